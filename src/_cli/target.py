"""The target of a command, `module:name`: find it, and run it while a profile is taken."""

import argparse
import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import sys
import time
from collections.abc import AsyncIterable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import structlog

from .. import Call, Graph, engine, telemetry
from .arguments import count, refuse, seconds

# The number of calls without --calls: enough for the percentiles of a table.
_CALLS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name the target and its inputs."""
    parser.add_argument(
        "target",
        metavar="MODULE:NAME",
        help="a graph, a function without parameters that returns calls or yields them, or an `async def main()`; "
        "modules of the current folder are found",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=_input,
        dest="inputs",
        metavar="JSON",
        help="the arguments of a call of the graph: an array of arguments, an object of arguments by name, or the only "
        "argument; if --input is given several times, the calls take turns",
    )
    parser.add_argument("--calls", type=count, metavar="N", help=f"how many calls (one for each input, or {_CALLS})")
    parser.add_argument("--seconds", type=seconds, metavar="S", help="run for S seconds, or until all calls are done")


def run_profiled(options: argparse.Namespace) -> telemetry.Profile:
    """Run the target while a profile is taken; return the profile. Wrong arguments exit with 2."""
    try:
        target = load(options.target)
        if isinstance(target, Graph):
            calls: Any = _calls_of(cast("Graph[..., Any]", target), options)
        elif options.inputs or options.calls:
            raise argparse.ArgumentTypeError(f"--input and --calls are for graphs, and {options.target} is not a graph")
        else:
            calls = _called(target, options.target)
    except argparse.ArgumentTypeError as error:
        refuse(options, str(error))
    if not structlog.is_configured():  # unless the module of the target has done so
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is the profile
    taken: list[telemetry.Profile] = []
    try:
        asyncio.run(_profile(calls, options.seconds, taken))
    except KeyboardInterrupt:
        if not taken:
            raise
        print("interrupted: this is what ran until then", file=sys.stderr)
    return taken[0]


async def _profile(calls: Any, seconds: float | None, taken: list[telemetry.Profile]) -> None:
    with telemetry.profile() as profile:
        taken.append(profile)
        if inspect.iscoroutine(calls):
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    await calls
            except TimeoutError:
                if not limit.expired():  # a TimeoutError of the program
                    raise
        else:
            if seconds is not None and not hasattr(calls, "__aiter__"):  # it may hold the loop for many calls
                calls = _until(time.monotonic() + seconds, calls)
            # An item that fails is counted and logged, and the other items go on.
            async with engine.stream(calls, on_error="skip") as results:
                draining = asyncio.create_task(_drain_after(seconds, results))
                try:
                    async for _ in results:
                        pass
                finally:
                    draining.cancel()


def _until(ends_at: float, calls: Iterable[Call[Any]]) -> Iterator[Call[Any]]:
    return itertools.takewhile(lambda _: time.monotonic() < ends_at, calls)


async def _drain_after(seconds: float | None, results: engine.Stream[Any]) -> None:
    if seconds is not None:
        await asyncio.sleep(seconds)
        await results.drain()


def load(path: str) -> object:
    """Return the object that `module:name` names; modules of the current folder are found.

    Raises:
        argparse.ArgumentTypeError: there is no such module, or the module has no such name.
    """
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise argparse.ArgumentTypeError(f"{path!r} is not of the form MODULE:NAME, such as shop.search:search")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports a module that does not exist
        raise argparse.ArgumentTypeError(f"there is no module {error.name!r} here or installed") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            graphs = [known for known, value in vars(found).items() if isinstance(value, Graph)]
            known = f"; its graphs: {', '.join(graphs)}" if graphs else ""
            raise argparse.ArgumentTypeError(f"{name!r} has no {attribute!r}{known}")
        found = getattr(found, part)
    return found


def _called(target: object, path: str) -> Any:
    """Call the function of a target; return its coroutine, or its calls of graphs."""
    what = "it has to be a graph, a function without parameters that gives calls of graphs, or an `async def main()`"
    if not callable(target):
        raise argparse.ArgumentTypeError(f"{path} is {target!r}: {what}")
    try:
        with contextlib.suppress(NameError):  # since Python 3.14: an annotation only for type checkers
            inspect.signature(target).bind()
    except TypeError as error:
        raise argparse.ArgumentTypeError(f"{path} needs arguments ({error}): {what}") from None
    found = target()
    if inspect.iscoroutine(found) or isinstance(found, (Iterable, AsyncIterable)):
        return cast("Any", found)
    raise argparse.ArgumentTypeError(f"{path}() gave {found!r}: {what}")


def _calls_of(graph: Graph[..., Any], options: argparse.Namespace) -> Iterator[Call[Any]]:
    inputs: list[tuple[list[Any], dict[str, Any]]] = options.inputs or [([], {})]
    calls: list[Call[Any]] = []
    for args, kwargs in inputs:
        try:
            calls.append(graph(*args, **kwargs))
        except TypeError as error:
            hint = "" if options.inputs else "; give them with --input, such as --input '[\"a\", 1]'"
            raise argparse.ArgumentTypeError(f"{error}{hint}") from None
    if options.calls is None and options.seconds is not None:
        return itertools.cycle(calls)
    return itertools.islice(itertools.cycle(calls), options.calls or (len(options.inputs) or _CALLS))


def _input(text: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error}); a text is in quotes: '\"a\"'") from None
    kind: type[Any] = value.__class__
    if kind is dict:
        return [], value
    return (value if kind is list else [value]), {}
