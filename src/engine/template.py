"""Templates: argument and result structures with symbolic values in them, and how they are built for each frame."""

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, TypeAlias

Values: TypeAlias = list[Any]
Access: TypeAlias = tuple[Literal["attribute", "item"], Any]


@dataclass(frozen=True)
class Constant:
    """A value that is the same for every frame."""

    value: Any


@dataclass(frozen=True)
class Read:
    """The value of a parameter or of a step, or something inside it.

    Attributes:
        source: number of the value: parameters first, then steps.
        path: attribute and item accesses, outermost first.
    """

    source: int
    path: tuple[Access, ...] = ()


@dataclass(frozen=True)
class Container:
    """A list, tuple, dict, dataclass or registered pytree; built anew for each frame, as plain Python would."""

    rebuild: Callable[[list[Any]], Any]
    children: "tuple[Template, ...]"
    kind: Hashable  # tells containers of different type or keys apart


Template: TypeAlias = Constant | Read | Container


def capture(value: Any, leaf: Callable[[Any], Template | None], shared: frozenset[int]) -> Template:
    """Return the template of a value that may have symbolic values in it.

    Args:
        value: what was passed or returned.
        leaf: says what a symbolic value stands for; None for a value that is not symbolic.
        shared: identities of containers that the graph's globals and closure name: these are passed as they are,
            while a list written in the graph's body is a new one for each frame, as in plain Python.
    """
    found = leaf(value)
    if found is not None:
        return found
    parts = _take_apart(value)
    if parts is None:
        return Constant(value)
    children, rebuild, kind = parts
    templates = tuple(capture(child, leaf, shared) for child in children)
    is_constant = all(isinstance(template, Constant) for template in templates)
    if is_constant and (id(value) in shared or not isinstance(value, list | dict | set)):
        return Constant(value)
    return Container(rebuild, templates, kind)


def _take_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Hashable] | None:
    """Return the children of a container, how to build one like it, and what tells it from others; None for a leaf."""
    kind = type(value)
    if kind is list:
        return value, list, kind
    if kind is set:
        return list(value), set, kind
    if kind is tuple:
        return list(value), tuple, kind
    if kind is dict:
        keys = tuple(value)
        return list(value.values()), lambda children: dict(zip(keys, children, strict=True)), (kind, keys)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return list(value), lambda children: kind(*children), kind
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass_parts(value)
    return _pytree_parts(value)


def _dataclass_parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Hashable]:
    names = tuple(field.name for field in dataclasses.fields(value))
    kind = type(value)

    def rebuild(children: list[Any]) -> Any:
        # Not through __init__: it may have side effects, and already ran when the graph built the original.
        made = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return [getattr(value, name) for name in names], rebuild, kind


def _pytree_parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Hashable] | None:
    """Take a container apart that is registered with JAX, one level deep; JAX is used only if somebody loaded it."""
    jax = sys.modules.get("jax")
    if jax is None or value is None:
        return None
    children, structure = jax.tree_util.tree_flatten(value, is_leaf=lambda child: child is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return children, lambda built: jax.tree_util.tree_unflatten(structure, built), structure


def reads(*templates: Template) -> Iterator[Read]:
    """Yield every read in the templates, in order."""
    stack: list[Template] = list(reversed(templates))
    while stack:
        template = stack.pop()
        if isinstance(template, Read):
            yield template
        elif isinstance(template, Container):
            stack.extend(reversed(template.children))


def renumber(template: Template, sources: Mapping[int, int]) -> Template:
    """Return the template with its sources replaced, where `sources` has a replacement."""
    if isinstance(template, Read):
        return Read(sources.get(template.source, template.source), template.path)
    if isinstance(template, Container):
        children = tuple(renumber(child, sources) for child in template.children)
        return Container(template.rebuild, children, template.kind)
    return template


def key(template: Template) -> Hashable:
    """Return what two templates have in common exactly if they build equal values out of equal slots."""
    if isinstance(template, Constant):
        value = template.value
        # 1, 1.0 and True are equal, yet different arguments; anything beyond plain scalars is compared by identity.
        scalar = isinstance(value, int | float | str | bytes | None)
        return ("constant", type(value), value if scalar and value == value else id(value))
    if isinstance(template, Read):
        return ("read", template.source, tuple((how, type(what), what) for how, what in template.path))
    return ("container", template.kind, tuple(key(child) for child in template.children))


def builder(template: Template, slots: Mapping[int, int]) -> Callable[[Values], Any]:
    """Return a function that builds the value of a template from the slots of a frame."""
    if isinstance(template, Constant):
        value = template.value
        return lambda values: value
    if isinstance(template, Read):
        slot = slots[template.source]
        return itemgetter(slot) if not template.path else _path_reader(slot, template.path)
    rebuild = template.rebuild
    children = [builder(child, slots) for child in template.children]
    return lambda values: rebuild([child(values) for child in children])


def _path_reader(slot: int, path: tuple[Access, ...]) -> Callable[[Values], Any]:
    def read(values: Values) -> Any:
        value = values[slot]
        for how, what in path:
            value = getattr(value, what) if how == "attribute" else value[what]
        return value

    return read


def arguments_builder(
    templates: tuple[Template, ...], slots: Mapping[int, int]
) -> Callable[[Values], tuple[Any, ...]]:
    """Return a function that builds positional arguments; two or more plain values are fetched in one C call."""
    if not templates:
        return lambda values: ()
    if len(templates) > 1 and all(isinstance(t, Read) and not t.path for t in templates):
        return itemgetter(*(slots[read.source] for read in reads(*templates)))
    builders = [builder(template, slots) for template in templates]
    return lambda values: tuple([build(values) for build in builders])


def keywords_builder(
    templates: Mapping[str, Template], slots: Mapping[int, int]
) -> Callable[[Values], dict[str, Any]] | None:
    """Return a function that builds keyword arguments; None if there are none."""
    if not templates:
        return None
    builders = [(name, builder(template, slots)) for name, template in templates.items()]
    return lambda values: {name: build(values) for name, build in builders}
