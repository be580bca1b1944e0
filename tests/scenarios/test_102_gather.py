"""gather: tables of one subscription that are in one Delta table, each of them a source of it."""

from __future__ import annotations

from typing import Any

import pytest

from pubsub.errors import PubsubError
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, RunningNode, wait_until

COLUMN = "_pubsub_source"
TABLES = (
    "CREATE TABLE {0}.orders (id int PRIMARY KEY, v text, n int);"
    "CREATE TABLE {0}.items (a int, b int, v text, PRIMARY KEY (a, b))"
)


class Gathered(Replica):
    """A subscription whose tables are compared with what a Delta table has of them."""

    def own(self, table: str, columns: str = "*") -> list[dict[str, Any]]:
        """Return the rows of a publisher's table in its Delta table."""
        relation = self.relation(table)
        assert relation.source is not None
        where = f"{relation.source.column} = '{relation.source.value}'"
        return self.rows(table, f"{columns} FROM delta_t WHERE {where} ORDER BY 1, 2")

    def assert_own(self, *tables: str, columns: str | None = None) -> None:
        """Check that each table's rows are the publisher's; `columns`: with those that it has been given."""
        self.caught_up()
        for table in tables:
            listed = columns or ("id, v, n" if "orders" in table else "a, b, v")
            ours = [tuple(row.values()) for row in self.own(table, listed)]
            assert ours == self.query(f"SELECT {listed} FROM {table} ORDER BY 1, 2"), table

    def tenant(self, schema: str, rows: int = 20) -> None:
        self.execute(
            f"CREATE SCHEMA {schema}; {TABLES.format(schema)}",
            f"INSERT INTO {schema}.orders SELECT g, '{schema} ' || g, g FROM generate_series(1, {rows}) g",
            f"INSERT INTO {schema}.items SELECT g % 5, g, '{schema}' FROM generate_series(1, {rows}) g",
        )

    def verified(self) -> None:
        """Check by `verify`, too."""
        report = self.node.run(self.node._node.verify(self.name))
        outcomes = {one.relation: (one.outcome, one.reason) for one in report.tables}
        assert {outcome for outcome, _ in outcomes.values()} == {"equal"}, outcomes


@pytest.fixture
def replica(database: Database, node: RunningNode) -> Any:
    found = Gathered(node, database)
    yield found
    found.leave()


CHANGES = (
    "INSERT INTO {}.orders VALUES (100, '{}', 1), (101, NULL, 2)",
    "UPDATE {}.orders SET v = v || '!', n = n + 1 WHERE id BETWEEN 3 AND 7; DELETE FROM {}.items WHERE b % 2 = 0",
    "UPDATE {}.orders SET id = id + 1000 WHERE id = 8; UPDATE {}.items SET a = 9 WHERE b = 1",
    "UPDATE {}.orders SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id < 1; DELETE FROM {}.orders WHERE id = 9",
)
BOTH = ("tenant_1", "tenant_2")


def test_schemas_are_in_one(replica: Gathered) -> None:
    """Equal keys, transactions of both, TRUNCATE, RESYNC and ALTER TABLE of one; another schema joins."""
    for schema in (*BOTH, "other"):
        replica.tenant(schema)
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe(gather="'tenant_*.* (tenants)'")
    replica.until_ready()
    every = [f"{schema}.{table}" for schema in BOTH for table in ("orders", "items")]
    assert len({replica.path(table) for table in every}) == 2
    assert replica.path("tenant_1.orders") == replica.path("tenant_2.orders")
    assert replica.path("tenant_1.orders").endswith("/tenants/orders")
    assert replica.relation("other.orders").source is None
    replica.assert_own(*every)
    for change in CHANGES:
        # In one transaction for both: its batch has two commits to one Delta table.
        replica.execute("; ".join(["BEGIN", *(change.replace("{}", schema) for schema in BOTH), "COMMIT"]))
        replica.assert_own(*every)
    replica.execute("BEGIN; TRUNCATE tenant_1.orders; INSERT INTO tenant_1.orders VALUES (1, 'after it', 1); COMMIT")
    replica.assert_own(*every)
    generation = replica.relation("tenant_2.orders").copy_generation
    replica.alter("RESYNC TABLE tenant_2.orders")
    replica.until_copied("tenant_2.orders", generation)
    replica.assert_own(*every)
    replica.execute("ALTER TABLE tenant_1.orders ADD c int DEFAULT 5; UPDATE tenant_1.orders SET n = 3")
    replica.execute("UPDATE tenant_2.orders SET n = 4 WHERE id < 5")
    replica.assert_own("tenant_1.orders", columns="id, v, n, c")
    replica.assert_own(*every)
    assert {row["c"] for row in replica.own("tenant_2.orders")} == {None}

    replica.tenant("tenant_3", 30)
    replica.alter("REFRESH PUBLICATION")
    replica.until_ready()
    every += ["tenant_3.orders", "tenant_3.items"]
    replica.assert_own(*every)
    replica.assert_equal("other.orders", "other.items")
    found = replica.node.fetch(
        f"SELECT {COLUMN} AS source, count(*) AS rows FROM {replica.database.name}.tenants.items GROUP BY 1"
    )
    assert {row["source"]: row["rows"] for row in found} == {
        schema: len(replica.own(f"{schema}.items")) for schema in (*BOTH, "tenant_3")
    }
    with pytest.raises(PubsubError, match=r'relation ".*tenant_1\.items" does not exist'):
        replica.node.fetch(f"SELECT count(*) FROM {replica.database.name}.tenant_1.items")
    replica.verified()
    statistics = replica.node.statistics(replica.name)
    assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)


@pytest.mark.full
def test_tables_by_name_are_in_one(replica: Gathered) -> None:
    """Through streamed transactions that are staged ahead and in parts, with every table in each."""
    names = [f"orders_{year}" for year in (2023, 2024, 2025)]
    for name in names:
        replica.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text, n int)",
            f"INSERT INTO {name} SELECT g, '{name}', g FROM generate_series(1, 3000) g",
        )
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}")
    replica.subscribe(
        gather="'public.orders_* (public.orders)'", source_column="year", streaming="parallel", batch_rows=500
    )
    replica.until_ready()
    assert {replica.relation(name).whose for name in names} == set(names)
    replica.assert_own(*names)
    one = (
        "UPDATE {0} SET n = -n WHERE id % 3 = 0;"
        "INSERT INTO {0} SELECT g, repeat('x', 500), g FROM generate_series({1}, {1} + 4000) g"
    )
    for place in (10_000, 20_000):
        replica.execute("; ".join(["BEGIN", *(one.format(name, place) for name in names), "COMMIT"]))
        replica.assert_own(*names)
    replica.execute("; ".join(["BEGIN", *(one.format(name, 30_000) for name in names), "ROLLBACK"]))
    replica.execute("; ".join(f"DELETE FROM {name} WHERE id > 10000" for name in names))
    replica.assert_own(*names)
    replica.verified()


@pytest.mark.full
def test_tables_leave_and_come_back(replica: Gathered) -> None:
    """A table that is made anew is the same source; one that is renamed stays what it was."""
    for schema in BOTH:
        replica.tenant(schema)
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe(gather="'tenant_*.orders (all.orders), tenant_*.items (tenants)'")
    replica.until_ready()
    # Neither schema nor name are those of the Delta table.
    assert replica.relation("tenant_1.orders").whose == "tenant_1"
    assert replica.path("tenant_1.orders").endswith("/all/orders")
    for schema in BOTH:
        made = (
            "CREATE TABLE {0}.orders (id int PRIMARY KEY, v text, n int); INSERT INTO {0}.orders VALUES (1, 'new', 1)"
        )
        replica.execute(f"BEGIN; DROP TABLE {schema}.orders; {made.format(schema)}; COMMIT")
    # Its rows are in conflict with those of the table that had its name; both are copied anew at once.
    replica.alter("RESYNC TABLE tenant_1.orders, tenant_2.orders")
    replica.until_ready()
    assert len({replica.relation(f"{schema}.orders").whose for schema in BOTH}) == 2
    replica.assert_own("tenant_1.orders", "tenant_2.orders")
    replica.execute(
        "ALTER TABLE tenant_1.orders RENAME TO orders_old; INSERT INTO tenant_1.orders_old VALUES (2, 'x', 2)"
    )
    wait_until(lambda: "tenant_1.orders_old" in replica.states(), "the new name")
    assert replica.relation("tenant_1.orders_old").whose == "tenant_1"
    replica.assert_own("tenant_1.orders_old", "tenant_2.orders")
    replica.execute("CREATE TABLE tenant_1.orders (id int PRIMARY KEY, v text, n int)")
    with pytest.raises(PubsubError, match=r'"tenant_1\.orders_old" and "tenant_1\.orders" would be one source'):
        replica.alter("REFRESH PUBLICATION")
    replica.execute("DROP TABLE tenant_1.orders; ALTER SCHEMA tenant_2 RENAME TO tenant_9")
    replica.execute("INSERT INTO tenant_9.orders VALUES (3000, 'y', 1)")
    wait_until(lambda: "tenant_9.orders" in replica.states(), "the schema's new name")
    replica.assert_own("tenant_1.orders_old", "tenant_9.orders")
    generation = replica.relation("tenant_9.orders").copy_generation
    replica.alter("RESYNC TABLE tenant_9.orders")
    replica.until_copied("tenant_9.orders", generation)
    assert replica.relation("tenant_9.orders").whose == "tenant_2", "what its rows have been since it joined"
    replica.assert_own("tenant_1.orders_old", "tenant_9.orders")


REFUSED = [
    ("gather = 'a.* (b), a'", "22023", "invalid value for parameter"),
    ("gather = 'tenant_*.* (tenants)', source = 'x'", "42601", "mutually exclusive"),
    ("gather = 'tenant_*.* (tenants)', dropped_columns = drop", "42601", "mutually exclusive"),
    ("gather = 'tenant_*.* (tenants)', copy_data = false", "0A000", "needs a copy"),
    ("gather = 'tenant_*.* (tenants)', mode = history", "0A000", "cannot be gathered and have mode = history"),
    ("gather = 'tenant_*.* (tenants)', mode = 'tenant_1.items (scd2)'", "0A000", "cannot be gathered and have mode"),
    ("gather = 'tenant_*.* (tenants)', partition_by = 'tenant_2.orders (n)'", "0A000", "have partition_by"),
    # Some rows would be a source's, and some all.
    ("gather = 'tenant_1.* (tenant_2)'", "42710", 'is that of relation "'),
    ("gather = 'tenant_*.* (one.all)'", "55000", "has the key"),
]


@pytest.mark.parametrize(("options", "sqlstate", "message"), REFUSED)
def test_refused(replica: Gathered, options: str, sqlstate: str, message: str) -> None:
    for schema in BOTH:
        replica.execute(f"CREATE SCHEMA {schema}; {TABLES.format(schema)}")
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    replica.assert_refused(options, sqlstate, message)
    assert replica.slots() == []


def test_columns_that_do_not_fit_are_refused(replica: Gathered) -> None:
    """By the table that comes second, before any row does."""
    replica.execute(
        "CREATE SCHEMA tenant_1; CREATE SCHEMA tenant_2; CREATE TABLE tenant_1.orders (id int PRIMARY KEY, v text)",
        "CREATE TABLE tenant_2.orders (id int PRIMARY KEY, v int); CREATE PUBLICATION p FOR ALL TABLES",
    )
    error = replica.refused("gather = 'tenant_*.* (tenants)'")
    assert 'column "v" of table "tenant_2.orders" does not fit' in error.message
