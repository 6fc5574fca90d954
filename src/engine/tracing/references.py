"""The objects that the names in the body of a graph referred to when it was traced, and whether they have changed.

A graph is traced once, so a name that is rebound afterwards (a notebook cell, `monkeypatch`, `self.k = 4`) must lead
to a new trace. `References` remembers the objects. `changed()` runs before each call, so it is built for speed: one
identity comparison for each name without attributes.

`changed()` compares all global, closure and attribute names in the source of the function. Without source, it compares
the names in the code object, without attributes. Undefined names count as well, since they may be defined later. So do
names in the plain functions of the same module that the graph calls, because their bodies run while tracing. The
contents of containers are not compared, nor objects that an attribute makes anew at each access.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Final, NamedTuple, cast

from ...actors.current import codes_of
from ...telemetry.text import MAX_NAME_COLUMNS, printable, shorten
from .source import locate
from .template import SCALARS, exact

MISSING: Final = object()


class _Path(NamedTuple):
    """One expression `name.attribute.attribute` of a body."""

    scope: str  # "global", "closure" or "local"
    names: tuple[str, ...]


class _Lookup(NamedTuple):
    """The object that a name refers to in one namespace: the globals, an instance or a class."""

    namespace: Mapping[str, object]
    name: str
    expected: object  # MISSING where the namespace does not have the name


class _Chain(NamedTuple):
    """The object that a name with attributes refers to, or a variable of a closure.

    Attributes:
        root: returns the object that the first name refers to now; `MISSING` if there is none.
        names: the first name and the attributes.
        expected: the object that the last attribute referred to.
    """

    root: Callable[[], object]
    names: tuple[str, ...]
    expected: object

    def value(self) -> object:
        """Return the object that the last attribute refers to now; `MISSING` if there is none."""
        value = self.root()
        try:
            for name in self.names[1:]:
                value = getattr(value, name, MISSING)
        except Exception:  # noqa: BLE001 - a user's property may raise anything; an error counts as a change
            return MISSING
        return value


class References(NamedTuple):
    """The objects that the names of graph functions referred to when they were resolved, each once.

    Attributes:
        lookups: the global names, and the attributes that are made anew at each access, where they are stored.
        chains: the other names with attributes, and the variables in closures.
    """

    lookups: tuple[_Lookup, ...] = ()
    chains: tuple[_Chain, ...] = ()

    def changed(self) -> bool:
        """Whether a name now refers to another object than when it was resolved, or to none."""
        return next(self._changes(), None) is not None

    def what_changed(self) -> str:
        """Return the first name that now refers to another object, with its old and new meaning; as text."""
        for name, expected, value in self._changes():
            return f"`{name}` {_change(expected, value)}"
        return "a name that its function uses changed and was changed back"

    def _changes(self) -> Iterator[tuple[str, object, object]]:
        """Yield the names that now refer to other objects, each with its old and new object."""
        for namespace, name, expected in self.lookups:
            value = namespace.get(name, MISSING)
            if value is not expected and not _is_same(value, expected):
                yield name, expected, value
        for chain in self.chains:
            value = chain.value()
            if value is not chain.expected and not _is_same(value, chain.expected):
                yield chain.names[-1], chain.expected, value


def resolve_references(
    functions: Iterable[Callable[..., object]], *, is_tracked: Callable[[object], bool]
) -> References:
    """Find the objects that the names in the bodies of functions refer to now.

    Args:
        functions: graph functions, bodies of control flow, or bound methods; other objects have no references.
        is_tracked: whether an object is a node, a graph or a resource.

    Returns:
        The references of the functions, of the functions defined inside them, and of the plain functions of the same
        module that they use.
    """
    resolver = _Resolver(is_tracked)
    for fn in functions:
        resolver.resolve(fn)
    return References(tuple(resolver.lookups.values()), tuple(resolver.chains.values()))


class _Resolver:
    def __init__(self, is_tracked: Callable[[object], bool]) -> None:
        self.is_tracked = is_tracked
        self.lookups: dict[tuple[int, str], _Lookup] = {}
        self.chains: dict[tuple[int, *tuple[str, ...]], _Chain] = {}
        self.waiting: list[object] = []

    def resolve(self, fn: object) -> None:
        seen: set[object] = set()
        self.waiting.append(fn)
        while self.waiting:
            function = self.waiting.pop()
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is not None:
                self.waiting.append(wrapped)
            receiver: object = MISSING
            if isinstance(function, MethodType):
                receiver, function = function.__self__, function.__func__
            if isinstance(function, FunctionType) and function not in seen:
                seen.add(function)
                self.read(function, receiver)

    def read(self, function: FunctionType, receiver: object) -> None:
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        first = code.co_varnames[0] if receiver is not MISSING and code.co_argcount else None
        namespace: dict[str, object] = function.__globals__
        for scope, names in dict.fromkeys(_paths(function, first)):
            if scope == "global":
                place: object = namespace
                root: Callable[[], object] = partial(namespace.get, names[0], MISSING)
            elif scope == "closure":
                place, root = cells[names[0]], partial(cell_contents, cells[names[0]])
            else:
                place, root = receiver, lambda: receiver
            value, count = self.follow(root(), names)
            if count == 1 and scope == "global":
                self.remember(namespace, names[0])
            else:
                chain = _Chain(root, names[:count], MISSING)
                self.chains[id(place), *chain.names] = chain._replace(expected=chain.value())
            if not self.is_tracked(value) and _is_at_home(value, function):
                self.waiting.append(value)

    def follow(self, value: object, names: tuple[str, ...]) -> tuple[object, int]:
        """Follow the attributes of a path, up to a tracked object or an error.

        Args:
            value: the object of the first name.
            names: the first name and the attributes.

        Returns:
            The last object; and how many of the names lead to the last object that is not made anew at each access.
        """
        again, steady = value, 1
        for count, name in enumerate(names[1:], 2):
            if value is MISSING or self.is_tracked(value):
                break
            owner = value
            try:
                value, again = getattr(value, name, MISSING), getattr(again, name, MISSING)
            except Exception:  # noqa: BLE001 - a property of the user's may raise anything; the graph meets it itself
                break
            if _is_same(value, again):
                steady = count
            else:
                self.remember_stored(owner, name)
        return value, steady

    def remember(self, namespace: Mapping[str, object], name: str) -> bool:
        """Remember the object of a name in a namespace; return whether there is one."""
        found = _Lookup(namespace, name, namespace.get(name, MISSING))
        self.lookups[id(namespace), name] = found
        return found.expected is not MISSING

    def remember_stored(self, owner: object, name: str) -> None:
        """Remember the object that stores `owner.name`, such as a method, and that no other class hides it."""
        classes: tuple[type, ...] = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        namespaces: list[Mapping[str, object]] = [vars(cls) for cls in classes]
        if not isinstance(owner, type) and hasattr(owner, "__dict__"):
            namespaces.insert(0, vars(owner))
        for namespace in namespaces:
            if self.remember(namespace, name):
                break


def _paths(function: FunctionType, receiver: str | None) -> Iterator[_Path]:
    """Yield the names that a body and the functions inside it load, with their attributes where the source shows them.

    A name of the code object that the source does not mention counts without attributes: there may be no source, or the
    file was edited. Names that are found needlessly do no harm: a variable of a comprehension may have the name of a
    global that is loaded as well.
    """
    code = function.__code__
    used = {name for inner in codes_of(code) for name in inner.co_names}  # global names and attributes
    location, mentioned = locate(function), set[str]()
    for written in () if location is None else location.names:
        # In a class, Python gives a name such as `__limit` the name of the class in front.
        names = tuple([_mangled(name, used) for name in written])
        mentioned.update(names)
        if names[0] == receiver:
            yield _Path("local", names)
        elif names[0] in code.co_freevars:
            yield _Path("closure", names)
        elif names[0] in used:
            yield _Path("global", names)
    yield from (_Path("global", (name,)) for name in sorted(used - mentioned))
    yield from (_Path("closure", (name,)) for name in code.co_freevars if name not in mentioned)


def _mangled(name: str, used: set[str]) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return next((one for one in used if one.endswith(name)), name) if is_private else name


def cell_contents(cell: CellType) -> object:
    """Return the value of a variable in a closure; `MISSING` if nothing has been assigned yet."""
    try:
        return cast("object", cell.cell_contents)
    except ValueError:
        return MISSING


def _change(before: object, after: object) -> str:
    """Return the change of a value in words; numbers and strings are shown, other objects only by their type."""
    if after is MISSING:
        return "has lost its value"
    if before is MISSING:
        return f"has a value now, {_shown(after)}"
    if _shown(before) == _shown(after):
        return f"is another object {_shown(after)}"
    return f"was {_shown(before)} and is {_shown(after)}"


def _shown(value: object) -> str:
    if type(value) in SCALARS:
        return shorten(printable(repr(value)), MAX_NAME_COLUMNS)
    return f"of type {type(value).__name__}"


def _is_same(value: object, other: object) -> bool:
    """Whether two values are the same for a trace: the same object, or equal numbers, strings, or tuples of these."""
    return value is other or exact(value) == exact(other)


def _is_at_home(value: object, function: FunctionType) -> bool:
    """Whether a value is a plain function or method of the same module, so that its body runs while tracing."""
    body = value.__func__ if isinstance(value, MethodType) else value
    return isinstance(body, FunctionType) and body.__globals__ is function.__globals__
