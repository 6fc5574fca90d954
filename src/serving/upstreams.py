"""Servers of models that speak OpenAI's protocol, and engines of models in this process, as nodes."""

import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, Final, Self
from urllib.parse import urlsplit
from uuid import uuid4

import httpx

from .. import Node, current, node
from .._errors import OptionsError, UnknownItemError
from ..actors.accepted import NOT_NEGATIVE, POSITIVE, check, whole
from .answers import Delta, Passed, as_json
from .measures import Asked
from .protocol import Base, ChatRequest, EmbeddingsRequest, Request, UpstreamError, completed
from .reading import chunk_of, parts_of
from .replicas import Breaker, Prefix, Replica, Router, count_tokens

_NOTES: Final = 10_000  # calls without an answer that are remembered; some 200 bytes each
_MAX_ANSWER_BYTES: Final = 64 << 20  # some images in base64, or a thousand embeddings in decimals
_AT_ONCE_SECONDS: Final = 1.0
_url_of: Final = lru_cache(1000)(httpx.URL)  # which takes httpx a while to parse

Messages = list[dict[str, Any]]


@dataclass(eq=False, repr=False)
class Upstream:
    """Servers of one model; made by `upstream`. An async context manager, which keeps connections open.

    Attributes:
        replicas: the servers.
    """

    replicas: tuple[Replica, ...]
    _model: str | None
    _make_client: Callable[[], httpx.AsyncHTTPTransport]
    _headers: dict[str, str]
    _timeouts: dict[str, float | None]
    _prefix: Callable[[Request], Hashable] | None
    _router: Router
    _max_answer_bytes: int

    def __post_init__(self) -> None:
        self._asked: OrderedDict[Hashable, list[Replica]] = OrderedDict()  # by call, until it has its answer
        self._order = [*self.replicas]  # the server that was asked last is the last one
        # Not a client of httpx: what it does beside that, such as cookies, takes a third of a request.
        self._client: httpx.AsyncHTTPTransport | None = None
        self._users = 0

    async def __aenter__(self) -> Self:
        """Keep connections open until the end of the block; without that, only while a request is on its way."""
        self._users += 1
        self._client = self._client or self._make_client()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections, unless they are in use elsewhere."""
        self._users -= 1
        if not self._users and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    @node
    async def chat(self, messages: Messages, request: Request | None = None) -> AsyncIterator[Delta]:
        """Give the answer to messages, with the fields of a request; a node.

        An answer that the client wants whole is one part. When the reader leaves, the response is closed, so that the
        server frees its slot.

        Args:
            messages: the messages.
            request: the request, whose body is passed on as it came, with these messages; None for a stream.

        Yields:
            The parts of the answer.

        Raises:
            APIError: the request is wrong, as the server says.
            UpstreamError: the server is unreachable, busy, or has failed.
        """
        call = _call() if len(self.replicas) > 1 else None
        replica, share = self._choose(messages, request, call)
        path, body = _passed_on(messages, request, self._model)
        is_stream = bool(getattr(request, "stream", request is None))
        async with replica.breaker, self:
            assert self._client is not None
            asked = Asked(replica.url, self._model or (request.model if request is not None else ""))
            headers = {**self._headers, **asked.headers}
            url, extensions = _url_of(f"{replica.url}/{path}"), {"timeout": self._timeouts}
            sent = httpx.Request("POST", url, headers=headers, content=body, extensions=extensions)
            replica.in_flight += 1
            usage: Any = None
            try:
                async with (
                    asked,
                    aclosing(await _send(self._client, sent)) as response,
                    aclosing(parts_of(response, self._max_answer_bytes, is_stream=is_stream)) as parts,
                ):
                    asked.answered(response.status_code)
                    async for data, chunk in parts:
                        asked.gave(data, chunk)
                        if b'"cached_tokens"' in data:
                            usage = (chunk or chunk_of(data)).get("usage")
                        yield Passed(data, chunk)
                self._asked.pop(call, None)
                count_tokens(replica, usage, share)
            except httpx.TimeoutException as error:
                raise UpstreamError(504, "The upstream does not answer.") from error
            except httpx.HTTPError as error:
                raise UpstreamError(502, "The upstream cannot be reached, or has broken off.") from error
            finally:
                replica.in_flight -= 1

    def _choose(self, messages: Messages, request: Base | None, call: Hashable) -> tuple[Replica, float]:
        """Return the server for a request, and the share of the prompt that it probably has in its cache.

        A server that an earlier attempt of the call has asked is the last choice. Embeddings, of which nothing is
        cached, go to the idlest server; servers that are as idle take turns.
        """
        well = [one for one in self._order if not one.breaker.is_open] or self._order
        asked = self._asked.get(call, [])
        if fresh := [one for one in well if one not in asked]:
            well = fresh
        else:
            asked = []
        if isinstance(request, EmbeddingsRequest):
            chosen, share = min(well, key=lambda one: one.in_flight), 0.0
        elif self._prefix is not None and isinstance(request, Request):
            chosen, share = self._router.choose(Prefix.of_value(self._prefix(request)), well)
        elif len(self.replicas) > 1:
            salt = None if request is None else (request.model_extra or {}).get("cache_salt")
            name = self._model or (request and request.model)
            chosen, share = self._router.choose(Prefix.of_messages(messages, name, salt), well)
        else:
            chosen, share = well[0], 0.0
        if call is not None:
            _note(self._asked, call, [*asked, chosen])
        self._order.sort(key=lambda one: one is chosen)
        return chosen, share


def upstream(
    base_url: str | Sequence[str],
    /,
    *,
    model: str | None = None,
    api_key: str | None = None,
    connections: int | None = None,
    timeout_seconds: float = 60.0,
    prefix: Callable[[Request], Hashable] | None = None,
    imbalance: int = 2,
    breaker: Breaker | None = None,
    max_answer_bytes: int = _MAX_ANSWER_BYTES,
) -> Upstream:
    """Return a server of a model, or several that serve the same, such as vLLM, SGLang and llama.cpp.

    `openai({"small": upstream})` serves it as it is. `upstream.chat` is a node for graphs, with `retry=`, `hedge=` and
    `failover=` like any other: `first.chat.with_policy(failover=second.chat)`.

    Args:
        base_url: the URL as clients take it, such as "http://10.0.0.1:8000/v1"; or several, of which each request goes
            to the one that has the beginning of its conversation in the cache. A further attempt asks another one.
        model: the name that the server knows the model by; None for the name in the request.
        api_key: the key that is sent to it.
        connections: the most connections; None without a limit.
        timeout_seconds: how long it may send nothing.
        prefix: returns what decides about the cache in place of the conversation, such as a text or a tuple of texts:
            requests with the same go to the same server.
        imbalance: how many more requests in flight than 1.25 times the mean of all servers that server may have.
        breaker: when a server is not asked; a copy for each. By default for 5 seconds after 3 failures in a row.
        max_answer_bytes: how large a whole answer, or an event of a stream, may be, in bytes; a larger one is an error.

    Returns:
        The upstream.

    Raises:
        OptionsError: an argument does not accept its value.
    """
    urls = [base_url] if isinstance(base_url, str) else [*base_url]
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise OptionsError(f"serving.upstream({base_url!r}): it takes URLs such as 'http://10.0.0.1:8000/v1'")
    for url in urls:
        try:
            _ = urlsplit(url).port
        except ValueError as error:
            raise OptionsError(f"serving.upstream({url!r}): {error}; write a port from 1 to 65535") from None
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise OptionsError("serving.upstream(api_key=...): a key travels in a header, so it is printable ASCII")
    check("timeout_seconds", timeout_seconds, POSITIVE)
    check("imbalance", imbalance, NOT_NEGATIVE)
    check("max_answer_bytes", max_answer_bytes, whole(1))

    # uvicorn closes a connection after 5 idle seconds: a request that comes in that moment would find the server down.
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=2)
    timeouts = httpx.Timeout(timeout_seconds, connect=min(5.0, timeout_seconds), pool=None).as_dict()
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    headers = {"content-type": "application/json", "accept-encoding": "identity", **key}
    replicas = tuple(Replica(url.rstrip("/"), replace(breaker or Breaker())) for url in urls)
    make_client = partial(httpx.AsyncHTTPTransport, limits=limits, trust_env=False)
    return Upstream(replicas, model, make_client, headers, timeouts, prefix, Router(imbalance), max_answer_bytes)


def _call() -> Hashable:
    """Return what all attempts of the present call have in common; None in a task that does not know its call."""
    try:
        return current().idempotency_key
    except UnknownItemError:
        return None


def _note(notes: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    """Note a value; the oldest notes are forgotten."""
    notes[key] = value
    notes.move_to_end(key)
    if len(notes) > _NOTES:
        notes.popitem(last=False)


def asks_upstreams(model: Any) -> bool:
    """Whether a model is an upstream, or its node with a policy by which no other code can answer."""
    if not isinstance(model, Node):
        return isinstance(model, Upstream)
    is_alone = model.policy.failover is None or asks_upstreams(model.policy.failover)
    return isinstance(model.bound_to, Upstream) and model.policy.fallback is None and is_alone


async def _send(client: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
    """Send a request; once again if a connection that had been idle is closed at once.

    A server may close an idle connection at any time, also in the moment in which the next request is sent. llama.cpp
    does so after each stream, and says nothing of it in its response.
    """
    is_new, sent_at = False, perf_counter()

    async def trace(event: str, _: object) -> None:
        nonlocal is_new
        if request.extensions.pop("trace", None):  # the first event tells; further events would only take time
            is_new = event == "connection.connect_tcp.started"

    request.extensions["trace"] = trace
    try:
        return await client.handle_async_request(request)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        if is_new or perf_counter() - sent_at > _AT_ONCE_SECONDS:  # the server may have begun to work on the request
            raise
    return await client.handle_async_request(request)


def _passed_on(messages: Messages, request: Base | None, model: str | None) -> tuple[str, bytes]:
    """Return the path and the body for an upstream: as it came, with the graph's messages and the model's name."""
    if request is None:
        request = ChatRequest.model_construct(model=model or "", stream=True)
        body: dict[str, Any] = {"messages": messages, "stream": True}
    else:
        body = request.body
        if isinstance(request, ChatRequest):
            # What the graph has passed on goes on as it came, without the keys that only graphs need.
            came = {id(one): raw for one, raw in zip(request.messages, body["messages"], strict=False)}
            pairs = ((one, came.get(id(one), one)) for one in messages)
            body["messages"] = [raw if completed({**raw}) == one else one for one, raw in pairs]
    body["model"] = model or request.model
    if getattr(request, "stream", None):
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return request._path, as_json(body)


def engine(
    model: Any, /, *, prompt: Callable[[Messages], Any], params: Callable[[Request | None], Any], concurrency: int = 256
) -> Node[..., Any]:
    """Return a node of an engine in this process, such as vLLM's `AsyncLLM`.

    Args:
        model: an object with `generate(prompt, params, request_id)`, which gives outputs asynchronously whose
            `outputs[0]` has the `text` so far, `token_ids` and `finish_reason`; and with `abort(request_id)`.
        prompt: returns the prompt for messages, such as `tokenizer.apply_chat_template`.
        params: returns the parameters of sampling for a request.
        concurrency: how many requests the engine has at a time.

    Returns:
        A node of messages and request, which gives the answer in parts. A reader that leaves aborts its request.
    """

    @node(concurrency=concurrency)
    async def generate(messages: Messages, request: Request | None = None) -> AsyncIterator[Delta]:
        name, said, is_done = uuid4().hex, 0, False
        try:
            async for output in model.generate(prompt(messages), params(request), name):
                one = output.outputs[0]
                asked = len(getattr(output, "prompt_token_ids", None) or ())
                usage = {"prompt_tokens": asked, "completion_tokens": len(one.token_ids)}
                is_done = one.finish_reason is not None
                yield Delta(one.text[said:], finish_reason=one.finish_reason, usage=usage)
                said = len(one.text)
        finally:
            if not is_done:
                aborted = model.abort(name)
                if inspect.isawaitable(aborted):
                    await aborted

    return generate
