"""Random pipelines of batches on devices, interrupted anywhere: each batch is restored in its place, bit by bit."""

from typing import Any

import pytest
import uvloop

from penstock import data, devices
from tests.saving.random_pipelines import Draw, check_seeds

jax = pytest.importorskip("jax")

SEEDS = 10


def placed(draw: Draw, free: Draw) -> Any:
    """Returns a stage that makes batches, splits them over a mesh or puts them on a device, and may shuffle them."""
    count = draw.choice([2, 4])
    device, specs = draw.choice([
        (devices.DeviceMesh(shape=(count,), axis_names=("data",)), jax.P("data")),
        (jax.make_mesh((count,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[3 : 3 + count]), None),
        ("cpu:3", None),
    ])  # fmt: skip
    to_device = data.to_device(device, specs, ahead=free.randint(1, 4))
    shuffles, size = draw.random() < 0.5, draw.randint(2, 4)

    def stage(stream: Any) -> Any:
        batches = stream >> data.batched(4, drop_remainder=True) >> to_device
        return batches >> data.shuffled(size, seed=1) if shuffles else batches

    return stage


def test_batches_on_devices_are_those_of_an_uninterrupted_run(request: pytest.FixtureRequest, effort: int) -> None:
    kept, _ = check_seeds(range(SEEDS * effort), uvloop.new_event_loop, request.node.nodeid, placed)
    assert kept
