"""What a call gives: one value, or a stream of values; and the refusal of the one where the other is asked for."""

from typing import TYPE_CHECKING, Any

from ..._errors import PlanError

if TYPE_CHECKING:
    from ..graph import Graph
    from ..options import ExecutionOptions
    from ..planning import Plan


def one_value(
    graph: "Graph[..., Any]", options: "ExecutionOptions", verb: str = "engine.stream of many calls"
) -> "Plan":
    """Return the plan of a graph whose calls give one value each.

    Raises:
        PlanError: they give streams.
    """
    plan = graph._planned(is_cached=options.enable_caching)
    if plan._gives_stream:
        raise gives_stream(graph, verb)
    return plan


def values(graph: "Graph[..., Any]") -> None:
    """Check that the calls of a graph give streams.

    Raises:
        PlanError: they give one value.
    """
    if not graph._present_trace().gives_stream:
        raise gives_one_value(graph, "engine")


def gives_one_value(graph: "Graph[..., Any]", owner: str) -> PlanError:
    """Return the error of a call that gives one value where a stream of values is asked for."""
    return PlanError(
        f"{owner}.stream takes an iterable of calls, or one call of a graph that returns an AsyncIterator; graph "
        f"{graph.name!r} returns one value: for one call, use {owner}.run"
    )


def gives_stream(graph: "Graph[..., Any]", verb: str) -> PlanError:
    """Return the error of a call that gives a stream where one value is asked for."""
    owner = verb.partition(".")[0]
    return PlanError(
        f"graph {graph.name!r} returns a stream of values, and {verb} takes calls that give one value; read it with "
        f"`async with {owner}.stream({graph.name}(...)) as values`"
    )
