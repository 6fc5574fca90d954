"""States are restored exactly: the order of axes, on which rounding depends, and objects that occur twice."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import data, engine
from tests.saving.exact import Keeping, check_interrupted


@ps.node
class Transposed(Keeping):
    def __init__(self) -> None:
        # Fortran order, as a solver may return it
        self.held = np.random.default_rng(1).standard_normal((64, 1000)).astype(np.float32).T

    def __call__(self, record: data.Record[None]) -> str:
        self.held *= np.float32(0.999)
        return float(self.held.sum()).hex()


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


@pytest.mark.parametrize("kind", [Transposed, Strided, Graph])
async def test_results_are_those_of_an_uninterrupted_run(tmp_path: Path, kind: Any) -> None:
    def call() -> Any:
        one = kind()

        @ps.graph
        async def trained(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[Any]:
            return ps.map_each(one, records) >> data.shuffled(7, seed=1)

        return trained(data.order(range(90), shuffle_seed=1))

    await check_interrupted(call, tmp_path, 11, 40)


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
