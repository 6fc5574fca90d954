"""The observation contract: the names by which `insight` knows counters, records and who collects them.

No other part imports this module; `tests/house/test_floors.py` counts its names, which may only become fewer.
"""

from .counters import (
    LEAST_USED,
    ActorStatistics,
    SavedSnapshots,
    changed,
    counted,
    full_inboxes,
    name_of,
    told,
)  # fmt: skip
from .profiling.collectors import Collector, begin, end, hosts, running
from .profiling.durations import NO_DEPTH, Durations
from .profiling.records import (
    Bound,
    Capacity,
    DeviceSlice,
    Execution,
    Host,
    ItemLook,
    ProfiledScope,
    ProfiledStream,
    ScopeSnapshot,
    StepContents,
    StepSnapshot,
    TimedReading,
    WindowLook,
)

__all__ = [
    "LEAST_USED", "NO_DEPTH", "ActorStatistics", "Bound", "Capacity", "Collector", "DeviceSlice", "Durations",
    "Execution", "Host", "ItemLook", "ProfiledScope", "ProfiledStream", "SavedSnapshots", "ScopeSnapshot",
    "StepContents", "StepSnapshot", "TimedReading", "WindowLook", "begin", "changed", "counted", "end", "full_inboxes",
    "hosts", "name_of", "running", "told",
]  # fmt: skip
