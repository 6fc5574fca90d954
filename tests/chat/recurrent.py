"""A recurrent model that runs through the actor of the chat example: its state is one vector for each slot."""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_static

from examples.chat.model import Parameters
from penstock.devices import Array

LETTERS = 40
END, BROKEN = 38, 39  # ends an answer; makes all that follows no number


def tokens_of(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the tokens of a chat, which is its last message: each letter is a token."""
    return [ord(letter) % END for letter in messages[-1]["content"]]


def bytes_of(token: int) -> bytes:
    return chr(97 + token).encode()


@cache
def weights(seed: int = 0, width: int = 16) -> Parameters:
    random = np.random.default_rng(seed)
    letters = random.normal(0, 1, (LETTERS, width)).astype(np.float32)
    letters[BROKEN] = np.nan
    return {"mix": random.normal(0, 1.5 * width**-0.5, (width, width)).astype(np.float32), "letters": letters}


@register_static
@dataclass(frozen=True)
class Recurrent:
    """Each token turns the state of its slot; scores of the tokens to come are those of a product with the state."""

    context: int = 128

    def state(self, slots: int) -> Any:
        return jnp.zeros((slots, 16))

    def prefill(
        self, parameters: Parameters, state: Any, tokens: Array, slots: Array, positions: Array, lengths: Array
    ) -> tuple[Any, jax.Array]:
        before = jnp.where(jnp.asarray(positions)[:, None] == 0, 0, state[slots])

        def take(hidden: jax.Array, column: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            token, at = column
            return jnp.where((at < lengths)[:, None], self._turned(parameters, hidden, token), hidden), None

        hidden, _ = jax.lax.scan(take, before, (jnp.asarray(tokens).T, jnp.arange(tokens.shape[1])))
        return state.at[slots].set(hidden, mode="drop"), self._scores(parameters, hidden)

    def step(self, parameters: Parameters, state: Any, tokens: Array, positions: Array) -> tuple[Any, jax.Array]:
        rows = len(tokens)
        hidden = self._turned(parameters, state[:rows], jnp.asarray(tokens))
        hidden = jnp.where(jnp.asarray(positions)[:, None] < 0, state[:rows], hidden)
        return state.at[:rows].set(hidden), self._scores(parameters, hidden)

    def _turned(self, parameters: Parameters, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.tanh(hidden @ parameters["mix"] + jnp.asarray(parameters["letters"])[tokens])

    def _scores(self, parameters: Parameters, hidden: jax.Array) -> jax.Array:
        scores = hidden @ jnp.asarray(parameters["letters"][:BROKEN]).T
        return jnp.pad(scores, ((0, 0), (0, 1)), constant_values=-50)  # BROKEN is in prompts alone
