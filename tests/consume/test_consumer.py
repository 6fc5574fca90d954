"""Consumers of sources in memory, under seeded interleavings: no message is lost, keys stay in order, and only a prefix
is settled.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from opentelemetry import propagate
from opentelemetry.trace import SpanKind

import penstock as ps
from penstock import consume, engine, telemetry, testing
from penstock.telemetry import names
from tests.consume.memory import Log, Member, Queue, in_order, log_of
from tests.kit import Gate, same, virtual
from tests.telemetry.collected import Collected, collecting
from tests.tracing import Tracing, attributes_of, id_of, parent_of


class Boom(Exception):
    pass


Before = Callable[[consume.Message], Awaitable[object]]


@asynccontextmanager
async def consuming(
    log: Log, before: Before | None = None, *, member: Member | None = None, **options: Any
) -> AsyncGenerator[consume.Consumer]:
    """Give a consumer whose calls end their messages after `before`; the partitions of the log are its own."""

    @ps.node(effectful="unordered")
    async def end(message: consume.Message) -> None:
        if before is not None:
            await before(message)
        log.ended.add(message.identity)

    source = member or Member(log)
    options = {"dead_letters": no_letter, "settle_seconds": 0.01, **options}
    async with (
        engine.deploy(ps.graph(end), max_in_flight=8) as service,
        consume.Consumer(service, source, ps.graph(end), **options) as consumer,
    ):
        await source.give(range(len(log.partitions)))
        yield consumer


class World:
    """A graph that handles messages, and the list of messages that it has handled."""

    def __init__(self, log: Log | None, *, seconds: float = 0.1, poison: float = 0.0) -> None:
        self.rng = Random(getattr(asyncio.get_running_loop(), "seed", 0))
        self.seconds, self.poison = seconds, poison
        self.done: list[tuple[str, Any]] = []
        self.letters: list[consume.DeadLetter] = []
        self.running: set[Any] = set()
        self.most_running = 0
        self.ended = set[str]() if log is None else log.ended

        @ps.node
        async def work(identity: str, value: Any) -> None:
            key = value[0] if isinstance(value, tuple) else None
            assert key not in self.running or not key, "two messages of one key at once"
            self.running.add(key)
            self.most_running = max(self.most_running, len(self.running))
            try:
                await asyncio.sleep(self.rng.uniform(0, self.seconds))
                if self.poison and Random(identity).random() < self.poison:
                    raise Boom(identity)
            finally:
                self.running.discard(key)
            self.done.append((identity, value))
            self.ended.add(identity)

        self.handle = ps.graph(work)

    def call_of(self, message: consume.Message) -> ps.Call[None]:
        return self.handle(message.identity, message.value)

    async def bury(self, letter: consume.DeadLetter) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        if self.rng.random() < 0.2:
            raise self.rng.choice((ConnectionError("the dead letters are away"), asyncio.CancelledError()))
        self.letters.append(letter)
        self.ended.add(letter.message.identity)

    def consumer(self, service: Any, source: consume.Source, **options: Any) -> consume.Consumer:
        return consume.Consumer(service, source, self.call_of, dead_letters=self.bury, **options)


LETTERS: list[consume.DeadLetter] = []


async def no_letter(letter: consume.DeadLetter) -> None:
    LETTERS.append(letter)  # an error would only have the consumer try again


@pytest.fixture(autouse=True)
def no_letter_is_written() -> Iterator[None]:
    LETTERS.clear()
    yield
    assert not LETTERS


def all_of(log: Log) -> set[str]:
    return {message.identity for messages in log.partitions for message in messages}


async def until(predicate: Any) -> None:
    async with asyncio.timeout(600):
        while not predicate():
            await asyncio.sleep(0.05)


def test_whatever_goes_wrong_nothing_is_lost_and_only_a_prefix_is_settled(effort: int) -> None:
    """Partitions are taken without notice or too soon, requests fail, answers are lost, the consumer is cancelled."""

    async def main() -> None:
        log = log_of(Random(asyncio.get_running_loop().seed), 3, 40, faults=0.1)  # type: ignore[attr-defined]
        lives = 0
        while not log.is_settled:
            world = World(log, poison=0.05)
            is_cancelled = world.rng.random() < 0.5 and lives < 3
            lives += 1
            world.rng.seed(str((world.rng.random(), lives)))

            async def life(world: World = world) -> None:
                async with engine.deploy(world.handle, max_in_flight=8) as service:
                    member = Member(log)
                    async with world.consumer(service, member, max_open=9, drain_seconds=0.3):
                        while not log.is_settled:
                            mine = [partition for partition, owner in log.owners.items() if owner is member]
                            gone = world.rng.sample(mine, world.rng.randint(0, len(mine)))
                            for partition in gone:
                                log.owners.pop(partition)
                            if world.rng.random() < 0.5:
                                await member.held.lost(gone)
                            else:
                                for partition in gone:
                                    log.owners[partition] = member
                                await member.held.taken_away(gone, world.rng.choice((0, 0.02, 1)))
                                for partition in gone:
                                    log.owners.pop(partition, None)
                            await asyncio.sleep(world.rng.uniform(0, 0.5))
                            await member.give([p for p in range(3) if p not in log.owners])
                            await asyncio.sleep(world.rng.uniform(0, 3))

            task = asyncio.create_task(life())
            if is_cancelled:
                await asyncio.sleep(world.rng.uniform(0, 1))
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
            log.owners.clear()
        assert log.ended == all_of(log)

    testing.interleavings(main, count=30 * effort)


def test_a_queue_settles_what_has_ended_and_renews_what_is_open(effort: int) -> None:
    async def main() -> None:
        world = World(None, seconds=5.0, poison=0.1)
        queue = Queue(world.rng, [f"value {n}" for n in range(30)], faults=0.05)
        async with engine.deploy(world.handle, max_in_flight=4) as service:
            async with world.consumer(service, queue, max_open=8) as consumer:
                await until(lambda: len(queue.settled) >= 10)
                assert consumer.statistics().open <= 8
            taken = len(queue.settled)
            async with world.consumer(service, queue, max_open=8):
                await until(lambda: len(queue.settled) == 30)
        assert taken >= 10
        assert len(set(queue.settled)) == 30
        assert world.ended == set(queue.settled)
        assert len(world.done) + len(world.letters) == 30, "what is renewed does not come twice"

    testing.interleavings(main, count=10 * effort)


@virtual
async def test_a_slow_message_delays_its_key_and_no_other_partition() -> None:
    log = log_of(Random(1), 4, 400, keys=40)
    release, member = asyncio.Event(), Member(log)

    async def wait(message: consume.Message) -> None:
        if message is log.partitions[1][0]:
            await release.wait()

    async with consuming(log, wait, member=member, max_open=32, settle_seconds=0.1) as consumer:
        await until(lambda: log.committed[0] + log.committed[2] + log.committed[3] > 200)
        await until(lambda: all(log.committed[p] == len(log.partitions[p]) for p in (0, 2, 3)))
        assert log.committed[1] == 0
        assert 0 < consumer.statistics().open <= 32
        await until(lambda: {partition for partition, _ in member.kept} == {0, 1, 2, 3})
        release.set()
        await until(lambda: log.is_settled)
        assert consumer.statistics().lag == 0


class Colliding(str):
    """A key with the hash of every other key."""

    def __hash__(self) -> int:
        return 1


@virtual
async def test_a_slow_key_delays_no_other_key_of_its_partition() -> None:
    log = log_of(Random(10), 1, 120, keys=12)
    release, done = asyncio.Event(), list[consume.Message]()
    slow = [message for message in log.partitions[0] if message.value[0] == 7]

    async def wait(message: consume.Message) -> None:
        if message is slow[0]:
            await release.wait()
        done.append(message)

    def by_number(message: consume.Message) -> Colliding:
        return Colliding(message.value[0])

    async with consuming(log, wait, max_open=160, order_by=by_number) as consumer:
        await until(lambda: len(done) == 120 - len(slow) and log.committed[0] == slow[0].position)
        assert not log.ended & {message.identity for message in slow}
        assert consumer.statistics().open == 120 - slow[0].position
        release.set()
        await until(lambda: log.is_settled)
    assert done[-len(slow) :] == slow
    assert in_order((message.identity, message.value) for message in done)


def points_of(collected: Collected) -> dict[str, list[tuple[Any, ...]]]:
    """Returns value and attributes of each point of the metrics of consumers."""
    metrics: Any = {name: metric for name, metric in collected.metrics().items() if "consumer" in name}
    return {
        name.rpartition(".")[2]: [(point.value, *point.attributes.values()) for point in metric.data.data_points]
        for name, metric in metrics.items()
    }


async def test_a_function_that_cannot_make_a_call_fails_its_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(Random(2), 1, 10)
    letters: list[consume.DeadLetter] = []

    @ps.graph
    @ps.node(effectful="unordered")
    def handle(identity: str) -> None:
        log.ended.add(identity)

    def call_of(message: consume.Message) -> ps.Call[None]:
        if message.position == 3:
            raise Boom("no call")
        forgotten: Any = None
        return handle(message.identity) if message.position != 9 else forgotten

    async def bury(letter: consume.DeadLetter) -> None:
        log.ended.add(letter.message.identity)
        letters.append(letter)

    monkeypatch.setattr("penstock.consume.consumer._instruments", [])
    monkeypatch.setattr("penstock.consume.consumer._closed", Counter())
    member, of_all_time = Member(log), {"dead_letters": [(2, "0")], "late_commits": [(0, "0")]}
    with collecting(monkeypatch) as collected:
        async with (
            engine.deploy(handle) as service,
            consume.Consumer(service, member, call_of, dead_letters=bury, settle_seconds=0.01) as consumer,
        ):
            await member.give([0])
            await until(lambda: log.is_settled)
            assert telemetry.snapshot().lines == (("consumer", "10 ended, 0 open, lag 0"),)
            assert points_of(collected) == {"lag": [(0, "0")], "open": [(0, "0")], **of_all_time}
        assert points_of(collected) == of_all_time
    assert telemetry.snapshot().lines == ()
    assert [(letter.message.position, letter.attempts) for letter in letters] == [(3, 0), (9, 0)]
    assert "call_of= returned None" in str(letters[1].error)
    assert consumer.statistics().ended == 10
    assert "2" in str(consumer.statistics())


class Frozen(Exception):
    """Like a frozen dataclass: it takes neither notes nor other attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@virtual
async def test_a_letter_tells_the_attempts_of_its_node_whatever_notes_the_error_has() -> None:
    noted, log, letters = Boom("noted"), log_of(Random(4), 1, 3), list[consume.DeadLetter]()
    noted.add_note("of the client, attempt 7")
    errors = [Boom("plain"), noted, Frozen("refuses notes")]

    @ps.graph
    @ps.node(retry=ps.Retry(attempts=2), effectful="unordered")
    async def fail(message: consume.Message) -> None:
        raise errors[message.position]

    async def bury(letter: consume.DeadLetter) -> None:
        log.ended.add(letter.message.identity)
        letters.append(letter)

    member = Member(log)
    async with (
        engine.deploy(fail) as service,
        consume.Consumer(service, member, fail, dead_letters=bury, order_by=None, settle_seconds=0.01),
    ):
        await member.give([0])
        await until(lambda: log.is_settled)
    assert {letter.message.position: (letter.error, letter.attempts) for letter in letters} == {
        position: (error, 2) for position, error in enumerate(errors)
    }


@virtual
async def test_letters_are_written_together_and_those_of_a_key_in_order() -> None:
    log = log_of(Random(12), 1, 40, keys=6)
    world, together, begun = World(log, poison=1.0), asyncio.Barrier(5), set[Any]()

    async def bury(letter: consume.DeadLetter) -> None:
        key = letter.message.key
        if key and key not in begun:
            begun.add(key)
            await together.wait()  # one letter of each key
        await world.bury(letter)

    member = Member(log)
    async with (
        engine.deploy(world.handle) as service,
        consume.Consumer(service, member, world.call_of, dead_letters=bury),
    ):
        await member.give([0])
        await until(lambda: log.is_settled)
    assert in_order((one.message.identity, one.message.value) for one in world.letters)
    assert len(world.letters) == 40


async def test_consumers_of_two_groups_have_series_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Member):
        def attributes(self, partition: int, /) -> dict[str, str]:
            return {"messaging.consumer.group.name": f"group of {len(self.log.partitions[0])}", "id": str(partition)}

    monkeypatch.setattr("penstock.consume.consumer._instruments", [])
    monkeypatch.setattr("penstock.consume.consumer._closed", Counter())
    logs, gate = [log_of(Random(13), 1, count) for count in (5, 21)], Gate()
    with collecting(monkeypatch) as collected:
        async with (
            consuming(logs[0], member=Named(logs[0])),
            consuming(logs[1], gate.wait, member=Named(logs[1]), drain_seconds=0),
        ):
            await until(lambda: logs[0].is_settled)
            assert sorted(points_of(collected)["lag"]) == [(0, "group of 5", "0"), (21, "group of 21", "0")]
            assert sorted(points_of(collected)["dead_letters"]) == [(0, "group of 21", "0"), (0, "group of 5", "0")]


@pytest.mark.parametrize("function", ["take", "settle", "keep"])
@pytest.mark.parametrize("error", [Boom("not authorized"), asyncio.CancelledError()])
async def test_an_error_of_the_source_that_is_no_outage_ends_the_consumer(function: str, error: BaseException) -> None:
    """A cancelled request inside the source, such as that of a closed client, is no outage either."""

    async def broken(*_: Any) -> Any:
        raise error

    member = Member(log_of(Random(3), 1, 10))
    member.keep_seconds = 0.01
    setattr(member, function, broken)
    with pytest.raises((Boom, ps.NodeCancelledError)):
        async with consuming(member.log, member=member) as consumer:
            await consumer.wait_failed()


@virtual
async def test_a_consumer_is_entered_once_and_has_its_source_for_itself() -> None:
    world = World(None)
    async with engine.deploy(world.handle) as service:
        source = Queue(world.rng, [])
        async with world.consumer(service, source) as first:
            for refused in (first, world.consumer(service, source)):
                with pytest.raises(ps.OptionsError, match="a source for each"):
                    await consume.run(refused)
        with pytest.raises(ps.OptionsError, match="entered once"):
            await consume.run(first)
        async with world.consumer(service, source):
            pass
        with pytest.raises(ps.OptionsError, match=r"dead_letters=.*an `async def`"):
            consume.Consumer(service, source, world.handle, dead_letters=print)  # type: ignore[arg-type]


@virtual
async def test_partitions_without_messages_leave_their_room_and_a_consumer_has_no_deadline() -> None:
    log = log_of(Random(7), 4, 40)
    world = World(log)
    async with (
        # This timeout is for other callers; the consumer does not use it.
        engine.deploy(world.handle, timeout_seconds=0.5) as service,
        world.consumer(service, member := Member(log), max_open=1),
    ):
        await member.give(range(4))
        await until(lambda: log.is_settled)


async def test_a_deployment_that_has_ended_makes_no_dead_letters() -> None:
    log, gate = log_of(Random(4), 1, 10), Gate()
    handle = gate.graph()

    async def abort(service: Any) -> None:
        member = Member(log)
        async with consume.Consumer(service, member, handle, dead_letters=no_letter) as consumer:
            await member.give([0])
            await gate.has()
            await service.abort()
            await consumer.wait_failed()

    async with engine.deploy(handle) as service:
        with pytest.raises(ps.EngineClosedError):
            await abort(service)
    assert log.committed == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_run_drains_at_a_signal_and_restores_the_handlers(number: signal.Signals) -> None:
    log = log_of(Random(5), 2, 50)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    release, signalled = asyncio.Event(), asyncio.Event()

    @ps.graph
    @ps.node(effectful="unordered")
    async def handle(message: consume.Message) -> None:
        if not release.is_set():
            for _ in range(2):  # the process gets the signal, and then its process group
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.02)
            signalled.set()
            await release.wait()
        log.ended.add(message.identity)

    member = Member(log)
    async with engine.deploy(handle, max_in_flight=1) as service:
        consumer = consume.Consumer(service, member, handle, dead_letters=no_letter, max_open=4)
        running = asyncio.create_task(consume.run(consumer))
        await until(lambda: hasattr(member, "held"))
        await member.give([0, 1])
        await consumer.wait_failed()
        await signalled.wait()
        await testing.wait_quiescent()
        assert not running.done()
        release.set()
        statistics = await running
    assert 0 < statistics.ended < 50
    assert sum(log.committed) == statistics.ended == len(log.ended)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


class Stuck(Queue):
    """A source that never opens, or never closes."""

    def __init__(self, where: str) -> None:
        super().__init__(Random(1), ["message"])
        self.where, self.waits = where, asyncio.Event()

    @asynccontextmanager
    async def partitions(self, held: consume.Partitions, /) -> AsyncGenerator[None]:
        await self._wait("opens")
        async with super().partitions(held):
            yield
        await self._wait("closes")

    async def _wait(self, where: str) -> None:
        if where == self.where:
            self.waits.set()
            await asyncio.Event().wait()


@virtual
@pytest.mark.parametrize("where", ["opens", "closes"])
async def test_run_ends_in_time_although_its_source_is_stuck(where: str) -> None:
    graph, source = ps.graph(same), Stuck(where)
    async with asyncio.timeout(60), engine.deploy(graph) as service:
        consumer = consume.Consumer(service, source, lambda one: graph(one.value), dead_letters=no_letter)
        running = asyncio.create_task(consume.run(consumer))
        if where == "closes":
            await until(lambda: source.settled)
        else:
            await source.waits.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).ended == len(source.settled) == int(where == "closes")
    assert source.waits.is_set()


async def test_a_commit_that_is_too_late_cancels_what_is_open_and_commits_nothing_more() -> None:
    log, gate = log_of(Random(6), 1, 20), Gate()

    async def wait(message: consume.Message) -> None:
        if message.position >= 5:
            await gate.wait(message)

    async with consuming(log, wait, order_by=None) as consumer:
        log.owners.clear()  # the partition is taken without notice
        await until(lambda: gate.cancelled)
        assert (consumer.statistics().late_commits, consumer.statistics().partitions) == (1, ())
    assert log.committed == [0]


@virtual
async def test_a_partition_that_comes_back_waits_for_handlers_that_still_unwind() -> None:
    log = log_of(Random(8), 1, 3, keys=1)
    began: list[str] = []
    unwinding, release = asyncio.Event(), asyncio.Event()

    async def unwind(message: consume.Message) -> None:
        began.append(message.identity)
        if len(began) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                unwinding.set()
                await release.wait()

    member = Member(log)
    async with consuming(log, unwind, member=member, order_by=lambda message: "all"):
        for _ in range(3):  # the partition is given and lost; the second time, before any message could begin
            await until(lambda: began)
            await member.held.lost([0])
            await unwinding.wait()
            await member.give([0])
        await asyncio.sleep(5)
        assert began == ["log/0/0"]
        release.set()
        await until(lambda: log.is_settled)
    assert began == ["log/0/0", "log/0/0", "log/0/1", "log/0/2"]


class Reconnecting(consume.Source):
    """A log of ten messages, which begins anew at the committed position when its connection was cut."""

    def __init__(self) -> None:
        self.position = self.committed = 0
        self.arrived = asyncio.Event()

    @asynccontextmanager
    async def partitions(self, held: consume.Partitions, /) -> AsyncGenerator[None]:
        self.held = held
        await held.given(["log"])
        yield

    async def take(self, partition: str, n: int, /) -> Sequence[consume.Message]:
        await self.arrived.wait()  # from here on, the messages are taken at once
        first, self.position = self.position, min(self.position + min(n, 2), 10)
        if first == self.position:
            await asyncio.sleep(0.01)
        return [consume.Message(f"log/{number}", number, position=number) for number in range(first, self.position)]

    async def settle(self, partition: str, messages: Sequence[consume.Message], /) -> bool:
        self.committed = messages[-1].position + 1
        return True


@virtual
async def test_a_partition_that_is_lost_and_given_again_at_once_loses_no_message() -> None:
    """The request that was under way takes no message any more, so the source may begin anew at once."""
    source, handled = Reconnecting(), list[int]()

    @ps.graph
    @ps.node
    async def handle(number: int) -> None:
        await asyncio.sleep(0.005)
        handled.append(number)

    async with (
        engine.deploy(handle) as service,
        consume.Consumer(
            service, source, lambda one: handle(one.value), dead_letters=no_letter, settle_seconds=0.01
        ),
    ):  # fmt: skip
        await asyncio.sleep(0.02)
        await source.held.lost(["log"])
        source.position = source.committed
        await source.held.given(["log"])
        source.arrived.set()
        await until(lambda: source.committed == 10)
    assert sorted(handled) == list(range(10))


async def test_a_message_goes_on_with_the_trace_of_its_sender(tracing: Tracing) -> None:
    log = log_of(Random(9), 1, 1)
    log.partitions[0][0].headers = [("traceparent", b"00-%032x-%016x-01" % (7, 8))]
    async with consuming(log):
        await until(lambda: log.ended)
    run = tracing.one("penstock.run end")
    assert run.parent is not None
    assert (run.parent.trace_id, run.parent.span_id) == (7, 8)
    [message] = log.partitions[0]
    assert run.kind is SpanKind.CONSUMER
    assert {name: value for name, value in attributes_of(run).items() if name.startswith("messaging.")} == {
        names.MESSAGING_SYSTEM: "unknown", names.MESSAGING_OPERATION: "process", names.PARTITION: "0",
        names.MESSAGE_ID: message.identity, names.MESSAGE_KEY: str(message.key),
        names.MESSAGE_OFFSET: message.position,
    }  # fmt: skip


async def test_a_dead_letter_and_its_call_lead_to_each_other(tracing: Tracing) -> None:
    log, carriers = log_of(Random(9), 1, 3), list[dict[str, str]]()
    log.partitions[0][2].headers = [("traceparent", b"00-%032x-%016x-01" % (7, 8))]

    @ps.node
    def fails(value: int) -> None:
        raise Boom(value)

    graph = ps.graph(fails)

    def call_of(message: consume.Message) -> ps.Call[None]:
        if message is log.partitions[0][2]:
            raise ValueError("no call")
        return graph(message.value)

    async def bury(letter: consume.DeadLetter) -> None:
        carriers.append({})
        propagate.inject(carriers[-1])
        log.ended.add(letter.message.identity)

    member = Member(log)
    async with (
        engine.deploy(graph) as service,
        consume.Consumer(service, member, call_of, dead_letters=bury, order_by=None, settle_seconds=0.01),
    ):
        await member.give([0])
        await until(lambda: len(log.ended) == 3)
    runs = {attributes_of(run)[names.MESSAGE_ID]: run for run in tracing.named("penstock.run fails")}
    letters = tracing.named("penstock.dead_letter 0")
    for message in log.partitions[0]:
        [letter] = [one for one in letters if attributes_of(one)[names.MESSAGE_ID] == message.identity]
        assert letter.kind is SpanKind.PRODUCER
        parent = runs[message.identity].context if message.identity in runs else None
        assert parent_of(letter) == (8 if parent is None else parent.span_id)
        assert f"{id_of(letter):016x}" in [carrier["traceparent"].split("-")[2] for carrier in carriers]
    assert len(runs) == 2


@virtual
async def test_a_client_that_makes_an_outage_of_a_cancel_does_not_hold_up_the_end() -> None:
    kept: list[int] = []

    class Stubborn(Queue):
        async def keep(self, partition: str, unsettled: Sequence[consume.Message], /) -> None:
            kept.append(len(unsettled))
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise ConnectionError("closed") from None

    graph, source = ps.graph(same), Stubborn(Random(1), ["message"])
    async with (
        asyncio.timeout(60),
        engine.deploy(graph) as service,
        consume.Consumer(service, source, lambda one: graph(one.value), dead_letters=no_letter),
    ):
        await until(lambda: kept)
