"""Gathers what happens to the programs of one node: counts, seconds, and why each of them was needed."""

import threading
from collections import Counter, deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final

from .compile_statistics import CompileStatistics, Recompilation, Transfer
from .explanations import Compiled, explain, report
from .resharding import describe

if TYPE_CHECKING:
    from .compiling import Program
    from .configuration import Configuration
    from .executable import Executable
    from .signature import Signature

# Enough for whoever looks at a table, and bounded where every item has a shape of its own.
_MAX_REASONS: Final = 100
_MAX_REMEMBERED: Final = 64


class CompileLog:
    """What `compile_statistics()` of a node shows. Its programs share it; callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executables: set[Executable] = set()
        self._programs = 0
        self._hits_of_dropped = 0
        self._transfers_of_dropped: Counter[tuple[str, Any, Any]] = Counter()
        self._misses = 0
        self._seconds = 0.0
        self._evictions = 0
        self._remembered: deque[Compiled] = deque(maxlen=_MAX_REMEMBERED)
        self._reasons: deque[Recompilation] = deque(maxlen=_MAX_REASONS)
        self._told: set[Hashable] = set()
        self._shapes: dict[str, int] = {}

    def statistics(self) -> CompileStatistics:
        """Return a snapshot."""
        with self._lock:
            transfers = Counter(self._transfers_of_dropped)
            for executable in self._executables:
                transfers.update(dict(executable.transfers))  # a copy: devices' threads count on
            return CompileStatistics(
                programs=len(self._executables),
                hits=self._hits_of_dropped + sum(executable.hits for executable in self._executables),
                misses=self._misses,
                seconds=self._seconds,
                evictions=self._evictions,
                transfers=transfers.total(),
                directions=tuple(
                    [
                        Transfer(argument, describe(source), describe(destination), count)
                        for (argument, source, destination), count in transfers.most_common()
                    ]
                ),
                recompilations=tuple(self._reasons),
            )

    def is_first(self, cause: Hashable) -> bool:
        """Tell whether a cause is told of for the first time, so that each is logged once."""
        with self._lock:
            if cause in self._told:
                return False
            self._told.add(cause)
            return True

    def missed(self) -> None:
        """Count a call whose program was not there."""
        with self._lock:
            self._misses += 1

    def spent(self, seconds: float) -> None:
        """Count time spent compiling, also in vain."""
        with self._lock:
            self._seconds += seconds

    def compiled(
        self, program: "Program", configuration: "Configuration", signature: "Signature", executable: "Executable"
    ) -> None:
        """Count a program, find out why the node needed another one, and log that once per cause."""
        this = Compiled(program, configuration, signature)
        with self._lock:
            self._programs += 1
            self._executables.add(executable)
            reasons = explain(this, list(self._remembered), self._programs)
            self._remembered.append(this)
            self._reasons.extend(reasons)
            counts: list[int] = []
            for reason in reasons:
                if reason.cause == "shape" and reason.remedy:
                    self._shapes[reason.argument] = self._shapes.get(reason.argument, 1) + 1
                counts.append(self._shapes.get(reason.argument, 0))
        for reason, count in zip(reasons, counts, strict=True):
            report(program.name, reason, count, self.is_first)

    def dropped(self, executable: "Executable") -> None:
        """Count a program that had to go, and let go of it."""
        with self._lock:
            if executable in self._executables:
                self._executables.discard(executable)
                self._evictions += 1
                self._hits_of_dropped += executable.hits
                self._transfers_of_dropped.update(executable.transfers)
