"""Gates: computations and compilations on a device that wait until a test opens the gate."""

import asyncio
import math
import threading
from typing import Any

import jax
import numpy as np

import penstock as ps

from .kit import on_the_host


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
        return on_the_host(self._wait, x)

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


class HeldTrace:
    """A function, `compute`, that waits while it is traced: a test then knows that its compilation is running."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.traced: list[int] = []
        self.error = error
        self._began, self._go_on = threading.Event(), threading.Event()

    def compute(self, x: Any) -> Any:
        self.traced.append(x.size)
        self._began.set()
        assert self._go_on.wait(50)
        if self.error is not None:
            raise self.error
        return x * 2

    async def entered(self) -> None:
        while not self._began.is_set():
            await asyncio.sleep(0)

    def wait(self) -> None:
        assert self._began.wait(50)

    def go_on(self) -> None:
        self._go_on.set()

    def hold(self) -> None:
        """Have the next trace wait again."""
        self._began.clear()
        self._go_on.clear()


def gated(gate: Gate, **options: Any) -> "ps.Graph[[Any], Any]":
    """Return a graph of one node that waits at a gate and then returns its argument."""
    node: Any = ps.device_node(device="cpu", name="guarded", **{"pure": False, **options})
    return ps.graph(node(lambda x: gate.pass_through(x) + 0))
