"""A graph is traced again once a name that it reads means something else, and is not traced again before."""

import functools
import linecache
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine
from tests.engine.tracing import add, collect, define, define_with_source

# Places that can hold nodes and values. They are source text, so that every case can change its own classes.
PLACES = """
import linecache
from types import SimpleNamespace
def node():
    return ps.node(lambda *values: values)
class Holder:
    fetch = node()
    setting = 3
    def method(self): ...
    @property
    def fresh(self):
        return node()
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
        self.fetch = node()
class Lazy:
    def __init__(self):
        self._found = {"fetch": node()}
    def __getattr__(self, name):
        try:
            return self._found[name]
        except KeyError:
            raise AttributeError(name) from None
"""

# What the graph reads, a statement that sets it up, and statements that each make the trace stale.
CHANGES = [
    ("fetch", "fetch = node()", ["fetch = node()", "del fetch", "fetch = 3"]),
    ("fetch", "fetch = lambda query: query", ["fetch = node()"]),
    ("fetch", "fetch = None", ["fetch = node()"]),
    ("filter", "pass", ["filter = node()"]),
    ("fetch", "fetch = len", ["fetch = max"]),
    ("Request", "Request = Holder", ["Request = Child"]),
    ("holder.fetch", "holder = SimpleNamespace(fetch=node())", [
        "holder.fetch = node()", "del holder.fetch", "del holder", "holder = SimpleNamespace(fetch=node())",
    ]),
    ("a.b.fetch", "a = SimpleNamespace(b=SimpleNamespace(fetch=node()))", [
        "a.b.fetch = node()", "a.b = SimpleNamespace()",
    ]),
    ("holder.fetch", "holder = Holder()", ["holder.fetch = node()", "Holder.fetch = node()", "holder = Holder()"]),
    ("holder.fetch", "holder = Child()", ["Child.fetch = node()"]),
    ("holder.method", "holder = Holder()", ["holder.method = node()", "Holder.method = lambda self: None"]),
    ("holder.fresh", "holder = Holder()", ["holder = Holder()"]),
    ("Holder.fetch", "pass", ["Holder.fetch = node()"]),
    ("Child.fetch", "pass", ["Child.fetch = node()", "Holder.fetch = node()"]),
    ("slotted.fetch", "slotted = Slotted()", ["slotted.fetch = node()", "del slotted.fetch", "slotted = Slotted()"]),
    ("lazy.fetch", "lazy = Lazy()", ["lazy._found['fetch'] = node()", "lazy._found.clear()"]),
    ("linecache.getline", "pass", ["linecache = SimpleNamespace(getline=node())"]),
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
    ("helper()", "helper = lambda: limit\nlimit = 3", ["limit = 4"]),
    ("await inner(query)", "@ps.graph\nasync def inner(x): return fetch(x)\nfetch = node()", ["fetch = node()"]),
    ("await ps.map_each(each, [1])", "def each(x): return fetch(x, limit)\nfetch, limit = node(), 3", [
        "fetch = node()", "limit = 4",
    ]),
]  # fmt: skip

# The same with statements that leave the trace as it is.
NO_CHANGES = [
    ("limit", "limit = 3000", "limit = 3 * 1000"),
    ("title", "title = 'a b'", "title = ' '.join('ab')"),
    ("sizes", "sizes = (1000, ('a',))", "sizes = (1000, ('a',)) + ()"),
    ("limit", "limit = float('nan')", "limit = float('nan')"),
    ("names", "names = ['a']", "names.append('b')"),
    ("holder.doubled", "holder = Holder()", "holder.other = 4"),
    ("holder.snapshot.rows", "holder = Holder()", "holder.setting = 4"),
    ("limits.clock", "limits = Limits()", "pass"),
    ("limits.holder.method", "limits = Limits()", "limits.setting = 4"),
    ("fetch(query)", "fetch = node()", "other = node()"),
    ("query.other", "other = node()", "other = node()"),
    ("holder.fetch(query)", "holder = Holder()", "holder.setting = 4"),
    ("holder.fresh(query)", "holder = Holder()", "holder.setting = 4"),
    ("limit and holder.broken", "holder, limit = Holder(), 0", "holder.setting = 4"),
    ("fetch.with_policy(name='x')(query)", "fetch = node()", "other = 4"),
]


def reading(expression: str, setup: str) -> ps.Graph[..., Any]:
    """Return a traced graph that evaluates an expression."""
    source = f"{PLACES}\n{setup}\n@ps.graph\nasync def g(query):\n    {expression}\n    return query\n"
    return traced(define_with_source(source))


def traced(fn: Any) -> ps.Graph[..., Any]:
    graph: ps.Graph[..., Any] = fn if isinstance(fn, ps.Graph) else ps.graph(fn)
    engine.plan(graph)
    return graph


def is_stale(graph: ps.Graph[..., Any]) -> bool:
    """Whether the next call traces the graph again; with `del`, the new trace fails."""
    traces = graph.statistics().traces
    try:
        engine.plan(graph)
    except ps.GraphTraceError:
        return True
    return graph.statistics().traces > traces


@pytest.mark.parametrize(
    ("expression", "setup", "statement"),
    [(expression, setup, statement) for expression, setup, statements in CHANGES for statement in statements],
)
def test_what_a_name_means_has_changed(expression: str, setup: str, statement: str) -> None:
    graph = reading(expression, setup)
    assert not is_stale(graph)
    exec(statement, graph.fn.__globals__)
    assert is_stale(graph)


@pytest.mark.parametrize(("expression", "setup", "statement"), NO_CHANGES)
def test_equal_values_and_other_names_are_no_change(expression: str, setup: str, statement: str) -> None:
    graph = reading(expression, setup)
    exec(statement, graph.fn.__globals__)
    assert not is_stale(graph)


def test_a_closure_is_watched() -> None:
    step: Any = add
    limit = 3

    async def fn(x: int) -> object:
        return step(x, limit)

    graph = traced(fn)
    limit = 4
    assert is_stale(graph)
    step = collect
    assert is_stale(graph)
    assert not is_stale(graph)
    del step
    assert is_stale(graph)
    step = add
    assert is_stale(graph)


def test_functions_inside_are_read() -> None:
    first: Any = add
    second: Any = add
    shadowed: Any = add

    async def fn(query: object) -> object:
        def body(item: object, shadowed: Any) -> object:
            def deeper() -> object:
                return shadowed(item)

            return second(item), deeper

        _ = [first(one) for one in (1, 2)], body, lambda value: value
        return query

    graph = traced(fn)
    shadowed = collect
    assert not is_stale(graph)
    second = collect
    assert is_stale(graph)
    first = collect
    assert is_stale(graph)
    assert shadowed is first


def test_what_is_read_of_another_module_are_graphs_and_bodies_and_no_plain_functions() -> None:
    source = """
def helper(query):
    return other.clean(query)
class Cleaner:
    def clean(self, query):
        return fetch(query)
other = Cleaner()
@ps.graph
async def g(query):
    return helper(query)
"""
    graph = traced(define_with_source(source, fetch=add))
    names = graph.fn.__globals__
    outer, mapping, calling = (
        traced(define_with_source(f"@ps.graph\nasync def g(x): return {result}", inner=graph, helper=names["helper"]))
        for result in ("await inner(x)", "await ps.map_each(helper, [x])", "helper(x)")
    )
    names["fetch"] = collect
    assert [is_stale(one) for one in (graph, outer, mapping, calling)] == [True, True, True, False]


def test_a_bound_method_knows_its_instance() -> None:
    class Search:
        fetch: Any = ps.node(lambda self, query, rank: query)

        def __init__(self) -> None:
            self.rank: Any = add

        async def graph(self, query: object) -> object:
            return self.fetch(query, 1), [self.rank(query) for _ in "ab"]

        async def pair(self, query: object) -> object:
            return [query, self.rank(query)]

        async def nested(self, query: object) -> object:
            _ = lambda: [self.rank(one) for one in "ab"]  # noqa: E731
            return query

    search = Search()
    graphs = [traced(fn) for fn in (search.graph, search.pair, search.nested)]
    assert not any(map(is_stale, graphs))
    search.rank = collect
    assert all(map(is_stale, graphs))
    Search.fetch = ps.node(lambda self, query, rank: rank)
    assert list(map(is_stale, graphs)) == [True, False, False]


def test_a_function_behind_a_decorator_is_read() -> None:
    fn = define_with_source("async def g(query): return fetch(query)", fetch=add)

    @functools.wraps(fn)
    async def wrapper(query: object) -> object:
        return await fn(query)

    graph = traced(wrapper)
    fn.__globals__["fetch"] = collect
    assert is_stale(graph)


def test_a_private_attribute_is_watched_under_the_name_that_python_gives_it() -> None:
    class Search:
        def __init__(self) -> None:
            self.__rank: Any = add

        def change(self) -> None:
            self.__rank = collect

        async def graph(self, query: object) -> object:
            return self.__rank(query)

    search = Search()
    graph = traced(search.graph)
    search.change()
    assert is_stale(graph)


def test_an_edit_of_the_file_changes_nothing_for_functions_that_were_read() -> None:
    graph = ps.graph(
        define_with_source("async def g(query): return other.fetch(query)", other=SimpleNamespace(fetch=add))
    )
    linecache.cache.pop(graph.fn.__code__.co_filename)
    engine.plan(graph)
    graph.fn.__globals__["other"].fetch = collect
    assert is_stale(graph)


def test_without_source_names_are_watched_and_attributes_are_not() -> None:
    source = """
def helper(query):
    return fetch(query)
@ps.graph
async def no_source(query):
    return helper(query), [other.fetch(one) for one in (1, 2)]
"""
    with structlog.testing.capture_logs() as logged:
        graph = traced(define(source, "no_source", fetch=add, other=SimpleNamespace(fetch=add)))
    names = graph.fn.__globals__
    names["other"].fetch = collect
    assert not is_stale(graph)
    names["fetch"] = collect
    assert is_stale(graph)
    names["other"] = SimpleNamespace(fetch=add)
    assert is_stale(graph)
    (warning,) = [line for line in logged if line["event"] == "graph.source_unavailable"]
    assert "a new value of an attribute that the function reads" in warning["consequence"]


@given(st.data())
def test_random_bodies_are_stale_when_a_node_that_they_name_is_another(data: st.DataObject) -> None:
    names = [f"n{index}" for index in range(8)]
    used = data.draw(st.lists(st.sampled_from(names), max_size=12))
    forms = [
        "{}(query)",
        "{} and None",
        "[{}(x) for x in ()]",
        "(lambda v: {}(v))",
        "lambda: query.a.b({})",
        "dict(k={})",
        "{} >> {}",
        "lambda: other.{}(query).{}",
        "lambda: query[{}:{}]",
    ]
    lines = [data.draw(st.sampled_from(forms)).replace("{}", name) for name in used]
    source = "@ps.graph\nasync def g(query):\n" + "".join(f"    {line}\n" for line in [*lines, "return query"])

    def node() -> Any:
        return ps.node(lambda value: value)

    other = SimpleNamespace(**{name: node() for name in names})
    graph = traced(define_with_source(source, other=other, **{name: node() for name in names}))
    rebound, is_attribute = data.draw(st.sampled_from(names)), data.draw(st.booleans())
    if is_attribute:
        setattr(other, rebound, node())
    else:
        graph.fn.__globals__[rebound] = node()
    named = [(name, "other." in line) for name, line in zip(used, lines, strict=True)]
    assert is_stale(graph) == ((rebound, is_attribute) in named)
