"""The scheduler of the chat example, in random runs beside a plain account of what each request has had."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from examples.chat.scheduler import Scheduler
from tests.conftest import EFFORT


@dataclass
class Account:
    """How much of the prompt of a request was read."""

    length: int
    read: int = 0


@st.composite
def sizes_of_slots(draw: st.DrawFn) -> tuple[int, list[int]]:
    return draw(st.integers(1, 6)), sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))


def free_slots(slots: int, accounts: dict[int, Account]) -> list[int]:
    return [slot for slot in range(slots) if slot not in accounts]


@settings(max_examples=25 * EFFORT)
@given(sizes_of_slots(), st.data())
def test_a_random_run_keeps_all_rules(setting: tuple[int, list[int]], data: Any) -> None:
    slots, sizes = setting
    scheduler, accounts = Scheduler(slots, sizes), dict[int, Account]()
    for _ in range(data.draw(st.integers(1, 30))):
        for slot in data.draw(st.sets(st.sampled_from(sorted(accounts)))) if accounts else set[int]():
            scheduler.release(slot)
            del accounts[slot]
        assert scheduler.free == slots - len(accounts)
        for length in data.draw(st.lists(st.integers(1, 100), max_size=scheduler.free)):
            lowest = free_slots(slots, accounts)[0]
            assert scheduler.admit(length) == lowest
            accounts[lowest] = Account(length)
        able = data.draw(st.sets(st.sampled_from(sorted(accounts)))) if accounts else set[int]()
        before = {slot: (one.read, one.length) for slot, one in accounts.items()}

        chunks, writing = scheduler.step(able)

        # Who has read the whole prompt writes one token in each step, and nobody else does.
        assert writing == sorted(slot for slot in able if before[slot][0] == before[slot][1])
        # Prompts are read from front to end, in sizes that there are, within the budget.
        for chunk in chunks:
            assert chunk.slot in able
            assert chunk.begin == accounts[chunk.slot].read
            assert 0 < chunk.length <= chunk.size
            assert chunk.size in sizes
            accounts[chunk.slot].read += chunk.length
            assert accounts[chunk.slot].read <= accounts[chunk.slot].length
            # Only the end of a prompt is padded, by a quarter at most where there is a smaller size.
            if chunk.length < chunk.size:
                assert accounts[chunk.slot].read == accounts[chunk.slot].length
                assert chunk.size == sizes[0] or chunk.size - chunk.length <= chunk.size / 4
        computed = sum(chunk.size for chunk in chunks)
        assert computed <= sizes[-1]
        # First come, first read: `accounts` is in the order of arrival. Who is not at the end holds up all behind.
        order = [slot for slot in accounts if slot in able and before[slot][0] < before[slot][1]]
        assert list(dict.fromkeys(chunk.slot for chunk in chunks)) == order[: len({chunk.slot for chunk in chunks})]
        unread = [slot for slot in order if accounts[slot].read < accounts[slot].length]
        assert unread == order[len(order) - len(unread) :]
        # No room is left while somebody could read.
        assert not unread or sizes[-1] - computed < sizes[0]
