"""Every exception that Penstock raises, in one flat hierarchy.

Every exception derives from `PenstockError`. Those that mean "too late" also derive from the built-in `TimeoutError`,
so that `except TimeoutError` works without knowing this module; `OptionsError` derives from `ValueError` and
`TypeError` for the same reason.
"""

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


class PenstockError(Exception):
    """Base class of every error that Penstock itself raises."""


class GraphTraceError(PenstockError):
    """A graph function does something that a trace cannot represent; the message names file, line and remedy."""


class PlanError(PenstockError):
    """A graph cannot be run as asked.

    For instance, the type of a value does not fit the parameter that takes it, or a call goes to a deployment that
    does not have its graph.
    """


class OptionsError(PenstockError, ValueError, TypeError):
    """An option is unknown, does not apply here, or does not accept its value; the message says what it accepts."""


class EngineLoopError(PenstockError):
    """An `Engine` is used outside of an event loop, or on another event loop than the one of its first use."""


class EngineClosedError(PenstockError):
    """An `Engine`, `Stream` or `Service` is used after it was closed."""


class ChannelClosed(PenstockError):
    """A channel is closed: a put is refused, or a get found it drained."""


class ResourceError(PenstockError):
    """A resource is called outside of a graph.

    Nothing would close the resource there: call it in a graph, or open it with
    `async with resource.open(...)`.
    """


class ReentrantCallError(PenstockError):
    """A node would wait for itself for ever; the message names the chain of calls and the remedy.

    There are two cases: a node of a deployment calls that deployment; or a node with `concurrency=` runs a graph, or
    a step with `penstock.call`, that uses the same node, while handlers that do so hold all of its places.
    """


class UnknownItemError(PenstockError):
    """`penstock.current()` or `call()` was called in a task that a handler has started, and its item is not known."""


class Overloaded(PenstockError):
    """A deployment refuses a call, or a node an item: all places, and all places in the queue, are taken.

    A `RateLimit` refuses with it, too, where its limit is used up.

    Attributes:
        retry_after_seconds: in how many seconds a place is likely to be free, from the measured service rate, or a
            limit lets an item pass; None before anything has been measured.
        key: the key to which it was refused, such as one tenant; None if it would be refused to all.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None, key: object = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.key = key


def retry_after_header(seconds: float | None) -> dict[str, str]:
    """Return the header for whoever was refused: in whole seconds, rounded up, and at least one."""
    return {"retry-after": str(max(1, ceil(seconds or 1)))}


class NodeError(PenstockError):
    """The error of an item or a caller that shares an exception with others, where the exception cannot be copied.

    The exception itself belongs to the first item or caller. Each of the others gets a `NodeError` with that exception
    as its `__cause__`.
    """


class NodeCancelledError(PenstockError):
    """A node raised `CancelledError`, not because its item was cancelled, but because a task that it awaited was."""


class NotFinished(PenstockError):
    """An item of a stream was in flight when the time of `stream.drain(timeout_seconds)` was over."""


class NodeTimeoutError(PenstockError, TimeoutError):
    """One attempt of a node took longer than its `timeout_seconds`."""


class DeadlineExceeded(PenstockError, TimeoutError):
    """A call did not finish within its `timeout_seconds`."""


class IterationLimitError(PenstockError):
    """A `while_loop` reached its `max_iterations` while its predicate was still true."""


class WorkerDied(PenstockError):
    """The worker that ran this item died, or a result that it kept was lost with it; other items are not affected."""


class ClusterError(PenstockError):
    """Workers of a cluster could not be placed, started or reached; the message names the requested resources."""


class InboxClosed(PenstockError):
    """An actor that owns its loop asks its inbox for work, but the scope ends and no more work comes.

    Do not catch it: this error is how the loop is told to end.
    """


class WorkSettledError(PenstockError):
    """Work was finished or failed a second time."""


class ActorRestarted(PenstockError):
    """The actor that worked on this item was restarted meanwhile, because it or a sibling crashed.

    The item may have been worked on in part. It runs again if the node's `Retry(retry_on=...)` covers this error.
    """


class ActorStopped(PenstockError):
    """An item needs an actor that has crashed or ended and will not be restarted (`restart="temporary"`)."""


class DeploymentFailed(PenstockError):
    """Actors crashed more often than `max_restarts` within `within_seconds`: the deployment, or the scope, gave up.

    The last crash is the `__cause__`.
    """


class DeadLetterError(PenstockError):
    """A dead letter can never be written, however often it is tried. The error ends its consumer.

    `consume.Kafka.letters_to` raises it. Raise it in a function of your own for `dead_letters=` for the same effect:
    after any other error, the function is called again.
    """


class MissingExtraError(PenstockError, ImportError):
    """A feature needs a package that only an extra of Penstock installs; the message names the extra."""


class NotStorable(PenstockError, TypeError):
    """A value cannot be stored so that an equal one comes back; the message names its path, its type and the remedy."""


class CheckpointError(PenstockError):
    """A snapshot or loop cannot be stored, read, or continued from; the message names the file and the remedy.

    Attributes:
        errno: the number of the error of the operating system behind it, such as `errno.ENOSPC`; None if there is none.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class Interrupted(PenstockError):
    """A call has ended because a node asked a question with `interrupt`; with the answer, the same key goes on.

    For the node itself, the question raises no `Exception`: retries, fallbacks and `except Exception` do not take it.

    Attributes:
        key: the key of the call.
        question: the question.
        token: a text that names this question, for an `Answer` to no other; the same until it is answered.
    """

    def __init__(self, key: str, question: object, token: str = "") -> None:
        super().__init__(key, question, token)
        self.key = key
        self.question = question
        self.token = token

    def __str__(self) -> str:
        return f"{self.key!r} waits for the answer to {self.question!r}: run it again with durable_key= and answer="


class KeyInUse(PenstockError):
    """A call with a durable loop is refused, or ends, because another call has its key."""


class KeyFinished(OptionsError):
    """A key with a durable loop has its result: with `on_finished="raise"`, or because the result is not kept."""


class OtherArguments(OptionsError):
    """A key with a durable loop belongs to a call of another graph, or to a call with other arguments."""


class StaleAnswer(OptionsError):
    """An answer is for a question that its key with a durable loop does not wait with, or no longer waits with."""


class KeyStopped(OptionsError):
    """A key with a durable loop has no result, and no call has the key: its last call has failed or was stopped."""


class OtherCall(PenstockError):
    """A handler of a durable run makes another call than in its first life, and a kept call not at all."""


class OtherGraph(PenstockError):
    """A durable run has kept steps that its graph does not have, or has wired otherwise."""


class LeaseLost(PenstockError):
    """A durable run ends in this process, because another process has taken it over, or may have."""


class RunCancelled(PenstockError):
    """A durable run was cancelled; `resume` lets it go on."""


class RunFailed(PenstockError):
    """A durable run has failed: its error could not be stored, or five workers in a row have died with it."""


class UnknownKey(OptionsError):
    """No durable loop is kept under a key."""


class UnknownStep(OptionsError):
    """The history of a key with a durable loop has no state of this step."""


class DeviceError(PenstockError):
    """A device does not exist, or computes wrong values; the message lists the devices, or says what to install."""


def with_cause(error: E, cause: BaseException | None) -> E:
    """Return an error, with its cause, as `raise error from cause` sets it."""
    of_all: Any = BaseException.__dict__["__cause__"]
    of_all.__set__(error, cause)  # the class of the error may refuse the assignment
    return error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception of a user, if the exception accepts notes."""
    with suppress(Exception):  # a class may override attribute access; that failure must not hide the error
        error.add_note(note)


def plain_error(error: Any, origin: str) -> Any:
    """Return the error; a RuntimeError in place of Stop(Async)Iteration, which would silently end a reader's loop."""
    if not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return with_cause(RuntimeError(f"{origin} raised {type(error).__name__}"), error)


class Noted:
    """A context for code of the user: it adds a note to each exception, and lets no Stop(Async)Iteration out.

    Args:
        note: the note, or a function that returns it for an exception.
    """

    def __init__(self, note: str | Callable[[BaseException], str]) -> None:
        self._note = note

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            add_note(error, note := self._note if isinstance(self._note, str) else self._note(error))
            if (plain := plain_error(error, "a function that Penstock called")) is not error:
                add_note(plain, note)
                raise plain


def copy_of(error: BaseException) -> BaseException:
    """Return a copy of an exception, for one more caller that has to raise the same failure.

    Each caller adds to the traceback and the notes of the object that it raises. One object for all callers would
    collect the notes of all. An exception that cannot be copied becomes the cause of a `NodeError`.
    """
    cls = type(error)
    try:
        # Not `cls(*args)`: some constructors, such as those of JAX's errors, take other arguments than `args` has.
        copy = cls.__new__(cls, *error.args)
        copy.__dict__.update(error.__dict__)
        for base in cls.__mro__:
            # Attributes outside of `__dict__`: the cause and the traceback, or `filename` of an OSError. Not by
            # `setattr`, which the class of the error may refuse.
            for name, field in vars(base).items():
                if isinstance(field, MemberDescriptorType | GetSetDescriptorType) and name != "__dict__":
                    with suppress(AttributeError, TypeError):  # it was never set, or is read-only after `__new__`
                        if (value := field.__get__(error)) is not None:
                            field.__set__(copy, value)
    except Exception:  # noqa: BLE001 - a constructor or an attribute of the user may raise anything
        told = cls.__name__
        with suppress(Exception):
            told = f"{told}: {error!r}"
        return with_cause(NodeError(told), error)
    if "__notes__" in copy.__dict__:
        copy.__dict__["__notes__"] = list(error.__notes__)
    if not error.__suppress_context__:
        vars(BaseException)["__suppress_context__"].__set__(copy, False)  # the cause has set it
    return copy


def travelling(error: BaseException) -> BaseException:
    """Return the form of `error` that a future accepts, with a traceback that begins in the job, not in the pool."""
    if error.__traceback__ is not None:
        # Not by `error.with_traceback`, which the class of an exception may override with a method that raises: the
        # future would never be settled, and its caller would wait for ever.
        BaseException.with_traceback(error, error.__traceback__.tb_next)
    if isinstance(error, StopIteration):
        return with_cause(RuntimeError("a job raised StopIteration, which cannot travel through a future"), error)
    return error


class DataError(PenstockError, ValueError):
    """A stage of `penstock.data` cannot work with its data; the message names the record and the difference."""
