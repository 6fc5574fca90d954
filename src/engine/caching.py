"""Results that a node keeps, with `cache=`: one computation for all equal calls, independent of each call."""

import asyncio
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextvars import Context
from typing import Any, cast
from weakref import WeakSet, ref

from .._errors import PlanError, ReentrantCallError
from ..actors.accepted import NOT_NEGATIVE, check, refuse_awaitable
from ..actors.execution import Bound, TracedExecution
from ..actors.frame import Frame, Listener, hand_over
from ..actors.node_actor import NodeActor, refuse_if_endless
from ..actors.policy import Cache
from ..actors.tasks import until
from ..actors.worker import Worker, WorkerGroup
from ..telemetry import logs, names, spans
from ..telemetry.counters import CacheStatistics
from .program import Wired

# The bytes of an entry besides its key and its result: places in two ordered dicts, and a tuple with a size and a time.
# `tracemalloc` says 230 to 275 bytes for 1,000 to 100,000 entries, on Python 3.11 and 3.13.
_BYTES_OF_AN_ENTRY = 300


class ResultCache:
    """The results that a node keeps in one Engine; results that were used last are at the end.

    Attributes:
        flights: the computations that run now, by their keys.
        bytes_held: how many bytes the results take, with their keys and the overhead of each entry.
        evicted: how many results were removed to make room for others.
    """

    def __init__(self, cache: Cache) -> None:
        self.flights: dict[Hashable, Flight] = {}
        self.bytes_held = 0
        self.evicted = 0
        self._cache = cache
        self._entries: OrderedDict[Hashable, tuple[Any, int, float]] = OrderedDict()  # the entry used last at the end
        # With a time to live: the keys of the entries, the key kept last at the end.
        self._by_age: OrderedDict[Hashable, None] = OrderedDict()
        self._has_warned = False

    def find(self, key: Hashable, now: float) -> tuple[Any, int, float] | None:
        """Return the entry with this key, whose first item is the result; None without an entry, or after its time."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now >= entry[2]:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def keep(self, node: str, key: tuple[Hashable, ...], value: Any, now: float) -> None:
        """Keep a result, if its size is known and there is room for it."""
        cache = self._cache
        if cache.size is None:
            size = _size_of(value)
        else:
            given = cache.size(value)
            check("size(result)", given, NOT_NEGATIVE, f"node {node!r}: the result of size= of its cache, ")
            size = int(given)
        if size is None:
            if not self._has_warned:
                self._has_warned = True
                logs.warning(
                    "cache.unknown_size", node=node, type=type(value).__qualname__,
                    remedy="say how many bytes a result takes: cache=ps.Cache(..., size=lambda result: ...)",
                )  # fmt: skip
            return
        self.forget_expired(now)
        if key in self._entries:
            self._drop(key)
        size += sys.getsizeof(key) + _BYTES_OF_AN_ENTRY
        for part in key[1:]:  # all keys share the first part
            size += _bytes_of_key(part)
        if size > cache.max_bytes:
            return
        until = math.inf
        if cache.ttl_seconds is not None:
            until = now + cache.ttl_seconds
            self._by_age[key] = None
        self._entries[key] = value, size, until
        self.bytes_held += size
        while self.bytes_held > cache.max_bytes:
            self._drop(next(iter(self._entries)))
            self.evicted += 1

    def forget_expired(self, now: float) -> None:
        """Drop the results whose time is over."""
        while self._by_age and now >= self._entries[key := next(iter(self._by_age))][2]:
            self._drop(key)

    def clear(self) -> None:
        """Forget all results."""
        self._entries.clear()
        self._by_age.clear()
        self.bytes_held = 0

    def _drop(self, key: Hashable) -> None:
        self.bytes_held -= self._entries.pop(key)[1]
        self._by_age.pop(key, None)


class CacheSite(Bound):
    """A call site of a node that keeps its results: it finds a result, or lets a body of the graph compute the result.

    Args:
        store: the results of the node in this Engine.
        cache: the option of the node.
        node: the name of the node.
        identity: the part of each key besides the arguments: the fake in the place of the node, and its instance.
        shared: the parameters, by position or name, that get resources.
        body: computes a result.
        captured: builds the arguments of the body from the values of a frame.

    Attributes:
        flights: the computations that calls of this site have begun and that have not ended.
    """

    def __init__(
        self,
        store: ResultCache,
        cache: Cache,
        node: str,
        identity: tuple[Hashable, ...],
        shared: frozenset[int | str],
        body: Wired,
        captured: Callable[[list[Any]], tuple[Any, ...]],
    ) -> None:
        super().__init__()
        self.store = store
        self.node = node
        self.body = body
        self.captured = captured
        self.flights: set[Flight] = set()
        self._cache = cache
        self._shared = shared
        self._identity = identity
        self._hits = self._misses = self._joined = 0

    async def invoke(self, worker: Worker, actor: NodeActor, frame: Frame) -> Any:
        """Return the result for one frame."""
        if frame.span is not None:
            with TracedExecution(frame.span, frame, actor) as execution:
                value, how = await self._find(frame, *actor.arguments(frame.values))
                spans.note_on_span({names.CACHE: how})  # "hit", "joined" or "miss"
                if how == "miss":
                    execution.returned(value)
                return value
        # The steps of `_find` for a hit: without them, a hit takes 1.12 times as long (40 pairs of processes).
        args, kwargs = actor.arguments(frame.values)
        kept = self.store.find(self._key_of(args, kwargs), frame.group.loop.time())
        if kept is not None:
            self._hits += 1
            return kept[0]
        return (await self._find(frame, args, kwargs))[0]

    def _cache_statistics(self) -> CacheStatistics:
        """Return a snapshot of the counters."""
        return CacheStatistics(
            self._hits, self._misses, self._joined, self.store.evicted, self.store.bytes_held, id(self.store)
        )

    async def close(self) -> None:
        """End the computations that calls of this site have begun: the scope ends; calls of other scopes start anew."""
        self.cancel()
        for flight in list(self.flights):
            await flight.unwound()

    def cancel(self) -> None:
        """Cancel these computations, without waiting for them."""
        for flight in list(self.flights):
            flight.give_up()

    async def _find(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        key, store = self._key_of(args, kwargs), self.store
        while True:
            kept = store.find(key, frame.group.loop.time())
            if kept is not None:
                self._hits += 1
                return kept[0], "hit"
            flight, how = store.flights.get(key), "joined"
            if flight is None:
                self._misses += 1
                flight, how = Flight(self, key, frame), "miss"
            else:
                self._joined += 1
                flight.refuse_if_endless(frame, self.node)
            try:
                value = await flight.result(frame)
                if not flight.was_given_up:
                    return value, how
            finally:
                del flight

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
        cache, shared = self._cache, self._shared
        parts: list[Hashable] = [self._identity]
        if cache.key is not None:
            parts.append(_of_key(cache.key(*args, **kwargs), self.node))
        for place, value in enumerate(args):
            if place in shared:
                parts.append(Identity(value))
            elif cache.key is None:
                parts.append(self._of_argument(value))
        for name, value in kwargs.items():
            if name in shared:
                parts += [name, Identity(value)]
            elif cache.key is None:
                parts += [name, self._of_argument(value)]
        return tuple(parts)

    def _of_argument(self, value: Any) -> Hashable:
        part = _part(value)
        if part is _OTHER:
            raise PlanError(
                f"node {self.node!r} has cache= and an argument of type {type(value).__name__}: without key=, "
                "arguments are numbers, strings, bytes, None, or tuples of these; give a function that returns a key "
                "for the arguments, as in cache=ps.Cache(..., key=lambda question: question.text)"
            )
        return part


class Flight(Listener):
    """One computation, for all calls that wait for it. This object listens to the frame of the computation.

    Attributes:
        was_given_up: whether the scope that began the computation ended first, so that waiting calls start again.
    """

    def __init__(self, site: CacheSite, key: tuple[Hashable, ...], caller: Frame) -> None:
        self.was_given_up = False
        self._site = site
        self._key = key
        self._error: BaseException | None = None
        self._waiters: dict[object, Frame] = {}
        self._empty = asyncio.Event()
        # No deadline and no context of a caller: the computation may go on for other callers when its first caller
        # left.
        loop, wired = caller.group.loop, site.body
        self._group = WorkerGroup(loop, Context(), self._ended, threads=caller.group.threads)
        self._group.is_exclusive = True
        inputs = site.captured(caller.values)
        self._frame = Frame(wired.program, inputs, self._group, self, caller.item, None)
        self._frame.priority = caller.priority
        self._frame.waiters = self._waiters.values()
        self._frame.waiting_inside = self._waiting = WeakSet[Frame]()
        site.store.flights[key] = self
        site.flights.add(self)
        self._group.start_worker(self._frame, wired.entries)

    async def result(self, caller: Frame) -> Any:
        """Wait for the result. A cancel of the last waiting caller cancels the computation, and waits for its end."""
        frame, waiter = self._frame, object()
        self._waiters[waiter] = caller
        for inside in {frame, *self._waiting}:  # the caller may hold the place that the computation waits for
            for actor in inside.queues:
                refuse_if_endless(actor, inside)
        try:
            await self._empty.wait()
        finally:
            del self._waiters[waiter]
            # Do not wait here for an ended computation, since two could wait for each other: its scope waits for it.
            if not self._waiters and frame.state == "running":
                frame.cancel()
                await self.unwound()
        error = self._error
        if not self._waiters:
            self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # breaks cycles, as in `Frame.tell_error`
        return frame.result

    def give_up(self) -> None:
        """Cancel the computation: the scope that began it ends."""
        if self._frame.state == "running":
            self.was_given_up = True
            self._frame.cancel()

    def refuse_if_endless(self, frame: Frame, node: str) -> None:
        """Raise if this computation waits, directly or through others, for the call that is about to wait for it."""
        if self._frame in frame.lineage():
            raise ReentrantCallError(
                f"node {node!r} keeps its results, and computes one by calling itself with equal arguments, directly "
                "or by way of other computations, which would wait for itself; call it inside with other arguments, "
                "or without the cache: with_policy(cache=None)"
            )

    def frame_done(self, frame: Frame) -> None:
        """Keep the result, except of a fallback or failover. Further calls do not find this computation."""
        site = self._site
        del site.store.flights[self._key]
        if frame.state == "done":
            try:
                frame.result = value = _handed_out(frame.result, site.node)
                if not frame.is_substitute:
                    site.store.keep(site.node, self._key, value, self._group.loop.time())
            except Exception as error:  # noqa: BLE001 - user code, such as `size=`: the waiting calls get the error
                self._error = error
        else:
            self._error = frame.tell_error()
            hand_over(self._error)
        self._group.close()

    async def unwound(self) -> None:
        """Wait until the last handler has returned, even if the caller is cancelled."""
        await until(self._empty.is_set, self._group.members_left)

    def _ended(self, group: WorkerGroup) -> None:
        self._site.flights.discard(self)
        self._empty.set()


class Identity:
    """The part of a key for one object, without keeping the object alive; equal only for the same object."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        self._object: Callable[[], object]
        try:
            self._object = ref(value)
        except TypeError:  # such as a list: the key keeps the object alive, so that no other object gets its id
            self._object = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        mine = self._object()
        return isinstance(other, Identity) and mine is not None and mine is other._object()


_OTHER = object()
_SIMPLE = (int, float, complex, str, bytes)


def _part(value: Any) -> Hashable:
    """Return the part of a key for an argument, or for a part of it; `_OTHER` if `key=` is needed."""
    kind: type[object] = type(cast("object", value))
    if kind is str or kind is bytes or value is None:
        return cast("Hashable", value)
    if isinstance(value, tuple):
        parts = tuple([_part(one) for one in value])  # pyright: ignore[reportUnknownVariableType]
        return _OTHER if _OTHER in parts else (kind, parts)
    if isinstance(value, _SIMPLE):
        # 1, True and 1.0 are equal, and so are 0.0 and -0.0, but a function may treat them differently.
        if isinstance(value, complex):
            return kind, repr(value.real), repr(value.imag)
        return (kind, repr(value)) if isinstance(value, float) and not value else (kind, value)
    return _OTHER


def _of_key(value: Any, node: str) -> Hashable:
    part = _part(value)
    if part is not _OTHER:
        return part
    refuse_awaitable(value)
    try:
        return _Given(value)
    except TypeError:
        raise TypeError(f"key= of the cache of node {node!r} returned {value!r:.100}, which is not hashable") from None


class _Given:
    """The part of a key for an object of any class, with its present hash: the object may change later."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self._hash = hash(value)
        self.value = value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given) and type(self.value) is type(other.value) and self.value == other.value


def _bytes_of_key(key: Any) -> int:
    """Return the size of a key, or of a part of it; types count nothing, since many keys share them."""
    if isinstance(key, type):
        return 0
    size = sys.getsizeof(key, 0)
    if isinstance(key, tuple):
        for part in key:  # pyright: ignore[reportUnknownVariableType]
            size += _bytes_of_key(part)
    elif isinstance(key, _Given):
        size += _bytes_of_key(key.value)
    return size


def _size_of(value: Any) -> int | None:
    """Return the size of a result in bytes; None if the size is not known."""
    own = sys.getsizeof(value, 0)
    if value is None or isinstance(value, int | float | complex | str | bytes | bytearray):
        return own
    size: object = getattr(value, "nbytes", None)
    if isinstance(size, int):
        whole: object = getattr(getattr(value, "base", None), "nbytes", 0)  # the whole array, which a view keeps alive
        return max(size, whole) if isinstance(whole, int) else size
    if type(value) not in (list, tuple, set, frozenset, dict):
        return None
    inside: list[Any] = [*value.keys(), *value.values()] if type(value) is dict else [*value]
    sizes = [_size_of(one) for one in inside]
    return None if None in sizes else own + sum([size or 0 for size in sizes])


def _handed_out(value: Any, node: str) -> Any:
    """Return a result in the form that all callers get: an array of NumPy becomes read-only."""
    numpy: Any = sys.modules.get("numpy")  # if NumPy was not imported, there is no such array
    if numpy is not None and isinstance(value, numpy.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        raise PlanError(
            f"node {node!r} has cache= and returned an array on a device, which is not kept; return numpy.asarray(...) "
            "of it, or leave cache= out"
        )
    return value
