"""Servers of models that speak OpenAI's protocol, and engines of models in this process, as nodes."""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, Final, Self
from urllib.parse import urlsplit
from uuid import uuid4

import httpx

from .. import Node, current, node
from .._errors import OptionsError, UnknownItemError
from ..actors.accepted import NOT_NEGATIVE, POSITIVE, check, optional, whole
from ..telemetry import logs
from .answers import Delta, Passed, as_json
from .measures import Asked
from .protocol import APIError, Base, ChatRequest, EmbeddingsRequest, Request, UpstreamError, completed
from .reading import chunk_of, failure, parts_of
from .replicas import Breaker, Prefix, Replica, Router, best_of, count_tokens, note_busy

_NOTES: Final = 10_000  # calls without an answer that are remembered; some 200 bytes each
_MAX_ANSWER_BYTES: Final = 64 << 20  # some images in base64, or a thousand embeddings in decimals
_AT_ONCE_SECONDS: Final = 1.0
_url_of: Final = lru_cache(1000)(httpx.URL)  # which takes httpx a while to parse

_MAX_CHECK_SECONDS: Final = 30.0
_LATE_SECONDS: Final = 2.0
_FAILED: Final = 500

Messages = list[dict[str, Any]]
Part = tuple[bytes, dict[str, Any] | None]


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
    _first_seconds: float | None
    _check_seconds: float | None

    def __post_init__(self) -> None:
        self._asked: OrderedDict[Hashable, list[Replica]] = OrderedDict()  # by call, until it has its answer
        self._order = [*self.replicas]  # the server that was asked last is the last one
        # Not a client of httpx: what it does beside that, such as cookies, takes a third of a request.
        self._client: httpx.AsyncHTTPTransport | None = None
        self._users = self._entered = 0
        self._probe: httpx.AsyncHTTPTransport | None = None
        self._checks: list[asyncio.Task[None]] = []
        self._doubts: dict[Replica, asyncio.Event] = {}  # by server: set to have it checked at once

    async def __aenter__(self) -> Self:
        """Keep connections open and check the servers until the end of the block."""
        self._hold()
        self._entered += 1
        if self._entered == 1 and self._check_seconds is not None:
            self._probe = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)
            self._checks = [asyncio.create_task(self._watch(one)) for one in self.replicas]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections, unless they are in use elsewhere."""
        self._entered -= 1
        try:
            if not self._entered and self._probe is not None:
                probe, self._probe = self._probe, None
                await self._end_checks(probe)
        finally:
            await self._release()

    async def _end_checks(self, probe: httpx.AsyncHTTPTransport) -> None:
        checks, self._checks = self._checks, []
        for check_ in checks:
            check_.cancel()
        try:
            await asyncio.gather(*checks, return_exceptions=True)
        finally:
            self._doubts.clear()
            for replica in self.replicas:
                replica.is_down = False  # nobody would find out that it is well again
            await probe.aclose()

    def _hold(self) -> httpx.AsyncHTTPTransport:
        """Return the client, which stays open until `_release`: without `async with`, as long as a request."""
        self._users += 1
        self._client = self._client or self._make_client()
        return self._client

    async def _release(self) -> None:
        self._users -= 1
        if not self._users and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def _watch(self, replica: Replica) -> None:
        """Check a server again and again; while it is down less often, but soon after a request found it down."""
        assert self._check_seconds is not None
        doubted = self._doubts[replica] = asyncio.Event()
        pause = self._check_seconds
        while True:
            doubted.clear()
            is_alive = await self._is_alive(replica)
            if replica.is_down is is_alive:
                (logs.info if is_alive else logs.warning)("serving.server", url=replica.url, is_down=not is_alive)
            if is_alive and replica.is_down:
                replica.breaker.failed = 0
            replica.is_down = not is_alive
            pause = self._check_seconds if is_alive else min(2 * pause, max(_MAX_CHECK_SECONDS, self._check_seconds))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await doubted.wait()

    async def _is_alive(self, replica: Replica) -> bool:
        """Ask a server for its health; an answer that comes late counts as none."""
        assert self._probe is not None
        asked = httpx.Request("GET", f"{replica.url.removesuffix('/v1')}/health", headers=self._headers)
        try:
            async with asyncio.timeout(_LATE_SECONDS):
                response = await self._probe.handle_async_request(asked)
                await response.aclose()
            return response.status_code < _FAILED
        except (httpx.HTTPError, OSError, ValueError):  # a TimeoutError is an OSError
            return False

    def _doubt(self, replica: Replica, error: Exception) -> None:
        """Have a server checked soon, because a request has found it unreachable or silent."""
        if replica in self._doubts and not replica.is_down:
            replica.is_down = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            self._doubts[replica].set()

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
        async with replica.breaker:
            asked = Asked(replica.url, self._model or (request.model if request is not None else ""))
            headers = {**self._headers, **asked.headers}
            url, extensions = _url_of(f"{replica.url}/{path}"), {"timeout": self._timeouts}
            sent = httpx.Request("POST", url, headers=headers, content=body, extensions=extensions)
            replica.in_flight += 1
            usage: Any = None
            try:
                async with asked, aclosing(self._parts(sent, asked, is_stream=is_stream)) as parts:
                    async with asyncio.timeout(self._first_seconds if is_stream else None):
                        part = await anext(parts, None)
                    while part is not None:
                        data, chunk = part
                        asked.gave(data, chunk)
                        if b'"cached_tokens"' in data:
                            usage = (chunk or chunk_of(data)).get("usage")
                        yield Passed(data, chunk)
                        part = await anext(parts, None)
                self._asked.pop(call, None)
                count_tokens(replica, usage, share)
            except (httpx.TimeoutException, TimeoutError) as error:
                self._doubt(replica, error)
                raise UpstreamError(504, "The upstream does not answer.") from error
            except httpx.HTTPError as error:
                self._doubt(replica, error)
                raise UpstreamError(502, "The upstream cannot be reached, or has broken off.") from error
            except APIError as error:
                note_busy(replica, error)
                raise
            finally:
                replica.in_flight -= 1

    async def _parts(self, sent: httpx.Request, asked: Asked, *, is_stream: bool) -> AsyncGenerator[Part]:
        """Send a request, and yield the parts of its answer."""
        client = self._hold()
        try:
            async with aclosing(await _send(client, sent)) as response:
                asked.answered(response.status_code)
                async with aclosing(parts_of(response, self._max_answer_bytes, is_stream=is_stream)) as parts:
                    async for part in parts:
                        yield part
        finally:
            await self._release()

    def _choose(self, messages: Messages, request: Base | None, call: Hashable) -> tuple[Replica, float]:
        """Return the server for a request, and the share of the prompt that it probably has in its cache.

        A server that an earlier attempt of the call has asked is the last choice. Embeddings, of which nothing is
        cached, go to the idlest server; servers that are as idle take turns.
        """
        asked = self._asked.get(call, [])
        well = best_of(self._order, asked)
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
            _note(self._asked, call, [chosen] if chosen in asked else [*asked, chosen])
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
    first_seconds: float | None = None,
    check_seconds: float | None = 2.0,
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
        first_seconds: how long the first part of a stream may take; None for no limit but `timeout_seconds`.
        check_seconds: how often each server is asked for `/health` while the upstream is entered. A server that does
            not answer within 2 seconds, or answers 500 or more, gets no requests while others are well. While a server
            is down, it is asked less often, down to every 30 seconds. None for no checks.

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
    check("first_seconds", first_seconds, optional(POSITIVE))
    check("check_seconds", check_seconds, optional(POSITIVE))

    # uvicorn closes a connection after 5 idle seconds: a request that comes in that moment would find the server down.
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=2)
    timeouts = httpx.Timeout(timeout_seconds, connect=min(5.0, timeout_seconds), pool=None).as_dict()
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    headers = {"content-type": "application/json", "accept-encoding": "identity", **key}
    replicas = tuple(Replica(url.rstrip("/"), replace(breaker or Breaker())) for url in urls)
    make_client = partial(httpx.AsyncHTTPTransport, limits=limits, trust_env=False)
    router = Router(imbalance)
    return Upstream(
        replicas, model, make_client, headers, timeouts, prefix, router, max_answer_bytes, first_seconds, check_seconds
    )  # fmt: skip


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


def upstreams_of(model: Any) -> list[Upstream]:
    """Return the upstreams that a model asks: itself, or a node with a policy by which no other code can answer."""
    if not isinstance(model, Node):
        return [model] if isinstance(model, Upstream) else []
    others = [] if model.policy.failover is None else upstreams_of(model.policy.failover)
    is_alone = model.policy.fallback is None and (model.policy.failover is None or others)
    return [model.bound_to, *others] if isinstance(model.bound_to, Upstream) and is_alone else []


def can_be_asked(upstream: Upstream) -> bool:
    """Whether a server of an upstream looks well."""
    return any(not (one.is_down or one.breaker.is_open) for one in upstream.replicas)


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
    model: Any,
    /,
    *,
    prompt: Callable[[Messages], Any],
    params: Callable[[Request | None], Any],
    options: Callable[[Request | None], dict[str, Any]] = lambda _: {},
    concurrency: int = 256,
) -> Node[..., Any]:
    """Return a node of an engine in this process, such as vLLM's `AsyncLLM`.

    Args:
        model: an object with `generate(prompt, params, request_id)`, which gives outputs asynchronously whose
            `outputs[0]` has the `text` so far, `token_ids` and `finish_reason`; and with `abort(request_id)`.
        prompt: returns the prompt for messages, such as `tokenizer.apply_chat_template`.
        params: returns the parameters of sampling for a request. If their `output_kind` is DELTA, each output has only
            the further text.
        options: returns further keywords of `generate` for a request, such as its priority.
        concurrency: how many requests the engine has at a time.

    Returns:
        A node of messages and request, which gives the answer in parts. A reader that leaves aborts its request. Log
        probabilities are refused. An error of the engine with a number as `http_status`, such as vLLM's, is answered
        with that status.
    """

    @node(concurrency=concurrency)
    async def generate(messages: Messages, request: Request | None = None) -> AsyncIterator[Delta]:
        if getattr(request, "logprobs", None) or getattr(request, "top_logprobs", None):
            raise APIError(400, "logprobs: the model cannot honour this", "logprobs", "unsupported_value")
        name, said, written, is_done = uuid4().hex, 0, 0, False
        sampling = params(request)
        is_delta = getattr(getattr(sampling, "output_kind", None), "name", None) == "DELTA"
        try:
            async for output in model.generate(prompt(messages), sampling, name, **options(request)):
                one = output.outputs[0]
                asked = len(getattr(output, "prompt_token_ids", None) or ())
                written = len(one.token_ids) + (written if is_delta else 0)
                usage = {"prompt_tokens": asked, "completion_tokens": written}
                is_done = one.finish_reason is not None
                yield Delta(one.text[said:], finish_reason=one.finish_reason, usage=usage)
                said = 0 if is_delta else len(one.text)
        except Exception as error:  # of the engine, whose classes are its own
            status = getattr(error, "http_status", None)
            if isinstance(error, APIError) or not isinstance(status, int) or not 400 <= status < 600:
                raise
            raise failure(status, {"message": str(error)}) from error
        finally:
            if not is_done:
                aborted = model.abort(name)
                if inspect.isawaitable(aborted):
                    await aborted

    return generate
