"""The supervisor with children of another kind: such as end by themselves, which own-loop actors do."""

import asyncio
from collections.abc import Callable

import pytest

from penstock import DeploymentFailed
from penstock.actors.supervision import Child, RestartMode, Supervisor, SupervisorFlags
from tests.kit import virtual


class FakeChild(Child):
    """Keeps a journal of what it was asked to do."""

    def __init__(self, name: str, journal: list[str], restart: RestartMode = "permanent") -> None:
        self.name = name
        self.restart: RestartMode = restart
        self.journal = journal
        self.on_start: Callable[[], None] = lambda: None
        self.stopping = asyncio.Event()
        self.stopping.set()
        self.error_of_stop: Exception | None = None

    def hold(self) -> None:
        self.journal.append(f"{self.name} hold")

    def resume(self) -> None:
        self.journal.append(f"{self.name} resume")

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
        self.on_start()


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
        child.on_start = lambda: None
        supervisor.exited(child, "normal", None)

    child.on_start = exit_at_once
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
    with pytest.raises(OSError, match="c"):
        await supervisor.close()
    assert journal == ["c stop", "b stop", "a stop"]


@virtual
async def test_an_exit_after_the_end_is_nothing_new() -> None:
    journal: list[str] = []
    child = FakeChild("a", journal)
    supervisor, failures = made(SupervisorFlags(max_restarts=0), child)
    supervisor.exited(child, "crash", ValueError())  # it escalates, which is told soon
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
    assert journal == ["a hold", "b hold"]  # who is told stops everything
    await supervisor.close()
