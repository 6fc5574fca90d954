"""The code search, run as a program: with a folder of good and bad files, and with Ctrl-C."""

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from examples import code_search
from tests.examples import programs
from tests.examples.programs import CTRL_C

PROGRAM = Path(code_search.__file__)
run, terminal = partial(programs.run, PROGRAM), partial(programs.terminal, PROGRAM)
# Drops the capabilities that let root read all files: PR_CAPBSET_DROP of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
OBEY_PERMISSIONS = (
    "assert not any(ctypes.CDLL(None).prctl(24, right, 0, 0, 0) for right in (1, 2)), 'root may read all'"
)

GOOD = '''
def frobnicate_widget(widget, times=1):
    """Turn a widget around.

    More of it.
    """


class Cache:
    def evict_oldest(self):
        """Forget the entry [bold] that was used last."""
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three files that can be searched, and four that cannot."""
    root = tmp_path_factory.mktemp("code")
    (root / "package").mkdir()
    (root / "package" / "good.py").write_text(GOOD)
    (root / "nothing.py").write_text("x = 1\n")
    (root / "latin.py").write_bytes("# coding: latin-1\ndef größe(): 'Ä'\n".encode("latin-1"))
    (root / "broken.py").write_text("def (:\n")
    (root / "binary.py").write_bytes(b"x = 1\0\n")
    (root / "gone.py").symlink_to(root / "not there")
    os.mkfifo(root / "pipe.py")
    (root / "notes.txt").write_text("def ignored(): ...\n")
    return root


@pytest.fixture(scope="module")
def answered(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(
        folder, "--query", "turn widgets around", "--query", "evict", "--query", "zebra", "--query", "", "--compare"
    )


def test_a_query_is_answered_with_place_code_and_summary(answered: subprocess.CompletedProcess[str]) -> None:
    assert answered.returncode == 0
    assert answered.stderr == ""
    blocks = answered.stdout.split("\n\n")
    [widgets] = [block for block in blocks if block.startswith("turn widgets around")]
    assert widgets.splitlines()[1:3] == [
        "  package/good.py:2  def frobnicate_widget(widget, times=1):",
        "      Turn a widget around.",
    ]
    [evict] = [block for block in blocks if block.startswith("evict")]
    assert "package/good.py:10  def evict_oldest(self):" in evict
    assert "Forget the entry [bold] that was used last." in evict


def test_it_draws_both_graphs_and_compares_with_the_plain_loop(answered: subprocess.CompletedProcess[str]) -> None:
    drawings, found = answered.stdout.split("functions and classes", 1)
    for node in ("read", "parse", "Index", "map_each", "quote"):
        assert re.search(rf"[●◆]\S* +{node}\b", drawings)
    assert "zebra\n  nothing fits\n\n\n  nothing fits\n" in found
    assert re.search(r"Pipeline \d+\.\d s, plain loop \d+\.\d s", found)
    assert "Both found the same." in found


def test_files_that_cannot_be_read_or_parsed_are_counted_and_named(answered: subprocess.CompletedProcess[str]) -> None:
    assert "4 files were skipped:" in answered.stdout
    assert re.search(r"  broken\.py  SyntaxError: ", answered.stdout)
    assert re.search(r"  binary\.py  (SyntaxError|ValueError): ", answered.stdout)
    assert "  gone.py  OSError: no regular file" in answered.stdout
    assert "  pipe.py  OSError: no regular file" in answered.stdout


def test_the_table_counts_what_each_node_did(answered: subprocess.CompletedProcess[str]) -> None:
    lines = answered.stdout.splitlines()
    table = lines[max(at for at, line in enumerate(lines) if line.startswith("──")) + 1 :]
    assert [
        line.split()[: 3 + ("running" in line)] if line.startswith("  ") else [line] for line in table if line.strip()
    ][:9] == [
        ["ask"],
        ["Index", "running", "5", "0"],  # four queries, and the query that ranks
        ["map_each", "2", "0"],
        ["ask/quote"],
        ["quote", "2", "0"],
        ["fill"],
        ["read", "5", "2"],
        ["parse", "3", "2"],
        ["Index", "running", "3", "0"],
    ]


def test_a_folder_without_rights_is_left_out_and_sample_queries_are_answered(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    secret = tmp_path / "secret"
    secret.mkdir(mode=0)
    before = ["os.close(0)"] + [OBEY_PERMISSIONS] * (os.geteuid() == 0)  # no input at which to type a query
    try:
        done = run(tmp_path, before="; ".join(before))
    finally:
        secret.chmod(0o700)
    assert (done.returncode, done.stderr) == (0, "")
    assert "A folder is left out: secret: Permission denied" in done.stdout
    assert "1 Python files" in done.stdout
    assert "parse a json document" in done.stdout


def test_a_folder_without_python_has_nothing_to_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["code_search.py", str(tmp_path)])
    assert code_search.main() == 1
    assert "There is nothing to search." in capsys.readouterr().out


@pytest.mark.long
def test_files_without_definitions_give_an_index_that_answers_nothing(tmp_path: Path) -> None:
    for name in ("nothing.py", "none.py", "neither.py"):
        (tmp_path / name).write_text("x = 1\n")
    done = run(tmp_path, "--limit", "2", "--query", "anything")
    assert done.returncode == 0
    assert "2 Python files" in done.stdout
    assert "0 functions and classes" in done.stdout
    assert "nothing fits" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("/not/there",), "/not/there is not a folder"),
        ((str(PROGRAM),), "code_search.py is not a folder"),
        (("--limit", "0"), "--limit must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["code_search.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        code_search.main()
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert complaint in errors


@pytest.fixture(scope="module")
def busy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that keeps worker processes busy for many seconds, unless the program is stopped."""
    root = tmp_path_factory.mktemp("busy")
    for number in range(400):
        (root / f"module{number}.py").write_text("".join(f"def f{i}(): return [{i}, x + {i}]\n" for i in range(300)))
    return root


def test_the_person_at_the_terminal_is_asked_until_end_of_file(folder: Path) -> None:
    with terminal(folder, typing=True) as shown:
        shown.until("search ❯ ")
        shown.type("widget\n")
        shown.until(r"package/good\.py:2")
        shown.until("search ❯ [^❯]*search ❯ ")
        shown.type("\x04")  # Ctrl-D
        assert shown.end() == 0
    assert re.search(r"ask\s+Index +running +2 ", shown.printed)


def test_progress_shows_rate_and_depth_of_each_inbox_and_the_slowest_node_is_named(busy_folder: Path) -> None:
    with terminal(busy_folder, "--query", "f1", "--limit", "200", typing=False) as shown:
        shown.until(r"\d+/200 +\d+ files/s  in line: read +\d+/16  parse +\d+/16  Index +\d+/16")
        assert shown.end() == 0
    # If workers take longer to start than to parse, "parse" waits for them and its inbox is full. On a busy machine,
    # all 64 items may wait for the workers.
    busy, starting = r"the \d+ worker processes are busy for", r"(its inbox is full )?for"
    waiting = r"max_in_flight= limits: its 64 places are taken for \d+% of the time"
    limits = rf'"parse" limits the pipeline: ({busy}|{starting}) \d+% of the time|{waiting}'
    assert re.search(limits, re.sub(r"\s+", " ", shown.printed)), shown.printed  # its lines are wrapped


FIRST_LINE = "Python files"


def files_done_at_ctrl_c(shown: programs.Terminal, moment: str, keys: str) -> str:
    """Presses Ctrl-C at a moment; returns how many of the files were done, as printed."""
    if moment == "worker":
        shown.worker_started()
    else:
        shown.until(moment)
    shown.type(keys)
    assert shown.end() == 130
    assert "Traceback" not in shown.printed
    [done] = re.findall(r"Interrupted after \d+\.\d s: (\d+ of \d+) files", shown.printed)
    return str(done)


@pytest.mark.parametrize(
    ("moment", "keys"),
    [
        ("worker", CTRL_C * 3),
        (r"[1-9]\d*/400", CTRL_C),
        *(
            pytest.param(moment, keys, marks=pytest.mark.long)
            for moment, keys in [
                (FIRST_LINE, CTRL_C), (FIRST_LINE, CTRL_C * 3), ("worker processes start", CTRL_C),
                ("worker processes start", CTRL_C * 3), ("worker", CTRL_C), (r"[1-9]\d*/400", CTRL_C * 3),
            ]
        ),
    ],
)  # fmt: skip
def test_ctrl_c_ends_it_cleanly(busy_folder: Path, moment: str, keys: str) -> None:
    with terminal(busy_folder, typing=False) as shown:
        done = files_done_at_ctrl_c(shown, moment, keys)
    assert "Error" not in shown.printed
    assert re.fullmatch(r"\d+ of (400|0)", done)
    assert not (moment.startswith("[") and done.startswith("0 "))


@pytest.mark.long  # two further moments of Ctrl-C
def test_ctrl_c_at_the_prompt_and_in_the_plain_loop_ends_it_cleanly(folder: Path, busy_folder: Path) -> None:
    with terminal(folder, typing=True) as shown:
        assert files_done_at_ctrl_c(shown, "search ❯ ", CTRL_C) == "7 of 7"
    with terminal(busy_folder, "--limit", "100", "--compare", typing=False) as shown:
        assert files_done_at_ctrl_c(shown, "Now the same as a plain loop", CTRL_C).endswith(" of 100")
