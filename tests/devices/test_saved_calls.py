"""Saved calls with batches on devices: each comes back where it was, or where it would be put now."""

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import pytest
import uvloop

import penstock as ps
from penstock import data, devices, engine
from penstock.testing import wait_quiescent
from tests.devices.kit import graph_of
from tests.saving.exact import Keeping, exact, taken
from tests.saving.random_pipelines import check_seeds

pytestmark = pytest.mark.several_devices

SOURCE = np.arange(64, dtype=np.float32)


async def test_batches_of_a_device_before_state_are_up_to_rounding(tmp_path: Path) -> None:
    def doubled(**options: Any) -> Any:
        return ps.device_node(device="cpu", batch=ps.Batch(4), name="doubled", **options)(lambda value: value * 2)

    value_of = ps.node(lambda record: record.value)

    @ps.node
    class Summed(Keeping):
        held = 0.0

        def __call__(self, value: Any) -> float:
            self.held += float(value)
            return self.held

    summed = Summed()

    def graph(node: Any) -> Any:
        return graph_of(lambda: data.order(SOURCE, epochs=2) >> data.read(SOURCE) >> value_of >> node >> summed)()

    with pytest.raises(ps.PlanError, match=r"'doubled' .* rounding"):
        engine.stream(graph(doubled()), checkpoint=ps.Checkpoint(tmp_path))
    about = doubled(stateless=True)
    checkpoint = ps.Checkpoint(tmp_path, every_records=10)
    whole = dict(await taken(graph(about)))
    first = dict(await taken(graph(about), checkpoint, 50))
    second = dict(await taken(graph(about), checkpoint))
    assert min(second) > 1
    got = {**first, **second}
    assert list(got) == list(whole)
    assert np.allclose(list(got.values()), list(whole.values()))


ROWS = np.random.default_rng(1).standard_normal((240, 8)).astype(np.float32)
Stage = Callable[[Any], Any]


def mesh_of(count: int, first: int = 0) -> Any:
    """Returns a mesh of JAX, whose axes are explicit."""
    return jax.make_mesh((count,), ("data",), devices=jax.devices()[first : first + count])


FOUR, TWO = (devices.DeviceMesh(shape=(count,), axis_names=("data",)) for count in (4, 2))


def call(stage: Stage, *, batch: int | None = None) -> Any:
    def feed() -> Any:
        records = data.order(ROWS, shuffle_seed=1, batch=batch) >> data.read(ROWS, runs_on="loop")
        return stage(records if batch else records >> data.batched(8))

    return graph_of(feed)()


def places(value: Any) -> list[Any]:
    leaves = jax.tree.leaves(value.value if isinstance(value, data.Record | data.Records) else value)
    return [(leaf.sharding, leaf.committed) for leaf in leaves if isinstance(leaf, jax.Array)]


async def values_of(values: Any, stop: int | None = None) -> list[tuple[Any, list[Any]]]:
    found: list[tuple[Any, list[Any]]] = []
    async for value in values:
        found.append((exact(value), places(value)))
        if len(found) == stop:
            await wait_quiescent()  # the feed works ahead
            await values.checkpoint()
            break
    return found


async def stopped_and_resumed(folder: Path, before: Any, after: Any) -> list[tuple[Any, list[Any]]]:
    checkpoint = ps.Checkpoint(folder)
    async with engine.stream(before, checkpoint=checkpoint) as values:
        got = await values_of(values, 13)
    async with engine.stream(after, checkpoint=checkpoint) as values:
        return got + await values_of(values)


async def whole(call: Any) -> list[tuple[Any, list[Any]]]:
    async with engine.stream(call) as values:
        return await values_of(values)


@ps.node
def summed(batch: Any) -> Any:
    """Gives a split array, a replicated array, an array on one device, and an array without a placement."""
    total = jax.device_put(np.asarray(batch).sum(), jax.devices()[5])
    return {"batch": batch, "mean": batch.mean(axis=0), "total": total, "new": jax.numpy.ones(2), "text": "x"}


def joined(stream: Any) -> Any:
    left, right = stream >> data.to_device(FOUR, jax.P("data")) >> data.split(2)
    return ps.map_each(pair, left, right >> data.to_device("cpu:6"))


pair = ps.node(name="pair")(lambda left, right: (left, right))


@ps.node
def keys(batch: Any) -> Any:
    key = jax.random.key(int(np.asarray(batch).sum() * 1e6) % 1000)
    return jax.device_put(jax.random.split(key, 8), jax.NamedSharding(FOUR.resolve(), jax.P("data")))


on_five = ps.node(name="on_five")(lambda batch: jax.device_put(batch, jax.devices()[5]))


def split_as(spec: Any) -> Any:
    """Returns a node that puts batches on four devices without `data.to_device`."""
    return ps.node(lambda batch: jax.device_put(batch, jax.NamedSharding(FOUR.resolve(), spec)))


PLACED: dict[str, Stage] = {
    "unread": lambda batches: batches >> data.to_device(FOUR, jax.P("data")),
    "explicit axes": lambda batches: batches >> data.to_device(mesh_of(4, 2), jax.P(None, "data")),
    "two axes": lambda batches: batches >> data.to_device(
        devices.DeviceMesh(shape=(2, 4), axis_names=("a", "b")), jax.P(("a", "b"))
    ),
    "on every device": lambda batches: batches >> data.to_device(FOUR),
    "one device": lambda batches: batches >> data.to_device("cpu:3"),
    "shuffled": lambda batches: batches >> data.to_device(FOUR, jax.P("data")) >> data.shuffled(5, seed=1),
    "computed": lambda batches: ps.map_each(summed, batches >> data.to_device(FOUR, jax.P("data"))),
    "branches": joined,
    "keys": lambda batches: ps.map_each(keys, batches >> data.to_device(FOUR, jax.P("data"))),
    "one that the user has chosen": lambda batches: ps.map_each(on_five, batches),
    "everywhere without to_device": lambda batches: ps.map_each(split_as(jax.P()), batches),
}  # fmt: skip


@pytest.mark.parametrize(("name", "batch"), [*[(name, None) for name in PLACED], ("unread", 8), ("shuffled", 8)])
async def test_batches_and_batches_of_records_come_back_where_they_were(
    tmp_path: Path, name: str, batch: int | None
) -> None:
    before, after, undisturbed = (call(PLACED[name], batch=batch) for _ in range(3))
    assert await stopped_and_resumed(tmp_path, before, after) == await whole(undisturbed)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((FOUR, "data"), (TWO, "data")),
        ((FOUR, "data"), (FOUR, None)),
        ((lambda: mesh_of(4), "data"), (lambda: mesh_of(4, 4), "data")),  # made late: there may be fewer devices
        ((FOUR, "data"), ("cpu",)),
        (("cpu:3",), (FOUR, "data")),
    ],
)
@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_batches_of_another_mesh_are_placed_as_new_ones(
    tmp_path: Path, before: tuple[Any, ...], after: tuple[Any, ...], shuffle: bool
) -> None:
    def made(device: Any, spec: Any = None) -> Any:
        stage = data.to_device(device() if callable(device) else device, jax.P(spec))

        def make(batches: Any) -> Any:
            return batches >> stage >> data.shuffled(5, seed=1) if shuffle else batches >> stage

        return call(make)

    got = await stopped_and_resumed(tmp_path, made(*before), made(*after))
    assert got[:13] == (await whole(made(*before)))[:13]
    assert got[13:] == (await whole(made(*after)))[13:]


@ps.node
def loss(batch: Any) -> Any:
    mean = float(np.asarray(batch).mean())
    return mean if mean > 0 else {"mean": mean, "as array": batch.mean()}


@pytest.mark.parametrize("after", [TWO, FOUR])
async def test_what_was_made_of_batches_stays_as_it_is(tmp_path: Path, after: Any) -> None:
    def made(mesh: Any) -> Any:
        return call(lambda batches: ps.map_each(loss, batches >> data.to_device(mesh, jax.P("data"))))

    got = await stopped_and_resumed(tmp_path, made(FOUR), made(after))
    kinds = [value[0] for value, _ in got]
    assert kinds == [value[0] for value, _ in await whole(made(after))]
    assert {*kinds} == {"float", "dict"}


@pytest.mark.parametrize("shuffle", [False, True])
async def test_batches_that_no_stage_has_split_are_refused(tmp_path: Path, shuffle: bool) -> None:
    def make(batches: Any) -> Any:
        split = ps.map_each(split_as(jax.P("data")), batches)
        return split >> data.shuffled(5, seed=1) if shuffle else split

    where = r'shuffled\["held"\]\[0\]' if shuffle else r'\(stream\)\["unread"\]\[0\]'
    every = {"every_records": 1} if shuffle else {}  # so that a barrier meets batches in the shuffle
    stream = engine.stream(call(make), checkpoint=ps.Checkpoint(tmp_path, **every))
    with pytest.raises((ps.EngineClosedError, ps.NotStorable)) as raised:
        await values_of(stream, 13)
    await stream.aclose()
    error = raised.value if raised.value.__cause__ is None else raised.value.__cause__
    assert isinstance(error, ps.NotStorable)
    assert re.search(where + r" is split over 4 devices.*data\.to_device", str(error))


SEEDS = 6


def placed(draw: Random, free: Random) -> Any:
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
    assert check_seeds(range(SEEDS * effort), uvloop.new_event_loop, request.node.nodeid, placed)
