"""Runs nodes in workers behind pipes."""

import asyncio
import inspect
import itertools
import multiprocessing
from collections.abc import AsyncIterator, Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import penstock as ps
from penstock import extension


def serve(pipe: "Connection[Any, Any]") -> None:
    """Answer one call after the other: the main function of a worker."""
    made: dict[int, Any] = {}  # the instances of classes, by their numbers

    async def answer(key: int | None, fn: Any, args: Any, kwargs: Any) -> Any:
        if key is not None:
            fn = made[key] = made[key] if key in made else fn()
        result = fn(*args, **kwargs)
        if not inspect.isasyncgen(result):
            return await result if inspect.isawaitable(result) else result
        async for value in result:
            pipe.send(("value", value))
            if pipe.recv() is None:  # nobody reads on
                await result.aclose()
                break
        return None

    for info, *call in filter(None, iter(pipe.recv, "end")):  # None is the cancel of a call that had ended
        try:
            with extension.working_on(info, is_cancelled=pipe.poll):  # all that comes meanwhile is a cancel
                pipe.send(("result", asyncio.run(answer(*call))))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            pipe.send(("error", error))


class Worker:
    """A process, and the pipe to it: a pool of an Engine."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # so that `recv` fails if the process ends
        self.is_free, self.keys = asyncio.Lock(), itertools.count()

    async def aclose(self) -> None:
        self.pipe.send("end")
        await asyncio.to_thread(self.process.join)

    async def ask(self, message: Any) -> Any:
        self.pipe.send(message)
        return await asyncio.to_thread(self.pipe.recv)


class Elsewhere(NamedTuple):
    """Stands for an instance of a class, which its worker makes at the first call."""

    worker: Worker
    key: int
    make: Callable[[], Any]


class OnWorkers(extension.Bound):
    """One call site: it asks a worker for each attempt."""

    begins_later = True  # a timeout counts from `attempt.begun()`

    def __init__(self, site: extension.Site, execution: "BehindPipes") -> None:
        super().__init__()
        self.site, self.execution, self.sent = site, execution, 0

    async def begin(self, attempt: extension.Attempt) -> tuple[Worker, Any]:
        scope, node = self.site.scope, self.site.node
        is_class = node.template is not None
        worker, key, fn = scope.instance(node) if is_class else (self.execution.worker(scope), None, node)
        await worker.is_free.acquire()
        attempt.begun()
        self.sent += 1
        return worker, (attempt.info, key, fn, attempt.args, attempt.kwargs)

    async def run(self, attempt: extension.Attempt) -> Any:
        worker, message = await self.begin(attempt)
        answer = asyncio.ensure_future(worker.ask(message))
        answer.add_done_callback(lambda _: worker.is_free.release())
        attempt.keeps_place_until(answer)
        try:
            kind, value = await asyncio.shield(answer)
        except asyncio.CancelledError:
            worker.pipe.send(None)  # so that `check_cancelled` raises there
            raise
        if kind == "error":
            raise value
        return value

    async def open(self, attempt: extension.Attempt) -> AsyncIterator[Any]:
        worker, message = await self.begin(attempt)
        answer = asyncio.ensure_future(worker.ask(message))
        try:
            while (answered := await asyncio.shield(answer))[0] == "value":
                yield answered[1]
                answer = asyncio.ensure_future(worker.ask("next"))
            if answered[0] == "error":
                raise answered[1]
        finally:
            if not answer.done() or answer.result()[0] == "value":  # nobody reads on
                worker.pipe.send(None)
                while (await answer)[0] == "value":
                    answer = asyncio.ensure_future(asyncio.to_thread(worker.pipe.recv))
            worker.is_free.release()

    def figures(self) -> list[extension.Figure]:
        return [extension.Figure("sent", "{call}", self.sent)]


class BehindPipes(extension.Execution):
    """What `runs_on=` takes."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name)
        self.count, self.numbers = count, itertools.count()

    def worker(self, scope: extension.Scope) -> Worker:
        return scope.pool(f"{self.name} {next(self.numbers) % self.count}", Worker)

    def places(self, node: ps.Node[..., Any], scope: extension.Scope) -> extension.Places:
        return extension.Places(self.count, key=self)

    def bind(self, site: extension.Site) -> extension.Bound:
        return OnWorkers(site, self)

    def make_instance(self, scope: extension.Scope, cls: Any, args: Any, kwargs: Any) -> Elsewhere:
        worker = self.worker(scope)
        return Elsewhere(worker, next(worker.keys), partial(cls, *args, **kwargs))
