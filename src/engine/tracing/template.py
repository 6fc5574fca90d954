"""Templates: arguments and results that contain symbolic values, and functions that build their values for a frame."""

import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from collections.abc import Container as Collection
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal, TypeAlias, cast

Values: TypeAlias = list[Any]
Access: TypeAlias = tuple[Literal["attribute", "item"], Any]


@dataclass(frozen=True)
class Constant:
    """A value that is the same for every frame."""

    value: Any


@dataclass(frozen=True)
class Read:
    """The value of a parameter or of a step, or an attribute or item of such a value.

    Attributes:
        source: the number of the value; parameters come first, then steps.
        path: attribute and item accesses, outermost first.
        written: the path as it is written in the graph, if a planning pass has given the value another structure.
    """

    source: int
    path: tuple[Access, ...] = ()
    written: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return the path as it is written in the graph: "[0].T"."""
        if self.written is not None:
            return self.written
        return "".join([f".{what}" if how == "attribute" else f"[{what!r}]" for how, what in self.path])


@dataclass(frozen=True)
class Container:
    """A list, tuple, dict, dataclass or registered pytree; built again for each frame, as in plain Python."""

    kind: type[Any]
    rebuild: Callable[[list[Any]], Any]
    children: "tuple[Template, ...]"
    shape: Hashable  # the keys or fields, since containers of one type may differ in these


Template: TypeAlias = Constant | Read | Container


def capture(value: Any, leaf: Callable[[Any], Template], outside: Collection[Any]) -> Template:
    """Return the template of a value that may contain symbolic values.

    Args:
        value: an argument or a result.
        leaf: returns the template of an object that is not taken apart.
        outside: the objects that exist outside of the graph. These are passed unchanged, while a list written in the
            body of the graph is a new list for each frame, as in plain Python.
    """
    kind: type[Any] = type(cast("object", value))
    if kind in SCALARS:
        return Constant(value) if kind is not str else leaf(value)
    parts = _take_apart(value, kind)
    if parts is None or (kind is not tuple and value in outside):
        return leaf(value)
    children, rebuild, shape = parts
    templates = tuple([capture(child, leaf, outside) for child in children])
    if kind not in _MUTABLE and all(isinstance(template, Constant) for template in templates):
        return Constant(value)
    return Container(kind, rebuild, templates, shape)


_Parts: TypeAlias = tuple[Iterable[Any], Callable[[list[Any]], Any], Hashable]
SCALARS: frozenset[type[Any]] = frozenset([int, float, complex, str, bytes, bool, type(None)])
_DICTS: frozenset[type[Any]] = frozenset([dict, OrderedDict, defaultdict])
_MUTABLE: frozenset[type[Any]] = frozenset([list, set, *_DICTS])


def _take_apart(value: Any, kind: type[Any]) -> _Parts | None:
    """Return the children of a container, a function that builds a like container, and its shape; None for a leaf."""
    if kind is list or kind is set:
        return list(value), kind, None
    if kind is tuple:
        return value, tuple, None
    if kind in _DICTS:
        keys = tuple(value)
        shape = tuple([exact(key) for key in keys])
        make = cast("Callable[..., Any]", partial(defaultdict, value.default_factory) if kind is defaultdict else kind)
        return value.values(), lambda children: make(zip(keys, children, strict=True)), shape
    if tuple in kind.__mro__ and hasattr(kind, "_make"):
        return value, cast("Callable[[list[Any]], Any]", kind._make), None  # a NamedTuple
    if dataclasses.is_dataclass(kind):
        return _dataclass_parts(value, kind)
    return _pytree_parts(value)


def _dataclass_parts(value: Any, kind: type[Any]) -> _Parts:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    # __post_init__ may have set attributes that are not fields.
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]

    def rebuild(children: list[Any]) -> Any:
        # Without __init__, which ran when the graph made the original, and may have side effects.
        made: Any = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return [getattr(value, name) for name in names], rebuild, tuple(names)


def _pytree_parts(value: Any) -> _Parts | None:
    """Take a container that is registered with JAX apart, one level deep; None if JAX was not imported."""
    jax: Any = sys.modules.get("jax")
    if jax is None or isinstance(value, Iterator):
        return None

    def is_inside(child: object) -> bool:
        return child is not value

    children, structure = jax.tree_util.tree_flatten(value, is_leaf=is_inside)
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


def with_reads(template: Template, replaced: Callable[[Read], Template]) -> Template:
    """Return the template with each read replaced by the result of `replaced`."""
    if isinstance(template, Read):
        return replaced(template)
    if isinstance(template, Container):
        children = tuple(with_reads(child, replaced) for child in template.children)
        return dataclasses.replace(template, children=children)
    return template


def key(template: Template) -> Hashable:
    """Return a key that two templates share exactly if they build equal values from the same slots.

    The key may be unhashable, like the structure of a pytree: then the template equals no other template.
    """
    if isinstance(template, Constant):
        return ("constant", exact(template.value))
    if isinstance(template, Read):
        return ("read", template.source, tuple([(how, exact(what)) for how, what in template.path]))
    return ("container", template.kind, template.shape, tuple([key(child) for child in template.children]))


def exact(value: Any) -> Hashable:
    """Return a key that distinguishes equal values such as 1, 1.0 and True, or 0.0 and -0.0."""
    kind: type[Any] = type(cast("object", value))
    if kind in SCALARS:
        return kind, repr(value)
    if kind is tuple:
        return kind, tuple([exact(member) for member in value])
    if kind is slice:
        return kind, exact((value.start, value.stop, value.step))
    return kind, id(value)  # the trace keeps the value alive, so its id stays unique


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


def arguments_builder(templates: tuple[Template, ...], slots: Mapping[int, int]) -> Callable[[Values], tuple[Any, ...]]:
    """Return a function that builds the positional arguments of a step."""
    if not templates:
        return lambda values: ()
    if len(templates) > 1 and all(isinstance(t, Read) and not t.path for t in templates):  # one C call for all
        return itemgetter(*(slots[read.source] for read in reads(*templates)))
    builders = [builder(template, slots) for template in templates]
    return lambda values: tuple([build(values) for build in builders])


def keywords_builder(
    templates: Mapping[str, Template], slots: Mapping[int, int]
) -> Callable[[Values], dict[str, Any]] | None:
    """Return a function that builds the keyword arguments of a step; None without keyword arguments."""
    if not templates:
        return None
    builders = [(name, builder(template, slots)) for name, template in templates.items()]
    return lambda values: {name: build(values) for name, build in builders}


def is_known(template: Template, sources: Set[int]) -> bool:
    """Whether a template reads at least one value, and only values with these numbers."""
    read = {read.source for read in reads(template)}
    return bool(read) and read <= sources


def value_of(template: Template, known: Mapping[int, Any]) -> Any:
    """Return the value of a template; `known` has all values that the template reads, by their numbers."""
    slots = {source: slot for slot, source in enumerate(known)}
    return builder(template, slots)([*known.values()])
