"""The decoder server: every patient client gets its answer, and a slot that is given up is in use at the next step."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples import decoder_server
from examples.decoder_server import END, STATES, serve
from penstock import devices, testing

PROGRAM = Path(decoder_server.__file__)


def answer_to(text: str) -> str:
    """Returns what a client has to get, decoded alone."""
    state = sum(text.encode()) % (STATES - 1) + 1
    letters: list[str] = []
    while (state := (state + 7) % STATES) != END:
        letters.append(chr(97 + state % 26))
    return "".join(letters)


class NoTimeDevice:
    """Runs functions at once, so that nothing but virtual time passes: the clock does not know what a device does."""

    async def run(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return fn(*args)


@pytest.fixture
def no_time_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "actor", lambda _device: NoTimeDevice())


@pytest.mark.usefixtures("no_time_device")
@pytest.mark.parametrize("slots", [1, 8])
def test_64_clients_of_which_three_misbehave(slots: int) -> None:
    server, (left_at, sleeper, hasty) = testing.run_virtual(lambda: serve(slots, 0.01), timeout_seconds=3600)
    history = server.history

    assert server.answers == {f"client {number}": answer_to(f"prompt {number}") for number in range(61)}
    assert sleeper == "the client is too slow"
    assert "did not finish within 0.105 s" in hasty

    # Whoever waits gets a slot at the very next step: none is ever empty while somebody waits.
    assert all(None not in slots for slots, waiting in zip(history.steps, history.waiting, strict=True) if waiting)
    clients_at = [set(slots) for slots in history.steps]
    # The one that left had a slot in the step that had begun then, and in none after that.
    assert "leaver" in clients_at[left_at - 1]
    assert not any("leaver" in clients for clients in clients_at[left_at:])
    # Its deadline passed during the step after ten, if it had a slot at all.
    assert not any("hasty" in clients for clients in clients_at[11:])
    # The one that does not read keeps its slot for as long as what it holds has room, and no longer.
    assert 10 < sum("sleeper" in clients for clients in clients_at) < 60


@pytest.mark.usefixtures("no_time_device")
def test_higher_priorities_get_a_slot_first() -> None:
    server, _ = testing.run_virtual(lambda: serve(8, 0.01), timeout_seconds=3600)
    first_step: dict[str, int] = {}
    for step, clients in enumerate(server.history.steps):
        for client in clients:
            if client is not None:
                first_step.setdefault(client, step)
    # All ask at once; those of the first step came before the others.
    later = {
        int(client.split()[1]): step for client, step in first_step.items() if step and client.startswith("client")
    }
    assert len(later) > 50
    favoured = [step for number, step in later.items() if number % 2]
    others = [step for number, step in later.items() if not number % 2]
    assert max(favoured) <= min(others)


def test_on_a_device_all_get_the_same_answers_and_no_slot_is_empty_while_somebody_waits() -> None:
    server, (_, sleeper, _) = asyncio.run(serve(8, 0.0005))
    history = server.history
    assert server.answers == {f"client {number}": answer_to(f"prompt {number}") for number in range(61)}
    assert sleeper == "the client is too slow"
    assert all(None not in slots for slots, waiting in zip(history.steps, history.waiting, strict=True) if waiting)


def test_the_program_says_how_it_went() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--slots", "16"], capture_output=True, text=True, timeout=50, check=True
    )
    assert re.search(r"61 clients got \d+ letters, the first '[a-z]{20}'", done.stdout)
    assert "the one that never read:  the client is too slow" in done.stdout
    assert re.search(r"\d+ steps, \d+% of 16 slots in use", done.stdout)
