"""The decisions of a supervisor, against a model of OTP's `supervisor` (stdlib)."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.actors.supervision import (
    Escalate,
    ExitKind,
    Restart,
    RestartMode,
    Strategy,
    SupervisorFlags,
    SupervisorState,
)


def test_exits_of_what_is_being_stopped_and_after_an_escalation_are_nothing_new() -> None:
    state = SupervisorState(SupervisorFlags("one_for_all", max_restarts=1))
    children = [state.add("permanent") for _ in range(2)]
    assert isinstance(state.exited(0, "crash", 0.0), Restart)
    assert [state.exited(child, "crash", 0.0) for child in children] == [None, None]
    for child in children:
        state.started(child)
    assert isinstance(state.exited(0, "crash", 0.0), Escalate)
    assert (state.exited(1, "crash", 0.0), state.start_failed(0, 0.0)) == (None, None)


@pytest.mark.parametrize("within_seconds", [0.01, 0.5, 5.0, 3600.0])
@pytest.mark.parametrize("max_restarts", [0, 1, 3, 4, 10, 1000])
def test_all_pauses_of_a_window_are_shorter_than_it_and_than_a_second(max_restarts: int, within_seconds: float) -> None:
    flags = SupervisorFlags(max_restarts=max_restarts, within_seconds=within_seconds)
    pauses = [flags.pause_seconds(number) for number in range(1, max_restarts + 1)]
    assert sum(pauses) < min(1.0, within_seconds)
    assert pauses == sorted(pauses)


@dataclass
class Spec:
    """A child of the model; `alive` stands for OTP's pid."""

    number: int
    mode: RestartMode
    alive: bool = True


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
        self.otp.specs.append(Spec(self.state.add(mode), mode))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.otp is not None and any(spec.alive for spec in self.otp.specs))
    @rule(data=st.data(), kind=st.sampled_from(["normal", "shutdown", "crash"]), failures=st.integers(0, 3))
    def exit(self, data: st.DataObject, kind: ExitKind, failures: int) -> None:
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
        for index, child in enumerate(decision.start):
            assert {self.state.state_of(each) for each in decision.start[index:]} == {"restarting"}
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
            for spec in self.otp.specs:
                assert self.state.state_of(spec.number) == ("running" if spec.alive else "stopped")


def test_any_exits_are_answered_as_in_a_model_of_otp() -> None:
    run_state_machine_as_test(Supervision)
