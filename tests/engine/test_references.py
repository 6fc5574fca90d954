"""A graph's references: unchanged while its names mean the same objects, changed once a name means another object."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.tracing.references import References, resolve_references


class FakeNode:
    """Stands for a node; with `bind`, it makes a new bound node at every attribute access, as a method does."""

    def __init__(self, bind: bool = False) -> None:
        self.bind = bind

    def __call__(self, *args: object) -> object:
        return self

    def __get__(self, instance: object, owner: type | None = None) -> "FakeNode":
        return FakeNode() if self.bind else self


def is_tracked(value: object) -> bool:
    return isinstance(value, FakeNode)


def references(fn: Callable[..., object]) -> References:
    return resolve_references([fn], is_tracked=is_tracked)


def define(source: str, /, **namespace: Any) -> tuple[Callable[..., object], dict[str, Any]]:
    """Defines `graph` from source text without a file; returns the function and its globals."""
    exec(source, namespace)
    return namespace["graph"], namespace


# Places that can hold nodes. They are source text, so that every case can change its own classes.
PLACES = """
import linecache
class Policed(FakeNode):
    def with_policy(self, **policy):
        return FakeNode()
class Holder:
    fetch = FakeNode()
    bound = FakeNode(bind=True)
    setting = 3
    def method(self): ...
    @property
    def fresh(self):
        return FakeNode()
    @property
    def doubled(self):
        return 1000 * self.setting
    @property
    def snapshot(self):
        return SimpleNamespace(setting=self.setting, rows=[])
    @property
    def broken(self):
        raise LookupError
class Limits:
    __slots__ = ("setting", "holder", "ticks")
    def __init__(self):
        self.setting, self.holder, self.ticks = 3, Holder(), 0
    @property
    def clock(self):
        self.ticks += 1
        return self.ticks
class Child(Holder): ...
class Slotted:
    __slots__ = ("fetch",)
    def __init__(self):
        self.fetch = FakeNode()
class Lazy:
    def __init__(self):
        self._found = {"fetch": FakeNode()}
    def __getattr__(self, name):
        try:
            return self._found[name]
        except KeyError:
            raise AttributeError(name) from None
"""

BODY = "async def graph(query):\n    return await {}(query)\n"
READING = "async def graph(query):\n    return {}\n"

# The callee of the body, a statement that sets up the globals, and statements that each make the trace stale.
CHANGES = [
    ("fetch", "fetch = FakeNode()", ["fetch = FakeNode()", "del fetch", "fetch = 3"]),
    ("fetch", "fetch = lambda query: query", ["fetch = FakeNode()"]),
    ("fetch", "fetch = None", ["fetch = FakeNode()"]),
    ("fetch", "pass", ["fetch = FakeNode()"]),
    ("filter", "pass", ["filter = FakeNode()"]),
    ("fetch", "fetch = len", ["fetch = max"]),
    ("Request", "Request = Holder", ["Request = Child"]),
    ("holder.fetch", "holder = SimpleNamespace(fetch=FakeNode())", [
        "holder.fetch = FakeNode()", "del holder.fetch", "del holder", "holder = SimpleNamespace(fetch=FakeNode())",
    ]),
    ("holder.fetch", "holder = SimpleNamespace()", ["holder.fetch = FakeNode()"]),
    ("a.b.fetch", "a = SimpleNamespace(b=SimpleNamespace(fetch=FakeNode()))", [
        "a.b.fetch = FakeNode()", "a.b = SimpleNamespace()",
    ]),
    ("holder.fetch", "holder = Holder()", ["holder.fetch = FakeNode()", "Holder.fetch = FakeNode()"]),
    ("holder.fetch", "holder = Child()", ["Child.fetch = FakeNode()"]),
    ("holder.bound", "holder = Holder()", ["holder = Holder()", "Holder.bound = FakeNode(bind=True)"]),
    ("holder.bound", "holder = Child()", ["Child.bound = FakeNode(bind=True)"]),
    ("holder.method", "holder = Holder()", ["holder.method = FakeNode()", "Holder.method = lambda self: None"]),
    ("holder.fresh", "holder = Holder()", ["holder = Holder()"]),
    ("Holder.fetch", "pass", ["Holder.fetch = FakeNode()"]),
    ("Child.fetch", "pass", ["Child.fetch = FakeNode()", "Holder.fetch = FakeNode()"]),
    ("slotted.fetch", "slotted = Slotted()", [
        "slotted.fetch = FakeNode()", "del slotted.fetch", "slotted = Slotted()",
    ]),
    ("lazy.fetch", "lazy = Lazy()", ["lazy._found['fetch'] = FakeNode()", "lazy._found.clear()"]),
    ("linecache.getline", "pass", ["linecache = SimpleNamespace(getline=FakeNode())"]),
]  # fmt: skip

# The same for plain values: an expression that the body reads, its setup, and statements that change it.
VALUES = [
    ("limit", "limit = 3", ["limit = 4", "del limit"]),
    ("limit", "limit = 1", ["limit = True"]),
    ("limit", "limit = 0.0", ["limit = -0.0"]),
    ("f'{title}'", 'title = "a"', ["title = 'b'"]),
    ("sizes[0]", "sizes = (1, 2)", ["sizes = (1, 3)"]),
    ("config['limit']", 'config = {"limit": 3}', ["config = {'limit': 4}"]),
    ("config.get('limit')", 'config = {"limit": 3}', ["config = {'limit': 4}"]),
    ("config.limit", "config = SimpleNamespace(limit=3)", ["config.limit = 4", "config = SimpleNamespace(limit=4)"]),
    ("a.b.limit", "a = SimpleNamespace(b=SimpleNamespace(limit=3))", ["a.b.limit = 4"]),
    ("Holder.setting", "pass", ["Holder = SimpleNamespace(setting=4)", "Holder.setting = 4"]),
    ("holder.setting", "holder = Holder()", ["holder.setting = 4"]),
    ("holder.setting", "holder = Child()", ["Holder.setting = 4"]),
    ("holder.doubled", "holder = Holder()", ["holder.setting = 4"]),
    ("holder.snapshot.setting", "holder = Holder()", ["holder.setting = 4"]),
    ("limits.setting", "limits = Limits()", ["limits.setting = 4"]),
    ("limits.holder.setting", "limits = Limits()", ["limits.holder.setting = 4"]),
    ("limits.holder.doubled", "limits = Limits()", ["limits.holder.setting = 4"]),
    ("helper()", 'helper = lambda: limit\nlimit = 3', ["limit = 4"]),
]  # fmt: skip


def define_among_places(source: str, setup: str) -> tuple[Callable[..., object], dict[str, Any]]:
    return define(f"{PLACES}\n{setup}\n{source}", FakeNode=FakeNode, SimpleNamespace=SimpleNamespace)


@pytest.mark.parametrize(
    ("body", "setup", "statement"),
    [(BODY.format(called), setup, statement) for called, setup, statements in CHANGES for statement in statements]
    + [(READING.format(value), setup, statement) for value, setup, statements in VALUES for statement in statements],
)
def test_what_a_name_means_has_changed(body: str, setup: str, statement: str) -> None:
    graph, namespace = define_among_places(body, setup)
    found = references(graph)
    assert not found.changed()
    exec(statement, namespace)
    assert found.changed()
    assert not references(graph).changed()


@pytest.mark.parametrize(
    ("expression", "setup", "statement"),
    [
        ("limit", "limit = 3000", "limit = 3 * 1000"),
        ("title", "title = 'a b'", "title = ' '.join('ab')"),
        ("sizes", "sizes = (1000, ('a',))", "sizes = (1000, ('a',)) + ()"),
        ("limit", "limit = float('nan')", "limit = float('nan')"),
        ("names", "names = ['a']", "names.append('b')"),
        ("holder.doubled", "holder = Holder()", "holder.other = 4"),
        ("holder.snapshot.rows", "holder = Holder()", "holder.setting = 4"),
        ("limits.clock", "limits = Limits()", "pass"),
        ("limits.holder.method(query)", "limits = Limits()", "limits.setting = 4"),
        ("fetch(query)", "fetch = FakeNode()", "other = FakeNode()"),
        ("fetch(query)", "fetch = FakeNode()", "fetch.attribute = FakeNode()"),
        ("query.other(query)", "other = FakeNode()", "other = FakeNode()"),
        ("holder.bound(query)", "holder = Holder()", "holder.setting = 4"),
        ("holder.fresh(query)", "holder = Holder()", "holder.setting = 4"),
        ("holder.broken(query)", "holder = Holder()", "holder.setting = 4"),
        ("fetch.with_policy(name='x')(query)", "fetch = Policed()", "Policed.with_policy = None"),
    ],
)
def test_equal_values_and_other_names_are_no_change(expression: str, setup: str, statement: str) -> None:
    graph, namespace = define_among_places(READING.format(expression), setup)
    found = references(graph)
    exec(statement, namespace)
    assert not found.changed()


def test_a_closure_is_watched() -> None:
    fetch: Any = FakeNode()
    limit = 3

    async def graph(query: object) -> object:
        return fetch(query, limit)

    found = references(graph)
    assert found.tracked == (fetch,)
    limit = 4
    assert found.changed()
    found = references(graph)
    fetch = FakeNode()
    assert found.changed()
    found = references(graph)
    del fetch
    assert found.changed()
    found = references(graph)
    assert not found.changed()
    fetch = FakeNode()
    assert found.changed()


def test_functions_inside_are_read() -> None:
    first, second, shadowed = FakeNode(), FakeNode(), FakeNode()

    async def graph(query: object) -> object:
        def body(item: object, shadowed: FakeNode) -> object:
            def deeper() -> object:
                return shadowed(item)

            return second(item), deeper

        return [first(one) for one in (1, 2)], body, lambda value: value

    found = references(graph)
    assert set(found.tracked) == {first, second}
    shadowed = FakeNode()
    assert not found.changed()
    second = FakeNode()
    assert found.changed()
    assert shadowed is not None


def test_plain_functions_of_the_same_module_are_read() -> None:
    source = """
async def graph(query):
    return await helper(query)
async def helper(query):
    return await other.clean(query)
class Cleaner:
    def clean(self, query):
        return fetch(query) or graph
other = Cleaner()
"""
    graph, namespace = define(source, fetch=FakeNode())
    found = references(graph)
    assert found.tracked == (namespace["fetch"],)
    namespace["fetch"] = FakeNode()
    assert found.changed()


def test_functions_of_other_modules_are_not_read() -> None:
    helper, namespace = define("def graph(query):\n    return fetch(query)\n", fetch=FakeNode())
    graph, _ = define("async def graph(query):\n    return helper(query)\n", helper=helper)
    found = references(graph)
    namespace["fetch"] = FakeNode()
    assert not found.changed()


def test_a_bound_method_knows_its_instance() -> None:
    class Search:
        fetch = FakeNode(bind=True)

        def __init__(self) -> None:
            self.rank = FakeNode()

        async def graph(self, query: object) -> object:
            return self.fetch(query, self.rank), [self.rank(query) for _ in "ab"]

        async def pair(self, query: object) -> object:
            return [query, self.rank]

        async def nested(self, query: object) -> object:
            return lambda: [self.rank(one) for one in "ab"]

    search = Search()
    found = references(search.graph)
    assert search.rank in found.tracked
    assert not found.changed()
    Search.fetch = FakeNode(bind=True)
    assert found.changed()
    for graph in (search.graph, search.pair, search.nested):
        found = references(graph)
        assert found.tracked[-1] is search.rank
        search.rank = FakeNode()
        assert found.changed()


def test_a_function_behind_a_decorator_is_read() -> None:
    source = """
@functools.wraps(fn)
async def graph(*args):
    return None
"""
    fn, namespace = define(BODY.format("fetch"), fetch=FakeNode())
    graph, _ = define(source, functools=functools, fn=fn)
    found = references(graph)
    assert namespace["fetch"] in found.tracked
    namespace["fetch"] = FakeNode()
    assert found.changed()


@pytest.mark.parametrize("value", [len, 3, FakeNode(), SimpleNamespace, print])
def test_without_bytecode_there_are_no_references(value: Any) -> None:
    found = references(value)
    assert found.tracked == ()
    assert not found.changed()


def test_many_names_need_extended_arguments() -> None:
    count = 35_000
    source = "async def graph(query):\n" + "".join(f"    n{index}(query)\n" for index in range(count))
    graph, namespace = define(source, **{f"n{index}": None for index in range(count)})
    namespace[f"n{count - 1}"] = last = FakeNode()
    found = references(graph)
    assert found.tracked == (last,)
    namespace[f"n{count // 2}"] = FakeNode()
    assert found.changed()


@given(st.data())
def test_random_bodies_track_exactly_the_nodes_they_name(data: st.DataObject) -> None:
    names = [f"n{index}" for index in range(8)]
    used = data.draw(st.lists(st.sampled_from(names), max_size=12))
    forms = [
        "await {}(query)",
        "{} and None",
        "[{}(x) for x in ()]",
        "(lambda v: {}(v))",
        "query.a.b({})",
        "{}(k={}, **{{}})",
        "{} >> {}",
        "other.{}(query).{}",
        "query[{}:{}]",
    ]
    lines = [data.draw(st.sampled_from(forms)).replace("{}", name) for name in used]
    source = "async def graph(query):\n" + "".join(f"    {line}\n" for line in [*lines, "pass"])
    other = SimpleNamespace(**{name: FakeNode() for name in names})
    graph, namespace = define(source, other=other, **{name: FakeNode() for name in names})
    found = references(graph)
    plain = {name for name, line in zip(used, lines, strict=True) if "other." not in line}
    nested = {name for name, line in zip(used, lines, strict=True) if "other." in line}
    expected = {namespace[name] for name in plain} | {getattr(other, name) for name in nested}
    assert set(found.tracked) == expected
    rebound = data.draw(st.sampled_from(names))
    namespace[rebound] = FakeNode()
    assert found.changed() == (rebound in plain)
