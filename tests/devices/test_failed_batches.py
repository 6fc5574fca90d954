"""A failed batch is run again in parts: few parts, and each item fails or succeeds by itself."""

import asyncio
import math
import random
from typing import Any

import jax
import numpy as np

import penstock as ps
from penstock import engine

MOST = 16


def refuse(x: Any) -> Any:
    if (np.asarray(x) < 0).any():
        raise ValueError(f"refused {sorted({*np.asarray(x).ravel().tolist()})}")
    return np.asarray(x)


@ps.device_node(device="cpu", batch=ps.Batch(MOST, max_wait_seconds=0.2))
def refusing(x: Any) -> Any:
    return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="broadcast_all") * 2


async def test_items_that_fail_are_found_in_few_runs_and_no_others_are_blamed(effort: int) -> None:
    chance, cases = random.Random(7), [(MOST, {place}) for place in (0, 6, MOST - 1)]
    cases += [(1, {0}), (MOST, set(range(MOST)))]
    for _ in range(4 * effort):
        count = chance.randint(1, MOST)
        cases.append((count, {chance.randrange(count) for _ in range(chance.randint(1, count))}))
    async with engine.deploy(ps.graph(refusing)) as service:
        for count, bad in cases:
            before = refusing.batch_statistics()
            values = [np.float32(-1 - n if n in bad else n) for n in range(count)]
            results = await asyncio.gather(*map(service, values), return_exceptions=True)
            for number, result in enumerate(results):
                if number in bad:  # its own error, from a run in which it was alone
                    assert f"refused [{-1.0 - number}]" in str(result)
                else:
                    assert result == 2 * number
            runs = refusing.batch_statistics().batches - before.batches
            assert runs <= 1 + min(2 * len(bad) * math.ceil(math.log2(count)) if count > 1 else 0, 2 * count)
