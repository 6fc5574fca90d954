"""The servers that `make bench-servers` compares give the same answers, and end at SIGTERM."""

import json
from contextlib import nullcontext

import httpx
import pytest
from starlette.applications import Starlette

from benchmarks.servers import by_hand, by_hand_with_promises, process, with_penstock


async def answer_of(app: Starlette) -> str:
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return (await http.post("/predict", json={"input": 4.0})).text


# The row on a device takes as long as all others together, and the tests of workers cover device nodes in servers.
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.long] * (row == "device batch")) for row in by_hand.APPLICATIONS]
)
async def test_a_server_answers_as_the_one_written_by_hand_does(row: str) -> None:
    sides = by_hand, by_hand_with_promises, with_penstock
    answers = [await answer_of(side.APPLICATIONS[row](nullcontext)) for side in sides]
    assert set(answers) == {answers[0]}
    if row == "events":
        assert answers[0].split("\n\n") == [*(f"data: {number}" for number in range(by_hand.TOKENS)), ""]
    elif row != "device batch":
        assert json.loads(answers[0]) == {"output": 8.0}


@pytest.mark.parametrize("side", ["by_hand", "by_hand_with_promises", "with_penstock"])
def test_a_tuned_server_answers_and_ends_at_sigterm(side: str) -> None:
    with process.server(side, "async", tuned=True) as (url, _):
        assert json.loads(process.ask(url)) == {"output": 8.0}
