"""The actors that all runs of one plan in one Engine share."""

from collections.abc import Iterator

from ..telemetry import metrics
from ..telemetry.profiling import registry
from .planning import ChosenScheduler
from .pools import Pools
from .wiring import Wiring


class SharedWirings:
    """The wirings of one plan in one Engine; runs that do not count in metrics have others.

    They end with the plan or the Engine, whichever goes first, and nobody ends those.
    """

    def __init__(self) -> None:
        self._wirings: dict[tuple[ChosenScheduler, str, bool], Wiring] = {}

    def get(self, pools: Pools, scheduler: ChosenScheduler, device_strategy: str, *, is_counted: bool) -> Wiring:
        """Return the one for runs with these options; the first time, make it."""
        key = scheduler, device_strategy, is_counted
        wiring = self._wirings.get(key)
        if wiring is None:
            # Every run has workers of its own, so nothing but the limits of nodes is shared and bounded here.
            wiring = self._wirings[key] = Wiring(pools, None, None, device_strategy=device_strategy)
            registry.scope_opened(wiring)
            if is_counted:
                metrics.opened(wiring)
        return wiring

    def __iter__(self) -> Iterator[Wiring]:
        return iter(list(self._wirings.values()))

    def __del__(self) -> None:
        for (_, _, is_counted), wiring in self._wirings.items():
            registry.scope_vanished(wiring)
            if is_counted:
                metrics.vanished(wiring)
