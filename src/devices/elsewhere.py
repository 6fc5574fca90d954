"""Device nodes that other processes run: each process compiles the function for a device of its own."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from .._errors import DeviceError
from ..actors.batching import Batch
from ..actors.execution import Attempt
from ..actors.executions import InOwnLoop
from ..actors.node_actor import NodeActor
from ..engine.engine import Engine
from ..engine.executions import InBatches
from ..engine.graph import graph
from ..engine.node import Execution, Node, Scope, Site, global_name
from ..engine.tracing.annotations import signature_of
from .statistics import BatchStatistics

if TYPE_CHECKING:
    from ..actors.execution import DetachedStep
    from ..actors.frame import Frame
    from ..actors.loop_host import OwnsLoop


class CompiledThere:
    """A callable that another process calls instead of a device node; with `batch=`, with a list of items' arguments.

    The object is pickled by the import name of the node, or by the contents of its function if no import finds the
    node.

    Args:
        fn: the function.
        name: the name of the node.
        options: the options of `device_node`, for a device of the process that makes the call.
        make: `device_node`.
    """

    def __init__(self, fn: Callable[..., Any], name: str, options: Mapping[str, Any], make: Callable[..., Any]) -> None:
        self.function, self.name, self.options, self.make = fn, name, options, make
        self.node: Node[..., Any] | None = None  # set in the process that declares the node
        self._service: Any = None
        self._open = AsyncExitStack()
        self._opening = asyncio.Lock()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute one item, or the items of a batch."""
        async with self._opening:
            if self._service is None:
                engine = await self._open.enter_async_context(Engine())
                self._service = await self._open.enter_async_context(
                    engine.deploy(self._graph(), max_in_flight=1 << 20)
                )
        if not self.options["batch"]:
            return await self._service(*args, **kwargs)
        [items] = args
        calls = [self._service(*args, **kwargs) for args, kwargs in items]
        return await asyncio.gather(*calls, return_exceptions=True)

    def _graph(self) -> Any:
        options = dict(self.options)
        if options["batch"] is not None:
            kind, given = options["batch"]
            options["batch"] = kind(**given)
        node = self.make(**options, name=self.name)(self.function)
        # With donate=, the arguments of a call are copied on the device. The copies belong to the node: donate them.
        copied = self.make(name="copied", device=options["device"], fuse=False)(_same)
        kept = set(signature_of(self.function).parameters if not options["donate"] else options["static"])

        async def called(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            for name, value in [*given.arguments.items()]:
                given.arguments[name] = value if name in kept else copied(value)
            return node(*given.args, **given.kwargs)

        signature = signature_of(graph(node).fn)  # without the masks, because the batch makes them
        made: Any = called
        made.__name__, made.__signature__ = self.name, signature
        return graph(made)

    async def aclose(self) -> None:
        """End its Engine."""
        await self._open.aclose()

    def __reduce__(self) -> tuple[Any, ...]:
        node = self.node
        if node is not None and self.function.__module__ != "__main__" and global_name(node, self.function):
            return _there, (node, self.name)
        return CompiledThere, (self.function, self.name, self.options, self.make)


def _same(value: Any) -> Any:
    return value.copy()


def _there(node: Any, name: str) -> Callable[..., Any]:
    there = getattr(node, "_elsewhere", None)
    if not isinstance(there, CompiledThere):

        async def refuse(*args: Any, **kwargs: Any) -> None:
            raise DeviceError(
                f"device node {name!r} is another one on the worker: there, its name stands for {node!r}, defined "
                "without runs_on=. Define the node alike in all processes; a worker does not have the arguments of "
                "the program, so choose runs_on= by a variable of the environment, which runtime_env= brings"
            )

        return refuse
    return CompiledThere(there.function, there.name, there.options, there.make)


class GatheredHere(InBatches):
    """Gathers items of a device node that other processes run. An item is the arguments of a call.

    Args:
        inner: the execution that runs the node.
        there: the callable that the other processes call.
        batch: how items are gathered.
        at_once: how many batches run at a time.
    """

    def __init__(self, inner: Execution, there: CompiledThere, batch: Batch, at_once: int | None) -> None:
        def cost(item: Any) -> float:
            assert batch.cost is not None
            return batch.cost(*item[0])

        plain = Batch(
            batch.max_size, max_wait_seconds=batch.max_wait_seconds, max_queue=batch.max_queue,
            max_cost=batch.max_cost, cost=batch.cost and cost,
        )  # fmt: skip
        super().__init__(inner, there, plain, at_once)
        self._sizes: Counter[int] = Counter()

    def statistics(self) -> BatchStatistics:
        """Return how many batches were gathered here. The other processes pad them, so the padding is not known."""
        sizes = self._sizes.copy()
        calls = sum(size * batches for size, batches in sizes.items())
        return BatchStatistics(sizes.total(), calls, calls, 0, 0)

    def _make_loop(self, node: Node[..., Any], scope: Scope) -> "OwnsLoop":
        loop: Any = super()._make_loop(node, scope)
        call = loop._call

        def counted(items: list[Any]) -> Any:
            self._sizes[len(items)] += 1
            return call(items)

        loop._call = counted
        return cast("OwnsLoop", loop)

    def bind(self, site: Site) -> "InGatheredBatch":
        """Return the object that puts the arguments of calls into the inbox of the loop."""
        loop: Any = site._instance
        return InGatheredBatch(loop)


class InGatheredBatch(InOwnLoop):
    """Puts the arguments of a call into the inbox of the loop that gathers a batch."""

    __slots__ = ()

    async def run(self, attempt: Attempt) -> Any:
        """Hand over the arguments of a call, and return the result."""
        frame, item = attempt._frame, (attempt.args, attempt.kwargs)
        return await self._host.run(item, frame.priority, attempt.deadline, frame.key, frame.leaves_running)

    def _begin(
        self, actor: NodeActor, frame: "Frame", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "DetachedStep | None":
        return super()._begin(actor, frame, ((args, kwargs),), {})


def compiled_there(
    fn: Callable[..., Any], name: str, options: Mapping[str, Any], batch: Batch | None, make: Callable[..., Any]
) -> CompiledThere:
    """Return the callable for other processes. This process gathers the items of a batch, so the others do not wait."""
    there = None
    if batch is not None:
        given = {one.name: getattr(batch, one.name) for one in fields(batch) if one.init}
        given |= {"max_wait_seconds": 0.0, "max_queue": None}
        if "pad_axes" in given:
            given["pad_axes"] = dict(given["pad_axes"])
        if "cost" in given:
            given |= {"cost": None, "max_cost": None}
        there = type(batch), given
    return CompiledThere(fn, name, {**options, "batch": there}, make)
