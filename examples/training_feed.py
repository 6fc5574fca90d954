"""Feed a training with real files: read in threads, decode in processes, augment in threads, train on a device.

    python examples/training_feed.py               the standard library of this interpreter
    python examples/training_feed.py ~/project
    python examples/training_feed.py --epochs 5 --checkpoint saved     goes on after a kill at any moment

The model learns nothing useful; its feed is the feed that a real model needs. In the end a profile says which step
limits the training.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import argparse
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock import data, devices, telemetry
from penstock.devices import Array

SIZE, BATCH_SIZE = 1024, 32
LEARNING_RATE = 1e-9

Image = npt.NDArray[np.float32]


class Files:
    """The beginnings of the files of a folder; indexing reads a file."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.rglob("*.py"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        with self._paths[index].open("rb") as file:
            return file.read(SIZE)


@ps.node(runs_on="process")
def decode(record: data.Record[bytes]) -> data.Record[Image]:
    """Return bytes as numbers: float32 [SIZE]."""
    return record.with_value(np.frombuffer(record.value.ljust(SIZE), dtype=np.uint8).astype(np.float32))


@ps.node(runs_on="thread")
def augment(record: data.Record[Image]) -> data.Record[Image]:
    """Turn one image in two around, at random; the choice depends only on the record, not on the order of the work."""
    return record.with_value(record.value[:: record.rng().choice((-1, 1))].copy())


def train_step(weights: jax.Array, batch: Array) -> tuple[jax.Array, jax.Array]:
    """Return new weights, float32 [SIZE], and the loss before the step."""
    error = batch @ weights - 1.0
    return weights - LEARNING_RATE * batch.T @ error, jnp.mean(error**2)


@ps.node
class Train:
    """Owns the weights, which never leave the device: each step writes the next weights into the same memory."""

    async def __aenter__(self) -> Self:
        self._step = devices.actor("auto").bind(train_step, donate_argnums=(0,), ready=False)
        self._weights = jnp.zeros(SIZE)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._weights

    async def __call__(self, batch: Image) -> jax.Array:
        self._weights, loss = await self._step(self._weights, batch)
        return loss

    def state(self) -> jax.Array:
        """Return the weights for a snapshot."""
        return self._weights

    def restore(self, state: jax.Array) -> None:
        """Go on with the weights of a snapshot."""
        self._weights = state


@ps.node(runs_on="thread")
def read_number(value: jax.Array) -> float:
    """Wait for a number from the device, while the device computes the next step."""
    return float(value)


train = Train()


@ps.graph
async def training(files: Files, epochs: int) -> AsyncIterator[float]:
    """Train with files, in another order in each epoch; give the loss of each batch."""
    records = data.order(files, shuffle_seed=0, epochs=epochs) >> data.read(files, concurrency=64)
    batches = records >> decode >> augment >> data.batched(BATCH_SIZE, drop_remainder=True)
    return ps.map_each(train, batches) >> read_number


def feed(folder: Path, epochs: int, checkpoint: ps.Checkpoint | None) -> int:
    """Train with the files of a folder; return the number of batches."""
    call, loss = training(Files(folder), epochs), 0.0
    with telemetry.profile() as profile, data.iterate(call, checkpoint=checkpoint) as losses:
        for loss in losses:
            if losses.position % 50 == 1:
                print(f"batch {losses.position:3}  loss {loss:.4f}")
        count = losses.position
    print(f"{count} batches, loss {loss:.9f}. {profile.verdict}.")
    return count


def main() -> None:
    """Train, and print which step limited the training."""
    parser = argparse.ArgumentParser(description="Feed a training with files.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="how often each file is learned from")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save snapshots there, and go on from them")
    options = parser.parse_args()
    print(training, end="\n\n")
    checkpoint = None if options.checkpoint is None else ps.Checkpoint(options.checkpoint, every_values=20)
    feed(options.folder, options.epochs, checkpoint)


if __name__ == "__main__":
    main()
