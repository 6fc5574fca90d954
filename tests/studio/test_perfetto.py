"""A timeline as a trace: its events, and that they follow the format."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, telemetry
from penstock.insight import timeline as timelines
from penstock.insight.timeline import TimelineRecorder
from penstock.studio.perfetto import trace, tracks
from penstock.telemetry import DeviceSlice
from tests.kit import paused, plain
from tests.telemetry.virtual_time import waits

from .trace_format import Trace

NASTY = 'fetch "all" </script>'
fetch, decode = paused.with_policy(name=NASTY), waits("decode", 0.001, concurrency=3)


@ps.graph
async def measure(number: int) -> int:
    return plain(await decode(await fetch(number)))


def written(profile: telemetry.Profile, folder: Path) -> Trace:
    profile.to_perfetto(folder / "trace.json")
    [found] = folder.iterdir()  # and no temporary file
    return Trace(found.read_text(encoding="utf-8"))


async def test_nodes_are_tracks_items_are_flows_and_inboxes_are_counters(tmp_path: Path) -> None:
    with telemetry.profile() as profile:
        _ = [one async for one in engine.stream(measure(number) for number in range(20))]
    found = written(profile, tmp_path)
    by_node: dict[str, list[Any]] = {}
    for (process, _), slices in found.slices.items():
        assert process == "measure"
        for one in slices:
            by_node.setdefault(one["name"], []).append(one)
    assert set(by_node) == {NASTY, "decode", "plain"}
    assert {one["args"]["item"] for one in by_node["decode"]} == set(range(20))
    tracks_of_decode = {thread for _, thread in found.slices if thread.startswith("decode")}
    assert tracks_of_decode == {"decode", "decode (2)", "decode (3)"}
    assert list(found.flows.values()) == [[NASTY, "decode", "plain"]] * 20
    assert any(max(values) > 1 for (_, name), values in found.counters.items() if name == "inbox of decode")
    assert found.facts["verdict"] == str(profile.verdict)
    assert found.facts["dropped_slices"] == 0


def test_devices_are_tracks_and_the_items_of_a_batch_lead_to_it() -> None:
    timeline = TimelineRecorder(100.0)
    timeline.executed("serve", "embed → rank", [(100.0, 100.4, 1, 0), (100.1, 100.4, 2, 1)])
    for kind, began, ended in (("to device", 100.1, 100.2), ("compute", 100.2, 100.3), ("compute", 100.35, 100.36)):
        timeline.device_worked(
            DeviceSlice(kind, "gpu:0", "embed → rank", began, ended, 2, 4, 0.5, (1, 2))  # type: ignore[arg-type]
        )
    timeline.device_worked(DeviceSlice("compile", "gpu:0", "embed → rank", 99.0, 100.1))
    timeline.device_worked(DeviceSlice("compute", "gpu:0", "embed → rank", 100.5, 100.6, 1, 0, 0.0, (3,)))
    timeline.device_worked(DeviceSlice("compute", "gpu:0", "embed → rank", 100.7, 100.8, 1, 0, 0.0, (3,)))
    found = Trace("".join(trace(timeline.timeline(), {})))
    assert {thread for process, thread in found.slices if process == "devices"} == {
        "gpu:0", "gpu:0, transfers to it", "compiler"
    }  # fmt: skip
    first = found.slices["devices", "gpu:0"][0]
    assert first["args"] == {
        "kind": "compute", "device": "gpu:0", "nodes": ["embed", "rank"], "items": 2, "rows": 4, "padding": "50%",
        "frames": [1, 2],
    }  # fmt: skip
    assert found.slices["devices", "compiler"][0]["ts"] == pytest.approx(-1e6)
    assert set(found.flows) == {1, 2}  # of the third item nothing else is known
    assert all(len(names) == 3 for names in found.flows.values())


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from("xyz"), st.floats(0, 1e-6), st.floats(0, 1e-6),
            st.none() | st.integers(0, 3),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_whatever_overlaps_is_put_side_by_side(found: list[tuple[str, str, float, float, int | None]]) -> None:
    timeline = TimelineRecorder(0.0)
    for graph, node, began, seconds, frame in found:
        timeline.executed(graph, node, [(began, began + seconds, frame, None)])
        timeline.depth_changed(graph, node, [(began, 1)])
    shown = Trace("".join(trace(timeline.timeline(), {})))
    assert sum(map(len, shown.slices.values())) == len(timeline.timeline().slices)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=30))
def test_there_are_as_many_tracks_as_overlap_at_a_time(found: list[tuple[int, int]]) -> None:
    bars = [(began, began + length, number) for number, (began, length) in enumerate(found)]
    sides = tracks(bars)
    assert sorted(bars) == sorted(bar for track in sides for bar in track)
    for track in sides:
        assert all(one[1] <= two[0] for one, two in pairwise(track))
    most = max((sum(began <= at < ended for began, ended, _ in bars) for at in range(31)), default=0)
    assert len(sides) == most


def test_a_trace_has_the_newest_and_says_how_many_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_SLICES", 10)
    monkeypatch.setattr(timelines, "MAX_POINTS", 4)
    monkeypatch.setattr(timelines, "MAX_DEVICE_SLICES", 3)
    with telemetry.profile() as profile:
        profile._recorder.executed("g", "n", [(0.0, 0.1, 0, 0)])  # ended before the profile began
        for number in range(30):
            profile._recorder.executed("g", "n", [(1e9 + number, 1e9 + number + 0.5, number, number)] * 2)
            profile._recorder.depth_changed("g", "n", [(1e9 + number, 1)])
            profile._recorder.device_worked(DeviceSlice("compute", "cpu:0", "n", 1e9 + number, 1e9 + number + 0.5))
    found = written(profile, tmp_path)
    assert [one["args"]["item"] for one in found.slices["g", "n"]] == [*range(25, 30)]
    assert (found.facts["dropped_slices"], found.facts["dropped_depths"]) == (50, 26)
    assert found.facts["dropped_device_slices"] == 27


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with telemetry.profile() as profile:
        pass
    monkeypatch.setattr("penstock.studio.perfetto._events", lambda timeline: iter([{"ph": object()}]))
    with pytest.raises(TypeError):
        profile.to_perfetto(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        profile.to_perfetto(tmp_path / "none" / "trace.json")
