"""`Retry(attempts=None)`: items wait until an outage ends, a bad item fails at once, and statistics show both."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs

import penstock as ps
from penstock import engine
from penstock.testing import run_virtual
from tests.kit import virtual

PATIENT = ps.Retry(None, backoff_seconds=0.5, max_backoff_seconds=10, jitter=0, retry_on=ConnectionError)


class Database:
    """A database that is down until a time, and always refuses invalid rows; `write` takes a batch of rows."""

    def __init__(self, until: float, retry: ps.Retry = PATIENT, name: str = "write") -> None:
        self.until = until
        self.asked: list[float] = []
        self.rows: list[int] = []

        @ps.node(retry=retry, batch=ps.Batch(4, max_wait_seconds=0.01))
        async def write(rows: list[int]) -> list[Exception | None]:
            self.asked.append(asyncio.get_running_loop().time())
            if self.asked[-1] < self.until:
                raise ConnectionRefusedError("no database")
            self.rows += [row for row in rows if row >= 0]
            return [None if row >= 0 else ValueError(f"{row} is no row") for row in rows]

        @ps.graph
        async def store(row: int) -> None:
            return await write.named(name)(row)

        self.store = store


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retry_on": OSError}, r"needs a pause, such as backoff_seconds=0\.5"),
        ({"retry_on": OSError, "backoff_seconds": 1, "max_backoff_seconds": 0}, "needs a pause"),
        ({"backoff_seconds": 1}, r"of an outage alone, such as retry_on=\(ConnectionError, TimeoutError\)"),
        ({"backoff_seconds": 1, "retry_on": (OSError, Exception)}, "a bug or a bad message would be retried for ever"),
    ],
)
def test_what_would_go_on_for_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.OptionsError, match=message):
        ps.Retry(None, **arguments)


def test_an_outage_loses_nothing_and_a_bad_row_fails_alone() -> None:
    async def main() -> None:
        database = Database(until=200, name="insert")  # another name, since logs are throttled by name
        rows = [*range(20), -1, *range(20, 30)]
        async with engine.stream(map(database.store, rows), max_in_flight=40) as stream:
            await asyncio.sleep(41)
            (write,) = stream.statistics().actors
            assert write.retrying_error == "ConnectionRefusedError"
            assert write.retrying_seconds == pytest.approx(41, abs=0.1)
            assert write.outage == f"insert has been retried for {write.retrying_seconds:.1f} s: ConnectionRefusedError"
            assert write.outage in str(stream.statistics())
            assert [outcome.index async for outcome in stream.outcomes() if outcome.error] == [20]
            (write,) = stream.statistics().actors
            assert (write.retrying_seconds, write.outage) == (0, "")
            assert "outage" not in str(stream.statistics())
        assert sorted(database.rows) == list(range(30))

    with capture_logs() as logs:
        run_virtual(main)
    seen = [log for log in logs if log["event"] == "node.error_handled"]
    assert [log.get("retried_for_seconds") for log in seen] == [None, 66, 126, 186]  # a line each minute


@virtual
async def test_it_waits_as_long_as_the_deadline_allows() -> None:
    database = Database(until=200)
    with pytest.raises(ConnectionRefusedError) as caught:
        await engine.run(database.store(1), timeout_seconds=60)
    assert 50 < asyncio.get_running_loop().time() <= 60  # the next attempt would come after the deadline
    assert len(database.asked) == 10
    assert "attempt 10" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("asked", "pauses"), [(1000, [10] * 4), (3, [3] * 4), (0, [0.5, 1, 2, 4]), (None, [0.5, 1, 2, 4])]
)
@virtual
async def test_a_longer_pause_than_the_longest_is_cut(asked: float | None, pauses: list[float]) -> None:
    retry = ps.Retry(
        None, backoff_seconds=0.5, max_backoff_seconds=10, jitter=0, retry_on=OSError, wait=lambda *_: asked
    )
    database = Database(until=sum(pauses[:-1]) + 0.2, retry=retry)
    await engine.run(database.store(1))
    assert [round(after - before - 0.01, 6) for before, after in pairwise(database.asked)] == pauses


@pytest.mark.parametrize("is_service", [True, False])
@virtual
async def test_a_drain_with_a_timeout_ends_it(is_service: bool) -> None:
    database = Database(until=10_000)
    async with (
        engine.deploy(database.store) as service,
        service.stream(map(database.store, range(9)), max_in_flight=4) as stream,
    ):
        await asyncio.sleep(20)
        if is_service:
            await service.drain(timeout_seconds=5)
            assert service.statistics().cancelled == 4
        else:
            assert await stream.drain(timeout_seconds=5) == 4
            errors = [outcome.error async for outcome in stream.outcomes()]
            assert [type(error) for error in errors] == [ps.NotFinished] * 4
    assert asyncio.get_running_loop().time() == 25
    assert not database.rows
