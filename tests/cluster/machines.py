"""Calls while machines fail: a program that runs one scenario on several local raylets of Ray.

`python -m tests.cluster.machines SCENARIO FOLDER`; raises if the scenario fails. Its processes are one group, which
the caller ends.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock import cluster, engine

Array = Any
HEALTH = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2, "gcs_rpc_server_reconnect_timeout_s": 5,
}  # fmt: skip
WORKERS = cluster.ray(workers=3, num_cpus=1, placement_timeout_seconds=120, name="three machines")
ELSEWHERE = cluster.ray(workers=1, resources={"elsewhere": 1}, placement_timeout_seconds=10, name="elsewhere")
TWO = cluster.ray(workers=2, num_cpus=1, placement_timeout_seconds=120, name="two machines")
SCENARIOS: dict[str, Callable[[], Awaitable[None]]] = {}


def scenario(fn: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    SCENARIOS[fn.__name__] = fn
    return fn


@contextlib.contextmanager
def machines(count: int, **head: Any) -> Generator[tuple[Any, list[Any]]]:
    """Gives the cluster and its raylets, that of the head node first; the driver is connected."""
    ray: Any = importlib.import_module("ray")
    simulated: Any = importlib.import_module("ray.cluster_utils")
    given = {
        "num_cpus": 1,
        "include_dashboard": False,
        "node_ip_address": "127.0.0.2",
        "_system_config": HEALTH,
        **head,
    }
    whole = simulated.Cluster(initialize_head=True, head_node_args=given)
    raylets = [whole.head_node, *[whole.add_node(num_cpus=1, node_ip_address="127.0.0.2") for _ in range(count - 1)]]
    ray.init(address=whole.address, log_to_driver=False, _node_ip_address="127.0.0.2")
    try:
        yield whole, raylets
    finally:
        ray.shutdown()
        whole.shutdown()


def raylet_pid(raylet: Any) -> int:
    found: int = raylet.all_processes["raylet"][0].process.pid
    return found


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found]


def slow(number: int) -> int:
    time.sleep(0.02)
    return number


near, far = (ps.graph(ps.node(runs_on=workers)(slow)) for workers in (WORKERS, ELSEWHERE))


async def outcomes(numbers: range, at: int, fault: Callable[[], None], *, elsewhere: bool = False) -> Counter[str]:
    """Returns how often each outcome occurred.

    Args:
        numbers: the arguments of the calls.
        at: `fault` is called when so many calls have ended.
        fault: makes a machine fail.
        elsewhere: whether every sixth call needs the machine `elsewhere`, and may find no place.
    """
    counted = Counter[str]()
    allowed = (ps.WorkerDied, ps.ClusterError) if elsewhere else (ps.WorkerDied,)
    async with engine.Engine() as e, e.deploy(near, *[far] * elsewhere) as service:

        async def call(number: int) -> None:
            graph = far if elsewhere and number % 6 == 0 else near
            try:
                assert await service.run(graph(number)) == number
                counted["results"] += 1
            except allowed:
                counted["errors"] += 1
            if counted.total() == at:
                fault()

        await asyncio.gather(*map(call, numbers))
    assert counted.total() == len(numbers), counted
    return counted


@scenario
async def a_killed_raylet_fails_what_had_begun_there_and_nothing_else() -> None:
    with machines(3) as (_, raylets):
        counted = await outcomes(range(600), 200, raylets[-1].kill_raylet)
    print(counted)
    assert 0 < counted["errors"] <= 40, counted  # one function ran, and calls of 15 ms in all were sent ahead


@scenario
async def a_frozen_machine_is_noticed_and_fails_what_had_begun_there() -> None:
    frozen: list[int] = []
    began: list[float] = []
    with machines(3) as (_, raylets):

        def freeze() -> None:
            pid = raylet_pid(raylets[-1])
            frozen.extend([*children_of(pid), pid])
            began.append(time.monotonic())
            for one in frozen:
                os.kill(one, signal.SIGSTOP)

        try:
            counted = await asyncio.wait_for(outcomes(range(600), 200, freeze), 60)
        finally:
            for one in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
    print(counted, time.monotonic() - began[0])
    assert 0 < counted["errors"] <= 40, counted


@ps.node(runs_on=TWO)
def make(number: int) -> Array:
    return np.full(5_000_000, number, np.float64)


@ps.node(runs_on=TWO)
def more(array: Array) -> Array:
    return array + 1


kept = make >> more


@scenario
async def a_full_store_spills_and_loses_nothing() -> None:
    with machines(2, object_store_memory=100 << 20):
        async with engine.Engine() as e:
            found = [array async for array in e.stream(map(kept, range(12)), max_in_flight=12)]  # 480 MB are held
            assert [array[0] for array in found] == [number + 1.0 for number in range(12)]


@scenario
async def a_killed_head_ends_the_driver() -> None:
    with machines(3) as (_, raylets):

        def kill() -> None:
            for name in ("gcs_server", "raylet"):
                os.kill(raylets[0].all_processes[name][0].process.pid, signal.SIGKILL)

        await outcomes(range(100_000), 100, kill)


def link(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


async def partition(seconds: float, most: int) -> None:
    """Cuts the link to a machine that is a network namespace."""
    ray: Any = importlib.import_module("ray")
    space = f"penstock{os.getpid() % 10_000}"
    settings = {f"RAY_{name}": str(value) for name, value in {**HEALTH, "health_check_failure_threshold": 10}.items()}
    os.environ.update(settings, RAY_AUTH_MODE="disabled")
    python = f"{sys.executable} -m ray.scripts.scripts"
    link(f"ip netns add {space} && ip link add {space} type veth peer name eth0 netns {space}")
    try:
        link(f"ip addr add 10.97.0.1/24 dev {space} && ip link set {space} up")
        link(f"ip netns exec {space} ip addr add 10.97.0.2/24 dev eth0")
        link(f"ip netns exec {space} ip link set eth0 up && ip netns exec {space} ip link set lo up")
        common = "--num-cpus=1 --disable-usage-stats"
        link(f"{python} start --head --port=6397 --node-ip-address=10.97.0.1 --include-dashboard=false {common}")
        there = f"start --address=10.97.0.1:6397 --node-ip-address=10.97.0.2 {common}"
        link(f"ip netns exec {space} {python} {there} --resources='{{\"elsewhere\": 1}}'")
        ray.init(address="10.97.0.1:6397", log_to_driver=False)

        def cut() -> None:
            link(f"ip link set {space} down")
            asyncio.get_running_loop().call_later(seconds, link, f"ip link set {space} up")

        counted = await asyncio.wait_for(outcomes(range(300), 100, cut, elsewhere=True), 70)
        print(seconds, counted)
        assert counted["errors"] <= most, counted
        ray.shutdown()
    finally:
        link(f"ip link del {space}; ip netns del {space}")


@scenario
async def a_link_that_is_cut_for_2_seconds() -> None:
    await partition(2, most=0)


@scenario
async def a_link_that_is_cut_for_30_seconds() -> None:
    await partition(30, most=50)  # calls on the lost machine fail; the last calls find no place


if __name__ == "__main__":
    this = importlib.import_module("tests.cluster.machines")  # workers import the scenarios under this name
    asyncio.run(this.SCENARIOS[sys.argv[1]]())
    Path(sys.argv[2], "done").touch()
