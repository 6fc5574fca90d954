"""Processes that consume 20,000 messages of a broker; meanwhile the test kills, adds and stops processes."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.backends import kafka_consumer
from tests.backends.broker import running

MESSAGES = 20_000
PARTITIONS = 4

Broker = tuple[str, int]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The address of a broker, and its process id."""
    with running(tmp_path_factory.mktemp("kafka") / "log") as found:
        yield found


class Trial:
    """A topic, the processes that consume it, and the database that they write."""

    def __init__(self, broker: str, folder: Path) -> None:
        self.broker = broker
        self.topic = f"orders-{uuid4().hex[:8]}"
        self.database = folder / "written.db"
        self.connection = kafka_consumer.connect(str(self.database))
        self.processes: list[subprocess.Popen[str]] = []
        self.may_repeat = 0  # messages written after the committed positions before kills

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.backends.kafka_consumer", self.broker, self.topic, str(self.database)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str], *, whole_group: bool = False) -> None:
        """Send SIGTERM, and check that the process ends cleanly."""
        if whole_group:
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=40)
        assert (process.returncode, out.splitlines()[-1]) == (0, "0 late commits")

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill the process, and count the messages that it has written after the committed positions."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        committed = asyncio.run(self.committed())
        rows = self.connection.execute("select distinct identity from written").fetchall()
        places = [identity.rsplit("/", 2)[1:] for (identity,) in rows]
        self.may_repeat += sum(int(offset) >= committed[int(partition)] for partition, offset in places)

    def written(self) -> int:
        count: int = self.connection.execute("select count(distinct identity) from written").fetchone()[0]
        return count

    def until(self, predicate: Callable[[], bool], seconds: float = 90) -> None:
        ends_at = time.monotonic() + seconds
        while not predicate():
            assert time.monotonic() < ends_at, f"{self.written()} are written"
            time.sleep(0.1)

    def until_written(self, share: float) -> None:
        self.until(lambda: self.written() >= share * MESSAGES)

    async def produce(self) -> None:
        kafka, admin = import_module("aiokafka"), import_module("aiokafka.admin")
        client = admin.AIOKafkaAdminClient(bootstrap_servers=self.broker)
        await client.start()
        topics = [(self.topic, PARTITIONS), (self.topic + ".dead", 1)]
        await client.create_topics([admin.NewTopic(name, partitions, 1) for name, partitions in topics])
        await client.close()
        rng, numbers, sent = random.Random(3), dict[str, int](), list[Any]()
        async with kafka.AIOKafkaProducer(bootstrap_servers=self.broker, linger_ms=20) as producer:
            for number in range(MESSAGES):
                key = "hot" if rng.random() < 0.02 else f"k{rng.randrange(1000)}"
                numbers[key] = numbers.get(key, -1) + 1
                order = json.dumps({"id": number, "key": key, "seq": numbers[key]}).encode()
                value = b"{broken" if is_broken(number) else order
                headers = [("id", str(number).encode())]
                sent.append(await producer.send(self.topic, value, key=key.encode(), headers=headers))
            await asyncio.gather(*sent)

    async def committed(self) -> list[int]:
        kafka = import_module("aiokafka")
        reader = kafka.AIOKafkaConsumer(bootstrap_servers=self.broker, group_id=self.topic, enable_auto_commit=False)
        async with reader:
            return [await reader.committed(kafka.TopicPartition(self.topic, n)) or 0 for n in range(PARTITIONS)]

    async def dead(self) -> list[int]:
        kafka = import_module("aiokafka")
        found: list[int] = []
        reader = kafka.AIOKafkaConsumer(
            self.topic + ".dead", bootstrap_servers=self.broker, auto_offset_reset="earliest"
        )
        async with reader:
            while records := await reader.getmany(timeout_ms=3000):
                found += [int(dict(record.headers)["id"]) for some in records.values() for record in some]
        return found

    def check(self) -> str:
        """Check that no message is lost, wrongly dead, out of order, or repeated more than allowed; return figures."""
        rows = self.connection.execute("select identity, id, key, seq from written order by n").fetchall()
        dead = asyncio.run(self.dead())
        wanted_dead = {number for number in range(MESSAGES) if is_broken(number) or number % 1000 == 999}
        last: dict[str, int] = {}
        seen: set[str] = set()
        disorder = 0
        for identity, _, key, number in rows:
            disorder += identity not in seen and number < last.get(key, -1)
            seen.add(identity)
            last[key] = max(number, last.get(key, -1))
        lost = set(range(MESSAGES)) - {number for _, number, _, _ in rows} - set(dead)
        repeated = len(rows) - len(seen)
        figures = f"lost {len(lost)}, wrongly dead {len(set(dead) - wanted_dead)}, out of order {disorder}, "
        figures += f"written twice {repeated}, of {self.may_repeat} that may be"
        print(figures)
        assert not lost, figures
        assert set(dead) == wanted_dead, figures
        assert not disorder, figures
        assert repeated <= self.may_repeat, figures
        assert sum(asyncio.run(self.committed())) == MESSAGES
        return figures


def is_broken(number: int) -> bool:
    return number % 500 == 250


@pytest.fixture
def trial(broker: Broker, tmp_path: Path) -> Iterator[Trial]:
    made = Trial(broker[0], tmp_path)
    asyncio.run(made.produce())
    yield made
    for process in made.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    made.connection.close()


def all_are_committed(trial: Trial) -> bool:
    return sum(asyncio.run(trial.committed())) == MESSAGES


@pytest.mark.timeout(300)
def test_three_kills_cost_what_had_begun_behind_the_committed_position(trial: Trial) -> None:
    for share in (0.15, 0.4, 0.65):
        process = trial.start()
        trial.until_written(share)
        trial.kill(process)
    process = trial.start()
    trial.until(lambda: all_are_committed(trial))
    trial.end(process)
    trial.check()


@pytest.mark.timeout(300)
def test_a_second_consumer_joins_and_leaves_and_nothing_is_written_twice(trial: Trial) -> None:
    process = trial.start()
    for share, whole_group in ((0.1, False), (0.4, True)):
        trial.until_written(share)
        second = trial.start()
        trial.until_written(share + 0.2)
        trial.end(second, whole_group=whole_group)
    trial.until_written(0.65)
    trial.end(process, whole_group=True)
    process = trial.start()
    trial.until(lambda: all_are_committed(trial))
    trial.end(process)
    trial.check()


@pytest.mark.timeout(300)
def test_a_second_consumer_is_killed(trial: Trial) -> None:
    process = trial.start()
    trial.until_written(0.1)
    second = trial.start()
    trial.until_written(0.4)
    trial.kill(second)
    trial.until(lambda: all_are_committed(trial))
    trial.end(process)
    trial.check()


@pytest.mark.timeout(300)
def test_a_broker_that_is_stopped_for_ten_seconds_costs_what_was_not_committed(broker: Broker, trial: Trial) -> None:
    if not broker[1]:
        pytest.skip("needs a broker of its own, to stop it")
    process = trial.start()
    trial.until_written(0.3)
    os.kill(broker[1], signal.SIGSTOP)
    try:
        time.sleep(10)
        trial.may_repeat = MESSAGES  # the broker may have removed the member from its group
    finally:
        os.kill(broker[1], signal.SIGCONT)
    trial.until(lambda: all_are_committed(trial))
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=40)
    trial.check()
