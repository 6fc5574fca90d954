"""Spans, logs, profiles, live looks and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""

from typing import TYPE_CHECKING

from .._public import public as _public
from . import names
from .logs import add_trace_context

__all__ = [
    "BodyPlace", "Capacity", "CriticalPath", "DepthPoint", "DeviceSlice", "Monitor", "NodeProfile", "Prediction",
    "Profile", "ScopeSnapshot", "Slice", "Snapshot", "StepSnapshot", "Timeline", "Verdict", "add_trace_context",
    "continue_trace", "continued", "expose", "names", "profile", "setup", "snapshot",
]  # fmt: skip

if TYPE_CHECKING:
    from ..studio.live.server import expose
    from .exporting import setup
    from .profiling.limits import Verdict
    from .profiling.monitor import Monitor, Snapshot, snapshot
    from .profiling.recording import Profile, profile
    from .profiling.records import BodyPlace, Capacity, ScopeSnapshot, StepSnapshot
    from .profiling.sums import CriticalPath, NodeProfile
    from .profiling.timeline import DepthPoint, DeviceSlice, Slice, Timeline
    from .profiling.verdict import Prediction
    from .spans import continue_trace, continued
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "setup": ".exporting",
            "continue_trace": ".spans",
            "continued": ".spans",
            "expose": "..studio.live.server",
            "NodeProfile": ".profiling.sums",
            "Profile": ".profiling.recording",
            "profile": ".profiling.recording",
            "CriticalPath": ".profiling.sums",
            "BodyPlace": ".profiling.records",
            "Capacity": ".profiling.records",
            "ScopeSnapshot": ".profiling.records",
            "StepSnapshot": ".profiling.records",
            "Monitor": ".profiling.monitor",
            "Snapshot": ".profiling.monitor",
            "snapshot": ".profiling.monitor",
            "DepthPoint": ".profiling.timeline",
            "DeviceSlice": ".profiling.timeline",
            "Slice": ".profiling.timeline",
            "Timeline": ".profiling.timeline",
            "Verdict": ".profiling.limits",
            "Prediction": ".profiling.verdict",
        },
    )
