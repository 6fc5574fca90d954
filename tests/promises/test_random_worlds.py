"""Promises 1, 2, 4 and 5 in random worlds: each world is run once, and its books are checked for all four promises."""

from penstock import engine
from tests.promises.exploring import Explorer
from tests.promises.scenario import LIMITS, Item, World, check_outcomes
from tests.promises.ways import live


def test_promises_1_2_4_and_5_hold_in_random_worlds(explore: Explorer) -> None:
    async def main() -> World:
        world = World.of_running_loop()
        items = await live(world)
        check_outcomes(world, items)
        check_statistics(world, items)
        check_bounds(world)
        assert set(world.calls.values()) <= {1}, f"called twice: {[key for key, n in world.calls.items() if n > 1]}"
        for item in items:
            check_calls(world, item)
        assert world.too_late == []
        return world

    kinds = ("done", "failed", "expired", "refused")
    kinds_seen = {f"an item is {kind}": lambda world, kind=kind: world.count(kind) > 0 for kind in kinds}
    limits = {f"{limit} in {node}": lambda w, n=node, limit=limit: w.peak[n] == limit for node, limit in LIMITS.items()}
    windows = {
        kind.__name__: lambda w, kind=kind: isinstance(w.statistics, kind) and w.running_peak == w.max_in_flight
        for kind in (engine.StreamStatistics, engine.ServiceStatistics)
    }
    explore(main, reaches={
        **kinds_seen, **limits, **windows,
        "four cancelled items": lambda world: world.count("cancelled") >= 4,
        "a fault": lambda world: world.injected > 0,
        "a second attempt": lambda world: any(attempt == 2 for _, _, attempt in world.calls),
    })  # fmt: skip


def check_statistics(world: World, items: list[Item]) -> None:
    """Check that the engine's counts agree with the outcomes that callers received, and that all places are free."""
    statistics = world.statistics
    if statistics is None:
        return
    if isinstance(statistics, engine.StreamStatistics):
        assert (statistics.submitted, statistics.completed, statistics.failed) == (
            len(items), world.count("done"), world.count("failed"),
        )  # fmt: skip
        assert (statistics.yielded, statistics.in_flight) == (len(items), 0)
    else:
        admission = statistics.admission
        # A result and the cancel of its caller may come in the same turn.
        assert statistics.completed + statistics.failed <= admission.admitted
        assert admission.in_flight == admission.queued == 0
        assert admission.refused == world.count("refused")
    assert [actor.node for actor in statistics.actors if actor.in_flight or actor.inbox.depth] == []


def check_bounds(world: World) -> None:
    """Check that limits of nodes, capacities of inboxes, and windows of streams and deployments were kept."""
    for node, limit in LIMITS.items():
        if node not in ("tally", "ledger") or world.statistics is not None:  # each run has an instance of its own
            assert world.peak[node] <= limit, f"{world.peak[node]} items were in {node!r} at a time"
    if isinstance(world.statistics, engine.StreamStatistics):
        assert world.inside_peak <= world.max_in_flight
    elif world.statistics is not None:
        assert world.running_peak <= world.max_in_flight
    for actor in () if world.statistics is None else world.statistics.actors:
        if actor.inbox.capacity is not None:  # an inbox in a body has no capacity: `concurrency` bounds its frames
            assert actor.inbox.high_water <= actor.inbox.capacity


def check_calls(world: World, item: Item) -> None:
    """Check that an item with a result was in each node once, and a second time only where the first attempt failed."""
    kind, _ = world.outcomes[item.index][0]
    attempts = {
        handler: sorted(attempt for name, index, attempt in world.calls if (name, index) == (handler, item.index))
        for handler in world.shape.handlers
    }
    for handler, made in attempts.items():
        assert len(made) <= (2 if handler == "left" else 1), f"{handler}, item {item.index}: attempts {made}"
    if world.injected:  # a fault replaces a call
        return
    for handler, made in attempts.items():
        assert made == list(range(1, len(made) + 1)), f"{handler}, item {item.index}: attempts {made}"
    if kind == "done":
        expected = {handler: 2 if handler in item.fails else 1 for handler in world.shape.handlers}
        assert {handler: len(made) for handler, made in attempts.items()} == expected
