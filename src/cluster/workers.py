"""Workers of a cluster: the values of `runs_on=` that have nodes run on workers."""

import asyncio
import inspect
import itertools
import math
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from numbers import Real
from time import perf_counter
from typing import Any, Final, get_origin
from weakref import WeakKeyDictionary

from .. import ItemInfo, Node, emit, extension
from .. import node as make_node
from .._errors import MissingExtraError, OptionsError
from . import messages
from .dispatch import Call, Dispatcher, Transport, Worker
from .messages import Reference, pack_function
from .remote import Request

# Larger arguments are written into the store in a thread, because the copy would block the event loop.
_MESSAGE_MAX_BYTES: Final = 256 * 1024

_FIGURES: Final = ("calls", "{call}"), ("busy", "s"), ("by reference", "By"), ("by value", "By")

_keys = itertools.count(1)


class Pool:
    """The workers of one execution in an Engine, with the functions and resources that the workers know.

    Args:
        transport: carries calls.
        most: the most workers.
    """

    def __init__(self, transport: Any, most: int) -> None:
        self.transport = transport
        self.dispatcher = transport.dispatcher = Dispatcher(transport, most)
        self._keys: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._openings: dict[object, int] = {}  # of resources; equal resources are opened once in each worker

    def key_of(self, fn: Any, name: str) -> int:
        """Return the number of a function or node, which is packed only once."""
        key = self._keys.get(fn)
        if key is None:
            packed = pack_function(fn, name)
            key = self._keys[fn] = next(_keys)
            self.transport.add_function(key, packed)
        return key

    def numbered(self, opens: Any) -> tuple[int, Any]:
        """Return the opening of a resource with its number."""
        what = opens.func, opens.args, tuple(sorted(opens.keywords.items()))
        return self._openings.setdefault(what, len(self._openings)), opens

    async def call(
        self, fn: Any, name: str, request: Request, is_coroutine: bool, begun: Callable[[], None], keeps: bool = False
    ) -> Call:
        """Return a call in the form that the transport sends: small values as bytes, large values in the store."""
        key = self.key_of(fn, name)
        with messages.references() as references:
            packed = messages.pack(tuple(request))
        given: list[Any] = [one.stored for one in references]
        if isinstance(packed, list) or len(packed) > _MESSAGE_MAX_BYTES:
            packed, given = b"", [await self.transport.put(packed), *given]
        future = asyncio.get_running_loop().create_future()
        return Call(name, (key, keeps, packed, given), future, is_coroutine, begun)

    async def answer(self, call: Call, left: Callable[["asyncio.Future[None]"], None]) -> tuple[str, float, Any]:
        """Have a worker make a call; emit the events that come before the answer, and return the answer.

        Args:
            call: the call.
            left: called if the caller leaves, with a future that is done once no worker has the call.
        """
        self.dispatcher.submit(call)
        try:
            while True:
                kind, seconds, content = await call.future
                if kind != "values":
                    return kind, seconds, content
                for _, packed in content:
                    await emit(messages.unpack(packed))
                self.dispatcher.more(call, call.future.get_loop().create_future())
        except asyncio.CancelledError:
            left(self.dispatcher.cancel(call))
            raise

    async def aclose(self) -> None:
        """End the workers."""
        await self.transport.aclose()


class Workers(extension.Execution):
    """Workers of a cluster for `runs_on=` of nodes; made by `penstock.cluster.ray`.

    Args:
        name: the name of the workers in drawings and statistics.
        workers: the most workers.
        connect: returns the `Transport` that carries calls to the workers, for one Engine.

    Attributes:
        workers: the most workers.

    Raises:
        OptionsError: `workers` is not a whole number of at least 1.
    """

    has_one_instance = False

    def __init__(self, name: str, workers: int, connect: Callable[[], Transport]) -> None:
        super().__init__(name)
        _check("workers", workers, int, 1, "a whole number of at least 1")
        self.workers = workers
        self._connect = connect

    def check(self, node: Node[..., Any]) -> None:
        """Refuse nodes that need the event loop of the driver: parameters that are streams, and order."""
        for name, hint in extension.hints_of(node.fn).items():
            origin = get_origin(hint) or hint
            if name != "return" and inspect.isclass(origin) and issubclass(origin, AsyncIterable):
                raise TypeError(_takes_a_stream(node.name, name))

    def places(self, node: Node[..., Any], scope: extension.Scope) -> extension.Places:
        """Return a place for each worker, and room for items ahead."""
        return extension.Places(self.workers, extension.CallsAhead.MOST * self.workers, self)

    def bind(self, site: extension.Site) -> extension.Bound:
        """Return the object that has workers make the calls of a site."""
        return OnWorkers(site, self._workers(site.scope))

    def bind_batch(
        self, fn: Callable[[list[Any]], Any], name: str, scope: extension.Scope
    ) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        """Return the object that has workers handle batches."""
        pool, is_async = self._workers(scope), _is_async(fn)

        tally = _Tally()

        async def handle(items: list[Any]) -> Any:
            request = Request(ItemInfo("", name, 0, 1), {}, (items,), {}, {}, None)
            call = await pool.call(fn, name, request, is_async, lambda: None)
            answer = await pool.answer(call, lambda gone: None)
            tally.count(call, answer)
            return _value(answer, name)

        told: Any = handle
        told.figures = tally.figures
        return handle

    def make_instance(
        self, scope: extension.Scope, cls: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the stand-in for the instances that workers make of a class."""
        return _Instances(self._workers(scope), cls, args, kwargs)

    @property
    def fetch(self) -> Node[..., Any]:
        """The node that fetches a result from a worker."""
        return _fetch

    def _workers(self, scope: extension.Scope) -> Pool:
        return scope.pool(f"cluster {self.name}", lambda: Pool(self._connect(), self.workers))

    def __repr__(self) -> str:
        return f"<Workers {self.name!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the name alone: a class that is pickled by its contents takes its execution along."""
        return type(self), (self.name, self.workers, _refused)


def _refused() -> Transport:
    raise RuntimeError("a node on a worker cannot run nodes on further workers: call those nodes in the driver's graph")


class _Instances:
    """Stands for the instances of a class in one scope. Each worker makes its instance at the first call."""

    def __init__(self, pool: Pool, cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.pool, self.cls = pool, cls
        self.recipe = next(_keys), args, kwargs

    async def __aenter__(self) -> None:
        """Do nothing, because there may be no worker yet."""

    async def __aexit__(self, *error: object) -> None:
        """Have the workers exit their instances."""
        self.pool.transport.leave(self.recipe[0])


class OnWorkers(extension.Bound):
    """One call site: each attempt is a call of a worker."""

    begins_later = True
    can_emit = True

    def __init__(self, site: extension.Site, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._node, self._callee = site.node, site.callee
        self._is_coroutine = site.node.is_async or site.node.gives_stream or _is_async(site.callee)
        self._scope = site.scope
        self._resources = {name: pool.numbered(opens) for name, opens in site.resources.items()}
        self._keeps_result = site.keeps_result
        self._tally = _Tally()

    async def _call(self, attempt: extension.Attempt) -> Call:
        node, pool = self._node, self._pool
        kwargs = attempt.kwargs
        args = attempt.args
        resources = self._resources
        if resources:
            names = [*inspect.signature(node.fn).parameters]
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            args, kwargs = (), {name: value for name, value in kwargs.items() if name not in resources}
        for name, value in (*enumerate(args), *kwargs.items()):
            if extension.is_stream(value):
                raise TypeError(_takes_a_stream(node.name, name))
        instance, fn = None, self._callee
        if node.template is not None:
            stand_in: _Instances = self._scope.instance(node)
            instance, fn = stand_in.recipe, stand_in.cls
        request = Request(attempt.info, attempt.trace_context(), args, kwargs, resources, instance)
        return await pool.call(fn, node.name, request, self._is_coroutine, attempt.begun, self._keeps_result)

    async def run(self, attempt: extension.Attempt) -> Any:
        """Have a worker make the call."""
        given = perf_counter()
        call = await self._call(attempt)
        answer = kind, seconds, content = await self._pool.answer(call, attempt.keeps_place_until)
        worker = self._tally.count(call, answer)
        attempt.ran_on(worker.machine, worker.process)
        attempt.begun(max(0.0, perf_counter() - given - seconds))
        if kind == "reference":
            content.pool = self._pool
            return content
        return _value(answer, self._node.name)

    async def open(self, attempt: extension.Attempt) -> AsyncIterator[Any]:
        """Have a worker make the values of a stream. The worker waits when it is some lists ahead."""
        call, dispatcher = await self._call(attempt), self._pool.dispatcher
        dispatcher.submit(call)
        is_open, size, seconds = True, 0, 0.0
        try:
            while is_open:
                answer = kind, seconds, content = await call.future
                if kind != "values":
                    is_open = False
                    _value(answer, self._node.name)
                    return
                is_open = call.number in (call.worker.coroutines if call.worker else ())
                if is_open:  # the worker makes the next list while this one is read
                    dispatcher.more(call, call.future.get_loop().create_future())
                for is_event, packed in content:
                    size += messages.size_of(packed)
                    if is_event:
                        await emit(messages.unpack(packed))
                    else:
                        yield messages.unpack(packed)
        finally:
            if call.worker is not None:
                self._tally.add(call.worker, seconds, 0, size)
                attempt.ran_on(call.worker.machine, call.worker.process)
            if is_open:
                attempt.keeps_place_until(dispatcher.cancel(call))

    def figures(self) -> list[extension.Figure]:
        """Return, for each machine, how many calls there were, how long they took, and how many bytes travelled."""
        return self._tally.figures()


class _Tally:
    """Counts the calls of one call site on each machine, with their times and bytes."""

    def __init__(self) -> None:
        self._of: dict[str, list[float]] = {}

    def count(self, call: Call, answer: tuple[str, float, Any]) -> Worker:
        """Count a call that was answered; return the worker that has answered."""
        kind, seconds, content = answer
        assert call.worker is not None
        by_value = messages.size_of(content) if kind == "value" else 0
        self.add(call.worker, seconds, content.nbytes if kind == "reference" else 0, by_value)
        return call.worker

    def add(self, worker: Worker, seconds: float, by_reference: int, by_value: int) -> None:
        """Count a call."""
        of = self._of.setdefault(worker.machine, [0, 0.0, 0, 0])
        for at, more in enumerate((1, seconds, by_reference, by_value)):
            of[at] += more

    def figures(self) -> list[extension.Figure]:
        """Return the counts, by machine."""
        return [
            extension.Figure(name, unit, value, machine)
            for machine, values in self._of.items()
            for (name, unit), value in zip(_FIGURES, values, strict=True)
        ]


@make_node(name="fetch")
async def _fetch(value: Any) -> Any:
    """Return the value of a result that stays on a worker; return any other value unchanged."""
    return await value.pool.transport.fetch(value) if isinstance(value, Reference) else value


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _value(answer: tuple[str, float, Any], name: str) -> Any:
    kind, _, content = answer
    if kind == "error":
        raise extension.unpack_error(content, name)
    return messages.unpack(content)


def _takes_a_stream(node: str, name: object) -> str:
    return (
        f"node {node!r} runs on workers, and its parameter {name!r} is a stream, which does not travel: call it for "
        "each value, `ps.map_each(node, stream)`"
    )


def _check(option: str, value: Any, kind: Any, least: int, accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
        raise OptionsError(f"{option}={value!r}: {accepted}")


def ray(
    *,
    workers: int,
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    label_selector: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    address: str | None = None,
    placement_timeout_seconds: float = 60.0,
    actor_options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Workers:
    """Return workers that Ray places. Each worker is an actor of Ray, in a process of its own.

    An Engine starts a worker when an item needs one, and ends its workers when it closes. If Ray is initialised,
    Penstock uses that Ray. Otherwise Penstock connects to `address`, or to the address in `RAY_ADDRESS`, or starts a
    local Ray, which ends with the last Engine that uses it. The first item raises `MissingExtraError` without the extra
    `penstock[ray]`, and `ClusterError` if no worker can be placed or the head cannot be reached.

    Args:
        workers: the most workers.
        num_cpus: how many cores each worker needs, as Ray counts cores.
        num_gpus: how many GPUs each worker needs.
        resources: other resources that each worker needs, by the names that the cluster gives them.
        label_selector: the labels of the machines that may run a worker.
        runtime_env: Ray's environment of a worker, such as `{"working_dir": "."}`.
        address: the head, "host:port"; "local" starts a local Ray in any case.
        placement_timeout_seconds: how long it may take to place a worker, and to reach the head, in seconds.
        actor_options: further options of the actor, as Ray names them.
        name: the name of the workers in drawings and statistics; by default, the resources of each worker.

    Raises:
        OptionsError: another execution has that name, or `workers`, `num_cpus` or `num_gpus` is not such a number.
    """
    for option, number in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        _check(option, number, Real, 0, "a finite number that is not negative")
    asked: dict[str, Any] = {
        "num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources, "label_selector": label_selector,
        "runtime_env": runtime_env,
    }  # fmt: skip
    options = {key: value for key, value in asked.items() if value} | {"num_cpus": num_cpus, **(actor_options or {})}
    words = [f"{key}={value}" for key, value in options.items() if key != "runtime_env"]

    def connect() -> Transport:
        from .ray_transport import RayTransport  # the first use loads Ray

        if find_spec("ray") is None:
            raise MissingExtraError("nodes on workers need Ray: pip install 'penstock[ray]'")
        return RayTransport(options, address, placement_timeout_seconds)

    return Workers(name or f"ray, {workers} of {', '.join(words)}", workers, connect)
