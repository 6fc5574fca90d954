"""Stages on parts of a mesh: the bubble of a pipeline, over the inevitable bubble (p - 1) / (m + p - 1).

The stages sleep inside of their programs, since two cores cannot compute four stages at a time. The time of each sleep
is measured, since a busy machine wakes a stage late.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import penstock as ps
from penstock import devices, engine

from ..harness import Contenders, Row, Workload
from ..summary import Limits

STAGES = 4
STAGE_SECONDS = 0.1


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", STAGES)
    items = 16
    slept: list[float] = []

    def sleep(x: Any) -> Any:
        begun = time.perf_counter()
        time.sleep(STAGE_SECONDS)
        slept.append(time.perf_counter() - begun)
        return np.asarray(x)

    def stage(part: devices.DeviceMesh) -> Any:
        @ps.device_node(device=part, pure=False)
        def compute(x: jax.Array) -> jax.Array:
            return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        return compute

    mesh = devices.DeviceMesh(shape=(STAGES,), axis_names=("stage",), device="cpu")
    stages = [stage(part) for part in mesh.split("stage")]

    @ps.graph
    async def pipeline(x: Any) -> Any:
        for compute in stages:
            x = compute(x)
        return x

    async def bubble() -> float:
        """Return the share of the time in which a stage does nothing, over the inevitable share."""
        slept.clear()
        begun = time.perf_counter()
        async with engine.stream(pipeline(np.full(2, item, np.float32)) for item in range(items)) as results:
            async for _ in results:
                pass
        seconds = time.perf_counter() - begun
        inevitable = (STAGES - 1) / (items + STAGES - 1)
        return (1 - sum(slept) / STAGES / seconds) / inevitable

    await bubble()  # compiles
    yield {"bubble, penstock": bubble}


MESH_STAGES = Workload(
    name="mesh stages",
    contenders=contenders,
    rounds=(5, 2),
    fresh_process=True,
    rows=(
        Row(
            title="bubble of 4 stages and 16 items, over (p - 1) / (m + p - 1)",
            subject="bubble, penstock",
            limits=Limits(must=1.1, aim=1.05),
        ),
    ),
)
