"""Tables without columns, which Delta does not have: left out until they have one."""

from __future__ import annotations

import pytest

from pubsub.publisher.check import check
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, wait_until

TABLES = """
CREATE TABLE t (id int PRIMARY KEY);
CREATE TABLE nothing ();
CREATE TABLE computed (a int GENERATED ALWAYS AS (1) STORED);
INSERT INTO t VALUES (1);
INSERT INTO nothing DEFAULT VALUES;
INSERT INTO computed DEFAULT VALUES
"""


def test_left_out_until_they_have_a_column(replica: Replica) -> None:
    replica.execute(TABLES, "CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe()
    replica.assert_equal("t")
    assert set(replica.states()) == {"public.t"}
    replica.execute("INSERT INTO nothing DEFAULT VALUES; INSERT INTO computed DEFAULT VALUES; INSERT INTO t VALUES (2)")
    replica.assert_equal("t")
    replica.execute("ALTER TABLE nothing ADD COLUMN a int DEFAULT 7")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("t", "nothing")
    replica.execute("INSERT INTO nothing VALUES (8)")
    replica.assert_equal("t", "nothing")
    assert set(replica.states()) == {"public.t", "public.nothing"}


@pytest.mark.parametrize("dropped", ["keep", "drop"])
def test_the_last_column_goes(replica: Replica, dropped: str) -> None:
    """It stays until there is another, also if dropped columns are to be dropped."""
    replica.execute("CREATE TABLE t (id int); CREATE TABLE u (id int); INSERT INTO t VALUES (1)")
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe(dropped_columns=dropped)
    replica.assert_equal("t", "u")
    replica.execute("ALTER TABLE t DROP COLUMN id", "INSERT INTO t DEFAULT VALUES", "INSERT INTO u VALUES (1)")
    replica.assert_equal("u")
    assert sorted(str(row["id"]) for row in replica.rows("t")) == ["1", "None"]
    replica.execute("ALTER TABLE t ADD COLUMN n int", "INSERT INTO t VALUES (2)", "INSERT INTO u VALUES (2)")
    replica.assert_equal("u")
    replica.assert_equal("t", columns=["n"])
    assert list(replica.rows("t")[0]) == (["id", "n"] if dropped == "keep" else ["n"])


def test_the_last_column_of_rows_without_a_key_goes(replica: Replica) -> None:
    """Rows that go can be told by nothing: the table is copied again, once it has a column."""
    replica.execute("CREATE TABLE t (a int); ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1), (2), (3)")
    replica.execute("CREATE TABLE u (id int)", "CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe()
    replica.assert_equal("t", "u")
    replica.execute("ALTER TABLE t DROP COLUMN a", "DELETE FROM t", "INSERT INTO u VALUES (1)")
    wait_until(lambda: replica.rows("u"), "the rows after those that are gone")
    replica.execute("ALTER TABLE t ADD COLUMN b int", "INSERT INTO t VALUES (4)")
    replica.until_ready()
    replica.assert_equal("t", "u")


async def test_check_says_so(any_database: Database) -> None:
    any_database.execute(TABLES)
    any_database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    found = [f for f in await check(any_database.conninfo, ["p"]) if "no column" in f.message]
    assert [f.severity for f in found] == ["warning", "warning"]
