"""Parts of a mesh as the stages of a pipeline: they compute different items at the same time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine

from .gates import Gate
from .kit import row

P = jax.P
MESH = devices.DeviceMesh(shape=(4, 2), axis_names=("stage", "data"), device="cpu")


def test_a_mesh_is_cut_along_any_axis_into_parts_that_have_all_its_axes() -> None:
    whole = devices.select(MESH)
    stages = MESH.split("stage")
    assert [stage.shape for stage in stages] == [(1, 2)] * 4
    for index, stage in enumerate(stages):
        assert (devices.select(stage).devices == whole.devices[index : index + 1]).all()
    columns = MESH.split("data")
    assert [column.shape for column in columns] == [(4, 1)] * 2
    assert (devices.select(columns[1]).devices == whole.devices[:, 1:]).all()
    single = columns[1].split("stage")[2]
    assert (devices.select(single).devices == whole.devices[2:3, 1:]).all()
    assert stages[1] == MESH.split("stage")[1] != stages[2]
    assert repr(MESH) == "DeviceMesh(shape=(4, 2), axis_names=('stage', 'data'), device='cpu')"
    assert repr(stages[1]) == "DeviceMesh(shape=(1, 2), axis_names=('stage', 'data'), device='cpu') at 2, 3 of (4, 2)"
    assert len({*stages, *MESH.split("stage")}) == 4
    with pytest.raises(ValueError, match="no axis 'rows'; it has stage, data"):
        MESH.split("rows")
    large = devices.DeviceMesh(shape=(4, 4), axis_names=("stage", "data"), device="cpu")
    with pytest.raises(ps.DeviceError, match=r"shape \(4, 4\) needs 16 devices, and there are 8"):
        devices.select(large.split("stage")[0])


async def test_a_pipeline_of_stages_gives_what_one_device_gives() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(8, 8)).astype(np.float32) for _ in range(4)]

    @ps.resource
    async def layer(index: int) -> AsyncIterator[Any]:
        yield weights[index]

    specs: dict[str, Any] = {"in_specs": {"w": P(None, "data"), "x": P("data")}, "out_specs": P("data")}
    stages = [ps.device_node(device=part, **specs)(lambda w, x: jnp.tanh(x @ w)) for part in MESH.split("stage")]

    @ps.graph
    async def pipeline(x: Any) -> Any:
        for index, compute in enumerate(stages):
            x = compute(await layer(index), x)
        return x

    batches = [rng.normal(size=(4, 8)).astype(np.float32) for _ in range(12)]
    async with engine.stream(pipeline(batch) for batch in batches) as results:
        given = [result async for result in results]
    for batch, result in zip(batches, given, strict=True):
        for w in weights:
            batch = np.tanh(batch @ w)
        np.testing.assert_allclose(np.asarray(result), batch, rtol=1e-4, atol=1e-5)
    assert [stage.compile_statistics().transfers for stage in stages] == [0, 12, 12, 12]


async def test_a_stage_works_on_an_item_while_the_one_before_works_on_the_next() -> None:
    gates = [Gate() for _ in range(4)]

    def stage(part: devices.DeviceMesh, gate: Gate) -> Any:
        return ps.device_node(device=part, pure=False)(lambda x: gate.pass_through(x) + 1)

    # One device for each stage: on simulated devices, programs with collectives run one at a time.
    line = devices.DeviceMesh(shape=(4,), axis_names=("stage",), device="cpu")
    first, second, third, last = map(stage, line.split("stage"), gates)

    pipeline = first >> second >> third >> last
    async with engine.stream(pipeline(row(10 * item)) for item in range(4)) as results:
        given = asyncio.ensure_future(_all(results))
        # A gate lets one computation pass at a time: the pipeline fills, step by step.
        for step in range(4):
            for gate in gates[: step + 1]:
                await gate.entered()
            if step < 3:
                for gate in gates[: step + 1]:
                    gate.let_one_pass()
        # The last stage holds the first item, while the first stage holds the last one.
        assert [gate.values[-1][0] for gate in gates] == [30, 21, 12, 3]
        for gate in gates:
            gate.open()
        assert [float(result[0]) for result in await given] == [4, 14, 24, 34]


async def _all(results: Any) -> list[Any]:
    return [result async for result in results]
