"""Pauses between attempts that an error asks for, and first attempts that begin before any timer is set."""

import asyncio
import copy
import email.utils
import inspect
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from traceback import walk_tb
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
from penstock import engine, testing


class Busy(Exception):
    """An error as in httpx and requests: it has a response with headers."""

    def __init__(self, headers: dict[str, str] | None) -> None:
        super().__init__("busy")
        self.response = None if headers is None else SimpleNamespace(headers=headers)


class BusyOfAiohttp(Exception):
    def __init__(self, headers: dict[str, str] | None) -> None:
        super().__init__("busy")
        self.headers = headers


def pauses(wait: Any, **options: Any) -> list[float]:
    """Return the pauses of a node that always fails, in seconds of the virtual clock."""
    at: list[float] = []

    @ps.node(retry=ps.Retry(**{"attempts": 3, "wait": wait, "jitter": 0, **options}))
    async def busy() -> None:
        at.append(asyncio.get_running_loop().time())
        raise Busy({"Retry-After": "7"})

    ask = ps.graph(busy)

    async def main() -> None:
        await engine.run(ask)

    with pytest.raises(Busy):
        testing.run_virtual(main)
    return [round(after - before, 6) for before, after in pairwise(at)]


@given(backoff=st.floats(0, 1e6), longest=st.floats(0, 1e6), jitter=st.sampled_from([0, 0.1, 1]))
@example(backoff=0.5, longest=3, jitter=0)
def test_pauses_double_up_to_the_longest_and_jitter_only_shortens_them(
    backoff: float, longest: float, jitter: float
) -> None:
    made = pauses(None, attempts=6, backoff_seconds=backoff, max_backoff_seconds=longest, jitter=jitter)
    assert len(made) == 5
    for number, pause in enumerate(made):
        full = min(longest, backoff * 2**number)
        assert full * (1 - jitter) - 1e-3 <= pause <= full + 1e-3


@pytest.mark.parametrize(
    ("wait", "options", "expected"),
    [
        (ps.retry_after, {}, [7, 7]),
        (lambda error, attempt: attempt * 10, {}, [10, 20]),
        # None is the normal backoff.
        (lambda error, attempt: None if attempt == 1 else 5, {"backoff_seconds": 0.5}, [0.5, 5]),
        # Beyond the longest pause, the call fails now.
        (lambda error, attempt: 31, {}, []),
        (lambda error, attempt: 31 if attempt == 2 else 2, {"max_backoff_seconds": 2}, [2]),
        (lambda error, attempt: float("inf"), {}, []),
    ],
)
def test_it_waits_as_long_as_the_error_asks(wait: Any, options: dict[str, Any], expected: list[float]) -> None:
    assert pauses(wait, **options) == expected


@pytest.mark.parametrize("wrong", [-1, "7", True, float("nan"), object()])
async def test_a_wait_that_is_no_number_of_seconds_raises(wrong: Any) -> None:
    @ps.node(retry=ps.Retry(3, wait=lambda error, attempt: wrong))
    async def busy() -> None:
        raise Busy(None)

    with pytest.raises(ps.OptionsError, match=r"Retry\.wait\(error, attempt\)=.*not negative") as caught:
        await engine.run(ps.graph(busy))
    assert isinstance(caught.value.__context__, Busy)


@pytest.mark.parametrize(("wait", "message"), [(7, "wait=7"), (lambda error: 1, r"such as wait=ps\.retry_after")])
def test_what_is_no_function_of_error_and_attempt_is_refused(wait: Any, message: str) -> None:
    with pytest.raises(ps.OptionsError, match=message):
        ps.Retry(3, wait=wait)


@pytest.mark.parametrize("kind", [Busy, BusyOfAiohttp])
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "120"}, 120),
        ({"retry-after": "1.5"}, 1.5),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 -0000"}, 0),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "1_0"}, None),
        ({"Retry-After": "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 +99999999999999"}, None),
        ({"Retry-After": ""}, None),
        ({}, None),
        (None, None),
    ],
)
def test_retry_after_reads_seconds_and_dates(kind: Any, headers: dict[str, str] | None, seconds: float | None) -> None:
    assert ps.retry_after(kind(headers)) == seconds


def test_retry_after_counts_from_now_to_a_date() -> None:
    date = email.utils.formatdate(time.time() + 3600, usegmt=True)
    assert ps.retry_after(Busy({"Retry-After": date})) == pytest.approx(3550, abs=50)


def test_retry_after_reads_the_errors_of_the_clients_themselves() -> None:
    httpx = pytest.importorskip("httpx")
    request = httpx.Request("GET", "http://localhost")
    response = httpx.Response(429, headers={"retry-after": "3"}, request=request)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    assert ps.retry_after(caught.value) == 3


# A node with a policy runs the first step of its first attempt before it sets up anything that only a wait needs.


async def run(fn: Any, **policy: Any) -> Any:
    return await engine.run(ps.graph(ps.node(**policy)(fn)))


async def test_the_deadline_of_an_attempt_is_known_before_it_waits() -> None:
    async def remaining() -> list[float | None]:
        first = ps.current().remaining_seconds()
        await asyncio.sleep(0)
        return [first, ps.current().remaining_seconds()]

    found = await run(remaining, timeout_seconds=60)
    assert all(seconds is not None and 0 < seconds < 60.001 for seconds in found)  # rounding: (t + 60) - t


async def test_the_time_before_the_first_wait_counts() -> None:
    async def late() -> None:
        time.sleep(0.02)  # noqa: ASYNC251 - work of a handler before it first waits
        await asyncio.sleep(60)

    with pytest.raises(ps.NodeTimeoutError):
        await run(late, timeout_seconds=0.01)


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_of_the_first_step_is_the_error_of_the_attempt(waits: bool) -> None:
    attempts: list[int] = []

    async def fails() -> str:
        attempts.append(ps.current().attempt)
        if waits:
            await asyncio.sleep(0)
        if len(attempts) < 3:
            raise LookupError(len(attempts))
        return "third"

    assert await run(fails, timeout_seconds=60, retry=ps.Retry(3)) == "third"
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize("cancels_itself", [False, True])
async def test_a_handler_that_catches_its_cancel_at_its_first_wait_goes_on(cancels_itself: bool) -> None:
    async def stubborn() -> str:
        task = asyncio.current_task()
        if cancels_itself:
            task.cancel()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            task.uncancel()
            await asyncio.sleep(0)
        return "went on"

    assert await run(stubborn, timeout_seconds=60 if cancels_itself else 0.001) == "went on"


async def test_a_cancel_from_inside_is_no_cancel_of_the_item() -> None:
    async def foreign() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.cancel)
        await future

    with pytest.raises(ps.NodeCancelledError):
        await run(foreign, timeout_seconds=60)


async def test_a_marked_function_that_returns_another_awaitable() -> None:
    if not hasattr(inspect, "markcoroutinefunction"):
        pytest.skip("from Python 3.12 on")

    class Answer:
        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return 42

    def marked() -> Any:
        return Answer()

    assert await run(inspect.markcoroutinefunction(marked), timeout_seconds=60) == 42


async def test_a_wait_that_raises_ends_the_attempts_and_what_follows_a_failure_runs() -> None:
    errors: list[Exception] = []

    def wait(error: Exception, attempt: int) -> float:
        raise LookupError("no wait")

    def fallback(error: Exception) -> str:
        errors.append(error)
        return "fallback"

    @ps.node(retry=ps.Retry(3, wait=wait), fallback=fallback)
    async def fails() -> str:
        raise ConnectionError

    assert await engine.run(ps.graph(fails)()) == "fallback"
    [error] = errors
    assert isinstance(error, ConnectionError)
    assert error.__notes__[0] == "no further attempt: wait= of Retry raised LookupError('no wait')"


# Logs of errors, and the traceback that a caller sees.


@pytest.mark.parametrize("how", ["retry", "failover", "hedge", "hedge of a stream"])
def test_errors_that_were_handled_are_one_line_a_minute_with_their_count(how: str) -> None:
    by = how.partition(" ")[0]

    async def instead(number: int) -> int:
        return -1

    options: dict[str, Any] = {
        "retry": {"retry": ps.Retry(2)},
        "failover": {"failover": ps.node(instead)},
        "hedge": {"hedge": ps.Hedge(after_seconds=0.5, max_share=1)},
    }[by]
    begun: Counter[int] = Counter()

    async def answer(number: int) -> int:
        begun[number] += 1
        if begun[number] == 1:
            await asyncio.sleep(1 if by == "hedge" else 0)
            raise ConnectionError(number)
        await asyncio.sleep(2)
        return number

    async def values(number: int) -> AsyncIterator[int]:
        yield await answer(number)

    fragile: Any = ps.node(name=f"fragile {how}", **options)(values if "stream" in how else answer)

    @ps.graph
    async def graph(number: int) -> int:
        return await only(fragile(number)) if "stream" in how else await fragile(number)

    async def main() -> None:
        async with engine.deploy(graph) as service:
            await asyncio.gather(*(service(number) for number in range(10)))
            await asyncio.sleep(60)
            await service(10)

    with structlog.testing.capture_logs() as logged:
        testing.run_virtual(main)
    assert [(event["event"], event["by"], event["count"]) for event in logged] == [
        ("node.error_handled", by, 1),
        ("node.error_handled", by, 10),
    ]
    assert (logged[1]["node"], logged[1]["error"]) == (f"fragile {how}", "ConnectionError(10)")


@ps.node
async def only(values: AsyncIterator[int]) -> int:
    return [value async for value in values][0]  # noqa: RUF015 - reads the stream to its end


def lines_of(error: BaseException, traceback: TracebackType | None) -> list[str]:
    names = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in walk_tb(traceback)]
    return [name if file == __file__ else "(library)" for file, name in names]


@pytest.mark.parametrize("full", [False, True])
async def test_the_traceback_goes_from_a_line_of_the_user_to_the_next(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full:
        monkeypatch.setenv("PENSTOCK_TRACEBACKS", "full")

    @ps.node(retry=ps.Retry(2), timeout_seconds=1)
    async def broken(number: int) -> int:
        try:
            return 1 // 0
        except ZeroDivisionError as error:
            raise LookupError(number) from error

    @ps.graph
    async def inner(number: int) -> int:
        return await broken(number)

    @ps.node
    async def calls(number: int) -> int:
        return await engine.run(inner(number))

    @ps.graph
    async def outer(number: int) -> list[int]:
        return await ps.map_each(calls, [number])

    with pytest.raises(LookupError) as caught:
        await engine.run(outer(1))
    error = caught.value
    seen = lines_of(error, error.__traceback__)
    of_the_user = [name for name in seen if name != "(library)"]
    assert of_the_user[-2:] == ["calls", "broken"]
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.__notes__[0] == "in node 'broken' of graph 'inner', item 0, attempt 2"
    inside = seen[seen.index("calls") :]
    if full:
        assert "(library)" in inside
        assert error.__penstock__.traceback is None  # type: ignore[attr-defined]
    else:
        assert inside == ["calls", "broken"]
        whole: Any = error.__penstock__.traceback  # type: ignore[attr-defined]
        names = lines_of(error, whole)
        assert [name for name in names if name != "(library)"] == ["calls", "broken"]
        assert names[names.index("calls") + 1] == "(library)"


async def test_an_error_can_be_pickled_with_its_notes_and_raised_again_by_a_node() -> None:
    @ps.node
    async def broken(error: Exception) -> None:
        raise error

    graph = ps.graph(broken)
    with pytest.raises(ValueError, match="bad") as first:
        await engine.run(graph(ValueError("bad")))
    for error in (pickle.loads(pickle.dumps(first.value)), copy.deepcopy(first.value)):
        with pytest.raises(ValueError, match="bad") as again:
            await engine.run(graph(error))
        assert again.value.__notes__ == 2 * ["in node 'broken' of graph 'broken', item 0, attempt 1"]


class AnswersWithKeyErrors(Exception):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class AnswersEverything(Exception):
    def __getattr__(self, name: str) -> str:
        return "everything"


class HasOtherArguments(Exception):
    @property
    def args(self) -> Any:
        return {"reason": 1}


class TakesNoAttributes(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(name)


@pytest.mark.parametrize("kind", [AnswersWithKeyErrors, AnswersEverything, HasOtherArguments, TakesNoAttributes])
async def test_an_error_of_an_odd_class_ends_its_item(kind: type[Exception]) -> None:
    error = kind("down")

    @ps.node
    async def broken(number: int) -> None:
        raise error

    @ps.graph
    async def twice(number: int) -> list[None]:
        return await ps.map_each(broken, [number])

    for graph in (ps.graph(broken), twice):
        for _ in range(2):
            with pytest.raises((kind, ps.NodeError)):  # NodeError if the error cannot be copied for a second item
                await engine.run(graph(1))


async def test_where_the_library_has_raised_stays_in_the_traceback() -> None:
    async def slow() -> None:
        await asyncio.sleep(60)

    with pytest.raises(ps.NodeTimeoutError) as caught:
        await run(slow, timeout_seconds=0.001)
    assert lines_of(caught.value, caught.value.__traceback__)[-1] == "(library)"
