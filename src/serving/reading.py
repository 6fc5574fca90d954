"""What an upstream answers: its size, lines and form are checked, and an error inside says whose fault it is."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final, cast

import httpx

from .protocol import KINDS, APIError, UpstreamError

_PASSING: Final = (408, 425, 429)  # all other statuses from 400 to 499 are the request's own fault
_TOLD: Final = {429: 429, 503: 503}  # any other failure of the server is a bad gateway
_STATUS_OF: Final = {**{kind: status for status, kind in KINDS.items()}, "invalid_request_error": 400}
_STATUS: Final = re.compile("[45][0-9][0-9]")
_TEXTS: Final = ("message", "error_message", "detail")
_MAX_TEXT: Final = 10_000
_MAX_ERROR_BYTES: Final = 1 << 20  # an error may repeat the request that it refuses
_ERROR_SECONDS: Final = 5.0  # the status says most, so the body of an error is not waited for
_END_SECONDS: Final = 0.1  # nearly always the end of a response comes with the last event
_BOM: Final = b"\xef\xbb\xbf"
_DONE: Final = b"[DONE]"


def chunk_of(data: bytes) -> dict[str, Any]:
    """Return an answer, or a part of an answer, from its bytes.

    Raises:
        APIError: there is an error in place of the answer, or beside it, and the request is wrong.
        UpstreamError: the error is that of the server, or the bytes are no object of JSON.
    """
    found = _read(data)
    if not isinstance(found, dict):
        raise UpstreamError(502, "The upstream has sent something else than an object of JSON.")
    chunk = cast("dict[str, Any]", found)
    choices = cast("list[object]", chunk["choices"]) if isinstance(chunk.get("choices"), list) else []
    has_answer = "choices" in chunk or "data" in chunk
    is_error = not has_answer and any(name in _TEXTS or name.startswith("error_") for name in chunk)
    for one in (chunk, *choices):
        known = cast("dict[str, Any]", one if isinstance(one, dict) else {})
        kinds = known.get("object"), known.get("type"), known.get("finish_reason")
        if is_error or known.get("error") or "error" in kinds:
            raise failure(200, known)
    return chunk


def _read(data: bytes) -> object:
    with suppress(ValueError, RecursionError):
        return cast("object", json.loads(data.decode()))
    return None


def failure(status: int, found: Any, retry_after: str = "") -> APIError:
    """Return the error that an upstream has answered with.

    Args:
        status: the status of the response. If that is no error, the error itself says its status, or it is 502.
        found: the body of the response, or an event, as far as it is JSON.
        retry_after: the header of this name.
    """
    outer = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})
    inner: Any = outer.get("error")
    told = cast("Mapping[str, Any]", inner if isinstance(inner, Mapping) else outer)
    if status < 400:
        given = next(filter(_STATUS.fullmatch, (str(told.get(name)) for name in ("code", "status"))), None)
        status = int(given or _STATUS_OF.get(str(told.get("type")), 502))
    said: list[Any] = [inner, *map(told.get, _TEXTS), f"The upstream has failed ({status})."]
    # In logs, half of a surrogate pair would be an error of its own.
    message = next(one for one in said if one and isinstance(one, str))[:_MAX_TEXT].encode(errors="replace").decode()
    if status == 404 and "message" not in told:
        message = "The upstream does not know this path: its base URL ends with /v1 as a rule."
    if 400 <= status < 500 and status not in _PASSING:
        param, code = told.get("param"), told.get("code")
        return APIError(
            status, message, param if isinstance(param, str) else None, code if isinstance(code, str | int) else None
        )  # fmt: skip
    can_be_sent = retry_after and retry_after.isascii() and retry_after.isprintable()
    return UpstreamError(_TOLD.get(status, 502), message, headers={"retry-after": retry_after} if can_be_sent else {})


async def parts_of(
    response: httpx.Response, max_bytes: int, *, is_stream: bool
) -> AsyncGenerator[tuple[bytes, dict[str, Any] | None], None]:
    """Read a response.

    Args:
        response: the response, of which nothing was read.
        max_bytes: how large a whole answer, or an event, may be.
        is_stream: whether a stream was asked for.

    Yields:
        The bytes of the whole answer, or of each event, as JSON; and what they say, if they were parsed.

    Raises:
        APIError: the request is wrong, as the server says.
        UpstreamError: the server has failed, or has sent no answer.
    """
    chunks, headers = response.aiter_raw(), response.headers
    if not response.is_success:
        found = _read(await _gathered(chunks, _MAX_ERROR_BYTES, _ERROR_SECONDS))
        raise failure(response.status_code, found, headers.get("retry-after", ""))
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UpstreamError(502, "The upstream has compressed its answer, which was not asked for.")
    if not is_stream or headers.get("content-type", "").lower().startswith("application/json"):
        data = await _gathered(chunks, max_bytes)
        if len(data) > max_bytes:
            raise UpstreamError(502, f"The upstream has sent an answer of more than {max_bytes} bytes.")
        data = data.removeprefix(_BOM)
        yield data, chunk_of(data)
        return
    events = _Events(max_bytes)
    async for chunk in chunks:
        for data in events.feed(chunk):
            if data == _DONE:
                await _gathered(chunks, _MAX_ERROR_BYTES, _END_SECONDS)  # so that the connection can be used again
                return
            # Only bytes that may be no part of an answer are parsed here: the others may go on unread.
            is_part = b'"choices"' in data and b'"error' not in data
            yield data, None if is_part else chunk_of(data)
    if _DONE not in events.feed(b"\n"):
        raise UpstreamError(502, "The upstream has ended its stream before the end of the answer.")


async def _gathered(chunks: AsyncIterator[bytes], max_bytes: int, seconds: float | None = None) -> bytes:
    """Return the bytes of a response, up to the first that are too many; with a limit of time, those that came."""
    body = bytearray()
    with suppress(*(() if seconds is None else (TimeoutError, httpx.HTTPError))):
        async with asyncio.timeout(seconds):
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    break
    return bytes(body)


class _Events:
    """The events of a stream, cut out of chunks: data of several lines is joined, and all else is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()  # the line that has begun
        self._data = bytearray()  # the lines of an event that has several
        self._is_first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take a chunk; return the data of the events that are complete now."""
        *lines, rest = chunk.split(b"\n")
        events: list[bytes] = []
        if lines:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
            if self._is_first:
                lines[0], self._is_first = lines[0].removeprefix(_BOM), False
        self._line += rest
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                # Nearly all events have one line, which is known by its braces: some servers write no empty line.
                if not self._data and (data == _DONE or (data.startswith(b"{") and data.endswith(b"}"))):
                    events.append(data)
                elif data:
                    self._data += data + b"\n"
            elif self._data and not line.strip():
                events.append(bytes(self._data))
                self._data.clear()
        if len(self._line) + len(self._data) > self._max_bytes:
            raise UpstreamError(502, f"The upstream has sent an event of more than {self._max_bytes} bytes.")
        return events
