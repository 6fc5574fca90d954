"""Stateful nodes: classes whose instances are called; each scope has an instance of its own."""

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

from .._errors import GraphTraceError
from ..actors.loop_host import check_loop, owns_loop, takes_tuples
from ..actors.policy import Policy
from .node import Node, RunsOn, as_execution, is_async
from .tracing.ref import call_location
from .tracing.tracer import active

T = TypeVar("T")

_RECIPE = "_penstock_recipe"


class _Recipe:
    """The class and the arguments of an instance, from which each scope makes its own; the instance keeps the recipe.

    A pickle or a deep copy of the instance gets an empty recipe: the arguments may be of no use in another process.
    """

    __slots__ = ("args", "cls", "kwargs", "node")

    def __init__(self, cls: type[Any] | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None):
        self.cls = cls
        self.args = args
        self.kwargs = kwargs or {}
        self.node: Node[..., Any] | None = None

    def __reduce__(self) -> tuple[type["_Recipe"], tuple[()]]:
        return _Recipe, ()


def make_stateful(cls: type[T], policy: Policy, name: str | None, runs_on: RunsOn) -> type[T]:
    """Change `__init__` and `__call__` of a class, so that calls of its instances in a graph become steps.

    The class is changed in place, so that the class keeps its identity.
    """
    # Not getattr(cls, "__call__"), which would find the method of the metaclass that makes instances.
    call = next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        raise TypeError(f"@node on class {cls.__name__!r} needs a method __call__, which handles one item")
    if cls.__dictoffset__ == 0:
        raise TypeError(f"@node on class {cls.__name__!r}: add '__dict__' to its __slots__, to keep its arguments")
    call = getattr(call, "_penstock_call", call)  # unwrap the method of a base class that is a stateful node
    if owns_loop(cls):
        call = inspect.unwrap(call)
        check_loop(cls, call)
        if policy.restart_on:
            raise TypeError(
                f"@node on class {cls.__name__!r}, which owns its loop: it crashes when its loop raises or returns, "
                "and work.fail(error) is the error of an item; leave out restart_on="
            )
        call = _alone(call)
    execution = as_execution(runs_on)
    # Raises if options do not fit the class.
    Node(call, policy, name=name or cls.__name__, template=cls, runs_on=execution)
    if owns_loop(cls):
        if execution is not as_execution("loop"):
            where = f"@node(runs_on={execution.name!r}) on class {cls.__name__!r}"
            raise TypeError(f"{where}, which owns its loop: leave it out")
        execution = as_execution("own loop")
    has_tuples = owns_loop(cls) and takes_tuples(cls)
    init = cls.__init__

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        # The __init__ of a subclass comes first, and its recipe counts: each scope makes an instance of the subclass.
        if _RECIPE not in self.__dict__:
            object.__setattr__(self, _RECIPE, _Recipe(type(cast("object", self)), args, kwargs))
        init(self, *args, **kwargs)

    @functools.wraps(call)
    def record_or_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_tuples and len(args) > 1:
            args = (args,)
        if active() is not None:
            return node_of(self)(*args, **kwargs)
        recipe: _Recipe | None = self.__dict__.get(_RECIPE)
        if recipe is not None and recipe.node is not None and recipe.node.origin._replacement is not None:
            return recipe.node(*args, **kwargs)
        return call(self, *args, **kwargs)

    init_marks: Any = remember
    init_marks._penstock_remembers = True
    call_marks: Any = record_or_call
    call_marks._penstock_call = call
    call_marks._penstock_policy = policy
    call_marks._penstock_runs_on = execution
    call_marks._penstock_name = name or cls.__name__
    setattr(cls, "__init__", remember)  # noqa: B010 - checkers know that a method is not assigned to
    setattr(cls, "__call__", record_or_call)  # noqa: B010
    for operator in _CHAINS.keys() - set(dir(cls)):
        setattr(cls, operator, _CHAINS[operator])
    return cls


def _before(self: Any, following: Any) -> Any:
    """Build a chain, `instance >> following`."""
    return Node._make_chain(self, following)


def _after(self: Any, before: Any) -> Any:
    """Read a stream, `stream >> instance`, as a whole or value by value; or build a chain."""
    return Node._make_chain(before, self)


# Both, because between two instances of one class Python does not try `__rrshift__`.
_CHAINS = {"__rshift__": _before, "__rrshift__": _after}


def is_stateful(value: object) -> bool:
    """Whether `value` is an instance of a stateful node, or the class itself."""
    cls = value if isinstance(value, type) else type(value)
    return hasattr(cls.__call__, "_penstock_call")


def as_node(value: object) -> Node[..., Any] | None:
    """Return the node of an object: a node itself, or the node of an instance of a stateful node; None otherwise.

    Args:
        value: any object; a class has no node.

    Raises:
        GraphTraceError: a scope could not make an instance like this one.
    """
    if isinstance(value, Node):
        return cast("Node[..., Any]", value)
    return node_of(value) if is_stateful(value) and not isinstance(value, type) else None


def node_of(instance: Any) -> Node[..., Any]:
    """Return the node of an instance that the user made; the same node at each call.

    Raises:
        GraphTraceError: a scope could not make an instance like this one.
    """
    recipe: _Recipe | None = instance.__dict__.get(_RECIPE)
    cls: type[Any] = type(cast("object", instance))
    wrapper: Any = cls.__call__
    if not hasattr(wrapper, "_penstock_call") or not hasattr(cls.__init__, "_penstock_remembers"):
        raise GraphTraceError(
            f"{call_location()}: class {cls.__qualname__!r} derives from a node, but has an __init__ or __call__ of "
            "its own; decorate it with @ps.node as well"
        )
    if recipe is None or recipe.cls is not cls:
        raise GraphTraceError(
            f"{call_location()}: an instance of {cls.__qualname__!r} was made by pickle or copy, not by calling the "
            "class, so a scope cannot make another one like it; make it by calling the class"
        )
    if recipe.node is None or recipe.node.template is not instance:
        # A new recipe, because a shallow copy shares the recipe of the original.
        recipe = _Recipe(cls, recipe.args, recipe.kwargs)
        recipe.node = Node(
            types.MethodType(wrapper._penstock_call, instance),
            wrapper._penstock_policy,
            name=wrapper._penstock_name,
            template=instance,
            runs_on=wrapper._penstock_runs_on,
        )
        object.__setattr__(instance, _RECIPE, recipe)
    assert recipe.node is not None
    return recipe.node


def handler_of(instance: Any) -> Callable[..., Any]:
    """Return the method of an instance that handles an item; a stand-in for an instance is returned itself."""
    call: Any = getattr(type(instance).__call__, "_penstock_call", None)
    return cast("Callable[..., Any]", instance if call is None else types.MethodType(call, instance))


def recipe_of(template: Any) -> tuple[type[Any], tuple[Any, ...], dict[str, Any]]:
    """Return the class and the arguments that `template` was made with."""
    recipe: _Recipe = template.__dict__[_RECIPE]
    assert recipe.cls is not None
    return recipe.cls, recipe.args, recipe.kwargs


def _alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that handles one item outside of a graph, with a new instance, as if it were a scope."""

    @functools.wraps(call)
    async def handle(self: Any, value: Any, /) -> Any:
        return await call(_for_one_scope(self), value)

    @functools.wraps(call)
    async def stream(self: Any, value: Any, /) -> Any:
        async with aclosing(call(_for_one_scope(self), value)) as parts:
            async for part in parts:
                yield part

    return handle if is_async(call) else stream


def _for_one_scope(instance: Any) -> Any:
    recipe: _Recipe | None = instance.__dict__.get(_RECIPE)
    if recipe is None or (cls := recipe.cls) is None or cls is not type(instance):
        return instance
    return cls(*recipe.args, **recipe.kwargs)
