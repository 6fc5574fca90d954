"""The answers of OpenAI's protocol, whole and in parts, made of the values of a graph."""

import json
import re
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from json.encoder import encode_basestring
from time import perf_counter, time
from typing import Any, ClassVar, Final
from uuid import uuid4

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from ..telemetry.text import on_one_line
from .protocol import Base, EmbeddingsRequest, Part, ToolCall, UpstreamError
from .reading import chunk_of

_dumps: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_escape: Final[Callable[[str], str]] = encode_basestring
_MODEL: Final = re.compile(rb'"model": ?"(?:[^"\\]|\\.)*"')
_HAS_USAGE: Final = re.compile(rb'"usage": ?\{')
_HAS_REASON: Final = re.compile(rb'"finish_reason": ?"')
_NO_CHOICES: Final = re.compile(rb'"choices": ?\[\]')
_DONE: Final = b"data: [DONE]\n\n"


# With slots, so that class defaults do not hide fields that `Passed` parses later.
@dataclass(slots=True)
class Delta:
    """A part of an answer, or a whole answer, that may have more than text.

    Args:
        text: the text.
        reasoning: the text that the model thought before its answer.
        tool_calls: calls of tools, as in OpenAI's protocol: `{"id": ..., "function": {"name": ..., "arguments": ...}}`.
            A mapping without an `index` is a whole call.
        finish_reason: why the answer ends here; "stop", or "tool_calls", unless the graph says otherwise.
        usage: how many tokens were read and written: `{"prompt_tokens": ..., "completion_tokens": ...}`.
        log_probabilities: the log probabilities of the tokens, for a client that asks for `logprobs`, as in OpenAI's
            protocol: `{"token": ..., "logprob": ..., "bytes": [...], "top_logprobs": [...]}`. `/v1/completions` has
            no log probabilities.

    Attributes:
        text: the text.
        reasoning: the text that the model thought before its answer.
        tool_calls: the calls of tools.
        finish_reason: why the answer ends here.
        usage: how many tokens were read and written.
        log_probabilities: the log probabilities of the tokens.
    """

    text: str = ""
    _: KW_ONLY
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    log_probabilities: Sequence[Mapping[str, Any]] = ()


class _Call(ToolCall, total=False):
    index: int | None


class _Said(TypedDict, total=False):
    content: str | list[Part] | None
    text: str | None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[_Call] | None


_SAID: Final = TypeAdapter(_Said)


class Passed(Delta):
    """A part as an upstream has sent it. Reading a field parses the part; unread parts go on to the client as bytes."""

    def __init__(self, data: bytes, chunk: dict[str, Any] | None = None) -> None:
        self.data = data
        if chunk is not None:
            self._read(chunk)

    def __getattr__(self, name: str) -> Any:
        if name not in Delta.__slots__:
            raise AttributeError(name)
        self._read(chunk_of(self.data))
        return getattr(self, name)

    def _read(self, chunk: dict[str, Any]) -> None:
        try:
            choices: Any = chunk.get("choices") or [{}]
            choice: Any = choices[0]
            said: Any = choice.get("delta") or choice.get("message") or choice
            usage: Any = chunk.get("usage") or {}
            scores: Any = choice.get("logprobs") or {}
            _SAID.validate_python(said, strict=True)
            parts: Any = said.get("content") or [said]
            super().__init__(
                parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts),
                reasoning=said.get("reasoning") or said.get("reasoning_content") or "",
                tool_calls=said.get("tool_calls") or (),
                finish_reason=choice.get("finish_reason"),
                usage={**usage} or None,
                log_probabilities=[*(scores.get("content") or ())],
            )
        except (AttributeError, LookupError, TypeError, ValueError):
            raise UpstreamError(502, "The upstream has sent JSON that is no answer.") from None

    def named(self, model: str) -> bytes:
        """Return the bytes, with the name under which clients know the model."""
        return _MODEL.sub(lambda _: b'"model":' + _dumps(model).encode(), self.data, count=1)


def as_json(value: Any) -> bytes:
    """Return JSON in UTF-8; half of a surrogate pair, which UTF-8 cannot encode, is replaced."""
    return on_one_line(_dumps(value)).encode(errors="replace")


def sse(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event with JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (head, as_json(data))


def usage_of(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the usage with all numbers, because clients expect all of them; None if nobody has counted tokens.

    What an upstream has sent in the place of a number is left out.
    """
    if usage is None:
        return None
    counted = (one for one in usage.items() if isinstance(one[1], dict if one[0].endswith("_details") else int | float))
    found: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0, **dict(counted)}
    return {**found, "total_tokens": found.get("total_tokens", found["prompt_tokens"] + found["completion_tokens"])}


class Answer:
    """An answer in the making: it takes the values of a graph, and makes the bytes for the client.

    Attributes:
        usage: the numbers of tokens, from the graph; None if the graph has given none.
        finish_reason: why the answer has ended, from the graph; None if the graph has given no reason.
        parts: how many parts have come.
        began_at: when the request came, in seconds of `perf_counter`.
        first_at: when the first part came; None before.
        error: the error with which the answer has failed; None if it has not failed.
        status: the status of the response; None until it was sent.
        is_complete: whether the answer has come to its end; otherwise, it has failed or its client has left.
    """

    PREFIX: ClassVar[str] = "chatcmpl-"
    OBJECT: ClassVar[str] = "chat.completion"
    CHUNK: ClassVar[str] = "chat.completion.chunk"
    OPERATION: ClassVar[str] = "chat"
    REASON: ClassVar[str] = "stop"

    def __init__(self, request: Base, model: str, name: str | None = None) -> None:
        self.request, self.model = request, model
        self.id, self.created = name or f"{self.PREFIX}{uuid4().hex}", int(time())
        self.usage: Mapping[str, Any] | None = None
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.status: int | None = None
        self.is_complete = False
        self.parts = 0
        self.began_at = perf_counter()
        self.first_at: float | None = None
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._log_probabilities: list[Mapping[str, Any]] = []
        self._head: dict[str, Any] = {"id": self.id, "object": self.CHUNK, "created": self.created, "model": model}
        self._before, self._after = "", ""
        self._passed: Passed | None = None  # the last part, if it was passed on as bytes

    def take(self, given: Any) -> Delta:
        """Take a value of the graph, and return the value as a part.

        Raises:
            TypeError: the value is neither a text nor a `Delta`.
        """
        self.parts += 1
        self.first_at = self.first_at or perf_counter()
        if not isinstance(given, str | Delta):
            raise TypeError(f"the graph of model {self.model!r} gave {given!r}: it has to give str or serving.Delta")
        item = Delta(given) if isinstance(given, str) else given
        self.finish_reason = item.finish_reason or self.finish_reason
        self.usage = item.usage or self.usage
        self._log_probabilities += item.log_probabilities
        if not item.tool_calls:
            return item
        calls = [*map(self._call, item.tool_calls)]
        return Delta(item.text, reasoning=item.reasoning, tool_calls=calls, log_probabilities=item.log_probabilities)

    def _call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add a part of a tool call to that call; return the part with the index of the call."""
        index: int = given.get("index", len(self._calls))
        if index not in self._calls:
            name = given.get("id") or f"call_{self.id[-20:]}_{index}"
            given = {**given, "id": name, "type": given.get("type") or "function"}
            self._calls[index] = {"id": name, "type": given["type"], "function": {"name": "", "arguments": ""}}
        function: Mapping[str, str] = given.get("function") or {}
        for name in ("name", "arguments"):
            self._calls[index]["function"][name] += function.get(name) or ""
        return {**given, "index": index}

    @property
    def reason(self) -> str:
        """Why the answer has ended."""
        return self.finish_reason or ("tool_calls" if self._calls else self.REASON)

    def part(self, item: Any) -> bytes:
        """Return the bytes to send for a part."""
        if isinstance(item, str) and self._before and self._passed is None:  # nearly all parts
            self.parts += 1
            return f"{self._before}{on_one_line(_escape(item))}{self._after}".encode(errors="replace")
        if isinstance(item, Passed):
            return self._pass(item)
        delta, self._passed = self.take(item), None
        if not self._before:
            mark = _dumps(self._chunk({"content": "\0"}))
            self._before, self._after = f"data: {mark}\n\n".split('"\\u0000"')
        said: dict[str, Any] = {"role": "assistant", "content": ""} if self.parts == 1 else {}
        if delta.text:
            said["content"] = delta.text
        if delta.reasoning:
            said["reasoning"] = said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = delta.tool_calls
        chunk = self._chunk(said)
        if delta.log_probabilities:
            chunk["choices"][0]["logprobs"] = {"content": delta.log_probabilities}
        return sse(chunk)

    def _pass(self, item: Passed) -> bytes:
        self.parts += 1
        self.first_at = self.first_at or perf_counter()
        self._passed = item
        if _HAS_USAGE.search(item.data) or _HAS_REASON.search(item.data):
            self.usage, self.finish_reason = item.usage or self.usage, item.finish_reason or self.finish_reason
            if not self.request._wants_usage and _NO_CHOICES.search(item.data):
                return b""  # this server has asked for these numbers, not the client
        data = item.named(self.model)
        if not data.isascii() or b"\n" in data or b"\r" in data:
            data = on_one_line(data.decode(errors="replace")).encode()
        return b"data: " + data + b"\n\n"

    def _chunk(self, said: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice("delta", said, finish_reason)]}

    def _choice(self, place: str, said: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, place: said, "logprobs": None, "finish_reason": finish_reason}

    def end(self) -> bytes:
        """Return the last events of a stream."""
        if self._passed is not None:  # the upstream has sent the end
            return _DONE
        last = sse(self._chunk({} if self.parts else {"role": "assistant", "content": ""}, self.reason))
        if self.request._wants_usage and self.usage is not None:
            last += sse({**self._head, "choices": [], "usage": usage_of(self.usage)})
        return last + _DONE

    def failed(self, error: Exception, told: dict[str, Any]) -> bytes:
        """Return the last events of a stream that has failed; `told` is the error for the client."""
        self.error = error
        return sse(told) + _DONE

    def gather(self, item: Any) -> None:
        """Take a part of an answer that is sent as a whole."""
        delta = self.take(item)
        self._passed = item if isinstance(item, Passed) else None
        self._texts.append(delta.text)
        self._reasonings.append(delta.reasoning)

    def json(self) -> bytes:
        """Return the body of the whole answer; the answer of an upstream goes on as it came."""
        if self.parts == 1 and self._passed is not None:
            return self._passed.named(self.model)
        return as_json(self.whole())

    def whole(self) -> dict[str, Any]:
        """Return the answer, when all parts were taken."""
        choice = self._choice("message", self.message(), self.reason)
        if self._log_probabilities:
            choice["logprobs"] = {"content": self._log_probabilities}
        return {**self._head, "object": self.OBJECT, "choices": [choice], "usage": usage_of(self.usage)}

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of a chat, when all parts were gathered."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._calls:
            message |= {"content": message["content"] or None, "tool_calls": [*self._calls.values()]}
        if thought := "".join(self._reasonings):
            message["reasoning"] = message["reasoning_content"] = thought
        return message


class Completion(Answer):
    """The answer to `/v1/completions`, which has only text."""

    PREFIX: ClassVar[str] = "cmpl-"
    OBJECT: ClassVar[str] = "text_completion"
    CHUNK: ClassVar[str] = "text_completion"
    OPERATION: ClassVar[str] = "text_completion"

    def _choice(self, place: str, said: Any, finish_reason: str | None) -> dict[str, Any]:
        return super()._choice("text", said.get("content") or "", finish_reason)


class Embeddings(Answer):
    """The answer to `/v1/embeddings`: a vector for each text, or the answer of an upstream."""

    OPERATION: ClassVar[str] = "embeddings"
    REASON: ClassVar[str] = ""  # an answer with vectors has no finish reason

    def __init__(self, request: EmbeddingsRequest, model: str) -> None:
        super().__init__(request, model)
        self._is_base64 = request.encoding_format == "base64"
        self._vectors: list[Any] = []

    def gather(self, item: Any) -> None:
        """Take the vector of a text, or the answer of an upstream."""
        self.parts += 1
        if isinstance(item, Passed):
            self._passed, self.usage = item, item.usage
        else:
            vector = [float(one) for one in item]
            self._vectors.append(b64encode(array("f", vector).tobytes()).decode() if self._is_base64 else vector)

    def whole(self) -> dict[str, Any]:
        """Return the answer; the protocol wants numbers of tokens, which are 0 because nobody has counted."""
        data = [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(self._vectors)]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return {"object": "list", "model": self.model, "data": data, "usage": usage}
