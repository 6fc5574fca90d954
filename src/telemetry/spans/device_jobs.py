"""Spans of what runs on a device: batches and single calls, and the compilations and transfers that they wait for.

A device works for many calls at a time, so the span of a batch is linked to those of its items, and they to it. It is a
child of the first one that is sampled: so it is sampled as well, whatever the sampler, and is found in that trace.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span

from .. import names
from .tracer import Value, is_set_up, record_error, start

# The SDK keeps so many unless told otherwise, and drops the rest without a word.
MAX_LINKS = 128


class DeviceWait:
    """A sampled execution that waits for a device.

    Args:
        span: its span.

    Attributes:
        span: the same.
        context: what is done for it gets this as its parent.
        since: when it began to wait.
    """

    __slots__ = ("context", "since", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = trace.set_span_in_context(span)
        self.since = perf_counter()


def waiting() -> DeviceWait | None:
    """Return the execution whose span is current here, as one that waits for a device; None if it is not sampled."""
    if not is_set_up():
        return None
    span = trace.get_current_span()
    return DeviceWait(span) if span.is_recording() else None


class JobSpan:
    """The span of one job of a device, from the moment at which the thread of the device takes it until it is ready.

    Args:
        node: name of the node.
        device: name of the device.
        waits: the sampled executions that it is for, at least one.
        items: how many calls run together, sampled or not; None for one that runs alone.
    """

    __slots__ = ("_device", "_dispatched_at", "_dispatching_since", "_node", "_span", "context")

    def __init__(self, node: str, device: str, waits: Sequence[DeviceWait], items: int | None) -> None:
        self._node = node
        self._device = device
        attributes: dict[str, Value] = {names.NODE: node, names.DEVICE: device}
        name, links = names.DEVICE_CALL, list[Link]()
        if items is not None:
            name = names.BATCH
            attributes[names.BATCH_ITEMS] = items
            links = [Link(wait.span.get_span_context()) for wait in waits[:MAX_LINKS]]
        self._span = start(f"{name} {node}", waits[0].context, attributes, links=links)
        self.context = trace.set_span_in_context(self._span, waits[0].context)
        self._dispatching_since = self._dispatched_at = perf_counter()
        for wait in waits:
            if wait.span.is_recording():  # else its item has been cancelled meanwhile
                wait.span.set_attribute(names.DEVICE_WAIT, self._dispatching_since - wait.since)
                if items is not None:
                    wait.span.add_link(self._span.get_span_context())

    def dispatching(self) -> None:
        """The thread of the device takes it again, now that its program is compiled."""
        self._dispatching_since = perf_counter()

    def dispatched(self, rows: int | None) -> None:
        """It is enqueued, and the device does the rest.

        Args:
            rows: of the batch, padding included.
        """
        self._dispatched_at = perf_counter()
        self._span.set_attribute(names.DISPATCH_SECONDS, self._dispatched_at - self._dispatching_since)
        if rows is not None:
            self._span.set_attribute(names.BATCH_ROWS, rows)

    def end(self, error: BaseException | None, *, has_run: bool) -> None:
        """It is ready, or has failed.

        Args:
            error: why it failed.
            has_run: whether the device has seen it; if not, nobody wanted it any more.
        """
        if has_run:
            self._span.set_attribute(names.DEVICE_SECONDS, perf_counter() - self._dispatched_at)
        outcome = "done" if has_run else "cancelled"
        if error is not None:
            outcome = "failed"
            record_error(self._span, error)
        self._span.set_attribute(names.OUTCOME, outcome)
        self._span.end()

    def transfer(self, size_bytes: int) -> AbstractContextManager[None]:
        """Open the span of a transfer to the device around what starts it."""
        attributes: dict[str, Value] = {
            names.NODE: self._node, names.DEVICE: self._device, names.TRANSFER_BYTES: size_bytes
        }  # fmt: skip
        return _around(names.TRANSFER, self._node, attributes, self.context, ())


def compiling(
    node: str, device: str, describe: Callable[[], str], waiting: Sequence[Context]
) -> AbstractContextManager[None]:
    """Open the span of a compilation around it, and make it current there.

    Args:
        node: name of the node.
        device: name of the device.
        describe: tells for which arguments it is compiled.
        waiting: the contexts of the sampled spans that wait for it; it is a child of the first, and linked to the rest.
            Without any there is no span.
    """
    if not waiting:
        return nullcontext()
    attributes: dict[str, Value] = {names.NODE: node, names.DEVICE: device, names.ARGUMENTS: describe()}
    first, *others = waiting
    links = [Link(trace.get_current_span(other).get_span_context()) for other in others[:MAX_LINKS]]
    return _around(names.COMPILE, node, attributes, first, links)


@contextmanager
def _around(
    kind: str, node: str, attributes: dict[str, Value], parent: Context, links: Sequence[Link]
) -> Generator[None, None, None]:
    span = start(f"{kind} {node}", parent, attributes, links=links)
    token = otel_context.attach(trace.set_span_in_context(span, parent))
    try:
        yield
    except BaseException as error:
        record_error(span, error)
        raise
    finally:
        otel_context.detach(token)
        span.end()
