"""Model servers as nodes: the parts of a request that are passed on, the choice of a server, and failing servers."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

import penstock as ps
from penstock import engine, serving
from tests.serving.model_server import ModelServer
from tests.serving.openai_server import Messages, asking, chat

ASKED: Messages = [{"role": "user", "content": "hi"}]
CLIENTS = 4


async def test_a_server_is_a_model_and_its_bytes_go_on_with_another_name() -> None:
    server = ModelServer()
    async with server.listening() as url:
        small = serving.upstream(f"{url}/", model="inside", api_key="sk-up")
        async with asking({"small": small}) as http:
            body = {"model": "small", "messages": ASKED, "n": 2, "seed": 3, "unheard_of": {"a": 1}}
            whole = (await http.post("/v1/chat/completions", json=body)).json()
            stream = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            counted = (await http.post("/v1/chat/completions", json=asked)).text
            completion = await http.post("/v1/completions", json={"model": "small", "prompt": ["a", "b"]})
    assert (whole["model"], whole["system_fingerprint"], whole["usage"]["total_tokens"]) == ("small", "f", 5)
    events = [json.loads(line[6:]) for line in stream.splitlines() if line[:7] == "data: {"]
    assert {(one["model"], one["system_fingerprint"]) for one in events} == {("small", "f")}
    assert (len(events), stream[-14:]) == (4, "data: [DONE]\n\n")
    assert counted.count("data: {") == 5
    assert completion.status_code == 200
    first, *_, last = server.bodies
    assert first == {**body, "model": "inside"}  # passed on unchanged, except for the model
    assert last == {"model": "inside", "prompt": ["a", "b"]}
    assert server.bodies[1]["stream_options"] == {"include_usage": True}
    assert {one["authorization"] for one in server.headers} == {"Bearer sk-up"}


async def test_an_upstream_with_a_policy_honours_what_the_upstream_honours() -> None:
    @ps.node
    async def local(messages: Messages, request: serving.Request) -> AsyncIterator[serving.Delta]:
        yield serving.Delta("one answer")

    bad, good = ModelServer("fails"), ModelServer()
    async with bad.listening() as one, good.listening() as two:
        first, second = serving.upstream(one), serving.upstream(two)
        again = ps.Retry(2, retry_on=serving.UpstreamError, backoff_seconds=0)
        safe = first.chat.with_policy(retry=again, failover=second.chat.with_policy(hedge=ps.Hedge(after_seconds=5)))
        models = {
            "safe": safe, "plain": second.chat, "here": first.chat.with_policy(failover=local),
            "text": first.chat.with_policy(fallback=lambda error: "sorry"),
        }  # fmt: skip
        said: dict[str, Any] = {"messages": ASKED}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("chat/completions", {**said, "n": 2}), ("chat/completions", {**said, "n": 2, "stream": True}),
            ("completions", {"prompt": ["a", "b"]}), ("completions", {"prompt": "a", "logprobs": 2}),
            ("embeddings", {"input": "a"}),
        ]  # fmt: skip
        async with asking(models, parts=[second]) as http:
            for model, status in (("plain", 200), ("safe", 200), ("here", 400), ("text", 400)):
                for path, body in asked:
                    answer = await http.post(f"/v1/{path}", json={"model": model, **body})
                    assert answer.status_code == status, (model, path, body, answer.text)


async def test_messages_that_a_graph_passes_on_reach_the_server_as_they_came() -> None:
    server = ModelServer()
    call = {"function": {"name": "f", "arguments": "{}"}, "type": "function", "id": "1"}
    messages: Messages = [
        {"role": "user"}, {"role": "user", "content": None}, {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "x", "reasoning_content": "why"}, {"role": "user", "content": "hi", "x": 1},
    ]  # fmt: skip
    async with server.listening() as url:
        small = serving.upstream(url)

        @ps.node
        async def with_facts(messages: Messages) -> Messages:
            assert messages[0]["content"] is None
            messages[-1]["content"] = "changed"
            messages.insert(1, {"role": "system", "content": "fact"})
            return messages

        @ps.graph
        async def rag(messages: Messages, request: serving.Request) -> AsyncIterator[serving.Delta]:
            return small.chat(await with_facts(messages), request)

        models = {"direct": small, "safe": small.chat.with_policy(retry=ps.Retry(2)), "rag": rag}
        async with asking(models, parts=[small]) as http:
            for model in models:
                assert (await chat(http, model, messages)).status_code == 200
    direct, safe, changed = (json.dumps(body["messages"]) for body in server.bodies)
    assert direct == safe == json.dumps(messages)
    last = {"role": "user", "content": "changed", "x": 1}
    assert json.loads(changed) == [messages[0], {"role": "system", "content": "fact"}, *messages[1:4], last]


async def test_a_graph_in_front_changes_the_messages_and_reads_the_parts() -> None:
    server = ModelServer()
    async with server.listening() as url:
        small = serving.upstream(url)

        @ps.node
        async def loud(parts: AsyncIterator[serving.Delta]) -> AsyncIterator[serving.Delta]:
            async for part in parts:
                yield serving.Delta(part.text.upper(), usage=part.usage)

        @ps.node
        async def with_facts(messages: Messages) -> Messages:
            return [{"role": "system", "content": "fact"}, *messages]

        @ps.graph
        async def rag(messages: Messages, request: serving.Request) -> AsyncIterator[serving.Delta]:
            return loud(small.chat(await with_facts(messages), request))

        async with asking({"rag": rag}, parts=[small]) as http:
            for stream in (False, True):
                answer = await chat(http, "rag", stream=stream)
                assert "ONE " in answer.text
                assert '"model":"rag"' in answer.text
    assert [body["messages"][0]["content"] for body in server.bodies] == ["fact"] * 2


@pytest.mark.parametrize(
    ("how", "status", "kind", "told"),
    [
        ("busy", 429, serving.UpstreamError, "busy"),
        ("fails", 502, serving.UpstreamError, "internal"),
        ("rejects", 400, serving.APIError, "no such thing"),
        ("no parts", 502, serving.UpstreamError, "ended its stream"),
        ("ends early", 502, serving.UpstreamError, "ended its stream"),
        ("error in a part", 502, serving.UpstreamError, "out of memory"),
        ("hangs", 504, serving.UpstreamError, "does not answer"),
        ("no path", 404, serving.APIError, "its base URL ends with /v1"),
        ("page", 502, serving.UpstreamError, "ended its stream"),
        ("no JSON", 502, serving.UpstreamError, "something else than an object of JSON"),
    ],
)
async def test_what_is_wrong_with_a_server_is_an_error_with_its_status(
    how: str, status: int, kind: type[serving.APIError], told: str
) -> None:
    server = ModelServer(how)
    async with server.listening() as url:
        small = serving.upstream(url, timeout_seconds=0.1 if how == "hangs" else 60)
        with pytest.raises(kind, match=told) as raised:
            await _read(small)
        assert (raised.value.status, isinstance(raised.value, serving.UpstreamError)) == (
            status, kind is serving.UpstreamError,
        )  # fmt: skip
        assert ps.retry_after(raised.value) == (0 if how == "busy" else None)
        assert small.replicas[0].in_flight == 0


async def test_a_whole_answer_that_is_no_json_is_an_error_of_the_server() -> None:
    server = ModelServer("page")
    async with server.listening() as url, asking({"small": serving.upstream(url)}) as http:
        answer = await chat(http, "small")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        502, "The upstream has sent something else than an object of JSON.",
    )  # fmt: skip


async def test_nobody_listens() -> None:
    small = serving.upstream("http://127.0.0.1:1/v1")
    with pytest.raises(serving.UpstreamError, match="cannot be reached"):
        await _read(small)


async def _read(upstream: serving.Upstream, request: Any = None) -> str:
    async with engine.stream(ps.graph(upstream.chat)(ASKED, request)) as parts:
        return "".join([part.text async for part in parts])


@contextlib.asynccontextmanager
async def keeping_connections(answers: Callable[[int], Awaitable[bool]]) -> AsyncIterator[str]:
    """Answers the requests of a connection, until `answers` says of the number of a request that it gets no answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has left
            for number in itertools.count():
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                if not await answers(number):
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield "http://{}:{}/v1".format(*server.sockets[0].getsockname())


@pytest.mark.parametrize(("answered", "expected"), [(1, [200] * 4), (0, [502] * 4)])
async def test_a_request_on_a_connection_that_the_server_closes_is_sent_again(
    answered: int, expected: list[int]
) -> None:
    asked: list[int] = []

    async def answers(number: int) -> bool:
        asked.append(number)
        return number < answered

    async with keeping_connections(answers) as url:
        small = serving.upstream(url, breaker=serving.Breaker(failures=9), check_seconds=None)
        async with asking({"small": small}, parts=[small]) as http:
            statuses = [(await chat(http, "small")).status_code for _ in expected]
    # A request that failed on a new connection is not sent again: the request may be what breaks the server.
    assert (statuses, asked) == (expected, [0, *[1, 0] * 3] if answered else [0] * 4)


async def test_a_request_that_ends_its_connections_is_sent_twice_at_most() -> None:
    asked: list[int] = []
    has_all = asyncio.Event()

    async def answers(number: int) -> bool:
        asked.append(number)
        if len(asked) == CLIENTS:
            has_all.set()
        await has_all.wait()  # so that each of the first requests has a connection of its own
        return len(asked) <= CLIENTS

    async with keeping_connections(answers) as url, serving.upstream(url, check_seconds=None) as small:
        await asyncio.gather(*(_read(small) for _ in range(CLIENTS)))
        with pytest.raises(serving.UpstreamError, match="broken off"):
            await _read(small)
    assert len(asked) == CLIENTS + 2


async def test_a_breaker_refuses_and_tries_again() -> None:
    breaker = serving.Breaker(failures=2, seconds=30)

    async def use(error: BaseException | None) -> None:
        with contextlib.suppress(ValueError, serving.APIError, asyncio.CancelledError):
            async with breaker:
                if error is not None:
                    raise error

    await use(ValueError())
    await use(None)
    for error in (asyncio.CancelledError(), serving.APIError(400, "wrong"), serving.UpstreamError(502, "down")):
        await use(error)
    assert (breaker.failed, breaker.is_open) == (1, False)
    await use(ValueError())
    assert breaker.is_open
    with pytest.raises(serving.UpstreamError, match="too often") as refused:
        async with breaker:
            raise AssertionError
    assert ps.retry_after(refused.value) == 30
    for options in ({"failures": 0}, {"seconds": 0}):
        with pytest.raises(ps.OptionsError):
            serving.Breaker(**options)


async def test_a_conversation_stays_at_its_server_unless_that_has_far_more_to_do() -> None:
    servers = [ModelServer("endless"), ModelServer("endless")]
    async with servers[0].listening() as one, servers[1].listening() as two:
        both = serving.upstream([one, two])
        async with asking({"both": both}) as http, contextlib.AsyncExitStack() as held:
            for _ in range(7):
                body = {"model": "both", "messages": ASKED, "stream": True}
                stream = await held.enter_async_context(http.stream("POST", "/v1/chat/completions", json=body))
                chunks: Any = stream.aiter_raw()
                await anext(chunks)
                held.push_async_callback(chunks.aclose)
            # With six in flight, a server has more than 1.25 times the mean of three, and two more.
            busiest, idlest = sorted(both.replicas, key=lambda one: -one.in_flight)
            assert (busiest.in_flight, idlest.in_flight) == (6, 1)
            assert sorted(server.open for server in servers) == [1, 6]
            idle = servers[both.replicas.index(idlest)]
            idle.plan = "good"
            for _ in range(3):  # embeddings have nothing in a cache
                assert (await http.post("/v1/embeddings", json={"model": "both", "input": "a"})).status_code == 200
            assert [("input" in body) for body in idle.bodies] == [False, True, True, True]
        assert [replica.in_flight for replica in both.replicas] == [0, 0]
        while any(server.open for server in servers):
            await asyncio.sleep(0)


async def test_what_servers_say_of_their_caches_is_counted_beside_what_was_expected() -> None:
    servers = [ModelServer(), ModelServer()]
    async with servers[0].listening() as one, servers[1].listening() as two:
        both = serving.upstream([one, two], model="m")
        first: Messages = [{"role": "system", "content": "x" * 99}, {"role": "user", "content": "y" * 99}]
        further: Messages = [*first, {"role": "assistant", "content": "z" * 98}, {"role": "user", "content": ""}]
        other: Messages = [first[0], {"role": "user", "content": "another conversation"}]
        with_tools: Messages = [{**further[0], "content": [{"type": "text", "text": "x"}]}, *further[1:]]
        async with asking({"both": both}) as http:
            for details in (None, {"cached_tokens": 60}, {"cached_tokens": "many"}, {"cached_tokens": None}, 5):
                for server in servers:
                    server.usage = {"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": details}
                for stream, messages in itertools.product((False, True), (first, further, other, with_tools)):
                    assert (await chat(http, "both", messages, stream=stream)).status_code == 200
        homes = {
            json.dumps(body["messages"]): url for url, one in zip("ab", servers, strict=True) for body in one.bodies
        }
        assert homes[json.dumps(first)] == homes[json.dumps(further)]
        told = [(one.prompt_tokens, one.cached_tokens, one.expected_tokens) for one in both.replicas]
        # Each of the four was asked before, so all of it was expected.
        assert tuple(map(sum, zip(*told, strict=True))) == (8 * 90, 8 * 60, 8 * 90)


def without_request(node: Any) -> Any:
    @ps.graph
    async def read(messages: Messages) -> AsyncIterator[serving.Delta]:
        return cast("AsyncIterator[serving.Delta]", node(messages))

    return read


async def test_a_further_attempt_asks_a_server_that_has_not_failed_this_call() -> None:
    with contextlib.ExitStack() as taken:  # two ports at which nobody listens
        dead = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        urls = ["http://{}:{}/v1".format(*one.getsockname()) for one in dead]
    server, busy = ModelServer(), ModelServer("busy")
    async with server.listening() as good, busy.listening() as full:
        for others, attempts in ((urls, 3), ([full], 2)):
            up = serving.upstream([*others, good], prefix=lambda asked: "all", breaker=serving.Breaker(failures=1000))
            again = ps.Retry(attempts, retry_on=serving.UpstreamError, backoff_seconds=0)
            safe = up.chat.with_policy(retry=again)
            async with asking({"safe": safe, "read": without_request(safe)}, parts=[up]) as http:
                for model, stream in itertools.product(("safe", "read"), (False, True)):
                    assert [(await chat(http, model, stream=stream)).status_code for _ in range(4)] == [200] * 4


async def test_a_hedge_asks_another_server() -> None:
    servers = [ModelServer(), ModelServer()]
    async with servers[0].listening() as one, servers[1].listening() as two:
        up = serving.upstream([one, two])
        hedged = up.chat.with_policy(hedge=ps.Hedge(after_seconds=0.01, max_share=1.0))
        async with asking({"hedged": hedged}) as http:
            assert (await chat(http, "hedged")).status_code == 200
            home = next(server for server in servers if server.bodies)
            home.plan = "silent"
            assert (await chat(http, "hedged")).status_code == 200
        assert sorted(len(server.bodies) for server in servers) == [1, 2]


async def test_servers_that_are_as_idle_take_turns_with_embeddings_and_a_prefix_stays() -> None:
    servers = [ModelServer() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server.listening()) for server in servers]
        models = {"both": serving.upstream(urls, prefix=lambda asked: asked.user), "plain": serving.upstream(urls)}
        http = await stack.enter_async_context(asking(models))
        for said in ("one", "two"):
            for user in "abcdef":
                await chat(http, "both", said, user=user)
        users = [[body["user"] for body in server.bodies] for server in servers]
        assert all(one[: len(one) // 2] == one[len(one) // 2 :] for one in users)
        for _ in range(6):
            await http.post("/v1/embeddings", json={"model": "plain", "input": "a"})
        assert [sum("input" in body for body in server.bodies) for server in servers] == [2] * 3


class Outputs:
    """An engine with the interface of vLLM's AsyncLLM."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.aborted: list[str] = []

    async def generate(self, prompt: str, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.running.add(request_id)
        text = ""
        while len(text) < params:
            await asyncio.sleep(0)
            text += prompt[0]
            reason = "length" if len(text) == params else None
            one = SimpleNamespace(text=text, token_ids=[1] * len(text), finish_reason=reason)
            yield SimpleNamespace(outputs=[one], prompt_token_ids=[1, 2])
        self.running.discard(request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.discard(request_id)


async def test_an_engine_in_the_process_is_a_node_and_a_reader_who_leaves_aborts() -> None:
    outputs = Outputs()
    node = serving.engine(
        outputs,
        prompt=lambda messages: str(messages[-1]["content"]),
        params=lambda request: 10**9 if request is None or request.max_tokens is None else request.max_tokens,
    )
    async with asking({"llm": node}) as http:
        answer = (await chat(http, "llm", max_tokens=3)).json()
        assert answer["choices"][0]["message"]["content"] == "hhh"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        assert (outputs.running, outputs.aborted) == (set(), [])
        async with engine.stream(ps.graph(node)(ASKED, None)) as parts:
            await anext(parts)
            assert len(outputs.running) == 1
    assert (len(outputs.running), len(outputs.aborted)) == (0, 1)


async def test_an_engine_says_what_is_wrong_and_may_give_only_the_further_text() -> None:
    seen: list[dict[str, Any]] = []

    class Deltas(Outputs):
        async def generate(self, prompt: str, params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
            seen.append(options)
            if status := options["priority"]:
                error = RuntimeError("too long")
                error.http_status = status  # type: ignore[attr-defined]
                raise error
            for text, reason in (("a", None), ("bc", "stop")):
                one = SimpleNamespace(text=text, token_ids=[1] * len(text), finish_reason=reason)
                yield SimpleNamespace(outputs=[one], prompt_token_ids=[1, 2])

    node = serving.engine(
        Deltas(),
        prompt=lambda messages: "p",
        params=lambda request: SimpleNamespace(output_kind=SimpleNamespace(name="DELTA")),
        options=lambda request: {"priority": request.seed if request else 0},
    )
    async with asking({"llm": node}) as http:
        answer = (await chat(http, "llm", seed=0)).json()
        assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("abc", 3)
        for status, told in ((400, 400), (422, 422), (503, 503), (500, 502)):
            refused = await chat(http, "llm", seed=status)
            assert (refused.status_code, refused.json()["error"]["message"]) == (told, "too long")
        scored = await chat(http, "llm", seed=0, logprobs=True)
        assert (scored.status_code, scored.json()["error"]["param"]) == (400, "logprobs")
    assert [one["priority"] for one in seen] == [0, 400, 422, 503, 500]


@pytest.mark.parametrize(
    "make",
    [
        lambda: serving.upstream([]),
        lambda: serving.upstream("10.0.0.1:8000"),
        lambda: serving.upstream("http://x/v1", timeout_seconds=0),
        lambda: serving.upstream("http://x/v1", imbalance=-1),
        lambda: serving.upstream("http://x/v1", first_seconds=0),
        lambda: serving.upstream("http://x/v1", check_seconds=True),
        lambda: serving.upstream("http://x:99999/v1"),
        lambda: serving.upstream("http://x/v1", api_key="schlüssel"),
    ],
)
def test_wrong_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ps.OptionsError):
        make()
