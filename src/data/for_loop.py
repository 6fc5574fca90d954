"""The values of a graph in a plain `for` loop: the engine runs on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from contextvars import copy_context
from typing import Any, Generic, Self, TypeVar, Unpack

from .. import Call, Checkpoint
from .._errors import EngineClosedError, EngineLoopError
from ..actors.tasks import when_main_thread_ends
from ..engine import CallOptions, Engine, Stream

T = TypeVar("T")

# What was entered and not left, such as by a generator that is still referenced when the program ends.
_entered: "set[Iterate[Any]]" = set()
_ending = threading.Event()  # set when the main thread has ended


def _leave_all() -> None:
    """Leave what was not left: the interpreter would wait for its threads for ever."""
    _ending.set()
    for one in list(_entered):
        one._leave_at_exit()


when_main_thread_ends(_leave_all)  # before the function of `actors.threads`, whose threads open calls need


class Iterate(Generic[T]):
    """The values of one call, for a `for` loop; made by `iterate`, and entered with `with`.

    One thread may read the values at a time. The end of the `with` ends the call, and waits until all of its tasks have
    ended.
    """

    def __init__(
        self, call: Call[AsyncIterator[T]], options: CallOptions, checkpoint: Checkpoint | None = None
    ) -> None:
        self._call = call
        self._checkpoint = checkpoint
        self._options = options
        self._thread: threading.Thread | None = None
        self._opened: Future[tuple[asyncio.AbstractEventLoop, Stream[T], asyncio.Event]] = Future()
        # The value that was asked for. It is kept if a signal handler, such as that of Ctrl-C, raises before the value
        # was returned.
        self._asked: Future[T] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_waiting = False
        self._given = 0  # the position before that value

    def __enter__(self) -> Self:
        """Start the call.

        Raises:
            EngineLoopError: an event loop runs in this thread, and would stand still.
            OptionsError: an option is unknown or does not apply.
            PlanError: the graph returns one value instead of a stream.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise EngineLoopError(
                "data.iterate waits for values, and the event loop that runs in this thread would stand still "
                "meanwhile; write `async with engine.stream(call) as values: async for value in values`"
            )
        if self._thread is not None:
            raise EngineClosedError("data.iterate was entered before, and can be read once: call data.iterate again")
        context, self._reader = copy_context(), threading.current_thread()
        self._thread = threading.Thread(target=context.run, args=(asyncio.run, self._run()), name="penstock-iterate")
        with ExitStack() as on_error:
            on_error.push(self)
            _entered.add(self)
            self._thread.start()
            self._opened.result()
            on_error.pop_all()
        if _ending.is_set():
            self._leave_at_exit()
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next value.

        Raises:
            Exception: the error of the call.
            EngineClosedError: the `with` was not entered, or was left.
        """
        if self._thread is None or not self._thread.is_alive():
            raise EngineClosedError("the values are read inside of `with data.iterate(call) as values:`")
        loop, stream, _ = self._opened.result()
        if self._asked is None:
            self._given = stream.position
            self._asked = Future()
        try:
            self._is_waiting = True
            if not self._asked.running():
                loop.call_soon_threadsafe(self._read, stream, self._asked)
            value = self._asked.result()
        except StopAsyncIteration:
            raise StopIteration from None
        finally:
            self._is_waiting = False
        self._asked = None
        return value

    def checkpoint(self) -> None:
        """Make a snapshot now and wait for it. Call this in the loop that reads the values, after SIGTERM for instance.

        Raises:
            OptionsError: there is no `checkpoint=`.
            CheckpointError: the snapshot could not be written.
            EngineClosedError: the `with` was not entered, or was left.
            EngineLoopError: a signal handler made this call while the loop waited for a value.
        """
        if self._thread is None or not self._thread.is_alive():
            raise EngineClosedError("a snapshot is made inside of `with data.iterate(call, checkpoint=...) as values:`")
        if self._is_waiting:
            raise EngineLoopError(
                "checkpoint() was called in a signal handler, or in another thread, while the loop waits for a value: "
                "only set a flag there, and call checkpoint() in the loop that reads the values"
            )
        loop, stream, _ = self._opened.result()
        asked, unread = self._asked, list[T]()
        if asked is not None:
            if not asked.running():
                loop.call_soon_threadsafe(self._read, stream, asked)
            if asked.exception() is None:
                self._asked, unread = None, [asked.result()]
        made = asyncio.run_coroutine_threadsafe(stream._checkpoint(is_reader=True, unread=unread), loop)
        try:
            made.result()
        finally:
            made.cancel()

    @property
    def position(self) -> int:
        """How many values were taken; with `checkpoint=`, values before a restart count, too."""
        if self._asked is not None:
            return self._given
        is_open = self._opened.done() and self._opened.exception() is None
        return self._opened.result()[1].position if is_open else 0

    def _read(self, stream: Stream[T], asked: "Future[T]") -> None:
        """Read a value, on the event loop. A value that is asked for again after a signal handler is read only once."""
        if asked.running() or asked.done():
            return
        asked.set_running_or_notify_cancel()

        async def read() -> None:
            try:
                asked.set_result(await anext(stream))
            except asyncio.CancelledError:
                asked.set_exception(EngineClosedError("the values were left before this one was there"))
                raise
            except BaseException as error:  # noqa: BLE001 - it is raised where the value was asked for
                asked.set_exception(error)

        self._reading = asyncio.get_running_loop().create_task(read())

    async def _run(self) -> None:
        """Keep the call open until the `with` is left. This is the main task of the thread."""
        is_left = asyncio.Event()

        def refused(kind: object, error: BaseException | None, trace: object) -> bool:
            if error is None or self._opened.done():
                return False
            self._opened.set_exception(error)  # `__enter__` raises it
            return True

        async with AsyncExitStack() as stack:
            stack.push(refused)
            engine = await stack.enter_async_context(Engine())
            call = engine.stream(self._call, checkpoint=self._checkpoint, **self._options)
            stream = await stack.enter_async_context(call)
            self._opened.set_result((asyncio.get_running_loop(), stream, is_left))
            await is_left.wait()

    def __exit__(self, *exc_info: object) -> None:
        assert self._thread is not None

        def leave(opened: "Future[tuple[asyncio.AbstractEventLoop, Stream[T], asyncio.Event]]") -> None:
            if opened.exception() is None:
                loop, _, is_left = opened.result()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(is_left.set)

        self._opened.add_done_callback(leave)  # a signal handler may have raised before the call was open
        if self._thread.is_alive():
            self._thread.join()
        _entered.discard(self)

    def _leave_at_exit(self) -> None:
        """Leave the values now that the main thread has ended, or once another thread has ended that reads them."""

        def leave() -> None:
            self._reader.join()
            self.__exit__()

        if self._thread is None or not self._thread.is_alive():
            return  # in a forked process
        if self._reader is threading.main_thread() or self._reader.daemon:
            self.__exit__()
        else:
            threading.Thread(target=leave, name="penstock-iterate-exit").start()


def iterate(
    call: Call[AsyncIterator[T]], /, *, checkpoint: Checkpoint | None = None, **options: Unpack[CallOptions]
) -> Iterate[T]:
    """Read the values of a call in a plain `for` loop, where no event loop runs.

    The graph runs on an event loop in another thread, and works ahead as far as its streams can hold values.

    Args:
        call: one call of a graph that returns an `AsyncIterator`.
        checkpoint: where snapshots of the call are saved, and where the call continues after a restart.
        **options: the options of `engine.stream` for one call.

    Returns:
        A context manager, inside which the values are read:
        `with data.iterate(call) as batches: for batch in batches: ...`
    """
    return Iterate(call, options, checkpoint)
