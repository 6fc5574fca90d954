"""Contenders in another process, which take one sample at a time."""

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..harness import Contenders, Sample
from .shared import TEXTS


class WorkerError(Exception):
    """A process has ended; the message is the last line that it has printed."""


@asynccontextmanager
async def start(module: str, *, quick: bool) -> AsyncIterator[dict[str, Contenders]]:
    """Start the encoders of a file, wait until they can embed, and give their samples by the name of the texts.

    Raises:
        WorkerError: The encoders could not be opened, or gave wrong vectors.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.encoders.worker", module, str(int(quick))]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=errors)
        try:
            names: list[str] = json.loads(await _answer(process))
            yield {texts: {name: _sampler(process, name, texts) for name in names} for texts in TEXTS}
        except WorkerError:
            errors.seek(0)
            raise WorkerError((errors.read().strip().splitlines() or ["it said nothing"])[-1]) from None
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def _sampler(process: Process, name: str, texts: str) -> Sample:
    async def sample() -> float:
        assert process.stdin is not None
        process.stdin.write(f"{json.dumps([name, texts])}\n".encode())
        return float(await _answer(process))

    return sample


async def _answer(process: Process) -> bytes:
    assert process.stdout is not None
    if not (line := await process.stdout.readline()):
        raise WorkerError
    return line
