"""Spans, logs, profiles, live looks and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""

from typing import TYPE_CHECKING

from .._public import public as _public
from . import names
from .logs import add_trace_context

__all__ = [
    "CriticalPath", "NodeProfile", "Prediction", "Profile", "Verdict", "add_trace_context", "continue_trace",
    "continued", "expose", "names", "profile", "setup",
]  # fmt: skip

if TYPE_CHECKING:
    from .exporting import setup
    from .live.server import expose
    from .profiling.limits import Verdict
    from .profiling.recording import Profile, profile
    from .profiling.sums import CriticalPath, NodeProfile
    from .profiling.verdict import Prediction
    from .spans import continue_trace, continued
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            "setup": ".exporting",
            "continue_trace": ".spans",
            "continued": ".spans",
            "expose": ".live.server",
            "NodeProfile": ".profiling.sums",
            "Profile": ".profiling.recording",
            "profile": ".profiling.recording",
            "CriticalPath": ".profiling.sums",
            "Verdict": ".profiling.limits",
            "Prediction": ".profiling.verdict",
        },
    )
