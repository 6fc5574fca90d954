"""Execution options: a frozen record of all options, and the merge of the levels at which options can be set."""

import dataclasses
import re
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, Unpack

from .._errors import OptionsError
from .._public import LateModule
from ..actors.accepted import KEY, SWITCH, TIMEOUT, OptionRule, check, check_fields, is_whole, one_of, optional, whole
from ..actors.policy import Policy

if TYPE_CHECKING:
    from ..saving import durable as saving
    from ..saving.durable import Durable
else:
    saving = LateModule("penstock.saving.durable")

Scheduler: TypeAlias = Literal["auto", "actors", "parallel", "wave", "sequential"]
"""The values of `scheduler=`."""
ChosenScheduler: TypeAlias = Literal["actors", "parallel", "wave", "sequential"]
OnFinished: TypeAlias = Literal["again", "return", "raise"]
"""The values of `on_finished=`."""


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `run`, `stream`, `deploy` and `Engine`; see `ExecutionOptions`."""

    scheduler: Scheduler
    timeout_seconds: float | None
    priority: int
    max_workers: int | None
    max_in_flight: int
    max_queue: int | None
    ordered: bool
    order_by: Callable[[Any], Hashable] | None
    on_error: Literal["raise", "skip"]
    reuse_plans: bool
    fuse: bool
    device_strategy: str
    trace_execution: bool | Literal["calls"]
    trace_items: bool
    collect_metrics: bool
    durable: "saving.Durable | None"


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How calls are executed.

    Precedence, highest first: keyword arguments of the call, the innermost `with execution_options(...)`, outer
    `with` blocks, the keyword arguments of the Engine, `set_execution_options(...)`, these defaults.

    Attributes:
        scheduler: "actors" (a pipeline), "parallel" (each node fires when its inputs are there), "wave" (level by
            level), "sequential" (one node after the other, for debugging), or "auto": "parallel" for one call,
            "actors" for many.
        timeout_seconds: the deadline of a call, or of a whole stream, in seconds from its start; None without a
            deadline.
        priority: the priority of a call to a deployment: higher first; among equals, first come, first served.
        max_workers: for a run, how many of its handlers run at a time, over all its nodes and bodies. For a stream or a
            deployment, how many items an `async def` node without `concurrency=` handles at a time. For each run,
            stream and deployment, also how many threads of its Engine it may keep busy at a time. With None, a run has
            no such bound; a node handles up to 32 items in a stream, and in a deployment as many as calls are in
            flight; and each may use all threads of the Engine. An Engine has 32 threads, unless its own `max_workers`
            says otherwise.
        max_in_flight: how many items of a stream, or calls of a deployment, are in flight at a time.
        max_queue: how many calls may wait for a place in a deployment; further calls are refused with `Overloaded`.
            None: all callers wait.
        ordered: whether a stream yields in input order, or as items are completed.
        order_by: for one stream of calls: a function that returns the key of a `Call`. A call begins when all earlier
            calls of the stream with its key have ended, and none of their handlers runs. Calls whose key is None have
            no order.
        on_error: whether a stream raises an item's error in its turn, or skips and logs the item.
        reuse_plans: whether a graph is traced and planned once for all its calls, and equal calls of `pure` nodes in
            the graph are made once. With False, each run, stream and deployment traces and plans its graphs anew, for
            itself alone, and makes every call in the source. Programs compiled for devices are kept all the same.
        fuse: whether device nodes that belong together become one program. With False, each node is a separate
            program, so fusion cannot change a bit of the results. A deployment keeps the value that it started with.
        device_strategy: where device nodes with device="auto" run: a name that `penstock.devices.select` accepts, such
            as "auto", "cpu" or "gpu:1". A deployment keeps the strategy that it started with.
        trace_execution: whether spans are opened, if the application has set up tracing and the call is sampled: True
            for spans of calls, of their steps and of shared work, such as a batch; "calls" for no spans of steps; False
            for no spans.
        trace_items: whether each item of a stream of calls begins a trace of its own, which is sampled separately and
            linked to the span of the stream; for streams that run long. With False, all items are in the trace of the
            stream.
        collect_metrics: whether the metrics of the process count a run, a stream or a deployment. Work on devices is
            counted in any case, because a batch belongs to many calls.
        durable: where durable loops are stored, in place of the `durable=` of the loop; for a test, or for a tenant
            with a separate file. A deployment keeps the value with which it was made.

    Raises:
        OptionsError: a value is out of its range.
    """

    scheduler: Scheduler = "auto"
    timeout_seconds: float | None = None
    priority: int = 0
    # anyio's and asyncio's default thread pools hold 40 and cpu + 4; beyond 32 I/O-bound stages gained nothing here.
    max_workers: int | None = None
    # Twice DEFAULT_WORKERS: one stage can be full while its items wait for their turn at the exit.
    max_in_flight: int = 64
    max_queue: int | None = None
    ordered: bool = True
    order_by: Callable[[Any], Hashable] | None = None
    on_error: Literal["raise", "skip"] = "raise"
    reuse_plans: bool = True
    fuse: bool = True
    device_strategy: str = "auto"
    trace_execution: bool | Literal["calls"] = True
    trace_items: bool = False
    collect_metrics: bool = True
    durable: "Durable | None" = None

    def __post_init__(self) -> None:
        check_fields(self, _ACCEPTED)


def _is_name_of_place(value: object) -> bool:
    # Only the form is checked. Only the package `devices` knows which devices exist, and this floor cannot import it.
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*(:\d+)?", value) is not None


_ACCEPTED: Final = {
    "scheduler": one_of(Scheduler),
    "timeout_seconds": TIMEOUT,
    "priority": OptionRule("a whole number, higher first", is_whole),
    "max_workers": optional(whole(1)),
    "max_in_flight": whole(1),
    "max_queue": optional(whole(0)),
    "order_by": optional(KEY),
    "on_error": one_of(Literal["raise", "skip"]),
    "device_strategy": OptionRule(
        "'auto', or the name of a platform, 'cpu', 'gpu', 'cuda', 'rocm' or 'tpu', perhaps with a number, as in "
        "'gpu:1'",
        _is_name_of_place,
    ),
    "durable": optional(OptionRule("a Durable", lambda value: isinstance(value, saving.Durable))),
    **dict.fromkeys(("ordered", "reuse_plans", "fuse", "trace_items", "collect_metrics"), SWITCH),
    "trace_execution": OptionRule("True, False or 'calls'", lambda value: isinstance(value, bool) or value == "calls"),
}
DEFAULTS = ExecutionOptions()
# Without `max_workers`: the threads of an Engine, and the items that an `async def` handles at a time in a stream.
DEFAULT_WORKERS: Final = 32
NAMES = frozenset(field.name for field in dataclasses.fields(ExecutionOptions))

_SHARED = NAMES - {"order_by"}  # a function of the calls of one stream
_ONE_CALL = frozenset({"timeout_seconds", "priority", "trace_execution"})
_ONE_RUN = frozenset({
    "scheduler", "timeout_seconds", "max_workers", "reuse_plans", "fuse", "device_strategy", "trace_execution",
    "collect_metrics", "durable",
})  # fmt: skip
# The options of each verb. `run` has one item, so no option that bounds or orders several items applies to `run`.
APPLICABLE: Mapping[str, frozenset[str]] = {
    "run": _ONE_RUN,
    "stream": NAMES - {"durable", "max_queue", "priority"},
    "deploy": _SHARED - {"ordered", "on_error", "priority", "trace_items"},
    "stream(call)": _ONE_RUN,
    "service.run": _ONE_CALL,
    "service.stream": _ONE_CALL | {"ordered", "order_by", "on_error", "max_in_flight", "trace_items"},
    "service.stream(call)": _ONE_CALL,
    "Engine": _SHARED,
    "set_execution_options": _SHARED,
    "execution_options": _SHARED,
}

_process_wide: dict[str, Any] = {}
# The options that `with execution_options(...)` around the caller sets.
scoped: ContextVar[Mapping[str, Any]] = ContextVar("penstock_execution_options", default={})  # noqa: B039 - never changed in place


def set_execution_options(**options: Unpack[CallOptions]) -> None:
    """Change the default options for the whole process; without arguments, restore the defaults of the library.

    Args:
        **options: the fields of `ExecutionOptions` to change; earlier changes of other fields stay.

    Raises:
        OptionsError: a name is unknown, or a value is out of its range.
    """
    checked(options, "set_execution_options")
    if options:
        _process_wide.update(options)
    else:
        _process_wide.clear()


@contextmanager
def execution_options(**options: Unpack[CallOptions]) -> Generator[None, None, None]:
    """Change the options of all calls made inside the `with`, and in tasks and threads that inherit its context.

    Tasks started inside inherit the options. So do `asyncio.to_thread`, `anyio.to_thread.run_sync`, and nodes, also in
    threads. `threading.Thread`, the threads of an executor, and worker processes do not inherit the options;
    `contextvars.copy_context().run(...)` takes the options into such a thread.

    Args:
        **options: the fields of `ExecutionOptions` to change.

    Raises:
        OptionsError: a name is unknown, or a value is out of its range.
    """
    checked(options, "execution_options")
    token = scoped.set({**scoped.get(), **options})
    try:
        yield
    finally:
        scoped.reset(token)


def resolve(verb: str, given: Mapping[str, Any], engine: Mapping[str, Any]) -> ExecutionOptions:
    """Merge the options of all levels for one call.

    Args:
        verb: the verb, a key of `APPLICABLE`.
        given: the keyword arguments of the call.
        engine: the keyword arguments of its Engine.

    Raises:
        OptionsError: a keyword argument of the call is unknown, does not apply to this verb, or is out of its range.
    """
    if given:
        checked(given, verb)
    around = scoped.get()
    if not (given or engine or around or _process_wide):
        return DEFAULTS
    return ExecutionOptions(**{**_process_wide, **engine, **around, **given})


def chosen(options: ExecutionOptions) -> ChosenScheduler:
    """Return the scheduler of one call."""
    return "parallel" if options.scheduler == "auto" else options.scheduler


def of_engine(engine: Mapping[str, Any]) -> ExecutionOptions:
    """Return the options of an Engine with these keyword arguments; `with execution_options(...)` does not count."""
    return ExecutionOptions(**{**_process_wide, **engine})


def checked(options: Mapping[str, Any], verb: str) -> None:
    """Check that all options apply to a verb, and that their values are in range.

    Raises:
        OptionsError: a name is unknown or does not apply, or a value is out of its range.
    """
    applicable = APPLICABLE[verb]
    for name, value in options.items():
        if name not in applicable:
            why = f"does not apply to {verb}" if name in NAMES else "is no execution option"
            if name == "checkpoint":
                why = f"is for one call of engine.stream or engine.run, not for {verb}: a deployment goes on for ever"
            if name == "detached":
                why = "is for one call of a deployment, in which it goes on: service.run(call, detached=True, ...)"
            options_of_verb = ", ".join(sorted(applicable))
            raise OptionsError(f"{name!r} {why}; the execution options of {verb} are {options_of_verb}{_instead(name)}")
        check(name, value, _ACCEPTED[name])


def _instead(name: str) -> str:
    """Return the end of a message: what to write instead of an option that a verb does not take; empty if unknown."""
    verbs = [verb for verb in ("run", "stream", "stream(call)", "deploy", "Engine") if name in APPLICABLE[verb]]
    if verbs:
        return f"; {name}= is for {', '.join(verbs)}"
    if name in Policy.__dataclass_fields__:
        return f"; {name}= is for nodes, @ps.node({name}=...)"
    is_parallel = "; leave it out: nodes that do not wait for each other run at the same time"
    return is_parallel if "parallel" in name else ""
