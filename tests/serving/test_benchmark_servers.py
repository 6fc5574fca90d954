"""The servers that `make bench-servers` compares give the same answers, tuned or not, and end at SIGTERM."""

import json

import pytest

from benchmarks.servers import by_hand, process


# The row on a device takes as long as all others together, and the tests of workers cover device nodes in servers.
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.long] * (row == "device batch")) for row in by_hand.APPLICATIONS]
)
@pytest.mark.parametrize(
    "tuned", [pytest.param(False, id="untuned", marks=pytest.mark.long), pytest.param(True, id="tuned")]
)
def test_a_server_answers_as_the_one_written_by_hand_does(row: str, tuned: bool) -> None:
    answers: list[str] = []
    for side in ("by_hand", "by_hand_with_promises", "with_penstock"):
        with process.server(side, row, tuned=tuned) as (url, _):
            answers.append(process.ask(url))
    assert set(answers) == {answers[0]}
    if row == "events":
        assert answers[0].split("\n\n") == [*(f"data: {number}" for number in range(by_hand.TOKENS)), ""]
    elif row != "device batch":
        assert json.loads(answers[0]) == {"output": 8.0}
