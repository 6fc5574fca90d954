"""The code that runs in a worker: functions in one thread, coroutines and streams on the worker's event loop."""

import asyncio
import inspect
import os
import pickle
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, contextmanager, nullcontext, suppress
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

from .. import __version__, extension, telemetry
from .._errors import copy_of
from . import messages
from .messages import Packed, pack, unpack

# A message of a stream has the values that come within this time, and at most this many.
_LIST_SECONDS: Final = 0.002
_LIST_VALUES: Final = 64
_LIST_BYTES: Final = 1 << 20
_NO_TRACE: Final = nullcontext()

T = TypeVar("T")


class Request(NamedTuple):
    """A call, in the form that travels to a worker.

    Attributes:
        info: the item.
        headers: the headers of the item's trace.
        args: the positional arguments.
        kwargs: the keyword arguments.
        resources: the parameters whose arguments the worker opens, with the number and the opening of each.
        instance: for a class, the number of the instance and the arguments of its constructor.
    """

    info: Any
    headers: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    resources: Mapping[str, tuple[int, Callable[[], Any]]]
    instance: tuple[int, tuple[Any, ...], Mapping[str, Any]] | None


class Answer(NamedTuple):
    """The answer of a worker, as the driver reads it.

    Attributes:
        kind: "value", "reference", "error", "recalled" or "values".
        seconds: how long the call took.
        content: the value, the size of a result that stays on the worker, the error, or the values of a stream.
        goes_on: whether a stream may have more values.
    """

    kind: str
    seconds: float
    content: Any
    goes_on: bool = False


class Described(NamedTuple):
    """The description that a worker sends of itself when it has started."""

    machine: str
    process: int
    versions: Mapping[str, str]


def versions() -> dict[str, str]:
    """Return the versions of packages in this process that must be the same in a driver and its workers."""
    found = {"Python": platform.python_version(), "penstock": __version__, "jax": "none"}
    with suppress(metadata.PackageNotFoundError):
        found["jax"] = metadata.version("jax")
    return found


class Remote:
    """The actor of Ray. `call` has one thread, `begin` has a thread for each coroutine, other methods share `control`.

    The class has no `async def`: with one, Ray would run all methods on one event loop.
    """

    def __init__(self) -> None:
        self._callees = _Callees()
        self._lock = threading.Lock()
        self._begun = 0  # the number of the last function that has begun
        self._recalled: set[int] = set()
        self._streams: dict[int, _Stream] = {}
        self._cancelled: set[int] = set()  # numbers of calls whose cancel came before the call
        self._pid = os.getpid()
        self._has_ended = False
        up = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
        self._thread = threading.Thread(target=asyncio.run, args=(_live(up),), name="penstock-loop", daemon=True)
        self._thread.start()
        self._loop, self._end = up.result()

    def describe(self, functions: Mapping[int, bytes]) -> Described:
        """Load functions, so that no call waits for their modules; return the place and the versions of this worker."""
        for key, function in functions.items():
            self._callees.learn(key, function)
        ray: Any = sys.modules.get("ray")
        node_id: str = f"/{ray.get_runtime_context().get_node_id()[:6]}" if ray and ray.is_initialized() else ""
        return Described(platform.node() + node_id, os.getpid(), versions())

    def watch(self) -> None:
        """Never return: a caller that waits for this method learns when the worker ends."""
        threading.Event().wait()

    def call(self, message: bytes, *given: Packed) -> Any:
        """Run a function, in the thread for functions."""
        sent = messages.Sent(*unpack(message))
        began = perf_counter()
        self._callees.learn(sent.key, sent.function)
        with self._lock:
            if sent.number in self._recalled:
                self._recalled.discard(sent.number)
                return _returned(Answer("recalled", 0.0, None), sent.keeps_result)
            self._begun = sent.number
        try:
            request = _request(sent.body, given)
            callees = self._callees
            fn, kwargs = callees.known(sent.key, request) or self._on_loop(callees.prepared, sent.key, request)
            trace = telemetry.continue_trace(request.headers) if request.headers else _NO_TRACE
            with trace, extension.working_on(request.info), _without_children():
                result = fn(*request.args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            return _failure(error, began, sent.keeps_result)
        return _answer(result, began, request.info.node, sent.keeps_result)

    def begin(self, message: bytes, *given: Packed) -> Any:
        """Begin a coroutine or a stream on the loop; return its result, or its first values."""
        sent = messages.Sent(*unpack(message))
        began = perf_counter()
        self._callees.learn(sent.key, sent.function)
        try:
            request = _request(sent.body, given)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            return _failure(error, began, sent.keeps_result)
        run = partial(self._callees.run, sent.key, request)
        stream = _Stream(self._loop, run, began, request.info.node, sent.keeps_result)
        with self._lock:
            self._streams[sent.number] = stream
            is_cancelled = sent.number in self._cancelled
            self._cancelled.discard(sent.number)
        if is_cancelled:
            self.cancel(sent.number)
        return self.more(sent.number)

    def more(self, number: int) -> Any:
        """Return the next values of a stream, or its end."""
        stream = self._streams[number]
        answer: Answer = self._on_loop(stream.take)
        if not answer.goes_on:
            del self._streams[number]
        if answer.kind == "value":
            return _answer(answer.content, stream.began, stream.node, stream.keeps_result)
        if answer.kind == "error":
            return _failure(answer.content, stream.began, stream.keeps_result)
        return _returned(answer, stream.keeps_result)

    def cancel(self, number: int) -> None:
        """Cancel a coroutine, or close a stream."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is None:
                self._cancelled.add(number)
        if stream is not None:
            self._loop.call_soon_threadsafe(stream.cancel)

    def recall(self, numbers: list[int]) -> list[int]:
        """Return the numbers of the functions that have not begun. These will not run."""
        with self._lock:
            taken = [number for number in numbers if number > self._begun]
            self._recalled.update(taken)
        return taken

    def leave(self, key: int) -> None:
        """Exit the instance of a number, whose scope has ended."""
        self._on_loop(self._callees.leave, key)

    def close(self) -> None:
        """Leave all instances, and close the resources."""
        self._on_loop(self._callees.aclose)

    def end(self) -> None:
        """End the event loop, and all that runs on the loop."""
        with self._lock:
            self._has_ended = True
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _on_loop(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        # A loop that ends cancels the coroutines that were posted before, and forgets all that are posted later.
        with self._lock:
            if self._has_ended:
                raise RuntimeError("this worker has ended")
            running = asyncio.run_coroutine_threadsafe(work(*args), self._loop)
        return running.result()


async def _live(up: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    """Run the event loop of a worker until the worker ends. `up` gets the loop."""
    ended = asyncio.Event()
    up.set_result((asyncio.get_running_loop(), ended))
    await ended.wait()


@contextmanager
def _without_children() -> Generator[None]:
    """End a process that the code inside has forked, where the process leaves that code: it would go on as a worker."""
    worker, raised = os.getpid(), None
    try:
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        if os.getpid() != worker:
            extension.end_forked(raised)


class _Callees:
    """The functions, the instances of classes and the resources of a worker, which are loaded and opened once."""

    def __init__(self) -> None:
        self._functions: dict[int, Any] = {}  # by number; an exception for a function that could not be loaded
        self._instances: dict[int, Any] = {}  # by the number of the stand-in in the driver
        self._exits: dict[int, AsyncExitStack] = {}  # of instances
        self._resources: dict[int, Any] = {}
        self._open = AsyncExitStack()  # of resources
        self._opening = asyncio.Lock()
        self._changed = threading.Condition()

    def learn(self, key: int, function: bytes) -> None:
        """Load the function that a message brings, if the message has one."""
        if function:
            try:
                found = pickle.loads(function)
            except BaseException as error:  # noqa: BLE001 - each call of it raises that
                found = error
            with self._changed:
                self._functions[key] = found
                self._changed.notify_all()

    def _function(self, key: int) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: key in self._functions)
            found = self._functions[key]
        if isinstance(found, BaseException):
            remedy = 'workers need the modules of the program: runtime_env={"working_dir": "."} brings them'
            raise ImportError(f"a worker cannot load the node: {found!r}; {remedy}") from copy_of(found)
        return found

    def known(self, key: int, request: Request) -> tuple[Any, Mapping[str, Any]] | None:
        """Return the result of `prepared` if nothing has to be opened, as for nearly all calls; otherwise None."""
        fn = self._functions.get(key) if request.instance is None else self._instances.get(request.instance[0])
        return None if fn is None or request.resources or isinstance(fn, BaseException) else (fn, request.kwargs)

    async def prepared(self, key: int, request: Request) -> tuple[Any, Mapping[str, Any]]:
        """Return the function, or the instance of a class, and the keyword arguments; resources are opened once."""
        fn = await asyncio.get_running_loop().run_in_executor(None, self._function, key)
        if request.instance is not None:
            number, args, kwargs = request.instance
            async with self._opening:
                if number not in self._instances:
                    instance, stack = fn(*args, **kwargs), AsyncExitStack()
                    if hasattr(instance, "__aenter__"):
                        await stack.enter_async_context(instance)
                    elif hasattr(instance, "__enter__"):
                        stack.enter_context(instance)
                    self._instances[number], self._exits[number] = instance, stack
            fn = self._instances[number]
        return fn, {**request.kwargs, **(await self._opened(request))} if request.resources else request.kwargs

    async def _opened(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (key, opens) in request.resources.items():
            async with self._opening:
                if key not in self._resources:
                    self._resources[key] = await self._open.enter_async_context(opens())
            found[name] = self._resources[key]
        return found

    async def run(self, key: int, request: Request, stream: "_Stream") -> Any:
        """Run a coroutine and return its result; or run a generator, whose values go into the stream."""
        fn, kwargs = await self.prepared(key, request)
        with (
            telemetry.continue_trace(request.headers),
            extension.working_on(request.info, emit=partial(stream.put, True)),
            _without_children(),
        ):
            result: Any = fn(*request.args, **kwargs)
            if inspect.isawaitable(result):
                return await result
            async with AsyncExitStack() as stack:
                if inspect.isasyncgen(result):
                    await stack.enter_async_context(aclosing(result))
                async for value in result:
                    await stream.put(False, value)
            return stream

    async def leave(self, key: int) -> None:
        """Exit the instance of a number."""
        if self._instances.pop(key, None) is not None:
            await self._exits.pop(key).aclose()

    async def aclose(self) -> None:
        """Leave all instances, and close the resources."""
        for key in [*self._instances]:
            await self.leave(key)
        for fn in self._functions.values():
            if hasattr(fn, "aclose"):
                await fn.aclose()
        await self._open.aclose()


def _request(body: bytes, given: "tuple[Packed, ...]") -> Request:
    packed: Packed = body
    if not body:  # the request was too large for a message, and came through the store
        packed, given = given[0], given[1:]
    with messages.references(given):
        return Request(*unpack(packed))


class _Stream:
    """A running coroutine with the events that it has emitted, or a running generator with its values.

    Attributes:
        began: when the call began.
        node: the name of the node.
        keeps_result: whether the result stays on this worker.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        run: "Callable[[_Stream], Any]",
        began: float,
        node: str,
        keeps_result: bool,
    ) -> None:
        self.began, self.node, self.keeps_result = began, node, keeps_result
        self._held: deque[tuple[bool, Packed]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Future[Any] | None = None
        self._is_cancelled = False
        loop.call_soon_threadsafe(self._begin, run)

    def _begin(self, run: "Callable[[_Stream], Any]") -> None:
        task: asyncio.Future[Any] = asyncio.ensure_future(run(self))
        self._task = task
        task.add_done_callback(lambda _: self._changed.set())
        if self._is_cancelled:
            task.cancel()

    def cancel(self) -> None:
        """Cancel what runs."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def put(self, is_event: bool, value: object) -> None:
        """Give a value to the driver; wait while the driver has not taken the earlier values."""
        while len(self._held) >= _LIST_VALUES or self._bytes >= _LIST_BYTES:
            self._changed.clear()
            await self._changed.wait()
        packed = pack(value)
        self._held.append((is_event, packed))
        self._bytes += messages.size_of(packed)
        self._changed.set()

    async def take(self) -> Answer:
        """Wait for a value, and return the values of two milliseconds; at the end, return the result or the error."""
        while not self._held and (self._task is None or not self._task.done()):
            self._changed.clear()
            await self._changed.wait()
        assert self._task is not None
        if self._held and not self._task.done() and len(self._held) < _LIST_VALUES:
            await asyncio.wait([self._task], timeout=_LIST_SECONDS)
        if self._held:
            values, self._bytes = [*self._held], 0
            self._held.clear()
            self._changed.set()
            ends = self._task.done() and not self._task.cancelled() and self._task.exception() is None
            ends = ends and self._task.result() is self
            return Answer("values", perf_counter() - self.began, values, not ends)
        if self._task.cancelled():
            return Answer("error", 0.0, asyncio.CancelledError())
        error = self._task.exception()
        if error is not None:
            return Answer("error", 0.0, error)
        result = self._task.result()
        return Answer("values", 0.0, []) if result is self else Answer("value", 0.0, result)


def _returned(answer: Answer, keeps_result: bool, kept: Packed = b"") -> Any:
    """Return an answer for Ray. A result that may stay here is a second part, for which the driver does not wait."""
    return (pack(answer), kept) if keeps_result else pack(answer)


def _answer(result: object, began: float, node: str, keeps_result: bool) -> Any:
    if isinstance(result, list):  # the results of a batch, where an exception is the outcome of one item
        items: list[Any] = result  # pyright: ignore[reportUnknownVariableType] - what isinstance leaves of object
        result = [_Raised(one, node) if isinstance(one, BaseException) else one for one in items]
    try:
        packed = pack(result)
    except Exception as error:  # noqa: BLE001 - reducers are the result's own code and may raise anything
        reason = f"the result of node {node!r} ({type(result).__name__}) cannot travel back: {error}"
        return _failure(TypeError(f"{reason}; return plain data instead"), began, keeps_result)
    seconds = perf_counter() - began
    if keeps_result:
        return _returned(Answer("reference", seconds, messages.size_of(packed)), True, packed)
    if isinstance(packed, bytes):
        return pack(Answer("value", seconds, packed))
    return [pack(Answer("value", seconds, None)), *packed]


class _Raised(NamedTuple):
    """An exception that is unpickled as itself, with the traceback on this worker as its cause."""

    error: BaseException
    node: str

    def __reduce__(self) -> tuple[Any, ...]:
        return extension.unpack_error, (extension.pack_error(self.error, messages.dumps_error), self.node)


def _failure(error: BaseException, began: float, keeps_result: bool) -> Any:
    packed = extension.pack_error(error, messages.dumps_error)
    return _returned(Answer("error", perf_counter() - began, packed), keeps_result)
