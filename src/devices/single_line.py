"""Single line: runs calls on a device one by one."""

from typing import TYPE_CHECKING

from .device_call import DeviceCall
from .device_queue import Lane
from .jobs import Job, SingleJob

if TYPE_CHECKING:
    from .compiling import Program
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
        job.settle()
        self._station.returned(self.lane)
