"""The actors that all runs of one plan in one Engine share."""

from collections.abc import Iterator

from ..telemetry import metrics
from ..telemetry.profiling import registry
from .options import ExecutionOptions
from .planning import ChosenScheduler
from .pools import Pools
from .wiring import Wiring


class SharedWirings:
    """The wirings of one plan in one Engine; runs that do not count in metrics, or share threads, have others.

    They end with the plan or the Engine, whichever goes first, and nobody ends those.
    """

    def __init__(self) -> None:
        self._wirings: dict[tuple[ChosenScheduler, str, bool, bool], Wiring] = {}

    def get(self, pools: Pools, scheduler: ChosenScheduler, options: ExecutionOptions) -> Wiring:
        """Return the one for runs with these options; the first time, make it."""
        device_strategy, is_counted = options.device_strategy, options.collect_metrics
        has_all_threads = options.max_workers >= pools.max_threads
        key = scheduler, device_strategy, is_counted, has_all_threads
        wiring = self._wirings.get(key)
        if wiring is None:
            # Every run has workers of its own, so nothing but the limits of nodes is shared and bounded here.
            # Where each run has a share of the threads, its items wait for that, and must not fill a node meanwhile.
            wiring = self._wirings[key] = Wiring(
                pools, None, None, device_strategy=device_strategy, has_places_in_threads=has_all_threads
            )
            registry.scope_opened(wiring)
            if is_counted:
                metrics.opened(wiring)
        return wiring

    def __iter__(self) -> Iterator[Wiring]:
        return iter(list(self._wirings.values()))

    def __del__(self) -> None:
        for (_, _, is_counted, _), wiring in self._wirings.items():
            registry.scope_vanished(wiring)
            if is_counted:
                metrics.vanished(wiring)
