"""Metrics, through the API of OpenTelemetry: what is open is read when somebody collects, and pays nothing before.

Only the durations of calls and streams are recorded when they end, once for each.
"""

from .instruments import Reading as Reading
from .instruments import Series as Series
from .instruments import are_recorded as are_recorded
from .instruments import series as series
from .registry import add as add
from .registry import closed as closed
from .registry import opened as opened
from .registry import run_ended as run_ended
from .registry import stream_ended as stream_ended
from .registry import vanished as vanished
