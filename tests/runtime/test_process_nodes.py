"""Process nodes that take lists, and classes with one instance in each worker process."""

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

import penstock as ps
from penstock import engine, testing
from tests.kit import actor, begun, outcomes, same
from tests.runtime import process_nodes as nodes

squared = ps.graph(nodes.squares)


async def test_a_process_node_and_a_method_take_a_list_of_many_callers() -> None:
    added = ps.graph(nodes.Offset(100).added)
    async with engine.Engine(max_processes=1) as own, own.deploy(squared, added) as service:
        assert await asyncio.gather(*map(service, range(10))) == [number**2 for number in range(10)]
        assert await outcomes(service(2), service(-1)) == [4, ValueError]
        assert own.statistics().processes.completed < 12
        assert await nodes.squares(3) == 9  # outside a graph: a batch of one item
        assert await service.map(added(number) for number in range(3)) == [100, 101, 102]


async def test_a_batch_dies_with_its_worker_and_the_next_one_gets_another() -> None:
    async with engine.Engine(max_processes=1) as own, own.deploy(squared) as service:
        assert await service(2) == 4
        results = await asyncio.gather(*map(service, (1, 13)), return_exceptions=True)
        for result in results:
            assert isinstance(result, ps.WorkerDied)
            message = str(result)
            assert re.search(r"worker process \d+ was killed by SIGKILL while it ran '.*:squares'", message)
            assert "the 2 items of this batch are affected, no others" in message
            assert "fewer items in a batch" in message
        assert await service(3) == 9


async def test_an_item_that_does_not_pickle_fails_alone_in_its_batch() -> None:
    lock, generator = threading.Lock(), (number for number in range(3))
    async with engine.Engine(max_processes=1) as own, own.deploy(ps.graph(nodes.unlocked)) as service:
        values = [1, lock, 2, 3, "lock", generator, 4, "api error", "unbuilt", "shared", "shared", {"five": 5}]
        results = await asyncio.gather(*map(service, values), return_exceptions=True)
    assert [result for result in results if not isinstance(result, Exception)] == [
        1, 2, 3, 4, *[b"shared"] * 2, {"five": 5},
    ]  # fmt: skip
    assert "an item (_thread.lock) of 'tests.runtime.process_nodes:unlocked' cannot be sent to" in str(results[1])
    assert "(_thread.lock) cannot be sent back" in str(results[4])
    assert "an item (generator)" in str(results[5])
    assert "returned tests.runtime.process_nodes.ApiError, which does not survive pickling" in str(results[7])
    assert "400: empty" in str(cast("Exception", results[7]).__cause__)
    assert "(tests.runtime.process_nodes.Unbuilt) cannot be sent back" in str(results[8])
    assert all(isinstance(results[position], TypeError) for position in (1, 4, 5, 7, 8))


async def test_an_error_of_a_run_inside_a_worker_process_is_raised_as_the_error_itself() -> None:
    async with engine.Engine(max_processes=1) as own:
        with pytest.raises(ValueError, match="no 3") as alone:
            await own.run(ps.graph(nodes.runs_a_graph)(3, in_group=False))
        with pytest.raises(ExceptionGroup) as group:
            await own.run(ps.graph(nodes.runs_a_graph)(4, in_group=True))
    assert alone.value.__notes__ == [
        "in node 'fails' of graph 'failing', item 0, attempt 1",
        "in node 'runs_a_graph' of graph 'runs_a_graph', item 0, attempt 1",
    ]
    assert [*map(str, group.value.exceptions)] == ["no 4"] * 2


async def test_what_results_of_a_batch_share_is_sent_once() -> None:
    shared, listed = ps.graph(nodes.sharing), ps.graph(nodes.with_table)
    async with engine.Engine(max_processes=1) as own, own.deploy(shared, listed) as service:
        found = await asyncio.gather(*[service.run(shared(number)) for number in range(3)])
        as_list = await asyncio.gather(*[service.run(listed(number)) for number in range(3)])
    assert [[*one] for one in found] == [[0], [1], [2]]
    assert len({id(one[number]) for number, one in enumerate(found)}) == 1
    assert [number for number, _ in as_list] == [0, 1, 2]


async def test_a_timeout_counts_from_the_begin_in_the_worker() -> None:

    async with engine.Engine(max_processes=1) as own, own.deploy(ps.graph(nodes.timed)) as service:
        # Together, the items take longer than the timeout of one item.
        results = await asyncio.gather(*[service(0.1) for _ in range(10)], service(60), return_exceptions=True)
        assert results[:10] == [0.1] * 10
        assert isinstance(results[10], ps.NodeTimeoutError)
        (node,) = service.statistics().actors
        assert 1 < node.busy_seconds < 4  # without the waits, which are much longer


async def test_the_time_that_each_attempt_has_waited_for_a_worker_is_not_that_of_the_node() -> None:

    async with engine.Engine(max_processes=1) as own, own.deploy(ps.graph(nodes.failing_once)) as service:
        assert await asyncio.gather(*map(service, range(8))) == list(range(8))
        (node,) = service.statistics().actors
        assert 0.75 < node.busy_seconds < 2.5  # each first attempt has waited up to 0.4 s, and each second 0.4 s


@pytest.mark.parametrize(("policy", "in_inbox"), [({}, 0), ({"capacity": 2}, 1), ({"max_bytes": 1000}, 3)])
async def test_bounds_of_an_inbox_bound_what_is_ahead_of_the_workers(policy: dict[str, Any], in_inbox: int) -> None:
    graph = ps.graph(ps.node(runs_on="process", **policy)(nodes.slow.fn))
    async with engine.Engine(max_processes=1) as own, own.deploy(graph) as service:
        calls = await begun(*map(service, range(4)))
        (actor,) = service.statistics().actors
        assert (actor.in_flight, actor.inbox.depth) == (1, in_inbox)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_batch_whose_callers_have_left_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setenv("PENSTOCK_TEST_FILE", str(begun))
    async with engine.Engine(max_processes=1) as own, own.deploy(squared) as service:
        call = asyncio.create_task(service(99))
        while not begun.exists():
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        assert await service(3) == 9
        assert own.statistics().processes.killed == 1


def told(path: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in path.read_text().splitlines())


async def test_each_worker_has_one_instance_which_is_entered_once_and_left_with_its_scope(tmp_path: Path) -> None:
    path = tmp_path / "told"
    graph = ps.graph(nodes.Model(str(path), factor=3))
    async with engine.Engine(max_processes=2) as own:
        async with own.deploy(graph) as service:
            results = await asyncio.gather(*map(service, range(100, 140)))
            assert [result[0] for result in results] == [3 * number for number in range(100, 140)]
            workers = Counter(process for _, process, _ in results)
            for process, calls in workers.items():
                assert sorted(count for _, at, count in results if at == process) == list(range(1, calls + 1))
            assert told(path) == {"entered": len(workers)}
            async with own.deploy(graph) as other:  # another scope has its own instances
                assert (await other(1))[2] == 1
            assert told(path) == {"entered": len(workers) + 1, "left": 1}
        assert told(path) == {"entered": len(workers) + 1, "left": len(workers) + 1}
        assert (await own.run(graph(2)))[0] == 6
    assert told(path)["left"] == told(path)["entered"]


async def test_an_instance_is_made_again_when_its_worker_has_died(tmp_path: Path) -> None:
    path = tmp_path / "told"
    async with engine.Engine(max_processes=1) as own, own.deploy(ps.graph(nodes.Model(str(path)))) as service:
        first = await service(1)
        with pytest.raises(ps.WorkerDied):
            await service(13)
        second = await service(2)
        assert (first[2], second[2]) == (1, 1)
        assert first[1] != second[1]
    assert told(path) == {"entered": 2, "left": 1}


async def test_an_instance_that_cannot_be_entered_fails_its_item(tmp_path: Path) -> None:
    async with engine.Engine(max_processes=1) as own, own.deploy(ps.graph(nodes.Model("", factor=-1))) as service:
        for _ in range(2):
            with pytest.raises(ValueError, match="no such model"):
                await service(1)


async def test_a_fake_of_a_class_in_processes_runs_here() -> None:
    node = nodes.Model("")
    with testing.replace(node, lambda number: (number, 0, 0)):
        assert await engine.run(ps.graph(node)(7)) == (7, 0, 0)


def test_what_supposes_one_instance_is_refused() -> None:
    class Plain:
        def __call__(self, number: int) -> int:
            return number

    class Entered(Plain):
        async def __aenter__(self) -> None: ...

    for options in ({"restart": "temporary"}, {"restart_on": (ValueError,)}, {"ordered": True}):
        with pytest.raises(TypeError, match="has an instance in each worker process"):
            ps.node(runs_on="process", **options)(Plain)
    with pytest.raises(TypeError, match="__enter__"):
        ps.node(runs_on="process")(Entered)
    with pytest.raises(TypeError, match="event loop"):
        actor(same.fn, runs_on="process")
