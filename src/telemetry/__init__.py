"""Spans, logs, profiles, live looks and tables; it knows the API of OpenTelemetry, and no other part of Penstock."""

from typing import TYPE_CHECKING

from .._public import public as _public
from . import names
from .logs import add_trace_context

__all__ = [
    "BodyPlace", "Capacity", "CriticalPath", "Cuts", "DepthPoint", "DeviceSlice", "FailureLook", "ItemLook", "Monitor",
    "NodeProfile", "NodeWork", "Prediction", "Profile", "ScopeSnapshot", "Slice", "Snapshot", "StepContents",
    "StepSnapshot", "StuckLoop", "Timeline", "Verdict", "add_trace_context", "continue_trace", "continued", "expose",
    "names", "profile", "setup", "snapshot",
]  # fmt: skip

if TYPE_CHECKING:
    from ..insight.limits import Verdict
    from ..insight.monitor import FailureLook, Monitor, NodeWork, Snapshot, snapshot
    from ..insight.recording import Profile, profile
    from ..insight.sums import CriticalPath, NodeProfile
    from ..insight.timeline import DepthPoint, Slice, Timeline
    from ..insight.verdict import Prediction
    from ..insight.watching import StuckLoop
    from ..studio.live.server import expose
    from .counters import Cuts
    from .exporting import setup
    from .profiling.records import (
        BodyPlace,
        Capacity,
        DeviceSlice,
        ItemLook,
        ScopeSnapshot,
        StepContents,
        StepSnapshot,
    )
    from .spans import continue_trace, continued
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            ".counters": "Cuts",
            ".exporting": "setup",
            ".spans": "continue_trace continued",
            "..studio.live.server": "expose",
            "..insight.sums": "NodeProfile CriticalPath",
            "..insight.recording": "Profile profile",
            ".profiling.records": "BodyPlace Capacity DeviceSlice ItemLook ScopeSnapshot StepContents StepSnapshot",
            "..insight.monitor": "FailureLook Monitor NodeWork Snapshot snapshot",
            "..insight.timeline": "DepthPoint Slice Timeline",
            "..insight.limits": "Verdict",
            "..insight.verdict": "Prediction",
            "..insight.watching": "StuckLoop",
        },
    )
