"""Device use: one node on one device, for call sites that have the same parameters from resources."""

import asyncio
from typing import TYPE_CHECKING, Any

from .batch_job import BatchLayout
from .batch_line import BatchLine
from .buckets import batch_sizes
from .device_call import DeviceCall
from .single_line import AHEAD, SingleLine
from .stacking import on_host

if TYPE_CHECKING:
    from .device_programs import DevicePrograms
    from .device_queue import Lane
    from .station import Station


class DeviceUse:
    """One node on one device.

    Args:
        station: the device.
        programs: what is compiled for the node.
        resources: parameters whose arguments come from resources.

    Attributes:
        lane: what waits there.
    """

    def __init__(self, station: "Station", programs: "DevicePrograms", resources: frozenset[str]) -> None:
        options = programs.options
        self._loop = station.loop
        self._arguments = arguments = programs.arguments(resources)
        self._program = program = programs.program(station.placement, resources)
        self._station = station
        self._layout: BatchLayout | None = None
        line: SingleLine | BatchLine
        if options.batch is None:
            line = SingleLine(station, programs.name, arguments.parameters, max(AHEAD, options.prefetch))
        else:
            assert arguments.stacker is not None
            self._layout = layout = BatchLayout(
                programs.name, arguments.stacker, arguments.stacked, arguments.shared, arguments.parameters,
                batch_sizes(options.batch),
            )  # fmt: skip
            line = BatchLine(station, program, layout, options.batch, options.prefetch, repeats=options.pure)
        self.lane: Lane = line.lane

    async def compile(self, values: tuple[Any, ...]) -> None:
        """Compile what calls with such arguments need; for a batched node, batches of every size.

        Raises:
            Exception: what the function raised while it was traced.
        """
        variants = [values]
        if self._layout is not None:
            layout = self._layout
            one, _ = self._arguments.item(values)
            stacks = [layout.stacker.stack([on_host(one.item)], size) for size in layout.sizes]
            variants = [layout.arguments(stacked, one.shared) for stacked in stacks]
        compiled = [self._station.compile(self._program, args) for args in variants]
        await asyncio.wait(compiled)
        for future in compiled:
            future.result()

    def call(
        self, values: tuple[Any, ...], priority: int = 0, deadline: float | None = None, *, hands_on: bool = False
    ) -> DeviceCall:
        """Return a call with these arguments, one for each parameter.

        Raises:
            TypeError: the node is batched, and an argument cannot be stacked.
            ValueError: the node is batched, and an argument is too long.
        """
        if self._layout is None:
            return DeviceCall(
                self._loop, self._program, values, hands_on=hands_on, priority=priority, deadline=deadline
            )
        item, group = self._arguments.item(values)
        return DeviceCall(self._loop, self._program, (item,), priority=priority, deadline=deadline, group=group)
