"""Training on digits: the model learns, gets the same result every time, and is judged by other data."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt
import pytest

from examples import train_digits
from examples.train_digits import BATCH_SIZE, STEPS, Digits, feed, moved, read_digits, train
from penstock import data, engine

PROGRAM = Path(train_digits.__file__)
TOGETHER = STEPS * BATCH_SIZE


@pytest.mark.long  # a whole training; the next test has the beginning of one
def test_the_program_gets_over_95_percent_right() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    [percent] = re.findall(r"(\d+\.\d)% of 359 digits that were held out are right", done.stdout)
    assert float(percent) > 95
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]


def trained(epochs: int) -> tuple[float, list[float]]:
    digits, held_out = read_digits()
    losses: list[float] = []
    return asyncio.run(train(digits, held_out, epochs, lambda _, loss: losses.append(loss))), losses


def test_it_goes_the_same_way_every_time() -> None:
    (share, losses), (other_share, other_losses) = trained(2), trained(2)
    assert losses == other_losses
    assert len(losses) == 2 * 1438 // TOGETHER * STEPS
    assert share == other_share > 0.5  # guessing gives a tenth


@pytest.mark.long  # compiles two programs
def test_steps_in_one_program_are_those_one_by_one() -> None:
    digits, _ = read_digits()
    some = digits[np.arange(3 * BATCH_SIZE)]
    keys = np.random.default_rng(0).integers(2**32, size=(len(some), 2), dtype=np.uint32)
    parameters = train_digits.create_parameters()
    begin = parameters, train_digits.optimizer.init(parameters)
    *together, losses = jax.jit(train_digits.train_steps)(*begin, some.images, some.labels, keys)
    one_by_one = list(begin)
    for number in range(3):
        at = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        *one_by_one, loss = jax.jit(train_digits.train_step)(*one_by_one, some.images[at], some.labels[at], keys[at])
        np.testing.assert_allclose(losses[number], loss, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), together, one_by_one)


def test_no_digit_is_held_out_and_learned_from() -> None:
    digits, held_out = read_digits()
    assert digits.images.shape == (1438, 8, 8)
    assert held_out.images.shape == (359, 8, 8)
    for part in (digits, held_out):
        images, labels = part.images, part.labels
        assert images.dtype == np.float32
        assert labels.dtype == np.int32
        assert (images.min(), images.max()) == (0, 1)
        assert np.bincount(labels).min() > 0.07 * len(labels)
    learned = {image.tobytes() for image in digits.images}
    assert not any(image.tobytes() in learned for image in held_out.images)


def numbered(count: int) -> Digits:
    images = np.random.default_rng(1).random((count, 8, 8), np.float32)
    return Digits(images, np.arange(count, dtype=np.int32))


async def batches(digits: Digits, epochs: int) -> list[data.Records[Digits]]:
    return [batch async for batch in engine.stream(feed(digits, epochs))]


async def test_each_epoch_has_another_order_and_batches_of_one_size() -> None:
    count = 2 * TOGETHER + 5
    labels = [batch.value.labels for batch in await batches(numbered(count), epochs=2)]
    assert [len(each) for each in labels] == [TOGETHER] * 4
    first, second = np.split(np.concatenate(labels), [count])
    assert sorted(first) == list(range(count))
    assert len(set(second)) == len(second)
    assert first[: len(second)].tolist() != second.tolist()


def test_an_augmented_digit_is_moved_by_one_pixel_at_most() -> None:
    image: npt.NDArray[np.float32] = np.zeros((8, 8), np.float32)
    image[4, 4] = 1
    keys = np.random.default_rng(0).integers(2**32, size=(500, 2), dtype=np.uint32)
    images = np.asarray(jax.jit(jax.vmap(moved, (None, 0)))(image, keys))
    places = {tuple(np.argwhere(image)[0]) for image in images}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


async def test_a_digit_is_augmented_the_same_every_time_and_differently_in_each_epoch() -> None:
    digits = numbered(TOGETHER)
    (first, second), (again, _) = [await batches(digits, epochs=2) for _ in range(2)]
    all_moved = jax.jit(jax.vmap(moved))
    by_label = [
        np.asarray(all_moved(batch.value.images, batch.key))[batch.value.labels.argsort()]
        for batch in (first, again, second)
    ]
    np.testing.assert_array_equal(by_label[0], by_label[1])
    assert (by_label[0] != by_label[2]).any()
