"""Statistics as tables: printed, with rich, and in a notebook; and the node that limits throughput."""

import asyncio
import dataclasses
import io
import os
import subprocess
import sys
from typing import Any, get_type_hints
from xml.etree import ElementTree

import pytest
from rich.console import Console

import penstock as ps
from penstock import engine, telemetry
from penstock.engine import ActorStatistics, AdmissionStatistics, ChannelStatistics, ServiceStatistics, StreamStatistics
from penstock.telemetry.tables import duration, milliseconds, rate, significant
from penstock.testing import wait_quiescent
from tests.kit import listed, model, numbers, same
from tests.telemetry.virtual_time import VirtualTime

IDLE = AdmissionStatistics(0, 64, 0, None, 0, 0, None)


def inbox(**fields: Any) -> ChannelStatistics:
    empty = ChannelStatistics(0, 16, 0, 0, 0, 0, 0, 0.0, 0.0)
    return dataclasses.replace(empty, **fields)


def actor(node: str, graph: str = "search", **fields: Any) -> ActorStatistics:
    idle = ActorStatistics(graph, node, 0, 0, 0, 0, 0, None, None, inbox())
    return dataclasses.replace(idle, **fields)


def service_of(*actors: ActorStatistics, elapsed_seconds: float | None = 10.0) -> ServiceStatistics:
    return ServiceStatistics("ready", 1204, 3, 1, IDLE, actors, elapsed_seconds)


BUSY = ServiceStatistics(
    "ready", 1204, 3, 1,
    AdmissionStatistics(64, 64, 12, 100, 1283, 7, 120.25),
    (
        actor("fetch", completed=1280, retried=4, in_flight=8, concurrency=8, busy_seconds=20.0, inbox=inbox(depth=3)),
        actor(
            "parse", completed=1204, failed=3, in_flight=2, concurrency=2, busy_seconds=19.2,
            inbox=inbox(depth=16, high_water=16, put_wait_seconds=50.0),
        ),
        actor("each", "parse", in_flight=1, inbox=inbox(capacity=None)),
    ),
    10.0,
)  # fmt: skip


def with_rich(shown: object, columns: int) -> str:
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def squeezed(text: str) -> list[str]:
    """The lines of a table without its padding, rules and empty lines."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip(" ─")]


PRINTED = """
service     ready
calls       1,204 completed, 3 failed, 1 cancelled, 0 expired, 120/s over 10.0 s
admission   64/64 in flight, 12/100 queued, 7 refused, 120 calls/s while full
bottleneck  parse limits it: on average 5.00 items waited for room in its inbox,
            while its 2 places were 96% busy

                                          busy
                            in             per     put            high
  node    done  failed  flight  inbox     item    wait  retried  water
──────────────────────────────────────────────────────────────────────
search
  fetch  1,280       0     8/8   3/16  15.6 ms     0 s        4      0
  parse  1,204       3     2/2  16/16  15.9 ms  50.0 s        0     16
parse
  each       0       0     1/-    0/-        -     0 s        0      0
"""


def test_what_can_be_restarted_says_whether_it_runs() -> None:
    assert "state" not in str(BUSY)
    shown = service_of(
        actor("plain"),
        actor("database", state="running"),
        actor("index", state="restarting", restarts=1),
        actor("decoder", state="stopped", restarts=12),
    )
    rows = [line.split() for line in str(shown).splitlines() if line.startswith("  ") and "0" in line]
    assert [" ".join(row[1:-1]) for row in rows] == ["", "running", "restarting, 1 restart", "stopped, 12 restarts"]
    for text in (with_rich(shown, 200), shown._repr_html_()):
        assert "stopped, 12 restarts" in text


def test_a_node_that_does_not_run_is_shown_of_many() -> None:
    shown = service_of(*(actor(f"node {n}", completed=9) for n in range(99)), actor("broken", state="stopped"))
    assert "broken" in str(shown)


def test_a_deployment_is_printed_as_a_table_with_and_without_rich() -> None:
    assert str(BUSY) == PRINTED.strip()
    assert [line.rstrip() for line in with_rich(BUSY, 80).splitlines()] == str(BUSY).splitlines()


def test_all_columns_are_shown_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_terminal(*args: object) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    long = [dataclasses.replace(one, node=f"{one.node}_{'very_long_' * 3}", state="running") for one in BUSY.actors]
    shown = dataclasses.replace(BUSY, actors=(*long, dataclasses.replace(long[0], state="stopped", restarts=3)))
    monkeypatch.setenv("COLUMNS", "80")
    assert "no room for: " in str(shown)
    monkeypatch.delenv("COLUMNS")
    assert "no room for: " not in str(shown)
    assert "fetch_very_long_very_long_very_long_  " in str(shown)
    assert max(map(len, str(shown).splitlines())) > 80


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 100, 200])
def test_a_table_fits_and_shortens_names_in_the_middle_and_says_which_columns_it_has_no_room_for(columns: int) -> None:
    long = tuple(dataclasses.replace(one, node=f"a_rather_long_name_of_a_node_{one.node}") for one in BUSY.actors)
    lines = [line.rstrip() for line in with_rich(dataclasses.replace(BUSY, actors=long), columns).splitlines()]
    assert max(map(len, lines)) <= columns
    [row] = [line.split() for line in lines if "fetch " in line and line.startswith("  a_ra")]
    assert row[0] == "a_rather_long_name_of_a_node_fetch" if columns >= 100 else "…" in row[0]
    assert row[1] == "1,280"
    cells = ["1,280", "0", "8/8", "3/16", "15.6 ms", "0 s", "4", "0"]
    assert " ".join(cells).startswith(" ".join(row[1:]))
    titles = ["done", "failed", "in flight", "inbox", "busy per item", "put wait", "retried", "high water"]
    said = " ".join(lines).partition("no room for: ")[2]
    left_out = [title for title in said.split(", ") if title]
    assert left_out == titles[len(titles) - len(left_out) :]
    assert len(" ".join(cells[: len(titles) - len(left_out)]).split()) == len(row) - 1


def test_what_all_rows_say_is_said_once() -> None:
    shown = str(service_of(actor("one", completed=3), actor("two", completed=3)))
    assert [line.split() for line in shown.splitlines() if line.startswith("  ")][-2:] == [["one", "3"], ["two", "3"]]
    assert " ".join(shown.split()).endswith(
        "the same in all rows: failed 0, in flight 0/-, inbox 0/16, busy per item -, put wait 0 s, retried 0, "
        "high water 0"
    )
    assert "failed" in str(service_of(actor("the only one"))).partition("──")[0]


def test_bodies_of_control_flow_stand_behind_their_graph() -> None:
    shown = str(service_of(actor("a", "one"), actor("b", "two"), actor("c", "one/body"), actor("d", "one")))
    rows = shown.splitlines()[shown.splitlines().index("one") :]
    assert [line.split()[0] for line in rows[:7]] == ["one", "a", "d", "one/body", "c", "two", "b"]


def test_a_notebook_shows_the_same_cells() -> None:
    page = ElementTree.fromstring(BUSY._repr_html_())
    rows = [" ".join("".join(cell.itertext()) for cell in row) for row in page.iter("tr")]
    assert rows[:3] == squeezed(str(BUSY))[:3]
    assert rows[-5:] == squeezed(str(BUSY))[-5:]


async def test_a_notebook_shows_plans_verdicts_and_predictions_and_no_raw_records() -> None:
    plan = engine.plan(waiting)._repr_html_()
    assert plan.startswith("<svg")
    lines = (ElementTree.fromstring(plan[plan.index("</svg>") + 6 :]).text or "").splitlines()
    assert lines == str(engine.plan(waiting)).splitlines()[-len(lines) :]
    assert lines[0] == "plan of waiting: 1 actor"
    event = asyncio.Event()
    event.set()
    with telemetry.profile() as profile:
        await engine.run(waiting(event))
    verdict, prediction = profile.verdict, profile.what_if("waiting", concurrency=2)
    for shown, label, value in ((verdict, "because", verdict.reason), (prediction, "then", str(prediction.verdict))):
        page = ElementTree.fromstring(shown._repr_html_())
        assert [label, value] in [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
        assert "(" not in str(shown).split(" ")[0]  # `str()` still says a sentence
        assert "\n" not in str(shown)


def test_names_are_never_taken_for_markup_or_control() -> None:
    evil = service_of(actor("<b>[red]x[/]</b>\x1b[2J&", "<script>"))
    page = ElementTree.fromstring(evil._repr_html_())
    assert "<b>[red]x[/]</b>\\x1b[2J&" in [cell.text for cell in page.iter("td")]
    assert "<script>" in [cell.text for cell in page.iter("th")]
    assert "<b>[red]x[/]</b>\\x1b[2J&" in with_rich(evil, 120)
    for shown in (str(evil), with_rich(evil, 120), evil._repr_html_()):
        assert "\x1b" not in shown


@pytest.mark.parametrize(
    "empty",
    [
        ServiceStatistics("starting", 0, 0, 0, IDLE, ()),
        StreamStatistics(0, 0, 0, 0, 0, 0, ()),
        engine.EngineStatistics(0, 0, None, None, ()),
    ],
    ids=lambda empty: type(empty).__name__,
)
def test_what_has_no_nodes_yet_says_so(empty: Any) -> None:
    assert str(empty).endswith("\n\nno nodes yet")
    assert "no nodes yet" in with_rich(empty, 80)
    ElementTree.fromstring(empty._repr_html_())
    assert "None" not in str(empty)


def test_only_rich_loads_rich() -> None:
    program = (
        "import sys; from penstock.engine import StreamStatistics; it = StreamStatistics(0, 0, 0, 0, 0, 0, ())\n"
        "str(it); it._repr_html_(); print('rich' in sys.modules); it.__rich__(); print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# --- The node that limits ---


def waited(node: str, seconds: float, graph: str = "search", **fields: Any) -> ActorStatistics:
    return actor(node, graph, inbox=inbox(put_wait_seconds=seconds), **fields)


@pytest.mark.parametrize(
    ("actors", "limiting"),
    [
        ([], None),
        ([actor("idle")], None),
        ([waited("now and then", 4.9)], None),
        ([waited("first", 80.0), waited("last full one", 30.0), waited("behind it", 1.0)], "last full one"),
        ([waited("one", 80.0, "a"), waited("other", 90.0, "b")], "other"),
        # The node is busy for a tenth of the time: a burst filled its inbox, but the node does not limit.
        ([waited("burst", 30.0, concurrency=2, busy_seconds=2.0)], None),
        ([waited("slow", 30.0, concurrency=2, busy_seconds=19.0),
          waited("burst", 6.0, concurrency=1, busy_seconds=1.0)], "slow"),
        ([waited("unlimited", 30.0, busy_seconds=2.0)], "unlimited"),
    ],
)  # fmt: skip
def test_the_last_node_that_was_waited_for_limits(actors: list[ActorStatistics], limiting: str | None) -> None:
    found = service_of(*actors).bottleneck
    assert (found and found.node) == limiting
    assert service_of(*actors, elapsed_seconds=None).bottleneck is None
    assert StreamStatistics(0, 0, 0, 0, 0, 0, tuple(actors), 10.0, None).bottleneck is None


def test_the_node_that_limits_is_named_in_a_sentence() -> None:
    found = service_of(waited("parse", 123.0, concurrency=1, busy_seconds=9.9)).bottleneck
    assert found == engine.Bottleneck("search", "parse", 12.3, 0.99, 1)
    assert str(found) == (
        "parse limits it: on average 12.3 items waited for room in its inbox, while its only place was 99% busy"
    )


# --- Live ---


async def test_the_time_of_a_node_that_reads_a_stream_is_not_taken_for_its_own() -> None:
    timed: Any = ps.node(timeout_seconds=100)

    @timed
    async def count(items: list[int]) -> int:
        return len(items)

    async with engine.deploy(timed(listed.fn) >> count) as service:
        await service(numbers(1))
        busy = {actor.node: actor.busy_seconds for actor in service.statistics().actors}
    assert busy["listed"] is None
    assert busy["count"] is not None


@ps.graph
@ps.node(concurrency=1, capacity=2)
async def waiting(event: Any) -> None:
    await event.wait()


async def test_uptime_begins_when_a_deployment_is_ready_and_stands_still_when_it_has_stopped() -> None:
    service = engine.deploy(waiting)
    assert service.statistics().elapsed_seconds is None
    async with service:
        first = service.statistics().elapsed_seconds
        second = service.statistics().elapsed_seconds
        assert first is not None
        assert second is not None
        assert 0 <= first < second
    assert service.statistics() == service.statistics()
    assert str(service.statistics()).startswith("service     stopped\n")


async def test_what_a_deployment_needs_to_get_ready_does_not_count(virtual: VirtualTime) -> None:
    async def enter() -> None:
        virtual.hold(5)  # loading a model takes a while

    async with engine.deploy(ps.graph(model(enter=enter))) as service:
        assert service.statistics().elapsed_seconds == 0
        virtual.hold(2)
        assert service.statistics().elapsed_seconds == 2


async def test_a_stream_and_an_engine_show_what_they_did() -> None:
    event = asyncio.Event()
    async with engine.Engine() as one:
        stream = one.stream(waiting(event) for _ in range(5))
        assert (
            "stream      0 in flight\nitems       0 submitted, 0 completed, 0 failed, 0 skipped, 0 yielded, - over -\n"
            in str(stream.statistics())
        )
        async with stream:
            await wait_quiescent()
            now = str(stream.statistics())
            assert "stream      4 in flight\n" in now
            assert "items       4 submitted, 0 completed, 0 failed, 0 skipped, 0 yielded, 0/s over" in now
            assert squeezed(now)[-2] == "waiting"
            assert squeezed(now)[-1].startswith("waiting 0 0 1/1 2/2 - ")
            event.set()
            assert [item async for item in stream] == [None] * 5
        assert stream.statistics() == stream.statistics()
        await one.run(waiting(event))
        shown = squeezed(str(one.statistics()))
    assert shown[:3] == ["engine 0 runs in flight, 0 scopes open", "threads -", "processes -"]
    assert shown[-2:] == ["waiting", "waiting 1 0 0/1 0/- - 0 s 0 0"]


async def test_of_a_deployments_stream_the_nodes_have_counted_for_longer_than_it_is_open() -> None:
    async with engine.deploy(waiting) as service, service.stream([]) as stream:
        assert [item async for item in stream] == []
        now = stream.statistics()
    assert now.elapsed_seconds is not None
    assert now.actors_elapsed_seconds is not None
    assert now.elapsed_seconds < now.actors_elapsed_seconds


async def test_threads_and_processes_of_an_engine_are_shown() -> None:
    threads = engine.ThreadPoolStatistics(4, 1, 3, 2, 1000, 0)
    processes = engine.ProcessPoolStatistics(2, 1, 1, 0, 50, 1, 2)
    assert (
        "threads    3/4 busy, 2 queued, 1,000 done\nprocesses  1/2 busy, 0 queued, 50 done, 1 died, 2 killed\n"
    ) in str(engine.EngineStatistics(1, 2, threads, processes, ()))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (significant(0), "0"),
        (significant(0.0001), "<0.001"),
        (significant(0.1234), "0.123"),
        (significant(0.99949), "0.999"),
        (significant(0.9996), "1.00"),
        (significant(9.996), "10.0"),
        (significant(99.96), "100"),
        (significant(1234567.8), "1,234,568"),
        (milliseconds(0.0123), "12.3 ms"),
        (milliseconds(None), "-"),
        (rate(12.34, "calls"), "12.3 calls/s"),
        (rate(None), "-"),
        (duration(59.94), "59.9 s"),
        (duration(250.7), "4 min 10 s"),
        (duration(3 * 3600 + 12 * 60 + 59), "3 h 12 min"),
        (duration(1000 * 86400 + 4 * 3600), "1,000 d 4 h"),
    ],
)
def test_numbers_are_short_and_have_their_units(shown: str, expected: str) -> None:
    assert shown == expected


# --- The difference of two snapshots ---


def test_what_happened_between_two_looks() -> None:
    later = dataclasses.replace(
        BUSY,
        completed=1304,
        elapsed_seconds=15.0,
        admission=dataclasses.replace(BUSY.admission, admitted=1400, refused=9, in_flight=1),
        actors=(
            dataclasses.replace(BUSY.actors[0], completed=1300, retried=5, busy_seconds=21.0, in_flight=0),
            dataclasses.replace(BUSY.actors[1], inbox=dataclasses.replace(BUSY.actors[1].inbox, put_wait_seconds=51.0)),
            BUSY.actors[2],
            actor("late", completed=3),
        ),
    )
    between = later.since(BUSY)
    assert (between.completed, between.failed, between.elapsed_seconds) == (100, 0, 5.0)
    assert (between.admission.admitted, between.admission.refused, between.admission.in_flight) == (117, 2, 1)
    fetch, parse, each, late = between.actors
    assert (fetch.completed, fetch.retried, fetch.busy_seconds, fetch.in_flight) == (20, 1, 1.0, 0)
    assert (parse.inbox.put_wait_seconds, parse.inbox.high_water, parse.busy_seconds) == (1.0, 16, 0.0)
    assert (each.busy_seconds, late.completed, later.bottleneck is None) == (None, 3, False)
    assert between.bottleneck is None  # the node limited before, and no longer does
    assert "100 completed, 0 failed, 0 cancelled, 0 expired, 20.0/s over 5.00 s" in str(between)


def test_nodes_of_the_same_name_are_told_apart() -> None:
    before = service_of(actor("fetch", completed=1), actor("fetch", completed=10))
    now = service_of(actor("fetch", completed=3), actor("fetch", completed=14))
    assert [each.completed for each in now.since(before).actors] == [2, 4]


def test_looks_in_the_wrong_order_are_refused() -> None:
    later = dataclasses.replace(BUSY, completed=2000)
    with pytest.raises(
        ValueError, match="since\\(\\) takes earlier statistics of the same object, but completed was 2000"
    ):
        BUSY.since(later)


async def test_two_looks_at_a_stream_from_its_beginning() -> None:
    stream = engine.stream(map(ps.graph(same), range(3)))
    before = stream.statistics()
    async with stream:
        assert await anext(stream) == 0
        first = stream.statistics()
        assert first.since(before) == first
        assert [item async for item in stream] == [1, 2]
        last = stream.statistics().since(first)
    assert last.yielded == 2
    assert last.elapsed_seconds is not None
    assert last.elapsed_seconds > 0


@pytest.mark.parametrize("record", [engine.EngineStatistics, engine.ServiceStatistics, engine.StreamStatistics])
def test_who_reads_annotations_at_run_time_can_take_a_record(record: type) -> None:
    assert get_type_hints(record).keys() >= {field.name for field in dataclasses.fields(record)}
