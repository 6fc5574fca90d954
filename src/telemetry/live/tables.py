"""A look as a table."""

from collections.abc import Sequence
from typing import Final

from ..tables.quantities import UNKNOWN, count, duration, of, significant
from ..tables.table import Column, Table
from .look import Look, NodeLook

_COLUMNS: Final = (
    Column("node", is_number=False),
    Column("graph", is_number=False),
    Column("items/s"),
    Column("in flight"),
    Column("inbox"),
    Column("busy"),
    Column("done"),
    Column("failed"),
    Column("", is_number=False),
)


def look_table(look: Look, max_rows: int | None = None) -> Table:
    """Return what is shown of a look.

    Args:
        look: the look.
        max_rows: how many nodes there is room for; None for all.
    """
    over = "" if look.seconds is None else f", over {duration(look.seconds)}"
    facts = (("process", f"{look.process}{over}"), ("limits", _limits(look)))
    shown = _most_telling(look, max_rows)
    remark = "" if look.nodes else "no nodes yet"
    if len(shown) < len(look.nodes):
        remark = f"and {count(len(look.nodes) - len(shown))} nodes that do less; --json has all of them"
    return Table(facts, _COLUMNS, tuple(_row(look, node) for node in shown), remark)


def _limits(look: Look) -> str:
    if look.seconds is None:
        return UNKNOWN
    return "nothing has left a node meanwhile" if look.verdict is None else str(look.verdict)


def _row(look: Look, node: NodeLook) -> tuple[str, ...]:
    ended = node.completed + node.failed
    return (
        node.node,
        node.graph,
        UNKNOWN if not look.seconds else significant(ended / look.seconds),
        of(node.in_flight, node.limit),
        of(node.inbox_depth, node.inbox_capacity),
        UNKNOWN if not look.seconds or node.busy_share is None else _share(node),
        count(node.total_completed),
        count(node.total_failed) + (f" (+{node.failed:,})" if look.seconds and node.failed else ""),
        "◀ limits" if _is_limit(look, node) else "",
    )


def _share(node: NodeLook) -> str:
    assert node.busy_share is not None
    return f"{node.busy_share:.0%}" if node.limit is not None else f"{significant(node.busy_share)} at once"


def _is_limit(look: Look, node: NodeLook) -> bool:
    return look.verdict is not None and (look.verdict.graph, look.verdict.node) == (node.graph, node.node)


def _most_telling(look: Look, max_rows: int | None) -> Sequence[NodeLook]:
    """Return the nodes that limit, wait and do most; in their order."""

    def weight(index: int) -> tuple[bool, int, int, int]:
        node = look.nodes[index]
        return _is_limit(look, node), node.inbox_depth, node.in_flight, node.completed + node.failed

    if max_rows is None or len(look.nodes) <= max_rows:
        return look.nodes
    chosen = sorted(range(len(look.nodes)), key=weight, reverse=True)[: max(max_rows, 1)]
    return [look.nodes[index] for index in sorted(chosen)]
