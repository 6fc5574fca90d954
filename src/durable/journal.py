"""The journal of a run: what its steps and calls have returned, and how a run that goes on is given that again."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final
from uuid import uuid4

from .._errors import NotStorable, OtherCall
from ..extension import Keeper, KeptSite, encode
from .parts import Values
from .store import Entry, Kind, Question, Run
from .writer import Writer

# How many turns of the loop lie between two results that a handler gets again: the code between them has come to rest,
# unless they were handed on within fewer turns in the first life; then it is as many as there.
REST_TURNS: Final = 16
# A handler that makes another call than in its first life is given this much longer than that life took.
PATIENCE_SECONDS: Final = 10.0


class Journal(Keeper):
    """Keeps the steps and calls of one run, and gives kept results back.

    A path in the store names the step as `Keeper` does; behind the label of a step of a graph, in braces, is a digest
    of where its arguments come from.

    Args:
        run: the run, as this process has claimed it.
        entries: its entries.
        values: encodes its values; knows the entries.
        writer: writes new entries.

    Attributes:
        run: the argument of the same name.
        values: the argument of the same name.
        patience_seconds: for how long a new call waits for a kept one that is not made.
    """

    def __init__(self, run: Run, entries: Iterable[Entry], values: Values, writer: Writer) -> None:
        self.run = run
        self.values = values
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._begun: set[str] = set()
        self._results: dict[str, Entry] = {}
        self._item_errors: dict[str, Entry] = {}
        self._states: dict[str, tuple[int, Entry]] = {}
        self._entered: set[str] = set()
        self._handlers: dict[str, _Handler] = {}
        self._questions = {one.path: one for one in run.questions}
        self._open: set[str] = set()  # the calls of handlers that run now
        self._next = 1
        self._turn = self._turns_left = 0
        self.patience_seconds = PATIENCE_SECONDS
        self._read(entries)

    def _read(self, entries: Iterable[Entry]) -> None:
        outcomes: dict[str, list[tuple[str, Entry]]] = {}
        times: list[float] = []
        for entry in entries:
            self._next = max(self._next, entry.seq + 1)
            if entry.kind in ("arguments", "forgotten"):
                continue
            times.append(entry.at)
            self._turn = max(self._turn, entry.moment)
            path = entry.path.partition("{")[0]
            self._entered.update(path[: at + 1] for at, letter in enumerate(path) if letter == "/")
            if entry.kind == "begun":
                self._begun.add(path)
            elif entry.kind == "state":
                loop, _, count = path.rpartition("[")
                self._states[loop] = int(count[:-1]), entry
            elif path.endswith("/"):
                self._item_errors[path] = entry
            elif "(" in path.rpartition("/")[2]:
                outcomes.setdefault(path.rpartition("/")[0], []).append((path, entry))
            else:
                self._results[path] = entry
        self._handlers = {path: _Handler(self, kept) for path, kept in outcomes.items()}
        self.patience_seconds += max(times, default=0) - min(times, default=0)

    # The steps.

    async def step(
        self,
        path: str,
        site: KeptSite,
        arguments: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]],
        run: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Return the outcome of a step; see `Keeper`."""
        is_call = path in self._open
        kept = self._results.get(path)
        if kept is not None:
            return self.values.decode(kept.seq)
        if not is_call and not site.is_kept and self._is_left_out(path.removesuffix(site.label), site):
            return None
        if site.is_effect:
            await self._begin(path if is_call else f"{path}{{{site.wiring}}}", arguments())
        value = await run()
        self._returned(path)
        if site.is_kept and not is_call:
            self.append(f"{path}{{{site.wiring}}}", "result", value, f"the result of {path}")
            await self._writer.room()
        return value

    def _is_left_out(self, around: str, site: KeptSite) -> bool:
        """Whether each reader of a value is kept, or left out itself."""
        return bool(site.readers) and all(
            around + one.label in self._results or (not one.is_kept and self._is_left_out(around, one))
            for one in site.readers
        )

    async def _begin(self, path: str, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
        """Keep that an effect has begun, behind everything that has ended before."""
        if path.partition("{")[0] not in self._begun:
            self.append(path, "begun", digest_of(arguments), path)
        await self._writer.barrier(self.run)

    def _returned(self, path: str) -> None:
        """Check that a handler that has returned has made each call that it has made in its first life."""
        attempts = [one for of, one in self._handlers.items() if of.partition("@")[0] == path] if self._handlers else ()
        for handler in [*attempts][-1:]:
            handler.returned(path)

    # Loops and items.

    def entered(self, path: str) -> bool:
        """Return whether something is kept below a path."""
        return path in self._entered

    def began_loop(self, path: str, state: Any) -> tuple[int, Any]:
        """Return the last kept state of a loop."""
        found = self._states.get(path)
        return (0, state) if found is None else (found[0], self.values.decode(found[1].seq))

    def iterated(self, path: str, iterations: int, state: Any) -> None:
        """Keep the state behind an iteration."""
        self.append(f"{path}[{iterations}]", "state", state, f"the state of {path}")

    def failed_item(self, path: str) -> Exception | None:
        """Return the kept error of an item."""
        found = self._item_errors.get(path)
        error: Exception | None = None if found is None else self.values.decode(found.seq)
        return error

    def item_failed(self, path: str, error: Exception) -> None:
        """Keep the error of an item."""
        self.append(path, "error", error, f"the error of {path}")

    # Calls of handlers.

    def name_of(self, handler: str, called: str, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> str:
        """Return the path of a call of a handler; see `Keeper`."""
        found = self._handlers.get(handler)
        if found is None:
            found = self._handlers[handler] = _Handler(self, ())
        return f"{handler}/{found.name_of(called, arguments)}"

    async def call(self, handler: str, path: str, run: Callable[[], Awaitable[Any]]) -> Any:
        """Return the outcome of a call of a handler; see `Keeper`."""
        return await self._called(self._handlers[handler], path, run)

    async def _called(self, handler: "_Handler", path: str, run: Callable[[], Awaitable[Any]]) -> Any:
        if path in handler.kept:
            entry = handler.kept[path]
            await handler.turn_of(path)
            value = self.values.decode(entry.seq)
            if entry.kind == "error":
                raise value
            return value
        await handler.all_kept(path)
        self.keep_errors(handler)
        self._open.add(path)
        try:
            value = await run()
        except Exception as error:
            handler.errors.append((path, self.moment(), error))
            raise
        finally:
            self._open.discard(path)
        self.keep_errors(handler)
        self.append(path, "result", value, f"the result of {path}")
        await self._writer.room()
        return value

    async def ask(self, handler: str, question: object) -> Any:
        """Return the answer to a question, which anybody may give while the run goes on; see `Keeper`."""
        path = self.name_of(handler, "ask", ((question,), {}))
        asking = self._handlers[handler]
        if path in asking.kept:
            await asking.turn_of(path)
            return self.values.decode(asking.kept[path].seq)
        await asking.all_kept(path)
        self.keep_errors(asking)
        found = self._questions.get(path)
        if found is None:
            data = self.values.coded(encode(question, "the question").to_bytes())
            found = Question(uuid4().hex, path, data, asked_at=self._writer.now())
            self._writer.ask(self.run, found)
            await self._writer.barrier(self.run)
        if found.answer is None:
            found = await self._writer.answered(self.run, found.token)
        assert found.answer is not None
        answer = self.values.whole(found.answer)
        self.keep_errors(asking)
        self.append(path, "answer", answer, f"the answer to {path}")
        return answer

    def keep_errors(self, handler: "_Handler") -> None:
        """Keep the errors that a handler has caught, since it goes on."""
        errors, handler.errors = handler.errors, []
        for path, moment, error in errors:
            self.append(path, "error", error, f"the error of {path}", moment)

    def idempotency_key(self, path: str) -> str:
        """Return the digest of the key of the run and a path, without the numbers of attempts."""
        parts = [part.partition("@")[0] for part in path.split("/")]
        return blake2b("\0".join([self.run.key, *parts]).encode(), digest_size=16).hexdigest()

    # Writing.

    def append(self, path: str, kind: Kind, value: object, name: str, moment: int | None = None) -> int:
        """Encode a value, and have its entry written; return the number of the entry.

        Raises:
            NotStorable: the value cannot be stored; the error begins with `name`.
        """
        seq = self._next
        encoded, parts = self.values.encode(value, name, seq)
        self._next += 1
        turn = self.moment() if moment is None else moment
        self._writer.add(self.run, Entry(seq, path, kind, turn, self._writer.now(), encoded, parts))
        return seq

    def moment(self) -> int:
        """Return the number of this turn of the loop; turns in which nothing happens are counted up to a bound."""
        if not self._turns_left:
            self._turn += REST_TURNS
            self._loop.call_soon(self._next_turn)
        self._turns_left = REST_TURNS
        return self._turn

    def _next_turn(self) -> None:
        self._turn += 1
        self._turns_left -= 1
        if self._turns_left:
            self._loop.call_soon(self._next_turn)


class _Handler:
    """One attempt of a handler: the calls that it has made in its first life, and makes now.

    Attributes:
        kept: its kept calls, by their paths.
        errors: errors of calls that it may have caught: path, moment and error.
    """

    def __init__(self, journal: Journal, kept: Sequence[tuple[str, Entry]]) -> None:
        self.kept = dict(kept)
        self.errors: list[tuple[str, int, Exception]] = []
        self._journal = journal
        self._order = deque(kept)
        self._handed: set[str] = set()  # calls in `_order` that were handed on before the first one there
        self._counts: Counter[str] = Counter()
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._new: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._turn, self._asked_at = 0, 0
        self._given: tuple[int, int] | None = None  # when the last result was given: the turn here, and its moment
        self._is_ticking = False

    def name_of(self, name: str, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> str:
        """Return the name of the next call: the node, the digest of the arguments, and how many were equal before."""
        found = f"{name}({digest_of(arguments)})"
        self._counts[found] += 1
        return f"{found}~{self._counts[found] - 1}"

    async def turn_of(self, path: str) -> None:
        """Wait until the result of a kept call is handed on.

        Raises:
            OtherCall: the handler has not made a kept call whose result is handed on before.
        """
        future = self._loop.create_future()
        self._asked[path] = future
        if self._given is not None and self.kept[path].moment == self._given[1]:
            self._give([path])  # the turn in which the results before it were handed on made this call as well
            self._tick()
            return
        self._asked_at = self._turn
        await self._given_in_time(future, path)

    async def all_kept(self, path: str) -> None:
        """Wait, before a new call begins, until all kept calls were handed on.

        Raises:
            OtherCall: the handler has not made one of them.
        """
        if not self.kept:
            return
        future = self._loop.create_future()
        self._new.append(future)
        await self._given_in_time(future, path)

    async def _given_in_time(self, future: "asyncio.Future[None]", path: str) -> None:
        self._tick()
        timer = self._loop.call_later(self._journal.patience_seconds, self._refuse, future, path)
        try:
            await future
        finally:
            timer.cancel()

    def returned(self, path: str) -> None:
        """Check that each kept call was made.

        Raises:
            OtherCall: one was not.
        """
        if missing := self._missing():
            raise OtherCall(self._told(f"returns ({path})", missing))

    def _missing(self) -> list[str]:
        return [path for path, _ in self._order if path not in self._asked]

    def _refuse(self, future: "asyncio.Future[None]", path: str) -> None:
        if not future.done() and (missing := self._missing()):
            future.set_exception(OtherCall(self._told(f"calls {path}", missing)))

    def _told(self, does: str, missing: Sequence[str]) -> str:
        return (
            f"run {self._journal.run.key!r}: the handler {does}, but in its first life it has called {missing[0]}, "
            "whose result is kept, and now it does not: a clock, chance or new code has decided between calls; "
            f"resume(key, forget={missing[0]!r}) forgets that call and all later ones of the handler, and fork keeps "
            "the run as it is"
        )

    def _tick(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Give the next results if it is their turn, and let new calls begin behind the last."""
        self._turn += 1
        self._is_ticking = False
        if not self._order:
            if self._given is None or self._turn >= self._given[0] + REST_TURNS:
                new, self._new = self._new, []
                for future in new:
                    if not future.done():
                        future.set_result(None)
            if self._new:
                self._tick()
            return
        moment = self._order[0][1].moment
        group = [path for path, _ in takewhile(lambda one: one[1].moment == moment, self._order)]
        group = [path for path in group if path not in self._handed]
        asked = [path for path in group if path in self._asked]
        given_at, given_moment = self._given or (0, moment - REST_TURNS)
        apart = min(moment - given_moment, REST_TURNS)
        if group[0] in self._asked:
            # A call that is not made yet may be made by the code behind the others.
            rest = REST_TURNS if apart == REST_TURNS or len(asked) < len(group) else 1
            if self._turn >= max(self._asked_at + rest, given_at + apart):
                self._given = self._turn, moment
                self._give(asked)
        elif self._turn >= given_at + REST_TURNS:
            return  # no turns need to be counted until the handler makes the call
        self._tick()

    def _give(self, paths: Sequence[str]) -> None:
        """Hand on the results of calls that were made."""
        self._handed.update(paths)
        while self._order and self._order[0][0] in self._handed:
            self._handed.discard(self._order.popleft()[0])
        for path in paths:
            if not self._asked[path].done():
                self._asked[path].set_result(None)


def digest_of(arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> str:
    """Return a digest of arguments; one that cannot be stored counts by its type alone."""
    positional, named = arguments
    found = blake2b(digest_size=6)
    for name, value in [*enumerate(positional), *sorted(named.items())]:
        found.update(f"\0{name}\0".encode())
        try:
            found.update(encode(value).to_bytes())
        except NotStorable:
            found.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    return found.hexdigest()
