"""Spans, logs, profiles, live looks and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""

from typing import TYPE_CHECKING

from .._late import late as _late
from .logs import add_trace_context as add_trace_context

if TYPE_CHECKING:
    from .exporting import setup as setup
    from .incoming import continue_trace as continue_trace
    from .incoming import continued as continued
    from .live.exposing import expose as expose
    from .profiling.node_profile import NodeProfile as NodeProfile
    from .profiling.recording import Profile as Profile
    from .profiling.recording import profile as profile
    from .profiling.verdicts.critical_path import CriticalPath as CriticalPath
    from .profiling.verdicts.limits.limit import Verdict as Verdict
    from .profiling.verdicts.prediction import Prediction as Prediction
else:
    __getattr__, __dir__ = _late(
        __name__,
        {
            "setup": ".exporting",
            "continue_trace": ".incoming",
            "continued": ".incoming",
            "expose": ".live.exposing",
            "NodeProfile": ".profiling.node_profile",
            "Profile": ".profiling.recording",
            "profile": ".profiling.recording",
            "CriticalPath": ".profiling.verdicts.critical_path",
            "Verdict": ".profiling.verdicts.limits.limit",
            "Prediction": ".profiling.verdicts.prediction",
        },
    )
