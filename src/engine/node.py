"""Node: a function, or an instance of a class, with a policy; and Executor, which runs the handlers of some nodes."""

import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    cast,
    overload,
)

from .._errors import GraphTraceError, OptionsError, PlanError
from ..actors.accepted import NAME, check, refuse_unknown
from ..actors.policy import Cache, Hedge, Policy, Retry, RunsOn
from ..telemetry.text import printable
from .tracing.annotations import hints_of, signature_of
from .tracing.ref import PendingRef, Ref, call_location, refuse_leak
from .tracing.tracer import Trace, Tracer, active

if TYPE_CHECKING:
    from ..actors.invocation import Carrier
    from ..actors.loop_host import OwnsLoop
    from ..actors.threads import ThreadShare
    from ..telemetry.counters import ProgramMemory
    from .graph import Graph
    from .pools import Pools
    from .program import Pass


# A Protocol, because the engine must not import the floors above it: they make nodes, and bring executors for them.


class Executor(Protocol):
    """Runs the handlers of nodes that run neither on the event loop nor in threads or worker processes."""

    @property
    def label(self) -> str:
        """How a drawing of the graph describes the executor."""
        ...

    @property
    def passes(self) -> "tuple[Pass, ...]":
        """Planning passes over graphs with nodes of this kind; all executors of a kind return the same objects."""
        ...

    @property
    def donates(self) -> bool:
        """Whether a result may take over the memory of arguments."""
        ...

    @property
    def takes_unready(self) -> bool:
        """Whether a node accepts results of other nodes of this kind before they are ready."""
        ...

    def check_reload(self, old: Any, new: Any) -> None:
        """Raise if a node cannot take the new value of a resource in place of the old one.

        Args:
            old: the value of the resource until now; it stays if this raises.
            new: the value after the reload.
        """
        ...

    async def warm_up(
        self, site: "CallSite", pools: "Pools", device_strategy: str, resources: "Mapping[str, Any]"
    ) -> None:
        """Prepare the node, for instance compile it, so that the first item need not wait for that.

        Args:
            site: where the node is called.
            pools: the pools of the Engine.
            device_strategy: the execution option of the scope.
            resources: the arguments that come from resources, by parameter.

        Raises:
            PlanError: the shapes of the items are not known.
        """
        ...

    def programs(self) -> "list[ProgramMemory]":
        """Return what its compiled programs take of memory; it may take a while, and is called in a thread."""
        ...

    def carrier(self, site: "CallSite", pools: "Pools", device_strategy: str) -> "Carrier":
        """Return the carrier that runs the handler, one item a call.

        Args:
            site: where the node is called.
            pools: the pools of the Engine.
            device_strategy: the execution option of the scope.
        """
        ...


P = ParamSpec("P")
Ret_co = TypeVar("Ret_co", covariant=True)
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
Owner = TypeVar("Owner")
Rest = ParamSpec("Rest")

_UNCHANGED: Any = object()

# For a node that owns its loop: makes the object that runs the loop in one scope. It takes the node, the pools of the
# Engine, and the share of threads that the scope has.
MakeLoop: TypeAlias = "Callable[[Node[..., Any], Pools, ThreadShare | None], OwnsLoop]"


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
        make_loop: for a node that owns its loop: makes the object that runs the loop in one scope. Outside of an
            engine there is no loop, and `fn` handles one item.
        executor: what runs the function, if neither the event loop, a thread nor a worker process does.
    """

    # engine/graph.py sets this, because it imports this file: it builds the graph of `a >> b`.
    _make_chain: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        fn: Callable[P, Ret_co],
        policy: Policy,
        *,
        name: str | None = None,
        origin: "Node[..., Any] | None" = None,
        template: object | None = None,
        bound_to: object | None = None,
        make_loop: "MakeLoop | None" = None,
        executor: "Executor | None" = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.policy = policy
        self.name: str = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.origin: Node[..., Any] = self if origin is None else origin
        self.template = template
        self.bound_to = bound_to
        self.make_loop = make_loop
        self.executor = executor
        self.is_async = is_async(fn)
        self.gives_stream = is_generator(fn)
        self._replacement: Callable[..., Any] | None = None
        self._alone: Any = None  # the graph that `penstock.graph(node)` has made
        # A closure, a bound instance or a `partial` could hold a symbolic value, which only arguments may.
        self._takes_along = not isinstance(fn, types.FunctionType) or fn.__closure__ is not None
        if executor is None:  # the maker of a node with an executor has checked the policy against that executor
            check_policy(self.name, fn, policy, is_stateful=template is not None)
            if make_loop is not None and policy.hedge is not None:
                raise TypeError(
                    f"batched node {self.name!r} has hedge=: a second attempt would wait for a batch as well; leave it "
                    "out"
                )
        elif policy.hedge is not None or policy.cache is not None:
            option = "hedge=" if policy.hedge is not None else "cache="
            raise TypeError(f"device node {self.name!r} cannot have {option}; put what it serves into a @node with it")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Ret_co:
        """Call the function; while a graph is traced, record the call instead."""
        tracer = active()
        if tracer is None:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Ref | PendingRef):
                    refuse_leak("node", self.name, arg)
            return cast(Ret_co, self._target(*args, **kwargs))
        fewest, most = self._arity
        if kwargs or not fewest <= len(args) <= most:
            self._check_arity(args, kwargs)
        if self._takes_along:
            tracer.check_callee(self.fn, self.name)
            self._check_receiver()
        if tracer.parent is not None and tracer.stands_in_for(self._identity):
            raise PlanError(
                f"{call_location()}: node {self.name!r} comes back to itself by failover=; for another attempt of the "
                "same node there is retry=, and for a last resort fallback="
            )
        if self.policy.has_bodies:
            return cast(Ret_co, tracer.record(self, args, kwargs, (self._body(tracer, args, kwargs),), is_node=True))
        return cast(Ret_co, tracer.record(self, args, kwargs, is_node=True))

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
            make_loop=self.make_loop, executor=self.executor,
        )  # fmt: skip

    @property
    def _reads_streams(self) -> bool:
        """Whether the function can read a stream that is passed to it: it has to suspend for that."""
        return self.is_async or self.gives_stream

    @property
    def _target(self) -> Callable[..., Any]:
        """The function to call: `fn`, or the fake that `testing.replace` has put in its place."""
        fake = self.origin._replacement
        if fake is None:
            return self.fn
        return fake if self.bound_to is None else types.MethodType(fake, self.bound_to)

    @property
    def _runs_on(self) -> RunsOn:
        """Where a plain function runs; the fake of a process node runs in a thread, since it need not be importable."""
        fake = self.origin._replacement is not None
        return "thread" if fake and self.policy.runs_on == "process" else self.policy.runs_on

    @property
    def _runs_loop(self) -> bool:
        """Whether each scope runs a loop that handles the items; a fake has no loop."""
        return self.make_loop is not None and self.origin._replacement is None

    @property
    def _shared_places(self) -> int | None:
        """How many items the node handles at a time, over all its call sites; None without a limit.

        An instance of a class handles one item at a time, unless it owns its loop, which decides that by itself.
        """
        one = 1 if self.template is not None and self.make_loop is None and not self._is_in_workers else None
        return one if self.policy.concurrency is None else self.policy.concurrency

    @property
    def _is_in_workers(self) -> bool:
        """Whether each worker process has an instance of its own, in place of one in this process."""
        return self.template is not None and self._runs_on == "process"

    @property
    def _runs_in(self) -> "Executor | None":
        """The executor that runs the function; None if there is none, or if a fake replaces the function."""
        return self.executor if self.origin._replacement is None else None

    @property
    def _binding(self) -> object:
        """A key of the instance that a method is bound to; None for a plain function."""
        return None if self.bound_to is None else id(self.bound_to)

    @property
    def _identity(self) -> tuple[object, ...]:
        """A key that copies with another policy share."""
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
        self: "Node[P, Coroutine[Any, Any, R]]",
        *,
        name: str = ...,
        timeout_seconds: float | None = ...,
        retry: Retry | None = ...,
        fallback: Callable[[Exception], R] = ...,
        failover: Callable[P, Coroutine[Any, Any, R]] | None = ...,
        hedge: Hedge | None = ...,
        cache: Cache | None = ...,
    ) -> "Node[P, Coroutine[Any, Any, R]]": ...
    @overload
    def with_policy(
        self: "Node[P, R]",
        *,
        name: str = ...,
        timeout_seconds: float | None = ...,
        retry: Retry | None = ...,
        fallback: Callable[[Exception], R] = ...,
        failover: Callable[P, R] | None = ...,
        hedge: Hedge | None = ...,
        cache: Cache | None = ...,
    ) -> "Node[P, R]": ...
    def with_policy(
        self,
        *,
        name: str = _UNCHANGED,
        timeout_seconds: float | None = _UNCHANGED,
        retry: Retry | None = _UNCHANGED,
        fallback: Any = _UNCHANGED,
        failover: Any = _UNCHANGED,
        hedge: Hedge | None = _UNCHANGED,
        cache: Cache | None = _UNCHANGED,
        **unknown: Any,
    ) -> "Node[P, Any]":
        """Return a copy of this node with another policy, to be called in its place somewhere.

        The copy shares the limits of this node: `concurrency=8` is eight for both together. An argument that is not
        passed leaves the policy as it is.

        Args:
            name: another name, which tells the copy apart in drawings, traces and errors.
            timeout_seconds: how long one attempt may take, in seconds; None for no limit.
            retry: which failures are worth another attempt; None for no retries.
            fallback: a function of the exception, called once after the last attempt has failed; its result becomes
                the result of the node.
            failover: another node, with the same parameters and result, which takes over after the last attempt has
                failed; None for none.
            hedge: when a second attempt begins beside the first; None for never.
            cache: how results are kept for equal calls; None to keep none.
            **unknown: any other option is refused.

        Returns:
            The copy.

        Raises:
            OptionsError: an option is unknown, or does not accept its value.
        """
        if shared := unknown.keys() & {field.name for field in dataclasses.fields(Policy)}:
            raise OptionsError(
                f"{min(shared)!r} belongs to node {self.name!r} itself, and copies share it: declare it with @node"
            )
        refuse_unknown(unknown, cast("Any", self).with_policy, f"{self.name}.with_policy")
        if name is not _UNCHANGED:
            check("name", name, NAME)
        changes = {
            "timeout_seconds": timeout_seconds, "retry": retry, "fallback": fallback, "failover": failover,
            "hedge": hedge, "cache": cache,
        }  # fmt: skip
        given = {key: value for key, value in changes.items() if value is not _UNCHANGED}
        return type(self)(
            self.fn,
            dataclasses.replace(self.policy, **given),
            name=self.name if name is _UNCHANGED else name,
            origin=self.origin,
            template=self.template,
            bound_to=self.bound_to,
            make_loop=self.make_loop,
            executor=self.executor,
        )

    def named(self, name: str, /) -> Self:
        """Return a copy of this node with another name, `with_policy(name=name)`.

        A graph that calls one node several times gives each call a name of its own, which tells them apart in every
        table, span and drawing.

        Args:
            name: the name of the copy.

        Returns:
            The copy; it shares the limits of this node.

        Raises:
            OptionsError: the name is none.
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
        """Build a chain: the result of this node is the only argument of `following`, a node or a graph."""
        return Node._make_chain(self, following)

    # `self` is annotated as a function of one argument: so parameters with defaults, and their names, do not matter.
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
    def _drawn_detail(self) -> str:
        """A line for drawings of the graph: how the policy differs from the default."""
        policy = self.policy
        words = [
            "stream" if self.gives_stream else "",
            policy.runs_on if policy.runs_on != "loop" else "",
            self.executor.label if self.executor is not None else "",
            getattr(self.fn, "_penstock_drawn", "")
            or ("own loop" if self.make_loop else "stateful" if self.template is not None else ""),
            f"{policy.concurrency} at once" if policy.concurrency else "",
            f"{policy.retry.attempts} attempts" if policy.retry else "",
            f"{policy.timeout_seconds:g} s" if policy.timeout_seconds else "",
            f"failover to {_name_of(policy.failover)}" if policy.failover else "",
            "fallback" if policy.fallback else "",
            f"hedged after {policy.hedge.after_seconds:g} s" if policy.hedge else "",
            "cached" if policy.cache else "",
            "pure" if policy.pure else "",
            "effectful" if policy.effectful else "",
            "replaced" if self.origin._replacement is not None else "",
        ]
        return ", ".join(word for word in words if word)

    def _check_arity(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise GraphTraceError(
                f"{call_location()}: node {self.name!r} is called wrongly: {error}; its parameters are "
                f"{self._signature}"
            ) from None

    def _check_receiver(self) -> None:
        # Every scope has an instance of its own, but this method is bound to the instance that the user made.
        if self.bound_to is not None and hasattr(type(self.bound_to).__call__, "_penstock_call"):
            raise GraphTraceError(
                f"{call_location()}: {self.name!r} is a method of the stateful node {type(self.bound_to).__name__!r}; "
                "only __call__ runs on the instance of the scope: call the instance, with an argument that says what "
                "to do"
            )

    def _body(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Trace what may run in the place of the function: its computation for the cache, or its failover.

        Raises:
            PlanError: the failover does not fit this node.
        """
        where, other = f"{call_location()}: node {self.name!r}", self.policy.failover
        option = "cache=" if other is None else "failover="
        if any(tracer.is_stream(arg) for arg in (*args, *kwargs.values())):
            raise PlanError(
                f"{where} has {option} and reads a stream, whose values are gone once they were read; read the stream "
                "in a node before, and pass its result on"
            )
        if self.policy.cache is not None:
            computed = self.with_policy(cache=None)
            return tracer.instead("computed", computed, lambda: computed(*args, **kwargs))
        assert other is not None
        name = _name_of(other)
        if self.executor is not None and self.executor.donates:
            raise PlanError(
                f"{where} has failover= and donate=True: it may have overwritten the arguments that {name!r} needs; "
                "leave out one of both"
            )
        trace = tracer.instead("failover", other, lambda: other(*args, **kwargs), self._identity)
        if trace.gives_stream != self.gives_stream:
            raise PlanError(
                f"{where} gives {'a stream' if self.gives_stream else 'one value'}, and its failover {name!r} does "
                "not; a failover has the parameters and the result of its node"
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
        return self  # as a function

    def __repr__(self) -> str:
        return f"<Node {printable(self.name)}>"


def _name_of(called: Callable[..., Any]) -> str:
    return str(getattr(called, "name", None) or type(cast("object", called)).__name__)


def is_node(value: object) -> TypeGuard[Node[..., Any]]:
    """Whether a value is a node; for type checkers, one with unknown parameters."""
    return isinstance(value, Node)


def global_name(value: object, fn: Callable[..., Any]) -> str | None:
    """Return the name that a node or graph has in the module of its function; None if it has none there."""
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
        f"{what} does not pickle: nodes and graphs do so by module and name, and module {fn.__module__!r} has no name "
        f"for it (its function is {qualname!r}); define it at the top level of that module, under a name of its own"
    )


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether a call of `fn` has to be awaited."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def is_generator(fn: Callable[..., Any]) -> bool:
    """Whether a call of `fn` gives many values, one after the other: an async generator, or a class of iterators."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, type):
        return issubclass(fn, AsyncIterator)
    return inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(type(fn).__call__)


def check_policy(name: str, fn: Callable[..., Any], policy: Policy, *, is_stateful: bool) -> None:
    """Refuse a policy that does not fit the function of a node.

    Raises:
        TypeError: an option of the policy does not apply to such a function, or the function is a plain generator.
    """
    if inspect.isgeneratorfunction(fn):
        raise TypeError(
            f"node {name!r} is a `def` with `yield`; write `async def` with `yield`, which makes it a stream of "
            "values, or return a list"
        )
    if is_generator(fn):
        _check_generator(name, policy)
        return
    if is_async(fn) and policy.runs_on != "loop":
        raise TypeError(
            f"node {name!r} is an `async def`, which runs on the event loop; "
            f'runs_on="{policy.runs_on}" needs a plain `def`'
        )
    if policy.timeout_seconds is not None and policy.runs_on == "loop" and not is_async(fn):
        raise TypeError(
            f"node {name!r} is a plain `def` that runs on the event loop, where nothing can time it out; "
            'use runs_on="thread" or runs_on="process", or an `async def`'
        )
    if policy.hedge is not None and policy.runs_on == "loop" and not is_async(fn):
        raise TypeError(
            f"node {name!r} is a plain `def` that runs on the event loop, where no second attempt begins beside it; "
            'use runs_on="thread" or runs_on="process", or an `async def`'
        )
    if (policy.restart_on or policy.restart != "permanent") and not is_stateful:
        raise TypeError(
            f"node {name!r} is a function, which has nothing to restart; restart= and restart_on= are for "
            "classes, whose instances can be replaced"
        )
    if is_stateful and (policy.hedge is not None or policy.cache is not None):
        option, why = ("hedge=", "attempts") if policy.hedge is not None else ("cache=", "calls that are left out")
        raise TypeError(
            f"stateful node {name!r} cannot have {option}: its state would see other {why}; call a function node inside"
        )
    if policy.runs_on == "process" and is_stateful:
        _check_in_workers(name, policy)


def _check_in_workers(name: str, policy: Policy) -> None:
    """Refuse what supposes one instance, which sees all items."""
    given = {
        "restart=": policy.restart != "permanent",
        "restart_on=": bool(policy.restart_on),
        "ordered=True": policy.ordered,
    }
    for option, is_given in given.items():
        if is_given:
            raise TypeError(
                f'stateful node {name!r} with runs_on="process" has an instance in each worker process, for what is '
                f"slow to make, such as a model, and not for state: {option} does not apply"
            )


def _check_generator(name: str, policy: Policy) -> None:
    reasons = {
        f'runs_on="{policy.runs_on}"': policy.runs_on != "loop" and "its body runs on the event loop, step by step",
        "pure=True": policy.pure and "equal calls would be merged, and a stream has one reader",
        "hedge=": policy.hedge is not None and "a stream that has begun cannot be exchanged",
        "cache=": policy.cache is not None and "a stream is read once, and not kept",
        "max_bytes=": policy.max_bytes is not None and "its stream is bounded by capacity=, in values",
    }
    for option, reason in reasons.items():
        if reason:
            raise TypeError(f"node {name!r} is an async generator, to which {option} does not apply: {reason}")


@dataclass(frozen=True)
class CallSite:
    """Where a node is called in a graph.

    Attributes:
        node: the node.
        label: the name of the step in the graph, for errors.
        resources: the parameters whose arguments come from resources: the same object for all items, until a reload.
        constants: the arguments that are the same for all items, by parameter: values in the source of the graph, and
            defaults.
        is_handed_on: whether only nodes with an executor of the same kind read the result. Then the result may be
            handed to them before it is ready; all other readers need a finished value.
        owned: the parameters whose arguments were handed on, and that this call alone reads, in one attempt: the
            executor may overwrite their memory.
    """

    node: Node[..., Any]
    label: str
    resources: frozenset[str]
    constants: Mapping[str, Any]
    is_handed_on: bool
    owned: frozenset[str]
