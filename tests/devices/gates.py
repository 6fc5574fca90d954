"""Gates: computations on a device that wait until a test opens the gate."""

import asyncio
import math
import threading
from typing import Any

import jax
import numpy as np

import penstock as ps


class Gate:
    """A computation that waits inside a program, in a thread of JAX."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passes = 0.0
        self._loop = asyncio.get_running_loop()
        self._entered = asyncio.Semaphore(0)
        self.values: list[Any] = []

    def pass_through(self, x: jax.Array) -> jax.Array:
        """Return `x` when the gate is open; to be called while a function is traced."""
        return jax.pure_callback(
            self._wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="broadcast_all"
        )  # fmt: skip

    def _wait(self, x: Any) -> Any:
        self.values.append(np.asarray(x).tolist())
        self._loop.call_soon_threadsafe(self._entered.release)
        with self._condition:
            if not self._condition.wait_for(lambda: self._passes > 0, 30):
                raise TimeoutError("nobody opened the gate")
            self._passes -= 1
        return np.asarray(x)

    async def entered(self, times: int = 1) -> None:
        """Wait until `times` computations have reached the gate."""
        for _ in range(times):
            await self._entered.acquire()

    def open(self) -> None:
        """Let computations pass, from now on."""
        self._let(math.inf)

    def close(self) -> None:
        """Have computations wait again, from now on."""
        self._let(0)

    def let_one_pass(self) -> None:
        """Let one waiting computation pass, or the next one to come."""
        self._let(self._passes + 1)

    def _let(self, passes: float) -> None:
        with self._condition:
            self._passes = passes
            self._condition.notify_all()


def gated(gate: Gate, **options: Any) -> "ps.Graph[[Any], Any]":
    """Return a graph of one node that waits at a gate and then returns its argument."""

    @ps.device_node(device="cpu", pure=False, **options)
    def guarded(x: jax.Array) -> jax.Array:
        return gate.pass_through(x) + 0

    @ps.graph
    async def of(x: Any) -> Any:
        return guarded(x)

    return of
