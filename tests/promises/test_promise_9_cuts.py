"""Promise 9: a training that is killed at random moments gives, in all, the results of one without kills, bit by bit.

`make train-kills` tests this with the language model, `tests/saving/test_interrupted_pipelines.py` with random
pipelines.
"""

from pathlib import Path

import pytest

from tests.saving.killed import killed_training


@pytest.mark.parametrize(("kills", "seed"), [(3, 1), pytest.param(20, 2, marks=pytest.mark.long)])
@pytest.mark.timeout(300)
def test_a_killed_training_gives_the_same_bits(tmp_path: Path, kills: int, seed: int) -> None:
    expected, _ = killed_training("numbers", tmp_path / "whole", 0, 1, 0)
    got, killed = killed_training("numbers", tmp_path / "killed", kills, seed, 0.3)
    assert killed >= kills // 2
    assert got == expected
