"""A small ASGI application whose nodes run in threads, processes and on a device; served by several workers."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

import penstock as ps
from penstock import engine

if os.environ.get("ARRAY_AT_IMPORT"):
    import jax.numpy as jnp

    TABLE = jnp.ones(3)


@ps.node(runs_on="thread")
def in_thread(x: int) -> int:
    return x + 1


@ps.node(runs_on="process")
def in_process(x: int) -> tuple[int, int]:
    return 2 * x, os.getppid()


@ps.device_node(device="cpu")
def on_device(x: Any) -> Any:
    return x * 2


work = in_thread >> in_process
compute: ps.Graph[[float], Any] = ps.graph(on_device)
service: engine.Service[[int], tuple[int, int]]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """The deployment lives as long as a worker of the server."""
    global service
    async with engine.deploy(work, compute) as service:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ready")
async def ready() -> None:
    """Answer, which shows that the server listens."""


@app.get("/work")
async def endpoint(x: int) -> dict[str, int]:
    """Return the result, the id of this server process, and the id of the worker's parent."""
    value, parent_of_worker = await service(x)
    return {"value": value, "server": os.getpid(), "parent_of_worker": parent_of_worker}


@app.get("/compute")
async def compute_endpoint(x: float) -> dict[str, str]:
    """Return the result of the device, or its error."""
    try:
        return {"value": str(await service.run(compute(x)))}
    except ps.DeviceError as error:
        return {"error": str(error)}
