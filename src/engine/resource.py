"""Resource: what is opened once and shared, such as an HTTP client, a pool or model weights."""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Self, TypeVar, cast, get_args

from .._errors import GraphTraceError, ResourceError
from ..actors.policy import Policy
from .node import Node
from .open_resources import Opening, open_eagerly
from .tracing.annotations import signature_of
from .tracing.ref import call_location, hidden_ref
from .tracing.template import Constant
from .tracing.tracer import Tracer, active

if TYPE_CHECKING:
    pass


P = ParamSpec("P")
T = TypeVar("T")


class Resource(Node[P, Coroutine[Any, Any, T]], Generic[P, T]):
    """What is opened once per Engine and static arguments, and closed with it; made by `penstock.resource`.

    A graph calls it like a node, `client = await http("https://...")`, and passes on what it gives.

    Attributes:
        fn: the async generator function.
        name: how it is drawn and named in errors.
    """

    def __init__(self, fn: Callable[P, AsyncIterator[T]]) -> None:
        super().__init__(cast("Callable[P, Coroutine[Any, Any, T]]", fn), Policy())
        self.is_async, self.gives_stream = True, False  # of its calls, not of its function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """In a graph, give what is opened; in a graph that is called without an engine, open it until that ends.

        Raises:
            GraphTraceError: an argument is not known while the graph is traced, or is not hashable.
            ResourceError: called anywhere else, where nobody would close it.
        """
        tracer = active()
        opening = self._opening(args, kwargs, tracer)
        if tracer is not None:
            return cast("Coroutine[Any, Any, T]", tracer.open(opening))
        value: Coroutine[Any, Any, T] | None = open_eagerly(opening)
        if value is None:
            raise ResourceError(
                f"{call_location()}: resource {self.name!r} is called outside of a graph, where nobody would close it; "
                "call it in the graph and pass the value to the node, or, in a test of the resource itself, write "
                f"`async with {self.name}.open(...) as value`"
            )
        return value

    def open(self, *args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        """Return an async context manager that opens it for itself alone, without an engine, for tests of it."""
        opened: AbstractAsyncContextManager[T] = self._opening(args, kwargs, None).manager()
        return opened

    def with_policy(self, **policy: Any) -> NoReturn:
        """Refuse: a resource has no policy.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"resource {self.name!r} has no policy, since its callers share one opening: write `asyncio.timeout` or a "
            "loop of attempts into its function"
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """Return itself: it is not bound to the object that it is an attribute of."""
        return self

    def _result_annotation(self) -> Any:
        """Return the annotation of what it yields, None if unknown."""
        return next(iter(get_args(self._hints.get("return"))), None)

    def _opening(self, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Tracer | None) -> Opening:
        signature = self._signature
        if signature is not None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise GraphTraceError(
                    f"{call_location()}: resource {self.name!r} is called wrongly: {error}; its parameters are "
                    f"{signature}"
                ) from None
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
            for name, value in bound.arguments.items():
                self._check_static(name, value, tracer)
        if tracer is not None:
            tracer.check_callee(self.fn, self.name)
        return Opening(self, self._target, args, kwargs)

    def _check_static(self, name: str, value: Any, tracer: Tracer | None) -> None:
        if (hidden := hidden_ref(value)) is not None:
            raise GraphTraceError(
                f"{call_location()}: argument {name!r} of resource {self.name!r} is {hidden!r}, which each call of the "
                "graph has its own of; a resource is opened once, with arguments that are known before: make the graph "
                "in a function that takes them (`def build(base_url): ...`), or pass the value to the node that uses "
                "the resource"
            )
        try:
            hash(value)
        except TypeError as error:
            raise GraphTraceError(
                f"{call_location()}: argument {name!r} of resource {self.name!r} cannot be hashed ({error}), so nobody "
                "could say which calls share it; pass a string, a number, a tuple or a frozen dataclass"
            ) from None
        if tracer is not None and not isinstance(tracer.template(value, call_location(), self.name), Constant):
            raise AssertionError(f"{value!r} is hashable, without a symbolic value, and yet no constant")

    def __repr__(self) -> str:
        return f"<Resource {self.name}>"


def resource(fn: Callable[P, AsyncIterator[T]], /) -> Resource[P, T]:
    """Make a resource of an async generator function that opens something, yields it once, and closes it.

    In an Engine it is opened when the first graph that uses it is about to run, once for each distinct static
    arguments, and shared by all. It is closed with the Engine, in reverse order of opening; in the default Engine
    when the last run, stream or deployment that uses it ends. Opening and closing happen in one task of its own, in
    an empty context, so it may hold task groups and belongs to no caller.

    Args:
        fn: an `async def` with one `yield`. Its arguments must be hashable and known while the graph is traced.

    Returns:
        A `Resource`; in a graph, `await` of its call gives what it yields.

    Raises:
        TypeError: `fn` is something else, or a method.
    """
    made: Any = fn  # whatever it is, whoever has no type checker is told
    if isinstance(made, Node):
        raise TypeError(
            f"@resource needs an `async def` with one `yield`, and {made!r} is a node or a resource already"
        )
    if not inspect.isasyncgenfunction(made):
        remedy = "write `async def` with one `yield`: what is before it opens, what follows it closes"
        raise TypeError(f"@resource needs an async generator function, got {made!r}; {remedy}")
    around, _, name = made.__qualname__.rpartition(".")
    first = next(iter(signature_of(made).parameters), "")
    if around and not around.endswith("<locals>") and first in ("self", "cls"):
        raise TypeError(
            f"resource {name!r} is a method of {around}; it is shared by all who open it with equal arguments: make it "
            "a function that takes what it needs"
        )
    return Resource(fn)
