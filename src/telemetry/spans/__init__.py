"""Spans: what the rest of the house calls to open and end them. Nothing is opened for what is not sampled."""

from .device_jobs import DeviceWait as DeviceWait
from .device_jobs import JobSpan as JobSpan
from .device_jobs import compiling as compiling
from .device_jobs import waiting as waiting
from .nodes import NodeSpan as NodeSpan
from .nodes import consists_of as consists_of
from .nodes import fell_back as fell_back
from .nodes import present as present
from .nodes import retried as retried
from .runs import FrameSpan as FrameSpan
from .runs import admitted as admitted
from .runs import end_run as end_run
from .runs import end_stream as end_stream
from .runs import item_skipped as item_skipped
from .runs import start_run as start_run
from .runs import start_stream as start_stream
from .tracer import incoming as incoming
from .tracer import is_set_up as is_set_up
from .tracer import outgoing as outgoing
from .tracer import set_up_of_workers as set_up_of_workers
from .tracer import set_up_workers as set_up_workers
