"""Feed a training with real files: read in threads, decode in processes, augment in threads, train on a device.

    python examples/training_feed.py               the standard library of this interpreter
    python examples/training_feed.py ~/project

The model learns nothing worth knowing; what feeds it is what a real one needs. In the end a profile says what limits.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import argparse
import asyncio
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock import devices, engine, telemetry
from penstock.devices import Array

SIZE, BATCH_SIZE = 1024, 32
LEARNING_RATE = 1e-9

Image = npt.NDArray[np.float32]


@ps.node(concurrency=64, runs_on="thread")
def read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SIZE)


@ps.node(runs_on="process")
def decode(raw: bytes) -> Image:
    """Return bytes as numbers: float32 [SIZE]."""
    return np.frombuffer(raw.ljust(SIZE), dtype=np.uint8).astype(np.float32)


@ps.node(runs_on="thread")
def augment(image: Image) -> Image:
    return image[::-1].copy()


@ps.node
async def batches(images: AsyncIterator[Image]) -> AsyncIterator[Image]:
    """Stack images to batches of one size, float32 [BATCH_SIZE, SIZE]; those that fill none are left out."""
    held: list[Image] = []
    async for image in images:
        held.append(image)
        if len(held) == BATCH_SIZE:
            yield np.stack(held)
            held = []


def train_step(weights: jax.Array, batch: Array) -> tuple[jax.Array, jax.Array]:
    """Return new weights, float32 [SIZE], and the loss from before the step."""
    error = batch @ weights - 1.0
    return weights - LEARNING_RATE * batch.T @ error, jnp.mean(error**2)


@ps.node
class Train:
    """Owns the weights, which never leave the device: each step takes their memory for the next ones."""

    async def __aenter__(self) -> Self:
        self._weights = jnp.zeros(SIZE)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._weights

    async def __call__(self, batch: Image) -> jax.Array:
        self._weights, loss = await devices.actor("auto").run(
            train_step, self._weights, batch, donate_argnums=(0,), ready=False
        )
        return loss


@ps.node(runs_on="thread")
def read_number(value: jax.Array) -> float:
    """Wait for a number of the device, while it has the next step."""
    return float(value)


train = Train()


@ps.graph
async def epoch(paths: AsyncIterator[Path]) -> AsyncIterator[float]:
    """Train with files; gives the loss of each batch."""
    images = ps.map_each(augment, ps.map_each(decode, ps.map_each(read, paths)))
    return ps.map_each(read_number, ps.map_each(train, batches(images)))


async def files(folder: Path) -> AsyncIterator[Path]:
    for path in await asyncio.to_thread(lambda: sorted(folder.rglob("*.py"))):
        yield path


async def feed(folder: Path) -> int:
    """Train with the files of a folder; returns how many batches they made."""
    count = 0
    with telemetry.profile() as profile:
        async with engine.stream(epoch(files(folder))) as losses:
            async for loss in losses:
                count += 1
                if count % 50 == 1:
                    print(f"batch {count:3}  loss {loss:.4f}")
    print(f"{count} batches. {profile.verdict}.")
    return count


def main() -> None:
    """Train, and say what limited."""
    parser = argparse.ArgumentParser(description="Feed a training with files.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    options = parser.parse_args()
    print(epoch, end="\n\n")
    asyncio.run(feed(options.folder))


if __name__ == "__main__":
    main()
