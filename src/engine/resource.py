"""Resource: an object that is opened once and shared, such as an HTTP client, a pool or model weights."""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar, cast, get_args

from .._errors import GraphTraceError, ResourceError
from ..actors.policy import Policy
from .node import Node
from .open_resources import Opening, open_eagerly
from .tracing.ref import call_location, hidden_ref
from .tracing.tracer import Tracer, active

P = ParamSpec("P")
T = TypeVar("T")


class Resource(Node[P, Coroutine[Any, Any, T]], Generic[P, T]):
    """An object that an Engine opens once and that all calls share; made by `penstock.resource`.

    A graph calls it like a node, `client = await http("https://...")`, and passes the value on to nodes. Calls with
    equal arguments share one opening.

    Attributes:
        fn: the async generator function.
        name: the name of the resource in drawings and errors.
    """

    _kind = "resource"

    def __init__(self, fn: Callable[P, AsyncIterator[T]]) -> None:
        super().__init__(cast("Callable[P, Coroutine[Any, Any, T]]", fn), Policy())
        self.is_async, self.gives_stream = True, False  # a call is awaited, although the function is a generator

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Return the opened value, to be awaited in a graph.

        While a graph is traced, the call records that the graph needs the resource. In a graph that is called without
        an engine, the call opens the resource, which is closed when the call of the graph ends.

        Raises:
            GraphTraceError: an argument is not known while the graph is traced, or is not hashable.
            ResourceError: the call is outside of any graph, where nothing would close the resource.
        """
        tracer = active()
        opening = self._opening(args, kwargs, tracer)
        if tracer is not None:
            return cast("Coroutine[Any, Any, T]", tracer.open(opening))
        value: Coroutine[Any, Any, T] | None = open_eagerly(opening)
        if value is None:
            raise ResourceError(
                f"{call_location()}: resource {self.name!r} is called outside of a graph, where nothing closes it; "
                "call it in the graph and pass the value to the node, or, in a test of the resource itself, write "
                f"`async with {self.name}.open(...) as value`"
            )
        return value

    def open(self, *args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        """Return an async context manager that opens the resource without an engine; for tests of the resource."""
        opened: AbstractAsyncContextManager[T] = self._opening(args, kwargs, None).manager()
        return opened

    def with_policy(self, **policy: Any) -> NoReturn:
        """Raise: a resource has no policy, because its callers share one opening.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"resource {self.name!r} has no policy, since its callers share one opening: write `asyncio.timeout` or a "
            "loop of attempts into its function"
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """Return the resource itself: as an attribute of a class, it is not bound to an instance."""
        return self

    def _result_annotation(self) -> Any:
        """Return the annotation of the value that the function yields; None if unknown."""
        return next(iter(get_args(self._hints.get("return"))), None)

    def _opening(self, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Tracer | None) -> Opening:
        if (bound := self._bound(args, kwargs)) is not None:
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
            for name, value in bound.arguments.items():
                self._check_static(name, value)
        if tracer is not None:
            tracer.check_callee(self.fn, self.name)
        return Opening(self, self._target, args, kwargs)

    def _check_static(self, name: str, value: Any) -> None:
        if (hidden := hidden_ref(value)) is not None:
            raise GraphTraceError(
                f"{call_location()}: argument {name!r} of resource {self.name!r} is {hidden!r}, which differs for each "
                "call of the graph; a resource is opened once, with arguments that are known before: make the graph "
                "in a function that takes them (`def build(base_url): ...`), or pass the value to the node that uses "
                "the resource"
            )
        try:
            hash(value)
        except TypeError as error:
            raise GraphTraceError(
                f"{call_location()}: argument {name!r} of resource {self.name!r} cannot be hashed ({error}), but calls "
                "with equal arguments share the resource; pass a string, a number, a tuple or a frozen dataclass"
            ) from None

    def __repr__(self) -> str:
        return f"<Resource {self.name}>"


def resource(fn: Callable[P, AsyncIterator[T]], /) -> Resource[P, T]:
    """Make a resource of an async generator function that opens an object, yields it once, and closes it.

    An Engine opens the resource before the first graph that uses it runs, once for each tuple of arguments. All calls
    share the value. The resource is closed with the Engine, in reverse order of opening; in the default Engine, when
    the last run, stream or deployment that uses it ends. Opening and closing happen in one task, so the function may
    hold task groups and cancel scopes open at its `yield`. That task has an empty context: it sees no variables of any
    caller.

    Args:
        fn: an `async def` with one `yield`. Its arguments must be hashable and known while the graph is traced.

    Returns:
        A `Resource`; in a graph, `await` of a call gives the value that `fn` yields.

    Raises:
        TypeError: `fn` is not an async generator function.
    """
    made: Any = fn  # the check below is for programs without a type checker
    if not inspect.isasyncgenfunction(made):
        remedy = "write `async def` with one `yield`: the code before it opens, the code after it closes"
        raise TypeError(f"@resource needs an async generator function, got {made!r}; {remedy}")
    return Resource(fn)
