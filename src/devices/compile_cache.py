"""The programs that this process has compiled: found in microseconds, compiled once for all callers, bounded."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from opentelemetry.context import Context

from .._errors import DeviceError, EngineClosedError, copy_of
from ..actors.accepted import check, whole
from ..actors.tasks import until
from ..actors.threads import ThreadOwner
from ..telemetry import logs, metrics, names, spans
from ..telemetry.metrics import Reading, series
from ..telemetry.profiling import collectors
from ..telemetry.profiling.records import DeviceWork
from .compiling import JittedFunction, arguments_of, build
from .executable import Configuration, Executable, Signature, current, signature_of, types_of
from .untyped_jax import jax

# Called with None to work, or with the error that keeps it from working. Raises nothing.
Compilation: TypeAlias = Callable[[BaseException | None], None]


class CompileThread(ThreadOwner):
    """Runs compilations one after the other. It starts with the first of them, and ends with the last lease."""

    def __init__(self) -> None:
        self._ended: threading.Thread | None = None
        self.begin_without_threads()
        super().__init__()

    def begin_without_threads(self) -> None:
        """Have no thread and no leases, from the beginning, or in a process that was forked."""
        self._lock = threading.Lock()
        self._leases = 0
        self._run: _Run | None = None

    def acquire(self) -> None:
        """Keep the thread: until `release`, compilations may be submitted. Callable from any thread."""
        with self._lock:
            self._leases += 1

    def submit(self, job: Compilation) -> None:
        """Run a compilation on the thread.

        Raises:
            EngineClosedError: there is no lease.
        """
        with self._lock:
            if self._leases == 0:
                raise EngineClosedError("nothing can be compiled: the last Engine that uses devices was closed")
            if self._run is None:
                self._run = _Run()
            self._run.compilations.put(job)

    def release(self) -> None:
        """Give a lease back. The last one blocks until the running compilation has ended; those that wait fail.

        It is not for an event loop: that has `arelease`.
        """
        thread = self._give_back(on_ended=None)
        if thread is not None:
            thread.join()

    async def arelease(self) -> None:
        """Do what `release` does without blocking the loop; a cancellation is raised once the thread has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        thread = self._give_back(on_ended=lambda: loop.call_soon_threadsafe(ended.set))
        if thread is None:
            return
        try:
            await until(ended.is_set, ended.wait)
        finally:
            thread.join()  # it has nothing left to do but return

    def abandon(self) -> None:
        """Take all leases back: the thread ends after the running compilation."""
        with self._lock:
            self._leases = 1
        self._ended = self._give_back(on_ended=None)

    def join(self) -> None:
        """Block until the running compilation has ended; after `abandon`."""
        if self._ended is not None:
            self._ended.join()

    def _give_back(self, on_ended: Callable[[], object] | None) -> threading.Thread | None:
        with self._lock:
            self._leases -= 1
            if self._leases > 0 or self._run is None:
                return None
            run, self._run = self._run, None
        run.end(on_ended)
        return run.thread


class _Run:
    """One life of the thread, with its own queue: the next one may start before it has ended."""

    def __init__(self) -> None:
        self.compilations: SimpleQueue[Compilation | _LastWord] = SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.compilations,), name="penstock-compile", daemon=False)
        self.thread.start()

    def end(self, on_ended: Callable[[], object] | None) -> None:
        """Fail the compilations that wait; the running one still ends, and no other begins."""
        waiting: list[Compilation] = []
        try:
            while not isinstance(job := self.compilations.get_nowait(), _LastWord):
                waiting.append(job)
        except Empty:
            pass
        self.compilations.put(_LastWord(on_ended))
        for job in waiting:
            job(EngineClosedError("closed before this was compiled"))


class _LastWord:
    """Ends the thread."""

    def __init__(self, on_ended: Callable[[], object] | None) -> None:
        self.on_ended = on_ended


def _work(compilations: "SimpleQueue[Compilation | _LastWord]") -> None:
    while not isinstance(job := compilations.get(), _LastWord):
        job(None)
        del job  # an idle thread holds no program
    if job.on_ended is not None:
        try:
            job.on_ended()
        except RuntimeError:  # the loop is closed, and with it who waited
            pass


# A node with buckets has ten programs (300 random lengths made 9). Two hundred and fifty-six are 25 such nodes. A
# small program takes 0.4 MB of memory on a CPU, four layers of a network 0.6: a full cache holds 100 to 160 MB.
DEFAULT_CAPACITY: Final = 256

OnCompiled: TypeAlias = Callable[[Executable | BaseException], object]
_Key: TypeAlias = tuple[Any, ...]
# Leaves and structure of arguments.
_Flat: TypeAlias = tuple[list[Any], Any]
# Configuration, structure and types of the leaves of the last call of a function, and its program.
_Usual: TypeAlias = tuple[Configuration, Any, list[Any], Executable]
_IsWanted: TypeAlias = Callable[[], bool]
_Waiter: TypeAlias = tuple[OnCompiled, Context | None, _IsWanted]


class CompileCache:
    """Compiled programs, at most `capacity` of them; those that were not used for longest go.

    `find` is called on devices' threads, all else from any thread. Compiling takes a lease.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """Hold nothing yet, and start no thread.

        Args:
            capacity: the most programs to keep.

        Raises:
            ValueError: `capacity` is below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._lock = threading.Lock()
        self._held: dict[_Key, Executable] = {}
        self._usual: dict[JittedFunction, _Usual] = {}  # a program that is held, for each function
        self._waiting: dict[_Key, list[_Waiter]] = {}
        self._uses = count(1)
        self._thread = CompileThread()
        metrics.opened(self)

    def counters(self) -> Iterator[Reading]:
        """Yield how often each program in the cache was found, for metrics; the rest is counted where it happens."""
        for (jitted, *_), executable in list(self._held.items()):
            yield _reading(names.METRIC_COMPILE_CACHE_HITS, jitted, executable.hits)

    def levels(self) -> Iterable[Reading]:
        """Return nothing: how many programs are held belongs to no node."""
        return ()

    def acquire(self) -> None:
        """Take a lease: until it is given back, programs can be compiled."""
        self._thread.acquire()

    def release(self) -> None:
        """Give a lease back. The last one blocks until a running compilation has ended; those that wait fail."""
        self._thread.release()

    async def arelease(self) -> None:
        """Do what `release` does, without blocking the event loop."""
        await self._thread.arelease()

    def find(self, jitted: JittedFunction, args: tuple[Any, ...], flat: _Flat | None = None) -> Executable | None:
        """Return the program for a call; None if it was not compiled, or was evicted.

        Args:
            jitted: the function to call.
            args: all of its arguments, static ones included.
            flat: the same as leaves and structure, if they are known.

        Raises:
            TypeError: an argument is neither an array nor static; the message names node, parameter and remedy.
        """
        configuration = current()
        # A call is nearly always like the last one, and that is seen sooner than its signature is made.
        leaves, structure = flat or jax.tree.flatten(args)
        types = None if jitted.static_argnums else types_of(leaves)
        executable: Executable | None
        usual = self._usual.get(jitted)
        if usual is not None and usual[0] is configuration and usual[1] == structure and usual[2] == types:
            executable = usual[-1]
        else:
            signature = signature_of(args, jitted.static_argnums, configuration, jitted)
            executable = self._held.get((jitted, configuration, signature))
            if executable is None:
                return None
        if types is not None:
            with self._lock:
                if executable.is_held:  # always the last call's: types that a program gives are the same objects again
                    self._usual[jitted] = configuration, structure, types, executable
        executable.hits += 1
        executable.used = next(self._uses)
        return executable

    def compile(
        self,
        jitted: JittedFunction,
        args: tuple[Any, ...],
        on_done: OnCompiled,
        trace: Context | None = None,
        is_wanted: _IsWanted = lambda: True,
    ) -> None:
        """Compile a program on the compile thread, under the configuration of the calling thread.

        Callers of one program and signature share one compilation. What fails is not kept: the next call tries again.

        Args:
            jitted: the function to compile.
            args: as in a call; nothing of the arrays is kept. `jax.ShapeDtypeStruct`s may stand for them.
            on_done: called with the executable, or with an error that no other caller gets. On the compile thread, or
                at once if it has been compiled meanwhile; it must not raise.
            trace: the context with the sampled span that waits for it; None without one.
            is_wanted: asked on the compile thread when its turn has come. If no caller wants the program, it is not
                compiled, and `on_done` is called with a `DeviceError`.

        Raises:
            TypeError: an argument is neither an array nor static.
            EngineClosedError: there is no lease.
        """
        configuration = current()
        signature = signature_of(args, jitted.static_argnums, configuration, jitted)
        key = jitted, configuration, signature
        jitted.log.missed()
        metrics.add([_reading(names.METRIC_COMPILE_CACHE_MISSES, jitted, 1)])
        with self._lock:
            executable = self._held.get(key)
            if executable is None:
                waiting = self._waiting.get(key)
                if waiting is not None:
                    waiting.append((on_done, trace, is_wanted))
                    return
                self._thread.submit(lambda refusal: self._compile(jitted, configuration, signature, refusal))
                self._waiting[key] = [(on_done, trace, is_wanted)]
                return
        on_done(executable)

    def resize(self, capacity: int) -> None:
        """Hold at most this many programs from now on; those beyond that go at once. Callable from any thread."""
        with self._lock:
            self._capacity = capacity
            evicted = self._evict()
        _let_go(evicted)

    def __len__(self) -> int:
        return len(self._held)

    def _compile(
        self, jitted: JittedFunction, configuration: Configuration, signature: Signature, refusal: BaseException | None
    ) -> None:
        outcome: Executable | BaseException
        key = jitted, configuration, signature
        if refusal is None and (left := self._left(key)):
            for on_done, *_ in left:
                _tell(on_done, DeviceError(f"{jitted.name!r} was not compiled: its callers had left"))
            return
        if refusal is not None:
            outcome = refusal
        else:
            started = time.perf_counter()
            with self._lock:
                traces = [trace for _, trace, _ in self._waiting[key] if trace is not None]
            try:
                with (
                    jax.profiler.TraceAnnotation(f"compile {jitted.name}"),  # its name in a profile that JAX takes
                    spans.compiling(
                        jitted.name, jitted.placement.name, lambda: arguments_of(jitted, signature), traces
                    ),
                ):
                    outcome = build(jitted, configuration, signature)
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the callers, not to this thread
                outcome = error
            ended = time.perf_counter()
            jitted.log.spent(ended - started)
            metrics.add([_reading(names.METRIC_COMPILE_TIME, jitted, ended - started)])
            collectors.device_worked(DeviceWork("compile", jitted.placement.name, jitted.name, started, ended))
        evicted: list[tuple[JittedFunction, Executable]] = []
        with self._lock:
            waiting = self._waiting.pop(key)
            if isinstance(outcome, Executable):
                outcome.used = next(self._uses)
                self._held[key] = outcome
                outcome.is_held = True
                evicted = self._evict()
        if isinstance(outcome, Executable):
            jitted.log.compiled(jitted, configuration, signature, outcome)
            metrics.add([_reading(names.METRIC_COMPILE_PROGRAMS, jitted, 1)])
            _let_go(evicted)
        for number, (on_done, *_) in enumerate(waiting):
            _tell(on_done, copy_of(outcome) if number and isinstance(outcome, BaseException) else outcome)
        del outcome  # an error refers to this frame

    def _left(self, key: _Key) -> list[_Waiter]:
        """Take out and return the waiters of a program if all of them have left; else return an empty list."""
        with self._lock:
            if any(is_wanted() for *_, is_wanted in self._waiting[key]):
                return []
            return self._waiting.pop(key)

    def _evict(self) -> list[tuple[JittedFunction, Executable]]:
        evicted: list[tuple[JittedFunction, Executable]] = []
        while len(self._held) > self._capacity:
            # A scan, once per compilation, so that finding costs no more than a number.
            key = min(self._held, key=lambda key: self._held[key].used)
            executable = self._held.pop(key)
            executable.is_held = False
            if self._usual.get(key[0], (None,))[-1] is executable:
                del self._usual[key[0]]
            evicted.append((key[0], executable))
        return evicted


def _let_go(evicted: list[tuple[JittedFunction, Executable]]) -> None:
    """Count the programs that were evicted, and let go of them before the callers of the new one are told."""
    while evicted:
        jitted, executable = evicted.pop(0)
        jitted.log.dropped(executable)
        metrics.add(
            [
                _reading(names.METRIC_COMPILE_CACHE_HITS, jitted, executable.hits),
                _reading(names.METRIC_COMPILE_CACHE_EVICTIONS, jitted, 1),
            ]
        )


def _reading(metric: str, jitted: JittedFunction, value: float) -> Reading:
    return series(metric, (names.NODE, jitted.name)), value, None


def _tell(on_done: OnCompiled, outcome: Executable | BaseException) -> None:
    try:
        on_done(outcome)
    except Exception as error:  # noqa: BLE001 - the thread compiles for others, too
        logs.warning("program.callback_failed", error=repr(error))


# One for the process: a program never changes and costs seconds, and event loops may come and go.
CACHE: Final = CompileCache()


def set_program_cache(*, max_programs: int = DEFAULT_CAPACITY) -> None:
    """Set how many compiled programs this process keeps, of all device nodes together.

    When there are more, those go that were not used for longest, and are compiled again when they are needed again.
    `compile_statistics()` of a node says which went. A small program takes some 0.4 MB of memory on a CPU.

    Args:
        max_programs: the most programs; 256 by default. If more are there, the rest goes now.

    Raises:
        OptionsError: `max_programs` is no number above 0.
        MissingExtraError: JAX is not installed.
    """
    check("max_programs", max_programs, whole(1))
    CACHE.resize(max_programs)
