"""Debezium's PostgreSQL connector, the real one in its embedded engine, behind `pubsub publish`.

Its events, put together by key, must be the publisher's tables: after the snapshot, changes, restarts with stored offsets,
kills of either program, and under load.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import java_programs
from tests.support.replica import wait_until
from tests.support.stock_pairs import Make, Pair

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not java_programs.has_compiler(), reason="a JDK is needed"),
]

_TABLES = """
CREATE TABLE customers (id int PRIMARY KEY, name text, credit numeric(12,2), since timestamptz DEFAULT now(), tags text[], info jsonb);
CREATE TABLE lines (id int, number int, note text, PRIMARY KEY (id, number));
ALTER TABLE lines REPLICA IDENTITY FULL;
CREATE TABLE signals (id varchar(64) PRIMARY KEY, type varchar(32) NOT NULL, data varchar(2048));
CREATE TABLE heartbeat (id int PRIMARY KEY, at timestamptz);
INSERT INTO customers SELECT g, 'customer ' || g, g / 3.0, now(), ARRAY['a', g::text], jsonb_build_object('n', g)
    FROM generate_series(1, 300) g;
INSERT INTO lines SELECT g, g % 7, repeat('note ', g % 10) FROM generate_series(1, 300) g;
"""


class Debezium:
    """The engine with a connector; `rows` are its events put together by key."""

    def __init__(self, directory: Path, pair: Pair, **properties: str) -> None:
        self.pair = pair
        self.events: list[dict[str, Any]] = []
        self.rows: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
        self._log = directory / "debezium.log"
        self._properties = directory / "debezium.properties"
        given = {
            "name": "engine",
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": str(directory / "offsets"),
            "offset.flush.interval.ms": "100",
            "database.hostname": "127.0.0.1",
            "database.port": str(pair.publish.port),
            "database.user": "postgres",
            "database.password": "none",
            "database.dbname": pair.name,
            "topic.prefix": "d",
            "plugin.name": "pgoutput",
            "slot.name": f"{pair.name}_debezium",
            "publication.autocreate.mode": "filtered",
            "table.include.list": "public.customers,public.lines,public.signals",
            "heartbeat.interval.ms": "300",
            "heartbeat.action.query": "INSERT INTO heartbeat VALUES (1, now()) ON CONFLICT (id) DO UPDATE SET at = now()",
            "decimal.handling.mode": "string",
            "poll.interval.ms": "50",
            "retriable.restart.connector.wait.ms": "500",
            "errors.retry.delay.initial.ms": "300",
            "status.update.interval.ms": "500",
            **{name.replace("_", "."): value for name, value in properties.items()},
        }
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
        self._process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        command = java_programs.command("DebeziumFollower", java_programs.DEBEZIUM)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self._properties)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            topic, _, text = line.partition("\t")
            if not topic.startswith("d.public.") or text.strip() in {"", "null"}:
                continue
            event = json.loads(text)["payload"]
            event["table"] = topic.removeprefix("d.public.")
            self._take(event)
            self.events.append(event)

    def _take(self, event: dict[str, Any]) -> None:
        table = self.rows.setdefault(event["table"], {})
        width = 2 if event["table"] == "lines" else 1

        def key(row: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(row.values())[:width]

        if event["op"] == "d":
            table.pop(key(event["before"]), None)
        elif event["op"] == "t":
            table.clear()
        else:
            table[key(event["after"])] = event["after"]

    def stop(self) -> None:
        """End it in good order, with its offsets stored."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(90) == 0, self.tail()
        self._reader.join()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def tail(self) -> str:
        return self._log.read_text()[-3000:]

    def equal(self) -> None:
        """Wait until the events put together are the publisher's rows."""
        for table, columns in (("customers", "id, name, credit::text, tags, info"), ("lines", "id, number, note")):
            wanted = self.pair.published(f"SELECT {columns} FROM {table} ORDER BY 1, 2")

            def same(table: str = table, wanted: list[Any] = wanted) -> bool:
                assert self._process.poll() is None, self.tail()
                found = [
                    (row["id"], row["name"], row["credit"], row["tags"], row["info"] and json.loads(row["info"]))
                    if table == "customers"
                    else (row["id"], row["number"], row["note"])
                    for _, row in sorted(dict(self.rows.get(table, {})).items())
                ]
                return found == wanted

            wait_until(same, f"{table} is equal: {len(self.rows.get(table, {}))} rows; {self.tail()}", 90)


@contextmanager
def debezium(directory: Path, pair: Pair, **properties: str) -> Iterator[Debezium]:
    follower = Debezium(directory, pair, **properties)
    try:
        yield follower
    finally:
        follower.kill()
    slot = f"{pair.name}_debezium"
    free = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
    wait_until(lambda: pair.served(free) == [(False,)], "the slot is free")
    pair.publish.execute(f"SELECT pg_drop_replication_slot('{slot}')", dbname=pair.name)


_CHANGES = (
    "UPDATE customers SET name = name || '!', info = NULL WHERE id % 5 = 0",
    "DELETE FROM customers WHERE id % 7 = 0",
    "UPDATE lines SET number = number + 10 WHERE id < 20; DELETE FROM lines WHERE id > 290",
    "BEGIN; INSERT INTO customers (id, name) VALUES (1000, 'a'); SAVEPOINT s; DELETE FROM lines; ROLLBACK TO s; COMMIT",
    "UPDATE customers SET id = id + 5000 WHERE id BETWEEN 10 AND 12",
    "INSERT INTO customers (id, name) SELECT g, repeat(md5(g::text), 300) FROM generate_series(2000, 2050) g",
    "UPDATE customers SET credit = 1 WHERE id BETWEEN 2000 AND 2050",
)


@pytest.mark.parametrize("version", ["18", "15"])
def test_snapshot_stream_and_restarts(pairs: Make, tmp_path: Path, version: str) -> None:
    pair = pairs(version, version)
    pair.run(_TABLES)
    # Unchanged large values come as a placeholder otherwise.
    pair.run("ALTER TABLE customers REPLICA IDENTITY FULL")
    with debezium(tmp_path, pair) as follower:
        follower.equal()
        assert {event["op"] for event in follower.events} == {"r"}
        for change in _CHANGES:
            pair.run(change)
        follower.equal()
        # With its offsets it goes on where it was, without a second snapshot.
        follower.stop()
        pair.run(
            "INSERT INTO customers (id, name) VALUES (3000, 'while it was away'); DELETE FROM customers WHERE id = 3"
        )
        seen = len(follower.events)
        follower.start()
        follower.equal()
        assert {event["op"] for event in follower.events[seen:]} == {"c", "d"}
        # Killed: what it had not confirmed comes again, nothing is missing.
        follower.kill()
        pair.run("UPDATE customers SET name = 'after a kill' WHERE id < 50", "TRUNCATE lines")
        pair.run("INSERT INTO lines VALUES (1, 1, 'new')")
        follower.start()
        wait_until(lambda: (1, 1) in follower.rows["lines"], "it follows")
        follower.rows["lines"] = {(1, 1): follower.rows["lines"][1, 1]}  # truncations are skipped by default
        follower.equal()
        # Our server is killed: Debezium connects again.
        pair.publish.kill()
        pair.run("UPDATE customers SET credit = 7 WHERE id < 20")
        pair.publish.start()
        follower.equal()
        # Its lag is seen in our view, and a column comes.
        pair.run("ALTER TABLE customers ADD COLUMN later int DEFAULT 5; UPDATE customers SET later = 6 WHERE id < 5")
        follower.equal()
        wait_until(lambda: any(e["after"] and e["after"].get("later") == 6 for e in follower.events), "the new column")


def test_an_incremental_snapshot_under_load(pairs: Make, tmp_path: Path) -> None:
    """Signalled through a table, while clients write: its chunks and the stream give the table."""
    pair = pairs()
    pair.run(_TABLES)
    with debezium(
        tmp_path,
        pair,
        snapshot_mode="no_data",
        signal_data_collection="public.signals",
        incremental_snapshot_chunk_size="64",
    ) as follower:
        wait_until(
            lambda: pair.served(f"SELECT 1 FROM pg_replication_slots WHERE active AND slot_name LIKE '{pair.name}%'"),
            "it streams",
        )
        ended = threading.Event()

        def load() -> None:
            with pair.publisher.connect(pair.name) as connection:
                number = 0
                while not ended.wait(0.02):  # so that it does not outrun everything else
                    number += 1
                    connection.execute(f"UPDATE customers SET credit = {number} WHERE id % 13 = {number % 13}".encode())
                    connection.execute(f"INSERT INTO lines VALUES ({10_000 + number}, 1, 'load')".encode())

        loading = threading.Thread(target=load)
        loading.start()
        try:
            pair.run(
                "INSERT INTO signals VALUES ('s1', 'execute-snapshot', "
                """'{"data-collections": ["public.customers", "public.lines"], "type": "incremental"}')"""
            )
            wait_until(lambda: len(follower.rows.get("customers", {})) >= 300, "the snapshot has all keys")
            wait_until(lambda: (300, 300 % 7) in follower.rows.get("lines", {}), "the second table has come")
        finally:
            ended.set()
            loading.join()
        follower.equal()
