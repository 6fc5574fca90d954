"""Penstock: graphs of async actors on bounded channels, in pure asyncio.

The map of the house, in the order in which its floors may know each other:

    _errors      every exception, one flat hierarchy; knows no one
    _late        names that a package imports when they are first used; knows no one
    telemetry    spans and logs through the API of OpenTelemetry, profiles, tables; knows none but _late
    actors       one actor: channel, places, frame, group of workers, policy, supervision, threads, processes
    engine       many actors: node, graph, trace, plan, run, stream, deploy
    devices      actors that own an accelerator, through JAX, which is loaded at the first use
    testing      virtual time, seeded interleavings, fakes
    _cli         the command line, a module for each command
"""

from typing import TYPE_CHECKING

from . import engine as engine
from . import telemetry as telemetry
from ._errors import ActorRestarted as ActorRestarted
from ._errors import ActorStopped as ActorStopped
from ._errors import ChannelClosed as ChannelClosed
from ._errors import DeadlineExceeded as DeadlineExceeded
from ._errors import DeploymentFailed as DeploymentFailed
from ._errors import DeviceError as DeviceError
from ._errors import EngineClosedError as EngineClosedError
from ._errors import EngineLoopError as EngineLoopError
from ._errors import GraphTraceError as GraphTraceError
from ._errors import InboxClosed as InboxClosed
from ._errors import IterationLimitError as IterationLimitError
from ._errors import MissingExtraError as MissingExtraError
from ._errors import NodeCancelledError as NodeCancelledError
from ._errors import NodeError as NodeError
from ._errors import NodeTimeoutError as NodeTimeoutError
from ._errors import OptionsError as OptionsError
from ._errors import Overloaded as Overloaded
from ._errors import PenstockError as PenstockError
from ._errors import PlanError as PlanError
from ._errors import ReentrantCallError as ReentrantCallError
from ._errors import ResourceError as ResourceError
from ._errors import UnknownItemError as UnknownItemError
from ._errors import WorkerDied as WorkerDied
from ._errors import WorkSettledError as WorkSettledError
from ._late import late as _late
from .actors.batching import Batch as Batch
from .actors.current import ItemInfo as ItemInfo
from .actors.current import current as current
from .actors.loop_host import Actor as Actor
from .actors.loop_host import StreamActor as StreamActor
from .actors.own_loops import Inbox as Inbox
from .actors.own_loops import StreamWork as StreamWork
from .actors.own_loops import Work as Work
from .actors.policy import Retry as Retry
from .engine.control import cond as cond
from .engine.control import map_each as map_each
from .engine.control import switch as switch
from .engine.control import while_loop as while_loop
from .engine.decorator import node as node
from .engine.graph import Call as Call
from .engine.graph import Graph as Graph
from .engine.graph import graph as graph
from .engine.node import Node as Node
from .engine.options import ExecutionOptions as ExecutionOptions
from .engine.options import execution_options as execution_options
from .engine.options import set_execution_options as set_execution_options
from .engine.rate_limit import RateLimit as RateLimit
from .engine.resource import Resource as Resource
from .engine.resource import resource as resource
from .engine.tracing.ref import Ref as Ref

# Written here, too: to ask importlib.metadata takes as long as a quarter of all else. A test compares it.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import devices as devices
    from . import testing as testing
    from .devices.device_node import DeviceNode as DeviceNode
    from .devices.device_node import device_node as device_node
else:
    __getattr__, __dir__ = _late(
        __name__,
        {
            "devices": ".devices",
            "testing": ".testing",
            "DeviceNode": ".devices.device_node",
            "device_node": ".devices.device_node",
        },
    )

for _public in [value for value in globals().values() if getattr(value, "__module__", "") == "penstock._errors"]:
    _public.__module__ = "penstock"  # tracebacks show the name that one imports
