"""Values in parts: what is read is what was written, and what is written is what is new."""

import dataclasses
import decimal
import random
import string
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import extension
from penstock.durable.parts import MissingEntries, Values
from penstock.durable.store import Entry


@dataclasses.dataclass
class Message:
    role: str
    content: str
    number: int | bool | float = 0


class Kept:
    """The entries of a run, which `Values` writes, and which other `Values` read, as in another process."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.values = Values(**options)
        self.entries: list[Entry] = []

    def add(self, value: object) -> int:
        """Keeps a value; returns how many bytes were written."""
        found = self.values.encode(value, "state", len(self.entries))
        self.entries.append(Entry(len(self.entries), "", "state", 0, 0.0, *found))
        return sum(len(one) for one in found if one is not None)

    def restart(self) -> Any:
        """Reads the last value in another process, which goes on."""
        self.values = Values(**self.options)
        self.values.add(self.entries)
        return self.values.decode(len(self.entries) - 1)


def exactly(value: object) -> bytes:
    """Returns bytes that are equal for equal values of equal types."""
    return extension.encode(value).to_bytes()


def message(number: int, size: int = 1000) -> dict[str, Any]:
    chosen = random.Random(number)
    return {"role": "user", "content": "".join(chosen.choices(string.ascii_letters, k=size)), "id": number}


# Values that equal others of another type, or have equal bytes, are those that could be taken for each other.
SCALARS = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, float("nan"), float("inf"), 1 << 70, "", "a", "$", "$cut", b"",
        "é\ud800", b"\0" * 8, bytearray(b"\0" * 8), 1j, decimal.Decimal("1.0"), numpy.zeros(1), numpy.zeros(2, "f4"),
        numpy.zeros((1, 1)), numpy.float64(0), numpy.int64(0), "x" * 700, "long" * 5000, b"y" * 300_000,
        numpy.arange(40_000.0), Message("a", "b"),
    ]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "b", "$cut", "$", ""]), inner, max_size=3),
        st.dictionaries(st.sampled_from([1, (2, "x"), None, "k"]), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(lambda one, times: [one] * times, inner, st.sampled_from([17, 40])),
        st.builds(lambda one, times: {str(number): one for number in range(times)}, inner, st.just(20)),
        st.builds(lambda one: (*range(20), one), inner),
        st.builds(Message, st.just("r"), st.just("c"), inner),
        st.just({*range(30), "b"}),
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_read_is_what_was_written(data: st.DataObject) -> None:
    kept = Kept()
    state: list[Any] = data.draw(st.lists(VALUES, max_size=40))
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(state)))
        match data.draw(st.sampled_from(["insert", "drop", "change", "trim", "alone", "restart", "mutate"])):
            case "insert":
                state[place:place] = data.draw(st.lists(VALUES, max_size=20))
            case "drop":
                del state[place : place + 5]
            case "change":
                state[place : place + 1] = [data.draw(VALUES)]
            case "trim":
                del state[: len(state) // 2]
            case "alone":
                alone = data.draw(VALUES)
                kept.add(alone)
                assert exactly(kept.restart()) == exactly(alone)
                state.append(alone)
            case "restart" if kept.entries:
                kept.restart()
            case _:
                for one in state:  # the same objects, with another content
                    if type(one) is list and len(one) < 50:
                        one.append(1)
                    elif type(one) is dict:
                        one["a"] = True
        kept.add(state)
        assert exactly(kept.restart()) == exactly(state)
        kept.add(state)
        assert kept.entries[-1].parts is None  # nothing is new


def edits() -> Iterator[tuple[str, Callable[[list[Any], Any], object]]]:
    yield "append", lambda state, one: state.append(one)
    yield "prepend", lambda state, one: state.insert(0, one)
    yield "insert", lambda state, one: state.insert(len(state) // 3, one)
    yield "change", lambda state, one: state.__setitem__(len(state) // 2, one)
    yield "window", lambda state, one: state.__setitem__(slice(None), [*state[1:], one])
    yield "drop last", lambda state, _: state.pop()
    yield "change inside", lambda state, one: state[7].__setitem__("content", one["content"])


@pytest.mark.parametrize(
    "wrap", [lambda state: state, lambda state: {"messages": state, "n": 1}, tuple], ids=["list", "in a dict", "tuple"]
)
@pytest.mark.parametrize(("name", "edit"), [pytest.param(*each, id=each[0]) for each in edits()])
def test_what_is_written_is_what_is_new(name: str, edit: Any, wrap: Callable[[Any], Any]) -> None:
    kept, numbers = Kept(), count(10_000)
    state = [message(number) for number in range(1000)]
    whole = kept.add(wrap(state))
    assert whole < 1.05 * len(exactly(state))
    written: list[int] = []
    for turn in range(60):
        edit(state, message(next(numbers)))
        if turn == 30:
            assert kept.restart() is not None  # nothing is written again by another process
        written.append(kept.add(wrap(state)))
    assert kept.restart() == wrap(state)
    new = 0 if name == "drop last" else 1050
    assert sum(written) / len(written) < new + 700
    assert max(written) < new + 2000


def test_growing_text_writes_what_it_grows_by() -> None:
    kept, chosen, text, written = Kept(), random.Random(1), "", 0
    for _ in range(400):
        text += "".join(chosen.choices("abcdefghijklmnopqrstuvwxyz é", k=1000))
        written += kept.add({"notes": text})
    assert kept.restart() == {"notes": text}
    assert written < 2 * len(text.encode())


def test_a_result_is_not_kept_again_in_a_state() -> None:
    kept, state = Kept(), list[Any]()
    for number in range(300):
        kept.add(message(number))  # the result of a step
        state.append(message(number))
        assert kept.add(state) < 17 * 1100 if number < 17 else kept.add(state) < 700


def test_arrays_and_bytes_are_kept_in_pieces() -> None:
    kept = Kept()
    weights = numpy.random.default_rng(0).normal(size=(1000, 300))
    first = kept.add({"weights": weights, "raw": bytes(500_000)})
    weights[500] = 0
    assert kept.add({"weights": weights, "raw": bytes(500_000)}) < first / 10
    loaded = kept.restart()
    assert (loaded["weights"] == weights).all()
    assert loaded["raw"] == bytes(500_000)
    loaded["weights"][0] = 1  # it may be written to
    assert (kept.restart()["weights"] == weights).all()


def test_runs_of_a_thread_share_parts() -> None:
    runs: list[Kept] = []
    state: list[Any] = []
    for turn in range(1, 40):
        kept = Kept()
        for number, earlier in enumerate(runs, 1):
            kept.values.add(earlier.entries, run=number)
        if runs:
            assert kept.values.decode(0, run=turn - 1) == state
        state += [message(1000 * turn + number) for number in range(20)]
        written = kept.add(state)
        assert written < 20 * 1050 + 1500
        runs.append(kept)
        alone = Values()
        alone.add(kept.entries, run=turn)
        if turn > 5:
            with pytest.raises(MissingEntries) as missing:
                alone.decode(0, run=turn)
            assert (1, 0) in missing.value.entries or (turn - 1, 0) in missing.value.entries


def test_a_value_that_is_too_large_is_refused_by_its_name() -> None:
    kept = Kept(max_value_bytes=1_000_000)
    state = {"small": [message(number) for number in range(100)], "large": [message(number) for number in range(1000)]}
    with pytest.raises(
        ps.NotStorable, match=r'^state\["large"\] takes 1,0\d\d,\d\d\d bytes, and max_value_bytes is 1,000,000'
    ):
        kept.add(state)
    with pytest.raises(ps.NotStorable, match=r'^state\["array"\]'):
        kept.add({"array": numpy.zeros(1_000_000)})
    del state["large"]
    kept.add(state)  # what was refused leaves nothing behind
    assert kept.restart() == state
    with pytest.raises(ps.NotStorable, match=r'^state\["small"\]\[99\]\["x"\] is a builtins.object'):
        kept.add({"small": [*state["small"][:99], {"x": object()}]})


class Zip:
    def encode(self, data: bytes) -> bytes:
        return b"Z" + zlib.compress(data)

    def decode(self, data: bytes) -> bytes:
        assert data[:1] == b"Z"
        return zlib.decompress(data[1:])


def test_a_codec_sees_every_value() -> None:
    kept = Kept(codec=Zip())
    state = {"a": [message(number) for number in range(30)], "text": "secret " * 5000, "short": "secret"}
    kept.add(state)
    assert kept.restart() == state
    assert not any(b"secret" in (one or b"") for entry in kept.entries for one in (entry.value, entry.parts))


def test_a_list_that_contains_itself_is_refused() -> None:
    state: list[Any] = [*range(20)]
    state.append(state)
    with pytest.raises(ps.NotStorable, match="more than 100 levels deep, or contains itself"):
        Kept().add(state)


def test_entries_that_nothing_needs_can_be_told() -> None:
    kept = Kept()
    state = [message(number) for number in range(100)]
    for number in range(100, 130):
        state = [*state[1:], message(number)]
        kept.add(state)
    needed = kept.values
    kept.restart()
    assert kept.values.named_by([29]) <= set(range(30))
    assert 29 in kept.values.named_by([29])
    value, parts = needed.encode(state, "state", 30, anew=True)
    alone = Values()
    alone.add([Entry(30, "", "state", 0, 0.0, value, parts)])
    assert alone.decode(30) == state
