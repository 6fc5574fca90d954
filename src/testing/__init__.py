"""Tools for testing asynchronous code without waiting and without luck; most know nothing of graphs and work on any.

Clocks that jump (`VirtualClockLoop`, `run_virtual`), interleavings that replay (`SeededLoop`, `run_seeded`,
`interleavings`), a cancel at every point of a run (`cancel_at_every_step`), and waiting for rest instead of for time
(`wait_quiescent`), fakes (`replace`), `faults`, and inboxes for loops
of actors (`inbox`, `stream_inbox`).
"""

from . import faults as faults
from ._cancellation import CancelOutcome as CancelOutcome
from ._cancellation import cancel_at_every_step as cancel_at_every_step
from ._inbox import StreamReader as StreamReader
from ._inbox import inbox as inbox
from ._inbox import stream_inbox as stream_inbox
from ._quiescence import wait_quiescent as wait_quiescent
from ._replace import replace as replace
from ._run import interleavings as interleavings
from ._run import run_seeded as run_seeded
from ._run import run_virtual as run_virtual
from ._seeded_loop import SeededLoop as SeededLoop
from ._virtual_clock import VirtualClockLoop as VirtualClockLoop
