"""The decisions of a supervisor, against a model of OTP's `supervisor` (stdlib)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock import DeploymentFailed
from penstock.actors.supervision import (
    Child,
    Escalate,
    ExitKind,
    Restart,
    RestartMode,
    Strategy,
    Supervisor,
    SupervisorFlags,
    SupervisorState,
)
from tests.kit import virtual

# Four children in start order: two permanent children, a temporary child and a transient child.
BEFORE, SUBJECT, TEMPORARY, AFTER = range(4)


def supervisor(strategy: Strategy, max_restarts: int = 3) -> SupervisorState:
    state = SupervisorState(SupervisorFlags(strategy, max_restarts))
    modes: tuple[RestartMode, ...] = ("permanent", "permanent", "temporary", "transient")
    assert [state.add(mode) for mode in modes] == [BEFORE, SUBJECT, TEMPORARY, AFTER]
    return state


def test_a_restart_that_fails_counts_again_and_takes_its_own_siblings_along() -> None:
    state = supervisor("rest_for_one")
    assert isinstance(state.exited(BEFORE, "crash", 0.0), Restart)
    state.started(BEFORE)  # BEFORE has started, but SUBJECT fails to start
    assert state.start_failed(SUBJECT, 0.0) == Restart(SUBJECT, (), (SUBJECT, AFTER), 0.1)
    assert state.start_failed(SUBJECT, 0.0) == Restart(SUBJECT, (), (SUBJECT, AFTER), 0.2)
    assert state.start_failed(SUBJECT, 0.0) == Escalate(SUBJECT, (BEFORE,))


def test_exits_of_what_is_being_stopped_are_nothing_new() -> None:
    state = supervisor("one_for_all")
    state.exited(SUBJECT, "crash", 0.0)
    assert state.exited(SUBJECT, "crash", 0.0) is None
    assert state.exited(BEFORE, "crash", 0.0) is None


def test_nothing_is_decided_after_escalation() -> None:
    state = supervisor("one_for_one", max_restarts=0)
    assert isinstance(state.exited(SUBJECT, "crash", 0.0), Escalate)
    assert state.exited(BEFORE, "crash", 0.0) is None
    assert state.start_failed(SUBJECT, 0.0) is None


@pytest.mark.parametrize("within_seconds", [0.01, 0.5, 5.0, 3600.0])
@pytest.mark.parametrize("max_restarts", [0, 1, 3, 4, 10, 1000])
def test_all_pauses_of_a_window_are_shorter_than_it_and_than_a_second(max_restarts: int, within_seconds: float) -> None:
    flags = SupervisorFlags(max_restarts=max_restarts, within_seconds=within_seconds)
    pauses = [flags.pause_seconds(number) for number in range(1, max_restarts + 1)]
    assert sum(pauses) < min(1.0, within_seconds)
    assert pauses == sorted(pauses)


def test_the_pause_doubles() -> None:
    flags = SupervisorFlags()
    assert [flags.pause_seconds(number) for number in (1, 2, 3)] == [0.05, 0.1, 0.2]


@dataclass
class Spec:
    """A child of the model; `alive` stands for OTP's pid."""

    number: int
    mode: RestartMode
    alive: bool = True
    restarting: bool = False


@dataclass
class Otp:
    """A model of `supervisor.erl`: one process that stops and starts its children one after the other.

    `failures` is the number of next starts that fail.
    """

    strategy: Strategy
    intensity: int
    period: float
    specs: list[Spec] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    terminated: bool = False
    failures: int = 0
    journal: list[tuple[str, int]] = field(default_factory=list)

    def exit(self, number: int, kind: ExitKind, now: float) -> None:
        spec = next(spec for spec in self.specs if spec.number == number)
        spec.alive = False
        if spec.mode == "permanent" or (spec.mode == "transient" and kind == "crash"):
            self.restart(spec, now)
        elif spec.mode == "temporary":
            self.specs.remove(spec)

    def restart(self, spec: Spec, now: float) -> None:
        self.restarts = [now, *(then for then in self.restarts if then >= now - self.period)]
        if len(self.restarts) > self.intensity:
            self.terminated = True
            self.stop(self.specs)
            return
        index = self.specs.index(spec)
        if self.strategy == "one_for_one":
            group = [spec]
        else:
            group = self.specs[:] if self.strategy == "one_for_all" else self.specs[index:]
            self.stop([other for other in group if other is not spec])
            for other in group:
                if other.mode == "temporary":
                    self.specs.remove(other)
            group = [other for other in group if other.mode != "temporary"]
        for other in group:
            if self.failures:
                self.failures -= 1
                self.journal.append(("fails", other.number))
                self.restart(other, now)  # OTP sends itself a message to try again
                return
            self.journal.append(("start", other.number))
            other.alive = True

    def stop(self, specs: list[Spec]) -> None:
        for spec in reversed(specs):
            if spec.alive:
                spec.alive = False
                self.journal.append(("stop", spec.number))


class Supervision(RuleBasedStateMachine):
    """Carries out the decisions of `SupervisorState`, and compares the starts and stops with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.otp: Otp | None = None

    @precondition(lambda self: self.otp is None)
    @rule(
        strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
        max_restarts=st.integers(0, 6),
        within_seconds=st.sampled_from([1.0, 5.0]),
    )
    def begin(self, strategy: Strategy, max_restarts: int, within_seconds: float) -> None:
        self.otp = Otp(strategy, max_restarts, within_seconds)
        self.state = SupervisorState(SupervisorFlags(strategy, max_restarts, within_seconds))
        self.journal: list[tuple[str, int]] = []

    @precondition(lambda self: self.otp is not None and not self.otp.terminated)
    @rule(mode=st.sampled_from(["permanent", "transient", "temporary"]))
    def add(self, mode: RestartMode) -> None:
        assert self.otp is not None
        self.otp.specs.append(Spec(self.state.add(mode), mode))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.otp is not None and any(spec.alive for spec in self.otp.specs))
    @rule(data=st.data(), kind=st.sampled_from(["normal", "shutdown", "crash"]), failures=st.integers(0, 3))
    def exit(self, data: st.DataObject, kind: ExitKind, failures: int) -> None:
        assert self.otp is not None
        child = data.draw(st.sampled_from([spec.number for spec in self.otp.specs if spec.alive]))
        self.otp.failures = failures
        self.otp.exit(child, kind, self.now)
        self.failures = failures
        self.obey(self.state.exited(child, kind, self.now))

    def obey(self, decision: Any) -> None:
        if isinstance(decision, Restart | Escalate):
            self.journal += [("stop", child) for child in decision.stop]
        if not isinstance(decision, Restart):
            return
        for child in decision.start:
            if self.failures:
                self.failures -= 1
                self.journal.append(("fails", child))
                self.obey(self.state.start_failed(child, self.now))
                return
            self.journal.append(("start", child))
            self.state.started(child)

    @invariant()
    def what_happened_is_what_otp_does(self) -> None:
        if self.otp is not None:
            assert self.journal == self.otp.journal
            assert self.state.running == {spec.number for spec in self.otp.specs if spec.alive}
            assert self.state.escalated == self.otp.terminated


def test_any_exits_are_answered_as_in_a_model_of_otp() -> None:
    run_state_machine_as_test(Supervision)


def test_a_child_is_restarting_until_it_runs_and_stopped_if_it_never_will() -> None:
    state = SupervisorState(SupervisorFlags("one_for_all", max_restarts=3))
    for mode in ("permanent", "transient", "temporary"):
        state.add(mode)
    steps: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: None, ["running", "running", "running"]),
        (lambda: state.exited(1, "normal", 0.0), ["running", "stopped", "running"]),
        (lambda: state.exited(0, "crash", 0.0), ["restarting", "restarting", "stopped"]),
        (lambda: state.started(0), ["running", "restarting", "stopped"]),
        (lambda: state.started(1), ["running", "running", "stopped"]),
        (lambda: state.exited(1, "normal", 0.1), ["running", "stopped", "stopped"]),
        (lambda: state.exited(0, "crash", 0.1), ["restarting", "restarting", "stopped"]),
        (lambda: state.start_failed(0, 0.2), ["restarting", "restarting", "stopped"]),
        (lambda: state.start_failed(0, 0.3), ["stopped", "stopped", "stopped"]),
    ]
    for step, expected in steps:
        step()
        assert [state.state_of(child) for child in range(3)] == expected
    assert state.escalated


# --- The supervisor, with children that end by themselves, like actors that own their loop ---


class FakeChild(Child):
    """A child that writes each call of the supervisor to a journal."""

    def __init__(self, name: str, journal: list[str], restart: RestartMode = "permanent") -> None:
        self.name = name
        self.restart: RestartMode = restart
        self.journal = journal
        self.on_resume: Callable[[], None] = lambda: None
        self.stopping = asyncio.Event()
        self.stopping.set()
        self.error_of_stop: Exception | None = None

    def hold(self) -> None:
        self.journal.append(f"{self.name} hold")

    def resume(self) -> None:
        self.journal.append(f"{self.name} resume")
        self.on_resume()

    def abandon(self, cause: BaseException | None, why: str | None = None) -> None:
        self.journal.append(f"{self.name} abandon")

    async def stop(self, cause: BaseException | None) -> None:
        await self.stopping.wait()
        self.journal.append(f"{self.name} stop")
        if self.error_of_stop is not None:
            raise self.error_of_stop

    async def close(self) -> None:
        await self.stop(None)

    async def start(self) -> None:
        self.journal.append(f"{self.name} start")


def made(flags: SupervisorFlags, *children: FakeChild) -> tuple[Supervisor, list[str]]:
    failures: list[str] = []
    supervisor = Supervisor(flags, lambda make_error: failures.append(str(make_error("it"))))
    for child in children:
        supervisor.add(child)
    return supervisor, failures


@virtual
async def test_a_child_that_exits_while_it_is_started_is_restarted_after_that() -> None:
    journal: list[str] = []
    child, later = FakeChild("a", journal), FakeChild("b", journal)
    supervisor, _ = made(SupervisorFlags("one_for_all"), child, later)

    def exit_at_once() -> None:
        child.on_resume = lambda: None
        supervisor.exited(child, "normal", None)

    child.on_resume = exit_at_once
    supervisor.exited(child, "crash", ValueError())
    await asyncio.sleep(0.5)
    assert journal == [
        *("a hold", "b hold", "b stop", "a stop", "a start", "a resume"),
        *("a hold", "a stop", "a start", "a resume", "b start", "b resume"),
    ]
    await supervisor.close()


@virtual
async def test_a_transient_child_that_ended_well_is_down_before_it_comes_back() -> None:
    journal: list[str] = []
    child, brief = FakeChild("a", journal), FakeChild("b", journal, "transient")
    supervisor, _ = made(SupervisorFlags("one_for_all"), child, brief)
    brief.stopping.clear()
    supervisor.exited(brief, "normal", None)
    supervisor.exited(child, "crash", ValueError())
    await asyncio.sleep(1)
    assert journal == ["b abandon", "a hold", "a stop", "a start", "a resume"]
    brief.stopping.set()
    await asyncio.sleep(1)
    assert journal[5:] == ["b stop", "b start", "b resume"]
    await supervisor.close()


@virtual
async def test_all_children_are_stopped_at_the_end_although_some_raise() -> None:
    journal: list[str] = []
    children = [FakeChild(name, journal) for name in "abc"]
    supervisor, _ = made(SupervisorFlags(), *children)
    children[1].error_of_stop, children[2].error_of_stop = OSError("b"), OSError("c")
    with pytest.raises(OSError, match="b"):
        await supervisor.close()
    assert journal == ["c stop", "b stop", "a stop"]


@virtual
async def test_an_exit_after_the_end_is_nothing_new() -> None:
    journal: list[str] = []
    child = FakeChild("a", journal)
    supervisor, failures = made(SupervisorFlags(max_restarts=0), child)
    supervisor.exited(child, "crash", ValueError())  # escalates; the callback comes later
    await supervisor.close()
    supervisor.exited(child, "crash", ValueError())
    await asyncio.sleep(1)
    assert journal == ["a hold", "a stop"]
    assert failures == []


@virtual
async def test_escalation_is_told_once_with_the_cause() -> None:
    journal: list[str] = []
    child, other = FakeChild("a", journal), FakeChild("b", journal)
    errors: list[DeploymentFailed] = []
    supervisor = Supervisor(SupervisorFlags(max_restarts=0), lambda make_error: errors.append(make_error("it")))
    supervisor.add(child)
    supervisor.add(other)
    cause = ValueError("broken")
    supervisor.exited(child, "crash", cause)
    supervisor.exited(other, "crash", ValueError("too late"))
    await asyncio.sleep(0)
    assert [error.__cause__ for error in errors] == [cause]
    assert str(errors[0]) == "it failed: node 'a' crashed after max_restarts=0 restarts within 5 s: " + repr(cause)
    assert journal == ["a hold", "b hold"]  # the callback's owner stops all children
    await supervisor.close()
