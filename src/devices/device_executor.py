"""Device executor: where device nodes run, as the engine sees it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._errors import PlanError
from ..telemetry import spans
from .device_programs import DevicePrograms
from .dispatch.device_pool import DevicePool
from .dispatch.parameters import check_same_shapes
from .platform.inventory import AUTO

if TYPE_CHECKING:
    from ..actors.errand import Errand
    from ..actors.frame import Frame
    from ..actors.node_actor import NodeActor
    from ..actors.worker import Worker
    from ..engine.call_site import CallSite
    from ..engine.passes import Pass
    from ..engine.pools import Pools
    from .arguments import Arguments
    from .dispatch.device_call import DeviceCall
    from .dispatch.device_use import DeviceUse


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
        from .regions.fusion import fuse_regions  # they know executors
        from .regions.items import give_items

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
        use = await self.opened(pools, device_strategy, arguments, donated)
        await use.compile(arguments.merge(sample, resources))

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
    ) -> "DeviceUse":
        """Return the node on its devices, which are opened if they are not."""
        pool, options = pools.other(DevicePool, DevicePool), self.programs.options
        device = device_strategy if options.device == AUTO else options.device
        stations = pool.opened(device, options.replicas) or await pool.open(device, options.replicas)
        return stations[0].use(self.programs, arguments, stations, donated)


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
        self._use: DeviceUse | None = None  # for as long as the Engine is open, and so are its devices

    async def __call__(
        self, worker: "Worker", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an item in the task of a worker."""
        use = self._use
        if use is None:
            use = self._use = await self._executor.opened(
                self._pools, self._device_strategy, self._arguments, self._donated
            )
        call = worker.outside_call = self._call(use, actor, frame, args, kwargs)
        if frame.span is not None:
            call.wait = spans.waiting()
            if self._executor.programs.members:
                spans.consists_of(self._executor.programs.members)
        return await use.lane.queue.run(use.lane, call)

    def begin(
        self, errand: "Errand", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DeviceCall | None":
        """Begin with an item that has no task; not with the first one of all, which opens the device."""
        use = self._use
        if use is None:
            return None
        call = self._call(use, actor, frame, args, kwargs)
        call.result = errand
        use.lane.queue.submit(use.lane, call)
        return call

    def _call(
        self, use: "DeviceUse", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DeviceCall":
        call = use.call(
            self._arguments.bind(args, kwargs), frame.priority, frame.deadline, hands_on=self._is_handed_on,
            label=self._label,
        )  # fmt: skip
        call.recorder, call.frame = actor.recorder, frame
        return call
