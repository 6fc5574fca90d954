"""Invocation: calls a node with its policy: attempts, timeout, backoff, fallback, span, and where it runs."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from types import CodeType, CoroutineType, FrameType, TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, Protocol, cast

from .._errors import DeadlineExceeded, Interrupted, NodeCancelledError, NodeTimeoutError, Overloaded
from ..telemetry import spans
from ..telemetry.spans import FrameSpan, NodeSpan, of_every_execution
from .current import Handling, Position, source
from .frame import NOTHING, Frame, Interruption, foreign_cancel
from .loop_host import LoopHost
from .own_loops import Request
from .policy import Hedge
from .tasks import start_task, until
from .threads import Lane, ThreadPool

if TYPE_CHECKING:
    from .node_actor import Body, Failover, NodeActor
    from .process_messages import WorkerInstance
    from .processes import ProcessPool
    from .sampler import ExecutionSampler
    from .stream_buffer import Reader
    from .worker import Member, Worker, WorkerGroup


# Chains of plain functions that share an actor; a single one is a chain too.
#
# A loop over ten functions calls each through one call site, which the interpreter cannot specialise. One line of code
# for each function can be, and makes the chain two to three times faster; the line number tells which function runs.

# After a chain that ran this long, the worker yields to the loop, so that timers are late by 1 ms at most.
SLOW_SECONDS: Final = 0.001


@dataclass(frozen=True)
class Link:
    """One node of a chain."""

    name: str
    fn: Callable[..., Any]
    model: str | None = None


def compose(
    links: Sequence[Link], actor: "NodeActor", sampler: "ExecutionSampler | None" = None
) -> Callable[[list[Any]], Any]:
    """Return a function that takes the values of a frame, runs the chain, and measures the time.

    The function adds the time to the `busy_seconds` of the actor, reports a run to it that was slow or returned a
    coroutine, and reports all runs to the sampler, if there is one.
    """
    if actor.slot >= 0:
        arguments = "values[slot]"
    else:
        arguments = "*args_of(values)" if actor.kwargs_of is None else "*args_of(values), **kwargs_of(values)"
    enclose = _compiled(len(links), arguments, is_sampled=sampler is not None)
    record = None if sampler is None else _recording(sampler)
    run: Callable[[list[Any]], Any] = enclose(
        actor, record, actor.slot, actor.args_of, actor.kwargs_of, *(link.fn for link in links)
    )
    return run


def _recording(sampler: "ExecutionSampler") -> Callable[[float, float], None]:
    def record(began: float, seconds: float) -> None:
        where = source.get()
        sampler.add(began, began + seconds, None if where is None else where.frame, asyncio.get_running_loop())

    return record


@cache
def _compiled(length: int, arguments: str, *, is_sampled: bool) -> Callable[..., Any]:
    names = [f"f{index}" for index in range(length)]
    source = "\n".join(
        [
            # The enclosing function makes the functions and the actor closure variables, which are fast to read.
            f"def enclose(actor, record, slot, args_of, kwargs_of, {', '.join(names)}):",
            " def chain(values):",
            "  began = perf_counter()",
            f"  value = f0({arguments})",
            *(f"  value = {name}(value)" for name in names[1:]),
            "  seconds = perf_counter() - began",
            "  actor.busy_seconds += seconds",
            *(["  record(began, seconds)"] if is_sampled else []),
            "  if seconds > SLOW_SECONDS or value.__class__ is CoroutineType:",
            "   actor.noticed(seconds, value)",
            "  return value",
            " return chain",
        ]
    )
    namespace: dict[str, Any] = {"perf_counter": perf_counter, "CoroutineType": CoroutineType}
    namespace["SLOW_SECONDS"] = SLOW_SECONDS
    exec(compile(source, "<penstock chain>", "exec"), namespace)
    enclose: Callable[..., Any] = namespace["enclose"]
    return enclose


# Lines of async nodes, and of plain functions between them, each of which reads the one before and nothing else.
#
# `Worker.run` could carry an item on through any graph, and asks at each step what this one is like. In a line that is
# known beforehand, so what is left to do between two nodes is written out: a third less per node.

# Each sequence of async and plain nodes gets compiled once, in about a millisecond for the longest.
LONGEST_LINE: Final = 16
# To enter a line costs as much as it saves at three nodes. One that is a whole graph is entered once for many items.
SHORTEST_PART: Final = 4
_LINE_FILE: Final = "<penstock line>"

# Takes the worker, the frame and its values. Returns None if the frame has ended; otherwise the actor that it has come
# to, the value of that one, and how many others were before.
AsyncLine = Callable[["Worker", Frame, list[Any]], Coroutine[Any, Any, "tuple[NodeActor, Any, int] | None"]]


def compose_line(actors: "Sequence[NodeActor]", *, is_whole: bool) -> AsyncLine:
    """Return a function that carries a frame on from the first of these actors as far as it comes.

    It does what `Worker.run` does from one node to the next. It leaves to that what comes less often: it returns early
    where the next node has no free place, or the frame has ended. An error is that of `worker.actor`.

    Args:
        actors: the actors.
        is_whole: whether they are all of the graph; then the line ends the frame, and goes on to the next of a stream.
    """
    compiled = _compiled_line(tuple([bool(actor.links) for actor in actors]), is_whole)
    line: AsyncLine = compiled(*actors, *[a.limiter for a in actors], *[a.fn for a in actors], NOTHING)
    return line


@cache
def _compiled_line(are_plain: tuple[bool, ...], is_whole: bool) -> Callable[..., Any]:
    length = len(are_plain)
    names = [f"{kind}{index}" for kind in ("actor", "limiter", "fn") for index in range(length)]
    last = length - 1
    lines = ["value = await fn0(values[actor0.slot])"]
    for index in range(1, length):
        lines += [
            f"free = limiter{index}.free",
            # A frame that has ended without a result has no values. Plain functions run in another way at first.
            f"if free <= 0 or not values{f' or not actor{index}.completed' * are_plain[index]}:",
            f" return actor{index - 1}, value, {index - 1}",
            f"actor{index - 1}.completed += 1",
            f"limiter{index}.free = free - 1",
            *_release(index - 1),
            f"worker.actor = actor{index}",
        ]
        if are_plain[index]:
            lines += [
                "values[actor0.out] = value",
                f"value = actor{index}.run(values)",
                f"if actor{index}.was_slow:",
                f" actor{index}.was_slow = False",
                " worker.budget = 0",
                f" return actor{index}, value, {index}",
            ]
            continue
        if index == 1 or are_plain[index - 1]:  # the slot is given up now, as where each value replaces the last
            lines.append("values[actor0.out] = None")
        lines.append(f"value = await fn{index}(value)")
    if is_whole:
        lines += [
            "if not values:",
            f" return actor{last}, value, {last}",
            f"actor{last}.completed += 1",
            "worker.frame = None",
            "frame.result = value",  # `Frame.end_with` written out
            "frame.state = 'done'",
            "frame.values = nothing",
            "if frame.timer is not None:",
            " frame.timer.cancel()",
            "frame.listener.frame_done(frame)",
            *_release(last),
            f"worker.budget -= {length}",
            "frame = values = value = None",
            "frame = worker.next_item(actor0) if worker.group.feed is not None else None",
            "if frame is None:",
            " return None",
            "values = frame.values",
        ]
        lines = ["while True:", *[f" {line}" for line in lines]]
    else:
        lines.append(f"return actor{last}, value, {last}")
    source = [f"def enclose({', '.join(names)}, nothing):", " async def line(worker, frame, values):"]
    source += [*[f"  {line}" for line in lines], " return line"]
    namespace: dict[str, Any] = {}
    exec(compile("\n".join(source), _LINE_FILE, "exec"), namespace)
    enclose: Callable[..., Any] = namespace["enclose"]
    return enclose


def _release(index: int) -> list[str]:
    """Return the lines that give back the place in an actor."""
    limiter = f"limiter{index}"
    return [f"if {limiter}.waiting:", f" {limiter}.release()", "else:", f" {limiter}.free += 1"]


def cut_line(error: BaseException) -> None:
    """Leave one entry of the engine in the traceback of an error that has passed a line, as where there is none."""
    traceback = error.__traceback__
    following = None if traceback is None else traceback.tb_next
    if following is not None and following.tb_frame.f_code.co_filename == _LINE_FILE:
        BaseException.with_traceback(error, following)


_LINES_BEFORE = 4  # the line number of the call of the first function in the source above


def run_linkwise(links: Sequence[Link], actor: "NodeActor", frame: Frame, args: Any, kwargs: Any) -> Any:
    """Run a chain link by link: check each result, and open a span for each link but the first if the frame has one."""
    number = 0  # `_number` reads it from the stack frame
    value = links[0].fn(*args, **kwargs)
    actor.refuse_coroutine(value, links[0].name)
    for number in range(1, len(links)):
        link = links[number]
        value = link.fn(value) if frame.span is None else _traced(frame.span, link, frame.item, value)
        actor.refuse_coroutine(value, link.name)
    return value


def _traced(parent: FrameSpan, link: Link, item: int, value: Any) -> Any:
    span = NodeSpan(parent, link.name, of_every_execution(link.name, link.fn, link.model), item)
    try:
        value = link.fn(value)
        span.returned(value)
    except BaseException as error:
        span.end("failed", error)
        raise
    span.end("done")
    return value


def running_link(code: CodeType) -> int | None:
    """Return the number of the link that is running in this thread; None if no link is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        number = _number(frame, frame.f_lineno, code)
        if number is not None:
            return number
        frame = frame.f_back
    return None


def failed_link(code: CodeType, traceback: TracebackType | None) -> int | None:
    """Return the number of the link in which an exception was raised; None if it was raised elsewhere."""
    while traceback is not None:
        number = _number(traceback.tb_frame, traceback.tb_lineno, code)
        if number is not None:
            return number
        traceback = traceback.tb_next
    return None


def _number(frame: FrameType, line: int, code: CodeType) -> int | None:
    if frame.f_code is code:
        return line - _LINES_BEFORE
    if frame.f_code is run_linkwise.__code__:
        number: int = frame.f_locals["number"]
        return number
    return None


Outcome = Literal["done", "failed", "cancelled", "expired", "interrupted", "refused"]
"""How a call, a stream or a node execution has ended; the value of an attribute of its span."""


def outcome_of(state: str, error: BaseException | None) -> Outcome:
    """Return the outcome of a call, from the state of its frame, or from the error that it ended with before."""
    if isinstance(error, DeadlineExceeded):
        return "expired"
    if isinstance(error, Overloaded):
        return "refused"
    if isinstance(error, Interrupted | Interruption):
        return "interrupted"
    if state == "done" and error is None:
        return "done"
    return "cancelled" if state == "cancelled" or isinstance(error, asyncio.CancelledError) else "failed"


class TracedExecution(NodeSpan):
    """The span of a node execution of a sampled frame, which ends with its outcome.

    Args:
        parent: the span of the frame.
        frame: the frame.
        actor: the actor.

    Attributes:
        was_cancelled: whether the execution was cancelled although it raised no error.
    """

    __slots__ = ("_actor", "_frame", "_parent", "was_cancelled")

    def __init__(self, parent: FrameSpan, frame: Frame, actor: "NodeActor") -> None:
        self._parent = parent
        self._frame = frame
        self._actor = actor
        self.was_cancelled = False
        alike = actor.span_attributes
        if alike is None:
            function = actor.links[0].fn if actor.links else actor.fn
            alike = actor.span_attributes = of_every_execution(actor.name, function, actor.policy.model)
        NodeSpan.__init__(self, parent, actor.name, alike, frame.item, actor.index)

    def __enter__(self) -> "TracedExecution":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and not self.was_cancelled:
            tell_consumers(self._parent, self._actor)
            self.end("done")
        elif isinstance(error, Interrupted | Interruption):
            self.end("interrupted")
        elif isinstance(error, Exception):
            self.end("failed", error)
        elif self._frame.expired:
            self.end("expired", DeadlineExceeded("its call did not finish in time"))
        elif error is None or isinstance(error, asyncio.CancelledError):
            self.end("cancelled")
        else:  # KeyboardInterrupt and the like
            self.end("failed", error)


def tell_consumers(parent: FrameSpan, actor: "NodeActor") -> None:
    """Note the time at which the readers of a value get it; their spans say how long they waited since."""
    parent.completed([consumer.index for consumer in actor.consumers])


async def invoke(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
    """Run a node for one frame, with its policy: attempts, timeout and fallback.

    Returns:
        The result of the node, or of its fallback.

    Raises:
        Exception: the error of the last attempt, or of the fallback.
    """
    return await invoke_with(Invocation(worker, actor, frame))


async def invoke_once(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
    """Run a node in a thread, in a process or on a device, if its policy has neither timeout, retries nor fallback."""
    if frame.span is not None:
        return await invoke(worker, actor, frame)
    args, kwargs = actor.arguments(frame.values)
    if actor.needs_thread:
        await take_thread(worker)
    began = perf_counter()
    try:
        return await actor.body(worker, actor, frame, args, kwargs)
    finally:
        leave_outside_call(worker, actor)
        executed(actor, began, frame, worker.position)


def executed(actor: "NodeActor", began: float, frame: Frame, position: "Position | None" = None) -> None:
    """Count an execution that ends now, also in a profile if one is taken; without what it has waited."""
    ended = perf_counter()
    if position is not None and position.waited_seconds:
        began += position.waited_seconds
        position.waited_seconds = 0.0
    actor.busy_seconds += ended - began
    if actor.sampler is not None:
        actor.sampler.add(began, ended, frame, frame.group.loop)


async def invoke_begun(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
    """Run an `async def` node with a policy; what only a wait needs is made when its handler first waits.

    A timer and the record of the attempts cost ten times what a hop costs, and a handler that ends at once needs
    neither. So its first step is made here, and what is left of the attempt is handed over.
    """
    task, policy = worker.task, actor.policy
    assert task is not None
    if frame.span is not None:
        return await invoke(worker, actor, frame)
    args, kwargs = actor.arguments(frame.values)
    undisturbed, began = task.cancelling(), perf_counter()
    if policy.timeout_seconds is not None:
        worker.attempt_deadline = worker.group.loop.time() + policy.timeout_seconds
    if actor.hedge is not None:
        actor.hedge.budget.called()
    if actor.body is run_task_starter:
        worker.remember()
    rest: Awaitable[Any]
    try:
        work = actor.fn(*args, **kwargs)
        # A result that is not a coroutine comes from a function that is only marked as an `async def`.
        rest = _rest_of(work, work.send(None)) if work.__class__ is CoroutineType else work
    except StopIteration as stop:
        worker.attempt_deadline = None
        executed(actor, began, frame)
        return stop.value
    except BaseException as error:  # noqa: BLE001 - the attempts decide what becomes of it, as if they had made the step
        rest = _failed(error)
    return await Invocation(worker, actor, frame, begun=Begun(args, kwargs, undisturbed, began, rest)).run()


@coroutine
def _rest_of(work: "CoroutineType[Any, Any, Any]", waits_for: Any) -> Generator[Any, Any, Any]:
    """Await a coroutine whose first step was made, and which waits for an object since."""
    while True:
        try:
            yield waits_for
            break
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - handed on
            try:
                waits_for = work.throw(error)
            except StopIteration as stop:
                return stop.value
    return (yield from work.__await__())


async def _failed(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # breaks a cycle: the traceback of the error refers to this frame


async def invoke_plain(worker: "Worker", actor: "NodeActor", frame: Frame) -> Any:
    """Run an `async def` node without a policy, as the worker itself would, in a span or timed for a profile."""
    args, kwargs = actor.arguments(frame.values)
    parent, task, sampler = frame.span, worker.task, actor.sampler
    assert task is not None
    undisturbed = task.cancelling()
    began = 0.0 if sampler is None else perf_counter()
    try:
        if parent is None:
            return await actor.fn(*args, **kwargs)
        with TracedExecution(parent, frame, actor) as execution:
            try:
                value = await actor.fn(*args, **kwargs)
            except asyncio.CancelledError as error:
                if task.cancelling() > undisturbed:
                    raise
                raise foreign_cancel(error) from error
            if execution.calls_model:
                execution.returned(value)
            return value
    finally:
        if sampler is not None:
            sampler.add(began, perf_counter(), frame, worker.group.loop)


async def invoke_with(invocation: "Invocation") -> Any:
    """Run the attempts of one node for one frame, inside a span if the frame is sampled."""
    frame, actor = invocation.frame, invocation.actor
    if frame.span is None:
        return await invocation.run()
    with TracedExecution(frame.span, frame, actor) as execution:
        value = await invocation.run()
        execution.returned(value)
        return value


class Begun(NamedTuple):
    """A first attempt that has made its first step already.

    Attributes:
        args, kwargs: the arguments of the node.
        undisturbed: the value of `cancelling()` of the task before.
        began: the time before, by `perf_counter`.
        rest: what is left of the attempt, to be awaited.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    undisturbed: int
    began: float
    rest: Awaitable[Any]


class Invocation:
    """The attempts of one node for one frame.

    Attributes:
        actor: the node.
        frame: the frame.
        worker: the worker, or the task of a generator or of a second attempt.
        cancelling: the value of `cancelling()` of its task before the first attempt.
    """

    __slots__ = (
        "_args",
        "_begun",
        "_kwargs",
        "_readers",
        "actor",
        "cancelling",
        "frame",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        worker: "Member",
        actor: "NodeActor",
        frame: Frame,
        readers: "Iterable[Reader[Any]]" = (),
        begun: Begun | None = None,
    ) -> None:
        self.worker = worker
        self.actor = actor
        self.frame = frame
        self._readers = readers
        self._begun = begun
        if begun is None:
            assert worker.task is not None
            self._args, self._kwargs = self._arguments()
            self.cancelling = worker.task.cancelling()
        else:
            self._args, self._kwargs, self.cancelling = begun.args, begun.kwargs, begun.undisturbed
        worker.position.attempt = 1

    async def run(self) -> Any:
        """Return the result of the node, or of its fallback."""
        actor = self.actor
        policy = actor.policy
        began = perf_counter() if self._begun is None else self._begun.began
        if self._begun is None and actor.hedge is not None:
            actor.hedge.budget.called()
        worker = self.worker
        value: Any
        try:
            while True:
                try:
                    value = await self._attempt()
                    break
                except Exception as error:  # the policy decides which errors are worth another attempt
                    if isinstance(error, Interrupted):  # a question is not a failure
                        raise
                    self._note_failure()
                    pause = self._pause_seconds(error)
                    if pause is None:
                        if policy.fallback is None and actor.failover is None:
                            raise
                        value = await self._substitute(error)
                        break
                    if self.frame.span is not None:
                        spans.retried(actor.name, error, worker.position.attempt + 1)
                if pause:
                    await asyncio.sleep(pause)
                await _returned(worker)  # a thread whose attempt timed out holds the place until it returns
                worker.position.attempt += 1
                actor.retried += 1
            worker.position.attempt = 1  # reset here, because a node without a policy does not set it
            return value
        finally:
            worker.position.attempt_deadline = None
            leave_outside_call(worker, actor)
            executed(actor, began, self.frame, worker.position)

    def _note_failure(self) -> None:
        """Let a thread or a task of the attempt know that it has failed; they may go on nevertheless."""
        call, here = self.worker.outside_call, source.get()
        if isinstance(call, ThreadCall) and call.handling is not None:
            call.handling.has_failed = True
        if isinstance(here, Handling) and here.is_present:
            here.has_failed = True

    async def _attempt(self) -> Any:
        gate, hedge = self.actor.gate, self.actor.hedge
        if hedge is not None:
            elapsed = 0.0 if self._begun is None else perf_counter() - self._begun.began
            return await hedge.attempt(self, elapsed)
        if gate is None:
            return await self.timed_attempt()
        async with gate.admit(self.worker):  # a wait for a restart does not count in the timeout of the attempt
            return await self.timed_attempt()

    async def timed_attempt(self) -> Any:
        """Return the result of one call of the node, which ends with `NodeTimeoutError` if it takes too long."""
        seconds = self.actor.policy.timeout_seconds
        try:
            if self.actor.needs_thread:  # a wait for a thread does not count in the timeout of the attempt
                await self._take_thread()
            if seconds is None:
                return await self._run_body()
            position = self.worker.position
            if self.actor.begins_later:
                position.attempt_deadline = None
                timer = position.timeout = asyncio.timeout_at(None)
            else:
                if self._begun is None:
                    position.attempt_deadline = self.worker.group.loop.time() + seconds
                timer = asyncio.timeout_at(position.attempt_deadline)
            try:
                async with timer:
                    return await self._run_body()
            except TimeoutError as error:
                if not timer.expired():
                    raise
                raise NodeTimeoutError(f"node {self.actor.name!r} took longer than {seconds:g} s") from error
        except asyncio.CancelledError as error:
            task = self.worker.task
            assert task is not None
            if task.cancelling() > self.cancelling:
                raise
            raise NodeCancelledError(
                f"something that node {self.actor.name!r} awaited was cancelled, but not the node itself"
            ) from error

    async def _take_thread(self) -> None:
        began = perf_counter()
        try:
            await take_thread(self.worker)
        finally:
            self.worker.position.waited_seconds += perf_counter() - began

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.actor.arguments(self.frame.values)

    def _run_body(self) -> Awaitable[Any]:
        if self._begun is not None:
            rest, self._begun = self._begun.rest, None
            return rest
        return self.actor.body(cast("Worker", self.worker), self.actor, self.frame, self._args, self._kwargs)

    def _pause_seconds(self, error: Exception) -> float | None:
        """Return the pause before another attempt, in seconds; None if there is no further attempt."""
        retry = self.actor.policy.retry
        attempt = self.worker.position.attempt
        if retry is None or attempt >= retry.attempts or not isinstance(error, retry.retry_on):
            return None
        if self.actor.is_stopped:
            return None
        if any(reader.buffer.position for reader in self._readers):
            return None  # the values that it has read from a stream are gone: another attempt would miss them
        pause = retry._pause_seconds(error, attempt)
        if pause is None:
            return None
        deadline = self.frame.deadline
        if deadline is not None and self.worker.group.loop.time() + pause >= deadline:
            return None  # the deadline would pass before: this error says more than a timeout later
        return pause

    async def _substitute(self, error: Exception) -> Any:
        """Return the result of the failover, or of the fallback where there is none or it has failed, too."""
        actor, frame = self.actor, self.frame
        frame.is_substitute = True
        if actor.failover is not None:
            if frame.state != "running":
                raise error
            actor.failed_over += 1
            if frame.span is not None:
                spans.failed_over(actor.name, error)
            self.worker.position.attempt_deadline = None
            leave_outside_call(self.worker, actor)
            began = perf_counter()
            try:
                return await self._fail_over(actor.failover)
            except Exception as of_failover:
                if actor.policy.fallback is None:
                    raise
                error = of_failover
            finally:
                self.worker.position.waited_seconds += perf_counter() - began
        if frame.span is not None:
            spans.fell_back(actor.name, error)
        return await self._fall_back(error)

    async def _fail_over(self, failover: "Failover") -> Any:
        # The place is free meanwhile: the failover has places of its own, and may be long.
        self.actor.limiter.release()
        try:
            return await failover(self.worker, self.frame)
        finally:
            self.actor.limiter.owe()

    async def _fall_back(self, error: Exception) -> Any:
        fallback = self.actor.policy.fallback
        assert fallback is not None
        value: Any = fallback(error)
        if inspect.isawaitable(value):
            value = await value
        return value


async def run_async(
    worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an `async def` node; one of the bodies that wiring chooses from."""
    return await actor.fn(*args, **kwargs)


async def run_task_starter(
    worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an `async def` node that starts tasks, which have to know its item."""
    worker.position.remember()
    return await actor.fn(*args, **kwargs)


async def run_inline(
    worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a plain `def` node, or a chain of them, whose further links get spans of their own."""
    began = perf_counter()
    value = run_linkwise(actor.links, actor, frame, args, kwargs)
    actor.watch(perf_counter() - began)
    return value


class OutsideCall(Protocol):
    """Work outside of the event loop, which may go on after its attempt has ended, since it cannot be cancelled."""

    def abandon(self) -> bool:
        """Note that its attempt has ended; return whether the work still runs."""
        ...

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has ended."""
        ...


class ThreadCall:
    """A job in a thread, which goes on if its attempt ends before it.

    Attributes:
        handling: what the job finds in its context; None before it was submitted.
        began: when the job has begun, by `perf_counter`; 0 before.
    """

    __slots__ = ("_then", "abandoned", "began", "handling", "returned", "submitted")

    def __init__(self) -> None:
        self.handling: Handling | None = None
        self.submitted = False
        self.abandoned = False
        self.began = 0.0
        self.returned = False
        self._then: list[Callable[[], None]] = []

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the job, in the thread; skip it if it was abandoned before."""
        self.began = perf_counter()
        return None if self.abandoned else fn(*args, **kwargs)

    def abandon(self) -> bool:
        """Note that the attempt has ended; return whether the job still holds a thread."""
        # This writes `abandoned` and then reads `began`; `run` writes `began` and then reads `abandoned`. So at
        # least one of the two threads sees what the other has written.
        self.abandoned = True
        if not self.submitted and not self.returned:
            self.on_returned()
        return self.began > 0 and not self.returned

    @property
    def is_ahead(self) -> bool:
        """Whether the job was given to the threads, and none has begun it."""
        return self.submitted and not self.began

    def on_returned(self) -> None:
        """Note that the thread is free again, and call the callbacks."""
        self.returned = True
        for callback in self._then:
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the thread is free again."""
        self._then.append(callback)


class ProcessCall:
    """A job of a hedged node in a worker process.

    Attributes:
        is_left: whether the other attempt has a result. Then the job goes on when its attempt is cancelled; else it is
            cancelled, too, which ends the worker process.
    """

    __slots__ = ("_task", "is_left")

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task
        self.is_left = False

    async def result(self) -> Any:
        """Wait for the result."""
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self.is_left and not self._task.done():
                self._task.cancel()
                await until(self._task.done, lambda: asyncio.wait([self._task]))
            raise

    def abandon(self) -> bool:
        """Return whether the job still runs."""
        return not self._task.done()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the job has ended."""
        self._task.add_done_callback(lambda _: callback())


async def take_thread(worker: "Member") -> None:
    """Wait until the run, stream or deployment of a worker may keep one more thread busy, for `call_in_thread`."""
    call = ThreadCall()
    share = worker.group.threads
    if share is not None:
        await share.take()
        call.then(share.give_back)
    worker.outside_call = call


def call_in_thread(
    pool: ThreadPool,
    worker: "Worker",
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lane: Lane | None = None,
) -> "asyncio.Future[Any]":
    """Run a blocking function in a thread, in a copy of the caller's context; `take_thread` must have been awaited."""
    context = copy_context()
    call = worker.outside_call
    assert isinstance(call, ThreadCall)
    # The thread knows this item also when the worker has gone on to the next.
    call.handling = context.run(worker.position.remember)
    result = pool.submit_to(lane, context, call.on_returned, call.run, (fn, args, kwargs), {})
    call.submitted = True
    return result


def in_thread(pool_of: Callable[[], ThreadPool], ahead: int) -> "Body":
    """Return a body that runs the plain function of a node in a thread, in a copy of the caller's context.

    Args:
        pool_of: returns the threads.
        ahead: how many items may be given to the threads besides those that run, if the function is short.
    """

    async def run_in_thread(
        worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        pool, sampler, limiter = pool_of(), actor.sampler, actor.limiter
        lane, given = limiter.lane, perf_counter()
        is_ahead = lane is not None and not lane.free
        if is_ahead:
            actor.begins_to_wait(frame)
        try:
            if sampler is None:
                value = await call_in_thread(pool, worker, actor.fn, args, kwargs, lane)
            else:
                call = sampler.in_thread(actor.fn, is_free=pool.has_free_thread and not is_ahead)
                try:
                    value = await call_in_thread(pool, worker, call, args, kwargs, lane)
                finally:
                    call.came_back()
        finally:
            if lane is not None:
                limiter.look_ahead(ahead if lane.is_short else 0)
            if isinstance(worker.outside_call, ThreadCall):  # a wait for a thread is no work of the node
                worker.position.waited_seconds += max(0.0, worker.outside_call.began - given)
        actor.refuse_coroutine(value, actor.name)
        return value

    return run_in_thread


def in_process(pool_of: "Callable[[], ProcessPool]", target: str, instance: "WorkerInstance | None" = None) -> "Body":
    """Return a body that runs `target` ("module:qualname") in a worker process; of a class, an instance of it."""

    async def run_in_process(
        worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        position, given = worker.position, perf_counter()
        before = position.waited_seconds  # that of earlier attempts
        timeout, position.timeout = position.timeout, None

        def begun() -> None:
            seconds = actor.policy.timeout_seconds
            assert timeout is not None
            assert seconds is not None
            position.waited_seconds = before + perf_counter() - given
            position.attempt_deadline = worker.group.loop.time() + seconds
            timeout.reschedule(position.attempt_deadline)

        def took(seconds: float) -> None:
            position.waited_seconds = before + max(0.0, perf_counter() - given - seconds)

        item = {"graph": actor.graph, "node": actor.label(), "item": frame.item, "attempt": position.attempt}
        work = pool_of().run(
            target, args, kwargs, item, instance,
            priority=frame.priority, begun=None if timeout is None else begun, took=took,
        )  # fmt: skip
        if actor.hedge is None:
            return await work
        worker.outside_call = call = ProcessCall(start_task(worker.group.loop, work))
        return await call.result()

    return run_in_process


class InLoop:
    """The carrier of an actor that owns its loop: it puts items into the inbox of the loop.

    Args:
        host: runs the actor.
    """

    __slots__ = ("_host",)

    def __init__(self, host: LoopHost) -> None:
        self._host = host

    async def __call__(
        self, worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Give the actor an item, and return its result."""
        deadlines = [at for at in (frame.deadline, worker.position.attempt_deadline) if at is not None]
        return await self._host.run(args[0], frame.priority, min(deadlines, default=None), frame.key)

    def begin(
        self, actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DetachedStep | None":
        """Give the actor an item without a worker; return None if the inbox is full, for which a worker has to wait.

        If its loop has ended, the step fails with `ActorStopped`.
        """
        step = DetachedRequest(actor, frame)
        outcome: Any = step  # it has the methods that settle a future
        request: Request[Any, Any] = Request(args[0], frame.priority, frame.deadline, frame.key, outcome)
        try:
            if not self._host.submit_nowait(request):
                return None
        except BaseException as error:  # noqa: BLE001 - any exception is the outcome of its item
            step.fail_soon(error)
        else:
            step.request = request
        return step


async def _returned(worker: "Member") -> None:
    call = worker.outside_call
    if call is not None and call.abandon():
        waiter = worker.group.loop.create_future()
        call.then(lambda: None if waiter.done() else waiter.set_result(None))
        await waiter


def leave_outside_call(worker: "Member", actor: "NodeActor") -> None:
    """Abandon a thread, or a process, that still runs; see `abandon`."""
    call, worker.outside_call = worker.outside_call, None
    if call is not None:
        abandon(call, actor)


def abandon(call: OutsideCall, actor: "NodeActor") -> None:
    """Stop waiting for a call; if it still runs, it keeps a place of the node until it has ended."""
    if call.abandon():
        actor.limiter.owe()
        actor.abandoned += 1
        call.then(actor.thread_returned)


# Hedging: a second attempt begins beside one that takes long, and the first result of the two counts.

_LOST = "penstock: the other attempt has a result"


class HedgeBudget:
    """How many second attempts a node may still make, over all of its call sites in an Engine."""

    __slots__ = ("_share", "_tokens")

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = 1.0

    def called(self) -> None:
        """Count a call, which adds its share."""
        self._tokens = min(10.0, self._tokens + self._share)

    def take(self) -> bool:
        """Take what one second attempt needs; return whether there was enough."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Hedging:
    """How a call site hedges: after which time, and from which budget."""

    __slots__ = ("_after_seconds", "budget")

    def __init__(self, hedge: Hedge, budget: HedgeBudget) -> None:
        self._after_seconds = hedge.after_seconds
        self.budget = budget

    async def attempt(self, first: Invocation, elapsed_seconds: float) -> Any:
        """Run one attempt of an item, and perhaps another beside it; return the first result.

        Args:
            first: runs the attempt, in the present task.
            elapsed_seconds: how long ago it has begun.

        Raises:
            Exception: the error of the attempt, if neither has a result.
        """
        race = _Race(first, self.budget)
        timer = race.group.loop.call_later(max(0.0, self._after_seconds - elapsed_seconds), race.begin_second)
        try:
            value = await first.timed_attempt()
        except asyncio.CancelledError:
            if race.was_cancelled():
                race.stop()
                raise
        except Exception as error:
            timer.cancel()
            if not race.has_lost:
                if race.second is None:
                    raise
                if isinstance(error, Interrupted):  # a question is not a failure
                    race.stop()
                    raise
                await race.second.over()
                if not race.second.has_result:
                    raise
                race.won()
            elif race.was_cancelled():
                raise asyncio.CancelledError from None
        except BaseException:  # a question, or what ends more than the item
            race.stop()
            raise
        else:
            if not race.has_lost:
                race.stop()
                return value
            if race.was_cancelled():
                raise asyncio.CancelledError
        finally:
            timer.cancel()
            race.is_over = True
        assert race.second is not None
        return race.second.value


class _Race:
    """Two attempts of one item.

    Attributes:
        second: the second attempt; None before it has begun.
        has_lost: whether the second had its result while the first was running, which was cancelled then.
        is_over: whether it is decided which result counts.
    """

    __slots__ = ("_budget", "_first", "group", "has_lost", "is_over", "second")

    def __init__(self, first: Invocation, budget: HedgeBudget) -> None:
        self._first = first
        self._budget = budget
        self.group: WorkerGroup = first.worker.group
        self.second: _Second | None = None
        self.has_lost = False
        self.is_over = False

    def begin_second(self) -> None:
        """Begin the second attempt, if there is a place for it, and the budget allows it."""
        first = self._first
        actor, frame = first.actor, first.frame
        if frame.state != "running" or actor.is_stopped or actor.limiter.free <= 0 or not self._budget.take():
            return
        actor.hedged += 1
        if frame.span is not None:
            spans.hedged(actor.name)
        self.second = _Second(self, actor, frame, first.worker.position.attempt)

    def second_ended(self) -> None:
        """Cancel the first attempt, if the second has a result and the first is still running."""
        second, first = self.second, self._first
        assert second is not None
        if second.waiter is not None:
            if not second.waiter.done():
                second.waiter.set_result(None)
        elif second.has_result and not self.is_over and first.frame.state == "running":
            task = first.worker.task
            assert task is not None
            self.has_lost = True
            _leave(first.worker.outside_call)
            self.won()
            task.cancel(_LOST)

    def was_cancelled(self) -> bool:
        """Take back the cancellation of the first attempt; return whether its task was cancelled for another reason."""
        task = self._first.worker.task
        assert task is not None
        return not self.has_lost or task.uncancel() > self._first.cancelling

    def won(self) -> None:
        """Count a result of the second attempt."""
        first = self._first
        first.actor.hedges_won += 1
        if first.frame.span is not None:
            spans.hedge_won(first.actor.name)

    def stop(self) -> None:
        """Cancel the second attempt, whose result is not needed."""
        if self.second is not None:
            self.second.leave()


def _leave(call: OutsideCall | None) -> None:
    if isinstance(call, ProcessCall):
        call.is_left = True


class _Second:
    """The second attempt, in a task of its own that is a member of the group of workers of its frame.

    Attributes:
        value: its result, once `has_result`.
        has_result: whether it has ended with a result.
        waiter: set once it has ended, after the first has failed; None before.
    """

    def __init__(self, race: _Race, actor: "NodeActor", frame: Frame, attempt: int) -> None:
        self.group = race.group
        self.position = Position()
        self.position.frame, self.position.actor = frame, actor
        self.cancels = 0
        self.outside_call: OutsideCall | None = None
        self.value: Any = None
        self.has_result = False
        self.waiter: asyncio.Future[None] | None = None
        self._race: _Race | None = race
        self._actor = actor
        self._frame = frame
        self._attempt = attempt
        actor.limiter.free -= 1
        self.group.joined(self)
        context = copy_context()  # that of the first attempt: the timer has it
        context.run(source.set, self.position)
        name = f"penstock-hedge {actor.name}"
        self.task: asyncio.Task[None] | None = start_task(self.group.loop, self._run(), name=name, context=context)
        # A callback, because a task that is cancelled before its first step does not run a `finally` of its own.
        self.task.add_done_callback(self._ended)

    def is_in(self, frame: Frame, actor: "NodeActor") -> bool:
        """Whether it runs the handler of `actor` for `frame`."""
        return self.position.frame is frame and self.position.actor is actor

    def cancel_if_in(self, frame: Frame) -> None:
        """Cancel the attempt of a frame that has ended."""
        if self.position.frame is frame and not self.cancels and self.task is not None:
            self.cancels += 1
            self.task.cancel(_LOST)

    def leave(self) -> None:
        """Cancel the attempt, because the first has ended; a process goes on, and keeps its place."""
        _leave(self.outside_call)
        self.cancel_if_in(self._frame)

    async def over(self) -> None:
        """Wait until it has ended, because the first attempt has failed."""
        if self.task is None or self.task.done():
            return
        self.waiter = self.group.loop.create_future()
        try:
            await self.waiter
        except asyncio.CancelledError:
            self.leave()
            raise

    async def _run(self) -> None:
        self.position.task = self.task
        member: Member = self
        try:
            invocation = Invocation(member, self._actor, self._frame)
            self.position.attempt = self._attempt
            self.value = await invocation.timed_attempt()
            self.has_result = True
        except asyncio.CancelledError:
            pass  # by the engine, or with the loop: the first attempt decides what becomes of the item
        except Exception:  # noqa: BLE001 - the first attempt decides
            pass
        except BaseException as error:  # noqa: BLE001 - as in a worker: it ends more than the item
            self._frame.fail(error, self._actor, self._attempt)
        finally:
            self.position.attempt_deadline = None
            leave_outside_call(member, self._actor)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        frame, race = self._frame, self._race
        self.position.frame = self.task = self._race = None
        assert race is not None
        race.second_ended()
        self._actor.limiter.release()
        if frame.state in ("failed", "cancelled"):
            frame.leave()
        self.group.left(self)


# DetachedStep: the first step of a call, if it runs outside of the loop, such as on a device; it needs no worker.
#
# A worker would only hand the step over and wait for the result, and making its task costs more than all other work of
# such a call on the loop. Instead, when the result arrives, it carries the frame on: to its end, or to a worker for the
# steps that follow.


class Carrier(Protocol):
    """Runs the executions of a node elsewhere: on a device, or in an actor that owns its loop."""

    def __call__(
        self, worker: "Worker", actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Awaitable[Any]:
        """Run one execution, while a worker waits, and return its result."""
        ...

    def begin(
        self, actor: "NodeActor", frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DetachedStep | None":
        """Begin one execution without a worker; it settles the step in a later turn of the loop, when it has ended.

        Returns:
            The step; None if it needs a worker, because something has to be awaited first.
        """
        ...


def begin_detached(carrier: Carrier, actor: "NodeActor", frame: Frame) -> "DetachedStep | None":
    """Begin the first step of a frame, for which a place was taken; return None if it needs a worker."""
    values = frame.values
    try:
        # `NodeActor.arguments` written out
        args = (values[actor.slot],) if actor.slot >= 0 else actor.args_of(values)
        return carrier.begin(actor, frame, args, {} if actor.kwargs_of is None else actor.kwargs_of(values))
    except BaseException as error:  # noqa: BLE001 - any exception is the outcome of its item
        step = DetachedRequest(actor, frame)
        step.fail_soon(error)
        return step


STEP_SLOTS: Final = ("_actor", "_began", "_frame", "_is_left", "_is_over")
_NO_SLOTS: Final[tuple[str, ...]] = ()  # of a class that may be the second base of another one


class DetachedStep:
    """The first step of a frame that has a group to itself, while it runs outside of the loop.

    It has the methods by which the result of a future is set. What runs the step is a subclass, with `STEP_SLOTS`: so
    step and call are one object.

    Attributes:
        returned: whether the execution has ended.
    """

    __slots__ = _NO_SLOTS

    returned: bool
    _actor: "NodeActor"
    _began: float
    _frame: Frame | None
    _is_left: bool
    _is_over: bool

    def step_begins(self, actor: "NodeActor", frame: Frame) -> None:
        """Set the attributes of a step; to be called once, before anything else."""
        self._actor = actor
        self._frame = frame
        self._began = perf_counter()
        self._is_over = self._is_left = False

    def withdraw(self) -> None:
        """Skip the execution if it has not begun, because its caller has left."""
        raise NotImplementedError

    def abandon(self) -> bool:
        """Note that its caller has left; return whether the execution still runs. As of an `OutsideCall`."""
        raise NotImplementedError

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the execution has ended. As of an `OutsideCall`."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give the step up, because its frame has ended."""
        self._is_over = self._is_left = True
        self.withdraw()
        self._over()
        self._actor.limiter.release()

    def cancel(self) -> bool:
        """Fail the frame, because the step will not run; return False if the step has ended already."""
        if self._is_over:
            return False
        self.set_exception(NodeCancelledError(f"the device of node {self._actor.name!r} has given up its call"))
        return True

    def set_result(self, value: Any) -> None:
        """Carry the frame on, unless it has ended: to its end, or to a worker for the steps that follow."""
        if self._is_over:
            return
        actor = self._actor
        frame = self._over()
        actor.completed += 1
        if actor.ends_line:
            # `Limiter.release` and `Frame.end_with` written out, as all calls of a batch end in one turn of the loop.
            limiter = actor.limiter
            if limiter.waiting:
                limiter.release()
            else:
                limiter.free += 1
            frame.result = value
            frame.state = "done"
            frame.values = NOTHING
            if frame.timer is not None:
                frame.timer.cancel()
            frame.listener.frame_done(frame)
            return
        frame.values[actor.out] = value
        for slot in actor.reads:
            frame.release(slot)
        # The worker gives the place back when it has found room for the frame: until then, the node stands still.
        if actor.successor is not None:
            frame.group.hire(frame, (actor.successor,), actor)
        elif actor.consumers:
            # The frame began with this step alone, so at least one of the next steps has all of its inputs now.
            complete = tuple([consumer for consumer in actor.consumers if frame.input_came(consumer)])
            frame.group.hire(frame, complete, actor)
        else:
            actor.limiter.release()
            frame.let_go()

    def fail_soon(self, error: BaseException) -> None:
        """Fail the frame in a later turn of the loop, unless it has ended by then."""
        assert self._frame is not None
        # Later: if calls failed at once, a caller that makes many would keep the loop from other tasks.
        self._frame.group.loop.call_soon(self.set_exception, error)

    def set_exception(self, error: BaseException) -> None:
        """Fail the frame, unless it has ended."""
        if not self._is_over:
            actor, frame = self._actor, self._over()
            actor.failed += 1
            frame.fail(foreign_cancel(error) if isinstance(error, asyncio.CancelledError) else error, actor)
            actor.limiter.release()

    def _over(self) -> Frame:
        actor, frame = self._actor, self._frame
        assert frame is not None
        self._is_over = True
        self._frame = None  # what runs the step may still hold it, and must not keep the frame alive
        frame.group.detached = None
        if not self.returned:
            abandon(self, actor)
        ended = perf_counter()
        actor.busy_seconds += ended - self._began  # as in `executed`
        if actor.sampler is not None:
            actor.sampler.add(self._began, ended, frame, frame.group.loop)
        return frame


class DetachedRequest(DetachedStep):
    """A step in an actor that owns its loop; or one that could not begin."""

    __slots__ = (*STEP_SLOTS, "request")

    returned = True  # the actor runs on the loop

    def __init__(self, actor: "NodeActor", frame: Frame) -> None:
        self.step_begins(actor, frame)
        self.request: Request[Any, Any] | None = None

    def withdraw(self) -> None:
        """Cancel the request."""
        if self.request is not None:
            self.request.cancel()

    def _over(self) -> Frame:
        self.request = None  # it refers to this step
        return super()._over()
