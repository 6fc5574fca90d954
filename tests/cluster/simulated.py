"""Simulated workers: a transport that answers after a while, in the time of the loop, and whose workers may die."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from penstock.cluster import Call, Transport, Worker


class Simulated(Transport):
    """Carries calls to no process: the message of a call contains its duration and its result.

    Args:
        random: draws the delays of the network and the deaths of workers.
        dies: the probability that a worker dies in a function that it begins.
        refuses: how many of the first workers cannot be placed.
    """

    def __init__(self, random: Random, dies: float = 0.0, refuses: int = 0) -> None:
        self.random, self.dies, self.refuses = random, dies, refuses
        self.queues: dict[Worker, list[Call]] = {}
        self.numbers: dict[Call, int] = {}
        self.busy: dict[Worker, asyncio.TimerHandle] = {}
        self.coroutines: dict[tuple[Worker, int], asyncio.TimerHandle] = {}
        self.alive: set[Worker] = set()
        self.most_workers = self.most_together = self.together = 0

    def later(self, then: Callable[..., None], *args: Any, seconds: float | None = None) -> asyncio.TimerHandle:
        delay = self.random.uniform(0.0002, 0.002) if seconds is None else seconds
        return asyncio.get_running_loop().call_later(delay, then, *args)

    def start(self, worker: Worker) -> None:
        if self.refuses:
            self.refuses -= 1
            self.later(self.dispatcher.started, worker, OSError("no room"))
            return
        self.alive.add(worker)
        self.most_workers = max(self.most_workers, len(self.alive))
        self.queues[worker] = []
        self.later(self._up, worker, seconds=self.random.uniform(0.5, 1.5))

    def _up(self, worker: Worker) -> None:
        if worker in self.alive:
            worker.process = f"simulated {worker.number}"
            self.dispatcher.started(worker)

    def send(self, worker: Worker, call: Call) -> None:
        self.later(self._arrive, worker, call, call.number)

    def _arrive(self, worker: Worker, call: Call, number: int) -> None:
        if worker not in self.alive:
            return
        if call.is_coroutine:
            end = self.later(self._end, worker, call, number, seconds=call.message[0])
            self.coroutines[worker, number] = end
            return
        self.numbers[call] = number
        self.queues[worker].append(call)
        if worker not in self.busy:
            self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        call = self.queues[worker].pop(0)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        if self.random.random() < self.dies:
            self.later(self._die, worker, "it crashed")
        self.busy[worker] = self.later(
            self._end, worker, call, self.numbers[call], seconds=call.message[0] if call.message else 0.0
        )

    def _end(self, worker: Worker, call: Call, number: int) -> None:
        if call.is_coroutine:
            del self.coroutines[worker, number]
        else:
            self.together -= 1
            del self.busy[worker]
            if self.queues[worker]:
                self._begin(worker)
        seconds, answer = call.message or (0.0, None)
        self.later(self._answer, worker, number, answer, seconds)

    def _answer(self, worker: Worker, number: int, answer: Any, seconds: float) -> None:
        if worker in self.dispatcher.workers:
            self.dispatcher.answered(worker, number, answer, seconds)

    def more(self, worker: Worker, call: Call) -> None:
        raise NotImplementedError

    def recall(self, worker: Worker, numbers: list[int]) -> None:
        self.later(self._recall, worker, numbers)

    def _recall(self, worker: Worker, numbers: list[int]) -> None:
        if worker not in self.alive:
            return
        queue = self.queues[worker]
        taken = [call for call in queue if self.numbers[call] in numbers]
        self.queues[worker] = [call for call in queue if call not in taken]
        self.later(self.dispatcher.recalled, worker, [self.numbers[call] for call in taken])

    def cancel(self, worker: Worker, call: Call) -> None:
        self.later(self._cancel, worker, call, call.number)

    def _cancel(self, worker: Worker, call: Call, number: int) -> None:
        running = self.coroutines.pop((worker, number), None)
        if running is not None:
            running.cancel()
            self.later(self._answer, worker, number, asyncio.CancelledError(), 0.0)
        elif worker in self.alive and number in worker.coroutines:  # the cancel has overtaken its call
            self.cancel(worker, call)

    def kill(self, worker: Worker) -> None:
        self.later(self._die, worker, "it was killed")

    def _die(self, worker: Worker, reason: str) -> None:
        if worker not in self.alive:
            return
        self.alive.discard(worker)
        if worker in self.busy:
            self.together -= 1
            self.busy.pop(worker).cancel()
        for key in [key for key in self.coroutines if key[0] is worker]:
            self.coroutines.pop(key).cancel()
        self.later(self.dispatcher.ended, worker, reason)
