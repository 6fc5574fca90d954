"""Enqueue order of programs that span several devices, and resharding, which keeps that order."""

import re
import threading
import weakref
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

from jax.sharding import Mesh, NamedSharding, Sharding

from .jax_import import Device
from .shardings import REPLICATED, devices_of
from .untyped_jax import jax
from .wrong_fusions import compiler_options

# Enqueue order: a program that spans several devices is enqueued on all of them before any other program.
#
# A program with collectives waits on each of its devices for the other devices. If two such programs were enqueued in
# different orders on two devices, they would wait for each other for ever. A program on one device waits for no other
# device, and may overtake.
#
# The devices of a CPU are threads of one pool, with a thread for each core of the machine. A program with collectives
# holds a thread for each of its devices until all of them have arrived. So two such programs could hold some threads
# each and wait for ever: after 40 seconds XLA aborts the process. Therefore one such program is in flight at a time on
# a CPU, whichever devices it uses.

Locks: TypeAlias = tuple[threading.Lock, ...]


class EnqueueOrder:
    """The locks of the devices of this process. Meshes may overlap in any way, and threads may serve any event loop."""

    # Ownership: any thread calls any method. `_lock` guards `_locks`, which only grows. `_alone` and `_given` belong to
    # the thread that holds the locks that `locks` returned: only programs of CPUs run alone, and all share one lock.

    def __init__(self) -> None:
        # Results of the last program that had to run alone: one of its arrays, and weak references to all of them.
        self._alone: Any = None
        self._given: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}

    def locks(self, devices: Iterable[Device]) -> Locks:
        """Return the locks to hold while a program is enqueued on these devices; no lock for a single device."""
        # All threads take locks in one order: otherwise two threads could each hold a lock that the other thread needs.
        keys = sorted({(device.platform, device.id) for device in devices})
        if len(keys) < 2:
            return ()
        if keys[0][0] == "cpu":
            keys = [("cpu", 0)]
        with self._lock:
            return tuple([self._locks.setdefault(key, threading.Lock()) for key in keys])

    def wait_for_last(self, read: Any = None) -> None:
        """Block until the last program that had to run alone has ended; called while the locks are held.

        Args:
            read: an array that the next program reads. If the array is a result of the last program, the device runs
                the two in order, so no wait is needed here.
        """
        if self._alone is None or (read is not None and any(one() is read for one in self._given)):
            return
        with suppress(RuntimeError, ValueError):  # the result was donated since, or failed: its callers get the error
            self._alone.block_until_ready()

    def begun_alone(self, given: Any) -> None:
        """Note the result of a program that has to run alone; called while the locks are held."""
        arrays: list[Any] = jax.tree.leaves(given)
        # The smallest array, because it is kept alive.
        self._alone = min(arrays, key=attrgetter("nbytes"), default=None)
        self._given = [*map(weakref.ref, arrays)]


@contextmanager
def holding(locks: Locks) -> Generator[None]:
    """Hold the locks that `EnqueueOrder.locks` returned. The thread must hold no other locks of that kind."""
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


# One object for the process, because the process shares the devices.
ENQUEUE_ORDER: Final = EnqueueOrder()


_COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|send|recv)(-start)?\(")


def has_collectives(compiled: Any) -> bool:
    """Return whether the devices of a program wait for each other."""
    return _COLLECTIVE.search(compiled.as_text()) is not None


# Resharding: moves an array from one device or mesh to another, without waiting until it is computed.
#
# `jax.device_put` between meshes gives the right values, but the calling thread waits for the array unless source and
# target have the same parts (measured with JAX 0.10.1 on CPU; a compiled program does not wait). So a compiled identity
# first gives the array the wanted layout on the devices that hold it. Then each part is copied to its target device.


def reshard(array: Any, target: Sharding) -> Any:
    """Return an array moved to another device or sharding, without waiting until it is computed.

    Args:
        array: a `jax.Array`.
        target: the sharding to give it.
    """
    devices = devices_of(array.sharding), devices_of(target)
    with holding(ENQUEUE_ORDER.locks(devices[0] | devices[1])):
        if isinstance(array.sharding, NamedSharding) and len(devices[0]) > 1:
            array = _ready_to_copy(array, array.sharding, target)
        return jax.device_put(array, target)


def _ready_to_copy(array: Any, source: NamedSharding, target: Sharding) -> Any:
    """Return an array of a mesh laid out so that each part of `target` is a part of the array, or all of it."""
    there = devices_of(target)
    if isinstance(target, NamedSharding) and len(there) == len(devices_of(source)):
        mesh, wanted = cast("Mesh", source.mesh), cast("Mesh", target.mesh)
        devices, shape = cast("Any", mesh.devices), cast("Any", wanted.devices).shape
        same_parts = Mesh(devices.reshape(shape), wanted.axis_names, wanted.axis_types)
        return _lay_out(array, NamedSharding(same_parts, target.spec))
    whole: Any = _lay_out(array, NamedSharding(source.mesh, REPLICATED))
    copies: list[Any] = whole.addressable_shards
    return next((copy for copy in copies if copy.device in there), copies[0]).data


def _lay_out(array: Any, sharding: NamedSharding) -> Any:
    if next(iter(devices_of(sharding))).platform != "cpu":
        return _laid_out(sharding)(array)
    ENQUEUE_ORDER.wait_for_last(array)
    given = _laid_out(sharding)(array)
    ENQUEUE_ORDER.begun_alone(given)
    return given


# One program for each layout and shape. No process has 64 layouts, and each program is small.
@lru_cache(maxsize=64)
def _laid_out(sharding: NamedSharding) -> Any:
    device = next(iter(devices_of(sharding)))
    return jax.jit(_identity, out_shardings=sharding, compiler_options=compiler_options(device.platform))


def _identity(array: Any) -> Any:
    return array
