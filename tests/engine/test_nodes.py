"""Nodes that are methods or classes, policies of copies, and objects that cannot be nodes."""

import asyncio
import copy
import inspect
import pickle
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest

import penstock as ps
from penstock import engine, telemetry
from tests.engine.tracing import add, body, collect, define, double, refusal
from tests.kit import Gauge, numbers, values_of


class Client:
    def __init__(self, base: str, gauge: Gauge | None = None) -> None:
        self.base = base
        self.gauge = gauge or Gauge()

    @ps.node(concurrency=2)
    async def fetch(self, path: str, suffix: str = "") -> str:
        with self.gauge:
            await asyncio.sleep(0)
        return self.base + path + suffix

    @ps.node
    def join(self, left: str, right: str) -> str:
        return f"{self.base}:{left}+{right}"

    quick = fetch.with_policy(name="quick", timeout_seconds=5)


async def test_methods_as_nodes() -> None:
    one, two = Client("one/"), Client("two/")

    @ps.graph
    async def graph(path: str) -> str:
        return one.join(await one.fetch(path), await two.quick(path, suffix="!"))

    assert await engine.run(graph("a")) == await graph("a") == "one/:one/a+two/a!"
    assert [step.label for step in engine.plan(graph).steps] == ["fetch", "quick", "join"]
    assert await Client.fetch(one, "b") == "one/b"
    message = refusal(lambda: ps.graph(lambda_without_path))
    assert "missing a required argument: 'path'" in message


async def lambda_without_path(x: str) -> str:
    return await Client("").fetch()  # type: ignore[call-arg]


async def test_methods_of_two_instances_are_not_merged() -> None:
    class Scale:
        def __init__(self, by: int) -> None:
            self.by = by

        @ps.node(pure=True)
        def __call__(self, x: int) -> int:
            return self.by * x

        @ps.node(pure=True)
        def scaled(self, x: int) -> int:
            return self.by * x

    one, two = Scale(1), Scale(2)

    @ps.graph
    async def graph(x: int) -> object:
        return collect(one.scaled(x), two.scaled(x), one.scaled(x), two.scaled(x))

    assert await engine.run(graph(3)) == (3, 6, 3, 6)
    assert len(engine.plan(graph).steps) == 3  # two kinds of `scaled`, and `collect`


EVENTS: list[str] = []


@ps.node
class Index:
    """Counts what it is given."""

    def __init__(self, name: str, start: int = 0, *, step: int = 1) -> None:
        """Stores its arguments."""
        self.name = name
        self.count = start
        self.step = step

    async def __aenter__(self) -> Self:
        EVENTS.append(f"open {self.name}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        EVENTS.append(f"close {self.name} at {self.count}")

    async def __call__(self, item: str, times: int = 1) -> int:
        self.count += self.step * times
        return self.count


index = Index("main", 10)


@ps.graph
async def fill(item: str) -> int:
    return await index(item, times=2)


@ps.graph
async def ask(item: str) -> object:
    return collect(await index(item, 0), await index(item, 0))


@pytest.fixture
def events() -> list[str]:
    EVENTS.clear()
    return EVENTS


async def test_every_scope_has_an_instance_of_its_own(events: list[str]) -> None:
    assert [await engine.run(fill("a")) for _ in range(2)] == [12, 12]
    assert events == ["open main", "close main at 12"] * 2
    assert await values_of(engine.stream(fill(item) for item in "abc")) == [12, 14, 16]
    async with engine.deploy(fill, ask) as service:
        assert await service("a") == 12
        assert await service.run(ask("a")) == (12, 12)
    assert events[4:] == ["open main", "close main at 16", "open main", "close main at 12"]
    assert index.count == 10  # the instance that the user made is never used


async def test_called_outside_a_graph_it_is_just_an_instance(events: list[str]) -> None:
    mine = Index("mine")
    assert await mine("a") == 1
    assert await mine("a", times=4) == 5
    assert events == []


def test_a_class_stays_what_it_was() -> None:
    assert str(inspect.signature(Index)) == "(name: str, start: int = 0, *, step: int = 1) -> None"
    assert (Index.__doc__, Index.__init__.__doc__) == ("Counts what it is given.", "Stores its arguments.")
    assert isinstance(Index("a"), Index)
    assert inspect.isclass(Index)


@pytest.mark.parametrize("used", [False, True])
def test_pickling_and_copying_an_instance(used: bool) -> None:
    original = Index("a", 5)
    if used:
        engine.plan(ps.graph(original))
    original.count = 7
    for made in (pickle.loads(pickle.dumps(original)), copy.copy(original), copy.deepcopy(original)):
        assert type(made) is Index
        assert (made.name, made.count, made.step) == ("a", 7, 1)
        assert asyncio.run(made("x")) == 8


@pytest.mark.parametrize("used", [False, True])
async def test_a_copy_is_a_node_of_its_own(used: bool) -> None:
    original = Index("a", 5)

    assert not used or await engine.run(ps.graph(original)("x")) == 6
    shallow = copy.copy(original)

    @ps.graph
    async def graph(item: str) -> object:
        return collect(await original(item), await shallow(item), await original(item, 0))

    assert await engine.run(graph("x")) == (6, 6, 6)


async def test_a_subclass_is_a_node_too(events: list[str]) -> None:
    class Named(Index):
        pass

    @ps.node
    class Doubling(Index):
        def __init__(self, name: str) -> None:
            super().__init__(name, start=100)
            self.factor = 2

        async def __call__(self, item: str, times: int = 1) -> int:
            return self.factor * await super().__call__(item, times)

    named, doubling = Named("sub", 1), Doubling("twice")

    @ps.graph
    async def graph(item: str) -> object:
        return collect(await named(item), await doubling(item))

    assert await engine.run(graph("x")) == (2, 202)
    assert await engine.run(graph("x")) == (2, 202)
    assert sorted(set(events)) == ["close sub at 2", "close twice at 101", "open sub", "open twice"]
    assert str(inspect.signature(Doubling)) == "(name: str) -> None"


def test_an_instance_that_no_scope_could_make_and_another_method_than_its_call_are_refused() -> None:
    class Other(Index):
        def __init__(self) -> None:
            super().__init__("other")

    class Calling(Index):
        async def __call__(self, item: str, times: int = 1) -> int:
            return await super().__call__(item, times)

    @ps.node
    class Store(Index):
        @ps.node
        async def total(self) -> int:
            return 0

    for call, instance, told in (
        ("one(x)", pickle.loads(pickle.dumps(Index("a"))), "^<graph>:3: .*make it by calling the class"),
        ("one(x)", Other(), "Other.*decorate it with @ps.node as well"),
        ("one(x)", Calling("calling"), "Calling.*decorate it with @ps.node as well"),
        ("one.total()", Store("a"), "^<graph>:3: 'total' is a method of the stateful node 'Store'.*__call__"),
    ):
        with pytest.raises(ps.GraphTraceError, match=told):
            engine.plan(body(f"return await {call}", one=instance))


async def test_a_dataclass_with_slots() -> None:
    @ps.node
    @dataclass
    class Plain:
        by: int
        total: int = 0

        def __call__(self, x: int) -> int:
            self.total += self.by * x
            return self.total

    plain = Plain(3)

    assert await engine.run(ps.graph(plain)(2)) == 6
    assert plain == Plain(3)
    with pytest.raises(TypeError, match="__dict__"):

        @ps.node
        @dataclass(slots=True)
        class Slotted:
            by: int

            def __call__(self, x: int) -> int:
                return x


def _plain_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.node(_plain_generator), "write `async def` with `yield`"),
        (lambda: ps.node(runs_on="thread")(numbers.fn), "runs on the event loop.*: leave out runs_on=.thread"),
        (lambda: ps.node(pure=True)(numbers.fn), "pure=True does not apply: equal calls would be merged"),
        (lambda: ps.node(max_bytes=10)(numbers.fn), "max_bytes= does not apply: its stream is bounded by capacity="),
        (lambda: ps.node(object), "__call__"),
        (lambda: ps.node(3), "function or a class"),  # type: ignore[call-overload]
        (lambda: ps.node(double), "with_policy"),
        (lambda: ps.node(runs_on="thread")(double.fn), 'runs_on="thread" needs a plain `def`'),
        (lambda: ps.node(timeout_seconds=1)(add.fn), 'runs_on="thread"'),
        (lambda: ps.node(concurrency=0), "concurrency=0"),
        (lambda: ps.node(pure=True, effectful=True), "either pure or effectful"),
        (lambda: ps.node(concurency=3), "concurency"),  # type: ignore[call-overload]
    ],
)
def test_what_cannot_be_a_node(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_function_beside_options_is_refused() -> None:
    made: Any = ps.node
    for fn, options, remedy in (
        (upper.fn, {"stateless": True}, "stateless=...)(upper)"),
        (add.fn, {"name": "plus", "batch": ps.Batch(3)}, "name=..., batch=...)(add)"),
        (type("Tally", (), {"__call__": add.fn}), {"concurrency": 2}, "concurrency=...)(Tally)"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"got both: write ps.node({remedy}")):
            made(fn, **options)
    assert made(add.fn, name=None, runs_on="loop")(1, y=2) == 3


def test_a_node_looks_like_its_function() -> None:
    assert (double.__name__, double.name) == ("double", "double")
    assert inspect.signature(add) == inspect.signature(add.fn)
    assert repr(add) == "<Node add>"
    assert add.with_policy(name="plus").name == "plus"
    assert add(1, y=2) == 3


@ps.node
async def upper(text: str, sign: str = "!", *, times: int = 1) -> str:
    return text.upper() + sign * times


@ps.node
async def letters(text: str) -> AsyncIterator[str]:
    for letter in text:
        yield letter


@ps.node
async def joined(parts: AsyncIterator[str]) -> str:
    return "".join([part async for part in parts])


@ps.node
class Shout:
    async def __call__(self, text: str, times: int = 2) -> str:
        return text + "!" * times


async def test_a_graph_of_one_node_has_its_name_parameters_and_defaults() -> None:
    graph = ps.graph(upper)
    assert (graph.name, inspect.signature(graph.fn)) == ("upper", inspect.signature(upper))
    assert [step.label for step in engine.plan(graph).steps] == ["upper"]
    assert await engine.run(graph("a")) == await graph("a") == "A!"
    assert await engine.run(graph(text="a", sign="?", times=2)) == "A??"
    assert await values_of(engine.stream(graph(text) for text in "ab")) == ["A!", "B!"]
    async with engine.deploy(graph) as service:
        assert await service("a", times=3) == "A!!!"
    with pytest.raises(TypeError, match=r"graph 'upper' is called wrongly: missing a required argument: 'text'"):
        graph()  # type: ignore[call-arg]


async def test_a_node_has_one_graph_of_it_alone_which_is_traced_once() -> None:
    @ps.node
    async def once(number: int) -> int:
        return number

    assert [await engine.run(ps.graph(once)(number)) for number in (1, 2)] == [1, 2]
    async with engine.deploy(ps.graph(once)) as service:
        assert await service.run(ps.graph(once)(3)) == 3
    assert ps.graph(once).statistics().traces == 1
    assert ps.graph(once.named("other")) is not ps.graph(once)


async def test_each_kind_of_node_alone_is_a_graph() -> None:
    client = Client("x/")
    assert await engine.run(ps.graph(add)(1, 2, z=3)) == 6  # a plain `def`
    assert await engine.run(ps.graph(client.fetch)("a", suffix="b")) == "x/ab"
    assert await engine.run(ps.graph(Shout())("a", times=1)) == "a!"
    assert ps.graph(Shout()).name == "Shout"
    assert await engine.run(ps.graph(ps.RateLimit(per_second=1000))(3)) == 3
    assert await engine.run(ps.graph(upper.named("loud").with_policy(timeout_seconds=5))("a")) == "A!"
    assert await values_of(engine.stream(ps.graph(letters)("abc"))) == ["a", "b", "c"]
    assert await engine.run(ps.graph(joined)(letters("abc"))) == "abc"
    assert await engine.run((joined >> upper)(letters("abc"))) == "ABC!"


async def test_annotations_that_cannot_be_resolved_still_tell_a_stream() -> None:
    source = """
        @ps.node
        async def joined(parts: "AsyncIterator[Unknown]") -> "Unknown":
            return "".join([part async for part in parts])
    """

    assert await engine.run(ps.graph(define(source, name="joined"))(letters("abc"))) == "abc"


async def test_a_graph_of_one_node_is_a_step_of_another_graph() -> None:
    inner = ps.graph(upper)

    @ps.graph
    async def outer(text: str) -> list[str]:
        return await ps.map_each(inner, [await inner(text), text])

    assert await engine.run(outer("a")) == ["A!!", "A!"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (collect, r"tracing.py:\d+: parameter \*values: object of graph 'collect': .*take a list"),
        (ps.node(max), r"the parameters of 'max' are not known.*@ps.graph"),
        (Shout, r"make an instance of the class first, ps.graph\(Shout\(...\)\)"),
        (ps.graph(upper), "this is a graph already"),
        (len, "write `async def`"),
    ],
    ids=["variadic", "builtin", "class", "graph", "function"],
)
def test_what_is_no_graph_of_one_node_says_why(wrong: object, message: str) -> None:
    with pytest.raises(ps.GraphTraceError, match=message):
        ps.graph(wrong)  # type: ignore[call-overload]


async def test_a_copy_with_another_name_shares_the_limits_and_is_told_apart() -> None:
    gauge = Gauge()
    client, other = Client("", gauge), Client("", gauge)
    news = client.fetch.named("news")

    @ps.graph
    async def graph(path: str) -> object:
        named = await news(path), await client.fetch.named("inside")(path)
        return collect(named, await client.quick(path), await other.fetch(path))

    async with engine.deploy(graph) as service:
        await service.map(graph(str(number)) for number in range(10))
        names = [actor.node for actor in service.statistics().actors]
    assert gauge.peak == 2
    assert [step.label for step in engine.plan(graph).steps] == ["news", "inside", "quick", "fetch", "collect"]
    assert {"news", "inside", "quick"} <= set(names), names
    for wrong in ("", 3):
        with pytest.raises(ps.OptionsError, match="name"):
            client.fetch.named(wrong)  # type: ignore[arg-type]


async def test_a_step_of_one_line() -> None:
    seen: list[str] = []

    async def later(text: str) -> str:
        await asyncio.sleep(0)
        return text.upper()

    @ps.graph
    async def graph(a: str, b: int) -> tuple[str, str, int, int]:
        seen.append("traced")
        text = ps.apply(lambda a, b: f"Judge {a} against {b}", a, b)
        return text, await ps.apply(later, text), ps.apply(len, text), ps.apply(lambda n: n + 1, ps.apply(abs, -3))

    expected = ("Judge x against 3", "JUDGE X AGAINST 3", 17, 4)
    assert await engine.run(graph("x", 3)) == expected
    assert await engine.run(graph("x", 3)) == expected
    assert seen == ["traced"]
    assert await graph("x", 3) == expected  # as plain Python
    labels = [step.label for step in engine.plan(graph).steps]
    assert labels[:3] == ['lambda a, b: f"Judge {a} against {b}"', "later", "len"]
    for drawing in (str(graph), graph.to_mermaid(), graph.to_dot(), graph._repr_svg_()):
        assert "Judge" in drawing
    assert ps.apply(lambda a: a + 1, 3) == 4


def test_the_name_of_a_step_of_one_line_is_shortened_in_the_middle() -> None:
    @ps.graph
    async def graph(text: str) -> str:
        return ps.apply(lambda text: text.replace("a long word", "another long word").strip(), text)

    [step] = engine.plan(graph).steps
    assert step.label == 'lambda text: text.re…ng word").strip()'[:21] + step.label[21:]
    assert len(step.label) == 40
    assert step.label.endswith('").strip()')
    unknown = define("@ps.graph\nasync def g(x):\n    return ps.apply(lambda x: x + 1, x)")
    assert [step.label for step in engine.plan(unknown).steps] == ["lambda"]


def test_a_step_of_one_line_is_one_node_from_trace_to_trace() -> None:
    step, offset = 1, 10

    @ps.graph
    async def graph(x: int) -> tuple[int, int, int]:
        return ps.apply(lambda x: x + 1, x), ps.apply(lambda x: x + offset, x), ps.apply(lambda x: x - step, x)

    def nodes() -> list[ps.Node[..., object]]:
        return [one.callee for one in graph._present_trace().steps]  # type: ignore[misc]

    before = nodes()
    offset = 20
    after = nodes()
    assert len({*map(id, before)}) == 3
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] is not before[1]  # it adds another number
    assert after[1].origin is before[1].origin
    assert (nodes(), graph._present_trace()) == (after, graph._present_trace())
    assert asyncio.run(engine.run(graph(1))) == (2, 21, 0)


async def test_a_step_of_one_line_keeps_the_values_of_its_round_and_of_its_factory() -> None:
    def build(by: int) -> ps.Graph[[int], list[str]]:
        @ps.graph
        async def graph(x: int) -> list[str]:
            return [ps.apply(lambda x: f"{name}{x * by}{end}", x) for name in "ab" for end in (name, "!")]  # noqa: B023

        return graph

    for by in (2, 3, 2):
        graph = build(by)
        assert (
            await engine.run(graph(5))
            == await graph(5)
            == [f"{one}{5 * by}{end}" for one in "ab" for end in (one, "!")]
        )


def test_a_step_of_one_line_says_what_is_wrong() -> None:
    outer = refusal(lambda: body("v = add(x)", "return ps.apply(lambda y: y + v, y)"))
    assert "<Ref add> in its closure" in outer
    assert "pass it as an argument" in outer
    assert "missing a required argument" in refusal(lambda: body("return ps.apply(lambda a, b: a, x)"))
    assert "call it directly" in refusal(lambda: body("return ps.apply(double, x)"))
    assert "never awaited" in refusal(lambda: body("ps.apply(double.fn, x)", "return 1"))
    for wrong in (3, add, Shout(), ps.graph(add)):
        with pytest.raises(TypeError, match=r"ps.apply takes a function first, got"):
            ps.apply(wrong, 3)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError) as caught:
        asyncio.run(engine.run(divided(1)))
    assert "in node 'lambda x: 1 / (x - 1)' of graph 'divided'" in caught.value.__notes__[0]


@ps.graph
async def divided(x: int) -> float:
    return ps.apply(lambda x: 1 / (x - 1), x)


quicker = upper.named("quicker")
loud_upper = upper >> Shout()
alone = ps.graph(upper)


@pytest.mark.parametrize(
    "made", [upper, quicker, Client.fetch, divided, alone, loud_upper, letters, add], ids=lambda made: made.name
)
def test_nodes_and_graphs_pickle_by_module_and_name(made: object) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps([made], protocol))[0] is made
    assert copy.copy(made) is made
    assert copy.deepcopy([made])[0] is made
    assert len(pickle.dumps(made)) < 100


async def test_a_call_pickles_with_its_arguments() -> None:
    call = pickle.loads(pickle.dumps(alone("a", times=3)))
    assert (call.graph, call.arguments) == (alone, ("a", "!", 3))
    assert await engine.run(call) == "A!!!"
    async with engine.deploy(alone) as service:
        assert await service.run(call) == "A!!!"
    continued = telemetry.continued(alone("b"), {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"})
    again = pickle.loads(pickle.dumps(continued))
    assert again._trace_headers == continued._trace_headers


async def test_methods_and_chains_without_a_name_are_made_again() -> None:
    client = Client("x/")
    for bound in (client.fetch, client.quick):
        again = pickle.loads(pickle.dumps(bound))
        assert (again.name, again.origin) == (bound.name, bound.origin)
        assert await again("a") == "x/a"
    chain = pickle.loads(pickle.dumps(upper >> quicker))
    assert await engine.run(chain("a", times=2)) == "A!!!"
    assert await engine.run(pickle.loads(pickle.dumps(ps.graph(quicker)("a")))) == "A!"


def test_what_does_not_pickle_is_named() -> None:
    @ps.node
    def inner(x: int) -> int:
        return x

    @ps.graph
    async def of_inner(x: int) -> int:
        return inner(x)

    for wrong, named in (
        (inner, "node 'inner'"),
        (of_inner, "graph 'of_inner'"),
        (of_inner(1), "graph 'of_inner'"),
        (ps.graph(inner)(1), "node 'inner'"),
        (inner >> add, "node 'inner'"),
        (upper.named("other"), "node 'other'"),
        (client_of_nobody.fetch.named("other"), "node 'other'"),
    ):
        with pytest.raises(pickle.PicklingError, match=f"{named} does not pickle: .*at the top level of that module"):
            pickle.dumps({"deep": [wrong]})


client_of_nobody = Client("y/")
