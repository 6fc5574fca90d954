"""The live page in a browser: it shows each box of a drawing with its figures, follows changes, and obeys its user."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from penstock import engine
from tests.packages import needs_package

from . import alive
from .browser import Browser, installed
from .studio import Studio
from .test_top import exposed

_PROGRAM = installed()
# `make test-long` sets this. There, tests fail without a browser or npm, and are not skipped.
_NOTHING_IS_SKIPPED = "PENSTOCK_TEST_EFFORT" in os.environ
pytestmark = [needs_package("chromium", "chromium" if _NOTHING_IS_SKIPPED else _PROGRAM), pytest.mark.timeout(250)]

KINDS = ("kinds", "moves", "hostile", "many")


class Shown:
    """The page of several programs of `alive`, whose sockets are in a folder, in a browser."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.apps = {kind: stack.enter_context(self.app(kind)) for kind in KINDS}
        paths = [folder / f"{kind}.sock" for kind in KINDS]
        trace_url = "http://jaeger.example/trace/{trace_id}"
        self.studio = stack.enter_context(Studio(*paths, "--trace-url", trace_url, "--show-messages", "--show-keys"))
        self.browser = stack.enter_context(Browser(str(_PROGRAM), folder))

    def app(self, kind: str) -> "AbstractContextManager[subprocess.Popen[str]]":
        """Runs a program of `alive` until the end of a `with` block."""
        return exposed(self.folder / f"{kind}.sock", kind)

    def open(self, kind: str, **options: Any) -> Browser:
        """Open the page anew, and choose a graph."""
        self.browser.open("about:blank")
        self.browser.open(self.studio.address, **options)
        chooser = f"document.querySelector('[data-key=\"{KINDS.index(kind)}\"].process button')"
        self.browser.until(chooser)
        self.browser.run(f"{chooser}.click()")
        self.browser.until(f"document.querySelectorAll('#picture .box').length && {chooser}.ariaPressed == 'true'")
        return self.browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    assert _PROGRAM is not None, "make test-long needs the Debian package chromium"
    with ExitStack() as stack:
        yield Shown(tmp_path_factory.mktemp("studio"), stack)


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    return found


# One test, as the browser and its programs take long to start; each thing that it checks has a function with a name.
def test_the_page_shows_programs_and_obeys(shown: Shown) -> None:
    each_box_of_the_drawing_has_its_figures(shown)
    bodies_open_and_close(shown)
    a_graph_of_300_steps_begins_in_parts_and_a_search_opens_the_part(shown)
    a_step_is_found_and_chosen_with_the_keyboard(shown)
    another_limit_is_told_after_a_few_looks(shown)
    a_hidden_page_asks_for_nothing_and_gets_what_it_has_missed(shown)
    names_messages_and_keys_are_only_text(shown)
    a_trace_has_a_link_that_tells_the_other_side_nothing(shown)
    texts_can_be_read_in_both_themes(shown)
    opening_the_page_of_300_steps_sends_less_than_2_mb(shown)
    a_process_that_dies_is_shown_as_dead_and_found_again(shown)


# --- The drawing ---


def labels(drawing: engine.Drawing) -> list[str]:
    """Return the labels of all boxes of a drawing, those of bodies included."""
    inside = [label for _, body in drawing.bodies for label in labels(body)]
    return [node.label for node in drawing.nodes if node.kind in ("node", "control")] + inside


def each_box_of_the_drawing_has_its_figures(shown: Shown) -> None:
    browser = shown.open("kinds")
    drawn = texts(browser, "#picture .box > text:first-of-type")
    assert sorted(drawn) == sorted(labels(alive.kinds.drawing()))
    # Each step of the table has a box, whose first line says the same as the table.
    rows = browser.run(
        "[...document.querySelectorAll('#steps tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    names = {name.rpartition("/")[2].partition("#")[0] for name, *_ in rows}
    assert names == {*drawn} - {"while_loop", "map_each", "cond", "split", "branch"}
    lines = [line for line in texts(browser, "#picture .box > text.detail") if "in flight" in line]
    assert len(lines) == len(rows)
    assert {f"{row[2]} in flight, {row[3]} waiting" for row in rows} <= {*lines}
    # All texts of a box are inside of it.
    assert browser.run(
        "[...document.querySelectorAll('#picture .box')].every(box => {"
        "const card = box.querySelector('rect').getBoundingClientRect();"
        "return [...box.querySelectorAll(':scope > text')].every(text => { const r = text.getBoundingClientRect();"
        "return !r.width || r.left >= card.left && r.right <= card.right && r.bottom <= card.bottom; }); })"
    )
    assert browser.complaints() == []
    assert all(url.startswith(f"http://127.0.0.1:{shown.studio.port}/") for url in browser.requests())
    assert not any(shown.studio.token in url for url in browser.requests())
    assert browser.run("location.href") == f"http://127.0.0.1:{shown.studio.port}/"
    assert browser.run("sessionStorage.getItem('penstock-token')") == shown.studio.token


def bodies_open_and_close(shown: Shown) -> None:
    browser = shown.open("kinds")
    count = "document.querySelectorAll('#picture .box').length"
    whole = browser.run(count)
    toggle = "document.querySelectorAll('#picture .fold')[0]"
    for compares, expanded in (("<", "false"), ("==", "true")):
        browser.run(f"{toggle}.dispatchEvent(new MouseEvent('click', {{bubbles: true, cancelable: true}}))")
        browser.until(f"{count} {compares} {whole}")
        assert browser.run(f"{toggle}.getAttribute('aria-expanded')") == expanded


def seek(browser: Browser, text: str) -> None:
    """Search for steps as a person does, and go to them."""
    browser.run("document.getElementById('search').select()")
    browser.send("Input.insertText", text=text)
    browser.press("Enter")


def a_graph_of_300_steps_begins_in_parts_and_a_search_opens_the_part(shown: Shown) -> None:
    browser = shown.open("many")
    assert len(texts(browser, "#picture .box > text:first-of-type")) == 15
    browser.until("[...document.querySelectorAll('#picture .box')].every(box => /in flight/.test(box.textContent))")
    assert {"20 steps", "busiest: "} <= {text[:9] for text in texts(browser, "#picture .box > text.detail")}
    browser.run("document.querySelector('#picture .box').dispatchEvent(new MouseEvent('click', {cancelable: true}))")
    assert len(texts(browser, "#steps tr.chosen")) == 20
    assert all("less … halve" in text for text in texts(browser, ".filter"))
    seek(browser, "halve#17")
    browser.until("document.querySelectorAll('#picture .box').length == 35")
    assert texts(browser, "#picture .box:not(.dim) > text:first-of-type") == ["halve"]
    assert browser.run(
        "(() => { const box = document.querySelector('#picture .box:not(.dim)').getBoundingClientRect(),"
        "around = document.getElementById('picture').getBoundingClientRect();"
        "return box.top >= around.top && box.bottom <= around.bottom; })()"
    )
    assert browser.complaints() == []


def a_step_is_found_and_chosen_with_the_keyboard(shown: Shown) -> None:
    browser = shown.open("kinds")
    browser.run("document.getElementById('search').focus()")
    browser.send("Input.insertText", text="halv")
    browser.painted()
    assert texts(browser, "#picture .box:not(.dim) > text:first-of-type") == ["halve"]
    assert [name.rpartition("/")[2] for name in texts(browser, "#steps tbody tr:not([hidden]) th")] == ["halve"]
    browser.run("document.querySelector('#steps tbody tr:not([hidden]) button').focus()")
    browser.run("document.activeElement.click()")
    assert texts(browser, "#picture .box.chosen > text:first-of-type") == ["halve"]
    assert all("halve" in text for text in texts(browser, ".filter"))
    browser.run("document.querySelector('.filter').click()")
    assert texts(browser, "#picture .box.chosen") == []


# --- Changes ---


def another_limit_is_told_after_a_few_looks(shown: Shown) -> None:
    browser = shown.open("moves")
    title = "document.getElementById('verdict-title').textContent"
    announced = "document.getElementById('announcer').textContent"
    browser.until(f"{title} == 'decode'")
    before = browser.run(announced)
    for slow in ("embed", "decode"):
        print(slow, file=shown.apps["moves"].stdin, flush=True)
        asked = len(browser.requests())
        browser.until(f"{title} == '{slow}'")
        assert len(browser.requests()) - asked <= 4  # one request a second
        assert texts(browser, "#picture .box.limits > text:first-of-type") == [slow]
        assert texts(browser, "#steps tr.limits th") == [slow]
        assert "concurrency=" in browser.run("document.getElementById('remedy').textContent")
    # A verdict was announced when the page was opened; these verdicts came less than ten seconds after it.
    assert browser.run(announced) == before


def a_process_that_dies_is_shown_as_dead_and_found_again(shown: Shown) -> None:
    browser = shown.open("moves")
    shown.apps["moves"].kill()
    browser.until("document.body.classList.contains('gone')")
    assert texts(browser, ".process.dead .who") == ["moves.sock: no process"]
    assert browser.run("document.getElementById('verdict-title').textContent") == "No process answers"
    assert browser.run("document.getElementById('record').disabled")
    with shown.app("moves") as again:
        browser.until("!document.body.classList.contains('gone')")
        assert texts(browser, ".process.dead .who") == []
        assert f"process {again.pid}" in texts(browser, ".process .who")[1]


def a_hidden_page_asks_for_nothing_and_gets_what_it_has_missed(shown: Shown) -> None:
    browser = shown.open("kinds")
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, value: %s})"
    points = "document.querySelector('#picture .spark[points]').getAttribute('points').split(' ').length"
    browser.until("document.querySelector('#picture .spark[points]')")
    before = browser.run(points)
    browser.run(hide % "true")
    browser.until("performance.now() > 0", 1)
    asked = len(browser.requests())
    number = shown.studio.looks()["number"]
    give_up = monotonic() + 30
    while shown.studio.looks()["number"] < number + 2 * len(KINDS) and monotonic() < give_up:
        browser.painted()
    assert len(browser.requests()) <= asked + 1  # one request may have been under way
    browser.run(hide % "false")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    browser.until(f"{points} > {before}")


# --- Attackers ---


def names_messages_and_keys_are_only_text(shown: Shown) -> None:
    browser = shown.open("hostile")
    browser.until("document.querySelector('#steps tbody th button')")
    assert browser.run("document.querySelectorAll('img, main script, iframe').length") == 0
    assert alive.EVIL in browser.run("document.getElementById('graph-title').textContent")
    assert alive.EVIL in browser.run("document.querySelector('#steps tbody th').textContent")
    assert browser.run("document.querySelector('#picture .box > text').textContent").startswith(alive.EVIL)
    browser.until("document.querySelector('#items a') && document.querySelector('#failures td:nth-child(5)')")
    items, failures = texts(browser, "#items tbody tr"), texts(browser, "#failures tbody tr")
    assert all(f"{alive.EVIL} of a tenant" in text for text in items)
    assert all(f"{alive.EVIL} 7" in text for text in failures)
    assert browser.run(
        "[...document.querySelectorAll('*')].every(e => !e.getAttributeNames().some(n => /^on/.test(n)))"
    )
    assert browser.complaints() == []


def a_trace_has_a_link_that_tells_the_other_side_nothing(shown: Shown) -> None:
    browser = shown.open("hostile")
    browser.until("document.querySelector('#items a')")
    links = browser.run(
        "[...document.querySelectorAll('main a[href*=\"//\"]')].map(a => [a.href, a.rel, a.target, a.textContent])"
    )
    for address, rel, target, text in links:
        trace = address.removeprefix("http://jaeger.example/trace/")
        assert len(bytes.fromhex(trace)) == 16
        assert (rel, target, text) == ("noopener noreferrer", "_blank", trace[:8])


# --- People who look ---


CONTRAST = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const card = at.matches('a.box, a.fold, svg g') && [...at.children].find((one) => one.tagName == 'rect');
      const fill = card && getComputedStyle(card).fill;
      if (fill && fill !== 'none') return channels(fill);
      const ground = channels(getComputedStyle(at).backgroundColor);
      if (ground.length < 4 || ground[3] > 0) return ground;
    }
    return [255, 255, 255];
  };
  const worst = {};
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = element.getBoundingClientRect();
    if (!own || box.width < 2 || element.closest('.unseen, .skip, script, style, title')) continue;
    const style = getComputedStyle(element);
    const inSvg = element.namespaceURI.endsWith('svg');
    const [front, back] = [light(channels(inSvg ? style.fill : style.color)), light(behind(element))];
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    const name = `${element.tagName}.${element.getAttribute('class') || ''} ${element.textContent.trim().slice(0, 30)}`;
    if (ratio < 4.5) worst[name] = ratio;
  }
  return worst;
})()
"""


def texts_can_be_read_in_both_themes(shown: Shown) -> None:
    for kind, dark in itertools.product(("kinds", "hostile"), (False, True)):
        browser = shown.open(kind, dark=dark)
        browser.until("document.querySelector('.verdict h2').textContent.length")
        assert browser.run(CONTRAST) == {}


AXE = "axe-core@4.10.3"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm."""
    leave = pytest.fail if _NOTHING_IS_SKIPPED else pytest.skip
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        leave(f"needs npm, for {AXE}")
    packed = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if packed.returncode:
        leave(f"npm has no {AXE}: {packed.stderr.strip()[-200:]}")
    subprocess.run(["tar", "xzf", packed.stdout.split()[-1]], cwd=folder, check=True)
    return (folder / "package" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.long)])
def test_axe_finds_nothing(shown: Shown, axe: str, width: int) -> None:
    browser = shown.open("kinds", width=width)
    browser.run(axe + "; 0")
    found = browser.run(
        "axe.run().then(found => found.violations.map(one => [one.help, ...one.nodes.map(node => node.html)]))"
    )
    assert found == []
    assert browser.run("document.documentElement.scrollWidth") <= width


# --- The cost of the page ---


def spent(browser: Browser) -> float:
    """Return the seconds that script, layout and style have taken so far."""
    told = {one["name"]: one["value"] for one in browser.send("Performance.getMetrics")["metrics"]}
    return float(told["ScriptDuration"] + told["LayoutDuration"] + told["RecalcStyleDuration"])


def looked(browser: Browser) -> int:
    """Return how often the page has asked for figures."""
    return sum("/looks?" in url for url in browser.requests())


@pytest.mark.long
def test_an_update_of_300_steps_takes_at_most_50_ms(shown: Shown) -> None:
    shown.browser.send("Performance.enable")
    browser = shown.open("many")
    assert len(texts(browser, "#steps tbody tr")) == 300
    seek(browser, "e")  # all steps have an "e" in their name
    browser.until("document.querySelectorAll('#picture .box').length == 315")
    began = looked(browser) + 1  # after one whole update
    while looked(browser) < began:
        browser.painted()
    taken: list[float] = []
    for number in range(1, 7):
        before = spent(browser)
        while looked(browser) < began + number:
            browser.run("new Promise(done => setTimeout(done, 50))")
        # The browser does not count the time of scripts that handle an answer; the page counts it.
        taken.append(spent(browser) - before + float(browser.run("document.body.dataset.updateMs")) / 1000)
    assert min(taken) < 0.05, taken  # the least time, as other programs of the machine only add to it


def heap(browser: Browser) -> int:
    browser.send("HeapProfiler.collectGarbage")
    return int(browser.send("Runtime.getHeapUsage")["usedSize"])


# Gives the page the newest look again and again, each time a second later and with other rates; a page that wakes asks.
REPLAY = """
(async (looks) => {
  if (!window.replayed) {
    const headers = {Authorization: `Bearer ${sessionStorage.getItem("penstock-token")}`};
    window.replayed = await (await fetch("/looks?newer=0", {headers})).json();
    const real = window.fetch;
    window.fetch = async (path, ...rest) => {
      if (!path.startsWith("/looks")) return real(path, ...rest);
      const found = structuredClone(window.replayed);
      found.number = window.replayed.number += 1;
      for (const one of found.processes) {
        one.series.times = one.series.times.slice(0, 1);
        for (const key of Object.keys(one.series.rates)) one.series.rates[key] = [Math.random() * 100];
      }
      window.given += 1;
      return {ok: true, json: async () => found};
    };
  }
  window.given = 0;
  while (window.given < looks) {
    document.dispatchEvent(new Event("visibilitychange"));
    await new Promise((done) => setTimeout(done, 0));
  }
})(%d)
"""


@pytest.mark.long
def test_the_heap_is_level_over_ten_minutes_of_looks(shown: Shown) -> None:
    browser = shown.open("many")
    for _ in range(6):  # five minutes of looks, which is all that the page keeps
        browser.run(REPLAY % 50)
    points = "document.querySelector('#picture .spark[points]').getAttribute('points').split(' ').length"
    assert browser.run(points) == 60
    before = heap(browser)
    for _ in range(12):
        browser.run(REPLAY % 50)
    assert heap(browser) < before + 1_000_000
    browser.open("about:blank")


def opening_the_page_of_300_steps_sends_less_than_2_mb(shown: Shown) -> None:
    at = KINDS.index("many")
    while len((found := shown.studio.looks()["processes"][at])["series"]["times"]) < 3:
        shown.browser.painted()
    series = found.pop("series")
    one_look = len(json.dumps(series, separators=(",", ":"))) / len(series["times"])
    assert 300 * one_look + len(json.dumps(found)) + len(shown.studio.ask("/")[2]) < 1_500_000  # and the drawing


@pytest.mark.long
def test_a_profile_is_recorded_and_opens(shown: Shown) -> None:
    browser = shown.open("kinds")
    box = "document.getElementById('record').getBoundingClientRect()"
    place = {"x": browser.run(f"{box}.x") + 9, "y": browser.run(f"{box}.y") + 9, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):  # this tab paints nothing afterwards
        browser.send("Input.dispatchMouseEvent", type=kind, **place)
    give_up, found = monotonic() + 40, ""
    while not found:
        assert monotonic() < give_up
        browser.run("new Promise(done => setTimeout(done, 100))")
        for target in browser.send("Target.getTargets")["targetInfos"]:
            if target["title"] == "Profile of kinds" and "/profiles/" in target["url"]:
                found = target["targetId"]
    browser.send("Target.closeTarget", targetId=found)
    browser.send("Page.bringToFront")
    assert "the profile opens in another tab" in browser.run("document.getElementById('recording').textContent")
