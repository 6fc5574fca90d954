"""Device programs: what is compiled for one device node."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from ..actors.batch import Batch
from .arguments import Arguments, holds_array
from .batches.buckets import batch_sizes
from .programs.compile_statistics import CompileStatistics

if TYPE_CHECKING:
    from ..engine.call_site import CallSite
    from .platform.placement import Placement
    from .programs.compiling import Program

# From the arguments that come from resources, by parameter, to the other arguments of items like those that will come.
Samples: TypeAlias = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], ...]]


@dataclass(frozen=True)
class DeviceOptions:
    """What a device node was made with; see `device_node`."""

    device: Any
    batch: Batch | None
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
        from .batches.batch_statistics import BatchLog
        from .programs.compile_log import CompileLog
        from .specs import Specs

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

    def batch_sizes(self, batch: Batch, arguments: Arguments) -> tuple[int, ...]:
        """Return the sizes that batches are padded to: their rows are independent, and split over the mesh evenly."""
        return batch_sizes(batch, self._specs.row_multiple(arguments.names[i] for i in arguments.stacked))

    def _make(self, placement: "Placement", arguments: Arguments, donated: tuple[int, ...]) -> "Program":
        from .programs.compiling import Program

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

    from .batches.stacking import unwrapped

    def call(*values: Any) -> Any:
        count = len(arguments.names)

        def one(rows: list[Any], masks: tuple[Any, ...]) -> Any:
            merged = list(values[:count])
            for position, row in zip(arguments.stacked, rows, strict=True):
                merged[position] = row
            return arguments.call(fn, tuple(merged), masks)

        return jax.vmap(one)([unwrapped(values[position]) for position in arguments.stacked], values[count:])

    return call
