"""A folder of snapshots. Each snapshot is a folder of its own, which is complete or does not exist.

A snapshot is written into a folder whose name ends with `.partial`, checksums last. Everything is synchronised with the
disk, and then the folder is renamed. So a crash at any moment leaves the earlier snapshots unchanged.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from .._errors import CheckpointError
from ..telemetry import logs
from .encoding import FORMAT, Encoded, check_format, decode, encode, json_text, read_arrays, write_arrays

# Earlier versions called a snapshot a cut, with `cut.json` inside. Their folders are read, and removed when too old.
_NAME: Final = re.compile(r"(snapshot|cut)-\d{8,}")
_PARTIAL: Final = ".partial"
_CHECKSUMS: Final = "checksums.json"
_PIECE_BYTES: Final = 1 << 24


def before_step(step: str, path: Path) -> None:
    """Do nothing before a step that reaches the disk; tests replace this function."""


@dataclass(frozen=True)
class Snapshot:
    """One moment of a stream: all values before it are in the states, and none behind it.

    Attributes:
        record: how many records the source had given.
        states: the result of `state()`, perhaps encoded, by the name of the source, node, stage or reader.
        fingerprint: settings, as JSON, that must be the same to continue from this snapshot.
        ended: whether the stream had ended.
    """

    record: int
    states: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    ended: bool


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot as it is found on the disk.

    Attributes:
        path: the folder of the snapshot.
        bytes: the size of the snapshot's files.
        record: how many records the source had given; None if the description cannot be read.
        ended: whether the stream had ended; None if the description cannot be read.
        saved_at: when the snapshot was saved, in seconds since 1970; None if the description cannot be read.
        damage: a text that describes the damage; None if no damage was found.
    """

    path: Path
    bytes: int
    record: int | None
    ended: bool | None
    saved_at: float | None
    damage: str | None


class SnapshotFolder(contextlib.AbstractContextManager["SnapshotFolder", None]):
    """A folder of snapshots, for one writer, which holds a lock until the folder is closed or the process ends.

    Args:
        path: the folder; made if it does not exist.
        keep: how many snapshots stay; older ones are removed after a newer one was saved.

    Raises:
        CheckpointError: the folder cannot be written, or another run holds the lock.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3) -> None:
        _refuse_several_processes()
        self.path = Path(path).expanduser().absolute()
        self._keep = keep
        self._damaged: set[Path] = set()
        self._lock: int | None = None
        _open_folders.add(self)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            try:
                _make_folder(self.path)
                self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
                self._take_lock(self._lock)
            except OSError as error:
                raise _failed(f"the folder {self.path} cannot be written", error) from error
            on_error.pop_all()

    def _take_lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 300, 0).decode(errors="replace").strip()
            who = "this process" if holder == _this_process() else holder or "a process that has just begun"
            raise CheckpointError(
                f"another run writes its snapshots into {self.path} ({who}): wait for its end, or use another folder",
                error.errno,
            ) from error
        except OSError as error:
            raise _failed(
                f"the file system of {self.path} has no locks: use a folder on a local disk", error
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{_this_process()}\n".encode(), 0)
        probe = self.path / f"snapshot-probe{_PARTIAL}"
        probe.mkdir(exist_ok=True)  # the file of the lock may be writable although the folder is not
        probe.rmdir()

    def newest(self, template: Mapping[str, Any] | None = None) -> Snapshot | None:
        """Return the newest undamaged snapshot; None if there is no snapshot. Damaged ones are logged and skipped.

        Args:
            template: for each name a state of the same structure, from which arrays of JAX take their shardings.

        Raises:
            CheckpointError: all snapshots are damaged, or this program cannot read the newest undamaged one.
        """
        found = _snapshot_folders(self.path)
        for path in reversed(found):
            damage = _damage(path, verify=True)
            if damage is None:
                return _read_snapshot(path, template or {})
            self._damaged.add(path)
            logs.warning("checkpoint.damaged", path=str(path), damage=damage)
        if found:
            raise CheckpointError(
                f"all snapshots in {self.path} are damaged ({', '.join(path.name for path in found)}): restore one "
                "from a backup, or use another folder to begin anew"
            )
        return None

    def save(self, snapshot: Snapshot) -> StoredSnapshot:
        """Write a snapshot, and remove snapshots that are too old. Blocks: call it in a thread, one call at a time.

        Raises:
            NotStorable: a state has a part that cannot be stored.
            CheckpointError: the disk refuses the snapshot, because it is full for instance. Earlier snapshots stay.
        """
        _refuse_several_processes()
        saved_at = time.time()
        states = {
            name: state if isinstance(state, Encoded) else encode(state, name)
            for name, state in snapshot.states.items()
        }
        self._remove(())  # folders that a crash has left half-written or half-removed
        found = _snapshot_folders(self.path)
        path = self.path / f"snapshot-{_number(found[-1]) + 1 if found else 1:08d}"
        partial = path.with_suffix(_PARTIAL)
        try:
            before_step("mkdir", partial)
            partial.mkdir()
            size = _write_snapshot(partial, snapshot, states, saved_at)
            _rename(partial, path)
        except OSError as error:
            raise _failed(f"the snapshot at record {snapshot.record} is not saved in {self.path}", error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # renamed already if the snapshot was saved
        whole = [one for one in (*found, path) if one not in self._damaged]
        self._remove(one for one in found if len(whole) > self._keep and _number(one) < _number(whole[-self._keep]))
        return StoredSnapshot(path, size, snapshot.record, snapshot.ended, saved_at, None)

    def _remove(self, old: Iterable[Path]) -> None:
        """Remove snapshots, and all folders that were left half-written or half-removed."""
        try:
            for path in old:
                _rename(path, path.with_suffix(_PARTIAL))  # otherwise a half-removed snapshot would look damaged
            for path in [*self.path.glob(f"snapshot-*{_PARTIAL}"), *self.path.glob(f"cut-*{_PARTIAL}")]:
                before_step("remove", path)
                shutil.rmtree(path)
        except OSError as error:  # do not lose the snapshot that is being saved: the next save tries to remove again
            logs.warning("checkpoint.not_removed", path=str(self.path), error=str(error))

    def close(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_open_folders: "weakref.WeakSet[SnapshotFolder]" = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """Close the locks in a forked process: otherwise it would hold them after its parent has ended."""
    for folder in _open_folders:
        folder.close()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def stored_snapshots(path: Path, *, verify: bool) -> list[StoredSnapshot]:
    """Return the snapshots in a folder, oldest first. A run may write there meanwhile.

    Args:
        path: the folder.
        verify: whether all files are read to compare checksums; if not, only the sizes of the files are compared.
    """
    found = [_stored_snapshot(folder, verify=verify) for folder in _snapshot_folders(path)]
    return [stored for stored in found if stored.path.exists()]  # without snapshots that were removed meanwhile


def _stored_snapshot(path: Path, *, verify: bool) -> StoredSnapshot:
    size, about = 0, dict[str, Any]()
    damage = _damage(path, verify=verify)
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        size = sum(file.stat().st_size for file in _files(path))
        about = _about(path)
    return StoredSnapshot(path, size, about.get("record"), about.get("ended"), about.get("saved_at"), damage)


def _about(path: Path) -> dict[str, Any]:
    """Return the description of a snapshot.

    Raises:
        OSError: the description cannot be read.
        ValueError: the description was not written by Penstock.
        CheckpointError: the description was written in a format that this version does not know.
    """
    about: dict[str, Any] = json.loads(_description(path).read_text())
    if type(about) is not dict or "format" not in about:
        raise ValueError("it is no object with a format")
    check_format(about["format"], str(path))
    wrong = [name for name, kind in _FIELDS.items() if type(about.get(name)) is not kind]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} cannot be read")
    return about


_FIELDS: Final = {"record": int, "ended": bool, "saved_at": float, "fingerprint": dict, "states": dict}


def _snapshot_folders(path: Path) -> list[Path]:
    try:
        found = [one for one in path.iterdir() if _NAME.fullmatch(one.name)]
    except OSError as error:
        raise _failed(f"{path} cannot be read", error) from error
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _description(path: Path) -> Path:
    """Return the file that describes a snapshot; its name is that of the folder without the number."""
    return path / f"{path.name.partition('-')[0]}.json"


def _read_snapshot(path: Path, template: Mapping[str, Any]) -> Snapshot:
    try:
        about = _about(path)
        states: dict[str, Any] = {}
        for name, stored in about["states"].items():
            arrays: Mapping[str, Any] = {}
            if stored["arrays"] is not None:
                with (path / stored["arrays"]).open("rb") as file:
                    arrays, _ = read_arrays(file)
            try:
                # None is a template, too, for a state that has no arrays yet.
                fresh = () if template.get(name, ...) is None else template.get(name)
                states[name] = decode(Encoded(stored["value"], arrays), fresh)
            except CheckpointError as error:
                raise CheckpointError(f"the state of {name!r} in {path}: {error}") from error
    except OSError as error:
        raise _failed(f"{path} cannot be read", error) from error
    return Snapshot(about["record"], states, about["fingerprint"], about["ended"])


def _write_snapshot(path: Path, snapshot: Snapshot, states: Mapping[str, Encoded], saved_at: float) -> int:
    """Write all files of a snapshot into a folder, and return how many bytes were written."""
    described: dict[str, Any] = {}
    for number, (name, state) in enumerate(states.items()):
        file = f"{number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:100]}.safetensors" if state.arrays else None
        described[name] = {"value": state.structure, "arrays": file}
        if file is not None:
            _write(path / file, lambda target, state=state: write_arrays(target, state.arrays))  # type: ignore[misc]
    about = {
        "format": FORMAT,
        "record": snapshot.record,
        "ended": snapshot.ended,
        "saved_at": saved_at,
        "fingerprint": snapshot.fingerprint,
        "states": described,
    }
    _write(_description(path), lambda target: target.write(json_text(about).encode()))
    _write(path / _CHECKSUMS, lambda target: target.write(json_text(_checksums(path)).encode()))
    _sync(path)
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file())


def _checksums(path: Path) -> dict[str, list[Any]]:
    """Return the size and the SHA-256 of each file in a folder."""
    found: dict[str, list[Any]] = {}
    for file in _files(path):
        if file != path / _CHECKSUMS:
            found[str(file.relative_to(path))] = [file.stat().st_size, _sha256(file)]
    return found


def _sha256(file: Path) -> str:
    # In large pieces: neither reading nor hashing holds the GIL, and to get it back takes 5 ms if a thread computes.
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        piece = memoryview(bytearray(min(_PIECE_BYTES, max(size, 1))))
        while count := opened.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def _damage(path: Path, *, verify: bool) -> str | None:
    """Return a text that describes the damage to the files of a snapshot; None if they are undamaged."""
    try:
        text = (path / _CHECKSUMS).read_text()
        expected: dict[str, Any] = json.loads(text)
        for name, (size, _) in expected.items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
        if verify and text != json_text(_checksums(path)):
            return "the checksums differ"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{_CHECKSUMS} and the files do not fit: {error}"
    with contextlib.suppress(CheckpointError):  # a snapshot of another version is undamaged
        try:
            _about(path)
        except (OSError, ValueError) as error:
            return f"{_description(path).name}: {error}"
    return None


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    before_step("write", path)
    with path.open("xb") as file:
        write(file)
        file.flush()
        before_step("fsync", path)
        os.fsync(file.fileno())


def _rename(path: Path, target: Path) -> None:
    before_step("rename", path)
    path.rename(target)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Synchronise the names of the files in a folder with the disk."""
    before_step("fsync", folder)
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _make_folder(path: Path) -> None:
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        _sync(folder.parent)


def _failed(what: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{what}: {error.strerror or error}", error.errno)


def _this_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


def _refuse_several_processes() -> None:
    jax: Any = sys.modules.get("jax")
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    distributed: Any = sys.modules.get("jax._src.distributed")
    count = 1
    if bridge is not None and bridge.backends_are_initialized():
        count = jax.process_count()
    elif distributed is not None and distributed.global_state.client is not None:
        count = distributed.global_state.num_processes  # `jax.process_count()` would start JAX
    if count > 1:
        raise CheckpointError(
            f"jax.process_count() is {count}: a snapshot holds the state of one process. Train in one process, or "
            "save the state that the processes share with Orbax"
        )
