"""The compile cache: one compilation for all that wait, a bounded size, and a thread that ends with its last user."""

import asyncio
import gc
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock import EngineClosedError, OptionsError
from penstock.devices.compiling import CompileCache
from penstock.devices.programs import Executable

from .compiled import called, compiled, leased, program
from .gates import HeldTrace
from .processes import run

X = np.ones(3, np.float32)


def compile_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-compile"]


def size(number: int) -> Any:
    return np.ones(number, np.float32)


def loaded_programs(name: str) -> int:
    """Returns how many programs of this name the backend holds."""
    client: Any = jax.devices("cpu")[0].client
    return sum(loaded.hlo_modules()[0].name == name for loaded in client.live_executables())


def test_concurrent_first_callers_share_one_compilation() -> None:
    held = HeldTrace()
    node, done = program(held.compute), SimpleQueue[Any]()
    with leased(CompileCache()) as cache:
        for _ in range(5):
            cache.compile(node, (X,), done.put)
        held.wait()
        for _ in range(5):
            cache.compile(node, (X,), done.put)
        held.go_on()
        executables = [done.get(timeout=50) for _ in range(10)]
        cache.compile(node, (X,), done.put)  # the program exists by now, so `done` is called at once
        executables.append(done.get_nowait())
    assert len(set(executables)) == 1
    assert len(held.traced) == 1
    np.testing.assert_array_equal(executables[0](X), [2, 2, 2])
    statistics = node.log.statistics()
    assert (statistics.programs, statistics.hits, statistics.misses) == (1, 0, 11)
    assert statistics.seconds > 0


class Custom(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


def test_a_failure_reaches_each_caller_as_its_own_exception_and_is_tried_again() -> None:
    held = HeldTrace(Custom(7, why="broken"))
    node, done = program(held.compute), SimpleQueue[Any]()
    with leased(CompileCache()) as cache:
        for _ in range(3):
            cache.compile(node, (X,), done.put)
        held.go_on()
        errors = [done.get(timeout=50) for _ in range(3)]
        assert len({id(error) for error in errors}) == 3
        for error in errors:
            assert isinstance(error, Custom)
            assert (str(error), error.code) == ("7: broken", 7)
            [note] = [note for note in error.__notes__ if "while compiling" in note]
            assert note == "while compiling node 'node' for cpu:0 with (x: float32[3])"
        errors[0].add_note("of the first")
        assert "of the first" not in errors[1].__notes__
        held.error = None
        np.testing.assert_array_equal(called(cache, node, X), [2, 2, 2])
    assert len(held.traced) == 2
    assert node.log.statistics().programs == 1


def test_the_least_recently_used_program_goes_without_a_trace_of_its_function_and_constants() -> None:
    def with_constant() -> tuple[Any, Any]:
        captured = jnp.arange(1000.0)
        return program(lambda x: x + captured.sum(), name="other"), weakref.ref(captured)

    node, (other, captured) = program(lambda x: x + 1), with_constant()
    log, fn = other.log, weakref.ref(other.fn)
    with leased(CompileCache(capacity=3)) as cache:
        first = weakref.ref(compiled(cache, other, X))
        assert loaded_programs("jit_other") == 1
        for number in (1, 2):
            compiled(cache, node, size(number))
        assert cache.find(node, (size(1),))
        assert cache.find(other, (X,)) is first()
        compiled(cache, node, size(3))  # evicts the program for size 2, the least recently used
        assert cache.find(node, (size(2),)) is None
        assert node.log.statistics().evictions == 1
        for number in (4, 5, 6):
            compiled(cache, node, size(number))
        del other
        gc.collect()
        assert first() is fn() is captured() is None
        assert loaded_programs("jit_other") == 0
        assert len(cache) == 3
    found = log.statistics()
    assert (found.evictions, found.programs, found.hits) == (1, 0, 1)
    assert (node.log.statistics().evictions, node.log.statistics().programs) == (3, 3)


def test_the_arguments_of_a_call_are_not_kept() -> None:
    held, done = HeldTrace(), SimpleQueue[Any]()
    with leased(CompileCache()) as cache:
        x = jnp.ones(3)
        kept = weakref.ref(x)
        cache.compile(program(held.compute), (x,), done.put)
        held.wait()
        del x
        assert kept() is None
        held.go_on()
        done.get(timeout=50)


def test_the_thread_is_there_from_the_first_job_to_the_last_lease_and_again() -> None:
    cache, node = CompileCache(), program(lambda x: x + 1)
    for _ in range(2):
        cache.thread.acquire()
        cache.thread.acquire()
        assert compile_threads() == []
        compiled(cache, program(lambda x: x + 1), X)
        asyncio.run(cache.thread.release())
        [thread] = compile_threads()
        assert not thread.daemon
        asyncio.run(cache.thread.release())
        assert compile_threads() == []
    with pytest.raises(EngineClosedError):
        cache.compile(node, (X,), print)
    with leased(cache):
        np.testing.assert_array_equal(called(cache, node, X), [2, 2, 2])


async def test_the_last_lease_waits_off_the_loop_and_fails_who_waits() -> None:
    cache, held, done, late = CompileCache(), HeldTrace(), SimpleQueue[Any](), SimpleQueue[Any]()
    cache.thread.acquire()
    cache.compile(program(held.compute), (X,), done.put)
    cache.compile(program(lambda x: x), (X,), late.put)
    await held.entered()
    closing = asyncio.ensure_future(cache.thread.release())
    await asyncio.sleep(0)
    assert isinstance(late.get_nowait(), EngineClosedError)
    closing.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()  # even a cancelled release() waits for the compilation, then closes the thread
    cache.thread.acquire()
    compiled_meanwhile = SimpleQueue[Any]()
    # The thread starts again, while the compilation before still runs.
    cache.compile(program(lambda x: x), (X,), compiled_meanwhile.put)
    held.go_on()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert callable(done.get_nowait())
    assert callable(compiled_meanwhile.get(timeout=50))
    await cache.thread.release()
    assert compile_threads() == []


EXITING = """
import sys, threading
import jax
from penstock.devices.compiling import CompileCache, JittedFunction
from penstock.devices.shardings import Placement

def chain(x):
    began.set()
    for i in range(300):
        x = jax.numpy.sin(x) @ x
    return x

began = threading.Event()
cache = CompileCache()
cache.thread.acquire()
for _ in range(3):
    node = JittedFunction(chain, "node", ("x",), Placement.of_device(jax.devices()[0]))
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    cache.compile(node, (x,), lambda outcome: print(type(outcome).__name__, flush=True))
began.wait()
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), *(pytest.param(*case, marks=pytest.mark.long) for case in (("sys.exit(0)", 0), ("1 / 0", 1)))],
)
def test_the_interpreter_ends_in_order_while_something_is_compiled(end: str, status: int) -> None:
    child = run("-c", EXITING + end)
    assert child.returncode == status, child.stderr
    assert sorted(child.stdout.split()) == ["EngineClosedError", "EngineClosedError", "Executable"]


def effectful(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    return x


def test_effects_of_a_pure_program_are_refused_and_are_fine_if_the_user_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with leased(CompileCache()) as cache:
        with pytest.raises(OptionsError, match=r"node 'node' is pure.*Debug.*pure=False"):
            called(cache, program(effectful), X)
        called(cache, program(effectful, pure=False), X).block_until_ready()
        jax.effects_barrier()
    assert "[1. 1. 1.]" in capfd.readouterr().out


def test_the_cache_keeps_as_many_programs_as_are_asked_for() -> None:
    node = program(lambda x: x + 1)
    with leased(CompileCache(capacity=5)) as cache:
        for number in range(1, 6):
            compiled(cache, node, size(number))
        cache.resize(2)
        assert len(cache) == 2
        statistics = node.log.statistics()
        assert (statistics.programs, statistics.evictions) == (2, 3)
        assert [f"[{number}]" in shown for number, shown in enumerate(statistics.evicted, 1)] == [True] * 3
        for room, number in (2, 9), (3, 10):
            cache.resize(room)
            compiled(cache, node, size(number))
            assert len(cache) == room


def test_one_caller_who_still_waits_is_enough_to_compile() -> None:
    held, other, done = HeldTrace(), HeldTrace(), SimpleQueue[Any]()
    with leased(CompileCache()) as cache:
        cache.compile(program(held.compute), (X,), lambda _: None)
        held.wait()
        node = program(other.compute)
        for is_wanted in (lambda: False, lambda: True):
            cache.compile(node, (X,), done.put, is_wanted=is_wanted)
        for one in (held, other):
            one.go_on()
        assert [type(done.get(timeout=50)) for _ in range(2)] == [Executable] * 2
