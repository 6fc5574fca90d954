"""Spans, logs, profiles, live looks and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""

from .exporting import setup as setup
from .incoming import continue_trace as continue_trace
from .incoming import continued as continued
from .live import expose as expose
from .logs import add_trace_context as add_trace_context
from .profiling import CriticalPath as CriticalPath
from .profiling import NodeProfile as NodeProfile
from .profiling import Prediction as Prediction
from .profiling import Profile as Profile
from .profiling import Verdict as Verdict
from .profiling import profile as profile
