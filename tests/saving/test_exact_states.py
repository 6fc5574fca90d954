"""States are restored exactly: the order of axes, on which rounding depends, and objects that occur twice."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine
from tests.saving.exact import exact


class Keeping:
    def state(self) -> Any:
        return self.held

    def restore(self, state: Any) -> None:
        self.held = state


@ps.node
class Transposed(Keeping):
    def __init__(self) -> None:
        # Fortran order, as a solver may return it
        self.held = np.random.default_rng(1).standard_normal((64, 1000)).astype(np.float32).T

    def __call__(self, record: data.Record[None]) -> str:
        self.held *= np.float32(0.999)
        return float(self.held.sum()).hex()


@ps.node
class Tied(Keeping):
    def __init__(self) -> None:
        embedding = np.zeros(4)
        self.held = {"embedding": embedding, "head": embedding, "layers": [embedding]}

    def __call__(self, record: data.Record[None]) -> float:
        self.held["embedding"] += record.index
        return float(self.held["head"].sum()) + float(self.held["layers"][0].sum())


@ps.node
class Strided(Keeping):
    """Keeps a view of every second row of an array in Fortran order, and returns arrays of all layouts."""

    def __init__(self) -> None:
        self.held = np.asfortranarray(np.random.default_rng(2).standard_normal((40, 30, 20)))[::2]

    def __call__(self, record: data.Record[None]) -> Any:
        self.held = np.array(self.held * 0.9 + record.index, order="K")
        return [self.held[:, 0].copy("K"), self.held.transpose(1, 2, 0), float(self.held.sum()).hex()]


@ps.node
class Graph(Keeping):
    """Keeps a graph of objects, each of which two others refer to."""

    def __init__(self) -> None:
        leaf: dict[str, Any] = {"count": 0}
        self.held = {"left": [leaf], "right": ([leaf], {"leaf": leaf})}

    def __call__(self, record: data.Record[None]) -> int:
        self.held["left"][0]["count"] += record.index
        return int(self.held["right"][1]["leaf"]["count"] + self.held["right"][0][0]["count"])


@pytest.mark.parametrize("kind", [Transposed, Tied, Strided, Graph])
async def test_results_are_those_of_an_uninterrupted_run(tmp_path: Path, kind: Any) -> None:
    def call() -> Any:
        one = kind()

        @ps.graph
        async def trained(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
            return ps.map_each(one, records) >> data.shuffled(7, seed=1)

        return trained(data.order(range(90), shuffle_seed=1))

    whole = [exact(value) async for value in engine.stream(call())]
    got: dict[int, Any] = {}
    for stop in (11, 40, None):
        async with engine.stream(call(), checkpoint=ps.Checkpoint(tmp_path)) as values:
            async for value in values:
                got[values.position - 1] = exact(value)
                if values.position == stop:
                    await values.checkpoint()
                    break
    assert list(got.values()) == whole


async def test_the_state_of_a_fold_keeps_what_is_there_twice(tmp_path: Path) -> None:
    crashes = [True]

    @ps.node
    async def added(state: dict[str, Any], record: data.Record[None]) -> dict[str, Any]:
        if record.position == 30 and crashes:
            raise ConnectionError
        state["in"] += record.index
        return {**state, "order": state["order"]}

    @ps.graph
    async def total(records: AsyncIterator[data.Record[None]]) -> Any:
        return await ps.fold(added, records, start())

    @ps.node
    def start() -> dict[str, Any]:
        weights = np.ones((3, 2)).T
        return {"in": weights, "out": weights, "order": weights}

    checkpoint = ps.Checkpoint(tmp_path, every_records=7)
    with pytest.raises(ConnectionError):
        await engine.run(total(data.order(range(60))), checkpoint=checkpoint)
    crashes.clear()
    found = await engine.run(total(data.order(range(60))), checkpoint=checkpoint)
    assert found["in"] is found["out"] is found["order"]
    assert (found["in"].tolist(), found["in"].flags.f_contiguous) == ([[1771.0] * 3] * 2, True)


async def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    @ps.node
    class Circle(Keeping):
        def __init__(self) -> None:
            self.held: dict[str, Any] = {"parent": None, "children": []}

        def __call__(self, record: data.Record[None]) -> int:
            self.held["children"].append({"parent": self.held})
            return record.index

    one = Circle()

    @ps.graph
    async def circles(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[int]:
        return ps.map_each(one, records)

    path = r'map_each/Circle\["children"\]\[0\]\["parent"\] is map_each/Circle, which contains it'
    with pytest.raises(ps.NotStorable, match=path):
        async for _ in engine.stream(
            circles(data.order(range(60))), checkpoint=ps.Checkpoint(tmp_path, every_records=5)
        ):
            pass
