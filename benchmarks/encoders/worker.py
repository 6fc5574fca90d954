"""The encoders of one file, in a process that stays alive: `python -m benchmarks.encoders.worker MODULE QUICK`.

The process prints the names of its encoders as JSON once all encoders gave the right vectors. Then it takes one sample
for each line that it reads; the line names the encoder and the texts as JSON.
"""

import asyncio
import importlib
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import TextIO

from .shared import TEXTS, Encode, Open, check


async def texts_per_second(encode: Encode, texts: list[str]) -> float:
    began = time.perf_counter()
    vectors = await encode(texts)
    assert len(vectors) == len(texts)
    return len(texts) / (time.perf_counter() - began)


async def serve(openers: dict[str, Open], texts: dict[str, list[str]], answers: TextIO) -> None:
    async with AsyncExitStack() as stack:
        encoders = {name: await stack.enter_async_context(opened()) for name, opened in openers.items()}
        for encode in encoders.values():
            await check(encode)
        print(json.dumps([*encoders]), file=answers, flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            name, which = json.loads(line)
            print(await texts_per_second(encoders[name], texts[which]), file=answers, flush=True)


def main() -> None:
    module, quick = sys.argv[1:]
    # Libraries print to standard error, so that their output is not taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    openers: dict[str, Open] = importlib.import_module(f".{module}", __package__).ENCODERS
    texts = {name: make(few if int(quick) else many) for name, (make, many, few) in TEXTS.items()}
    asyncio.run(serve(openers, texts, answers))


if __name__ == "__main__":
    main()
