"""Detached calls of a deployment: they run without a reader, and a reader can attach to them by key."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import Response

import penstock as ps
from penstock import asgi, engine, testing
from tests.kit import Gate
from tests.saving.agents import TURNS, WORDS, Job, MemoryStore, State, asks, fails
from tests.saving.test_durable_processes import started
from tests.serving.openai_server import served


class EmittingJob(Job):
    """An agent of which each turn emits its number, and then a word.

    Attributes:
        emits: how often a turn emits its number.
    """

    emits = 1

    async def __call__(self, state: State) -> State:
        for _ in range(self.emits):
            await ps.emit(state.turn)
        await ps.emit(f"word{state.turn}")
        return await super().__call__(state)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def job() -> EmittingJob:
    return EmittingJob(MemoryStore())


@pytest.fixture
async def service(job: EmittingJob, gate: Gate) -> AsyncIterator[engine.Service[[str], str]]:
    async with engine.deploy(job.graph) as service:
        yield service
        gate.open()


def begin(service: engine.Service[[str], str], job: EmittingJob, **options: Any) -> engine.DetachedStream[Any, str]:
    return service.stream(job.graph("q"), events=int, detached=True, durable_key="k", **options)


async def test_a_call_goes_on_when_its_reader_has_left_and_others_attach_from_any_number_on(
    job: EmittingJob, service: engine.Service[[str], str], gate: Gate
) -> None:
    job.in_turn = {2: lambda: gate.wait("word2")}
    async with begin(service, job) as first:
        assert (await anext(first)).value == 0
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    await gate.has()
    second, third = (service.attach("k", events=int, after=after) for after in (first.number, 0))
    await third.wait_started()
    assert [(await anext(stream)).value for stream in (second, third)] == [1, 0]
    words = service.attach("k", events=str, after=second.number)
    gate.open()
    assert [event.value async for event in second] == [2, 3, 4]
    assert [outcome.value.value async for outcome in third.outcomes()] == [1, 2, 3, 4]
    assert [event.value async for event in words] == [f"word{turn}" for turn in (1, 2, 3, 4)]
    assert [await stream.result() for stream in (second, words)] == [WORDS, WORDS]
    assert (second.position, third.position, words.position) == (4, 5, 4)
    assert second.statistics().completed == 2 * TURNS
    assert service.statistics().completed == 1


@pytest.mark.parametrize("way", ["run", "resume", "resume_all"])
async def test_a_caller_that_is_cancelled_leaves_its_call_alone(tmp_path: Path, way: str, gate: Gate) -> None:
    job = EmittingJob(tmp_path / "loops.db")
    if way != "run":
        await job.ends("k", 1, fails)
    job.in_turn = {2: lambda: gate.wait("word2")}
    async with engine.deploy(job.graph) as service:
        calls: dict[str, Any] = {
            "run": lambda: service.run(job.graph("q"), durable_key="k", detached=True),
            "resume": lambda: service.resume("k", detached=True),
            "resume_all": lambda: service.resume_all(detached=True),
        }
        caller = asyncio.ensure_future(calls[way]())
        await gate.has()
        caller.cancel()
        await asyncio.wait([caller])
        reader = service.attach("k", events=int)
        gate.open()
        assert await reader.result() == WORDS
        assert await service.run(job.graph("q"), durable_key="k", detached=True, on_finished="return") == WORDS


async def test_a_reader_that_is_slow_holds_nothing_back_and_is_told_what_it_has_missed(
    job: EmittingJob, service: engine.Service[[str], str]
) -> None:
    job.emits = 1100 // TURNS
    stream = begin(service, job)
    assert await service.attach("k", events=int).result() == WORDS
    numbers: list[int] = []
    items: list[Any] = []
    async for item in stream:
        numbers.append(stream.number)
        items.append(item)
    assert items[0] == engine.Missed(1100 + TURNS - 1000)
    assert (items[0].kind, len(items)) == ("missed", 1 + 1000 - TURNS)
    assert numbers == sorted(set(numbers))
    for after, missed in ((numbers[0] - 7, 7), (numbers[-1] + 5, None), (1, None)):
        late = service.attach("k", events=object, after=after)
        assert await anext(late) == engine.Missed(missed)
        assert len([event async for event in late]) == 1000


@pytest.mark.parametrize("does", [asks, fails])
async def test_readers_get_the_error_or_the_question_after_the_events_and_numbers_go_on_behind_it(
    job: EmittingJob, service: engine.Service[[str], str], does: Any
) -> None:
    job.in_turn = {1: does}
    streams = [begin(service, job), service.attach("k", events=int)]
    errors: list[Any] = []
    for stream in streams:
        assert [(await anext(stream)).value for _ in range(2)] == [0, 1]
        with pytest.raises((ValueError, ps.Interrupted)) as caught:
            await anext(stream)
        with pytest.raises(type(caught.value)):
            await stream.result()
        assert [item async for item in stream] == []
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    late = service.attach("k", events=int, after=streams[0].number)
    with pytest.raises(ps.Interrupted if does is asks else ps.KeyStopped) as caught:
        await anext(late)
    if does is asks:
        assert caught.value.token == errors[0].token
        given: dict[str, Any] = {"answer": ps.Answer("word1", errors[0].token)}
    else:
        assert str(caught.value) == (
            "no call has the key 'k': the last call has failed, ValueError: the model is down; service.resume('k') "
            "continues it"
        )
        given, job.in_turn = {}, {}
    again = begin(service, job, **given)
    assert [item.value async for item in again] == [1, 2, 3, 4]
    both = service.attach("k", events=int, after=streams[0].number)
    assert [item.value async for item in both] == [1, 2, 3, 4]
    assert await both.result() == WORDS


async def test_values_of_a_stream_are_read_with_events_and_are_kept_until_there_are_a_hundred_others() -> None:
    durable = ps.Durable(MemoryStore())

    @ps.node(effectful=True)
    async def add(state: int) -> int:
        await ps.emit("adds")
        return state + 1

    @ps.node
    async def tokens(state: int) -> AsyncIterator[int]:
        for token in range(state):
            yield token

    @ps.graph
    async def counting(limit: int) -> AsyncIterator[int]:
        return tokens(await ps.while_loop(ps.node(lambda state: state < 2), add, 0, durable=durable))

    async with engine.deploy(counting) as service:
        for key in ("k", *(f"k{number}" for number in range(99))):
            stream = service.stream(counting(2), events=str, detached=True, durable_key=key)
            assert [item.value async for item in stream if item.kind != "missed"] == ["adds", "adds", 0, 1]
        with pytest.raises(ps.PlanError, match="gives a stream, which has no result"):
            await stream.result()
        late = service.attach("k", events=int)
        assert [item.value async for item in late if item.kind != "missed"] == [0, 1]
        await service.stream(counting(2), events=str, detached=True, durable_key="k100").wait_started()
        with pytest.raises(ps.PlanError, match="returns a stream"):
            await service.run(counting(2), detached=True, durable_key="k")
    assert service.statistics().completed == 101


async def test_what_a_call_can_be_attached_to_by(tmp_path: Path) -> None:
    file = tmp_path / "loops.db"
    job = EmittingJob(file)
    async with engine.deploy(job.graph) as service:
        with pytest.raises(ps.UnknownKey, match=r"'k'\): no graph of this deployment keeps anything under this key"):
            await anext(service.attach("k", events=int))
        with started(file, "k", STOP_IN="2") as one:
            for _ in range(3):
                await asyncio.to_thread(one.stdout.readline)
            with pytest.raises(ps.KeyInUse, match=f"'k' is under way in process {one.pid}"):
                await service.attach("k", events=int).result()
        with pytest.raises(ps.KeyStopped, match=r"was stopped, or its process has died; service\.resume"):
            await service.attach("k", events=int).wait_started()
        assert await service.resume("k") == WORDS
        late = service.attach("k", events=int, after=7)  # an event number from the other process
        assert [item async for item in late] == [engine.Missed(None)]
        assert await late.result() == WORDS

    async with engine.deploy(Job(file, name="another").graph) as other:
        with pytest.raises(ps.UnknownKey):  # another graph has the key
            await other.attach("k", events=int).result()


async def test_a_request_for_a_key_in_use_is_answered_with_the_status_that_the_application_gives(
    job: EmittingJob, service: engine.Service[[str], str], gate: Gate
) -> None:
    """Over a real socket: the first answer goes on, and a second request must have more than a broken stream of 200."""
    job.in_turn = {1: lambda: gate.wait("word1")}
    app = FastAPI()

    @app.get("/")
    async def answer() -> Response:
        response: Response = asgi.event_stream(begin(service, job), statuses={ps.KeyInUse: 409})
        return response

    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("GET", "/") as first,
    ):
        await gate.has()
        second = await client.get("/")
        assert (second.status_code, second.text) == (409, "Conflict")
        gate.open()
        assert first.status_code == 200
        assert (await first.aread()).decode().endswith(f"data: {WORDS}\n\n")


async def test_refusals_name_the_remedy(job: EmittingJob, service: engine.Service[[str], str], gate: Gate) -> None:
    @ps.graph
    async def plain() -> int:
        return ps.node(lambda: 1)()

    job.in_turn = {1: lambda: gate.wait("word1")}
    stream = begin(service, job)
    for read in (anext, lambda late: late.result(), lambda late: late.wait_started()):
        late: Any = begin(service, job)  # the read raises, where `asgi.event_stream(statuses=)` can answer
        with pytest.raises(ps.KeyInUse, match=r"under way here, in a detached call: service.attach\('k'\) reads it"):
            await read(late)
    await gate.has()
    with pytest.raises(ps.KeyInUse, match="under way here, in a detached call"):
        await service.resume("k", detached=True)
    untyped: Any = service
    call = job.graph("q")
    async with engine.deploy(plain) as other:
        for refused in (
            lambda: untyped.stream(call, events=int, detached=True),
            lambda: untyped.stream(call, detached=True, durable_key="k"),
            lambda: untyped.stream(call, events=int, detached=True, durable_key="k", capacity=3),
            lambda: other.stream(plain(), events=int, detached=True, durable_key="k"),
        ):
            with pytest.raises(
                (ps.OptionsError, ps.PlanError), match=r"events=|is for a call of a graph with a durable"
            ):
                refused()
    with pytest.raises(ps.OptionsError, match="for one call with durable_key=, not for many"):
        untyped.stream([call], detached=True)
    with pytest.raises(ps.OptionsError, match=r"service\.run\(call, detached=True"):
        await engine.run(call, durable_key="k", detached=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    with pytest.raises(ps.OptionsError, match=r"attach\(after=-1\): a whole number of at least 0"):
        service.attach("k", events=int, after=-1)
    gate.open()
    assert await stream.result() == WORDS


async def test_a_drain_waits_for_detached_calls_which_are_read_meanwhile_and_an_abort_ends_them(
    job: EmittingJob, gate: Gate
) -> None:
    job.in_turn = {1: lambda: gate.wait("word1")}
    async with engine.deploy(job.graph) as service:
        stream = begin(service, job)  # the call has not even taken its key
        draining = asyncio.ensure_future(service.drain())
        await gate.has()
        reader = service.attach("k", events=int)
        assert (await anext(reader)).value == 0
        assert not draining.done()
        gate.open()
        await draining
        assert await reader.result() == await stream.result() == WORDS
        with pytest.raises(ps.EngineClosedError, match="is stopped and takes no more calls"):
            service.attach("k", events=int)
    async with engine.deploy(job.graph) as service:
        streams = [begin(service, job)]
        await streams[0].wait_started()
        streams.append(service.stream(job.graph("q"), events=int, detached=True, durable_key="not begun"))
        await service.abort()
        for stream in streams:
            with pytest.raises(ps.EngineClosedError, match="stopped while the call was in flight"):
                await stream.result()
    assert list(job.durable._store.records) == ["k"]  # type: ignore[attr-defined]


def test_a_call_that_a_handler_begins_has_not_the_deadline_of_its_item() -> None:
    async def main() -> None:
        gate, job = Gate(), EmittingJob(MemoryStore())
        job.in_turn = {1: lambda: gate.wait("word1")}
        async with engine.deploy(job.graph) as service:

            @ps.node(effectful=True)
            async def begins(x: int) -> int:
                async def beside() -> None:
                    begin(service, job)

                # The end of the handler does not end the call, but a deadline would.
                await asyncio.create_task(beside())
                return x

            assert await engine.run(ps.graph(begins)(1), timeout_seconds=60) == 1
            await gate.has()
            await asyncio.sleep(90)
            gate.open()
            assert await service.attach("k", events=int).result() == WORDS

    testing.run_virtual(main, timeout_seconds=None)


async def test_loops_are_kept_where_an_option_says(job: EmittingJob, tmp_path: Path) -> None:
    other = ps.Durable(tmp_path / "tenant.db")
    assert await engine.run(job.graph("q"), durable_key="k", durable=other) == WORDS
    async with engine.stream(job.graph("q"), durable_key="s", events=int, durable=other) as stream:
        assert await stream.result() == WORDS
    with ps.execution_options(durable=other):
        await engine.run(job.graph("q"), durable_key="o")
    async with engine.deploy(job.graph, durable=other) as service:
        with ps.execution_options(durable=job.durable):  # the deployment keeps its own store
            await service.run(job.graph("q"), durable_key="d")
        assert await service.stream(job.graph("q"), durable_key="t", events=int, detached=True).result() == WORDS
        assert await service.resume("k") == await service.attach("k", events=int).result() == WORDS
        with pytest.raises(ps.OptionsError, match=r"'durable' does not apply to service\.run"):
            await service.run(job.graph("q"), durable_key="d", durable=other)
    assert {run.key for run in await other.runs()} == {"k", "s", "o", "d", "t"}
    assert await job.durable.history("k") == []
    with pytest.raises(ps.OptionsError, match=r"durable='a\.db': a Durable, or None"):
        await engine.run(job.graph("q"), durable_key="k", durable="a.db")  # type: ignore[arg-type]


async def test_a_fork_goes_on_from_a_state_that_was_edited(job: EmittingJob) -> None:
    await engine.run(job.graph("q"), durable_key="k")
    state = (await job.durable.history("k"))[2].value
    edited = State(2, ("other", *state.said[1:]), {})
    await job.durable.fork("k", 2, "edited", state=edited)
    assert await engine.run(job.graph("q"), durable_key="edited") == WORDS.replace("word0", "other")
    with pytest.raises(ps.NotStorable, match="state"):
        await job.durable.fork("k", 2, "third", state=object())
