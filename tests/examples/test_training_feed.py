"""The training feed: every batch is trained with, in order, and the slowest part is named."""

import re
from pathlib import Path

import numpy as np

from examples import training_feed
from examples.training_feed import BATCH_SIZE
from tests.examples import programs


def test_files_are_fed_in_batches(tmp_path: Path) -> None:
    for number in range(2 * BATCH_SIZE + 5):
        (tmp_path / f"module{number}.py").write_text(f"x = {number}\n" * number)
    done = programs.run(Path(training_feed.__file__), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "batch   1  loss 1.0000\n" in done.stdout  # before the first step, all weights are 0
    assert re.search(r"^2 batches\. .*limits?.*\.$", done.stdout, re.MULTILINE)


def test_training_makes_the_loss_smaller() -> None:
    batch = np.random.default_rng(0).integers(0, 128, (BATCH_SIZE, training_feed.SIZE)).astype(np.float32)
    weights: object = np.zeros(training_feed.SIZE, np.float32)
    losses: list[float] = []
    for _ in range(3):
        weights, loss = training_feed.train_step(weights, batch)  # type: ignore[arg-type]
        losses.append(float(loss))
    assert losses[0] == 1
    assert losses[2] < losses[1] < losses[0]
