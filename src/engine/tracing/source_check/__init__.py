"""Find in a graph's source what a symbolic value cannot see when the graph is traced.

A Ref raises when it is compared, iterated over or asked for its truth. It does not notice that it stands in a `try`,
that `is` compares its identity, or that `isinstance` looks at its class: the trace would be silently wrong. So the
body is interpreted abstractly when the graph is decorated (`SourceInterpreter`), with what is known of each variable.
What may or may not be symbolic is never reported.
"""

from collections.abc import Callable
from types import FunctionType, MethodType

from ...._errors import GraphTraceError
from ....telemetry import logs
from .interpreter import SourceInterpreter
from .rules import Problem, SourceRules
from .values import Kind, Value, locate

_warned: set[tuple[str, int, str]] = set()  # places, so that a factory of graphs is warned of once


def check_source(
    fn: Callable[..., object],
    *,
    is_node: Callable[[object], bool],
    is_graph: Callable[[object], bool] = lambda _: False,
) -> None:
    """Check the body of a graph, or of a branch of one, for what a trace cannot represent.

    The functions inside it are checked as well, and the plain functions of the same module that it calls: their
    bodies run while tracing. Names are looked up as they are now; one that is not bound yet is taken for unknown, so
    that checking once more before the first trace sees more.

    Args:
        fn: a function, lambda or bound method; of anything else there is no source to check. The first parameter of
            a method is configuration, every other parameter is symbolic.
        is_node: tells the objects whose call gives a Ref, e.g. nodes, and the classes whose instances are such.
        is_graph: tells graphs, whose call gives whatever structure of Refs they return; they may be among the
            former as well.

    Raises:
        GraphTraceError: the body does something of the kind; the message has one line for each place, with file,
            line, source and remedy.
    """
    receiver = Value(Kind.PLAIN, target=fn.__self__) if isinstance(fn, MethodType) else None
    function = _innermost(fn)
    if function is None:
        return
    location = locate(function)
    if location is None:
        _warn_of(function)
        return
    rules = SourceRules(is_node, is_graph, function.__globals__)
    SourceInterpreter(rules, function, location, is_graph=True).interpret_graph(receiver)
    if rules.problems:
        raise GraphTraceError("\n".join((f"{function.__qualname__} cannot be traced:", *_listed(rules.problems))))


def _warn_of(function: FunctionType) -> None:
    code = function.__code__
    place = code.co_filename, code.co_firstlineno, function.__qualname__
    if place not in _warned:
        _warned.add(place)
        logs.warning(
            "graph.source_unavailable",
            function=f"{function.__module__}.{function.__qualname__}",
            file=code.co_filename,
            consequence="`try`, `with`, `is`, `match` and `isinstance` on symbolic values go unnoticed",
        )


def _listed(problems: dict[tuple[str, int, str], Problem]) -> list[str]:
    return [str(problems[place]) for place in sorted(problems, key=lambda place: place[:2])]


def _innermost(fn: object) -> FunctionType | None:
    """The function whose body it is, behind methods and decorators that name what they wrap."""
    seen: set[int] = set()
    while id(fn) not in seen:
        seen.add(id(fn))
        fn = fn.__func__ if isinstance(fn, MethodType) else getattr(fn, "__wrapped__", fn)
    return fn if isinstance(fn, FunctionType) else None
