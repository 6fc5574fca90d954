"""Clients that leave in the middle of a stream, over real HTTP: Starlette never calls `aclose` on the stream."""

from collections.abc import Iterator

import pytest

from tests.serving.servers import WAYS_TO_LEAVE, client, places_kept, places_of_a_client_who_stalls, server
from tests.serving.streaming_app import BODIES


@pytest.fixture(scope="module", params=[pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Starts a server for all tests; each test leaves it idle."""
    with server("--loop", request.param) as (url, _):
        yield url


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
async def test_a_client_who_leaves_frees_its_place_without_the_collector(address: str) -> None:
    async with client(address) as http:
        await http.post("/disable-collector")
        kept = {(body, how): await places_kept(http, f"/body/{body}", how) for body in BODIES for how in WAYS_TO_LEAVE}
    assert kept == dict.fromkeys(kept, 0)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the client's loop; the server's is its own
async def test_a_client_who_stalls_keeps_its_place_until_its_deadline(address: str) -> None:
    async with client(address) as http:
        await http.post("/disable-collector")
        assert await places_of_a_client_who_stalls(http, "/flood?timeout_seconds=1") == (1, 0)
