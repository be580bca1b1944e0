"""Metrics and readiness of a picture of a node, read by Prometheus's own parsers; the HTTP server, and its bad clients."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from apply.worker_statistics import Changes, Figures
from catalog.figures import (
    CopyProgress,
    Outcome,
    PublisherStatus,
    SubscriptionStats,
    TableRows,
    TableStorage,
    Verification,
    Warned,
    WorkerStats,
)
from catalog.records import DaemonRow, NodeRow, OriginStatus, State, Subscription, SubscriptionRel
from catalog.states import RelState
from pubsub.errors import PubsubError
from pubsub.memory import Memory
from pubsub.monitoring import endpoint as endpoints
from pubsub.monitoring.answers import Answer, Asked, Handler
from pubsub.monitoring.endpoint import MAX_CLIENTS, Endpoint
from pubsub.monitoring.metrics import exposition, families
from pubsub.monitoring.node import NodeSource
from pubsub.monitoring.picture import Live, Picture, Served
from pubsub.monitoring.readiness import obstacles
from pubsub.monitoring.standby import StandbySource
from pubsub.node.status import from_state
from pubsub.node.verify.report import TableReport
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions
from tests.support.exposition import OPENMETRICS, samples, value

TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SECRET = "hunter2"
#: What has to be escaped in a label.
ODD = 'a "b" \\ c\nd'


def subscription(oid: int, name: str, *, enabled: bool = True) -> Subscription:
    options = SubscriptionOptions()
    conninfo = f"host=h password={SECRET}"
    given = (conninfo, f"slot_{oid}", ("p",), options, "t", "7", 1, "d", INVALID_LSN, "o", 1, False)
    return Subscription(oid, name, enabled, *given)


def relation(relid: int, name: str, state: RelState = RelState.READY) -> SubscriptionRel:
    return SubscriptionRel(5, relid, "public", name, state, Lsn(0x500), 1, None, name, None, None, None, None)


def picture(**changes: Any) -> Picture:
    """Two subscriptions; one has a table that follows, one that is copied, and one that has stopped."""
    state = State(
        NodeRow("9", TIME),
        (DaemonRow(1, 1, "h", "/home", TIME, Memory(300 << 20, 900 << 20, 100 << 20, 500 << 20, 2 << 30)),),
        (subscription(5, "s"), subscription(6, ODD, enabled=False)),
        (
            relation(1, ODD),
            relation(2, "copied", RelState.DATASYNC),
            replace(relation(3, "stopped"), stopped=True, error=f"a value {SECRET} of the row"),
        ),
        (OriginStatus(5, None, Lsn(0x600), None),),
        (
            WorkerStats(
                5,
                None,
                received_lsn=Lsn(0x6F0),
                publisher_lsn=Lsn(0x700),
                flush_lsn=Lsn(0x600),
                lag_seconds=1.5,
                last_msg_receipt_time=datetime.now(UTC) - timedelta(seconds=3),
            ),
        ),
        (CopyProgress(5, 2, 10, 100, 1000, 9000, False), CopyProgress(5, 1, 50, 50, 1, 1, True)),
        (SubscriptionStats(5, apply_error_count=2, transactions=7, rows_inserted=11, spill_bytes=2**40),),
        publishers={
            5: PublisherStatus(
                current_lsn=Lsn(0x700),
                retained_wal_bytes=512,
                safe_wal_bytes=4096,
                wal_status="extended",
                warnings=(Warned("w"),),
            )
        },
        rows=(TableRows(5, 1, 1, 30, Lsn(0x600)),),
        storage=(TableStorage(5, 1, 1, 9, 4, 1024, 2048, 512, TIME, None, 3, 10),),
        verifications=(Verification(5, 1, 1, TIME, TIME, Lsn(0x10), "different", missing=2, different=1),),
    )
    figures = Figures(queued_bytes=77, queue_limit=64 << 20)
    for seconds in (0.004, 0.03, 100.0):
        figures.commit_seconds.add(seconds)
    figures.batch_rows.add(1000)
    figures.changes[1] = Changes(11, 5, 1, 3)
    slot = {
        "slot_name": "theirs", "plugin": "pgoutput", "database": "shop", "active": True, "restart_lsn": "0/400",
        "confirmed_flush_lsn": "0/500", "wal_status": "lost", "safe_wal_size": None,
    }  # fmt: skip
    stream = {"pid": 4, "usename": "u", "application_name": "a", "client_addr": None, "state": "streaming"}
    found = Picture(
        state,
        from_state(state, 1),
        {5: Live.of(figures)},
        Served((("walsender", slot),), (("node", {**stream, "sent_lsn": "0/10", "flush_lsn": None}),), 0x700),
        os.getpid(),
        86400.0,
        {"folding": 1.5, "other": 20.0},
    )
    return replace(found, **changes)


def test_prometheus_parser_reads_what_the_catalog_and_the_workers_know() -> None:
    kind, body = exposition(partial(families, picture()), OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    found = samples(body.decode())

    def of(metric: str, **labels: str) -> float | None:
        return value(found, metric, subname="s", **labels)

    assert (of("pg_subscription_subenabled"), value(found, "pg_subscription_subenabled", subname=ODD)) == (1, 0)
    lags = [of("pg_stat_subscription_lag_bytes", stage=one) for one in ("received", "flushed", "visible")]
    # The table that is copied is at 0/500.
    assert lags == [0x10, 0x100, 0x200]
    assert of("pg_stat_subscription_lag_seconds") == 1.5
    assert of("pg_stat_subscription_stats_apply_error_count_total") == 2
    assert of("pg_stat_subscription_stats_spill_bytes_total") == 2**40
    assert of("pg_stat_subscription_flush_lsn") == 0x600
    assert of("pubsub_subscription_warnings") == 1
    tables = {one: of("pubsub_subscription_tables", state=one) for one in "idfscrw"}
    assert tables == {"i": 0, "d": 1, "f": 0, "s": 0, "c": 0, "r": 1, "w": 0}
    assert of("pubsub_subscription_tables", state="stopped") == 1
    assert of("pg_subscription_rel_srsubstate", relation=f"public.{ODD}", srsubstate="r") == 1
    assert of("pubsub_table_rows", relation=f"public.{ODD}") == 30
    assert of("pubsub_table_small_file_ratio", relation=f"public.{ODD}") == 0.75
    assert of("pubsub_table_deleted_row_ratio", relation=f"public.{ODD}") == 0.25
    assert of("pubsub_table_changes_total", relation=f"public.{ODD}", kind="update") == 5
    assert of("pubsub_table_stopped", relation="public.stopped") == 1
    assert of("pubsub_verification_equal", relation=f"public.{ODD}") == 0
    assert of("pubsub_verification_failed", relation=f"public.{ODD}") == 0
    assert of("pubsub_verification_compared_seconds", relation=f"public.{ODD}") == TIME.timestamp()
    assert value(found, "pubsub_verification_interval_seconds") == 86400
    assert of("pubsub_verification_rows", relation=f"public.{ODD}", kind="missing") == 2
    assert of("pg_stat_progress_copy_tuples_processed", relation="public.copied") == 10
    assert of("pg_stat_progress_copy_tuples_processed", relation=f"public.{ODD}") is None, "its copy has ended"
    buckets = [of("pubsub_commit_seconds_bucket", le=le) for le in ("0.01", "0.05", "60.0", "+Inf")]
    assert buckets == [1, 2, 2, 3]
    assert of("pubsub_commit_seconds_sum") == pytest.approx(100.034)
    assert of("pubsub_batch_rows_bucket", le="1000.0") == 1
    assert of("pubsub_queue_bytes") == 77
    slot = {"server": "publisher", "slot_name": "slot_5", "plugin": "pgoutput", "database": ""}
    assert of("pg_replication_slots_retained_bytes", **slot) == 512
    assert of("pg_replication_slots_safe_wal_size", **slot) == 4096
    assert of("pg_replication_slots_wal_status", **slot, pg_replication_slots_wal_status="extended") == 1
    assert of("pg_replication_slots_wal_status", **slot, pg_replication_slots_wal_status="lost") == 0
    ours = {"server": "walsender", "slot_name": "theirs", "plugin": "pgoutput", "database": "shop", "subname": ""}
    assert value(found, "pg_replication_slots_retained_bytes", **ours) == 0x300
    assert value(found, "pg_replication_slots_confirmed_flush_lsn", **ours) == 0x500
    debezium = {"plugin": "postgres", "name": "s"}
    assert value(found, "debezium_metrics_MilliSecondsBehindSource", **debezium, context="streaming") == 1500
    assert value(found, "debezium_metrics_RemainingTableCount", **debezium, context="snapshot") == 1
    since = value(found, "debezium_metrics_MilliSecondsSinceLastEvent", **debezium, context="streaming")
    assert since is not None
    assert 2000 < since < 60_000
    assert (value(found, "process_resident_memory_bytes") or 0) > 1 << 20
    heap = [value(found, f"pubsub_jvm_heap_{one}_bytes") for one in ("used", "committed", "max")]
    assert heap == [100 << 20, 500 << 20, 2 << 30]
    assert value(found, "pubsub_processor_seconds_total", part="folding") == 1.5
    assert value(found, "pubsub_processor_seconds_total", part="other") == 20
    assert (value(found, "pubsub_jvm_processor_seconds_total") or 0) > 0


def test_the_older_text_has_the_same_and_browsers_get_it() -> None:
    for accept in ("text/plain;version=0.0.4", "text/html,application/xhtml+xml,*/*;q=0.8"):
        kind, body = exposition(partial(families, picture()), accept)
        assert kind.startswith("text/plain")
        found = samples(body.decode(), read_text)
        assert value(found, "pg_stat_subscription_lag_seconds", subname="s") == 1.5
    assert exposition(partial(families, picture()), "")[0].startswith("application/openmetrics-text")


def test_no_secret_no_row_s_value_and_no_error_s_text_is_shown() -> None:
    assert SECRET.encode() not in exposition(partial(families, picture()), OPENMETRICS)[1]
    assert SECRET not in json.dumps(obstacles(picture().status, 60))


def test_what_is_unknown_has_no_sample() -> None:
    whole = picture()
    away = replace(whole.state, publishers={5: PublisherStatus(away_since=TIME)})
    found = samples(
        exposition(partial(families, replace(whole, state=away, status=from_state(away, 1), live={})), OPENMETRICS)[
            1
        ].decode()
    )
    assert value(found, "pubsub_publisher_up", subname="s") == 0
    assert not [name for name, labels in found if name == "pg_stat_subscription_lag_bytes"]
    assert not [name for name, labels in found if name.startswith("pubsub_commit_seconds")]
    assert not [
        name
        for name, _ in samples(
            exposition(partial(families, replace(whole, status=from_state(whole.state, None))), OPENMETRICS)[1].decode()
        )
        if name.startswith("pubsub_jvm_heap")
    ]
    empty = replace(
        whole.state, subscriptions=(), relations=(), origins=(), workers=(), copies=(), statistics=(), publishers={},
        rows=(), storage=(), verifications=(),
    )  # fmt: skip
    assert samples(exposition(partial(families, Picture(empty, from_state(empty, 1), {})), OPENMETRICS)[1].decode())


@pytest.mark.parametrize("outcome", ["failed", "not compared"])
def test_a_table_that_differed_does_so_until_it_is_found_equal(outcome: Outcome) -> None:
    """A later verification that could not compare the table neither mends it nor ends the alert."""
    later = TIME + timedelta(days=1)
    one = relation(1, ODD)
    differs = TableReport("t", "different", missing=2).record(one, TIME, TIME, None)
    equal = TableReport("t", "equal").record(one, TIME, TIME, None)
    for before, shown in ((differs, 0), (replace(differs, differed_at=None), 0), (equal, 1), (None, None)):
        record = TableReport("t", outcome, reason="none").record(one, later, later, before)
        for last, expected in ((record, shown), (TableReport("t", outcome).record(one, later, later, record), shown)):
            whole = picture()
            state = replace(whole.state, verifications=(last,))
            found = samples(
                exposition(partial(families, replace(whole, state=state, status=from_state(state, 1))), OPENMETRICS)[
                    1
                ].decode()
            )
            labels = {"subname": "s", "relation": f"public.{ODD}"}
            assert value(found, "pubsub_verification_equal", **labels) == expected
            assert value(found, "pubsub_verification_failed", **labels) == (outcome == "failed")
            compared = value(found, "pubsub_verification_compared_seconds", **labels)
            assert compared == (None if expected is None else TIME.timestamp())
            assert value(found, "pubsub_verification_rows", **labels, kind="missing") is None
    mended = TableReport("t", "equal").record(one, later, later, differs)
    assert (mended.equal, TableReport("t", "failed").record(one, later, later, mended).equal) == (True, True)
    # Another copy of the table has nothing of it.
    again = replace(one, copy_generation=2)
    assert TableReport("t", outcome).record(again, later, later, differs).equal is None


def test_a_thousand_tables_take_no_more_than_some_megabytes() -> None:
    whole = picture()
    many = replace(whole.state, relations=tuple(relation(n, f"t{n}") for n in range(1000)))
    body = exposition(partial(families, replace(whole, state=many, status=from_state(many, 1))), OPENMETRICS)[1]
    found = samples(body.decode())
    assert sum(name == "pubsub_table_lsn" for name, _ in found) == 1000
    assert len(body) < 4 << 20


def test_who_does_not_follow_is_not_ready() -> None:
    whole = picture()
    assert obstacles(whole.status, 60) == {
        "s": ["table public.copied is in state d", "table public.stopped has stopped"]
    }
    (first, second) = whole.status.subscriptions
    first = replace(first, tables=first.tables[:1])
    assert obstacles(replace(whole.status, subscriptions=(first, second)), 60) == {}
    for changed, reason in (
        ({"lag_seconds": 61.0}, "it lags 61.0 s behind"),
        ({"received_lsn": None}, "no apply worker streams"),
        ({"lag_unknown_since": TIME}, "the publisher does not answer"),
        ({"error": f"x {SECRET}"}, "its last error has not been overcome"),
    ):
        one: Any = replace(first, **changed)  # type: ignore[arg-type]
        assert obstacles(replace(whole.status, subscriptions=(one,)), 60) == {"s": [reason]}
    many = tuple(replace(first.tables[0], state="i") for _ in range(1000))
    found = obstacles(replace(whole.status, subscriptions=(replace(first, tables=many),)), 60)
    assert (len(found["s"]), found["s"][-1]) == (11, "990 more")


async def test_a_daemon_answers_for_the_subscriptions_that_it_has() -> None:
    """Of several that share a catalog: each series comes from one, and what the others have makes none of them unready."""

    async def other() -> Picture:
        return picture(leased=frozenset({6}))

    source = NodeSource(other, 60)
    found = samples(exposition(await source.families(), OPENMETRICS)[1].decode())
    assert {dict(labels).get("subname", "") for _, labels in found} == {"", ODD}
    assert value(found, "pubsub_jvm_heap_used_bytes") == 100 << 20, "it is the process's"
    assert (await source.ready()).status == 200
    assert (await NodeSource(partial(_given, picture(leased=frozenset({5}))), 60).ready()).status == 503


async def _given(found: Picture) -> Picture:
    return found


# The HTTP server


@asynccontextmanager
async def served(
    take: Any = None, more: Mapping[str, Handler] = MappingProxyType({}), hosts: Sequence[str] = ()
) -> AsyncIterator[Endpoint]:
    async def one() -> Picture:
        return picture()

    opened = await Endpoint.open(("127.0.0.1", 0), NodeSource(take or one, 60), more, hosts=hosts)
    try:
        yield opened
    finally:
        await opened.close()


async def connect(served: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert served.place is not None
    host, _, port = served.place.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=1 << 24)


async def ask(served: Endpoint, request: str | bytes, host: str = "localhost") -> tuple[int, dict[str, str], bytes]:
    reader, writer = await connect(served)
    writer.write(request if isinstance(request, bytes) else f"{request}\r\nHost: {host}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_the_paths() -> None:
    async with served() as place:
        status, headers, body = await ask(place, "GET /metrics?x=1 HTTP/1.1")
        assert (status, int(headers["content-length"])) == (200, len(body))
        assert headers["content-type"].startswith("application/openmetrics-text")
        assert samples(body.decode())
        status, headers, body = await ask(place, "HEAD /metrics HTTP/1.1")
        assert (status, body) == (200, b"")
        status, _, body = await ask(place, "GET /health HTTP/1.0")
        assert (status, json.loads(body)) == (200, {"status": "alive"})
        status, _, body = await ask(place, "GET /ready HTTP/1.1")
        assert status == 503
        assert json.loads(body)["subscriptions"]["s"][0] == "table public.copied is in state d"
        assert (await ask(place, "GET /../../etc/passwd HTTP/1.1"))[0] == 404
        status, headers, _ = await ask(place, "DELETE /metrics HTTP/1.1")
        assert (status, headers["allow"]) == (405, "get, head")


HOSTS = {
    "127.0.0.1": 200,
    "127.0.0.1:9187": 200,
    "[::1]:9187": 200,
    "[::1]": 200,
    "localhost": 200,
    "LocalHost.:80": 200,
    "there.example": 200,
    "proxy.example:443": 200,
    "Other.example": 200,
    "evil.example": 421,
    "127.0.0.1.evil.example:9187": 421,
    "proxy.example.evil.example": 421,
    "localhost@evil.example": 421,
    "[evil.example]": 421,
    "": 421,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
async def test_another_site_s_page_cannot_read_what_it_shows(host: str, status: int) -> None:
    """A page whose name its owner has turned to this address (DNS rebinding) asks under that name."""

    async def page(_: Asked) -> Answer:
        return Answer(HTTPStatus.OK, "text/html", b"texts of errors")

    async with served(more={"/": page}, hosts=("there.example", "proxy.example", "other.EXAMPLE")) as place:
        found, _, body = await ask(place, "GET / HTTP/1.1", host)
        assert (found, b"http.hosts" in body) == (status, status == 421)
        for path, answer in (("/metrics", 200), ("/health", 200), ("/ready", 503), ("/nowhere", 404)):
            assert (await ask(place, f"GET {path} HTTP/1.1", host))[0] == answer


async def test_the_machine_s_own_name_is_no_other_site_s() -> None:
    async with served() as place:
        assert (await ask(place, "GET /health HTTP/1.1", socket.gethostname()))[0] == 200
        assert (await ask(place, b"GET /health HTTP/1.0\r\n\r\n"))[0] == 200, "older clients name no host"


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (1 << 20),
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"8\r\nxxxxxxxx\r\n" * 100_000,
    ],
)
async def test_bad_requests_are_answered_or_cut_and_disturb_nobody(request_: bytes) -> None:
    async with served() as place:
        reader, writer = await connect(place)
        with_error = (ConnectionError, BrokenPipeError)
        try:
            writer.write(request_)
            if len(request_) < 100:
                writer.write_eof()
            answer = await reader.read()
        except with_error:
            answer = b""
        assert not answer or answer.split()[1].startswith(b"4"), answer[:100]
        writer.close()
        assert (await ask(place, "GET /health HTTP/1.1"))[0] == 200


async def test_silent_clients_are_ended_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_SECONDS", 1.0)
    async with served() as place:
        held = [await connect(place) for _ in range(MAX_CLIENTS)]
        await until(lambda: len(place._clients) == MAX_CLIENTS)
        reader, _ = await connect(place)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # turned away
            await reader.readexactly(1)
        assert await asyncio.gather(*(one.read() for one, _ in held)) == [b""] * MAX_CLIENTS
        await until(lambda: not place._clients)
        assert (await ask(place, "GET /health HTTP/1.1"))[0] == 200


async def test_what_cannot_be_made_is_an_answer_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    errors: list[Exception] = [PubsubError("no catalog"), TimeoutError(), KeyError(SECRET), KeyError(SECRET)]

    async def fail() -> Picture:
        raise errors[0]

    async with served(fail) as place:
        found = []
        while errors:
            status, _, body = await ask(place, "GET /metrics HTTP/1.1")
            assert SECRET.encode() not in body
            found.append(status)
            errors.pop(0)
        assert found == [503, 503, 500, 500]
        assert (await ask(place, "GET /health HTTP/1.1"))[0] == 200


async def test_a_place_that_is_taken_is_an_error_with_a_hint() -> None:
    async with served() as place:
        assert place.place is not None
        port = int(place.place.rpartition(":")[2])
        with pytest.raises(PubsubError, match="could not listen on") as caught:
            await Endpoint.open(("127.0.0.1", port), StandbySource())
        assert "http.listen" in str(caught.value.hint)
