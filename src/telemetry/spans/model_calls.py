"""What the result of a model call says about it, in the shapes of OpenAI's and Anthropic's clients."""

from collections.abc import Mapping
from typing import Any

from .. import names

# In the words of OpenAI's responses and Anthropic's messages, then of OpenAI's chat completions and embeddings.
_INPUT = ("input_tokens", "prompt_tokens")
_OUTPUT = ("output_tokens", "completion_tokens")
# Anthropic counts these beside `input_tokens`, OpenAI as a part of it; the conventions count all of them.
_BESIDE_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")


def usage_of(result: Any) -> dict[str, str | int]:
    """Return the attributes of a result: tokens and the model that answered; none for one that says nothing.

    Args:
        result: what the node returned: an object with attributes, or a mapping.
    """
    found: dict[str, str | int] = {}
    usage = _read(result, "usage")
    tokens = _first_count(usage, _INPUT)
    if tokens is not None:
        found[names.INPUT_TOKENS] = tokens + sum(_first_count(usage, (name,)) or 0 for name in _BESIDE_INPUT)
    tokens = _first_count(usage, _OUTPUT)
    if tokens is not None:
        found[names.OUTPUT_TOKENS] = tokens
    model = _read(result, "model")
    if isinstance(model, str):
        found[names.RESPONSE_MODEL] = model
    return found


def _first_count(usage: Any, fields: tuple[str, ...]) -> int | None:
    for field in fields:
        count = _read(usage, field)
        if isinstance(count, int) and not isinstance(count, bool):
            return count
    return None


def _read(value: Any, field: str) -> Any:
    try:
        if isinstance(value, Mapping):
            return value.get(field)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return getattr(value, field, None)
    except Exception:  # noqa: BLE001 - code of the user's result, which must not fail the node for its trace
        return None
