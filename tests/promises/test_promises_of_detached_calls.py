"""Promises 1 and 6 for detached calls: each has one outcome, whatever its readers do, and ends with its service."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import penstock as ps
from penstock import engine
from tests.promises.exploring import Explorer, random_of_loop
from tests.saving.agents import MemoryStore, without_threads

TURNS = 3
KEPT = 4
State = tuple[str, int, int]  # the key, the turn, and the number of events so far


class Boom(Exception):
    """The error that a turn raises."""


@dataclass
class Books:
    """The books of one interleaving.

    Attributes:
        rng: the generator that draws the interleaving.
        durable: the store of the agents.
        fate: the end of each key in its last turn: "done", "failed" or "asked".
        ran: how often each turn of a key began.
        inside: how many turns are running.
        outcomes: the kinds of outcomes that callers and readers of a key received.
        missed: how many readers were told that they had missed events.
    """

    rng: random.Random
    durable: ps.Durable
    fate: dict[str, str]
    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    inside: int = 0
    outcomes: dict[str, set[str]] = field(default_factory=dict)
    missed: int = 0

    @classmethod
    def of_running_loop(cls) -> "Books":
        rng = random_of_loop()
        fate = {f"k{number}": rng.choice(["done", "done", "failed", "asked"]) for number in range(4)}
        return cls(rng, ps.Durable(MemoryStore()), fate)

    def agent(self) -> "ps.Graph[[str], int]":
        """Return an agent that emits numbers, and ends each key by its fate."""

        @ps.node(effectful=True)
        async def turn(state: State) -> State:
            self.inside += 1
            try:
                return await self._turn(*state)
            finally:
                self.inside -= 1

        @ps.graph
        async def agent(key: str) -> int:
            first = ps.apply(lambda key: (key, 0, 0), key)
            last = await ps.while_loop(ps.node(lambda state: state[1] < TURNS), turn, first, durable=self.durable)
            return ps.apply(lambda state: state[1], last)

        return agent

    async def _turn(self, key: str, state: int, emitted: int) -> State:
        self.ran[key, state] += 1
        for _ in range(self.rng.randrange(4)):
            await ps.emit(emitted)
            emitted += 1
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.choice([0, 0.5]))
        if state == TURNS - 1 and self.fate[key] == "failed":
            raise Boom(key)
        if state == TURNS - 1 and self.fate[key] == "asked":
            await ps.interrupt(key)
        return key, state + 1, emitted

    async def calls(self, service: engine.Service[[str], int], call: ps.Call[int], key: str) -> None:
        """Begin the call of a key; then wait for it, read it, or leave."""
        way = self.rng.choice(["run", "read", "leave"])
        if way == "run":
            await self._ends(key, service.run(call, detached=True, durable_key=key))
            return
        stream = service.stream(call, events=int, detached=True, durable_key=key)
        if way == "read":
            await self._ends(key, self._read(stream))

    async def attaches(self, service: engine.Service[[str], int], key: str) -> None:
        """Attach to the call of a key at a random time."""
        await asyncio.sleep(self.rng.choice([0, 0.3, 1]))
        await self._ends(key, self._read(service.attach(key, events=int)))

    async def _ends(self, key: str, call: Awaitable[int]) -> None:
        kind = await kind_of(call)
        if kind:
            self.outcomes.setdefault(key, set()).add(kind)

    async def _read(self, stream: engine.DetachedStream[Any, int]) -> int:
        """Read to the end. Numbers grow, and events come in order, except where events were missed."""
        number, last, patience = stream.number, None, self.rng.choice([0, 0, 1])
        async for item in stream:
            is_missed = item.kind == "missed"
            assert stream.number > number or is_missed
            assert is_missed or last is None or item.value == last + 1
            self.missed += is_missed
            number, last = stream.number, None if is_missed else item.value
            await asyncio.sleep(patience)
        return await stream.result()

    async def check(self, end: str, statistics: engine.ServiceStatistics) -> None:
        """Check that the store, callers, readers and the statistics of the service agree."""
        found = Counter[str]()
        async with engine.deploy(self.agent()) as service:
            for key in self.fate:
                kind = await kind_of(service.attach(key, events=int).result())
                if not kind:  # the call ended before it had its key
                    assert end != "drain" or key not in self.outcomes
                    continue
                found[kind] += 1
                assert kind in (self.fate[key], "ended")
                assert self.outcomes.get(key, {kind}) == {kind}, "all get the one outcome"
                assert kind != "ended" or end != "drain", "a drain waits for what has begun"
        assert all(times == 1 for times in self.ran.values())
        assert (statistics.completed, statistics.interrupted) == (found["done"], found["asked"])
        assert statistics.admission.in_flight == statistics.admission.queued == 0


async def kind_of(call: Awaitable[int]) -> str:
    """Return how a call ended; "" if it was refused: it had no key yet, or came too late."""
    try:
        assert await call == TURNS
    except ps.Interrupted:
        return "asked"
    except (Boom, ps.KeyStopped) as error:
        return "failed" if "Boom" in repr(error) else "ended"
    except ps.UnknownKey:
        return ""
    except ps.EngineClosedError as error:
        return "" if "takes no more calls" in str(error) else "ended"
    return "done"


@pytest.fixture(autouse=True)
def in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace threads, whose steps no seed replays, by turns of the loop; keep few events."""
    without_threads(monkeypatch)
    monkeypatch.setattr("penstock.engine.detached.KEPT", KEPT)


def test_promises_1_and_6_hold_for_detached_calls(explore: Explorer) -> None:
    async def main() -> tuple[str, Books]:
        books = Books.of_running_loop()
        rng, agent = books.rng, books.agent()
        end = rng.choice(["drain", "drain", "impatient drain", "abort", "close"])
        async with engine.Engine() as own, own.deploy(agent, max_in_flight=rng.choice([1, 2, 8])) as service:
            tasks = [asyncio.create_task(books.calls(service, agent(key), key)) for key in books.fate]
            tasks += [asyncio.create_task(books.attaches(service, rng.choice(list(books.fate)))) for _ in range(4)]
            await asyncio.sleep(rng.choice([0, 0.2, 1, 3]))
            for task in rng.sample(tasks, 3):
                task.cancel()
                await asyncio.sleep(0)
            if end == "abort":
                await service.abort()
            elif end == "close":
                await own.__aexit__(None, None, None)
            else:
                await service.drain(timeout_seconds=None if end == "drain" else rng.choice([0, 0.5, 2]))
            assert asyncio.all_tasks() <= {*tasks, asyncio.current_task()}
            assert not books.inside, "a handler runs on"
            assert own.statistics().scopes == 0
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError | ps.EngineClosedError), repr(outcome)
        await books.check(end, service.statistics())
        return end, books

    ends = ("drain", "impatient drain", "abort", "close")
    kinds = ("done", "failed", "asked", "ended")
    reaches: dict[str, Callable[[tuple[str, Books]], bool]] = {
        **{end: lambda found, end=end: found[0] == end for end in ends},
        **{kind: lambda found, kind=kind: {kind} in found[1].outcomes.values() for kind in kinds},
        "a reader misses something": lambda found: found[1].missed > 0,
    }
    explore(main, reaches=reaches)
