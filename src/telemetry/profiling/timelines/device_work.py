"""Device work: what a device, or the compiler, did in one piece, as a profile takes it."""

from typing import Literal, NamedTuple, TypeAlias

# Computing a batch or a call; compiling a program; arrays on their way to a device, or from it.
DeviceWorkKind: TypeAlias = Literal["compute", "compile", "to device", "from device"]


class DeviceWork(NamedTuple):
    """What a device, or the compiler, did in one piece.

    Args:
        kind: what it did.
        device: name of the device or mesh; for a program that is compiled, of that which it is compiled for.
        node: name of the node; of a region that became one program, the names of all its nodes.
        began: when it began, in seconds of `time.perf_counter`.
        ended: when it ended.
        items: for how many items; 0 if it was for none in particular.
        rows: of the batch, with those of padding; 0 if it was no batch.
        padding_share: how much of the elements of the batch's arrays was padding, of rows or of lengths: 0 to 1.
        frames: a number for each of the items, as in the executions of nodes; for a large batch, of the first ones.
    """

    kind: DeviceWorkKind
    device: str
    node: str
    began: float
    ended: float
    items: int = 0
    rows: int = 0
    padding_share: float = 0.0
    frames: tuple[int, ...] = ()
