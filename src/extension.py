"""The contract for packages that stand on Penstock: what runs nodes somewhere else, and stages of streams.

An `Execution` is what `runs_on=` takes. Its `bind` is given each call site of a node, once for each run, stream or
deployment, and returns a `Bound`, which runs one attempt of an item.

A stage of a stream is a class derived from `StageIterator`; `stage_node` makes its node.

The others are for tests: `penstock.testing` stands on them.
"""

from ._public import public
from .actors.calls_ahead import CallsAhead
from .actors.current import working_on
from .actors.execution import Attempt, Bound
from .actors.frame import attempts_of, noted
from .actors.node_actor import Places
from .actors.own_loops import filled_inbox, filled_stream_inbox
from .actors.packed_errors import pack_error, unpack_error
from .actors.packing import Packer
from .actors.threads import LoopMailbox, ThreadOwner, end_forked, end_with_loop
from .engine.control import split_stream
from .engine.engine import kept_plan, run_kept
from .engine.graph import replaced
from .engine.interception import Interception, intercept
from .engine.keeping import Keeper, KeptSite, wirings
from .engine.node import Execution, Scope, Site
from .engine.stages import StageIterator, StageRole, ThreadIterator, has_state, has_value, is_stream, stage_node
from .engine.stateful import as_node
from .engine.tracing.annotations import hints_of
from .saving.encoding import Encoded, decode, encode
from .telemetry.counters import Figure, tell_in_top
from .telemetry.spans import MessageTrace, WorkerTraces

__all__ = [
    "Attempt", "Bound", "CallsAhead", "Encoded", "Execution", "Figure", "Interception", "Keeper", "KeptSite",
    "LoopMailbox", "MessageTrace", "Packer", "Places", "Scope", "Site", "StageIterator", "StageRole", "ThreadIterator",
    "ThreadOwner", "WorkerTraces", "as_node", "attempts_of", "decode", "encode", "end_forked", "end_with_loop",
    "filled_inbox", "filled_stream_inbox", "has_state", "has_value", "hints_of", "intercept", "is_stream", "kept_plan",
    "noted", "pack_error", "replaced", "run_kept", "split_stream", "stage_node", "tell_in_top", "unpack_error",
    "wirings", "working_on",
]  # fmt: skip

__getattr__, __dir__ = public(__name__)
