"""One peer in a process of its own: `python -m benchmarks.peers.child MODULE LOOP quick|full PATH`."""

import importlib
import pickle
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from .. import loops
from ..harness import Measured
from .shared import Open, measure_beside_hand_written


async def measure_workload(name: str, open_contenders: Open, loop: str, *, quick: bool) -> list[Measured]:
    async with AsyncExitStack() as stack:
        contenders = await stack.enter_async_context(open_contenders(quick))
        return await measure_beside_hand_written(name, contenders, loop, quick=quick)


def main() -> None:
    module, loop, size, path = sys.argv[1:]
    quick = size == "quick"
    workloads: dict[str, Open] = importlib.import_module(f".{module}", __package__).WORKLOADS
    rows: list[Measured] = []
    for name, open_contenders in workloads.items():
        rows += loops.run(loop, measure_workload(name, open_contenders, loop, quick=quick))
        # Write after every workload, so that its rows survive a failure of a later workload.
        Path(path).write_bytes(pickle.dumps(rows))


if __name__ == "__main__":
    main()
