"""Consumers of a real broker that hangs, is gone, or has given them up.

SIGTERM ends a consumer whatever its state and whatever the broker does: exit status 0, and no wait for the broker. A
client of the broker would wait 40 seconds for an answer.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from uuid import uuid4

import pytest

import penstock as ps
from penstock import consume, engine
from tests.backends.broker import committed, java, make_topics, running


class Ending:
    """A process of `ending_consumer`, which has a topic of its own."""

    def __init__(self, servers: str, topic: str, state: str) -> None:
        command = [sys.executable, "-m", "tests.backends.ending_consumer", servers, topic, state]
        self.state = state
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self, wanted: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == wanted:
                return
        raise AssertionError(f"the process in the state {self.state} has not said {wanted!r}")

    def fail_its_message(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.says("failed")


async def _filled(servers: str, topics: dict[str, int]) -> None:
    """Make topics, with so many messages each."""
    await make_topics(servers, {name: 1 for topic in topics for name in (topic, f"{topic}.dead")})
    async with import_module("aiokafka").AIOKafkaProducer(bootstrap_servers=servers) as producer:
        for topic, count in topics.items():
            for _ in range(count):
                await producer.send_and_wait(topic, b"message", b"key")


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


def end(made: list[Ending]) -> None:
    """End the processes by SIGTERM, all at once, and check that each ends by itself, with its summary."""
    for one in made:
        one.process.send_signal(signal.SIGTERM)
    for one in made:
        out, _ = one.process.communicate(timeout=30)
        assert (one.process.returncode, out.split()[-1:]) == (0, ["ended"]), one.state


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with running(tmp_path_factory.mktemp("kafka") / "log") as found:
        if not found[1]:
            pytest.skip("needs a broker of its own, to stop it")
        yield found


@pytest.mark.timeout(300)
def test_while_the_broker_is_up(broker: tuple[str, int]) -> None:
    with consumers(broker[0], "starting", "idle", "busy", "letters") as made:
        made[-1].fail_its_message()
        end(made)


@pytest.mark.timeout(300)
def test_while_the_broker_hangs(broker: tuple[str, int]) -> None:
    servers, pid = broker
    with consumers(servers, "idle", "busy", "letters") as made:
        os.kill(pid, signal.SIGSTOP)
        try:
            made[-1].fail_its_message()
            with consumers(servers, "starting", topics=False) as starting:
                end([*made, *starting])
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(300)
def test_while_there_is_no_broker_any_more(broker: tuple[str, int], tmp_path: Path) -> None:
    with running(tmp_path / "log") as (servers, pid), consumers(servers, "idle", "busy", "letters") as made:
        os.kill(pid, signal.SIGKILL)
        made[-1].fail_its_message()
        end(made)


@pytest.mark.timeout(300)
def test_while_there_was_never_a_broker() -> None:
    """A server that never answers."""
    pytest.importorskip("aiokafka")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with consumers(address, "starting", topics=False) as starting:
            end(starting)


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
def test_lag_is_what_the_tool_of_kafka_says_also_of_a_consumer_that_is_stuck(broker: tuple[str, int]) -> None:
    servers, _ = broker
    topic = f"stuck-{uuid4().hex[:8]}"
    tool = java(
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", "--bootstrap-server", servers, "--describe",
        "--group", topic,
    )  # fmt: skip

    async def lags() -> list[int]:
        shown = await asyncio.to_thread(subprocess.run, tool, capture_output=True, text=True, timeout=120, check=True)
        return [int(line.split()[5]) for line in shown.stdout.splitlines() if line.startswith(topic)]

    @ps.graph
    @ps.node
    async def wait() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await _filled(servers, {topic: 5})
        source = consume.Kafka(topic, group_id=topic, bootstrap_servers=servers)
        dead_letters = source.letters_to(f"{topic}.dead")
        async with (
            asyncio.timeout(120),
            engine.deploy(wait) as service,
            consume.Consumer(
                service, source, lambda message: wait(), dead_letters=dead_letters, max_open=2, drain_seconds=0
            ) as consumer,
        ):
            for more, lag in ((0, 5), (20, 25)):
                await _filled(servers, {topic: more})
                while consumer.statistics().lag != lag:
                    await asyncio.sleep(0.1)
                assert await lags() == [lag]

    asyncio.run(main())
