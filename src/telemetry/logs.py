"""Logs: structlog events with the ids of their trace, and the graph, node, item and attempt that they are about.

Also the door to all foreign code that only observes: log handlers, span processors, readers of metrics, `repr`.
"""

import sys
import threading
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from time import time
from traceback import extract_tb, format_exception
from typing import Any, Final, ParamSpec, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from . import names
from .text import cut

P = ParamSpec("P")
T = TypeVar("T")

# The doors whose first error was told.
_told: set[str] = set()


def guarded(door: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call foreign code that observes a call, and must not decide what the call does: its errors end here.

    The first error of each door is logged. Errors that are no `Exception` are raised in the main thread, because a
    signal handler may have raised them. A `CancelledError` ends here: the code awaits nothing, so nobody cancelled it.

    Args:
        door: a name for this kind of foreign code: "logs", "spans", "metrics".
        function: the foreign code.
        *args: the arguments of the function.
        **kwargs: the keyword arguments of the function.

    Returns:
        The result of the function; None if the function has raised.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
        _let_signals_pass(error)
        if door not in _told:
            _told.add(door)
            if door == "logs":
                with suppress(Exception):  # standard error may be closed, too, or None
                    sys.stderr.write(f"Penstock could not write a log line: {shown(error)}. It tells this once.\n")
            else:
                last = extract_tb(error.__traceback__)[-1]
                warning("telemetry.failed", door=door, error=error, at=f"{last.filename}:{last.lineno}", told="once")
        return None


def _let_signals_pass(error: BaseException) -> None:
    is_expected = isinstance(error, Exception | CancelledError)
    if not is_expected and threading.current_thread() is threading.main_thread():
        raise error


def shown(value: object, text: Callable[[Any], str] = repr) -> str:
    """Return the `repr` of a value of the user, or its `str`; if that raises, a text that says so."""
    try:
        return text(value)
    except BaseException as broken:  # noqa: BLE001 - code of the user may raise anything
        _let_signals_pass(broken)
        return f"<{type(value).__qualname__} whose {text.__name__}() raises {type(broken).__qualname__}>"


# A receiver refuses a batch of spans of more than 4 MB, with the spans of other calls in it. So long texts are cut.
_MOST_TEXT: Final = 4_000
_MOST_STACK: Final = 16_000


def about_error(error: BaseException | None) -> dict[str, str]:
    """Return the type and the text of an error as attributes; without an error, none."""
    if error is None:
        return {}
    text = cut(shown(error, str), _MOST_TEXT)
    return {names.ERROR_TYPE: type(error).__qualname__, names.ERROR_MESSAGE: text}


def record_error(span: Span, error: BaseException) -> None:
    """Mark a span as failed, with the type and the text of the error."""
    about = about_error(error)
    guarded("spans", span.set_attribute, names.ERROR_TYPE, about[names.ERROR_TYPE])
    guarded("spans", span.set_status, Status(StatusCode.ERROR, about[names.ERROR_MESSAGE]))
    if isinstance(error, Exception):
        guarded("record_exception", _record_exception, span, error, about[names.ERROR_MESSAGE])


def _record_exception(span: Span, error: Exception, text: str) -> None:
    """Do what `span.record_exception` does, with texts of a bounded length."""
    module, name = type(error).__module__, type(error).__qualname__
    stack = cut("".join(format_exception(error)), _MOST_STACK)
    event = {
        names.EXCEPTION_TYPE: name if module == "builtins" else f"{module}.{name}",
        names.ERROR_MESSAGE: text, names.EXCEPTION_STACKTRACE: stack, names.EXCEPTION_ESCAPED: "False",
    }  # fmt: skip
    span.add_event(names.EXCEPTION, event)


# Functions that return the fields of the item that is being handled here; the floors above register them.
_describers: list[Callable[[], Mapping[str, object]]] = []

_ITEM_FIELDS = frozenset({"graph", "node", "item", "attempt"})


def describe_items(describe: Callable[[], Mapping[str, object]]) -> None:
    """Register a function that returns the fields of the item that the caller handles; empty if it handles no item."""
    _describers.append(describe)


def add_trace_context(logger: Any, method_name: str, event_dict: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the trace and the item to a log event; a processor for `structlog.configure(processors=[...])`.

    Inside of a span, recorded or not, it adds `trace_id` and `span_id`. Inside of the handler of a node, also in its
    threads, tasks and worker processes, it adds `graph`, `node`, `item` and `attempt`. If the event already has one of
    these four fields, it adds none of the four, since the event may be about another item. Fields of the event are not
    changed.

    Args:
        logger: not used.
        method_name: not used.
        event_dict: the event.

    Returns:
        The event, with the fields added.
    """
    for name, value in _ids().items():
        event_dict.setdefault(name, value)
    if _ITEM_FIELDS.isdisjoint(event_dict):
        for describe in _describers:
            event_dict.update(describe())
    return event_dict


def warning(event: str, **fields: object) -> None:
    """Log a warning, with the trace and span ids of the caller's span if it has one, recorded or not.

    Fields that are exceptions are logged as their `repr`. A warning that cannot be written is lost.
    """
    guarded("logs", _log, "warning", event, fields)


def info(event: str, **fields: object) -> None:
    """Log what is no warning, as `warning` does."""
    guarded("logs", _log, "info", event, fields)


def _log(level: str, event: str, fields: Mapping[str, object]) -> None:
    # Imported at the first warning: with rich installed, structlog takes as long to import as the rest of this package.
    import structlog

    logger: structlog.stdlib.BoundLogger = structlog.get_logger("penstock")
    told = {name: shown(value) if isinstance(value, BaseException) else value for name, value in fields.items()}
    getattr(logger, level)(event, **told, **_ids())


@contextmanager
def logged(event: str, **fields: object) -> Generator[None]:
    """Log an `Exception` of the block as a warning, with its `repr` as `error`, and go on: no caller can handle it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - code of the user or of another library; code after the block must run
        warning(event, **fields, error=error)


def _ids() -> dict[str, str]:
    context = guarded("spans", trace.get_current_span().get_span_context)
    # Not `is_recording`: logs of unsampled requests are found by their trace id, too.
    if context is None or not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


# The newest failures of the process: the graph, the node (empty if no node has raised the error), the class of the
# error, its text or number, and the time. They are kept always, also while nobody looks.
failures: deque[tuple[str, str, str, str | float, float]] = deque(maxlen=200)
_TEXT: Final = 200  # characters of the text of an error that are kept
# The `args` of the base class: the class of a user may have a property of this name.
_args_of: Final[Callable[[BaseException], tuple[Any, ...]]] = vars(BaseException)["args"].__get__


def item_failed(graph: str, node: str, error: BaseException) -> None:
    """Keep a failure of an item, with the first argument of the error: `str(error)` may run code of the user."""
    args = _args_of(error)
    text = args[0] if args else ""
    kind = text.__class__
    if kind is str:
        text = text[:_TEXT]
    elif kind is not int and kind is not float:
        text = ""
    failures.append((graph, node, error.__class__.__name__, text, time()))
