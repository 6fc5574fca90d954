"""What each metric is: kind, unit and meaning."""

from dataclasses import dataclass
from typing import Final, Literal

from .. import names

# The boundaries that the semantic conventions give for the durations of HTTP requests, in seconds.
RUN_BOUNDARIES: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# A stream takes as long as its input is: from below a second to a day.
STREAM_BOUNDARIES: Final = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 43200.0, 86400.0)


@dataclass(frozen=True)
class Observed:
    """A metric that is read when it is collected.

    Attributes:
        name: its name.
        kind: "counter" for what only grows, "up_down" for a level. Both can be added up over attributes.
        unit: in UCUM.
        description: what it says.
    """

    name: str
    kind: Literal["counter", "up_down"]
    unit: str
    description: str


@dataclass(frozen=True)
class Recorded:
    """A histogram that is recorded when something ends.

    Attributes:
        name: its name.
        unit: in UCUM.
        description: what it says.
        boundaries: of its buckets, unless the application has a view of its own.
    """

    name: str
    unit: str
    description: str
    boundaries: tuple[float, ...]


RECORDED: Final = (
    Recorded(names.METRIC_RUN_DURATION, "s", "Calls, from the call to the outcome.", RUN_BOUNDARIES),
    Recorded(names.METRIC_STREAM_DURATION, "s", "Streams of calls, from the first step to the end.", STREAM_BOUNDARIES),
)

OBSERVED: Final = (
    Observed(names.METRIC_RUN_IN_FLIGHT, "up_down", "{run}", "Calls of run in flight."),
    Observed(names.METRIC_STREAM_ITEMS, "counter", "{item}", "Items of streams that have ended."),
    Observed(names.METRIC_STREAM_IN_FLIGHT, "up_down", "{item}", "Items that count in max_in_flight of open streams."),
    Observed(names.METRIC_STREAM_MAX_IN_FLIGHT, "up_down", "{item}", "How many may."),
    Observed(names.METRIC_DEPLOYMENT_IN_FLIGHT, "up_down", "{run}", "Calls that hold a place in a deployment."),
    Observed(names.METRIC_DEPLOYMENT_MAX_IN_FLIGHT, "up_down", "{run}", "How many may."),
    Observed(names.METRIC_DEPLOYMENT_QUEUED, "up_down", "{run}", "Calls that wait for a place in a deployment."),
    Observed(names.METRIC_DEPLOYMENT_REFUSED, "counter", "{run}", "Calls that were refused with Overloaded."),
    Observed(names.METRIC_NODE_EXECUTIONS, "counter", "{execution}", "Items that left a node."),
    Observed(names.METRIC_NODE_BUSY_TIME, "counter", "s", "Time in the handler of a node, over all items."),
    Observed(names.METRIC_NODE_RETRIES, "counter", "{attempt}", "Attempts beyond the first."),
    Observed(names.METRIC_NODE_RESTARTS, "counter", "{restart}", "Instances of stateful nodes that were replaced."),
    Observed(names.METRIC_NODE_IN_FLIGHT, "up_down", "{item}", "Items in a node."),
    Observed(names.METRIC_NODE_MAX_IN_FLIGHT, "up_down", "{item}", "How many may be; not for one without a limit."),
    Observed(names.METRIC_QUEUE_DEPTH, "up_down", "{item}", "Items in the inbox of a node."),
    Observed(names.METRIC_QUEUE_CAPACITY, "up_down", "{item}", "How many it holds; not for one without a limit."),
    Observed(names.METRIC_QUEUE_SIZE, "up_down", "By", "Bytes in the inbox of a node with max_bytes."),
    Observed(names.METRIC_QUEUE_PUT_WAIT_TIME, "counter", "s", "Time that items waited for room in an inbox."),
    Observed(names.METRIC_BATCH_RUNS, "counter", "{batch}", "Batches that ran on devices."),
    Observed(names.METRIC_BATCH_ITEMS, "counter", "{item}", "Items in them."),
    Observed(names.METRIC_BATCH_ELEMENTS, "counter", "{element}", "Elements of their arrays, real ones and padding."),
    Observed(names.METRIC_DEVICE_BUSY_TIME, "counter", "s", "Time in which a device had something to compute."),
    Observed(names.METRIC_DEVICE_RESTARTS, "counter", "{restart}", "Threads of devices that died and began anew."),
    Observed(names.METRIC_COMPILE_PROGRAMS, "counter", "{program}", "Programs that were compiled."),
    Observed(names.METRIC_COMPILE_TIME, "counter", "s", "Time spent tracing, lowering and compiling, also in vain."),
    Observed(names.METRIC_COMPILE_CACHE_HITS, "counter", "{call}", "Calls whose program was there."),
    Observed(names.METRIC_COMPILE_CACHE_MISSES, "counter", "{call}", "Calls that waited for a compilation."),
    Observed(names.METRIC_COMPILE_CACHE_EVICTIONS, "counter", "{program}", "Programs dropped for others."),
)

COUNTERS: Final = frozenset(metric.name for metric in OBSERVED if metric.kind == "counter")
