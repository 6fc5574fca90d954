"""Spans, logs, profiles and tables; knows the API of OpenTelemetry and nothing of the rest of the house."""

from .exporting import setup as setup
from .incoming import continue_trace as continue_trace
from .profiling import NodeProfile as NodeProfile
from .profiling import Profile as Profile
from .profiling import Verdict as Verdict
from .profiling import profile as profile
