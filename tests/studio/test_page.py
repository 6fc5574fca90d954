"""A profile as a page: its content, read without a browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine, telemetry
from penstock.studio.drawing import svg
from penstock.studio.page import page as page_module
from penstock.telemetry import DeviceSlice
from tests.kit import paused, plain
from tests.telemetry.virtual_time import VirtualTime, telling, waits

NASTY = "</script><script>alert(\"1\")</script><b a='x'>&amp;"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A well-formed page: every element is closed in its place, and every id is there once.

    Attributes:
        found: for each tag, the attributes of its elements.
        texts: for each tag, the texts directly inside of its elements.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, list[dict[str, str | None]]] = {}
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        ids = [attributes["id"] for found in self.found.values() for attributes in found if "id" in attributes]
        assert len(set(ids)) == len(ids)
        links = {attributes.get("href") for attributes in self.found["a"]}
        assert links <= {f"#{name}" for name in ids}, "a link leads nowhere, or elsewhere"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.setdefault(tag, []).append(dict(attrs))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.setdefault(tag, []).append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def data(self) -> dict[str, Any]:
        """Return the data that the script of the timeline reads."""
        [position] = [at for at, one in enumerate(self.found["script"]) if one.get("type") == "application/json"]
        found: dict[str, Any] = json.loads(self.texts["script"][position])
        return found


def classes(attributes: dict[str, str | None]) -> list[str]:
    return (attributes.get("class") or "").split()


fetch, decode = paused.with_policy(name="fetch"), waits("decode", 0.002, concurrency=2)
count = plain.with_policy(name="count")


@ps.node
def odd(number: int) -> bool:
    return bool(number % 2)


@ps.node
def zero(number: int) -> int:
    return 0


@ps.graph
async def measure(number: int) -> int:
    return count(await decode(await fetch(number)))


@ps.graph
async def branching(number: int) -> int:
    page = await fetch(number)
    return zero(await ps.cond(odd(page), count, zero, page))


async def profiled(*graphs: ps.Graph[[int], int], items: int = 30) -> telemetry.Profile:
    with telemetry.profile() as profile:
        for graph in graphs:
            _ = [one async for one in engine.stream(graph(number) for number in range(items))]
    return profile


def written(profile: telemetry.Profile, folder: Path) -> tuple[str, Page]:
    profile.to_html(folder / "profile.html")
    [path] = folder.iterdir()  # and no temporary file
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_shows_graph_table_verdict_and_timeline(tmp_path: Path) -> None:
    with telling(virtual := VirtualTime()):
        profile = virtual.profile(measure, 30)
    _, page = written(profile, tmp_path)
    assert page.texts["title"][0] == "Profile of measure"
    boxes = [one for one in page.found["a"] if "box" in classes(one)]
    assert [one["href"] for one in boxes] == ["#node-1", "#node-2", "#node-3"]
    limits = [number for number, one in enumerate(boxes, start=1) if "limits" in classes(one)]
    rows = [one for one in page.found["tr"] if one.get("id")]
    assert profile.verdict.node == "decode"
    assert limits == [2]
    assert [one["id"] for one in rows if "limits" in classes(one)] == ["node-2"]
    assert "decode" in page.texts["code"]
    reason = profile.verdict.reason
    assert f"{reason[0].upper()}{reason[1:]}." in page.texts["p"]
    gain = profile.verdict.gain
    assert f"{gain[0].upper()}{gain[1:]}." in page.texts["i"]
    assert len([one for one in page.found["path"] if "edge" in classes(one)]) == 4  # with those from outside and to it
    tracks = page.data()["tracks"]
    assert [(one["name"], one["limits"]) for one in tracks] == [("fetch", False), ("decode", True), ("count", False)]
    assert [sorted(slice_[3] for slice_ in one["slices"]) for one in tracks] == [list(range(30))] * 3
    assert tracks[1]["lanes"] == 2


async def test_where_threads_are_used_the_table_says_what_their_time_goes_into(tmp_path: Path) -> None:
    @ps.node(runs_on="thread")
    def read(number: int) -> int:
        return number

    of_threads = ["CPU", "GIL", "loop", "hops", "holds GIL"]
    for graph, expected in ((ps.graph(read), of_threads), (ps.graph(fetch), [])):
        _, page = written(await profiled(graph, items=1), tmp_path)
        assert [title for title in page.texts["button"] if title in of_threads] == expected


async def test_edges_lead_around_control_flow(tmp_path: Path) -> None:
    profile = await profiled(branching, items=4)
    _, page = written(profile, tmp_path)
    assert page.texts["figcaption"] == ["branching"]
    assert len([one for one in page.found["rect"] if "body" in classes(one)]) == 2  # its branches, inside of it
    titles = [text for text in page.texts["title"] if "→" in text]
    assert {title.partition(":")[0] for title in titles} >= {
        "fetch → odd", "odd → then", "odd → otherwise", "then → zero", "otherwise → zero",
    }  # fmt: skip
    assert not any(title.startswith("odd → zero") for title in titles)
    rows = [one.get("id") or "heading" for one in page.found["tr"] if one]
    assert rows == ["heading", "node-1", "node-2", "node-3", "heading", "node-4", "heading", "node-5"]
    assert page.texts["th"] == [
        "branching", "fetch", "odd", "zero", "branching/then", "count", "branching/otherwise", "zero",
    ]  # fmt: skip


async def test_what_names_say_is_text(tmp_path: Path) -> None:
    @ps.node(name=NASTY)
    async def nasty(number: int) -> int:
        raise ValueError(NASTY)

    with telemetry.profile() as profile:
        _ = [one async for one in engine.stream([ps.graph(nasty)(1)], on_error="skip")]
        profile._recorder.device_worked(DeviceSlice("compute", NASTY, NASTY, 1e9, 1e9 + 1))
    text, page = written(profile, tmp_path)
    assert text.count("</script") == 3
    assert NASTY not in text
    assert len(page.found["script"]) == 3
    assert "b" in page.found  # of the legend
    assert not any("a" in one for one in page.found["b"])
    assert {one["name"] for one in page.data()["tracks"]} == {NASTY}


async def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text, page = written(await profiled(measure), tmp_path)
    assert re.findall(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttp|import\(", text.replace("fetch(all", "")) == []
    for found in page.found.values():
        for attributes in found:
            assert not {"src", "srcset", "data", "action", "xlink:href"} & set(attributes)
    [policy] = [one["content"] for one in page.found["meta"] if one.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_a_page_is_bounded_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with telemetry.profile() as profile:
        timeline = profile._recorder
        for number in range(3 * page_module.MAX_SLICES):
            timeline.executed("g", f"node {number % 7}", [(1e9 + number / 3, 1e9 + number, 10**6 + number, number)])
        for number in range(3 * page_module.MAX_POINTS):
            timeline.depth_changed("g", "node 1", [(1e9 + number / 7, number % 3)])
        for number in range(3 * page_module.MAX_DEVICE_SLICES):
            frames = tuple(range(10**6, 10**6 + 64))
            timeline.device_worked(
                DeviceSlice("compute", "gpu:0", "node 1", 1e9 + number, 1e9 + number + 0.3, 64, 64, 0, frames)
            )
    text, page = written(profile, tmp_path)
    assert len(text) < 3_000_000
    data = page.data()
    assert sum(len(one["slices"]) for one in data["tracks"]) == page_module.MAX_SLICES + page_module.MAX_DEVICE_SLICES
    assert data["dropped"] == {
        "slices": 2 * page_module.MAX_SLICES, "device slices": 2 * page_module.MAX_DEVICE_SLICES,
        "depths": 3 * page_module.MAX_POINTS - page_module.MAX_POINTS,
    }  # fmt: skip
    assert any(f"{2 * page_module.MAX_SLICES:,} slices" in text for text in page.texts["p"])


async def test_a_graph_too_large_to_draw_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "MAX_ROWS", 2)
    _, page = written(await profiled(measure, items=2), tmp_path)
    assert any(text.startswith("too large to draw: 5 nodes") for text in page.texts["text"])
    assert len([one for one in page.found["tr"] if one.get("id")]) == 3


def test_a_profile_of_nothing_is_a_page_too(tmp_path: Path) -> None:
    with telemetry.profile() as profile:
        pass
    _, page = written(profile, tmp_path)
    assert "No node ran while the profile was taken." in page.texts["p"]
    assert "canvas" not in page.found
