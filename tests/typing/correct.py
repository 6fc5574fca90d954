"""Correct use, which mypy and pyright must accept; its functions are not called. `wrong.py` has code to refuse."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self, assert_type

import jax
import numpy as np
from starlette.applications import Starlette

import penstock as ps
from penstock import asgi, devices, engine, telemetry, testing
from penstock.testing import faults


@dataclass
class Hit:
    url: str
    score: float


@ps.node(concurrency=8, retry=ps.Retry(attempts=3, backoff_seconds=0.1, retry_on=(OSError,)), timeout_seconds=5)
async def fetch(url: str) -> bytes:
    return url.encode()


@ps.node(runs_on="thread", capacity=4, max_bytes=1 << 20, fallback=lambda error: [])
def tokenize(page: bytes, separator: bytes = b" ", *, limit: int = 10) -> list[bytes]:
    return page.split(separator)[:limit]


@ps.node
async def rank(tokens: list[bytes], popularity: float = 0.0) -> list[Hit]:
    return [Hit("a", popularity)] * len(tokens)


@ps.node(model="gpt-5", retry=ps.Retry(attempts=2))
async def summarise(hit: Hit) -> str:
    return hit.url


@ps.node
async def fetch_elsewhere(url: str) -> bytes:
    return url.encode()


@ps.node(failover=fetch_elsewhere, cache=ps.Cache(max_bytes=1 << 20, ttl_seconds=60, key=lambda url: url.lower()))
async def fetch_safely(url: str) -> bytes:
    return url.encode()


@ps.node(hedge=ps.Hedge(after_seconds=0.2), retry=ps.Retry(3, wait=ps.retry_after))
async def fetch_soon(url: str) -> bytes:
    return url.encode()


@ps.node(pure=True)
def best(hits: list[Hit]) -> Hit:
    return hits[0]


@ps.node(effectful=True, name="store")
async def save(hit: Hit) -> None: ...


@ps.node
async def is_good(hit: Hit) -> bool:
    return hit.score > 1


@ps.node
def is_best(hit: Hit) -> bool:
    return hit.score > 2


@ps.node
def first_hit(hit: Hit) -> Hit:
    return hit


@ps.node
class Index:
    def __init__(self, path: str, *, size: int = 3) -> None:
        self.path = path

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def __call__(self, hit: Hit, weight: float = 1.0) -> Hit:
        return hit


@ps.node(concurrency=2)
class Counter:
    def __call__(self, hit: Hit) -> int:
        return 1


class Client:
    @ps.node
    async def get(self, url: str, retries: int = 1) -> bytes:
        return url.encode()

    @ps.node(concurrency=3)
    def parse(self, page: bytes) -> str:
        return page.decode()


@ps.node(
    batch=ps.Batch(32, max_wait_seconds=0.004, max_queue=100, max_cost=8192, cost=len), concurrency=2, timeout_seconds=3
)
async def embed(texts: list[str]) -> list[float | Exception]:
    return [float(len(text)) if text else ValueError("empty") for text in texts]


@ps.node(batch=ps.Batch(8), runs_on="thread")
def score(hits: Sequence[Hit]) -> tuple[float, ...]:
    return tuple(hit.score for hit in hits)


class Model:
    @ps.node(batch=ps.Batch(8))
    async def answer(self, questions: list[str]) -> list[bytes | Exception]:
        return [question.encode() for question in questions]


@ps.node(name="tripler", capacity=3, shutdown_seconds=2.5)
class Tripler(ps.Actor[int, str]):
    def __init__(self, sign: str) -> None:
        self.sign = sign

    async def loop(self, inbox: ps.Inbox[ps.Work[int, str]], /) -> None:
        while True:
            first = await inbox.get()
            for work in [first, *inbox.take_nowait(3)]:
                assert_type(work, ps.Work[int, str])
                assert_type(
                    (work.value, work.priority, work.deadline, work.cancelled), tuple[int, int, float | None, bool]
                )
                if work.value < 0:
                    work.fail(ValueError("negative"))
                else:
                    work.finish(3 * work.value * self.sign)


@ps.node
class Decoder(ps.StreamActor[str, int]):
    async def loop(self, inbox: ps.Inbox[ps.StreamWork[str, int]], /) -> None:
        while True:
            work = await inbox.get()
            assert_type(work.value, str)
            if work.put_nowait(len(work.value)):
                work.finish()


@ps.node
class Chooser(ps.StreamActor[tuple[str, int, bytes], int]):
    async def loop(self, inbox: ps.Inbox[ps.StreamWork[tuple[str, int, bytes], int]], /) -> None:
        while True:
            work = await inbox.get()
            assert_type(work.value, tuple[str, int, bytes])
            work.finish()


@ps.node
class Pairs(ps.Actor[tuple[int, str], float]):
    async def loop(self, inbox: ps.Inbox[ps.Work[tuple[int, str], float]], /) -> None:
        while True:
            (await inbox.get()).finish(0.0)


triple, decode, choose, pairs = Tripler("a"), Decoder(), Chooser(), Pairs()
limited = ps.RateLimit(per_second=10, burst=5)


@ps.graph
async def own_loops(text: str) -> str:
    assert_type(await embed(text), float)
    assert_type(await limited(text), str)
    assert_type(await score(await limited(Hit(text, 0))), float)
    return await triple(3)


async def own_loops_outside() -> None:
    assert_type(triple, Tripler)
    assert_type(await triple(3), str)
    assert_type(await Model().answer("why"), bytes)
    assert_type(await embed("a"), float)
    assert_type(await limited(3), int)
    assert_type([part async for part in decode("a")], list[int])
    assert_type(await pairs(1, "a"), float)
    assert_type(await pairs((1, "a")), float)
    assert_type([part async for part in choose("a", 1, b"")], list[int])
    assert_type(await embed.with_policy(name="other", timeout_seconds=2)("a"), float)


@dataclass(frozen=True)
class Settings:
    strategy: engine.Strategy = "rest_for_one"
    restart: engine.RestartMode = "transient"
    runs_on: engine.RunsOn = "loop"
    scheduler: engine.Scheduler = "actors"


def of_settings(settings: Settings) -> engine.Service[[str], str]:
    @ps.node(restart=settings.restart, runs_on=settings.runs_on)
    class Configured:
        def __call__(self, text: str) -> str:
            return text

    configured = Configured()

    @ps.graph
    async def graph(text: str) -> str:
        return configured(text)

    return engine.deploy(graph, strategy=settings.strategy, scheduler=settings.scheduler)


async def states() -> None:
    async with of_settings(Settings()) as service:
        state: engine.ServiceState = service.state
        assert_type(service.statistics().actors[0].state, engine.ActorState | None)
        assert_type(state, engine.ServiceState)


async def own_loops_alone() -> None:
    inbox, outcomes = testing.inbox([1, 2])
    await triple.loop(inbox)
    assert_type(outcomes[0].done(), bool)
    words, readers = testing.stream_inbox(["a"], capacity=3)
    await decode.loop(words)
    async for _ in readers[0]:
        await readers[0].aclose()


index, counter, client = Index("here", size=4), Counter(), Client()


@ps.graph
async def search(url: str, popularity: float = 1.0) -> list[Hit]:
    tokens = tokenize(await fetch(url), limit=3)
    assert_type(tokens, list[bytes])
    return await rank(tokens, popularity)


@ps.graph
async def first(url: str, *, weight: float = 1.0) -> Hit:
    hits = await search(url)
    assert_type(hits, list[Hit])
    hit = await index(best(hits), weight)
    assert_type(hit, Hit)
    await save(hit)
    assert_type(counter(hit), int)
    return hit


@ps.graph
async def judge(answer: str, other: Hit) -> str:
    assert_type(ps.apply(len, answer), int)
    assert_type(ps.apply(lambda: 3), int)
    assert_type(await ps.apply(as_hits, answer), list[Hit])
    return ps.apply(lambda a, b: f"Judge {a} against {b.url}", answer, other)


async def as_hits(text: str) -> list[Hit]:
    return [Hit(text, 0)]


@ps.graph
async def warm_up() -> int:
    return 3


async def nodes() -> None:
    assert_type(best([]), Hit)
    assert_type(await fetch("a"), bytes)
    assert_type(index, Index)
    named = fetch.with_policy(name="slow", timeout_seconds=None, retry=None, fallback=lambda error: b"")
    assert_type(await named("a"), bytes)
    assert_type(best.with_policy(fallback=lambda error: Hit("", 0))([]), Hit)
    assert_type(await fetch.named("news")("a"), bytes)
    assert_type(await client.get.named("other")("a", retries=2), bytes)
    assert_type(await client.get("a", retries=2), bytes)
    assert_type(client.parse(b""), str)
    assert_type(Client.parse(client, b""), str)
    assert_type(await client.get.with_policy(name="other")("a"), bytes)


@ps.graph()
async def with_parentheses(url: str) -> bytes:
    return await fetch(url)


def chains() -> None:
    assert_type(with_parentheses("a"), ps.Call[bytes])
    assert_type((fetch >> tokenize)("a"), ps.Call[list[bytes]])
    assert_type((fetch >> tokenize >> rank)("a"), ps.Call[list[Hit]])
    assert_type((search >> best >> index)("a", popularity=2.0), ps.Call[Hit])
    assert_type((best >> first_of)([]), ps.Call[str])
    assert_type((index >> is_good)(Hit("", 0), weight=2.0), ps.Call[bool])
    assert_type((counter >> double)(Hit("", 0)), ps.Call[int])
    assert_type((index >> first_of)(Hit("", 0)), ps.Call[str])


def graphs_of_one_node() -> None:
    assert_type(ps.graph(fetch)("a"), ps.Call[bytes])
    assert_type(ps.graph(best)([]), ps.Call[Hit])
    assert_type(ps.graph(tokenize)(b"", limit=3), ps.Call[list[bytes]])
    assert_type(ps.graph(embed)("a"), ps.Call[float])
    assert_type(ps.graph(letters)("a"), ps.Call[AsyncIterator[str]])
    assert_type(ps.graph(client.get)("a", retries=2), ps.Call[bytes])
    assert_type(ps.graph(index)(Hit("", 0), weight=2.0), ps.Call[Hit])
    assert_type(ps.graph(triple)(3), ps.Call[str])
    assert_type(ps.graph(decode)("a"), ps.Call[AsyncIterator[int]])
    assert_type(engine.deploy(ps.graph(embed)), engine.Service[[str], float])


@ps.node
async def letters(text: str) -> AsyncIterator[str]:
    for letter in text:
        yield letter


@ps.node
def double(number: int) -> int:
    return 2 * number


@ps.graph
async def first_of(hit: Hit) -> str:
    return hit.url


async def calls(urls: list[str], more: AsyncIterator[str]) -> None:
    call = search("a")
    assert_type(call, ps.Call[list[Hit]])
    assert_type(await call, list[Hit])
    assert_type(await engine.run(call, timeout_seconds=3.0, scheduler="parallel"), list[Hit])
    assert_type(await engine.run(first("a", weight=2.0)), Hit)
    assert_type(await engine.run(warm_up), int)
    assert_type(await engine.run(warm_up()), int)
    async with engine.stream((search(url) for url in urls), max_in_flight=4, ordered=False) as results:
        assert_type(results, engine.Stream[list[Hit]])
        await results.wait_started()
        async for hits in results:
            assert_type(hits, list[Hit])
        async for outcome in results.outcomes():
            assert_type(outcome, engine.Outcome[list[Hit]])
            assert_type(outcome.value, list[Hit] | None)
            assert_type(outcome.error, Exception | None)
            assert_type(outcome.index, int)
        assert_type(results.position, int)
        assert_type(results.statistics(), engine.StreamStatistics)
    assert_type(engine.stream(search(url) async for url in more), engine.Stream[list[Hit]])
    assert_type(engine.stream([first("a")], progress=True, ordered=False), engine.Stream[Hit])
    tagged = ps.tagged(first("a"), b"offset")
    assert_type(tagged, ps.Call[Hit, bytes])
    assert_type(tagged.tag, bytes)
    assert_type(ps.tagged(telemetry.continued(first("a"), {}), 1), ps.Call[Hit, int])
    assert_type(telemetry.continued(tagged, {}), ps.Call[Hit, bytes])
    assert_type(await engine.run(tagged), Hit)
    plain: ps.Call[Hit] = tagged
    assert_type(plain, ps.Call[Hit, Any])
    async for each in engine.stream([tagged]).outcomes():
        assert_type(each, engine.Outcome[Hit, bytes])
        assert_type(each.tag, bytes)
    assert_type(engine.plan(search), engine.Plan)


async def deployments(urls: list[str]) -> None:
    async with engine.deploy(search, first, warm_up, max_queue=10, max_in_flight=3) as service:
        assert_type(await service("a", popularity=3.0), list[Hit])
        assert_type(await service.run(first("a"), priority=2, timeout_seconds=1), Hit)
        assert_type(await service.map(first(url) for url in urls), list[Hit])
        assert_type(await service.map([first("a")], progress=True), list[Hit])
        assert_type(service.stream([search("a")], on_error="skip"), engine.Stream[list[Hit]])
        assert_type(service.stream(ps.tagged(first(url), url) for url in urls), engine.Stream[Hit, str])
        assert_type(await service.map(ps.tagged(first(url), url) for url in urls), list[Hit])
        await service.wait_ready()
        await service.drain(timeout_seconds=3)
        assert_type(service.statistics(), engine.ServiceStatistics)
    async with engine.Engine(max_workers=4) as mine:
        assert_type(await mine.run(search("a")), list[Hit])
        assert_type(mine.stream([first("a")]), engine.Stream[Hit])
        assert_type(mine.stream([ps.tagged(first("a"), 1)]), engine.Stream[Hit, int])
        assert_type(await mine.deploy(first)("a", weight=0.5), Hit)
        supervised = mine.deploy(first, strategy="rest_for_one", max_restarts=5, within_seconds=60, max_queue=3)
        assert_type(await supervised("a"), Hit)


@ps.graph
async def control(hit: Hit, number: int, urls: list[str]) -> list[bytes]:
    async def improve(worse: Hit) -> Hit:
        return await index(worse)

    assert_type(await ps.cond(await is_good(hit), index, improve, hit), Hit)
    assert_type(await ps.switch(number, (improve, index, improve), hit), Hit)
    assert_type(await ps.cond(await is_good(hit), first_hit, improve, hit), Hit)
    assert_type(await ps.cond(await is_good(hit), first_hit, lambda hit: hit, hit), Hit)
    assert_type(await ps.switch(number, (first_hit, improve, lambda hit: hit), hit), Hit)
    assert_type(await ps.while_loop(is_best, first_hit, hit), Hit)
    assert_type(await ps.while_loop(is_good, improve, hit, max_iterations=3), Hit)
    assert_type(await ps.while_loop(is_best, improve, hit), Hit)
    assert_type(await ps.map_each(first_of, [hit]), list[str])
    assert_type(await ps.map_each(best, [[hit], [hit]], concurrency=2), list[Hit])
    return await ps.map_each(fetch, urls)


def replacing(index: Index) -> None:
    async def fake(url: str) -> bytes:
        return b""

    async def fake_index(hit: Hit, weight: float = 1.0) -> Hit:
        return hit

    assert_type(testing.replace(fetch, fake), AbstractContextManager[None])
    assert_type(testing.replace(index, fake_index), AbstractContextManager[None])

    @ps.node(batch=ps.Batch(20))
    async def embed(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    async def fake_embed(text: str) -> int:
        return 1

    @ps.node(runs_on="thread")
    def read(name: str) -> str:
        return name

    async def fake_read(name: object) -> str:
        return "fake"

    @ps.node
    async def ask(client: dict[str, str], name: str) -> str:
        return client[name]

    async def fake_ask(client: object, name: str) -> str:
        return "fake"

    assert_type(testing.replace(embed, fake_embed), AbstractContextManager[None])
    assert_type(testing.replace(read, fake_read), AbstractContextManager[None])
    assert_type(testing.replace(ask, fake_ask), AbstractContextManager[None])


def options() -> None:
    with ps.execution_options(max_workers=3, ordered=False, on_error="skip"):
        ps.set_execution_options(scheduler="wave", timeout_seconds=None)
    assert_type(ps.ExecutionOptions(max_in_flight=3).max_in_flight, int)


async def inside_a_handler() -> None:
    info = ps.current()
    assert_type(info.remaining_seconds(), float | None)
    assert_type((info.graph, info.node, info.item, info.attempt), tuple[str, str, int, int])
    info.check_cancelled()


async def failing_over() -> None:
    assert_type(await fetch_safely("a"), bytes)
    assert_type(await fetch.with_policy(failover=fetch_elsewhere)("a"), bytes)
    assert_type(await fetch_soon.with_policy(failover=None, hedge=None, cache=None)("a"), bytes)
    assert_type(ps.retry_after(OSError()), float | None)


def drawing() -> str:
    return search.to_mermaid() + search.to_dot() + str(search) + repr(search)


def with_faults() -> None:
    with faults.inject("node.call", faults.Raise(OSError("down")), node=fetch, at=range(1, 3)) as injected:
        assert_type(injected[0], faults.Injection)
        assert_type((len(injected), injected.passes), tuple[int, int])
        assert_type(injected[0].node, str)
    with faults.inject("worker.process", faults.Kill(), probability=0.1, seed=3, optional=True):
        pass


@ps.device_node
def normalised(x: devices.Array) -> jax.Array:
    raise NotImplementedError


@ps.graph
async def unit(x: devices.Array) -> jax.Array:
    return normalised(x)


def arrays_of_both_kinds(of_jax: jax.Array) -> None:
    assert_type([unit(of_jax), unit(np.ones(3))], list[ps.Call[jax.Array]])


def train_step(state: dict[str, float], batch: list[int]) -> tuple[dict[str, float], float]:
    return state, float(len(batch))


async def functions_on_a_device() -> None:
    device = devices.actor("cpu")
    step = device.bind(train_step, donate_argnums=(0,), ready=False)
    assert_type(step, devices.BoundFunction[dict[str, float], list[int], tuple[dict[str, float], float]])
    assert_type(await step({}, [1]), tuple[dict[str, float], float])
    assert_type(await device.run(train_step, {"a": 1.0}, [1]), tuple[dict[str, float], float])
    parameters: dict[str, jax.Array] = {}
    assert_type(await device.put(parameters), dict[str, jax.Array])
    assert_type(await device.put(np.ones(3)), jax.Array)


@ps.node(effectful=True)
async def tell(hit: Hit) -> str:
    await ps.emit(hit)
    return hit.url


@ps.graph
async def telling(hit: Hit) -> str:
    return await tell(hit)


@ps.node(effectful=True)
async def spelled(hit: Hit) -> AsyncIterator[str]:
    for letter in hit.url:
        await ps.emit(hit)
        yield letter


@ps.graph
async def spelling(hit: Hit) -> AsyncIterator[str]:
    return spelled(hit)


async def events(hit: Hit) -> None:
    async with engine.stream(telling(hit), events=Hit, capacity=4, timeout_seconds=1) as told:
        assert_type(told, engine.EventStream[Hit, str])
        async for event in told:
            assert_type(event, engine.Event[Hit])
            assert_type((event.value.score, event.node, event.item, event.attempt), tuple[float, str, int, int])
        assert_type(await told.result(), str)
    async with engine.deploy(telling, spelling) as service:
        async with service.stream(telling(hit), events=Hit, priority=1) as told:
            assert_type(await told.result(), str)
        async with service.stream(spelling(hit), events=Hit) as both:
            assert_type(both, engine.Stream[engine.Event[Hit] | engine.Value[str]])
            async for item in both:
                if item.kind == "event":
                    assert_type(item.value, Hit)
                else:
                    assert_type(item.value, str)


def responses(service: engine.Service[[Hit], str], own: engine.Engine, hit: Hit) -> None:
    asgi.event_stream(service.stream(telling(hit), events=Hit), encode=repr, heartbeat_seconds=None)
    asgi.ndjson(service.stream(spelling(hit)), stall_timeout_seconds=5, headers={"x": "y"})
    asgi.event_stream(service.stream(spelling(hit)), end="[DONE]", encode_error=repr)
    asgi.lifespan(own, service, drain_timeout_seconds=5, tuned=True)
    app = Starlette(lifespan=asgi.lifespan(service))
    app.add_exception_handler(ps.Overloaded, lambda request, error: asgi.overloaded(error))


@ps.graph
async def asked(question: str, tenant: int) -> str:
    return await limited(question)


async def fair_shares() -> None:
    async with engine.deploy(asked, key=lambda question, tenant: tenant, weights={1: 2.0}) as service:
        assert_type(await service("q", 1), str)
    async with engine.deploy(asked, own_loops, key=lambda call: call.graph.name) as service:
        assert_type(await service("q", 1), str)


async def chosen(hit: Hit) -> None:
    assert_type(await ps.call(fetch, "a"), bytes)
    assert_type(await ps.call(tokenize, b"", limit=3), list[bytes])
    assert_type(await ps.call(search, "a"), list[Hit])
    assert_type(await ps.call(counter, hit), int)
    assert_type(await ps.call(client.get, "a"), bytes)
    assert_type(await asyncio.gather(ps.call(fetch, "a"), ps.call(fetch, "b")), tuple[bytes, bytes])
    assert_type(ps.current().idempotency_key, str)
