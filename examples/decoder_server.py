"""Serve a language model to many clients at once, with continuous batching: every step decodes for all open requests.

    python examples/decoder_server.py                    64 clients, of which three misbehave
    python examples/decoder_server.py --slots 2 --step-seconds 0.01

The decoder is an actor that owns its loop. Between two steps it gives free slots to requests that wait: a request never
waits for others to finish, only for a slot. A client that does not read loses its slot, one that leaves or whose
deadline passes gives it up, and the next request has it at the very next step.

The cache of all slots stays on the device: each step takes its memory for the next one. The model is a toy; what is
around it is what a real one needs.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import argparse
import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock import devices, engine

Tokens = npt.NDArray[np.int32]
Work = ps.StreamWork[tuple[str, Tokens], int]  # who asks, and the prompt

END = 0
MAX_PROMPT = 64  # all prompts are padded to it, so that one program is enough
STATES = 251  # a prime, so that every state comes to END


@dataclass
class History:
    """What the decoder did: for each step, which client had which slot (None: it was free), and how many waited."""

    steps: list[tuple[str | None, ...]] = field(default_factory=list[tuple[str | None, ...]])
    waiting: list[int] = field(default_factory=list[int])

    def occupancy(self) -> float:
        """Return the share of slots that were in use."""
        used = [client is not None for slots in self.steps for client in slots]
        return sum(used) / len(used) if used else 0.0


def prefill(cache: jax.Array, slot: int, prompt: Tokens) -> jax.Array:
    """Put a prompt into a slot of the cache, int32 [slots]; padding is 0."""
    return cache.at[slot].set(prompt.sum() % (STATES - 1) + 1)


def step(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decode one token for every slot; returns the new cache and the tokens, int32 [slots] each."""
    following = (cache + 7) % STATES
    return following, following


@ps.node
class Decoder(ps.StreamActor[tuple[str, Tokens], int]):
    """Decodes for as many requests at a time as it has slots."""

    def __init__(self, slots: int, step_seconds: float, history: History) -> None:
        self.slots = slots
        self.step_seconds = step_seconds
        self.history = history

    async def loop(self, inbox: ps.Inbox[Work], /) -> None:
        """Fill free slots, decode one token for each, give them out; until no more work comes."""
        device = devices.actor("auto")
        cache = jnp.zeros(self.slots, jnp.int32)
        active: dict[int, Work] = {}
        while True:
            fresh = [] if active else [await inbox.get()]
            for slot in [slot for slot in range(self.slots) if slot not in active]:
                fresh = fresh or inbox.take_nowait(1)  # one by one: others come while the device is given work
                if not fresh:
                    break
                work = fresh.pop()
                _, prompt = work.value
                cache = await device.run(prefill, cache, slot, prompt, donate_argnums=(0,), ready=False)
                active[slot] = work
            self.record(active, len(inbox))
            await asyncio.sleep(self.step_seconds)  # the time that a larger model takes
            # Around a loop, pyright does not see that the cache stays what it was.
            cache, tokens = await device.run(step, cache, donate_argnums=(0,))  # pyright: ignore[reportUnknownArgumentType]
            for slot, work in list(active.items()):
                token = int(tokens[slot])
                if work.cancelled or token == END:
                    work.finish()
                elif work.put_nowait(token):
                    continue
                else:  # a client that does not read loses its slot, and its batch mates lose no time
                    work.fail(TimeoutError("the client is too slow"))
                del active[slot]

    def record(self, active: dict[int, Work], waiting: int) -> None:
        """Note which client has which slot, and tell how many are in use."""
        slots = (active.get(slot) for slot in range(self.slots))
        self.history.steps.append(tuple([None if work is None else work.value[0] for work in slots]))
        self.history.waiting.append(waiting)
        self.report(slots=len(active), waiting=waiting, steps=len(self.history.steps))


@ps.node
def tokenize(text: str) -> Tokens:
    """Make tokens of a text."""
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    return np.pad(tokens[:MAX_PROMPT], (0, max(MAX_PROMPT - len(tokens), 0)))


@ps.node
async def detokenize(tokens: AsyncIterator[int]) -> AsyncIterator[str]:
    """Make text of tokens."""
    async for token in tokens:
        yield chr(97 + token % 26)


def build(slots: int, step_seconds: float, history: History) -> ps.Graph[[str, str], AsyncIterator[str]]:
    """Return the graph that answers a prompt of a client."""
    decode = Decoder(slots, step_seconds, history)

    @ps.graph
    async def generate(client: str, text: str) -> AsyncIterator[str]:
        return detokenize(decode(client, tokenize(text)))

    return generate


@dataclass
class Server:
    """A deployment, and the clients that call it."""

    service: engine.Service[[str, str], AsyncIterator[str]]
    generate: ps.Graph[[str, str], AsyncIterator[str]]
    history: History
    answers: dict[str, str] = field(default_factory=dict[str, str])

    async def patient(self, number: int) -> None:
        """Read the whole answer."""
        client = f"client {number}"
        async with self.service.stream(self.generate(client, f"prompt {number}"), priority=number % 2) as letters:
            self.answers[client] = "".join([letter async for letter in letters])

    async def one_that_leaves(self) -> int:
        """Read three letters and leave; returns how many steps the decoder had begun then."""
        async with self.service.stream(self.generate("leaver", "a long story"), priority=5) as letters:
            for _ in range(3):
                await anext(letters)
            return len(self.history.steps)

    async def one_that_never_reads(self, others: asyncio.Event) -> str:
        """Ask, and read nothing until all others have their answers; returns what that gave."""
        async with self.service.stream(self.generate("sleeper", "once upon a time"), priority=5) as letters:
            await letters.wait_started()
            await others.wait()
            try:
                return "".join([letter async for letter in letters])
            except TimeoutError as error:
                return str(error)

    async def one_in_a_hurry(self, timeout_seconds: float) -> str:
        """Ask with a deadline that is too short; returns the error."""
        try:
            call = self.generate("hasty", "tell me everything")
            async with self.service.stream(call, priority=5, timeout_seconds=timeout_seconds) as letters:
                return "".join([letter async for letter in letters])
        except TimeoutError as error:
            return str(error)


async def serve(slots: int, step_seconds: float, clients: int = 64) -> tuple[Server, tuple[int, str, str]]:
    """Serve `clients` at once, three of which misbehave; returns the server, and what became of those three."""
    history = History()
    generate = build(slots, step_seconds, history)
    async with engine.deploy(generate, max_in_flight=clients, max_queue=clients) as service:
        server = Server(service, generate, history)
        others = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            sleeper = group.create_task(server.one_that_never_reads(others))
            leaver = group.create_task(server.one_that_leaves())
            hasty = group.create_task(server.one_in_a_hurry(timeout_seconds=10.5 * step_seconds))
            patients = [group.create_task(server.patient(number)) for number in range(clients - 3)]
            await asyncio.wait([*patients, leaver, hasty])
            others.set()
    return server, (leaver.result(), sleeper.result(), hasty.result())


def main() -> None:
    """Run the server and its clients, and say how it went."""
    parser = argparse.ArgumentParser(description="Serve a toy language model with continuous batching.")
    parser.add_argument("--slots", type=int, default=8, help="requests that are decoded at a time")
    parser.add_argument("--step-seconds", type=float, default=0.001, help="how long a step takes")
    parser.add_argument("--clients", type=int, default=64, help="clients that ask at once, at least 3")
    options = parser.parse_args()
    server, (_, sleeper, hasty) = asyncio.run(serve(options.slots, options.step_seconds, options.clients))
    letters = sum(map(len, server.answers.values()))
    print(f"{len(server.answers)} clients got {letters} letters, the first {server.answers['client 0'][:20]!r}")
    print(f"the one that never read:  {sleeper}")
    print(f"the one in a hurry:       {hasty}")
    print(f"{len(server.history.steps)} steps, {server.history.occupancy():.0%} of {options.slots} slots in use")


if __name__ == "__main__":
    main()
