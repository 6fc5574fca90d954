"""Graphs from source text, and the errors of tracing them; for the tests of the tracer."""

import itertools
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.kit import SCHEDULERS, values_of


@ps.node
async def double(x: int) -> int:
    return 2 * x


@ps.node
def add(x: int, y: int = 1, *, z: int = 0) -> int:
    return x + y + z


@ps.node
def collect(*values: object, **named: object) -> tuple[object, ...]:
    return (*values, *named.items())


def define(source: str, /, name: str = "g", **namespace: Any) -> Any:
    """The object that `source` defines under `name`. It has no file, so only the tracer can find its mistakes."""
    names: dict[str, Any] = {"ps": ps, "double": double, "add": add, "collect": collect, **namespace}
    exec(compile(textwrap.dedent(source), "<graph>", "exec"), names)
    return names[name]


def define_with_source(source: str, /, **namespace: Any) -> Any:
    """The same for a source that Python's tracebacks and the tracer can find, as that of a notebook cell."""
    filename, source = f"<cell {next(_CELLS)}>", textwrap.dedent(source)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = {"ps": ps, "double": double, "add": add, "collect": collect, **namespace}
    exec(compile(source, filename, "exec"), names)
    return names["g"]


_CELLS = itertools.count(1)


def body(*lines: str, **namespace: Any) -> Any:
    """A graph of `x: int` and `y: int` with these lines as its body; the first is line 3 of <graph>."""
    text = "\n".join(["@ps.graph", "async def g(x: int, y: int):", *(f"    {line}" for line in lines)])
    return define(text, **namespace)


def refusal(make: Callable[[], Any]) -> str:
    """The message with which a graph is refused, at the latest when it is planned."""
    with pytest.raises(ps.GraphTraceError) as caught:
        engine.plan(make())
    return str(caught.value)


async def assert_like_plain(graph: ps.Graph[..., Any], *args: Any) -> Any:
    """Check that every way to run the graph gives the result of plain Python, and return this result."""
    expected = await graph(*args)
    for scheduler in SCHEDULERS:
        assert await engine.run(graph(*args), scheduler=scheduler) == expected
    assert await values_of(engine.stream([graph(*args)] * 3)) == [expected] * 3
    async with engine.deploy(graph) as service:
        assert await service(*args) == expected
    return expected


def assert_names_line_and_remedy(message: str, line: int, what: str, remedies: list[str]) -> None:
    assert message.startswith(f"<graph>:{line}: "), message
    assert what in message, message
    assert all(remedy in message for remedy in remedies), message
