"""Search Python code with the workers of a cluster: three local raylets; the program kills one of them on the way.

    python examples/cluster_search.py          needs the extra `penstock[ray]`

Files are parsed on workers, and the index is in this process. A worker that dies with its raylet fails the files that
it had begun. These files are parsed again on another worker, so no file is lost. In the end the program prints how many
files each raylet has parsed.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import examples`: the path has only this file's folder

import ast
import asyncio
import os
import sysconfig
import warnings
from collections import Counter
from importlib import import_module
from time import perf_counter
from typing import Any

import penstock as ps
from examples.code_search import Definition, definitions, index, quote
from penstock import cluster, engine

# Without these settings, Ray notices the end of a machine after 14 s.
HEALTH = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}  # fmt: skip
WORKERS = cluster.ray(workers=3, num_cpus=1, placement_timeout_seconds=120)


@ps.node(runs_on=WORKERS, retry=ps.Retry(3, retry_on=(ps.WorkerDied,)))
def parse(path: Path) -> tuple[str, list[Definition]]:
    with warnings.catch_warnings():  # hide warnings about invalid escapes in the searched code
        warnings.simplefilter("ignore")
        try:
            found = list(definitions(path, ast.parse(path.read_bytes(), path)))
        except (SyntaxError, ValueError):  # some files of the standard library's tests are not valid Python
            found = []
    return os.environ["RAY_RAYLET_PID"], found


@ps.node
def where(parsed: tuple[str, list[Definition]]) -> str:
    return parsed[0]


@ps.graph
async def fill(path: Path) -> tuple[str, int]:
    parsed = parse(path)
    return where(parsed), index(parsed[1])


@ps.graph
async def ask(query: str) -> Any:
    return await ps.map_each(quote, index(query))


async def search(raylets: list[Any], files: list[Path]) -> None:
    began, done = perf_counter(), Counter[str]()
    async with engine.Engine() as e, e.deploy(ask, fill) as service:
        async with service.stream(fill(path) for path in files) as parsed:
            async for raylet, _ in parsed:
                done[raylet] += 1
                if done.total() == len(files) // 3:
                    print(f"killing one of {len(raylets) + 1} raylets after {done.total()} files")
                    raylets[-1].kill_raylet()
        for raylet, count in done.most_common():
            print(f"{count:5} files were parsed under raylet {raylet}")
        again = sum(one.retried for one in service.statistics().actors)
        lost = len(files) - done.total()
        print(f"{len(files)} files in {perf_counter() - began:.1f} s: {lost} lost, {again} tried again")
        for hit in await service.run(ask("which values occur most often")):
            print(f"  {hit.definition.path.name}:{hit.definition.line}  {hit.definition.signature}")


def main() -> int:
    ray, simulated = import_module("ray"), import_module("ray.cluster_utils")
    machines = simulated.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": HEALTH}
    )
    try:
        others = [machines.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=machines.address, log_to_driver=False)
        library = Path(sysconfig.get_path("stdlib"))
        asyncio.run(search(others, sorted(library.glob("*.py")) + sorted(library.glob("*/*.py"))[:400]))
    finally:
        ray.shutdown()
        machines.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
