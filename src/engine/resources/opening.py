"""Opening: a resource and the static arguments that it is opened with."""

import inspect
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from ..._errors import ResourceError

if TYPE_CHECKING:
    from .resource import Resource


class Opening:
    """A resource and the static arguments that it is opened with; equal ones are opened once and shared.

    Attributes:
        resource: the resource.
        opener: its function, or the fake that `testing.replace` put in its place when the graph was traced.
        name: name of the resource.
    """

    __slots__ = ("_args", "_hash", "_key", "_kwargs", "name", "opener", "resource")

    def __init__(
        self,
        resource: "Resource[..., Any]",
        opener: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.resource = resource
        self.opener = opener
        self.name = resource.name
        self._args = args
        self._kwargs = kwargs
        self._key = (
            id(resource),
            id(opener),
            tuple([_exact(arg) for arg in args]),
            tuple([(name, _exact(arg)) for name, arg in sorted(kwargs.items())]),
        )
        self._hash = hash(self._key)

    def manager(self) -> "_Opened":
        """Return what opens it once."""
        return _Opened(self)

    def make(self) -> Any:
        """Call the function."""
        return self.opener(*self._args, **self._kwargs)

    @property
    def arguments(self) -> str:
        """The arguments, as one would write them."""
        named = [f"{name}={value!r}" for name, value in self._kwargs.items()]
        return ", ".join([*map(repr, self._args), *named])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opening) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


class _Opened:
    """Runs the function of a resource to its `yield` and, later, to its end."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._generator: AsyncGenerator[Any, None] | None = None

    async def __aenter__(self) -> Any:
        made = self._opening.make()
        if not inspect.isasyncgen(made):  # a fake may just give the value
            return await made if inspect.isawaitable(made) else made
        self._generator = cast("AsyncGenerator[Any, None]", made)
        try:
            return await anext(self._generator)
        except StopAsyncIteration:
            raise ResourceError(
                f"resource {self._opening.name!r} ended without a `yield`: it yields what it opened, once"
            ) from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        generator = self._generator
        if generator is None:
            return
        try:
            # A host that is cancelled, by a loop that is shut down or by a task group of the resource's own, raises
            # at the `yield`, as it would inside any other `async with`.
            await (anext(generator) if error is None else generator.athrow(error))
        except StopAsyncIteration:
            return
        await generator.aclose()
        raise ResourceError(f"resource {self._opening.name!r} yielded twice: it yields what it opened, once")


def _exact(value: object) -> Hashable:
    """Return what tells values apart that are equal and yet not the same, such as 1 and True."""
    if type(value) is tuple:
        return tuple, tuple([_exact(member) for member in cast("tuple[object, ...]", value)])
    return type(value), value
