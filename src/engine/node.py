"""Node: a function, or a class whose instances are called, plus policy."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from .._errors import GraphTraceError
from ..actors.policy import Policy, Retry, RunsOn
from .ref import PendingRef, Ref
from .tracer import active

if TYPE_CHECKING:
    from .graph import Graph

P = ParamSpec("P")
Ret = TypeVar("Ret", covariant=True)
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

_UNCHANGED: Any = object()


class Node(Generic[P, Ret]):
    """A function with a policy, made by `penstock.node`.

    Called outside a graph it is just the function. Called while a graph is traced, it becomes a step of the graph.

    Attributes:
        fn: the function itself.
        name: how it is drawn, traced and named in errors.
        policy: limits, timeout, retry, fallback, where it runs.
        origin: the node that this one is a copy of, or itself; copies share its limits.
        template: for an instance of a stateful node, the instance that the user made.
    """

    def __init__(
        self,
        fn: Callable[P, Ret],
        policy: Policy,
        *,
        name: str | None = None,
        origin: "Node[..., Any] | None" = None,
        template: object | None = None,
    ) -> None:
        self.fn = fn
        self.policy = policy
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self.origin: Node[..., Any] = self if origin is None else origin
        self.template = template
        self.is_async = _is_async(fn)
        self.replacement: Callable[..., Any] | None = None
        functools.update_wrapper(self, fn, updated=())
        _validate(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Ret:
        """Call the function; while a graph is traced, record the call instead."""
        tracer = active()
        if tracer is None:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Ref | PendingRef):
                    _refuse_leak(self.name, arg)
            return self.target(*args, **kwargs)
        _check_arity(self, args, kwargs)
        return cast(Ret, tracer.record(self, args, kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> "Node[..., Ret]":
        """Bind a node that is a method; all bound copies share the limits of the method."""
        if instance is None:
            return self
        bound = types.MethodType(self.fn, instance)
        return Node(bound, self.policy, name=self.name, origin=self.origin)

    @property
    def target(self) -> Callable[..., Any]:
        """The function that runs: this node's own, or the fake that `testing.replace` put in its place."""
        fake = self.origin.replacement
        return self.fn if fake is None else fake

    @property
    def binding(self) -> object:
        """What tells two bindings of one method apart; None for a plain function."""
        return id(self.fn.__self__) if isinstance(self.fn, types.MethodType) else None

    @overload
    def with_policy(
        self: "Node[P, Coroutine[Any, Any, R]]",
        *,
        name: str = ...,
        timeout_seconds: float | None = ...,
        retry: Retry | None = ...,
        fallback: Callable[[Exception], R] = ...,
    ) -> "Node[P, Coroutine[Any, Any, R]]": ...
    @overload
    def with_policy(
        self: "Node[P, R]",
        *,
        name: str = ...,
        timeout_seconds: float | None = ...,
        retry: Retry | None = ...,
        fallback: Callable[[Exception], R] = ...,
    ) -> "Node[P, R]": ...
    def with_policy(
        self,
        *,
        name: str = _UNCHANGED,
        timeout_seconds: float | None = _UNCHANGED,
        retry: Retry | None = _UNCHANGED,
        fallback: Any = _UNCHANGED,
    ) -> "Node[P, Any]":
        """Return a copy with another policy for some call sites; it shares the limits of this node.

        Args:
            name: another name, so that it can be told apart in drawings, traces and errors.
            timeout_seconds: seconds that one attempt may take; None for no limit.
            retry: which failures are worth another attempt; None for none.
            fallback: function of the exception, run once after the last attempt; its result is the node's.
        """
        changes = {"timeout_seconds": timeout_seconds, "retry": retry, "fallback": fallback}
        given = {key: value for key, value in changes.items() if value is not _UNCHANGED}
        return Node(
            self.fn,
            dataclasses.replace(self.policy, **given),
            name=self.name if name is _UNCHANGED else name,
            origin=self.origin,
            template=self.template,
        )

    @overload
    def __rshift__(
        self: "Node[P, Coroutine[Any, Any, A]]", following: "Node[[A], Coroutine[Any, Any, B]] | Graph[[A], B]"
    ) -> "Graph[P, B]": ...
    @overload
    def __rshift__(
        self: "Node[P, A]", following: "Node[[A], Coroutine[Any, Any, B]] | Graph[[A], B]"
    ) -> "Graph[P, B]": ...
    @overload
    def __rshift__(self: "Node[P, Coroutine[Any, Any, A]]", following: "Node[[A], B]") -> "Graph[P, B]": ...
    @overload
    def __rshift__(self: "Node[P, A]", following: "Node[[A], B]") -> "Graph[P, B]": ...
    def __rshift__(self, following: Any) -> Any:
        """Build a chain: the result of this node is the only argument of `following`."""
        from .graph import chain

        return chain(self, following)

    def result_annotation(self) -> Any:
        """Return the annotation of the result, None if unknown."""
        return hints_of(self.fn).get("return")

    def __repr__(self) -> str:
        return f"<Node {self.name}>"


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations of a function; none where they cannot be resolved."""
    function = fn if inspect.isroutine(fn) or inspect.isclass(fn) else getattr(type(fn), "__call__", fn)
    try:
        return typing.get_type_hints(function)
    except Exception:  # names in annotations may not exist at run time (TYPE_CHECKING), or fail in any other way
        return {}


def _is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))


def _validate(node: Node[..., Any]) -> None:
    if inspect.isasyncgenfunction(node.fn) or inspect.isgeneratorfunction(node.fn):
        raise TypeError(f"node {node.name!r} is a generator; a node returns one value for one call")
    if node.is_async and node.policy.runs_on != "loop":
        raise TypeError(
            f"node {node.name!r} is an `async def`, which runs on the event loop; "
            f'runs_on="{node.policy.runs_on}" needs a plain `def`'
        )
    if node.policy.runs_on == "process" and isinstance(node.template, object) and node.template is not None:
        raise TypeError(f'stateful node {node.name!r} cannot run with runs_on="process": its state would stay there')


@functools.lru_cache(maxsize=4096)
def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return None


def _check_arity(node: Node[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = _signature(node.fn)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        from .ref import call_location

        raise GraphTraceError(f"{call_location()}: node {node.name!r}{signature} is called wrongly: {error}") from None


def _refuse_leak(name: str, ref: Ref | PendingRef) -> None:
    raise GraphTraceError(
        f"node {name!r} was called outside a graph with {ref!r}, a value that exists only while its graph is traced; "
        "it leaked out of the graph function through a global, an attribute or a cache"
    )


class _Decorator(Protocol):
    @overload
    def __call__(self, cls: type[T], /) -> type[T]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Node[P, R]: ...


@overload
def node(cls: type[T], /) -> type[T]: ...  # type: ignore[overload-overlap]
@overload
def node(fn: Callable[P, R], /) -> Node[P, R]: ...
@overload
def node(
    *,
    name: str | None = None,
    concurrency: int | None = None,
    capacity: int | None = None,
    max_bytes: int | None = None,
    runs_on: RunsOn = "loop",
    timeout_seconds: float | None = None,
    retry: Retry | None = None,
    fallback: Callable[[Exception], Any] | None = None,
    pure: bool = False,
    effectful: bool = False,
) -> _Decorator: ...
def node(fn: Any = None, /, *, name: str | None = None, **policy: Any) -> Any:
    """Make a node of a function, an async function, or a class whose instances are called.

    Args:
        fn: the function or class, when used without parentheses.
        name: how it is drawn, traced and named in errors; default: the name of the function.
        concurrency: the most items in flight in it at a time, per Engine; default: an `async def` grows on demand,
            a thread or process node has its pool's size, a plain `def` and a stateful node have 1.
        capacity: items that its inbox holds in a pipeline.
        max_bytes: bytes that its inbox holds, for values that know their size (`nbytes`, `bytes`, `str`).
        runs_on: "loop", "thread" or "process", for a plain `def`.
        timeout_seconds: seconds that one attempt may take.
        retry: which failures are worth another attempt.
        fallback: function of the exception, run once after the last attempt; its result is the node's.
        pure: equal arguments give equal results, and nothing else happens: equal calls are merged.
        effectful: it is called for its effect: it stays, although nobody reads its result.

    Returns:
        A `Node`; a class stays a class, and calls of its instances become steps.

    Raises:
        ValueError: a number is out of its range.
        TypeError: the function cannot be a node as asked, e.g. an `async def` with runs_on="thread".
    """

    def decorate(target: Any) -> Any:
        if isinstance(target, Node):
            raise TypeError(f"{target.name!r} is a node already; use {target.name}.with_policy(...) for a copy")
        try:
            made = Policy(**policy)
        except TypeError as error:
            raise TypeError(f"@node: {error}; the options are {', '.join(sorted(_OPTIONS))}") from None
        if isinstance(target, type):
            from .stateful import make_stateful

            return make_stateful(target, made, name)
        if not callable(target):
            raise TypeError(f"@node needs a function or a class, got {target!r}")
        return Node(target, made, name=name)

    return decorate if fn is None else decorate(fn)


_OPTIONS = {"name", *(field.name for field in dataclasses.fields(Policy))}
