"""The verdict of a profile names a device node that is compiled again and again, or copies, or waits for the GIL."""

import asyncio
import itertools
import sys
from collections.abc import Iterable
from contextlib import closing
from time import thread_time
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine, telemetry
from tests.kit import measured

from .kit import doubling


async def profile_of(calls: Iterable[ps.Call[Any]]) -> telemetry.Profile:
    with telemetry.profile() as profile:
        async with engine.stream(calls) as results:
            async for _ in results:
                pass
    return profile


async def look_at(calls: Iterable[ps.Call[Any]]) -> telemetry.Verdict:
    """Returns the verdict of a live monitor on a stream."""
    with closing(telemetry.Monitor()) as monitor:
        monitor.snapshot()
        async with engine.stream(calls) as results:
            async for _ in results:
                pass
        lately = monitor.snapshot().lately
    assert lately is not None
    return lately.verdict


def sines(x: jax.Array, count: int = 8) -> jax.Array:
    for _ in range(count):
        x = jnp.sin(x) * 2
    return x


def embedding(count: int = 8) -> Any:
    """Returns a node whose compilation takes long if the count is large."""
    return ps.device_node(device="cpu", name="embed")(lambda x: sines(x, count))


async def test_a_live_look_names_a_compilation_and_a_device() -> None:
    @ps.device_node(device="cpu")
    def multiply(x: jax.Array) -> jax.Array:
        for _ in range(30):
            x = jnp.tanh(x @ x)
        return x

    search, heavy, square = ps.graph(embedding()), ps.graph(multiply), np.ones((400, 400), np.float32)
    verdict = await look_at(search(np.ones(number + 1, np.float32)) for number in range(10))
    assert (verdict.node, verdict.limit) == ("embed", "compilation")
    assert verdict.reason.startswith("it is compiled again and again, 9 times, because of the shape of x: ")
    await engine.run(heavy(square))
    verdict = await look_at(heavy(square) for _ in range(12))
    assert (verdict.node, verdict.limit) == ("multiply", "device"), str(verdict)
    assert verdict.remedy.startswith("twice the devices (mesh=), ")


@ps.node
def total(x: Any) -> float:
    return float(np.asarray(x).sum())


async def test_a_node_whose_shapes_change() -> None:
    search = embedding() >> total
    profile = await profile_of(search(np.ones(number + 1, np.float32)) for number in range(10))
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("embed", "compilation")
    assert verdict.reason.startswith("it is compiled again and again, 9 times, because of the shape of x: ")
    assert "pad" in verdict.remedy
    again = await profile_of(search(np.ones(3, np.float32)) for _ in range(20))
    assert again.verdict.limit != "compilation"


async def test_a_node_whose_first_compilation_is_in_the_profile_is_not_compiled_again() -> None:
    embed = embedding(100)
    await engine.run(doubling()(np.ones(3, np.float32)))  # opens the device
    profile = await profile_of(ps.graph(embed)(np.ones(3, np.float32)) for _ in range(20))
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("embed", "compilation")
    assert verdict.reason.startswith("it waits for its first compilation: ")
    assert verdict.remedy.startswith("have it compiled before the first call, with deploy(warmup=True)")
    other = await profile_of(ps.graph(embed)(np.ones(3, np.int32)) for _ in range(20))
    assert other.verdict.reason.startswith("it is compiled again, because of the dtype of x: ")
    assert other.verdict.remedy == "convert the argument to one dtype before the node"


async def test_an_actor_whose_function_is_compiled_in_the_profile() -> None:
    @ps.node
    class Trainer:
        async def __aenter__(self) -> Self:
            self._spread = devices.actor("cpu").bind(lambda x: sines(x, 100))
            return self

        async def __aexit__(self, *exc_info: object) -> None:
            pass

        async def __call__(self, x: Any) -> Any:
            return await self._spread(x)

    trainer = ps.graph(Trainer())
    await engine.run(doubling()(np.ones(3, np.float32)))  # opens the device
    verdict = (await profile_of(trainer(np.ones(3, np.float32)) for _ in range(20))).verdict
    assert (verdict.node, verdict.limit) == ("Trainer", "compilation"), str(verdict)
    assert "the warmup(...) of a bound function" in verdict.remedy


async def test_a_node_whose_programs_are_evicted() -> None:
    graph = ps.graph(embedding())
    for size in (2, 3):
        await engine.run(graph(np.ones(size, np.float32)))
    devices.set_program_cache(max_programs=1)
    try:
        profile = await profile_of(graph(np.ones(2 + number % 2, np.float32)) for number in range(6))
    finally:
        devices.set_program_cache()
    assert "because of the eviction: " in profile.verdict.reason
    assert "devices.set_program_cache(max_programs=...)" in profile.verdict.remedy


async def test_a_node_that_mostly_copies() -> None:
    search = ps.device_node(device="cpu:1", name="first")(lambda x: x[:1, :1]) >> total
    x = np.ones((6144, 4096), np.float32)  # copying this takes far longer than a busy machine keeps the device waiting
    await engine.run(search(x))  # compiles
    verdict = (await measured(lambda: profile_of(search(x) for _ in range(8)), "transfer")).verdict
    assert (verdict.node, verdict.limit) == ("first", "transfer")
    assert "copies rather than computes" in verdict.reason


@ps.node(runs_on="thread", concurrency=1)
def spin(number: int) -> int:
    until = thread_time() + 0.003
    while thread_time() < until:
        pass
    return number


spinning = ps.graph(spin)


def added(total: Any, number: int) -> Any:
    return total + number


@ps.node(concurrency=1)
async def add_by_actor(number: int) -> Any:
    return await devices.actor("cpu").run(added, np.zeros(4, np.float32), number)


by_actor = ps.graph(add_by_actor)
on_device = ps.graph(ps.device_node(device="cpu", name="add_on_device")(lambda number: jnp.asarray(number) + 1))


async def use_the_device(graph: Any) -> None:
    async with engine.stream((graph(number) for number in range(80)), max_in_flight=1) as results:
        async for _ in results:
            pass


def node_of(profile: telemetry.Profile, name: str) -> telemetry.NodeProfile:
    [found] = [node for node in profile.nodes if node.node == name]
    return found


VICTIMS = {"add_by_actor": by_actor, "add_on_device": on_device}


async def profile_beside(victim: str) -> telemetry.Profile:
    """Profile a node that uses a device beside a node that spins in a thread."""
    over = asyncio.Event()

    async def spin_on() -> None:
        async with engine.stream(itertools.takewhile(lambda _: not over.is_set(), calls)) as results:
            async for _ in results:
                pass

    calls = map(spinning, itertools.repeat(1))
    with telemetry.profile() as profile:
        beside = asyncio.create_task(spin_on())
        await use_the_device(VICTIMS[victim])
        over.set()
        await beside
    return profile


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else says what the threads of a process do")
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_node_beside_a_device_that_holds_the_gil_is_named(victim: str) -> None:
    await engine.run(VICTIMS[victim](1))  # compiles
    profile = await measured(lambda: profile_beside(victim), "gil")
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("spin", "gil"), str(verdict)
    assert 'runs_on="process"' in verdict.remedy
    assert "concurrency=" not in str(verdict)
    assert (node_of(profile, victim).gil_share or 0) > 0.25


async def test_what_a_node_does_on_a_device_by_an_actor_is_its_own() -> None:
    await engine.run(by_actor(1))
    with telemetry.profile() as profile:
        await use_the_device(by_actor)
    node = node_of(profile, "add_by_actor")
    assert node.device_share
    assert node.cpu_share
    assert node.hop_share is not None
    assert {work.node for work in profile.timeline.device_slices} == {"added"}
