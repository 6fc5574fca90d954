"""Devices: what nodes compute on them, compile for them, and copy to them."""

from collections.abc import Iterator
from typing import Final

from ...sums import NodeSum
from ..evidence import Evidence
from .limit import Kind, Limit, Verdict

_REASONS: Final[dict[Kind, str]] = {
    "compilation": "it is compiled again and again, because its arguments change: {share:.0%} of what its items take "
    "there",
    "transfer": "it copies rather than computes: arrays on their way to its device and back are {share:.0%} of what "
    "its items take there",
    "device": "its device has an item for {used:.0%} of the time",
}
_REMEDIES: Final[dict[Kind, str]] = {
    "compilation": "give it arguments of few shapes (pad them, or Batch(pad_axes=)), as its compile_statistics() "
    "explains, and have deploy(warmup=True) compile them before the first call",
    "transfer": "have the nodes before and after it run on its device as well, send less (smaller dtypes), or keep "
    "there what does not change (a resource)",
    "device": "have it take more items at once (batch=), or use more devices",
}


def devices(evidence: Evidence) -> Iterator[Limit]:
    """Yield the devices of nodes that had something to do there."""
    for name, seconds in evidence.covered_seconds.items():
        node = evidence.sums.nodes[name]
        kind, share = _most(node)
        used = min(seconds / evidence.elapsed_seconds, 1.0)
        reason = _REASONS[kind].format(share=share, used=used)
        yield Limit(used, 4, Verdict(name[1], reason, _REMEDIES[kind], name[0], kind))


def _most(node: NodeSum) -> tuple[Kind, float]:
    """Return what the items of a node wait for most on their device, and for how much of what they take there."""
    seconds: dict[Kind, float] = {
        "device": node.device_seconds,
        "compilation": node.compile_seconds,
        "transfer": node.transfer_seconds,
    }
    kind = max(seconds, key=seconds.__getitem__)
    return kind, seconds[kind] / (sum(seconds.values()) or 1.0)
