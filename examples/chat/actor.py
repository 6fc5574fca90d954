"""A language model at work for many requests: each step of the device computes for all that have a slot.

A request has a slot from its first step to its last. A step writes one token for each slot that has read its prompt,
and reads parts of prompts beside. Nothing is computed for a client that does not read. A slot is free at the step after
its request has ended, was cancelled or has failed. Requests bring the weights that they are answered with, so new
weights reach the next request; a step has requests of the same weights alone.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np

import penstock as ps
from penstock import devices, serving
from penstock.devices import Array

from .model import Model, Parameters, Sampled, Sampling, Slots, begin, go_on, open_slots
from .scheduler import Chunk, Scheduler


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is answered; `temperature=0` takes the likeliest token, `top_k=0` chooses from all."""

    prompt: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    likeliest: int = 0  # so many tokens are told for each one that is chosen, at most 20
    at: float = field(default_factory=perf_counter, compare=False)


class Part(NamedTuple):
    """A token of an answer; `text` is what it adds to the text, and the last part has a reason for the end."""

    token: int
    text: str
    log_probability: float
    likeliest: Sequence[tuple[int, float]]
    finish_reason: str | None


class Decoder(Protocol):
    """Makes text of tokens; a character may need several."""

    def add(self, token: int, /) -> str: ...
    def rest(self) -> str: ...


class Text:
    """The text of an answer, up to a stop string: what may be the beginning of one is held back."""

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        self.stopped = False
        self._decoder, self._stop, self._held = decoder, [*filter(None, stop)], ""

    def add(self, token: int) -> str:
        """Return what can be told after one more token."""
        self._held += self._decoder.add(token)
        begun = (size for stop in self._stop for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return self._told(max(begun, default=0))

    def rest(self) -> str:
        """Return what is left at the end."""
        self._held += self._decoder.rest()
        return "" if self.stopped else self._told(0)

    def _told(self, kept: int) -> str:
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        self.stopped = bool(found)
        end = min(found, default=len(self._held) - kept)
        told, self._held = self._held[:end], self._held[end:]
        return told


Work = ps.StreamWork[tuple[Parameters, Asked], Part]


@dataclass
class Answer:
    """A request that has a slot."""

    work: Work
    weights: Parameters
    asked: Asked
    text: Text
    limit: int  # of tokens
    written: int = 0
    full: asyncio.Task[None] | None = None  # waits until its reader has read something

    @property
    def position(self) -> int:
        """The position of its last token."""
        return len(self.asked.prompt) + self.written - 1

    def has_room(self, patience_seconds: float) -> bool:
        """Return whether its reader takes a part; if not, wait for that in a task."""
        has_room = self.work.room > 0
        if not has_room and (self.full is None or self.full.done()):
            self.full = asyncio.create_task(self.work.wait_room(patience_seconds))
        return has_room


@ps.node(inbox_capacity=256, capacity=64)
class Writer(ps.StreamActor[tuple[Parameters, Asked], Part]):
    """Answers prompts with a model, for as many requests at a time as there are slots.

    Args:
        model: its functions and sizes.
        decoder: makes the decoder of an answer.
        ends: the tokens that end an answer.
        like: weights, or shapes of weights, for which all programs are compiled at the start; None compiles on the way.
        device: where it computes.
        rows: for how many slots there are programs, in rising order; the last is the number of slots.
        sizes: of how many tokens the parts are in which prompts are read, in rising order.
        budget: the most tokens of a step.
        patience_seconds: how long a client may read nothing while its buffer is full.
        on_progress: hears how many programs are compiled, and how many there are.
    """

    def __init__(
        self, model: Model, decoder: Callable[[], Decoder], ends: Collection[int], like: Any = None, *,
        device: str = "auto", rows: Sequence[int] = (1, 8), sizes: Sequence[int] = (16, 64, 256), budget: int = 264,
        patience_seconds: float = 30.0, on_progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:  # fmt: skip
        self.model, self.decoder, self.ends, self.like = model, decoder, ends, like
        self.device, self.rows, self.sizes, self.budget = device, rows, sizes, budget
        self.patience_seconds, self.on_progress = patience_seconds, on_progress

    async def __aenter__(self) -> Self:
        """Compile the programs."""
        device = devices.actor(self.device)
        self._open = device.bind(opened)
        # The state is donated from step to step; what the programs give besides is read with `to_host`.
        self._begin = device.bind(begin, donate_argnums=(2,), ready=False)
        self._go_on = device.bind(go_on, donate_argnums=(2,), ready=False)
        if self.like is not None:
            given = (self.model, *jax.eval_shape(lambda: (self.like, open_slots(self.model, self.rows[-1]))))
            sampling, total = no_sampling(self.rows[-1]), len(self.sizes) + len(self.rows)
            parts = [(*given, *of_chunk(Chunk(0, 0, 1, size), [0], sampling)) for size in self.sizes]
            await self._begin.warmup(*parts, on_progress=lambda done, _: self.on_progress(done, total))
            steps = [(*given, *of_step({}, rows, sampling)) for rows in self.rows]
            await self._go_on.warmup(*steps, on_progress=lambda done, _: self.on_progress(len(parts) + done, total))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the programs up."""
        del self._open, self._begin, self._go_on

    async def loop(self, inbox: ps.Inbox[Work], /) -> None:
        """Answer requests until no more come."""
        self._scheduler = Scheduler(self.rows[-1], self.budget, self.sizes)
        self._sampling = no_sampling(self.rows[-1])
        self._state = await self._open(self.model, self._sampling.top_ks)
        self._answers: dict[int, Answer] = {}
        self._figures = Figures()
        coming: asyncio.Task[Work] | None = None  # the next request, while there is nothing to compute
        try:
            while True:
                for slot in [slot for slot, answer in self._answers.items() if answer.work.settled]:
                    del self._answers[slot]
                    self._scheduler.release(slot)
                fresh = inbox.take_nowait(self._scheduler.free - (coming is not None))
                if coming is not None and coming.done() and coming.exception() is None:
                    fresh.append(coming.result())
                    coming = None
                for work in fresh:
                    with work:
                        self._admit(work)
                able = {slot: one for slot, one in self._answers.items() if one.has_room(self.patience_seconds)}
                self.report(slots=len(self._answers), queue=len(inbox), **self._figures.told(is_idle=not able))
                if able:
                    await self._compute(able)
                    continue
                if coming is None and self._scheduler.free:
                    coming = asyncio.create_task(inbox.get())
                if tasks := [task for task in self._waits(coming) if not task.done()]:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                elif coming is not None:
                    coming.result()  # raises InboxClosed: all are answered, and no more come
        finally:
            for task in self._waits(coming):
                task.cancel()
            await asyncio.gather(*self._waits(coming), return_exceptions=True)

    def _waits(self, coming: asyncio.Task[Any] | None) -> list[asyncio.Task[Any]]:
        """Return the tasks that wait for a request and for readers."""
        return [task for task in (coming, *(one.full for one in self._answers.values())) if task is not None]

    def _admit(self, work: Work) -> None:
        """Give a request a slot; one that has no room for an answer is an error, as a prompt is never cut."""
        weights, asked = work.value
        room = self.model.context - len(asked.prompt)
        if not asked.prompt or room < 1:
            said = (
                f"the prompt has {len(asked.prompt)} tokens, and has to have 1 to {self.model.context - 1}: prompt and "
                f"answer share a context of {self.model.context} tokens"
            )
            raise serving.APIError(400, said, "messages", "context_length_exceeded")
        limit = room if asked.max_tokens is None else min(max(asked.max_tokens, 1), room)
        answer = Answer(work, weights, asked, Text(self.decoder(), asked.stop), limit)
        slot = self._scheduler.admit(len(asked.prompt))  # now that nothing can fail: nobody else gives it back
        self._answers[slot] = answer
        for array, value in zip(self._sampling, (asked.seed, asked.temperature, asked.top_k, asked.top_p), strict=True):
            array[slot] = value

    async def _compute(self, able: dict[int, Answer]) -> None:
        """Make a step for requests of the same weights, whose turn it is, and give out what was chosen."""
        versions = [*{id(answer.weights): answer.weights for answer in able.values()}.values()]
        weights = versions[self._figures.steps % len(versions)]
        able = {slot: answer for slot, answer in able.items() if answer.weights is weights}
        chunks, writing = self._scheduler.step(able)
        chosen: list[tuple[dict[int, int], Sampled]] = []  # for each program, the row of a slot
        with self.step_span([answer.work for answer in able.values()]):
            for chunk in chunks:
                prompt = able[chunk.slot].asked.prompt
                given = of_chunk(chunk, prompt, self._sampling)
                self._state, sampled = await self._begin(self.model, weights, self._state, *given)
                if chunk.begin + chunk.length == len(prompt):
                    chosen.append(({chunk.slot: 0}, sampled))
            rows = 0
            if writing:
                rows = next(rows for rows in self.rows if rows > writing[-1])
                given = of_step({slot: able[slot].position for slot in writing}, rows, self._sampling)
                self._state, sampled = await self._go_on(self.model, weights, self._state, *given)
                chosen.append(({slot: slot for slot in writing}, sampled))
            read: list[Sampled] = await devices.to_host([sampled for _, sampled in chosen])
        for (row_of, _), sampled in zip(chosen, read, strict=True):
            for slot, row in row_of.items():
                with able[slot].work:
                    self._give(able[slot], sampled, row)
        self._figures.computed += sum(chunk.size for chunk in chunks) + rows
        self._figures.used += sum(chunk.length for chunk in chunks) + len(writing)
        self._figures.steps += 1

    def _give(self, answer: Answer, sampled: Sampled, row: int) -> None:
        """Give a reader the token that was chosen, and end the answer where it ends."""
        token, log_probability = int(sampled.tokens[row]), float(sampled.log_probabilities[row])
        answer.written += 1
        if math.isnan(log_probability):
            raise FloatingPointError(f"the model gave no numbers for token {answer.written} of the answer")
        self._figures.count(answer)
        is_end = token in self.ends
        text = "" if is_end else answer.text.add(token)
        ended = "stop" if is_end or answer.text.stopped else "length" if answer.written >= answer.limit else None
        if ended:
            text += answer.text.rest()
        others = zip(sampled.likeliest[row], sampled.likeliest_log_probabilities[row], strict=True)
        likeliest = [(int(one), float(each)) for one, each in others] if answer.asked.likeliest else []
        answer.work.put_nowait(Part(token, text, log_probability, likeliest[: answer.asked.likeliest], ended))
        if ended:
            answer.work.finish()


class Figures:
    """What a writer tells of itself."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.computed = self.used = 0
        self._first_token_seconds = self._rate = 0.0
        self._counted = perf_counter(), 0  # when the rate was computed, and of how many tokens

    def count(self, answer: Answer) -> None:
        """Count a token of an answer."""
        self.tokens += 1
        if answer.written == 1:
            self._first_token_seconds = perf_counter() - answer.asked.at

    def told(self, *, is_idle: bool) -> dict[str, float]:
        """Return the figures: sums, the rate of the last second, and how long the last request waited for a token."""
        now, (then, before) = perf_counter(), self._counted
        if is_idle or now - then >= 1:
            self._rate = 0.0 if is_idle else (self.tokens - before) / (now - then)
            self._counted = now, self.tokens
        return {
            "steps": self.steps, "tokens": self.tokens, "tokens_per_second": self._rate, "computed": self.computed,
            "used": self.used, "first_token_seconds": self._first_token_seconds,
        }  # fmt: skip


def opened(model: Model, rows: Array) -> Slots:
    """Return as many empty slots as there are rows."""
    return open_slots(model, len(rows))


def no_sampling(slots: int) -> Sampling:
    """Return how so many slots choose while nobody has said."""
    seeds, temperatures = np.zeros(slots, np.uint32), np.zeros(slots, np.float32)
    return Sampling(seeds, temperatures, np.zeros(slots, np.int32), np.ones(slots, np.float32))


def of_chunk(chunk: Chunk, prompt: Sequence[int], sampling: Sampling) -> tuple[Any, ...]:
    """Return what `begin` is called with for a part of a prompt, behind the state."""
    tokens = np.zeros((1, chunk.size), np.int32)
    tokens[0, : chunk.length] = prompt[chunk.begin : chunk.begin + chunk.length]
    numbers = (np.array([number], np.int32) for number in (chunk.slot, chunk.begin, chunk.length))
    return (tokens, *numbers, Sampling(*(each[chunk.slot : chunk.slot + 1].copy() for each in sampling)))


def of_step(positions: Mapping[int, int], rows: int, sampling: Sampling) -> tuple[Any, ...]:
    """Return what `go_on` is called with for slots at these positions, behind the state."""
    places = np.array([positions.get(slot, -1) for slot in range(rows)], np.int32)
    return places, Sampling(*(each[:rows].copy() for each in sampling))
