"""The source check finds code that a Ref cannot see, and reports file, line and remedy; it reports no other code."""

import functools
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine

# The module that the snippets stand in. The graph of a snippet is `g`; the rest is ordinary code of a user's module.
PRELUDE = """
import asyncio, anyio, collections, functools, time
from contextlib import suppress
from types import SimpleNamespace
import penstock as ps
@ps.node
async def fetch(*values, **options): ...
@ps.node
async def rank(*values): ...
@ps.graph
async def search(query):
    return await fetch(query)
NODES = {"fetch": fetch, "rank": rank}
STAGES = [fetch, rank]
MANY = [fetch] * 20 + [len]
SOURCES = ("wiki", "docs")
CACHE, RESULTS, DEFAULTS = {}, [], collections.defaultdict(dict)
config = SimpleNamespace(rerank=True, name="x", limit=3, client=fetch, extra=None, last=None)
LOCK, EVENT = asyncio.Lock(), asyncio.Event()
counter = 0
class Holder:
    node = fetch
    @staticmethod
    def static(value): return isinstance(value, str)  #! {helper}
    @classmethod
    def of_class(cls, value): return isinstance(value, cls)  #! {helper}
    def method(self, value): return isinstance(value, str)  #! {helper}
holder = Holder()
def kind_of(value, default=None):
    if isinstance(value, str):  #! {helper}
        return value
    return default
def first(values):
    return values[0]
def twice(value):
    return fetch(value), fetch(value)
def once(value):
    fetch(value)
    return None
def itself(value, depth=3):
    return itself(value, depth - 1) if depth else fetch(value)
async def guarded(value):
    try:  #! {helper}
        return await fetch(value)
    except ValueError:
        return None
async def loaded():
    return config.name
def parsed(text):
    try:
        return int(text)
    except ValueError:
        return 0
def maybe(value):
    if config.rerank:
        return fetch(value)
def failing(value):
    raise ValueError(value)
exec("def hidden(value): return value is None", globals())
class Table:
    def __getitem__(self, key):
        raise AssertionError("the check runs nothing of the user's")
table = Table()
def labelled(name, value, extra=None):
    return name if isinstance(value, str) else extra
def pages_of(value):
    yield fetch(value)
    return fetch(value)
def settings():
    global counter
    counter += 1
    return counter
tools = SimpleNamespace(cond=ps.cond)
class Unmarked:
    count = 0
    async def __call__(self, text):
        self.count += 1
        return self.count
    def method(self, text):
        return self.count
    async def with_step(self, text):
        return await fetch(self.count)
    async def passes_on(self, text):
        return await rank(text)
unmarked = Unmarked()
async def undecorated(text):
    return time.time()
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], SimpleNamespace]]:
    """Imports source text as a module with a file of its own."""

    def make(source: str) -> SimpleNamespace:
        path = tmp_path / f"snippet{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        namespace: dict[str, Any] = {"__name__": path.stem}
        exec(compile(source, str(path), "exec"), namespace)
        return SimpleNamespace(**namespace, path=str(path))

    yield make
    linecache.clearcache()


def problems_of(fn: Callable[..., Any], *, is_traced: bool = False) -> list[tuple[str, int, str]]:
    """The file, line number and text of each problem in the error of a graph; empty without an error."""
    try:
        graph = ps.graph(fn)
        if is_traced:
            engine.plan(graph)
    except ps.GraphTraceError as error:
        first, *lines = str(error).splitlines()
        assert is_traced or first == f"{fn.__qualname__} cannot be traced:"
        found = [re.fullmatch(r"(.+?):(\d+): (.+)", line) for line in lines]
        problems = [(match[1], int(match[2]), match[3]) for match in found if match is not None]
        assert problems == sorted(problems, key=lambda problem: problem[1])
        return problems
    return []


FALLBACK = "fallback="
TIMEOUT = "timeout_seconds="
COND = "ps.cond"
SWITCH = "ps.switch"
PARALLEL = "just await each"
INSIDE = "inside a node"
WITH = "@ps.resource"
STORE = "return the value"

# Bodies of `async def g(q, k=2)`. A line that must be reported ends in a comment `#!` with a part of its remedy.
REFUSED = {
    "try": """
        try:  #! {FALLBACK}
            a = await fetch(q)
        except ValueError:
            a = None
        try:  #! {FALLBACK}
            b = q["key"]
        finally:
            print("done")
        try:  #! {FALLBACK}
            c = twice("text")
        except* ValueError:
            c = None
        return a, b, c
    """,
    "try in a plain function of the same module": "return await guarded(q)",
    "asyncio.timeout": "async with asyncio.timeout(3): return await fetch(q)  #! {TIMEOUT}",
    "anyio.fail_after": "with anyio.fail_after(3): return await fetch(q)  #! {TIMEOUT}",
    "anyio.move_on_after": "with anyio.move_on_after(3) as scope: return await fetch(q)  #! {TIMEOUT}",
    "wait_for": "return await asyncio.wait_for(fetch(q), 3)  #! {TIMEOUT}",
    "with around a node": "with suppress(ValueError): return await fetch(q)  #! {WITH}",
    "with on a node's result": "async with await fetch(q) as connection: pass  #! {WITH}",
    "a lock": "async with LOCK: return await fetch(q)  #! {WITH}",
    "is on a parameter": "return await fetch(q) if q is None else q  #! {COND}",
    "is not on a default": "if k is not None: return await fetch(q)  #! {COND}",
    "is on a node's result": "return (await fetch(q)) is None  #! {COND}",
    "is on an inlined graph's result": "return await search(q) is None  #! {COND}",
    "is on an unawaited node": "return fetch(q) is None  #! {COND}",
    "is on the right": "return None is q  #! {COND}",
    "is in a chain": "return 1 < config.limit is q  #! {COND}",
    "match": """
        match (config.limit, await fetch(q)):  #! {SWITCH}
            case (3, None):
                return q
        match q:  #! {SWITCH}
            case None:
                return q
            case q:
                return await fetch(q)
    """,
    "in an empty list": "return q if q in RESULTS else await fetch(q)  #! {COND}",
    "is on an attribute by its name": "return q if getattr(q, 'size', 0) is None else await fetch(q)  #! {COND}",
    "is on an item of a tuple": "return (await fetch(q), 3)[0] is None  #! {COND}",
    "is on an item of a copy": "return [r for r in [await fetch(q)].copy() if r is None]  #! {COND}",
    "is on the last item of a list": "return [await fetch(q)].pop() is None  #! {COND}",
    "isinstance": "if isinstance(q, str): return q  #! {COND}",
    "isinstance of an attribute": "return isinstance(q.a.b[0], str)  #! {COND}",
    "isinstance in a plain function": "return kind_of(q)",
    "isinstance in a static method": "return Holder.static(q)",
    "isinstance in a method": "return holder.method(q)",
    "isinstance in a class method": "return Holder.of_class(q)",
    "type": "return type(q).__name__  #! {COND}",
    "callable": "return callable(q)  #! {COND}",
    "hasattr": "return hasattr(await fetch(q), 'title')  #! {COND}",
    "id": "return id(q)  #! {COND}",
    "gather": "return await asyncio.gather(fetch(q), rank(q))  #! {PARALLEL}",
    "wait": "done, _ = await asyncio.wait([fetch(q)])  #! {PARALLEL}",
    "TaskGroup": "async with asyncio.TaskGroup() as group: group.create_task(fetch(q))  #! {PARALLEL}",
    "anyio task group": "async with anyio.create_task_group() as group: group.start_soon(fetch, q)  #! {PARALLEL}",
    "create_task": "return await asyncio.create_task(fetch(q))  #! {PARALLEL}",
    "sleep": """
        await asyncio.sleep(1)  #! sleep inside a node
        await anyio.sleep(1)  #! sleep inside a node
        return await fetch(q)
    """,
    "to_thread": 'return await asyncio.to_thread(time.sleep, 1)  #! runs_on="thread"',
    "anyio's threads": 'return await anyio.to_thread.run_sync(time.sleep, 1)  #! runs_on="thread"',
    "another awaitable of asyncio": "await EVENT.wait()  #! {INSIDE}",
    "a lock's method": "await LOCK.acquire()  #! {INSIDE}",
    "what is outside of the graph": """
        global counter
        counter += 1  #! {STORE}
        CACHE["last"] = q  #! {STORE}
        RESULTS.append(await fetch(q))  #! {STORE}
        CACHE.update(last=1, **{})
        CACHE.update({"last": q})  #! {STORE}
        CACHE.setdefault("x", q)  #! {STORE}
        config.last = await fetch(q)  #! {STORE}
        config.last = 3
        cache = CACHE
        cache["last"] = [q]  #! {STORE}
    """,
    "nonlocal in a body": """
        seen = 0
        async def body(x):
            nonlocal seen
            seen = x  #! {STORE}
            return await fetch(x)
        return await ps.map_each(body, q)
    """,
    "through assignments": """
        a: object = q
        b, (c, *d) = 1, (2, a)
        e = (f := a.title)
        g, h = await fetch(q)
        first, *rest = q, q
        total = [a]
        total += [a]
        print(e is None)  #! {COND}
        print(f is None)  #! {COND}
        print(g is None)  #! {COND}
        print(rest[0] is None)  #! {COND}
        print(total[0] is None)  #! {COND}
        return d[0] is None  #! {COND}
    """,
    "through a list and a dict": """
        listed, more = [], {}
        for s in SOURCES:
            listed.append(await fetch(s, q))
        print([page for page in listed if page is not None])  #! {COND}
        more["a"] = q
        print(more["a"] is None)  #! {COND}
        pages = {s: await fetch(s, q) for s in SOURCES}
        for name, page in pages.items():
            print(page is None)  #! {COND}
        for page in pages.values():
            print(page is None)  #! {COND}
    """,
    "through pairs": """
        pages = [await fetch(s, q) for s in SOURCES]
        for i, page in enumerate(pages):
            if page is None: return i  #! {COND}
        for s, page in zip(SOURCES, pages):
            if page is None: return s  #! {COND}
        for page in list(reversed(pages[1:])):
            if isinstance(page, str): return page  #! {COND}
        rows = [("a", q), ("b", await fetch("b"))]
        for name in SOURCES:
            rows.append((name, await fetch(name)))
        for name, page in rows:
            if page is None: return name  #! {COND}
    """,
    "through a loop": """
        x, seen = None, []
        for s in SOURCES:
            y = x
            kept = [one for one in seen if one is None]  #! {COND}
            x = await fetch(s, q)
            seen.append(x)
            print(isinstance(x.title, str))  #! {COND}
        return isinstance(y, str), kept
    """,
    "through a plain function": "return first([q]) is None  #! {COND}",
    "through nodes": """
        a, b = twice(config.name)
        print(a is b)  #! {COND}
        careful = fetch.with_policy(timeout_seconds=3)
        print(await careful("text") is None)  #! {COND}
        step = fetch if config.rerank else rank
        print(await step("text") is None)  #! {COND}
        print(await NODES["fetch"]("text") is None)  #! {COND}
        for stage in STAGES:
            if stage("text") is None: return a  #! {COND}
    """,
    "through a recursive function": "return itself(q) is None, q is None  #! {COND}",
    "through a node of an object": "return Holder.node('a') is None, config.client('b') is None  #! {COND}",
    "in a function inside, a key or behind them": """
        x = await fetch(q)
        def helper(other, text=isinstance(q, str)):  #! {COND}
            return x is other  #! {COND}
        def plain(x):
            nonlocal_name = x = 3
            return x
        names = [x for x in SOURCES]
        print({q is None: 1})  #! {COND}
        print({y is None: 1 for y in [q]})  #! {COND}
        return helper(3), plain(1), names, x is None  #! {COND}
    """,
    "in every part of a statement": """
        while config.limit > 3:
            print(q is None)  #! {COND}
        else:
            print(q is None)  #! {COND}
        for s in SOURCES:
            pass
        else:
            print(q is None)  #! {COND}
        async for s in config.stream():
            pass
        else:
            print(q is None)  #! {COND}
        try:
            limit = 3
        except ValueError as error:
            print(q is None)  #! {COND}
        else:
            print(q is None)  #! {COND}
        finally:
            print(q is None)  #! {COND}
        match config.name:
            case "x":
                print(q is None)  #! {COND}
        with suppress(ValueError):
            limit = 4
        raise ValueError(q is None)  #! {COND}
    """,
    "try around a plain function that was read before": """
        x = once("text")
        try:  #! {FALLBACK}
            once("text")
        except ValueError:
            pass
        return x
    """,
    "through copies and branches": """
        pages, filled = list(), []
        pages.append(q)
        print(list(tuple(pages))[0] is None)  #! {COND}
        print((pages + pages)[0] is None)  #! {COND}
        print([*pages][0] is None)  #! {COND}
        if config.rerank:
            filled.append(q)
        else:
            filled = filled
        return filled[0] is None  #! {COND}
    """,
    "what a control-flow function returns": """
        x = await ps.cond(q, fetch, rank, q)
        y = await tools.cond(q, fetch, rank, q)
        return x is None, y is None  #! {COND}
    """,
    "in an f-string": "return f'{q is None}'  #! {COND}",
}

ACCEPTED = {
    "configuration": """
        if config.rerank and not config.extra:
            x = await rank(q)
        elif config.extra is None:
            x = await fetch(q)
        else:
            raise ValueError(f"{config.name}")
        y, z = None, config.extra
        if config.rerank:
            y = await rank(q)
        if y is None or z is None:
            z = await fetch(q)
        return x, y, z
    """,
    "a loop over configuration": """
        found = [await fetch(s, q) for s in SOURCES]
        for s in ("wiki", "docs"):
            found.append(await fetch(s, q))
        for i in range(3):
            found += [await fetch(i, q)]
        if not found or len(found) > 3:
            return []
        for page in found:
            await rank(page)
        assert found is not None and isinstance(found, list)
        return found
    """,
    "a dict of results": """
        pages = {s: await fetch(s, q) for s in SOURCES}
        if pages.pop("other", None) is None:
            return q
        if "wiki" in pages:
            for name in pages:
                if name: await rank(pages[name])
        return {**pages, "x": [page for page in pages.values()]}
    """,
    "plain code under try and with": """
        try:
            limit = int(config.name)
        except ValueError:
            return await fetch(q)
        with suppress(ValueError):
            limit = int("4")
        with open("/dev/null") as file:
            text = file.read()
        return await fetch(q, limit, text)
    """,
    "plain values under match and isinstance": """
        match config.name:
            case "x" | "y":
                return await fetch(q)
            case str(other) if isinstance(config.limit, int) and type(config.limit) is int:
                return await rank(q, other)
        match config.limit, config.name:
            case [limit, *rest] if limit:
                return await fetch(q, rest)
            case {"a": a, **others}:
                return await fetch(a, others)
    """,
    "policies": """
        careful = fetch.with_policy(fallback=lambda error: None if error is None else isinstance(error, ValueError))
        if careful is fetch:
            return q
        return await careful(q)
    """,
    "what functions return": """
        def better(left, right):
            return left if left > right else right
        names = sorted(SOURCES, key=lambda s: len(s) if s else 0)
        limit, found, name = parsed(config.name), maybe(q), await loaded()
        page, note = await search(q)
        pair = collections.namedtuple("Pair", "a b")(q, 1)
        if limit is None or kind_of(config.name) is None or found is None or note is None or pair.b is None:
            return page
        bound = functools.partial(fetch, q)
        return await bound(pair.a, better(1, config.limit), names, name, settings())
    """,
    "control flow": """
        async def body(x):
            inner = await ps.map_each(lambda y: fetch(y), x.items)
            return await ps.cond(rank(x), fetch, lambda y: rank(y), x)
        x = await ps.while_loop(lambda x: rank(x), body, q)
        return await ps.switch(q, (fetch, rank, lambda x, s=config.name: rank(x) if s else fetch(x)), x)
    """,
    "a node defined inside": """
        @functools.cache
        def decorated(x):
            return x is None
        class Local:
            def method(self, x):
                return x is None
        return await fetch(q, decorated)
    """,
    "a function that a node takes": "return await fetch(lambda x: x is None, key=lambda x: x if x else None)",
    "functions without a result or without source": """
        for x in ():
            print(x)
        if config.limit > 3:
            failing(q)
        for page in pages_of(q):
            if page is None: return q
        return hidden(q) is None
    """,
    "containers that get other values": """
        seen, pages, more = [q], {"a": q}, [q]
        page = first(seen)
        seen.append(None)
        pages.update(b=None)
        more.extend([None])
        if first(seen) is None or pages["b"] is None or more[1] is None:
            return q
        for name, page in [("a", q), ("b", None)]:
            if page is None: return name
        return {**pages, "c": None}["c"] is None
    """,
    "tables of nodes": """
        if NODES["other"] is None or config[3] is None or STAGES[7] is None:
            return q
        for node in MANY:
            if node("x") is None: return q
        return q
    """,
    "a container with code of its own": "return await fetch(table['a'], q)",
    "an argument that goes elsewhere": "return labelled(*SOURCES, q)",
    "names that something else hides": """
        def helper():
            return rank("x") is None
        rank = config.limit
        def search(x):
            return x
        class Holder:
            pass
        import json as fetch
        if search("x") is None or Holder("x") is None or fetch.loads("x") is None or config.client is None:
            return q
        with open("/dev/null") as client:
            if client is None: return
        return q
    """,
    "what a handler, a with statement and a capture assign": """
        error = file = name = q
        try:
            limit = 3
        except ValueError as error:
            if error is None: return q
        with open("/dev/null") as file:
            if file is None: return
        match config.name:
            case name:
                if name is None: return q
        return q
    """,
    "functions inside that declare and store": """
        def helper():
            global counter
            return None
        def note(x):
            CACHE["name"] = x
        counter = 3
        note(config.name)
        CACHE["name"] = config.name
        return await fetch(q, counter)
    """,
    "local objects": """
        box = SimpleNamespace()
        box.page = await fetch(q)
        box.pages = []
        box.pages.append(q)
        if box.extra is None:
            del box
        return q
    """,
    "copies of a container outside, and attributes of a function inside": """
        cache, results = CACHE.copy(), RESULTS[:]
        cache["last"] = q
        results.append(q)
        def helper(x):
            return x
        helper.pages = [q]
        client = config.client
        client.extra.pages = 3
        return cache, results
    """,
    "plain async helpers": """
        lock = asyncio.Lock()
        now = asyncio.get_running_loop().time()
        return await fetch(q, now, lock)
    """,
    "shadowed names": """
        isinstance = config.client
        type = lambda x: x
        q2 = [q for q in SOURCES if q is not None]
        return isinstance(q, str), type(q), await fetch(q2)
    """,
    "a walrus on configuration, and unpacked arguments": """
        options = {"a": 1}
        if (limit := config.limit) is not None:
            return await fetch(*SOURCES, **options), kind_of(*SOURCES)
        while (limit := limit - 1) > 0:
            await fetch(q, limit)
        return q
    """,
}


def graph_source(body: str) -> str:
    names = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, str)}
    for name in ("FALLBACK", "TIMEOUT", "COND", "SWITCH", "PARALLEL", "INSIDE", "WITH", "STORE"):
        body = body.replace(f"{{{name}}}", names[name])
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return f"{PRELUDE}\nasync def g(q, k=2):\n{body}\n"


# Bodies of control flow, in graphs that are traced.
BODIES = {
    "in the body of a branch": """
        return await ps.cond(
            ps.apply(bool, q),
            lambda x: fetch(x is None),  #! {COND}
            lambda x: rank(x),
            q,
        )
    """,
    "in a function for map_each": """
        async def body(x, kind=str):
            if kind is None or isinstance(x, str):  #! {COND}
                return await rank(x)
            return await fetch(x)
        return await ps.map_each(body, q)
    """,
    "in a function of the module": "return await ps.map_each(guarded, q)",
    "objects and functions that were probably meant to be nodes": """
        first = await unmarked(await fetch(q))  #! @ps.node
        second = unmarked.method([q])  #! @ps.node
        return first, second, await undecorated(q)  #! @ps.node
    """,
    "an object in a body that was probably meant to be a node": """
        async def body(x):
            return await unmarked(x)  #! @ps.node
        return await ps.map_each(body, [q])
    """,
}


@pytest.mark.parametrize("name", [*REFUSED, *BODIES])
def test_refused(name: str, module: Callable[[str], SimpleNamespace]) -> None:
    lines = [line.partition("#!") for line in graph_source({**REFUSED, **BODIES}[name]).splitlines()]
    marked = {number: text.strip() for number, (_, mark, text) in enumerate(lines, 1) if mark}
    helpers = {number for number, text in marked.items() if text == "{helper}"}
    found = module("\n".join(source for source, _, _ in lines))
    problems = problems_of(found.g, is_traced=name in BODIES)
    assert {path for path, _, _ in problems} == {found.path}
    reported = {line for _, line, _ in problems}
    assert reported == marked.keys() - helpers or (reported <= helpers == marked.keys())
    for _, line, text in problems:
        assert lines[line - 1][0].strip() in text
        assert line in helpers or marked[line] in text


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str, module: Callable[[str], SimpleNamespace]) -> None:
    assert problems_of(module(graph_source(ACCEPTED[name])).g) == []


async def test_a_forgotten_decorator_is_refused_at_the_call_wherever_the_class_is(
    module: Callable[[str], SimpleNamespace],
) -> None:
    far = module(PRELUDE)
    counter = far.unmarked

    @ps.graph
    async def count(text: str) -> Any:
        return await counter(await fetch(text))

    @ps.graph
    async def makes_steps(text: str) -> Any:
        steps = await counter.with_step(text), await counter.passes_on(text)
        return await fetch(*steps, far.first([text]), counter.method("known"), far.kind_of(None, default=text))

    for _ in range(2):
        with pytest.raises(ps.GraphTraceError, match=r"test_source_check.py:\d+: .*`counter` uses no symbolic value"):
            await engine.run(count("a"))
    await engine.run(makes_steps("a"))
    counter = fetch  # before the first trace that succeeds
    await engine.run(count("a"))


def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await fn(*args, **kwargs)

    return wrapper


@ps.node
async def fetch(*values: object) -> Any: ...


@logged
@logged
async def decorated(
    query: "list[str] | None",
    limit: tuple[int, ...] = (
        1,
        2,
    ),
) -> "object":
    """A text that starts
    no deeper than the module, with a `try:` in it.
    """
    if query is None:  # decorated
        return None
    return await fetch(query, limit)


def build(name: str | None) -> Callable[..., Any]:
    async def inner(query: str) -> Any:
        text = """
less indented than the function
"""
        if name is None:
            return await fetch(query)
        return await fetch(query, text) is name  # inner

    return inner


class Search:
    """Graphs as methods: the first parameter is configuration."""

    name: str | None = None
    last: object = None
    cache: dict[str, object]
    unknown: set[object]

    async def method(self, query: str) -> Any:
        if self.name is None:
            return await fetch(query)
        return query is self.name  # method

    @staticmethod
    async def static(query: str) -> Any:
        return query is None  # static

    @classmethod
    async def of_class(cls, query: str) -> Any:
        return query is cls.name  # of_class

    async def store(self, query: str) -> Any:
        if isinstance(self, Search):
            self.last = await fetch(query)  # store

    async def store_in(self, query: str) -> Any:
        self.cache["last"] = query  # store_in
        self.unknown.add(query)


one_line: Any = (lambda a: fetch(a, 1), lambda b: fetch(b is None), lambda c, d=None: d is None)  # one_line
branches: Any = (
    lambda a: fetch(
        a is None,  # many_lines
    ),
)


def mapped(body: Callable[[Any], Any]) -> Callable[..., Any]:
    async def graph(query: str) -> Any:
        return await ps.map_each(body, [query])

    return graph


CASES: list[tuple[Any, str]] = [
    (decorated, "decorated"),
    (build("x"), "inner"),
    (Search().method, "method"),
    (Search.static, "static"),
    (Search().of_class, "of_class"),
    (Search().store, "store"),
    (Search().store_in, "store_in"),
    (mapped(one_line[1]), "one_line"),
    (mapped(branches[0]), "many_lines"),
]


@pytest.mark.parametrize(("fn", "comment"), CASES)
def test_lines_are_those_of_the_file(fn: Callable[..., object], comment: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"  # {comment}"))
    ((path, at, text),) = problems_of(fn, is_traced=True)
    assert (path, at) == (__file__, line)
    assert lines[line - 1].strip() in text


@pytest.mark.parametrize("body", [one_line[0], one_line[2], fetch, functools.partial(one_line[0])])
def test_nothing_to_report(body: Callable[..., object]) -> None:
    assert problems_of(mapped(body), is_traced=True) == []


def cell(source: str, filename: str) -> dict[str, Any]:
    """Runs a notebook cell: its source is in linecache, and in no file."""
    namespace: dict[str, Any] = {"fetch": fetch}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def test_a_closure_that_is_not_assigned_yet() -> None:
    async def graph(query: str) -> Any:
        return None if await later(query) is None else inner

    inner = problems_of(graph)
    assert inner == []
    later = fetch
    assert len(problems_of(graph)) == 1


STEPS = {
    "return q is None": "ps.apply(lambda value, other: value is other, value, other)",
    "return isinstance(q, str)": "ps.apply(lambda value: isinstance(value, ...), value)",
    "return id(q)": "ps.apply(lambda value: id(value), value)",
    f"return q.{'x' * 50} is None": f"the symbolic value `q.{'x' * 18}…{'x' * 19}`",
}


@pytest.mark.parametrize("statement", STEPS)
def test_an_operation_is_written_out_as_a_step(statement: str, module: Callable[[str], SimpleNamespace]) -> None:
    ((_, _, text),) = problems_of(module(f"async def g(q):\n    {statement}\n").g)
    assert STEPS[statement] in text


def test_a_step_of_one_line_may_look_at_its_values(module: Callable[[str], SimpleNamespace]) -> None:
    step = "ps.apply(lambda x: x if x is not None and isinstance(x, str) else [y for y in x], q)"
    assert problems_of(module(f"import penstock as ps\nasync def g(q):\n    return {step}\n").g) == []
    assert len(problems_of(module(f"import penstock as ps\nasync def g(q):\n    return {step} is None\n").g)) == 1


def test_a_notebook_cell(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(linecache.clearcache)
    source = "x = 1\n\nasync def g(q):\n    return await fetch(q) is None\n"
    ((path, line, _),) = problems_of(cell(source, "<ipython-input-7>")["g"])
    assert (path, line) == ("<ipython-input-7>", 4)


GONE = "async def g(q):\n    return q is None\n"


@pytest.mark.parametrize(
    "now",
    ["", "# another file\n", "def g(q): (\n", "x = '\0'\n", "x = 1\n\n" + GONE, "async def other(q):\n    return q\n"],
)
def test_without_its_source_each_function_is_warned_of_once(
    now: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(linecache.clearcache)
    filename = f"<gone {tmp_path}>"
    functions = [cell(GONE.replace(" g(", f" {name}("), filename)[name] for name in ("g", "g", "second")]
    linecache.cache[filename] = (len(now), None, now.splitlines(keepends=True), filename)
    with capture_logs() as logs:
        for fn in functions:
            ps.graph(fn)
    for entry, name in zip(logs, ["g", "second"], strict=True):
        assert (entry["event"], entry["log_level"]) == ("graph.source_unavailable", "warning")
        assert (entry["file"], entry["function"].rpartition(".")[2]) == (filename, name)


def test_names_that_were_bound_later_are_known_at_a_second_check(module: Callable[[str], SimpleNamespace]) -> None:
    found = module("async def g(q):\n    return await later('x') is None\n")
    assert problems_of(found.g) == []
    found.g.__globals__["later"] = fetch
    assert [line for _, line, _ in problems_of(found.g)] == [2]
