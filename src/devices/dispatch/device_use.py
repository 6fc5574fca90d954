"""Device use: one node on its devices, for call sites that have the same parameters from resources."""

import asyncio
from typing import TYPE_CHECKING, Any

from ..batches.batch_job import BatchLayout
from ..batches.batch_line import BatchLine
from ..batches.stacking import on_host
from .device_call import DeviceCall
from .device_queue import Lane, share
from .same_parameters import SameParameters
from .single_line import AHEAD, SingleLine

if TYPE_CHECKING:
    from ..arguments import Arguments
    from ..device_programs import DevicePrograms
    from ..programs.compiling import Program
    from .station import Station


class DeviceUse:
    """One node on one device, or on several that each have a copy: the next free one takes the next call.

    Args:
        stations: the devices.
        programs: what is compiled for the node.
        arguments: how its calls become arguments.
        donated: positions of the arguments whose memory the result may take.

    Attributes:
        lane: what waits there.
    """

    def __init__(
        self,
        stations: "tuple[Station, ...]",
        programs: "DevicePrograms",
        arguments: "Arguments",
        donated: tuple[int, ...] = (),
    ) -> None:
        options = programs.options
        self._loop = stations[0].loop
        self._stations = stations
        self._programs = [programs.program(station.placement, arguments, donated) for station in stations]
        self._arguments = arguments
        self._parameters = [(position, SameParameters()) for position in arguments.parameters]
        self._layout: BatchLayout | None = None
        if options.batch is not None:
            assert arguments.stacker is not None
            self._layout = BatchLayout(
                programs.name, arguments.stacker, arguments.stacked, arguments.shared, arguments.parameters,
                programs.batch_sizes(options.batch, arguments),
            )  # fmt: skip
        lanes = [
            self._lane(station, program, programs) for station, program in zip(stations, self._programs, strict=True)
        ]
        if len(lanes) > 1:
            share(lanes)
        self.lane = lanes[0]

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
        compiled = [
            station.compile(program, args)
            for station, program in zip(self._stations, self._programs, strict=True)
            for args in variants
        ]
        try:
            await asyncio.wait(compiled)
        finally:
            for future in compiled:
                future.cancel()  # without effect on those that are over
        for future in compiled:
            future.result()

    def call(
        self,
        values: tuple[Any, ...],
        priority: int = 0,
        deadline: float | None = None,
        *,
        hands_on: bool = False,
        label: str | None = None,
    ) -> DeviceCall:
        """Return a call with these arguments, one for each parameter.

        Raises:
            TypeError: the node is batched, and an argument cannot be stacked.
            ValueError: the node is batched, and an argument is too long.
        """
        for position, same in self._parameters:
            value = same.of(values[position])
            if value is not values[position]:
                values = (*values[:position], value, *values[position + 1 :])
        if self._layout is None:
            return DeviceCall(
                self._loop, self._programs[0], values, hands_on=hands_on, priority=priority, deadline=deadline,
                label=label, size_bytes=self._arguments.size_bytes(values),
            )  # fmt: skip
        item, group = self._arguments.item(values)
        size_bytes = sum([array.nbytes for array in item.item.arrays])
        return DeviceCall(
            self._loop, self._programs[0], (item,), priority=priority, deadline=deadline, group=group,
            size_bytes=size_bytes,
        )  # fmt: skip

    def _lane(self, station: "Station", program: "Program", programs: "DevicePrograms") -> Lane:
        options = programs.options
        if self._layout is None or options.batch is None:
            # What a device holds ahead, no other one can take when it is free.
            limit = max(AHEAD, options.prefetch) if options.replicas == 1 else options.prefetch
            return SingleLine(station, program.name, program, self._arguments.parameters, limit).lane
        return BatchLine(
            station, program, self._layout, options.batch, options.prefetch, programs.batches, repeats=options.pure
        ).lane
