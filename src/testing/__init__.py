"""Tools for tests of asynchronous code that take no real time and do not depend on chance.

For any asyncio code: clocks that jump to the next timer (`VirtualClockLoop`, `run_virtual`), interleavings that can be
replayed (`SeededLoop`, `run_seeded`, `interleavings`), a cancellation at each point of a run (`cancel_at_every_step`),
and waiting until all tasks are blocked (`wait_quiescent`). For graphs: fakes (`replace`), injected `faults`, inboxes
for the loops of actors (`inbox`, `stream_inbox`), and threads in place of the workers of a cluster
(`workers_in_threads`). The tools for graphs load the engine when they are first used.
"""

from typing import TYPE_CHECKING

from .._public import public as _public
from ._cancellation import CancelOutcome, cancel_at_every_step
from ._quiescence import wait_quiescent
from ._run import interleavings, run_seeded, run_virtual
from ._seeded_loop import SeededLoop
from ._virtual_clock import VirtualClockLoop

__all__ = [
    "CancelOutcome", "SeededLoop", "StreamReader", "VirtualClockLoop", "cancel_at_every_step", "faults", "inbox",
    "interleavings", "replace", "run_seeded", "run_virtual", "stream_inbox", "wait_quiescent", "workers_in_threads",
]  # fmt: skip

if TYPE_CHECKING:
    from ..cluster.in_threads import workers_in_threads
    from . import faults
    from ._inbox import StreamReader, inbox, stream_inbox
    from ._replace import replace
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            ".faults": "faults",
            "._inbox": "StreamReader inbox stream_inbox",
            "._replace": "replace",
            "..cluster.in_threads": "workers_in_threads",
        },
    )
