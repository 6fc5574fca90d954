"""Device executor: where device nodes run, as the engine sees it, and what is compiled for each of them."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from .._errors import PlanError
from ..telemetry import spans
from .arguments import Arguments, holds_array
from .device_batch import DeviceBatch, batch_sizes
from .device_pool import DevicePool
from .parameters import check_same_shapes
from .selection import AUTO
from .statistics import CompileStatistics

if TYPE_CHECKING:
    from ..actors.detached import DetachedStep
    from ..actors.frame import Frame
    from ..actors.node_actor import NodeActor
    from ..actors.worker import Worker
    from ..engine.node import CallSite
    from ..engine.passes import Pass
    from ..engine.pools import Pools
    from .compiling import Program
    from .device_queue import DeviceCall
    from .engine_device import PlacedNode
    from .shardings import Placement


# From the arguments that come from resources, by parameter, to the other arguments of items like those that will come.
Samples: TypeAlias = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], ...]]


@dataclass(frozen=True)
class DeviceOptions:
    """What a device node was made with; see `device_node`."""

    device: Any
    batch: DeviceBatch | None
    static: tuple[str, ...]
    shared: tuple[str, ...]
    donate: bool
    pure: bool
    in_specs: Any
    out_specs: Any
    replicas: int
    prefetch: int
    sample_input: tuple[tuple[Any, ...], ...]


class DevicePrograms:
    """The programs of one device node, on each device and for each set of parameters that come from resources.

    Args:
        name: of the node.
        fn: its function.
        options: how it runs.
        samples: gives the arguments of items to compile it for, where these come from resources; those of its options
            unless told otherwise.
        members: names of the nodes of a region; none for a node that is one.

    Attributes:
        samples: as given.
        log: what its own programs cost.
        fn: the function.
        members: as given.
        giving: programs that give parts of its result, by which.

    Raises:
        TypeError: the function cannot be compiled as asked.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: DeviceOptions,
        samples: Samples | None = None,
        members: tuple[str, ...] = (),
    ) -> None:
        from .compiling import CompileLog
        from .shardings import Specs
        from .statistics import BatchLog

        self.name = name
        self.options = options
        self.members = members
        self.samples: Samples = samples or (lambda resources: options.sample_input)
        self.log = CompileLog()
        self.batches = BatchLog(name)
        self.fn = fn
        self.giving: dict[Hashable, DevicePrograms] = {}
        # A region belongs to the plans that have it.
        self._shared: WeakSet[DevicePrograms] = WeakSet()
        self._arguments: dict[tuple[frozenset[str], frozenset[str]], Arguments] = {}
        self._programs: dict[tuple[Placement, tuple[int, ...], tuple[int, ...]], Program] = {}
        self._specs = Specs(
            name, options.device, self.arguments(frozenset()).names, options.in_specs, options.out_specs
        )

    def share(self, region: "DevicePrograms") -> None:
        """Note that the node is a part of a region, which has programs of its own."""
        self._shared.add(region)

    def statistics(self) -> CompileStatistics:
        """Return what the programs cost that the node has, also for parts of its result, or is a part of."""
        others = (*self._shared, *self.giving.values())
        return CompileStatistics.total([self.log.statistics(), *[other.statistics() for other in others]])

    def constants(self, site: "CallSite") -> frozenset[str]:
        """Return the parameters of a batched node whose arguments at a call site are passed once, and not per row.

        Those are arrays, or hold some, and the same ones for all items. Numbers stay with the rows: calls at other
        places with other numbers share their batches. So does what `in_specs` splits, whose first axis is the batch's.
        """
        batch = self.options.batch
        if batch is None:
            return frozenset()
        arguments = self.arguments(site.resources)
        names = {arguments.names[position] for position in arguments.stacked} - batch.pad_axes.keys()
        found = {
            name
            for name in names & site.constants.keys()
            if self._specs.of(name) is None and holds_array(site.constants[name])
        }
        # Something has to have rows.
        return frozenset(found) if names - site.constants.keys() else frozenset()

    def arguments(self, resources: frozenset[str], constants: frozenset[str] = frozenset()) -> Arguments:
        """Return how calls become arguments, where these parameters come from resources, and those are constants."""
        found = self._arguments.get((resources, constants))
        if found is None:
            options = self.options
            found = self._arguments[resources, constants] = Arguments(
                self.name, self.fn, options.static, resources, constants | {*options.shared}, options.batch
            )
        return found

    def program(self, placement: "Placement", arguments: Arguments, donated: tuple[int, ...] = ()) -> "Program":
        """Return the program for a device and arguments of its calls, some of them donated."""
        # What is shared is an argument like others, except in a batch, where it has no rows.
        key = placement, arguments.shared if self.options.batch is not None else (), donated
        if key not in self._programs:
            self._programs[key] = self._make(placement, arguments, donated)
        return self._programs[key]

    def batch_sizes(self, batch: DeviceBatch, arguments: Arguments) -> tuple[int, ...]:
        """Return the sizes that batches are padded to: their rows are independent, and split over the mesh evenly."""
        return batch_sizes(batch, self._specs.row_multiple(arguments.names[i] for i in arguments.stacked))

    def _make(self, placement: "Placement", arguments: Arguments, donated: tuple[int, ...]) -> "Program":
        from .compiling import Program

        options, specs = self.options, self._specs
        specs.check(placement)
        in_specs = [specs.of(name) for name in arguments.names]
        if arguments.stacker is not None:
            in_specs += [specs.of_mask(name) for name in arguments.stacker.padded]
        return Program(
            _vectorised(self.fn, arguments) if options.batch is not None else _in_order(self.fn, arguments),
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
            log=self.log,
        )


def _bucketed(arguments: Arguments) -> tuple[frozenset[int], ...]:
    """Return for each argument of a batch which axes are padded to buckets."""
    if arguments.stacker is None:
        return ()
    rows = {position: {0} for position in arguments.stacked}
    masks: list[frozenset[int]] = []
    for position, axes in zip(arguments.stacked, arguments.stacker.axes, strict=True):
        rows[position].update(axis + 1 for axis in axes)
        if axes:
            masks.append(frozenset(range(len(axes) + 1)))
    return (*[frozenset(rows.get(position, ())) for position in range(len(arguments.names))], *masks)


def _in_order(fn: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return arguments.call(fn, values)

    return call


def _vectorised(fn: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """Return the function of one item as one of a batch: rows of what is stacked, the rest as it is."""
    import jax

    from .stacking import unwrapped

    def call(*values: Any) -> Any:
        count = len(arguments.names)

        def one(rows: list[Any], masks: tuple[Any, ...]) -> Any:
            merged = list(values[:count])
            for position, row in zip(arguments.stacked, rows, strict=True):
                merged[position] = row
            return arguments.call(fn, tuple(merged), masks)

        return jax.vmap(one)([unwrapped(values[position]) for position in arguments.stacked], values[count:])

    return call


class DeviceExecutor:
    """Runs the calls of one device node.

    Args:
        programs: what is compiled for it.
    """

    def __init__(self, programs: DevicePrograms) -> None:
        self.programs = programs

    @property
    def label(self) -> str:
        """The device, and the batch."""
        options = self.programs.options
        return str(options.device) if options.batch is None else f"{options.device}, up to {options.batch.max_size}"

    @property
    def passes(self) -> "tuple[Pass, ...]":
        """Those of device nodes."""
        from .fusion import fuse_regions
        from .projection import give_items

        return fuse_regions, give_items

    @property
    def takes_unready(self) -> bool:
        """Unless they are stacked, for which they have to be there."""
        return self.programs.options.batch is None

    def check_reload(self, old: Any, new: Any) -> None:
        """Refuse parameters that would need another program.

        Raises:
            DeviceError: shapes, dtypes or structure differ; the message names what.
        """
        check_same_shapes(old, new)

    async def warm_up(
        self, site: "CallSite", pools: "Pools", device_strategy: str, resources: Mapping[str, Any]
    ) -> None:
        """Compile the programs for the samples of the node.

        Raises:
            PlanError: it has none.
        """
        samples = self.programs.samples(resources)
        if not samples:
            raise PlanError(
                f"warmup=True: device node {site.label!r} has no sample_input=, so nobody knows what to compile it "
                "for; give it the arguments of one item, as a tuple"
            )
        for sample in samples:
            await self.compile(pools, device_strategy, self.arguments(site), sample, resources, self.donated(site))

    async def compile(
        self,
        pools: "Pools",
        device_strategy: str,
        arguments: "Arguments",
        sample: tuple[Any, ...],
        resources: Mapping[str, Any],
        donated: tuple[int, ...] = (),
    ) -> None:
        """Compile what calls like a sample need.

        Args:
            pools: those of the Engine.
            device_strategy: where it runs, if that is left open.
            arguments: how the calls become arguments.
            sample: those that do not come from resources, in order.
            resources: the others, by parameter.
            donated: positions of the arguments whose memory the result may take.
        """
        placed = await self.opened(pools, device_strategy, arguments, donated)
        await placed.compile(arguments.merge(sample, resources))

    def carrier(self, site: "CallSite", pools: "Pools", device_strategy: str) -> "OnDevice":
        """Return what runs one item on the device."""
        return OnDevice(self, site, pools, device_strategy)

    def arguments(self, site: "CallSite") -> "Arguments":
        """Return how the calls of a site become arguments."""
        return self.programs.arguments(site.resources, self.programs.constants(site))

    def donated(self, site: "CallSite") -> tuple[int, ...]:
        """Return the positions of the arguments whose memory the result of a call there may take."""
        options = self.programs.options
        if not options.donate or options.batch is not None:
            return ()
        return self.programs.arguments(site.resources).positions(site.owned)

    async def opened(
        self, pools: "Pools", device_strategy: str, arguments: "Arguments", donated: tuple[int, ...] = ()
    ) -> "PlacedNode":
        """Return the node on its devices, which are opened if they are not."""
        pool, options = pools.other(DevicePool, DevicePool), self.programs.options
        device = device_strategy if options.device == AUTO else options.device
        devices = pool.opened(device, options.replicas) or await pool.open(device, options.replicas)
        return devices[0].placed(self.programs, arguments, devices, donated)


class OnDevice:
    """Runs the items of one call site on the device of the node.

    Args:
        executor: of the node.
        site: where it is called.
        pools: those of the Engine.
        device_strategy: where it runs, if that is left open.
    """

    def __init__(self, executor: DeviceExecutor, site: "CallSite", pools: "Pools", device_strategy: str) -> None:
        self._executor = executor
        self._site = site
        self._pools = pools
        self._device_strategy = device_strategy
        self._arguments = executor.arguments(site)
        self._donated = executor.donated(site)
        self._label, self._is_handed_on = site.label, site.is_handed_on
        self._placed: PlacedNode | None = None  # for as long as the Engine is open, and so are its devices

    async def __call__(
        self, worker: "Worker", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an item in the task of a worker."""
        placed = self._placed
        if placed is None:
            placed = self._placed = await self._executor.opened(
                self._pools, self._device_strategy, self._arguments, self._donated
            )
        call = worker.outside_call = self._call(placed, actor, frame, args, kwargs)
        if frame.span is not None:
            call.wait = spans.waiting()
            if self._executor.programs.members:
                spans.consists_of(self._executor.programs.members)
        return await placed.lane.queue.run(placed.lane, call)

    def begin(
        self,
        detached: "DetachedStep",
        actor: "NodeActor",
        frame: "Frame",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "DeviceCall | None":
        """Begin with an item that has no task; not with the first one of all, which opens the device."""
        placed = self._placed
        if placed is None:
            return None
        call = self._call(placed, actor, frame, args, kwargs)
        call.result = detached
        placed.lane.queue.submit(placed.lane, call)
        return call

    def _call(
        self, placed: "PlacedNode", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DeviceCall":
        call = placed.call(
            self._arguments.bind(args, kwargs), frame.priority, frame.deadline, hands_on=self._is_handed_on,
            label=self._label,
        )  # fmt: skip
        call.sampler, call.frame = actor.sampler, frame
        return call
