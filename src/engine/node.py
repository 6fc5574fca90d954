"""Node: a function, or an instance of a class, with a policy; and Execution, which says how its steps run."""

import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Final,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    TypeAlias,
    TypedDict,
    TypeGuard,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from weakref import WeakValueDictionary

from .._errors import GraphTraceError, OptionsError, PlanError
from ..actors.accepted import NAME, OptionRule, check, refuse_unknown
from ..actors.current import source
from ..actors.execution import Bound
from ..actors.node_actor import NO_LIMIT, Places
from ..actors.policy import Cache, Hedge, Policy, Retry
from ..actors.threads import PoolT
from ..telemetry import logs
from ..telemetry.profiling import collectors
from ..telemetry.profiling.collectors import Collector
from ..telemetry.text import printable
from .tracing.annotations import hints_of, signature_of, unwrapped
from .tracing.ref import PendingRef, Ref, call_location, refuse_leak
from .tracing.template import Read, reads
from .tracing.tracer import Trace, Tracer, active

if TYPE_CHECKING:
    from ..actors.batching import Batch
    from ..actors.loop_host import OwnsLoop, RestartGate
    from ..actors.node_actor import NodeActor
    from ..actors.threads import ThreadShare
    from ..telemetry.counters import ProgramMemory
    from ..telemetry.profiling.records import Bound as LimitedBy
    from .graph import Graph
    from .pools import Pools
    from .program import PlannedStep, Program, Unit, Wired


# By name: an execution pickles by its name, and `runs_on=` takes the names of the built-in executions.
_named: WeakValueDictionary[str, "Execution"] = WeakValueDictionary()
# The built-in executions that are imported at the first use of their name, and the module of each.
_LATE: Final = {"process": "..workers.execution"}
# A slot for `engine/interception.py`; see `Scope.giving`.
fault_at_giving: Callable[[str], Awaitable[bool]] | None = None


class Execution:
    """How the steps of nodes run: the value of `runs_on=`. An execution serves many nodes, and pickles by its name.

    Args:
        name: where the steps run, as drawings and statistics show it; the same in every process.

    Attributes:
        name: the name.
        pool: what bounds the items of all nodes of an Engine together: "threads" (`max_workers=`), "processes"
            (`max_processes=`), or None. A class attribute.

    Raises:
        OptionsError: an execution of another class has that name.
    """

    has_one_instance: ClassVar[bool] = True
    """True: a class has one instance for each scope, which handles an item at a time. False: one in each worker."""

    needs_plain_def: ClassVar[bool] = False
    """Whether only a plain `def` can run: then `check` refuses coroutines and generators."""

    pool: ClassVar[Literal["threads", "processes"] | None] = None

    # Facts that other parts of the engine ask for.
    _passes: tuple[Callable[..., Any], ...] = ()  # planning passes over graphs with such nodes
    _is_here = False  # whether this process calls the handler of a call site
    _is_inline = False  # whether workers call plain functions themselves, so that a chain of nodes may be one function
    _is_compiled = False  # whether arguments and results are converted, and nothing is kept between two calls
    _gathers = False  # whether items are taken before they have a place
    # Whether a result may take over the memory of arguments; or of the state of a loop; whether arguments may be
    # unready.
    _donates = _overwrites = _takes_unready = False
    _made: Sequence[str] = ()  # the parameters whose arguments the execution makes, so that calls do not pass them
    # Of an execution that gathers items of many calls:
    _batch: Any = None  # the options of the batches
    _fn: Any = None  # the function that takes a batch
    _holds: int | None = None  # how many items it may hold
    _runs_loop = False  # whether each scope runs a loop that handles the items; see `_make_loop`

    def __init__(self, name: str) -> None:
        check("name", name, NAME)
        known = _named.get(name, self)
        if _class_of(known) != _class_of(self):
            raise OptionsError(f"name={name!r}: an execution of class {type(known).__name__} has that name")
        _named[name] = self
        self.name = name

    @property
    def _drawn(self) -> str:
        """How drawings of a graph describe it."""
        return "" if self._is_inline else self._place

    @property
    def _place(self) -> str:
        """Where the steps run, as profiles say it."""
        return self.name

    def check(self, node: "Node[..., Any]") -> None:
        """Refuse a node that this execution cannot run, when the node is declared.

        Args:
            node: the node; for a class, `__call__` is its function, and the class is its template.

        Raises:
            TypeError: the node cannot run; the message says why, and what to write instead.
        """
        if self.needs_plain_def and node.gives_stream:
            raise TypeError(
                f"node {node.name!r} is an async generator, whose body runs on the event loop, step by step: leave out "
                f'runs_on="{self.name}"'
            )
        if self.needs_plain_def and node.is_async:
            raise TypeError(
                f"node {node.name!r} is an `async def`, which runs on the event loop; "
                f'runs_on="{self.name}" needs a plain `def`'
            )

    @property
    def fetch(self) -> "Node[..., Any] | None":
        """A node that fetches the value of a result which stays where the steps run; other values pass unchanged.

        The plan puts this node before steps with another `fetch`, and before the result of the graph: see
        `Site.keeps_result`.
        """
        return None

    def places(self, node: "Node[..., Any]", scope: "Scope") -> Places:
        """Return the places of one call site of a function without `concurrency=`. By default, there is no limit.

        Args:
            node: the node.
            scope: the scope in which the node is wired.
        """
        return NO_LIMIT

    def bind(self, site: "Site") -> Bound:
        """Return the part of this execution that belongs to one call site of a node, in one scope.

        Args:
            site: the call site.
        """
        raise NotImplementedError

    def make_instance(
        self, scope: "Scope", cls: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make the instance of a class that is a node, for one scope. The scope enters and leaves it like `async with`.

        An execution that has instances in another process returns a stand-in. Its `__aenter__` makes the instance
        there, and its `__aexit__` leaves the instance. The supervisor replaces the stand-in after a crash, like any
        instance.

        Args:
            scope: the scope.
            cls: the class.
            args: the arguments of the class.
            kwargs: the keyword arguments of the class.
        """
        return cls(*args, **kwargs)

    def bind_batch(
        self, fn: Callable[[list[Any]], Any], name: str, scope: "Scope"
    ) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        """Return a function that runs batches of a node with `batch=`; without this method, `batch=` is refused.

        Args:
            fn: the function, or the bound method, which takes a list.
            name: the name of the node.
            scope: the scope; it gathers the items.

        Returns:
            A function that handles a batch. If it has an attribute `figures`, this is called like `Bound.figures`.
        """
        raise NotImplementedError

    @property
    def _takes_batches(self) -> bool:
        """Whether nodes with `batch=` may run here."""
        kind = type(self)
        return kind.bind_batch is not Execution.bind_batch or kind._batcher is not Execution._batcher

    def _limits(self, node: "Node[..., Any]", scope: "Scope", instance: object) -> Places:
        """Return the places of one call site of a node.

        Args:
            node: the node.
            scope: the scope in which the node is wired.
            instance: the child of the supervisor, for a stateful node or an actor that owns its loop; None for others.
        """
        if node.policy.ordered:  # an item that waits for its turn holds no place that the item before it needs
            return Places()
        if instance is not None and self.has_one_instance:
            return Places(node._shared_places, 0, instance)
        if node.policy.concurrency is not None:
            return Places(node.policy.concurrency, 0, node.origin)
        limit, ahead, key = self.places(node, scope)
        return Places(limit, items_ahead(node.policy, ahead), key)

    def script_uses_engine(self) -> None:
        """Note that the main script uses an Engine while it is imported, in a process that `multiprocessing` has begun.

        An execution that has started this process ends it here: it would run the script again.
        """

    def _of_fake(self, node: "Node[..., Any]") -> "Execution":
        """Return the execution of a fake that `testing.replace` has put in the place of the function of the node."""
        return self if self._is_here else as_execution("loop" if node._reads_streams else "thread")

    def _bound_by(self, node: "Node[..., Any]") -> "LimitedBy":
        """Return the name of the limit on the places of a call site, for a profile."""
        return self.pool or "concurrency"

    def _make_loop(self, node: "Node[..., Any]", scope: "Scope") -> "OwnsLoop":
        """Make the object that runs the loop of a node in one scope."""
        raise NotImplementedError

    def _batcher(self, fn: Callable[..., Any], batch: "Batch", most: int, name: str, scope: "Scope") -> "OwnsLoop":
        """Make the object that gathers items in one scope for a function of a list; `most` batches run at a time."""
        from ..actors.batching import Batcher  # few programs need it

        return Batcher(self.bind_batch(fn, name, scope), batch, most, name)

    def _directly(self, actor: "NodeActor") -> None:
        """Have workers run a step in the quickest way; the step has no policy, no gate, no stream and no order."""
        actor.begin = actor.bound._begin

    def _check_reload(self, old: Any, new: Any) -> None:
        """Raise if a node cannot take the new value of a resource in place of the old one.

        Args:
            old: the value of the resource until now; the resource keeps it if this method raises.
            new: the value after the reload.
        """

    async def _warm_up(
        self, site: "CallSite", pools: "Pools", device_strategy: str, resources: "Mapping[str, Any]"
    ) -> None:
        """Prepare the node, for instance compile it, so that the first item does not wait for the preparation.

        Args:
            site: the call site of the node.
            pools: the pools of the Engine.
            device_strategy: the execution option of the scope.
            resources: the arguments that come from resources, by parameter.

        Raises:
            PlanError: the shapes of the items are not known.
        """

    def _programs(self) -> "list[ProgramMemory]":
        """Return the memory of the compiled programs; this may take long, so it is called in a thread."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        if _named.get(self.name) is not self:
            raise TypeError(f"the execution {self.name!r} does not pickle: another execution has taken its name")
        return _execution, (type(self), self.name)


def _class_of(execution: Execution) -> tuple[str, str]:
    """Return the name of the class. Compare names, since a notebook or a reload makes the class again."""
    return type(execution).__module__, type(execution).__qualname__


def _execution(kind: type[Execution], name: str) -> Execution:
    """Return the execution of this process with a name; `pickle` imports the module of its class before."""
    found = _named.get(name)
    if found is None:
        raise LookupError(f"this process has no {kind.__name__} named {name!r}: first import the module that makes it")
    return found


RunsOn: TypeAlias = Literal["loop", "thread", "process"] | Execution
"""The values of `runs_on=`: how the steps of a node run."""

RUNS_ON: Final = OptionRule(
    "one of 'loop', 'thread', 'process', or an Execution of penstock.extension",
    lambda value: isinstance(value, Execution) or (isinstance(value, str) and value in ("loop", "thread", "process")),
)


def as_execution(runs_on: str | Execution) -> Execution:
    """Return the execution with a name; an execution is returned as it is."""
    if not isinstance(runs_on, str):
        return runs_on
    if runs_on not in _named:
        import_module(_LATE[runs_on], __package__)
    return _named[runs_on]


def refuse_spawned_script() -> None:
    """Tell late executions that the main script uses an Engine while a process of `multiprocessing` imports it."""
    started = sys.modules.get("multiprocessing.process")  # without importing it: few programs need it
    if started is not None and getattr(started.current_process(), "_inheriting", False):
        for name in _LATE:
            as_execution(name).script_uses_engine()


def items_ahead(policy: Policy, most: int) -> int:
    """Return how many items of a node, besides the items that run, may wait where the node runs, and not in its inbox.

    Args:
        policy: the policy of the node.
        most: how many items there is room for.
    """
    # None for a hedged node: second attempts would begin because first attempts wait behind other items. None with
    # `max_bytes`: the bytes of an item count while the item is in the inbox.
    if policy.hedge is not None or policy.max_bytes is not None:
        return 0
    return most if policy.capacity is None else min(most, policy.capacity)


class Scope:
    """The resources that the steps of one run, stream or deployment share."""

    if TYPE_CHECKING:
        _pools: Pools
        _threads: ThreadShare | None  # the threads that the scope may use; None for all threads of the Engine
        # Whether a thread node has as many places as the scope has threads; if not, the node has no limit of its own.
        _has_places_in_threads: bool
        _counts_handlers: bool  # whether runs bound how many of their handlers run at a time
        _device_strategy: str
        _max_workers: int | None  # the most items in an `async def` node; None outside of pipelines

    @property
    def max_processes(self) -> int:
        """The most processes that the Engine may start for its nodes: its option `max_processes=`."""
        return self._pools.max_processes

    @property
    def giving(self) -> Callable[[str], Awaitable[bool]] | None:
        """In tests, a function to be awaited with the name of a node before one of its calls leaves this process.

        It may raise, or return True: then the process that gets the call has to die. None without such a fault.
        """
        return fault_at_giving

    @staticmethod
    def worker_started(began: float, ended: float) -> None:
        """Tell profiles that items have waited for the start of a process, while no other process had done any work.

        Args:
            began: when the start began, by `time.perf_counter`.
            ended: when it ended.
        """
        collectors.report(Collector.worker_started, began, ended)

    def pool(
        self,
        key: str,
        open: Callable[[], PoolT],  # noqa: A002 - the word that says it
        *,
        ends_with_scopes: bool = False,
    ) -> PoolT:
        """Return a pool of the Engine, which all scopes of the Engine share; the first call opens the pool.

        Args:
            key: the name of the pool, such as "cluster". An Engine has one pool of each name. The `statistics()` of the
                pool "processes" are `EngineStatistics.processes`.
            open: makes the pool. The Engine closes it with `aclose`, after all scopes.
            ends_with_scopes: whether a default Engine, which no `async with` closes, closes the pool when its last
                scope has ended. Otherwise the pool ends with the loop.

        Raises:
            EngineClosedError: the Engine was closed.
        """
        return self._pools.pool(key, open, ends_with_scopes=ends_with_scopes)

    def instance(self, node: "Node[..., Any]") -> Any:
        """Return the present instance of a class that is a node; a restart replaces the instance.

        Args:
            node: the node, as `Site.node` has it.
        """
        raise NotImplementedError


class Site:
    """A call of a node in a graph, in one scope: the argument of `Execution.bind`.

    Attributes:
        scope: the scope, with everything that its steps share.
        node: the node.
    """

    __slots__ = ("_failover", "_instance", "_place", "_program", "_unit", "node", "scope")

    def __init__(
        self,
        scope: "Scope",
        program: "Program",
        unit: "Unit",
        node: "Node[..., Any]",
        instance: Any,
        failover: "tuple[Wired, Callable[[list[Any]], tuple[Any, ...]]] | None",
        place: Any,
    ) -> None:
        self.scope = scope
        self.node = node
        self._program = program
        self._unit = unit
        # The child of the supervisor of the scope, for a stateful node or an actor that owns its loop.
        self._instance = instance
        self._failover = failover  # the body of the failover, and the function that builds its arguments
        self._place = place  # the `checkpoint.StepCheckpoint` that handles barriers, or None

    @property
    def name(self) -> str:
        """The name of the step in the graph."""
        assert self._unit.step is not None
        return self._unit.step.label

    @property
    def keeps_result(self) -> bool:
        """Whether all steps that read the result accept its stand-in: they have the same `Execution.fetch`."""
        fetch, source, program = self.node.runs_on.fetch, self._unit.source, self._program
        steps = [one.step for one in map(program.units.__getitem__, self._unit.consumers) if source in one.sources]
        is_result = any(read.source == source for read in reads(program.plan.result))
        return fetch is not None and bool(steps) and not is_result and all(_takes(one, source, fetch) for one in steps)

    @property
    def callee(self) -> Callable[..., Any]:
        """The function that another process calls: the node; for a device node, a function that compiles it."""
        return self.node._elsewhere or self.node

    @property
    def resources(self) -> "Mapping[str, Callable[[], AbstractAsyncContextManager[Any]]]":
        """The parameters whose arguments are resources of the graph, each with a function that opens the resource."""
        openings = {source: one for one, source in self._program.plan.trace.resources.items()}
        assert self._unit.step is not None
        found: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {}
        for name, template in self._unit.step.head.named_arguments():
            opening = openings.get(template.source) if isinstance(template, Read) and not template.path else None
            resource: Any = None if opening is None else opening.resource
            if opening is not None and opening.opener is resource.fn:
                found[name] = functools.partial(resource.open, *opening._args, **opening._kwargs)
        return found

    @property
    def _gate(self) -> "RestartGate | None":
        """The gate that attempts pass before they reach the instance; None without an instance that restarts."""
        gate: RestartGate | None = None if self._instance is None else self._instance.gate
        return gate


def _takes(step: "PlannedStep | None", source: int | None, fetch: "Node[..., Any]") -> bool:
    """Whether a step reads a whole value, and accepts the stand-in for it."""
    callee = None if step is None else step.head.callee
    if step is None or not is_node(callee) or (callee is not fetch and callee.runs_on.fetch is not fetch):
        return False
    return not step.head.captured and not any(one.path for one in step.head.reads() if one.source == source)


P = ParamSpec("P")
Ret_co = TypeVar("Ret_co", covariant=True)
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
Owner = TypeVar("Owner")
Rest = ParamSpec("Rest")


class _Changes(TypedDict, Generic[R], total=False):
    """The arguments of `with_policy`, without `failover`."""

    name: str
    timeout_seconds: float | None
    retry: Retry | None
    fallback: Callable[[Exception], R]
    hedge: Hedge | None
    cache: Cache | None


class _AnyChanges(_Changes[Any], total=False):
    failover: Callable[..., Any] | None


# The options of a node that have an effect on each call.
_ACTING: Final = ("concurrency", "timeout_seconds", "retry", "fallback", "failover", "hedge", "cache", "ordered")


class Node(Generic[P, Ret_co]):
    """A function with a policy, made by `penstock.node`.

    Outside of a graph, a call of the node just calls the function. While a graph is traced, a call of the node is
    recorded as a step of the graph. A node pickles by module and name, as a function does.

    Attributes:
        fn: the function itself.
        name: the name of the node in drawings, traces and errors.
        policy: limits, timeout, retry, fallback, and where the function runs.
        origin: the node that this one was copied from, or itself; copies share the limits of their origin.
        template: for an instance of a stateful node, the instance that the user made.
        bound_to: for a method, the instance that it is bound to.
        is_async: whether a call of the node is awaited.
        gives_stream: whether a call of the node gives a stream of values, which is read and not awaited.
        runs_on: how the steps of the node run. While `testing.replace` has a fake in its place: how the fake runs.
    """

    _elsewhere: Any = None  # the function that another process calls in the place of the node
    # engine/graph.py sets this, because it imports this file: it builds the graph of `a >> b`.
    _make_chain: ClassVar[Callable[..., Any]]
    _kind: ClassVar = "node"  # the word for the object in errors

    def __init__(
        self,
        fn: Callable[P, Ret_co],
        policy: Policy,
        *,
        name: str | None = None,
        origin: "Node[..., Any] | None" = None,
        template: object | None = None,
        bound_to: object | None = None,
        runs_on: RunsOn = "loop",
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.policy = policy
        self.name: str = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.origin: Node[..., Any] = self if origin is None else origin
        self.template = template
        self.bound_to = bound_to
        self._runs_on = as_execution(runs_on)
        self._is_stateful = template is not None or self._runs_on._runs_loop
        self.is_async = is_async(fn)
        self.gives_stream = is_generator(fn)
        self._replacement: Callable[..., Any] | None = None
        self._is_watched = True  # until a warning is logged, or not needed, that a handler calls the node as a function
        self._alone: Any = None  # the graph that `penstock.graph(node)` has made
        # A closure, a bound instance or a `partial` could hold a symbolic value, which only arguments may be.
        self._takes_along = not isinstance(fn, types.FunctionType) or fn.__closure__ is not None
        if inspect.isgeneratorfunction(fn):
            raise TypeError(
                f"node {self.name!r} is a `def` with `yield`; write `async def` with `yield`, which makes it a stream "
                "of values, or return a list"
            )
        policy.check_fits(self.name, gives_stream=self.gives_stream, is_stateful=template is not None)
        self._runs_on.check(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Ret_co:
        """Call the function; while a graph is traced, record the call instead."""
        tracer = active()
        if tracer is None:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Ref | PendingRef):
                    refuse_leak("node", self.name, arg)
            if self._is_watched:
                self._watch_call()
            return cast(Ret_co, self._target(*args, **kwargs))
        fewest, most = self._arity
        if kwargs or not fewest <= len(args) <= most:
            self._bound(args, kwargs)  # refuses wrong arguments
        if self._takes_along:
            tracer.check_callee(self.fn, self.name)
            self._check_receiver()
        if tracer.parent is not None and tracer.stands_in_for(self._identity):
            raise PlanError(
                f"{call_location()}: node {self.name!r} comes back to itself by failover=; for another attempt of the "
                "same node, write retry=; for a last resort, write fallback="
            )
        if self.policy.has_bodies:
            return cast(Ret_co, tracer.record(self, args, kwargs, (self._body(tracer, args, kwargs),), is_node=True))
        return cast(Ret_co, tracer.record(self, args, kwargs, is_node=True))

    @functools.cached_property
    def _acting(self) -> list[str]:
        """The names of the given options that have an effect on each call."""
        given = [name for name in _ACTING if getattr(self.policy, name) not in (None, False)]
        return given if self._runs_on._is_inline else [*given, "runs_on"]

    def _watch_call(self) -> None:
        """Log once if a handler calls the node as a function, so that its options do nothing."""
        if not self._acting or not self.origin._is_watched:
            self._is_watched = False
        elif source.get() is not None:
            self.origin._is_watched = False
            logs.warning(
                "node.called_as_function", node=self.name, without=", ".join(self._acting),
                remedy=f"a handler called the node as a function; await ps.call({self.name}, ...) runs it as a step",
            )  # fmt: skip

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: "Node[Concatenate[Owner, Rest], Ret_co]", instance: Owner, owner: type | None = None
    ) -> "Node[Rest, Ret_co]": ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a node that is a method; all bound copies share the limits of the method."""
        if instance is None:
            return self
        bound = types.MethodType(self.fn, instance)
        return Node(
            bound, self.policy, name=self.name, origin=self.origin, bound_to=instance,
            runs_on=self._runs_on,
        )  # fmt: skip

    @property
    def _reads_streams(self) -> bool:
        """Whether the function can read a stream that is passed to it, which needs a function that can suspend."""
        return self.is_async or self.gives_stream

    @property
    def _target(self) -> Callable[..., Any]:
        """The function to call: `fn`, or the fake that `testing.replace` has put in its place."""
        fake = self.origin._replacement
        if fake is None:
            return self.fn
        return fake if self.bound_to is None else types.MethodType(fake, self.bound_to)

    @property
    def runs_on(self) -> Execution:
        """How the steps of the node run. While `testing.replace` has a fake in its place: how the fake runs."""
        return self._runs_on if self.origin._replacement is None else self._runs_on._of_fake(self)

    @property
    def _is_replaced(self) -> bool:
        """Whether a fake is in the place of the function."""
        return self.origin._replacement is not None

    @property
    def _is_plain(self) -> bool:
        """Whether a worker may simply call the function: on the loop, without timeout, retries or fallback."""
        return self.policy.is_once and self._runs_on._is_inline

    @property
    def _shared_places(self) -> int | None:
        """How many items the node handles at a time, over all its call sites; None without a limit.

        An instance of a class handles one item at a time. An actor that owns its loop decides the number itself.
        """
        execution = self._runs_on
        one = 1 if self.template is not None and execution.has_one_instance and not execution._runs_loop else None
        return one if self.policy.concurrency is None else self.policy.concurrency

    @property
    def _has_instance(self) -> bool:
        """Whether each scope has an instance of its own, or runs a loop for the node."""
        return self._is_stateful and self.origin._replacement is None

    @property
    def _binding(self) -> object:
        """A key of the instance that a method is bound to, which the node keeps alive; None for a plain function."""
        return None if self.bound_to is None else id(self.bound_to)

    @property
    def _identity(self) -> tuple[object, ...]:
        """A key that copies with another policy share, while the node lives. By ids: unlike instances may be equal."""
        return id(self.origin), self._binding, id(self.template)

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        """The signature of the function; None for some builtins, which have none."""
        try:
            return signature_of(self.fn)
        except (TypeError, ValueError):
            return None

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters by name; empty if the signature is unknown."""
        return {} if self._signature is None else self._signature.parameters

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        """The annotations of the function that could be resolved, by parameter; "return" for its result."""
        return hints_of(self.fn)

    @overload
    def with_policy(
        self: "Node[P, Coroutine[Any, Any, R]]", *, failover: Callable[P, Coroutine[Any, Any, R]] | None = ...,
        **changes: Unpack[_Changes[R]],
    ) -> "Node[P, Coroutine[Any, Any, R]]": ...  # fmt: skip
    @overload
    def with_policy(
        self: "Node[P, R]", *, failover: Callable[P, R] | None = ..., **changes: Unpack[_Changes[R]]
    ) -> "Node[P, R]": ...
    def with_policy(self, **changes: Unpack[_AnyChanges]) -> "Node[P, Any]":
        """Return a copy of this node with another policy, to be called in its place somewhere.

        The copy shares the limits of this node: `concurrency=8` is eight for both together. An argument that is not
        passed leaves the policy as it is.

        Args:
            name: another name, which identifies the copy in drawings, traces and errors.
            timeout_seconds: how long one attempt may take, in seconds; None for no limit.
            retry: which failures are worth another attempt; None for no retries.
            fallback: a function of the exception, called once after the last attempt has failed; its result becomes
                the result of the node.
            failover: another node, with the same parameters and result, which takes over after the last attempt has
                failed; None for none.
            hedge: when a second attempt begins beside the first; None for never.
            cache: how results are kept for equal calls; None to keep none.

        Returns:
            The copy.

        Raises:
            OptionsError: an option is unknown, or does not accept its value.
        """
        given: dict[str, Any] = {**changes}
        name, known = given.pop("name", self.name), _AnyChanges.__annotations__.keys()
        if shared := (given.keys() - known) & {field.name for field in dataclasses.fields(Policy)}:
            raise OptionsError(
                f"{min(shared)!r} belongs to node {self.name!r} itself, and copies share it: declare it with @node"
            )
        refuse_unknown(given, known, f"{self.name}.with_policy")
        check("name", name, NAME)
        return type(self)(
            self.fn,
            dataclasses.replace(self.policy, **given),
            name=name,
            origin=self.origin,
            template=self.template,
            bound_to=self.bound_to,
            runs_on=self._runs_on,
        )

    def named(self, name: str, /) -> Self:
        """Return a copy of this node with another name, `with_policy(name=name)`.

        A graph that calls one node several times can give each call a name of its own. Tables, spans and drawings show
        this name.

        Args:
            name: the name of the copy.

        Returns:
            The copy; it shares the limits of this node.

        Raises:
            OptionsError: the name is empty, or not a text.
        """
        return cast("Self", self.with_policy(name=name))

    @overload
    def __rshift__(
        self: "Node[P, Coroutine[Any, Any, A]]", following: Callable[[A], Awaitable[B]]
    ) -> "Graph[P, B]": ...
    @overload
    def __rshift__(self: "Node[P, Coroutine[Any, Any, A]]", following: Callable[[A], B]) -> "Graph[P, B]": ...
    @overload
    def __rshift__(self: "Node[P, A]", following: Callable[[A], Awaitable[B]]) -> "Graph[P, B]": ...
    @overload
    def __rshift__(self: "Node[P, A]", following: Callable[[A], B]) -> "Graph[P, B]": ...
    def __rshift__(self, following: Any) -> Any:
        """Build a chain: `following`, a node or a graph, takes the result of this node as its only argument."""
        return Node._make_chain(self, following)

    # `self` is annotated as a function of one argument: so the names of parameters, and those with defaults, are free.
    @overload
    def __rrshift__(  # type: ignore[misc]
        self: Callable[[AsyncIterator[A]], AsyncIterator[B]], before: AsyncIterator[A]
    ) -> AsyncIterator[B]: ...
    @overload
    def __rrshift__(  # type: ignore[misc]
        self: Callable[[AsyncIterator[A]], Coroutine[Any, Any, B]], before: AsyncIterator[A]
    ) -> Coroutine[Any, Any, B]: ...
    @overload
    def __rrshift__(  # type: ignore[misc]
        self: Callable[[A], Awaitable[B]], before: AsyncIterator[A]
    ) -> AsyncIterator[B]: ...
    @overload
    def __rrshift__(self: Callable[[A], B], before: AsyncIterator[A]) -> AsyncIterator[B]: ...
    @overload
    def __rrshift__(  # type: ignore[misc]
        self: Callable[[A], Awaitable[B]], before: Callable[Rest, Awaitable[A]]
    ) -> "Graph[Rest, B]": ...
    @overload
    def __rrshift__(  # type: ignore[misc]
        self: Callable[[A], Awaitable[B]], before: Callable[Rest, A]
    ) -> "Graph[Rest, B]": ...
    @overload
    def __rrshift__(self: Callable[[A], B], before: Callable[Rest, Awaitable[A]]) -> "Graph[Rest, B]": ...
    @overload
    def __rrshift__(self: Callable[[A], B], before: Callable[Rest, A]) -> "Graph[Rest, B]": ...
    def __rrshift__(self, before: Any) -> Any:
        """Read a stream, as a whole or value by value; or build a chain that begins with a stateful node."""
        return Node._make_chain(before, self)

    def _result_annotation(self) -> Any:
        """Return the annotation of the result; None if unknown."""
        return self._hints.get("return")

    @functools.cached_property
    def _positional(self) -> tuple[str, ...]:
        """The names of the parameters that take positional arguments, without `*args`."""
        kinds = inspect.Parameter
        return tuple(
            name
            for name, one in self._parameters.items()
            if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        )

    def _argument_names(self) -> tuple[str, ...]:
        return self._positional

    @functools.cached_property
    def _arity(self) -> tuple[int, float]:
        """How many positional arguments, at least and at most, are a valid call without keyword arguments.

        A call with a number in between needs no `Signature.bind`, which is slow.
        """
        kinds = inspect.Parameter
        if self._signature is None:
            return 0, math.inf
        parameters = self._parameters
        if any(one.kind is kinds.KEYWORD_ONLY and one.default is kinds.empty for one in parameters.values()):
            return 1, 0  # an empty range: without keyword arguments, no call is valid
        fewest = sum(parameters[name].default is kinds.empty for name in self._positional)
        unlimited = any(one.kind is kinds.VAR_POSITIONAL for one in parameters.values())
        return fewest, math.inf if unlimited else len(self._positional)

    @property
    def _is_effect(self) -> bool:
        """Whether calls of the node keep their place in the order of the source."""
        return self.policy.effectful is True

    @property
    def _drawn_detail(self) -> str:
        """A line for drawings of the graph: how the policy differs from the default."""
        policy = self.policy
        words = [
            "stream" if self.gives_stream else "",
            self._runs_on._drawn,
            "stateful" if self.template is not None and not self._runs_on._runs_loop else "",
            f"{policy.concurrency} at once" if policy.concurrency else "",
            f"{policy.retry.attempts or 'unlimited'} attempts" if policy.retry else "",
            f"{policy.timeout_seconds:g} s" if policy.timeout_seconds else "",
            f"failover to {callee_name(policy.failover)}" if policy.failover else "",
            "fallback" if policy.fallback else "",
            f"hedged after {policy.hedge.after_seconds:g} s" if policy.hedge else "",
            "cached" if policy.cache else "",
            "pure" if policy.pure else "",
            "effectful" if policy.effectful else "",
            "unordered" if policy.effectful == "unordered" else "",
            "replaced" if self.origin._replacement is not None else "",
        ]
        return ", ".join(word for word in words if word)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
        """Return the arguments by name; None for a function without a signature."""
        try:
            return None if self._signature is None else self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise GraphTraceError(
                f"{call_location()}: {self._kind} {self.name!r} is called wrongly: {error}; its parameters are "
                f"{self._signature}"
            ) from None

    def _check_receiver(self) -> None:
        # Every scope has an instance of its own, but this method is bound to the instance that the user made.
        if self.bound_to is not None and hasattr(type(self.bound_to).__call__, "_penstock_call"):
            raise GraphTraceError(
                f"{call_location()}: {self.name!r} is a method of the stateful node {type(self.bound_to).__name__!r}; "
                "only __call__ runs on the instance of the scope: call the instance, with an argument that selects "
                "the action"
            )

    def _body(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Trace the body that may run in the place of the function: its computation for the cache, or its failover.

        Raises:
            PlanError: the failover does not fit this node.
        """
        where, other = f"{call_location()}: node {self.name!r}", self.policy.failover
        option = "cache=" if other is None else "failover="
        if any(tracer.is_stream(arg) for arg in (*args, *kwargs.values())):
            raise PlanError(
                f"{where} has {option} and reads a stream, whose values can be read only once; read the stream in an "
                "earlier node, and pass the result of that node on"
            )
        if self.policy.cache is not None:
            computed = self.with_policy(cache=None)
            return tracer.instead("computed", computed, lambda: computed(*args, **kwargs))
        assert other is not None
        name = callee_name(other)
        if self._runs_on._donates:
            raise PlanError(
                f"{where} has failover= and donate=True: it may have overwritten the arguments that {name!r} needs; "
                "leave out one of the two options"
            )
        trace = tracer.instead("failover", other, lambda: other(*args, **kwargs), self._identity)
        if trace.gives_stream != self.gives_stream:
            raise PlanError(
                f"{where} gives {'a stream' if self.gives_stream else 'one value'}, and its failover {name!r} does "
                "not; take a failover with the parameters and the kind of result of the node"
            )
        return trace

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the node by module and name, as a function, and a method by its instance and name."""
        if self.bound_to is not None and self.template is None:
            for cls in type(self.bound_to).__mro__:
                for attribute, one in vars(cls).items():
                    if is_node(one) and (one.origin, one.policy, one.name) == (self.origin, self.policy, self.name):
                        return getattr, (self.bound_to, attribute)
        return global_name(self, self.fn) or refuse_pickle(f"node {self.name!r}", self.fn)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # like a function

    def __repr__(self) -> str:
        return f"<Node {printable(self.name)}>"


def callee_name(called: Any) -> str:
    """Return the name of a node, of a graph, or of the class of another object, such as a stateful instance."""
    return str(getattr(called, "name", None) or type(called).__name__)


def is_node(value: object) -> TypeGuard[Node[..., Any]]:
    """Whether a value is a node; for type checkers, a node with unknown parameters."""
    return isinstance(value, Node)


def global_name(value: object, fn: Callable[..., Any]) -> str | None:
    """Return the name of a node or graph in the module of its function; None without a name there."""
    namespace = vars(sys.modules[fn.__module__]) if fn.__module__ in sys.modules else {}
    first, *others = str(getattr(fn, "__qualname__", "")).split(".")
    found: Any = namespace.get(first)
    for name in others:
        found = getattr(found, name, None)
    if found is value:
        return ".".join((first, *others))
    return next((name for name, other in namespace.items() if other is value), None)


def refuse_pickle(what: str, fn: Callable[..., Any]) -> NoReturn:
    """Raise the error for a node or graph that has no name of its own in a module."""
    from pickle import PicklingError  # here, because few programs need it

    qualname = getattr(fn, "__qualname__", type(fn).__qualname__)
    raise PicklingError(
        f"{what} does not pickle: nodes and graphs pickle by module and name, and module {fn.__module__!r} has no "
        f"name for it (its function is {qualname!r}); define it at the top level of that module, under its own name"
    )


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether a call of `fn` has to be awaited."""
    fn = unwrapped(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def is_generator(fn: Callable[..., Any]) -> bool:
    """Whether a call of `fn` gives many values, one after the other: an async generator, or a class of iterators."""
    fn = unwrapped(fn)
    if isinstance(fn, type):
        return issubclass(fn, AsyncIterator)
    return inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(type(fn).__call__)


@dataclass(frozen=True)
class CallSite:
    """The place where a node is called in a graph, with facts for the executor.

    Attributes:
        node: the node.
        label: the name of the step in the graph, for errors.
        resources: the parameters whose arguments come from resources: the same object for all items, until a reload.
        constants: the arguments that are the same for all items, by parameter: values in the source of the graph, and
            defaults.
        returns_pending: whether only nodes with an execution of the same kind read the result. Then the execution may
            pass the result on before it is ready; all other readers need a finished value.
        owned: the parameters whose arguments only this call reads, in one attempt: the execution may overwrite their
            memory.
        state: the parameter that gets the state of a loop, or None. The execution may overwrite the state in place,
            where `Frame.owns_state`, except for the parts that were emitted.
    """

    node: Node[..., Any]
    label: str
    resources: frozenset[str]
    constants: Mapping[str, Any]
    returns_pending: bool
    owned: frozenset[str]
    state: str | None
