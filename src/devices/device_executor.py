"""Device executor: where device nodes run, as the engine sees it."""

from typing import TYPE_CHECKING, Any

from ..engine.executor import CallSite
from .device_pool import DevicePool
from .device_programs import DevicePrograms
from .parameters import check_same_shapes

if TYPE_CHECKING:
    from ..actors.frame import Frame
    from ..actors.node_actor import Body, NodeActor
    from ..actors.worker import Worker
    from ..engine.passes import Pass
    from ..engine.pools import Pools


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
        return ()

    def check_reload(self, old: Any, new: Any) -> None:
        """Refuse parameters that would need another program.

        Raises:
            DeviceError: shapes, dtypes or structure differ; the message names what.
        """
        check_same_shapes(old, new)

    def body(self, site: CallSite, pools: "Pools") -> "Body":
        """Return what runs one item on the device."""
        programs, device = self.programs, self.programs.options.device
        arguments = programs.arguments(site.resources)

        async def run_on_device(
            worker: "Worker", actor: "NodeActor", frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            pool = pools.other(DevicePool, DevicePool)
            station = pool.opened(device) or await pool.open(device)
            use = station.use(programs, site.resources)
            call = use.call(arguments.bind(args, kwargs), frame.priority, frame.deadline, hands_on=site.is_handed_on)
            worker.outside_call = call
            return await station.run(use.lane, call)

        return run_on_device
