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
    from ..actors.frame import Frame
    from ..actors.node_actor import Body, NodeActor
    from ..actors.worker import Worker
    from ..engine.call_site import CallSite
    from ..engine.passes import Pass
    from ..engine.pools import Pools
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
        from .regions.fusion import fuse_regions  # it knows executors

        return (fuse_regions,)

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
            await self.compile(pools, device_strategy, site.resources, sample, resources, self._donated(site))

    async def compile(
        self,
        pools: "Pools",
        device_strategy: str,
        names: frozenset[str],
        sample: tuple[Any, ...],
        resources: Mapping[str, Any],
        donated: tuple[int, ...] = (),
    ) -> None:
        """Compile what calls like a sample need.

        Args:
            pools: those of the Engine.
            device_strategy: where it runs, if that is left open.
            names: parameters whose arguments come from resources.
            sample: the other arguments, in order.
            resources: those arguments.
            donated: positions of the arguments whose memory the result may take.
        """
        use = await self._opened(pools, device_strategy, names, donated)
        await use.compile(self.programs.arguments(names).merge(sample, resources))

    def body(self, site: "CallSite", pools: "Pools", device_strategy: str) -> "Body":
        """Return what runs one item on the device."""
        arguments = self.programs.arguments(site.resources)
        donated = self._donated(site)
        use: DeviceUse | None = None  # for as long as the Engine is open, and so are its devices

        async def run_on_device(
            worker: "Worker", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            nonlocal use
            if use is None:
                use = await self._opened(pools, device_strategy, site.resources, donated)
            call = use.call(
                arguments.bind(args, kwargs), frame.priority, frame.deadline, hands_on=site.is_handed_on,
                label=site.label,
            )  # fmt: skip
            if frame.span is not None:
                call.wait = spans.waiting()
                if self.programs.members:
                    spans.consists_of(self.programs.members)
            call.recorder, call.frame = actor.recorder, frame
            worker.outside_call = call
            return await use.lane.queue.run(use.lane, call)

        return run_on_device

    def _donated(self, site: "CallSite") -> tuple[int, ...]:
        """Return the positions of the arguments whose memory the result of a call there may take."""
        options = self.programs.options
        if not options.donate or options.batch is not None:
            return ()
        return self.programs.arguments(site.resources).positions(site.owned)

    async def _opened(
        self, pools: "Pools", device_strategy: str, resources: frozenset[str], donated: tuple[int, ...] = ()
    ) -> "DeviceUse":
        """Return the node on its devices, which are opened if they are not."""
        pool, options = pools.other(DevicePool, DevicePool), self.programs.options
        device = device_strategy if options.device == AUTO else options.device
        stations = pool.opened(device, options.replicas) or await pool.open(device, options.replicas)
        return stations[0].use(self.programs, resources, stations, donated)
