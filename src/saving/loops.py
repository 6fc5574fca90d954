"""The stored form of a durable loop: `LoopRecord`, which a store keeps, and `Loop`, the content of a record."""

import dataclasses
import functools
import hashlib
import os
import platform
import sys
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, cast

from .._errors import CheckpointError
from .encoding import Encoded, decode, encode, json_text

Status = Literal["running", "interrupted", "done", "failed"]
RunState = Literal["running", "asking", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class LoopRecord:
    """The record that a store keeps of one key at one step.

    Only `Durable` reads `content` and `header`. A store that lists its keys keeps all fields but `content` for a list.

    Attributes:
        version: the number of the write, from 1; each write of a key has the next number.
        step: how many iterations were made.
        content: everything that is kept.
        state: "running", "asking", "finished", "failed" or "stopped", as it was when the record was written.
        graph: the name of the graph.
        began_at: when the loop of the key began, in seconds since 1970.
        changed_at: when a state was last kept, or a call began or ended, in seconds since 1970.
        question: the question that waits for an answer, as text; None if there is no question.
        header: the beginning of `content`, with everything but the large values.
    """

    version: int
    step: int
    content: bytes
    state: str = "stopped"
    graph: str = ""
    began_at: float = 0.0
    changed_at: float = 0.0
    question: str | None = None
    header: bytes = b""


class Run(NamedTuple):
    """An entry of the list of keys with durable loops; see `Durable.runs`.

    Attributes:
        key: the key.
        state: "running" if a call has the key, in this process or another one; "asking" if the key waits for an answer;
            "finished" with a result; "failed" with an error; "stopped" if the call was cancelled, or its process has
            died.
        graph: the name of the graph.
        step: how many iterations were made.
        question: the question that waits for an answer; None if there is no question.
        token: the token of that question, for an `Answer`; empty if there is no question.
        error: the error of a call that has failed, as text; empty if there is no error.
        owner: for a running key "here", or the process, such as "process 12" or "process 12 of another machine".
        began_at: when the loop began, in seconds since 1970; 0 if an earlier version began the loop.
        changed_at: when a state was last kept, or a call began or ended, in seconds since 1970.
        bytes: how many bytes are stored under the key: states, arguments and result.
    """

    key: str
    state: RunState
    graph: str
    step: int
    question: Any
    token: str
    error: str
    owner: str
    began_at: float
    changed_at: float
    bytes: int


# The owner of a key.

# The calls of this process that have a key, by their tokens. Calls of an event loop that was closed early are dropped.
active_calls: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


class Owner(NamedTuple):
    """The call that has a key.

    Attributes:
        machine: a text for the machine since its start, and for the namespace of process numbers.
        pid: the number of the call's process.
        started: when the process was started, as Linux tells; empty if unknown.
        token: a text that is unique to the call.
    """

    machine: str
    pid: int
    started: str
    token: str

    def is_gone(self) -> bool:
        """Whether the call has certainly ended. False if the call runs, or belongs to another machine."""
        if self.machine != machine():
            return False
        if self.pid == os.getpid() and self.started == started_at(self.pid):
            return not self.is_here()
        if sys.platform == "win32":  # on Windows `os.kill` ends the process, whatever the signal
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return started_at(self.pid) != self.started

    def is_here(self) -> bool:
        """Whether the call runs in this process, so that it certainly has not ended."""
        return self.token in active_calls

    def place(self) -> str:
        """Return "here", or the process of the call."""
        if self.is_here():
            return "here"
        return f"process {self.pid}{'' if self.machine == machine() else ' of another machine'}"


@functools.cache
def machine() -> str:
    """Return a text for this machine since its start, and for the namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # the system is not Linux
        return f"{platform.node()} {uuid.getnode():x}"


def started_at(pid: int) -> str:
    """Return when a process was started; empty if the process has ended, or if the system does not tell."""
    try:
        # The name of the program comes before the fields, in parentheses, and may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a dead process stays until its parent has asked for its status


@dataclass(frozen=True)
class Loop:
    """The stored content of a key at one step.

    Attributes:
        step: how many iterations were made.
        state: the encoded state; None before the loop began.
        kept_at: when the state was kept, in seconds since 1970.
        graph: the name of the graph.
        arguments: the digest of each argument, by its parameter.
        status: "done" if the call has returned its result; "interrupted" if it waits for an answer; "failed" if it has
            ended with an error; otherwise "running".
        owner: the call that has the key; None if no call has the key.
        lease_until: when the key is free if the lease is not renewed, in seconds since 1970.
        question: the encoded question that waits for an answer.
        answers: the encoded questions and answers of the iteration after this step, in the order of the answers.
        began_at: when the loop began, in seconds since 1970.
        changed_at: when anything but the lease was changed, in seconds since 1970.
        error: the error of a failed call; for a call that is done, the reason why the result was not kept.
        given: the encoded arguments, in the first record of the key; None in later records.
        result: the encoded result; None if there is no result, or the result cannot be stored.
    """

    step: int
    state: bytes | None
    kept_at: float
    graph: str
    arguments: dict[str, str]
    status: Status = "running"
    owner: Owner | None = None
    lease_until: float = 0.0
    question: bytes | None = None
    answers: tuple[tuple[bytes, bytes], ...] = ()
    began_at: float = 0.0
    changed_at: float = 0.0
    error: str = ""
    given: bytes | None = None
    result: bytes | None = None

    def is_free(self, now: float) -> bool:
        """Whether the owner has ended, or has not renewed its lease, as far as this process can tell.

        Args:
            now: the time by the clock of the store.
        """
        if self.owner is None or self.owner.is_gone():
            return True
        return self.lease_until < now and not self.owner.is_here()  # a clock may have leapt while the owner runs here

    def run_state(self, *, is_free: bool) -> RunState:
        """Return the state of the key, as a list shows it."""
        if not is_free:
            return "running"
        if self.status == "done":
            return "finished"
        if self.question is not None:
            return "asking"
        return "failed" if self.status == "failed" else "stopped"

    def token(self, key: str, question: bytes) -> str:
        """Return the token of a question that is asked in the iteration after this step."""
        asked = repr((key, self.step, self.kept_at, len(self.answers), question))
        return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()

    def record(self, version: int) -> LoopRecord:
        """Return the record for a store. Its content is the length of a header, the header, and the large values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts: list[bytes | None] = [fields.pop(name) for name in _LARGE]
        owner = None if self.owner is None else tuple(self.owner)
        lengths = [None if part is None else len(part) for part in parts]
        header = encode({**fields, "owner": owner, "lengths": lengths}, "loop").to_bytes()
        content = b"".join((len(header).to_bytes(8, "little"), header, *(part or b"" for part in parts)))
        question = None if self.question is None else f"{readable(self.question)!r:.500}"
        state = self.run_state(is_free=self.owner is None)
        return LoopRecord(
            version, self.step, content, state, self.graph, self.began_at, self.changed_at, question, header
        )

    @classmethod
    def read(cls, record: LoopRecord) -> Self:
        """Read a record; if its content is empty, read all but the large values from the header.

        Raises:
            CheckpointError: the record is something else, or damaged.
        """
        begin = 8 + int.from_bytes(record.content[:8], "little")
        try:
            fields: dict[str, Any] = decode(Encoded.from_bytes(record.content[8:begin] or record.header))
            fields["owner"] = None if fields["owner"] is None else Owner(*fields["owner"])
            if "has_state" in fields:  # written by an earlier version
                lengths: list[int | None] = [len(record.content) - begin if fields.pop("has_state") else None]
                fields["changed_at"] = fields["kept_at"]
            else:
                lengths = fields.pop("lengths")
            for name, length in zip(_LARGE, lengths, strict=False):
                end = begin + (length or 0)
                fields[name] = None if length is None else record.content[begin:end]
                begin = end
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the record of version {record.version} is no durable loop: {error!r}") from error

    def run(self, key: str, stored_bytes: int, now: float) -> Run:
        """Return the entry of a key in a list.

        Args:
            key: the key.
            stored_bytes: how many bytes are stored under the key.
            now: the time by the clock of the store.
        """
        is_free = self.is_free(now)
        asked = self.question if is_free else None
        owner = "" if is_free or self.owner is None else self.owner.place()
        return Run(
            key, self.run_state(is_free=is_free), self.graph, self.step,
            None if asked is None else readable(asked), "" if asked is None else self.token(key, asked),
            self.error if self.status == "failed" else "", owner, self.began_at, self.changed_at, stored_bytes,
        )  # fmt: skip


# The large values, in the order in which they are stored.
_LARGE: Final = ("state", "given", "result")


def readable(data: bytes) -> Any:
    """Return an encoded value; if one of its classes cannot be imported, a text that says so."""
    try:
        return decoded(data)
    except CheckpointError as error:
        return f"unreadable here: {error}"


def encoded(value: object, name: str) -> bytes:
    """Return a value as bytes; see `encode`."""
    return encode(value, name).to_bytes()


def decoded(data: bytes | None, template: object = None) -> Any:
    """Return the value that was encoded; see `decode`."""
    assert data is not None
    return decode(Encoded.from_bytes(data), template)


def comparable(value: object, name: str) -> bytes:
    """Return bytes that are equal for equal values. The order of a dict does not count."""
    plain = encode(value, name)
    return Encoded(_in_order(plain.structure), dict(sorted(plain.arrays.items()))).to_bytes()


def _in_order(structure: Any) -> Any:
    kind = cast("Any", type(structure))
    if kind is list:
        return [_in_order(one) for one in structure]
    if kind is not dict:
        return structure
    found = {key: _in_order(one) for key, one in sorted(structure.items())}
    if "$dict" in found:
        found["$dict"] = sorted(found["$dict"], key=json_text)
    return found


def digests(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return the digest of each argument, by its parameter."""
    return {
        name: hashlib.blake2b(comparable(value, name), digest_size=16).hexdigest() for name, value in arguments.items()
    }
