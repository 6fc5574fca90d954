"""A folder of snapshots: the newest complete snapshot is found again, whatever happens while another one is written."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
from structlog.testing import capture_logs

import penstock as ps
from penstock._cli import main
from penstock.saving import snapshots
from penstock.saving.encoding import encode, json_text
from penstock.saving.snapshots import Snapshot, SnapshotFolder

STATES: dict[str, Any] = {
    "source": {"record": 7, "rng": (1, 2)},
    "train": {"params": np.arange(1000.0), "scale": np.ones((), "f2")},
    "data/shuffled#2": {"buffer": [b"x" * 1000, np.arange(6).reshape(2, 3).T]},
}


def snapshot(record: int, **more: Any) -> Snapshot:
    return Snapshot(record, {**STATES, "reader": record, **more}, {"graph": "train", "seed": [1, None]}, ended=False)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SnapshotFolder]:
    with SnapshotFolder(tmp_path / "deep/snapshots") as opened:
        yield opened


def newest(folder: SnapshotFolder) -> int | None:
    found = folder.newest()
    assert found is None or found.states["reader"] == found.record
    return None if found is None else found.record


def names(folder: SnapshotFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_a_snapshot_comes_back(folder: SnapshotFolder) -> None:
    assert folder.newest() is None
    saved = folder.save(snapshot(7))
    found = folder.newest()
    assert found is not None
    assert (found.record, found.ended, found.fingerprint) == (7, False, {"graph": "train", "seed": [1, None]})
    assert list(found.states) == [*STATES, "reader"]
    assert found.states["source"] == STATES["source"]
    assert np.array_equal(found.states["train"]["params"], STATES["train"]["params"])
    assert np.array_equal(found.states["data/shuffled#2"]["buffer"][1], np.arange(6).reshape(2, 3).T)
    assert snapshots.stored_snapshots(folder.path, verify=True) == [saved]
    assert saved.path.parent == folder.path
    assert saved.bytes == sum(file.stat().st_size for file in saved.path.iterdir())
    assert sorted(file.name for file in saved.path.iterdir()) == [
        "1-train.safetensors", "2-data_shuffled_2.safetensors", "checksums.json", "snapshot.json",
    ]  # fmt: skip
    assert set(safetensors.numpy.load_file(saved.path / "1-train.safetensors")) == {
        'state["params"]', 'state["scale"]',
    }  # fmt: skip
    folder.save(Snapshot(9, {"source": encode({"x": (1,)}, "source", copy=True)}, {}, ended=True))
    assert folder.newest() == Snapshot(9, {"source": {"x": (1,)}}, {}, ended=True)


def renamed_as_before(path: Path) -> None:
    """Gives a snapshot its earlier file names, from when snapshots were called cuts."""
    (path / "snapshot.json").rename(path / "cut.json")
    sums = path / "checksums.json"
    files = {name.replace("snapshot", "cut"): found for name, found in json.loads(sums.read_text()).items()}
    sums.write_text(json_text(dict(sorted(files.items()))))
    path.rename(path.with_name(path.name.replace("snapshot", "cut")))


def test_a_folder_of_cuts_goes_on_as_one_of_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SnapshotFolder(tmp_path, keep=2) as folder:
        for record in (1, 2):
            renamed_as_before(folder.save(snapshot(record)).path)
        (tmp_path / "cut-00000003.partial").mkdir()  # of a save that was killed
        assert names(folder) == ["cut-00000001", "cut-00000002", "cut-00000003.partial", "lock"]
        assert newest(folder) == 2
        folder.save(snapshot(3))
        assert names(folder) == ["cut-00000002", "lock", "snapshot-00000003"]
        assert newest(folder) == 3
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:4]] == [
        "cut-00000002",
        "snapshot-00000003",
    ]
    empty(tmp_path / "snapshot-00000003/snapshot.json")
    with SnapshotFolder(tmp_path) as folder:
        assert newest(folder) == 2
        empty(tmp_path / "cut-00000002/cut.json")
        with pytest.raises(ps.CheckpointError, match=r"damaged \(cut-00000002, snapshot-00000003\)"):
            folder.newest()


def test_the_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path, keep=2) as folder:
        for record in (5, 6, 7, 3):  # the last save is of a run that restarted from an older snapshot
            folder.save(snapshot(record))
        assert names(folder) == ["lock", "snapshot-00000003", "snapshot-00000004"]
        assert newest(folder) == 3


def test_a_state_that_cannot_be_stored_is_named_and_leaves_nothing(folder: SnapshotFolder) -> None:
    folder.save(snapshot(1))
    before = names(folder)
    with pytest.raises(ps.NotStorable, match=r'shuffled\["buffer"\]\[0\] is a builtins.object'):
        folder.save(snapshot(2, shuffled={"buffer": [object()]}))
    assert names(folder) == before
    assert newest(folder) == 1


def test_arrays_need_no_package_beside_numpy(folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    folder.save(snapshot(1))
    assert newest(folder) == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data))] ^= 1 << 3
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES = [flip, truncate, empty, Path.unlink]
FILES = ["snapshot.json", "checksums.json", "1-train.safetensors", "2-data_shuffled_2.safetensors"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_snapshot_is_skipped_with_a_warning(folder: SnapshotFolder, damage: Any, file: str) -> None:
    folder.save(snapshot(1))
    damaged = folder.save(snapshot(2)).path
    damage(damaged / file)
    with capture_logs() as logs:
        assert newest(folder) == 1
    assert [(log["event"], log["log_level"], log["path"]) for log in logs] == [
        ("checkpoint.damaged", "warning", str(damaged))
    ]
    found = snapshots.stored_snapshots(folder.path, verify=True)
    assert [one.damage is None for one in found] == [True, False]
    assert damage is flip or snapshots.stored_snapshots(folder.path, verify=False)[1].damage is not None
    folder.save(snapshot(3))
    assert newest(folder) == 3


def test_every_flipped_bit_is_seen(folder: SnapshotFolder) -> None:
    path = folder.save(Snapshot(1, {"a": np.arange(3)}, {}, ended=False)).path
    for file in path.iterdir():
        data = file.read_bytes()
        for at in range(len(data)):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            assert snapshots._damage(path, verify=True) is not None, (file.name, at)
        file.write_bytes(data)
    assert snapshots._damage(path, verify=True) is None


def test_if_all_are_damaged_nothing_begins_anew_in_silence(folder: SnapshotFolder) -> None:
    empty(folder.save(snapshot(1)).path / "snapshot.json")
    (folder.save(snapshot(2)).path / "more").write_text("")  # an added file is damage, too
    with pytest.raises(
        ps.CheckpointError, match=r"damaged \(snapshot-00000001, snapshot-00000002\): .* another folder"
    ):
        folder.newest()


def test_damaged_ones_do_not_count_among_those_that_stay(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path, keep=2) as folder:
        folder.save(snapshot(1))
        for record in (2, 3):
            saved = folder.save(snapshot(record))
        empty(saved.path / "snapshot.json")
        assert newest(folder) == 2
        folder.save(snapshot(4))
        assert [one.record for one in snapshots.stored_snapshots(tmp_path, verify=True) if one.damage is None] == [2, 4]
        folder.save(snapshot(5))
        assert [one.record for one in snapshots.stored_snapshots(tmp_path, verify=True)] == [4, 5]


@pytest.mark.parametrize("text", ["[1]", "null", "5", "{}", '{"format": 1}', "no JSON"])
def test_a_snapshot_json_that_says_nothing_is_damage(
    folder: SnapshotFolder, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder.save(snapshot(1))
    rewrite(folder.save(snapshot(2)).path, text)
    assert newest(folder) == 1
    assert main(["checkpoints", str(folder.path)]) == 1
    assert "snapshot-00000002 is damaged: snapshot.json: " in capsys.readouterr().out


@pytest.mark.parametrize("told", ["7", '"b"', "null"])
def test_a_snapshot_of_an_unknown_format_is_refused_by_it_alone(
    folder: SnapshotFolder, capsys: pytest.CaptureFixture[str], told: str
) -> None:
    folder.save(snapshot(1))
    rewrite(folder.save(snapshot(2)).path, f'{{"format": {told}, "record": "text", "all_else": []}}')
    with pytest.raises(ps.CheckpointError, match=f"written in format {json.loads(told)}, .*use the version that wrote"):
        folder.newest()
    assert main(["checkpoints", str(folder.path)]) == 0  # the snapshot is complete
    assert "damaged" not in capsys.readouterr().out


def rewrite(path: Path, text: str) -> None:
    (path / "snapshot.json").write_text(text)
    (path / "checksums.json").write_text(snapshots.json_text(snapshots._checksums(path)))


# The steps of a save that reach the disk: they write the new snapshot, and then remove the oldest.
STEPS = ["mkdir", *["write", "fsync"] * 4, "fsync", "rename", "fsync", "rename", "fsync", "remove"]


class Fault:
    """Raises an error at step number `at` of those that reach the disk."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def __call__(self, step: str, path: Path) -> None:
        self.at -= 1
        if self.at == -1:
            raise self.error


def test_a_fault_at_any_step_leaves_the_snapshots_before(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for record in range(3):
        folder.save(snapshot(record))
    for at, step in enumerate(STEPS):
        for error in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()):
            before, newest_before = names(folder), newest(folder)
            with monkeypatch.context() as patch, capture_logs() as logs:
                patch.setattr(snapshots, "before_step", Fault(at, error))
                try:
                    folder.save(snapshot(100 + at))
                except ps.CheckpointError as failed:
                    message = (
                        f"the snapshot at record {100 + at} is not saved in {folder.path}: No space left on device"
                    )
                    assert (failed.errno, str(failed)) == (errno.ENOSPC, message)  # noqa: PT017 - not at every step
                    assert at <= STEPS.index("rename") + 1
                except KeyboardInterrupt:
                    assert error.__class__ is KeyboardInterrupt
                else:
                    assert [log["event"] for log in logs] == ["checkpoint.not_removed"]
                    assert newest(folder) == 100 + at
            if at <= STEPS.index("rename"):
                assert names(folder) == before  # no half-written snapshot
                assert newest(folder) == newest_before
            assert newest(folder) in (newest_before, 100 + at)
            folder.save(snapshot(200 + at))
            assert newest(folder) == 200 + at
            assert len(names(folder)) == 4  # three snapshots and the lock: files of the failed save are gone, too
            assert all(one.damage is None for one in snapshots.stored_snapshots(folder.path, verify=True)), step


def test_everything_is_synchronised_before_it_gets_its_name(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[tuple[str, Path]]()
    monkeypatch.setattr(snapshots, "before_step", lambda step, path: done.append((step, path)))
    saved = folder.save(snapshot(1)).path
    renamed = [step for step, _ in done].index("rename")
    partial = done[renamed][1]
    synced = {path.name for step, path in done[:renamed] if step == "fsync"}
    assert synced == {*(file.name for file in saved.iterdir()), partial.name}
    assert done[renamed - 1] == ("fsync", partial)
    assert done[renamed - 3 : renamed - 1] == [
        ("write", partial / "checksums.json"),
        ("fsync", partial / "checksums.json"),
    ]
    assert done[renamed + 1] == ("fsync", folder.path)


def test_after_a_kill_at_any_step_the_last_snapshot_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[tuple[str, Path]] = []

    def leave_a_copy(step: str, path: Path) -> None:
        left.append((step, shutil.copytree(folder.path, tmp_path / str(len(left)))))

    with SnapshotFolder(tmp_path / "folder", keep=2) as folder, monkeypatch.context() as patch:
        folder.save(snapshot(1))
        folder.save(snapshot(2))
        patch.setattr(snapshots, "before_step", leave_a_copy)
        folder.save(snapshot(3))
    assert [step for step, _ in left] == STEPS
    for at, (_, copy) in enumerate(left):
        with SnapshotFolder(copy, keep=2) as again:
            assert newest(again) == (2 if at <= STEPS.index("rename") else 3)
            again.save(snapshot(4))
            assert newest(again) == 4
            assert len(names(again)) == 3  # two snapshots and the lock


HOLDS = """
import os, sys
from penstock.saving.snapshots import SnapshotFolder
folder = SnapshotFolder(sys.argv[1])
if len(sys.argv) == 2 or not os.fork():  # a forked process outlives its parent
    print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(folder: Path, *options: str) -> Iterator[Any]:
    """Runs a process that holds the lock of a folder."""
    command = [sys.executable, "-c", HOLDS, str(folder), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "holds\n"
        yield child


def test_a_second_writer_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    with holding(tmp_path) as child:
        with pytest.raises(
            ps.CheckpointError, match=rf"another run writes .*{tmp_path} \(process {child.pid} on .+\)"
        ) as caught:
            SnapshotFolder(tmp_path)
        assert caught.value.errno == errno.EWOULDBLOCK
        assert snapshots.stored_snapshots(tmp_path, verify=True) == []  # reading needs no lock
        child.kill()
    with SnapshotFolder(tmp_path), pytest.raises(ps.CheckpointError, match=r"\(this process\): wait for its end"):
        SnapshotFolder(tmp_path)
    SnapshotFolder(tmp_path).close()


def test_a_forked_process_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    with holding(tmp_path, "fork") as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        SnapshotFolder(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ps.CheckpointError, match=f"the folder {file} cannot be written: ") as caught:
        SnapshotFolder(file)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(ps.CheckpointError, match="the folder /proc/"):
        SnapshotFolder("/proc/snapshots")

    SnapshotFolder(tmp_path / "made").close()  # the folder exists, and the disk was then mounted read-only
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(
        ps.CheckpointError, match=r"the folder .*made cannot be written: Read-only file system"
    ) as caught:
        SnapshotFolder(tmp_path / "made")
    assert caught.value.errno == errno.EROFS


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with pytest.raises(ps.CheckpointError, match="has no locks: use a folder on a local disk"):
        SnapshotFolder(tmp_path)


@pytest.mark.parametrize("has_begun", [True, False])
def test_several_processes_of_jax_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool) -> None:
    jax = SimpleNamespace(process_count=lambda: 2 if has_begun else pytest.fail("this starts JAX"))
    bridge = SimpleNamespace(backends_are_initialized=lambda: has_begun)
    distributed = SimpleNamespace(global_state=SimpleNamespace(client=object(), num_processes=2))
    for name, module in {"jax": jax, "jax._src.xla_bridge": bridge, "jax._src.distributed": distributed}.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    with pytest.raises(ps.CheckpointError, match=r"jax.process_count\(\) is 2"):
        SnapshotFolder(tmp_path / "snapshots")
    assert not (tmp_path / "snapshots").exists()


def test_a_snapshot_that_goes_while_it_is_listed_is_left_out(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = folder.save(snapshot(1)).path
    folder.save(snapshot(2))
    files = snapshots._files

    def removed(path: Path) -> Iterator[Path]:
        found = [*files(path)]
        shutil.rmtree(gone, ignore_errors=True)
        return iter(found)

    monkeypatch.setattr(snapshots, "_files", removed)
    assert [one.record for one in snapshots.stored_snapshots(folder.path, verify=True)] == [2]


def test_the_command_lists_and_verifies(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*options: str) -> tuple[int, str]:
        return main(["checkpoints", str(folder.path), *options]), capsys.readouterr().out

    status, shown = command()
    assert (status, shown.split()) == (1, ["no", "checkpoints", "in", str(folder.path)])
    with monkeypatch.context() as patch:
        patch.setattr(snapshots.time, "time", lambda: 1.0)
        folder.save(snapshot(1200))
    saved = folder.save(Snapshot(1300, {"weights": np.arange(3)}, {}, ended=True))
    status, shown = command("--verify")  # this process holds the lock
    assert status == 0
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert rows[0] == "checkpoint record age size"
    assert rows[2].startswith("snapshot-00000001 1,200 ")
    assert rows[3].startswith("snapshot-00000002 1,300 (the end) ")
    assert rows[-1] == "the same in all rows: whole yes"
    flip(next(saved.path.glob("*.safetensors")))
    assert command()[0] == 0  # the command without --verify checks only sizes, and the size is right
    status, shown = command("--verify")
    assert status == 1
    assert "snapshot-00000002 is damaged: the checksums differ" in shown
    os.truncate(saved.path / "snapshot.json", 3)
    status, shown = command("--json")
    assert status == 1
    one, two = map(json.loads, shown.splitlines())
    assert (one["record"], one["damage"], two["record"]) == (1200, None, None)
    assert two["damage"].startswith("snapshot.json has 3 bytes")
    damaged = [snapshot.damage is not None for snapshot in ps.Checkpoint(folder.path).stored(verify=True)]
    assert damaged == [False, True]
    assert main(["checkpoints", "/nowhere"]) == 1
    assert capsys.readouterr().err.endswith(": /nowhere cannot be read: No such file or directory\n")


def test_what_is_not_of_a_snapshot_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.partial").mkdir()
    with snapshots.SnapshotFolder(tmp_path) as folder:
        folder.save(snapshots.Snapshot(1, {}, {}, ended=False))
    assert (tmp_path / "mine.partial").exists()
