"""`python -m penstock devices`, in a process of its own."""

import json

import pytest

from penstock import devices
from tests.devices.processes import command, run

jax = pytest.importorskip("jax")


def test_it_shows_the_status() -> None:
    done = run("-m", "penstock", "devices", JAX_NUM_CPU_DEVICES="2")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (jax.__version__, "cpu:1", "right values", "simulated-devices: "):
        assert part in done.stdout


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
import sys
sys.modules["jax"] = None
from penstock._cli import main
assert main(["devices"]) == main(["devices", "--json"]) == 0
sys.exit(main(["devices", "--benchmark"]))
"""
    done = run("-c", program)
    missing = 'jax-missing: JAX is not installed, so there are no devices to compute on. pip install "penstock[jax]"'
    assert missing in " ".join(done.stdout.split())
    assert done.returncode == 1
    assert 'pip install "penstock[jax]"' in done.stderr
