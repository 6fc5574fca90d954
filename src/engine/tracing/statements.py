"""Find out whether a call in the body of a graph is a statement of its own, whose value nothing uses.

The answer comes from the bytecode that runs. So it needs no source, and an edit of the file cannot change it.
"""

import sys
from dis import opmap
from types import CodeType
from typing import Final, Literal, TypeAlias


def opcodes(*names: str) -> frozenset[int]:
    """Return the numbers of these operations, as far as this version of Python has them."""
    return frozenset([opmap[name] for name in names if name in opmap])


_CACHE, _EXTENDED_ARG = opmap["CACHE"], opmap["EXTENDED_ARG"]
_GET_AWAITABLE, _SEND = opmap["GET_AWAITABLE"], opmap["SEND"]
_SWAP = opmap["SWAP"]
Way: TypeAlias = Literal["dropped", "returned", "used"]
_ENDS: Final[dict[int, Way]] = {opmap["POP_TOP"]: "dropped", opmap["RETURN_VALUE"]: "returned"}
_BYTES_OF_JUMP = {opmap["SEND"]: 2, opmap["FOR_ITER"]: 2, opmap["JUMP_FORWARD"]: 2, opmap["JUMP_BACKWARD"]: -2}
_STEPPED_OVER = opcodes("END_SEND", "END_FOR", "POP_ITER", "NOP", "NOT_TAKEN", "LIST_APPEND", "SET_ADD", "MAP_ADD")
# The followed value may be below other values, after a SWAP. For each instruction: how many of these values it takes
# off the stack.
_TAKES_OFF = {opmap[name]: count for name, count in {
    "STORE_FAST": 1, "STORE_FAST_STORE_FAST": 2, "POP_TOP": 1, "POP_ITER": 1
}.items() if name in opmap}  # fmt: skip
# In 3.13, the end of a loop has two instructions; the second takes the iterator off the stack.
_END_OF_LOOP = opmap.get("END_FOR") if sys.version_info[:2] == (3, 13) else None


def way_of_value(code: CodeType, at: int) -> Way:
    """Return whether the value that an instruction leaves on top of the stack is dropped, returned or used.

    Args:
        code: the code of the function.
        at: the instruction that runs: a call, or the wait in an `await`.
    """
    raw = code.co_code
    while raw[at] == _CACHE:  # `at` may point to the last cache entry of the running instruction
        at -= 2
    if raw[at] != _SEND:
        at = _next(raw, at)
    above = extended = 0  # how many values a SWAP has put above the followed value
    while True:
        operation, argument, after = raw[at], raw[at + 1] | extended, _next(raw, at)
        extended = 0
        if above > 0 and operation in _TAKES_OFF:
            above -= _TAKES_OFF[operation]
        elif operation in _ENDS:
            return _ENDS[operation] if above == 0 else "used"
        elif operation == _GET_AWAITABLE:
            while raw[after] != _SEND:
                after += 2
        elif operation == _EXTENDED_ARG:
            extended = argument << 8
        elif operation == _SWAP:
            above = argument - 1
        elif operation == _END_OF_LOOP:
            after += 2
        elif operation in _BYTES_OF_JUMP:
            after += _BYTES_OF_JUMP[operation] * argument
        elif operation not in _STEPPED_OVER:
            return "used"
        at = after


def _next(raw: bytes, at: int) -> int:
    """Return the position of the next instruction."""
    at += 2
    while at < len(raw) and raw[at] == _CACHE:
        at += 2
    return at
