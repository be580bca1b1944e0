"""Publications of PostgreSQL 19 that leave out tables: FOR ALL TABLES EXCEPT (TABLE …)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deltalake import DeltaTable

from pubsub.publisher import publication
from pubsub.publisher.check import check
from pubsub.publisher.connection import Connection
from pubsub.testing.fixtures import Database, Servers, fresh
from tests.support.replica import Replica, wait_until

pytestmark = pytest.mark.full  # a server of another version than the base's


@pytest.fixture
def database(servers: Servers) -> Iterator[Database]:
    """An empty database on PostgreSQL 19."""
    yield from fresh(servers["19"])


def write_to_all(replica: Replica, first: int) -> None:
    for table in ("kept", "out", "parted", "parted_out", "child", "parent"):
        replica.execute(f"INSERT INTO {table} SELECT generate_series({first}, {first + 3})")
        replica.execute(f"UPDATE {table} SET note = 'changed' WHERE id = {first}")
        replica.execute(f"DELETE FROM {table} WHERE id = {first + 1}")
    replica.execute("TRUNCATE out, parted_out")


@pytest.mark.parametrize("via_root", ["false", "true"])
async def test_copy_apply_check_verify_and_refresh(replica: Replica, via_root: str) -> None:
    columns = "(id int PRIMARY KEY, note text)"
    replica.execute(
        f"CREATE TABLE kept {columns}; CREATE TABLE out {columns}; CREATE TABLE parent {columns}; "
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)",
        *(
            f"CREATE TABLE {name} {columns} PARTITION BY RANGE (id); "
            f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES FROM (0) TO (5); "
            f"CREATE TABLE {name}_2 PARTITION OF {name} DEFAULT"
            for name in ("parted", "parted_out")
        ),
        "CREATE PUBLICATION p FOR ALL TABLES EXCEPT (TABLE out, parted_out, ONLY parent) "
        f"WITH (publish_via_partition_root = {via_root})",
    )
    write_to_all(replica, 1)
    parts = {"parted"} if via_root == "true" else {"parted_1", "parted_2"}
    tables = {"kept", "child", *parts}
    findings = await check(replica.conninfo, ["p"])
    assert {one.message for one in findings if one.message.startswith("table ")} == {
        f'table "public.{name}"' for name in tables
    }
    replica.subscribe()
    replica.assert_equal(*sorted(tables))
    write_to_all(replica, 11)
    replica.assert_equal(*sorted(tables))
    assert replica.states() == {f"public.{name}": "r" for name in tables}
    report = replica.node.run(replica.node._node.verify(replica.name, ()))
    assert {one.relation: one.outcome for one in report.tables} == {f"public.{name}": "equal" for name in tables}

    # One comes, one goes.
    replica.execute("ALTER PUBLICATION p SET ALL TABLES EXCEPT (TABLE kept, parted, parent)")
    replica.alter("REFRESH PUBLICATION")
    tables = {"out", *(name.replace("parted", "parted_out") for name in parts)}
    replica.assert_equal(*sorted(tables))
    write_to_all(replica, 21)
    replica.assert_equal(*sorted(tables))
    assert set(replica.states()) == {f"public.{name}" for name in tables}


async def test_columns_of_a_table_that_one_publication_leaves_out(database: Database) -> None:
    """Generated columns that one publication publishes of all its tables are not those of a table that it leaves out."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED); CREATE TABLE other (LIKE t INCLUDING ALL); "
        "CREATE TABLE r (LIKE t INCLUDING ALL) PARTITION BY RANGE (id); CREATE TABLE part PARTITION OF r DEFAULT; "
        "CREATE PUBLICATION a FOR ALL TABLES EXCEPT (TABLE t, r) WITH (publish_generated_columns = stored); "
        "CREATE PUBLICATION b FOR TABLE t, r"
    )
    oids = dict(database.query("SELECT oid, relname FROM pg_class WHERE relname IN ('t', 'other', 'part')"))
    async with await Connection.connect(database.conninfo) as connection:
        found = await publication.published_columns(connection, ["a", "b"], oids)
        assert {oids[oid]: names for oid, names in found.items()} == {"other": ("id", "g")}
        listed = await publication.published_tables(connection, ["a", "b"])
    assert {one.name: one.attnames for one in listed} == {"t": None, "part": None, "other": ("id", "g")}


def test_a_table_that_one_publication_leaves_out_has_the_columns_of_the_other(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE TABLE r (id int, g int GENERATED ALWAYS AS (id * 2) STORED, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF r DEFAULT",
        "CREATE TABLE other (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE PUBLICATION a FOR ALL TABLES EXCEPT (TABLE t, r) WITH (publish_generated_columns = stored)",
        "CREATE PUBLICATION b FOR TABLE t, r",
    )
    replica.subscribe("a, b")
    replica.execute(*(f"INSERT INTO {table} VALUES (1)" for table in ("t", "r", "other")))
    replica.caught_up()
    # REFRESH asks for the columns, whether rows come or not.
    replica.execute(
        *(
            f"ALTER TABLE {table} ADD h int GENERATED ALWAYS AS (id * 3) STORED, ADD n int"
            for table in ("t", "r", "other")
        )
    )
    replica.alter("REFRESH PUBLICATION")
    wait_until(lambda: all("n" in columns(replica, name) for name in ("t", "part", "other")), "the new columns")
    assert columns(replica, "t") == columns(replica, "part") == ["id", "n"]
    replica.execute(*(f"INSERT INTO {table} VALUES (2)" for table in ("t", "r", "other")))
    replica.assert_equal("t", "part", columns=["id", "n"])
    replica.assert_equal("other")
    found = {name: columns(replica, name) for name in ("t", "part", "other")}
    assert found == {"t": ["id", "n"], "part": ["id", "n"], "other": ["id", "g", "h", "n"]}


def columns(replica: Replica, table: str) -> list[str]:
    return [field.name for field in DeltaTable(replica.path(table)).schema().fields]
