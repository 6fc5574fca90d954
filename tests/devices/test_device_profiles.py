"""A profile shows the work of devices and why items waited for them, and its verdict names the node that is slow."""

import asyncio
import gzip
import itertools
import json
import sys
import threading
from collections.abc import Iterable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from time import thread_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine, telemetry
from penstock.telemetry import DeviceSlice
from tests.kit import model

from .kit import at_64, doubling

KINDS = ["compile", "to device", "compute", "from device"]


def node_of(profile: telemetry.Profile, name: str) -> telemetry.NodeProfile:
    [found] = [node for node in profile.nodes if node.node == name]
    return found


def shares_of(profile: telemetry.Profile, name: str) -> dict[str, float]:
    node = node_of(profile, name)
    shares = {"compile": node.compile_share, "transfer": node.transfer_share, "device": node.device_share}
    return {key: share for key, share in shares.items() if share is not None}


def of_kind(profile: telemetry.Profile, kind: str) -> list[DeviceSlice]:
    return [one for one in profile.timeline.device_slices if one.kind == kind]


async def profile_of(calls: Iterable[ps.Call[Any]], **options: Any) -> telemetry.Profile:
    with telemetry.profile() as profile:
        async for _ in engine.stream(calls, **options):
            pass
    return profile


@pytest.mark.several_devices
async def test_batches_are_slices_of_their_device_and_tell_their_padding() -> None:
    of = doubling(device="cpu:1", batch=devices.DeviceBatch(4, max_wait_seconds=0.5, buckets=(4,)))
    profile = await profile_of(of(np.full(3, number, np.float32)) for number in range(5))
    found = profile.timeline.device_slices
    assert {one.device for one in found} == {"cpu:1"}
    assert {one.node for one in found} == {"doubled"}
    assert all(one.began_seconds <= one.ended_seconds for one in found)
    assert [one.kind for one in found if one.frames[:1] == found[1].frames[:1]] == KINDS[1:]
    computed = of_kind(profile, "compute")
    assert [(one.items, one.rows, one.padding_share) for one in computed] == [(4, 4, 0), (1, 4, 0.75)]
    assert [frame for one in computed for frame in one.frames] == [one.frame for one in profile.timeline.slices]
    assert len(of_kind(profile, "compile")) == 1
    assert all(one.ended_seconds <= two.began_seconds for one, two in pairwise(computed))


async def test_what_several_nodes_became_names_all_of_them() -> None:
    first, second = (ps.device_node(device="cpu", name=name)(lambda x: x + 1) for name in ("first", "second"))
    both = first >> second
    with telemetry.profile() as profile:
        await engine.run(both(np.ones(2, np.float32)))
    assert {one.node for one in of_kind(profile, "compute")} == {"first → second"}
    assert {one.node for one in of_kind(profile, "compile")} == {"first → second"}


async def test_items_wait_for_a_program_only_when_it_is_compiled() -> None:
    of = doubling()
    profiles: list[telemetry.Profile] = []
    for sizes in ((1, 2, 3), (1, 2, 3)):
        with telemetry.profile() as profile:
            for size in sizes:
                await engine.run(of(np.ones(size, np.float32)))
        profiles.append(profile)
    first, second = [shares_of(profile, "doubled") for profile in profiles]
    assert first["compile"] > first["device"]
    assert second["compile"] == 0
    assert second["device"] > 0
    assert all(sum(shares.values()) <= 1 for shares in (first, second))
    assert [len(of_kind(profile, "compile")) for profile in profiles] == [3, 0]


async def test_all_items_of_a_batch_wait_for_its_program() -> None:
    traced = threading.Event()

    @ps.device_node(device="cpu", batch=ps.Batch(4, max_wait_seconds=1))
    def slow_to_trace(x: jax.Array) -> jax.Array:
        traced.wait(0.05)
        return x * 2

    of = ps.graph(slow_to_trace)
    profile = await profile_of(of(np.ones(3, np.float32)) for _ in range(4))
    [compiled] = of_kind(profile, "compile")
    [node] = profile.nodes
    waited = (node.compile_share or 0) * (node.busy_seconds or 0)
    assert waited >= 4 * (compiled.ended_seconds - compiled.began_seconds)


@pytest.mark.several_devices
async def test_arrays_that_lie_elsewhere_are_transfers_of_the_node_that_takes_them() -> None:
    made = ps.device_node(device="cpu:0", name="made")(lambda size: jnp.ones(1 << 16) * size)
    used = ps.device_node(device="cpu:1", name="used")(lambda x: x + 1)
    of = made >> used
    profile = await profile_of(of(np.float32(number)) for number in range(4))
    moved = [one for one in of_kind(profile, "to device") if one.node == "used"]
    assert [(one.device, one.items) for one in moved] == [("cpu:1", 1)] * 4
    assert shares_of(profile, "used")["transfer"] > 0
    assert shares_of(profile, "made")["transfer"] == 0  # its argument is a number, not an array


async def test_an_error_on_a_device_reaches_its_caller_while_a_profile_is_taken() -> None:
    @ps.device_node(device="cpu", batch=ps.Batch(4, max_wait_seconds=1))
    def broken(x: jax.Array) -> jax.Array:
        raise ArithmeticError("no")

    with telemetry.profile() as profile, pytest.raises(ArithmeticError):
        await engine.run(ps.graph(broken)(np.ones(2, np.float32)))
    assert of_kind(profile, "compute") == []
    assert len(of_kind(profile, "compile")) == 1


async def test_nothing_is_kept_while_no_profile_is_taken() -> None:
    with telemetry.profile() as profile:
        pass
    await engine.run(doubling()(np.ones(2, np.float32)))
    assert profile.timeline.device_slices == ()


async def test_memory_may_be_donated_while_a_profile_is_taken_and_that_of_numpy_stays_as_it_is() -> None:
    given, actor = at_64(), devices.actor("cpu")
    with telemetry.profile() as profile:
        await actor.run(jnp.negative, given, donate_argnums=(0,))
        state = await actor.run(jnp.negative, given, donate_argnums=(0,), ready=False)
        for _ in range(3):
            state = await actor.run(jnp.cos, state, donate_argnums=(0,), ready=False)
        found = await actor.run(jnp.negative, state, donate_argnums=(0,))
    assert np.asarray(found).shape == given.shape
    assert len(of_kind(profile, "compute")) == 6
    assert (given == 1).all()


NAMES = ("profiled_in_a_batch", "profiled_alone")
in_a_batch = ps.device_node(device="cpu", batch=ps.Batch(4, max_wait_seconds=1), name=NAMES[0])(lambda x: x * 2)
both = in_a_batch >> ps.device_node(device="cpu", name=NAMES[1])(lambda x: x + 1)


def annotations(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the events of Penstock by name, each event as its arguments."""
    [path] = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, list[dict[str, str]]] = {}
    for event in events:
        if event.get("name", "").split(" ")[-1] in NAMES:
            found.setdefault(event["name"], []).append(event.get("args", {}))
    return found


async def test_dispatches_are_named_after_nodes_and_items(tmp_path: Path) -> None:
    calls = lambda: (both(np.full(3, number, np.float32)) for number in range(4))  # noqa: E731
    with telemetry.profile() as profile:
        with jax.profiler.trace(str(tmp_path)):
            async for _ in engine.stream(calls()):
                pass
        async for _ in engine.stream(calls()):  # outside of the JAX profile
            pass
    found = annotations(tmp_path)
    [batch] = found["profiled_in_a_batch"]
    assert (batch["count"], batch["items"]) == ("4", "0 1 2 3")
    assert [one["items"] for one in found["profiled_alone"]] == ["0", "1", "2", "3"]
    [computed, _] = [one for one in of_kind(profile, "compute") if one.node == "profiled_in_a_batch"]
    assert batch["frames"].split(" ") == [str(frame) for frame in computed.frames]


async def test_compilations_are_named_after_nodes(tmp_path: Path) -> None:
    fresh = ps.device_node(device="cpu", name="profiled_alone")(lambda x: x - 1)
    with jax.profiler.trace(str(tmp_path)):
        await engine.run(ps.graph(fresh)(np.ones(3, np.float32)))
    assert len(annotations(tmp_path)["compile profiled_alone"]) == 1


async def look_at(calls: Iterable[ps.Call[Any]]) -> telemetry.Verdict:
    """Returns the verdict of a live monitor on a stream."""
    with closing(telemetry.Monitor()) as monitor:
        monitor.snapshot()
        async for _ in engine.stream(calls):
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


@pytest.mark.timed
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


total = ps.node(lambda x: float(np.asarray(x).sum()))


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
    trainer = ps.graph(model(call=devices.actor("cpu").bind(lambda x: sines(x, 100))))
    await engine.run(doubling()(np.ones(3, np.float32)))  # opens the device
    verdict = (await profile_of(trainer(np.ones(3, np.float32)) for _ in range(20))).verdict
    assert (verdict.node, verdict.limit) == ("Model", "compilation"), str(verdict)
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


@pytest.mark.timed
async def test_a_node_that_mostly_copies() -> None:
    search = ps.device_node(device="cpu:1", name="first")(lambda x: x[:1, :1]) >> total
    x = np.ones((6144, 4096), np.float32)  # copying this takes most of the time
    await engine.run(search(x))  # compiles
    verdict = (await profile_of(search(x) for _ in range(8))).verdict
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


def calls_of(graph: Any) -> Iterable[ps.Call[Any]]:
    return (graph(number) for number in range(80))


VICTIMS = {"add_by_actor": by_actor, "add_on_device": on_device}


async def profile_beside(victim: str) -> telemetry.Profile:
    """Profile a node that uses a device beside a node that spins in a thread."""
    over = asyncio.Event()

    async def spin_on() -> None:
        async for _ in engine.stream(itertools.takewhile(lambda _: not over.is_set(), calls)):
            pass

    calls = map(spinning, itertools.repeat(1))
    with telemetry.profile() as profile:
        beside = asyncio.create_task(spin_on())
        async for _ in engine.stream(calls_of(VICTIMS[victim]), max_in_flight=1):
            pass
        over.set()
        await beside
    return profile


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else says what the threads of a process do")
@pytest.mark.timed
@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_node_beside_a_device_that_holds_the_gil_is_named(victim: str) -> None:
    await engine.run(VICTIMS[victim](1))  # compiles
    profile = await profile_beside(victim)
    verdict = profile.verdict
    assert (verdict.node, verdict.limit) == ("spin", "gil"), str(verdict)
    assert 'runs_on="process"' in verdict.remedy
    assert "concurrency=" not in str(verdict)
    assert (node_of(profile, victim).gil_share or 0) > 0.25


async def test_what_a_node_does_on_a_device_by_an_actor_is_its_own() -> None:
    await engine.run(by_actor(1))
    profile = await profile_of(calls_of(by_actor), max_in_flight=1)
    node = node_of(profile, "add_by_actor")
    assert node.device_share
    assert node.cpu_share
    assert node.hop_share is not None
    assert {work.node for work in profile.timeline.device_slices} == {"added"}
