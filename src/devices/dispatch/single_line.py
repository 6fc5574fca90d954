"""Single line: runs calls on a device one by one."""

from typing import TYPE_CHECKING, Any

from ..._errors import DeviceError
from ..untyped_jax import jax
from .device_call import DeviceCall
from .device_queue import Lane
from .jobs import Job, SingleJob
from .memory import is_out_of_memory

if TYPE_CHECKING:
    from ..programs.compiling import Program
    from .station import Station

# Jobs of one node that the device's thread holds ahead: enough that a burst of tiny kernels does not wait for the loop
# between two of them, few enough that a node that comes later is served soon.
AHEAD = 16


class SingleLine:
    """The calls of one node on one device, one by one.

    Args:
        station: the device.
        name: of the node.
        program: what it runs; None for what each call brings.
        parameters: positions of the arguments that are parameters.
        limit: the most calls that the device's thread holds.

    Attributes:
        lane: what waits.
    """

    def __init__(
        self,
        station: "Station",
        name: str,
        program: "Program | None" = None,
        parameters: tuple[int, ...] = (),
        limit: int = AHEAD,
    ) -> None:
        self.lane = Lane(name, station.queue, self._start, None, limit)
        self._station = station
        self._program = program
        self._parameters = parameters

    def _start(self, calls: list[DeviceCall]) -> None:
        program = self._program or calls[0].program
        SingleJob(program, self._station.route, calls[0], self._ended, self._parameters).submit()

    def _ended(self, job: Job) -> None:
        if job.error is not None and is_out_of_memory(job.error):
            job.error = self._too_large(job, job.error)
        try:
            job.settle()
        finally:
            self.lane.queue.returned(self.lane, job.calls)

    def _too_large(self, job: Job, error: BaseException) -> DeviceError:
        arguments = ", ".join(described(leaf) for leaf in jax.tree.leaves(job.calls[0].args) if hasattr(leaf, "shape"))
        found = DeviceError(
            f"a call of {job.calls[0].program.name!r} does not fit the memory of {self._station.placement.name}: "
            f"{arguments}"
        )
        found.__cause__ = error
        return found


def described(array: Any) -> str:
    """Return dtype, shape and size of an array."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}], {array.nbytes:,} bytes"
