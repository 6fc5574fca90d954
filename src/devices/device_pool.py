"""The devices that one Engine uses, and the functions that `devices.actor` runs there."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jax.sharding import NamedSharding

from .._errors import EngineClosedError, copy_of
from ..actors.accepted import FUNCTION, SWITCH, OptionRule, check, is_whole
from ..actors.current import calling_actor, enclosing_frame
from ..actors.tasks import uninterrupted
from ..actors.threads import LoopMailbox
from ..engine.engine import default
from ..engine.nesting import pools_around
from ..telemetry import spans
from ..telemetry.profiling import collectors
from .compiling import CACHE, JittedFunction
from .engine_device import DeviceCall, EngineDevice, SingleCallQueue, all_compiled
from .jax_import import is_device, start_backends
from .parameter_checks import parameter_names
from .parameters import put_there
from .programs import are_arrays, current, is_device_array, is_random_key, on_host_of, refuse_own_x64, signature_of
from .recompilation import CompileLog
from .selection import following, select
from .shardings import LeafSpecs, Placement
from .untyped_jax import jax

if TYPE_CHECKING:
    from ..engine.pools import Pools
    from .executor import PlacedNode


class DevicePool:
    """The devices that one Engine uses. A device is opened when it is first used.

    Attributes:
        placed: the nodes that run on these devices, by a key that tells the nodes apart.
        fitting: a lock, held while the batch sizes of a node are tried.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mailbox = LoopMailbox(self._loop)
        self.placed: dict[Hashable, PlacedNode] = {}
        self.fitting = asyncio.Lock()
        self._devices: dict[Placement, EngineDevice] = {}
        self._by_name: dict[tuple[Hashable, int], tuple[EngineDevice, ...]] = {}
        self._opening: dict[tuple[Hashable, int], asyncio.Future[list[Placement]]] = {}
        self._closed = False
        CACHE.thread.acquire()

    async def open(self, device: Hashable, replicas: int = 1) -> "tuple[EngineDevice, ...]":
        """Return a device, as `select` names it, and the next devices of its platform.

        Args:
            device: the first device.
            replicas: how many devices to return.

        Raises:
            DeviceError: there is no such device, or there are fewer than `replicas`.
            EngineClosedError: the Engine was closed.
        """
        if (opened := self._by_name.get((device, replicas))) is not None:
            return opened
        # The first use of a device takes seconds: JAX is imported, and looks for devices.
        found = self._opening.get((device, replicas)) or self._find(device, replicas)
        await asyncio.wait([found])  # the search goes on for other callers if this one is cancelled
        if (error := found.exception()) is not None:
            raise copy_of(error)
        if self._closed:
            raise EngineClosedError(f"device {device} was not opened: its Engine was closed")
        devices = self._by_name[device, replicas] = tuple(map(self._device, found.result()))
        return devices

    def _device(self, placement: Placement) -> EngineDevice:
        device = self._devices.get(placement)
        if device is None:
            device = self._devices[placement] = EngineDevice(placement, self._mailbox, self._loop)
        return device

    async def aclose(self) -> None:
        """Refuse further calls, wait for the running calls, and give the threads back."""
        if self._closed:
            return
        self._closed = True
        await uninterrupted(self._close())

    async def _close(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening.values())
        for device in self._devices.values():
            await device.close()
        await CACHE.thread.release()

    def _find(self, device: Hashable, replicas: int) -> "asyncio.Future[list[Placement]]":
        """Look for devices on a thread, once for all callers that ask meanwhile. Closing the pool waits for that."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-device-open")
        found = self._loop.run_in_executor(thread, placements_of, device, replicas)

        def is_over(_: "asyncio.Future[list[Placement]]") -> None:
            thread.shutdown()  # the thread is about to return
            del self._opening[device, replicas]
            found.exception()  # marks the error as seen: asyncio does not warn of it if the callers have left

        self._opening[device, replicas] = found
        found.add_done_callback(is_over)
        return found


def placements_of(device: Any, replicas: int) -> list[Placement]:
    """Return a device, as `select` names it, and the next devices. Call it in a thread, because it may start JAX.

    Raises:
        DeviceError: there is no such device, or there are fewer than `replicas`.
    """
    start_backends()
    found = cast("Any", select(device))
    if not is_device(found):
        return [Placement.of_mesh(found)]
    return [Placement.of_device(one) for one in following(found, replicas)]


# All functions share one log, so that it can tell a function that is made anew for each call from a new shape.
_LOG = CompileLog()


_POSITIONS = OptionRule(
    "a tuple of positions of arguments, from 0",
    lambda value: isinstance(value, tuple) and all(is_whole(one, 0) for one in cast("tuple[object, ...]", value)),
)


class DeviceFunction:
    """A function that `devices.actor` runs: on a device of the Engine in which it is called, or of the default one.

    Args:
        device: the device, as `select` takes it.
        owner: the device actor. Actors and nodes take turns on a device, however many functions an actor has.
        fn: the function.
        donate_argnums: positions of the arguments whose memory the result may take.
        ready: whether a call waits until its result is computed.
    """

    __slots__ = ("_device", "_donate_argnums", "_fn", "_jitted", "_owner", "_ready")

    def __init__(
        self, device: Any, owner: object, fn: Callable[..., Any], donate_argnums: tuple[int, ...], ready: bool
    ) -> None:
        check("fn", fn, FUNCTION, "devices.actor(...): ")
        check("donate_argnums", donate_argnums, _POSITIONS, "devices.actor(...): ")
        check("ready", ready, SWITCH, "devices.actor(...): ")
        self._device, self._owner = device, owner
        self._fn = fn
        self._donate_argnums = donate_argnums
        self._ready = ready
        self._jitted: JittedFunction | None = None  # the function for the device of the last call

    async def compile(
        self, samples: Iterable[tuple[Any, ...]], on_progress: Callable[[int, int], object] | None
    ) -> int:
        """Compile the programs for arguments like these, and return the number of programs."""
        given: list[Any] = [*samples]
        if wrong := [sample for sample in given if not isinstance(sample, tuple)]:
            name = getattr(self._fn, "__name__", self._fn)
            raise TypeError(
                f"warmup of {name}: a sample is a tuple of the arguments of a call, got "
                f"{type(wrong[0]).__name__}; write warmup((x,)) for one argument x"
            )
        (device,) = await _pools().pool("devices", DevicePool).open(self._device)
        placement, configuration, wanted = device.placement, current(), dict[Any, tuple[JittedFunction, Any]]()
        for args in given:
            jitted = self._jitted_for(placement, args)
            wanted[jitted.serial, signature_of(args, (), configuration, jitted)] = jitted, args
        with _LOG.announced(wanted):
            await all_compiled([device.compile(jitted, args) for jitted, args in wanted.values()], on_progress)
        return len(wanted)

    async def call(self, args: tuple[Any, ...]) -> Any:
        """Run the function with these arguments."""
        (device,) = await _pools().pool("devices", DevicePool).open(self._device)
        jitted, placement = self._jitted, device.placement
        if jitted is None or jitted.placement is not placement or placement.mesh is not None:
            jitted = self._jitted = self._jitted_for(placement, args)
        refuse_own_x64(jitted.name)
        leaves = args if are_arrays(args) else jax.tree.leaves(args)
        call = DeviceCall(jitted, args, on_host_of(leaves))
        call.leaves, call.returns_pending, call.wait = leaves, not self._ready, spans.waiting()
        if collectors.running and (actor := calling_actor()) is not None:
            call.sampler, call.frame = actor.sampler, enclosing_frame()
        if (queue := device.functions.get(self._owner)) is None:
            queue = device.functions[self._owner] = SingleCallQueue("devices.actor", device)
        return await (queue.run_to_end(call) if self._donate_argnums else queue.run(call))

    def _jitted_for(self, placement: Placement, args: tuple[Any, ...]) -> JittedFunction:
        kept = None if placement.mesh is None else _kept(args, placement.mesh)
        return _jitted(self._fn, placement, self._donate_argnums, kept)


async def put(device: Any, value: Any, specs: Any) -> Any:
    """Put a value on a device of the Engine that makes this call, or of the default Engine; return it when it is there.

    Args:
        device: the device, as `select` takes it.
        value: a pytree of arrays.
        specs: how the arrays are split over a mesh: a prefix of the structure of the value.
    """
    pools = _pools()
    (opened,) = await pools.pool("devices", DevicePool).open(device)
    refuse_own_x64("put")

    def work() -> Any:
        placement = opened.placement
        return jax.block_until_ready(put_there(value, placement.shardings(specs, value, "the value"), placement, "put"))

    return await pools.threads().submit(Context(), None, work)


async def to_host(value: Any, /) -> Any:
    """Wait for arrays in a thread, and return them as NumPy arrays. The event loop is free meanwhile.

    Inside of a node, the thread belongs to the Engine that runs the node. A loop can begin its next step before it
    awaits the results of the present step: `reading = asyncio.ensure_future(devices.to_host(tokens))`.

    Args:
        value: an array of JAX, ready or not, or a pytree with such arrays. An array that a later call donates can no
            longer be read.

    Returns:
        The value with arrays of NumPy, which may not be writable. Random keys, and leaves that are no arrays of JAX,
        stay as they are.

    Raises:
        EngineClosedError: the Engine was closed.
        Exception: the error of the computation.
    """
    leaves, tree = jax.tree.flatten(value)

    def work() -> Any:
        read = [np.asarray(leaf) if is_device_array(leaf) and not is_random_key(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(tree, read)

    return await _pools().threads().submit(Context(), None, work)


def _pools() -> "Pools":
    """Return the pools of the Engine that makes this call, or of the default one."""
    return pools_around() or default._runtime.pools


def _kept(args: tuple[Any, ...], mesh: Any) -> "tuple[Any, ...] | None":
    """Return the specs of the arguments, if any argument is split over the mesh already.

    Returns:
        None if no argument is split: then all arguments are copied to every device.
    """

    def spec_of(leaf: Any) -> Any:
        at = leaf.sharding if is_device_array(leaf) else None
        return at.spec if isinstance(at, NamedSharding) and at.mesh == mesh and not at.is_fully_replicated else None

    specs = tuple([LeafSpecs(map(spec_of, jax.tree.leaves(arg))) for arg in args])
    return specs if any(spec is not None for of_arg in specs for spec in of_arg) else None


# Few programs use two hundred functions, and functions that are made anew for each call must not pile up.
@lru_cache(maxsize=256)
def _jitted(
    fn: Callable[..., Any], placement: Placement, donate_argnums: tuple[int, ...], kept: "tuple[Any, ...] | None"
) -> JittedFunction:
    name = str(getattr(fn, "__name__", type(fn).__name__))
    return JittedFunction(fn, name, parameter_names(fn), placement, donate_argnums, in_specs=kept, pure=False, log=_LOG)
