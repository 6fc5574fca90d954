"""What a look tells of a process, as a client without Penstock reads it: lines of JSON on a socket."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock import engine, telemetry


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


class Asking:
    """A connection of a client."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")

    def ask(self, request: str, **more: object) -> Any:
        self._socket.sendall(json.dumps({"version": 1, "request": request, **more}).encode() + b"\n")
        return json.loads(self._lines.readline())[request]

    def look(self, **more: object) -> Any:
        return self.ask("look", **more)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextlib.contextmanager
def exposed(path: Path) -> Generator[Asking, None, None]:
    with telemetry.expose(path), contextlib.closing(Asking(path)) as asking:
        yield asking


@ps.node
async def fetch(number: int) -> int:
    await asyncio.sleep(0)
    return number


@ps.node
def double(number: int) -> int:
    return 2 * number


@ps.node
def more(number: int) -> int:
    return number + 1


@ps.node
def is_small(number: int) -> bool:
    return number < 3


@ps.graph
async def shape(numbers: list[int]) -> list[int]:
    async def body(number: int) -> int:
        async def one(value: int) -> int:
            return await fetch(value)

        async def other(value: int) -> int:
            return double(more(value))

        return await ps.cond(is_small(number), one, other, number)

    return await ps.map_each(body, numbers)


def boxes_of(drawing: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the names of the boxes of nodes by their places."""
    found = {prefix + node["id"]: node["label"] for node in drawing["nodes"] if node["kind"] == "node"}
    numbers: dict[str, int] = {}
    for owner, body in drawing["bodies"]:
        number = numbers[owner] = numbers.get(owner, -1) + 1
        found |= boxes_of(body, f"{prefix}{owner}.{number}.")
    return found


async def test_each_node_has_its_box_in_the_drawing(path: Path) -> None:
    with exposed(path) as asking:
        async with engine.deploy(shape, max_in_flight=5) as service:
            assert await service([1, 4]) == [1, 10]
            look = asking.look()
            [scope] = look["scopes"]
            [digest] = scope["drawings"]
            drawing = asking.ask("drawing", digest=digest)
            assert asking.ask("drawing", digest="none") is None
    assert (scope["graph"], scope["kind"], scope["max_admitted"]) == ("shape", "deployment", 5)
    assert 0 <= look["when"] - scope["opened"] < 60
    assert drawing["title"] == "shape"
    assert {(node["drawing"], node["step"]): node["node"] for node in look["nodes"]} == {
        (digest, box): name for box, name in boxes_of(drawing).items()
    }
    assert {node["node"]: node["total_completed"] for node in look["nodes"]} == {
        "is_small": 2, "fetch": 1, "more": 1, "double": 1,
    }  # fmt: skip


async def test_scopes_of_one_graph_share_a_drawing_and_a_client_may_choose_one(path: Path) -> None:
    graph = ps.graph(fetch)
    with exposed(path) as asking:
        async with engine.deploy(graph) as one, engine.deploy(graph) as other:
            assert [await one(1), await other(2), await other(3)] == [1, 2, 3]
            await engine.run(graph(4))
            look = asking.look()
            scopes = {scope["id"]: scope for scope in look["scopes"]}
            each = {name: asking.look(scope=name)["nodes"][0]["total_completed"] for name in scopes}
    assert len(scopes) == 3
    assert len({digest for scope in scopes.values() for digest in scope["drawings"]}) == 1
    assert look["nodes"][0]["total_completed"] == 4
    kinds = [(scopes[name].get("kind", "runs"), count) for name, count in each.items()]
    assert sorted(kinds) == [("deployment", 1), ("deployment", 2), ("runs", 1)]


async def test_a_look_of_an_older_process_can_be_read(path: Path) -> None:
    with telemetry.expose(path):
        async with engine.deploy(ps.graph(fetch)) as service:
            await service(1)
            with contextlib.closing(Asking(path)) as asking:
                look = asking.look()
    assert look["nodes"][0].keys() >= {"graph", "node", "completed", "in_flight", "limit", "busy_share"}
