"""Consumers of Kafka: the same scenarios with a fake of aiokafka, under seeds, and with a real broker."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from opentelemetry.trace import SpanKind, StatusCode

import penstock as ps
from penstock import consume, engine, testing
from penstock.telemetry import names
from tests.backends.broker import committed, make_topics, records_of, running
from tests.consume.fake_kafka import Broker
from tests.consume.memory import in_order
from tests.tracing import Tracing, id_of

PARTITIONS = 4
KEYS = 12


class Boom(Exception):
    pass


class World:
    """A topic with messages, the results of handling them, and consumers of the topic.

    Attributes:
        written: the identity, the key and the number of each message, in the order in which handlers wrote them.
        letters: the identities of dead letters.
    """

    def __init__(self, seed: int, broker: Broker | None, servers: str, messages: int) -> None:
        self.rng, self.broker, self.servers = Random(seed), broker, servers
        self.name = f"orders-{uuid4().hex[:8]}" if broker is None else "orders"
        self.messages = messages
        self.written: list[tuple[str, tuple[str, int]]] = []
        self.letters: list[str] = []
        self.is_down = False  # whether the database is down
        self.seconds = 0.05
        self.poison = 0.0
        self._open: Counter[str] = Counter()

        @ps.node
        async def write(identity: str, key: str, number: int) -> None:
            assert not self._open[key], "two messages of a key at once"
            self._open[key] += 1
            try:
                await asyncio.sleep(self.rng.uniform(0, self.seconds))
                while self.is_down:
                    await asyncio.sleep(0.05)
                if Random(identity).random() < self.poison:
                    raise Boom(identity)
                self.written.append((identity, (key, number)))
            finally:
                self._open[key] -= 1

        self.handle = ps.graph(write)

    async def produce(self) -> None:
        """Write the messages. The seed draws their keys; each message has its number within its key."""
        numbers = [0] * KEYS
        made: list[tuple[bytes, bytes]] = []
        for _ in range(self.messages):
            key = self.rng.randrange(KEYS)
            made.append((b"%d" % numbers[key], b"key %d" % key))
            numbers[key] += 1
        if self.broker is None:
            await make_topics(self.servers, {self.name: PARTITIONS, self.name + ".dead": 1})
        await self.send(made)

    async def send(self, made: list[tuple[bytes, bytes]]) -> None:
        """Write messages, pairs of value and key."""
        headers = [("kind", b"order")]
        if self.broker is not None:
            for number, name in made:
                self.broker.append(self.name, number, name, headers)
            return
        kafka = import_module("aiokafka")
        async with kafka.AIOKafkaProducer(bootstrap_servers=self.servers, acks="all") as producer:
            await asyncio.gather(
                *[await producer.send(self.name, value, key=key, headers=headers) for value, key in made]
            )

    async def until_settled(self) -> None:
        async with asyncio.timeout(60 if self.broker is None else 3000):
            while await self.settled() < self.messages:
                await asyncio.sleep(0.05)

    async def settled(self) -> int:
        """Return how many messages are committed."""
        if self.broker is not None:
            return sum(self.broker.committed.values())
        return sum(await committed(self.servers, self.name, PARTITIONS))

    async def dead_letters(self) -> list[Any]:
        """Return the records of the topic of dead letters."""
        topic = self.name + ".dead"
        if self.broker is not None:
            return self.broker.logs.get(self.broker.topic(topic)[0], [])
        return await records_of(self.servers, topic)

    @asynccontextmanager
    async def consumer(self, drain_seconds: float = 20.0, **settings: Any) -> AsyncGenerator[consume.Consumer]:
        """Give a consumer with a deployment of its own, as in a process of its own."""
        settings = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 300, **settings}
        source = consume.Kafka(self.name, group_id=self.name, bootstrap_servers=self.servers, **settings)

        def call_of(message: consume.Message) -> ps.Call[None]:
            assert message.headers
            assert message.headers[0] == ("kind", b"order")
            return self.handle(message.identity, message.key.decode(), int(message.value))  # type: ignore[attr-defined]

        async with (
            engine.deploy(self.handle, max_in_flight=16) as service,
            consume.Consumer(
                service, source, call_of, dead_letters=source.letters_to(self.name + ".dead"), max_open=32,
                settle_seconds=0.2, drain_seconds=drain_seconds,
            ) as consumer,
        ):  # fmt: skip
            yield consumer

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(60 if self.broker is None else 3000):
            while not predicate():
                await asyncio.sleep(0.05)

    def has_written(self, count: int) -> bool:
        return len(self.written) >= count

    def identities(self) -> set[str]:
        """Return the identities of the messages that were written."""
        return {identity for identity, _ in self.written}

    def check(self, *, may_repeat: bool) -> None:
        """Check that no message is lost or wrongly a dead letter, keys are in order, and only allowed repeats occur."""
        assert len(self.identities()) + len(set(self.letters)) == self.messages
        assert may_repeat or len(self.written) == len(self.identities())
        assert in_order(self.written), self.written


Scenario = Callable[[World], Coroutine[Any, Any, None]]
Run = Callable[..., None]


@pytest.fixture(scope="module", params=["fake", "broker"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of a broker; empty for the fake."""
    if request.param == "fake":
        yield ""
        return
    with running(tmp_path_factory.mktemp("kafka") / "log") as (found, _):
        yield found


async def world_of_a_fake(monkeypatch: pytest.MonkeyPatch, messages: int) -> Any:
    """Return a world with a fake broker; the seed of the loop draws all that is random."""
    seed: int = asyncio.get_running_loop().seed  # type: ignore[attr-defined]
    broker = Broker(Random(seed), {"orders": PARTITIONS})
    broker.install(monkeypatch)
    world = World(seed, broker, "", messages)
    await world.produce()
    return world


@pytest.fixture
def run(address: str, monkeypatch: pytest.MonkeyPatch, effort: int) -> Run:
    """Return a function that runs a scenario: with the fake under many seeds, or with a broker."""

    def with_fake(scenario: Scenario, *, messages: int, seeds: int = 25) -> None:
        async def main() -> None:
            await scenario(await world_of_a_fake(monkeypatch, messages))

        testing.interleavings(main, count=seeds * effort)

    def with_broker(scenario: Scenario, *, messages: int, seeds: int = 25) -> None:
        async def main() -> None:
            world = World(7, None, address, messages * 5)
            await world.produce()
            await scenario(world)

        asyncio.run(main())

    return with_broker if address else with_fake


def test_consumers_come_and_go_and_each_message_is_written_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        async with world.consumer():
            await world.until(lambda: len(world.written) > world.messages // 8)
            for _ in range(2):
                async with world.consumer():
                    share = min(len(world.written) + world.messages // 4, world.messages)
                    await world.until(partial(world.has_written, share))
            await world.until(lambda: len(world.written) == world.messages)
        world.check(may_repeat=False)
        assert await world.settled() == world.messages

    run(scenario, messages=120)


def test_dead_letters_have_their_source_and_a_refused_one_is_written_again(run: Run) -> None:
    async def scenario(world: World) -> None:
        world.poison = 0.1
        async with world.consumer() as consumer:
            await world.until(lambda: consumer.statistics().ended == world.messages)
        letters = await world.dead_letters()
        names = [dict(letter.headers) for letter in letters]
        world.letters = [own["source"].decode() for own in names]
        world.check(may_repeat=False)
        assert await world.settled() == world.messages
        assert names
        assert all(own["kind"] == b"order" and b"Boom" in own["error"] and own["attempts"] == b"1" for own in names)
        assert consumer.statistics().dead_letters == len(letters)

    run(scenario, messages=60)


def test_a_letter_has_the_trace_of_its_call_which_says_where_the_letter_is(run: Run, tracing: Tracing) -> None:
    async def scenario(world: World) -> None:
        tracing.exporter.clear()
        world.poison = 0.2
        async with world.consumer() as consumer:
            await world.until(lambda: consumer.statistics().ended == world.messages)
        runs = {id_of(span) for span in tracing.spans() if span.kind is SpanKind.CONSUMER}
        spans: dict[str, Any] = {
            f"{id_of(span):016x}": span for span in tracing.spans() if span.kind is SpanKind.PRODUCER
        }
        letters = await world.dead_letters()
        for letter in letters:
            found = spans.pop(dict(letter.headers)["traceparent"].decode().split("-")[2])
            assert found.parent.span_id in runs
            told = [found.attributes[name] for name in (names.DESTINATION, names.PARTITION, names.MESSAGE_OFFSET)]
            assert told == [letter.topic, str(letter.partition), letter.offset]
        assert letters
        assert all(span.status.status_code is StatusCode.ERROR for span in spans.values())  # letters not taken at once

    run(scenario, messages=40, seeds=3)


def test_a_letter_that_is_refused_for_good_is_written_without_its_value(run: Run) -> None:
    async def scenario(world: World) -> None:
        await world.send([(b"x" * 1_048_400, b"large")])  # with the headers of a letter it is too large
        world.messages += 1
        async with world.consumer():
            await world.until_settled()
        [letter] = await world.dead_letters()
        headers = dict(letter.headers)
        assert (letter.key, letter.value) == (b"large", b"")
        assert headers["source"].startswith(world.name.encode() + b"/")
        assert b"ValueError" in headers["error"]
        assert b"MessageSizeTooLargeError" in headers["reason"]

    run(scenario, messages=20, seeds=3)


def test_a_letter_that_is_refused_also_without_its_value_ends_the_consumer(
    monkeypatch: pytest.MonkeyPatch, effort: int
) -> None:
    async def main() -> None:
        world = await world_of_a_fake(monkeypatch, 20)
        await world.send([(b"no number", b"key" * 400_000)])
        [place] = [log[-1] for log in world.broker.logs.values() if len(log[-1].key) > 1000]
        said = (
            rf"orders/{place.partition}/{place.offset} cannot be written to orders.dead: .*TooLarge.*without its value"
        )
        with pytest.raises(ps.DeadLetterError, match=said):
            async with world.consumer() as consumer:
                await consumer.wait_failed()
        assert world.broker.committed.get(place[:2], 0) <= place.offset

    testing.interleavings(main, count=5 * effort)


def test_a_topic_that_does_not_exist_is_named_when_the_consumer_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = await world_of_a_fake(monkeypatch, 0)
        world.broker.missing = {"orders", "orders.dead"}
        with pytest.raises(ps.OptionsError, match=r"no topic orders and no topic orders\.dead"):
            async with world.consumer():
                pass
        assert world.broker.members == []

    testing.interleavings(main, count=2)


def test_an_outage_that_is_longer_than_the_poll_interval_costs_no_partition(run: Run) -> None:
    async def scenario(world: World) -> None:
        async with world.consumer(max_poll_interval_ms=2000) as consumer:
            await world.until(lambda: len(world.written) > world.messages // 4)
            world.is_down = True
            await asyncio.sleep(7)
            assert consumer.statistics().open >= 24  # a partition may have no message left
            world.is_down = False
            await world.until(lambda: len(world.written) == world.messages)
        world.check(may_repeat=False)
        assert consumer.statistics().late_commits == 0

    run(scenario, messages=120, seeds=10)


def test_what_a_drain_leaves_comes_again_and_is_no_dead_letter(run: Run) -> None:
    async def scenario(world: World) -> None:
        async with world.consumer(drain_seconds=0.2) as consumer:
            await world.until(lambda: len(world.written) > world.messages // 4)
            world.is_down = True
            await asyncio.sleep(0.3)
        left = consumer.statistics()
        assert left.open > 0
        assert left.lag == world.messages - await world.settled()
        world.is_down = False
        async with world.consumer():
            await world.until(lambda: len(world.identities()) == world.messages)
        world.check(may_repeat=True)  # messages repeat that were written behind an unwritten one
        assert await world.dead_letters() == []

    run(scenario, messages=80, seeds=15)


def test_a_consumer_that_drains_too_long_loses_its_partitions_and_commits_nothing_of_them(run: Run) -> None:
    """Messages that outlast a rebalance: the other consumer gets the partitions nevertheless."""

    async def scenario(world: World) -> None:
        async with world.consumer(session_timeout_ms=6000) as first:
            await world.until(lambda: len(world.written) > world.messages // 8)
            world.is_down = True
            async with world.consumer() as second:
                await asyncio.sleep(8)
                world.is_down = False
                await world.until(lambda: len(world.identities()) == world.messages)
            await world.until(lambda: first.statistics().open + second.statistics().open == 0)
        world.check(may_repeat=True)
        assert await world.settled() == world.messages

    run(scenario, messages=100, seeds=15)


def test_what_comes_during_a_restart_is_handled_with_latest_also_where_nothing_came_before(run: Run) -> None:
    async def scenario(world: World) -> None:
        async with world.consumer(auto_offset_reset="latest") as consumer:
            await world.until_settled()  # the end of each partition is what the group begins with
            await world.until(lambda: consumer.statistics().lag == 0)
        assert world.written == []
        await world.produce()
        world.messages *= 2
        async with world.consumer(auto_offset_reset="latest") as consumer:
            await world.until(lambda: len(world.identities()) == world.messages // 2)
            await world.until_settled()
            await world.until(lambda: consumer.statistics().lag == 0)

    run(scenario, messages=40, seeds=10)


def test_a_member_that_its_group_has_given_up_does_not_set_offsets_back(
    monkeypatch: pytest.MonkeyPatch, effort: int
) -> None:
    """The fake broker refuses a commit that goes back."""

    async def main() -> None:
        world = await world_of_a_fake(monkeypatch, 60)
        async with world.consumer() as consumer:
            await world.until(lambda: len(world.written) > world.messages // 4)
            world.is_down = True
            await asyncio.sleep(world.rng.uniform(0, 1))
            [member] = world.broker.members
            member.is_evicted()
            # Another member has handled all messages, and left.
            world.broker.committed |= {tp: len(log) for tp, log in world.broker.logs.items()}
            world.is_down = False
            if world.rng.random() < 0.5:
                await world.until(lambda: consumer.statistics().late_commits > 0)
            member.comes_back()
            await world.until(lambda: consumer.statistics().lag == consumer.statistics().open == 0)
        assert await world.settled() == world.messages

    testing.interleavings(main, count=15 * effort)


def test_a_broker_that_is_away_costs_nothing(monkeypatch: pytest.MonkeyPatch, effort: int) -> None:
    """While requests wait, partitions are taken away, and the consumer ends and starts again."""

    async def main() -> None:
        world = await world_of_a_fake(monkeypatch, 80)
        lives = 0
        while len(world.identities()) < world.messages or await world.settled() < world.messages:
            lives += 1
            assert lives < 50

            async def life() -> None:
                async with world.consumer(drain_seconds=world.rng.choice((0.0, 0.5, 20.0))):
                    if world.rng.random() < 0.5:
                        async with world.consumer():
                            await asyncio.sleep(world.rng.uniform(0, 2))
                    await asyncio.sleep(world.rng.uniform(0, 3))

            task = asyncio.create_task(life())
            await asyncio.sleep(world.rng.uniform(0, 1))
            outage = asyncio.create_task(world.broker.away(world.rng.choice((0.5, 3.0, 12.0))))
            if world.rng.random() < 0.3:
                await asyncio.sleep(world.rng.uniform(0, 2))
                task.cancel()
            await asyncio.wait([task, outage])
            if not task.cancelled():
                task.result()
        world.check(may_repeat=True)
        assert await world.dead_letters() == []

    testing.interleavings(main, count=15 * effort)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"enable_auto_commit": True}, "enable_auto_commit"),
        ({"value_deserializer": bytes}, "parse the value in a node"),
        ({"key_deserializer": bytes}, "decode the key in order_by="),
        ({"bootstrap_server": "localhost"}, "did you mean bootstrap_servers?"),
    ],
)
def test_a_setting_that_would_lose_messages_or_does_not_exist_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ps.OptionsError, match=said):
        consume.Kafka("orders", group_id="billing", **settings)
    with pytest.raises(ps.OptionsError, match="did you mean max_request_size"):
        consume.Kafka("orders", group_id="billing").letters_to("dead", max_request=1)


def test_without_aiokafka_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiokafka", None)
    with pytest.raises(ps.MissingExtraError, match=r"penstock\[kafka\]"):
        consume.Kafka("orders", group_id="billing")
    with pytest.raises(ps.OptionsError, match="no topic"):
        consume.Kafka(group_id="billing")
