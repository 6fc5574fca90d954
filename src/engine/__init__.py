"""Running graphs: `run` for one call, `stream` for many, `deploy` for servers, `plan` to look at what will happen."""

from typing import TYPE_CHECKING

from .._public import public as _public
from ..actors.supervision import RestartMode, Strategy
from ..actors.threads import ThreadPoolStatistics
from ..telemetry.counters import ActorState, ActorStatistics, CacheStatistics, ChannelStatistics, ProgramMemory
from .admission import AdmissionStatistics, KeyStatistics
from .call_stream import Stream
from .control import Outcome
from .engine import Engine, EngineStatistics
from .engine import default as _default
from .events import Event, Value
from .graph import GraphStatistics
from .node import RunsOn
from .one_call_stream import EventStream
from .options import CallOptions, OnFinished, Scheduler
from .pools import ProcessPoolStatistics
from .program import Plan
from .statistics import Bottleneck, StreamStatistics

__all__ = [
    "ActorState", "ActorStatistics", "AdmissionStatistics", "Bottleneck", "CacheStatistics", "CallOptions",
    "ChannelStatistics", "DetachedStream", "Drawing", "DrawnEdge", "DrawnNode", "Engine", "EngineStatistics", "Event",
    "EventStream", "GraphStatistics", "KeyStatistics", "MemoryReport", "Missed", "NodeMemory", "OnFinished", "Outcome",
    "Plan", "ProcessPoolStatistics", "ProgramMemory", "RestartMode", "RunsOn", "Scheduler", "Service", "ServiceState",
    "ServiceStatistics", "StoredSnapshot", "Strategy", "Stream", "StreamStatistics", "ThreadPoolStatistics", "Value",
    "deploy", "memory", "plan", "run", "stream", "tuned_for_serving",
]  # fmt: skip

if TYPE_CHECKING:
    from ..saving.snapshots import StoredSnapshot
    from .deployment import ServiceState
    from .detached import DetachedStream, Missed
    from .drawing import Drawing, DrawnEdge, DrawnNode
    from .footprint import MemoryReport, NodeMemory
    from .service import Service, ServiceStatistics
    from .tuning import tuned_for_serving

run, stream, deploy = _default.run, _default.stream, _default.deploy
plan, memory = _default.plan, _default.memory

if not TYPE_CHECKING:
    __getattr__, __dir__ = _public(
        __name__,
        {
            ".detached": "DetachedStream Missed",
            ".drawing": "Drawing DrawnEdge DrawnNode",
            ".footprint": "MemoryReport NodeMemory",
            ".service": "Service ServiceStatistics",
            ".deployment": "ServiceState",
            "..saving.snapshots": "StoredSnapshot",
            ".tuning": "tuned_for_serving",
        },
    )
