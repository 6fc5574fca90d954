"""Random programs under a key, which are killed at any write and any step, and go on in further lives.

Whatever may differ between two lives does: values of nodes, errors, and how long each step takes. So a step that runs
again although it was kept shows: as an effect with other arguments or another key, or in the result.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import penstock as ps
from penstock._errors import RunCancelled
from penstock.durable.runs import Durable
from penstock.durable.sqlite import MemoryStore
from penstock.durable.store import Batch, Store
from penstock.testing import run_virtual

KEY = "the run"
Op = list[Any]


class World:
    """What has happened in all lives of a run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values: dict[str, Any] = {}  # of each step that may differ: what its last run has given
        self.answers: dict[str, str] = {}  # that handlers have got
        self.given: dict[str, set[str]] = {}  # some of them just when a process was killed
        self.tokens: dict[str, str] = {}
        self.winners: dict[str, int] = {}
        self.effects: dict[str, list[tuple[str, str, int]]] = {}  # arguments, key and life
        self.kept: set[str] = set()  # idempotency keys of kept results
        self.begun: set[str] = set()
        self.wrong: list[str] = []
        self.life = 0
        self.is_oracle = False
        self.dead = asyncio.Event()
        self.kill_at = self.steps = 0
        self.runs = 0

    async def live_on(self) -> None:
        """Count a moment at which the process may be killed; in a dead process, nothing goes on."""
        self.steps += 1
        if self.steps == self.kill_at:
            self.dead.set()
        if self.dead.is_set():
            await asyncio.get_running_loop().create_future()

    async def pass_time(self) -> None:
        """Wait for some turns, for some time, or not at all."""
        if self.is_oracle:
            return
        await self.live_on()
        kind = self.random.randrange(4)
        if kind == 1:
            for _ in range(self.random.randrange(6)):
                await asyncio.sleep(0)
        elif kind > 1:
            await asyncio.sleep(self.random.choice([0.001, 0.01, 0.02, 0.5]))
        await self.live_on()

    def note(self, token: str, value: Any) -> Any:
        """Return the value of a step: a random one, or for the oracle the one that the run has kept."""
        if self.is_oracle:
            return self.values[token]
        self.values[token] = value
        self.runs += 1
        return value


world = World(0)


class MortalStore(Store):
    """A store of a process that is killed before or behind one of its writes."""

    def __init__(self, inner: Store, kill_at: int, *, behind: bool) -> None:
        self._inner = inner
        self._left = kill_at
        self._behind = behind
        self.writes = 0

    def _check(self) -> None:
        if world.dead.is_set():
            raise ps.CheckpointError("the process is dead")

    async def write(self, batches: Sequence[Batch], /) -> Any:
        self._check()
        self._left -= 1
        self.writes += 1
        if not self._left and not self._behind:
            world.dead.set()
            self._check()
        written = await self._inner.write(batches)
        for batch in batches:
            for entry in batch.entries:
                key = key_of(entry.path.partition("{")[0])
                (world.kept if entry.kind == "result" else world.begun).add(key)
        if not self._left:
            world.dead.set()
        self._check()
        return written

    async def begin(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.begin(*args, **options)

    async def claim(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.claim(*args, **options)

    async def load(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.load(*args, **options)

    async def read(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.read(*args, **options)

    async def change(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.change(*args, **options)

    async def events(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.events(*args, **options)

    async def list(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.list(*args, **options)

    async def delete(self, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._inner.delete(*args, **options)

    def changes(self) -> Any:
        return self._inner.changes()


def key_of(path: str) -> str:
    parts = [part.partition("@")[0] for part in path.split("/")]
    return blake2b("\0".join([KEY, *parts]).encode(), digest_size=16).hexdigest()


@ps.node
async def ask(token: str) -> str:
    await world.pass_time()
    return str(world.note(token, f"{token}={world.random.randrange(1000)}"))


@ps.node
async def flaky(token: str) -> str:
    await world.pass_time()
    value = world.note(token, world.random.randrange(2))
    if value:
        raise ValueError(token)
    return f"{token} ok"


@ps.node(effectful="unordered")
async def pay(token: str, what: str) -> str:
    if world.is_oracle:
        return f"{token}: {what}"
    await world.live_on()
    key = ps.current().idempotency_key
    if key in world.kept:
        world.wrong.append(f"{token} runs again, and is kept")
    if key not in world.begun:
        world.wrong.append(f"{token} runs before it is kept that it has begun")
    world.effects.setdefault(token, []).append((what, key, world.life))
    await world.pass_time()
    return f"{token}: {what}"


@ps.node(pure=True)
async def tidy(text: str) -> str:
    await world.pass_time()
    return text.strip()


@ps.node
def joined(first: str, second: str) -> str:
    return f"{first}, {second}"


@ps.node
def is_odd(text: str) -> bool:
    return sum(map(ord, text)) % 2 == 1


@ps.graph
async def asked_and_paid(token: str) -> str:
    first = await tidy(await ask(token))
    return await pay(token, first)


@ps.node
async def agent(token: str, script: list[Op]) -> str:
    ps.current()  # so that its tasks know for which item they work
    return await performed(script, token)


async def performed(script: list[Op], text: str) -> str:
    """Performs the ops of a handler, one after the other; the text tells the story so far."""
    for op, token, *more in script:
        if op == "ask":
            text = f"{text} {await ps.call(ask, token)}"
        elif op == "pay":
            text = f"{text} {await ps.call(pay, token, text)}"
        elif op == "graph":
            text = f"{text} {await ps.call(asked_and_paid, token)}"
        elif op == "agent":
            text = f"{text} {await ps.call(agent, token, more[0])}"
        elif op == "question":
            text = f"{text} {await asked(token, text)}"
        elif op == "try":
            try:
                text = f"{text} {await ps.call(flaky, token)}"
            except ValueError as error:
                text = f"{text} {error}!"
        elif op == "rest":
            for _ in range(0 if world.is_oracle else more[0]):
                await asyncio.sleep(0)
        elif op == "gather":
            text = f"{text} {await asyncio.gather(*[performed(one, token) for one in more[0]])}"
        else:
            text = f"{text} {await raced(token, more[0])}"
    return text


async def asked(token: str, text: str) -> str:
    if world.is_oracle:
        return str(world.values[token])
    answer = world.values[token] = await ps.interrupt([token, text])
    if world.answers.setdefault(token, answer) != answer or answer not in world.given[token]:
        world.wrong.append(f"{token} got the answers {answer} and {world.answers[token]}, of {world.given[token]}")
    return str(answer)


async def answering(durable: Durable) -> None:
    """Answers questions, as another process does."""
    while True:
        await asyncio.sleep(world.random.choice([0.05, 0.5, 2.0]))
        with contextlib.suppress(RunCancelled):  # it has not begun
            for token, question in (await durable.questions(KEY)).items():
                if world.tokens.setdefault(question[0], token) != token:
                    world.wrong.append(f"{question[0]} is asked again, with another token")
                answer = f"answer {world.random.randrange(100)}"
                world.given.setdefault(question[0], set()).add(answer)
                await durable.answer(KEY, answer, token=token)


async def raced(token: str, scripts: list[list[Op]]) -> str:
    if world.is_oracle:
        winner = world.winners[token]
        return f"{winner} {await performed(scripts[winner], token)}"
    tasks = [asyncio.ensure_future(performed(one, token)) for one in scripts]
    try:
        done, _ = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    winner = world.winners[token] = min(tasks.index(one) for one in done)
    return f"{winner} {tasks[winner].result()}"


State = dict[str, Any]


@ps.node
def has_more(state: State) -> bool:
    return bool(state["scripts"])


@ps.node
def first_of(state: State) -> list[Any]:
    return [f"{state['token']}.{len(state['scripts'])}", state["scripts"][0]]


@ps.node
def rest_of(state: State, text: str) -> State:
    return {**state, "scripts": state["scripts"][1:], "texts": [*state["texts"], text]}


@ps.node
def texts_of(state: State) -> str:
    return " ".join(state["texts"])


@ps.node
async def one_agent(work: list[Any]) -> str:
    ps.current()
    return await performed(work[1], work[0])


@ps.graph
async def iteration(state: State) -> State:
    return rest_of(state, await using_agent(await as_work(first_of(state))))


@ps.node
async def as_work(work: list[Any]) -> list[Any]:
    await world.pass_time()
    return [*work, "unused"]


@ps.node
async def using_agent(work: list[Any]) -> str:
    ps.current()
    text = f"{work[0]} {work[2]}"
    work[2] = "used"  # what a reader does to a value is not kept
    return await performed(work[1], text)


@ps.graph
async def looped(state: State) -> str:
    last = await ps.while_loop(has_more, iteration, state)
    return await pay(state["token"], texts_of(last))


@ps.graph
async def item(work: list[Any]) -> str:
    return joined(await one_agent(work), await tidy(await ask(work[2])))


@ps.graph
async def mapped(state: State) -> str:
    items: list[list[Any]] = state["items"]
    tokens: list[str] = state["flaky"]
    texts = await ps.map_each(item, items, concurrency=2)
    caught = await ps.map_each(flaky, tokens, on_error="return")
    told = await told_of(caught)
    return await pay(state["token"], await joined_all(texts, told))


@ps.node(pure=True)
async def told_of(outcomes: list[Any]) -> str:
    return " ".join("failed" if one.error is not None else one.value for one in outcomes)


@ps.node(pure=True)
async def joined_all(texts: list[str], more: str) -> str:
    return " ".join([*texts, more])


@ps.graph
async def left(text: str) -> str:
    return await pay("left", await tidy(text))


@ps.graph
async def right(text: str) -> str:
    return joined(await pay("right", text), await ask("right asks"))


@ps.graph
async def branched(state: State) -> str:
    first, second = ask("first"), ask("second")
    both = joined(await first, await second)
    chosen = await ps.cond(is_odd(both), left, right, both)
    inside = await asked_and_paid("inside")
    return await pay(state["token"], joined(joined(chosen, inside), await one_agent(state["work"])))


def script_of(chance: random.Random, token: str, depth: int = 0) -> list[Op]:
    """Returns a random script."""
    ops = ["ask", "ask", "pay", "try", "graph", "rest", "question"] + ["gather", "race", "agent"] * (depth < 2)
    script: list[Op] = []
    for number in range(chance.randrange(1, 5 - depth)):
        op, name = chance.choice(ops), f"{token}/{number}"
        if op == "rest":
            script.append([op, name, chance.randrange(8)])
        elif op == "agent":
            script.append([op, name, script_of(chance, name, depth + 1)])
        elif op in ("gather", "race"):
            count = chance.randrange(2, 4)
            branches = [script_of(chance, f"{name}.{one}", depth + 1) for one in range(count)]
            for number_of_branch, branch in enumerate(branches):
                if all(kind == "rest" for kind, *_ in branch):  # else turns of the loop would decide the race
                    branch.append(["ask", f"{name}.{number_of_branch}/last"])
            script.append([op, name, branches])
        else:
            script.append([op, name])
    return script


def program_of(chance: random.Random) -> Any:
    """Returns a call of a random graph with random scripts."""
    kind = chance.randrange(4)
    if kind == 0:
        return ps.graph(agent)("a", script_of(chance, "a"))
    scripts = [script_of(chance, f"s{number}") for number in range(chance.randrange(1, 4))]
    if kind == 1:
        return looped({"token": "t", "scripts": scripts, "texts": []})
    if kind == 2:
        items = [[f"i{number}", one, f"asked {number}"] for number, one in enumerate(scripts)]
        return mapped({"token": "t", "items": items, "flaky": ["f1", "f2", "f3"]})
    return branched({"token": "t", "work": ["w", scripts[0]]})


def live(seed: int, lives: int = 3) -> World:
    """Runs a random program in several lives, all but the last one killed; returns what has happened."""
    global world  # noqa: PLW0603 - the nodes of the programs find it there
    world = World(seed)
    chance = random.Random(f"program {seed}")
    program = program_of(chance)
    store = MemoryStore()
    result: Any = None
    for life in range(lives):
        world.life = life
        kill = chance.randrange(3) if life < lives - 1 else -1
        result = run_virtual(partial(one_life, store, program, chance, kill), timeout_seconds=10_000)
        if not world.dead.is_set():
            break
    else:
        raise AssertionError("the last life did not end")
    world.is_oracle = True
    expected = asyncio.run(plain(program))
    if result != expected:
        world.wrong.append(f"the result is {result!r}, and in plain Python {expected!r}")
    for token, effects in world.effects.items():
        if len({(what, key) for what, key, _ in effects}) > 1:
            world.wrong.append(f"effect {token} has run with {effects}")
        if len({life for _, _, life in effects}) < len(effects):
            world.wrong.append(f"effect {token} has run twice in one life: {effects}")
    return world


async def plain(program: Any) -> Any:
    return await program


async def one_life(store: Store, program: Any, chance: random.Random, kill: int) -> Any:
    world.dead = asyncio.Event()
    world.steps = 0
    world.kill_at = chance.randrange(1, 60) if kill == 0 else 0
    mortal = MortalStore(store, chance.randrange(1, 25) if kill > 0 else 0, behind=kill == 1)
    durable = Durable(mortal, lease_seconds=2)
    running = asyncio.ensure_future(durable.run(program, key=KEY))
    other = asyncio.ensure_future(answering(Durable(store)))
    dying = asyncio.ensure_future(world.dead.wait())
    await asyncio.wait([running, dying], return_when="FIRST_COMPLETED")
    dying.cancel()
    other.cancel()
    if world.dead.is_set():
        running.cancel()
        with contextlib.suppress(BaseException):
            await running
        return None
    return await running
