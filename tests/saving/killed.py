"""Trainings that are killed with SIGKILL at random moments and restarted: they give the results of one without kills.

    python -m tests.saving.killed --kills 20            the language model of the examples, killed 20 times
    python -m tests.saving.killed --kills 20 numbers    sums in NumPy, through threads, a shuffle and a split

Half of the kills come at a random time, the others at a write, an fsync or a rename of a snapshot. Each start has other
concurrency and other buffers. Exit status 1 if a result or a parameter differs in a single bit.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock import data, engine
from penstock.saving import snapshots
from tests.saving.exact import Keeping

SOURCE = np.sqrt(np.arange(3000))
KILLS_AT = "KILLS_AT_STEP"


# The child: it continues from its newest snapshot, and appends its results to a file.


@ps.node
class Sums(Keeping):
    """Results depend on all values before, and on the order of the additions."""

    def __init__(self) -> None:
        self.held = np.linspace(0.1, 1, 1000)

    def __call__(self, batch: Any) -> float:
        self.held *= 0.999
        self.held += np.sin(self.held * float(np.sum(batch)))
        return float(self.held.sum())


@ps.node
def number(record: data.Record[float]) -> float:
    return record.value + record.seed % 7


@ps.node(runs_on="thread")
def halved(value: float) -> float:
    return value / 2


@ps.node
def added(left: float, right: float) -> float:
    return left + right


async def numbers(folder: Path, seed: int) -> None:
    draw, sums = random.Random(seed), Sums()

    def width() -> int:
        return draw.randint(1, 8)

    @ps.graph
    async def train(records: AsyncIterator[data.Record[None]]) -> AsyncIterator[float]:
        shuffled = records >> data.shuffled(20, seed=1) >> data.read(SOURCE, concurrency=width())
        left, right = ps.map_each(number, shuffled, concurrency=width()) >> data.split(2, ahead=width())
        joined = ps.map_each(added, ps.map_each(halved, left, concurrency=width()), right >> data.prefetched(width()))
        return joined >> data.shuffled(30, seed=2) >> data.batched(7) >> sums

    checkpoint = ps.Checkpoint(folder / "snapshots", every_values=9)
    with (folder / "results").open("a") as results:
        async with engine.stream(train(data.order(SOURCE, shuffle_seed=7, epochs=2)), checkpoint=checkpoint) as stream:
            async for value in stream:
                print(stream.position, value.hex(), file=results, flush=True)


async def model(folder: Path, seed: int) -> None:
    from examples import language_model as example
    from penstock import devices

    config = example.Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, vocab_size=300,
    )  # fmt: skip
    texts = [path.read_bytes() for path in sorted(Path(example.__file__).parent.glob("*.py"))]
    mesh = devices.DeviceMesh(shape=(1,), axis_names=("data",))
    trained = example.create_model(config, example.Vocabulary.learn(texts, config.vocab_size))
    with (folder / "results").open("a") as results:

        def report(step: example.Step) -> None:
            print(step.number, step.loss.hex(), file=results, flush=True)

        checkpoint = ps.Checkpoint(folder / "snapshots", every_values=20)
        await example.train(trained, texts, mesh, report, steps=400, checkpoint=checkpoint)
        for name, value in trained.parameters.items():
            print(name, np.asarray(value).tobytes().hex(), file=results, flush=True)


TRAININGS = {"numbers": numbers, "model": model}


def kill_at_step(count: int) -> None:
    """Makes this process kill itself before step number `count` of writing snapshots."""
    left = count

    def step(name: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    snapshots.before_step = step


# The parent.


def start(training: str, folder: Path, seed: int, kills_at: int | None = None) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if kills_at is not None:
        environment[KILLS_AT] = str(kills_at)
    folder.mkdir(exist_ok=True)
    arguments = [sys.executable, "-m", "tests.saving.killed", training, "--child", str(folder), "--seed", str(seed)]
    return subprocess.Popen(arguments, env=environment, cwd=Path(__file__).parents[2])


def results_of(folder: Path) -> dict[str, str]:
    """Returns the results of a training, by position.

    Raises:
        AssertionError: a result that came again differs.
    """
    found: dict[str, str] = {}
    path = folder / "results"
    for line in path.read_text().splitlines() if path.exists() else ():
        place, _, value = line.partition(" ")
        if value and found.setdefault(place, value) != value:
            raise AssertionError(f"result {place} came again, and is another one: {found[place]:.40}, {value:.40}")
    return found


def killed_training(training: str, folder: Path, kills: int, seed: int, seconds: float) -> tuple[dict[str, str], int]:
    """Kills a training `kills` times, and then lets it end; returns its results, and the number of kills."""
    draw, killed = random.Random(seed), 0
    for number in range(kills):
        at_a_step = draw.randint(1, 40) if number % 2 else None
        child = start(training, folder, draw.randrange(1000), at_a_step)
        begun = results_of(folder)
        if at_a_step is None:
            while child.poll() is None and len(results_of(folder)) == len(begun):  # until it has a new result
                time.sleep(0.02)
            try:
                child.wait(draw.random() * seconds)  # a random moment for the kill; no assertion depends on it
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()
        killed += child.returncode == -signal.SIGKILL
    child = start(training, folder, draw.randrange(1000))
    assert child.wait() == 0
    return results_of(folder), killed


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a training again and again, and compare.")
    parser.add_argument("training", choices=sorted(TRAININGS), default="model", nargs="?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--seconds", type=float, default=3.0, help="between the first result and a kill, at most")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        if KILLS_AT in os.environ:
            kill_at_step(int(os.environ[KILLS_AT]))
        asyncio.run(TRAININGS[options.training](options.child, options.seed))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = killed_training(options.training, Path(folder) / "whole", 0, 1, 0)
        print(f"{len(whole)} results without a kill", flush=True)
        kills, seed = 0, options.seed
        while kills < options.kills:  # a training may end before all of its kills
            here = Path(folder) / str(seed)
            got, killed = killed_training(options.training, here, options.kills - kills, seed, options.seconds)
            same = sum(whole.get(place) == value for place, value in got.items())
            print(f"{killed} kills (seed {seed}): {same} of {len(whole)} results are the same bits", flush=True)
            if got != whole:
                return 1
            kills, seed = kills + killed, seed + 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
