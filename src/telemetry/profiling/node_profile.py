"""NodeProfile: what one node did while a profile was taken."""

from dataclasses import dataclass

from .sums import NodeSum, Sums


@dataclass(frozen=True)
class NodeProfile:
    """What one node did, over all scopes of its graph: the items that left it meanwhile.

    Of a node that runs very often only a sample of its executions is timed, and stands for all of them.

    Attributes:
        graph: name of its graph, or of the body of control flow that it belongs to.
        node: name of the node, as drawn.
        count: items that it finished with a result.
        errors: items that ended in an error here.
        busy_seconds: time in its handler, waits included, over all items; in a thread or a process also the wait for
            one that is free. None for a node that gives or reads a stream, whose time is that of others as well.
        busy_share: `busy_seconds` of places times seconds: how many items it may have at a time, times how long each
            of its scopes was open inside of the profile. 1 is always busy. Without any limit it counts as one place:
            then it is how many items it had at a time, on average. None if `busy_seconds` is.
        p50_seconds: half of its executions, with all attempts of each, took at most this long. None if none was timed.
        p90_seconds: 90 % of them did.
        p99_seconds: 99 % of them did.
        put_wait_seconds: time that items waited for room in its inbox, over all items.
        queue_wait_seconds: time that items waited in its inbox, over all items.
        blocked_seconds: time that items which it had finished waited for room in the inboxes after it, over all items.
        occupancy: share of the time that items waited in its inbox. Near 0: it is starved, and what comes before it
            limits; near 1: it is what limits, or something after it does.
        inbox_full_share: share of the time that its inbox was full.
        compile_share: share of `busy_seconds` that its items waited for programs to be compiled. What a device does for
            results that were handed on before they were ready is busy time as well. None if `busy_seconds` is, or 0.
        transfer_share: the same of arrays on their way to a device, from another one or back.
        device_share: the same of computing on a device. What is missing from the sum of the three is time in which an
            item waited for others of its batch, or for the device.
    """

    graph: str
    node: str
    count: int
    errors: int
    busy_seconds: float | None
    busy_share: float | None
    p50_seconds: float | None
    p90_seconds: float | None
    p99_seconds: float | None
    put_wait_seconds: float
    queue_wait_seconds: float
    blocked_seconds: float
    occupancy: float
    inbox_full_share: float
    compile_share: float | None
    transfer_share: float | None
    device_share: float | None

    @property
    def mean_seconds(self) -> float | None:
        """Mean of `busy_seconds` of an item; None if there was none, or they are not timed."""
        ended = self.count + self.errors
        return None if self.busy_seconds is None or not ended else self.busy_seconds / ended

    @property
    def mean_queue_wait_seconds(self) -> float | None:
        """Mean of `queue_wait_seconds` of an item; None if there was none."""
        ended = self.count + self.errors
        return self.queue_wait_seconds / ended if ended else None


def node_profile_of(sums: Sums, node: NodeSum) -> NodeProfile:
    """Return what one of the nodes of `sums` did."""
    counters, queue, durations = node.counters, node.timed.queue, node.timed.durations
    place_seconds = sum(group.place_seconds for group in sums.own_places(node)) or node.open_seconds
    return NodeProfile(
        graph=counters.graph,
        node=counters.node,
        count=counters.completed,
        errors=counters.failed,
        busy_seconds=node.busy_seconds,
        busy_share=None if node.busy_seconds is None or not place_seconds else node.busy_seconds / place_seconds,
        p50_seconds=durations.quantile(0.5),
        p90_seconds=durations.quantile(0.9),
        p99_seconds=durations.quantile(0.99),
        put_wait_seconds=node.put_wait_seconds,
        queue_wait_seconds=queue.waited_seconds,
        blocked_seconds=node.blocked_seconds,
        occupancy=node.occupancy,
        inbox_full_share=node.inbox_full_share,
        compile_share=node.share_of_busy(node.compile_seconds),
        transfer_share=node.share_of_busy(node.transfer_seconds),
        device_share=node.share_of_busy(node.device_seconds),
    )
