"""Conversations go to the server that has their beginning in its cache: a simulation, with caches and a clock."""

import heapq
import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from penstock.serving import Breaker, Replica
from penstock.serving.replicas import Prefix, Router

Messages = list[dict[str, Any]]
Choose = Callable[[int, Messages], int]

SYSTEM = {"role": "system", "content": "You are a keeper of rivers. " + "weir " * 40}
BLOCK_TOKENS = 16


@dataclass
class Server:
    """A model server: a cache of blocks of tokens, of which the one that was not read for longest goes first."""

    capacity: int
    blocks: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    tokens: int = 0
    cached: int = 0

    def read(self, messages: Messages) -> int:
        """Read a prompt; return how many of its tokens were not in the cache."""
        words = " ".join(one["content"] for one in messages).split()
        hits, key, is_known = 0, 0, True
        for at in range(0, len(words) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = hash((key, *words[at : at + BLOCK_TOKENS]))
            is_known = is_known and key in self.blocks
            hits += BLOCK_TOKENS * is_known
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) * BLOCK_TOKENS > self.capacity:
            self.blocks.popitem(last=False)
        self.tokens += len(words)
        self.cached += hits
        return len(words) - hits


@dataclass
class World:
    """Conversations of five turns, of which so many at a time wait for an answer, through gateways by chance."""

    servers: int
    gateways: int = 1
    at_once: int = 4
    conversations: int = 20
    capacity: int = 6_144

    def run(self, choose: Choose, began: Callable[[int, int], None]) -> list[Server]:
        """Run it: `choose` returns the server of a request, and `began` hears that one begins (1) or ends (-1)."""
        servers = [Server(self.capacity) for _ in range(self.servers)]
        chance = random.Random(1)
        talks: list[Messages] = [
            [SYSTEM, {"role": "user", "content": f"{number} " + words_of(number, 100)}]
            for number in range(self.conversations)
        ]
        now, busy = 0.0, list[tuple[float, int, int]]()
        for turn in range(5):
            for number in chance.sample(range(self.conversations), self.conversations):
                if len(busy) == self.at_once:
                    now, _, ended = heapq.heappop(busy)
                    began(ended, -1)
                chosen = choose(number, talks[number])
                began(chosen, 1)
                company = 1 + sum(at == chosen for *_, at in busy)
                seconds = (servers[chosen].read(talks[number]) + 80) * company
                heapq.heappush(busy, (now + seconds, number, chosen))
                talks[number] = [
                    *talks[number], {"role": "assistant", "content": words_of((number, -turn - 1), 8)},
                    {"role": "user", "content": words_of((number, turn), 25)},
                ]  # fmt: skip
            while busy:
                now, _, ended = heapq.heappop(busy)
                began(ended, -1)
        return servers

    def best(self) -> float:
        """Return the cached tokens if each server has its own conversations, as many as each other."""
        servers = self.run(lambda number, _: number % self.servers, lambda _, __: None)
        return sum(one.cached for one in servers)

    def routed(self) -> tuple[float, float]:
        """Return the cached tokens beside the best possible, and the tokens of the busiest server beside the mean."""
        all_urls = [f"http://10.0.0.{number}:8000/v1" for number in range(1, self.servers + 1)]
        gateways = [[Replica(url, Breaker()) for url in all_urls] for _ in range(self.gateways)]
        routers, chance, asked = [Router(2) for _ in gateways], random.Random(2), list[tuple[int, int]]()

        def choose(_: int, messages: Messages) -> int:
            at = chance.randrange(self.gateways)
            found, _share = routers[at].choose(Prefix.of_messages(messages, "smol", None), gateways[at])
            asked.append((at, gateways[at].index(found)))
            return asked[-1][1]

        def began(server: int, change: int) -> None:
            at = asked[-1][0] if change > 0 else next(at for at, one in asked if one == server)
            if change < 0:
                asked.remove((at, server))
            gateways[at][server].in_flight += change

        servers = self.run(choose, began)
        assert not any(one.in_flight for replicas in gateways for one in replicas)
        tokens = [one.tokens for one in servers]
        return sum(one.cached for one in servers) / self.best(), max(tokens) * len(tokens) / sum(tokens)


def words_of(seed: object, count: int) -> str:
    chance = random.Random(str(seed))
    return " ".join(str(chance.randrange(1000)) for _ in range(count))


def test_each_server_has_its_own_conversations() -> None:
    for at_once, least in ((1, 0.98), (4, 0.98), (16, 0.93)):
        share, busiest = World(servers=2, at_once=at_once).routed()
        assert (share >= least, busiest <= 1.4) == (True, True), (at_once, share, busiest)
    share, busiest = World(servers=2, at_once=4, conversations=1000, capacity=400_000).routed()
    assert (share >= 0.98, busiest <= 1.1) == (True, True), (share, busiest)


@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize("gateways", [1, 2, 4])
def test_gateways_that_know_nothing_of_each_other_agree(servers: int, gateways: int) -> None:
    for at_once in (1, 2 * servers, 8 * servers):
        world = World(servers, gateways, at_once, 25 * servers, capacity=7_000)
        share, busiest = world.routed()
        assert (share >= (0.92 if gateways == 1 else 0.87), busiest <= 1.35) == (True, True), (at_once, share, busiest)


def test_what_differs_before_the_first_question_is_another_conversation() -> None:
    one, two = (Prefix.of_messages([SYSTEM, {"role": "user", "content": "hi"}], "m", salt) for salt in ("a", "b"))
    assert not {*one.keys} & {*two.keys}
    assert one.start != two.start
    router, replicas = Router(2), [Replica(f"http://{name}/v1", Breaker()) for name in "ab"]
    router.choose(Prefix.of_messages([SYSTEM], "m"), replicas)
    for number in range(20):  # only the system message is alike, so no conversation counts as known
        prefix = Prefix.of_messages([SYSTEM, {"role": "user", "content": str(number)}], "m")
        assert router.choose(prefix, replicas)[1] == 0.0
        assert router.choose(prefix, replicas)[1] == 1.0


def test_a_request_without_messages_goes_to_a_server_too() -> None:
    replicas = [Replica(f"http://{name}/v1", Breaker()) for name in "ab"]
    assert Router(2).choose(Prefix.of_messages([], "m", None), replicas)[0] in replicas


def test_conversations_that_are_remembered_take_little_memory() -> None:
    router, replicas = Router(2), [Replica(f"http://{name}/v1", Breaker()) for name in "abcd"]
    tracemalloc.start()
    try:
        for number in range(20_000):
            router.choose(Prefix([number, -number], [0.5, 1.0], b""), replicas)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.timed
def test_a_choice_takes_microseconds() -> None:
    router, replicas = Router(2), [Replica(f"http://{name}/v1", Breaker()) for name in "abcd"]
    seconds = list[float]()
    for number in range(10_000):
        talk = [{"role": "user", "content": f"{number} {at} ".ljust(800, "x")} for at in range(20)]
        began = perf_counter()
        router.choose(Prefix.of_messages(talk, "m", None), replicas)
        seconds.append(perf_counter() - began)
    assert median(seconds) < 50e-6
