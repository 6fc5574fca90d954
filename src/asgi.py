"""Responses and a lifespan for Starlette and FastAPI: streams over HTTP that end with their client, and refusals.

Starlette is imported when the first response is made. Importing this module needs neither Starlette nor FastAPI.
"""

import asyncio
import functools
import inspect
import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from http import HTTPStatus
from importlib import import_module
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from . import engine
from ._errors import EngineClosedError, Interrupted, MissingExtraError, Overloaded, retry_after_header
from ._public import LateModule, public
from .actors.accepted import POSITIVE, TIMEOUT, OptionRule, are_exceptions, check, is_whole, optional
from .actors.tasks import until
from .telemetry import logs
from .telemetry.text import on_one_line

if TYPE_CHECKING:
    from starlette import requests, responses
else:
    requests, responses = LateModule("starlette.requests"), LateModule("starlette.responses")

__all__ = ["answer", "event_stream", "lifespan", "ndjson", "overloaded"]

E = TypeVar("E", bound=Exception)  # so that a dict of one class of errors, or of several, is one of classes of errors

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]

# Proxies, such as nginx and load balancers of the large clouds, close a connection that is silent for a minute.
_HEARTBEAT_SECONDS: Final = 15.0
# A client that is alive takes a chunk within a round trip. A mobile client that has lost its network comes back within
# seconds, or not at all.
_STALL_SECONDS: Final = 30.0
_COMMENT: Final = b":\n\n"
_CLIENT_GONE: Final = 499  # the status that nginx logs; no client reads it
# The status codes for errors of these classes, and of classes derived from them. A draining deployment refuses calls
# with `EngineClosedError`. Any other error, such as a KeyError of a node, is a mistake unless `statuses=` names it.
_STATUSES: Final[Mapping[type[Exception], int]] = {TimeoutError: 504, Overloaded: 503, EngineClosedError: 503}
_PHRASES: Final[Mapping[int, str]] = {status: status.phrase for status in HTTPStatus}
_STATUSES_RULE: Final = OptionRule(
    "a mapping of classes of exceptions to status codes from 400 to 599",
    lambda value: (
        isinstance(value, Mapping)
        and are_exceptions(tuple(cast("Mapping[object, object]", value)))
        and all(is_whole(code, 400) and code < 600 for code in cast("Mapping[object, object]", value).values())
    ),
)
_NEW_LINE: Final = re.compile("\r\n|\n|\r")


async def answer(
    request: "requests.Request",
    call: Awaitable[Any],
    /,
    *,
    encode: Callable[[Any], str] | None = None,
    statuses: Mapping[type[E], int] | None = None,
    encode_error: Callable[[Exception], str] | None = None,
) -> "responses.Response":
    """Await a call for a plain endpoint, and return the response. A client that leaves ends the call.

        @app.post("/complete")
        async def endpoint(request: Request, prompt: str) -> Response:
            return await asgi.answer(request, service(prompt), statuses={httpx.HTTPError: 502})

    A timeout or a passed deadline is answered with 504, and logged. A refusal for one key is answered with 429, and any
    other refusal with 503, both with `Retry-After`. A call of a closed deployment is answered with 503, too. An error
    whose class `statuses` names is answered with that status. Every other error is raised, so that the application
    answers it, with 500 if it has no handler for the error.

    Args:
        request: the request. Its body was read before: further messages of the client are dropped.
        call: the awaitable, such as `service(...)` or `engine.run(...)`. If the result is a response, that is sent.
        encode: returns the body for the result; by default the result as JSON.
        statuses: the status codes of further errors, by class. If several classes fit, the most specific one counts.
        encode_error: returns the body for an error that is answered, as JSON; by default the body is the name of the
            status alone, since the text of an error may name what no client should know.

    Returns:
        A response of Starlette, which FastAPI returns as it is.

    Raises:
        Exception: the error of the call, if its class has no status.
        TypeError: `call` cannot be awaited.
        OptionsError: `statuses` has other keys or values.
        MissingExtraError: Starlette is not installed.
    """
    response: Any = _starlette().Response
    check("statuses", statuses, optional(_STATUSES_RULE))
    if not hasattr(call, "__await__"):
        raise TypeError(f"asgi.answer takes an awaitable, such as service(...) or engine.run(graph(...)), got {call!r}")
    known = _known(statuses)
    try:
        async with _connected(request.receive):
            value = await call
    except _ClientGoneError:
        return cast("responses.Response", response(status_code=_CLIENT_GONE))
    except tuple(known) as error:
        return _answered(error, known, encode_error)
    if isinstance(value, response):
        return cast("responses.Response", value)
    return cast("responses.Response", response((encode or _as_json)(value), media_type="application/json"))


def event_stream(
    stream: engine.Stream[Any],
    /,
    *,
    encode: Callable[[Any], str | bytes] | None = None,
    encode_event: Callable[[Any], bytes] | None = None,
    end: str | Callable[[], bytes] | None = None,
    encode_error: Callable[[Exception], str | bytes] | None = None,
    statuses: Mapping[type[E], int] | None = None,
    heartbeat_seconds: float | None = _HEARTBEAT_SECONDS,
    stall_timeout_seconds: float | None = _STALL_SECONDS,
    status_code: int = 200,
    headers: Mapping[str, str] | None = None,
) -> "responses.Response":
    """Return a response that sends a stream as server-sent events. The end of the response ends the call.

    For a detached call, the end of the response ends only the reading. Then each event has an `id:`, which a browser
    sends as the header `Last-Event-ID` when it connects again, for `service.attach(key, after=...)`. A `Missed` is an
    event `missed`.

    Each value is an event with `data:`, text unchanged and every other value as JSON. A value that a node has emitted
    has the name of its class in `event:` as well. Values and events that are ready at the same time go out in one
    chunk, in their order. The last event is `end`; its data is the result of the graph, if the graph has one value. If
    a call ends because a node asks a person (`ps.interrupt`), the last event is `question` instead. Its data is an
    object of JSON with `key`, `question` and `token`, which an `Answer` takes.

    The call begins with the response. The status waits for the first item, or for `heartbeat_seconds`. An error before
    the status, such as `Overloaded`, is raised, so that the application answers it; with `statuses`, it is answered as
    `answer` does. A later error is sent to the client as an event `failed`, with the name of its class, and then
    raised, which cuts the connection. For HEAD, the call ends with the status.

    With `end` and `encode_error`, the response speaks other protocols than that of browsers, such as OpenAI's protocol,
    whose events have no names: `end="[DONE]", encode_error=lambda error: json.dumps({"error": {"message": "..."}})`.

    Args:
        stream: a stream of `engine.stream` or `service.stream` that was not read yet.
        encode: returns the text of a value; for a question, only the text of a part that JSON cannot write. Bytes are
            sent unchanged: no event, or several events, with their names and ends.
        encode_event: returns the bytes that are sent for a value that a node has emitted, such as a comment.
        end: the data of the last event, which then has no name; a result of the graph is an event before it. Or a
            function that returns the bytes of the last events.
        encode_error: returns the data of an error after the status. The error is logged instead of raised, and the
            response is complete: it ends with the event `failed`, or, if there is an `end`, with the error as an event
            without a name, and the end. Bytes are sent unchanged. The log has the traceback, unless `statuses` names
            the class.
        statuses: the status codes of errors before the first item, by class. With a mapping, also an empty one,
            refusals, timeouts and errors of these classes are answered as `answer` does, with the body of
            `encode_error`. With None they are raised.
        heartbeat_seconds: after how many seconds of silence a comment is sent; None for never.
        stall_timeout_seconds: how long a client may take no data before its call is ended, in seconds; None without a
            limit. Data in buffers of server and network count as taken.
        status_code: the status of the response.
        headers: further headers.

    Returns:
        A response of Starlette, which FastAPI returns as it is.

    Raises:
        TypeError: the argument is not a stream.
        OptionsError: an option does not accept its value.
        MissingExtraError: Starlette is not installed.
    """
    _check_stream(stream, "event_stream")
    check("heartbeat_seconds", heartbeat_seconds, optional(POSITIVE))
    check("statuses", statuses, optional(_STATUSES_RULE))
    said = _Events(stream, encode or _as_text, encode_event, end, encode_error)
    # A plain stream has no events, so its values need no check.
    is_plain = not isinstance(stream, engine.EventStream | engine.DetachedStream)
    body = _Body(
        stream, said.plain if is_plain else said.chunk, stall_timeout_seconds,
        end=said.last,
        failed=said.failed,
        asked=lambda question: _sse(_as_json(question, encode), "question"),
        heartbeat_seconds=heartbeat_seconds,
        encode_error=encode_error,
        statuses=statuses,
    )  # fmt: skip
    # `no-transform` and the header of nginx keep buffers on the way from holding events back.
    ours = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
    return _response(body, "text/event-stream", status_code, {**ours, **(headers or {})})


@dataclass
class _Events:
    """The encoding of a stream as server-sent events; `event_stream` explains the fields."""

    stream: engine.Stream[Any]
    encode: Callable[[Any], str | bytes]
    encode_event: Callable[[Any], bytes] | None
    end: str | Callable[[], bytes] | None
    encode_error: Callable[[Exception], str | bytes] | None

    def chunk(self, item: Any) -> bytes:
        """Return the bytes that are sent for an item."""
        if isinstance(item, engine.Missed):
            return self._id_line() + _sse(_as_json(item), item.kind)
        if not isinstance(item, engine.Event):
            return self._event(cast("Any", item).value if isinstance(item, engine.Value) else item, None)
        value: Any = cast("Any", item).value
        return self._event(value, type(value).__name__) if self.encode_event is None else self.encode_event(value)

    def plain(self, value: Any) -> bytes:
        """Return the bytes that are sent for a value of a stream that has no events."""
        said = self.encode(value)
        return said if isinstance(said, bytes) else _sse(said)

    def last(self, results: list[Any]) -> bytes:
        """Return the bytes that are sent at the end. The list has the result of the call, or is empty without one."""
        if self.end is None:
            return _sse("".join(str(self.encode(result)) for result in results), "end")
        given = b"".join(map(self.plain, results))
        return given + (_sse(self.end) if isinstance(self.end, str) else self.end())

    def failed(self, error: Exception) -> bytes:
        """Return the bytes that are sent for an error after the status."""
        said = type(error).__name__ if self.encode_error is None else self.encode_error(error)
        if isinstance(said, bytes):
            return said
        if self.encode_error is None or not isinstance(self.end, str):
            return _sse(said, "failed")
        return _sse(said) + _sse(self.end)

    def _event(self, value: Any, name: str | None) -> bytes:
        said = self.encode(value)
        return said if isinstance(said, bytes) else self._id_line() + _sse(said, name)

    def _id_line(self) -> bytes:
        """Return the line with the number of the last item of a detached call. A browser that returns sends it."""
        stream: Any = self.stream
        return b"id: %d\n" % stream.number if isinstance(stream, engine.DetachedStream) else b""


def ndjson(
    stream: engine.Stream[Any],
    /,
    *,
    encode: Callable[[Any], str] | None = None,
    stall_timeout_seconds: float | None = _STALL_SECONDS,
    status_code: int = 200,
    headers: Mapping[str, str] | None = None,
) -> "responses.Response":
    """Return a response that sends a stream as lines of JSON. The end of the response ends the call.

    Each item is a line: a value as JSON; an `Event` or a `Value` as an object with its fields, whose field `kind` tells
    the two apart. If the events of a graph with one value are read, the last line has the kind "result". If a call ends
    because a node asks a person (`ps.interrupt`), the last line has the kind "question", with `key`, `question` and
    `token`.

    The call begins with the response, whose status waits for the first item. An error before the status is raised, so
    that the application answers it. A later error is sent as a last line of the kind "failed", with the name of its
    class as `error`, and then raised, which cuts the connection early. For HEAD, the call ends with the status.

    Args:
        stream: a stream of `engine.stream` or `service.stream` that was not read yet.
        encode: returns the line of an item, without its end; for a question, only the text of a part that JSON cannot
            write.
        stall_timeout_seconds: as for `event_stream`.
        status_code: the status of the response.
        headers: further headers.

    Returns:
        A response of Starlette, which FastAPI returns as it is.

    Raises:
        TypeError: the argument is not a stream.
        OptionsError: an option does not accept its value.
        MissingExtraError: Starlette is not installed.
    """
    _check_stream(stream, "ndjson")
    line = encode or _as_json
    body = _Body(
        stream, lambda item: _bytes(line(item) + "\n"), stall_timeout_seconds,
        end=lambda results: b"".join(_line({"kind": "result", "value": value}) for value in results),
        # A line says so, too: HTTP/1.0 marks no end, and some middleware completes a response that was cut.
        failed=lambda error: _line({"kind": "failed", "error": type(error).__name__}),
        asked=lambda question: _line({"kind": "question", **question}, encode),
    )  # fmt: skip
    ours = {"cache-control": "no-store", "x-accel-buffering": "no"}  # otherwise nginx would gather lines
    return _response(body, "application/x-ndjson", status_code, {**ours, **(headers or {})})


def overloaded(error: Exception, /) -> "responses.Response":
    """Return the response to a refused call: 503, or 429 if the call was refused to one key, with `Retry-After`.

    For an exception handler: `app.add_exception_handler(ps.Overloaded, lambda request, error: asgi.overloaded(error))`.
    `answer` does the same for a plain endpoint.

    Args:
        error: the refusal. Any other error is raised; for type checkers, a handler gets any exception.

    Returns:
        A response of Starlette. Its text is the name of the status: the message of the error names the key and options.

    Raises:
        MissingExtraError: Starlette is not installed.
    """
    if not isinstance(error, Overloaded):
        raise error
    return _refused(error, 503)


def lifespan(
    *parts: AbstractAsyncContextManager[Any], drain_timeout_seconds: float | None = None, tuned: bool = False
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return a lifespan for an application, which enters an Engine and its deployments, and drains these at the end.

        own = engine.Engine()
        service = own.deploy(answer, max_in_flight=64)
        app = FastAPI(lifespan=asgi.lifespan(own, service))

    Args:
        *parts: an Engine, services, and any other async context managers, in the order in which they are entered.
        drain_timeout_seconds: how long calls that still run may take when the application ends, in seconds. Calls that
            are left then are aborted. None without a limit.
        tuned: whether the process is tuned meanwhile, with `engine.tuned_for_serving`.

    Returns:
        The lifespan, a function of the application.

    Raises:
        TypeError: a part is not an async context manager.
        OptionsError: `drain_timeout_seconds` is neither None nor a number of seconds.
    """
    check("drain_timeout_seconds", drain_timeout_seconds, TIMEOUT)
    for part in parts:
        if not isinstance(part, AbstractAsyncContextManager):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"asgi.lifespan takes an Engine, services and other async context managers, got {part!r}: write "
                "asgi.lifespan(own, own.deploy(graph))"
            )

    @asynccontextmanager
    async def entered(app: Any) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(part)
                if isinstance(part, engine.Service):
                    stack.push_async_callback(part.drain, timeout_seconds=drain_timeout_seconds)
            with engine.tuned_for_serving() if tuned else nullcontext():
                yield

    return entered


def _known(statuses: Mapping[Any, int] | None) -> dict[type[Exception], int]:
    return {**_STATUSES, **(statuses or {})}


def _answered(
    error: Exception, known: Mapping[type[Exception], int], encode_error: Callable[[Exception], str | bytes] | None
) -> "responses.Response":
    """Return the response to an error whose class, or a base class, has a status; None without one."""
    status = next(known[kind] for kind in type(error).__mro__ if kind in known)
    body = None if encode_error is None else encode_error(error)
    if not isinstance(error, Overloaded):  # also if a deployment is closed: it may be one that a node has called
        logs.warning("asgi.failed", status=status, error=error)
    if isinstance(error, Overloaded | EngineClosedError):
        return _refused(error, status, body)
    return _failed(status, body)


def _refused(
    error: Overloaded | EngineClosedError, status: int, body: str | bytes | None = None
) -> "responses.Response":
    seconds = None
    if isinstance(error, Overloaded):
        seconds = error.retry_after_seconds
        if error.key is not None and status == _STATUSES[Overloaded]:
            status = 429
    return _failed(status, body, retry_after_header(seconds))


def _failed(status: int, body: str | bytes | None, headers: Mapping[str, str] | None = None) -> "responses.Response":
    media_type = "text/plain" if body is None else "application/json"
    body = _PHRASES.get(status, str(status)) if body is None else body
    return cast("responses.Response", _starlette().Response(body, status, headers, media_type=media_type))


def _check_stream(stream: object, name: str) -> None:
    if not isinstance(stream, engine.Stream):
        raise TypeError(f"asgi.{name} takes a stream of engine.stream(...) or service.stream(...), got {stream!r}")


@dataclass(eq=False)
class _Body:
    """The body of a response: how each item of a stream is sent, and how the client is watched.

    Args:
        stream: the stream.
        chunk: returns the bytes for an item.
        stall_timeout_seconds: how long a chunk may wait for the client, in seconds.
        end: returns the bytes for the end. It gets a list with the result of the call, which is empty without a result.
        failed: returns the bytes for an error, sent before the connection is cut.
        asked: returns the bytes for the end of a call with a question, from the question, its key and its token.
        heartbeat_seconds: after how many seconds of silence a comment is sent; None for never.
        encode_error: returns the text of an error. With it, an error is logged, and the response is complete.
        statuses: the status codes of errors before the response has begun; None to raise all errors.
    """

    stream: engine.Stream[Any]
    chunk: Callable[[Any], bytes]
    stall_timeout_seconds: float | None
    _: KW_ONLY
    end: Callable[[list[Any]], bytes]
    failed: Callable[[Exception], bytes]
    asked: Callable[[dict[str, Any]], bytes]
    heartbeat_seconds: float | None = None
    encode_error: Callable[[Exception], str | bytes] | None = None
    statuses: Mapping[Any, int] | None = None

    def __post_init__(self) -> None:
        check("stall_timeout_seconds", self.stall_timeout_seconds, optional(POSITIVE))
        self._answers = () if self.statuses is None else tuple(_known(self.statuses))

    async def serve(self, begin: _Message, receive: _Receive, send: _Send, *, is_head: bool) -> None:
        """Send the whole response, or as much as its client takes. When this returns, the call has ended.

        A response to HEAD ends after its beginning: no client reads more, and no server tells that a client has gone
        while another request of the client waits.
        """
        self._begin: _Message | None = begin  # the beginning of the response; None once it was sent
        self._is_head = is_head
        self._send = send
        self._is_lost = _look_at_connection(receive)  # whether the connection is lost, as far as the server shows
        self._limit = _Limit(self.heartbeat_seconds, self.stall_timeout_seconds)
        try:
            async with self.stream, _connected(receive):
                try:
                    await self._send_all()
                finally:
                    self._limit.close()
        except _ClientGoneError:
            await self._end_unbegun(send)
        except self._answers as error:
            await self._answer_unbegun(error, receive, send)

    async def _answer_unbegun(self, error: Exception, receive: _Receive, send: _Send) -> None:
        """Answer an error that has a status with a response of its own; raise the error if the response has begun."""
        if self._begin is None:
            raise error
        with suppress(OSError):  # the client may have left meanwhile
            await _answered(error, _known(self.statuses), self.encode_error)({"type": "http"}, receive, send)

    async def _end_unbegun(self, send: _Send) -> None:
        """Answer a client that left before the response began: for middleware, a missing answer is an error."""
        if self._begin is not None:
            self._begin = None
            with suppress(OSError, RuntimeError):
                await send({"type": "http.response.start", "status": _CLIENT_GONE, "headers": []})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self) -> None:
        try:
            last = await self._send_items()
        except Exception as error:
            if self._begin is not None or isinstance(error, _ClientGoneError):
                raise
            last = self.failed(error)
            if self.encode_error is None:
                await self._give(last)
                raise
            # As text: an unconfigured structlog would print all variables of all frames, which takes seconds.
            trace = {} if isinstance(error, self._answers) else {"exception": "".join(format_exception(error))}
            logs.warning("asgi.failed", error=error, **trace)
        if last is not None:
            await self._give(last, more=False)

    async def _send_items(self) -> bytes | None:
        """Send the items of the stream; return the bytes for the end, or None for HEAD, which has ended already."""
        stream, limit = self.stream, self._limit
        results: list[Any] = []
        try:
            while True:
                limit.begin(self.heartbeat_seconds)
                try:
                    item = await anext(stream)  # a cancelled read takes no item
                except StopAsyncIteration:
                    break
                except asyncio.CancelledError:
                    if not limit.has_ended():
                        raise
                    await self._give(_COMMENT, more=not self._is_head)
                else:
                    if stream.ready:
                        await self._give_ready(item)
                    else:
                        await self._give(self.chunk(item), more=not self._is_head)
                if self._is_head:
                    return None
            if isinstance(stream, engine.EventStream | engine.DetachedStream) and not stream.gives_values:
                results.append(await stream.result())
        except Interrupted as asked:  # a question is not a failure, so the response is complete
            return self.asked({"key": asked.key, "question": asked.question, "token": asked.token})
        return self.end(results)

    async def _give_ready(self, item: Any) -> None:
        """Send an item in one chunk with all items that are ready, up to an error."""
        chunks: list[bytes] = []
        try:
            chunks.append(self.chunk(item))
            while self.stream.ready:
                chunks.append(self.chunk(await anext(self.stream)))
        finally:  # the code above never waits, so no cancellation comes here
            if chunks:
                await self._give(b"".join(chunks), more=not self._is_head)

    async def _give(self, chunk: bytes, *, more: bool = True) -> None:
        """Send a chunk. The beginning of the response is sent before the first chunk.

        Raises:
            _ClientGoneError: the client has gone, or has stopped reading.
        """
        if self._is_lost():
            raise _ClientGoneError
        self._limit.begin(self.stall_timeout_seconds)
        try:
            if self._begin is not None:
                begin, self._begin = self._begin, None
                await self._send(begin)
            await self._send({"type": "http.response.body", "body": b"" if self._is_head else chunk, "more_body": more})
        except asyncio.CancelledError as error:
            if not self._limit.has_ended():
                raise
            logs.warning("asgi.client_stalled", stall_timeout_seconds=self.stall_timeout_seconds)
            raise _ClientGoneError from error
        except (OSError, RuntimeError) as error:  # some servers raise these for a lost connection, and so does uvloop
            if isinstance(error, RuntimeError) and not self._is_lost():
                raise
            raise _ClientGoneError from error


class _Limit:
    """A time limit for each of many waits of one task, as `asyncio.timeout` is for one wait.

    All waits share one timer, which checks whether the present wait has reached its limit. To set and cancel a timer
    for each wait would take longer than the rest of the work for an event.

    Args:
        *seconds: the limits that waits may have, in seconds; None without a limit.
    """

    def __init__(self, *seconds: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._cancelling = task.cancelling()
        self._loop = task.get_loop()
        self._time = self._loop.time
        self._is_open, self._is_over = True, False
        self._ends_at = math.inf  # when the present wait reaches its limit
        self._shortest = min((one for one in seconds if one is not None), default=math.inf)
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def begin(self, seconds: float | None) -> None:
        """Note that a wait of at most `seconds` begins."""
        self._ends_at = math.inf if seconds is None else self._time() + seconds

    def end(self) -> None:
        """End the present wait as if it had reached its limit. After `close`, this has no effect."""
        if self._is_open:
            self._is_over, self._ends_at = True, math.inf
            self._task.cancel()

    def has_ended(self) -> bool:
        """Return whether this limit alone has cancelled the task. If so, the task continues."""
        if not self._is_over:
            return False
        self._is_over = False
        return self._task.uncancel() <= self._cancelling

    def close(self) -> None:
        """Cancel the timer: the last wait is over."""
        self._is_open = False
        self.has_ended()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._time()
        if now >= self._ends_at:
            self.end()
        if self._shortest < math.inf:  # no wait that begins meanwhile reaches its limit before the next look
            self._timer = self._loop.call_at(min(self._ends_at, now + self._shortest), self._look)


class _ClientGoneError(Exception):
    """The client has gone, or has stopped reading."""


@asynccontextmanager
async def _connected(receive: _Receive) -> AsyncGenerator[None, None]:
    """Cancel the code inside of the `with` when the client goes.

    Raises:
        _ClientGoneError: the client has gone.
        Exception: the error with which the server watched the client.
    """
    limit = _Limit()
    gone = asyncio.ensure_future(_gone(receive))
    gone.add_done_callback(lambda _: limit.end())
    try:
        yield
    except asyncio.CancelledError as error:
        if not limit.has_ended():
            raise
        raise gone.exception() or _ClientGoneError from error
    finally:
        limit.close()
        gone.cancel()
        await until(gone.done, lambda: asyncio.wait([gone]))


async def _gone(receive: _Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _look_at_connection(receive: _Receive) -> Callable[[], bool]:
    """Return a function that tells whether the connection is lost; always False if the server hides the connection.

    uvicorn with httptools tells only the last request that it has read that the client has gone. If another request
    waits behind this one, only the transport knows. A `receive` that was wrapped with `functools.wraps` is unwrapped.
    """
    transport: Any = getattr(getattr(inspect.unwrap(receive), "__self__", None), "transport", None)
    return cast("Callable[[], bool]", getattr(transport, "is_closing", bool))


def _sse(data: str, name: str | None = None) -> bytes:
    """Return a server-sent event, as the HTML standard defines it."""
    if name is None and "\n" not in data and "\r" not in data:  # nearly always
        return _bytes("data: " + data + "\n\n")  # a format would write the name of a member of an Enum that is a text
    lines = [] if name is None else [f"event: {name}"]
    lines += [f"data: {line}" for line in _NEW_LINE.split(data)]
    return _bytes("\n".join([*lines, "", ""]))


def _line(value: dict[str, Any], encode: Callable[[Any], str] | None = None) -> bytes:
    return _bytes(_as_json(value, encode) + "\n")


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else _as_json(value)


def _as_json(value: Any, encode: Callable[[Any], str | bytes] | None = None) -> str:
    return on_one_line(json.dumps(value, default=encode or _plain, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return a value that JSON can write in the place of an object that JSON does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        known = {one.name: getattr(value, one.name) for one in fields(value) if not one.name.startswith("_")}
        if isinstance(value, engine.Event | engine.Value | engine.Missed):
            return {"kind": value.kind, **known}
        return known
    dumped: Any = getattr(value, "model_dump", None)  # a model of pydantic
    if dumped is not None:
        return dumped(mode="json")
    raise TypeError(f"JSON cannot write a {type(value).__name__!r}: pass encode=, which returns the text of a value")


def _starlette() -> Any:
    try:
        return import_module("starlette.responses")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "starlette":
            raise
        raise MissingExtraError(
            "the responses of penstock.asgi are those of Starlette: pip install starlette, or fastapi", name=error.name
        ) from error


def _response(body: _Body, media_type: str, status_code: int, headers: Mapping[str, str]) -> "responses.Response":
    response: responses.Response = _response_class()(body, status_code, headers, media_type)
    return response


@functools.cache
def _response_class() -> Any:
    """Return the class of the responses. It is derived from a class of Starlette, so that FastAPI accepts it."""
    base: Any = _starlette().Response

    class StreamResponse(base):  # type: ignore[misc]
        """A response that sends a stream, and ends its call."""

        def __init__(self, content: _Body, status_code: int, headers: Mapping[str, str], media_type: str) -> None:
            # As in Starlette's own StreamingResponse: without a body, the headers have no length of it.
            self.content = content
            self.status_code = status_code
            self.media_type = media_type
            self.background: Any = None
            self.init_headers(headers)

        async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
            begin = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self.content.serve(begin, receive, send, is_head=scope["method"] == "HEAD")
            if self.background is not None:
                await self.background()

    return StreamResponse


if not TYPE_CHECKING:
    __getattr__, __dir__ = public(__name__)
