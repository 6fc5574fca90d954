"""Plans: the changes and the report of each pass, graphs that are refused, and graphs of any size."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType, Protocol, TypedDict, TypeVar

import pytest
import structlog

import penstock as ps
from penstock import engine
from tests.engine.tracing import add, collect, define, double
from tests.kit import values_of


@ps.node(pure=True)
def square(x: float) -> float:
    return x * x


@ps.node(pure=True)
async def power(x: float, exponent: float = 2, *, offset: Any = 0) -> float:
    return x**exponent + offset


@ps.node(effectful="unordered")
async def save(x: object) -> None: ...


@ps.node
class Store:
    async def __call__(self, x: object) -> None: ...


def report(plan: engine.Plan, name: str) -> Any:
    return next(report for report in plan.reports if report.name == name)


def changes(graph: ps.Graph[..., Any], name: str) -> tuple[int, int, tuple[str, ...]]:
    found = report(engine.plan(graph), name)
    return found.before, found.after, found.changes


def line_of(fn: Callable[..., Any] | ps.Graph[..., Any], offset: int) -> str:
    function = fn.fn if isinstance(fn, ps.Graph) else fn
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"  # type: ignore[attr-defined]


async def test_pure_nodes_whose_value_nobody_reads_are_dropped_with_a_warning() -> None:
    ran: list[str] = []

    @ps.node(pure=True)
    async def spy(x: int) -> int:
        ran.append("spy")
        return x

    store = Store()

    @ps.graph
    async def graph(x: int) -> int:
        lost = await spy(x)
        _ = square(lost)
        _ = await save(x)
        _ = await store(x)
        _ = await ps.cond(x, spy, spy, x)  # type: ignore[arg-type]
        _ = await ps.cond(x, spy, save, x)  # type: ignore[arg-type]
        return await double(x)

    with structlog.testing.capture_logs() as logs:
        before, after, dropped = changes(graph, "dead-node elimination")
    assert (before, after) == (7, 4)
    assert dropped == (
        f"dropped spy ({line_of(graph, 2)}): its result is not read, and it is pure",
        f"dropped square ({line_of(graph, 3)}): its result is not read, and it is pure",
        f"dropped cond ({line_of(graph, 6)}): its result is not read, and so may be all steps in its bodies",
    )
    assert report(engine.plan(graph), "dead-node elimination").notes == ()
    assert [step.label for step in engine.plan(graph).steps] == ["save", "Store", "cond", "double"]
    assert [(log["event"], log["graph"]) for log in logs] == [("plan.dead_nodes", "graph")]
    assert "not declared pure" in logs[0]["remedy"]
    assert await engine.run(graph(0)) == 0
    assert ran == []


def test_equal_calls_of_pure_nodes_are_merged() -> None:
    thing = object()

    @ps.graph
    async def graph(x: float, y: float) -> object:
        return collect(
            square(x),
            square(x),  # merged
            square(y),
            await power(square(x), 2),  # merged, and then equal
            await power(square(x), 2),  # twice merged
            await power(x, y),
            await power(y, x),  # another order
            await power(x, 1),
            await power(x, 1.0),  # another type
            await power(x, True),
            await power(x, offset=0.0),
            await power(x, offset=-0.0),  # another zero
            await power(x, offset=[x, (y,)]),
            await power(x, offset=[x, (y,)]),  # merged
            await power(x, offset=(x, [y])),
            await power(x, offset={"a": x}),
            await power(x, offset={"b": x}),  # another key
            await power(x, offset=thing),
            await power(x, offset=thing),  # merged
            await power(x, offset=object()),
            await power.with_policy(timeout_seconds=3)(x, 1),  # another policy
        )

    before, after, merged = changes(graph, "common-subexpression elimination")
    assert before - after == len(merged) == 6
    assert merged[0] == f"merged square ({line_of(graph, 4)}) into the equal call at {line_of(graph, 3)}"


def test_parts_of_values_are_told_apart() -> None:
    @ps.graph
    async def graph(x: Any) -> object:
        return collect(
            square(x.a), square(x["a"]), square(x[0]), square(x[True]), square(x[0:1]), square(x[0:2]), square(x[0, 1]),
            square(x.a), square(x[0:1]), square(x[0, 1]),
        )  # fmt: skip

    before, after, merged = changes(graph, "common-subexpression elimination")
    assert (before, after, len(merged)) == (11, 8, 3)


def test_what_is_not_pure_is_not_merged() -> None:
    @ps.graph
    async def graph(x: int) -> object:
        return collect(await double(x), await double(x), add(x), add(x))

    assert changes(graph, "common-subexpression elimination") == (5, 5, ())


async def test_chains_of_plain_functions_share_an_actor() -> None:
    limited = ps.node(concurrency=1)(lambda x: x)

    @ps.graph
    async def graph(x: int) -> object:
        a = add(add(add(x)))  # one actor
        b = add(await double(a))
        c = add(b)  # joins b
        return collect(add(limited(c)), add(c))  # c has two readers; limited stays alone

    before, after, fused = changes(graph, "inline chains")
    assert (before, after) == (10, 7)
    assert fused == ("one actor for add → add → add", "one actor for add → add")
    assert await engine.run(graph(1)) == await graph(1)


def test_what_a_plan_says() -> None:
    @ps.graph
    async def report_on(x: int) -> object:
        return collect(square(x), square(x), add(add(x)))

    text = str(engine.plan(report_on))
    assert "common-subexpression elimination: 5 → 4" in text
    assert f"merged square ({line_of(report_on, 2)})" in text
    assert "one actor for add → add" in text
    assert "dead-node elimination: nothing to change" in text
    assert "argument types checked" in text
    assert '"parallel" for one call' in text


def test_a_name_that_would_drive_the_terminal_is_shown_escaped() -> None:
    evil = ps.node(pure=True, name="\x1b[2Jevil\r\n")(lambda x: x)

    async def graph(x: int) -> object:
        return collect(evil(x), evil(x), evil(evil(x)))

    graph.__name__ = "\x1b]0;title\x07"
    made = ps.graph(graph)
    plan = engine.plan(made)
    assert "merged" in str(plan)
    for shown in (str(plan), str(made), repr(made), repr(made(1)), repr(evil)):
        assert all(c.isprintable() or c == "\n" for c in shown), ascii(shown)
    assert repr(evil) == "<Node \\x1b[2Jevil>"


class Base: ...


class Derived(Base): ...


class Sized(Protocol):
    def __len__(self) -> int: ...


class Options(TypedDict):
    a: int


UserId = NewType("UserId", int)


@dataclass
class Page:
    url: str


FITS = [
    ("int", "int"), ("int", "float"), ("bool", "int"), ("int", "complex"), ("Derived", "Base"), ("Base", "Derived"),
    ("int", "Any"), ("Any", "int"), ("int", "object"), ("object", "int"), ("str", "Sized"), ("int", "UserId"),
    ("dict[str, int]", "Options"), ("list[int]", "list[str]"), ("int | None", "int"), ("None", "int"),
    ("int", "'NoSuchName'"), ("int", "T"),
]  # fmt: skip
MISFITS = [
    ("int", "str", "gets int"),
    ("str", "int", "gets str"),
    ("Base", "Page", "gets Base"),
    ("float", "int", "gets float"),
]
TYPES = {one.__name__: one for one in (Base, Derived, Sized, Options, UserId, Page, TypeVar)} | {"Any": Any}


def typed_graph(given: str, wanted: str) -> ps.Graph[..., Any]:
    source = f"""
    T = TypeVar("T")
    @ps.node
    def make(x) -> {given}: ...
    @ps.node
    def take(first, value: {wanted}, *rest: bytes, other: str = "", **more: bytes): ...
    @ps.graph
    async def g(x: {given}):
        return take(1, x, 2, 3), take(None, make(x), unknown=4)
    """
    return define(source, **TYPES)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("given", "wanted"), FITS)
def test_values_that_may_fit_are_accepted(given: str, wanted: str) -> None:
    engine.plan(typed_graph(given, wanted))


@pytest.mark.parametrize(("given", "wanted", "says"), MISFITS)
def test_values_that_cannot_fit_are_refused(given: str, wanted: str, says: str) -> None:
    with pytest.raises(ps.PlanError) as caught:
        engine.plan(typed_graph(given, wanted))
    message = str(caught.value)
    assert message.startswith("<graph>:9: in graph 'g', parameter 'value' of node 'take'")
    assert says in message


def test_constants_and_literals_are_checked() -> None:
    @ps.node
    def read(path: Path, page: Page | None = None, *, size: int = 0) -> str: ...  # type: ignore[empty-body]

    def build(**given: Any) -> ps.Graph[[], str]:
        @ps.graph
        async def graph() -> str:
            return read(**given)

        return graph

    engine.plan(build(path=Path("a"), size=3))
    for wrong, says in (({"path": "a"}, "Path, but gets str from the constant 'a'"), ({"path": ["a"]}, "gets list")):
        with pytest.raises(ps.PlanError, match=r"test_plan\.py:\d+: in graph 'graph', parameter 'path'") as caught:
            engine.plan(build(**wrong))
        assert says in str(caught.value)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_line_of_thousands_of_nodes() -> None:
    mix = ps.node(lambda a, b: (a + b) % 97)

    @ps.graph
    async def line(x: int) -> int:
        for _ in range(600):
            x = mix(await double(x), x)
        return x

    @ps.graph
    async def chain(x: int) -> int:
        for _ in range(2_000):
            x = add(x)
        return x

    assert len(engine.plan(line).steps) == 1_200
    assert await engine.run(line(1)) == await line(1)
    assert len(engine.plan(chain).steps) == 1
    assert await engine.run(chain(1)) == 2_001
    assert "2,000  add" in str(chain)
    assert "add#2000" in engine.plan(chain).steps[0].tail_labels
    for drawn in (str(line), line.to_mermaid(), line.to_dot(), str(engine.plan(line))):
        assert drawn


async def test_a_fan_of_1_000_nodes() -> None:
    @ps.graph
    async def fan(x: int) -> object:
        return collect(*[await double(add(x, number)) for number in range(1_000)])

    result = await engine.run(fan(1))
    assert result == await fan(1)
    assert await values_of(engine.stream([fan(1), fan(2)])) == [result, await fan(2)]
    assert "fan" in str(engine.plan(fan))


def test_a_graph_is_drawn_with_policies_and_parameters() -> None:
    fetch = ps.node(name="fetch", concurrency=8, retry=ps.Retry(3), timeout_seconds=5)(double.fn)

    @ps.graph
    async def drawn(url: int, z: int) -> object:
        page = await fetch(url)
        await save(await ps.cond(page, square, power, url))  # type: ignore[arg-type]
        return {"a": add(page, url, z=z), "b": [page]}

    text = str(drawn)
    assert "fetch 8 at once, 3 attempts, 5 s" in " ".join(text.split())
    assert "effectful" in text
    lines = drawn.to_mermaid().splitlines()
    labels = {line.split("|")[1].strip('"') for line in lines if "|" in line}
    assert labels == {"x", "y", "predicate", "operand"}  # `z` has no label: its parameter has the same name
    assert drawn._repr_svg_().startswith("<svg")
    assert [line for line in drawn.to_dot().splitlines() if 'label="y"' in line]
