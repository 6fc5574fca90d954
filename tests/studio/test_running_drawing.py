"""The drawing of `print(service)`: each graph at work, with the load of its nodes."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

import penstock as ps
from penstock import engine
from penstock.engine import ActorStatistics, ChannelStatistics, Drawing, DrawnEdge, DrawnNode
from penstock.studio.drawing import to_dot, to_mermaid, to_svg, to_text
from tests.kit import begun, numbers, outcomes


@ps.node(concurrency=2, capacity=4)
async def fetch(gate: asyncio.Event, number: int) -> int:
    await gate.wait()
    if number == 0:
        raise ValueError("zero")
    return number


@ps.node
def half(number: int) -> float:
    return number / 2


@ps.node
def shown(number: float) -> str:
    return str(number)


@ps.node(pure=True)
async def twice(number: int) -> int:
    return 2 * number


@ps.graph
async def report(gate: asyncio.Event, number: int) -> str:
    return shown(half(await fetch(gate, number)))


@ps.graph
async def each(numbers: list[int]) -> list[int]:
    _ = await twice(numbers[0])  # nobody reads it
    return await ps.map_each(twice, numbers)


@ps.graph
async def merged(number: int) -> tuple[int, int]:
    return await twice(number), await twice(number)


def lines_of(service: object) -> list[str]:
    """The lines of a drawing, with `~` for rates, times and the blanks around them, which differ from run to run."""
    text = re.sub(r" *<?[\d,.]+/s", " ~/s", str(service))
    return re.sub(r" {2,}", "  ", re.sub(r"over <?[\d.]+ s", "over ~", text)).splitlines()


WAITING = """
service  ready
calls  0 completed, 0 failed, 0 cancelled, 0 expired, ~/s over ~
admission  5/64 in flight, 0/- queued, 0 refused, - while full
bottleneck  -

report

○  gate
│ ○  number
●─╯  fetch  inbox 3/4  in flight 2/2  0 done ~/s  ← gate, number  2 at once
●  half  inbox 0/16  in flight 0/1  0 done ~/s
●  shown  with half
◎  result

each

○  numbers
◆  map_each  inbox 0/16  in flight 0  0 done ~/s
│  twice:
│  ○  number
│  ●  twice  inbox 0  in flight 0  0 done ~/s  pure
│  ◎  result
◎  result
"""


async def test_each_graph_is_drawn_with_the_load_of_its_nodes() -> None:
    gate = asyncio.Event()
    async with engine.deploy(report, each) as service:
        calls = await begun(*(service(gate, number) for number in range(5)))
        waiting = lines_of(service)
        gate.set()
        assert await outcomes(*calls) == [ValueError, "0.5", "1.0", "1.5", "2.0"]
        assert await service.run(each([1, 2, 3])) == [2, 4, 6]
        done = lines_of(service)
    assert waiting == WAITING.strip().splitlines()
    assert [line.split("●")[1] for line in done if "●" in line] == [
        "─╯  fetch  inbox 0/4  in flight 0/2  4 done  1 failed ~/s  ← gate, number  2 at once",
        "  half  inbox 0/16  in flight 0/1  4 done ~/s",
        "  shown  with half",
        "  twice  inbox 0  in flight 0  3 done ~/s  pure",
    ]
    assert [line for line in done if "map_each" in line] == ["◆  map_each  inbox 0/16  in flight 0  3 done ~/s"]


async def test_what_the_planner_dropped_or_merged_is_not_drawn() -> None:
    async with engine.deploy(merged) as service:
        assert await service(1) == (2, 2)
        drawn = lines_of(service)
    assert [line for line in drawn if "twice" in line] == ["●  twice  inbox 0/16  in flight 0  1 done ~/s  pure"]


@ps.graph
async def counting(number: int) -> AsyncIterator[int]:
    return ps.map_each(twice, numbers(number))


async def test_a_graph_that_gives_a_stream_is_drawn_with_its_loads() -> None:
    async with engine.deploy(counting) as service:
        async with service.stream(counting(3)) as stream:
            assert [number async for number in stream] == [0, 2, 4]
            now = stream.statistics()
        drawn = lines_of(service)
    assert [line for line in drawn if "●  twice" in line] == ["│  ●  twice  inbox 0  in flight 0  3 done ~/s  pure"]
    assert all(" 1 done ~/s " in line for line in drawn if "numbers" in line)
    assert now.elapsed_seconds is not None
    assert now.actors_elapsed_seconds is not None
    assert now.elapsed_seconds < now.actors_elapsed_seconds
    assert "items       3 submitted, 3 completed, 0 failed, 0 skipped, 3 yielded, " in str(now)


async def test_before_and_after_its_life_a_deployment_can_be_printed() -> None:
    service = engine.deploy(report, each)
    assert str(service).startswith("service     starting\n")
    assert str(report) in str(service)
    assert str(each) in str(service)
    async with service:
        pass
    assert str(service).startswith("service     stopped\n")
    assert "0 done" in str(service)
    assert len(repr(service)) < 100


async def test_a_notebook_shows_the_totals_and_a_picture_of_each_graph() -> None:
    async with engine.deploy(report, each) as service:
        page = service._repr_html_()
    pictures = page[page.index("<svg") :].replace("</svg>", "</svg>\0").split("\0")[:-1]
    texts = [["".join(text.itertext()) for text in ElementTree.fromstring(one).iter()] for one in pictures]
    assert len(texts) == 2
    assert any("inbox 0/4, in flight 0/2, 0 done, 0/s" in text for text in texts[0])
    ElementTree.fromstring(page[: page.index("<svg")])


def load(key: int, *, depth: int = 1, capacity: int | None = 16, **numbers: Any) -> tuple[ActorStatistics, ...]:
    inbox = ChannelStatistics(depth, capacity, 0, 0, 0, 0, 0, 0.0, 0.0)
    found = ActorStatistics("search", "fetch", 10, 0, 0, 0, 3, 8, None, inbox, places=key)
    return (replace(found, **numbers),)


def siblings(loads: list[tuple[ActorStatistics, ...]], elapsed_seconds: float | None = 5.0) -> Drawing:
    fetches = [DrawnNode(f"f{nth}", "fetch", inputs=(DrawnEdge("in"),), actors=one) for nth, one in enumerate(loads)]
    joined = DrawnNode("out", "join", inputs=tuple(DrawnEdge(node.id) for node in fetches))
    nodes = (DrawnNode("in", "query", kind="input"), *fetches, joined)
    return Drawing("search", nodes, elapsed_seconds=elapsed_seconds)


def test_loads_of_folded_siblings_add_up_and_places_that_they_share_count_once() -> None:
    drawn = to_text(siblings([load(key, completed=10 - key, failed=key) for key in range(3)]))
    assert "fetch ×3   inbox 3/48  in flight 9/24  27 done  3 failed  6.00/s" in drawn
    drawn = to_text(siblings([load(7), load(7), load(7)]))
    assert "fetch ×3   inbox 3/48  in flight 3/8  30 done  6.00/s" in drawn


def test_what_is_not_known_of_one_is_not_known_of_all() -> None:
    drawn = to_text(siblings([load(1), load(2, capacity=None)], None))
    assert "fetch ×2   inbox 2  in flight 6/16  20 done" in drawn
    assert "/s" not in drawn


def test_what_does_not_run_says_so() -> None:
    nodes = (
        DrawnNode("a", "first", actors=load(1)),
        DrawnNode("b", "second", inputs=(DrawnEdge("a"),), actors=load(2, state="restarting")),
        DrawnNode("c", "third", detail="thread", inputs=(DrawnEdge("b"),)),
    )
    drawing = Drawing("line", nodes, elapsed_seconds=5.0)
    assert to_text(drawing).splitlines()[2:] == [
        "●  first                inbox 1/16  in flight 3/8  10 done  2.00/s",
        "●  second   restarting  inbox 1/16  in flight 3/8  10 done  2.00/s",
        "●  third                                                             thread",
    ]
    assert "restarting, inbox 1/16" in to_svg(drawing)
    runs = DrawnNode("a", "first", detail="thread", actors=load(1))
    assert to_text(Drawing("line", (runs,), elapsed_seconds=5.0)).endswith("2.00/s   thread")


def test_loads_stand_in_columns() -> None:
    nodes = (
        DrawnNode("a", "first", actors=load(1, completed=1_000_000)),
        DrawnNode("b", "second", inputs=(DrawnEdge("a"),), actors=load(2, completed=7, failed=3, depth=16)),
        DrawnNode("c", "third", inputs=(DrawnEdge("b"),)),
    )
    assert to_text(Drawing("line", nodes, elapsed_seconds=5.0)).splitlines()[2:] == [
        "●  first    inbox 1/16   in flight 3/8  1,000,000 done            200,000/s",
        "●  second   inbox 16/16  in flight 3/8  7 done          3 failed  2.00/s",
        "●  third",
    ]


@pytest.mark.parametrize("to_format", [to_mermaid, to_dot, to_svg])
def test_a_load_disturbs_no_other_format(to_format: Any) -> None:
    plain = Drawing("one", (DrawnNode("a", "first"),))
    at_work = Drawing("one", (DrawnNode("a", "first", actors=load(1)),))
    assert (to_format(plain) == to_format(at_work)) == (to_format is not to_svg)
    assert "first" in to_format(at_work)


def test_others_can_draw_a_graph() -> None:
    @ps.graph
    async def halves(number: int) -> str:
        return shown(half(number))

    drawing = halves.drawing()
    assert (drawing.title, drawing.bodies) == ("halves", ())
    labels = {node.id: node.label for node in drawing.nodes}
    edges = [(labels[edge.source_id], node.label) for node in drawing.nodes for edge in node.inputs]
    assert edges == [("number", "half"), ("half", "shown"), ("shown", "result")]
    assert [node.kind for node in drawing.nodes] == ["input", "node", "node", "output"]
