"""Stateful nodes: classes whose instances are called, each scope with an instance of its own."""

import functools
import inspect
from typing import Any, TypeVar

from ..actors.policy import Policy
from .node import Node
from .tracer import active

T = TypeVar("T")

_RECIPE = "_penstock_recipe"
_NODE = "_penstock_node"


def make_stateful(cls: type[T], policy: Policy, name: str | None) -> type[T]:
    """Make calls of the instances of a class into steps, in place, so that the class stays what it was."""
    call = getattr(cls, "__call__", None)
    if call is None:
        raise TypeError(f"@node on class {cls.__name__!r} needs a method __call__, which handles one item")
    init = cls.__init__

    @functools.wraps(init)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        # Every scope makes an instance of its own out of the same arguments. A subclass's recipe is the outermost.
        if not hasattr(self, _RECIPE):
            object.__setattr__(self, _RECIPE, (type(self), args, kwargs))
        init(self, *args, **kwargs)

    @functools.wraps(call)
    def record_or_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return call(self, *args, **kwargs)
        return node_of(self)(*args, **kwargs)

    record_or_call._penstock_call = call  # type: ignore[attr-defined]
    record_or_call._penstock_policy = policy  # type: ignore[attr-defined]
    record_or_call._penstock_name = name or cls.__name__  # type: ignore[attr-defined]
    if inspect.iscoroutinefunction(call):
        record_or_call = inspect.markcoroutinefunction(record_or_call) if hasattr(inspect, "markcoroutinefunction") else record_or_call  # type: ignore[assignment]
    cls.__init__ = remember  # type: ignore[method-assign]
    cls.__call__ = record_or_call  # type: ignore[attr-defined]
    return cls


def is_stateful(value: object) -> bool:
    """Whether `value` is an instance of a stateful node, or the class itself."""
    cls = value if isinstance(value, type) else type(value)
    return hasattr(getattr(cls, "__call__", None), "_penstock_call")


def node_of(instance: Any) -> Node[..., Any]:
    """Return the node of an instance that the user made; always the same one."""
    made: Node[..., Any] | None = getattr(instance, _NODE, None)
    if made is None:
        wrapper = type(instance).__call__
        call = functools.partial(wrapper._penstock_call, instance)
        functools.update_wrapper(call, wrapper._penstock_call)
        made = Node(call, wrapper._penstock_policy, name=wrapper._penstock_name, template=instance)
        object.__setattr__(instance, _NODE, made)
    return made


def fresh_instance(template: Any) -> tuple[Any, Any]:
    """Make an instance like `template` for one scope; returns it, and what handles an item."""
    cls, args, kwargs = getattr(template, _RECIPE)
    instance = cls(*args, **kwargs)
    return instance, functools.partial(type(instance).__call__._penstock_call, instance)
