"""`python -m penstock profile`."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from penstock._cli import main
from penstock.telemetry import NodeProfile, Verdict

SHOP = """
import asyncio
import time
import signal

import penstock as ps
from penstock import engine


@ps.node
async def fetch(number: int, scale: int = 1) -> int:
    await asyncio.sleep(0)
    return number * scale


@ps.node(concurrency=1)
async def decode(number: int) -> int:
    if number == 13:
        raise ValueError(number)
    await asyncio.sleep(0.002)
    return number


@ps.graph
async def search(number: int, scale: int = 1) -> int:
    return await decode(await fetch(number, scale))


@ps.graph
async def fixed() -> int:
    return await decode(await fetch(3))


def calls():
    return [search(number) for number in range(5)]


async def endless():
    while True:
        yield search(1)


async def main():
    await engine.run(fixed())


def slowly():
    while True:
        time.sleep(0.02)  # as a source that reads or parses
        yield search(1)


async def forever():
    await engine.run(fixed())
    await asyncio.Event().wait()


async def late():
    await engine.run(fixed())
    raise TimeoutError("of its own")


async def source():
    yield fixed()
    raise TimeoutError("of its own")


async def interrupted():
    await engine.run(fixed())
    signal.raise_signal(signal.SIGINT)
    await asyncio.Event().wait()


def needs(number):
    return []


number = 3
"""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shop", raising=False)

    def run(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    structlog.reset_defaults()  # another test may have configured it
    yield run
    structlog.reset_defaults()


def counts(run: Run, *arguments: str) -> dict[str, int]:
    shown = json.loads(run("profile", *arguments, "--json"))
    assert set(shown) == {"elapsed_seconds", "nodes", "verdict", "critical_path"}
    assert set(shown["nodes"][0]) == set(NodeProfile.__dataclass_fields__)
    assert set(shown["verdict"]) == set(Verdict.__dataclass_fields__)
    return {node["node"]: node["count"] for node in shown["nodes"]}


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (["shop:fixed", "--calls", "7"], 7),
        (["shop:fixed"], 100),
        (["shop:search", "--input", "3"], 1),
        (["shop:search", "--input", "[3, 2]", "--input", '{"number": 3, "scale": 2}', "--calls", "5"], 5),
        (["shop:calls"], 5),
        (["shop:main"], 1),
        (["shop:forever", "--seconds", "0.5"], 1),
    ],
)
def test_it_runs_graphs_and_what_gives_calls(run: Run, arguments: list[str], calls: int) -> None:
    assert counts(run, *arguments) == {"fetch": calls, "decode": calls}


@pytest.mark.parametrize("arguments", [["shop:slowly"], ["shop:endless"], ["shop:search", "--input", "3"]])
def test_it_ends_after_some_seconds(run: Run, arguments: list[str]) -> None:
    count = counts(run, *arguments, "--seconds", "0.2")["decode"]
    assert count > 0
    assert arguments != ["shop:slowly"] or count <= 11  # a call takes 20 ms to make, and holds the loop


@pytest.mark.parametrize("name", ["shop:late", "shop:source"])
@pytest.mark.parametrize("limit", [[], ["--seconds", "60"]])
def test_a_timeout_of_the_program_itself_is_not_hidden(run: Run, name: str, limit: list[str]) -> None:
    with pytest.raises(TimeoutError, match="of its own"):
        run("profile", name, *limit)


def test_ctrl_c_shows_what_ran_until_then(run: Run, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        assert "decode" in run("profile", "shop:interrupted", "--html", str(tmp_path / "page.html"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "page.html").exists()


def test_it_shows_the_table_and_the_verdict(run: Run) -> None:
    shown = run("profile", "shop:fixed", "--calls", "200")
    assert '"decode" limits the pipeline: ' in shown
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[lines.index("fixed") :][1:3]] == ["fetch", "decode"]


def test_what_fails_counts_and_the_others_go_on(run: Run) -> None:
    shown = json.loads(run("profile", "shop:search", "--input", "13", "--input", "3", "--json"))
    assert [(node["count"], node["errors"]) for node in shown["nodes"]] == [(2, 0), (1, 1)]


def test_it_writes_a_timeline_and_a_page(run: Run, tmp_path: Path) -> None:
    run("profile", "shop:calls", "--perfetto", "trace.json", "--html", "page.html")
    assert "decode" in (tmp_path / "page.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shop"], "'shop' is not of the form MODULE:NAME"),
        (["shoop:search"], "there is no module 'shoop'"),
        (["shop.inner:search"], "there is no module 'shop.inner'"),
        (["shop:serch"], "'shop' has no 'serch'; its graphs: search, fixed"),
        (["shop:number"], "shop:number is 3: it has to be a graph"),
        (["shop:needs"], "shop:needs needs arguments (missing a required argument: 'number')"),
        (["shop:search"], "missing a required argument: 'number'; its parameters are"),
        (["shop:search"], "give them with --input"),
        (["shop:search", "--input", "x"], "'x' is no JSON"),
        (["shop:search", "--input", "3", "--calls", "0"], "'0' is no whole number, at least 1"),
        (["shop:calls", "--calls", "3"], "--input and --calls are for graphs, and shop:calls is not a graph"),
    ],
)
def test_wrong_arguments_say_what_is_right(
    run: Run, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run("profile", *arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_a_module_fails_with_is_not_hidden(run: Run) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        run("profile", "broken:search")
