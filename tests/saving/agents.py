"""Graphs with durable loops, for tests; and `main`, which runs one of them in a process of its own."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock as ps
from penstock import engine


@dataclass(frozen=True)
class State:
    """The state of an agent; it has types that JSON alone would not restore."""

    turn: int
    said: tuple[str, ...]
    counts: dict[int, str]


FIRST = State(0, (), {})
TURNS = 5
RunAgent = Callable[..., list[str]]  # the fixture `run_agent`
WORDS = " ".join(f"word{turn}" for turn in range(TURNS))


def agent(
    durable: ps.Durable, turn: "Callable[[State], Any]", last: int = TURNS, name: str = "answered"
) -> "ps.Graph[[str], str]":
    """Returns a graph of this name, whose loop runs `turn` until the state has reached turn `last`."""
    body = ps.node(effectful=True)(turn)

    @ps.node
    async def before(question: str) -> State:
        return FIRST

    @ps.node
    def goes_on(state: State) -> bool:
        return state.turn < last

    @ps.node
    async def after(state: State) -> str:
        return " ".join(state.said)

    async def answered(question: str) -> str:
        state = await ps.while_loop(goes_on, body, await before(question), durable=durable)
        return await after(state)

    answered.__name__ = name
    return ps.graph(answered)


def durable_in(place: str) -> ps.Durable:
    """Returns where loops are stored: in a file, or in a PostgreSQL database."""
    return ps.Durable(ps.PostgresStore(place) if place.startswith("postgresql://") else Path(place))


def next_state(state: State, word: str) -> State:
    return State(state.turn + 1, (*state.said, word), {**state.counts, state.turn: word})


class MemoryStore(ps.LoopStore):
    """Keeps loops in memory; each method waits one turn of the loop before and after it has done its work."""

    def __init__(self) -> None:
        self.records: dict[str, list[ps.LoopRecord]] = {}
        self.calls: list[str] = []

    async def called(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(0)

    async def load(self, key: str, /) -> ps.LoopRecord | None:
        await self.called("load")
        return self.records[key][-1] if key in self.records else None

    async def store(self, key: str, record: ps.LoopRecord, /, *, expected_version: int) -> bool:
        await self.called("store")
        kept = self.records.get(key, [])
        if (kept[-1].version if kept else 0) != expected_version:
            return False
        self.records[key] = [*(one for one in kept if one.step < record.step), record]
        await asyncio.sleep(0)
        return True

    async def history(self, key: str, /) -> Sequence[ps.LoopRecord]:
        await self.called("history")
        return list(self.records.get(key, ()))


class Job:
    """An agent that notes the turns that ran, and does something else in some turns.

    Attributes:
        durable: where its loop is kept.
        graph: the graph of the agent.
        ran: the turns that ran, in their order.
        in_turn: what is done in a turn; a result of it is the word of the turn.
    """

    def __init__(self, store: ps.LoopStore | Path, last: int = TURNS, name: str = "answered", **options: Any) -> None:
        self.durable = ps.Durable(store, **options)
        self.graph = agent(self.durable, self, last, name)
        self.ran: list[int] = []
        self.in_turn: dict[int, Callable[[], Awaitable[Any]]] = {}

    async def __call__(self, state: State) -> State:
        self.ran.append(state.turn)
        word = await self.in_turn[state.turn]() if state.turn in self.in_turn else None
        return next_state(state, word or f"word{state.turn}")

    async def run(self, key: str = "k", question: str = "q", **options: Any) -> str:
        return await engine.run(self.graph(question), durable_key=key, **options)

    async def ends(self, key: str, turn: int, does: Callable[[], Awaitable[Any]]) -> None:
        """Runs a key until its call fails or asks in a turn."""
        self.in_turn = {turn: does}
        with suppress(ValueError, ps.Interrupted):
            await self.run(key)
            raise AssertionError("it had a result")
        self.in_turn = {}

    async def begun(
        self, key: str, turn: int, does: "Callable[[], Awaitable[Any]] | None" = None
    ) -> "asyncio.Task[str]":
        """Runs a key until its call has begun a turn, in which it waits for ever, or does what is given."""
        self.in_turn = {turn: does or asyncio.Event().wait}
        self.ran.clear()
        running = asyncio.create_task(self.run(key))
        while turn not in self.ran:
            await asyncio.sleep(0)
        self.in_turn = {}
        return running


async def stop(running: "asyncio.Task[Any]") -> None:
    """Cancels a call, and waits for its end."""
    running.cancel()
    await asyncio.wait([running])


def without_threads(patch: Any) -> None:
    """Replaces the threads of durable calls by turns of the loop, whose number is always the same."""

    async def in_a_turn(work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return work(*args)

    patch.setattr("asyncio.to_thread", in_a_turn)
    patch.setattr("penstock.saving.durable.DurableCall._in_thread", lambda call, *args: in_a_turn(*args))


async def fails() -> None:
    raise ValueError("the model is down")


async def asks() -> Any:
    return await ps.interrupt({"pay": 120})


def say(word: str) -> None:
    print(word, flush=True)


def program(function: str = "main") -> str:
    """Returns a program that runs one of the functions below with its arguments."""
    return f"import asyncio, sys; from tests.saving import agents; asyncio.run(agents.{function}(*sys.argv[1:]))"


async def turn(state: State) -> State:
    """Prints its number, and then does what the environment says."""
    say(f"turn {state.turn}")
    if os.environ.get("DIE_IN") == str(state.turn):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("STOP_IN") == str(state.turn):
        await asyncio.sleep(3600)
    word = f"word{state.turn}"
    if os.environ.get("ASK_IN") == str(state.turn):
        word = await ps.interrupt(f"what comes in turn {state.turn}?")
    return next_state(state, word)


async def main(file: str, key: str, answer: str | None = None) -> None:
    """Runs the agent; prints each turn that runs, and then the outcome."""
    graph = agent(durable_in(file), turn)
    given: dict[str, Any] = {} if answer is None else {"answer": answer}
    try:
        say(f"result {await engine.run(graph('q'), durable_key=key, **given)}")
    except ps.Interrupted as interrupted:
        say(f"asked {interrupted.key} {interrupted.question}")
    except ps.KeyInUse as error:
        say(f"refused {error}")


async def resume_all(file: str) -> None:
    """Resumes all keys; prints each turn that runs, and each key that failed."""
    async with engine.deploy(agent(durable_in(file), turn)) as service:
        say(f"left {await service.resume_all()}")


async def fork(file: str) -> None:
    """Runs one loop here, one in a forked child while the file is open here, and another one here."""
    job = Job(Path(file))
    await job.run("before")
    child = multiprocessing.get_context("fork").Process(target=lambda: say(f"child {asyncio.run(job.run('child'))}"))
    child.start()
    await asyncio.to_thread(child.join)
    say(f"parent {await job.run('after')}")
