"""Which values of a trace are streams, and who reads each: exactly one reader, because what was read is gone."""

from typing import TYPE_CHECKING

from ..._errors import GraphTraceError
from ..tracing.template import Read, Template, reads

if TYPE_CHECKING:
    from ..tracing.tracer import Callee


class StreamValues:
    """The streams of one trace.

    Attributes:
        sources: the numbers of the values that are streams.
    """

    def __init__(self) -> None:
        self.sources: dict[int, str] = {}  # with a name for each
        self._readers: dict[int, str] = {}

    def add(self, source: int, name: str) -> None:
        """Note that a value is a stream."""
        self.sources[source] = name

    def read_by_step(
        self, callee: "Callee", args: tuple[Template, ...], captured: tuple[Template, ...], location: str
    ) -> None:
        """Note what a step reads.

        Args:
            callee: what the step calls.
            args: its arguments.
            captured: what the bodies of a control-flow step take from outside.
            location: "file:line" of the call.

        Raises:
            GraphTraceError: a stream has a reader already, or cannot be read by this step.
        """
        if not self.sources:
            return
        for read in reads(*captured):
            if read.source in self.sources:
                raise GraphTraceError(
                    f"{location}: the body of {callee.name} takes {self._named(read)} from outside, which would be "
                    "read again for each item; read it in a node before, and pass the value on"
                )
        for read in reads(*args):
            if read.source not in self.sources:
                continue
            if not callee.reads_streams:
                raise GraphTraceError(
                    f"{location}: {self._named(read)} is passed to {callee.name!r}, which cannot read it: only an "
                    "`async def`, an async generator and ps.map_each can; read it in one of these, and pass on what "
                    "it returns"
                )
            self._read(read, location, repr(callee.name))

    def result(self, template: Template, location: str) -> bool:
        """Note what the graph returns; whether that is a stream.

        Raises:
            GraphTraceError: a stream is returned together with something else, or was read already.
        """
        found = [read for read in reads(template) if read.source in self.sources]
        for read in found:
            if not isinstance(template, Read):
                raise GraphTraceError(
                    f"{location}: {self._named(read)} is returned inside a {template_kind(template)}; return the "
                    "stream alone, and give what belongs to it as its first values"
                )
            self._read(read, location, "the result")
        return bool(found)

    def _read(self, read: Read, location: str, reader: str) -> None:
        if read.path:
            raise GraphTraceError(
                f"{location}: an attribute or item of {self._named(read)} is passed to {reader}; a stream has none "
                "in a graph: read it in a node, or use ps.map_each(node, stream)"
            )
        before = self._readers.get(read.source)
        if before is not None:
            raise GraphTraceError(
                f"{location}: {self._named(read)} is read by {reader} and was read before by {before}; a stream has "
                "one reader: call the node once for each, or read it in one node that returns what both need"
            )
        self._readers[read.source] = f"{reader} ({location})"

    def _named(self, read: Read) -> str:
        return f"stream {self.sources[read.source]!r}"


def template_kind(template: Template) -> str:
    """Return the name of the container that a template builds."""
    kind: type[object] | None = getattr(template, "kind", None)
    return "value" if kind is None else kind.__name__
