"""What a monitor is told by a real daemon, which follows a database, serves slots, and is disturbed meanwhile."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pubsub.processor_time import PARTS
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.ports import Port
from pubsub.testing.servers import EmbeddedPostgres
from tests.fault.daemon import Daemon, Subscribed
from tests.support.exposition import OPENMETRICS, Samples, samples, value
from tests.support.publish import Publish
from tests.support.replica import PATIENCE, wait_until


def place(daemon: Daemon, what: str) -> str:
    """Return where the daemon listens, as it has logged it last."""

    def find() -> str | None:
        lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
        started = [line for line in lines if line.get("event") == "daemon has started"]
        return started[-1][what] if started else None

    return wait_until(find, "the daemon to listen")


def get(daemon: Daemon, path: str) -> tuple[int, str]:
    try:
        with urlopen(
            Request(f"http://{place(daemon, 'http')}{path}", headers={"Accept": OPENMETRICS}), timeout=60
        ) as got:
            return got.status, got.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def scrape(daemon: Daemon) -> Samples:
    def answered() -> str:
        status, text = get(daemon, "/metrics")
        # On a busy machine the catalog may not answer in time.
        assert status in (200, 503), text
        return text if status == 200 else ""

    return samples(wait_until(answered, "metrics"))


def page(daemon: Daemon) -> dict[str, Any]:
    def answered() -> dict[str, Any]:
        status, text = get(daemon, "/status.json")
        assert status in (200, 503), text
        return json.loads(text) if status == 200 else {}

    return wait_until(answered, "the page's document")


def busy(daemon: Daemon) -> set[int]:
    """Return the ends of the steps of the last hour in which rows were committed."""
    history = page(daemon)["subscriptions"][0]["history"]
    ends = range(history["end"], 0, -history["step"])
    return {at for at, rows in zip(ends, reversed(history["rows_per_second"]), strict=False) if rows}


@pytest.fixture
def watched(tmp_path: Path, database: Database) -> Iterator[Subscribed]:
    """A daemon with [http], which serves the database's slots, too; and a subscription to two tables."""
    daemon = Daemon(tmp_path)
    with (tmp_path / "pubsub.toml").open("a") as file:
        file.write('[http]\nlisten = "127.0.0.1:0"\n[walsender]\nlisten = "127.0.0.1:0"\n')
        file.write(f"upstream = {json.dumps(database.conninfo)}\n")
    daemon.start()
    one = Subscribed(daemon, database)
    try:
        yield one
        one.drop()
    finally:
        daemon.kill()


@pytest.mark.full
def test_a_daemon_is_seen_and_nothing_that_looks_disturbs_it(watched: Subscribed) -> None:
    daemon, database = watched.daemon, watched.database
    assert get(daemon, "/health")[0] == 200
    wait_until(lambda: get(daemon, "/ready")[0] == 200, "there is nothing to follow")
    watched.subscribe()
    watched.caught_up()
    watched.write(3)
    watched.caught_up()
    name = watched.name

    def of(metric: str, **labels: str) -> float | None:
        return value(scrape(daemon), metric, subname=name, **labels)

    # What the catalog stores once a second, as SQL shows it.
    wait_until(lambda: (of("pg_stat_subscription_stats_transactions_total") or 0) >= 3, "three transactions")
    wait_until(lambda: get(daemon, "/ready")[0] == 200, "the daemon to be ready")
    found = scrape(daemon)
    (row,) = daemon.client(
        lambda node: node.fetch(f"SELECT * FROM pg_stat_subscription_stats WHERE subname = '{name}'")
    )
    for column in ("transactions", "batches", "commits", "rows_inserted", "rows_updated", "rows_deleted"):
        assert value(found, f"pg_stat_subscription_stats_{column}_total", subname=name) == row[column]
        assert row[column] > 0
    assert value(found, "pg_subscription_rel_srsubstate", subname=name, relation="public.a", srsubstate="r") == 1
    kinds = {one: value(found, "pubsub_table_changes_total", subname=name, relation="public.a", kind=one) for one in
             ("insert", "update", "delete")}  # fmt: skip
    assert all((number or 0) >= 3 for number in kinds.values()), kinds
    assert value(found, "pubsub_commit_seconds_count", subname=name) == row["commits"]
    assert value(found, "pubsub_batch_rows_count", subname=name) == row["batches"]
    assert value(found, "pubsub_transaction_lag_seconds_count", subname=name) == row["transactions"]
    ((count,),) = database.query("SELECT count(*) FROM a")
    assert value(found, "pubsub_table_rows", subname=name, relation="public.a") == count
    assert value(found, "pubsub_publisher_up", subname=name) == 1
    assert (value(found, "pubsub_jvm_resident_memory_bytes") or 0) > 50 << 20
    assert (value(found, "pubsub_jvm_processor_seconds_total") or 0) > 1
    for part in PARTS:
        spent = value(found, "pubsub_processor_seconds_total", part=part)
        assert spent is not None
        assert spent > 0 or part in ("copying", "housekeeping"), part
    wait_until(lambda: value(scrape(daemon), "pubsub_jvm_heap_used_bytes") is not None, "the heap to be measured")
    found = scrape(daemon)
    used, committed, most = (value(found, f"pubsub_jvm_heap_{one}_bytes") or 0 for one in ("used", "committed", "max"))
    assert 1 << 20 < used <= committed <= most
    slot = {"server": "publisher", "slot_name": name, "subname": name, "plugin": "pgoutput", "database": ""}
    assert value(found, "pg_replication_slots_wal_status", **slot, pg_replication_slots_wal_status="reserved") == 1
    assert database_password(database) not in get(daemon, "/metrics")[1]

    assert get(daemon, "/")[1].startswith("<!doctype html>")
    wait_until(lambda: page(daemon)["subscriptions"][0]["history"]["rows_per_second"][-2:] != [None, None], "samples")
    found_page = page(daemon)
    tables = {one["name"]: one for one in found_page["tables"]}
    assert (tables["public.a"]["rows"], tables["public.a"]["state"]) == (count, "r")
    assert tables["public.a"]["last_commit"] > found_page["events"][-1]["first"], (
        "the table was written after the first event"
    )
    assert found_page["slots"][0]["slot_name"] == name
    statements = [one["fields"].get("statement", "") for one in found_page["events"]]
    assert any(one.startswith("CREATE SUBSCRIPTION") for one in statements), statements
    assert database_password(database) not in json.dumps(found_page)

    serves_slots(daemon, database)
    disturbed(watched)

    # Not ready while it does not follow; metrics go on.
    daemon.execute(f"ALTER SUBSCRIPTION {name} DISABLE")
    wait_until(lambda: of("pg_subscription_subenabled") == 0, "disabled")
    wait_until(lambda: get(daemon, "/ready")[0] == 200, "what is disabled is not waited for")
    daemon.execute(f"ALTER SUBSCRIPTION {name} CONNECTION 'host=/nowhere dbname=none'")
    daemon.execute(f"ALTER SUBSCRIPTION {name} ENABLE")
    wait_until(lambda: get(daemon, "/ready")[0] == 503, "the publisher is away")
    assert "nowhere" not in get(daemon, "/ready")[1] + get(daemon, "/metrics")[1]
    wait_until(lambda: of("pubsub_publisher_up") == 0, "the publisher is seen to be away")
    daemon.execute(f"ALTER SUBSCRIPTION {name} CONNECTION {quote_literal(database.conninfo)}")
    wait_until(lambda: get(daemon, "/ready")[0] == 200, "the daemon to be ready again")

    # Another place, without an end of the process.
    watched.write()
    observed = wait_until(lambda: busy(daemon), "rows to be observed")
    before, pid = place(daemon, "http"), daemon.process.pid
    settings = daemon.home / "pubsub.toml"
    settings.write_text(settings.read_text().replace("[http]", '[http]\nready_lag = "2min"'))
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: place(daemon, "http") != before, "another port")
    assert daemon.process.pid == pid
    wait_until(lambda: get(daemon, "/ready")[0] == 200, "the daemon to be ready after SIGHUP")
    assert observed <= busy(daemon), "what was observed outlasts the reload"
    settings.write_text(settings.read_text().replace("[http]", "[http]\npage = false"))
    at = place(daemon, "http")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: place(daemon, "http") != at, "another port again")
    assert [get(daemon, path)[0] for path in ("/", "/status.json", "/page.js", "/health")] == [404, 404, 404, 200]
    watched.assert_equal()


def database_password(database: Database) -> str:
    return str(conninfo_to_dict(database.conninfo).get("password") or "password=")


def serves_slots(daemon: Daemon, database: Database) -> None:
    """A slot of the daemon's walsender is shown as SQL shows it there."""
    host, _, port = place(daemon, "listen").rpartition(":")
    given: dict[str, Any] = {**conninfo_to_dict(database.conninfo), "host": host, "port": port}
    with psycopg.connect(**given, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('seen', 'pgoutput')")
        row = connection.execute(
            "SELECT restart_lsn - '0/0', confirmed_flush_lsn - '0/0', database FROM pg_replication_slots"
        ).fetchone()
        assert row is not None
        labels = {"server": "walsender", "slot_name": "seen", "subname": "", "plugin": "pgoutput", "database": row[2]}

        def shown() -> bool:
            found = scrape(daemon)
            columns = [
                value(found, f"pg_replication_slots_{one}", **labels) for one in ("restart_lsn", "confirmed_flush_lsn")
            ]
            return columns == [float(row[0]), float(row[1])]

        wait_until(shown, "the slot to be shown")
        connection.execute("SELECT pg_drop_replication_slot('seen')")


def disturbed(watched: Subscribed) -> None:
    """Clients that send rubbish, or nothing, cost the tables nothing."""
    host, _, port = place(watched.daemon, "http").rpartition(":")
    with ExitStack() as held:
        for _ in range(60):
            silent = held.enter_context(socket.create_connection((host, int(port)), timeout=60))
            silent.sendall(b"GET /met")
        watched.write(3)
        watched.assert_equal()
    for rubbish in (b"\0" * 100_000, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 100_000, b"\x16\x03\x01"):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            try:
                client.sendall(rubbish)
                client.shutdown(socket.SHUT_WR)
                answer = client.recv(100)
            except OSError:
                answer = b""  # it has been ended; ENOTCONN, which shutdown may raise then, is no ConnectionError
            assert not answer or re.match(rb"HTTP/1.1 4\d\d ", answer), answer
    wait_until(lambda: get(watched.daemon, "/health")[0] == 200, "the silent clients to be let go")
    assert watched.daemon.running
    assert not watched.daemon.said("Traceback")


@pytest.mark.full
def test_a_publishers_server_without_a_node_is_seen(tmp_path: Path) -> None:
    """`pubsub publish`: its slots, and whether the upstream server's WAL comes."""
    home = tmp_path / "home"
    home.mkdir()
    held = Port.reserve()
    (home / "pubsub.toml").write_text(f'[http]\nlisten = "127.0.0.1:{held.number}"\n')

    def asked(path: str) -> tuple[int, str]:
        try:
            accepting = Request(f"http://127.0.0.1:{held.number}{path}", headers={"Accept": OPENMETRICS})
            with urlopen(accepting, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def found(metric: str, **labels: str) -> float | None:
        return value(samples(asked("/metrics")[1]), metric, **labels)

    with EmbeddedPostgres("18") as server:
        publish = Publish(home, server.conninfo())
        try:
            publish.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            assert asked("/health")[0] == 200
            wait_until(lambda: asked("/ready")[0] == 200, "WAL to come")
            assert asked("/")[0] == 404
            assert found("pubsub_walsender_upstream_up") == 1
            slot = {
                "server": "walsender",
                "slot_name": "s",
                "subname": "",
                "plugin": "pgoutput",
                "database": "postgres",
            }
            assert found("pg_replication_slots_active", **slot) == 0
            before = found("pg_replication_slots_retained_bytes", **slot)
            server.execute("CREATE TABLE t AS SELECT generate_series(1, 10000) i")
            wait_until(
                lambda: (found("pg_replication_slots_retained_bytes", **slot) or 0) > (before or 0) + 100000, "WAL"
            )
            server.stop("immediate")
            wait_until(lambda: asked("/ready")[0] == 503, "the loss of the server to be told")
            assert found("pubsub_walsender_upstream_up") == 0
            assert asked("/health")[0] == 200
            server.start()
            wait_until(lambda: asked("/ready")[0] == 200, "WAL to come again")
            assert found("pubsub_walsender_upstream_up") == 1
        finally:
            publish.kill()
