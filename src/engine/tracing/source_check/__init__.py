"""Check the source of a graph for statements that would make its trace silently wrong.

A Ref raises when it is compared, iterated over or tested for truth. It cannot notice that it is used in a `try`, that
`is` compares its identity, or that `isinstance` looks at its class: the trace would be silently wrong. So the body is
interpreted when the graph is decorated, with an abstract value for each variable (`SourceInterpreter`). A use is only
reported if the value is certainly symbolic.
"""

from collections.abc import Callable
from types import FunctionType, MethodType

from ...._errors import GraphTraceError
from ....telemetry import logs
from .interpreter import SourceInterpreter
from .rules import Problem, SourceRules
from .values import AbstractValue, Kind, locate

_warned: set[tuple[str, int, str]] = set()  # by place in the source, so that a factory of graphs causes one warning


def check_source(
    fn: Callable[..., object],
    *,
    is_node: Callable[[object], bool],
    is_graph: Callable[[object], bool] = lambda _: False,
) -> None:
    """Check the body of a graph, or of a body of control flow, for statements that a trace cannot represent.

    The functions inside it are checked as well, and the plain functions of the same module that it calls, because
    their bodies run while tracing. Names are looked up now. A name that is not bound yet counts as unknown; the check
    before the first trace finds more.

    Args:
        fn: a function, lambda or bound method; other objects have no source and are not checked. The first parameter
            of a method is configuration, all other parameters are symbolic.
        is_node: whether a call of an object gives a Ref, as of a node; true also for the class of a stateful node.
        is_graph: whether an object is a graph, whose call gives a structure of Refs; `is_node` may be true for it, too.

    Raises:
        GraphTraceError: the body has such statements; the message has a line for each, with file, line, source and
            remedy.
    """
    receiver = AbstractValue(Kind.PLAIN, target=fn.__self__) if isinstance(fn, MethodType) else None
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
    """Return the function behind methods and decorators (`__wrapped__`); None if there is none."""
    seen: set[int] = set()
    while id(fn) not in seen:
        seen.add(id(fn))
        fn = fn.__func__ if isinstance(fn, MethodType) else getattr(fn, "__wrapped__", fn)
    return fn if isinstance(fn, FunctionType) else None
