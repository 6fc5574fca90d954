"""A consumer whose process a test ends: `python -m tests.backends.ending_consumer SERVERS TOPIC STATE`.

It says "ready" when it is in the state: starting, idle, busy (a message takes long), twin (the same, with an instance
id that another may have), stale (only the first message ends, and is not settled), or letters (a message fails when a
line comes from stdin). In the state steady, which it does not say, each message takes a moment. At its end it prints
how many messages have ended.
"""

import asyncio
import sys
from typing import Any

import penstock as ps
from penstock import consume, engine

DRAIN_SECONDS = 2.0
SETTLE_SECONDS = {"stale": 600.0, "steady": 0.1}
handled: list[str] = []


@ps.node
async def work(state: str) -> None:
    if state == "steady":
        await asyncio.sleep(0.02)
        return
    print("ready", flush=True)
    if state == "letters":
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        print("failed", flush=True)
        raise ValueError(state)
    handled.append(state)
    if state != "stale" or len(handled) > 1:
        await asyncio.Event().wait()


handle = ps.graph(work)


async def main(servers: str, topic: str, state: str) -> None:
    settings: dict[str, Any] = {"session_timeout_ms": 3000, "heartbeat_interval_ms": 300}
    if state == "twin":
        settings["group_instance_id"] = "one"
    source = consume.Kafka(topic, group_id=topic, bootstrap_servers=servers, **settings)
    dead_letters = source.letters_to(f"{topic}.dead")
    async with engine.deploy(handle) as service:
        consumer = consume.Consumer(
            service,
            source,
            lambda message: handle(state),
            dead_letters=dead_letters,
            drain_seconds=DRAIN_SECONDS,
            settle_seconds=SETTLE_SECONDS.get(state, 1.0),
        )
        running = asyncio.create_task(consume.run(consumer))
        await asyncio.sleep(0)  # `run` has its handlers now
        while state == "idle" and consumer.statistics().lag != 0:
            await asyncio.sleep(0.05)
        if state in {"starting", "idle"}:
            print("ready", flush=True)
        try:
            statistics = await running
        except ps.OptionsError as error:
            print(error, flush=True)
        else:
            print(statistics.ended, "ended", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
