"""The processes that the live page shows: a look at each, once a second, and the figures of the last five minutes."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from math import inf
from pathlib import Path
from typing import Any, Final

from ...engine import Drawing
from ...telemetry import FailureLook, ItemLook
from ...telemetry.tables import count, duration, figure_cells, figure_columns, milliseconds, of, rate
from ...telemetry.text import clip, printable
from ..live.protocol import Client
from ..live.watch import LiveSnapshot, NodeLook, ScopeLook, busy_words
from .page import sentence

# Five minutes.
LOOKS: Final = 300
PAUSE_SECONDS: Final = 1.0
# How long after the beginning of the looks a page asks for them: most looks are answered within 0.2 s.
_ASK_AFTER_SECONDS: Final = 0.25
# A process that has not answered a look for so long is shown as one that does not. After a look that took long, a
# process answers the next one up to four seconds later.
_SILENT_SECONDS: Final = 8.0
# For how long a scope that a page has chosen is looked at beside the whole, after the page has asked for it last.
_CHOSEN_SECONDS: Final = 5.0
# Each chosen scope has a connection of its own, and a process accepts sixteen connections.
_MOST_CHOSEN: Final = 8
_RECORD_SECONDS: Final = 10
# How many recorded profiles can still be opened; each is a page of 2 MB.
_PROFILES: Final = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the page.

    Attributes:
        trace_url: the address of a trace, with {trace_id} in it; empty for no links.
        show_messages: whether failures show the texts of errors, which may hold values.
        show_keys: whether items show their keys, and not only eight digits that stand for them.
    """

    trace_url: str = ""
    show_messages: bool = False
    show_keys: bool = False


class Watched:
    """One process, at one socket. A thread looks at it once a second; a process that is gone is looked for again.

    The thread ends with the program: a look may wait for ten seconds, and nothing waits for it.

    Args:
        number: the number that identifies the process on the page.
        path: the path of its socket.
        settings: what the page shows.
        next_number: returns the number of the next look, higher than the numbers of all looks before.
    """

    def __init__(self, number: int, path: str, settings: Settings, next_number: Callable[[], int]) -> None:
        self.number = number
        self.path = path
        self.name = printable(Path(path).name)
        self._settings = settings
        self._next_number = next_number
        self._lock = threading.Lock()
        self._rates: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=LOOKS)
        self._newest: tuple[int, dict[str, Any]] = 0, {}
        self._says = "it has not been looked at yet"
        self._asked = inf  # when the present look began, which has no answer yet
        self._chosen: dict[str, float] = {}
        self._of_scopes: dict[str, tuple[Client, list[dict[str, Any]]]] = {}
        self._drawings: dict[str, Drawing] = {}

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._look_on, name=f"penstock-studio-{self.number}", daemon=True).start()

    def since(self, newer: int, scope: str) -> dict[str, Any]:
        """Return the data of this process that the page does not have yet.

        Args:
            newer: the number of the newest look that the page has.
            scope: the id of the scope that the page has chosen; empty for all.
        """
        with self._lock:
            if scope:
                self._chosen[scope] = time.monotonic() + _CHOSEN_SECONDS
            later = [(at, rates) for looked, at, rates in self._rates if looked > newer]
            keys = dict.fromkeys(key for _, rates in later for key in rates)
            newest, look = self._newest
            waited = time.monotonic() - self._asked
            says = self._says or (f"it has not answered for {waited:.0f} s" if waited > _SILENT_SECONDS else "")
            if scope in self._of_scopes and look:
                steps = self._of_scopes[scope][1]
                look = {**look, "steps": {**look["steps"], **_by_graph(steps)}}
            return {
                "id": self.number, "name": self.name, "alive": not says, "says": says,
                "look": look if newest > newer or scope else None,
                "series": {
                    "times": [round(at, 1) for at, _ in later],
                    "rates": {key: [rates.get(key) for _, rates in later] for key in keys},
                },
            }  # fmt: skip

    def drawing(self, digest: str) -> Drawing:
        """Return the drawing of a graph.

        Raises:
            LookupError: there is none.
        """
        found = self._drawings.get(digest)
        if found is None:
            raise LookupError("this graph is not drawn: its process has ended, or has an older version of penstock")
        return found

    def steps(self, graph: str) -> set[str]:
        """Return the keys of the steps of a graph."""
        _, look = self._newest
        return {step["key"] for step in look.get("steps", {}).get(graph, ())}

    def _look_on(self) -> None:
        while True:
            try:
                with closing(Client(self.path)) as client:
                    while True:
                        self._look(client)
                        time.sleep(_until_next_look())
            except (OSError, LookupError, TypeError, ValueError) as error:  # the last three if a look makes no sense
                with self._lock:
                    self._says = printable(str(error) if isinstance(error, OSError) else repr(error))
                    self._of_scopes.clear()
                time.sleep(PAUSE_SECONDS)

    def _look(self, client: Client) -> None:
        """Look once."""
        began = self._asked = time.monotonic()
        settings = self._settings
        look = client.look(show_messages=settings.show_messages, show_keys=settings.show_keys)
        for digest in {node.drawing for node in look.nodes} - self._drawings.keys() - {""}:
            if found := client.drawing(digest):  # None if the scope has closed meanwhile: a later look asks again
                self._drawings[digest] = found
        view = _view_of(look, settings.trace_url, self._drawings)
        rates = {step["key"]: step["rate"] for steps in view["steps"].values() for step in steps}
        scopes = {scope.id for scope in look.scopes}
        chosen = [scope for scope, until in self._chosen.items() if scope in scopes and until > began]
        chosen = chosen[:_MOST_CHOSEN]
        of_scopes: dict[str, tuple[Client, list[dict[str, Any]]]] = {}
        for scope in chosen:
            own, _ = self._of_scopes.get(scope) or (Client(self.path), [])
            nodes = own.look(scope=scope)
            of_scopes[scope] = own, _steps(nodes, look)
        with self._lock:
            for scope, (own, _) in self._of_scopes.items():
                if scope not in of_scopes:
                    own.close()
            self._of_scopes = of_scopes
            self._chosen = {scope: until for scope, until in self._chosen.items() if scope in chosen}
            number = self._next_number()
            self._newest = number, view
            self._says, self._asked = "", inf
            if look.seconds is not None:
                self._rates.append((number, look.when or time.time(), rates))


def _until_next_look(after_seconds: float = 0.0) -> float:
    """Return the seconds until the next look, plus `after_seconds`, and never few, as rates need some time.

    All processes are looked at together, at each whole second, so that a page can ask just then.
    """
    left = (after_seconds - time.monotonic()) % PAUSE_SECONDS
    return left if left > PAUSE_SECONDS / 5 else left + PAUSE_SECONDS


class Processes:
    """All processes of a page, and the profiles that were recorded of them.

    Args:
        paths: the paths of their sockets.
        settings: what the page shows.
    """

    def __init__(self, paths: Sequence[str], settings: Settings) -> None:
        self._number = 0
        self._lock = threading.Lock()
        self.watched = [Watched(number, path, settings, self._next_number) for number, path in enumerate(paths)]
        self._profiles: dict[str, _Recorded] = {}

    def start(self) -> None:
        """Begin to look at all processes."""
        for one in self.watched:
            one.start()

    def looks(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the data that is newer than the look with the number `newer`, and when to ask again."""
        newer, scope = _whole(query, "newer"), query.get("scope", "")
        number = self._number  # before the looks: data that comes meanwhile is sent twice rather than never
        processes = [one.since(newer, scope) for one in self.watched]
        return {"number": number, "processes": processes, "ask_in_seconds": _until_next_look(_ASK_AFTER_SECONDS)}

    def process(self, query: Mapping[str, str]) -> Watched:
        """Return the process that a request names.

        Raises:
            LookupError: there is none.
        """
        number = _whole(query, "process")
        if not 0 <= number < len(self.watched):
            raise LookupError("there is no such process")
        return self.watched[number]

    def record(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Begin to record a profile; return the secret path of its page."""
        recorded = _Recorded(self.process(query).path)
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._profiles[name] = recorded
            while len(self._profiles) > _PROFILES:
                del self._profiles[next(iter(self._profiles))]
        return {"path": f"/profiles/{name}", "seconds": _RECORD_SECONDS}

    def recorded(self, query: Mapping[str, str]) -> str:
        """Return the page of a profile; while the profile is recorded, a page that reloads itself.

        Raises:
            LookupError: there is no such profile.
        """
        with self._lock:
            found = self._profiles.get(query["rest"])
        if found is None:
            raise LookupError("there is no such profile: record another")
        return found.page()

    def _next_number(self) -> int:
        with self._lock:
            self._number += 1
            return self._number


def _whole(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise LookupError(f"{name}= is a whole number, not {text!r}")
    return int(text)


_RECORDING: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penstock: recording</title>
<meta name="color-scheme" content="light dark">{refresh}</head><body><h1>{heading}</h1><p>{text}</p></body></html>
"""


class _Recorded:
    """A profile, which a separate thread records."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ends = time.monotonic() + _RECORD_SECONDS
        self._page = ""
        threading.Thread(target=self._record, name="penstock-studio-profile", daemon=True).start()

    def _record(self) -> None:
        try:
            with closing(Client(self._path)) as client:
                self._page = client.profile(_RECORD_SECONDS)
        except OSError as error:
            text = escape(printable(str(error)))
            self._page = _RECORDING.format(refresh="", heading="No profile was recorded", text=text)

    def page(self) -> str:
        left = max(self._ends - time.monotonic(), 0)
        refresh = '<meta http-equiv="refresh" content="1">'
        text = f"{left:.0f} seconds are left. The profile then appears here."
        return self._page or _RECORDING.format(refresh=refresh, heading="Recording", text=text)


# --- A look as the page shows it ---

_Column = tuple[str, bool]
_COLUMNS: Final[tuple[_Column, ...]] = (
    ("step", False), ("runs on", False), ("in flight", True), ("waiting", True), ("items/s", True), ("busy", True),
    ("p50", True), ("p99", True), ("timed", True), ("done", True), ("failed", True), ("retried", True),
)  # fmt: skip
# Optional columns, shown if a step has a value.
_MAYBE: Final[dict[str, Callable[[NodeLook], int | str]]] = {
    "hedged": lambda node: node.hedged, "failed over": lambda node: node.failed_over,
    "cache hits": lambda node: node.cache_hits, "cache misses": lambda node: node.cache_misses,
    "held by a full buffer": lambda node: node.blocked, "wait for the inbox": lambda node: node.waits,
    "limit is shared": lambda node: printable(node.shared).replace(f" of {printable(node.graph)}", ""),
}  # fmt: skip
_LINE_COLUMNS: Final = 30


def _view_of(look: LiveSnapshot, trace_url: str, drawings: Collection[str]) -> dict[str, Any]:
    """Return a look as the page shows it: its texts, and the numbers of its lines and bars."""
    names = _Names(look)
    steps = _by_graph(_steps(look, look))
    item_columns, items = _told(_ITEM_COLUMNS, [_item(item, trace_url) for item in look.items])
    failure_columns, failures = _told(_FAILURE_COLUMNS, [_failure(one, look, names) for one in look.failures])
    return {
        "process": look.process, "columns": _columns(look), "steps": steps, "verdict": _verdict(look, names),
        "graphs": [_graph(look, graph, names, drawings, steps[graph]) for graph in steps],
        "facts": [("in flight", count(look.in_flight)), *[(printable(a), printable(b)) for a, b in look.lines]],
        "stalls": [
            {
                "thread": stuck.thread,
                "sentence": f"The event loop of {printable(stuck.thread)} has not answered "
                f"for {duration(stuck.seconds)}",
                "stack": "\n".join(map(printable, stuck.stack)),
            }
            for stuck in look.stuck
        ],
        "item_columns": item_columns, "items": items,
        "failure_columns": failure_columns, "failures": failures,
    }  # fmt: skip


class _Names:
    """Maps the records of a look to the graphs and steps of the page."""

    def __init__(self, look: LiveSnapshot) -> None:
        self.steps = {(node.graph, node.node): (_graph_of(node), _key_of(node)) for node in look.nodes}
        self.titles: dict[str, str] = {}
        for node in look.nodes:
            self.titles.setdefault(_graph_of(node), node.graph.partition("/")[0])


def _graph_of(node: NodeLook | ItemLook) -> str:
    """Return the key of a record's graph: the digest of its drawing, or the name of the graph."""
    return node.drawing or node.graph.partition("/")[0]


def _key_of(node: NodeLook | ItemLook) -> str:
    """Return the key of a step, unique in its process: its place in the drawing, or its name."""
    return f"{_graph_of(node)} {node.step or f'{node.graph}/{node.node}'}"


def _columns(look: LiveSnapshot) -> list[_Column]:
    maybe = [(title, title != "limit is shared") for title in _told_of(look)]
    return [*_COLUMNS, *maybe, *[(printable(figure), True) for figure in _figures(look)]]


def _told_of(look: LiveSnapshot) -> list[str]:
    return [title for title, told in _MAYBE.items() if any(map(told, look.nodes))]


def _figures(look: LiveSnapshot) -> list[str]:
    return figure_columns([node.figures for node in look.nodes])


def _by_graph(steps: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        found.setdefault(step["graph"], []).append(step)
    return found


def _steps(look: LiveSnapshot, whole: LiveSnapshot) -> list[dict[str, Any]]:
    """Return, for each step of a look, its row and the lines of its box; `whole` decides about the columns."""
    maybe, figures = [_MAYBE[title] for title in _told_of(whole)], _figures(whole)
    limits = None if whole.verdict is None else (whole.verdict.graph, whole.verdict.node)
    return [_step(node, look.seconds, maybe, figures, (node.graph, node.node) == limits) for node in look.nodes]


def _step(
    node: NodeLook,
    over_seconds: float | None,
    maybe: Sequence[Callable[[NodeLook], int | str]],
    figures: Sequence[str],
    limits: bool,
) -> dict[str, Any]:
    per_second = (node.completed + node.failed) / over_seconds if over_seconds else 0.0
    depth, capacity = _buffer(node)
    of_graph, _, body = node.graph.partition("/")
    texts = [
        count(node.in_flight) if node.limit is None else of(node.in_flight, node.limit),
        count(depth) if capacity is None else of(depth, capacity), rate(per_second), busy_words(node),
        milliseconds(node.p50), milliseconds(node.p99), count(node.timed), count(node.total_completed),
        count(node.total_failed), count(node.retried),
    ]  # fmt: skip
    name = printable(f"{body}/{node.node}" if body else node.node)
    return {
        "key": _key_of(node), "graph": _graph_of(node), "name": name, "limits": limits,
        "rate": float(f"{per_second:.3g}"), "is_of_graph": of_graph == node.graph,
        "full": node.waits > 0 or (capacity or inf) <= depth, "lines": _lines(node, texts),
        "sums": (node.in_flight, depth, node.total_failed), "share": (node.limit and node.busy_share) or 0.0,
        "about": ". ".join(filter(None, (f"{name}, {node.runs_on}", printable(node.shared), printable(node.outage)))),
        "cells": [
            printable(node.runs_on), *texts,
            *[count(one) if isinstance(one := told(node), int) else one for told in maybe],
            *map(printable, figure_cells(node.figures, figures)),
        ],
    }  # fmt: skip


def _buffer(node: NodeLook) -> tuple[int, int | None]:
    """Return how many items wait before a step; for a step that gives a stream, how many values wait after it."""
    if node.buffer_depth is not None and node.inbox_capacity is None:
        return node.buffer_depth, node.buffer_capacity
    return node.inbox_depth, node.inbox_capacity


def _lines(node: NodeLook, texts: Sequence[str]) -> list[str]:
    """Return the lines in the box of a step: four lines, of which some may be empty."""
    flight, waiting, per_second, busy, p50, p99, _, _, failed, retried = texts
    times = [f"p50 {p50}" if node.p50 is not None else "", f"p99 {p99}" if node.p99 is not None else ""]
    wrong = [f"{failed} failed" if node.total_failed else "", f"{retried} retried" if node.retried else ""]
    share = "" if node.busy_share is None else busy if node.limit is None else f"{busy} busy"
    lines = [f"{flight} in flight", f"{waiting} waiting"], [per_second, share], times, wrong
    return [clip(", ".join(filter(None, words)), _LINE_COLUMNS) for words in lines]


def _verdict(look: LiveSnapshot, names: _Names) -> dict[str, Any] | None:
    verdict = look.verdict
    if verdict is None:
        return None
    graph, key = names.steps.get((verdict.graph or "", verdict.node or ""), (None, None))
    reason = " ".join(map(sentence, filter(None, (verdict.reason, verdict.spent))))
    return {
        "graph": graph, "key": key, "title": printable(verdict.name) or sentence(verdict.reason),
        "evidence": " ".join(map(sentence, look.evidence)), "reason": reason if verdict.node else "",
        "remedy": f"{printable(verdict.remedy)}.", "gain": sentence(verdict.gain) if verdict.gain else "",
    }  # fmt: skip


def _graph(
    look: LiveSnapshot,
    graph: str,
    names: _Names,
    drawings: Collection[str],
    steps: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    scopes = [scope for scope in look.scopes if graph in scope.drawings]
    fastest = max([step["rate"] for step in steps if step["is_of_graph"]], default=0.0)
    return {
        "id": graph, "name": printable(names.titles[graph]), "drawing": graph in drawings,
        "rate": rate(fastest) if fastest else "",
        "scopes": [
            (scope.id, _scope(scope, number if len(scopes) > 1 else None, look.when), _share_done(scope))
            for number, scope in enumerate(scopes, start=1)
        ],
    }  # fmt: skip


def _whole_seconds(seconds: float) -> str:
    """Return a time in whole seconds, as looks are no more exact."""
    return f"{max(round(seconds), 0)} s" if seconds < 59.5 else duration(round(seconds))


def _scope(scope: ScopeLook, number: int | None, now: float) -> str:
    words = [
        scope.kind if number is None else f"{scope.kind} {number}",
        f"open for {duration(max(now - scope.opened, 0))}",
    ]
    if scope.admitted is not None:
        words.append(f"{of(scope.admitted, scope.max_admitted)} admitted")
    return printable("; ".join(filter(None, (", ".join(words), scope.words()))))


def _share_done(scope: ScopeLook) -> float | None:
    return scope.done / scope.total if scope.done is not None and scope.total else None


_ITEM_COLUMNS: Final[tuple[_Column, ...]] = (
    ("step", False), ("item", True), ("age", True), ("state", False), ("attempt", True), ("time left", True),
    ("key", False), ("trace", False),
)  # fmt: skip


def _told(columns: Sequence[_Column], rows: Sequence[dict[str, Any]]) -> tuple[list[_Column], list[dict[str, Any]]]:
    """Return a table without columns that are empty in all rows; an empty table has the first four columns."""
    told = [at for at in range(len(columns)) if any(row["cells"][at] for row in rows) or (not rows and at < 4)]
    return [columns[at] for at in told], [{**row, "cells": [row["cells"][at] for at in told]} for row in rows]


def _item(item: ItemLook, trace_url: str) -> dict[str, Any]:
    is_trace = len(item.trace) == 32 and all(c in "0123456789abcdef" for c in item.trace)
    cells = (
        item.node or item.graph, count(item.item), _whole_seconds(item.age), item.state,
        count(item.attempt) if item.attempt > 1 else "",
        "" if item.deadline is None else duration(max(item.deadline, 0.0)), item.key,
        item.trace[:8] if is_trace else "",
    )  # fmt: skip
    link = {"link": trace_url.replace("{trace_id}", item.trace)} if trace_url and is_trace else {}
    key = _key_of(item)
    return {
        "id": f"{item.scope} {item.graph} {item.item} {item.node}", "graph": _graph_of(item), "key": key,
        "cells": list(map(printable, cells)), **link,
    }  # fmt: skip


_FAILURE_COLUMNS: Final[tuple[_Column, ...]] = (
    ("step", False),
    ("error", False),
    ("times", True),
    ("last", True),
    ("message", False),
)


def _failure(failure: FailureLook, look: LiveSnapshot, names: _Names) -> dict[str, Any]:
    graph, key = names.steps.get((failure.graph, failure.node), (failure.graph.partition("/")[0], ""))
    ago = f"{_whole_seconds(look.when - failure.last)} ago"
    cells = failure.node or failure.graph, failure.type, count(failure.count), ago, failure.message
    return {
        "id": f"{failure.graph} {failure.node} {failure.type}", "graph": graph, "key": key,
        "cells": list(map(printable, cells)),
    }  # fmt: skip
