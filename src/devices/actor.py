"""Device actor: runs functions on a device, for code that keeps its own state there."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from ..engine.engine import default_engine
from ..engine.nesting import pools_around
from ..telemetry import spans
from .arguments import parameter_names, size_on_host
from .dispatch.device_pool import DevicePool
from .dispatch.device_queue import DeviceCall
from .jax_import import require_jax
from .platform.placement import Placement
from .programs.compiling import CompileLog, Program

if TYPE_CHECKING:
    import jax.sharding

    from .jax_types import Device
    from .platform.selection import DeviceMesh


# What is made anew for each call is told apart from a new shape because all of them share it.
_LOG = CompileLog()


async def call_function(
    device: Any, fn: Callable[..., Any], args: tuple[Any, ...], donate_argnums: tuple[int, ...], ready: bool
) -> Any:
    """Run a function on a device of the Engine around, or of the default one; see `DeviceActor.run`."""
    pools = pools_around() or default_engine()._runtime.pools
    pool = pools.other(DevicePool, DevicePool)
    (station,) = pool.opened(device) or await pool.open(device)
    program = _program(fn, station.placement, donate_argnums)
    call = DeviceCall(station.loop, program, args, hands_on=not ready, size_bytes=size_on_host(args))
    call.wait = spans.waiting()
    run = station.queue.run_to_end if donate_argnums else station.queue.run
    return await run(station.others, call)


# Two hundred functions are more than a program has; what is made anew for each call must not pile up.
@lru_cache(maxsize=256)
def _program(fn: Callable[..., Any], placement: Placement, donate_argnums: tuple[int, ...]) -> Program:
    name = str(getattr(fn, "__name__", type(fn).__name__))
    return Program(fn, name, parameter_names(fn), placement, donate_argnums, pure=False, log=_LOG)


R = TypeVar("R")
Ts = TypeVarTuple("Ts")


def actor(device: "str | Device | DeviceMesh | jax.sharding.Mesh", /) -> "DeviceActor":
    """Return a device for code that keeps its own state there.

    Args:
        device: which one, as `select` takes it.

    Raises:
        MissingExtraError: JAX is not installed.
    """
    require_jax()
    return DeviceActor(device)


class DeviceActor:
    """A device or mesh for code that keeps its own state there: parameters, an optimizer's state, a cache.

    Made by `penstock.devices.actor`. Functions run in the order of the calls; several are in flight. Nothing is
    compiled, dispatched or waited for on the event loop. Inside of a node it belongs to the Engine that runs the node,
    and takes turns with the device nodes there; outside, to the default Engine.
    """

    def __init__(self, device: Any) -> None:

        self._device = device
        self._call = call_function

    async def run(
        self, fn: Callable[[*Ts], R], /, *args: *Ts, donate_argnums: tuple[int, ...] = (), ready: bool = True
    ) -> R:
        """Run a function of arrays on the device.

        It is compiled when it is called with new shapes or dtypes, so pass the same function each time, not a new
        lambda.

        What donates is not interrupted once it has begun on the device: a cancellation that comes later waits for the
        result, which the caller gets, and is raised where the caller waits next. One that comes before is raised at
        once, and nothing was donated. So `self.state = await actor.run(step, self.state, donate_argnums=(0,))` always
        leaves a state that can be used.

        Args:
            fn: plain JAX.
            *args: arrays of JAX or NumPy, scalars, and pytrees of them.
            donate_argnums: positions of the arguments whose memory the result may take; they cannot be used again.
            ready: wait until the result is there. Without, it is an array that will be, for the next call.

        Returns:
            What the function returns, on the device.

        Raises:
            DeviceError: there is no such device, or its JAX computes wrong values.
            EngineClosedError: the event loop is being shut down, or the Engine was closed.
            Exception: what the function raised while it was traced, or the device while it ran.
        """
        return cast(R, await self._call(self._device, fn, args, donate_argnums, ready))
