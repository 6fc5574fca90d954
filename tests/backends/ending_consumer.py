"""A consumer whose process a test ends: `python -m tests.backends.ending_consumer SERVERS TOPIC STATE`.

It says "ready" when it is in the state: starting, idle, busy (a message takes long), stale (only the first message
ends, and is not settled), or letters (a message fails when a line comes from stdin). At its end it prints how many
messages have ended.
"""

import asyncio
import sys

import penstock as ps
from penstock import consume, engine

handled: list[str] = []


@ps.node
async def work(state: str) -> None:
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
    times = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 500}
    source = consume.Kafka(topic, group_id=topic, bootstrap_servers=servers, **times)
    dead_letters = source.letters_to(f"{topic}.dead")
    async with engine.deploy(handle) as service:
        consumer = consume.Consumer(
            service,
            source,
            lambda message: handle(state),
            dead_letters=dead_letters,
            drain_seconds=2.0,
            settle_seconds=600 if state == "stale" else 1,
        )
        running = asyncio.create_task(consume.run(consumer))
        await asyncio.sleep(0)  # `run` has its handlers now
        while state == "idle" and consumer.statistics().lag != 0:
            await asyncio.sleep(0.05)
        if state in {"starting", "idle"}:
            print("ready", flush=True)
        statistics = await running
        print(statistics.ended, "ended", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
