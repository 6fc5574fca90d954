"""What `print(service)` and a notebook show: the totals of a deployment, and each of its graphs at work."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..telemetry.tables.as_html import to_html as table_to_html
from ..telemetry.tables.as_text import to_text as table_to_text
from . import drawing
from .drawing import Drawing
from .picture import drawing_of
from .running_picture import running_drawing
from .statistics.tables import service_summary

if TYPE_CHECKING:
    from .deployment import Deployment
    from .graph import Graph
    from .service import ServiceStatistics


def to_text(statistics: "ServiceStatistics", graphs: "Iterable[Graph[..., Any]]", deployment: "Deployment") -> str:
    """Return the totals and the drawings of the graphs."""
    drawings = map(drawing.to_text, _drawings(statistics, graphs, deployment))
    return "\n\n".join([table_to_text(service_summary(statistics)), *drawings])


def to_html(statistics: "ServiceStatistics", graphs: "Iterable[Graph[..., Any]]", deployment: "Deployment") -> str:
    """Return the totals and the drawings of the graphs, for a notebook."""
    drawings = map(drawing.to_svg, _drawings(statistics, graphs, deployment))
    return "\n".join([table_to_html(service_summary(statistics)), *drawings])


def _drawings(
    statistics: "ServiceStatistics", graphs: "Iterable[Graph[..., Any]]", deployment: "Deployment"
) -> Iterator[Drawing]:
    for graph in graphs:
        wired = deployment.graphs.find(graph)
        if wired is None or deployment.scope is None:  # not started yet
            yield drawing_of(graph._present_trace())
        else:
            yield running_drawing(wired.program.plan, deployment.scope.wiring, statistics.elapsed_seconds)
