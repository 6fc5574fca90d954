"""`device_node`: a node whose function is plain JAX and runs on a device."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from .._errors import DeviceError
from ..actors.accepted import NAME, SWITCH, check, instance, optional, refuse_beside, refuse_unknown, whole
from ..actors.batching import BATCH, Batch
from ..actors.policy import Policy, Retry
from ..engine.engine import default
from ..engine.graph import Graph
from ..engine.node import Execution, Node, is_async, is_generator
from ..engine.options import resolve
from ..engine.stateful import is_stateful
from ..engine.tracing.annotations import signature_of
from ..engine.tracing.tracer import active
from .device_batch import PackedBatch, on_device
from .jax_import import is_device, require_jax
from .parameter_checks import DeviceOptions, made_by_batches
from .statistics import BatchStatistics, CompileStatistics

if TYPE_CHECKING:
    from .executor import DeviceExecutor, FindSize

P = ParamSpec("P")
R = TypeVar("R")


class _NodeOptions(TypedDict, total=False):
    """The options of `device_node`."""

    name: str | None
    device: Any
    batch: Batch | None
    static: tuple[str, ...]
    shared: tuple[str, ...]
    donate: bool
    pure: bool
    fuse: bool
    stateless: bool
    in_specs: Any
    out_specs: Any
    replicas: int
    prefetch: int
    sample_input: tuple[Any, ...] | list[tuple[Any, ...]]
    concurrency: int | None
    timeout_seconds: float | None
    retry: Retry | None
    fallback: Callable[[Exception], Any] | None
    failover: Callable[..., Any] | None
    runs_on: Execution | None


_POLICY: Final = ("concurrency", "timeout_seconds", "retry", "fallback", "failover", "pure", "stateless")
_DEFAULTS: Final[dict[str, Any]] = {
    **{field.name: field.default for field in fields(Policy) if field.name in _POLICY},
    **{field.name: field.default for field in fields(DeviceOptions)}, "name": None, "runs_on": None,
}  # fmt: skip
_RULES: Final = {"batch": BATCH, "pure": SWITCH, "fuse": SWITCH, "replicas": whole(1), "prefetch": whole(1)}


@overload
def device_node(fn: Callable[P, R], /) -> "DeviceNode[P, R]": ...
@overload
def device_node(**options: Unpack[_NodeOptions]) -> "Callable[[Callable[P, R]], DeviceNode[P, R]]": ...
def device_node(fn: Callable[..., Any] | None = None, /, **options: Unpack[_NodeOptions]) -> Any:
    """Make a node of a JAX function: the function is compiled off the event loop, and runs on a device.

    The function is written for one item, and can be called directly with one item. It takes arrays of JAX or NumPy,
    scalars, and pytrees of them. An argument that comes from a `@resource` is a parameter, which is placed on the
    device once.

    Args:
        fn: the function, when used without parentheses.
        name: the name of the node in drawings, traces and errors; default: the name of the function.
        device: the device, as `penstock.devices.select` takes it; "auto" leaves the choice to the execution option
            `device_strategy`.
        batch: stacks the calls of any requests, and runs them as one vectorised program. With `devices.PackedBatch`,
            several calls share a row, and the function is written for rows.
        static: names of the parameters whose values are compiled into the program. These values must be hashable, and
            cannot be arrays.
        shared: names of the parameters for which all calls of a batch pass the same arrays, such as a table that the
            body of `map_each` captures. These arrays are passed once instead of stacked. Calls with other arrays (other
            objects) run in other batches. Arrays that are written in the graph itself need not be named. Only with
            `batch=`.
        donate: whether the result may take over the memory of arguments; default: False. An argument is donated only if
            it is the result of a device node and no other reader needs it, not even another attempt. The state of a
            `fold` or a `while_loop` that device nodes make is donated once all other steps have read it. No effect with
            `batch=`, because stacked arrays are new.
        pure: states that the function has no effects; default: True. Then equal calls are merged, a failed batch is
            tried again in parts, and adjacent nodes become one program.
        fuse: whether the node may become one program with adjacent nodes; default: True. With False, the node has a
            program of its own, and its results equal that program's bit by bit. The execution option of the same name
            does that for all nodes of a call.
        stateless: states that results that differ by rounding are acceptable. It matters where a call with
            `checkpoint=` has state behind this node, and `batch=` makes batches of the calls that happen to be there.
        in_specs: how each argument is split over a mesh: a tuple with a `PartitionSpec` for each parameter, a
            dictionary by parameter, or one spec for all parameters. None is a copy on every device. A spec may be a
            prefix of the argument's pytree, or a `NamedSharding` over the same mesh. With `batch=`, the first axis is
            that of the batch, except for `shared` parameters.
        out_specs: how the result is split over a mesh; by default the compiler decides.
        replicas: how many devices run the node, by default one: `device`, and the next devices of its platform. Each
            call goes to the next free device.
        prefetch: how many jobs a device holds, by default two: one runs while the next is transferred. Do not write
            into a host array that was passed to the node until the result is there.
        sample_input: the arguments of one item as a tuple, or a list of such tuples, without the arguments that come
            from resources. `deploy(..., warmup=True)` compiles the programs for these samples before the first call.
        concurrency: how many items the node handles at a time, per Engine; default: without a limit.
        timeout_seconds: how long one attempt may take, in seconds.
        retry: after which failures another attempt is made, and when.
        fallback: a function of the exception, called once after the last attempt has failed; its result becomes the
            result of the node.
        failover: another node with the same parameters and result, which takes over after the last attempt has
            failed; see `penstock.node`. Not with `donate=True`.
        runs_on: a `penstock.extension.Execution` that runs the function in another place, such as on workers that have
            their own devices. Each worker compiles the function for the device that `device=` names there. The items of
            a batch are gathered in this process. Not with `replicas=`, `in_specs=`, `out_specs=` and `sample_input=`.

    Returns:
        A `Node`.

    Raises:
        MissingExtraError: JAX is not installed.
        TypeError: the function cannot run on a device, or an option does not fit it.
        OptionsError: an option is unknown, or does not accept its value.
    """
    given: dict[str, Any] = {**_DEFAULTS, **options}
    refuse_beside(fn, [option for option in options if given[option] is not _DEFAULTS.get(option)], "ps.device_node")
    refuse_unknown(options, _DEFAULTS, "@ps.device_node")
    name, runs_on = given.pop("name"), given.pop("runs_on")

    def decorate(target: Callable[..., Any]) -> Node[..., Any]:
        require_jax()
        from .executor import DeviceExecutor
        from .fusion import fuse_regions
        from .projection import give_items

        check("name", name, optional(NAME))
        label = name or str(getattr(target, "__name__", type(target).__name__))
        _check_function(target, label)
        _check_options(label, given)
        own: dict[str, Any] = {field.name: given[field.name] for field in fields(DeviceOptions)}
        own["shared"] = _names(label, "shared", own["shared"])
        _check_batched(target, label, own["batch"], own["shared"])
        own["static"] = _names(label, "static", own["static"])
        own["batch"] = on_device(own["batch"])
        own["sample_input"] = _samples(label, own["sample_input"])
        policy, options = Policy(**{option: given[option] for option in _POLICY}), DeviceOptions(**own)
        find_size: FindSize | None = None
        if options.batch is not None and options.batch.max_size == "auto":
            if runs_on is not None:
                raise TypeError(
                    f'device node {label!r} has runs_on=, and batch with max_size="auto": a size is found on a device '
                    "of this process; write the size, such as max_size=16"
                )
            if not options.sample_input:
                raise TypeError(
                    f'device node {label!r} has batch with max_size="auto", but no sample_input= to find a size with: '
                    "give it the arguments of one item, as a tuple"
                )
            from . import size_search

            find_size = size_search.find_size
        if runs_on is not None:
            return _elsewhere(label, target, policy, runs_on, options)
        executor = DeviceExecutor(label, target, options, (fuse_regions, give_items), find_size=find_size)
        return DeviceNode(target, policy, name=label, runs_on=executor)

    return decorate if fn is None else decorate(fn)


class DeviceNode(Node[P, R]):
    """A node whose function runs on a device; made by `penstock.device_node`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function; while a graph is traced, record the call instead.

        Raises:
            DeviceError: the function takes packed rows, and is called with an item, outside of an Engine.
        """
        if isinstance(self._runs_on._batch, PackedBatch) and active() is None:
            bound = signature_of(self.fn).bind_partial(*args, **kwargs)
            if bound.arguments.get("segments") is None:
                raise DeviceError(
                    f"device node {self.name!r} has batch=PackedBatch(...): its function takes rows, which an Engine "
                    "makes of items. Call the node in a graph that engine.run or a deployment runs; or call it with "
                    "rows of your own, and segments="
                )
        return super().__call__(*args, **kwargs)

    def compile_statistics(self) -> CompileStatistics:
        """Return how many programs were compiled for this node, how long compiling took, and why each was needed."""
        return self._device_executor.statistics()

    def batch_statistics(self) -> BatchStatistics:
        """Return how many calls the batches held, and how much of the batches was padding; all 0 without `batch=`.

        With `runs_on=`, these are the batches that this process has gathered. Their padding is not known here.
        """
        if self._elsewhere is not None:
            from .elsewhere import GatheredHere

            gathered = self._runs_on
            return gathered.statistics() if isinstance(gathered, GatheredHere) else BatchStatistics(0, 0, 0, 0, 0)
        return self._device_executor.batch_log.statistics()

    def vmap(self, in_axes: Any = 0, out_axes: Any = 0, batch_size: int | None = None) -> "DeviceNode[..., Any]":
        """Return a node that takes whole arrays, and maps the function of this node over their rows, as `jax.vmap`.

        Without `batch_size`, all rows run at once, in a program for that number of rows. With `batch_size`, the rows
        run in chunks, all with one program for any number of rows: the last chunk is padded, and the results of the
        padding are left out. On a mesh, the rows of each chunk are split over all devices, and other arguments are
        split as `in_specs=` says. With `batch_size`, and on a mesh, the result is on the host, as NumPy arrays.

        Args:
            in_axes: the axis of the rows in each argument: one number for all arguments, or a tuple with a number, None
                or a pytree of these for each argument. An argument with None is passed once, for all rows.
            out_axes: the axis of the rows in the result: a number, or a pytree of numbers. None for a result that is
                the same for all rows.
            batch_size: how many rows run at a time; None for all rows.

        Returns:
            The new node. It has the policy of this node. Its calls are not stacked: `batch=` does not apply.

        Raises:
            OptionsError: `batch_size` is not a whole number.
            TypeError: `in_axes` has more entries than there are parameters, or the node packs its items into rows.
        """
        from .whole_arrays import vmapped

        executor = vmapped(self.name, self._device_executor, in_axes, out_axes, batch_size)
        return DeviceNode(executor.fn, self.policy, name=executor.name, runs_on=executor)

    async def warmup(
        self, *sample: Any, resources: Mapping[str, Any] | None = None, constants: Mapping[str, Any] | None = None
    ) -> None:
        """Compile the programs for calls like a sample, before the first call; for a batched node, for all batch sizes.

        Args:
            *sample: the arguments of one item, in order, without the arguments in `resources` and `constants`.
            resources: by parameter, values like those that will come from resources.
            constants: by parameter, arrays like those that are written in the graph or are defaults. A batched node
                takes these arrays once for a whole batch, in another program than arrays that callers pass. Arguments
                named in `shared=` belong to the sample. `deploy(..., warmup=True)` finds all of this by itself.

        Raises:
            TypeError: the sample has too many arguments, or too few.
            DeviceError: there is no such device.
            Exception: the error that the function raised while it was traced.
        """
        given, same = resources or {}, constants or {}
        pools, options = default._runtime.pools, resolve("Engine", {}, {})
        executor = self._device_executor
        arguments = executor.arguments(frozenset(given), frozenset(same))
        await executor.compile(pools, options.device_strategy, arguments, sample, {**given, **same})

    @property
    def _device_executor(self) -> "DeviceExecutor":
        from .executor import DeviceExecutor

        if not isinstance(self._runs_on, DeviceExecutor):
            raise DeviceError(f"device node {self.name!r} has runs_on=: no device of this process runs it")
        return self._runs_on


# Options that a node on workers cannot have, and the reason.
_NOT_ELSEWHERE: Final = {
    "replicas": "each worker is a replica, so say how many workers there are",
    "in_specs": "a mesh does not reach over workers: their devices belong to different processes",
    "out_specs": "a mesh does not reach over workers: their devices belong to different processes",
    "sample_input": "a worker compiles when the first call comes, and is not warmed up before",
}


def _elsewhere(
    label: str, target: Callable[..., Any], policy: Policy, runs_on: Execution, options: DeviceOptions
) -> "DeviceNode[..., Any]":
    """Make a node that other processes compile for their own devices; batches are gathered in this process."""
    from .elsewhere import GatheredHere, compiled_there

    check("runs_on", runs_on, instance(Execution, "an Execution of penstock.extension"), f"device node {label!r} has ")
    for option, reason in _NOT_ELSEWHERE.items():
        if getattr(options, option) != _DEFAULTS[option]:
            raise TypeError(f"device node {label!r} has runs_on=, and {option}=: {reason}; leave out {option}=")
    if options.batch is not None and not runs_on._takes_batches:
        raise TypeError(
            f"device node {label!r} has runs_on= and batch=, which do not go together: {type(runs_on).__name__} has no "
            "bind_batch; leave out runs_on= or batch="
        )
    if not isinstance(options.device, str):
        raise TypeError(
            f"device node {label!r} has runs_on=, and device={options.device!r}, which belongs to this process: write "
            "the name of a device that each worker has, such as 'gpu' or 'cpu:1'; a mesh does not reach over workers"
        )
    given = {"device": options.device, "static": options.static, "shared": options.shared, "donate": options.donate,
             "pure": options.pure, "prefetch": options.prefetch}  # fmt: skip
    there = compiled_there(target, label, given, options.batch, device_node)
    if options.batch is None:
        made = DeviceNode[..., Any](target, policy, name=label, runs_on=runs_on)
    else:
        gathered = GatheredHere(runs_on, there, options.batch, policy.concurrency)
        gathered._made = made_by_batches(signature_of(target), options.batch, label)
        made = DeviceNode[..., Any](target, replace(policy, concurrency=None), name=label, runs_on=gathered)
    made._elsewhere, there.node = there, made
    return made


def _check_options(label: str, given: Mapping[str, Any]) -> None:
    from .selection import is_selectable

    device, donate, replicas = given["device"], given["donate"], given["replicas"]
    if not is_selectable(device):
        raise TypeError(
            f"device node {label!r} has device={device!r}: the name of a device, a jax.Device, a jax.sharding.Mesh or "
            "a DeviceMesh"
        )
    if not isinstance(donate, bool):
        raise TypeError(
            f"device node {label!r} has donate={donate!r}: True or False; the planner finds out which arguments it "
            "may overwrite. To name arguments, use penstock.devices.actor(...).run with donate_argnums="
        )
    for option, rule in _RULES.items():
        check(option, given[option], rule, f"device node {label!r} has ")
    if replicas > 1 and not (isinstance(device, str) or is_device(device)):
        raise TypeError(
            f"device node {label!r} has replicas={replicas}, and runs on a mesh, whose devices compute together: for "
            "replicas, name one device; or split the rows of batches over the mesh with in_specs="
        )


def _check_batched(target: Callable[..., Any], label: str, batch: object, shared: tuple[str, ...]) -> None:
    if batch is None and shared:
        raise TypeError(
            f"device node {label!r} has shared={shared!r}, and no batch=: calls that run one by one share nothing; "
            "leave out shared="
        )
    with suppress(ValueError):  # some builtins have no signature
        if batch is not None and not signature_of(target).parameters:
            raise TypeError(
                f"device node {label!r} has batch=, and no parameter whose arguments could be stacked: leave out batch="
            )


def _names(label: str, option: str, value: object) -> tuple[str, ...]:
    names = cast("Sequence[object]", value) if isinstance(value, tuple | list) else ()
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in names):
        example = f", as in {option}=({value!r},)" if isinstance(value, str) else ""
        raise TypeError(f"device node {label!r} has {option}={value!r}: a tuple of names of parameters{example}")
    return cast("tuple[str, ...]", tuple(names))


def _samples(label: str, given: tuple[Any, ...] | list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    if isinstance(given, tuple) and not given:
        return ()
    samples: list[Any] = [*given] if isinstance(given, list) else [given]
    for sample in samples:
        if not isinstance(sample, tuple):
            raise TypeError(
                f"device node {label!r}: sample_input= is a tuple of the arguments of one item, or a list of such "
                f"tuples, and has a {type(sample).__name__}: for a single argument, write sample_input=(argument,)"
            )
    return tuple(samples)


def _check_function(target: object, label: str) -> None:
    if isinstance(target, Node | Graph):
        kind = "node" if isinstance(target, Node) else "graph"
        raise TypeError(f"{target.name!r} is a {kind} already; @device_node goes on a plain function")
    if isinstance(target, type) or is_stateful(target) or not callable(target):
        raise TypeError(
            f"@device_node goes on a function, and {target!r} is not a function: put state on a device into a class "
            "that is a @node and uses penstock.devices.actor"
        )
    if is_async(target) or is_generator(target) or inspect.isgeneratorfunction(target):
        raise TypeError(
            f"device node {label!r} is an `async def` or a generator: make it a plain function of arrays, and await "
            "in a @node before or after it"
        )
