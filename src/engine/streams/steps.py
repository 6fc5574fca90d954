"""What the actors of streams do: each opens its stream, and is done with that."""

import functools
from typing import TYPE_CHECKING, Any

from ...actors.driver import open_stream
from ...actors.frame import Frame
from ...actors.loop_host import LoopHost
from ...actors.loop_stream import LoopStream
from ...actors.node_actor import Invoke, NodeActor
from ...actors.parts import DEFAULT_PARTS, Reader
from ...actors.worker import Worker
from .mapping import StreamMap

if TYPE_CHECKING:
    from ..wiring import Wired


def opening(capacity: int, streams: tuple[int, ...]) -> Invoke:
    """Return what opens the stream of a node.

    Args:
        capacity: values that it holds for its reader.
        streams: slots of the streams that the node reads itself.
    """

    async def open_node(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        args, kwargs = actor.arguments(frame.values)
        readers = [frame.values[slot] for slot in streams]
        return open_stream(actor, frame, capacity, lambda: actor.fn(*args, **kwargs), readers)

    return open_node


def opening_in_loop(host: LoopHost, capacity: int, streams: tuple[int, ...]) -> Invoke:
    """Return what opens the stream of an actor that owns its loop; takes what `opening` takes, and the actor's host."""

    async def open_in_loop(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        args, _ = actor.arguments(frame.values)
        readers = [frame.values[slot] for slot in streams]
        start = functools.partial(LoopStream, host, args[0], frame.priority, frame.deadline, capacity)
        return open_stream(actor, frame, capacity, start, readers)

    return open_in_loop


def mapping(limit: int, body: "Wired") -> Invoke:
    """Return what opens the stream of a `map_each`, with at most `limit` items in flight."""

    async def open_map(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        (items, *outside), _ = actor.arguments(frame.values)
        stream_map = StreamMap(body, frame, items.parts, tuple(outside), limit)
        return open_stream(actor, frame, DEFAULT_PARTS, stream_map.results, [items])

    return open_map


def input_of(parameter: str) -> Invoke:
    """Return what opens a stream that was passed as an argument."""

    async def open_input(worker: Worker, actor: NodeActor, frame: Frame) -> Reader[Any]:
        given = frame.values[actor.slot]
        if not hasattr(given, "__aiter__"):
            raise TypeError(
                f"parameter {parameter!r} of graph {actor.graph!r} is a stream: pass an async iterator, got {given!r}"
            )
        return open_stream(actor, frame, DEFAULT_PARTS, lambda: given, given=given)

    return open_input


async def hand_over(worker: Worker, actor: NodeActor, frame: Frame) -> None:
    """Give the stream that a graph returns to whoever reads it; the frame goes on until it has been read."""
    assert frame.on_result_stream is not None
    frame.hold()
    frame.on_result_stream(frame.values[actor.slot])
