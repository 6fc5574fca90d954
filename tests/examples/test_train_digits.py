"""Training on digits: it learns, the same every time, from data that it is not judged by."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples import train_digits
from examples.train_digits import BATCH_SIZE, Batch, Digits, augment, batches, moved, read_digits, train

PROGRAM = Path(train_digits.__file__)


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
    assert len(losses) == 2 * (1438 // BATCH_SIZE)
    assert share == other_share > 0.5  # a tenth is what guessing gives


def test_no_digit_is_held_out_and_learned_from() -> None:
    digits, held_out = read_digits()
    assert digits.images.shape == (1438, 8, 8)
    assert held_out.images.shape == (359, 8, 8)
    for images, labels in (digits, held_out):
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        assert (images.min(), images.max()) == (0, 1)
        assert np.bincount(labels).min() > 0.07 * len(labels)
    learned = {image.tobytes() for image in digits.images}
    assert not any(image.tobytes() in learned for image in held_out.images)


async def test_each_epoch_has_another_order_and_batches_of_one_size() -> None:
    images = np.ones((2 * BATCH_SIZE + 5, 8, 8), np.float32)
    numbered = Digits(images, np.arange(len(images), dtype=np.int32))
    feed: AsyncIterator[Batch] = batches(numbered, epochs=2)
    labels: list[npt.NDArray[np.int32]] = []
    async for batch in feed:
        assert batch.number == len(labels)
        labels.append(batch.digits.labels)
    assert [len(each) for each in labels] == [BATCH_SIZE] * 4
    first, second = np.concatenate(labels[:2]), np.concatenate(labels[2:])
    assert len(set(first)) == len(set(second)) == 2 * BATCH_SIZE
    assert first.tolist() != second.tolist()


def test_an_augmented_digit_is_moved_by_one_pixel_at_most() -> None:
    image: npt.NDArray[np.float32] = np.zeros((8, 8), np.float32)
    image[4, 4] = 1
    random = np.random.default_rng(0)
    places = {tuple(np.argwhere(moved(image, random))[0]) for _ in range(500)}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


def test_a_batch_is_augmented_the_same_whichever_thread_has_it_and_others_differently() -> None:
    digits = Digits(np.random.default_rng(1).random((BATCH_SIZE, 8, 8), np.float32), np.zeros(BATCH_SIZE, np.int32))
    first, again, second = (augment(Batch(number, digits)).images for number in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
