"""Train a small network on scikit-learn's handwritten digits, in a graph.

    python examples/train_digits.py                reaches over 95% on digits that it has never seen
    python examples/train_digits.py --epochs 5

`penstock.data` makes batches ahead of time, in another order in each epoch. A stateful node trains: it owns parameters
and the optimizer's state, which stay on the device. Two graphs share that node: `learn` trains it, `judge` tests it.
"""

# The types of JAX, optax and scikit-learn leave parameters of some functions open, or are missing.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import penstock as ps
from penstock import data, devices, engine
from penstock.devices import Array

SIDE, CLASSES = 8, 10
HIDDEN = 128
BATCH_SIZE = 64
STEPS = 16  # steps of the training in one call of the device
HELD_OUT = 0.2
SEED = 0

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images, float32 [digits, 8, 8] from 0 to 1, and the digits that they show, int32 [digits]."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Any) -> "Digits":
        """Return some of the digits; a single digit comes without the first axis."""
        return Digits(self.images[which], self.labels[which])


def read_digits() -> tuple[Digits, Digits]:
    """Return the digits to train with, and the digits to hold out: the same split every time."""
    from sklearn.datasets import load_digits  # takes longer to import than the rest of the program

    bunch: Any = load_digits()
    digits = Digits(bunch.images.astype(np.float32) / 16, bunch.target.astype(np.int32))
    order = np.random.default_rng(SEED).permutation(len(digits))
    held_out, rest = np.split(order, [int(len(order) * HELD_OUT)])
    return digits[rest], digits[held_out]


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


def moved(image: Array, key: Array) -> jax.Array:
    """Return an image; one in two, at random, is moved by up to one pixel each way: another image of the same digit."""
    whether, where = jax.random.split(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"))
    # One pixel of eight is a lot: if all images were moved, fewer digits would be right in the end.
    start = jnp.where(jax.random.bernoulli(whether), jax.random.randint(where, (2,), 0, 3), 1)
    return jax.lax.dynamic_slice(jnp.pad(image, 1), start, (SIDE, SIDE))


def train_step(
    parameters: Parameters, optimizer_state: Any, images: Array, labels: Array, keys: Array
) -> tuple[Parameters, Any, jax.Array]:
    """Learn from one batch.

    Args:
        parameters: The parameters before the step. They and the state can be donated: the results replace both.
        optimizer_state: The state of the optimizer.
        images: float32 [batch, 8, 8].
        labels: int32 [batch].
        keys: uint32 [batch, 2]; random keys, which say how images are moved.

    Returns:
        Parameters, optimizer state, and the mean loss of the batch before the step.
    """

    def mean_loss(parameters: Parameters) -> jax.Array:
        scores = classify(parameters, jax.vmap(moved)(images, keys))
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses.mean()

    loss, gradients = jax.value_and_grad(mean_loss)(parameters)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
    updated: Any = optax.apply_updates(parameters, updates)
    return updated, optimizer_state, loss


def train_steps(
    parameters: Parameters, optimizer_state: Any, images: Array, labels: Array, keys: Array
) -> tuple[Parameters, Any, jax.Array]:
    """Learn from several batches, one after the other; return the loss of each step. Otherwise like `train_step`.

    A step of such a small network takes less time than the call that begins it. As one program, sixteen steps need one
    call.
    """

    def step(state: tuple[Parameters, Any], batch: Any) -> tuple[tuple[Parameters, Any], jax.Array]:
        parameters, optimizer_state, loss = train_step(*state, *batch)
        return (parameters, optimizer_state), loss

    together = images, labels, keys
    batches = [jnp.reshape(array, (-1, BATCH_SIZE, *array.shape[1:])) for array in together]
    state, losses = jax.lax.scan(step, (parameters, optimizer_state), batches)
    return *state, losses


def count_right(parameters: Parameters, images: Array, labels: Array) -> jax.Array:
    """Return how many images are classified as the digits that they show."""
    return (classify(parameters, images).argmax(axis=1) == labels).sum()


# --- The graphs ---


@ps.node
class Trainer:
    """Learns from batches, one at a time. Only this node has parameters and optimizer state, so it can donate them."""

    async def __aenter__(self) -> Self:
        self._device = devices.actor("auto")
        # ready=False: the next steps begin before the losses of these steps have been read.
        self._step = self._device.bind(train_steps, donate_argnums=(0, 1), ready=False)
        self._parameters: Parameters = await self._device.run(create_parameters)
        self._state: Any = await self._device.run(optimizer.init, self._parameters)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        del self._parameters, self._state

    async def __call__(self, given: data.Records[Digits] | Digits) -> jax.Array:
        """Learn from records, and return the losses of the steps; or test digits, and return how many are right."""
        if isinstance(given, Digits):
            return await self._device.run(count_right, self._parameters, given.images, given.labels)
        digits, keys = given.value, given.key  # a key depends only on the epoch and on the digit
        self._parameters, self._state, losses = await self._step(
            self._parameters, self._state, digits.images, digits.labels, keys
        )
        return losses


@ps.node(runs_on="thread", concurrency=1)
def read_numbers(values: jax.Array) -> npt.NDArray[np.float32]:
    """Wait for numbers from the device."""
    return np.asarray(values)


trainer = Trainer()


@ps.graph
async def feed(digits: Digits, epochs: int) -> AsyncIterator[data.Records[Digits]]:
    """Give digits for several steps at a time, in another order in each epoch; an incomplete last batch is left out."""
    # With `batch=`, because the digits are in memory: the digits of a batch are read at once.
    records = data.order(digits, batch=STEPS * BATCH_SIZE, shuffle_seed=SEED, epochs=epochs, drop_remainder=True)
    return records >> data.read(digits, runs_on="loop")


@ps.graph
async def learn(digits: Digits, epochs: int) -> AsyncIterator[float]:
    """Learn from all digits in each epoch; give the loss of each step."""
    return ps.map_each(trainer, await feed(digits, epochs)) >> read_numbers >> data.unbatched()


@ps.graph
async def judge(digits: Digits) -> float:
    """Return how many digits are classified correctly."""
    return ps.apply(float, await trainer(digits))


async def train(digits: Digits, held_out: Digits, epochs: int, report: Callable[[int, float], None]) -> float:
    """Learn from digits; `report` is called with the number of each step and its loss.

    Returns:
        The share of held out digits that are classified correctly after the training.
    """
    async with engine.deploy(learn, judge) as service:
        async with service.stream(learn(digits, epochs)) as losses:
            number = 0
            async for loss in losses:
                number += 1
                report(number, loss)
        return await service.run(judge(held_out)) / len(held_out)


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
        steps = options.epochs * len(digits) // (STEPS * BATCH_SIZE) * STEPS
        task = bar.add_task("", total=steps, loss=float("nan"))

        def show(number: int, loss: float) -> None:
            bar.update(task, completed=number, loss=loss)
            if number % 50 == 0:
                bar.console.print(f"step {number:4}  loss {loss:.3f}")

        share = asyncio.run(train(digits, held_out, options.epochs, show))
    seconds = perf_counter() - began
    console.print(
        f"{share:.1%} of {len(held_out)} digits that were held out are right, after {seconds:.1f} s of training",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
