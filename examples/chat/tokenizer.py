"""Text as tokens, and messages as a prompt, as a GGUF file says."""

# The types of tokenizers are missing.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock import serving

CONTROL = 3  # the type of a token that stands for no text
MARK = "\ufdd0"  # no character: it may be in no text


class ChatTokenizer:
    """The tokens of a model: those of bytes that come together often, and those that begin and end a message."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Read the metadata of a GGUF file.

        Raises:
            ValueError: Its tokenizer is of another kind, or it has no template for a chat.
        """
        about = {name.removeprefix("tokenizer."): value for name, value in metadata.items()}
        if (kind := (about.get("ggml.model"), about.get("ggml.pre"))) != ("gpt2", "smollm"):
            raise ValueError(f"the tokenizer is {kind[0]} {kind[1]}; only gpt2 smollm can be read")
        if "chat_template" not in about:
            raise ValueError("the file has no tokenizer.chat_template, so it is no model for a chat")
        tokens: list[str] = about["ggml.tokens"]
        merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in about["ggml.merges"])]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        types = zip(tokens, about["ggml.token_type"], strict=True)
        self._control = {token: vocabulary[token] for token, kind in types if kind == CONTROL}
        self._tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        # A tokenizer shows a byte as a character: itself if it can be printed, else one from 256 on, in order.
        shown = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
        printed = [ord(character) for character in shown if ord(character) < 256]
        byte_of = dict(zip(shown, printed + sorted(set(range(256)) - set(printed)), strict=True))
        self._bytes = [b"" if each in self._control else bytes(map(byte_of.__getitem__, each)) for each in tokens]
        end: int = about["ggml.eos_token_id"]
        self.ends = frozenset({end, self._control.get("<|endoftext|>", end)})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(about["chat_template"])
        self._names = {name: tokens[about[f"ggml.{name}_id"]] for name in ("bos_token", "eos_token")}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; the name of a control token is only text in it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation, as the template of the model writes it, up to where its answer begins.

        A message that has the name of a control token in it, such as `<|im_end|>`, does not end there.

        Raises:
            APIError: The template refuses the messages.
        """
        names = "|".join(map(re.escape, self._control))
        first = f"(?={names})."  # the first character of a name
        safe = [{key: re.sub(first, rf"\g<0>{MARK}", value) for key, value in each.items()} for each in messages]
        try:
            text = self._template.render(messages=safe, add_generation_prompt=True, **self._names)
        except (TemplateError, TypeError) as error:
            raise serving.APIError(400, f"the model's template refuses the messages: {error}", "messages") from error
        tokens: list[int] = []
        for part in re.split(f"({names})", text):
            tokens += [self._control[part]] if part in self._control else self.encode(part.replace(MARK, ""))
        return tokens

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return self._bytes[token]
