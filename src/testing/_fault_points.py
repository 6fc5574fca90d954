"""The points at which faults are injected: the engine is intercepted there only while there is a fault."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..extension import Interception, intercept

if TYPE_CHECKING:
    from .faults import Injections

Point: TypeAlias = Literal["actor.start", "node.call", "channel.put", "worker.process"]


class InjectedCancel(asyncio.CancelledError):
    """An injected cancellation; the item itself was not cancelled."""


_active: dict[Point, list["Injections"]] = {"actor.start": [], "node.call": [], "channel.put": [], "worker.process": []}


def install(point: Point, injections: "Injections") -> None:
    """Inject a fault at a point from now on."""
    _active[point].append(injections)
    _intercept()


def remove(point: Point, injections: "Injections") -> None:
    """End the injection of a fault at a point."""
    _active[point].remove(injections)
    _intercept()


def _intercept() -> None:
    """Intercept the engine at the points that have faults, and at no other."""
    is_called = bool(_active["node.call"])
    intercept(
        Interception(
            entering=partial(_pass, "actor.start") if _active["actor.start"] else None,
            calling=partial(_pass, "node.call") if is_called else None,
            calling_plain=_pass_blocking if is_called else None,
            queueing=_held_up if _active["channel.put"] else None,
            giving=_given_to_process if _active["worker.process"] else None,
        )
    )


async def _pass(point: Point, node: str) -> None:
    for injections in tuple(_active[point]):
        fault: Any = injections._take(node)
        if fault is not None:
            await fault._act()


def _pass_blocking(node: str) -> None:
    for injections in tuple(_active["node.call"]):
        fault: Any = injections._take(node)
        if fault is not None:
            fault._act_blocking()


def _held_up(node: str) -> Any:
    for injections in tuple(_active["channel.put"]):
        fault = injections._take(node)
        if fault is not None:
            return partial(_outcome, fault)
    return None


async def _outcome(fault: Any) -> BaseException | None:
    """Have a fault happen; return the error of the item."""
    try:
        await fault._act()
    except (InjectedCancel, Exception) as error:  # noqa: BLE001 - the injected error
        return error
    return None


async def _given_to_process(node: str) -> bool:
    """Pass the point with a call; return whether the worker process of the call has to be killed."""
    kills = False
    for injections in tuple(_active["worker.process"]):
        fault: Any = injections._take(node)
        if hasattr(fault, "_act"):
            await fault._act()
        elif fault is not None:
            kills = True
    return kills
