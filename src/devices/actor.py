"""Device actor: runs functions on a device, for code that keeps its own state there."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast
from weakref import WeakKeyDictionary

from ..actors.current import remaining_deadline
from ..engine.engine import default_engine
from .device_call import DeviceCall
from .device_pool import DevicePool, Station
from .device_queue import DEFAULT_WINDOW, Lane

if TYPE_CHECKING:
    import jax.sharding

    from .compiling import Program
    from .device_mesh import DeviceMesh
    from .jax_types import Device
    from .jobs import Job

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class DeviceActor:
    """One device or mesh, for code that keeps its own state there: parameters, an optimizer's state, a cache.

    Made by `penstock.devices.actor`. Functions run one after the other in the order of the calls; several are in
    flight. Nothing is compiled, dispatched or waited for on the event loop.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    async def run(
        self,
        fn: Callable[[*Ts], R],
        /,
        *args: *Ts,
        donate_argnums: tuple[int, ...] = (),
        ready: bool = True,
    ) -> R:
        """Run a function of arrays on the device.

        It is compiled when it is called with new shapes or dtypes, so pass the same function each time, not a new
        lambda.

        Args:
            fn: plain JAX.
            *args: arrays of JAX or NumPy, scalars, and pytrees of them.
            donate_argnums: positions of the arguments whose memory the result may take; they cannot be used again.
            ready: wait until the result is there. Without, it is an array that will be, for the next call.

        Returns:
            What the function returns, on the device.

        Raises:
            DeviceError: there is no such device, or its JAX computes wrong values.
            EngineClosedError: the event loop is being shut down.
            Exception: what the function raised while it was traced, or the device while it ran.
        """
        pool = default_engine()._runtime.pools.other(DevicePool, DevicePool)
        station = pool.opened(self._device) or await pool.open(self._device)
        lane = station.lane(_Runs, lambda: _Runs(station).lane)
        call = DeviceCall(pool.loop, args, deadline=remaining_deadline())
        call.payload = _Run(fn, donate_argnums, ready)
        return cast(R, await station.queue.run(lane, call))
