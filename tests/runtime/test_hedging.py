"""Hedging: when a second attempt begins, whose result counts, and what becomes of the other."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import penstock as ps
from penstock import engine, testing
from tests.runtime import hedged_process

SOON = ps.Hedge(after_seconds=1, max_share=1)


class Attempts:
    """A node whose attempts are told one by one what to do, and what happened to each."""

    def __init__(self, *plans: Callable[[], Awaitable[str]], **policy: Any) -> None:
        self.plans = list(plans)
        self.log: list[str] = []
        self.numbers: list[int] = []

        @ps.node(**{"hedge": SOON, **policy})
        async def attempt(value: int) -> str:
            number = len(self.numbers)
            self.numbers.append(ps.current().attempt)
            try:
                result = await self.plans[number]()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                self.log.append(f"{number} cancelled")
                raise
            except Exception as error:
                self.log.append(f"{number} {error!r}")
                raise
            self.log.append(f"{number} done")
            return result

        @ps.graph
        async def ask(value: int) -> str:
            return await attempt(value)

        self.ask = ask

    async def run(self, service: Any = None) -> str:
        result: str = await (service or engine).run(self.ask(1))
        return result


def after(seconds: float, result: str | Exception) -> Callable[[], Awaitable[str]]:
    async def plan() -> str:
        await asyncio.sleep(seconds)
        if isinstance(result, Exception):
            raise result
        return result

    return plan


def run(attempts: Attempts) -> str:
    return testing.run_virtual(attempts.run)


def test_the_second_attempt_begins_when_the_first_has_not_ended() -> None:
    attempts = Attempts(after(60, "first"), after(1, "second"))
    assert run(attempts) == "second"
    assert attempts.log == ["1 done", "0 cancelled"]
    assert attempts.numbers == [1, 1]


def test_no_second_attempt_begins_beside_one_that_has_ended() -> None:
    for plan in (after(0.5, "first"), after(0.5, LookupError())):
        attempts = Attempts(plan)
        try:
            assert run(attempts) == "first"
        except LookupError:
            pass
        assert attempts.numbers == [1]


def test_the_first_result_wins_also_if_it_is_that_of_the_first() -> None:
    attempts = Attempts(after(2, "first"), after(60, "second"))
    assert run(attempts) == "first"
    assert attempts.log == ["0 done", "1 cancelled"]


@pytest.mark.parametrize(
    "plans",
    [(after(2, LookupError()), after(5, "good")), (after(5, "good"), after(1, LookupError()))],
)
def test_an_error_waits_for_the_other_attempt(plans: tuple[Callable[[], Awaitable[str]], ...]) -> None:
    assert run(Attempts(*plans)) == "good"


def test_if_both_fail_it_is_the_error_of_the_first() -> None:
    for seconds in (2, 5):
        attempts = Attempts(after(3, LookupError("first")), after(seconds, LookupError("second")))
        with pytest.raises(LookupError, match="first"):
            run(attempts)


def test_retries_begin_after_both_and_both_have_one_number() -> None:
    plans = (after(2, LookupError()), after(5, LookupError()), after(0, "third"))
    attempts = Attempts(*plans, retry=ps.Retry(2))
    assert run(attempts) == "third"
    assert attempts.numbers == [1, 1, 2]
    assert attempts.log == ["0 LookupError()", "1 LookupError()", "2 done"]


def test_each_attempt_has_the_timeout_of_its_own() -> None:
    assert run(Attempts(after(60, "first"), after(2.5, "second"), timeout_seconds=3)) == "second"
    with pytest.raises(ps.NodeTimeoutError):
        run(Attempts(after(60, "first"), after(60, "second"), timeout_seconds=3))


def test_a_first_attempt_that_does_not_stop_has_lost_all_the_same() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        return "stubborn"

    async def turns_it_into_an_error() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise LookupError from None
        return "never"

    for plan in (stubborn, turns_it_into_an_error):
        assert run(Attempts(plan, after(1, "second"))) == "second"


def test_the_second_attempt_needs_a_place() -> None:
    attempts = Attempts(after(5, "first"), after(0, "second"), concurrency=1)
    assert run(attempts) == "first"
    attempts = Attempts(after(5, "first"), after(0, "second"), concurrency=2)
    assert run(attempts) == "second"


def test_max_share_is_a_bucket_that_each_call_fills() -> None:
    hedged: list[int] = []
    slow: set[int] = set()

    @ps.node(hedge=ps.Hedge(after_seconds=1, max_share=0.25))
    async def call(number: int) -> None:
        if number in slow:
            hedged.append(number)
        elif number >= 0:
            slow.add(number)
            await asyncio.sleep(5)

    @ps.graph
    async def ask(number: int) -> None:
        return await call(number)

    async def main() -> None:
        async with engine.deploy(ask) as service:
            for number in range(9):
                await service.run(ask(number))
            assert hedged == [0, 3, 7]  # it begins with 1; then each call brings a quarter
            for _ in range(1000):
                await service.run(ask(-1))
            hedged.clear()
            await asyncio.gather(*[service.run(ask(number)) for number in range(20, 40)])
            assert len(hedged) == 10  # and it holds 10

    testing.run_virtual(main)


def test_it_is_counted() -> None:
    slow, soon = after(60, "slow"), after(2, "soon")
    attempts = Attempts(slow, soon, soon, slow, after(0, "at once"))

    async def main() -> None:
        async with engine.deploy(attempts.ask) as service:
            for _ in range(3):
                await attempts.run(service)
            [actor] = service.statistics().actors
            assert (actor.completed, actor.hedged, actor.hedges_won, actor.in_flight) == (3, 2, 1, 0)

    testing.run_virtual(main)


def test_a_caller_that_leaves_cancels_both() -> None:
    attempts = Attempts(after(60, "first"), after(60, "second"))

    async def main() -> None:
        async with engine.deploy(attempts.ask) as service:
            call = asyncio.create_task(attempts.run(service))
            await asyncio.sleep(2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await testing.wait_quiescent()
            assert sorted(attempts.log) == ["0 cancelled", "1 cancelled"]
            [actor] = service.statistics().actors
            assert actor.in_flight == 0
        late = Attempts(after(60, "first"), after(60, "second"))
        with pytest.raises(ps.DeadlineExceeded):
            await engine.run(late.ask(1), timeout_seconds=2)
        assert sorted(late.log) == ["0 cancelled", "1 cancelled"]

    testing.run_virtual(main)


def test_a_run_ends_only_when_the_loser_has_unwound() -> None:
    async def slow_to_leave() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(3)
        return "never"

    attempts = Attempts(after(2, "first"), slow_to_leave)
    assert run(attempts) == "first"
    assert attempts.log == ["0 done", "1 cancelled"]


async def test_a_thread_that_loses_keeps_its_place_until_it_returns() -> None:
    begun: list[int] = []
    go_on = threading.Event()

    @ps.node(hedge=ps.Hedge(after_seconds=0.01, max_share=1), runs_on="thread", concurrency=2)
    def blocking(value: int) -> str:
        begun.append(value)
        if len(begun) == 1:
            go_on.wait(30)
            return "first"
        return "second"

    @ps.graph
    async def ask(value: int) -> str:
        return blocking(value)

    async with engine.deploy(ask) as service:
        assert await service.run(ask(1)) == "second"
        [actor] = service.statistics().actors
        assert (actor.in_flight, actor.hedges_won) == (1, 1)
        go_on.set()
    [actor] = service.statistics().actors
    assert actor.in_flight == 0


@pytest.mark.parametrize("slow", ["first", "second"])
async def test_a_process_that_loses_is_not_killed(slow: str, tmp_path: Any) -> None:
    @ps.graph
    async def ask(folder: str) -> int:
        return hedged_process.one_is_slow(folder, slow)

    async with engine.Engine(max_processes=2) as e, e.deploy(ask) as service:
        (tmp_path / "before").mkdir()
        (tmp_path / "before" / "go-on").touch()
        await service.run(ask(str(tmp_path / "before")))  # starts both processes
        while service.statistics().actors[0].in_flight:
            await asyncio.sleep(0.01)  # until the loser has returned
        try:
            winner = await service.run(ask(str(tmp_path)))
            await testing.wait_quiescent()
            [actor] = service.statistics().actors
        finally:
            (tmp_path / "go-on").touch()
        await service.drain()
    begun, ended = [
        {int(path.name.split("-")[1]) for path in tmp_path.iterdir() if path.name.startswith(word)}
        for word in ("begun-", "ended-")
    ]
    assert winner in begun
    assert (len(begun), actor.in_flight, actor.hedged) == (2, 1, 2)
    assert ended == begun


async def _race(seed: int) -> None:
    import random

    draw = random.Random(seed)
    running = 0

    @ps.node(
        hedge=ps.Hedge(after_seconds=0.0001, max_share=1),
        retry=draw.choice([None, ps.Retry(2)]),
        timeout_seconds=draw.choice([None, 0.005]),
        concurrency=draw.choice([None, 1, 3]),
    )
    async def attempt(value: int) -> int:
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(draw.choice([0, 0, 0.0001, 0.0002, 0.001, 0.01]))
            if draw.random() < 0.3:
                raise LookupError(value)
            return value
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                running -= 1

    @ps.graph
    async def ask(value: int) -> int:
        return await attempt(value)

    async def one(service: Any, value: int) -> None:
        call = asyncio.create_task(service.run(ask(value)))
        await asyncio.sleep(draw.choice([0, 0.0001, 0.0003, 0.002]))
        if draw.random() < 0.3:
            call.cancel()
        try:
            assert await call == value
        except (LookupError, TimeoutError, asyncio.CancelledError):
            pass

    async with engine.deploy(ask) as service:
        await asyncio.gather(*[one(service, value) for value in range(12)])
        await testing.wait_quiescent()
        [actor] = service.statistics().actors
        assert actor.in_flight == 0
        assert running == 0


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_every_call_has_one_outcome_and_leaves_nothing(first: int, effort: int) -> None:
    for seed in range(first, first + 20 * effort):
        testing.run_seeded(lambda seed=seed: _race(seed), seed=seed)


# What is refused.


def test_where_a_second_attempt_would_do_harm_it_is_refused() -> None:
    with pytest.raises(ps.OptionsError, match="hedge=, effectful=True"):
        ps.node(effectful=True, hedge=SOON)(asyncio.sleep)
    with pytest.raises(TypeError, match="stateful node 'Stateful' cannot have hedge="):

        @ps.node(hedge=SOON)
        class Stateful:
            async def __call__(self, value: int) -> int:
                return value

    with pytest.raises(TypeError, match="batched node 'batch' has hedge="):

        @ps.node(batch=ps.Batch(2), hedge=SOON)  # type: ignore[call-overload]
        async def batch(values: list[int]) -> list[int]:
            return values

    @ps.node(batch=ps.Batch(2))
    async def later(values: list[int]) -> list[int]:
        return values

    with pytest.raises(TypeError, match="batched node 'later' has hedge="):
        later.with_policy(hedge=SOON)

    with pytest.raises(TypeError, match="async generator, to which hedge= does not apply"):

        @ps.node(hedge=SOON)
        async def stream(value: int) -> AsyncIterator[int]:
            yield value

    with pytest.raises(TypeError, match="plain `def` that runs on the event loop"):

        @ps.node(hedge=SOON)
        def plain(value: int) -> int:
            return value


def test_a_device_node_has_none() -> None:
    pytest.importorskip("jax")

    @ps.device_node
    def double(x: Any) -> Any:
        return x * 2

    with pytest.raises(TypeError, match="device node 'double' cannot have hedge="):
        double.with_policy(hedge=SOON)
    with pytest.raises(TypeError, match="device node 'double' cannot have cache="):
        double.with_policy(cache=ps.Cache(max_bytes=10))


@pytest.mark.parametrize("options", [{"after_seconds": 0}, {"after_seconds": 1, "max_share": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ps.OptionsError):
        ps.Hedge(**options)
