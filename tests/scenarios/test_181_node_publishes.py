"""A node's Delta tables, published to a stock PostgreSQL: copy, changes, keys, tables without one; slots and what they keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pubsub.backend import users
from pubsub.backend.scram import Verifier
from pubsub.delta import pins
from pubsub.server.backend import NodeBackend
from pubsub.server.doors import Doors
from pubsub.settings import Settings
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, wait_until

TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, name text, price numeric(12, 2), at timestamptz, ok bool, r real, b bytea, j jsonb)",
    "CREATE TABLE plain (a bigint, d double precision)",
)


@pytest.fixture
def published(replica: Replica) -> Iterator[tuple[Replica, str]]:
    """A replica whose node publishes both tables; and its connection string."""
    replica.execute(
        *TABLES,
        "INSERT INTO orders SELECT n, 'name ' || n, n * 1.5, '2026-01-02 03:04:05.678+00', n % 2 = 0, n / 3.0, '\\x00ff', '{\"a\": 1}'"
        " FROM generate_series(1, 3000) n",
        "INSERT INTO plain VALUES (1, 'NaN'), (1, 2.5), (NULL, NULL)",
        "ALTER TABLE plain REPLICA IDENTITY FULL",
        "CREATE PUBLICATION p FOR TABLE orders, plain",
    )
    replica.subscribe()
    replica.caught_up()
    home, node = replica.node.home, replica.node
    (home / "followers").write_text(users.line("follower", Verifier.of_password("secret", iterations=1), "replication"))
    (home / "followers").chmod(0o600)
    settings = Settings.read({"walsender": {"listen": "127.0.0.1:0", "auth_file": "followers"}}, home)
    doors = node.run(Doors.open(settings, NodeBackend(settings, node._node)))
    with psycopg.connect(f"host={home} dbname=pubsub user=me", autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION lake FOR ALL TABLES")
    assert doors.place is not None
    host, _, port = doors.place.rpartition(":")
    yield replica, f"host={host} port={port} dbname=pubsub user=follower password=secret"
    node.run(doors.close())


def test_a_stock_subscriber_follows_delta_tables(
    published: tuple[Replica, str], stock_server: EmbeddedPostgres
) -> None:
    replica, conninfo = published
    name = replica.database.name
    stock_server.create_database(f"{name}_lake")

    def rows(database: str, table: str) -> list[tuple[Any, ...]]:
        server = stock_server if database.endswith("_lake") else replica.database.server
        return server.query(f"SELECT {table}::text FROM {table} ORDER BY 1", database)

    def equal() -> bool:
        return all(rows(f"{name}_lake", table) == rows(name, table) for table in ("orders", "plain"))

    for statement in TABLES:
        stock_server.execute(statement, f"{name}_lake")
    stock_server.execute("ALTER TABLE plain REPLICA IDENTITY FULL", f"{name}_lake")
    try:
        stock_server.execute(f"CREATE SUBSCRIPTION lake CONNECTION '{conninfo}' PUBLICATION lake", f"{name}_lake")
        wait_until(equal, "both tables are copied")
        replica.execute(
            "INSERT INTO orders SELECT n, 'later' FROM generate_series(10001, 11777) n",
            "UPDATE orders SET name = 'changed' WHERE id <= 20",
            "UPDATE orders SET id = id + 100000 WHERE id BETWEEN 30 AND 40",
            "DELETE FROM orders WHERE id BETWEEN 50 AND 60",
            "INSERT INTO plain VALUES (7, 'Infinity')",
            "DELETE FROM plain WHERE d = 2.5",
        )
        replica.caught_up()
        wait_until(equal, "the changes arrive")
        with psycopg.connect(f"host={replica.node.home} dbname=pubsub user=me", autocommit=True) as connection:
            listed = connection.execute("SELECT slot_name, plugin, active FROM pg_replication_slots").fetchall()
            assert listed == [("lake", "pgoutput", True)]
            paths = [row[0] for row in connection.execute("SELECT path FROM pg_subscription_rel").fetchall()]
        assert all(pins.holds(path, "slot_lake") for path in paths), "what the slot needs is kept"
        replica.execute("TRUNCATE orders", "INSERT INTO orders VALUES (1, 'again')")
        replica.caught_up()
        wait_until(equal, "a truncated table follows")
    finally:
        stock_server.execute("DROP SUBSCRIPTION IF EXISTS lake", f"{name}_lake")
        stock_server.drop_database(f"{name}_lake")
    with psycopg.connect(f"host={replica.node.home} dbname=pubsub user=me", autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)
    assert not any(pins.holds(path, "slot_lake") for path in paths), "nothing is kept any more"
