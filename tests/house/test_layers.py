"""The tables on how a step runs, in docs/explanation/architecture.md, match the code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock as ps
from penstock import cluster
from penstock.actors import attempts
from penstock.actors.attempts import HedgeBudget, hedged
from penstock.actors.execution import Bound
from penstock.actors.policy import Policy
from penstock.devices import elsewhere, executor
from penstock.engine import executions
from penstock.engine.node import Execution

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "architecture.md"
# Layers around the result of `compose`; and the layer in place of a hedge, as no node has both.
OUTSIDE, INSTEAD_OF_A_HEDGE = ["in_input_order", "traced"], ["through_gate"]


def rows(first: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is `first`."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    found: list[list[str]] = []
    while lines[at].startswith("|"):
        found.append(lines[at].strip("| ").split(" | "))
        at += 1
    return found


def layers(run: Any) -> Iterator[str]:
    """Yield the names of the functions that made a layer and the layers inside it."""
    while run is not None:
        yield run.__qualname__.partition(".")[0]
        inside = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True)).get("run")
        run = None if inside is None else inside.cell_contents


async def never(attempt: Any) -> None:
    raise NotImplementedError


def subclasses(of: type) -> set[str]:
    found = [one for one in of.__subclasses__() if one.__module__.startswith("penstock.")]
    return {one.__name__ for one in found}.union(*(subclasses(one) for one in found))


def test_the_layers_of_a_policy_are_those_of_the_table() -> None:
    policy = Policy(timeout_seconds=1, retry=ps.Retry(2), fallback=lambda error: None, hedge=ps.Hedge(after_seconds=1))
    *outer, innermost = layers(attempts.compose(policy, (hedged(1, HedgeBudget(1)),), never))
    assert [row[0].strip("`") for row in rows("layer")] == [*OUTSIDE, *outer, *INSTEAD_OF_A_HEDGE, innermost]


def test_a_node_without_a_policy_has_no_stack_of_its_own() -> None:
    assert attempts.compose(Policy()) is attempts.compose(Policy())


def test_the_executions_are_those_of_the_table() -> None:
    table = rows("execution")
    named = {name for row in table for name in re.findall(r"`(\w+)`", row[1])}
    ours = {cls for cls in subclasses(Bound) if cls not in {"CacheSite", "_InBodies", "_Intercepted"}}
    assert named == ours
    known = {one for one in vars(executions).values() if isinstance(one, type) and issubclass(one, Execution)}
    known |= {executor.DeviceExecutor, cluster.Workers, elsewhere.GatheredHere}
    assert {row[0].strip("`") for row in table} == {one.__name__ for one in known}
