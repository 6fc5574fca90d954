"""Values as JSON and arrays, and back; without pickle, so reading a file never runs code that the file brings.

`encode` returns the structure of a value as JSON, and long binary data apart from it. JSON keeps None, booleans,
numbers, text, lists and dicts with text keys. Every other value is an object with one key, its tag:
`{"$tuple": [1, 2]}`. Arrays are in the format of safetensors, by the path of the value, such as
`state["params"]["w"]`. An array whose dtype safetensors cannot read back is stored as raw bytes.
"""

import ast
import base64
import dataclasses
import enum
import functools
import importlib
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import SEEK_END, BufferedReader, BytesIO
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias, cast

from .._errors import CheckpointError, MissingExtraError, NotStorable
from ..actors.accepted import is_text

FORMAT: Final = 1

# Deeper values would reach the recursion limit of Python, here or when they are read; cycles would never end.
_MOST_LEVELS: Final = 100
# Python refuses to write or read whole numbers of more than 4,300 decimal digits.
_LONG_NUMBER: Final = 1 << 10_000
# Types whose values cannot change: only `is` can tell two equal values apart.
_NEVER_SHARED: Final = (tuple, frozenset, bytes, complex, enum.Enum)
# Longer bytes are kept beside the arrays: in JSON they would take a third more.
_MOST_INLINE_BYTES: Final = 256
# What is longer than this is cut into parts, if the caller has said how.
_MOST_ITEMS: Final = 16
_MOST_CHARACTERS: Final = 4 << 10
_MOST_BYTES: Final = 256 << 10

# The dtypes that safetensors reads back into NumPy, by their name in NumPy.
_SAFETENSORS: Final = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL",
}  # fmt: skip

# Types of the standard library that can be written as a text, and the functions that read the text.
_WRITTEN: Final = {
    "datetime.date": "datetime:date.fromisoformat",
    "datetime.datetime": "datetime:datetime.fromisoformat",
    "datetime.time": "datetime:time.fromisoformat",
    "decimal.Decimal": "decimal:Decimal",
    "uuid.UUID": "uuid:UUID",
}

# See `cut` of `encode`.
Cut: TypeAlias = Callable[[Callable[[], str], str, Any, Callable[[int], "Encoded"]], Any]

# The depth of a value, the path of the value that contains it, and the last part of its path: the format to write the
# part with, and the part.
_Path: TypeAlias = "tuple[int, _Path | None, str, object]"


@dataclass(frozen=True)
class Encoded:
    """A value that is ready to be stored.

    Attributes:
        structure: the value as JSON, with the names of its arrays.
        arrays: arrays and long bytes, by the path of the value; after reading, the bytes of the arrays.
        copied_bytes: how many bytes of arrays were copied.
    """

    structure: Any
    arrays: Mapping[str, Any]
    copied_bytes: int = 0

    @property
    def array_bytes(self) -> int:
        """The size of the arrays, in bytes."""
        return sum(len(one) if isinstance(one, bytes | bytearray) else one.nbytes for one in self.arrays.values())

    def to_bytes(self) -> bytes:
        """Return JSON text, or, if there are arrays, a safetensors file with that text in its metadata."""
        text = json_text({"penstock": FORMAT, "value": self.structure})
        return b"".join(_safetensors(self.arrays, {"penstock": text})) if self.arrays else text.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Encoded":
        """Read the bytes that `to_bytes` has returned.

        Raises:
            CheckpointError: the bytes are damaged or something else, or were written by a newer version.
        """
        try:
            # A safetensors file begins with the lowest byte of a length that is a multiple of 8, which is never "{".
            is_text = data.startswith(b"{")
            arrays, metadata = ({}, {"penstock": data.decode()}) if is_text else read_arrays(BytesIO(data))
            stored: dict[str, Any] = json.loads(metadata["penstock"])
            written_as: int = stored["penstock"]
            structure: Any = stored["value"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"these {len(data)} bytes are no stored value, or are damaged: {error!r}") from error
        check_format(written_as, "the value")
        return cls(structure, arrays)


def encode(
    value: object,
    name: str = "state",
    *,
    copy: bool = False,
    exact: bool = False,
    splits: bool = True,
    copies: dict[int, tuple[Any, Any]] | None = None,
    cut: Cut | None = None,
) -> Encoded:
    """Encode a value. `decode` returns an equal value with the same types.

    These types can be encoded, and structures of them: None, bool, int, float, complex, str, bytes, bytearray, list,
    tuple, dict, set, frozenset, date, time, datetime, Decimal, UUID, members of an Enum, named tuples, dataclasses,
    models of pydantic; exceptions that can be made from their `args`, without tracebacks and causes; arrays, scalars
    and dtypes of NumPy and ml_dtypes; arrays of JAX. Members of a set are added in the order of their JSON.

    Args:
        value: the value.
        name: the first part of all paths, in errors and in names of arrays.
        copy: whether the arrays are copied, arrays of JAX to the host. If not, the result refers to the value's arrays.
        exact: if True, arrays come back with the order of their axes, and arrays of JAX on the devices where they were
            put; and two references to one object come back as two references, except to tuples, texts and the like. If
            False, arrays are in C order, and an object that is there twice becomes two equal objects, so that equal
            values are equal when encoded.
        splits: whether arrays of JAX may be split over several devices.
        copies: arrays that were copied before and have not changed since, each with its copy, by the id of the array.
            These copies are used again. Afterwards the dict has the arrays of this value.
        cut: cuts lists and dicts of over 16 items, text of over 4,096 characters, and bytes and arrays of over 256 KiB
            into parts. It is called with a function that returns the path of the value; "list", "dict", "text" or
            "bytes"; the items (of a dict, keys and values alternate), the text or the bytes; and a function that
            encodes the item of a number. It returns JSON that stands for the value. Not with `exact=True`.

    Raises:
        NotStorable: the value, or a part of it, cannot be encoded; the message names its path and type.
    """
    encoder = _Encoder(copy, exact, splits, copies or {}, cut)
    structure = encoder.value(value, (0, None, name, None))
    if copies is not None:
        copies.clear()
        copies.update(encoder.copies)
    structure = _numbered(structure, encoder.again, {}) if encoder.again else structure
    return Encoded(structure, encoder.arrays, encoder.copied_bytes)


def decode(encoded: Encoded, template: object = None, *, joined: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that was encoded.

    Args:
        encoded: the encoded value.
        template: a value of the same structure. Where the template has an array of JAX, an array of JAX with the same
            sharding comes back. Other arrays of JAX come back on the devices where they were put, if these were stored
            and are here, otherwise on the default device. Without a template, and where JAX is not loaded, arrays of
            JAX come back as arrays of NumPy.
        joined: returns the value for which `cut` has made this JSON.

    Raises:
        CheckpointError: a class is gone, or has other fields or another `__version__`.
        MissingExtraError: there are arrays, and NumPy is not installed.
    """
    return _Decoder(encoded, template, joined).value(encoded.structure)


# Cycles were refused before; to look for them again would take a third longer.
_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))


def json_text(structure: object) -> str:
    """Return JSON as text without spaces."""
    return _json.encode(structure)


def check_format(written_as: int, what: str) -> None:
    """Raise an error if a file or record was written in a format that this version does not know."""
    if written_as != FORMAT:
        raise CheckpointError(
            f"{what} was written in format {written_as}, and this version of Penstock reads format {FORMAT}: use the "
            "version that wrote it"
        )


def write_arrays(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write arrays and bytes as a safetensors file."""
    file.writelines(_safetensors(arrays, {}))


def read_arrays(file: BufferedReader | BytesIO) -> tuple[dict[str, bytearray], dict[str, str]]:
    """Return the bytes of each array in a safetensors file, and the metadata of the file.

    Raises:
        ValueError: the file is not a safetensors file, or ends too early.
    """
    left = file.seek(0, SEEK_END)
    file.seek(0)

    def read(size: int) -> bytearray:
        nonlocal left
        left -= size
        if left < 0:
            raise ValueError("the file is too short")
        data = bytearray(size)
        file.readinto(data)
        return data

    header: dict[str, Any] = json.loads(read(int.from_bytes(read(8), "little")))
    metadata = header.pop("__metadata__", {})
    arrays: dict[str, bytearray] = {}
    for name, array in header.items():  # in the order in which they were written, without gaps
        begin, end = array["data_offsets"]
        arrays[name] = read(end - begin)
    return arrays, metadata


def _safetensors(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Yield the parts of a safetensors file: https://github.com/huggingface/safetensors#format."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    parts: list[Any] = []
    end = 0
    for name, array in arrays.items():
        part = _bytes_of(array)
        dtype = getattr(array, "dtype", None)
        known = _SAFETENSORS.get(dtype.str) if dtype is not None and dtype.isbuiltin == 1 else None
        begin, end = end, end + len(part)
        shape = list(array.shape) if known else [len(part)]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [begin, end]}
        parts.append(part)
    text = json_text(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    yield from parts


def _bytes_of(array: Any) -> Any:
    """Return the bytes of an array in C order; without a copy if the array is long and in that order already."""
    if isinstance(array, bytes | bytearray):
        return array
    host = _numpy().asarray(array, order="C")
    if (meant := _meant(host.dtype)) is not None and host.size:
        return (host.reshape(-1).view("u1").reshape(-1, meant.size) & meant).tobytes()
    return host.reshape(-1).view("u1").data if host.nbytes > 1024 else host.tobytes()  # none at all have no view


@functools.lru_cache(maxsize=256)
def _meant(dtype: Any) -> Any:
    """Return a mask with 255 for each byte of an item that has a meaning, and 0 for padding; None without padding.

    Padding holds old content of the memory, so it differs between equal values.
    """
    numpy = _numpy()
    if dtype.itemsize == 0:
        return None
    meant = numpy.full(dtype.itemsize, 255, "u1")
    if dtype.subdtype is not None:
        inside = _meant(dtype.base)
        meant.reshape(-1, dtype.base.itemsize)[:] = 255 if inside is None else inside
    elif dtype.names is not None:
        meant[:] = 0
        for field, offset, *_ in dtype.fields.values():
            inside = _meant(field)
            meant[offset : offset + field.itemsize] |= 255 if inside is None else inside
    elif dtype.type in (numpy.longdouble, numpy.clongdouble) and numpy.finfo(dtype.type).nmant == 63:
        # 10 bytes of each part have a meaning; the lowest byte comes first in the processor's own byte order.
        parts = meant.reshape(2 if dtype.kind == "c" else 1, -1)
        parts[:, slice(10, None) if dtype.isnative else slice(0, -10)] = 0
    return None if meant.all() else meant


def _fetched(array: Any) -> Any:
    """Return an array of JAX as an array of NumPy, with one copy. `asarray` would leave a copy in the array, too."""
    numpy = _numpy()
    host = numpy.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            host[shard.index] = numpy.asarray(shard.data)
    return host


def _placement_of(array: Any) -> dict[str, Any] | None:
    """Return the devices on which the program has put an array of JAX, as JSON; None if the program has not put it."""
    sharding = array.sharding
    mesh = getattr(sharding, "mesh", None)
    devices = [*array.devices()] if mesh is None else [*mesh.devices.flat]
    if not array.committed or (mesh is None and len(devices) > 1):
        return None
    where = {"platform": devices[0].platform, "devices": [device.id for device in devices]}
    if mesh is None:
        return where
    axes = [[name, size, kind.name] for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)]
    spec = [axis if axis is None or isinstance(axis, str) else [*axis] for axis in sharding.spec]
    return {**where, "axes": axes, "spec": spec, "memory": sharding.memory_kind}


def _sharding_at(where: Mapping[str, Any]) -> Any:
    """Return the sharding that `_placement_of` has described; None if this process does not have the devices."""
    jax: Any = importlib.import_module("jax")
    try:
        found = {device.id: device for device in jax.devices(where["platform"])}
        devices = [found[number] for number in where["devices"]]
    except (RuntimeError, KeyError):
        return None
    if "axes" not in where:
        return jax.sharding.SingleDeviceSharding(devices[0])
    names, sizes, kinds = zip(*where["axes"], strict=True)
    types = tuple(getattr(jax.sharding.AxisType, kind) for kind in kinds)
    mesh = jax.sharding.Mesh(_numpy().array(devices).reshape(sizes), names, axis_types=types)
    spec = [axis if axis is None or isinstance(axis, str) else tuple(axis) for axis in where["spec"]]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec), memory_kind=where["memory"])


class _Class(NamedTuple):
    """A class whose instances can be stored: the import path of the class, and the fields of its instances."""

    place: str
    kind: str
    version: object
    fields: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _class_of(cls: Any) -> _Class | None:
    """Return the stored description of a class; None if instances of the class cannot be stored."""
    pydantic: Any = sys.modules.get("pydantic")
    bases, names = cls.__mro__, list[str]()
    if enum.Enum in bases:
        kind = "enum"
    elif BaseException in bases:
        kind, names = "error", ["args"]
    elif pydantic is not None and pydantic.BaseModel in bases:
        kind, names = "model", [*cls.model_fields]
    elif hasattr(cls, "__dataclass_fields__"):
        kind, names = "dataclass", [field.name for field in dataclasses.fields(cls)]
        try:
            object.__new__(cls)
        except TypeError:  # a base class, such as dict, holds more than the fields
            return None
    elif hasattr(cls, "_fields") and tuple in bases:
        kind, names = "named tuple", [*cls._fields]
    else:
        return None
    return _Class(f"{cls.__module__}:{cls.__qualname__}", kind, getattr(cls, "__version__", None), tuple(names))


def _found(place: str) -> object:
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError):
        return None


@dataclass(eq=False)
class _Encoder:
    copy: bool = False
    exact: bool = False
    splits: bool = True
    known: Mapping[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])
    cut: Cut | None = None

    def __post_init__(self) -> None:
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.copied_bytes = 0
        self._most_characters = sys.maxsize if self.cut is None else _MOST_CHARACTERS
        self.arrays: dict[str, Any] = {}
        self.on_devices: dict[str, Any] = {}  # the arrays of JAX
        self.again: set[int] = set()  # ids of the structures of objects that were met more than once
        self._met: dict[int, Any] = {}  # by the id of an object that can be shared: its structure, or first its path
        self._kept: list[Any] = []

    def value(self, value: Any, path: _Path) -> Any:
        cls = cast("Any", type(value))
        if cls is str:
            is_short = len(value) <= self._most_characters
            return value if is_short and value.isascii() else self._text(value, path)
        if cls is int:
            return value if -_LONG_NUMBER < value < _LONG_NUMBER else {"$int": hex(value)}
        if cls is bool or value is None:
            return value
        if cls is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if path[0] > _MOST_LEVELS:
            raise NotStorable(f"{_shown(path)} is more than {_MOST_LEVELS} levels deep, or contains itself: flatten it")
        if not self.exact or isinstance(value, _NEVER_SHARED):
            return self._compound(value, path)
        place = id(value)
        met = self._met.get(place)
        if met is None:
            self._kept.append(value)  # keep the value alive, so that no other object gets its id
            self._met[place] = path
            self._met[place] = structure = self._compound(value, path)
            return structure
        if type(met) is tuple:
            raise NotStorable(f"{_shown(path)} is {_shown(cast('_Path', met))}, which contains it: break the cycle")
        self.again.add(id(met))
        return met

    def _text(self, value: str, path: _Path) -> Any:
        if not is_text(value):  # JSON would join two lone surrogates into one character
            return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
        return value if len(value) <= self._most_characters else self._cut(path, "text", value)

    def _compound(self, value: Any, path: _Path) -> Any:
        cls = cast("Any", type(value))
        if cls is list:
            return self._items(value, path)
        if cls is dict:
            return self._dict(value, path)
        if cls is tuple:
            return {"$tuple": self._items(value, path)}
        if cls in (set, frozenset):  # sorted by JSON, an order that does not depend on the process
            members = [self.value(one, (path[0] + 1, path, "[{}]", number)) for number, one in enumerate(value)]
            return {f"${cls.__name__}": sorted(members, key=json_text)}
        if cls in (bytes, bytearray):
            long = len(value) > _MOST_INLINE_BYTES
            return {f"${cls.__name__}": [self._apart(bytes(value), path)] if long else _base64(value)}
        if cls is complex:
            return {"$complex": [self.value(value.real, path), self.value(value.imag, path)]}
        return self._array(value, path) or self._instance(value, path) or _written(value) or _refuse(value, path)

    def _items(self, values: Any, path: _Path) -> Any:
        if self.cut is not None and len(values) > _MOST_ITEMS:
            return self._cut(path, "list", list(values))
        below, encode_one = path[0] + 1, self.value
        return [encode_one(value, (below, path, "[{}]", number)) for number, value in enumerate(values)]

    def _cut(self, path: _Path, kind: str, value: Any) -> dict[str, Any]:
        """Return what the caller makes of a long value."""
        assert self.cut is not None

        def encoded(number: int) -> Encoded:
            # An item has names of its own: its bytes must not depend on its place.
            place = value[number & ~1] if kind == "dict" else number
            encoder = _Encoder(self.copy, False, self.splits, self.known, self.cut)
            structure = encoder.value(value[number], (path[0] + 1, None, _shown((0, path, "[{}]", place)), None))
            return Encoded(structure, encoder.arrays)

        return {"$cut": self.cut(lambda: _shown(path), kind, value, encoded)}

    def _dict(self, values: dict[Any, Any], path: _Path) -> dict[str, Any]:
        if self.cut is not None and len(values) > _MOST_ITEMS:
            return self._cut(path, "dict", [one for pair in values.items() for one in pair])
        below, encode_one = path[0] + 1, self.value
        for key in values:
            if type(key) is not str or key[:1] == "$" or not (key.isascii() or is_text(key)):
                break
        else:
            return {key: encode_one(value, (below, path, "[{}]", key)) for key, value in values.items()}
        pairs = ((key, (below, path, "[{}]", key), value) for key, value in values.items())
        return {"$dict": [[encode_one(key, place), encode_one(value, place)] for key, place, value in pairs]}

    def _apart(self, array: Any, path: _Path) -> Any:
        if self.cut is not None and (len(array) if isinstance(array, bytes) else array.nbytes) > _MOST_BYTES:
            return self._cut(path, "bytes", memoryview(_bytes_of(array)))
        name = _shown(path, "state")
        while name in self.arrays:  # two different keys may be written in the same way
            name += "'"
        self.arrays[name] = array
        return name

    def _copied(self, array: Any, copy: Callable[[], Any]) -> Any:
        known, made = self.known.get(id(array), (None, None))
        if known is not array:
            made = copy()
            self.copied_bytes += made.nbytes
        self.copies[id(array)] = array, made
        return made

    def _array(self, value: Any, path: _Path) -> dict[str, Any] | None:
        numpy, jax = cast("Any", sys.modules.get("numpy")), cast("Any", sys.modules.get("jax"))
        if numpy is None:
            return None
        if type(value) is numpy.ndarray:
            order = "K" if self.exact else "C"
            array = self._copied(value, lambda: numpy.array(value, order=order)) if self.copy else value
            axes = None
            if self.exact and not array.flags.c_contiguous:
                axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
                array = array.transpose(axes)
            content: list[Any] = [self._apart(array, path), _named(value.dtype, path), list(array.shape)]
            return {"$array": content} if axes is None else {"$axes": [content, axes]}
        if isinstance(value, numpy.generic):
            scalar = numpy.asarray(value)
            return {"$scalar": [_base64(_bytes_of(scalar)), _named(scalar.dtype, path)]}
        if isinstance(value, numpy.dtype):
            return {"$dtype": _named(value, path)}
        if jax is None or not isinstance(value, jax.Array):
            return None
        if isinstance(value, jax.core.Tracer) or value.is_deleted():
            raise NotStorable(
                f"{_shown(path)} is an array of JAX without values: it is traced, or was donated; keep another array"
            )
        if not self.splits and not value.sharding.is_fully_replicated:
            raise NotStorable(
                f"{_shown(path)} is split over {len(value.devices())} devices, and it is not known where it belongs "
                "after a restart, when the mesh may be another one: split batches with data.to_device(mesh, specs)"
            )
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(value) if is_key else value
        name = self._apart(self._copied(value, lambda: _fetched(array)) if self.copy else array, path)
        self.on_devices[str(name)] = value
        special = str(jax.random.key_impl(value)) if is_key else bool(value.weak_type)
        content = [name, _named(numpy.dtype(array.dtype), path), list(array.shape), special]
        where = _placement_of(value) if self.exact else None
        return {"$jax": content} if where is None else {"$placed": [content, where]}

    def _instance(self, value: Any, path: _Path) -> dict[str, Any] | None:
        cls = cast("Any", type(value))
        known = _class_of(cls)
        if known is None:
            return None
        if _found(known.place) is not cls:
            raise NotStorable(
                f"{_shown(path)} is a {known.place}, and no import finds that class: define it at the top level of a "
                "module"
            )
        if known.kind == "enum":
            is_flag = isinstance(value, enum.Flag)  # a combination of several members has no name
            return {"$enum": [known.place, self.value(value.value if is_flag else value.name, path)]}
        if known.kind == "error":
            return self._error(value, known, path)
        held: dict[str, Any] = getattr(value, "__dict__", {})
        extra = {
            name
            for name in held.keys() - set(known.fields)
            if not name.startswith("__") and not isinstance(getattr(cls, name, None), functools.cached_property)
        }
        missing = [name for name in known.fields if not hasattr(value, name)]
        if extra or missing:
            raise NotStorable(
                f"{_shown(path)}, a {known.place}, has {'no' if missing else 'an'} attribute "
                f"{(missing or sorted(extra))[0]!r}: only its fields are stored, and all of them have to be there; "
                "declare it with field(init=False)"
            )
        rest: dict[str, Any] = {}
        if known.kind == "model":
            rest = {key: part for key, part in value.__getstate__().items() if key != "__dict__"}
        below = path[0] + 1
        fields = {name: self.value(getattr(value, name), (below, path, ".{}", name)) for name in known.fields}
        return {"$instance": [known.place, self.value(known.version, path), fields, self.value(rest, path)]}

    def _error(self, value: Any, known: _Class, path: _Path) -> dict[str, Any] | None:
        """Return the stored form of an error: its arguments, and attributes that were set later; no traceback."""
        make, args, *rest = cast("tuple[Any, ...]", value.__reduce__())
        held: dict[str, Any] = dict(*rest)
        # Other attributes that begin with an underscore are internal, such as the place of the error's item.
        held = {key: one for key, one in held.items() if key == "__notes__" or not key.startswith("__")}
        try:
            if make is not type(value) or str(_error_of(make, args, held)) != str(value):
                return None
        except (TypeError, ValueError, AttributeError):  # the error cannot be made again
            return None
        fields = {"args": self.value(args, (path[0] + 1, path, ".{}", "args"))}
        return {"$instance": [known.place, self.value(known.version, path), fields, self.value(held, path)]}


def _error_of(cls: Any, args: Any, held: Any) -> Any:
    """Return an error without a call of the `__init__` of its class."""
    made = cls.__new__(cls, *args)
    made.__setstate__(held)
    return made


def _numbered(structure: Any, again: set[int], numbers: dict[int, int]) -> Any:
    """Return a structure in which a repeated object is written once, with a number, and then named by that number."""
    place = id(structure)
    if place in numbers:
        return {"$same": numbers[place]}
    if place in again:
        numbers[place] = len(numbers)
    cls, made = cast("Any", type(structure)), structure
    if cls is list:
        made = [_numbered(one, again, numbers) for one in structure]
    elif cls is dict:
        made = {key: _numbered(one, again, numbers) for key, one in structure.items()}
    return {"$shared": [numbers[place], made]} if place in again else made


def _written(value: Any) -> dict[str, Any] | None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind not in _WRITTEN:
        return None
    text = value.isoformat() if kind.startswith("datetime") else str(value)
    # A time zone with a name would become a fixed offset, although its rules may change.
    return {"$written": [kind, text]} if repr(_read_again(kind, text)) == repr(value) else None


def _read_again(kind: str, text: str) -> Any:
    make: Any = pkgutil.resolve_name(_WRITTEN[kind])
    return make(text)


def _refuse(value: object, path: _Path) -> Any:
    cls = type(value)
    raise NotStorable(
        f"{_shown(path)} is a {cls.__module__}.{cls.__qualname__}, which cannot be stored: give its content as JSON "
        "values, bytes, tuples, sets, arrays, or as an instance of an enum, a named tuple, a dataclass or a model "
        "of pydantic"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _shown(path: _Path, root: str | None = None) -> str:
    _, parent, form, part = path
    if parent is None:
        return root or form
    return _shown(parent, root) + form.format(json.dumps(part) if type(part) is str and form == "[{}]" else part)


class _Decoder:
    def __init__(self, encoded: Encoded, template: object, joined: Callable[[Any], Any] | None) -> None:
        self._arrays = encoded.arrays
        self._joined = joined
        self._shared: dict[int, Any] = {}
        self._jax_module: Any = None if template is None else sys.modules.get("jax")
        self._on_devices: dict[str, Any] = {}
        if self._jax_module is not None:
            encoder = _Encoder()
            encoder.value(template, (0, None, "state", None))
            self._on_devices = encoder.on_devices

    def value(self, structure: Any) -> Any:
        cls = cast("Any", type(structure))
        if cls is list:
            return [self.value(one) for one in structure]
        if cls is not dict:
            return structure
        if len(structure) == 1:
            ((tag, content),) = structure.items()
            if tag.startswith("$"):
                if tag not in _READERS:
                    raise CheckpointError(
                        f"unknown type {tag!r}: read the value with the version of Penstock that wrote it"
                    )
                return _READERS[tag](self, content)
        return {key: self.value(one) for key, one in structure.items()}

    def _bytes(self, content: Any) -> bytes:
        return base64.b64decode(content) if type(content) is str else bytes(self._stored(content[0]))

    def _stored(self, name: Any) -> Any:
        return self._arrays[name] if type(name) is str else self.value(name)

    def _cut(self, content: Any) -> Any:
        if self._joined is None:
            raise CheckpointError("the value was cut into parts, which are missing: read it with its parts")
        return self._joined(content)

    def _array(self, content: Any, axes: Any = ()) -> Any:
        name, dtype, shape = content
        template = self._on_devices.get(name) if type(name) is str else None
        if template is None or template.dtype != _dtype_of(dtype):
            return _array_of(self._stored(name), dtype, shape, axes)
        # The array came from a value that was decoded without a template.
        return self._jax([*content, template.weak_type], axes=axes)

    def _share(self, content: Any) -> Any:
        number, structure = content
        self._shared[number] = value = self.value(structure)
        return value

    def _jax(self, content: Any, where: Any = None, axes: Any = ()) -> Any:
        name, dtype, shape, special = content
        host = _array_of(self._stored(name), dtype, shape, axes)
        if self._jax_module is None and type(special) is bool:
            return host
        jax: Any = importlib.import_module("jax")
        template = self._on_devices.get(name) if type(name) is str else None
        sharding = template.sharding if template is not None and template.committed else None
        if template is None and where is not None:
            template, sharding = host, _sharding_at(where)
        if type(special) is str:
            key = jax.random.wrap_key_data(host, impl=special)
            return key if sharding is None else jax.device_put(key, sharding)
        fits = sharding is not None and getattr(template, "shape", None) == host.shape
        array = jax.device_put(host, sharding) if fits else jax.numpy.asarray(host)
        if array.dtype != host.dtype:
            raise CheckpointError(f"{name} has the dtype {host.dtype}, which JAX has only with jax_enable_x64=True")
        if not special:
            return array
        # The array is weakly typed; `jax.numpy.asarray` has no argument for that.
        return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)

    def _enum(self, content: Any) -> Any:
        place, member = content
        cls: Any = _known_class(place, "enum")[0]
        try:
            return cls[member] if type(member) is str else cls(self.value(member))
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{place} has lost its member {member!r}") from error

    def _instance(self, content: Any) -> Any:
        place, version, stored, rest = content
        cls, known = _known_class(place, "dataclass, named tuple, model or error")
        fields = {name: self.value(one) for name, one in stored.items()}
        if self.value(version) != known.version or set(fields) != set(known.fields):
            raise CheckpointError(
                f"{place} has changed since an instance was stored: the class had the fields {sorted(fields)} and the "
                f"__version__ {version}, and has the fields {sorted(known.fields)} and the __version__ {known.version}"
            )
        if known.kind == "named tuple":
            return cast("Any", tuple).__new__(cls, (fields[name] for name in known.fields))
        if known.kind == "error":
            return _error_of(cls, fields["args"], self.value(rest))
        made: Any = cls.__new__(cls) if known.kind == "model" else object.__new__(cls)
        if known.kind == "model":
            made.__setstate__({"__dict__": fields, **self.value(rest)})
        else:
            for name, one in fields.items():
                object.__setattr__(made, name, one)  # the `__setattr__` of a frozen class would refuse
        return made


def _known_class(place: str, kind: str) -> tuple[Any, _Class]:
    """Return the class of stored instances, and its description."""
    found = _found(place)
    known = _class_of(found) if isinstance(found, type) else None
    if known is None or (known.kind == "enum") != (kind == "enum"):
        raise CheckpointError(
            f"{place} is not the {kind} of which instances were stored: keep the class in its module, under its name"
        )
    return found, known


def _array_of(data: Any, dtype: str, shape: Any, axes: Any = ()) -> Any:
    # If the value was not written to bytes in between, the decoded array is a copy: the encoded value keeps its own.
    own = data if isinstance(data, bytearray) else bytearray(_bytes_of(data))
    array = _numpy().ndarray(shape, _dtype_of(dtype), own)
    return array.transpose(_numpy().argsort(axes)) if axes else array


def _named(dtype: Any, path: _Path) -> str:
    """Return the name of a dtype of NumPy or ml_dtypes."""
    name = _name_of(dtype)
    if name is None:
        raise NotStorable(f"{_shown(path)} has the dtype {dtype!r}, which has no bytes of its own: give it as a list")
    return name


@functools.lru_cache(maxsize=256)
def _name_of(dtype: Any) -> str | None:
    if dtype.hasobject or dtype.kind == "T":
        return None
    if dtype.type.__module__.startswith("ml_dtypes"):
        name: str = dtype.name
    else:
        name = repr(_numpy().lib.format.dtype_to_descr(dtype)) if dtype.kind == "V" else dtype.str
    return name if _dtype_of(name) == dtype else None


@functools.lru_cache(maxsize=256)
def _dtype_of(name: str) -> Any:
    numpy = _numpy()
    if name[0] in "<>|=":
        return numpy.dtype(name)
    if name[0] in "['":
        return numpy.lib.format.descr_to_dtype(ast.literal_eval(name))
    return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'arrays were stored, and NumPy is not installed: pip install "penstock[data]"', name=error.name
        ) from error


# By tag: the function that decodes the content behind it.
_READERS: Final[Mapping[str, Callable[[_Decoder, Any], Any]]] = {
    "$array": _Decoder._array,
    "$axes": lambda self, content: self._array(*content),
    "$bytearray": lambda self, content: bytearray(self._bytes(content)),
    "$bytes": _Decoder._bytes,
    "$complex": lambda self, parts: complex(*map(self.value, parts)),
    "$cut": _Decoder._cut,
    "$dict": lambda self, pairs: {self.value(key): self.value(value) for key, value in pairs},
    "$dtype": lambda _, name: _dtype_of(name),
    "$enum": _Decoder._enum,
    "$float": lambda _, text: float(text),
    "$frozenset": lambda self, values: frozenset(map(self.value, values)),
    "$instance": _Decoder._instance,
    "$int": lambda _, text: int(text, 16),
    "$jax": _Decoder._jax,
    "$placed": lambda self, content: self._jax(*content),
    "$same": lambda self, number: self._shared[number],
    "$scalar": lambda _, content: _array_of(base64.b64decode(content[0]), content[1], ())[()],
    "$set": lambda self, values: set(map(self.value, values)),
    "$shared": _Decoder._share,
    "$str": lambda _, text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "$tuple": lambda self, values: tuple(self.value(values)),
    "$written": lambda _, content: _read_again(*content),
}
