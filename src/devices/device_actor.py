"""Device actor: runs functions on a device, for code that keeps its own state there."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, cast, overload

from .._public import LateModule
from .jax_import import Device, require_jax
from .selection import DeviceMesh

if TYPE_CHECKING:
    import jax.sharding
    import numpy.typing as npt

    from .device_pool import DeviceFunction
else:
    jax = LateModule("jax")

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def actor(device: "str | Device | DeviceMesh | jax.sharding.Mesh", /) -> "DeviceActor":
    """Return a device for code that keeps its own state there.

    Args:
        device: the device or mesh, as `select` takes it.

    Raises:
        MissingExtraError: JAX is not installed.
    """
    require_jax()
    return DeviceActor(device)


class DeviceActor:
    """A device or mesh for code that keeps its own state there: parameters, an optimizer's state, a cache.

    Made by `penstock.devices.actor`. Functions run in the order of the calls; several may be in flight. The event loop
    neither compiles nor dispatches, and never blocks. Inside of a node, the actor belongs to the Engine that runs the
    node, and takes turns with the device nodes and other device actors of that Engine. Outside, it belongs to the
    default Engine.
    """

    def __init__(self, device: Any) -> None:
        from .device_pool import DeviceFunction, put  # needs JAX; imported here so that calls do not pay for the import

        self._device = device
        self._put = put
        self._function = DeviceFunction

    def bind(
        self, fn: Callable[[*Ts], R], /, *, donate_argnums: tuple[int, ...] = (), ready: bool = True
    ) -> "BoundFunction[*Ts, R]":
        """Return a function that runs on the device each time it is called and awaited.

        For a function that is called again and again with arguments of the same structure, shapes and dtypes, such as a
        training step: `step = actor.bind(train_step, donate_argnums=(0,), ready=False)`, and then
        `self.state, loss = await step(self.state, batch)`. `ready` is chosen here instead of in each call, because one
        place in a loop always does the same. To do both, bind the function twice.

        Args:
            fn: see `run`.
            donate_argnums: see `run`.
            ready: see `run`.

        Raises:
            OptionsError: an argument does not accept its value.
        """
        return BoundFunction(self._function(self._device, self, fn, donate_argnums, ready))

    @overload
    async def put(self, value: "npt.NDArray[Any] | float", specs: Any = None, /) -> "jax.Array": ...
    @overload
    async def put(self, value: T, specs: Any = None, /) -> T: ...
    async def put(self, value: Any, specs: Any = None, /) -> Any:
        """Put arrays on the device, such as the weights of a model; off the event loop.

        Functions of this actor take these arrays without another transfer. The caller may change or drop its arrays of
        NumPy afterwards. An array that is on the device already is returned unchanged: if one of the two is donated,
        the other is gone, too.

        Args:
            value: an array of NumPy or JAX, a number, or a pytree of these.
            specs: how the arrays are split over a mesh: one `PartitionSpec` for all arrays, or a prefix of the
                structure of `value` with a spec for each array. None is a copy on every device.

        Returns:
            The value with arrays of JAX, once they are on the device.

        Raises:
            ValueError: `specs` does not fit the value or the device.
            DeviceError: there is no such device, or the call is inside of `jax.enable_x64`.
            EngineClosedError: the event loop is being shut down, or the Engine was closed.
        """
        return await self._put(self._device, value, specs)

    async def run(
        self, fn: Callable[[*Ts], R], /, *args: *Ts, donate_argnums: tuple[int, ...] = (), ready: bool = True
    ) -> R:
        """Run a function of arrays on the device.

        The function is compiled when it is called with new shapes or dtypes, so pass the same function each time
        instead of a new lambda.

        A call that donates is not interrupted once the device has begun to run it: a cancelled caller then gets the
        result, and the cancellation is raised where the caller waits next. An earlier cancellation is raised at once,
        and nothing was donated. So `self.state = await actor.run(step, self.state, donate_argnums=(0,))` always leaves
        a state that can be used.

        Args:
            fn: plain JAX.
            *args: arrays of JAX or NumPy, scalars, and pytrees of these.
            donate_argnums: positions of the arguments whose memory the result may take. Donated arguments cannot be
                used again.
            ready: whether to wait until the result is computed. If False, pass the returned arrays to the next call.

        Returns:
            The result of the function, on the device.

        Raises:
            OptionsError: an option does not accept its value.
            DeviceError: there is no such device, or its JAX computes wrong values.
            EngineClosedError: the event loop is being shut down, or the Engine was closed.
            Exception: an error that the function raised while it was traced, or the device while the program ran.
        """
        return cast(R, await self._function(self._device, self, fn, donate_argnums, ready).call(args))


class BoundFunction(Generic[*Ts, R]):
    """A function that is bound to a device; made by `DeviceActor.bind`."""

    def __init__(self, function: "DeviceFunction") -> None:
        self._call = function.call
        self._compile = function.compile

    async def warmup(self, *samples: tuple[Any, ...], on_progress: Callable[[int, int], object] | None = None) -> int:
        """Compile the programs for calls like these before the first call.

        Shapes that were announced here do not count as recompilations, such as the sizes of the batches that a loop
        makes. Later shapes that were not announced are logged as `program.recompiled`.

        Args:
            *samples: for each program, the arguments of a call as a tuple. A `jax.ShapeDtypeStruct` may stand for an
                array.
            on_progress: called after each program, with the number of compiled programs and the number of all programs.

        Returns:
            The number of different programs, including programs that were compiled before.

        Raises:
            DeviceError: there is no such device.
            TypeError: a sample is no tuple, such as an array: write `warmup((x,))`.
            Exception: the error that the function raised while it was traced.
        """
        return await self._compile(samples, on_progress)

    def __call__(self, *args: *Ts) -> Coroutine[Any, Any, R]:
        """Run the function, as `DeviceActor.run` does, and return its result.

        Args:
            *args: arrays of JAX or NumPy, scalars, and pytrees of these.
        """
        return self._call(args)
