"""Results that a node keeps: their scope, their lifetime, and one computation at a time for all equal calls."""

import asyncio
import contextlib
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, testing
from tests.kit import Gate, Gauge, Renamed, begun, model, numbers, outcomes, slow_to_leave, values_of, virtual

KEPT = ps.Cache(max_bytes=1_000_000)


class Calls(Counter[Any]):
    """Counts the computations, by argument."""

    def node(self, cache: ps.Cache = KEPT, **policy: Any) -> Any:
        @ps.node(cache=cache, **policy)
        async def compute(value: Any) -> str:
            self[repr(value)] += 1
            await asyncio.sleep(0)
            return f"of {value}"

        return compute


def beside(argument: object) -> int:
    """Returns the bytes that an entry counts besides its result."""
    key = [argument] if isinstance(argument, str) else [(int, argument), argument]
    return 300 + sum(map(sys.getsizeof, [(None, None), *key]))


def counts_of(service: engine.Service[Any, Any]) -> tuple[int, int, int, int]:
    found = cache_of(service)
    return found.hits, found.misses, found.joined, found.evicted


def cache_of(service: engine.Service[Any, Any]) -> engine.CacheStatistics:
    [found] = [actor.cache for actor in service.statistics().actors if actor.cache is not None]
    return found


async def test_equal_calls_of_an_engine_get_the_result_that_is_kept() -> None:
    calls = Calls()
    ask = ps.graph(calls.node())
    async with engine.Engine() as one, engine.Engine() as other:
        assert [await one.run(ask("a")) for _ in range(3)] == ["of a"] * 3
        async with one.deploy(ask) as service:
            assert await service.run(ask("a")) == "of a"
            assert await service.run(ask("b")) == "of b"
            assert counts_of(service) == (1, 1, 0, 0)
            assert cache_of(service).bytes_held == 2 * (beside("a") + sys.getsizeof("of a"))
        assert calls == {"'a'": 1, "'b'": 1}
        await other.run(ask("a"))
    assert calls["'a'"] == 2


async def test_a_hundred_equal_calls_at_once_run_once() -> None:
    calls = Calls()
    ask = ps.graph(calls.node(concurrency=1))
    async with engine.deploy(ask, max_in_flight=100) as service:
        assert await asyncio.gather(*[service.run(ask("a")) for _ in range(100)]) == ["of a"] * 100
        assert counts_of(service) == (0, 1, 99, 0)
    assert await asyncio.gather(*[engine.run(ask("c")) for _ in range(100)]) == ["of c"] * 100
    assert calls == {"'a'": 1, "'c'": 1}


async def test_the_types_of_arguments_are_part_of_the_key() -> None:
    calls = Calls()
    ask = ps.graph(calls.node())
    values = [
        1, True, 1.0, complex(-1, 0.0), complex(-1, -0.0), 0, 0.0, -0.0, "1", b"1", None, (), (1,), (True,), ((1,),),
        (1, None),
    ]  # fmt: skip
    async with engine.Engine() as e:
        for _ in range(2):
            for value in values:
                assert await e.run(ask(value)) == f"of {value}"
    assert calls == {repr(value): 1 for value in values}


@dataclass
class Question:
    text: str
    asked_at: float


async def test_other_arguments_need_a_key() -> None:
    calls = Calls()
    with pytest.raises(ps.PlanError, match=r"argument of type Question: without key=.*key=lambda question"):
        await engine.run(ps.graph(calls.node())(Question("a", 1)))
    keyed = ps.graph(calls.node(ps.Cache(max_bytes=1000, key=lambda question: question.text)))
    async with engine.Engine() as e:
        first = await e.run(keyed(Question("a", 1)))
        assert await e.run(keyed(Question("a", 2))) == first
        assert await e.run(keyed(Question("b", 2))) != first


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda value: [], r"key= of the cache of node 'compute' returned \[\], which is not hashable"),
        (lambda value: asyncio.sleep(0), "a key is what a plain function returns"),
    ],
)
async def test_a_key_that_is_not_hashable_or_would_have_to_be_awaited_is_refused(key: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        await engine.run(ps.graph(Calls().node(ps.Cache(max_bytes=1000, key=key)))(1))


async def test_keys_and_results_of_no_bytes_count() -> None:
    @ps.node(cache=ps.Cache(max_bytes=100_000, size=lambda result: 0))
    async def nothing(value: str) -> None:
        pass

    async with engine.deploy(ps.graph(nothing)) as service:
        for number in range(400):
            await service(f"{number:01000}")
        found = cache_of(service)
        assert 60 < 400 - found.evicted < 80
        assert 90_000 < found.bytes_held <= 100_000


async def test_a_key_whose_hash_changes_ends_and_goes_as_others_do() -> None:
    @ps.node(cache=ps.Cache(max_bytes=1000, key=lambda value: value))
    async def rename(value: Renamed) -> str:
        value.name += "!"
        return value.name

    async with engine.deploy(ps.graph(rename)) as service:
        for number in range(10):
            assert await service(Renamed(f"{number}")) == f"{number}!"
        assert cache_of(service).bytes_held <= 1000


async def test_a_result_of_unknown_size_is_kept_only_with_size() -> None:
    computed = 0

    def returning(cache: ps.Cache) -> Any:
        @ps.node(cache=cache)
        async def make(value: int) -> Question:
            nonlocal computed
            computed += 1
            return Question("a", 1)

        return ps.graph(make)

    unknown, known = returning(KEPT), returning(ps.Cache(max_bytes=1000, size=lambda result: len(result.text)))
    async with engine.Engine() as e:
        with structlog.testing.capture_logs() as logs:
            assert await e.run(unknown(1)) is not await e.run(unknown(1))
        assert [log["event"] for log in logs] == ["cache.unknown_size"]
        assert "size=lambda result" in logs[0]["remedy"]
        assert await e.run(known(1)) is await e.run(known(1))
    assert computed == 3


@pytest.mark.parametrize("wrong", [-1, None, "1"])
async def test_a_size_that_is_no_number_of_bytes_is_refused(wrong: Any) -> None:
    ask = ps.graph(Calls().node(ps.Cache(max_bytes=1000, size=lambda result: wrong)))
    with pytest.raises(ps.OptionsError, match=r"node 'compute': the result of size= of its cache"):
        await engine.run(ask("a"))


async def test_the_size_of_common_results_is_known_and_all_callers_get_the_same_object() -> None:
    results: dict[int, tuple[Any, list[Any] | None]] = dict(enumerate([
        ("abc", []), (b"abc", []), (7, []), (None, []), ([1, "ab"], [1, "ab"]), ({"a": (1.5,)}, ["a", (1.5,), 1.5]),
        (np.zeros(4), None), (np.zeros(4)[:1], None),
    ]))  # fmt: skip

    @ps.node(cache=KEPT)
    async def make(number: int) -> Any:
        return results[number][0]

    for number, (result, parts) in results.items():
        async with engine.Engine() as own, own.deploy(ps.graph(make)) as service:
            assert await service(number) is await service(number)
            size = 32 if parts is None else sum(map(sys.getsizeof, [result, *parts]))
            assert cache_of(service).bytes_held == beside(number) + size, result


async def test_arrays_are_read_only() -> None:
    @ps.node(cache=KEPT)
    async def array(count: int) -> np.ndarray:
        return np.zeros(count)

    with pytest.raises(ValueError, match="read-only"):
        (await engine.run(ps.graph(array)(3)))[0] = 1


async def test_a_device_array_is_refused() -> None:
    jnp = pytest.importorskip("jax.numpy")

    @ps.node(cache=KEPT)
    async def on_device(count: int) -> Any:
        return jnp.zeros(count)

    with pytest.raises(ps.PlanError, match=r"returned an array on a device.*numpy\.asarray"):
        await engine.run(ps.graph(on_device)(3))


async def test_the_instance_of_a_resource_is_part_of_the_key() -> None:
    opened = itertools.count(1)
    computed: list[int] = []

    @ps.resource
    async def index() -> AsyncIterator[list[int]]:
        yield [next(opened)]

    @ps.node(cache=KEPT)
    async def search(where: list[int], question: str) -> int:
        computed.append(where[0])
        return where[0]

    @ps.graph
    async def ask(question: str) -> int:
        return await search(await index(), question)

    async with engine.Engine() as e, e.deploy(ask) as service:
        assert [await service.run(ask("a")) for _ in range(2)] == [1, 1]
        await service.reload(index)
        assert [await service.run(ask("a")) for _ in range(2)] == [2, 2]
    assert computed == [1, 2]


async def test_two_instances_of_a_class_keep_results_of_their_own() -> None:
    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        @ps.node(cache=KEPT)
        async def ask(self, question: str) -> str:
            return f"{self.name}: {question}"

    one, other = Client("one"), Client("other")

    @ps.graph
    async def both(question: str) -> tuple[str, str]:
        return await one.ask(question), await other.ask(question)

    async with engine.Engine() as e:
        assert [await e.run(both("a")) for _ in range(2)] == [("one: a", "other: a")] * 2


async def test_a_fake_has_results_of_its_own() -> None:
    calls = Calls()
    node = calls.node()
    ask = ps.graph(node)

    async def fake(value: Any) -> str:
        return "fake"

    async with engine.Engine() as e:
        assert await e.run(ask("a")) == "of a"
        with testing.replace(node, fake):
            assert await e.run(ask("a")) == "fake"
        assert await e.run(ask("a")) == "of a"
    assert calls["'a'"] == 1


@pytest.mark.parametrize("policy", [{}, {"retry": ps.Retry(2)}, {"timeout_seconds": 60}, {"failover": None}])
async def test_the_first_caller_that_still_waits_gets_the_exception_itself(policy: dict[str, Any]) -> None:
    """Other callers get copies, with notes of their own; the next call computes anew."""
    raised: list[LookupError] = []
    gate = Gate()

    async def fails(value: str) -> str:
        await gate.wait(value)
        raised.append(LookupError(value))
        raised[-1].add_note("a note of its own")
        raise raised[-1]

    if "failover" in policy:
        policy = {"failover": ps.node(name="backup")(fails)}
    ask = ps.graph(ps.node(cache=KEPT, **policy)(fails))
    async with engine.deploy(ask) as service:
        waiting = await begun(*map(service, "aaaa"))
        waiting[0].cancel()
        await testing.wait_quiescent()
        gate.open()
        gone, *errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(gone, asyncio.CancelledError)
        assert len(gate.came) == (2 if "retry" in policy or "failover" in policy else 1)
        assert [error is raised[-1] for error in errors] == [True, False, False]
        for item, error in enumerate(errors, 1):
            assert isinstance(error, LookupError)
            where = f"in node 'fails' of graph 'fails', item {item}, attempt 1"
            assert error.__notes__ == ["a note of its own", where]
            assert error is raised[-1] or error.__traceback__ is not raised[-1].__traceback__
        with pytest.raises(LookupError) as caught:
            await service("a")
        assert caught.value is raised[-1]
    with pytest.raises(LookupError) as caught:
        await engine.run(ask("a"))
    assert caught.value is raised[-1]


async def test_results_of_fallback_and_failover_are_not_kept() -> None:
    is_down = True

    @ps.node
    async def backup(value: str) -> str:
        return "backup"

    async def primary(value: str) -> str:
        await asyncio.sleep(0)
        if is_down:
            raise ConnectionError
        return "primary"

    for policy in ({"failover": backup}, {"fallback": lambda error: "backup"}):
        is_down = True
        node: Any = ps.node(cache=KEPT, **policy)(primary)  # type: ignore[call-overload]
        ask = ps.graph(node)
        async with engine.Engine() as e:
            assert await asyncio.gather(*[e.run(ask("a")) for _ in range(3)]) == ["backup"] * 3
            is_down = False
            assert await e.run(ask("a")) == "primary"
            is_down = True
            assert await e.run(ask("a")) == "primary"


@pytest.mark.parametrize("how", ["cancelled in a deployment", "cancelled in an engine", "expired"])
@virtual
async def test_a_leader_that_leaves_does_not_end_the_computation_for_the_others(how: str) -> None:
    gate = Gate()
    ask = gate.graph(cache=KEPT)
    async with engine.Engine() as e, e.deploy(ask) as service:
        runner: Any = e if how == "cancelled in an engine" else service
        [leader] = await begun(runner.run(ask("a"), timeout_seconds=1 if how == "expired" else None))
        others = await begun(*(runner.run(ask("a")) for _ in range(3)))
        if how != "expired":
            leader.cancel()
        assert await outcomes(leader) == [ps.DeadlineExceeded if how == "expired" else asyncio.CancelledError]
        gate.open()
        assert await asyncio.gather(*others) == ["a"] * 3
    assert (gate.came, gate.cancelled) == (["a"], [])


@virtual
async def test_the_computation_is_cancelled_and_has_unwound_when_the_last_waiter_has_left() -> None:
    ask = ps.graph(slow_to_leave.with_policy(cache=KEPT))
    async with engine.Engine() as e:
        waiters = await begun(*(e.run(ask(1)) for _ in range(3)))
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        assert asyncio.get_running_loop().time() == 1


async def test_it_runs_without_the_context_of_its_callers() -> None:

    who: ContextVar[str] = ContextVar("who", default="nobody")

    @ps.node(cache=KEPT)
    async def asks(value: str) -> list[Any]:
        return [who.get(), ps.current().remaining_seconds(), ps.current().node]

    who.set("a caller")
    assert await engine.run(ps.graph(asks)("a"), timeout_seconds=60) == ["nobody", None, "asks"]


async def test_a_deployment_that_ends_leaves_the_computation_to_the_others() -> None:
    gate = Gate()
    ask = gate.graph(cache=KEPT)
    async with engine.Engine() as e:
        async with e.deploy(ask) as service:
            leader = asyncio.create_task(service.run(ask("a")))
            await gate.has()
            [other] = await begun(e.run(ask("a")))
            leader.cancel()
            await asyncio.wait([leader])
        assert gate.cancelled == ["a"]
        gate.open()
        assert await other == "a"
    assert (gate.came, gate.cancelled) == (["a", "a"], ["a"])


async def test_an_engine_that_is_closed_leaves_no_computation() -> None:
    gate = Gate()
    async with engine.Engine() as e:
        call = asyncio.create_task(e.run(gate.graph(cache=KEPT)("a")))
        await gate.has()
    with pytest.raises(ps.EngineClosedError):
        await call
    assert gate.cancelled == ["a"]


async def test_a_node_that_calls_itself_with_equal_arguments_is_refused() -> None:
    @ps.node(cache=KEPT)
    async def around(value: str) -> str:
        return await engine.run(ask(value))

    ask = ps.graph(around)
    with pytest.raises(ps.ReentrantCallError, match="computes one by calling itself with equal arguments"):
        await engine.run(ask("a"))


async def test_a_wait_for_the_own_place_is_refused_through_a_computation() -> None:
    @ps.node(concurrency=1, cache=KEPT)
    async def down(count: int) -> int:
        return 0 if not count else 1 + await engine.run(ask(count - 1))

    ask = ps.graph(down)
    with pytest.raises(ps.ReentrantCallError, match="the only place is held by handlers that wait"):
        await asyncio.wait_for(engine.run(ask(1)), 60)


async def test_a_call_that_joins_a_computation_that_waits_for_its_place_is_refused() -> None:
    gate = Gate()

    @ps.node(concurrency=1, cache=KEPT)
    async def down(count: int) -> int:
        return 1 + await e.run(ask(await gate.wait(count) - 1)) if count else 0

    ask = ps.graph(down)
    async with engine.Engine() as e:
        outer, inner = await begun(e.run(ask(1)), e.run(ask(0)))  # the second run waits for the place
        gate.open()
        with pytest.raises(ps.ReentrantCallError, match="the only place is held by handlers that wait"):
            await asyncio.wait_for(outer, 60)
        await asyncio.gather(inner, return_exceptions=True)


async def test_computations_that_would_wait_for_each_other_are_refused() -> None:
    both = asyncio.Barrier(2)

    @ps.node(cache=KEPT)
    async def mutual(value: int) -> int:
        await both.wait()
        return await e.run(ask(3 - value))

    ask = ps.graph(mutual)
    async with engine.Engine() as e, e.deploy(ask) as service:
        async with asyncio.timeout(60):
            assert await outcomes(service(1), service(2)) == [ps.ReentrantCallError] * 2


async def test_an_abort_ends_computations_that_wait_for_each_other_unseen() -> None:
    both, waits = asyncio.Barrier(2), 0

    @ps.node(cache=KEPT)
    async def mutual(value: int) -> int:
        nonlocal waits
        await both.wait()
        waits += 1
        # A task with an empty context: the engine cannot know the call that it works for.
        return await asyncio.create_task(e.run(ask(3 - value)), context=Context())

    ask = ps.graph(mutual)
    async with engine.Engine() as e, e.deploy(ask) as service:
        calls = await begun(*(service.run(ask(value)) for value in (1, 2)))
        assert waits == 2
        await asyncio.wait_for(service.abort(), 60)
        await asyncio.gather(*calls, return_exceptions=True)


async def test_without_reuse_of_plans_nothing_is_kept() -> None:
    calls = Calls()
    ask = ps.graph(calls.node())
    async with engine.Engine() as e:
        assert [await e.run(ask("a"), reuse_plans=False) for _ in range(2)] == ["of a"] * 2
        async with e.deploy(ask, reuse_plans=False) as service:
            await asyncio.gather(*[service.run(ask("a")) for _ in range(3)])
    assert calls["'a'"] == 5


async def test_hits_need_no_place_of_the_node() -> None:
    gate = Gate()
    ask = gate.graph(cache=KEPT, concurrency=1)
    async with engine.deploy(ask) as service:
        gate.open()
        await service("fast")
        gate.close()
        [waits] = await begun(service("slow"))
        assert await service("fast") == "fast"
        gate.open()
        await waits


@pytest.mark.parametrize("policy", [{"runs_on": "thread"}, {"batch": ps.Batch(8, max_wait_seconds=0.001)}])
async def test_threads_and_batches_keep_results(policy: dict[str, Any]) -> None:
    computed: list[int] = []

    def double(value: Any) -> Any:
        computed.extend(value if "batch" in policy else [value])
        return [2 * one for one in value] if "batch" in policy else 2 * value

    async with engine.deploy(ps.graph(ps.node(cache=KEPT, **policy)(double))) as service:
        assert await asyncio.gather(*[service(number % 3) for number in range(9)]) == [0, 2, 4] * 3
    assert sorted(computed) == [0, 1, 2]


async def test_in_a_stream_and_in_a_body() -> None:
    calls = Calls()
    node = calls.node()
    ask = ps.graph(node)

    @ps.graph
    async def each(values: list[str]) -> list[str]:
        return await ps.map_each(node, values)

    async with engine.Engine() as e:
        assert await values_of(e.stream(map(ask, "010101"))) == ["of 0", "of 1"] * 3
        assert await e.run(each(["0", "1", "2"])) == ["of 0", "of 1", "of 2"]
    assert calls == {"'0'": 1, "'1'": 1, "'2'": 1}


def test_it_is_drawn_with_what_it_computes() -> None:
    drawn = str(ps.graph(Calls().node(retry=ps.Retry(3))))
    assert "cached" in drawn
    assert "computed" in drawn


# Refused options and keys.


async def test_effects_state_and_streams_are_not_kept() -> None:
    with pytest.raises(ps.OptionsError, match="cache=, effectful=True"):
        ps.node(effectful=True, cache=KEPT)(asyncio.sleep)
    with pytest.raises(TypeError, match="stateful node 'Model' cannot have cache="):
        model(cache=KEPT)
    with pytest.raises(TypeError, match="async generator, to which cache= does not apply"):
        ps.node(cache=KEPT)(numbers.fn)

    @ps.node(cache=KEPT)
    async def add(values: AsyncIterator[int]) -> int:
        return sum([value async for value in values])

    with pytest.raises(ps.PlanError, match="has cache= and reads a stream"):
        await engine.run((numbers >> add)(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 0}, "at least 1"),
        ({"max_bytes": 1, "ttl_seconds": 0}, "above 0"),
        ({"max_bytes": 1, "key": 1}, "a function"),
        ({"max_bytes": 1, "key": asyncio.sleep}, "not an async one"),
        ({"max_bytes": 1, "size": 1}, "a function"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.OptionsError, match=message):
        ps.Cache(**options)


# Compare with an oracle: a few lines that keep results as the documentation says.


class Oracle:
    def __init__(self, max_bytes: int, ttl_seconds: float) -> None:
        self.kept: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self.max_bytes, self.ttl_seconds = max_bytes, ttl_seconds
        self.hits = self.misses = self.joined = self.evicted = 0

    def ask(self, key: int, times: int, now: float, *, fails: bool) -> None:
        kept = self.kept.get(key)
        if kept is not None and now < kept[1]:
            self.kept.move_to_end(key)
            self.hits += times
            return
        self.kept.pop(key, None)
        self.misses += 1
        self.joined += times - 1
        if fails:
            return
        self.kept = OrderedDict({one: kept for one, kept in self.kept.items() if now < kept[1]})
        if key + beside(1) > self.max_bytes:
            return
        self.kept[key] = key + beside(1), now + self.ttl_seconds
        while sum(size for size, _ in self.kept.values()) > self.max_bytes:
            self.kept.popitem(last=False)
            self.evicted += 1


STEPS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from([0, 1, 5]), st.booleans()), min_size=1, max_size=25
)


@settings(deadline=None)
@given(steps=STEPS, results=st.integers(0, 6), more=st.integers(1, 12))
def test_it_keeps_what_a_few_lines_would_keep(steps: list[tuple[int, int, int, bool]], results: int, more: int) -> None:
    oracle = Oracle(max_bytes := results * beside(1) + more, 7)
    failing = False

    @ps.node(cache=ps.Cache(max_bytes=max_bytes, ttl_seconds=7, size=lambda result: result))
    async def compute(key: int) -> int:
        await asyncio.sleep(0)
        if failing:
            raise LookupError(key)
        return key

    ask = ps.graph(compute)

    async def main() -> None:
        nonlocal failing
        async with engine.Engine() as e, e.deploy(ask) as service:
            for key, times, pause, fails in steps:
                await asyncio.sleep(pause)
                failing = fails
                oracle.ask(key, times, asyncio.get_running_loop().time(), fails=fails)
                results = await asyncio.gather(*[service.run(ask(key)) for _ in range(times)], return_exceptions=True)
                assert all(result == key or isinstance(result, LookupError) for result in results)
                found = cache_of(service)
                assert (found.hits, found.misses, found.joined) == (oracle.hits, oracle.misses, oracle.joined)
                assert found.evicted == oracle.evicted
                assert found.bytes_held == sum(size for size, _ in oracle.kept.values()) <= max_bytes

    testing.run_virtual(main)


async def _some_leave(seed: int) -> None:
    """Calls with few different arguments; some calls are cancelled at random times."""

    draw = random.Random(seed)
    gauges = defaultdict[int, Gauge](Gauge)

    @ps.node(cache=ps.Cache(max_bytes=500 * draw.randint(1, 3), ttl_seconds=1), concurrency=draw.choice([None, 1, 2]))
    async def compute(key: int) -> int:
        with gauges[key]:
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            if draw.random() < 0.2:
                raise LookupError(key)
            return key

    ask = ps.graph(compute)

    async def one(runner: Any) -> None:
        key = draw.randint(0, 2)
        call = asyncio.create_task(runner.run(ask(key)))
        for _ in range(draw.randint(0, 8)):
            await asyncio.sleep(0)
        if draw.random() < 0.5:
            call.cancel()
        with contextlib.suppress(LookupError, asyncio.CancelledError):
            assert await call == key

    async with engine.Engine() as e, e.deploy(ask) as service:
        await asyncio.gather(*[one(draw.choice([service, e])) for _ in range(20)])
        assert all((gauge.now, gauge.peak) == (0, 1) for gauge in gauges.values())


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_at_most_one_computation_runs_whoever_leaves(first: int, effort: int) -> None:
    for seed in range(first, first + 20 * effort):
        testing.run_seeded(lambda seed=seed: _some_leave(seed), seed=seed)
