"""The clients of a soak: they call, stream, give up or leave early, and record the outcome of each call."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import penstock as ps
from penstock import engine
from tests.soak.world import Injected, answer, book, chat, heavy, rank

Service = engine.Service[..., Any]

# Few pages, since the store remembers all pages, and its growth would hide other growth.
_PAGES = 500

OUTCOMES = ("results", "errors", "cancelled", "expired", "refused")


class Ledger:
    """Counts of the outcomes of all calls.

    Attributes:
        counts: the number of "submitted" calls, and of calls with each of `OUTCOMES`.
        surprises: errors that neither a fault nor a limit explains.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.surprises: list[str] = []

    @property
    def lost(self) -> int:
        """The number of submitted calls minus the number of outcomes; 0 if each call has one outcome."""
        return self.counts["submitted"] - sum(self.counts[outcome] for outcome in OUTCOMES)

    async def follow(self, call: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Make one call, wait for it, and record its outcome; `call` returns whether the client stayed to the end."""
        self.counts["submitted"] += 1
        try:
            stayed = await call()
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
        except ps.DeadlineExceeded:
            self.counts["expired"] += 1
        except ps.Overloaded:
            self.counts["refused"] += 1
        except Exception as error:  # noqa: BLE001 - any error is the outcome of this call
            self.failed(error)
        else:
            self.counts["results" if stayed else "cancelled"] += 1

    def failed(self, error: Exception) -> None:
        self.counts["errors"] += 1
        expected = Injected, LookupError, ps.NodeCancelledError, ps.WorkerDied, ps.NodeTimeoutError, ps.ActorRestarted
        if not isinstance(error, expected) and len(self.surprises) < 10:
            self.surprises.append(repr(error))


class Clients:
    """Clients that come at random moments; each makes one kind of call.

    Args:
        service: the service that they call.
        rng: the source of their random choices.
    """

    def __init__(self, service: Service, rng: random.Random) -> None:
        self.ledger = Ledger()
        self._service = service
        self._rng = rng
        self._present: set[asyncio.Task[None]] = set()

    async def come(self, per_second: float, seconds: float) -> None:
        """Let clients come at this rate, even if earlier clients still wait, as clients do that overload a server."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + seconds
        while due < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._enter()
            due += self._rng.expovariate(per_second)

    async def gone(self, patience_seconds: float = 30) -> None:
        """Wait until all clients have left; report a lost call for each client that is still there."""
        if self._present:
            await asyncio.wait(self._present, timeout=patience_seconds)
        for task in self._present:
            task.cancel()  # it counts as cancelled, but the surprise below reports it
            self.ledger.surprises.append("a call did not end")

    def _enter(self) -> None:
        rng, page = self._rng, self._rng.randrange(_PAGES)
        [graph] = rng.choices((answer, rank, book, heavy, chat, None), (45, 15, 10, 3, 24, 3))
        if graph is None:
            self._add(self._pipeline(page))
            return
        call = partial(self._chat, page) if graph is chat else partial(self._call, graph(page))
        task = self._add(self.ledger.follow(call))
        if rng.random() < 0.06:  # the connection breaks
            asyncio.get_running_loop().call_later(rng.expovariate(30), task.cancel)

    def _add(self, client: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(client)
        self._present.add(task)
        task.add_done_callback(self._present.discard)
        return task

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self._rng.random() < 0.3:
            options["timeout_seconds"] = self._rng.choice([0.03, 0.1, 1.0])
        if self._rng.random() < 0.1:
            options["priority"] = self._rng.choice([-1, 1])
        return options

    async def _call(self, call: ps.Call[Any]) -> bool:
        await self._service.run(call, **self._options())
        return True

    async def _chat(self, page: int) -> bool:
        """Read a stream of tokens: to its end, slowly, or only a few tokens."""
        rng = self._rng
        leaves_after = rng.choice([None, None, None, 0, 3, 20])
        drops = rng.random() < 0.3  # leaves without `aclose`
        stream = self._service.stream(chat(page), **self._options())
        try:
            read = 0
            async for _ in stream:
                read += 1
                if leaves_after is not None and read > leaves_after:
                    return False
                if rng.random() < 0.02:
                    await asyncio.sleep(0.02)
        finally:
            if not drops:
                await stream.aclose()
        return True

    async def _pipeline(self, page: int) -> None:
        """Send several calls as one stream, and record an outcome for each call."""
        calls = [answer(page + number) for number in range(8)]
        self.ledger.counts["submitted"] += len(calls)
        async with self._service.stream(calls, max_in_flight=3) as stream:
            async for outcome in stream.outcomes():
                if outcome.error is None:
                    self.ledger.counts["results"] += 1
                else:
                    assert isinstance(outcome.error, Exception)
                    self.ledger.failed(outcome.error)
