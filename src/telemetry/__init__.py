"""Spans, logs, profiles, live looks and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""

from typing import TYPE_CHECKING

from .._late import late as _late
from .logs import add_trace_context as add_trace_context

if TYPE_CHECKING:
    from .exporting import setup as setup
    from .live.server import expose as expose
    from .profiling.evidence import CriticalPath as CriticalPath
    from .profiling.limits import Verdict as Verdict
    from .profiling.node_profile import NodeProfile as NodeProfile
    from .profiling.recording import Profile as Profile
    from .profiling.recording import profile as profile
    from .profiling.verdict import Prediction as Prediction
    from .spans.tracer import continue_trace as continue_trace
    from .spans.tracer import continued as continued
else:
    __getattr__, __dir__ = _late(
        __name__,
        {
            "setup": ".exporting",
            "continue_trace": ".spans.tracer",
            "continued": ".spans.tracer",
            "expose": ".live.server",
            "NodeProfile": ".profiling.node_profile",
            "Profile": ".profiling.recording",
            "profile": ".profiling.recording",
            "CriticalPath": ".profiling.evidence",
            "Verdict": ".profiling.limits",
            "Prediction": ".profiling.verdict",
        },
    )
