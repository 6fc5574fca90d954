"""The nodes of a profile as a table of a page, which its script can sort."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from ...tables.characters import printable
from ...tables.quantities import count, milliseconds, seconds
from ..node_profile import NodeProfile
from .graph_picture import DrawnNode


@dataclass(frozen=True)
class _Column:
    """A column of numbers.

    Args:
        title: its heading.
        about: what the number is.
        value: reads it.
        text: writes it.
        is_share: whether it is one, and drawn as a bar.
    """

    title: str
    about: str
    value: Callable[[NodeProfile], float | None]
    text: Callable[[float | None], str]
    is_share: bool = False


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _whole(value: float | None) -> str:
    return count(None if value is None else int(value))


_COLUMNS: Final[tuple[_Column, ...]] = (
    _Column("done", "items that it finished", lambda node: node.count, _whole),
    _Column("failed", "items that ended in an error here", lambda node: node.errors, _whole),
    _Column("mean", "time in its handler, waits included", lambda node: node.mean_seconds, milliseconds),
    _Column("p50", "half of its executions took at most this long", lambda node: node.p50_seconds, milliseconds),
    _Column("p90", "90 % of them did", lambda node: node.p90_seconds, milliseconds),
    _Column("p99", "99 % of them did", lambda node: node.p99_seconds, milliseconds),
    _Column("busy", "share of the time of its places", lambda node: node.busy_share, _share, is_share=True),
    _Column(
        "queue wait", "how long an item waited in its inbox", lambda node: node.mean_queue_wait_seconds, milliseconds
    ),
    _Column(
        "occupancy", "share of the time that items waited in its inbox", lambda node: node.occupancy, _share,
        is_share=True,
    ),
    _Column(
        "blocked", "time that finished items waited for room after it, over all", lambda node: node.blocked_seconds,
        seconds,
    ),
    _Column("compile", "share of its busy time", lambda node: node.compile_share, _share),
    _Column("transfer", "share of its busy time", lambda node: node.transfer_share, _share),
)  # fmt: skip


def node_table(nodes: Sequence[DrawnNode]) -> Iterator[str]:
    """Yield the table, without columns that would tell nothing: of the only graph, or of devices that nobody used."""
    has_graphs = len({node.profile.graph for node in nodes}) > 1
    uses_devices = any(node.profile.compile_share or node.profile.transfer_share for node in nodes)
    columns = [column for column in _COLUMNS if uses_devices or column.title not in ("compile", "transfer")]
    yield '<table id="nodes"><caption class="unseen">What each node did</caption><thead><tr>'
    yield _heading("node", "name of the node", is_number=False)
    if has_graphs:
        yield _heading("graph", "name of its graph, or of the body of control flow", is_number=False)
    for column in columns:
        yield _heading(column.title, column.about)
    yield "</tr></thead><tbody>\n"
    for node in nodes:
        yield from _row(node, columns, has_graph=has_graphs)
    yield "</tbody></table>\n"


def _heading(title: str, about: str, *, is_number: bool = True) -> str:
    kind = ' class="number"' if is_number else ""
    return (
        f'<th scope="col"{kind} aria-sort="none"><button type="button" title="{escape(about)}">{escape(title)}'
        '<span class="arrow" aria-hidden="true"></span></button></th>'
    )


def _row(node: DrawnNode, columns: Sequence[_Column], *, has_graph: bool) -> Iterator[str]:
    profile = node.profile
    kind, badge = (' class="limits"', ' <span class="badge">limits</span>') if node.limits else ("", "")
    name, graph = escape(printable(profile.node)), escape(printable(profile.graph))
    yield f'<tr id="{node.anchor}"{kind}><th scope="row" data-value="{name}">{name}{badge}</th>'
    if has_graph:
        yield f'<td class="graph" data-value="{graph}">{graph}</td>'
    for column in columns:
        value = column.value(profile)
        text = escape(column.text(value))
        if column.is_share and value is not None:
            text += f'<span class="bar" aria-hidden="true"><i style="width:{min(value, 1):.1%}"></i></span>'
        yield f'<td class="number" data-value="{"" if value is None else f"{value:.9g}"}">{text}</td>'
    yield "</tr>\n"
