"""Stored values are read as equal values of the same types; an error shows where a value cannot be stored."""

import collections
import datetime
import decimal
import json
import math
import subprocess
import sys
import uuid
import zoneinfo
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.saving import encoding
from penstock.saving.encoding import Encoded, decode, encode
from tests.saving import stored_classes as stored

SIZES = ("1", "2", "4", "8")
DTYPES = [
    *(np.dtype(order + kind + size) for kind in "iuf" for size in SIZES for order in "<>" if kind + size != "f1"),
    *map(np.dtype, ("?", "<c8", ">c16", "g", "G", "M8[ns]", ">M8[D]", "m8[us]", "M8", "S3", "U2", ">U2", "V5", "U0")),
    np.dtype([("a", "<i4"), ("b", ">f8", (2, 3)), ("c", [("d", "S2")])]),
    np.dtype({"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [0, 8], "itemsize": 24}),
    *(np.dtype(kind) for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)),
]
PADDED = [dtype for dtype in DTYPES if dtype.char in "gG" or dtype.names]  # dtypes with padding bytes


def comes_back(value: Any, template: Any = None) -> Any:
    """Stores a value as one bytes object, and reads it; checks that the encoding of snapshots gives an equal value."""
    found = decode(Encoded.from_bytes(encode(value).to_bytes()), template)
    assert same(decode(Encoded.from_bytes(encode(value, exact=True).to_bytes()), template), found)
    return found


def comes_back_exactly(value: Any) -> Any:
    return decode(Encoded.from_bytes(encode(value, copy=True, exact=True).to_bytes()))


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal and of the same types at every level; unlike `==`, it tells 1 from True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        is_padded = a.dtype in PADDED or a.dtype.kind == "V"
        same_bytes = a.tobytes() == b.tobytes() or (is_padded and repr(a.tolist()) == repr(b.tolist()))
        return a.dtype == b.dtype and a.shape == b.shape and same_bytes
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and (a.tobytes() == b.tobytes() or a.dtype in PADDED)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (a, math.copysign(1, a)) == (b, math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, set | frozenset):
        return a == b and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    return bool(a == b)


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary(),
    lambda inside: st.lists(inside, max_size=3).map(tuple) | st.frozensets(inside, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    KEYS | st.floats() | st.complex_numbers() | st.binary(max_size=600).map(bytearray) | st.sets(st.integers()),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.dictionaries(KEYS, inside, max_size=4)
        | st.dictionaries(st.text(), inside, max_size=4)
        | st.builds(stored.Pair, inside, inside)
        | st.builds(stored.Point, st.floats(), inside)
    ),
    max_leaves=20,
)


@settings(max_examples=settings().max_examples // 5)  # of many steps each
@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(comes_back(value), value)


def test_values_that_json_would_change_come_back() -> None:
    for value in (
        10**5000, -(1 << 10_000), {"$tuple": [1]}, {"$": 1}, {"a": 1, "$b": 2}, {1: "a", "1": "b"}, {(1, b""): {2: 3}},
        {None: 1, True: 2}, "\ud83d\ude00", {"\udc00": "\ud800"}, "🚀", b"x" * 5000, bytearray(5000), -0.0, 5e-324,
        [(), [], {}], {"a": (1, [2, (3,)])}, {1, (2, 3)}, complex("nan+infj"), math.nan, -math.inf, "",
        decimal.Decimal("1.50"), uuid.UUID(int=5), datetime.date.min, datetime.time(1, 2, 3, 4), datetime.datetime.max,
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    ):  # fmt: skip
        assert same(comes_back(value), value), ascii(value)[:50]


def filled(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    size = math.prod(shape)
    if dtype.kind == "b":
        return (np.arange(size) % 2 == 1).reshape(shape)
    if dtype.kind == "U":  # not every number is a valid character
        return np.array([chr(97 + at % 26) for at in range(size)], dtype).reshape(shape)
    raw = np.random.default_rng(1).integers(0, 256, size * dtype.itemsize, dtype="u1")
    if dtype.type.__module__.startswith("ml_dtypes") and dtype.itemsize == 1:
        raw &= 1  # valid in types of 4 and 2 bits as well
    return np.ndarray(shape, dtype, raw.tobytes()).copy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: np.dtype[Any]) -> None:
    table = filled(dtype, (3, 4))
    arrays = {
        "plain": table,
        "transposed": table.T,
        "fortran": np.asfortranarray(table),
        "strided": table[::2, ::-1],
        "0-d": filled(dtype, ()),
        "empty": filled(dtype, (0, 3)),
        "large": filled(dtype, (30, 40)),
    }
    found = comes_back(arrays)
    assert same(found, arrays)
    assert all(array.flags.writeable and array.flags.aligned for array in found.values())
    scalar = table[1, 2]
    assert same(comes_back([scalar, dtype]), [scalar, dtype])


ALIGNED = np.dtype([("label", "i1"), ("weight", "f8")], align=True)


def with_padding(array: Any, filler: int) -> Any:
    """Return the same values, with `filler` in each padding byte."""
    new: Any = np.ndarray(array.shape, array.dtype, np.full(max(1, array.nbytes), filler, "u1"))
    if array.dtype.names is not None:
        for name in array.dtype.names:
            new[name] = with_padding(array[name], filler)
        return new
    raw = np.frombuffer(bytearray(array.tobytes()), "u1").reshape(array.size, array.itemsize)
    if array.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
        part = np.dtype(np.longdouble).itemsize
        for begin in range(0, array.itemsize, part):
            padding = slice(begin + 10, begin + part) if array.dtype.isnative else slice(begin, begin + part - 10)
            raw[:, padding] = filler
    return raw.reshape(-1).view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    "dtype",
    [
        *PADDED, ALIGNED, np.dtype(">g"), np.dtype(">G"), np.dtype("f8"),
        np.dtype([("pair", ALIGNED), ("more", "i2")], align=True),
        np.dtype([("pairs", ALIGNED, (2, 3)), ("x", "g"), ("none", "S0", 2)]),
    ],
    ids=str,
)  # fmt: skip
def test_equal_values_have_equal_bytes_whatever_is_in_their_padding(dtype: np.dtype[Any]) -> None:
    for shape in ((3, 4), (), (0, 3), (30, 40)):
        table = np.ones(shape, dtype)
        arrays = [with_padding(table, filler) for filler in (0, 1, 255)]
        for equal in (arrays, [array.T for array in arrays], [array[()] for array in arrays]):
            assert len({encode(one).to_bytes() for one in equal}) == 1
            found = comes_back(equal[2])
            assert found.dtype == equal[0].dtype
            assert np.all(found == equal[0])
    some = np.ones(5, [("a", "i1"), ("b", "i4"), ("c", "f4")])
    other = some.copy()
    other["b"] = 2
    assert encode(some[["a", "c"]]).to_bytes() == encode(other[["a", "c"]]).to_bytes()


def test_the_bytes_are_a_safetensors_file_for_everyone() -> None:
    arrays = {str(dtype): filled(dtype, (3, 2)).T for dtype in DTYPES}
    found = safetensors.numpy.load(encode(arrays).to_bytes())
    assert set(found) == {f'state["{name}"]' for name in arrays}
    for name, array in arrays.items():
        read = found[f'state["{name}"]']
        if read.dtype == array.dtype:
            assert np.array_equal(read, array, equal_nan=array.dtype.kind == "f")
        assert array.dtype in PADDED or read.tobytes() == array.tobytes()
    assert np.dtype("float32") in {array.dtype for array in found.values()}  # some other dtypes are read as raw bytes
    without = encode({"messages": [{"role": "user"}]}).to_bytes()
    assert json.loads(without) == {"penstock": 1, "value": {"messages": [{"role": "user"}]}}


@pytest.mark.parametrize(
    "value",
    [
        *stored.Colour, stored.Level.LOW, stored.Word.YES, stored.Access.READ, stored.Access.READ | stored.Access.WRITE,
        stored.Access(0), stored.Point(1.5, [2]), stored.Frozen("a", [1]), stored.Computed[int](3),
        stored.Outer.Inside(stored.Outer(stored.Point(0))), stored.Pair(1, stored.Pair((2,), {3: 4})),
        stored.Model(name="a", parts=[stored.Model(name="b")], at=stored.Point(1)), stored.Open(value=(1,), more={2}),
        stored.Root([1, 2]), stored.Versioned(3), {stored.Level.LOW: stored.Word.YES, stored.Pair(1): 2},
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],  # without addresses, so that all processes have the same ids
)  # fmt: skip
def test_instances_come_back(value: Any) -> None:
    found = comes_back(value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


def test_what_equality_does_not_see_of_an_instance_comes_back() -> None:
    assert comes_back(stored.Frozen("a", [1])).seen == [1]
    model = stored.Model(name="a")
    model._secret = 5
    found = comes_back(model)
    assert (found._secret, found.model_fields_set) == (5, {"name"})
    assert comes_back(stored.Open(value=1, more=2)).model_extra == {"more": 2}
    point = stored.Point(-1)
    assert point.size == 1  # the instance caches its size; after reading, it is computed anew
    assert comes_back(point).size == 1


class _Coded(Exception):
    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def test_errors_come_back_with_what_they_say() -> None:
    try:
        raise KeyError("a")
    except KeyError as error:
        error.add_note("of item 3")
        missing = error
    for value in (
        ValueError("no", 3.5), missing, _Coded(4, text="bad"), FileNotFoundError(2, "not here", "x"), TimeoutError(),
        ps.CheckpointError("full", 28), ModuleNotFoundError("no b", name="b"), ExceptionGroup("two", [ValueError(1)]),
    ):  # fmt: skip
        found = comes_back_exactly(value)
        assert (type(found), repr(found), str(found)) == (type(value), repr(value), str(value))
        assert vars(found) == vars(value)
    assert comes_back_exactly(FileNotFoundError(2, "not here", "x")).errno == 2
    assert refused(ValueError(object())).startswith("state.args[0] is a builtins.object")
    assert refused(UnicodeDecodeError("utf-8", b"x", 0, 1, "no")).startswith("state is a builtins.UnicodeDecodeError")


@dataclass
class _Local:
    at: Any


def refused(value: Any, name: str = "state") -> str:
    with pytest.raises(ps.NotStorable) as caught:
        encode(value, name)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def test_what_is_refused_is_named_with_its_path_and_type() -> None:
    @dataclass
    class Nowhere:
        x: int

    extra = stored.Point(1)
    vars(extra)["more"] = 2
    unset = stored.Computed.__new__(stored.Computed)
    circle: list[Any] = []
    circle.append(circle)
    family: dict[str, Any] = {"parent": None, "children": []}
    family["children"].append({"parent": family})
    inside = stored.Outer.Inside(stored.Plain())
    assert refused({"buffer": [0, 1, 2, inside]}).startswith(
        'state["buffer"][3].image is a tests.saving.stored_classes.Plain, which cannot be stored: '
    )
    assert refused([lambda: 1], "shuffled").startswith("shuffled[0] is a builtins.function")
    assert refused({(1, 2): open}).startswith("state[(1, 2)] is a builtins.")
    assert refused(stored.Model.model_construct(name=stored.Plain())).startswith("state.name is a")
    assert "Nowhere, and no import finds that class: define it at the top level of a module" in refused(Nowhere(1))
    assert "has an attribute 'more'" in refused(extra)
    assert "has no attribute 'of'" in refused(unset)
    assert "contains itself" in refused(circle)
    with pytest.raises(ps.NotStorable, match=r'state\["children"\]\[0\]\["parent"\] is state, which contains it'):
        encode(family, exact=True)
    assert "dtype dtype('O')" in refused([np.array([None])])
    assert "dtype StringDType()" in refused(np.array(["a"], np.dtypes.StringDType()))
    for other in (
        collections.OrderedDict(a=1), collections.defaultdict(int), collections.deque(), datetime.timedelta(1),
        np.ma.masked_array([1]), np.rec.array([(1,)]), stored.OfDict(1), stored.Plain, object(), memoryview(b""),
        {1: 2}.keys(), (one for one in ()), np.random.default_rng(),
        datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    ):  # fmt: skip
        assert f"state is a {type(other).__module__}.{type(other).__qualname__}" in refused(other)


def test_deep_values_come_back_and_deeper_ones_are_refused() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = (deep,)
    assert same(comes_back(deep), deep)
    assert "more than 100 levels deep" in refused(((deep,),))


@given(st.data())
def test_the_order_of_the_axes_of_an_array_is_kept(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    array = np.arange(int(np.prod(shape))).reshape(shape)
    array = array.transpose(data.draw(st.permutations(range(len(shape)))))
    array = array[(*(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape), ...)]
    if data.draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape)).swapaxes(0, data.draw(st.integers(0, len(shape))))
    expected = np.array(array, order="K")  # NumPy's dense copy with the same order of axes
    for found in (comes_back_exactly(array), decode(encode(array, exact=True))):
        assert same(found, expected)
        assert found.flags.writeable
        assert found.strides == expected.strides or array.size < 2 or 1 in array.shape or 0 in array.strides


def test_what_is_there_twice_comes_back_as_one() -> None:
    array, words = np.ones(3), ["a"]
    point = stored.Point(1.0, words)
    value = {
        "tied": {"in": array, "out": array}, "list": [words, (words, [words])], "point": [point, point],
        "bytes": [bytearray(b"x")] * 2, "empty": ([], []), "set": [{1}] * 2, "frozen": {stored.Frozen("a", words)},
        "dict": [{"a": array}] * 2, "equal": [[1], [1]], "model": [stored.Model(name="a")] * 2,
    }  # fmt: skip
    found = comes_back_exactly(value)
    assert same(found, value)
    assert found["tied"]["in"] is found["tied"]["out"] is found["dict"][0]["a"]
    assert found["list"][0] is found["list"][1][0] is found["list"][1][1][0] is found["point"][0].y
    assert next(iter(found["frozen"])).seen is found["list"][0]
    for name in ("point", "bytes", "set", "dict", "model"):
        assert found[name][0] is found[name][1]
    assert found["empty"][0] is not found["empty"][1]
    assert found["equal"][0] is not found["equal"][1]
    assert len(encode(5 * [np.ones(1000)], exact=True).to_bytes()) < 9000
    again = comes_back_exactly(found)
    assert again["tied"]["in"] is again["tied"]["out"]
    alone = comes_back(value)
    assert alone["tied"]["in"] is not alone["tied"]["out"]


def test_the_members_of_a_set_are_added_in_the_order_of_their_json_which_processes_share() -> None:
    members = ["b", "a", "é", 10, 9, (2, 1), None]
    for kind, stored_as in ((set, "$set"), (frozenset, "$frozenset")):
        assert encode(kind(members)).structure == {stored_as: ["a", "b", "é", 10, 9, None, {"$tuple": [2, 1]}]}


def test_a_copy_does_not_follow_what_happens_to_the_value() -> None:
    value = {"a": np.arange(3), "b": [1]}
    copied, referred = encode(value, copy=True), encode(value)
    value["a"][0] = 9
    assert decode(Encoded.from_bytes(copied.to_bytes()))["a"].tolist() == [0, 1, 2]
    assert decode(Encoded.from_bytes(referred.to_bytes()))["a"].tolist() == [9, 1, 2]


def test_a_class_that_has_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode([stored.Versioned(1), stored.Level.LOW]).to_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(stored, "Versioned", dataclass(type("Versioned", (), {"__annotations__": {"other": int}})))
        with pytest.raises(ps.CheckpointError, match=r"had the fields \['value'\] .*, and has the fields \['other'\]"):
            decode(Encoded.from_bytes(data))
    with monkeypatch.context() as patch:
        patch.setattr(stored.Versioned, "__version__", 2)
        encoding._class_of.cache_clear()
        with pytest.raises(ps.CheckpointError, match=r"the __version__ 1, and has .* the __version__ 2"):
            decode(Encoded.from_bytes(data))
    encoding._class_of.cache_clear()
    for name, value in (("Versioned", None), ("Versioned", subprocess.Popen), ("Level", stored.Point)):
        with monkeypatch.context() as patch:
            patch.setattr(stored, name, value)
            with pytest.raises(ps.CheckpointError, match=f"stored_classes:{name} is not the .* of which instances"):
                decode(Encoded.from_bytes(data))
    monkeypatch.setattr(stored.Level, "_member_map_", {})
    with pytest.raises(ps.CheckpointError, match="has lost its member 'LOW'"):
        decode(Encoded.from_bytes(data))


@pytest.mark.parametrize("structure", [{"$call": ["os:system", "false"]}, {"$value": 1}, {"$enum": ["os:system", "a"]}])
def test_bytes_cannot_name_code_to_run(structure: Any) -> None:
    with pytest.raises(ps.CheckpointError):
        decode(Encoded(structure, {}))


def test_damaged_or_newer_bytes_are_an_error() -> None:
    for data in (b"", b"{", b"[]", b"{}", b"x" * 20, b"\x10" + b"\0" * 30, encode(np.arange(99)).to_bytes()[:-1]):
        with pytest.raises(ps.CheckpointError, match="no stored value"):
            Encoded.from_bytes(data)
    with pytest.raises(ps.CheckpointError, match=r"written in format 2, .* reads format 1"):
        Encoded.from_bytes(b'{"penstock":2,"value":1}')


def test_it_loads_neither_numpy_nor_pydantic_nor_jax() -> None:
    program = """
import sys
from penstock.saving.encoding import decode, encode, Encoded
value = {"a": (1, b"x" * 1000), 2: {3}}
assert decode(Encoded.from_bytes(encode(value).to_bytes())) == value
print(*({"numpy", "jax", "pydantic", "ml_dtypes"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_without_numpy_arrays_are_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = Encoded.from_bytes(encode(np.arange(3)).to_bytes())
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ps.MissingExtraError, match=r"penstock\[data\]"):
        decode(encoded)
