"""Function calls: what `devices.actor` runs on a device, which belongs to no node."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..engine.engine import default_engine
from ..engine.nesting import pools_around
from ..telemetry import spans
from .arguments import parameter_names, size_on_host
from .compiling import CompileLog, Program
from .device_pool import DevicePool
from .device_queue import DeviceCall
from .shardings import Placement

# What is made anew for each call is told apart from a new shape because all of them share it.
_LOG = CompileLog()


async def call_function(
    device: Any, fn: Callable[..., Any], args: tuple[Any, ...], donate_argnums: tuple[int, ...], ready: bool
) -> Any:
    """Run a function on a device of the Engine around, or of the default one; see `DeviceActor.run`."""
    pools = pools_around() or default_engine()._runtime.pools
    pool = pools.other(DevicePool, DevicePool)
    (engine_device,) = pool.opened(device) or await pool.open(device)
    program = _program(fn, engine_device.placement, donate_argnums)
    call = DeviceCall(engine_device.loop, program, args, hands_on=not ready, size_bytes=size_on_host(args))
    call.wait = spans.waiting()
    run = engine_device.queue.run_to_end if donate_argnums else engine_device.queue.run
    return await run(engine_device.others, call)


# Two hundred functions are more than a program has; what is made anew for each call must not pile up.
@lru_cache(maxsize=256)
def _program(fn: Callable[..., Any], placement: Placement, donate_argnums: tuple[int, ...]) -> Program:
    name = str(getattr(fn, "__name__", type(fn).__name__))
    return Program(fn, name, parameter_names(fn), placement, donate_argnums, pure=False, log=_LOG)
