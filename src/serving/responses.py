"""Responses, OpenAI's other protocol: its requests become requests of a chat, and its answers have all events."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, NotRequired, cast
from uuid import uuid4

from pydantic import Field, with_config
from typing_extensions import TypedDict

from ..telemetry import logs
from .answers import Answer, Delta, sse, usage_of
from .protocol import KEPT, APIError, Base, ChatRequest, Count, Part, Request, Text, parsed

_STATEFUL: Final = ("previous_response_id", "conversation", "background")
_ALIKE: Final = (  # fields that a chat has as well
    "model", "stream", "user", "temperature", "top_p", "parallel_tool_calls", "max_completion_tokens", "top_logprobs",
    "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
# For each kind of item: the prefix of its id, the name of its events, and its part.
_ITEMS: Final[Mapping[str, tuple[str, str, dict[str, Any] | None]]] = {
    "reasoning": ("rs", "response.reasoning_text", {"type": "reasoning_text", "text": ""}),
    "message": ("msg", "response.output_text", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "function_call": ("fc", "response.function_call_arguments", None),
}


@with_config(KEPT)
class Item(TypedDict):
    """An item of the input: a message, a call of a function, the result of that call, or reasoning of the model."""

    type: NotRequired[Text]
    role: NotRequired[Text | None]
    content: NotRequired[str | list[Part] | None]
    summary: NotRequired[list[Part] | None]
    output: NotRequired[str | list[Part] | None]


@with_config(KEPT)
class TextOptions(TypedDict):
    """The options for the text of a response, such as its format."""

    format: NotRequired[dict[str, Any] | None]


class ResponsesRequest(Request):
    """The body of `/v1/responses`; a graph gets the request as a request of a chat."""

    _path: ClassVar[str] = "responses"

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    include: list[Text] | None = None

    @property
    def _wants_scores(self) -> bool | None:
        """Whether the tokens come with log probabilities: True, or None for the field of a chat that is left out."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()) or None

    def _chat(self) -> ChatRequest:
        """Return the request as a request of a chat.

        Raises:
            APIError: the request needs a server that keeps earlier responses.
        """
        for name in _STATEFUL:
            if getattr(self, name):
                raise APIError(400, f"{name}: nothing is kept of earlier responses", name, "unsupported_value")
        form: dict[str, Any] = (self.text or {}).get("format") or {}
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
        tools = [_function(tool) for tool in self.tools or () if tool.get("type") == "function"]
        others = {str(tool.get("type"))[:64] for tool in self.tools or ()} - {"function"}
        if others:
            logs.warning("serving.tools_left_out", types=sorted(others)[:20])
        choice = _function(self.tool_choice) if isinstance(self.tool_choice, dict) else self.tool_choice
        body = {key: value for key, value in self.body.items() if key in _ALIKE or key not in type(self).model_fields}
        body |= {
            "messages": _messages(self.instructions, self.input), "max_tokens": self.max_output_tokens,
            "logprobs": self._wants_scores,
            "response_format": form or None, "reasoning_effort": (self.reasoning or {}).get("effort"),
            "tools": tools or None, "tool_choice": choice if tools else None,
        }  # fmt: skip
        raw = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
        return parsed(ChatRequest, raw, self.caller)


def _function(given: dict[str, Any]) -> dict[str, Any]:
    """Return a tool, or the choice of a tool, in the form of a chat."""
    return {"type": "function", "function": {key: value for key, value in given.items() if key != "type"}}


def _messages(instructions: str | None, given: str | list[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat for the input of a response."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    thought = ""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for place, item in enumerate(cast("list[dict[str, Any]]", items)):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought = str(_content(item.get("content") or item.get("summary") or [], place))
        elif kind == "function_call_output":
            content = _content(item.get("output") or "", place)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind in ("message", "function_call"):
            message: dict[str, Any] = {"role": item.get("role") or "assistant"}
            if kind == "message":
                role = str(message["role"]).replace("developer", "system")
                message |= {"role": role, "content": _content(item.get("content") or "", place)}
            elif found and found[-1]["role"] == "assistant":
                message = found.pop()
            if kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                message = {"content": None, **message, "tool_calls": [*message.get("tool_calls", ()), call]}
            if thought and message["role"] == "assistant":
                message["reasoning"] = message["reasoning_content"] = thought
                thought = ""
            found.append(message)
        else:
            raise APIError(400, f"input[{place}]: items of type {kind!r} are not served", f"input[{place}]")
    return found


def _content(given: Any, place: int) -> Any:
    """Return the content of a message: a text, or parts if the content has more than text."""
    if isinstance(given, str):
        return given
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(given):
        if part["type"] in _TEXTS:
            parts.append({"type": "text", "text": part.get("text") or part.get("refusal") or ""})
        elif part["type"] == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            where = f"input[{place}].content[{number}]"
            raise APIError(400, f"{where}: parts of type {part['type']!r} are not served", where)
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


class _Output:
    """An item of the output, and its text so far."""

    def __init__(self, kind: str, index: int, fields: Mapping[str, Any]) -> None:
        prefix, self.event, self.part = _ITEMS[kind]
        self.texts: list[str] = []
        self.item: dict[str, Any] = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.where: dict[str, Any] = {"item_id": self.item["id"], "output_index": index}
        self.more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}  # further fields of its text events
        if self.part is not None:
            self.where["content_index"] = 0


class Response(Answer):
    """The answer to `/v1/responses`."""

    PREFIX: ClassVar[str] = "resp_"

    def __init__(self, request: Base, model: str) -> None:
        super().__init__(request, model)
        self._outputs: list[_Output] = []
        self._open: dict[str | int, _Output] = {}  # by the kind of a text, or by the index of a call
        self._number = 0

    def part(self, item: Any) -> bytes:
        """Return the events for a part."""
        return self._begin() + b"".join(self._events(self.take(item)))

    def gather(self, item: Any) -> None:
        """Take a part of an answer that is sent as a whole."""
        self.part(item)

    def end(self) -> bytes:
        """Return the last events of a stream."""
        last = self._begin() + b"".join(self._closed(self._open))
        return last + self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, error: Exception, told: dict[str, Any]) -> bytes:
        """Return the last event of a stream that has failed; `told` is the error for the client."""
        self.error = error
        said = {"code": told["error"]["code"] or "server_error", "message": told["error"]["message"]}
        return self._event("response.failed", response={**self._response("failed"), "error": said})

    def whole(self) -> dict[str, Any]:
        """Return the answer, when all parts were taken."""
        for _ in self._closed(self._open):
            pass
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "completed" if self.reason in ("stop", "tool_calls") else "incomplete"

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                fields: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
                yield from self._said(kind, kind, text, {"content": [], **fields}, delta.log_probabilities)
        for call in delta.tool_calls:
            known = self._calls[call["index"]]
            function: dict[str, str] = call.get("function") or {}
            fields = {"call_id": known["id"], "name": known["function"]["name"], "arguments": ""}
            yield from self._said("function_call", call["index"], function.get("arguments") or "", fields)

    def _said(
        self, kind: str, key: str | int, text: str, fields: dict[str, Any], scores: Sequence[Any] = ()
    ) -> Iterator[bytes]:
        """Yield the events for more text of an item; a new item begins, and ends the other open texts."""
        if key not in self._open:
            yield from self._closed([other for other in self._open if isinstance(other, str)])
            one = self._open[key] = _Output(kind, len(self._outputs), fields)
            self._outputs.append(one)
            yield self._event("response.output_item.added", output_index=one.where["output_index"], item=dict(one.item))
            if one.part is not None:
                yield self._event("response.content_part.added", **one.where, part=one.part)
        if text:
            one = self._open[key]
            one.texts.append(text)
            for told in one.more.values():
                told += scores
            more = dict.fromkeys(one.more, scores)
            yield self._event(f"{one.event}.delta", **one.where, **more, delta=text)

    def _closed(self, keys: Iterable[str | int]) -> Iterator[bytes]:
        for key in [*keys]:
            yield from self._done(self._open.pop(key))

    def _done(self, one: _Output) -> Iterator[bytes]:
        text, item = "".join(one.texts), one.item
        item["status"] = "completed"
        if one.part is None:
            item["arguments"] = text
            yield self._event(f"{one.event}.done", **one.where, arguments=text, name=item["name"])
        else:
            part = {**one.part, **one.more, "text": text}
            item["content"] = [part]
            yield self._event(f"{one.event}.done", **one.where, **one.more, text=text)
            yield self._event("response.content_part.done", **one.where, part=part)
        yield self._event("response.output_item.done", output_index=one.where["output_index"], item=dict(item))

    def _response(self, status: str) -> dict[str, Any]:
        asked, usage = cast("ResponsesRequest", self.request), None
        if status in ("completed", "incomplete") and (counted := usage_of(self.usage)) is not None:
            read: dict[str, int] = counted.get("prompt_tokens_details") or {}
            written: dict[str, int] = counted.get("completion_tokens_details") or {}
            usage = {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": read.get("cached_tokens", 0)},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens", 0)},
                "total_tokens": counted["total_tokens"],
            }
        why = "max_output_tokens" if self.reason == "length" else "content_filter"
        same = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user")
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "error": None, "incomplete_details": {"reason": why} if status == "incomplete" else None,
            "output": [dict(one.item) for one in self._outputs], "background": False, "store": False,
            "previous_response_id": None, "truncation": "disabled", "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto", "text": asked.text or {"format": {"type": "text"}},
            "usage": usage, **{name: getattr(asked, name) for name in same},
        }  # fmt: skip
