"""A keeper is asked before each step and each call of its run, and may give their outcomes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import penstock as ps
from penstock.extension import Keeper, KeptSite, run_kept


class Remembering(Keeper):
    """Keeps each outcome under its path."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.ran: list[str] = []
        self.loops: dict[str, tuple[int, Any]] = {}
        self.errors: dict[str, Exception] = {}

    async def step(
        self,
        path: str,
        site: KeptSite,
        arguments: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]],
        run: Callable[[], Awaitable[Any]],
    ) -> Any:
        if path not in self.kept:
            self.ran.append(path)
            value = await run()
            if not site.is_kept:
                return value
            self.kept[path] = value
        return self.kept[path]

    def name_of(self, handler: str, called: str, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> str:
        return f"{handler}/{called}{arguments[0]}"

    async def call(self, handler: str, path: str, run: Callable[[], Awaitable[Any]]) -> Any:
        return await run()

    async def ask(self, handler: str, question: object) -> Any:
        return f"{handler} asks {question}"

    def entered(self, path: str) -> bool:
        return any(one.startswith(path) for one in self.kept)

    def began_loop(self, path: str, state: Any) -> tuple[int, Any]:
        return self.loops.get(path, (0, state))

    def iterated(self, path: str, iterations: int, state: Any) -> None:
        self.loops[path] = iterations, state

    def failed_item(self, path: str) -> Exception | None:
        return self.errors.get(path)

    def item_failed(self, path: str, error: Exception) -> None:
        self.errors[path] = error

    def idempotency_key(self, path: str) -> str:
        return f"key of {path}"


@ps.node
async def double(value: int) -> int:
    return 2 * value


@ps.node(effectful=True)
async def key(value: int) -> str:
    return f"{ps.current().idempotency_key}: {value}"


@ps.node
async def handler(value: int) -> str:
    first = await ps.call(key, value)
    return first + await ps.call(inner, value)


@ps.node
async def odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError(value)
    return value


@ps.node
def plus_one(value: int) -> int:
    return value + 1


@ps.node
def is_small(value: int) -> bool:
    return value < 40


@ps.graph
async def inner(value: int) -> str:
    return await key(await double(value))


@ps.graph
async def whole(value: int) -> list[Any]:
    added = await double(plus_one(value))
    looped = await ps.while_loop(is_small, double, added)
    chosen = await ps.cond(is_small(value), inner, key, looped)
    return [await ps.map_each(odd, [1, 2, 3], on_error="skip"), chosen, await handler(looped)]


async def test_steps_have_paths_and_a_run_repeats_nothing_that_is_kept() -> None:
    keeper = Remembering()
    first = await run_kept(whole(3), keeper)
    assert first == [
        [1, 3],
        "key of cond:0/key: 128",
        "key of handler/key(64,): 64key of handler/inner(64,)/key: 128",
    ]
    assert set(keeper.kept) == {
        "double", "while_loop[0]/double", "while_loop[1]/double", "while_loop[2]/double", "cond:0/double",
        "cond:0/key", "handler/key(64,)", "handler/inner(64,)/double", "handler/inner(64,)/key", "handler",
        "map_each[0]/odd", "map_each[2]/odd",
    }  # fmt: skip
    assert keeper.loops == {"while_loop": (3, 64)}
    assert list(keeper.errors) == ["map_each[1]/"]
    keeper.ran.clear()
    assert await run_kept(whole(3), keeper) == first
    assert set(keeper.ran) == {"plus_one", "is_small", "while_loop", "cond", "map_each"} | {
        one for one in keeper.ran if one.startswith("while_loop[3]?")
    }
