"""Programs in processes of their own: `python -m penstock devices`, and what ends while kernels run or are compiled."""

import json
import re
import signal

import pytest

from penstock import devices
from tests.devices.processes import command, run

jax = pytest.importorskip("jax")


@pytest.mark.several_devices
def test_it_shows_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, errors = command(capsys, "devices")
    assert (status, errors) == (0, "")
    for part in (jax.__version__, "cpu:1", "right values", "simulated-devices: "):
        assert part in printed


def test_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    measure = ("devices", "--benchmark", "--device", "cpu", "--seconds", "0.05")
    status, printed, errors = command(capsys, *measure, "--json")
    assert status == 0, errors
    shown = json.loads(printed)
    assert set(shown["status"]) == set(devices.Status.__dataclass_fields__)
    assert set(shown["benchmark"]) == set(devices.Benchmark.__dataclass_fields__)
    assert shown["status"]["devices"][-1]["platform"] == "cpu"
    assert set(shown["benchmark"]["measurements"][0]) == set(devices.Measurement.__dataclass_fields__)
    assert json.loads(command(capsys, "devices", "--json")[1])["benchmark"] is None
    status, printed, errors = command(capsys, *measure)
    assert status == 0, errors
    assert "right values" in printed
    assert "device to host" in printed


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "arguments are required: COMMAND"),
        (["device"], 2, "choose from"),
        (["devices", "--seconds", "3"], 2, "need --benchmark"),
        (["devices", "--benchmark", "--seconds", "x"], 2, "'x' is no number of seconds above 0"),
        (["devices", "--benchmark", "--device", "abacus:1"], 1, "penstock: there is no device 'abacus:1'; this"),
    ],
)
def test_errors_help(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, printed, errors = command(capsys, *arguments)
    assert (found, printed) == (status, "")
    assert message in errors
    assert "Traceback" not in errors


def test_without_jax_it_says_how_to_get_it() -> None:
    program = """
import asyncio, sys
sys.modules["jax"] = None
import penstock as ps
from penstock import devices
from penstock._cli import main
to_run = lambda: asyncio.run(devices.actor("cpu").run(abs, 1))
for attempt in (lambda: ps.device_node(abs), lambda: devices.select("cpu"), to_run):
    try:
        attempt()
    except ps.MissingExtraError as error:
        print("refused:", error)
assert main(["devices"]) == main(["devices", "--json"]) == 0
sys.exit(main(["devices", "--benchmark"]))
"""
    done = run("-c", program)
    assert len(re.findall(r'refused: .*pip install "penstock\[jax\]"', done.stdout)) == 3
    missing = 'jax-missing: JAX is not installed, so there are no devices to compute on. pip install "penstock[jax]"'
    assert missing in " ".join(done.stdout.split())
    assert done.returncode == 1
    assert 'pip install "penstock[jax]"' in done.stderr


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

def slow_to_compile(x):
    for _ in range(60):
        x = jnp.sin(x) @ x
    return x

@ps.graph
async def of(x):
    return heavy(heavy(heavy(x)))

x = np.ones(256, np.float32)

async def main():
    await engine.run(of(x))
    calls = [asyncio.ensure_future(engine.run(of(x + n))) for n in range(8)]
    calls.append(asyncio.ensure_future(devices.actor("cpu").run(slow_to_compile, jnp.outer(x, x))))
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
