"""The requests of OpenAI's protocol: their bodies, the fields that are honoured, and errors in its form."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NotRequired, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from .._errors import PenstockError
from ..actors.accepted import OptionRule
from ..telemetry import logs

KEPT: Final = ConfigDict(extra="allow", allow_inf_nan=False)
_MAX_NAME: Final = 256
NAME: Final = OptionRule(
    f"a name of 1 to {_MAX_NAME} characters, which clients send",
    lambda it: isinstance(it, str) and 0 < len(it) <= _MAX_NAME,
)
_UNKNOWN_NAMES: Final = 1000  # the most unknown names that are logged, each once, since a client can send any number

_NAMES_AT_ONCE: Final = 20  # of one request: the others come in later lines, with later requests

Text = Annotated[str, Field(max_length=256)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class APIError(PenstockError):
    """An error in OpenAI's form, which a graph may raise to tell the client what is wrong with a request.

    Args:
        status: the status of the response, from 400 to 599.
        message: the message for the client.
        param: the field of the request that is wrong; None if no field is wrong.
        code: a word that programs look for, such as "model_not_found", or the number of an upstream.
        headers: further headers of the response, such as Retry-After, which `ps.retry_after` reads as well.

    Attributes:
        status: the status of the response.
        param: the field of the request that is wrong; None if no field is wrong.
        code: the word, or the number, for programs.
        headers: the further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, param, code, headers)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return str(self.args[1])


class UpstreamError(APIError):
    """An upstream is unreachable, busy or broken: `Retry(retry_on=serving.UpstreamError)` and a failover may help.

    That a request is wrong is an `APIError` of no such class.
    """


KINDS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip


def error_of(status: int, message: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@with_config(KEPT)
class Part(TypedDict):
    """A part of the content of a message."""

    type: Text
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]


@with_config(KEPT)
class Function(TypedDict):
    """The function and the arguments of a call of a tool."""

    name: NotRequired[str | None]
    arguments: NotRequired[str | None]


@with_config(KEPT)
class ToolCall(TypedDict):
    """A call of a tool that the model has made."""

    function: NotRequired[Function | None]


@with_config(KEPT)
class Message(TypedDict):
    """A message of a chat."""

    role: Text
    content: NotRequired[str | list[Part] | None]
    tool_calls: NotRequired[list[ToolCall] | None]


@with_config(KEPT)
class StreamOptions(TypedDict):
    """The options of a stream."""

    include_usage: NotRequired[bool | None]


class Base(BaseModel):
    """The fields that all requests have, and unknown fields.

    Attributes:
        model: the name of the model, as the server names it.
        user: the user for whom the client asks, in the client's words.
    """

    model_config = KEPT
    _path: ClassVar[str] = ""

    model: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    user: str | None = None

    # Not `PrivateAttr`, which gives each class a method whose annotations cannot be resolved.
    __slots__ = ("_caller", "_raw")
    if TYPE_CHECKING:
        _caller: str | None
        _raw: bytes

    @property
    def caller(self) -> str | None:
        """The name of the API key that the client has sent; None without keys."""
        return getattr(self, "_caller", None)

    @property
    def body(self) -> dict[str, Any]:
        """The body as the client sent it, with unknown fields; a new dict each time."""
        raw: bytes | None = getattr(self, "_raw", None)
        found: dict[str, Any] = self.model_dump(mode="json", exclude_unset=True) if raw is None else json.loads(raw)
        return found

    @property
    def _wants_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        options: StreamOptions | None = getattr(self, "stream_options", None)
        return bool(options and options.get("include_usage"))

    def _chat(self) -> "Base":
        """Return the request that a graph gets."""
        return self

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages that a graph is called with."""
        return []

    def _changes(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield each field that changes the answer, whether it is set, and whether a graph can read it in `request`."""
        yield from ()


class Request(Base):
    """The request of a client; a graph with a parameter `request` gets this object.

    Attributes:
        stream: whether the client reads the answer while it is made.
        stream_options: the options of the stream.
        temperature: from 0, for the likeliest token, to 2.
        top_p: the share of probability from which tokens are chosen.
        max_tokens: the most tokens of the answer.
        max_completion_tokens: the most tokens of the answer, under the name that newer clients use.
        top_logprobs: for a client that asks for `logprobs`: how many of the likeliest tokens come with each token, up
            to 20.
        stop: texts before which the answer ends.
        seed: a number for repeatable answers.
        n: how many answers the client asks for.
        presence_penalty: how much less likely a token becomes once it has occurred, from -2 to 2.
        frequency_penalty: how much less likely a token becomes each time that it occurs, from -2 to 2.
        logit_bias: numbers to add to the logits of tokens, by token.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None


class ChatRequest(Request):
    """The body of `/v1/chat/completions`."""

    _path: ClassVar[str] = "chat/completions"

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[Text] | None = None
    audio: dict[str, Any] | None = None

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages; the reasoning of a model comes under one of two names, and is there under both."""
        return [completed(message) for message in cast("list[dict[str, Any]]", self.messages)]

    def _changes(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the fields that change the answer."""
        yield "n", (self.n or 1) > 1, False
        yield "logprobs", self.logprobs or self.top_logprobs, True
        yield "audio", self.audio or "audio" in (self.modalities or ()), False
        yield "tools", self.tools, True
        yield "functions", self.functions, True
        yield "response_format", (self.response_format or {}).get("type", "text") != "text", True
        for number, message in enumerate(self.messages):
            content = message.get("content")
            for place, part in enumerate(content if isinstance(content, list) else ()):
                yield f"messages[{number}].content[{place}]", part["type"] not in ("text", "refusal"), True


def completed(message: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that a graph may read to a message that has come, and return the message."""
    message.setdefault("content", None)
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        message["reasoning"] = message["reasoning_content"] = thought
    return message


class CompletionRequest(Request):
    """The body of `/v1/completions`; a graph gets the prompt as a message of the user."""

    _path: ClassVar[str] = "completions"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def _prompt(self) -> object:
        return self.prompt[0] if isinstance(self.prompt, list) and len(self.prompt) == 1 else self.prompt

    def _messages(self) -> list[dict[str, Any]]:
        """Return the prompt as a message; tokens, and several prompts, become JSON."""
        prompt = self._prompt
        return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(prompt)}]

    def _changes(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the fields that change the answer."""
        yield "prompt", not isinstance(self._prompt, str), False
        yield "n", (self.n or 1) > 1, False
        yield "best_of", (self.best_of or 1) > 1, False
        yield "logprobs", self.logprobs is not None, False
        yield "echo", self.echo, False
        yield "suffix", self.suffix, False


class EmbeddingsRequest(Base):
    """The body of `/v1/embeddings`."""

    _path: ClassVar[str] = "embeddings"

    input: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None

    @property
    def _texts(self) -> list[Any]:
        """The texts, or lists of tokens, each of which becomes a vector."""
        return [self.input] if isinstance(self.input, str) else self.input

    def _changes(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the fields that change the answer."""
        yield "input", not all(isinstance(one, str) for one in self._texts), False
        yield "dimensions", self.dimensions, False


B = TypeVar("B", bound=Base)

_logged: set[str] = set()


def parsed(kind: type[B], raw: bytes, caller: str | None) -> B:
    """Return the request of a body; unknown names are logged once.

    Raises:
        APIError: the body is wrong; `param` names the field.
    """
    try:
        request = kind.model_validate_json(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        alike = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
        first = max(alike, key=lambda one: len(one["loc"]))  # the error of the type that fits best
        if first["type"] == "json_invalid":
            raise APIError(400, f"The body is no JSON: {first['msg']}") from None
        param = _path(first["loc"], raw, is_missing=first["type"] == "missing")
        raise APIError(400, f"{param or 'The body'}: {first['msg']}", param) from None
    request._caller, request._raw = caller, raw
    unknown = (name[:64] for name in request.model_extra or () if name[:64] not in _logged)
    if named := {*islice(unknown, min(_NAMES_AT_ONCE, _UNKNOWN_NAMES - len(_logged)))}:
        _logged.update(named)
        logs.warning("serving.unknown_fields", path=kind._path, fields=sorted(named))
    return request


def _path(where: tuple[int | str, ...], raw: bytes, *, is_missing: bool) -> str | None:
    """Return the path of a field as a person writes the path, without the types that pydantic has tried."""
    value: Any = json.loads(raw)
    path = ""
    for number, step in enumerate(where, 1):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):  # the name of a type, or of a missing field
            if not (is_missing and number == len(where)):
                continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.lstrip(".") or None
