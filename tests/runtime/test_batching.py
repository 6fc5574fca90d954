"""Batched nodes: one call of a function takes items of many requests, and each item has its own outcome."""

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

import penstock as ps
from penstock import engine, testing
from penstock.actors.batching import Batcher
from penstock.actors.own_loops import Mailbox, Request
from tests.kit import Gate, begun, cancelled_at_every_step, outcomes, virtual


class Recorder:
    """A batched function that doubles its items, and records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.at: list[float] = []

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.at.append(asyncio.get_running_loop().time())
        return [2 * item for item in items]

    def graph(self, *options: Any, **more: Any) -> Any:
        node: Any = ps.node(batch=ps.Batch(*options, **more), name="double")
        return ps.graph(node(self))


def doubled(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def test_the_value_of_a_resource_comes_with_each_item() -> None:
    opened: list[str] = []

    @ps.resource
    async def client() -> AsyncIterator[str]:
        opened.append("ab"[len(opened)])
        yield opened[-1]

    @ps.node(batch=ps.Batch(4))
    async def ask(items: list[tuple[int, str]]) -> list[str]:
        return [f"{number}{client}" for number, client in items]

    @ps.graph
    async def asked(number: int) -> str:
        return await ask((number, await client()))

    async with engine.deploy(asked) as service:
        assert await asyncio.gather(service(1), service(2)) == ["1a", "2a"]
        await service.reload(client)
        assert await asyncio.gather(service(1), service(2)) == ["1b", "2b"]


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"batch": ps.Batch(4)}, "batches of 4"),
        ({"batch": ps.Batch(8), "runs_on": "process", "concurrency": 2}, "process, batches of 8, 2 at once"),
        ({"batch": ps.Batch(2), "runs_on": "thread", "timeout_seconds": 3}, "thread, batches of 2, 3 s"),
    ],
)
def test_a_graph_is_drawn_with_its_batches_and_where_they_run(options: dict[str, Any], drawn: str) -> None:
    node: Any = ps.node(**options)(doubled)
    assert str(ps.graph(node)).splitlines()[-2].split("doubled")[1].strip() == drawn


async def test_items_of_requests_of_a_stream_and_of_map_each_are_handled_together() -> None:
    recorder = Recorder()
    graph = recorder.graph(4, max_wait_seconds=60)

    @ps.graph
    async def mapped(items: list[int]) -> list[int]:
        return await ps.map_each(graph, items)

    assert await engine.run(mapped(list(range(4)))) == [0, 2, 4, 6]
    async with engine.deploy(graph) as service:
        assert await asyncio.gather(*map(service, range(8))) == [2 * x for x in range(8)]
    assert recorder.batches == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert [result async for result in engine.stream(graph(x) for x in range(100))] == [2 * x for x in range(100)]
    assert set(map(len, recorder.batches)) == {4}


@virtual
async def test_a_small_batch_waits_for_others_and_no_longer() -> None:
    recorder = Recorder()
    async with engine.deploy(recorder.graph(3, max_wait_seconds=0.5)) as service:
        calls = [asyncio.create_task(service(0))]
        await asyncio.sleep(0.25)
        calls.append(asyncio.create_task(service(1)))
        await asyncio.gather(*calls)
        await asyncio.sleep(1)
        await asyncio.gather(*map(service, range(3)))  # a full batch does not wait
    assert recorder.batches == [[0, 1], [0, 1, 2]]
    assert recorder.at == [0.5, 1.5]


async def test_a_batch_is_limited_by_what_its_items_cost() -> None:
    sizes: list[list[int]] = []

    @ps.node(batch=ps.Batch(3, max_wait_seconds=0.01, max_cost=10, cost=len))
    async def lengths(texts: list[str]) -> list[int]:
        sizes.append([*map(len, texts)])
        return [*map(len, texts)]

    async with engine.deploy(ps.graph(lengths)) as service:
        results = await asyncio.gather(*(service("x" * size) for size in (6, 4, 1, 1, 1, 1, 10, 9, 2)))
    assert results == [6, 4, 1, 1, 1, 1, 10, 9, 2]
    assert sizes == [[6, 4], [1, 1, 1], [1], [10], [9], [2]]


async def test_an_item_that_costs_too_much_or_has_no_cost_is_refused_alone() -> None:
    def cost(value: int) -> float:
        if value == 3:
            raise KeyError("no price")
        if value == 6:  # as `result()` of a cancelled task does
            raise asyncio.CancelledError
        return {4: float("nan"), 5: -1}.get(value, value)

    @ps.node(batch=ps.Batch(8, max_wait_seconds=0.01, max_cost=10, cost=cost))
    async def same(values: list[int]) -> list[int]:
        return values

    async with engine.deploy(ps.graph(same)) as service:
        calls = [service(value) for value in (1, 3, 4, 5, 11, 6, 10)]
        first, *others, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 10)
    assert [type(error) for error in others] == [KeyError, TypeError, TypeError, ValueError, ps.NodeCancelledError]
    assert "node 'same': cost= of its Batch returned nan; return a finite number that is not negative" in str(others[1])
    assert "node 'same' refuses an item: it costs 11, and a whole batch may cost at most max_cost=10" in str(others[3])


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        ([1], ValueError, "got 3 items and returned 1 results"),
        ([1, 2, 3, 4], ValueError, "returned 4 results"),
        (None, TypeError, "returned NoneType"),
        ("abc", TypeError, "returned str"),
        (OSError("gone"), OSError, "gone"),
        (asyncio.CancelledError(), ps.NodeCancelledError, "was cancelled"),
    ],
)
async def test_a_batch_that_fails_as_a_whole_fails_all_of_its_items(returned: Any, error: Any, match: str) -> None:
    @ps.node(batch=ps.Batch(3, max_wait_seconds=60))
    async def wrong(items: list[int]) -> list[int]:
        if isinstance(returned, BaseException):
            raise returned
        return returned

    async with engine.deploy(ps.graph(wrong)) as service:
        for _ in range(2):  # the node goes on after the error
            for result in await asyncio.gather(*map(service, range(3)), return_exceptions=True):
                assert isinstance(result, error)
                assert match in str(result)


@virtual
async def test_cancelled_and_expired_items_are_not_in_the_batch() -> None:
    recorder = Recorder()
    graph = recorder.graph(3, max_wait_seconds=2)
    async with engine.deploy(graph) as service:
        gone, patient = await begun(service(0), service(1))
        gone.cancel()
        with pytest.raises(ps.DeadlineExceeded):
            await service.run(graph(2), timeout_seconds=1)
        assert await patient == 2
    assert recorder.batches == [[1]]


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_concurrency_counts_batches(concurrency: int) -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(batch=ps.Batch(2), concurrency=concurrency)) as service:
        calls = await begun(*map(service, range(10)))
        assert gate.gauge.now == concurrency
        gate.open()
        assert await asyncio.gather(*calls) == list(range(10))
    assert gate.gauge.peak == concurrency


async def test_what_waits_beyond_max_queue_is_refused() -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(batch=ps.Batch(2, max_queue=1))) as service:
        calls = await begun(*map(service, range(8)))
        # Two items run, two items form the next batch, one item waits; the others are refused.
        assert [call.done() for call in calls] == [False] * 5 + [True] * 3
        with pytest.raises(ps.Overloaded, match="'held' refuses an item"):
            await calls[7]
        gate.open()
        assert await outcomes(*calls) == [*range(5), *[ps.Overloaded] * 3]


async def test_a_batcher_whose_next_batch_was_cancelled_goes_on() -> None:
    gate = Gate()
    async with engine.deploy(gate.graph(batch=ps.Batch(2))) as service:
        calls = await begun(*map(service, range(6)))
        for call in calls[2:4]:
            call.cancel()
        await testing.wait_quiescent()
        gate.open()
        assert await outcomes(*calls) == [0, 1, *[asyncio.CancelledError] * 2, 4, 5]


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_batch_that_nobody_wants_any_more_is_cancelled(swallows: bool) -> None:
    gate = Gate()

    @ps.node(batch=ps.Batch(2))
    async def backend(items: list[int]) -> list[int]:
        try:
            return items if items == [2] else await gate.wait(items)
        except asyncio.CancelledError:
            if not swallows:
                raise
        return items

    async with engine.deploy(ps.graph(backend)) as service:
        calls = await begun(*map(service, range(2)))
        calls[0].cancel()
        await testing.wait_quiescent()
        assert not gate.cancelled  # the caller of the other item still waits
        calls[1].cancel()
        assert await service(2) == 2
        await asyncio.wait(calls)
    assert gate.came == gate.cancelled == [[0, 1]]


class HeldThread(Gate):
    """A batched function for a thread, whose batches wait at a gate; the test may wait for them without the loop."""

    def __init__(self, handle: Callable[[list[int]], Sequence[int]] = list) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self._handle = handle

    def __call__(self, items: list[int]) -> Sequence[int]:
        self.begun.release()
        return self._handle(self.block(items))

    def batched(self, max_size: int) -> ps.Graph[[int], int]:
        def hold(items: list[int]) -> Sequence[int]:
            return self(items)

        return ps.graph(ps.node(batch=ps.Batch(max_size), runs_on="thread")(hold))


async def queued(service: engine.Service[[int], int], items: range) -> list[asyncio.Task[int]]:
    """Call a service with the first item, and then with the other items, which wait for a batch."""
    calls = await begun(*map(service, items[:1]))
    calls += await begun(*map(service, items[1:]))
    return calls


async def test_a_thread_goes_on_with_what_waits_while_the_loop_is_held() -> None:
    held = HeldThread()
    async with engine.Engine() as own, own.deploy(held.batched(2)) as service:
        calls = await queued(service, range(6))
        held.open()
        for _ in range(2):
            assert held.begun.acquire(timeout=30)  # the loop takes no turn meanwhile
        assert await asyncio.gather(*calls) == list(range(6))
    assert held.came == [[0], [1, 2], [3, 4], [5]]


@asynccontextmanager
async def one_thread(max_size: int, *, of_engine: bool) -> AsyncIterator[tuple[HeldThread, Any, Any, Any]]:
    """A deployment with one thread; a batched node and a node for single items run the same function."""
    held = HeldThread()
    batched, other = held.batched(max_size), ps.graph(ps.node(runs_on="thread")(lambda x: held([x])[0]))
    async with (
        engine.Engine(max_workers=1 if of_engine else 8) as own,
        own.deploy(batched, other, max_workers=8 if of_engine else 1) as service,
    ):
        yield held, service, batched, other


@pytest.mark.parametrize("of_engine", [True, False], ids=["engine", "deployment"])
async def test_what_waits_for_a_thread_comes_before_the_next_batch(*, of_engine: bool) -> None:
    async with one_thread(1, of_engine=of_engine) as (held, service, batched, other):
        calls = await begun(service.run(batched(0)))
        calls += await begun(service.run(batched(1)), service.run(other(2)))
        held.open()
        assert await asyncio.gather(*calls) == [0, 1, 2]
    assert held.came == [[0], [2], [1]]


@pytest.mark.parametrize("of_engine", [True, False], ids=["engine", "deployment"])
@pytest.mark.parametrize(("leaving", "batches"), [([2], [[0], [1, 3], [4]]), ([1, 2, 3], [[0], [4]])])
async def test_who_leaves_while_a_batch_waits_for_a_thread_is_not_in_it(
    leaving: list[int], batches: list[list[int]], *, of_engine: bool
) -> None:
    async with one_thread(3, of_engine=of_engine) as (held, service, batched, other):
        calls = await begun(service.run(other(0)))
        calls += await begun(*(service.run(batched(x)) for x in (1, 2, 3)))
        for x in leaving:
            calls[x].cancel()
        await testing.wait_quiescent()
        held.open()
        assert await outcomes(*calls) == [asyncio.CancelledError if x in leaving else x for x in range(4)]
        assert await service.run(batched(4)) == 4
    assert held.came == batches


class Unreadable(list[int]):
    """A list that raises an error when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        raise KeyError("unreadable")


async def test_in_a_thread_each_batch_has_its_own_outcome_and_context() -> None:
    seen: list[int] = []
    number = contextvars.ContextVar("number", default=0)

    def handle(items: list[int]) -> Sequence[int]:
        seen.append(number.get())
        number.set(1)
        match items[0]:
            case 1:
                raise ValueError("one")
            case 2:
                raise asyncio.CancelledError
            case 3:
                raise StopIteration
            case 4:
                return []
            case 5:
                return ValueError("five")  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
            case 6:
                return Unreadable(items)
        return items

    held = HeldThread(handle)
    async with engine.Engine() as own, own.deploy(held.batched(1)) as service:
        calls = await queued(service, range(8))
        held.open()
        errors = [ValueError, ps.NodeCancelledError, RuntimeError, ValueError, TypeError, KeyError]
        assert await outcomes(*calls) == [0, *errors, 7]
    assert seen == [0] * 8


async def test_methods_are_batched_for_each_instance() -> None:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor
            self.batches: list[list[int]] = []

        @ps.node(batch=ps.Batch(4))
        async def scale(self, items: list[int]) -> list[int]:
            self.batches.append(items)
            return [item * self.factor for item in items]

    double, triple = Model(2), Model(3)

    @ps.graph
    async def both(x: int) -> tuple[int, int]:
        return await double.scale(x), await triple.scale(x)

    async with engine.deploy(both) as service:
        assert await asyncio.gather(*(service(x) for x in range(4))) == [(2 * x, 3 * x) for x in range(4)]
    assert double.batches == triple.batches == [[0, 1, 2, 3]]
    assert await double.scale(5) == 10


async def test_outside_a_graph_it_is_a_function_of_one_item() -> None:
    @ps.node(batch=ps.Batch(4))
    async def half(items: list[int]) -> list[int | ValueError]:
        return [ValueError("odd") if item % 2 else item // 2 for item in items]

    assert await half(4) == 2
    assert await ps.graph(half)(6) == 3
    with pytest.raises(ValueError, match="odd"):
        await half(3)


async def test_a_fake_takes_one_item() -> None:
    recorder = Recorder()
    node = ps.node(batch=ps.Batch(4), name="double")(recorder)

    async def fake(x: int) -> int:
        return -x

    with testing.replace(node, fake):
        assert await engine.run(ps.graph(node)(3)) == -3
    assert recorder.batches == []


async def test_policies_are_those_of_an_item() -> None:
    calls: list[list[int]] = []

    @ps.node(batch=ps.Batch(2), retry=ps.Retry(attempts=2))
    async def flaky(items: list[int]) -> list[int | Exception]:
        calls.append(items)
        return [OSError() if len(calls) == 1 and item == 1 else item for item in items]

    async with engine.deploy(ps.graph(flaky)) as service:
        assert await asyncio.gather(service(0), service(1)) == [0, 1]
    assert calls == [[0, 1], [1]]


def test_annotations_are_those_of_an_item() -> None:
    @ps.node(batch=ps.Batch(2))
    async def embed(texts: list[str]) -> list[tuple[int, int] | Exception]:
        return [(len(text), 0) for text in texts]

    @ps.graph
    async def sizes(text: str) -> int:
        size, _ = await embed(text)  # the annotation tells the length
        return size

    @ps.graph
    async def wrong(number: int) -> tuple[int, int]:
        return await embed(number)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    assert "embed" in str(engine.plan(sizes))
    with pytest.raises(ps.PlanError, match="takes str, but gets int"):
        engine.plan(wrong)


def test_what_cannot_be_batched_is_refused() -> None:
    async def fine(items: list[int]) -> list[int]:
        return items

    with pytest.raises(TypeError, match="async def"):
        ps.node(batch=ps.Batch(2), runs_on="thread")(fine)
    wrong = [lambda texts, models: texts, lambda texts, *, model: texts, lambda: None]
    for one in wrong:
        with pytest.raises(TypeError, match=r"'<lambda>' has batch=, so its function takes one list of items"):
            ps.node(batch=ps.Batch(2))(one)
    with pytest.raises(TypeError, match="for functions and methods"):
        ps.node(batch=ps.Batch(2))(Recorder)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


@virtual
async def test_an_abort_waits_for_a_thread_however_long_it_takes_and_no_further_batch_begins() -> None:
    held = HeldThread()
    async with engine.deploy(held.batched(1)) as service:
        calls = await queued(service, range(3))
        held.begun.acquire()  # otherwise abort() would skip the batch
        stopping = asyncio.create_task(service.abort())
        await asyncio.sleep(3600)  # virtual seconds
        assert not stopping.done()
        held.open()
        await stopping
        assert await outcomes(*calls) == [ps.EngineClosedError] * 3
    assert held.came == [[0]]


@virtual
async def test_the_end_of_the_inbox_lets_what_waits_go_at_once() -> None:
    recorder = Recorder()
    inbox: Mailbox[Request[int, int]] = Mailbox()
    batcher = Batcher(recorder, ps.Batch(2, max_wait_seconds=3600), 1, "batcher")
    looping = asyncio.create_task(batcher.loop(inbox))
    works = [Request[int, int](number) for number in range(5)]
    for work in works:
        await inbox.channel.put(work)
    await testing.wait_quiescent()
    inbox.channel.close()
    await looping
    assert [await work.outcome for work in works] == [0, 2, 4, 6, 8]
    assert recorder.batches == [[0, 1], [2, 3], [4]]
    assert asyncio.get_running_loop().time() == 0


@ps.node(batch=ps.Batch(3, max_wait_seconds=0.05), concurrency=2)
async def slow(items: list[int]) -> list[int]:
    await asyncio.sleep(0.01 * len(items))
    return items


def test_every_item_has_one_outcome_under_many_interleavings(effort: int) -> None:
    async def main() -> None:
        async with engine.deploy(ps.graph(slow)) as service:
            calls = [asyncio.create_task(service(x)) for x in range(10)]
            await asyncio.sleep(0.02)
            for call in calls[::3]:
                call.cancel()
            for x, result in enumerate(await outcomes(*calls)):
                assert result == x or (x % 3 == 0 and result is asyncio.CancelledError)

    testing.interleavings(main, count=50 * effort)


def test_a_cancel_at_every_step_leaves_nothing_behind() -> None:
    @ps.graph
    async def mapped(items: list[int]) -> list[int]:
        return await ps.map_each(slow, items)

    for outcome in cancelled_at_every_step(lambda: engine.run(mapped([1, 2, 3, 4]))):
        assert outcome.error or outcome.result == [1, 2, 3, 4]


class Large:
    """An argument that must not be held too long."""


@pytest.mark.parametrize("runs_on", ["loop", "thread"])
async def test_a_call_that_has_ended_holds_its_argument_no_longer(runs_on: Literal["loop", "thread"]) -> None:
    """Reference counts alone must free the argument: a cycle would keep it until the collector runs."""

    def handle(items: list[Large]) -> list[int]:
        return [1] * len(items)

    arguments: list[weakref.ref[Large]] = []

    async def ask(service: engine.Service[[Any], Any]) -> Any:
        argument = Large()
        arguments.append(weakref.ref(argument))
        return await service(argument)

    graph = ps.graph(ps.node(batch=ps.Batch(2), runs_on=runs_on)(handle))
    async with engine.deploy(graph) as service:
        await ask(service)
        gc.collect()
        gc.disable()
        try:
            assert [await ask(service) for _ in range(3)] == [1] * 3
            await asyncio.gather(*[ask(service) for _ in range(5)])
            await ask(service)  # a thread may still hold its last argument
            assert not [one for one in arguments[:-1] if one() is not None]
        finally:
            gc.enable()
