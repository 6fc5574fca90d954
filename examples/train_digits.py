"""Train a small network on scikit-learn's handwritten digits, in a graph.

    python examples/train_digits.py                reaches over 95% on digits that it has never seen
    python examples/train_digits.py --epochs 5

An async generator makes batches, worker processes augment them some steps ahead, and a stateful node trains: it owns
parameters and the optimizer's state, which stay on the device. Two graphs share that node: `learn` trains, `judge` asks
it.
"""

# The types of JAX, optax and scikit-learn leave parameters of some functions open, or are missing.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

import penstock as ps
from penstock import devices, engine
from penstock.devices import Array

SIDE, CLASSES = 8, 10
HIDDEN = 128
BATCH_SIZE = 64
PREFETCH = 4  # batches that are ready before they are needed
HELD_OUT = 0.2
SEED = 0

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


class Digits(NamedTuple):
    """Images, float32 [digits, 8, 8] from 0 to 1, and what they show, int32 [digits]."""

    images: Images
    labels: Labels


def read_digits() -> tuple[Digits, Digits]:
    """Return the digits to train with, and those to hold out: the same ones every time."""
    bunch: Any = load_digits()
    digits = Digits(bunch.images.astype(np.float32) / 16, bunch.target.astype(np.int32))
    order = np.random.default_rng(SEED).permutation(len(digits.labels))
    held_out, rest = np.split(order, [int(len(order) * HELD_OUT)])
    return take(digits, rest), take(digits, held_out)


def take(digits: Digits, numbers: npt.NDArray[np.int64]) -> Digits:
    """Return a copy of some of the digits."""
    return Digits(digits.images[numbers], digits.labels[numbers])


# --- What feeds the training ---


class Batch(NamedTuple):
    """Some digits to learn from, and how many batches came before."""

    number: int
    digits: Digits


@ps.node
async def batches(digits: Digits, epochs: int) -> AsyncIterator[Batch]:
    """Yield all digits in batches of one size, for each epoch in a new order; those that fill none are left out."""
    random = np.random.default_rng(SEED)
    number = 0
    for _ in range(epochs):
        order = random.permutation(len(digits.labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield Batch(number, take(digits, order[start : start + BATCH_SIZE]))
            number += 1


# In processes, and not in threads: it computes in Python for 1.5 ms, and a step takes a third of that. A thread that
# computes in Python keeps the interpreter from the thread that enqueues the steps, and from the event loop.
@ps.node(runs_on="process", concurrency=2)
def augment(batch: Batch) -> Digits:
    """Move digits; which ones and where to depends on the number of the batch, and not on which process is first."""
    random = np.random.default_rng((SEED, batch.number))
    images, labels = batch.digits
    return Digits(np.stack([moved(image, random) for image in images]), labels)


def moved(image: Images, random: np.random.Generator) -> Images:
    """Return an image, every second one moved by up to one pixel each way: the same digit, and yet another one."""
    if random.random() < 0.5:  # a pixel is much of eight: moved all the time, fewer are right in the end
        return image
    down, right = random.integers(0, 3, 2)
    cut: Images = np.pad(image, 1)[down : down + SIDE, right : right + SIDE]
    return cut


# --- The model ---

optimizer: Any = optax.adam(3e-3)


class Layer(NamedTuple):
    """An affine map; kernel [inputs, outputs], bias [outputs]."""

    kernel: jax.Array
    bias: jax.Array


Parameters = list[Layer]


def create_parameters() -> Parameters:
    """Return the parameters before any training."""
    keys = jax.random.split(jax.random.key(SEED), 3)
    return [
        Layer(jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5, jnp.zeros(outputs))
        for key, inputs, outputs in zip(keys, (SIDE * SIDE, HIDDEN, HIDDEN), (HIDDEN, HIDDEN, CLASSES), strict=True)
    ]


def classify(parameters: Parameters, images: Array) -> jax.Array:
    """Return a score for each class: [images, 8, 8] gives [images, 10]."""
    *hidden, last = parameters
    values = jnp.reshape(images, (-1, SIDE * SIDE))
    for layer in hidden:
        values = jax.nn.relu(values @ layer.kernel + layer.bias)
    return values @ last.kernel + last.bias


def train_step(
    parameters: Parameters, optimizer_state: Any, images: Array, labels: Array
) -> tuple[Parameters, Any, jax.Array]:
    """Learn from one batch.

    Args:
        parameters: They and the state are replaced by those that are returned, so both can be donated.
        optimizer_state: That of the optimizer.
        images: float32 [batch, 8, 8].
        labels: int32 [batch].

    Returns:
        Parameters, optimizer state, and the mean loss of the batch, from before the step.
    """

    def mean_loss(parameters: Parameters) -> jax.Array:
        scores = classify(parameters, images)
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses.mean()

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
    updated: Any = optax.apply_updates(parameters, updates)
    return updated, optimizer_state, loss


def count_right(parameters: Parameters, images: Array, labels: Array) -> jax.Array:
    """Return how many images are classified as what they show."""
    return (classify(parameters, images).argmax(axis=1) == labels).sum()


# --- The graphs ---


@ps.node
class Trainer:
    """Learns from batches, one at a time. Parameters and the optimizer's state are here alone, so they are donated."""

    async def __aenter__(self) -> Self:
        self._device = devices.actor("auto")
        # Not ready: the next step is under way before the loss of this one has been read.
        self._step = self._device.bind(train_step, donate_argnums=(0, 1), ready=False)
        self._parameters: Parameters = await self._device.run(create_parameters)
        self._state: Any = await self._device.run(optimizer.init, self._parameters)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._parameters, self._state

    async def __call__(self, digits: Digits, judging: bool = False) -> jax.Array:
        """Return the loss of a batch to learn from, or how many digits are classified as what they show."""
        if judging:
            return await self._device.run(count_right, self._parameters, *digits)
        self._parameters, self._state, loss = await self._step(self._parameters, self._state, *digits)
        return loss


@ps.node(runs_on="thread", concurrency=1)
def read_number(value: jax.Array) -> float:
    """Wait for a number of the device."""
    return float(value)


trainer = Trainer()


@ps.graph
async def learn(digits: Digits, epochs: int) -> AsyncIterator[float]:
    """Learn from all digits in each epoch; gives the loss of each batch."""
    feed = ps.map_each(augment, batches(digits, epochs), concurrency=PREFETCH)
    return ps.map_each(read_number, ps.map_each(trainer, feed, concurrency=PREFETCH))


@ps.graph
async def judge(digits: Digits) -> float:
    """Return how many digits are classified as what they show."""
    return read_number(await trainer(digits, judging=True))


async def train(digits: Digits, held_out: Digits, epochs: int, report: Callable[[int, float], None]) -> float:
    """Learn from digits; `report` hears the number of each step and its loss.

    Returns:
        The share of held out digits that are then classified as what they show.
    """
    async with engine.deploy(learn, judge) as service:
        async with service.stream(learn(digits, epochs)) as losses:
            number = 0
            async for loss in losses:
                number += 1
                report(number, loss)
        return await service.run(judge(held_out)) / len(held_out.labels)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a network to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, metavar="N", help="how often each digit is learned from")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    digits, held_out = read_digits()
    console = Console(highlight=False)
    console.print(f"{learn}\n\n{judge}\n", markup=False, soft_wrap=True)
    began = perf_counter()
    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}")
    with Progress(*columns, console=console) as bar:
        steps = options.epochs * (len(digits.labels) // BATCH_SIZE)
        task = bar.add_task("", total=steps, loss=float("nan"))

        def show(number: int, loss: float) -> None:
            bar.update(task, completed=number, loss=loss)
            if number % 50 == 0:
                bar.console.print(f"step {number:4}  loss {loss:.3f}")

        share = asyncio.run(train(digits, held_out, options.epochs, show))
    seconds = perf_counter() - began
    console.print(
        f"{share:.1%} of {len(held_out.labels)} digits that were held out are right, after {seconds:.1f} s of training",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
