"""A training step of 19 arrays with donation: through `devices.actor`, and by plain JAX in the same thread."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import jax
import numpy as np

from examples import train_digits
from examples.train_digits import Parameters, create_parameters, optimizer, train_step, train_steps
from penstock import devices, engine
from penstock.devices import select

from ..baselines.device_thread import promising
from ..harness import Contenders, Row, Sample, Workload
from ..summary import Limits
from .device import DEVICE

DONATED = (0, 1)


class State:
    """The state of a training: parameters, and the state of the optimizer."""

    def __init__(self) -> None:
        with jax.default_device(select(DEVICE)):
            self.parameters: Parameters = create_parameters()
            self.optimizer: Any = optimizer.init(self.parameters)

    def replace(self, parameters: Parameters, optimizer: Any, loss: jax.Array) -> None:
        self.parameters, self.optimizer = parameters, optimizer

    def wait(self) -> None:
        jax.block_until_ready((self.parameters, self.optimizer))


@asynccontextmanager
async def contenders(quick: bool) -> AsyncIterator[Contenders]:
    steps = 100 if quick else 300
    random = np.random.default_rng(0)
    images = random.random((train_digits.BATCH_SIZE, train_digits.SIDE, train_digits.SIDE), np.float32)
    labels = random.integers(0, train_digits.CLASSES, train_digits.BATCH_SIZE, np.int32)
    batch = images, labels, random.integers(2**32, size=(len(labels), 2), dtype=np.uint32)
    plain: Any = jax.jit(train_step, donate_argnums=DONATED)
    actor = devices.actor(DEVICE)

    def by_hand(*, ready: bool) -> Sample:
        state = State()

        async def sample() -> float:
            began = time.perf_counter()
            for _ in range(steps):
                state.replace(*plain(state.parameters, state.optimizer, *batch))
                if ready:
                    state.wait()
            state.wait()
            return 1e6 * (time.perf_counter() - began) / steps

        return sample

    def through(step: Callable[..., Awaitable[Any]]) -> Sample:
        state = State()

        async def sample() -> float:
            began = time.perf_counter()
            for _ in range(steps):
                state.replace(*await step(state.parameters, state.optimizer, *batch))
            state.wait()
            return 1e6 * (time.perf_counter() - began) / steps

        return sample

    def unbound(*args: Any) -> Awaitable[Any]:
        return actor.run(train_step, *args, donate_argnums=DONATED, ready=False)

    def call(args: Any) -> Any:
        return plain(*args)

    with promising(call) as thread, promising(call, ready=False) as handing_on:
        yield {
            "ready": through(actor.bind(train_step, donate_argnums=DONATED)),
            "by a thread": through(lambda *args: thread.run_to_end(args)),
            "blocking": by_hand(ready=True),
            "handed on": through(actor.bind(train_step, donate_argnums=DONATED, ready=False)),
            "handed on by a thread": through(lambda *args: handing_on.run_to_end(args)),
            "enqueuing": by_hand(ready=False),
            "unbound": through(unbound),
        }


@asynccontextmanager
async def loops(quick: bool) -> AsyncIterator[Contenders]:
    """Open the example, and the same loop in one thread: read digits, make steps, read the losses of the last steps."""
    epochs = 40 if quick else 160
    digits, _ = train_digits.read_digits()
    together = train_digits.STEPS * train_digits.BATCH_SIZE
    plain: Any = jax.jit(train_steps, donate_argnums=DONATED)

    async def by_hand() -> float:
        state, random, last, steps = State(), np.random.default_rng(train_digits.SEED), None, 0
        began = time.perf_counter()
        for _ in range(epochs):
            order = random.permutation(len(digits))
            for number in range(len(digits) // together):
                read = digits[order[number * together :][:together]]
                keys = random.integers(2**32, size=(together, 2), dtype=np.uint32)
                given = plain(state.parameters, state.optimizer, read.images, read.labels, keys)
                state.replace(*given)
                if last is not None:
                    np.asarray(last)
                last = given[-1]
                steps += train_digits.STEPS
        state.wait()
        return steps / (time.perf_counter() - began)

    async with engine.deploy(train_digits.learn) as service:

        async def example() -> float:
            began = time.perf_counter()
            async with service.stream(train_digits.learn(digits, epochs)) as losses:
                steps = len([loss async for loss in losses])
            return steps / (time.perf_counter() - began)

        yield {"example": example, "by hand": by_hand}


TRAINING_LOOP = Workload(
    name="training loop",
    contenders=loops,
    control="by hand",
    rows=(
        Row(
            title="examples/train_digits.py, steps a second over its loop in one thread",
            subject="example",
            reference="by hand",
            unit="times",
            limits=Limits(must=0.9, aim=1.0, at_least=True),
        ),
        Row(title="examples/train_digits.py", subject="example", unit="steps/s"),
        Row(title="its loop in one thread", subject="by hand", unit="steps/s"),
    ),
)


TRAINING_STEP = Workload(
    name="training step",
    contenders=contenders,
    control="enqueuing",
    rows=(
        Row(
            title="a donated step of 19 arrays, ready, over plain JAX that blocks",
            subject="ready",
            reference="blocking",
            limits=Limits(must=1.3, aim=1.1, at_least=False),
        ),
        Row(
            title="the same by a thread by hand, which loses no result, over plain JAX that blocks",
            subject="by a thread",
            reference="blocking",
        ),
        Row(title="a donated step, ready, over that thread", subject="ready", reference="by a thread"),
        Row(
            title="the same handed on, over plain JAX that enqueues",
            subject="handed on",
            reference="enqueuing",
            limits=Limits(must=2.0, aim=1.4, at_least=False),
        ),
        Row(
            title="the same by a thread by hand, which loses no result, over plain JAX that enqueues",
            subject="handed on by a thread",
            reference="enqueuing",
        ),
        Row(
            title="a donated step, handed on, over that thread", subject="handed on", reference="handed on by a thread"
        ),
        Row(title="the same by run instead of bind", subject="unbound", reference="enqueuing"),
        Row(title="a donated step of 19 arrays, handed on", subject="handed on", unit="us"),
        Row(title="the same ready", subject="ready", unit="us"),
        Row(title="plain JAX that enqueues", subject="enqueuing", unit="us"),
        Row(title="plain JAX that blocks", subject="blocking", unit="us"),
    ),
)
