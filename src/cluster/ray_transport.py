"""Workers that are actors of Ray: how Ray is started, how calls are sent, and how answers come to the event loop."""

import asyncio
import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from time import monotonic
from typing import Any, Final

from .. import extension
from .._errors import ClusterError, WorkerDied
from ..telemetry import logs
from . import messages
from .dispatch import MOST_COROUTINES, Call, Transport, Worker
from .messages import Reference, Sent, import_ray
from .remote import Described, Remote, versions

# How long instances and resources of an idle worker may take to close.
_CLOSE_SECONDS: Final = 5.0


class _Started:
    """The Ray of this process, if Penstock has started it: a thread that lives as long as Ray does.

    Ray ends with the thread that has started it, because Linux tells a child process when that thread of its parent
    ends. And Ray sets signal handlers only if it is started in the main thread.
    """

    lock = threading.Lock()
    users = 0
    thread: threading.Thread | None = None
    end = threading.Event()


def start(address: str | None, timeout_seconds: float) -> None:
    """Begin to use Ray: the initialised Ray, or a Ray at an address, or a local Ray. Runs in a thread.

    Raises:
        ClusterError: the head does not answer within the timeout.
    """
    ray = import_ray()
    with _Started.lock:
        if _Started.thread is None and ray.is_initialized():
            return
        if _Started.thread is None:
            _start(ray, address or os.environ.get("RAY_ADDRESS"), timeout_seconds)
        _Started.users += 1


def end() -> None:
    """End the use of Ray. The last user ends a Ray that this process has started. Runs in a thread."""
    with _Started.lock:
        if _Started.thread is None:
            return
        _Started.users -= 1
        if not _Started.users:
            _Started.end.set()
            _Started.thread.join()
            _Started.thread = None


def _start(ray: Any, address: str | None, timeout_seconds: float) -> None:
    failed: list[BaseException] = []
    ready, _Started.end = threading.Event(), threading.Event()
    until = monotonic() + timeout_seconds
    if address and address not in ("auto", "local") and "://" not in address:
        _reach(address, timeout_seconds)

    def live() -> None:
        try:
            local = not address or address == "local"
            options: dict[str, Any] = {"address": address}
            if local:  # no other process can use this Ray
                options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            ray.init(**options, configure_logging=False, log_to_driver=True)
            if local:
                logs.warning("cluster.started_locally", remedy="address= or RAY_ADDRESS names a cluster")
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            failed.append(error)
            ready.set()
            return
        ready.set()
        _Started.end.wait()
        ray.shutdown()

    _Started.thread = threading.Thread(target=live, name="penstock-ray", daemon=True)
    _Started.thread.start()
    where = f"the head at {address}" if address else "a local Ray"
    if not ready.wait(max(1.0, until - monotonic())):
        _Started.thread = None
        raise ClusterError(f"{where} does not answer within {timeout_seconds:g} s: check whether `ray status` answers")
    if failed:
        _Started.thread = None
        raise ClusterError(f"{where} could not be used: {failed[0]}") from failed[0]


def _reach(address: str, timeout_seconds: float) -> None:
    """Raise an error if no process listens at an address: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=min(timeout_seconds, 10.0)).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"the head at {address} cannot be reached ({error}): start one with `ray start --head`, or correct "
            "address= or RAY_ADDRESS"
        ) from error


class RayTransport(Transport):
    """Carries calls to actors of Ray, one for each worker.

    Args:
        options: the options of the actors.
        address: the address of the head.
        placement_timeout_seconds: how long it may take to place a worker, and to reach Ray, in seconds.
    """

    def __init__(self, options: Mapping[str, Any], address: str | None, placement_timeout_seconds: float) -> None:
        self._options = options
        self._address = address
        self._timeout_seconds = placement_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] | None = None
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._functions: dict[int, bytes] = {}
        self._known: dict[Worker, set[int]] = {}
        self._mailbox = extension.LoopMailbox(self._loop)  # for calls that come from threads of Ray

    def add_function(self, key: int, function: bytes) -> None:
        """Note the function of calls with this key."""
        self._functions[key] = function

    async def put(self, packed: messages.Packed) -> Any:
        """Write a value that is too large for a message into the store of Ray; return its reference."""
        await self._begin_ray()
        return await asyncio.to_thread(import_ray().put, packed)

    async def fetch(self, reference: Reference) -> Any:
        """Return the value of a result that stays on a worker.

        Raises:
            WorkerDied: the value was lost with its machine.
        """
        answer = await self._arrival(reference.stored)
        if isinstance(answer, BaseException):
            raise lost(answer)
        return messages.unpack(answer)

    # Called by `Dispatcher`.

    def start(self, worker: Worker) -> None:
        """Start an actor."""
        self._keep(self._started(worker))

    def send(self, worker: Worker, call: Call) -> None:
        """Send a call to its actor."""
        key, keeps_result, body, given = call.message
        known = self._known[worker]
        function = b"" if key in known else self._functions[key]
        known.add(key)
        group = "begin" if call.is_coroutine else "call"
        sent = pickle.dumps(tuple(Sent(call.number, key, keeps_result, function, body)), protocol=5)
        self._ask(worker, call, worker.handle[group, keeps_result].remote(sent, *given))

    def more(self, worker: Worker, call: Call) -> None:
        """Ask for the next values of a stream."""
        self._ask(worker, call, worker.handle["more", call.message[1]].remote(call.number))

    def recall(self, worker: Worker, numbers: list[int]) -> None:
        """Ask which functions have not begun."""

        def recalled(answer: Any) -> None:
            if isinstance(answer, BaseException):
                self._failed(worker, answer)
            else:
                self.dispatcher.recalled(worker, answer)

        self._when(worker.handle["recall", False].remote(numbers), recalled)

    def cancel(self, worker: Worker, call: Call) -> None:
        """Cancel a coroutine."""
        worker.handle["cancel", False].remote(call.number)

    def leave(self, key: int) -> None:
        """Have all workers exit their instance of a number."""
        for worker in self.dispatcher.workers:
            if worker.is_up:
                worker.handle["leave", False].remote(key)

    def kill(self, worker: Worker) -> None:
        """Kill an actor. When all workers end, an idle actor may first close what it has opened."""
        if self._is_closing and worker.is_up and not worker.functions and not worker.coroutines:
            self._keep(self._closed(worker))
        else:
            self._kill(worker)

    async def aclose(self) -> None:
        """End all workers, and end Ray if this process has started it."""
        self._is_closing = True
        await self.dispatcher.aclose()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ready is not None:
            await asyncio.wait([self._ready])
            if self._ready.exception() is None:
                await asyncio.to_thread(end)

    # Internal.

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task, which `aclose` ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin_ray(self) -> None:
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = self._loop.run_in_executor(None, start, self._address, self._timeout_seconds)
        await asyncio.shield(self._ready)

    async def _started(self, worker: Worker) -> None:
        try:
            await self._begin_ray()
            found = await self._place(worker)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - that of the calls that wait
            if worker.handle is not None:
                self._end_actor(worker)
            self.dispatcher.started(worker, error)
            return
        worker.process, worker.machine = str(found.process), found.machine
        self.dispatcher.started(worker)
        self._when(worker.handle["watch", False].remote(), lambda answer: self._failed(worker, answer))

    async def _make(self, worker: Worker) -> None:
        """Make an actor, and note its methods: one whose result comes back, and one whose result stays there."""
        groups = {"begin": MOST_COROUTINES, "control": 4}
        actor: Any = import_ray().remote(
            **{"num_cpus": 1, **self._options, "max_restarts": 0, "max_task_retries": 0, "concurrency_groups": groups}
        )(Remote)
        handle = await asyncio.to_thread(actor.remote)
        worker.handle = {"actor": handle}
        for name, group in METHODS.items():
            for keeps_result in (False, True):
                options: dict[str, Any] = {"num_returns": 2 if keeps_result else 1}
                if group:
                    options["concurrency_group"] = group
                worker.handle[name, keeps_result] = getattr(handle, name).options(**options)

    async def _place(self, worker: Worker) -> Described:
        """Make an actor, and wait until it runs."""
        await self._make(worker)
        self._known[worker] = {*self._functions}
        answered = self._arrival(worker.handle["describe", False].remote(self._functions))
        try:
            answer = await asyncio.wait_for(answered, self._timeout_seconds)
        except TimeoutError:
            raise ClusterError(await asyncio.to_thread(self._unplaced)) from None
        if isinstance(answer, BaseException):
            raise ClusterError(f"a worker could not start: {_reason(answer)}") from answer
        described = Described(*answer)
        others = {name: (mine, described.versions.get(name, "none")) for name, mine in versions().items()}
        differ = [f"{name} {mine} here and {there} there" for name, (mine, there) in others.items()
                  if mine.split(".")[:2] != there.split(".")[:2]]  # fmt: skip
        if differ:
            raise ClusterError(
                f"the worker on {described.machine} has other versions: {', '.join(differ)}; install equal versions, "
                "such as with runtime_env="
            )
        return described

    def _unplaced(self) -> str:
        ray = import_ray()
        asked = ", ".join(f"{name}={value!r}" for name, value in self._options.items() if name != "runtime_env")
        has, free = ray.cluster_resources(), ray.available_resources()
        told = ", ".join(f"{name} {free.get(name, 0):g} of {value:g}" for name, value in sorted(has.items())
                         if not name.startswith("node:"))  # fmt: skip
        return (
            f"a worker could not be placed within {self._timeout_seconds:g} s: it needs {asked or 'num_cpus=1'}, and "
            f"of the cluster is free: {told}; ask for less, for fewer workers, or add a machine"
        )

    def _ask(self, worker: Worker, call: Call, returned: Any) -> None:
        status, kept = returned if call.message[1] else (returned, None)
        self._when(status, lambda answer: self._answered(worker, call.number, answer, kept))

    def _answered(self, worker: Worker, number: int, answer: Any, kept: Any) -> None:
        if isinstance(answer, BaseException):
            if self._is_death(answer):
                self._failed(worker, answer)
            else:
                self.dispatcher.answered(worker, number, lost(answer))
            return
        parts: list[Any] = [*answer] if isinstance(answer, list) else [answer]
        kind, seconds, content, goes_on = messages.unpack(parts[0])
        if kind == "recalled":  # the answer to the recall says the same
            return
        if kind == "value" and len(parts) > 1:
            content = parts[1:]
        elif kind == "reference":
            content = Reference(kept, content, worker.machine)
        self.dispatcher.answered(worker, number, (kind, seconds, content), seconds, goes_on=goes_on)

    def _failed(self, worker: Worker, error: BaseException) -> None:
        self._known.pop(worker, None)
        self.dispatcher.ended(worker, _reason(error))

    async def _closed(self, worker: Worker) -> None:
        done = self._arrival(worker.handle["close", False].remote())
        await asyncio.wait([done], timeout=_CLOSE_SECONDS)
        self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        if worker.handle is None:  # the actor is not made yet
            self.dispatcher.ended(worker, "it was not needed any more")
            return
        if not self._end_actor(worker) or not worker.is_up:
            self.dispatcher.ended(worker, "it was killed while it started")

    def _end_actor(self, worker: Worker) -> bool:
        """Kill an actor; return whether its method `watch` will tell that the actor has ended."""
        ray = import_ray()
        with contextlib.suppress(Exception):  # Ray itself may have ended
            ray.kill(worker.handle["actor"], no_restart=True)
        return bool(ray.is_initialized())

    def _is_death(self, error: BaseException) -> bool:
        exceptions = import_ray().exceptions
        return isinstance(error, (exceptions.RayActorError, exceptions.ActorUnavailableError))

    def _arrival(self, reference: Any) -> "asyncio.Future[Any]":
        """Return a future for a result, or for its error as a value."""
        found: asyncio.Future[Any] = self._loop.create_future()

        def arrived(answer: Any) -> None:
            if not found.done():
                found.set_result(answer)

        self._when(reference, arrived)
        return found

    def _when(self, reference: Any, then: Callable[[Any], None]) -> None:
        """Have a function called on the event loop with a result or its error, which a thread of Ray brings."""

        def arrived(answer: Any, _held: Any = reference) -> None:  # without the reference, Ray drops the object
            self._mailbox.post(then, answer)

        # The public way, a future of `concurrent.futures`, costs a lock and a condition for each call.
        getattr(reference, "_on_completed")(arrived)  # noqa: B009 - a private name of Ray


# The concurrency groups of the actor's methods, with their threads; functions have the group "", with one thread.
METHODS: Final = {
    "call": "", "begin": "begin", "more": "begin", "describe": "control", "watch": "control", "recall": "control",
    "cancel": "control", "leave": "control", "close": "control",
}  # fmt: skip


def _reason(error: BaseException) -> str:
    """Return the first line of Ray's message about a death, without the part about the class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    found = next((line for line in reversed(lines) if "died" in line or "killed" in line), lines[0] if lines else "")
    return found.partition(" Some common causes")[0]


def lost(error: BaseException) -> BaseException:
    """Return the error of a value that was lost."""
    found = WorkerDied(f"a value that stayed on a worker was lost with it: {_reason(error)}")
    found.__cause__ = error
    return found
