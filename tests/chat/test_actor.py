"""The actor of the chat example with a tiny model: each answer is that of a plain loop for its request alone."""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from examples.chat.actor import Asked, Part, Text, Writer, of_chunk, of_step
from examples.chat.model import Parameters, begin, go_on, open_slots
from examples.chat.scheduler import Chunk
from penstock import devices, engine, serving, testing
from tests.chat.recurrent import BROKEN, END, Recurrent, bytes_of, weights
from tests.devices import kit
from tests.devices.kit import resource_of
from tests.kit import cancelled_at_every_step, values_of

MODEL = Recurrent()


def writer(ends: tuple[int, ...] = (END,), **more: Any) -> Writer:
    """Return an actor of two slots with few programs, as each takes a second or two to compile."""
    return Writer(MODEL, bytes_of, ends, **{"rows": [2], "sizes": [16], "device": "cpu", **more})


@cache
def programs() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return jax.jit(begin, donate_argnums=(2,)), jax.jit(go_on, donate_argnums=(2,))


def alone(parameters: Parameters, asked: Asked) -> list[int]:
    """Return the tokens of a plain loop over one slot, which reads the prompt one token at a time."""
    start, step = programs()
    slots = open_slots(MODEL, 1)
    tokens: list[int] = []
    sampled: Any = None
    for at in range(len(asked.prompt)):
        slots, sampled = start(MODEL, parameters, slots, *of_chunk(Chunk(0, at, 1, 1), asked))
    while True:
        tokens.append(int(sampled.tokens[0]))
        room = MODEL.context - len(asked.prompt)
        if tokens[-1] == END or len(tokens) == min(asked.max_tokens or room, room):
            return tokens
        slots, sampled = step(MODEL, parameters, slots, *of_step({0: (len(asked.prompt) + len(tokens) - 1, asked)}, 1))


def asked_at_random(chance: random.Random) -> Asked:
    prompt = [chance.randrange(END) for _ in range(chance.randint(1, 60))]
    hot = chance.choice([0.0, 0.7, 1.3])
    return Asked(
        prompt, max_tokens=chance.randint(1, 40), temperature=hot, top_k=chance.choice([0, 1, 5]),
        top_p=chance.choice([1.0, 0.8]), seed=chance.randrange(2**32),
    )  # fmt: skip


def graph_of(node: Writer, loaded: Any = resource_of(weights)) -> Any:  # noqa: B008 - a resource is a constant
    return kit.graph_of(lambda parameters, asked: node(parameters, asked), loaded)  # noqa: PLW0108 - it has no signature


async def parts_of(service: engine.Service[[Asked], AsyncIterator[Part]], answer: Any, asked: Asked) -> list[Part]:
    return await values_of(service.stream(answer(asked)))


def tokens_of(parts: list[Part]) -> list[int]:
    return [part.token for part in parts]


@pytest.mark.parametrize("slots", [pytest.param(2, marks=pytest.mark.long), 8])
async def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd_and_nothing_is_compiled_after_the_start(
    slots: int, effort: int
) -> None:
    chance = random.Random(slots)
    requests = [asked_at_random(chance) for _ in range(12 * effort)]
    programs_ready: list[tuple[int, int]] = []
    told: dict[str, Any] = {"like": weights(), "on_progress": lambda *counts: programs_ready.append(counts)}
    answer = graph_of(writer(rows=[1, slots], sizes=[4, 16], **told))
    with structlog.testing.capture_logs() as logged:
        async with engine.deploy(answer, max_in_flight=len(requests)) as service:
            answers = await asyncio.gather(*(parts_of(service, answer, asked) for asked in requests))
            figures = {figure.name: figure.value for figure in service.statistics().actors[-1].figures}
    assert programs_ready == [(done, 4) for done in range(1, 5)]
    assert [event for event in logged if event["event"].startswith("program.")] == []
    for asked, parts in zip(requests, answers, strict=True):
        assert tokens_of(parts) == alone(weights(), asked)
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == ("stop" if parts[-1].token == END else "length")
        letters = [chr(97 + part.token) for part in parts if part.token != END]
        assert "".join(part.text for part in parts) == "".join(letters)
    assert figures["tokens"] == sum(map(len, answers))
    # The last token of an answer is not read.
    assert figures["used"] == sum(len(asked.prompt) for asked in requests) + figures["tokens"] - len(requests)
    assert (figures["slots"], figures["queue"]) == (0, 0)


async def test_new_weights_answer_the_next_request_and_a_step_has_those_of_one_version() -> None:
    versions = [weights(seed) for seed in range(3)]
    loading = iter(versions)
    loaded = resource_of(lambda: next(loading))
    answer = graph_of(writer(), loaded)
    chance = random.Random(0)
    requests = [[asked_at_random(chance) for _ in range(8)] for _ in versions]
    async with engine.deploy(answer, max_in_flight=100) as service, asyncio.TaskGroup() as tasks:
        asking: list[list[asyncio.Task[list[Part]]]] = []
        for number, some in enumerate(requests):
            if number:
                await service.reload(loaded)
            # The first tokens of each version come while those before are answered.
            asking.append([tasks.create_task(parts_of(service, answer, asked)) for asked in some])
            await asyncio.wait(asking[-1], return_when=asyncio.FIRST_COMPLETED)
    for parameters, some, tasks_of_version in zip(versions, requests, asking, strict=True):
        assert [tokens_of(task.result()) for task in tasks_of_version] == [alone(parameters, asked) for asked in some]


async def test_no_numbers_end_their_request_alone_and_its_slot_is_as_good_as_new() -> None:
    good, broken = Asked([1, 2, 3], max_tokens=20), Asked([1, BROKEN, 3])
    requests = [good, broken, good, broken, good, good]
    answer = graph_of(writer())
    async with engine.deploy(answer, max_in_flight=10) as service:
        asking = [parts_of(service, answer, asked) for asked in requests]
        answers = await asyncio.gather(*asking, return_exceptions=True)
    for asked, outcome in zip(requests, answers, strict=True):
        if asked is broken:
            assert isinstance(outcome, FloatingPointError)
            assert str(outcome) == "the model gave no numbers for token 1 of the answer"
        else:
            assert isinstance(outcome, list)
            assert tokens_of(outcome) == alone(weights(), good)


async def test_a_prompt_that_leaves_no_room_is_an_error_and_the_context_bounds_an_answer() -> None:
    answer = graph_of(writer())
    async with engine.deploy(answer) as service:
        for length in (0, MODEL.context, MODEL.context + 1):
            with pytest.raises(serving.APIError, match=f"has {length} tokens, and has to have 1 to 127") as raised:
                await parts_of(service, answer, Asked([1] * length))
            assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
        full = Asked([1] * 120, max_tokens=1000, temperature=1, seed=7)
        parts = await parts_of(service, answer, full)
    assert tokens_of(parts) == alone(weights(), full)
    assert (len(parts), parts[-1].finish_reason) == (8, "length")


# --- In virtual time, with a device that takes none ---


class NoTimeDevice:
    """Runs functions at once: the clock does not know what a device does."""

    def bind(self, fn: Callable[..., Any], **_: Any) -> Callable[..., Awaitable[Any]]:
        program = {begin: programs()[0], go_on: programs()[1]}.get(fn, fn)

        async def run(*args: Any) -> Any:
            await asyncio.sleep(1)  # a second a program
            return program(*args)

        return run

    async def put(self, value: Any) -> Any:
        return value


@pytest.fixture
def no_time_device(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(value: Any) -> Any:
        return jax.tree.map(np.asarray, value)

    monkeypatch.setattr(devices, "actor", lambda _device: NoTimeDevice())
    monkeypatch.setattr(devices, "to_host", read)


@contextlib.asynccontextmanager
async def running(node: Writer, requests: list[Asked], capacity: int = 64) -> AsyncGenerator[list[Any]]:
    """Run the loop of an actor, until all requests are answered; give the readers."""
    inbox, readers = testing.stream_inbox([(weights(), asked) for asked in requests], capacity=capacity)
    async with node:
        loop = asyncio.create_task(node.loop(inbox))
        yield readers
        with contextlib.suppress(ps.InboxClosed):
            await loop


@pytest.mark.usefixtures("no_time_device")
def test_a_reader_that_pauses_is_not_computed_for_and_one_that_never_reads_loses_its_slot() -> None:
    asked = Asked([1, 2, 3], max_tokens=30, temperature=1, seed=3)
    expected = alone(weights(), asked)
    assert len(expected) == 30

    async def main() -> tuple[list[int], list[int], list[int], str]:
        node = writer(patience_seconds=50)
        async with running(node, [asked, asked, asked], capacity=4) as [pausing, sleeping, behind]:
            patient = [await anext(pausing) for _ in range(2)]
            await asyncio.sleep(40)
            patient += [part async for part in pausing]
            third = [part async for part in behind]  # it has the slot of the first
            await asyncio.sleep(60)
            asleep = [await anext(sleeping) for _ in range(4)]
            with pytest.raises(TimeoutError) as raised:
                await anext(sleeping)
        return tokens_of(patient), tokens_of(third), tokens_of(asleep), str(raised.value)

    patient, third, asleep, said = testing.run_virtual(main)
    assert patient == third == expected
    assert asleep == expected[:4]
    assert said == "the reader has taken nothing for 50 seconds"


@pytest.mark.usefixtures("no_time_device")
def test_a_request_that_comes_while_all_readers_are_full_is_answered_at_once() -> None:
    endless, short = Asked([1, 2, 3]), Asked([4, 5], max_tokens=10)
    answer = graph_of(writer(ends=(), patience_seconds=1000))

    async def main() -> tuple[list[int], float]:
        async with engine.deploy(answer, max_in_flight=10) as service, service.stream(answer(endless)) as full:
            await anext(full)
            await asyncio.sleep(500)  # its buffer of 64 parts has been full for long
            asked_at = asyncio.get_running_loop().time()
            parts = await parts_of(service, answer, short)
            return tokens_of(parts), asyncio.get_running_loop().time() - asked_at

    # A program takes a second, and each token one of them.
    assert testing.run_virtual(main) == (alone(weights(), short)[:10], 10)


@pytest.mark.usefixtures("no_time_device")
def test_the_slot_of_a_reader_that_leaves_at_any_token_is_in_use_two_steps_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[Any] = []  # what the actor has told before each step
    monkeypatch.setattr(Writer, "report", lambda _self, **figures: steps.append(figures))
    left, stays, behind = Asked([1] * 30, max_tokens=12), Asked([4]), Asked([2, 3], max_tokens=3)
    for tokens in range(11):

        async def main(tokens: int = tokens) -> None:
            async with running(writer(ends=()), [left, stays, behind]) as [leaver, stayer, waiting]:
                for _ in range(tokens + 1):
                    await anext(leaver)
                await leaver.aclose()
                before = len(steps)
                await anext(waiting)
                assert len(steps) - before <= 2
                assert len([part async for part in waiting]) == 2
                await stayer.aclose()

        testing.run_virtual(main)


@pytest.mark.usefixtures("no_time_device")
def test_a_program_that_is_cancelled_at_any_step_leaves_nothing_and_others_have_one_outcome_each() -> None:
    requests = [Asked([1, 2, 3], max_tokens=3), Asked([4], max_tokens=2), Asked([5] * 20, max_tokens=2)]
    answer = graph_of(writer(ends=()))
    expected = [alone(weights(), asked) for asked in requests]
    runs = 0

    async def everything() -> list[list[int]]:
        async with engine.deploy(answer, max_in_flight=3) as service:
            return [*map(tokens_of, await asyncio.gather(*(parts_of(service, answer, one) for one in requests)))]

    for outcome in cancelled_at_every_step(everything, seed=1):
        assert outcome.cancelled or outcome.result == expected
        runs += 1
    assert runs > 50


# --- The text ---


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_string_that_is_whole(pieces: list[str], stop: list[str]) -> None:
    text, told = Text(stop), list[str]()
    for place, piece in enumerate(pieces):
        told.append(text.add(piece.encode(), is_last=place == len(pieces) - 1))
        if text.stopped:
            break
    expected = ""
    for piece in pieces:
        expected += piece
        found = [at for at in map(expected.find, stop) if at >= 0]
        if found:
            assert text.stopped
            assert "".join(told) == expected[: min(found)]
            return
    assert not text.stopped
    assert "".join(told) == expected
    # What can be no beginning of a stop string is told at once.
    if not stop:
        assert told == pieces


async def test_an_answer_ends_at_a_stop_string_and_at_the_end_token() -> None:
    asked = Asked([1, 2, 3], max_tokens=40, temperature=1, seed=3)
    whole = "".join(chr(97 + token) for token in alone(weights(), asked))
    stop = whole[5:8]
    answer = graph_of(writer())
    async with engine.deploy(answer) as service:
        parts = await parts_of(service, answer, replace(asked, stop=["", stop]))
    assert "".join(part.text for part in parts) == whole[: whole.index(stop)]
    assert (len(parts), parts[-1].finish_reason) == (whole.index(stop) + 3, "stop")
