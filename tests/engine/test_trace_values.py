"""Values in a trace: containers, parts of values, literals, constants. Plain Python is the oracle."""

import enum
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest

import penstock as ps
from penstock import engine
from tests.engine.tracing import add, assert_like_plain, body, collect, define, double, refusal


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Page:
    url: str
    size: int
    words: list[str] = field(default_factory=list)
    corner: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.label = f"page of {len(self.words)}"


@dataclass(frozen=True)
class Frozen:
    value: int
    more: tuple[int, ...] = ()


@dataclass(slots=True)
class WithSlots:
    value: int


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: int
    initial: int = field(default=3, init=False)


class Colour(enum.Enum):
    RED = 1


NAMES = {one.__name__: one for one in (Point, Page, Frozen, WithSlots, FrozenSlots, Colour)}
CONTAINERS = [
    "[v, x]", "(v, x)", "{'v': v, 1: x}", "[[v], [(x, {'y': y})]]", "Point(v, y)", "Frozen(v, (x, y))", "WithSlots(v)",
    "FrozenSlots(v)", "Page('a', v, [w], corner=(x, y))", "[Page('a', size=v), Point(Frozen(v), x)]", "[]", "()", "{}",
    "set()", "{1, 2}", "[1, [2, {'a': (3,)}]]", "Page('a', 1)", "(Colour.RED, Colour)", "None", "...",
]  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
async def test_containers_as_arguments_and_results(container: str) -> None:
    lines = ["v = await double(x)", "w = add(y)"]
    passed = body(*lines, f"return collect({container}, named={container})", **NAMES)
    returned = body(*lines, f"return {container}", **NAMES)
    plain = (await assert_like_plain(passed, 1, 2))[0]
    assert await assert_like_plain(returned, 1, 2) == plain
    assert type(plain) is type(await engine.run(returned(1, 2)))


async def test_what_a_dataclass_sets_beside_its_fields_is_kept() -> None:
    graph = body("return Page('a', await double(x), ['b', 'c'])", **NAMES)
    page = await engine.run(graph(1, 2))
    assert (page.size, page.label) == (2, "page of 2")


async def test_a_registered_pytree() -> None:
    jax = pytest.importorskip("jax")

    class Pair:
        def __init__(self, first: object, second: object) -> None:
            self.first, self.second = first, second

    jax.tree_util.register_pytree_node(
        Pair, lambda pair: ((pair.first, pair.second), None), lambda _, children: Pair(*children)
    )
    graph = body("pair = Pair(await double(x), [y])", "return collect(pair)", Pair=Pair)
    (pair,) = await engine.run(graph(1, 2))
    assert (type(pair), pair.first, pair.second) == (Pair, 2, [2])


@ps.node
async def page_of(url: str) -> Page:
    return Page(url, len(url), ["some", "words"], (3, 4))


@ps.node
def halves(x: int) -> tuple[int, tuple[str, int]]:
    return x // 2, ("rest", x % 2)


@ps.node
async def point(x: int) -> Point:
    return Point(x, -x)


async def test_attributes_and_items() -> None:
    @ps.graph
    async def graph(url: str, table: dict[str, list[int]]) -> tuple[object, ...]:
        page = await page_of(url)
        return collect(
            page.words[-1], page.words[0:1], page.corner[1], table["a"][0], page.label, collect(page)[0].size
        )

    assert await assert_like_plain(graph, "abc", {"a": [7]}) == ("words", ["some"], 4, 7, "page of 2", 3)


async def test_unpacking_where_an_annotation_gives_the_length() -> None:
    @ps.graph
    async def graph(pair: tuple[int, int], page: Page) -> object:
        first, second = pair
        half, (text, rest) = halves(first)
        across, down = await point(second)
        left, top = page.corner
        (a, b), *others = [pair]
        return collect(half, text, rest, across, down, left, top, a, b, len(pair), others, *await point(3))

    expected = (2, "rest", 1, 6, -6, 8, 9, 5, 6, 2, [], 3, -3)
    assert await assert_like_plain(graph, (5, 6), Page("a", 1, corner=(8, 9))) == expected


async def test_unpacking_without_a_length_is_refused_with_the_remedy() -> None:
    source = """
    @ps.graph
    async def g(pair: {annotation}):
        a, b = pair
        return a
    """
    for annotation in ("tuple[int, ...]", "list[int]", "object"):
        message = refusal(lambda annotation=annotation: define(source.format(annotation=annotation)))
        assert message.startswith("<graph>:4: ")
        assert "annotate it as tuple[A, B]" in message


@ps.node
def append(values: list[object], value: object) -> list[object]:
    values.append(value)
    return values


async def test_a_list_in_the_body_is_a_new_one_for_each_item() -> None:
    @ps.graph
    async def graph(x: int) -> object:
        deep = append(([1], 2)[0], x)
        return append([], x), append([0], x), append([x], 1), deep, {"list": []}

    for _ in range(2):
        assert await assert_like_plain(graph, 7) == ([7], [0, 7], [7, 1], [1, 7], {"list": []})
    first, second = await engine.run(graph(1)), await engine.run(graph(1))
    assert first[4]["list"] is not second[4]["list"]  # type: ignore[index]


SEEN: list[object] = []


class Settings:
    seen: list[object] = []  # noqa: RUF012 - the test needs a shared list

    def __init__(self) -> None:
        self.own: dict[str, list[object]] = {"list": []}


SETTINGS = Settings()
NESTED = {"deep": ([SEEN], Page("a", 1, words=["x"]))}


SEEN_BY_A_HELPER: list[object] = []


def seen_by_a_helper() -> list[object]:
    return SEEN_BY_A_HELPER


async def test_what_a_global_or_a_closure_names_is_the_same_for_all() -> None:
    SEEN.clear()
    SEEN_BY_A_HELPER.clear()
    local: list[object] = []
    nested = {"list": local}

    @ps.graph
    async def graph(x: int) -> object:
        return collect(
            append(SEEN, x),
            append(local, x),
            append(nested["list"], x),
            append(SETTINGS.own["list"], x),
            append(Settings.seen, x),
            append(seen_by_a_helper(), x),
            NESTED["deep"],
            SETTINGS,
        )

    found = await engine.run(graph(1))
    plain = await graph(1)
    for one, other in zip(found, plain, strict=True):
        assert one is other
    assert SEEN == SEEN_BY_A_HELPER == [1, 1]


async def test_a_default_is_the_same_for_all() -> None:
    @ps.graph
    async def graph(x: int, kept: list[object] = []) -> object:  # noqa: B006 - the test needs such a default
        return append(kept, x)

    assert await engine.run(graph(1)) is await engine.run(graph(2))

    @ps.graph
    async def outer(x: int) -> object:
        return await graph(x)

    assert await engine.run(outer(3)) is await graph(4)


async def test_a_body_of_control_flow_gets_new_lists_too() -> None:
    @ps.graph
    async def graph(xs: list[int]) -> object:
        start = [0]

        async def each(x: int) -> object:
            return append(start, x)

        return await ps.map_each(each, xs)

    # In plain Python, the items would share one list, which would grow. Nodes do not share objects that a body makes.
    assert await engine.run(graph([1, 2])) == [[0, 1], [0, 2]]
    assert await engine.run(graph([1, 2])) == [[0, 1], [0, 2]]


async def in_a_helper(xs: list[int], y: int) -> object:
    start: list[object] = [await double(y)]
    named = {"more": [start]}

    async def each(x: int) -> object:
        return collect(append(start, x), named, append([], x))

    return await ps.map_each(each, xs)


async def in_a_helper_of_a_helper(xs: list[int], y: int) -> object:
    return await in_a_helper(xs, y)


def made_by_a_factory(kept: list[object]) -> Callable[[int], Any]:
    async def each(x: int) -> object:
        return append(kept, x)

    return each


def graph_of_a_factory(kept: list[object]) -> Any:
    @ps.graph
    async def inner(x: int) -> object:
        return append(kept, x)

    return inner


async def test_a_body_that_a_helper_makes_reads_the_lists_of_the_helper() -> None:
    @ps.graph
    async def graph(xs: list[int], y: int) -> object:
        return await in_a_helper_of_a_helper(xs, y)

    @ps.graph
    async def by_factory(xs: list[int], y: int) -> object:
        return await ps.map_each(made_by_a_factory([await double(y)]), xs)

    for _ in range(2):
        first, second = [6], [6]  # as it was for each item
        expected = [([*first, 1], {"more": [[6]]}, [1]), ([*second, 2], {"more": [[6]]}, [2])]
        assert [tuple(one) for one in cast("Any", await engine.run(graph([1, 2], 3)))] == expected
        assert await engine.run(by_factory([1, 2], 3)) == [[6, 1], [6, 2]]


async def test_what_a_factory_was_given_outside_is_the_same_for_all() -> None:
    kept: list[object] = []
    each, inner = made_by_a_factory(kept), graph_of_a_factory(kept)

    @ps.graph
    async def graph(xs: list[int], y: int) -> object:
        again = await ps.map_each(made_by_a_factory([]), xs)  # the traced code names the factories, too
        return collect(again, await graph_of_a_factory([])(y), await ps.map_each(each, xs), await inner(y))

    assert len(cast("Any", await engine.run(graph([1, 2], 3)))) == 4
    assert sorted(cast("list[int]", kept)) == [1, 2, 3]


async def test_constants_keep_identity_and_code_without_values_runs_once() -> None:
    runs: list[int] = []
    marker = object()

    @ps.graph
    async def graph(x: int) -> object:
        runs.append(1)
        return collect(marker, Colour.RED, x)

    for x in range(3):  # a marker and a colour are equal to themselves alone
        assert await engine.run(graph(x)) == (marker, Colour.RED, x)
    assert runs == [1]


async def test_defaults_and_keywords() -> None:
    @ps.graph
    async def graph(x: int, y: int = 10, *, z: int = 100, w: int = 1000) -> object:
        return collect(add(x), add(x, y), add(x, y=y, z=z), add(z=z, x=x), w, a=y, b=z)

    for call in (graph(1), graph(1, 2), graph(1, y=2, z=3), graph(x=1, w=4, z=3), graph(w=4, x=1)):
        assert await engine.run(call) == await call

    @ps.graph
    async def outer(x: int) -> object:
        return collect(await graph(x), await graph(x, z=5), await graph(w=x, x=2))

    await assert_like_plain(outer, 1)


async def test_a_graph_that_returns_a_constant_or_its_own_input() -> None:
    @ps.graph
    async def constant() -> str:
        return "always"

    @ps.graph
    async def identity(x: int) -> int:
        return x

    @ps.graph
    async def parts(x: int) -> object:
        return {"first": (await identity(x), await constant(), [x])}

    assert await engine.run(constant) == "always"
    assert await assert_like_plain(constant) == "always"
    assert await assert_like_plain(identity, 5) == 5
    assert await assert_like_plain(parts, 5) == {"first": (5, "always", [5])}
    async with engine.deploy(identity, constant) as service:
        assert await service.run(constant()) == "always"


async def test_chains() -> None:
    @ps.graph
    async def twice(x: int) -> int:
        return await double(await double(x))

    @ps.node
    class Offset:
        def __init__(self, by: int) -> None:
            self.by = by

        async def __call__(self, x: int) -> int:
            return x + self.by

    chains: list[tuple[ps.Graph[[int], int], Callable[[int], int]]] = [
        (double >> add, lambda x: 2 * x + 1),
        (add >> double >> double, lambda x: 4 * (x + 1)),
        (double >> twice >> add, lambda x: 8 * x + 1),
        (twice >> add, lambda x: 4 * x + 1),
        (double >> Offset(10) >> twice, lambda x: 4 * (2 * x + 10)),
        (Offset(10) >> double, lambda x: 2 * (x + 10)),
        (Offset(1) >> twice, lambda x: 4 * (x + 1)),
        (Offset(1) >> Offset(10), lambda x: x + 11),  # type: ignore[operator]
        (double >> (add >> double), lambda x: 2 * (2 * x + 1)),
    ]
    for chain, expected in chains:
        assert await assert_like_plain(chain, 3) == expected(3)
    assert chains[0][0].name == "double_to_add"
    with pytest.raises(TypeError, match="nodes and graphs"):
        double >> len  # type: ignore[operator]
    with pytest.raises(TypeError, match="nodes and graphs"):
        twice >> 3  # type: ignore[operator]


async def test_lambdas_partials_and_builtins_are_nodes() -> None:
    total = ps.node(sum)
    longest = ps.node(functools.partial(max, key=len))
    join = ps.node(name="join")(lambda words: "-" + " ".join(words))

    @ps.graph
    async def graph(words: list[str], numbers: list[int]) -> object:
        return collect(total(numbers), longest(words), join(words))

    assert await assert_like_plain(graph, ["a", "bcd"], [1, 2]) == (3, "bcd", "-a bcd")
    assert join.name == "join"


async def test_a_dataclass_that_lacks_a_field() -> None:
    @dataclass
    class Sparse:
        a: int
        b: int = field(init=False)

    (made,) = await engine.run(body("return collect(Sparse(await double(x)))", Sparse=Sparse)(4, 0))
    assert (type(made), vars(made)) == (Sparse, {"a": 8})


async def test_ordered_and_default_dicts_hold_symbolic_values() -> None:
    @ps.node
    async def seen(value: dict[str, int]) -> tuple[type, dict[str, int], int]:
        missing = value["missing"] if isinstance(value, defaultdict) else 0
        return type(value), dict(value), missing

    @ps.graph
    async def both(x: int) -> list[Any]:
        counts: defaultdict[str, int] = defaultdict(lambda: 7)
        counts["a"] = await double(x)
        return [await seen(OrderedDict(b=await double(x), a=x)), await seen(counts)]

    assert await engine.run(both(3)) == [(OrderedDict, {"b": 6, "a": 3}, 0), (defaultdict, {"a": 6, "missing": 7}, 7)]
