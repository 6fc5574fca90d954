"""Promise 8: `import penstock` imports neither jax nor the OpenTelemetry SDK."""

import subprocess
import sys

PROGRAM = """
import sys
import penstock
from penstock import engine, telemetry, testing
print([name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "numpy")
       or name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""


def test_promise_8_importing_penstock_loads_neither_jax_nor_the_opentelemetry_sdk() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
