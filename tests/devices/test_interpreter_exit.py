"""A process that ends while kernels run or are compiled exits with its own status, and does not abort."""

import signal

import pytest

from .processes import run

PROGRAM = """
import asyncio, os, signal, sys
import jax, jax.numpy as jnp, numpy as np
import penstock as ps
from penstock import devices, engine

@ps.device_node(device="cpu", pure=False)
def heavy(x):
    product = jnp.outer(x, x)
    for _ in range(20):
        product = jnp.sin(product @ product)
    return product[0]

@ps.graph
async def of(x):
    return heavy(heavy(heavy(x)))

x = np.ones(256, np.float32)

async def main():
    await engine.run(of(x))
    calls = [asyncio.ensure_future(engine.run(of(x + n))) for n in range(8)]
    calls.append(asyncio.ensure_future(devices.actor("cpu").run(lambda x: jnp.tanh(x).sum(), x)))
    for _ in range(20):
        await asyncio.sleep(0)
    HOW

END
"""

WAYS = {
    "normal end": ("return", "asyncio.run(main())", 0),
    "sys.exit": ("sys.exit(0)", "asyncio.run(main())", 0),
    "exception": ('raise LookupError("unhandled")', "asyncio.run(main())", 1),
    "interrupt": (
        "os.kill(os.getpid(), signal.SIGINT); await asyncio.sleep(30)",
        # A shell starts background processes with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler); asyncio.run(main())",
        -signal.SIGINT,
    ),
    "loop closed": (
        "return", "loop = asyncio.new_event_loop(); loop.run_until_complete(main()); loop.close()", 0
    ),
    "loop left open": ("return", "loop = asyncio.new_event_loop(); loop.run_until_complete(main())", 0),
}  # fmt: skip


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.long] * (way in {"normal end", "exception", "loop closed", "sys.exit"}))
        for way in WAYS
    ],
)
def test_a_process_ends_while_kernels_run(way: str, effort: int) -> None:
    how, end, status = WAYS[way]
    program = PROGRAM.replace("HOW", how).replace("END", end)
    for _ in range(1 if effort == 1 else 10):
        done = run("-c", program)
        assert done.returncode == status, (done.returncode, done.stderr)
        if way == "exception":
            assert "LookupError: unhandled" in done.stderr
        if way == "interrupt":
            assert "KeyboardInterrupt" in done.stderr
