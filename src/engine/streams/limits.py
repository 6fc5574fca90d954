"""Streams that would wait for each other: a limited node that is needed again for a stream that it gives or reads.

A node whose places are limited holds one until the stream that it gives has ended, or until it has read the one that it
is given. If that stream needs another place of the same node, each frame needs two at a time, and frames that have one
each wait for ever. It may need one because it is read through another stream of the node, together with one, or through
a `map_each` whose body calls the node. And a stream that is open holds a place while its reader still waits for another
value, for which the node may be needed as well.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..._errors import PlanError
from ..node import Node
from ..tracing.tracer import Step


@dataclass(frozen=True)
class _Need:
    """A limited node that is needed for a stream to go on.

    Attributes:
        node: the node.
        step: the step that needs it.
        is_held: whether it holds its place until the stream has ended, and not only now and then, in a body.
    """

    node: Node[..., object]
    step: Step
    is_held: bool


def check_stream_limits(graph: str, steps: Iterable[Step], *, in_order: bool = False) -> None:
    """Refuse streams that need a place of a node while the same node holds one for them.

    Args:
        graph: name of the graph.
        steps: its steps, in the order in which they were recorded.
        in_order: whether each step waits for those before, and not only for its arguments.

    Raises:
        PlanError: there are such streams; the message names the line at which they meet.
    """
    behind: dict[int, list[_Need]] = {}  # of each stream
    earlier: dict[int, Step] = {}
    for step in steps:
        sources = {read.source for read in step.reads()} & behind.keys()
        if sources or step.callee.gives_stream:
            needs = [*_own(step), *(need for source in sources for need in behind[source])]
            for need in needs:
                if need.is_held and _is_needed(need, step, needs, earlier, in_order=in_order):
                    raise PlanError(_message(graph, step, need.node))
            if step.callee.gives_stream:
                behind[step.source] = needs
        earlier[step.source] = step


def _is_needed(held: _Need, reader: Step, needs: list[_Need], earlier: dict[int, Step], *, in_order: bool) -> bool:
    """Whether a node is needed again before the stream for which it holds a place can be read to its end."""
    key = _key(held.node)
    if sum(_key(other.node) == key for other in needs) > 1:
        return True
    if held.step is reader:
        return False
    if in_order:
        meanwhile = {number for number in earlier if number > held.step.source}
    else:
        meanwhile = _awaited(reader, earlier) - _awaited(held.step, earlier) - {held.step.source}
    return any(_key(node) == key for node in _limited(earlier[number] for number in meanwhile))


def _awaited(step: Step, earlier: dict[int, Step]) -> set[int]:
    """Return the steps that have to be done before a step begins; of a stream, that it is open."""
    found: set[int] = set()
    waiting = [step]
    while waiting:
        new = {read.source for read in waiting.pop().reads()} & earlier.keys() - found
        found |= new
        waiting.extend(earlier[number] for number in new)
    return found


def _own(step: Step) -> Iterator[_Need]:
    if isinstance(step.callee, Node):
        if step.callee.shared_places is not None:
            yield _Need(step.callee, step, is_held=True)
        return
    # The frames of a body have one place after the other, or at least do not wait for each other's.
    for node in {_key(node): node for body in step.bodies for node in _limited(body.steps)}.values():
        yield _Need(node, step, is_held=False)


def _limited(steps: Iterable[Step]) -> Iterator[Node[..., object]]:
    for step in steps:
        if isinstance(step.callee, Node) and step.callee.shared_places is not None:
            yield step.callee
        for body in step.bodies:
            yield from _limited(body.steps)


def _key(node: Node[..., object]) -> int:
    return id(node.origin) if node.template is None else id(node.template)


def _message(graph: str, step: Step, node: Node[..., object]) -> str:
    what = f"two streams of node {node.name!r} are open together here; each holds one of its places until it was read"
    if not node.gives_stream:
        what = f"node {node.name!r} reads a stream that needs the same node; it holds one of its places meanwhile"
    remedy = "leave out its concurrency=, and bound the calls with max_in_flight"
    if node.template is not None and node.make_loop is None:
        remedy = "use another instance in one of the places"
    return f"{step.location}: in graph {graph!r}, {what}, so calls would wait for each other for ever; {remedy}"
