"""The persistent cache: a process reads the programs that an earlier process compiled."""

import json
from pathlib import Path

import pytest

from .processes import run

CHILD = """
import json, sys
import jax, numpy as np
from jax import monitoring
events = []
monitoring.register_event_listener(lambda event, **kwargs: events.append(event))
jax.jit(lambda x: x - 1)(1.0)  # JAX has decided by now that there is no folder
import asyncio, warnings
from queue import SimpleQueue
from penstock.devices import persistent_compile_cache
from penstock.devices.compiling import CompileCache, JittedFunction
from penstock.devices.shardings import Placement

persistent_compile_cache(sys.argv[1])
events.clear()
cache, done = CompileCache(), SimpleQueue()
cache.thread.acquire()
node = JittedFunction(lambda x: (x @ x.T).sum(), "node", ("x",), Placement.of_device(jax.devices()[0]))
cache.compile(node, (np.ones((8, 8), np.float32),), done.put)
result = float(done.get()(np.ones((8, 8), np.float32)))
asyncio.run(cache.thread.release())
hits = events.count("/jax/compilation_cache/cache_hits")
print(json.dumps({"result": result, "hits": hits, "misses": events.count("/jax/compilation_cache/cache_misses")}))
"""


def run_child(folder: Path) -> tuple[dict[str, float], str]:
    child = run("-c", CHILD, str(folder))
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), child.stderr


def test_a_second_process_reads_what_the_first_has_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    first, _ = run_child(folder)
    assert first == {"result": 512.0, "hits": 0, "misses": 1}
    assert [entry for entry in folder.iterdir() if entry.name.startswith("jit_node-")]
    second, log = run_child(folder)
    if second["hits"] == 0 and "machine" in log:  # XLA refuses code if it takes this CPU for another kind
        pytest.skip(f"this host rejects cached CPU programs: {log[-500:]}")
    assert second == {"result": 512.0, "hits": 1, "misses": 0}
