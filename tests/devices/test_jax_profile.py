"""A profile of JAX shows the names of nodes and items for the work of device threads."""

import gzip
import json
from pathlib import Path

import jax
import numpy as np

import penstock as ps
from penstock import engine, telemetry

NAMES = ("profiled_in_a_batch", "profiled_alone")
in_a_batch = ps.device_node(device="cpu", batch=ps.Batch(4, max_wait_seconds=1), name=NAMES[0])(lambda x: x * 2)
both = in_a_batch >> ps.device_node(device="cpu", name=NAMES[1])(lambda x: x + 1)


def annotations(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the events of Penstock by name, each event as its arguments."""
    [path] = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, list[dict[str, str]]] = {}
    for event in events:
        if event.get("name", "").split(" ")[-1] in NAMES:
            found.setdefault(event["name"], []).append(event.get("args", {}))
    return found


async def test_dispatches_are_named_after_nodes_and_items(tmp_path: Path) -> None:
    calls = lambda: (both(np.full(3, number, np.float32)) for number in range(4))  # noqa: E731
    with telemetry.profile() as profile:
        with jax.profiler.trace(str(tmp_path)):
            async with engine.stream(calls()) as results:
                async for _ in results:
                    pass
        async with engine.stream(calls()) as results:  # outside of the JAX profile
            async for _ in results:
                pass
    found = annotations(tmp_path)
    [batch] = found["profiled_in_a_batch"]
    assert (batch["count"], batch["items"]) == ("4", "0 1 2 3")
    assert [one["items"] for one in found["profiled_alone"]] == ["0", "1", "2", "3"]
    [computed, _] = [
        one for one in profile.timeline.device_slices if (one.kind, one.node) == ("compute", "profiled_in_a_batch")
    ]
    assert batch["frames"].split(" ") == [str(frame) for frame in computed.frames]


async def test_compilations_are_named_after_nodes(tmp_path: Path) -> None:
    fresh = ps.device_node(device="cpu", name="profiled_alone")(lambda x: x - 1)
    with jax.profiler.trace(str(tmp_path)):
        await engine.run(ps.graph(fresh)(np.ones(3, np.float32)))
    assert len(annotations(tmp_path)["compile profiled_alone"]) == 1
