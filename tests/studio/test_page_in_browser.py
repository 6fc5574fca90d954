"""The page of a profile in a browser: it shows the profile, and reacts to clicks and keys."""

import asyncio
from pathlib import Path

import pytest

import penstock as ps
from penstock import engine, telemetry
from penstock.telemetry import DeviceSlice
from tests.packages import needs_package
from tests.telemetry.virtual_time import VirtualTime, telling, waits

from .browser import Browser, installed
from .test_page import count, fetch, profiled

_PROGRAM = installed()
pytestmark = needs_package("chromium", _PROGRAM)

ITEMS = 12
WARM = {False: "rgb(194, 65, 12)", True: "rgb(255, 146, 87)"}


decode = waits("decode", 0.005, concurrency=1)


@ps.graph
async def measure(number: int) -> int:
    return count(await decode(await fetch(number)))


@ps.graph
async def again(number: int) -> int:
    return count(await fetch(number))


async def profiled_with_a_device() -> telemetry.Profile:
    with telemetry.profile() as profile:
        _ = [one async for one in engine.stream(measure(number) for number in range(ITEMS))]
        began = profile._recorder._began
        frames = tuple(one.frame for one in profile.timeline.slices[:2] if one.frame is not None)
        profile._recorder.device_worked(
            DeviceSlice("compute", "gpu:0", "decode", began, began + 0.01, 2, 4, 0.5, frames)
        )
    return profile


# One test, as a browser takes seconds to start; each thing that it checks has a function with a name.
@pytest.mark.timeout(180)
def test_the_page_shows_itself_and_obeys(tmp_path: Path) -> None:
    assert _PROGRAM is not None
    page, of_two_graphs = tmp_path / "profile.html", tmp_path / "two.html"
    with telling(virtual := VirtualTime()):
        virtual.run(profiled_with_a_device).to_html(page)
    asyncio.run(profiled(measure, again, items=3)).to_html(of_two_graphs)
    with Browser(_PROGRAM, tmp_path) as browser:
        for dark in (False, True):
            browser.open(page, dark=dark)
            the_bottleneck_is_highlighted(browser, WARM[dark])
            everything_is_drawn(browser)
        the_theme_is_switched(browser)
        the_table_is_sorted(browser)
        the_timeline_zooms_and_moves(browser)
        an_item_is_followed(browser)
        a_new_size_is_drawn_at_once(browser)
        nothing_is_wider_than_a_narrow_window(browser, page)
        assert browser.complaints() == []
        assert browser.requests() == [page.as_uri()]
        browser.open(of_two_graphs)
        the_nodes_of_each_graph_are_sorted(browser)


def the_bottleneck_is_highlighted(browser: Browser, warm: str) -> None:
    colour = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.run("document.querySelector('.verdict.limits h2').innerText") == "decode"
    assert browser.run(colour.format(".verdict h2", "color")) == warm
    assert browser.run("document.querySelector('a.box.limits text').textContent") == "decode"
    assert browser.run(colour.format("a.box.limits .node", "stroke")) == warm
    assert browser.run("document.querySelector('tr.limits th').dataset.value") == "decode"
    assert browser.run(colour.format("tr.limits th", "color")) == warm
    assert pixels(browser, warm) > 100  # its slices
    assert pixels(browser, "rgb(0, 255, 0)") == 0


def pixels(browser: Browser, colour: str) -> int:
    """Return how many pixels of the timeline have about a colour: slices are a bit transparent."""
    wanted = colour.removeprefix("rgb(").removesuffix(")")
    found: int = browser.run(
        "(() => { const c = document.getElementById('timeline'); const gutter = 0.25 * c.width;"
        "const d = c.getContext('2d').getImageData(gutter, 0, c.width - gutter, c.height).data;"
        f"const w = [{wanted}]; let n = 0; for (let i = 0; i < d.length; i += 4)"
        "if (w.every((v, k) => Math.abs(v - d[i + k]) < 45)) n += 1; return n; })()"
    )
    return found


def everything_is_drawn(browser: Browser) -> None:
    for selector in (".graph svg", "#nodes", "#timeline"):
        box = browser.run(
            f"(({{width, height}}) => [width, height])(document.querySelector('{selector}').getBoundingClientRect())"
        )
        assert min(box) > 60, selector
    assert browser.run("document.querySelectorAll('#nodes tbody tr').length") == 3
    # In each box, the texts are inside of it.
    assert browser.run(
        "[...document.querySelectorAll('a.box')].every(box => {"
        "const card = box.querySelector('.node').getBoundingClientRect();"
        "return [...box.querySelectorAll('text:not(.badge)')].every(text => { const r = text.getBoundingClientRect();"
        "return r.left >= card.left && r.right <= card.right && r.bottom <= card.bottom; }); })"
    )


def the_theme_is_switched(browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(background)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) != before
    browser.painted()
    assert pixels(browser, WARM[False]) > 100  # the canvas follows
    browser.run("document.getElementById('theme').click()")
    assert browser.run(background) == before


def the_table_is_sorted(browser: Browser) -> None:
    names = "[...document.querySelectorAll('#nodes tbody th')].map(cell => cell.dataset.value)"
    heading = "[...document.querySelectorAll('#nodes thead th')].find(cell => cell.innerText.startsWith('{}'))"
    original = browser.run(names)
    assert original == ["fetch", "decode", "count"]
    browser.run(heading.format("node") + ".querySelector('button').click()")
    assert browser.run(names) == ["count", "decode", "fetch"]
    busy = heading.format("mean")
    browser.run(busy + ".querySelector('button').click()")
    assert browser.run(busy + ".getAttribute('aria-sort')") == "descending"
    assert browser.run(heading.format("node") + ".getAttribute('aria-sort')") == "none"
    assert browser.run(names)[0] == "decode"
    browser.run(busy + ".querySelector('button').click()")
    assert browser.run(names)[-1] == "decode"
    browser.run(busy + ".querySelector('button').click()")
    assert browser.run(names) == original


def the_nodes_of_each_graph_are_sorted(browser: Browser) -> None:
    names = "[...document.querySelectorAll('#nodes tbody th')].map(cell => cell.innerText)"
    button = "[...document.querySelectorAll('#nodes thead button')].find(one => one.innerText.startsWith('node'))"
    original = browser.run(names)
    assert [name.split()[0] for name in original] == ["measure", "fetch", "decode", "count", "again", "fetch", "count"]
    browser.run(button + ".click()")
    found = [name.split()[0] for name in browser.run(names)]
    assert found == ["measure", "count", "decode", "fetch", "again", "count", "fetch"]


def the_timeline_zooms_and_moves(browser: Browser) -> None:
    span = "Number(document.getElementById('timeline').dataset.span)"
    whole = browser.run(span)
    browser.run("document.querySelector('[data-action=in]').click()")
    assert browser.run(span) == pytest.approx(whole * 0.6, rel=0.01)
    browser.run("document.getElementById('timeline').focus()")
    browser.press("+")
    assert browser.run(span) == pytest.approx(whole * 0.42, rel=0.01)
    browser.press("ArrowRight")
    browser.press("0")
    assert browser.run(span) == whole


def an_item_is_followed(browser: Browser) -> None:
    told = "document.getElementById('chosen').textContent"
    assert browser.run(told) == ""
    left, top, width, height = browser.run(
        "(canvas => { canvas.scrollIntoView({behavior: 'instant'}); const r = canvas.getBoundingClientRect();"
        "return [r.left, r.top, r.width, r.height]; })(document.getElementById('timeline'))"
    )
    places = ((left + width * part / 10, top + y) for part in (5, 4, 6, 7) for y in range(30, int(height), 6))
    for x, y in places:  # between two executions there is nothing to click on
        browser.click(x, y)
        if browser.run(told):
            break
    assert browser.run(told).startswith("The item went through fetch, decode, count")
    assert not browser.run("document.getElementById('tip').hidden")
    browser.press("Escape")
    assert browser.run(told) == ""


def a_new_size_is_drawn_at_once(browser: Browser) -> None:
    # If a page is printed, or is in a frame out of view, it gets no animation frame.
    browser.run(
        "(parent => { window.requestAnimationFrame = () => 0; parent.style.width = '700px';"
        "return new Promise(done => new ResizeObserver(() => setTimeout(() => done(0))).observe(parent)); })"
        "(document.getElementById('timeline').parentElement)"
    )
    assert browser.run("document.getElementById('timeline').width") <= 700
    assert pixels(browser, WARM[True]) > 100


def nothing_is_wider_than_a_narrow_window(browser: Browser, page: Path) -> None:
    browser.open(page, width=380)
    assert browser.run("document.documentElement.scrollWidth") <= 380
