"""schema_changes = refuse beside a stock subscriber whose tables stay as they are: the same rows and errors.

Every row of the table in docs/schema-changes.md, each with a table of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pubsub.sql.identifiers import quote_literal
from pubsub.testing.compare import compare_tables
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.readers import assert_read_alike
from tests.support.replica import Replica, wait_until

# Tables are altered after checkpoints, too.
pytestmark = pytest.mark.usefixtures("frequent_checkpoints")

TABLE = "CREATE TABLE a (id int PRIMARY KEY, t varchar(20), n numeric(10,2) DEFAULT 0);"
ROWS = "INSERT INTO a SELECT g, 'row ' || g, g / 7.0 FROM generate_series(1, 50) g;"
AFTER = "UPDATE a SET n = 3 WHERE id < 9", "UPDATE a SET id = -id WHERE id = 12; DELETE FROM a WHERE id = 13"

#: Changes after which both subscribers go on, with the same rows.
SAME = (
    (
        "ALTER TABLE a ADD COLUMN g int GENERATED ALWAYS AS (id + 1) STORED",
        "INSERT INTO a VALUES (100, 'x', 1)",
        *AFTER,
    ),
    ("ALTER TABLE a DROP COLUMN t", "INSERT INTO a VALUES (100, 1)", *AFTER),
    (
        "ALTER TABLE a DROP COLUMN t; ALTER TABLE a ADD COLUMN t text DEFAULT 'd'",
        "INSERT INTO a VALUES (100, 1, 'x')",
        *AFTER,
    ),
    ("ALTER TABLE a ALTER t TYPE text", "INSERT INTO a VALUES (100, 'x', 1)", *AFTER),
    ("ALTER TABLE a ALTER n TYPE numeric(20,2)", "INSERT INTO a VALUES (100, 'x', 99999999.99)", *AFTER),
    ("ALTER TABLE a ALTER id TYPE bigint", "INSERT INTO a VALUES (2147483647, 'x', 1)", *AFTER),
    ("ALTER TABLE a ALTER t TYPE int USING substr(t, 5)::int", "INSERT INTO a VALUES (100, 77, 1)", *AFTER),
    ("ALTER TABLE a REPLICA IDENTITY FULL", "INSERT INTO a VALUES (100, 'x', 1)", *AFTER),
    ("ALTER TABLE a REPLICA IDENTITY NOTHING", "INSERT INTO a VALUES (100, 'x', 1)"),
    ("ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE a ALTER id SET NOT NULL", "INSERT INTO a VALUES (100, 'x', 1)"),
    (
        "ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE a ALTER t SET NOT NULL, ADD PRIMARY KEY (id, t)",
        "INSERT INTO a VALUES (100, 'x', 1)",
        "UPDATE a SET t = 'y' WHERE id < 5",
        *AFTER,
    ),
    (
        "ALTER TABLE a ALTER n SET NOT NULL, ALTER t SET DEFAULT 'd', ADD CHECK (n < 1000)",
        "INSERT INTO a VALUES (100)",
        *AFTER,
    ),
    ("TRUNCATE a; ALTER TABLE a DROP COLUMN t; INSERT INTO a VALUES (1, 2)", "UPDATE a SET n = 4"),
)
MISSING = 'logical replication target relation "public.a" is missing replicated column: "{}"'
NO_TABLE = 'logical replication target relation "{}" does not exist'
#: Changes that stop the table, with PostgreSQL's error where Delta's types have none of their own.
STOPS = (
    (MISSING.format("c"), "ALTER TABLE a ADD COLUMN c int", "INSERT INTO a VALUES (100, 'x', 1)"),
    (MISSING.format("c"), "ALTER TABLE a ADD COLUMN c int DEFAULT 5", "UPDATE a SET n = 9 WHERE id = 1"),
    (MISSING.format("c"), "ALTER TABLE a ADD COLUMN c float8 DEFAULT random()", "DELETE FROM a WHERE id = 1"),
    (MISSING.format("u"), "ALTER TABLE a RENAME t TO u", "INSERT INTO a VALUES (100, 'x', 1)"),
    (NO_TABLE.format("public.a_new"), "ALTER TABLE a RENAME TO a_new", "INSERT INTO a_new VALUES (100, 'x', 1)"),
    (NO_TABLE.format("other.a"), "ALTER TABLE a SET SCHEMA other", "INSERT INTO other.a VALUES (100, 'x', 1)"),
    (None, "ALTER TABLE a ALTER n TYPE numeric(20,2)", "INSERT INTO a VALUES (100, 'x', 123456789012)"),
    (None, "ALTER TABLE a ALTER id TYPE bigint", "INSERT INTO a VALUES (5000000000, 'x', 1)"),
    (None, "ALTER TABLE a ALTER n TYPE text", "INSERT INTO a VALUES (100, 'x', 'many')"),
    (
        'publisher did not send replica identity column expected by the logical replication target relation "public.a"',
        "ALTER TABLE a ALTER t SET NOT NULL; CREATE UNIQUE INDEX a_t ON a (t); ALTER TABLE a REPLICA IDENTITY USING INDEX a_t",
        "UPDATE a SET n = 1 WHERE id = 4",
    ),
    (MISSING.format("c"), "TRUNCATE a; ALTER TABLE a ADD c int; INSERT INTO a VALUES (1, 'x', 1, 2)"),
)


def of(name: str, statement: str) -> str:
    return re.sub(r"\ba(?=\b|_)", name, statement)


@pytest.fixture
def beside(replica: Replica, stock_server: EmbeddedPostgres) -> Iterator[str]:
    """A database of the stock subscriber's; its subscriptions and their slots are dropped afterwards."""
    name = replica.database.name
    stock_server.create_database(name)
    yield name
    for (subscription,) in stock_server.query(
        f"SELECT subname FROM pg_subscription WHERE subname LIKE '{name}\\_%'", name
    ):
        stock_server.execute(f"ALTER SUBSCRIPTION {subscription} DISABLE", name)
        stock_server.execute(f"ALTER SUBSCRIPTION {subscription} SET (slot_name = NONE)", name)
        stock_server.execute(f"DROP SUBSCRIPTION {subscription}", name)
    stock_server.drop_database(name)


@pytest.mark.full
def test_each_change_is_taken_or_refused_as_postgresql_does(
    replica: Replica, stock_server: EmbeddedPostgres, beside: str
) -> None:
    names = [f"a{number}" for number in range(len(SAME) + len(STOPS))]
    same, stops = names[: len(SAME)], names[len(SAME) :]
    stock_server.execute("".join(of(name, TABLE + ROWS) for name in names), beside)
    replica.execute("CREATE SCHEMA other;" + "".join(of(name, TABLE + ROWS) for name in names))
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(same)}")
    for name in stops:
        replica.execute(f"CREATE PUBLICATION p_{name} FOR TABLE {name}")
    publications = ["p", *(f"p_{name}" for name in stops)]
    for publication in publications:
        # An error stops a whole stock subscription, so each table that stops has a subscription of its own.
        stock_server.execute(
            f"CREATE SUBSCRIPTION {beside}_{publication} CONNECTION {quote_literal(replica.conninfo)} "
            f"PUBLICATION {publication} WITH (slot_name = stock_{beside}_{publication}, disable_on_error, copy_data = false)",
            beside,
        )
    replica.subscribe(", ".join(publications), schema_changes="refuse", on_table_error="isolate")
    # So many copies take their time.
    replica.node.wait_for_catchup(replica.name, timeout=600)
    replica.assert_equal(*names, caught_up=False)
    paths = {name: replica.path(name) for name in names}
    for name, statements in zip(same, SAME, strict=True):
        replica.execute(*(of(name, statement) for statement in statements))
    for name, (_, *statements) in zip(stops, STOPS, strict=True):
        replica.execute(*(of(name, statement) for statement in statements))
    replica.caught_up()
    (lsn,) = replica.query("SELECT pg_current_wal_lsn()")[0]
    wait_until(
        lambda: replica.query(
            f"SELECT FROM pg_replication_slots WHERE slot_name = 'stock_{beside}_p' AND confirmed_flush_lsn >= '{lsn}'"
        ),
        "the stock subscriber to catch up",
    )
    enabled = f"SELECT subname FROM pg_subscription WHERE subenabled AND subname LIKE '{beside}\\_%'"
    wait_until(lambda: stock_server.query(enabled, beside) == [(f"{beside}_p",)], "the other subscriptions to stop")
    for name in names:
        difference = compare_tables(stock_server.conninfo(beside), f"public.{name}", paths[name])
        assert difference is None, str(difference)
    for path in paths.values():
        assert_read_alike(path, replica.node.spark)
    relations = {relation.name: relation for relation in replica.node.relations(replica.name)}
    assert [name for name in names if relations[name].stopped] == stops
    log = stock_server.read_log()
    for name, (text, *_) in zip(stops, STOPS, strict=True):
        if text is not None:
            assert relations[name].error == of(name, text)
            assert f"ERROR:  {of(name, text)}" in log
