"""What the page is made of: the history of lag and throughput, the ends of copies, recent events, the document, and its answers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

import pubsub.monitoring
from catalog.figures import SubscriptionStats, WorkerStats
from pubsub import logs
from pubsub.logs import RecentEvents
from pubsub.monitoring.copies import CopyEnds
from pubsub.monitoring.document import Observed, Query, document
from pubsub.monitoring.endpoint import Endpoint
from pubsub.monitoring.history import POINTS, STEPS, History
from pubsub.monitoring.node import NodeSource
from pubsub.monitoring.page import Page
from pubsub.monitoring.picture import Picture
from pubsub.node.status import NodeStatus, from_state
from tests.support.watched_node import HOSTILE, picture
from tests.unit.pubsub.monitoring.test_metrics import ask

#: At a multiple of both steps.
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def sampled(seconds: float, rows: int, lag: float | None = 1.0) -> Picture:
    """One subscription's picture, so many seconds after noon, with a count of rows so far."""
    whole = picture(NOON, 1)
    state = replace(
        whole.state,
        subscriptions=whole.state.subscriptions[:1],
        statistics=(SubscriptionStats(5, rows_inserted=rows, transactions=rows // 10, bytes_received=rows * 100),),
        workers=(WorkerStats(5, None, lag_seconds=lag),),
    )
    return replace(whole, state=state, status=replace(from_state(state, 1), time=NOON + timedelta(seconds=seconds)))


def points(history: History, seconds: float, span: str = "hour") -> dict[str, Any]:
    found = history.document(5, span, (NOON + timedelta(seconds=seconds)).timestamp())
    assert found is not None
    return found


def test_rates_are_differences_over_time_and_the_greatest_lag_counts() -> None:
    history = History()
    for seconds, rows, lag in ((0, 1000, 1.0), (5, 1050, 3.0), (10, 1100, 2.0), (15, 1400, None)):
        history.sample(sampled(seconds, rows, lag))
    found = points(history, 15)
    assert (found["lag_seconds"][-2:], found["rows_per_second"][-2:]) == ([3.0, None], [10.0, 60.0])
    assert (found["bytes_per_second"][-1], found["transactions_per_second"][-1]) == (6000.0, 6.0)
    assert found["end"] == NOON.timestamp() + 30
    assert [len(values) for values in found.values() if isinstance(values, list)] == [POINTS] * 5
    assert set(found["rows_per_second"][:-2]) == {None}, "before the first sample nothing is known"
    day = points(history, 15, "day")
    assert (day["step"], day["rows_per_second"][-1]) == (STEPS["day"], pytest.approx(400 / 15, abs=0.01))


def test_what_was_not_seen_is_a_gap_and_a_reset_counter_is_not_negative() -> None:
    history = History()
    history.sample(sampled(0, 1000))
    history.sample(sampled(5, 2000))
    history.sample(sampled(125, 200))  # after two minutes without a sample, and pg_stat_reset_subscription_stats()
    found = points(history, 140)
    assert found["lag_seconds"][-10:] == [1.0, *[None] * 7, 1.0, None]
    assert found["rows_per_second"][-2] == pytest.approx(200 / 120, abs=0.01)
    # A clock that went back, or an hour without a sample, leaves nothing of before.
    history.sample(sampled(-600, 300))
    assert [value for value in points(history, -600)["lag_seconds"] if value is not None] == [1.0]
    history.sample(sampled(86_400 * 3, 300))
    assert [value for value in points(history, 86_400 * 3)["lag_seconds"] if value is not None] == [1.0]
    assert points(history, 86_400 * 9)["lag_seconds"] == [None] * POINTS


def test_the_oldest_points_make_room_and_a_dropped_subscription_is_forgotten() -> None:
    history = History()
    for minute in range(180):
        history.sample(sampled(minute * 60, minute, float(minute)))
    known = [value for value in points(history, 179 * 60)["lag_seconds"] if value is not None]
    assert known == [float(minute) for minute in range(120, 180)]
    assert len([v for v in points(history, 179 * 60, "day")["lag_seconds"] if v is not None]) == 30
    gone = sampled(0, 0)
    state = replace(gone.state, subscriptions=(), relations=())
    history.sample(replace(gone, state=state, status=from_state(state, 1)))
    assert history.document(5, "hour", NOON.timestamp()) is None
    assert (history._spans, history._before) == ({}, {})


def copying(seconds: float, rows: int | None, estimated: int | None = 10_000) -> NodeStatus:
    status = sampled(seconds, 0).status
    one = status.subscriptions[0]
    table = replace(one.tables[0], state="d", rows_copied=rows, rows_estimated=estimated)
    return replace(status, subscriptions=(replace(one, tables=(table,)),))


def test_a_copy_s_end_follows_its_last_minute() -> None:
    ends = CopyEnds()

    def left(status: NodeStatus) -> float | None:
        ends.look(status)
        one = status.subscriptions[0]
        return ends.seconds_left(one.name, one.tables[0])

    assert left(copying(0, 1000)) is None, "one look has no speed"
    assert left(copying(5, 1500)) == pytest.approx(85)
    # A minute in which it went ten times as fast, and only that, counts.
    for second in range(10, 100, 5):
        left(copying(second, 1500 + (second - 5) * 50))
    assert left(copying(100, 6250)) == pytest.approx(75)
    assert left(copying(105, 6000, None)) is None, "nobody knows how many rows there are"
    assert left(copying(110, 12_000)) is None, "more than had been estimated"
    assert left(copying(115, 10)) is None, "it has begun anew"
    assert left(copying(120, 510)) == pytest.approx(94.9)
    ends.look(sampled(130, 0).status)
    assert not ends._seen


def test_events_are_kept_without_tracebacks_and_one_that_repeats_drives_out_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = structlog.get_config()
    recent = RecentEvents(3)
    logs.configure(logging.DEBUG, recent=recent)
    try:
        logger = structlog.get_logger()
        logger.info("a", subscription="s", secret="hunter2")
        for _ in range(100):
            try:
                raise ValueError("hunter2")
            except ValueError:
                logger.exception("b", reason="r", relation=HOSTILE[0])
        logger.debug("c")
        logger.warning("d", reason="x" * 10_000)
    finally:
        structlog.configure(**before)
    found = recent.newest()
    assert [(one.text, one.level, one.times) for one in found] == [
        ("d", "warning", 1),
        ("b", "error", 100),
        ("a", "info", 1),
    ]
    assert found[1].fields == (("relation", HOSTILE[0]), ("reason", "r"))
    assert found[1].first < found[1].last
    assert len(found[0].fields[0][1]) < 600
    assert "hunter2" not in repr(found)
    for number in range(5):
        recent(None, "info", {"event": str(number), "level": "info", "timestamp": "t"})
    assert [one.text for one in recent.newest()] == ["4", "3", "2"]
    assert len(capsys.readouterr().err.splitlines()) == 103, "the log itself has every one"


def shown(query: str = "", tables: int = 1000, *, hostile: bool = False) -> dict[str, Any]:
    found = document(picture(NOON, tables, hostile=hostile), Observed(), Query.parse(query), 60)
    read: dict[str, Any] = json.loads(json.dumps(found))
    return read


def test_the_document_has_what_status_has_and_a_page_of_the_tables() -> None:
    found = shown()
    status = picture(NOON).status.as_json()
    assert (found["version"], found["node"], found["daemon"]) == (1, status["node"], status["daemon"])
    for ours, theirs in zip(found["subscriptions"], status["subscriptions"], strict=True):
        tables = {(one["name"]): one for one in theirs.pop("tables")}
        assert ours.items() >= theirs.items()
        for one in found["tables"]:
            if one["subscription"] == theirs["name"]:
                assert one.items() >= tables[one["name"]].items()
    shop = found["subscriptions"][0]
    assert (shop["tables_total"], shop["tables_troubled"]) == (1000, 2)
    assert shop["tables_by_state"] == {"r": 994, "stopped": 1, "d": 2, "i": 3}
    assert (found["tables_total"], found["tables_matching"], len(found["tables"])) == (1004, 1004, 50)
    assert found["tables_shown"] == {"all": 1004, "trouble": 2, "copying": 5, "following": 998}
    assert [one["name"] for one in found["tables"][:3]] == [
        "public.payments_0003",
        "public.products_0005",
        "public.events_0008",
    ]
    assert found["tables"][0]["last_commit"] is not None
    assert [(one["server"], one["slot_name"]) for one in found["slots"]] == [
        ("publisher", "shop"), ("publisher", "billing"), ("publisher", "archive"), ("walsender", "follower"),
    ]  # fmt: skip
    assert found["slots"][3]["retained_wal_bytes"] == 0x4100
    assert found["streams"][0]["application_name"] == "follower"
    assert found["obstacles"].keys() == {"shop", "billing"}
    assert len(json.dumps(found)) < 80_000
    assert "hunter2" not in json.dumps(found)


@pytest.mark.parametrize(
    ("query", "names", "matching"),
    [
        ("search=CARTS+1&limit=2", ["carts_0011", "carts_0071"], 28),
        ("search=carts_0011", ["carts_0011"], 1),
        ("search=%3Cimg", [], 0),
        ("show=trouble", ["payments_0003", "products_0005"], 2),
        ("show=copying&limit=2&offset=2", ["carts_0011", "sessions_0009"], 5),
        ("show=copying&limit=2&offset=900", ["users_0010"], 5),
        ("order=name&limit=1", ["bill_1"], 1004),
        ("limit=0", [], 1004),
        ("offset=999999999&limit=0", [], 1004),
    ],
)
def test_tables_are_found_by_name_kind_and_place(query: str, names: list[str], matching: int) -> None:
    found = shown(query)
    assert [one["name"].removeprefix("public.") for one in found["tables"]] == names
    assert found["tables_matching"] == matching


@pytest.mark.parametrize("order", ["rows", "size"])
def test_tables_are_ordered_by_what_they_hold_and_what_is_unknown_comes_last(order: str) -> None:
    first = [one["rows"] for one in shown(f"order={order}&limit=200")["tables"]]
    assert first == sorted(first, reverse=True)
    assert shown(f"order={order}&offset=1003")["tables"][-1]["rows"] is None


@pytest.mark.parametrize(
    "query",
    ["limit=x", "limit=-1", "limit=1e3", "limit=" + "9" * 5000, "show=none", "order=rows;", "span=year", "x=1", "&", "=", "a&b",
     "&".join(["search=a"] * 30), "limit=٣"],
)  # fmt: skip
def test_a_query_that_makes_no_sense_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Query.parse(query)


def test_a_page_is_never_larger_than_its_bound() -> None:
    assert len(shown("limit=999999")["tables"]) == 200


# The answers


@asynccontextmanager
async def served() -> AsyncIterator[Endpoint]:
    async def take() -> Picture:
        return picture(datetime.now(UTC), 30, hostile=True)

    page = Page(take, Observed(), 60)
    endpoint = await Endpoint.open(("127.0.0.1", 0), NodeSource(take, 60), page.paths())
    try:
        yield endpoint
    finally:
        await endpoint.close()


async def test_the_files_go_out_as_they_are_and_may_load_nothing_else() -> None:
    directory = Path(pubsub.monitoring.__file__).parent / "files"
    async with served() as place:
        for path, name, kind in (
            ("/", "page.html", "text/html"),
            ("/page.js", "page.js", "text/javascript"),
            ("/charts.js", "charts.js", "text/javascript"),
            ("/page.css", "page.css", "text/css"),
            ("/icon.svg", "icon.svg", "image/svg+xml"),
        ):
            status, headers, body = await ask(place, f"GET {path} HTTP/1.1")
            assert (status, body) == (200, (directory / name).read_bytes())
            assert headers["content-type"].startswith(kind)
            policy = dict(one.split(" ", 1) for one in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert set(policy.values()) == {"'none'", "'self'"}
            assert headers["x-content-type-options"] == "nosniff"
        for path in ("/page.py", "/files/page.js", "/../page.js", "/%2e%2e/page.py", "/page.html"):
            assert (await ask(place, f"GET {path} HTTP/1.1"))[0] == 404
        assert {one.name for one in directory.iterdir()} == {
            "page.html",
            "page.js",
            "charts.js",
            "page.css",
            "icon.svg",
        }


async def test_status_json_is_answered_and_bad_questions_are_refused() -> None:
    async with served() as place:
        status, headers, body = await ask(place, "GET /status.json?search=img&limit=3 HTTP/1.1")
        assert (status, headers["content-type"]) == (200, "application/json")
        assert [one["name"] for one in json.loads(body)["tables"]]
        for query in ("limit=x", "search=%ff%00&limit=-1", "search[]=1", "a=b"):
            assert (await ask(place, f"GET /status.json?{query} HTTP/1.1"))[0] == 400
        assert (await ask(place, "POST /status.json HTTP/1.1"))[0] == 405


def test_the_scripts_put_nothing_into_the_page_but_text() -> None:
    """Where the page has no other way to make markup of a text, a name cannot become any."""
    directory = Path(pubsub.monitoring.__file__).parent / "files"
    scripts = "".join(path.read_text() for path in sorted(directory.glob("*.js")))
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc|ContextualFragment|\.href|Parser"
    )
    assert not re.findall(forbidden, scripts)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", scripts + (directory / "page.html").read_text())
    assert not re.search(r"\son\w+=|style=", (directory / "page.html").read_text())
