"""Consumers of logs and queues: messages go through a deployment, in the order of their keys, and are settled then."""

from .._public import public
from .consumer import Consumer, ConsumerStatistics, PartitionStatistics, run
from .kafka import Kafka
from .partitions import Partitions
from .source import DeadLetter, Message, Source

__all__ = [
    "Consumer", "ConsumerStatistics", "DeadLetter", "Kafka", "Message", "PartitionStatistics", "Partitions", "Source",
    "run",
]  # fmt: skip

__getattr__, __dir__ = public(__name__)
