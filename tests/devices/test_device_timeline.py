"""A profile shows the work of devices, and why items waited for them."""

import threading
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine, telemetry
from penstock.telemetry import DeviceSlice

from .kit import at_64, doubling

KINDS = ["compile", "to device", "compute", "from device"]


def shares_of(profile: telemetry.Profile, name: str) -> dict[str, float]:
    [node] = [node for node in profile.nodes if node.node == name]
    shares = {"compile": node.compile_share, "transfer": node.transfer_share, "device": node.device_share}
    return {key: share for key, share in shares.items() if share is not None}


def of_kind(profile: telemetry.Profile, kind: str) -> list[DeviceSlice]:
    return [one for one in profile.timeline.device_slices if one.kind == kind]


async def stream(calls: Iterable[ps.Call[Any]]) -> None:
    async with engine.stream(calls) as results:
        async for _ in results:
            pass


async def test_batches_are_slices_of_their_device() -> None:
    of = doubling(device="cpu:1", batch=devices.DeviceBatch(4, max_wait_seconds=1, buckets=(4,)))
    with telemetry.profile() as profile:
        await stream(of(np.full(3, number, np.float32)) for number in range(8))
    found = profile.timeline.device_slices
    assert {one.device for one in found} == {"cpu:1"}
    assert {one.node for one in found} == {"doubled"}
    assert all(one.began_seconds <= one.ended_seconds for one in found)
    assert [one.kind for one in found if one.frames[:1] == found[1].frames[:1]] == KINDS[1:]
    computed = of_kind(profile, "compute")
    assert [(one.items, one.rows, one.padding_share) for one in computed] == [(4, 4, 0), (4, 4, 0)]
    assert [frame for one in computed for frame in one.frames] == [one.frame for one in profile.timeline.slices]
    assert len(of_kind(profile, "compile")) == 1
    assert all(one.ended_seconds <= two.began_seconds for one, two in pairwise(computed))


async def test_a_slice_of_a_batch_tells_its_padding() -> None:
    of = doubling(batch=devices.DeviceBatch(4, max_wait_seconds=0, buckets=(4,)))
    with telemetry.profile() as profile:
        await engine.run(of(np.ones(3, np.float32)))
    assert [(one.items, one.rows, one.padding_share) for one in of_kind(profile, "compute")] == [(1, 4, 0.75)]


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
    with telemetry.profile() as profile:
        await stream(of(np.ones(3, np.float32)) for _ in range(4))
    [compiled] = of_kind(profile, "compile")
    [node] = profile.nodes
    waited = (node.compile_share or 0) * (node.busy_seconds or 0)
    assert waited >= 4 * (compiled.ended_seconds - compiled.began_seconds)


async def test_arrays_that_lie_elsewhere_are_transfers_of_the_node_that_takes_them() -> None:
    made = ps.device_node(device="cpu:0", name="made")(lambda size: jnp.ones(1 << 16) * size)
    used = ps.device_node(device="cpu:1", name="used")(lambda x: x + 1)
    of = made >> used
    with telemetry.profile() as profile:
        await stream(of(np.float32(number)) for number in range(4))
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
        state = await actor.run(jnp.negative, given, donate_argnums=(0,), ready=False)
        for _ in range(3):
            state = await actor.run(jnp.cos, state, donate_argnums=(0,), ready=False)
        found = await actor.run(jnp.negative, state, donate_argnums=(0,))
    assert np.asarray(found).shape == given.shape
    assert len(of_kind(profile, "compute")) == 5
    assert (given == 1).all()
