"""The training feed: training uses every batch in order, and the report names the slowest part."""

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from examples import training_feed
from examples.training_feed import BATCH_SIZE
from tests.examples import programs


def test_files_are_fed_in_batches_and_a_killed_training_goes_on(tmp_path: Path, effort: int) -> None:
    """A snapshot every 20 batches survives `kill -9`."""
    files, saved = tmp_path / "files", tmp_path / "saved"
    files.mkdir()
    count = 4 * BATCH_SIZE + 5
    for number in range(count):
        (files / f"module{number}.py").write_text(f"x = {number}\n" * number)
    epochs = 8 if effort == 1 else 30
    program, arguments = Path(training_feed.__file__), (files, "--epochs", str(epochs))
    left_alone = programs.run(program, *arguments)
    assert (left_alone.returncode, left_alone.stderr) == (0, "")
    assert "batch   1  loss 1.0000\n" in left_alone.stdout  # before the first step, all weights are 0
    assert re.search(r"^\d+ batches, loss [\d.]+\. .*limits?.*\.$", left_alone.stdout, re.MULTILINE)
    [whole] = ended(left_alone.stdout)
    assert whole.startswith(f"{epochs * count // BATCH_SIZE} batches, ")  # records that fill no batch are left out
    for number in (1,) if effort == 1 else (1, 2, 4):
        killed = subprocess.Popen(
            [sys.executable, program, *arguments, "--checkpoint", saved], stdout=subprocess.DEVNULL
        )
        while not (saved / f"snapshot-{number:08d}").exists():
            assert killed.poll() is None
            time.sleep(0.01)  # another process writes the snapshot
        killed.kill()
        killed.wait()
    done = programs.run(program, *arguments, "--checkpoint", saved)
    assert "batch   1 " not in done.stdout
    assert ended(done.stdout) == [whole]


def ended(printed: str) -> list[str]:
    """Returns the number of batches and the last loss, as printed."""
    return re.findall(r"^\d+ batches, loss [\d.]+", printed, re.MULTILINE)


def test_training_makes_the_loss_smaller() -> None:
    batch = np.random.default_rng(0).integers(0, 128, (BATCH_SIZE, training_feed.SIZE)).astype(np.float32)
    weights: object = np.zeros(training_feed.SIZE, np.float32)
    losses: list[float] = []
    for _ in range(3):
        weights, loss = training_feed.train_step(weights, batch)  # type: ignore[arg-type]
        losses.append(float(loss))
    assert losses[0] == 1
    assert losses[2] < losses[1] < losses[0]
