"""Answer questions from the pages of this project: search by meaning, prompt, generate, check. One graph, one trace.

    python examples/rag_server.py                                    ask one question, and end
    python examples/rag_server.py --question "What is a resource?"
    python examples/rag_server.py --serve 8000                       as the model "pages", in OpenAI's protocol

The question is embedded on a device, in one batch with those of other clients, and the closest passages are put before
it. A language model answers, on the same device, with all other answers in one step. What it says is passed on as it
comes, and its end says whether the passages have the words of the answer.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # there is this file's folder, and not the one of `examples`

import argparse
import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
import uvicorn

import penstock as ps
from examples.chat.graph import Answer, Messages, text_of
from examples.embedding import Vector, embed, embed_all
from penstock import engine, serving

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
SHOWN = 3  # passages in a prompt
MAX_CHARACTERS = 900  # of a passage
ENOUGH = 0.6  # of the longer words of an answer that are in the passages; below that, a client is warned

Model: TypeAlias = ps.Graph[[Messages, serving.Request], Answer]


class Passage(NamedTuple):
    """A part of a page, below one heading."""

    source: str
    text: str


class Passages(NamedTuple):
    """All passages, and what they mean: float32 [passages, 384]."""

    each: list[Passage]
    vectors: Vector


def read(folder: Path) -> list[Passage]:
    """Return the passages of the pages in a folder."""
    found: list[Passage] = []
    for page in sorted(folder.glob("*.md")):
        for part in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            text = re.sub(r"```.*?```", "", part, flags=re.DOTALL).strip()
            if len(text) > 80:
                found.append(Passage(page.name, text[:MAX_CHARACTERS]))
    return found


def words_of(texts: Iterable[str]) -> set[str]:
    """Return the longer words of texts, by which it is seen whether they are about the same."""
    return {word for text in texts for word in re.findall(r"[a-z]{5,}", text.lower())}


@ps.resource
async def passages() -> AsyncIterator[Passages]:
    """The passages, which are read and embedded once."""
    each = await asyncio.to_thread(read, PAGES)
    yield Passages(each, await embed_all([passage.text for passage in each]))


@ps.node
def question(messages: Messages) -> str:
    """Return what was asked last."""
    return text_of(messages[-1]["content"])


@ps.node
def closest(known: Passages, vector: jax.Array) -> list[Passage]:
    """Return the passages that are closest in meaning."""
    order = (-(known.vectors @ np.asarray(vector))).argsort()
    return [known.each[number] for number in order[:SHOWN]]


@ps.node
def prompt(messages: Messages, found: list[Passage]) -> Messages:
    """Put the passages before what was asked."""
    texts = "\n\n".join(passage.text for passage in found)
    return [{"role": "system", "content": f"Answer in two sentences, from these notes alone.\n\n{texts}"}, *messages]


@ps.node
async def checked(parts: Answer, found: list[Passage]) -> Answer:
    """Pass an answer on, and say at its end where it comes from, or that it is not from the passages."""
    said = ""
    async for part in parts:
        said += part if isinstance(part, str) else part.text
        if isinstance(part, str) or not part.finish_reason:
            yield part
            continue
        words, known = words_of([said]), words_of(passage.text for passage in found)
        is_founded = len(words & known) >= ENOUGH * len(words)
        sources = ", ".join(dict.fromkeys(passage.source for passage in found))
        note = f"(from {sources})" if is_founded else f"(careful: much of this is not in {sources})"
        yield replace(part, text=f"{part.text}\n\n{note}")


def build(model: Model) -> Model:
    """Return the graph that answers from the passages with a model."""

    @ps.graph
    async def answer(messages: Messages, request: serving.Request) -> Answer:
        found = closest(await passages(), await embed(question(messages)))
        return checked(await model(prompt(messages, found), request), found)

    return answer


async def ask(rag: Model, text: str) -> None:
    """Ask one question, and print the answer as it comes."""
    request = serving.Request.model_validate({"model": "pages", "seed": 0, "max_tokens": 100})
    async with engine.stream(rag([{"role": "user", "content": text}], request)) as parts:
        async for part in parts:
            print(part if isinstance(part, str) else part.text, end="", flush=True)
    print()


def main() -> None:
    """Ask the question, or serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", default="What happens to a reader that is slow?")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve until Ctrl-C")
    options = parser.parse_args()
    from examples.chat.smollm2 import smollm2  # which loads the model

    rag = build(smollm2)
    if options.serve is None:
        asyncio.run(ask(rag, options.question))
    else:
        print(f"the model 'pages' at http://127.0.0.1:{options.serve}/v1, once its programs are ready")
        uvicorn.run(serving.openai({"pages": rag}), port=options.serve, log_level="warning")


if __name__ == "__main__":
    main()
