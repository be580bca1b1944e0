"""The publisher's ALTER TABLE while the subscription runs: docs/schema-changes.md, row by row, on a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.compare import compare_tables
from tests.support.replica import Replica, read, wait_until

TABLE = """
CREATE TABLE a (id int PRIMARY KEY, t varchar(20), n numeric(10,2) DEFAULT 0);
INSERT INTO a SELECT g, 'row ' || g, g / 7.0 FROM generate_series(1, 500) g;
CREATE PUBLICATION p FOR TABLE a;
"""


@pytest.fixture(autouse=True, params=["from commits", pytest.param("from checkpoints", marks=pytest.mark.full)])
def each_log(request: pytest.FixtureRequest, replica: Replica) -> Iterator[None]:
    """Logs of commits alone, and logs with a checkpoint every third commit, which every reader reads in the end."""
    if request.param == "from checkpoints":
        request.getfixturevalue("frequent_checkpoints")
    yield
    if request.param == "from checkpoints":
        replica.assert_read_alike(*replica.states())


def subscribed(replica: Replica, ddl: str = TABLE, **options: object) -> None:
    replica.execute(ddl)
    replica.subscribe(**options)
    replica.assert_equal("a")


def write(replica: Replica, column: str | None = None, value: str = "'w'") -> None:
    """Change existing rows, add rows and delete rows; `column` gets `value` in some."""
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


@pytest.mark.full
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
        # Elements of such arrays are not divided by commas.
        "ALTER TABLE a ADD COLUMN e box DEFAULT '(3,4),(1,2)', ADD COLUMN f box[] DEFAULT '{(3,4),(1,2);(1,1),(0,0)}',"
        " ADD COLUMN g text[] DEFAULT '{a,NULL,\"b, c\"}', ADD COLUMN h text DEFAULT '';"
        "ALTER TABLE a ALTER c SET DEFAULT 'later';"
        "UPDATE a SET t = 'after' WHERE id BETWEEN 15 AND 30; INSERT INTO a VALUES (901, 'after', 1); COMMIT"
    )
    write(replica, "c")
    replica.assert_equal("a")
    assert copies(replica) == 1


@pytest.mark.full
@pytest.mark.parametrize("dropped_columns", ["keep", "drop"])
def test_a_partition_column_that_is_dropped(replica: Replica, dropped_columns: str) -> None:
    """It is not followed, and RESYNC TABLE is the way out."""
    subscribed(replica, dropped_columns=dropped_columns, partition_by="'public.a (t)'")
    replica.execute("ALTER TABLE a DROP t", "INSERT INTO a VALUES (1000, 7)")
    if dropped_columns == "drop":
        assert "it is partitioned by t" in replica.error()
    replica.alter("RESYNC TABLE a")
    replica.until_copied("a", 1)
    replica.execute("INSERT INTO a VALUES (1001, 7)")
    write(replica)
    replica.assert_equal("a")
    assert columns(replica) == (["id", "n"] if dropped_columns == "drop" else ["id", "t", "n"])


@pytest.mark.full
def test_a_dropped_column_of_a_table_that_only_spark_can_write(replica: Replica) -> None:
    subscribed(replica, dropped_columns="drop")
    replica.node.spark.session.sql(f"ALTER TABLE delta.`{replica.path('a')}` ADD CONSTRAINT c CHECK (id > 0)")
    replica.execute("ALTER TABLE a DROP t", "INSERT INTO a VALUES (1000, 7)")
    assert "cannot be altered" in replica.error()
    replica.alter("RESYNC TABLE a")
    replica.until_copied("a", 1)
    replica.execute("INSERT INTO a VALUES (1001, 7)")
    replica.assert_equal("a")
    assert columns(replica) == ["id", "n"]


@pytest.mark.parametrize("dropped_columns", [pytest.param("keep", marks=pytest.mark.full), "drop"])
def test_a_column_that_a_copy_does_not_find_any_more(replica: Replica, dropped_columns: str) -> None:
    """It is the publisher's all the same: it is dropped, or gives its name to a new one."""
    subscribed(replica, dropped_columns=dropped_columns)
    replica.execute("ALTER TABLE a DROP t")
    for copy in (1, 2):
        replica.alter("RESYNC TABLE a")
        replica.until_copied("a", copy)
        replica.assert_equal("a")
        assert columns(replica) == (["id", "n"] if dropped_columns == "drop" else ["id", "t", "n"])
        replica.execute(f"INSERT INTO a VALUES ({copy}000, 7)")
        replica.assert_equal("a")
    replica.execute("ALTER TABLE a ADD t int DEFAULT 7", "INSERT INTO a VALUES (1001, 8)")
    write(replica, "t", "8")
    replica.assert_equal("a")
    assert columns(replica) == ["id", "n", "t"]
    assert copies(replica) == 3


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
    # The name may come again as another column.
    replica.execute("ALTER TABLE a ADD COLUMN t int DEFAULT 7", "UPDATE a SET t = 8 WHERE id = 4")
    write(replica, "t", "9")
    replica.assert_equal("a")
    assert columns(replica) == ["id", "n", "t"]
    assert copies(replica) == 1


def test_renamed_columns(replica: Replica, spark: Spark) -> None:
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
    # Spark reads the mapped columns in files from before and after, with their deletion vectors.
    read = spark.session.read.format("delta").load(replica.path("a"))
    expected = replica.query("SELECT number, o, n, u FROM a ORDER BY number")
    assert [tuple(row) for row in read.orderBy("number").collect()] == expected


#: Each has a table of its own in one subscription; `a` stands for the table.
COPIED_AGAIN = (
    "ALTER TABLE a ADD COLUMN c float8 DEFAULT random()",
    "ALTER TABLE a ADD COLUMN c int GENERATED BY DEFAULT AS IDENTITY",
    "ALTER TABLE a ADD COLUMN c int DEFAULT 5; ALTER TABLE a ALTER c TYPE bigint",
    "ALTER TABLE a ALTER id TYPE bigint",
    "ALTER TABLE a ALTER t TYPE int USING substr(t, 5)::int",
    "ALTER TABLE a ALTER n TYPE numeric(20,5)",
    "ALTER TABLE a ALTER n TYPE numeric(10,2) USING n + 100",
    "TRUNCATE a; ALTER TABLE a ADD c int; INSERT INTO a VALUES (1, 'x', 1, 2)",
    "ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE a ADD PRIMARY KEY (t); UPDATE a SET id = 3 WHERE id < 9",
)
TAKEN = (
    ("ALTER TABLE a ALTER n TYPE numeric(20,2)", "UPDATE a SET n = 123456789012.5 WHERE id = 1"),
    ("ALTER TABLE a ALTER t TYPE text", "UPDATE a SET t = repeat('x', 999) WHERE id = 1"),
    ("ANALYZE a", "VACUUM FULL a"),
    ("ALTER TABLE a ALTER n SET NOT NULL", "UPDATE a SET n = 2 WHERE id = 1"),
    ("ALTER TABLE a ALTER t SET DEFAULT 'x'", "INSERT INTO a VALUES (1000)"),
    ("ALTER TABLE a ADD COLUMN g int GENERATED ALWAYS AS (id + 1) STORED", "UPDATE a SET n = 2 WHERE id = 1"),
    ("ALTER TABLE a ADD COLUMN x int; ALTER TABLE a DROP COLUMN x", "UPDATE a SET n = 2 WHERE id = 1"),
    ("ALTER TABLE a REPLICA IDENTITY FULL", "UPDATE a SET n = 2 WHERE id = 1; DELETE FROM a WHERE id = 2"),
    (
        "ALTER TABLE a ALTER t SET NOT NULL, ALTER t SET DEFAULT 'd', ADD UNIQUE (t), REPLICA IDENTITY USING INDEX a_t_key",
        "UPDATE a SET t = 'other' WHERE id = 1; UPDATE a SET id = 7000 WHERE id = 2; DELETE FROM a WHERE id = 3",
    ),
    ("ALTER TABLE a REPLICA IDENTITY NOTHING; INSERT INTO a VALUES (-1)", "ALTER TABLE a REPLICA IDENTITY DEFAULT"),
    ("TRUNCATE a; ALTER TABLE a DROP COLUMN n", "INSERT INTO a VALUES (1, 'a')"),
)


def many(replica: Replica, count: int, **options: object) -> list[str]:
    """Make `count` tables like `a` and subscribe to them; return their names."""
    names = [f"a{number}" for number in range(count)]
    replica.execute(*(_for(TABLE.split("CREATE PUBLICATION", maxsplit=1)[0], name) for name in names))
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}")
    replica.subscribe(**options)
    replica.assert_equal(*names)
    return names


def _for(statement: str, name: str) -> str:
    return re.sub(r"\ba(?=\b|_)", name, statement)


@pytest.mark.full
def test_changes_that_need_a_new_copy(replica: Replica) -> None:
    names = many(replica, len(COPIED_AGAIN))
    for name, alter in zip(names, COPIED_AGAIN, strict=True):
        replica.execute(_for(f"UPDATE a SET n = 1 WHERE id < 100; {alter}; UPDATE a SET n = 2 WHERE id < 50", name))
    replica.assert_equal(*names)
    replica.execute(*(_for("UPDATE a SET n = 3 WHERE n = 2; DELETE FROM a WHERE n = 1", name) for name in names))
    replica.assert_equal(*names)
    assert {name: replica.relation(name).copy_generation for name in names} == dict.fromkeys(names, 2)


@pytest.mark.full
def test_a_key_that_is_written_otherwise_though_its_values_are_the_same(replica: Replica) -> None:
    """No row is rewritten, but as inet 10.1.2.3/32 is 10.1.2.3: changes of older rows once found none."""
    subscribed(
        replica,
        "CREATE DOMAIN net AS cidr; CREATE TABLE a (id net PRIMARY KEY, n int); CREATE PUBLICATION p FOR TABLE a;"
        "INSERT INTO a VALUES ('10.1.2.3', 1), ('10.0.0.0/8', 2), ('10.1.2.4', 3), ('::1', 4)",
    )
    replica.execute(
        "ALTER TABLE a ALTER id TYPE inet",
        "UPDATE a SET n = 9 WHERE n < 3; DELETE FROM a WHERE n = 4; INSERT INTO a VALUES ('10.1.2.5', 5)",
    )
    replica.assert_equal("a")
    assert copies(replica) == 2
    assert replica.relation("a").state == "r"


@pytest.mark.full
def test_changes_that_are_followed_without_a_new_copy(replica: Replica) -> None:
    names = many(replica, len(TAKEN))
    replica.execute(*(_for("UPDATE a SET n = 1 WHERE id < 100", name) for name in names))
    replica.caught_up()
    for name, (alter, again) in zip(names, TAKEN, strict=True):
        replica.execute(_for(alter, name), _for(again, name))
    for name in names:
        replica.execute(
            _for(
                "UPDATE a SET t = 'row of ' || id WHERE id % 11 = 3; UPDATE a SET id = id + 100000 WHERE id % 50 = 7;"
                "INSERT INTO a (id) SELECT max(id) + 1 FROM a; DELETE FROM a WHERE id % 60 = 9",
                name,
            )
        )
    replica.assert_equal(*names)
    assert {name: replica.relation(name).copy_generation for name in names} == dict.fromkeys(names, 1)


def test_refused_as_by_postgresql(replica: Replica) -> None:
    subscribed(replica, schema_changes="refuse")
    replica.execute("ALTER TABLE a DROP COLUMN n", "INSERT INTO a VALUES (2000, 'x')")
    replica.assert_equal("a")
    replica.execute("ALTER TABLE a ADD COLUMN c int", "INSERT INTO a VALUES (2001, 'x', 1)")
    assert 'logical replication target relation "public.a" is missing replicated column: "c"' in replica.error()
    replica.alter("RESYNC TABLE a")
    replica.execute("INSERT INTO a VALUES (2002, 'x', 1)")
    replica.assert_equal("a")
    assert columns(replica) == ["id", "t", "c"]


#: A snapshot from before must not show these changes; none of them copies the table again.
AFTERWARDS = (
    "ALTER TABLE a ADD COLUMN c int DEFAULT 1",
    "ALTER TABLE a RENAME t TO u",
    "ALTER TABLE a RENAME id TO x; ALTER TABLE a RENAME t TO id; ALTER TABLE a RENAME x TO t",
    "ALTER TABLE a DROP n; ALTER TABLE a ADD n text",
    "ALTER TABLE a ALTER n TYPE numeric(20,2)",
    "ALTER TABLE a ALTER t SET NOT NULL, DROP CONSTRAINT a_pkey; ALTER TABLE a ADD PRIMARY KEY (t)",
    "ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE a REPLICA IDENTITY FULL; ALTER TABLE a DROP t",
)


@pytest.mark.full
def test_a_snapshot_before_the_change_shows_the_old_columns_and_rows(replica: Replica) -> None:
    from deltalake import DeltaTable, QueryBuilder

    names = many(replica, len(AFTERWARDS), dropped_columns="drop")
    replica.execute(*(_for("UPDATE a SET n = 1 WHERE id < 100; DELETE FROM a WHERE id = 9", name) for name in names))
    replica.assert_equal(*names)
    (lsn,) = replica.query("SELECT pg_current_wal_lsn()")[0]
    before = {name: replica.query(f"SELECT * FROM {name} ORDER BY id") for name in names}
    for name, alter in zip(names, AFTERWARDS, strict=True):
        replica.execute(
            _for(alter, name), _for("UPDATE a SET n = NULL WHERE n = 1", name) if " n" not in alter else "SELECT"
        )
        replica.execute(f"DELETE FROM {name} WHERE ctid IN (SELECT ctid FROM {name} LIMIT 50)")
    replica.assert_equal(*names)
    assert {name: replica.relation(name).copy_generation for name in names} == dict.fromkeys(names, 1)
    shown = replica.node.run(replica.node._node.snapshot(replica.name, at=lsn))
    for name in names:
        version, path = shown.tables[f"public.{name}"]
        table = DeltaTable(path, version=version)
        assert [field.name for field in table.schema().fields] == ["id", "t", "n"]
        rows = read(QueryBuilder().register("old", table).execute("SELECT * FROM old ORDER BY id"))
        assert [tuple(row.values()) for row in rows] == before[name]


#: No row of the table is written after these.
UNFOLLOWED = (
    ("ALTER TABLE a ADD COLUMN c int DEFAULT 1; ALTER TABLE a RENAME t TO u", 1),
    ("ALTER TABLE a RENAME id TO x; ALTER TABLE a RENAME t TO id; ALTER TABLE a RENAME x TO t", 1),
    ("ALTER TABLE a DROP t", 1),
    ("ALTER TABLE a ALTER n TYPE numeric(20,2)", 1),
    ("ALTER TABLE a ALTER id TYPE bigint", 2),
    ("ALTER TABLE a ADD COLUMN c float8 DEFAULT random()", 2),
)


@pytest.mark.full
def test_refresh_brings_columns_that_no_row_has_followed(replica: Replica) -> None:
    names = many(replica, len(UNFOLLOWED) + 1, dropped_columns="drop")
    *altered, busy = names
    replica.execute(*(_for(alter, name) for name, (alter, _) in zip(altered, UNFOLLOWED, strict=True)))
    replica.caught_up()
    assert {name: replica.relation(name).copy_generation for name in names} == dict.fromkeys(names, 1)
    replica.alter("REFRESH PUBLICATION")

    def brought() -> bool:
        # Rows of another table, so that the stream moves on and batches come between the two looks.
        replica.execute(f"UPDATE {busy} SET n = n + 1 WHERE id < 9")
        return not any(compare_tables(replica.conninfo, f"public.{name}", replica.path(name)) for name in altered)

    wait_until(brought, "the columns to come")
    assert [replica.relation(name).copy_generation for name in altered] == [copies for _, copies in UNFOLLOWED]
    wait_until(lambda: not any(r.look_again for r in replica.node.relations(replica.name)), "nobody to ask any more")
    for name in altered:
        replica.execute(f"DELETE FROM {name} WHERE ctid IN (SELECT ctid FROM {name} LIMIT 50)")
    replica.assert_equal(*names)
    # The same with nothing else in the stream.
    replica.execute(f"ALTER TABLE {busy} ADD COLUMN last text DEFAULT 'x'")
    replica.alter("REFRESH PUBLICATION")
    wait_until(
        lambda: compare_tables(replica.conninfo, f"public.{busy}", replica.path(busy)) is None, "the column to come"
    )


@pytest.mark.full
def test_partitions_that_are_tables_of_their_own(replica: Replica) -> None:
    """Without publish_via_partition_root each partition is a table of its own."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text) PARTITION BY RANGE (id);"
        "CREATE TABLE a_1 PARTITION OF a FOR VALUES FROM (0) TO (100); CREATE TABLE a_2 PARTITION OF a FOR VALUES FROM (100) TO (200);"
        "CREATE TABLE b (LIKE a INCLUDING INDEXES) PARTITION BY RANGE (id); INSERT INTO a SELECT g, g FROM generate_series(1, 150) g;"
        "CREATE PUBLICATION p FOR TABLE a, b"
    )
    replica.subscribe()
    replica.assert_equal("a_1", "a_2")
    replica.execute(
        "ALTER TABLE a ADD COLUMN c int DEFAULT 7; UPDATE a SET c = 8 WHERE id < 20",
        "UPDATE a SET id = id + 100 WHERE id BETWEEN 91 AND 99; ALTER TABLE a RENAME t TO u; UPDATE a SET u = 'x' WHERE id % 7 = 3",
        "CREATE TABLE a_3 PARTITION OF a FOR VALUES FROM (200) TO (300); INSERT INTO a VALUES (200, 'early', 1)",
    )
    replica.alter("REFRESH PUBLICATION")
    replica.execute("INSERT INTO a VALUES (201, 'late', 1)", "DELETE FROM a WHERE id < 5")
    replica.assert_equal("a_1", "a_2", "a_3")
    # A partition moves to another parent, which has another name for a column.
    replica.execute(
        "ALTER TABLE a DETACH PARTITION a_2; ALTER TABLE b ADD COLUMN c int; ALTER TABLE a_2 RENAME u TO t;"
        "ALTER TABLE b ATTACH PARTITION a_2 FOR VALUES FROM (100) TO (200); UPDATE b SET t = 'moved' WHERE id < 120",
        "INSERT INTO b VALUES (170, 'x', 1); DELETE FROM b WHERE id = 130",
    )
    replica.assert_equal("a_1", "a_2", "a_3")
    assert {name: replica.relation(name).copy_generation for name in ("a_1", "a_2", "a_3")} == dict.fromkeys(
        ("a_1", "a_2", "a_3"), 1
    )


@pytest.mark.full
def test_renamed_tables_keep_their_rows_and_their_places(replica: Replica) -> None:
    names = many(replica, 4)
    paths = {name: replica.path(name) for name in names}
    replica.execute(
        # One table is renamed, one changes its schema, and two exchange names.
        "ALTER TABLE a0 RENAME TO b0; UPDATE b0 SET n = 3 WHERE id < 9",
        "CREATE SCHEMA s; ALTER TABLE a1 SET SCHEMA s; UPDATE s.a1 SET n = 3 WHERE id < 9",
        "UPDATE a2 SET n = 4 WHERE id = 1; ALTER TABLE a2 RENAME TO x; ALTER TABLE a3 RENAME TO a2; ALTER TABLE x RENAME TO a3;"
        "UPDATE a2 SET n = 5 WHERE id = 2; UPDATE a3 SET n = 6 WHERE id = 3",
    )
    replica.assert_equal("b0", "s.a1", "a2", "a3")
    assert [replica.path(name) for name in ("b0", "s.a1", "a3", "a2")] == list(paths.values())
    # A table is renamed, and a new table takes its name, which is none of ours.
    replica.execute(
        "ALTER TABLE b0 RENAME TO old; CREATE TABLE b0 (id int PRIMARY KEY); ALTER PUBLICATION p ADD TABLE b0;",
        "INSERT INTO b0 VALUES (77)",
        "UPDATE old SET n = 8 WHERE id = 4",
    )
    replica.assert_equal("old")
    replica.alter("REFRESH PUBLICATION")
    replica.execute("INSERT INTO b0 VALUES (78)")
    replica.execute("ALTER TABLE a2 RENAME TO later")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("old", "s.a1", "later", "a3")
    assert replica.relation("old").path == paths["a0"]


def test_a_table_that_joined_without_a_copy_is_not_copied_unasked(replica: Replica) -> None:
    replica.execute(TABLE)
    replica.subscribe(copy_data="false")
    replica.execute(
        "INSERT INTO a VALUES (1000, 'x', 1)", "ALTER TABLE a ADD c int DEFAULT 3", "INSERT INTO a VALUES (1001)"
    )
    replica.assert_equal("a", where="id > 999")
    replica.execute("ALTER TABLE a ALTER c TYPE bigint", "INSERT INTO a VALUES (1002)")
    assert 'table "public.a" was altered, and must be copied again' in replica.error()
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a")
