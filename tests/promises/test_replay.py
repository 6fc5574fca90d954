"""A failing seed tells the command that replays it, and with the seed of the command nothing else runs."""

import asyncio
import shlex

import pytest

from tests.promises.exploring import SEED, Explorer, seed_to_replay

TEST = "tests/promises/test_failing.py::test_that_they_never_come_in_reverse[of two words]"


def test_a_failing_seed_tells_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    async def main() -> None:
        tried.append(asyncio.get_running_loop().seed)  # type: ignore[attr-defined]
        order: list[int] = []

        async def arrive(number: int) -> None:
            await asyncio.sleep(0)
            order.append(number)

        await asyncio.gather(*map(arrive, range(4)))
        assert order != sorted(order, reverse=True), f"they came as {order}"

    with pytest.raises(AssertionError, match=r"they came as \[3, 2, 1, 0\]") as first:
        Explorer(TEST, 1, None)(main)
    assert tried == [*range(len(tried))]
    assert len(tried) > 1, "a seed that fails at once would be found without replaying it, too"
    variable, *command = shlex.split(first.value.__notes__[0].removeprefix("replay: "))
    assert (variable, command) == (f"{SEED}={tried[-1]}", ["python", "-m", "pytest", TEST])

    monkeypatch.setenv(*variable.split("="))
    again = tried[-1:]
    tried.clear()
    with pytest.raises(AssertionError, match=r"they came as \[3, 2, 1, 0\]"):
        Explorer(TEST, 1, seed_to_replay())(main)
    assert tried == again
