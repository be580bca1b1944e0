"""The publisher's ALTER TABLE while the subscription runs: what docs/schema-changes.md says, row by row, on a real server."""

from __future__ import annotations

import pytest

from tests.replica import Replica

TABLE = """
CREATE TABLE a (id int PRIMARY KEY, t text, n numeric(10,2));
INSERT INTO a SELECT g, 'row ' || g, g / 7.0 FROM generate_series(1, 500) g;
CREATE PUBLICATION p FOR TABLE a;
"""


def subscribed(replica: Replica, ddl: str = TABLE, **options: object) -> None:
    replica.execute(ddl)
    replica.subscribe(**options)
    replica.assert_equal("a")


def write(replica: Replica, column: str | None = None, value: str = "'w'") -> None:
    """Rows that were there, rows that are new, rows that go; `column` gets `value` in some."""
    changed = "" if column is None else f"UPDATE a SET {column} = {value} WHERE id % 11 = 3;"
    replica.execute(
        f"UPDATE a SET id = id + 100000 WHERE id % 50 = 7; {changed}"
        "INSERT INTO a (id) SELECT max(id) + 1 FROM a; DELETE FROM a WHERE id % 60 = 9"
    )


def columns(replica: Replica) -> list[str]:
    from deltalake import DeltaTable

    return [field.name for field in DeltaTable(replica.path("a")).schema().fields]


def copies(replica: Replica) -> int:
    return replica.relation("a").copy_generation


def test_a_column_without_a_default(replica: Replica) -> None:
    subscribed(replica)
    replica.execute("ALTER TABLE a ADD COLUMN c int", "INSERT INTO a VALUES (1000, 'x', 1, 5)")
    write(replica, "c", "id")
    replica.assert_equal("a")
    assert columns(replica) == ["id", "t", "n", "c"]
    assert copies(replica) == 1, "no row is read again"


def test_a_column_with_a_constant_default_is_in_all_rows(replica: Replica) -> None:
    subscribed(replica)
    replica.execute(
        "BEGIN; UPDATE a SET t = 'before' WHERE id < 20; INSERT INTO a VALUES (900, 'before', 1);"
        "ALTER TABLE a ADD COLUMN c text NOT NULL DEFAULT 'it''s {\"a\", b}', ADD COLUMN d timestamptz DEFAULT now();"
        "ALTER TABLE a ALTER c SET DEFAULT 'later';"
        "UPDATE a SET t = 'after' WHERE id BETWEEN 15 AND 30; INSERT INTO a VALUES (901, 'after', 1); COMMIT"
    )
    write(replica, "c")
    replica.assert_equal("a")
    assert copies(replica) == 1


@pytest.mark.parametrize("dropped_columns", ["keep", "drop"])
def test_a_dropped_column(replica: Replica, dropped_columns: str) -> None:
    subscribed(replica, dropped_columns=dropped_columns)
    replica.execute(
        "BEGIN; UPDATE a SET t = 'x' WHERE id < 9; ALTER TABLE a DROP t; UPDATE a SET n = 0 WHERE id < 5; COMMIT"
    )
    write(replica, "n", "1.5")
    replica.assert_equal("a")
    if dropped_columns == "keep":
        assert columns(replica) == ["id", "t", "n"]
        assert replica.rows("a", "t FROM delta_t WHERE id IN (1, 8, 12) ORDER BY id") == [
            {"t": "x"},
            {"t": "x"},
            {"t": "row 12"},
        ]
    else:
        assert columns(replica) == ["id", "n"]
    # The name may come again, as another column.
    replica.execute("ALTER TABLE a ADD COLUMN t int DEFAULT 7", "UPDATE a SET t = 8 WHERE id = 4")
    write(replica, "t", "9")
    replica.assert_equal("a")
    assert columns(replica) == ["id", "n", "t"]
    assert copies(replica) == 1


def test_renamed_columns(replica: Replica) -> None:
    subscribed(replica)
    replica.execute("ALTER TABLE a RENAME t TO u")
    write(replica, "u")
    replica.assert_equal("a")
    replica.execute(
        "ALTER TABLE a RENAME id TO number; ALTER TABLE a ADD o text DEFAULT 'o'",
        "UPDATE a SET number = -number WHERE number < 40",
        "BEGIN; ALTER TABLE a RENAME u TO x; ALTER TABLE a RENAME o TO u; ALTER TABLE a RENAME x TO o;"
        "UPDATE a SET u = 'swapped' WHERE number < 0; DELETE FROM a WHERE number = -1; COMMIT",
    )
    replica.assert_equal("a")
    assert columns(replica) == ["number", "o", "n", "u"]
    assert copies(replica) == 1
