"""Consumers of a real broker that hangs, is gone, or has given them up; their offsets, and their lag.

SIGTERM ends a consumer whatever its state and whatever the broker does: exit status 0, and no wait for the broker. A
client of the broker would wait 40 seconds for an answer.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
import structlog

import penstock as ps
from penstock import consume, engine
from tests.backends.broker import committed, java, make_topics, running
from tests.backends.ending_consumer import DRAIN_SECONDS
from tests.telemetry.collected import collecting


class Ending:
    """A process of `ending_consumer`, which has a topic of its own."""

    def __init__(self, servers: str, topic: str, state: str) -> None:
        command = [sys.executable, "-m", "tests.backends.ending_consumer", servers, topic, state]
        self.state = state
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self, wanted: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.split()[-1:] == [wanted]:
                return
        raise AssertionError(f"the process in the state {self.state} has not said {wanted!r}")

    def fail_its_message(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.says("failed")


async def _filled(servers: str, topics: dict[str, int], partitions: int = 1) -> None:
    """Make topics, with so many messages each, which the partitions take in turn."""
    await make_topics(servers, dict.fromkeys(topics, partitions) | {f"{topic}.dead": 1 for topic in topics})
    async with import_module("aiokafka").AIOKafkaProducer(bootstrap_servers=servers) as producer:
        for topic, count in topics.items():
            sent = [await producer.send(topic, b"message", b"key", partition=n % partitions) for n in range(count)]
            await asyncio.gather(*sent)


async def until(predicate: Callable[[], bool]) -> None:
    while not predicate():
        await asyncio.sleep(0.05)


@contextmanager
def consumers(servers: str, *states: str, topics: bool = True) -> Generator[list[Ending]]:
    """Give a consumer in each of the states."""
    names = {state: f"{state}-{uuid4().hex[:8]}" for state in states}
    if topics:
        asyncio.run(_filled(servers, {name: int(state in {"busy", "letters"}) for state, name in names.items()}))
    made = [Ending(servers, name, state) for state, name in names.items()]
    try:
        for one in made:
            one.says("ready")
        yield made
    finally:
        for one in made:
            one.process.kill()
            one.process.communicate()


def end(made: list[Ending]) -> float:
    """End the processes by SIGTERM, all at once, and check that each ends by itself, with its summary.

    Returns:
        How long the last summary took, in seconds. On a busy machine, the interpreter takes seconds to exit after it.
    """
    began = time.monotonic()
    for one in made:
        one.process.send_signal(signal.SIGTERM)
    for one in made:
        one.says("ended")
    took = time.monotonic() - began
    for one in made:
        one.process.communicate(timeout=30)
        assert one.process.returncode == 0, one.state
    return took


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with running(tmp_path_factory.mktemp("kafka") / "log") as found:
        if not found[1]:
            pytest.skip("needs a broker of its own, to stop it")
        yield found


# `drain_seconds` bounds the end. A busy machine takes longer, so these run alone.
@pytest.mark.timed
@pytest.mark.timeout(300)
def test_while_the_broker_is_up(broker: tuple[str, int]) -> None:
    with consumers(broker[0], "starting", "idle", "busy", "letters") as made:
        made[-1].fail_its_message()
        assert end(made) <= DRAIN_SECONDS + 2


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_while_the_broker_hangs(broker: tuple[str, int]) -> None:
    servers, pid = broker
    with consumers(servers, "idle", "busy", "letters") as made:
        os.kill(pid, signal.SIGSTOP)
        try:
            made[-1].fail_its_message()
            with consumers(servers, "starting", topics=False) as starting:
                assert end([*made, *starting]) <= DRAIN_SECONDS + 2
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_while_there_is_no_broker_any_more(broker: tuple[str, int], tmp_path: Path) -> None:
    with running(tmp_path / "log") as (servers, pid), consumers(servers, "idle", "busy", "letters") as made:
        os.kill(pid, signal.SIGKILL)
        made[-1].fail_its_message()
        assert end(made) <= DRAIN_SECONDS + 2


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_while_there_was_never_a_broker() -> None:
    """A server that never answers."""
    pytest.importorskip("aiokafka")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with consumers(address, "starting", topics=False) as starting:
            assert end(starting) <= DRAIN_SECONDS + 2


@pytest.mark.timeout(300)
def test_a_member_that_stalled_does_not_set_back_what_another_has_committed(broker: tuple[str, int]) -> None:
    servers, _ = broker
    topic = f"stale-{uuid4().hex[:8]}"
    asyncio.run(_filled(servers, {topic: 3}))
    stale = Ending(servers, topic, "stale")
    try:
        stale.says("ready")
        stale.says("ready")  # the first message has ended, and the second is open
        stale.process.send_signal(signal.SIGSTOP)
        other = Ending(servers, topic, "letters")  # it gets the partition when the session of the first has ended
        try:
            for _ in range(3):
                other.says("ready")
                other.fail_its_message()
            end([other])
        finally:
            other.process.kill()
            other.process.communicate()
        assert asyncio.run(committed(servers, topic, 1)) == [3]
        stale.process.send_signal(signal.SIGCONT)
        asyncio.run(_filled(servers, {topic: 1}))
        stale.says("ready")  # it is a member again
        assert asyncio.run(committed(servers, topic, 1)) == [3]
        end([stale])
    finally:
        stale.process.kill()
        stale.process.communicate()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_committed_offsets_never_go_down(broker: tuple[str, int], seed: int) -> None:
    """Members begin, leave, and stall, some for longer than their session, while messages come."""
    servers, _ = broker
    topic, rng, partitions = f"steady-{uuid4().hex[:8]}", Random(seed), 4
    kafka = import_module("aiokafka")
    members: list[Ending] = []
    stalled: list[Ending] = []

    def start() -> None:
        members.append(Ending(servers, topic, "steady"))

    def stall() -> None:
        stalled.append(members.pop(rng.randrange(len(members))))
        stalled[-1].process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        members.append(stalled.pop(rng.randrange(len(stalled))))
        members[-1].process.send_signal(signal.SIGCONT)

    def leave() -> None:
        end([members.pop(rng.randrange(len(members)))])

    async def main() -> None:
        await _filled(servers, {topic: 400}, partitions)
        known = [0] * partitions
        async with (
            kafka.AIOKafkaConsumer(bootstrap_servers=servers, group_id=topic, enable_auto_commit=False) as reader,
            kafka.AIOKafkaProducer(bootstrap_servers=servers) as producer,
        ):

            async def look() -> int:
                nonlocal known
                found = [await reader.committed(kafka.TopicPartition(topic, n)) or 0 for n in range(partitions)]
                assert all(map(int.__le__, known, found)), f"committed {found} after {known}"
                known = found
                return sum(found)

            sent = 400
            for step in range(8):
                may = [start] * (len(members) < 2) + [stall, stall, leave] * bool(members) + [go_on] * bool(stalled)
                await asyncio.to_thread(start if not step else rng.choice(may))
                for _ in range(rng.randrange(5, 50)):
                    sent += len([await producer.send(topic, b"message") for _ in range(5)])
                    await look()
                    await asyncio.sleep(0.05)
            while stalled:
                go_on()
            if not members:
                start()
            await producer.flush()
            while await look() < sent:
                await asyncio.sleep(0.05)

    try:
        asyncio.run(main())
        end(members)
    finally:
        for one in (*members, *stalled):
            one.process.kill()
            one.process.communicate()


@ps.graph
@ps.node
async def handle(is_stuck: bool) -> None:
    if is_stuck:
        await asyncio.Event().wait()


@asynccontextmanager
async def consuming(
    servers: str, topic: str, *, group: str = "", is_stuck: bool = False, max_open: int = 256, **settings: Any
) -> AsyncGenerator[consume.Consumer]:
    """Give a consumer in this process."""
    settings = {"heartbeat_interval_ms": 300, "bootstrap_servers": servers, **settings}
    source = consume.Kafka(topic, group_id=group or topic, **settings)
    dead_letters = source.letters_to(f"{topic}.dead")
    async with (
        engine.deploy(handle) as service,
        consume.Consumer(
            service, source, lambda message: handle(is_stuck), dead_letters=dead_letters, max_open=max_open,
            settle_seconds=0.2, drain_seconds=0 if is_stuck else 20,
        ) as consumer,
    ):  # fmt: skip
        yield consumer


def lags_of(consumer: consume.Consumer) -> dict[str, int | None]:
    return {one.partition.rpartition("/")[2]: one.lag for one in consumer.statistics().partitions}


Look = Callable[[consume.Consumer, dict[str, int]], Awaitable[None]]


async def stuck(servers: str, topic: str, look: Look) -> None:
    await _filled(servers, {topic: 5})
    async with consuming(servers, topic, is_stuck=True, max_open=2) as consumer:
        await look(consumer, {"0": 5})
        await _filled(servers, {topic: 20})
        await look(consumer, {"0": 25})


async def restarted_at_the_end(servers: str, topic: str, look: Look) -> None:
    await _filled(servers, {topic: 1}, 2)  # nothing in the second partition
    for _ in range(2):
        async with consuming(servers, topic) as consumer:
            await look(consumer, {"0": 0, "1": 0})


async def behind_transactions(servers: str, topic: str, look: Look) -> None:
    await _filled(servers, {topic: 0})
    async with import_module("aiokafka").AIOKafkaProducer(
        bootstrap_servers=servers, transactional_id=topic
    ) as producer:
        for end_transaction in (producer.commit_transaction, producer.abort_transaction):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"message")
            await end_transaction()
    async with consuming(servers, topic, isolation_level="read_committed") as consumer:
        await look(consumer, {"0": 0})


async def given_to_another_and_back(servers: str, topic: str, look: Look) -> None:
    await _filled(servers, {topic: 20}, 2)
    async with consuming(servers, topic) as first:
        async with consuming(servers, topic) as second:
            await until(lambda: (len(lags_of(first)), len(lags_of(second))) == (1, 1))
            await _filled(servers, {topic: 200}, 2)
            await until(lambda: first.statistics().ended + second.statistics().ended >= 220)
        await look(first, {"0": 0, "1": 0})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", [stuck, restarted_at_the_end, behind_transactions, given_to_another_and_back])
def test_lag_is_what_the_tool_of_kafka_says(
    broker: tuple[str, int], scenario: Callable[[str, str, Look], Awaitable[None]]
) -> None:
    servers, _ = broker
    topic = f"lag-{uuid4().hex[:8]}"
    tool = java(
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", "--bootstrap-server", servers, "--describe",
        "--group", topic,
    )  # fmt: skip

    async def look(consumer: consume.Consumer, wanted: dict[str, int]) -> None:
        await until(lambda: lags_of(consumer) == wanted)
        shown = await asyncio.to_thread(subprocess.run, tool, capture_output=True, text=True, timeout=120, check=True)
        rows = [line.split() for line in shown.stdout.splitlines() if line.startswith(topic)]
        assert {row[2]: int(row[5]) for row in rows} == wanted
        assert lags_of(consumer) == wanted

    async def main() -> None:
        async with asyncio.timeout(120):
            await scenario(servers, topic, look)

    asyncio.run(main())


@pytest.mark.timeout(300)
def test_two_groups_of_one_topic_have_series_of_their_own(
    broker: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, _ = broker
    topic = f"groups-{uuid4().hex[:8]}"
    monkeypatch.setattr("penstock.consume.consumer._instruments", [])
    monkeypatch.setattr("penstock.consume.consumer._closed", Counter())

    async def main() -> None:
        await _filled(servers, {topic: 7})
        async with (
            asyncio.timeout(120),
            consuming(servers, topic, group="slow", is_stuck=True) as slow,
            consuming(servers, topic, group="fast") as fast,
        ):
            await until(lambda: (lags_of(slow), lags_of(fast)) == ({"0": 7}, {"0": 0}))
            points = [(dict(point.attributes), point.value) for point in collected.points("penstock.consumer.lag")]
            assert sorted((told["messaging.consumer.group.name"], lag) for told, lag in points) == [
                ("fast", 0), ("slow", 7),
            ]  # fmt: skip
            for told, _ in points:
                assert told["messaging.destination.name"] == topic
                assert told["messaging.destination.partition.id"] == "0"

    with collecting(monkeypatch) as collected:
        asyncio.run(main())


@pytest.mark.timeout(300)
def test_a_second_member_with_the_same_instance_id_ends_one_of_them_with_an_error(broker: tuple[str, int]) -> None:
    servers, _ = broker
    topic = f"twin-{uuid4().hex[:8]}"
    asyncio.run(_filled(servers, {topic: 1}))
    twins = [Ending(servers, topic, "twin")]
    try:
        twins[0].says("ready")
        twins.append(Ending(servers, topic, "twin"))
        asyncio.run(until(lambda: any(one.process.poll() is not None for one in twins)))
        ended = [one.process for one in twins if one.process.poll() is not None]
        assert "another member of the group has group_instance_id='one'" in ended[0].communicate()[0]
    finally:
        for one in twins:
            one.process.kill()
            one.process.communicate()


@pytest.mark.timeout(300)
def test_the_end_of_a_consumer_of_200_partitions_commits_all_in_time(broker: tuple[str, int]) -> None:
    servers, _ = broker
    topic = f"many-{uuid4().hex[:8]}"

    async def main() -> None:
        await _filled(servers, {topic: 200}, 200)
        async with asyncio.timeout(120), consuming(servers, topic, max_open=2000) as consumer:
            await until(lambda: consumer.statistics().ended >= 200)
            await _filled(servers, {topic: 1000}, 200)
            await until(lambda: consumer.statistics().ended >= 1200)
        assert await committed(servers, topic, 200) == [6] * 200

    with structlog.testing.capture_logs() as logged:
        asyncio.run(main())
    assert not [event for event in logged if event["event"] == "consume.not_settled"]
