"""Batched nodes: functions of a list, called in graphs with one item."""

import asyncio
import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, Union, get_args, get_origin

from ..actors.batch import Batch
from ..actors.batching import Batcher, results_of
from ..actors.loop_host import OwnsLoop
from ..actors.node_actor import BLOCKING_SECONDS, log_blocking
from ..actors.policy import Policy
from ..actors.uninterrupted import uninterrupted
from .node import Node, check_policy, is_async
from .tracing.annotations import hints_of, signature_of

if TYPE_CHECKING:
    from ..actors.threads import ThreadShare
    from .pools import Pools

_Call: TypeAlias = Callable[[list[Any]], Awaitable[Sequence[Any]]]


def batched_node(fn: Callable[..., Any], batch: Batch, policy: Policy, name: str | None) -> Node[..., Any]:
    """Make a node of a function that takes a list and returns a list with one result or exception per item.

    Raises:
        TypeError: the function cannot be a batched node.
    """
    label = name or str(getattr(fn, "__name__", type(fn).__name__))
    if isinstance(fn, type):
        raise TypeError(
            f"@node(batch=...) on class {label!r}: batch= is for functions and methods; a class may own its loop"
        )
    for option, is_given in (
        ("pad_axes", bool(batch.pad_axes)),
        ("buckets", batch.buckets != "powers_of_two"),
    ):
        if is_given:
            raise TypeError(
                f"node {label!r} takes a list, which is not padded: Batch({option}=...) is for device_node, which "
                "stacks arrays"
            )
    check_policy(label, fn, policy, is_stateful=False)
    if policy.runs_on == "process":
        raise TypeError(f'batched node {label!r} cannot run with runs_on="process"; use runs_on="thread"')

    def make_loop(node: Node[..., Any], pools: "Pools", threads: "ThreadShare | None") -> OwnsLoop:
        bound = fn if node.bound_to is None else types.MethodType(fn, node.bound_to)
        call = _call_of(bound, policy, pools, threads, label)
        return Batcher(call, batch, policy.concurrency or 1, label, policy.runs_on)

    # `concurrency` counts batches and is the batcher's; what waits for it is not limited.
    for_items = replace(policy, concurrency=None, runs_on="loop")
    return Node(_of_one_item(fn, label), for_items, name=label, make_loop=make_loop)


def _call_of(fn: Callable[..., Any], policy: Policy, pools: "Pools", threads: "ThreadShare | None", name: str) -> _Call:
    if is_async(fn):
        return fn

    async def inline(items: list[Any]) -> Any:
        began = perf_counter()
        results = fn(items)
        elapsed = perf_counter() - began
        if elapsed > BLOCKING_SECONDS and not reported:
            reported.append(elapsed)
            log_blocking(name, None, elapsed)
        return results

    async def in_thread(items: list[Any]) -> Any:
        returned = asyncio.Event()
        if threads is None:
            waiting: Awaitable[Any] = pools.threads().submit(copy_context(), returned.set, fn, items)
        else:
            waiting = threads.run(pools.threads(), copy_context(), returned.set, fn, items)
        try:
            return await waiting
        finally:  # a thread must not outlive its scope
            await uninterrupted(returned.wait())

    reported: list[float] = []
    return in_thread if policy.runs_on == "thread" else inline


def _of_one_item(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function as a graph sees it: it takes one item, and returns its result or raises its error."""

    @functools.wraps(fn)
    async def handle(*args: Any) -> Any:
        results = fn(*args[:-1], [args[-1]])
        if inspect.isawaitable(results):
            results = await results
        [result] = results_of(results, 1, name)
        if isinstance(result, BaseException):
            raise result
        return result

    del handle.__wrapped__  # its parameters and annotations are not these
    with suppress(TypeError, ValueError):  # some builtins have no signature
        signature, hints = signature_of(fn), hints_of(fn)
        *before, items = signature.parameters.values()
        annotations = {
            items.name: _item_of(hints.get(items.name)),
            "return": _result_of(hints.get("return")),
        }
        handle.__annotations__ = {key: hint for key, hint in annotations.items() if hint is not None}
        item = items.replace(kind=inspect.Parameter.POSITIONAL_ONLY, annotation=annotations[items.name])
        before = [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in before]
        made: Any = handle
        made.__signature__ = signature.replace(parameters=[*before, item], return_annotation=annotations["return"])
    return handle


def _item_of(hint: Any) -> Any:
    """Return T of list[T]; None if unknown."""
    members = get_args(hint)
    return members[0] if len(members) == 1 else None


def _result_of(hint: Any) -> Any:
    """Return U of list[U | Exception]; None if unknown."""
    member = _item_of(hint)
    if get_origin(member) not in (Union, types.UnionType):
        return member
    members: tuple[Any, ...] = get_args(member)
    left: list[Any] = [one for one in members if not (isinstance(one, type) and issubclass(one, BaseException))]
    return left[0] if len(left) == 1 else None
