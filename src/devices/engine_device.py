"""One device or mesh as one Engine uses it: the nodes on it, and the lines in which their calls wait."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .._errors import DeviceError
from ..actors.batching import Batch
from ..actors.threads import LoopMailbox
from ..telemetry import spans
from .compile_cache import CACHE
from .device_queue import DeviceCall, DeviceQueue, Lane, share
from .dispatch_thread import THREADS
from .failed_batches import Bisection, SizeLimits
from .jobs import BatchItem, BatchJob, BatchLayout, Job, Route, SingleJob, is_out_of_memory
from .parameters import PlacedParameters, SameParameters
from .shardings import Placement
from .stacking import on_host
from .statistics import BatchLog
from .untyped_jax import jax

if TYPE_CHECKING:
    from .arguments import Arguments
    from .compiling import Program
    from .executor import DevicePrograms


# Jobs of one node that the device's thread holds ahead: enough that a burst of tiny kernels does not wait for the loop
# between two of them, few enough that a node that comes later is served soon.
AHEAD = 16


class SingleLine:
    """The calls of one node on one device, one by one.

    Args:
        device: where they run.
        name: of the node.
        program: what it runs; None for what each call brings.
        parameters: positions of the arguments that are parameters.
        limit: the most calls that the device's thread holds.

    Attributes:
        lane: what waits.
    """

    def __init__(
        self,
        device: "EngineDevice",
        name: str,
        program: "Program | None" = None,
        parameters: tuple[int, ...] = (),
        limit: int = AHEAD,
    ) -> None:
        self.lane = Lane(name, device.queue, self._start, None, limit)
        self._device = device
        self._program = program
        self._parameters = parameters

    def _start(self, calls: list[DeviceCall]) -> None:
        program = self._program or calls[0].program
        SingleJob(program, self._device.route, calls[0], self._ended, self._parameters).submit()

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
            f"a call of {job.calls[0].program.name!r} does not fit the memory of {self._device.placement.name}: "
            f"{arguments}"
        )
        found.__cause__ = error
        return found


def described(array: Any) -> str:
    """Return dtype, shape and size of an array."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}], {array.nbytes:,} bytes"


class BatchLine:
    """The batches of one node on one device.

    Args:
        device: where they run.
        program: the vectorised program.
        layout: how calls become its arguments.
        batch: how many run together.
        prefetch: the most batches that the device holds: one runs while the next is transferred.
        log: counts them.
        repeats: whether a batch that failed may run again, in parts.

    Attributes:
        lane: what waits.
        limits: how large its batches may be.
    """

    def __init__(
        self,
        device: "EngineDevice",
        program: "Program",
        layout: BatchLayout,
        batch: Batch,
        prefetch: int,
        log: BatchLog,
        *,
        repeats: bool,
    ) -> None:
        self.lane = Lane(layout.name, device.queue, self._start, batch, prefetch)
        self.limits = SizeLimits(layout.sizes, self.lane.largest)
        self._log = log
        self._device = device
        self._program = program
        self._layout = layout
        self._repeats = repeats

    def _start(self, calls: list[DeviceCall]) -> None:
        is_try = self.limits.begins(calls[0].group, len(calls))
        self.submit(calls, partial(self._ended, partial(self.lane.queue.returned, self.lane, calls), is_try))

    def submit(self, calls: list[DeviceCall], on_over: Callable[[BatchJob], None], size: int | None = None) -> None:
        """Have the device run some calls as a batch of so many rows."""

        def over(job: BatchJob) -> None:
            if job.stacked is not None and job.has_run:
                self._log.add(job.stacked)
            on_over(job)

        BatchJob(self._program, self._device.route, calls, over, self._layout, size).submit()

    def _ended(self, then: Callable[[], None], is_try: bool, job: BatchJob) -> None:
        if job.error is not None and job.has_run and self._repeats and isinstance(job.error, Exception):
            self.try_again(job, then)
            return
        if job.results and job.stacked is not None:
            self.limits.fitted(job.calls[0].group, job.stacked.size, is_try=is_try)
        try:
            job.settle()
        finally:
            then()

    def try_again(self, job: BatchJob, then: Callable[[], None]) -> None:
        """Run a batch that failed in parts, until each of its calls has its result or an error of its own."""
        assert job.error is not None
        if is_out_of_memory(job.error):
            _Halving(self, job, then).go_on()
        else:
            _Search(self, job, then).go_on()

    def exceeded(self, job: BatchJob) -> bool:
        """Note that a batch did not fit the memory of the device; returns whether a smaller one may."""
        assert job.stacked is not None
        return self.limits.exceeded(job.calls[0].group, job.stacked.size)

    @property
    def device(self) -> str:
        """Its name, for errors."""
        return self._device.placement.name

    def describe(self, call: DeviceCall) -> str:
        """Return what a call holds, for an error."""
        item: BatchItem = call.args[0]
        return self._layout.stacker.describe(item.item)


class _Search:
    """Runs a batch that failed again in parts, until the calls that fail are alone."""

    def __init__(self, owner: BatchLine, job: BatchJob, then: Callable[[], None]) -> None:
        error = job.take_error()
        assert isinstance(error, Exception)
        self._owner = owner
        self._then = then
        self._calls = job.calls
        self._size = None if job.stacked is None else job.stacked.size
        self._bisection = Bisection(len(job.calls), error)
        if len(job.calls) == 1:
            job.calls[0].fail(error)

    def go_on(self) -> None:
        """Run the next part; at the end, do what comes then."""
        positions = self._bisection.next_batch()
        if positions:
            # Of the same size, whose program is there.
            self._owner.submit([self._calls[position] for position in positions], self._ended, self._size)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and job.has_run and is_out_of_memory(job.error):
            self._bisection.succeeded()  # its calls are taken care of
            self._owner.try_again(job, self.go_on)
            return
        if isinstance(job.error, Exception):
            self._bisection.failed(job.error)
            if len(job.calls) == 1:
                job.settle()
            else:
                job.take_error()
        else:
            self._bisection.succeeded()
            job.settle()
        self.go_on()


class _Halving:
    """Runs a batch that did not fit the memory of the device again in parts that are smaller."""

    def __init__(self, owner: BatchLine, job: BatchJob, then: Callable[[], None]) -> None:
        self._owner = owner
        self._then = then
        self._group = job.calls[0].group
        self._left: list[DeviceCall] = []
        self._too_large(job)

    def go_on(self) -> None:
        """Run the next part; at the end, do what comes then."""
        owner = self._owner
        if self._left:
            size = owner.limits.size(self._group) or len(self._left)
            part, self._left = self._left[:size], self._left[size:]
            owner.submit(part, self._ended)
        else:
            self._then()

    def _ended(self, job: BatchJob) -> None:
        if job.error is not None and is_out_of_memory(job.error):
            self._too_large(job)
        elif isinstance(job.error, Exception) and job.has_run:
            self._owner.try_again(job, self.go_on)
            return
        else:
            job.settle()
        self.go_on()

    def _too_large(self, job: BatchJob) -> None:
        cause = job.take_error()
        if self._owner.exceeded(job):
            self._left = [*job.calls, *self._left]
            return
        for call in job.calls:
            error = DeviceError(
                f"one item of node {self._owner.lane.name!r} does not fit the memory of "
                f"{self._owner.device}: {self._owner.describe(call)}"
            )
            error.__cause__ = cause
            call.fail(error)


class PlacedNode:
    """One node on one device, or on several that each have a copy: the next free one takes the next call.

    Args:
        devices: where it runs; the first is asked first.
        programs: what is compiled for the node.
        arguments: how its calls become arguments.
        donated: positions of the arguments whose memory the result may take.

    Attributes:
        lane: what waits there.
    """

    def __init__(
        self,
        devices: "tuple[EngineDevice, ...]",
        programs: "DevicePrograms",
        arguments: "Arguments",
        donated: tuple[int, ...] = (),
    ) -> None:
        options = programs.options
        self._loop = devices[0].loop
        self._devices = devices
        self._programs = [programs.program(device.placement, arguments, donated) for device in devices]
        self._arguments = arguments
        self._parameters = [(position, SameParameters()) for position in arguments.parameters]
        self._layout: BatchLayout | None = None
        if options.batch is not None:
            assert arguments.stacker is not None
            self._layout = BatchLayout(
                programs.name, arguments.stacker, arguments.stacked, arguments.shared, arguments.parameters,
                programs.batch_sizes(options.batch, arguments),
            )  # fmt: skip
        lanes = [self._lane(device, program, programs) for device, program in zip(devices, self._programs, strict=True)]
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
            device.compile(program, args)
            for device, program in zip(self._devices, self._programs, strict=True)
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

    def _lane(self, device: "EngineDevice", program: "Program", programs: "DevicePrograms") -> Lane:
        options = programs.options
        if self._layout is None or options.batch is None:
            # What a device holds ahead, no other one can take when it is free.
            limit = max(AHEAD, options.prefetch) if options.replicas == 1 else options.prefetch
            return SingleLine(device, program.name, program, self._arguments.parameters, limit).lane
        return BatchLine(
            device, program, self._layout, options.batch, options.prefetch, programs.batches, repeats=options.pure
        ).lane


class EngineDevice:
    """One device or mesh, as one Engine uses it: a queue, and a lease on the device's thread.

    Attributes:
        placement: which it is.
        loop: where its results go.
        route: the way of jobs to it and back.
        queue: what waits for it.
        others: what waits there beside nodes: functions of `devices.actor`.
    """

    def __init__(self, placement: Placement, mailbox: LoopMailbox, loop: asyncio.AbstractEventLoop) -> None:
        self.placement = placement
        self.loop = loop
        self.route = Route(THREADS.acquire(placement), CACHE, mailbox, PlacedParameters())
        self.queue = DeviceQueue(placement.name, loop)
        self._placed: dict[tuple[DevicePrograms, Arguments, tuple[int, ...]], PlacedNode] = {}
        self.others = SingleLine(self, "devices.actor").lane

    def placed(
        self,
        programs: "DevicePrograms",
        arguments: "Arguments",
        replicas: "tuple[EngineDevice, ...]",
        donated: tuple[int, ...] = (),
    ) -> PlacedNode:
        """Return a node on this device.

        Args:
            programs: of the node.
            arguments: how its calls become arguments.
            replicas: the devices that have a copy of the node; this is the first.
            donated: positions of the arguments whose memory the result may take.
        """
        key = programs, arguments, donated
        if key not in self._placed:
            self._placed[key] = PlacedNode(replicas, programs, arguments, donated)
        return self._placed[key]

    def compile(self, program: "Program", args: tuple[Any, ...]) -> "asyncio.Future[None]":
        """Have a program compiled for such arguments; the future tells when it is, or why it could not be.

        It is not compiled if the future was cancelled before its turn.
        """
        done: asyncio.Future[None] = self.loop.create_future()
        mailbox, wait = self.route.mailbox, spans.waiting()
        trace = None if wait is None else wait.context
        self.route.cache.compile(
            program, args, lambda found: mailbox.post(_tell, done, found), trace, lambda: not done.cancelled()
        )  # fmt: skip
        return done

    async def close(self) -> None:
        """Wait for what runs, and give the lease back."""
        await self.queue.close()
        ended = asyncio.Event()
        THREADS.release(self.placement, lambda: self.route.mailbox.post(ended.set))
        await ended.wait()


def _tell(done: "asyncio.Future[None]", found: object) -> None:
    if done.done():
        return
    if isinstance(found, BaseException):
        done.set_exception(found)
    else:
        done.set_result(None)
