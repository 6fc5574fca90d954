"""Loop stream: what an actor that owns its loop gives for one item, as an async iterator."""

from typing import Any, Self

from .loop_host import LoopHost
from .parts import DEFAULT_PARTS, Parts
from .requests import StreamRequest


class LoopStream:
    """The parts of one item. The actor is given the item when the first part is asked for.

    Args:
        host: runs the actor.
        value: what the actor is called with.
        priority: higher first.
        deadline: when nobody will wait for it any more, in the loop's time.
        capacity: parts that it holds for its reader.
    """

    def __init__(
        self,
        host: LoopHost,
        value: Any,
        priority: int = 0,
        deadline: float | None = None,
        capacity: int = DEFAULT_PARTS,
    ) -> None:
        self._host = host
        self._work: StreamRequest[Any, Any] = StreamRequest(value, priority, deadline, capacity)
        self._reader = self._work.parts.reader()
        self._begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next part.

        Raises:
            ActorStopped: the loop has ended.
        """
        if not self._begun:
            self._begun = True
            await self._host.submit(self._work)
        return await anext(self._reader)

    async def pour(self, parts: Parts[Any]) -> None:
        """Let the actor put what is left straight into `parts`, whose reader need not be told part by part.

        Returns when the actor has finished the item, or the reader has left.

        Raises:
            Exception: what the actor failed it with.
        """
        await self._work.pour(parts)

    async def aclose(self) -> None:
        """Stop reading: the work is cancelled."""
        self._work.cancel()
        self._reader.leave()
