"""Execution options: one frozen record, and the rules by which the levels at which one can set them are merged."""

import dataclasses
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack

from .._errors import OptionsError
from ..actors.accepted import SWITCH, TIMEOUT, Accepted, check, check_fields, is_whole, one_of, optional, whole

Scheduler: TypeAlias = Literal["auto", "actors", "parallel", "wave", "sequential"]
"""The values of `scheduler=`."""
ChosenScheduler: TypeAlias = Literal["actors", "parallel", "wave", "sequential"]


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `run`, `stream`, `deploy` and `Engine`; see `ExecutionOptions`."""

    scheduler: Scheduler
    timeout_seconds: float | None
    priority: int
    max_workers: int | None
    max_in_flight: int
    max_queue: int | None
    ordered: bool
    on_error: Literal["raise", "skip"]
    enable_caching: bool
    device_strategy: str
    trace_execution: bool
    trace_items: bool
    collect_metrics: bool


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How calls are executed.

    Precedence, highest first: keyword arguments of the call, the innermost `with execution_options(...)`, those
    around it, the keyword arguments of the Engine, `set_execution_options(...)`, these defaults.

    Attributes:
        scheduler: "actors" (a pipeline), "parallel" (each node fires when its inputs are there), "wave" (level by
            level), "sequential" (one node after the other, for debugging), or "auto": "parallel" for one call,
            "actors" for many.
        timeout_seconds: deadline of a call, or of a whole stream, in seconds from its start.
        priority: of a call to a deployment: higher first, first come first served within one.
        max_workers: how many threads a run, a stream or a deployment may have busy at a time, over all of its nodes,
            of those that its Engine has; and how far an `async def` node without `concurrency=` grows in a stream or a
            deployment. None: all threads of the Engine, which are 32 unless its own `max_workers` says otherwise; such
            a node grows to 32 in a stream, and in a deployment has no bound but that of the calls, `max_in_flight`.
        max_in_flight: items of a stream or deployment that are in flight at a time.
        max_queue: calls that may wait for a place in a deployment; more are refused with `Overloaded`. None: callers
            wait.
        ordered: whether a stream yields in input order, or as items are completed.
        on_error: whether a stream raises an item's error in its turn, or skips and logs the item.
        enable_caching: whether a graph is traced and planned once for all of its calls, and equal calls of `pure` nodes
            in it are made once. With False, each run, stream and deployment traces and plans its graphs anew, for
            itself alone, and makes every call that the source has. What was compiled for devices is kept all the same.
        device_strategy: where device nodes run that are left to it by device="auto": a name that
            `penstock.devices.select` takes, "auto", "cpu", "gpu:1". A deployment keeps the one that it began with.
        trace_execution: whether spans are opened, if the application has set up tracing and the call is sampled.
        trace_items: whether each item of a stream of calls begins a trace of its own, sampled by itself and linked to
            the span of the stream, or all are in the trace of the stream. For streams that run for long.
        collect_metrics: whether what a run, a stream or a deployment does counts in the metrics of the process. What
            happens on devices counts in any case: a batch belongs to many.

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
    on_error: Literal["raise", "skip"] = "raise"
    enable_caching: bool = True
    device_strategy: str = "auto"
    trace_execution: bool = True
    trace_items: bool = False
    collect_metrics: bool = True

    def __post_init__(self) -> None:
        check_fields(self, _ACCEPTED)


def _is_device_name(value: object) -> bool:
    # Which platforms and devices there are is known where they are looked for, on the floor above.
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*(:\d+)?", value) is not None


_ACCEPTED: Final = {
    "scheduler": one_of(Scheduler),
    "timeout_seconds": TIMEOUT,
    "priority": Accepted("a whole number, higher first", is_whole),
    "max_workers": optional(whole(1)),
    "max_in_flight": whole(1),
    "max_queue": optional(whole(0)),
    "on_error": one_of(Literal["raise", "skip"]),
    "device_strategy": Accepted(
        "'auto', or the name of a platform, 'cpu', 'gpu', 'cuda', 'rocm' or 'tpu', which a number may follow, as in "
        "'gpu:1'",
        _is_device_name,
    ),
    **dict.fromkeys(("ordered", "enable_caching", "trace_execution", "trace_items", "collect_metrics"), SWITCH),
}
DEFAULTS = ExecutionOptions()
# The threads of an Engine, and how far an `async def` grows in a stream, where `max_workers` says nothing.
DEFAULT_WORKERS: Final = 32
NAMES = frozenset(field.name for field in dataclasses.fields(ExecutionOptions))

_ONE_CALL = frozenset({"timeout_seconds", "priority", "trace_execution"})
_ONE_RUN = frozenset({
    "scheduler", "timeout_seconds", "max_workers", "enable_caching", "device_strategy", "trace_execution",
    "collect_metrics",
})  # fmt: skip
# What applies to each verb. `run` has one item, so nothing that bounds or orders several items applies to it.
APPLICABLE: Mapping[str, frozenset[str]] = {
    "run": _ONE_RUN,
    "stream": NAMES - {"max_queue", "priority"},
    "deploy": NAMES - {"ordered", "on_error", "priority", "trace_items"},
    "stream(call)": _ONE_RUN,
    "service.run": _ONE_CALL,
    "service.stream": _ONE_CALL | {"ordered", "on_error", "max_in_flight", "trace_items"},
    "service.stream(call)": _ONE_CALL,
    "Engine": NAMES,
}

_process_wide: dict[str, Any] = {}
# What `with execution_options(...)` around the caller sets.
scoped: ContextVar[Mapping[str, Any]] = ContextVar("penstock_execution_options", default={})  # noqa: B039 - never changed in place


def set_execution_options(**options: Unpack[CallOptions]) -> None:
    """Change the defaults for the whole process; without arguments, go back to those of the library.

    Raises:
        OptionsError: a name is unknown, or a value is out of its range.
    """
    checked(options, "Engine")
    if options:
        _process_wide.update(options)
    else:
        _process_wide.clear()


@contextmanager
def execution_options(**options: Unpack[CallOptions]) -> Generator[None, None, None]:
    """Change the options for all calls made inside the `with`, also those of what inherits its context variables.

    That are tasks that are started in it, `asyncio.to_thread`, `anyio.to_thread.run_sync`, and nodes, also in threads;
    not `threading.Thread`, the threads of an executor and worker processes. `contextvars.copy_context().run(...)` takes
    the options into those threads.

    Raises:
        OptionsError: a name is unknown, or a value is out of its range.
    """
    checked(options, "Engine")
    token = scoped.set({**scoped.get(), **options})
    try:
        yield
    finally:
        scoped.reset(token)


def resolve(verb: str, given: Mapping[str, Any], engine: Mapping[str, Any]) -> ExecutionOptions:
    """Merge all levels for one call.

    Args:
        verb: which verb of the engine, a key of `APPLICABLE`.
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


def of_engine(engine: Mapping[str, Any]) -> ExecutionOptions:
    """Return what an Engine with these keyword arguments begins with."""
    return ExecutionOptions(**{**_process_wide, **engine})


def checked(options: Mapping[str, Any], verb: str) -> None:
    """Check names against what applies to a verb, and values against their ranges."""
    applicable = APPLICABLE[verb]
    for name, value in options.items():
        if name not in applicable:
            why = f"does not apply to {verb}" if name in NAMES else "is no execution option"
            raise OptionsError(f"{name!r} {why}; {verb} takes {', '.join(sorted(applicable))}")
        check(name, value, _ACCEPTED[name])
