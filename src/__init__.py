"""Penstock: graphs of async actors on bounded channels, in pure asyncio.

The map of the house, in the order in which its floors may import each other:

    _errors      every exception, one flat hierarchy; imports no other part
    _public      the public names of a package, and which of them are imported late; imports no other part
    _machine     what the machine gives to this process: cores, limits, a SLURM allocation; imports no other part
    telemetry    spans and logs through the API of OpenTelemetry, counters, tables; imports only _public
    actors       one actor: channel, limiter, frame, group of workers, policy, supervision, threads
    saving       values as bytes, folders of snapshots on the disk, durable loops and where they are kept
    engine       many actors: node, graph, trace, plan, run, stream, deploy
    devices      actors that own an accelerator, through JAX, which is loaded at the first use
    advice       how fast devices and feeds are, what a machine has, how many items a call should take
    insight      what the counters say: profiles, the verdict on what limits a graph; knows only telemetry
    studio       what people look at: drawings, bars, pages, live looks and their command
    data         feeds: records in a known order, stages that shape them, on streams as values
    extension    the names that floors and packages beside this one stand on: what runs nodes elsewhere, stages
    durable      runs that survive their process: a journal of their steps, and the stores that keep it
    asgi         streams over HTTP, for Starlette and FastAPI
    serving      OpenAI's protocol in front of any graph
    consume      consumers of logs and queues, such as Kafka
    workers      nodes in worker processes, loaded by the first `runs_on="process"`
    cluster      nodes on workers of other machines, which Ray places
    testing      virtual time, seeded interleavings, fakes
    _cli         the command line, a module for each command
"""

from typing import TYPE_CHECKING

from . import engine, telemetry
from ._errors import (
    ActorRestarted,
    ActorStopped,
    ChannelClosed,
    CheckpointError,
    ClusterError,
    DataError,
    DeadLetterError,
    DeadlineExceeded,
    DeploymentFailed,
    DeviceError,
    EngineClosedError,
    EngineLoopError,
    GraphTraceError,
    InboxClosed,
    Interrupted,
    IterationLimitError,
    KeyFinished,
    KeyInUse,
    KeyStopped,
    MissingExtraError,
    NodeCancelledError,
    NodeError,
    NodeTimeoutError,
    NotFinished,
    NotStorable,
    OptionsError,
    OtherArguments,
    Overloaded,
    PenstockError,
    PlanError,
    ReentrantCallError,
    ResourceError,
    StaleAnswer,
    UnknownItemError,
    UnknownKey,
    UnknownStep,
    WorkerDied,
    WorkSettledError,
)
from ._public import public as _public
from .actors.batching import Batch
from .actors.current import ItemInfo, current
from .actors.loop_host import Actor, StreamActor
from .actors.own_loops import Inbox, StreamWork, Work
from .actors.policy import Cache, Hedge, Retry, retry_after
from .engine.checkpoint import Checkpoint
from .engine.control import cond, fold, map_each, switch, while_loop
from .engine.decorator import apply, node
from .engine.events import emit
from .engine.graph import Call, Graph, graph, tagged
from .engine.node import Node
from .engine.options import ExecutionOptions, execution_options, set_execution_options
from .engine.rate_limit import RateLimit
from .engine.resource import Resource, resource
from .engine.tracing.ref import Ref

__all__ = [
    "Actor", "ActorRestarted", "ActorStopped", "Answer", "Batch", "Cache", "Call", "ChannelClosed", "Checkpoint",
    "CheckpointError", "ClusterError", "DataError", "DeadLetterError", "DeadlineExceeded", "DeploymentFailed",
    "DeviceError", "DeviceNode", "Durable", "EngineClosedError", "EngineLoopError", "ExecutionOptions", "Graph",
    "GraphTraceError", "Hedge", "Inbox", "InboxClosed", "Interrupted", "ItemInfo", "IterationLimitError", "KeyFinished",
    "KeyInUse", "KeyStopped", "LoopRecord", "LoopState", "LoopStore", "MissingExtraError", "Node", "NodeCancelledError",
    "NodeError", "NodeTimeoutError", "NotFinished", "NotStorable", "OptionsError", "OtherArguments", "Overloaded",
    "PenstockError", "PlanError", "PostgresStore", "RateLimit", "ReentrantCallError", "Ref", "Resource",
    "ResourceError", "Retry", "Run", "SQLiteStore", "StaleAnswer", "StreamActor", "StreamWork", "UnknownItemError",
    "UnknownKey", "UnknownStep", "Work", "WorkSettledError", "WorkerDied", "apply", "asgi", "call", "cluster", "cond",
    "consume", "current", "data", "device_node", "devices", "emit", "engine", "execution_options", "extension", "fold",
    "graph", "interrupt", "map_each", "node", "resource", "retry_after", "serving", "set_execution_options", "switch",
    "tagged", "telemetry", "testing", "while_loop",
]  # fmt: skip

__version__ = telemetry.names.VERSION

if TYPE_CHECKING:
    from . import asgi, cluster, consume, data, devices, extension, serving, testing
    from .devices.device_node import DeviceNode, device_node
    from .engine.interrupt import interrupt
    from .engine.late_steps import call
    from .saving.durable import Answer, Durable, LoopState
    from .saving.loops import LoopRecord, Run
    from .saving.postgres import PostgresStore
    from .saving.store import LoopStore, SQLiteStore
else:
    __getattr__, __dir__ = _public(
        __name__,
        {
            ".asgi": "asgi",
            ".cluster": "cluster",
            ".consume": "consume",
            ".data": "data",
            ".devices": "devices",
            ".extension": "extension",
            ".serving": "serving",
            ".testing": "testing",
            ".devices.device_node": "DeviceNode device_node",
            ".engine.late_steps": "call",
            ".engine.interrupt": "interrupt",
            ".saving.durable": "Answer Durable LoopState",
            ".saving.loops": "LoopRecord Run",
            ".saving.postgres": "PostgresStore",
            ".saving.store": "LoopStore SQLiteStore",
        },
    )
