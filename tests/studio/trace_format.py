"""Reads a trace in the "Trace Event Format", more strictly than the programs that show traces."""

import json
from collections import defaultdict
from typing import Any

NUMBER = (int, float)
# The fields that an event of each phase must have, besides "ph"; and the fields that it may have.
FIELDS: dict[str, tuple[dict[str, type | tuple[type, ...]], set[str]]] = {
    "M": ({"pid": int, "name": str, "args": dict}, {"tid"}),
    "X": ({"pid": int, "tid": int, "name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "args": dict}, set()),
    "C": ({"pid": int, "name": str, "ts": NUMBER, "args": dict}, set()),
    **dict.fromkeys(
        "stf",
        ({"pid": int, "tid": int, "name": str, "cat": str, "id": int, "ts": NUMBER, "bp": str}, set[str]()),
    ),
}  # fmt: skip
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA["thread_sort_index"] = "sort_index"


class Trace:
    """A trace that follows the format.

    Attributes:
        facts: the facts in its "otherData".
        events: all events.
        slices: for each named track, as (process, thread), its slices in order.
        flows: for each item, the names of the slices that its arrows bind to, in order.
        counters: for each counter, as (process, name), its values in order.
    """

    def __init__(self, text: str) -> None:
        document = json.loads(text)
        assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
        assert document["displayTimeUnit"] in ("ms", "ns")
        self.facts: dict[str, Any] = document["otherData"]
        self.events: list[dict[str, Any]] = document["traceEvents"]
        for event in self.events:
            _check_fields(event)
        self._name_tracks()
        self._gather_slices()
        self._bind_flows()
        self.counters: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event in sorted(self._of("C"), key=lambda event: event["ts"]):
            [value] = event["args"].values()
            assert value >= 0
            self.counters[self._processes[event["pid"]], event["name"]].append(value)

    def _of(self, phases: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] in phases]

    def _name_tracks(self) -> None:
        self._processes: dict[int, str] = {}
        self._threads: dict[tuple[int, int], str] = {}
        for event in self._of("M"):
            value = event["args"][METADATA[event["name"]]]
            if event["name"] == "process_name":
                assert self._processes.setdefault(event["pid"], value) is value
            elif event["name"] == "thread_name":
                assert self._threads.setdefault((event["pid"], event["tid"]), value) is value
        assert len(set(self._processes.values())) == len(self._processes)

    def _gather_slices(self) -> None:
        self._raw: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for event in self._of("X"):
            assert event["dur"] > 0
            self._raw[event["pid"], event["tid"]].append(event)
        self.slices: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for (pid, tid), found in self._raw.items():
            found.sort(key=lambda event: event["ts"])
            ended = float("-inf")
            for event in found:
                assert round(event["ts"] * 1000) >= ended, "slices of one track overlap"
                ended = round(event["ts"] * 1000) + round(event["dur"] * 1000)
            self.slices[self._processes[pid], self._threads[pid, tid]] = found

    def _bind_flows(self) -> None:
        chains: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in self._of("stf"):
            chains[event["id"]].append(event)
        self.flows: dict[int, list[str]] = {}
        for frame, chain in chains.items():
            phases = "".join(event["ph"] for event in chain)
            assert phases == f"s{'t' * (len(chain) - 2)}f", phases
            assert [event["ts"] for event in chain] == sorted(event["ts"] for event in chain)
            self.flows[frame] = [self._bound(event, frame)["name"] for event in chain]

    def _bound(self, event: dict[str, Any], frame: int) -> dict[str, Any]:
        """Return the slice that a flow event binds to: the slice that encloses the event on its track."""
        at = event["ts"]
        [found] = [one for one in self._raw[event["pid"], event["tid"]] if one["ts"] <= at < one["ts"] + one["dur"]]
        assert frame == found["args"].get("frame") or frame in found["args"].get("frames", ())
        return found


def _check_fields(event: dict[str, Any]) -> None:
    required, optional = FIELDS[event["ph"]]
    assert set(required) <= set(event) - {"ph"} <= set(required) | optional, event
    for name, kind in required.items():
        assert isinstance(event[name], kind), event
        assert not isinstance(event[name], bool), event
