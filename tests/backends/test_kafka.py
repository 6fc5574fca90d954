"""Processes that consume 20,000 messages of a broker; meanwhile the test kills processes, or stops the broker."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.backends import kafka_consumer
from tests.backends.broker import committed, make_topics, records_of, running
from tests.consume.memory import in_order

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

    def end(self, process: subprocess.Popen[str]) -> None:
        """Send SIGTERM to the process and its workers, and check that the process ends cleanly."""
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=40)
        assert (process.returncode, out.splitlines()[-1]) == (0, "0 late commits")

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill the process, and count the messages that it has written after the committed positions."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        committed = self.committed()
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
        await make_topics(self.broker, {self.topic: PARTITIONS, self.topic + ".dead": 1})
        rng, numbers, sent = random.Random(3), dict[str, int](), list[Any]()
        async with import_module("aiokafka").AIOKafkaProducer(bootstrap_servers=self.broker, linger_ms=20) as producer:
            for number in range(MESSAGES):
                key = "hot" if rng.random() < 0.02 else f"k{rng.randrange(1000)}"
                numbers[key] = numbers.get(key, -1) + 1
                order = json.dumps({"id": number, "key": key, "seq": numbers[key]}).encode()
                value = b"{broken" if is_broken(number) else order
                headers = [("id", str(number).encode())]
                sent.append(await producer.send(self.topic, value, key=key.encode(), headers=headers))
            await asyncio.gather(*sent)

    def committed(self) -> list[int]:
        return asyncio.run(committed(self.broker, self.topic, PARTITIONS))

    def dead(self) -> list[int]:
        letters = asyncio.run(records_of(self.broker, self.topic + ".dead"))
        return [int(dict(letter.headers)["id"]) for letter in letters]

    def check(self) -> None:
        """Check that no message is lost, wrongly dead, out of order, or repeated more than allowed."""
        rows = self.connection.execute("select identity, id, key, seq from written order by n").fetchall()
        dead = self.dead()
        wanted_dead = {number for number in range(MESSAGES) if is_broken(number) or number % 1000 == 999}
        is_ordered = in_order((identity, (key, number)) for identity, _, key, number in rows)
        lost = set(range(MESSAGES)) - {number for _, number, _, _ in rows} - set(dead)
        repeated = len(rows) - self.written()
        figures = f"lost {len(lost)}, wrongly dead {len(set(dead) - wanted_dead)}, in order: {is_ordered}, "
        figures += f"written twice {repeated}, of {self.may_repeat} that may be"
        print(figures)
        assert not lost, figures
        assert set(dead) == wanted_dead, figures
        assert is_ordered, figures
        assert repeated <= self.may_repeat, figures
        assert sum(self.committed()) == MESSAGES


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
    with suppress(AssertionError):  # of aiokafka, while a broker that was stopped is not in the metadata yet
        return sum(trial.committed()) == MESSAGES
    return False


@pytest.mark.timeout(300)
def test_kills_cost_what_had_begun_behind_the_committed_position(trial: Trial) -> None:
    """Three processes are killed alone, and a fourth beside another."""
    for share in (0.15, 0.3, 0.45):
        process = trial.start()
        trial.until_written(share)
        trial.kill(process)
    process, second = trial.start(), trial.start()
    trial.until_written(0.7)
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
