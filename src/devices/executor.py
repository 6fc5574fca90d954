"""How device nodes run: the programs of each node, its devices, and the calls of its call sites."""

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakSet

from .._errors import DeviceError, PlanError
from ..actors.execution import Attempt, Bound
from ..engine.node import Execution, as_execution
from ..engine.wiring import call_site
from ..telemetry import names, spans
from .arguments import Arguments, BatchLog, on_host, unwrapped
from .compiling import JittedFunction
from .device_batch import DeviceBatch, PackedBatch, batch_sizes
from .device_pool import DevicePool
from .dispatch import SingleJob
from .engine_device import (
    AHEAD,
    BatchCallQueue,
    CallQueue,
    DetachedDeviceCall,
    DeviceCall,
    EngineDevice,
    SingleCallQueue,
    all_compiled,
    share,
)
from .failed_batches import PartsOfBatch
from .parameter_checks import DeviceOptions
from .parameters import EVERYTHING, LoopState, SameParameters, check_same_shapes, with_same
from .programs import UNSET, holds_array, own_x64, refuse_own_x64
from .recompilation import CompileLog
from .selection import AUTO
from .shardings import Placement, Specs
from .statistics import CompileStatistics
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.node_actor import NodeActor
    from ..engine.node import CallSite, Node, Site
    from ..engine.pools import Pools
    from ..engine.program import Pass
    from ..telemetry.counters import ProgramMemory


C = TypeVar("C", bound=DeviceCall)

# From the arguments that come from resources, by parameter, to the other arguments of items like those that will come.
Samples: TypeAlias = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], ...]]


# The type of the function that finds a batch size: `size_search` imports this module, so it cannot be imported here.
FindSize: TypeAlias = "Callable[[DeviceExecutor, Pools, str, Arguments, tuple[Any, ...]], Awaitable[int]]"


class DeviceExecutor(Execution):
    """Compiles and runs one device node.

    There is a program for each device, and for each set of parameters that come from resources.

    Args:
        name: name of the node.
        fn: the function of the node.
        options: the options of the node.
        passes: the planning passes of device nodes.
        samples: from the values of resources, returns the arguments of items to compile for. By default, it returns
            `sample_input=` of the options.
        members: names of the nodes of a region; empty for a single node.
        find_size: finds the size of a batch by trying, if the options have `max_size="auto"`.

    Attributes:
        batch: how calls are stacked, with the size that was found for "auto"; None if calls are not stacked.
        compile_log: counts the node's own programs.
        batch_log: counts the node's batches.
        projections: executors whose programs give a part of the node's result, by that part.
        regions: the regions that the node is a part of; the plans own them. Their programs count for the node as well.
        specs: how the arguments and the result are split over a mesh.
        runs_many_programs: whether a call runs its program several times, so that no other program can join it or take
            its parts.
        job: makes the job of a call without a batch.

    Raises:
        TypeError: the function cannot be compiled as asked.
    """

    _is_compiled = _gathers = True
    runs_many_programs = False
    job: Callable[..., SingleJob] = SingleJob

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: DeviceOptions,
        passes: "tuple[Pass, ...]",
        samples: Samples | None = None,
        members: tuple[str, ...] = (),
        find_size: "FindSize | None" = None,
    ) -> None:
        self.name = name
        self.fn = fn
        self.options = options
        self.batch = options.batch
        self._passes, self._donates, self._batch = passes, options.donate, options.batch
        self._overwrites = options.donate and options.batch is None
        self._takes_unready = options.batch is None and not self.runs_many_programs  # arrays are not stacked or cut
        self.members = members
        self.find_size = find_size
        self.samples: Samples = samples or (lambda resources: options.sample_input)
        self.compile_log = CompileLog()
        self.batch_log = BatchLog(name)
        self.projections: dict[Hashable, DeviceExecutor] = {}
        self.regions: WeakSet[DeviceExecutor] = WeakSet()
        self._arguments: dict[tuple[frozenset[str], frozenset[str]], Arguments] = {}
        self._jitted: dict[tuple[Placement, tuple[int, ...], tuple[int, ...]], JittedFunction] = {}
        self._made = self.arguments(frozenset()).masks
        self.specs = Specs(name, options.device, self.arguments(frozenset()).names, options.in_specs, options.out_specs)

    def statistics(self) -> CompileStatistics:
        """Return the cost of the node's programs: its own, those for parts of its result, and those of its regions."""
        others = (*self.regions, *self.projections.values())
        return CompileStatistics._total([self.compile_log.statistics(), *[other.statistics() for other in others]])

    def _programs(self) -> "list[ProgramMemory]":
        """Return the memory of the node's compiled programs, including the programs for parts of its result."""
        logs = [self.compile_log, *[other.compile_log for other in self.projections.values()]]
        return [program for log in logs for program in log.programs()]

    def constants(self, site: "CallSite") -> frozenset[str]:
        """Return the parameters of a batched node whose arguments at a call site are passed once, instead of per row.

        Such an argument is an array, or holds arrays, and is the same for all items. A number becomes a row of the
        batch, so that call sites with different numbers share batches. An argument that `in_specs` splits is stacked,
        too: its first axis is that of the batch. With packed rows, several items share a row, so a number is passed
        once.
        """
        batch = self.options.batch
        if batch is None:
            return frozenset()
        arguments = self.arguments(site.resources)
        names = {arguments.names[position] for position in arguments.stacked}
        is_packed = isinstance(batch, PackedBatch)
        if not isinstance(batch, PackedBatch):
            names -= batch.pad_axes.keys()
        found = {
            name
            for name in names & site.constants.keys()
            if self.specs.of(name) is None and (is_packed or holds_array(site.constants[name]))
        }
        # At least one argument must have rows.
        return frozenset(found) if names - site.constants.keys() else frozenset()

    def arguments(self, resources: frozenset[str], constants: frozenset[str] = frozenset()) -> Arguments:
        """Return the `Arguments` of call sites at which these parameters come from resources or are constants."""
        found = self._arguments.get((resources, constants))
        if found is None:
            options = self.options
            found = self._arguments[resources, constants] = Arguments(
                self.name, self.fn, options.static, resources, constants | {*options.shared}, options.batch
            )
        return found

    def jitted(self, placement: Placement, arguments: Arguments, donated: tuple[int, ...] = ()) -> JittedFunction:
        """Return the function to compile for a device and the arguments of calls, some of them donated."""
        # Without a batch, a shared argument is like any other argument; in a batch it has no rows.
        key = placement, arguments.shared if self.options.batch is not None else (), donated
        if key not in self._jitted:
            self._jitted[key] = self._make(placement, arguments, donated)
        return self._jitted[key]

    def batch_sizes(self, batch: DeviceBatch | PackedBatch, arguments: Arguments) -> tuple[int, ...]:
        """Return the sizes that batches are padded to. On a mesh, each size splits evenly over the devices."""
        return batch_sizes(batch, self.specs.row_multiple(arguments.names[i] for i in arguments.stacked))

    def _make(self, placement: Placement, arguments: Arguments, donated: tuple[int, ...]) -> JittedFunction:
        options, specs = self.options, self.specs
        specs.check(placement)
        in_specs = [specs.of(name) for name in arguments.names]
        if arguments.items is not None:
            in_specs += [specs.of_mask(name) for name in arguments.masked]
        if options.batch is None:
            fn = _in_order(self.fn, arguments)
        else:
            fn = (_in_rows if isinstance(options.batch, PackedBatch) else _vectorised)(self.fn, arguments)
        return JittedFunction(
            fn,
            self.name,
            (*arguments.names, *arguments.masks),
            placement,
            donated,
            static_argnums=arguments.static,
            in_specs=tuple(in_specs),
            out_specs=specs.result,
            pure=options.pure,
            bucketed=_bucketed(arguments),
            from_resources=frozenset(arguments.parameters),
            log=self.compile_log,
        )

    @property
    def _place(self) -> str:
        """The device and the size of a batch, for drawings."""
        device, batch = self.options.device, self.batch
        if isinstance(batch, PackedBatch):
            return f"{device}, {batch.rows} rows of {' or '.join(map(str, batch.lengths))}"
        return str(device) if batch is None else f"{device}, up to {batch.max_size}"

    def check(self, node: "Node[..., Any]") -> None:
        """Refuse options that a device node cannot have."""
        policy = node.policy
        if policy.hedge is not None or policy.cache is not None:
            option = "hedge=" if policy.hedge is not None else "cache="
            raise TypeError(
                f"device node {self.name!r} cannot have {option}: move the code that needs the option into a @node"
            )

    def _of_fake(self, node: "Node[..., Any]") -> Execution:
        return as_execution("loop")

    @property
    def ahead(self) -> int:
        """The most calls without a batch that one device holds."""
        # With replicas the number is small: a call that one device holds cannot move to a device that becomes free.
        options = self.options
        return max(AHEAD, options.prefetch) if options.replicas == 1 else options.prefetch

    def variants(self, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the arguments of each program that calls without a batch need, given the arguments of an item."""
        return [values]

    def _check_reload(self, old: Any, new: Any) -> None:
        """Refuse parameters that would need another program.

        Raises:
            DeviceError: shapes, dtypes or structure differ; the message names the difference.
        """
        check_same_shapes(old, new)

    async def _warm_up(
        self, site: "CallSite", pools: "Pools", device_strategy: str, resources: Mapping[str, Any]
    ) -> None:
        """Compile the programs for the samples of the node.

        Raises:
            PlanError: the node has no samples.
        """
        samples = self.samples(resources)
        if not samples:
            raise PlanError(
                f"warmup=True: device node {site.label!r} has no sample_input= to compile its programs for; give the "
                "arguments of one item, as a tuple: sample_input=(...)"
            )
        for sample in samples:
            await self.compile(pools, device_strategy, self.arguments_at(site), sample, resources, self.donated(site))

    async def compile(
        self,
        pools: "Pools",
        device_strategy: str,
        arguments: Arguments,
        sample: tuple[Any, ...],
        resources: Mapping[str, Any],
        donated: tuple[int, ...] = (),
    ) -> None:
        """Compile the programs that calls like a sample need.

        Args:
            pools: the pools of the Engine.
            device_strategy: the execution option, which selects the device of a node with `device="auto"`.
            arguments: makes the arguments of the program from those of a call.
            sample: the arguments that do not come from resources, in order.
            resources: the other arguments, by parameter.
            donated: positions of the arguments whose memory the result may take.
        """
        values = arguments.merge(sample, resources)
        await self._fit(pools, device_strategy, arguments, values)
        placed = await self.opened(pools, device_strategy, arguments, donated)
        await placed.compile(values)

    def bind(self, site: "Site") -> "OnDevice":
        """Return the object that runs the items of a call site on the device."""
        scope = site.scope
        return OnDevice(self, call_site(site._program, site._unit), scope._pools, scope._device_strategy)

    def arguments_at(self, site: "CallSite") -> Arguments:
        """Return the `Arguments` of a call site."""
        return self.arguments(site.resources, self.constants(site))

    def donated(self, site: "CallSite") -> tuple[int, ...]:
        """Return the positions of the arguments whose memory the result of a call at this site may take."""
        options = self.options
        if not options.donate or options.batch is not None:
            return ()
        return self.arguments(site.resources).positions([*site.owned, *([site.state] if site.state else ())])

    async def opened(
        self, pools: "Pools", device_strategy: str, arguments: Arguments, donated: tuple[int, ...] = ()
    ) -> "PlacedNode":
        """Return the node on its devices, and open the devices that are not open yet.

        Raises:
            DeviceError: the size of the batches is "auto", and can only be found at warm-up.
        """
        if self._is_open_ended:
            samples = () if arguments.parameters else self.samples({})
            if not samples:
                raise DeviceError(
                    f'device node {self.name!r} has batch with max_size="auto", and an argument that comes from a '
                    "resource: find the size before the first call, by engine.deploy(..., warmup=True) or "
                    "await node.warmup(...)"
                )
            await self._fit(pools, device_strategy, arguments, arguments.merge(samples[0], {}))
        pool, options = pools.pool("devices", DevicePool), self.options
        device = device_strategy if options.device == AUTO else options.device
        devices = await pool.open(device, options.replicas)
        key = self, arguments, donated, devices
        if key not in pool.placed:
            pool.placed[key] = PlacedNode(devices, self, arguments, donated)
        return pool.placed[key]

    @property
    def _is_open_ended(self) -> bool:
        """Whether the size of the batches is "auto", and was not found yet."""
        return self.batch is not None and self.batch.max_size == "auto"

    async def _fit(self, pools: "Pools", device_strategy: str, arguments: Arguments, values: tuple[Any, ...]) -> None:
        """Find the size of the batches by trying, if it is "auto" and was not found yet."""
        if not self._is_open_ended:
            return
        async with pools.pool("devices", DevicePool).fitting:
            if isinstance(self.batch, DeviceBatch) and self._is_open_ended:
                assert self.find_size is not None
                size = await self.find_size(self, pools, device_strategy, arguments, values)
                self.batch = replace(self.batch, max_size=size)


def _bucketed(arguments: Arguments) -> tuple[frozenset[int], ...]:
    """Return, for each argument of a batch, the axes that are padded to buckets."""
    if arguments.items is None:
        return ()
    rows = {position: {0} for position in arguments.stacked}
    padded: dict[str, int] = {}
    for position, (name, axes) in zip(arguments.stacked, arguments.items.parameters, strict=True):
        rows[position].update(axis + 1 for axis in axes)
        padded[name] = len(axes)
    masks = [frozenset(range(padded[name] + 1)) for name in arguments.masked]
    return (*[frozenset(rows.get(position, ())) for position in range(len(arguments.names))], *masks)


def _in_order(fn: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return arguments.call(fn, values)

    return call


def _vectorised(fn: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """Return the function of one item mapped over the rows of stacked arguments; other arguments are passed whole."""

    def call(*values: Any) -> Any:
        count = len(arguments.names)

        def one(rows: list[Any], masks: tuple[Any, ...]) -> Any:
            merged = list(values[:count])
            for position, row in zip(arguments.stacked, rows, strict=True):
                merged[position] = row
            return arguments.call(fn, tuple(merged), masks)

        return jax.vmap(one)([unwrapped(values[position]) for position in arguments.stacked], values[count:])

    return call


def _in_rows(fn: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """Return the function of packed rows. Its result is checked while the function is traced."""
    stacker = arguments.items
    assert stacker is not None

    def call(*values: Any) -> Any:
        count = len(arguments.names)
        result = arguments.call(fn, values[:count], values[count:])
        stacker.check_packed(jax.tree.leaves(result), values[count].shape)
        return result

    return call


class PlacedNode:
    """One node on one device, or on several replicas, of which the next free one takes the next call.

    Args:
        devices: the devices that run the node; the first one is asked first.
        executor: the executor of the node.
        arguments: makes the arguments of the program from those of a call.
        donated: positions of the arguments whose memory the result may take.

    Attributes:
        queue: the queue of the first device.
    """

    def __init__(
        self,
        devices: tuple[EngineDevice, ...],
        executor: DeviceExecutor,
        arguments: Arguments,
        donated: tuple[int, ...] = (),
    ) -> None:
        self._devices = devices
        self._executor = executor
        self._jitted = [executor.jitted(device.placement, arguments, donated) for device in devices]
        self._arguments = arguments
        self._parameters = [(position, SameParameters()) for position in arguments.parameters]
        self._is_batched = arguments.items is not None
        self._sizes: tuple[int, ...] = ()  # the sizes that batches are padded to
        if executor.batch is not None:
            self._sizes = executor.batch_sizes(executor.batch, arguments)
        queues = [self._queue(device, jitted, executor) for device, jitted in zip(devices, self._jitted, strict=True)]
        if len(queues) > 1:
            share(queues)
        self.queue = queues[0]

    async def compile(self, values: tuple[Any, ...]) -> None:
        """Compile the programs that calls with arguments like these need; for a batched node, for each size of batches.

        Raises:
            DeviceError: the calling thread has its own setting of 64 bits.
            Exception: the error that the function raised while it was traced.
        """
        refuse_own_x64(self._executor.name)
        variants = self._executor.variants(values)
        arguments = self._arguments
        if arguments.items is not None:
            item, group = arguments.describe_item(values)
            variants = [arguments.stack([on_host(item)], group, size)[0] for size in self._sizes]
        devices = list(zip(self._devices, self._jitted, strict=True))
        await all_compiled([device.compile(jitted, args) for device, jitted in devices for args in variants])

    def call(
        self, kind: type[C], actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> C:
        """Return a call of the class `kind` for an item.

        Raises:
            DeviceError: the calling thread has its own setting of 64 bits.
        """
        arguments = self._arguments
        if own_x64() is not UNSET:
            refuse_own_x64(arguments.name)
        if kwargs or len(args) != len(arguments.names):
            args = arguments.bind(args, kwargs)
        size_bytes = 0
        if not self._is_batched:  # the queue of a batched node looks at the arguments
            args = with_same(self._parameters, args)
            size_bytes = arguments.on_host_of(args)
        return kind(self._jitted[0], args, size_bytes, frame.priority, frame.deadline, actor.name, actor.sampler, frame)

    def _queue(self, device: EngineDevice, jitted: JittedFunction, executor: DeviceExecutor) -> CallQueue:
        arguments, options = self._arguments, executor.options
        if executor.batch is None:
            return SingleCallQueue(jitted.name, device, jitted, arguments.parameters, executor.ahead, executor.job)
        return BatchCallQueue(
            arguments, self._parameters, device, jitted, executor.batch, self._sizes, options.prefetch,
            executor.batch_log, in_parts=PartsOfBatch if options.pure else None,
        )  # fmt: skip


class OnDevice(Bound):
    """Runs the items of one call site on the device of the node.

    Args:
        executor: the executor of the node.
        site: the call site.
        pools: the pools of the Engine.
        device_strategy: the execution option, which selects the device of a node with `device="auto"`.
    """

    def __init__(self, executor: DeviceExecutor, site: "CallSite", pools: "Pools", device_strategy: str) -> None:
        super().__init__()
        self._executor = executor
        self._pools = pools
        self._device_strategy = device_strategy
        self._arguments = executor.arguments_at(site)
        self._donated = executor.donated(site)
        self._state = None if site.state is None else self._arguments.names.index(site.state)
        self._returns_pending = site.returns_pending
        if executor.batch is None and executor.options.replicas == 1:
            self._most_begun = executor.ahead
        self._placed: PlacedNode | None = None  # valid while the Engine and its devices are open

    async def run(self, attempt: "Attempt") -> Any:
        """Run an item in the task of a worker."""
        actor, frame = attempt._actor, attempt._frame
        placed = self._placed
        if placed is None:
            placed = self._placed = await self._executor.opened(
                self._pools, self._device_strategy, self._arguments, self._donated
            )
        call = placed.call(DeviceCall, actor, frame, attempt.args, attempt.kwargs)
        call.returns_pending = self._returns_pending
        if (state := self._state) is not None:
            events = frame.group.events
            kept = () if events is None else events.kept()
            held = LoopState(call.args[state], kept if frame.owns_state else EVERYTHING)
            call.args = (*call.args[:state], held, *call.args[state + 1 :])
        attempt.keeps_place_until(call)
        if frame.span is not None:
            call.wait = spans.waiting()
            if self._executor.members:
                spans.note_on_span({names.NODES: self._executor.members})
        return await placed.queue.run(call)

    def _begin(
        self, actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DetachedDeviceCall | None:
        """Begin an item that no worker waits for; return None for the very first item, which opens the device."""
        placed = self._placed
        if placed is None:
            return None
        call = placed.call(DetachedDeviceCall, actor, frame, args, kwargs)
        call.returns_pending = self._returns_pending
        call.step_begins(actor, frame)
        placed.queue.submit(call)
        return call
