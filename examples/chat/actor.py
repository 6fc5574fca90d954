"""A language model at work for many requests: each step of the device computes for all that have a slot.

A request has a slot from its first step to its last. A step writes one token for each slot that has read its prompt,
and reads parts of prompts beside. Nothing is computed for a client that does not read. A slot is free at the step after
its request has ended, was cancelled or has failed. Requests bring the weights that they are answered with, so new
weights reach the next request; a step has requests of the same weights alone.
"""

# The types of JAX leave parameters of some functions open.
# pyright: reportUnknownMemberType=false

import asyncio
import codecs
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Self

import jax
import numpy as np

import penstock as ps
from penstock import devices, serving

from .model import Model, Parameters, Sampled, Sampling, begin, go_on, open_slots
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


IDLE = Asked([0])  # of a slot that nobody has


class Part(NamedTuple):
    """A token of an answer; `text` is what it adds to the text, and the last part has a reason for the end."""

    token: int
    text: str
    log_probability: float
    likeliest: Sequence[tuple[int, float]]
    finish_reason: str | None


Work = ps.StreamWork[tuple[Parameters, Asked], Part]


class Text:
    """The text of an answer, up to a stop string: what may be the beginning of one is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped, self._stop, self._held = False, [*filter(None, stop)], ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, spelled: bytes, *, is_last: bool) -> str:
        """Return what can be told after one more token, which may have a part of a character; after the last, all."""
        self._held += self._decoder.decode(spelled, is_last)
        begun = (size for stop in self._stop for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        kept = 0 if is_last else max(begun, default=0)
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        self.stopped = bool(found)
        end = min(found, default=len(self._held) - kept)
        told, self._held = self._held[:end], self._held[end:]
        return told


class Answer:
    """A request that has a slot.

    Raises:
        APIError: its prompt leaves no room for an answer; a prompt is never cut.
    """

    def __init__(self, work: Work, context: int) -> None:
        self.work, (self.weights, self.asked) = work, work.value
        size = len(self.asked.prompt)
        if not 0 < size < context:
            said = f"the prompt has {size} tokens, and has to have 1 to {context - 1}: its answer shares the context"
            raise serving.APIError(400, said, "messages", "context_length_exceeded")
        self.limit = min(self.asked.max_tokens or context, context - size)
        self.text, self.written = Text(self.asked.stop), 0


@ps.node(inbox_capacity=256, capacity=64)
class Writer(ps.StreamActor[tuple[Parameters, Asked], Part]):
    """Answers prompts with a model, for as many requests at a time as there are slots.

    Args:
        model: its functions and sizes.
        bytes_of: spells a token.
        ends: the tokens that end an answer.
        like: weights, or shapes of weights, for which all programs are compiled at the start; None compiles on the way.
        device: where it computes.
        rows: for how many slots there are programs, in rising order; the last is the number of slots.
        sizes: of how many tokens the parts are in which prompts are read, in rising order; a step reads no more than
            the last.
        patience_seconds: how long a client may read nothing while its buffer is full.
        on_progress: hears how many programs are compiled, and how many there are.
    """

    def __init__(
        self, model: Model, bytes_of: Callable[[int], bytes], ends: Collection[int], like: Any = None, *,
        device: str = "auto", rows: Sequence[int] = (1, 8), sizes: Sequence[int] = (16, 64, 256),
        patience_seconds: float = 30.0, on_progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:  # fmt: skip
        self.model, self.bytes_of, self.ends, self.like = model, bytes_of, ends, like
        self.device, self.rows, self.sizes = device, rows, sizes
        self.patience_seconds, self.on_progress = patience_seconds, on_progress

    async def __aenter__(self) -> Self:
        """Compile the programs."""
        self._device = device = devices.actor(self.device)
        # The state is donated from step to step; what the programs give besides is read with `to_host`.
        self._begin = device.bind(begin, donate_argnums=(2,), ready=False)
        self._go_on = device.bind(go_on, donate_argnums=(2,), ready=False)
        if self.like is not None:
            given = (self.model, *jax.eval_shape(lambda: (self.like, open_slots(self.model, self.rows[-1]))))
            parts = [(*given, *of_chunk(Chunk(0, 0, 1, size), IDLE)) for size in self.sizes]
            steps = [(*given, *of_step({}, rows)) for rows in self.rows]
            total = len(parts) + len(steps)
            await self._begin.warmup(*parts, on_progress=lambda done, _: self.on_progress(done, total))
            await self._go_on.warmup(*steps, on_progress=lambda done, _: self.on_progress(len(parts) + done, total))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the programs up."""
        del self._device, self._begin, self._go_on

    async def loop(self, inbox: ps.Inbox[Work], /) -> None:
        """Answer requests until no more come."""
        self._scheduler, self._figures = Scheduler(self.rows[-1], self.sizes), defaultdict[str, float](float)
        self._state = await self._device.put(await asyncio.to_thread(open_slots, self.model, self.rows[-1]))
        answers = dict[int, Answer]()
        full = dict[int, asyncio.Task[None]]()  # the slots whose readers take no part now
        coming: asyncio.Task[Work] | None = None  # the next request, while there is nothing to compute
        try:
            while True:
                for slot in [slot for slot, answer in answers.items() if answer.work.settled]:
                    del answers[slot]
                    self._scheduler.release(slot)
                fresh = inbox.take_nowait(self._scheduler.free - (coming is not None))
                if coming is not None and coming.done() and coming.exception() is None:
                    fresh, coming = [coming.result(), *fresh], None
                for work in fresh:
                    with work:
                        answer = Answer(work, self.model.context)
                        answers[self._scheduler.admit(len(answer.asked.prompt))] = answer
                full = {slot: task for slot, task in full.items() if not task.done()}
                for slot, answer in answers.items():
                    if not answer.work.room and slot not in full:
                        full[slot] = asyncio.create_task(answer.work.wait_room(self.patience_seconds))
                able = {slot: answer for slot, answer in answers.items() if slot not in full}
                if not able:
                    self._figures["tokens_per_second"] = 0
                self.report(slots=len(answers), queue=len(inbox), **self._figures)
                if able:
                    await self._compute(able)
                    continue
                if coming is None and self._scheduler.free:
                    coming = asyncio.create_task(inbox.get())
                tasks: list[asyncio.Task[Any]] = [task for task in (coming, *full.values()) if task and not task.done()]
                if tasks:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                elif coming is not None:
                    coming.result()  # raises InboxClosed: all are answered, and no more come
        finally:
            tasks = [task for task in (coming, *full.values()) if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _compute(self, able: dict[int, Answer]) -> None:
        """Make a step for requests of the same weights, whose turn it is, and give out what was chosen."""
        began, figures = perf_counter(), self._figures
        versions = [*{id(answer.weights): answer.weights for answer in able.values()}.values()]
        weights = versions[int(figures["steps"]) % len(versions)]
        able = {slot: answer for slot, answer in able.items() if answer.weights is weights}
        chunks, writing = self._scheduler.step(able)
        places = {slot: (len(able[slot].asked.prompt) + able[slot].written - 1, able[slot].asked) for slot in writing}
        rows = next(rows for rows in (0, *self.rows) if rows > max(writing, default=-1))
        runs: list[tuple[Any, tuple[Any, ...], dict[int, int]]] = []  # programs, and where they choose for which slots
        for chunk in chunks:
            asked = able[chunk.slot].asked
            is_last = chunk.begin + chunk.length == len(asked.prompt)
            runs.append((self._begin, of_chunk(chunk, asked), {chunk.slot: 0} if is_last else {}))
        if writing:
            runs.append((self._go_on, of_step(places, rows), {slot: slot for slot in writing}))
        chosen: list[Sampled] = []
        with self.step_span([answer.work for answer in able.values()]):
            for program, given, _ in runs:
                self._state, sampled = await program(self.model, weights, self._state, *given)
                chosen.append(sampled)
            chosen = await devices.to_host(chosen)
        for (_, _, row_of), sampled in zip(runs, chosen, strict=True):
            for slot, row in row_of.items():
                with able[slot].work:
                    self._give(able[slot], sampled, row)
        seconds, written = perf_counter() - began, sum(len(row_of) for _, _, row_of in runs)
        figures["steps"] += 1
        figures["tokens"] += written
        figures["computed"] += sum(chunk.size for chunk in chunks) + rows
        figures["used"] += sum(chunk.length for chunk in chunks) + len(writing)
        # A mean over about a second.
        figures["tokens_per_second"] += (written / seconds - figures["tokens_per_second"]) * min(1, seconds)

    def _give(self, answer: Answer, sampled: Sampled, row: int) -> None:
        """Give a reader the token that was chosen, and end the answer where it ends."""
        token, log_probability = int(sampled.tokens[row]), float(sampled.log_probabilities[row])
        answer.written += 1
        if math.isnan(log_probability):
            raise FloatingPointError(f"the model gave no numbers for token {answer.written} of the answer")
        if answer.written == 1:
            self._figures["first_token_seconds"] = perf_counter() - answer.asked.at
        is_end, is_last = token in self.ends, answer.written >= answer.limit
        text = answer.text.add(b"" if is_end else self.bytes_of(token), is_last=is_end or is_last)
        reason = "stop" if is_end or answer.text.stopped else "length" if is_last else None
        others = (each[row][: answer.asked.likeliest].tolist() for each in sampled[2:])
        answer.work.put_nowait(Part(token, text, log_probability, [*zip(*others, strict=True)], reason))
        if reason:
            answer.work.finish()


def sampling_of(asked: Sequence[Asked]) -> Sampling:
    """Return how the next token of each request is chosen."""
    rows = ((each.seed, each.temperature, each.top_k, each.top_p) for each in asked)
    kinds = (np.uint32, np.float32, np.int32, np.float32)
    return Sampling(*(np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)))


def of_chunk(chunk: Chunk, asked: Asked) -> tuple[Any, ...]:
    """Return what `begin` is called with for a part of a prompt, behind the state."""
    tokens = np.zeros((1, chunk.size), np.int32)
    tokens[0, : chunk.length] = asked.prompt[chunk.begin : chunk.begin + chunk.length]
    numbers = (np.array([number], np.int32) for number in (chunk.slot, chunk.begin, chunk.length))
    return (tokens, *numbers, sampling_of([asked]))


def of_step(writing: Mapping[int, tuple[int, Asked]], rows: int) -> tuple[Any, ...]:
    """Return what `go_on` is called with for slots at these positions, behind the state."""
    places, asked = zip(*(writing.get(slot, (-1, IDLE)) for slot in range(rows)), strict=True)
    return np.array(places, np.int32), sampling_of(asked)
