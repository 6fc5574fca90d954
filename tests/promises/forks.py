"""Items in threads and worker processes, while the process is forked at random moments: a program for one seed."""

import asyncio
import random
import sys
import warnings
from collections import Counter

from penstock import engine
from tests.bad_days.forking import fork, work

ROUNDS = 4
ITEMS = 24


def nothing() -> None:
    """Most forked children do nothing."""


def work_of_its_own() -> None:
    assert asyncio.run(engine.run(work(2))) == 9


async def fork_now_and_then(rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 4)):
        await asyncio.sleep(rng.choice([0, 0.001, 0.02]))
        wait = fork("multiprocessing", work_of_its_own if rng.random() < 0.1 else nothing)
        if rng.random() < 0.5:
            await asyncio.to_thread(wait)
        else:
            wait()  # and blocks the event loop in the meantime


async def play(seed: int) -> Counter[str]:
    """Run calls, some of which are cancelled, while the process forks; return how the calls ended."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    async with engine.Engine() as own:
        for _ in range(ROUNDS):
            async with own.deploy(work, max_in_flight=rng.choice([1, 4, ITEMS])) as service:
                calls = [asyncio.create_task(service(x)) for x in range(ITEMS)]
                forks = asyncio.create_task(fork_now_and_then(rng))
                cancelled = set(rng.sample(range(ITEMS), rng.choice([0, 3])))
                for x in cancelled:
                    await asyncio.sleep(rng.choice([0, 0.005]))
                    calls[x].cancel()
                await forks
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for x, outcome in enumerate(outcomes):
                if x in cancelled and isinstance(outcome, asyncio.CancelledError):
                    ends["cancelled"] += 1
                else:
                    assert outcome == (x + 1) ** 2, f"item {x} under seed {seed}: {outcome!r}"
                    ends["done"] += 1
        processes = own.statistics().processes
        assert processes is not None
        assert processes.died == 0
    return ends


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # from Python 3.12 on, every fork of a process with threads warns
    found = asyncio.run(play(int(sys.argv[1])))
    assert found.total() == ROUNDS * ITEMS
    print("played")
