"""A node's life for the recorder: it copies tables, follows them in every way, and writes down what the publisher held when.

    python -m tests.power.run BASE CONNINFO COMMITS

The node is BASE/home.  A mark is a directory BASE/marks/NAME, made when something was reported.  BASE/publisher.json gets, for
each commit at the publisher, an LSN before it, one at or past its end, and the tables' rows then; and the prepared transactions.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psycopg

from pubsub.node.node import Node
from pubsub.settings import Settings
from pubsub.sql.identifiers import quote_literal

TABLES: Final = ("a", "keyless", "locked", "wide")
SUBSCRIPTION: Final = "s"
#: A slot that stays where the subscription began: a node can be started from any state.
KEPT: Final = "kept"
_SETTINGS: Final[dict[str, Any]] = {
    "logical_decoding_work_mem": "64kB",
    "wal_retrieve_retry_interval": "300ms",
    "catalog_poll_interval": "50ms",
    "wal_receiver_status_interval": "1s",
    "spark": {
        "statement_rows": 300,
        "conf": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1", "spark.driver.memory": "1g"},
    },
    # Without it Delta writes a checkpoint within each hundredth commit.
    "housekeeping": {"enabled": False},
}
#: Seconds: everything is traced, and others may need the machine.
_PATIENCE: Final = 1800


def settings(home: Path) -> Settings:
    """Return the node's settings."""
    return Settings.read(_SETTINGS, home)


class Publisher:
    """The load, and what is written down of it."""

    def __init__(self, conninfo: str) -> None:
        self._connection = psycopg.connect(conninfo, autocommit=True)
        self.moments: list[tuple[str, str, dict[str, list[dict[str, Any]]]]] = []
        self.prepared: list[dict[str, Any]] = []

    def make(self) -> None:
        """Create the tables and the publication."""
        self.execute(
            """
            CREATE TABLE a (id int PRIMARY KEY, n int, t text);
            CREATE TABLE keyless (n int);
            ALTER TABLE keyless REPLICA IDENTITY FULL;
            CREATE TABLE locked (id int PRIMARY KEY, t text);
            CREATE TABLE wide (id int PRIMARY KEY, t text);
            INSERT INTO a SELECT g, 0, 'first ' || g FROM generate_series(1, 40) g;
            INSERT INTO keyless SELECT g % 5 FROM generate_series(1, 20) g;
            INSERT INTO locked SELECT g, 'first' FROM generate_series(1, 9) g;
            INSERT INTO wide SELECT g, repeat('x', 2000) FROM generate_series(1, 1500) g;
            CREATE PUBLICATION p FOR ALL TABLES
            """
        )
        self.execute(f"SELECT pg_create_logical_replication_slot('{KEPT}', 'pgoutput', false, true)")

    def execute(self, sql: str) -> None:
        """Run statements, which are one transaction, and write down what the tables hold then."""
        before = self._lsn()
        self._connection.execute(sql)
        rows = {
            name: [row for (row,) in self._connection.execute(f"SELECT row_to_json(x) FROM {name} x").fetchall()]
            for name in TABLES
        }
        self.moments.append((before, self._lsn(), rows))

    def _lsn(self) -> str:
        found = self._connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert found is not None
        return str(found[0])

    def prepare(self, gid: str, sql: str) -> None:
        self._connection.execute(f"BEGIN; {sql}; PREPARE TRANSACTION '{gid}'")
        self.prepared.append({"gid": gid, "prepared": self._lsn(), "ended": None})

    def end(self, gid: str, outcome: str) -> None:
        self.execute(f"{outcome} PREPARED '{gid}'")
        next(one for one in self.prepared if one["gid"] == gid)["ended"] = self._lsn()


class Life:
    """The node, and what happens to it."""

    def __init__(self, base: Path, conninfo: str, commits: int) -> None:
        self._base = base
        self._streaming = f"{conninfo} options='-c logical_decoding_work_mem=64kB'"
        self._commits = commits
        self.publisher = Publisher(conninfo)

    def _node(self) -> Node:
        return Node(self._base / "home", settings=settings(self._base / "home"))

    def _mark(self, name: str) -> None:
        (self._base / "marks" / name).mkdir(parents=True)

    async def first(self) -> None:
        """Copy; small transactions between all that is special."""
        publisher = self.publisher
        async with self._node() as node:
            await node.execute(
                f"CREATE SUBSCRIPTION {SUBSCRIPTION} CONNECTION {quote_literal(self._streaming)} PUBLICATION p "
                "WITH (batch_age = '10ms', two_phase = true, streaming = parallel)"
            )
            self._mark("created")
            await _caught_up(node)
            self._mark("copied")
            publisher.prepare("early", "INSERT INTO a VALUES (100, 0, 'early')")
            # A table of its own: its lock stands until the end.
            publisher.prepare(
                "late", "UPDATE locked SET t = 'late' WHERE id = 5; INSERT INTO locked VALUES (77, 'late')"
            )
            specials: dict[int, Callable[[], None]] = {
                1: lambda: publisher.end("early", "COMMIT"),
                # Streamed, spilled, and written by a statement of Spark's.
                2: lambda: publisher.execute("UPDATE wide SET t = md5(id::text) || repeat('y', 1500)"),
                3: lambda: publisher.execute("TRUNCATE keyless; INSERT INTO keyless VALUES (9)"),
                4: lambda: publisher.execute(
                    "ALTER TABLE a ADD COLUMN c text DEFAULT 'c'; UPDATE a SET c = 'd' WHERE id = 7"
                ),
                5: lambda: publisher.prepare("rolled back", "INSERT INTO a VALUES (200, 0, 'no')"),
            }
            for number in range(self._commits):
                publisher.execute(
                    f"UPDATE a SET n = n + 1 WHERE id % 10 = {number % 10} AND id < 40;"
                    f"INSERT INTO a VALUES ({1000 + number}, 0, 'new'); DELETE FROM a WHERE id = {990 + number};"
                    f"INSERT INTO keyless VALUES ({number % 3}); DELETE FROM keyless WHERE n = {number % 7}"
                )
                specials.get(number, lambda: None)()
                if number % 4 != 3:
                    # Else two transactions have one batch.
                    await _caught_up(node)
            publisher.end("rolled back", "ROLLBACK")
            await _caught_up(node)

    async def second(self) -> None:
        """Start again; copy a table anew; leave a prepared transaction that waits."""
        publisher = self.publisher
        publisher.end("late", "COMMIT")
        async with self._node() as node:
            await _caught_up(node)
            await node.execute(f"ALTER SUBSCRIPTION {SUBSCRIPTION} RESYNC TABLE keyless")
            await _caught_up(node)
            self._mark("copied again")
            publisher.execute("INSERT INTO keyless VALUES (8)")
            publisher.prepare("waiting", "INSERT INTO a VALUES (300, 0, 'waits')")
            publisher.execute("DELETE FROM a WHERE id < 10")
            await _caught_up(node)


async def _caught_up(node: Node) -> None:
    await node.wait_for_catchup(SUBSCRIPTION, timeout=_PATIENCE)


async def main() -> None:
    base = Path(sys.argv[1])
    life = Life(base, sys.argv[2], int(sys.argv[3]))
    life.publisher.make()
    try:
        await life.first()
        await life.second()
    finally:
        # What was recorded by then can be cut, too.
        written = {"moments": life.publisher.moments, "prepared": life.publisher.prepared}
        (base / "publisher.json").write_text(json.dumps(written))


if __name__ == "__main__":
    asyncio.run(main())
