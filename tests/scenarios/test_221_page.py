"""The page of [http] in a real browser: both widths, light and dark, a thousand tables, by keyboard, with names that attack it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, Tab, browser
from tests.support.watched_node import HOSTILE, served

pytestmark = pytest.mark.full

WIDTHS = (1280, 390)
ROWS = "document.querySelectorAll('#tables tbody tr').length"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with served(1000) as url:
        yield url


def opened(chromium: Browser, url: str, width: int = 1280, *, dark: bool = False) -> Tab:
    tab = chromium.tab(url, width, dark=dark)
    tab.until(f"{ROWS} > 10", "the tables")
    return tab


def nothing_is_cut(tab: Tab, width: int) -> None:
    """Nothing reaches beyond the window, but what is meant for screen readers alone, and no text is wider than its element."""
    assert tab.run("document.documentElement.scrollWidth") == width
    beyond = tab.run(
        """[...document.querySelectorAll('body *')].filter(one => {
            const box = one.getBoundingClientRect();
            return box.width > 1 && (box.right > innerWidth + 1 || box.left < -1) && !one.closest('thead, .unseen, svg');
        }).map(one => one.outerHTML.slice(0, 200))"""
    )
    assert beyond == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_asks_nobody_else(chromium: Browser, page: str, width: int, dark: bool, tmp_path: Path) -> None:
    tab = opened(chromium, page, width, dark=dark)
    nothing_is_cut(tab, width)
    tab.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    red, green, blue = (
        int(one) for one in tab.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)")
    )
    assert (red + green + blue < 200) is dark
    assert contrast(tab) == []
    assert tab.complaints() == []
    assert tab.hosts() == {page.split("/")[2]}
    # The charts of the subscription that moves, with the gap of what was unknown.
    lines = tab.run("[...document.querySelectorAll('.chart')].map(one => one.querySelectorAll('.line').length)")
    assert lines[:2] == [2, 1]
    size = tab.run(
        "performance.getEntriesByType('resource').filter(e => e.name.includes('status.json'))[0].decodedBodySize"
    )
    assert size < 64 << 10, "a refresh stays small, however many tables there are"
    tab.close()


def contrast(tab: Tab) -> list[str]:
    """Return the texts whose contrast is less than WCAG's 4.5 to 1."""
    found = tab.run(
        """(() => {
            const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return {rgb: n.slice(0, 3), a: n[3] ?? 1}; };
            const light = rgb => { const [r, g, b] = rgb.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                                   return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            const back = one => { for (; one; one = one.parentElement) { const c = parse(getComputedStyle(one).backgroundColor);
                                  if (c.a === 1) return c.rgb; } return [255, 255, 255]; };
            const poor = new Set();
            const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
                const one = walker.currentNode.parentElement;
                if (!walker.currentNode.textContent.trim() || !one.checkVisibility()) continue;
                if (one.closest('svg, :disabled, option, noscript')) continue;
                const style = getComputedStyle(one);
                const [a, b] = [light(parse(style.color).rgb), light(back(one))];
                const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                if (ratio < 4.5) poor.add(one.className + ' ' + one.textContent.slice(0, 30) + ' ' + ratio.toFixed(2));
            }
            return [...poor];
        })()"""
    )
    return list(found)


def test_everything_has_a_name_for_a_screen_reader(chromium: Browser, page: str) -> None:
    for width in WIDTHS:
        tab = opened(chromium, page, width)
        assert tab.run("document.documentElement.lang") == "en"
        # "Previous tables" is disabled, and has its name nevertheless.
        assert tab.names("button") == ["Pause", "Previous tables", "Next tables"]
        assert tab.names("searchbox") == ["Find"]
        assert tab.names("combobox") == ["Show", "Order"]
        assert tab.names("radio") == ["Last hour", "Last day"]
        assert tab.names("table") == ["Tables", "Replication slots and WAL", "Streams that this node sends"]
        assert tab.names("columnheader")[:6] == ["Table", "State", "Rows", "Size", "Lag", "Last commit"]
        assert sorted(tab.names("progressbar")) == ["Copy of public.events_0008", "Copy of public.stock_0007"]
        charts = tab.names("image") + tab.names("img")
        assert (
            len([name for name in charts if name.startswith(("Lag until visible in Delta, ", "Rows a second, "))]) == 2
        )
        assert all(name for name in charts)
        headings = tab.names("heading")
        assert headings[:2] == ["pubsub node 7438921", "Subscriptions"]
        assert "Recent events" in headings
        assert tab.names("main")
        assert tab.names("navigation")[0] == "Parts of the page"
        assert "2 of 3 do not follow" in tab.run("document.querySelector('[role=status]').textContent")
        tab.close()


def test_a_thousand_tables_are_searched_by_keyboard(chromium: Browser, page: str) -> None:
    tab = opened(chromium, page)
    tab.press("/")
    assert tab.run("document.activeElement.id") == "search"
    tab.write("customers_09")
    count = "document.querySelector('#tables-count').textContent"
    tab.until(f"{count} == '9 of 1,004'", "the tables that match")
    names = tab.run("[...document.querySelectorAll('#tables .name')].map(one => one.textContent)")
    assert len(names) == 9
    assert all(name.startswith("public.customers_09") for name in names)
    assert tab.run("document.activeElement.id") == "search", "a refresh leaves the focus where it is"
    # On to the two lists, and the second choice of the first: those in trouble.
    tab.run("document.querySelector('#search').value = ''")
    tab.press("Enter")
    tab.until(f"{count} == '1,004'", "all tables")
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "show"
    tab.press("ArrowDown")
    tab.until(f"{count} == '2 of 1,004'", "the tables in trouble")
    text = tab.run("document.querySelector('#tables tbody').innerText")
    assert 'At 0/16B0000: value "1e400" of column "price" does not fit double precision' in text
    assert "Hint: Fix the row, then ALTER SUBSCRIPTION shop RESYNC TABLE" in text
    assert "2 missing, 0 extra, 1 different" in text
    # A page on, by keyboard alone.
    tab.run(
        "document.querySelector('#show').value = 'all'; document.querySelector('#show').dispatchEvent(new Event('change'))"
    )
    tab.until(f"{count} == '1,004'", "all tables again")
    tab.run("document.querySelector('#table-pages button:last-child').focus()")
    tab.press("Enter")
    tab.until("document.querySelector('#table-pages').innerText.includes('26–50 of 1,004')", "the second page")
    # A chart's points are read by keyboard, too.
    tab.run("document.querySelector('.chart').focus()")
    tab.press("End")
    assert ":" in tab.run("document.querySelector('figcaption output').textContent")
    assert tab.complaints() == []
    tab.close()


def test_names_and_errors_are_text(chromium: Browser) -> None:
    with served(40, hostile=True) as url:
        for width in WIDTHS:
            tab = opened(chromium, url, width)
            nothing_is_cut(tab, width)
            assert "taken" not in tab.run("document.title")
            assert tab.run("document.querySelectorAll('img, script, main svg:not(.chart)').length") == 2, "our own"
            text = tab.run("document.body.textContent")
            for one in HOSTILE:
                assert text.count(one) >= 3, f"{one!r}: as a name, an error and an event"
            assert "hunter2" not in text
            assert tab.complaints() == []
            tab.close()


def test_a_daemon_that_is_gone_is_said_and_one_that_comes_back_is_seen(chromium: Browser) -> None:
    with served(20) as url:
        tab = opened(chromium, url)
        tab.run("window.real = fetch; window.fetch = () => Promise.reject(new Error('gone'))")
        tab.run("document.dispatchEvent(new Event('visibilitychange'))")
        failure = "document.querySelector('[role=alert]').innerText"
        tab.until(f"{failure}.includes('The daemon does not answer (gone). What is shown is of')", "the failure")
        assert tab.run(ROWS) > 10
        tab.run("window.fetch = window.real; document.dispatchEvent(new Event('visibilitychange'))")
        tab.until(f"!{failure}", "the answer")
        tab.close()
