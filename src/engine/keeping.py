"""Keeping: a run with a `Keeper` asks it before each step and each call; without a keeper, nothing is asked."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..actors.execution import GENERAL
from ..actors.frame import Frame
from ..actors.node_actor import NodeActor
from .node import Node, is_node
from .program import Plan, PlannedStep, Program, Unit
from .tracing.template import SCALARS, Template, is_known, reads, value_of

if TYPE_CHECKING:
    from ..actors.worker import Worker

T = TypeVar("T")
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]


class Keeper(ABC):
    """Decides for one run which of its steps and calls run; their paths lead from the run to them."""

    @abstractmethod
    def step(
        self, path: str, site: "KeptSite", arguments: Callable[[], Arguments], run: Callable[[], Awaitable[Any]]
    ) -> Awaitable[Any]:
        """Return the outcome of a step of a graph, or of a node that a handler calls.

        Args:
            path: the path of the step.
            site: the facts about the step; for a node that a handler calls, about the only step of its graph.
            arguments: returns the arguments of the step. They are unknown if a step that makes them was left out.
            run: runs the step with its policy.
        """

    @abstractmethod
    def name_of(self, handler: str, called: str, arguments: Arguments) -> str:
        """Return the path of a call that a handler makes with `penstock.call`, when the handler makes it.

        Args:
            handler: the path of the handler, with the number of its attempt.
            called: the name of the node or graph.
            arguments: its arguments.
        """

    @abstractmethod
    def call(self, handler: str, path: str, run: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        """Return the outcome of such a call, when it is awaited.

        Args:
            handler: the path of the handler.
            path: the path of the call.
            run: runs the call. If it is a call of a node, `step` is asked for the same path.
        """

    @abstractmethod
    def ask(self, handler: str, question: object) -> Awaitable[Any]:
        """Return the answer to a question that a handler asks with `penstock.interrupt`.

        Args:
            handler: the path of the handler, with the number of its attempt.
            question: the question.
        """

    @abstractmethod
    def entered(self, path: str) -> bool:
        """Return whether something is kept below a branch, an iteration or an item, so that it is entered again."""

    @abstractmethod
    def began_loop(self, path: str, state: Any) -> tuple[int, Any]:
        """Return how many iterations of a loop have ended, and the state behind them."""

    @abstractmethod
    def iterated(self, path: str, iterations: int, state: Any) -> None:
        """Keep the state behind an iteration that has a kept step."""

    @abstractmethod
    def failed_item(self, path: str) -> Exception | None:
        """Return the kept error of an item of a `map_each` that goes on after errors; None if there is none."""

    @abstractmethod
    def item_failed(self, path: str, error: Exception) -> None:
        """Keep the error of such an item."""

    @abstractmethod
    def idempotency_key(self, path: str) -> str:
        """Return a text of 32 digits for the work of a step, the same in all processes."""


class KeptSite:
    """A step of a graph, as a keeper knows it.

    Attributes:
        label: its name in the plan.
        node: the node; None for control flow.
        is_kept: whether its result is kept: not of pure nodes, of nodes on devices, of streams, and of control flow
            other than a fold; nor of a plain `def` on the loop without an effect, a batch or a state.
    """

    def __init__(self, program: Program, unit: Unit) -> None:
        assert unit.step is not None
        self._program, self._unit = program, unit
        self.label = unit.step.label
        callee = unit.step.head.callee
        self.node: Node[..., Any] | None = callee if is_node(callee) else None
        self.is_kept = is_kept(unit.step)

    @property
    def is_effect(self) -> bool:
        """Whether the node has `effectful=`."""
        return self.node is not None and self.node.policy.effectful is not False

    @cached_property
    def wiring(self) -> str:
        """A digest of where the arguments of the step come from."""
        return wirings(self._program.plan)[self.label]

    @cached_property
    def readers(self) -> "tuple[KeptSite, ...]":
        """The steps that read the value; empty if it is part of the result."""
        source, units = self._unit.source, self._program.units
        if any(read.source == source for read in reads(self._program.plan.result)):
            return ()
        found = [one for one in units if source in one.sources]
        return () if any(one.step is None for one in found) else tuple(KeptSite(self._program, one) for one in found)


def is_kept(planned: PlannedStep) -> bool:
    """Return whether the result of a step is kept; see `KeptSite`."""
    callee: Any = planned.head.callee
    if not is_node(callee):
        return bool(callee.kind == "fold")
    policy, runs_on = callee.policy, callee.runs_on
    if policy.pure or callee.gives_stream or runs_on._is_compiled:
        return False
    is_inline = not callee.is_async and runs_on._is_here and runs_on.pool is None and not callee._is_stateful
    return not is_inline or policy.effectful is not False


def keeps(plan: Plan) -> bool:
    """Return whether a plan, or the plan of a body, has a step that is kept."""
    return any(is_kept(one) or any(map(keeps, one.bodies)) for one in plan.steps)


def wirings(plan: Plan) -> Mapping[str, str]:
    """Return for each step of a plan, by its label, a digest of where its arguments come from."""
    names = dict(zip(plan.parameter_sources, plan.parameters, strict=False))
    names |= {one.source: one.label for one in plan.steps}
    return {
        one.label: blake2b(repr(list(_wiring(one, names))).encode(), digest_size=2).hexdigest() for one in plan.steps
    }


def _wiring(planned: PlannedStep, names: Mapping[int, str]) -> Iterator[object]:
    callee = planned.head.callee
    yield callee.name
    arguments: Iterator[tuple[str, Template]] = planned.head.named_arguments() if is_node(callee) else iter(
        [(str(number), one) for number, one in enumerate(planned.head.args)]
    )  # fmt: skip
    for name, template in arguments:
        yield name, [(names.get(read.source, ""), str(read)) for read in reads(template)]
        if is_known(template, frozenset()) and type(value := value_of(template, {})) in SCALARS:
            yield value


def keep(actor: NodeActor, program: Program, unit: Unit) -> None:
    """Have the keeper of each run asked before a step."""
    if unit.streams or (unit.step is not None and unit.step.head.callee.gives_stream):
        return
    site, invoke = KeptSite(program, unit), actor.invoke

    async def invoke_kept(worker: "Worker", actor: NodeActor, frame: Frame) -> Any:
        place = frame.place
        if place is None:
            return await invoke(worker, actor, frame)
        keeper: Keeper = place.keeper
        arguments, run = partial(actor.arguments, frame.values), partial(invoke, worker, actor, frame)
        return await keeper.step(place.of(actor.name), site, arguments, run)

    actor.mode, actor.begin, actor.invoke = GENERAL, None, invoke_kept
