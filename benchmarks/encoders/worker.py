"""The encoders of one file, in a process that stays: `python -m benchmarks.encoders.worker MODULE TEXTS`.

Prints their names as JSON once all of them gave the right vectors; then, for each name that it reads, one sample.
"""

import asyncio
import importlib
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import TextIO

from .shared import Encode, Open, check, documents


async def texts_per_second(encode: Encode, texts: list[str]) -> float:
    began = time.perf_counter()
    vectors = await encode(texts)
    assert len(vectors) == len(texts)
    return len(texts) / (time.perf_counter() - began)


async def serve(openers: dict[str, Open], texts: list[str], answers: TextIO) -> None:
    async with AsyncExitStack() as stack:
        encoders = {name: await stack.enter_async_context(opened()) for name, opened in openers.items()}
        for encode in encoders.values():
            await check(encode)
        print(json.dumps([*encoders]), file=answers, flush=True)
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(await texts_per_second(encoders[name], texts), file=answers, flush=True)


def main() -> None:
    module, count = sys.argv[1:]
    # What libraries print is not taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    openers: dict[str, Open] = importlib.import_module(f".{module}", __package__).ENCODERS
    asyncio.run(serve(openers, documents(int(count)), answers))


if __name__ == "__main__":
    main()
