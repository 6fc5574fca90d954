"""Train a small network on scikit-learn's handwritten digits.

python examples/train_digits.py                reaches over 95% on digits that it has never seen
python examples/train_digits.py --epochs 5
"""

# The types of JAX, optax and scikit-learn leave parameters of some functions open, or are missing.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from sklearn.datasets import load_digits

SIDE, CLASSES = 8, 10
HIDDEN = 128
BATCH_SIZE = 64
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


def augment(image: Images, random: np.random.Generator) -> Images:
    """Return an image, every second one moved by up to one pixel each way: the same digit, and yet another one."""
    if random.random() < 0.5:  # a pixel is much of eight: moved all the time, fewer are right in the end
        return image
    down, right = random.integers(0, 3, 2)
    moved: Images = np.pad(image, 1)[down : down + SIDE, right : right + SIDE]
    return moved


async def batches(digits: Digits, epochs: int) -> AsyncIterator[Digits]:
    """Yield all digits in batches of one size, for each epoch in a new order; those that fill none are left out."""
    random = np.random.default_rng(SEED)
    for _ in range(epochs):
        order = random.permutation(len(digits.labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            images, labels = take(digits, order[start : start + BATCH_SIZE])
            yield Digits(np.stack([augment(image, random) for image in images]), labels)


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


def classify(parameters: Parameters, images: jax.Array) -> jax.Array:
    """Return a score for each class: [images, 8, 8] gives [images, 10]."""
    *hidden, last = parameters
    values = images.reshape(len(images), SIDE * SIDE)
    for layer in hidden:
        values = jax.nn.relu(values @ layer.kernel + layer.bias)
    return values @ last.kernel + last.bias


def train_step(
    parameters: Parameters, optimizer_state: Any, images: jax.Array, labels: jax.Array
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


def count_right(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return how many images are classified as what they show."""
    return (classify(parameters, images).argmax(axis=1) == labels).sum()


# --- The job ---


async def train(feed: AsyncIterator[Digits], report: Callable[[int, float], None]) -> Parameters:
    """Learn from every batch of a feed; `report` hears the number of each and its loss."""
    step: Any = jax.jit(train_step, donate_argnums=(0, 1))
    parameters = create_parameters()
    state = optimizer.init(parameters)
    number = 0
    async for images, labels in feed:
        parameters, state, loss = step(parameters, state, images, labels)
        number += 1
        report(number, float(loss))
    return parameters


def evaluate(parameters: Parameters, digits: Digits) -> float:
    """Return the share of digits that are classified as what they show."""
    right: jax.Array = jax.jit(count_right)(parameters, digits.images, digits.labels)
    share: float = right.item() / len(digits.labels)
    return share


def show(number: int, loss: float) -> None:
    if number % 50 == 0:
        print(f"step {number:4}  loss {loss:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a network to read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, metavar="N", help="how often each digit is learned from")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    digits, held_out = read_digits()
    began = perf_counter()
    parameters = asyncio.run(train(batches(digits, options.epochs), show))
    seconds = perf_counter() - began
    share = evaluate(parameters, held_out)
    print(
        f"{share:.1%} of {len(held_out.labels)} digits that were held out are right, after {seconds:.1f} s of training"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
