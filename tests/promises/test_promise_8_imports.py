"""Promise 8: `import penstock` imports neither jax nor the OpenTelemetry SDK."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import penstock
from penstock import devices, engine, telemetry, testing
print([name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "numpy")
       or name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""

USE = """
import sys
from tests.promises.exploring import Explorer, seed_to_replay
from tests.promises.scenario import World
from tests.promises.ways import live

async def main():
    await live(World.of_running_loop())
    loaded = [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib")
              or name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
    assert not loaded, loaded

print(Explorer(sys.argv[1], int(sys.argv[2]), seed_to_replay())(main, count=50))
"""


def test_promise_8_importing_penstock_loads_neither_jax_nor_the_opentelemetry_sdk() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_promise_8_neither_does_using_it(request: pytest.FixtureRequest, effort: int) -> None:
    """Some imports happen at first use, so this test uses everything, in a process that has loaded nothing else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    command = [sys.executable, "-c", USE, request.node.nodeid, str(effort)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 1  # lines before the last are logs
