"""Streams that would wait for each other: a limited node that is open twice in what one reader reads.

A node with `concurrency=` holds a place until its stream has ended. If a stream is read through another of the same
node, or together with one, each frame needs two of its places at a time, and frames that have one each wait for ever.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from ..._errors import PlanError
from ..node import Node
from ..tracing.tracer import Step


def check_stream_limits(graph: str, steps: Iterable[Step]) -> None:
    """Refuse streams of one limited node that are open together.

    Raises:
        PlanError: there are such streams; the message names the line at which they meet.
    """
    behind: dict[int, list[Node[..., object]]] = {}  # the limited nodes that are open behind each stream
    for step in steps:
        opened = [node for source in {read.source for read in step.reads()} for node in behind.get(source, ())]
        if opened or step.callee.gives_stream:
            opened += _limited(step)
        counts = Counter(map(_key, opened))
        for node in opened:
            if counts[_key(node)] > 1:
                raise PlanError(
                    f"{step.location}: in graph {graph!r}, two streams of node {node.name!r} are open together here; "
                    "each holds one of its places until it has ended, so calls would wait for each other for ever; "
                    "leave out its concurrency=, and bound the calls with max_in_flight"
                )
        if step.callee.gives_stream:
            behind[step.source] = opened


def _limited(step: Step) -> Iterator[Node[..., object]]:
    """Yield the nodes that a step opens streams of, and whose places are limited; with those of its bodies."""
    callee = step.callee
    if isinstance(callee, Node) and callee.gives_stream and _is_limited(callee):
        yield callee
    for body in step.bodies:
        for inner in body.steps:
            yield from _limited(inner)


def _is_limited(node: Node[..., object]) -> bool:
    return node.policy.concurrency is not None or node.template is not None


def _key(node: Node[..., object]) -> int:
    return id(node.origin) if node.template is None else id(node.template)
