"""Values of options: each option has one check, whose error names the option, the value and the accepted values."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import devices, engine


@ps.node
async def half(x: int) -> int:
    return x // 2


halved = ps.graph(half)


# Integer options: the name, the least value, and a function that takes the option.
OPTIONS: list[tuple[str, int, Callable[[Any], Any]]] = [
    ("concurrency", 1, lambda value: ps.node(concurrency=value)(lambda x: x)),
    ("capacity", 1, lambda value: ps.node(capacity=value)(lambda x: x)),
    ("max_bytes", 1, lambda value: ps.node(max_bytes=value)(lambda x: x)),
    ("attempts", 1, ps.Retry),
    ("max_size", 1, ps.Batch),
    ("max_queue", 0, lambda value: ps.Batch(8, max_queue=value)),
    ("burst", 1, lambda value: ps.RateLimit(per_second=1, burst=value)),
    ("max_iterations", 0, lambda value: ps.while_loop(half, half, 1, max_iterations=value)),
    ("concurrency", 1, lambda value: ps.map_each(half, [1], concurrency=value)),
    ("max_restarts", 0, lambda value: engine.Engine().deploy(halved, max_restarts=value)),
    ("max_in_flight", 1, lambda value: ps.ExecutionOptions(max_in_flight=value)),
    ("max_workers", 1, lambda value: ps.ExecutionOptions(max_workers=value)),
    ("max_queue", 0, lambda value: ps.ExecutionOptions(max_queue=value)),
    ("shape", 1, lambda value: devices.DeviceMesh(shape=(value,), axis_names=("x",))),
]


def handle(x: int) -> int:
    return x


# Options of a wrong type or out of range: a function that takes the option, its name, values, and the accepted values.
WRONG: list[tuple[Callable[..., Any], str, list[object], str]] = [
    (ps.node, "retry", [3], "a Retry, such as penstock.Retry(3), or None"),
    (ps.node, "fallback", [0], "a function of the exception, or None"),
    (ps.node, "timeout_seconds", ["3", True, 0, float("nan"), Decimal(3)], "a finite number above 0, or None"),
    (ps.node, "batch", [4], "a Batch, such as penstock.Batch(max_size=32), or None"),
    (ps.node, "name", [3], "a text that is not empty and can be written as UTF-8, or None"),
    (ps.node, "pure", ["yes"], "True or False"),
    (ps.node, "effectful", [1], "True, False or 'unordered'"),
    (ps.node, "runs_on", [["thread"]], "one of 'loop', 'thread', 'process'"),
    (ps.node, "restart", [None, "always"], "one of 'permanent', 'transient', 'temporary'"),
    (ps.node, "restart_on", [ValueError, (ValueError, "OSError"), (KeyboardInterrupt,)], "a tuple of exception"),
    (ps.node, "inbox_capacity", [0], "a whole number of at least 1, or None"),
    (ps.node, "shutdown_seconds", ["1", -1, float("nan"), float("inf")], "not negative, or None"),
    (ps.node, "model", [5], "the name of the model"),
    (half.with_policy, "retry", [3], "a Retry, such as penstock.Retry(3), or None"),
    (half.with_policy, "timeout_seconds", [[1]], "a finite number above 0, or None"),
    (half.with_policy, "fallback", ["none"], "a function of the exception, or None"),
    (half.with_policy, "name", [""], "a text that is not empty"),
    (partial(ps.Retry, 3), "retry_on", [[ValueError], "ValueError", KeyboardInterrupt], "an exception class, or a tup"),
    (partial(ps.Retry, 3), "backoff_seconds", ["1", -1, float("nan"), Decimal(1)], "number that is not negative"),
    (partial(ps.Retry, 3), "max_backoff_seconds", [None, -1], "a finite number that is not negative"),
    (partial(ps.Retry, 3), "jitter", ["0.1", 1.5, -0.1], "a share between 0 and 1"),
    (partial(ps.Batch, 8), "max_wait_seconds", [None, -1, float("inf")], "a finite number that is not negative"),
    (ps.RateLimit, "per_second", ["5", 1j, 0, -1, float("inf"), Decimal(5)], "a finite number above 0"),
    (engine.Engine().deploy, "within_seconds", ["5", 0, float("inf"), float("nan")], "a finite number above 0"),
    (engine.Engine().deploy, "strategy", [1, "simple"], "one of 'one_for_one', 'one_for_all', 'rest_for_one'"),
    (engine.Engine().deploy, "warmup", ["yes"], "True or False"),
    (engine.Engine().deploy, "timeout_seconds", ["3"], "a number of seconds, 0 or more, or None"),
    (engine.Engine, "timeout_seconds", ["3"], "a number of seconds, 0 or more, or None"),
    (ps.ExecutionOptions, "scheduler", [[]], "one of 'auto', 'actors', 'parallel', 'wave', 'sequential'"),
    (partial(engine.Engine().stream, []), "progress", ["yes"], "True or False"),
    (ps.device_node, "batch", [4], "a Batch, such as penstock.Batch(max_size=32), or None"),
    (ps.device_node, "timeout_seconds", ["3"], "a finite number above 0, or None"),
    (ps.device_node, "name", [b"x"], "a text that is not empty and can be written as UTF-8, or None"),
    (ps.device_node, "replicas", ["2"], "a whole number of at least 1"),
    (devices.benchmark, "seconds", ["5"], "a finite number above 0"),
]


@pytest.mark.parametrize(("take", "option", "values", "accepted"), WRONG)
async def test_a_wrong_value_is_refused_where_it_is_given(
    take: Callable[..., Any], option: str, values: list[object], accepted: str
) -> None:
    for value in values:
        given = {option: value}
        with pytest.raises(ps.OptionsError) as caught:
            take(halved, **given) if getattr(take, "__name__", "") == "deploy" else take(**given)(handle)
        assert f"{option}={value!r}" in str(caught.value)
        assert accepted in str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("option", [name for name in inspect.signature(ps.node).parameters if name != "fn"])
def test_every_option_of_a_node_is_checked(option: str) -> None:
    with pytest.raises((ps.OptionsError, TypeError), match=option):
        ps.node(**{option: object()})(handle)  # type: ignore[call-overload]


def test_a_pure_node_has_no_effect() -> None:
    with pytest.raises(ps.OptionsError, match="pure"):
        ps.node(pure=True, effectful=True)(handle)


@pytest.mark.parametrize("record", [ps.Retry(3), ps.Batch(8), ps.ExecutionOptions()], ids=repr)
def test_every_option_of_a_record_is_checked(record: Any) -> None:
    for field in dataclasses.fields(record):
        if field.name != "_":
            with pytest.raises(ps.OptionsError, match=f"{field.name}=<object object"):
                dataclasses.replace(record, **{field.name: object()})


@pytest.mark.parametrize("seconds", [1, 0.5, Fraction(1, 2), np.float32(0.5), np.int64(1)])
def test_numbers_of_every_kind_are_accepted(seconds: Any) -> None:
    assert ps.node(timeout_seconds=seconds)(half.fn).policy.timeout_seconds == seconds
    assert ps.ExecutionOptions(timeout_seconds=seconds).timeout_seconds == seconds
    assert ps.Retry(3, backoff_seconds=seconds).backoff_seconds == seconds


def test_an_option_that_there_is_not_is_answered_with_those_that_there_are() -> None:
    wrong: Any = {"timeout": 3}
    for take in (ps.node, ps.device_node, half.with_policy):
        with pytest.raises(ps.OptionsError, match=r"'timeout' is no option.* \(did you mean timeout_seconds.*retry"):
            take(**wrong)


def test_a_copy_of_a_node_has_no_limit_of_its_own() -> None:
    with pytest.raises(ps.OptionsError, match="'concurrency' belongs to node 'half' itself, and copies share it: decl"):
        half.with_policy(concurrency=8)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def test_a_drain_does_not_begin_with_a_wrong_timeout() -> None:
    async with engine.deploy(halved) as service:
        with pytest.raises(ps.OptionsError, match="timeout_seconds='3': a number of seconds"):
            await service.drain(timeout_seconds="3")  # type: ignore[arg-type]
        assert await service(4) == 2


@pytest.mark.parametrize(("name", "least", "take"), OPTIONS)
def test_what_is_no_whole_number_is_refused_where_one_is_asked_for(
    name: str, least: int, take: Callable[[Any], Any]
) -> None:
    for value in ("2", 2.0, True, least - 1):
        with pytest.raises((ValueError, ps.OptionsError), match=rf"{name}=\(?{re.escape(repr(value))}.*whole number"):
            take(value)
    taken = take(least)
    if hasattr(taken, "close"):
        taken.close()


async def test_priority_may_be_negative_and_is_no_bool() -> None:
    assert ps.ExecutionOptions(priority=-2).priority == -2
    for value in ("2", 2.0, True):
        with pytest.raises(ps.OptionsError, match=f"priority={value!r}: a whole number"):
            ps.ExecutionOptions(priority=value)  # type: ignore[arg-type]
