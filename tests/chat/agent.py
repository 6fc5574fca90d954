"""An agent that asks a model, uses a tool and asks again, in a durable loop; `main` runs it in a process of its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import penstock as ps
from examples.chat.actor import Asked, Part, Writer
from examples.chat.model import Parameters
from penstock import engine
from tests.chat.recurrent import END, Recurrent, bytes_of, tokens_of, weights

TURNS, TOKENS = 3, 6


@dataclass(frozen=True)
class State:
    """The turns so far, and all letters: of the question, of answers and of what the tool gave."""

    turn: int
    text: str


def die_at(place: str) -> None:
    """Be killed here, if the environment says so."""
    if os.environ.get("DIE_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


@ps.resource
async def loaded() -> AsyncIterator[Parameters]:
    yield weights()


writer = Writer(Recurrent(), bytes_of, [END], weights(), rows=(1,), sizes=(16,), device="cpu")


@ps.node
def asked(state: State) -> Asked:
    # A run that goes on says the same as one that was left alone: a seed for each turn.
    prompt = tokens_of([{"content": state.text}])
    return Asked(prompt, max_tokens=TOKENS, temperature=1, seed=state.turn)


@ps.node
async def said(state: State, parts: AsyncIterator[Part]) -> str:
    text = ""
    async for part in parts:
        text += part.text
        if len(text) == TOKENS // 2:
            die_at(f"answer {state.turn}")
    return text


@ps.node(effectful=True)
async def tool(state: State, answer: str) -> State:
    """Turn an answer around."""
    die_at(f"before tool {state.turn}")
    print("tool", state.turn, flush=True)
    die_at(f"tool {state.turn}")
    return State(state.turn + 1, f"{state.text}{answer}{answer[::-1]}")


@ps.node
def goes_on(state: State) -> bool:
    return state.turn < TURNS


@ps.graph
async def turn(state: State) -> State:
    return await tool(state, await said(state, writer(await loaded(), asked(state))))


def agent(durable: ps.Durable) -> ps.Graph[[str], State]:
    @ps.graph
    async def answered(question: str) -> State:
        return await ps.while_loop(goes_on, turn, State(0, "gate"), durable=durable)

    return answered


async def main(file: str) -> None:
    result = await engine.run(agent(ps.Durable(Path(file)))("gate"), durable_key="k")
    print("result", result.turn, result.text, flush=True)


if __name__ == "__main__":
    import sys

    asyncio.run(main(sys.argv[1]))
