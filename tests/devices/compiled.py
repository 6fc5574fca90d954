"""What tests look at inside: the compile cache, the calls of programs, and the devices that are open."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import jax
import pytest

from penstock.devices.compiling import CompileCache, JittedFunction
from penstock.devices.device_pool import DevicePool
from penstock.devices.programs import Executable
from penstock.devices.shardings import Placement


def program(fn: Callable[..., Any], *parameters: str, device: int = 0, **options: Any) -> JittedFunction:
    options.setdefault("placement", Placement.of_device(jax.devices("cpu")[device]))
    return JittedFunction(fn, options.pop("name", "node"), parameters or ("x",), **options)


@contextmanager
def leased(cache: CompileCache) -> Iterator[CompileCache]:
    cache.thread.acquire()
    try:
        yield cache
    finally:
        cache.thread.abandon()
        cache.thread.join()


def compiled(cache: CompileCache, what: JittedFunction, *args: Any) -> Executable:
    """Compiles and waits; returns the executable or raises the error."""
    done: SimpleQueue[Executable | BaseException] = SimpleQueue()
    cache.compile(what, args, done.put)
    outcome = done.get(timeout=50)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def called(cache: CompileCache, what: JittedFunction, *args: Any) -> Any:
    """Finds or compiles a program, and calls it, as the thread of a device does."""
    executable = cache.find(what, args)
    if executable is None:
        executable = compiled(cache, what, *args)
    return executable(*args)


@contextmanager
def each_call(
    before: Callable[[Any], object] = lambda args: None, then: Callable[[Any], object] = lambda args: None
) -> Iterator[None]:
    """Makes each call of a program call `before` with its arguments, and `then` when it has returned."""
    original = Executable.call

    def call(executable: Executable, args: Any) -> Any:
        before(args)
        result = original(executable, args)
        then(args)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "call", call)
        yield


@contextmanager
def configured(name: str, value: object) -> Iterator[None]:
    """Sets an option of JAX for the whole process, within a block."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextmanager
def dying_once(where: Any, function: str) -> Iterator[None]:
    """Makes the thread of a device die once, in the given function, at its next job."""
    original = getattr(where, function)
    left = [1]

    def die(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            raise SystemExit("the thread dies")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, function, die)
        yield
    assert not left


def open_pools() -> list[DevicePool]:
    return [pool for pool in gc.get_objects() if isinstance(pool, DevicePool) and not pool._closed]


def open_device() -> Any:
    """Returns the device that some Engine has opened, if it is the only one."""
    [pool] = open_pools()
    [device] = pool._devices.values()
    return device


def refuse_memory(args: object = None) -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
