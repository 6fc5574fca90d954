"""Values as entries keep them: long ones are cut into parts, and a part that was kept before is named, not kept again.

A list or dict of many items is a tree. Its leaves are cells, one for each item (of a dict, keys and values alternate):
a short item itself, or the name of the part with the item. Cells are joined to nodes of about 32, and the node ends
behind a cell whose digest says so; nodes are cells of the next level. So a change at any place changes one node of each
level. Long text and long bytes are trees of pieces.

A part is named by the number of its entry and its own number there; 0 is the root of the value. Parts of other runs of
the thread have the number of the run besides.
"""

import json
import marshal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from .._errors import NotStorable
from ..extension import Encoded, decode, encode
from .store import Entry, Store

_PIECE_CHARACTERS: Final = 1 << 9
_PIECE_BYTES: Final = 64 << 10
# A shorter item is part of its cell.
_INLINE_BYTES: Final = 64
# A node ends behind a cell of which the first byte of the digest is below this, which one of 32 is. It has at least
# four cells, so that each level is smaller than the level below.
_ENDS_BELOW: Final = 8
_LEAST_CELLS: Final = 4
_MOST_CELLS: Final = 128
# A longer key of an item is replaced by its digest, so that texts are not in memory twice.
_MOST_KEY_BYTES: Final = 2 << 10
# Parts that no value has used lately are forgotten.
_LEAST_KNOWN: Final = 4096

_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))


class Codec(Protocol):
    """Encrypts or compresses what a store keeps: `Durable(codec=)`. Both methods may be called in any thread."""

    def encode(self, data: bytes, /) -> bytes:
        """Return the bytes for the store."""
        ...

    def decode(self, data: bytes, /) -> bytes:
        """Return the bytes that were given to `encode`."""
        ...


class _Cell(NamedTuple):
    """An item, a piece or a node, as a node writes it.

    Attributes:
        code: the item itself, or the name of its part.
        digest: the digest of the content.
        size: how many bytes the content takes, with all parts below.
        is_plain: whether the content has only values whose `marshal.dumps` tells them apart.
    """

    code: bytes
    digest: bytes
    size: int
    is_plain: bool


class Values:
    """Encodes and decodes the values of one run. It is used by one thread at a time.

    Each encoded value has to be written, or everything behind it has to be dropped: later values name its parts.

    Args:
        codec: encrypts or compresses.
        max_value_bytes: the most bytes of a value.
    """

    def __init__(self, codec: Codec | None = None, max_value_bytes: int = 64 << 20) -> None:
        self._codec = codec
        self._max_value_bytes = max_value_bytes
        self._rows: dict[tuple[int, int], Entry | list[bytes]] = {}
        # By the content of an item, a piece or a node: its cell. Two generations, the second one with what was not
        # used lately.
        self._known: dict[object, _Cell] = {}
        self._older: dict[object, _Cell] = {}
        self._most_used = 0

    def encode(self, value: object, name: str, seq: int, *, anew: bool = False) -> tuple[bytes, bytes | None]:
        """Return the root of a value and its new parts, as the fields `value` and `parts` of an `Entry`.

        Args:
            value: the value.
            name: its name in errors.
            seq: the number of the entry.
            anew: whether parts of earlier entries are kept again, so that these entries can be dropped.

        Raises:
            NotStorable: the value or a part of it cannot be stored, or is too large; the message names it.
        """
        if anew:
            self._known, self._older = {}, {}
        cutting = _Cutting(self, seq)
        root = cutting.root(value, name)
        if len(root) + cutting.size > self._max_value_bytes:
            raise self._too_large(name, len(root) + cutting.size)
        self._known.update(cutting.added)
        self._most_used = max(self._most_used, cutting.used)
        if len(self._known) > 2 * self._most_used + _LEAST_KNOWN:
            self._known, self._older, self._most_used = {}, self._known, 0
        parts = b"".join(b"".join((_number(len(part)), part)) for part in cutting.parts)
        return self.coded(root), self.coded(parts) if parts else None

    def whole(self, data: bytes) -> Any:
        """Return a value that was kept without parts: a question, an answer or an error."""
        return decode(Encoded.from_bytes(self.plain(data)))

    def coded(self, data: bytes) -> bytes:
        """Return bytes as the codec wants them in the store, such as those of a question."""
        return data if self._codec is None else self._codec.encode(data)

    def plain(self, data: bytes) -> bytes:
        """Return the bytes that were given to `coded`."""
        return data if self._codec is None else self._codec.decode(data)

    def add(self, entries: Iterable[Entry], run: int = 0) -> None:
        """Add entries whose values are decoded, or are named by values.

        Args:
            entries: the entries.
            run: the number of the run; 0 for the run itself.
        """
        for entry in entries:
            self._rows[run, entry.seq] = entry

    def decode(self, seq: int, run: int = 0) -> Any:
        """Return the value of an entry that was added. Its parts are known from now on.

        Raises:
            MissingEntries: other entries have to be added first.
            CheckpointError: a class is gone or has changed; see `penstock.extension.decode`.
        """
        joining, value = _Joining(self), None
        try:
            value = joining.value(run, seq, 0)
        except Exception:  # without some parts, any class may refuse its fields
            if not joining.missing:
                raise
        if joining.missing:
            raise MissingEntries(joining.missing)
        self._known.update(joining.learned)
        self._most_used = max(self._most_used, len(joining.learned))
        return value

    async def read(self, store: Store, run: int, seq: int, *, of_this_run: bool = True) -> Any:
        """Return the value of an entry, with entries from the store as they are needed.

        Args:
            store: the store.
            run: the number of the run.
            seq: the number of the entry.
            of_this_run: whether it is the run whose values these are.
        """
        wanted: Collection[tuple[int, int]] = [(0 if of_this_run else run, seq)]
        while True:
            for number in {number for number, _ in wanted}:
                found = await store.load(number or run, [seq for one, seq in wanted if one == number])
                self.add(found, number)
            try:
                return self.decode(seq, 0 if of_this_run else run)
            except MissingEntries as missing:
                if missing.entries == wanted:
                    raise
                wanted = missing.entries

    def named_by(self, seqs: Collection[int]) -> set[int]:
        """Return the numbers of these entries of the run, and of all entries that their values need."""
        needed: set[int] = set()
        joining = _Joining(self)
        for seq in seqs:
            joining.value(0, seq, 0)
        needed.update(row for run, row in joining.rows if run == 0)
        return needed

    def part(self, run: int, row: int, number: int) -> bytes | None:
        """Return a part; None if its entry was not added."""
        found = self._rows.get((run, row))
        if found is None:
            return None
        if isinstance(found, Entry):
            assert found.value is not None
            found = [self.plain(found.value), *_split(self.plain(found.parts or b""))]
            self._rows[run, row] = found
        return found[number]

    def known(self, key: object) -> _Cell | None:
        """Return the cell of this content, if it was kept."""
        found = self._known.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self._known[key] = found
        return found

    def _too_large(self, name: str, size: int) -> NotStorable:
        return NotStorable(
            f"{name} takes {size:,} bytes, and max_value_bytes is {self._max_value_bytes:,}: keep large data somewhere "
            "else, and give its name here; or raise Durable(max_value_bytes=)"
        )


class MissingEntries(Exception):
    """Entries that have to be added before a value can be decoded.

    Attributes:
        entries: their runs, 0 for the run itself, and their numbers.
    """

    def __init__(self, entries: set[tuple[int, int]]) -> None:
        self.entries = entries
        super().__init__(f"{len(entries)} entries are missing, such as {min(entries)}")


class _Cutting:
    """Encodes one value.

    Attributes:
        parts: its new parts.
        added: the cells of its new parts and short items, by their content.
        used: how many cells it has.
        size: how many bytes all cut values take that the item at hand has, or the whole value.
    """

    _is_plain: bool

    def __init__(self, values: Values, seq: int) -> None:
        self._values = values
        self._seq = seq
        self.parts: list[bytes] = []
        self.added: dict[object, _Cell] = {}
        self.used = 0
        self.size, self._cuts, self._is_plain = 0, 0, True

    def root(self, value: object, name: str) -> bytes:
        data, is_plain = self._data(encode(value, name, cut=self._cut))
        if is_plain and not self._cuts and len(data) > _INLINE_BYTES:
            cell = _Cell(_named(0, self._seq, 0), _digest(data), len(data), True)
            self.added[_key(value)] = self.added[b"\xff" + cell.digest] = cell
        return data

    def _data(self, encoded: Encoded) -> tuple[bytes, bool]:
        """Return an encoded item as bytes, and whether it is plain."""
        if encoded.arrays:
            return b"a" + encoded.to_bytes(), False
        text = _json.encode(encoded.structure)
        return b"j" + text.encode(), self._is_plain and text.count('"$') == self._cuts

    def _cut(self, path: Callable[[], str], kind: str, value: Any, encoded: Callable[[int], Encoded]) -> list[Any]:
        """Return JSON for a long value, which names its tree."""
        if kind == "text":
            pieces = (value[at : at + _PIECE_CHARACTERS] for at in range(0, len(value), _PIECE_CHARACTERS))
            cells = [self._found(piece) or self._piece(piece, b"t" + piece.encode(), True) for piece in pieces]
        elif kind == "bytes":
            pieces = (b"b" + bytes(value[at : at + _PIECE_BYTES]) for at in range(0, len(value), _PIECE_BYTES))
            keys = ((b"\xff" + _digest(piece), piece) for piece in pieces)
            cells = [self._found(key) or self._piece(key, piece, False) for key, piece in keys]
        else:
            cells = [self._item(number, item, encoded) for number, item in enumerate(value)]
        size = sum(cell.size for cell in cells)
        if size > self._values._max_value_bytes:
            raise self._values._too_large(path(), size)
        level = 0
        while True:
            nodes = [self._node(level, chunk) for chunk in _chunks(cells)]
            if len(nodes) == 1:
                break
            cells, level = nodes, level + 1
        self.size += size
        self._cuts += 1
        self._is_plain = self._is_plain and nodes[0].is_plain
        (name,) = _names(nodes[0].code)
        run, *place = name
        return [kind, *place, run] if run else [kind, *place]

    def _found(self, key: object) -> _Cell | None:
        self.used += 1
        return self._values.known(key) or self.added.get(key)

    def _item(self, number: int, item: object, encoded: Callable[[int], Encoded]) -> _Cell:
        try:
            key = _key(item)
        except ValueError:  # `marshal` does not know its type
            key = None
        found = None if key is None else self._found(key)
        if found is not None:
            return found
        outer = self.size, self._cuts, self._is_plain
        self.size, self._cuts, self._is_plain = 0, 0, True
        data, is_plain = self._data(encoded(number))
        size = len(data) + self.size
        self.size, self._cuts, self._is_plain = outer
        of_data = b"\xff" + _digest(data)
        # For an item that is not plain, `marshal` may have written another type in the same way.
        found = self._found(of_data) or self._piece(of_data, data, is_plain, size)
        if is_plain and key is not None:
            self.added[key] = found
        return found

    def _piece(self, key: object, data: bytes, is_plain: bool, size: int = 0) -> _Cell:
        """Keep a new part, or a short item in its cell."""
        is_short = data[:1] == b"j" and len(data) <= _INLINE_BYTES
        code = _number((len(data) - 1) << 2) + data[1:] if is_short else self._part(data)
        self.added[key] = cell = _Cell(code, _digest(data), size or len(data), is_plain)
        return cell

    def _node(self, level: int, cells: Sequence[_Cell]) -> _Cell:
        key = bytes([level]) + b"".join([cell.digest for cell in cells])
        found = self._found(key)
        if found is None:
            code = self._part(bytes([level]) + b"".join([cell.code for cell in cells]))
            is_plain = all(cell.is_plain for cell in cells)
            found = self.added[key] = _Cell(code, _digest(key), sum(cell.size for cell in cells), is_plain)
        return found

    def _part(self, data: bytes) -> bytes:
        """Keep a new part; return its name."""
        self.parts.append(data)
        return _named(0, self._seq, len(self.parts))


class _Joining:
    """Decodes values, and learns the cells of their parts.

    Attributes:
        missing: entries that were not added.
        rows: entries that were read.
        learned: the cells of all parts, by their content.
    """

    _is_plain: bool

    def __init__(self, values: Values) -> None:
        self._values = values
        self.missing: set[tuple[int, int]] = set()
        self.rows: set[tuple[int, int]] = set()
        self.learned: dict[object, _Cell] = {}
        self._size, self._cuts, self._is_plain = 0, 0, True

    def value(self, run: int, row: int, number: int) -> Any:
        """Return the value of an entry."""
        data = self._part(run, row, number)
        if data is None:
            return None
        value, cell = self._item(run, data, _named(run, row, number))
        if not self._cuts and len(data) > _INLINE_BYTES:
            self._learn(value, data, cell)
        return value

    def _part(self, run: int, row: int, number: int) -> bytes | None:
        self.rows.add((run, row))
        data = self._values.part(run, row, number)
        if data is None:
            self.missing.add((run, row))
        return data

    def _item(self, run: int, data: bytes, code: bytes) -> tuple[Any, _Cell]:
        """Return an item and its cell. Afterwards, `_cuts` counts the cut values in it."""
        self._size, self._cuts, self._is_plain = 0, 0, True
        tags = -1
        if data[:1] == b"a":
            value = decode(Encoded.from_bytes(data[1:]), joined=lambda content: self._joined(run, content))
        else:
            text = data[1:].decode()
            value, tags = json.loads(text), text.count('"$')
            if tags:
                value = decode(Encoded(value, {}), joined=lambda content: self._joined(run, content))
        return value, _Cell(code, _digest(data), len(data) + self._size, self._is_plain and tags == self._cuts)

    def _learn(self, value: object, data: bytes, cell: _Cell) -> None:
        self.learned[b"\xff" + cell.digest] = cell
        if cell.is_plain:
            self.learned[_key(value)] = cell

    def _joined(self, run: int, content: list[Any]) -> Any:
        """Return the long value that this JSON names."""
        kind, row, number, *other = content
        outer = self._size, self._cuts, self._is_plain
        items: list[Any] = []
        node = self._node(other[0] if other else run, row, number, items)
        size, cuts, is_plain = outer
        self._size, self._cuts, self._is_plain = size + node.size, cuts + 1, is_plain and node.is_plain
        if kind == "text":
            return "".join(items)
        if kind == "bytes":
            return bytearray().join(items)
        return items if kind == "list" else dict(zip(items[::2], items[1::2], strict=True))

    def _node(self, run: int, row: int, number: int, items: list[Any]) -> _Cell:
        """Append the items below a node; return the cell of the node."""
        code = _named(run, row, number)
        data = self._part(run, row, number)
        if data is None:
            return _Cell(code, b"", 0, False)
        level = data[0]
        cells: list[_Cell] = []
        for name in _names(data[1:]):
            if isinstance(name, bytes):
                cells.append(self._leaf(run, b"j" + name, _number(len(name) << 2) + name, items))
                continue
            place = name[0] or run, *name[1:]
            if level:
                cells.append(self._node(*place, items))
                continue
            data = self._part(*place)
            if data is not None:
                cells.append(self._leaf(place[0], data, _named(*place), items))
        key = bytes([level]) + b"".join([cell.digest for cell in cells])
        is_plain = all(cell.is_plain for cell in cells)
        self.learned[key] = cell = _Cell(code, _digest(key), sum(cell.size for cell in cells), is_plain)
        return cell

    def _leaf(self, run: int, data: bytes, code: bytes, items: list[Any]) -> _Cell:
        """Append an item or a piece; return its cell."""
        if data[:1] == b"t":
            piece = data[1:].decode()
            self.learned[piece] = cell = _Cell(code, _digest(data), len(data), True)
            items.append(piece)
        elif data[:1] == b"b":
            cell = _Cell(code, _digest(data), len(data), False)
            self.learned[b"\xff" + cell.digest] = cell
            items.append(data[1:])
        else:
            value, cell = self._item(run, data, code)
            self._learn(value, data, cell)
            items.append(value)
        return cell


def _key(item: Any) -> bytes:
    """Return bytes that are equal only for equal items, if one of them is plain: see `_Cell.is_plain`.

    Raises:
        ValueError: `marshal` does not know a type.
    """
    # Version 2 writes neither references nor whether a text is interned, so equal items give equal bytes.
    key = marshal.dumps(item, 2)
    return key if len(key) <= _MOST_KEY_BYTES else b"\xfe" + _digest(key)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _chunks(cells: Sequence[_Cell]) -> Iterator[Sequence[_Cell]]:
    """Yield the cells of one node after the other."""
    begin, end = 0, _LEAST_CELLS
    while end < len(cells):
        if cells[end - 1].digest[0] < _ENDS_BELOW or end - begin == _MOST_CELLS:
            yield cells[begin:end]
            begin, end = end, end + _LEAST_CELLS
        else:
            end += 1
    yield cells[begin:]


def _number(value: int) -> bytes:
    """Return a whole number in groups of seven bits, the lowest first; all but the last have their highest bit set."""
    if value < 0x80:
        return bytes([value])
    groups = bytearray()
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it."""
    value, shift = data[at] & 0x7F, 7
    while data[at] >= 0x80:
        at += 1
        value |= (data[at] & 0x7F) << shift
        shift += 7
    return value, at + 1


def _named(run: int, row: int, number: int) -> bytes:
    """Return the name of a part as a node writes it. The lowest two bits say which kind of cell it is."""
    if run:
        return _number(run << 2 | 2) + _number(row) + _number(number)
    return _number(row << 2 | 1) + _number(number)


def _names(codes: bytes) -> Iterator[bytes | tuple[int, int, int]]:
    """Yield the cells of a node: short items, and the names of parts."""
    at = 0
    while at < len(codes):
        first, at = _read_number(codes, at)
        kind, first = first & 3, first >> 2
        if kind == 0:
            yield codes[at : at + first]
            at += first
            continue
        run, row = 0, first
        if kind == 2:
            run = first
            row, at = _read_number(codes, at)
        number, at = _read_number(codes, at)
        yield run, row, number


def _split(data: bytes) -> Iterator[bytes]:
    """Yield the parts of an entry."""
    at = 0
    while at < len(data):
        size, at = _read_number(data, at)
        yield data[at : at + size]
        at += size
