"""`devices.fit`, and batches whose size it finds: the sizes that it tries and its report; speed is not tested."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine
from penstock.devices import CgroupLimits, DeviceStatus, SlurmAllocation

jax = pytest.importorskip("jax")

from penstock.advice import fitting  # noqa: E402 - needs JAX
from penstock.devices import size_search  # noqa: E402 - needs JAX
from tests.devices.compiled import each_call, refuse_memory  # noqa: E402 - needs JAX
from tests.devices.kit import doubling, numbers_of, usual_device  # noqa: E402 - needs JAX

WIDTH = 256
ROW = np.zeros(WIDTH, np.float32)
ROW_BYTES = ROW.nbytes


scaled = ps.device_node(batch=devices.DeviceBatch(8), prefetch=1, name="scaled")(
    lambda x, weights: jax.numpy.tanh(x @ weights)
)
WEIGHTS = np.eye(WIDTH, dtype=np.float32)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_search, "_SECONDS_A_SIZE", 0.0)
    monkeypatch.setattr(size_search, "_LARGEST", 64)
    monkeypatch.setattr(size_search, "_MOST_IN_VAIN", 100)


async def fitted(limit: Any = "auto", items: int | None = None) -> devices.FitPlan:
    return await devices.fit(scaled, (ROW,), limit, items, resources={"weights": WEIGHTS})


async def test_sizes_are_tried_and_the_knee_is_recommended() -> None:
    plan = await fitted()
    assert [one.size for one in plan.tried] == [1, 2, 4, 8, 16, 32, 64]
    best = max(one.items_per_second or 0 for one in plan.tried)
    for one in plan.tried:
        assert one.median_seconds is not None
        assert 0 < (one.low_seconds or 0) <= one.median_seconds <= (one.high_seconds or 0)
        assert one.items_per_second == pytest.approx(one.size / one.median_seconds)
        assert one.why_not == ""
        if one.size <= plan.recommended_size:
            assert (one.items_per_second >= 0.9 * best) == (one.size == plan.recommended_size)
    assert plan.fixed_bytes == pytest.approx(WEIGHTS.nbytes, rel=0.1)
    assert 2 * ROW_BYTES <= plan.bytes_per_item <= 4 * ROW_BYTES  # argument and result, perhaps temporaries
    assert plan.largest_size is not None
    assert plan.fixed_bytes + plan.bytes_per_item * plan.largest_size <= plan.limit.bytes


async def test_a_size_that_exceeds_the_limit_is_not_run() -> None:
    ran: list[int] = []
    limit = WEIGHTS.nbytes + 20 * ROW_BYTES
    with each_call(lambda args: ran.append(args[0].shape[0])):
        plan = await fitted(limit)
    assert plan.tried[-1].why_not == "over the limit"
    assert plan.tried[-1].bytes > limit
    assert all(one.bytes <= limit for one in plan.tried[:-1])
    assert max(ran) == plan.tried[-2].size
    assert (plan.limit.bytes, plan.limit.reserve_bytes) == (limit, 0)
    on = usual_device()
    message = f"of node 'scaled' fits on {on}, over the limit: a batch of 1 takes .* kB, and the limit is 1.00 kB"
    with pytest.raises(ps.DeviceError, match=message):
        await fitted(1000)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
async def test_only_an_accelerator_may_run_out_of_memory(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(size_search, "platform_of", lambda device: platform)
    with each_call(lambda args: args[0].shape[0] <= 4 or refuse_memory()):
        if platform == "cpu":
            with pytest.raises(ps.DeviceError, match="does not fit"):
                await fitted(1 << 30)
            return
        plan = await fitted(1 << 30)
    assert [one.size for one in plan.tried] == [1, 2, 4, 8]
    assert plan.tried[-1].why_not == "no memory left"
    assert plan.recommended_size <= 4


async def test_a_node_without_batch_is_tried_as_if_it_had_one_and_stays_as_it_is() -> None:
    summed = ps.device_node(name="summed")(lambda x: x.sum())
    plan = await devices.fit(summed, (ROW,), 40 * ROW_BYTES)
    assert plan.node == "summed"
    assert len(plan.tried) > 2
    assert float(await engine.run(ps.graph(summed)(ROW + 1))) == WIDTH
    assert summed.batch_statistics().batches == 0


@pytest.mark.several_devices
async def test_on_a_mesh_sizes_are_multiples_of_its_devices_and_bytes_those_of_each() -> None:
    mesh = devices.DeviceMesh(shape=(4,), axis_names=("data",), device="cpu")
    node = ps.device_node(device=mesh, batch=ps.Batch(64), prefetch=1, in_specs={"x": jax.P("data")})(lambda x: x * 2)
    plan = await devices.fit(node, (ROW,), items=32)
    assert [one.size for one in plan.tried] == [4, 8, 16, 32]
    assert [one.bytes for one in plan.tried] == [one.size // 4 * 2 * ROW_BYTES for one in plan.tried]
    assert "over a mesh" not in [one.approach for one in plan.strategies]  # it already runs on a mesh
    assert plan.device == "mesh(data=4)"


class TestStrategies:
    LIMIT = WEIGHTS.nbytes + 100 * ROW_BYTES

    @pytest.mark.parametrize(
        ("items", "approach", "says", "impossible"),
        [
            # CPU devices share their memory, so a mesh cannot help.
            (10, "all in memory", "within the limit", {"over a mesh"}),
            (100_000, "in chunks", "calls of ", {"all in memory", "over a mesh"}),
            (10**12, "as a stream", "", {"all in memory", "over a mesh", "in chunks"}),
            (None, "as a stream", "is not known", set[str]()),
        ],
    )
    async def test_on_one_host(self, items: int | None, approach: str, says: str, impossible: set[str]) -> None:
        plan = await fitted(self.LIMIT, items)
        assert plan.strategy.approach == approach
        assert says in plan.strategy.reason
        assert {one.approach for one in plan.strategies if not one.is_possible} == impossible
        if items == 10:
            assert "+ 10 × " in plan.strategy.formula
            assert max(one.size for one in plan.tried) == 8

    async def test_over_a_mesh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Card:
            platform = "gpu"

            def __eq__(self, other: object) -> bool:
                return other is jax.devices()[0]

            __hash__ = object.__hash__

            def memory_stats(self) -> dict[str, int]:
                return {"bytes_limit": TestStrategies.LIMIT * 10 // 9 + 6, "bytes_in_use": 5}

        monkeypatch.setattr(size_search, "local_devices", lambda platform: [Card()] if platform == "gpu" else [])
        monkeypatch.setattr(size_search, "platform_of", lambda device: "gpu")
        found = devices.status()
        card = DeviceStatus(
            name="gpu:0", id=0, platform="gpu", kind="card", process=0, is_local=True,
            memory_bytes_in_use=None, memory_bytes_limit=None,
        )  # fmt: skip
        status = type(found)(**{**vars(found), "devices": (card, *[type(card)(**{**vars(card), "id": 1})] * 3)})
        monkeypatch.setattr(fitting, "status", lambda: status)
        plan = await fitted(items=100)
        assert plan.limit.bytes == pytest.approx(self.LIMIT, abs=2)
        assert "what gpu:0 has free" in plan.limit.source
        assert plan.limit.reserve_bytes == pytest.approx(self.LIMIT / 9, abs=2)
        assert plan.strategy.approach == "over a mesh"
        assert "on each of 4 devices" in plan.strategy.reason


async def test_the_least_of_what_limits_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_search, "read_resident_memory", lambda: 1_000_000_000)
    monkeypatch.setattr(size_search, "read_free_memory", lambda: 90_000_000_000)

    async def limit(cgroup: CgroupLimits, slurm: SlurmAllocation | None) -> devices.MemoryLimit:
        monkeypatch.setattr(size_search, "read_cgroup_limits", lambda: cgroup)
        monkeypatch.setattr(size_search, "read_slurm", lambda environment: slurm)
        return (await fitted()).limit

    group = CgroupLimits(version=2, cpu_quota=None, memory_bytes=11_000_000_000)
    no_group = CgroupLimits(version=2, cpu_quota=None, memory_bytes=None)
    job = SlurmAllocation(
        job_id="1", node_list=None, nodes=2, tasks=8, task=0, cpus_per_task=1, gpus_on_node=0,
        memory_bytes_per_node=24_000_000_000,
    )  # fmt: skip
    for cgroup, slurm, gigabytes, reserve, source in (
        (no_group, None, 81, 9, "the machine"),
        (group, None, 9, 1, "control group"),
        (group, job, 4.5, 0.5, "SLURM"),  # 24 GB for four tasks
    ):
        found = await limit(cgroup, slurm)
        assert (found.bytes, found.reserve_bytes) == (gigabytes * 10**9, reserve * 10**9)
        assert source in found.source


async def test_it_is_a_table_and_a_picture() -> None:
    plan = await fitted(WEIGHTS.nbytes + 20 * ROW_BYTES, items=1000)
    for part in ("recommended", "in chunks", "items/s"):
        assert part in str(plan)
    picture = plan.to_svg()
    root = ElementTree.fromstring(picture)
    titles = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == f"scaled on {usual_device()}"
    assert len(titles) == 1 + len(plan.tried)
    assert "over the limit" in titles[-1]
    assert plan._repr_svg_() == picture
    assert "recommended" in plan._repr_html_()


async def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"takes a node made by @ps\.device_node"):
        await devices.fit(len, (ROW,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write \(argument,\)"):
        await devices.fit(scaled, ROW)  # type: ignore[arg-type]
    for wrong in ({"limit": 0}, {"limit": "all"}, {"items": 0}):
        with pytest.raises(ps.OptionsError):
            await devices.fit(scaled, (ROW,), **wrong)  # type: ignore[arg-type]


class TestAuto:
    @pytest.mark.parametrize("batch", [ps.Batch("auto"), devices.DeviceBatch("auto")])
    async def test_the_size_is_found_out_at_warm_up(self, batch: ps.Batch) -> None:
        doubled = ps.device_node(batch=batch, sample_input=(ROW,))(lambda x: x * 2)
        of = ps.graph(doubled)
        assert "up to auto" in str(of)
        async with engine.deploy(of, warmup=True) as service:
            assert "up to auto" not in str(of)
            programs = doubled.compile_statistics().programs
            results = await asyncio.gather(*(service(ROW + n) for n in range(10)))
            assert numbers_of(results) == [2 * n for n in range(10)]
            assert doubled.compile_statistics().programs == programs

    async def test_without_warm_up_it_is_found_out_before_the_first_call(self) -> None:
        of = doubling(batch=ps.Batch("auto"), sample_input=[(ROW,)])
        results = await asyncio.gather(*(engine.run(of(ROW + n)) for n in range(4)))
        assert numbers_of(results) == [0, 2, 4, 6]

    async def test_with_parameters_from_a_resource_it_takes_a_warm_up(self) -> None:
        weighted = ps.device_node(batch=ps.Batch("auto"), sample_input=(ROW,))(lambda x, weights: x @ weights)

        @ps.resource
        async def weights() -> AsyncIterator[Any]:
            yield WEIGHTS

        @ps.graph
        async def of(x: Any) -> Any:
            return weighted(x, await weights())

        with pytest.raises(ps.DeviceError, match="warmup=True"):
            await engine.run(of(ROW))
        async with engine.deploy(of, warmup=True) as service:
            assert float((await service(ROW + 1))[0]) == 1.0

    async def test_nodes_that_become_one_program_have_one_size(self) -> None:
        made = ps.device_node(batch=ps.Batch("auto"), sample_input=(ROW,))
        doubled = made(lambda x: x * 2)
        halves = made(lambda x: {"low": x[: WIDTH // 2].sum(), "high": x[WIDTH // 2 :].sum()})

        @ps.graph
        async def of(x: Any) -> Any:
            return halves(doubled(x))["low"]

        async with engine.deploy(of, warmup=True) as service:
            results = await asyncio.gather(*(service(ROW + n) for n in range(10)))
            assert numbers_of(results) == [WIDTH * n for n in range(10)]

    def test_refusals(self) -> None:
        with pytest.raises(TypeError, match="no sample_input="):
            ps.device_node(batch=ps.Batch("auto"))(lambda x: x)
        with pytest.raises(TypeError, match="for device nodes"):
            ps.node(batch=ps.Batch("auto"))(lambda xs: xs)
        with pytest.raises(ps.OptionsError, match='or "auto" on a device node'):
            ps.Batch("large")  # type: ignore[arg-type]
        with pytest.raises(ps.OptionsError, match="no bucket may be above"):
            devices.DeviceBatch("auto", buckets=(1, 8))
