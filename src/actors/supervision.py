"""Supervision: what becomes of the children of a supervisor when one of them exits, decided as in Erlang/OTP.

A pure state machine: exits and the time go in, a decision comes out. It has no clock and starts nothing; `supervisor`
does what it decides. The rules are those of OTP's `supervisor` (stdlib): the strategies, which exits restart which
children, and the restart intensity. The pause before a restart is not OTP's.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from .accepted import POSITIVE, check_fields, one_of, whole

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
"""The values of `strategy=`: which others are restarted with a stateful node that has crashed."""

RestartMode = Literal["permanent", "transient", "temporary"]
"""The values of `restart=`: after which exits a stateful node is restarted."""

ActorState = Literal["running", "restarting", "stopped"]
"""What the `state` of a stateful node may be, in its statistics."""

ExitKind = Literal["normal", "shutdown", "crash"]

# The first pause is short against a person's patience and long against a connection that a peer has just reset.
FIRST_PAUSE_SECONDS = 0.05
# All pauses within the window together stay below this: callers wait meanwhile, and their deadlines are seconds.
MAX_PAUSES_SECONDS = 1.0


_FLAGS: Final = {"strategy": one_of(Strategy), "max_restarts": whole(0), "within_seconds": POSITIVE}


@dataclass(frozen=True)
class SupervisorFlags:
    """How a supervisor restarts; OTP's words, with the defaults of the design.

    Args:
        strategy: which children a restart takes along: none ("one_for_one"), all ("one_for_all"), or those started
            after the one that exited ("rest_for_one").
        max_restarts: how many restarts may happen within `within_seconds`; one more escalates.
        within_seconds: the window, in seconds.

    Raises:
        OptionsError: a value is out of its range.
    """

    strategy: Strategy = "one_for_one"
    max_restarts: int = 3
    within_seconds: float = 5.0

    def __post_init__(self) -> None:
        check_fields(self, _FLAGS)

    def pause_seconds(self, restart: int) -> float:
        """Return how long to wait before restart number `restart` of the window, counted from 1.

        The pause doubles up to a bound such that `max_restarts` pauses together are shorter than the window and than
        one second: otherwise waiting alone would keep a child that always crashes below the limit for ever.
        """
        longest = min(MAX_PAUSES_SECONDS, self.within_seconds) / (self.max_restarts + 1)
        return min(longest, FIRST_PAUSE_SECONDS * 2.0 ** min(restart - 1, 60))


@dataclass(frozen=True)
class LetEnd:
    """The child stays down, and nobody else is concerned."""

    child: int


@dataclass(frozen=True)
class Restart:
    """Children are to be started again.

    Attributes:
        origin: the child that exited, or that did not start.
        stop: the running children to stop first, in this order: the last started first.
        start: the children to start after the pause, in this order, the origin among them.
        pause_seconds: how long to wait between the two.
    """

    origin: int
    stop: tuple[int, ...]
    start: tuple[int, ...]
    pause_seconds: float

    @property
    def removed(self) -> tuple[int, ...]:
        """The temporary children among those to stop: they never start again."""
        return tuple(child for child in self.stop if child not in self.start)


@dataclass(frozen=True)
class Escalate:
    """More restarts than allowed: the supervisor gives up.

    Attributes:
        origin: the child that exited, or that did not start.
        stop: the running children to stop, in this order.
    """

    origin: int
    stop: tuple[int, ...]


Decision = LetEnd | Restart | Escalate


@dataclass
class SupervisorState:
    """The children of one supervisor, and what becomes of them.

    Children are numbers in start order.

    Args:
        flags: strategy and restart intensity.

    Attributes:
        running: the children that run.
        awaited: the children that are to be started again.
        escalated: whether the supervisor has given up; nothing is decided any more.
    """

    flags: SupervisorFlags
    running: set[int] = field(default_factory=set[int])
    awaited: set[int] = field(default_factory=set[int])
    escalated: bool = False
    _modes: dict[int, RestartMode] = field(default_factory=dict[int, RestartMode])
    _next: int = 0
    _restarts: deque[float] = field(default_factory=deque[float])

    def add(self, mode: RestartMode) -> int:
        """Add a child that has just been started, behind all others; returns its number."""
        child = self._next
        self._next += 1
        self._modes[child] = mode
        self.running.add(child)
        return child

    def started(self, child: int) -> None:
        """A child runs again."""
        self.awaited.discard(child)
        self.running.add(child)

    def state_of(self, child: int) -> ActorState:
        """Return whether a child runs, or will run again."""
        if self.escalated:
            return "stopped"
        if child in self.running:
            return "running"
        return "restarting" if child in self.awaited else "stopped"

    def exited(self, child: int, kind: ExitKind, now_seconds: float) -> Decision | None:
        """A child has ended by itself.

        Args:
            child: which.
            kind: how it ended: "normal" and "shutdown" are as it should be, "crash" is not.
            now_seconds: the time, of any clock that does not go back.

        Returns:
            What to do; None if it was not known to run, e.g. because it is being stopped anyway.
        """
        if child not in self.running or self.escalated:
            return None
        self.running.discard(child)
        mode = self._modes[child]
        if mode == "temporary":
            del self._modes[child]
            return LetEnd(child)
        if mode == "transient" and kind != "crash":
            return LetEnd(child)  # it stays a child: a restart of all starts it again
        return self._restart(child, now_seconds)

    def start_failed(self, child: int, now_seconds: float) -> Decision | None:
        """A child that was to be started again did not start, which is one more restart, whatever its mode."""
        return None if self.escalated else self._restart(child, now_seconds)

    def _restart(self, origin: int, now_seconds: float) -> Decision:
        # Every restart counts once, however many children it takes along.
        while self._restarts and self._restarts[0] < now_seconds - self.flags.within_seconds:
            self._restarts.popleft()
        self._restarts.append(now_seconds)
        if len(self._restarts) > self.flags.max_restarts:
            self.escalated = True
            stop = tuple(sorted(self.running, reverse=True))
            self.running.clear()
            return Escalate(origin, stop)
        group = self._group(origin)
        stop = tuple(sorted(self.running.intersection(group), reverse=True))
        self.running.difference_update(stop)
        for child in group:
            if self._modes[child] == "temporary":
                del self._modes[child]
        start = tuple(child for child in group if child in self._modes)
        self.awaited.update(start)
        return Restart(origin, stop, start, self.flags.pause_seconds(len(self._restarts)))

    def _group(self, origin: int) -> tuple[int, ...]:
        """Return the children that a restart concerns, in start order."""
        if self.flags.strategy == "one_for_one":
            return (origin,)
        if self.flags.strategy == "one_for_all":
            return tuple(self._modes)
        return tuple(child for child in self._modes if child >= origin)
