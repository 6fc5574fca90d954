"""The gateway over real sockets: 300 clients, and two model servers that refuse, hang, cut streams or are busy."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog

import penstock as ps
from examples import gateway as example
from examples.gateway import PLACES, create_app
from penstock import asgi
from penstock.serving import Breaker
from tests.serving.model_server import CUT, ModelServer
from tests.serving.openai_server import served

CLIENTS = 300
TOKENS = 5  # tokens of an answer; `usage` counts as many for the prompt
# Quotas in tokens a minute.
QUOTAS = {f"sk-{number}": 10**9 for number in range(4)} | {f"sk-small-{number}": 6000 for number in range(3)}
KEYS = {key: [f"name of {key}", quota] for key, quota in QUOTAS.items()}
PATIENCE_SECONDS = 30
CLOSING_SECONDS = 60

CUT_OFF = (
    "The upstream cannot be reached, or has broken off.",
    "The upstream has ended its stream before the end of the answer.",
)
# Behaviours of a server: it answers, perhaps at the second try; it gives no answer; it cuts its answer.
GOOD = "good", "hangs once", "busy once"
BAD = "refuses", "fails", "hangs", "busy for long", "cut before"
CUTS = "cut after", "ends early"


class Upstream(ModelServer):
    """A server whose plan is in the question of each request."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.asked = Counter[str]()  # number of requests of each client
        self.hangs_up = False
        self._changed = asyncio.Condition()

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(condition)

    async def has_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def hang_up(self) -> None:
        """Close hanging connections, now and later, as a server does that restarts."""
        self.hangs_up = True
        for writer in self.hanging:
            writer.close()

    def plan_of(self, body: dict[str, Any]) -> str:
        client, plans = json.loads(body["messages"][0]["content"])
        self.asked[client] += 1
        plan: str = plans[self.name]
        if plan.endswith(" once"):
            plan = plan.removesuffix(" once") if self.asked[client] == 1 else "good"
        return "refuses" if plan == "hangs" and self.hangs_up else plan

    def words_of(self, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        total = body.get("total", 2 * TOKENS)
        words = [f"{self.name}-{len(self.bodies)}-{number} " for number in range(TOKENS)]
        return words, {"prompt_tokens": TOKENS, "completion_tokens": TOKENS, "total_tokens": total}


Stop = Callable[[], Coroutine[Any, Any, None]]


class Gateway:
    """The gateway at work, its two servers, and a client."""

    def __init__(self, client: httpx.AsyncClient, servers: tuple[Upstream, Upstream], stop: Stop) -> None:
        self.client = client
        self.stop = stop
        self.servers = self.first, self.second = servers

    @staticmethod
    def request(name: str, first: str, second: str = "good", key: str = "sk-0", **more: Any) -> dict[str, Any]:
        question = json.dumps([name, {"first": first, "second": second}])
        body = {"model": "m", "messages": [{"role": "user", "content": question}], **more}
        return {"url": "/v1/chat/completions", "json": body, "headers": {"Authorization": f"Bearer {key}"}}

    async def ask(self, *plan: str, **options: Any) -> httpx.Response:
        return await self.client.post(**self.request(*plan, **options))

    async def words(self, *plan: str, **options: Any) -> AsyncGenerator[str]:
        """Ask for a stream, and give its words; for an error, give its status, or its message after the first words."""
        async with self.client.stream("POST", **self.request(*plan, stream=True, **options)) as answer:
            if answer.status_code != 200:
                yield str(answer.status_code)
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        yield event["error"]["message"]
                    elif event["choices"][0]["delta"]:  # and not the end
                        yield event["choices"][0]["delta"]["content"]
                elif line.strip(":"):  # and no heartbeat
                    yield line

    async def is_up(self) -> bool:
        try:
            await self.ask("up", "good")
        except httpx.TransportError:
            return False
        return True

    async def nothing_is_open(self) -> None:
        for server in self.servers:
            await server.until(lambda server=server: server.open == 0, CLOSING_SECONDS)  # type: ignore[misc]


@asynccontextmanager
async def gateway(monkeypatch: pytest.MonkeyPatch, **policy: Any) -> AsyncGenerator[Gateway]:
    """Start the gateway with these policies of its nodes; its breaker never opens, since most plans are bad.

    It sends no heartbeat: on a busy machine, one would come before the status of an error. So nothing but the end of
    its connection tells it that a client has left.
    """
    monkeypatch.setitem(asgi.event_stream.__kwdefaults__ or {}, "heartbeat_seconds", None)
    monkeypatch.setattr(example, "POLICY", {**example.POLICY, **policy})
    monkeypatch.setattr(example, "BREAKER", Breaker(failures=10_000))
    servers = Upstream("first"), Upstream("second")
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server.listening()) for server in servers]
        monkeypatch.setenv("UPSTREAMS", " ".join(urls))
        monkeypatch.setenv("KEYS", json.dumps(KEYS))
        monkeypatch.setenv("MODEL", "m")
        stack.enter_context(structlog.testing.capture_logs())
        serves = await stack.enter_async_context(AsyncExitStack())
        url = await serves.enter_async_context(served(create_app()))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, limits=limits, timeout=60))
        yield Gateway(client, servers, serves.aclose)


def outcome_by(server: str, plan: str, *, is_stream: bool) -> tuple[str, str]:
    """Return the server that answers if `server` decides the outcome, and the end of its answer."""
    if plan in GOOD:
        return server, "good"
    if plan in CUTS and is_stream:
        return server, "cut"
    return "nobody", "429" if plan == "busy for long" else "502"


async def read_stream(gate: Gateway, *plan: str, key: str = "sk-0") -> tuple[str, str]:
    words = [word async for word in gate.words(*plan, key=key)]
    if len(words) == 1:
        return "nobody", words[0]
    *tokens, last = words
    assert last == "data: [DONE]"
    ends_well = len(tokens) == TOKENS
    if not ends_well:
        assert tokens.pop() in CUT_OFF
        assert len(tokens) == CUT
    [source] = {word.rpartition("-")[0] for word in tokens}  # all tokens come from one attempt at one server
    assert tokens == [f"{source}-{number} " for number in range(len(tokens))]
    return source.partition("-")[0], "good" if ends_well else "cut"


async def read_whole(gate: Gateway, *plan: str, key: str = "sk-0") -> tuple[str, str]:
    answer = await gate.ask(*plan, key=key)
    if answer.status_code != 200:
        assert answer.json()["error"]["type"] in ("server_error", "overloaded_error", "rate_limit_error")
        return "nobody", str(answer.status_code)
    words = answer.json()["choices"][0]["message"]["content"].split()
    assert len(words) == TOKENS
    return words[0].partition("-")[0], "good"


async def leave_early(gate: Gateway, name: str, key: str) -> tuple[str, str]:
    """Leave before an answer has begun."""
    asking = asyncio.create_task(read_stream(gate, name, "silent", "silent", key=key))
    asked = asyncio.create_task(gate.first.until(lambda: gate.first.asked[name] > 0))
    await asyncio.wait([asking, asked], return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    asked.cancel()
    await asyncio.wait([asking, asked])
    return ("left", "early") if asking.cancelled() else asking.result()


async def leave_late(gate: Gateway, name: str, key: str) -> tuple[str, str]:
    """Leave after the first token."""
    async with aclosing(gate.words(name, "endless", "endless", key=key)) as words:
        word = await anext(words)
    return ("left", "late") if "-" in word else ("nobody", word)


async def holds_all_places(gate: Gateway) -> None:
    """Begin as many streams as there are places, before any of them ends."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for number in range(PLACES):
            words = gate.words(f"holds {number}", "endless", key=f"sk-{number % 4}")
            await stack.enter_async_context(aclosing(words))
            tasks.create_task(anext(words))


async def test_each_of_300_clients_has_one_outcome_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [(first, second) for first in (*GOOD, *BAD, *CUTS) for second in (*GOOD, *BAD, *CUTS)]
    async with gateway(monkeypatch) as gate:
        clients: list[asyncio.Task[tuple[str, str]]] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                name, key, plan = str(number), f"sk-{number % 4}", plans[number // 3]
                if number % 3 == 0:
                    client = (leave_early if number % 2 else leave_late)(gate, name, key)
                else:
                    client = (read_stream if number % 3 == 1 else read_whole)(gate, name, *plan, key=key)
                clients.append(tasks.create_task(client, name=" ".join(plan)))
            await asyncio.wait([client for client in clients if "hangs" not in client.get_name()])
            for server in gate.servers:
                server.hang_up()
        for number, ended in enumerate(clients):
            outcome, (first, second), is_stream = ended.result(), plans[number // 3], number % 3 == 1
            bad = BAD if is_stream else BAD + CUTS  # if a whole answer is cut, the gateway asks the other server
            if number % 3 == 0:
                assert outcome == ("left", "early" if number % 2 else "late")
            elif str(number) not in gate.second.asked:
                assert first not in bad
                assert outcome == outcome_by("first", first, is_stream=is_stream)
            else:
                assert first in bad
                assert outcome == outcome_by("second", second, is_stream=is_stream)
        await gate.nothing_is_open()
        await holds_all_places(gate)
        await gate.nothing_is_open()


async def test_a_server_that_hangs_is_left_for_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(monkeypatch, timeout_seconds=1) as gate:
        for second, outcome in (("good", ("second", "good")), ("hangs", ("nobody", "504"))):
            both = (read(gate, f"{read} {second}", "hangs", second) for read in (read_stream, read_whole))
            assert await asyncio.gather(*both) == [outcome] * 2
        await gate.nothing_is_open()


async def test_a_slow_first_token_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(monkeypatch, hedge=ps.Hedge(after_seconds=0.05, max_share=1)) as gate:
        assert await read_stream(gate, "a", "hangs once") == ("first", "good")
        assert await read_whole(gate, "b", "hangs once") == ("first", "good")
        await gate.nothing_is_open()
        assert not gate.second.asked


async def test_tokens_a_minute_are_those_that_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(monkeypatch) as gate:
        for number, is_stream in enumerate((True, False)):
            key = f"sk-small-{number}"
            assert (await gate.ask("a", "good", key=key, stream=is_stream, total=3000)).status_code == 200
            refused = await gate.ask("b", "good", key=key, stream=is_stream)
            assert refused.status_code == 429
            assert 15 <= int(refused.headers["retry-after"]) <= 30  # 100 tokens a second, burst 1,000
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await gate.ask("c", "good")).status_code == 200  # another key
        for _ in range(2):  # a failed call of some 800 tokens costs nothing
            failed = await gate.ask("d", "fails", "fails", key="sk-small-2", stream=True, padding="x" * 3000)
            assert failed.status_code == 502
        assert (await gate.ask("e", "good", key="sk-small-2", stream=True)).status_code == 200


async def test_what_the_client_gets_is_what_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(monkeypatch) as gate:
        assert (await gate.ask("a", "good", key="sk-unknown")).status_code == 401
        for is_stream in (True, False):
            rejected = await gate.ask("b", "rejects", "rejects", stream=is_stream)
            assert (rejected.status_code, rejected.json()["error"]["message"]) == (400, "no such thing")
        assert (await gate.ask("c", "good")).json()["usage"]["total_tokens"] == 2 * TOKENS
        for options in ({}, {"stream_options": {"include_usage": True}}):
            lines = (await gate.ask("d", "good", stream=True, temperature=0.5, **options)).text.split("\n\n")
            assert ('"total_tokens"' in lines[-3]) == bool(options)
            assert lines[-2:] == ["data: [DONE]", ""]
        assert gate.first.bodies[-1]["temperature"] == 0.5


async def test_a_stream_that_has_begun_is_finished_when_the_gateway_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(monkeypatch) as gate, aclosing(gate.words("a", "pauses")) as words:
        first = await anext(words)
        stopping = asyncio.create_task(gate.stop())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await gate.is_up():
                pass
        gate.first.resumed.set()
        *rest, last = [word async for word in words]
        assert (len([first, *rest]), last) == (TOKENS, "data: [DONE]")
        await stopping
