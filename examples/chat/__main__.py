"""Ask SmolLM2 on the command line, and read its answer as it comes.

python -m examples.chat "Why is the sky blue?"
python -m examples.chat                             at a prompt, as a conversation; an empty line ends it
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

import anyio

from penstock import engine, serving

from .graph import Messages
from .smollm2 import smollm2


async def questions(given: Sequence[str]) -> AsyncIterator[str]:
    """Yield what to ask: what was given, or what a person types."""
    for question in given:
        yield question
    while not given:
        print("\n❯ ", end="", flush=True)
        await anyio.wait_readable(sys.stdin)  # a terminal hands over whole lines, so this holds up nothing
        if not (question := sys.stdin.readline().strip()):
            return
        yield question


async def main() -> None:
    """Ask each question after the last answer, so that the model knows both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="*", help="what to ask; several are a conversation")
    parser.add_argument("--temperature", type=float, help="0 for the likeliest answer")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--seed", type=int, help="a number for repeatable answers")
    options = parser.parse_args()
    how = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
    request = serving.Request.model_validate({"model": "smollm2", **how})
    messages: Messages = []
    async with engine.deploy(smollm2) as service:
        async for question in questions(options.question):
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
    asyncio.run(main())
