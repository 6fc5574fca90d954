"""What of tests depends on real time: the clocks that they read, and their sleeps. The list may only shrink.

A busy machine makes everything slow, and nothing wrong: so a test waits for an event, moves a clock of its own, or runs
in virtual time. The uses that are left poll another process or thread, are a guard against hanging, or stand in a
program that is to take its time. No result depends on how long they take.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.counting import tree_of

TESTS = Path(__file__).parents[1]

# How many uses each file has.
USES = {
    "actors/test_threads.py": 1,
    "backends/broker.py": 3,
    "backends/ending_consumer.py": 2,
    "backends/kafka_consumer.py": 2,
    "backends/sent.py": 3,
    "backends/slow_requests.py": 1,
    "backends/test_consumer_ends.py": 5,
    "backends/server.py": 3,
    "backends/test_kafka.py": 4,
    "bad_days/process_nodes.py": 1,
    "bad_days/test_threads_and_processes.py": 3,
    "cluster/machines.py": 3,
    "cluster/scenarios.py": 4,
    "cluster/test_dispatch.py": 2,
    "cluster/test_ray.py": 3,
    "conftest.py": 2,
    "consume/fake_kafka.py": 4,
    "consume/memory.py": 6,
    "consume/test_redis.py": 11,
    "data/test_iterate.py": 3,
    "devices/test_bad_days.py": 2,
    "devices/test_batches.py": 1,
    "devices/test_buffers.py": 1,
    "devices/test_busy_devices.py": 5,
    "devices/test_device_actors.py": 2,
    "devices/test_device_profiles.py": 2,
    "devices/test_donation_under_cancellation.py": 1,
    "engine/test_source_check.py": 1,
    "examples/programs.py": 7,
    "examples/test_approvals.py": 3,
    "examples/test_consumer.py": 1,
    "examples/test_training_feed.py": 1,
    "house/test_tours.py": 1,
    "leaks.py": 3,
    "promises/forks.py": 2,
    "promises/scenario.py": 2,
    "promises/ways.py": 2,
    "runtime/hedged_process.py": 2,
    "runtime/process_nodes.py": 4,
    "runtime/test_batches_of_many_callers.py": 2,
    "runtime/test_process_nodes.py": 1,
    "runtime/test_retries.py": 2,
    "saving/killed.py": 1,
    "saving/test_durable.py": 8,
    "saving/test_postgres.py": 1,
    "saving/test_runs.py": 2,
    "saving/written.py": 1,
    "serving/asgi_app.py": 1,
    "serving/openai_server.py": 3,
    "serving/streaming_app.py": 4,
    "serving/test_front.py": 1,
    "serving/test_llama.py": 1,
    "serving/test_routing.py": 2,
    "serving/test_several_workers.py": 1,
    "soak/__main__.py": 4,
    "soak/clients.py": 2,
    "soak/watch.py": 1,
    "soak/world.py": 5,
    "studio/alive.py": 8,
    "studio/browser.py": 2,
    "studio/test_expose.py": 1,
    "studio/test_look.py": 4,
    "studio/test_studio.py": 5,
    "studio/test_studio_in_browser.py": 4,
    "telemetry/test_profile_command.py": 1,
    "telemetry/test_verdict.py": 3,
    "telemetry/test_waits_in_spans.py": 3,
    "testing/test_virtual_clock.py": 2,
    "workers/both.py": 6,
    "workers/jobs.py": 4,
    "workers/test_both.py": 1,
    "workers/test_pool.py": 5,
}

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}
# In files that name one of these, coroutines sleep in virtual time.
VIRTUAL = {
    "VirtualClockLoop", "VirtualTime", "cancel_at_every_step", "cancelled_at_every_step", "explore", "interleavings",
    "run_seeded", "run_virtual", "virtual",
}  # fmt: skip
# A sleep that is as long stands for something that never ends.
FOR_EVER_SECONDS = 30
# In the text of a program that another process runs.
IN_TEXT = re.compile(rf"\b(?:{'|'.join(CLOCKS)})(?:_ns)?\(|\btime\.(?:time|sleep)\(")


def uses_in(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields what reads a clock or sleeps in real time."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    of_time = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=attr) if (
                attr in ("sleep", "time") or attr.removesuffix("_ns") in CLOCKS
            ):
                yield node
            case ast.Name(id=name, ctx=ast.Load()) if name in of_time:
                yield node
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="asyncio" | "anyio"), attr="sleep"), args=[seconds, *_]
            ) if not names & VIRTUAL and not _is_no_time_or_for_ever(seconds):
                yield node
            case ast.Constant(value=str(text)):
                yield from [node] * len(IN_TEXT.findall(text))
            case _:
                pass


def _is_no_time_or_for_ever(seconds: ast.expr) -> bool:
    return (
        isinstance(seconds, ast.Constant)
        and isinstance(seconds.value, int | float)
        and not 0 < seconds.value < FOR_EVER_SECONDS
    )


def found_uses(folder: Path) -> dict[str, int]:
    counts = Counter({
        path.relative_to(folder).as_posix(): sum(1 for _ in uses_in(tree_of(path)))
        for path in sorted(folder.rglob("*.py"))
        if path != Path(__file__)
    })  # fmt: skip
    return dict(+counts)


def test_no_more_tests_than_before_depend_on_real_time() -> None:
    found = found_uses(TESTS)
    raised = {path: count for path, count in found.items() if count > USES.get(path, 0)}
    assert raised == {}, "wait for an event, or run in virtual time: CONTRIBUTING.md, Wait for rest"
    assert found == USES, "write the smaller number here"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import time\ntime.sleep(1)\nbegan = time.perf_counter()\ntime.monotonic_ns()", 3),
        ("from time import sleep, perf_counter as now\nsleep(1)\nnow()", 2),
        ("import datetime\ndatetime.time(1, 2)\nx.is_monotonic", 0),
        ("async def f():\n    await asyncio.sleep(0)\n    await asyncio.sleep(3600)\n    await asyncio.sleep(0.1)", 1),
        ("async def f():\n    await anyio.sleep(seconds)", 1),
        ("run_virtual(lambda: asyncio.sleep(1))", 0),
        ("def test(virtual):\n    asyncio.sleep(1)", 0),
        ("PROGRAM = 'import time; time.sleep(0.1); time.sleep(0.2)'", 2),
    ],
)
def test_a_use_is_seen(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "one.py").write_text(text)
    assert found_uses(tmp_path) == ({"one.py": count} if count else {})
