"""rename: columns that have another name in the Delta table than at the publisher."""

from __future__ import annotations

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pubsub.backend import users
from pubsub.backend.scram import Verifier
from pubsub.delta.table import TargetTable
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.read_table import ReadTable
from pubsub.server.backend import NodeBackend
from pubsub.server.doors import Doors
from pubsub.settings import Settings
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import choose_copier, chunk_reader, window
from tests.support.replica import Replica, wait_until

SETUP = (
    'CREATE TABLE users (id int PRIMARY KEY, email text, name text, "Odd" int); ALTER TABLE users ALTER email SET STORAGE EXTERNAL;'
    "CREATE TABLE logins (who text, at int, ip text); ALTER TABLE logins REPLICA IDENTITY FULL;"
    "INSERT INTO users SELECT g, repeat('e', 4000) || g, 'n' || g, g % 3 FROM generate_series(1, 9) g;"
    "INSERT INTO logins SELECT 'w' || g % 2, g % 3, 'x' FROM generate_series(1, 9) g; CREATE PUBLICATION p FOR TABLE users, logins"
)
RENAME = 'public.users (id user_id, email mail, "Odd" "an odd one"), public.logins (who name, ip who)'
USERS = {"id": "user_id", "email": "mail", "name": "name", "Odd": "an odd one"}
LOGINS = {"who": "name", "at": "at", "ip": "who"}
CHANGES = (
    # A key, values that are not sent, and values under a new key.
    "INSERT INTO users VALUES (10, 'short', NULL, 1); UPDATE users SET name = 'changed' WHERE id < 4; DELETE FROM users WHERE id = 9",
    "UPDATE users SET id = id + 100 WHERE id < 3; UPDATE users SET email = 'other' WHERE id = 5",
    "UPDATE logins SET ip = 'y' WHERE at = 2; DELETE FROM logins WHERE at = 1; INSERT INTO logins VALUES ('z', 7, NULL)",
)


def columns(replica: Replica, table: str) -> list[str]:
    return [field.name for field in DeltaTable(replica.path(table)).schema().fields]


def assert_renamed(replica: Replica, table: str, names: dict[str, str], *, caught_up: bool = True) -> None:
    """Check that the Delta table has the publisher's rows; `names`: of its columns there and here, in order."""
    if caught_up:
        replica.caught_up()
    assert columns(replica, table) == [*names.values()]
    listed = ", ".join(f'"{name}"' for name in names)
    wanted = replica.query(f"SELECT {listed} FROM {table}")
    found = [tuple(row[name] for name in names.values()) for row in replica.rows(table)]
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


def outcomes(replica: Replica, *, repair: bool = False) -> dict[str, str]:
    report = replica.node.run(replica.node._node.verify(replica.name, (), repair=repair))
    return {one.relation: one.outcome for one in report.tables}


def test_columns_have_other_names(replica: Replica) -> None:
    """Copied, changed, and altered at the publisher."""
    replica.execute(SETUP)
    replica.subscribe(rename=f"'{RENAME}'")
    for statements in ((), CHANGES):
        replica.execute(*statements)
        assert_renamed(replica, "users", USERS)
        assert_renamed(replica, "logins", LOGINS, caught_up=False)
    (row,) = replica.node.fetch("SELECT renamed FROM pg_subscription_rel WHERE relation = 'public.users'")
    assert row["renamed"] == 'id user_id, email mail, "Odd" "an odd one"'
    assert replica.node.fetch("SELECT mail, name FROM users WHERE user_id = 5") == [{"mail": "other", "name": "n5"}]

    # The chosen names stay; others follow the publisher's.
    replica.execute(
        "ALTER TABLE users RENAME email TO name_; ALTER TABLE users RENAME name TO email; ALTER TABLE users RENAME name_ TO name;"
        "ALTER TABLE users ADD COLUMN more int DEFAULT 5; UPDATE users SET email = 'n', name = 'e' WHERE id = 6",
    )
    names = {"id": "user_id", "name": "mail", "email": "email", "Odd": "an odd one", "more": "more"}
    assert_renamed(replica, "users", names)
    (row,) = replica.node.fetch("SELECT renamed FROM pg_subscription_rel WHERE relation = 'public.users'")
    assert row["renamed"] == 'id user_id, name mail, "Odd" "an odd one"'
    assert outcomes(replica) == {"public.users": "equal", "public.logins": "equal"}


@pytest.mark.full
def test_a_column_takes_a_name_that_another_one_has(replica: Replica) -> None:
    """The subscription waits until the option gives it one of its own."""
    replica.execute(SETUP)
    replica.subscribe(rename=f"'{RENAME}'")
    assert_renamed(replica, "users", USERS)
    replica.execute("ALTER TABLE users ADD COLUMN \"Mail\" int; INSERT INTO users VALUES (20, 'e', 'n', 1, 3)")
    assert 'columns "email" and "Mail" of table "public.users" would have one name here, "Mail"' in replica.error()
    replica.alter('SET (rename = \'public.users ("Mail" letter), public.logins (at "when")\')')
    assert_renamed(replica, "users", USERS | {"Mail": "letter"})
    replica.execute("UPDATE users SET \"Mail\" = 9, email = 'again' WHERE id = 20")
    assert_renamed(replica, "users", USERS | {"Mail": "letter"})
    assert_renamed(replica, "logins", LOGINS)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"binary": "true"},
        {"copied": "by a job"},
        {"table_properties": "'* (delta.enableChangeDataFeed = true)'"},
        {"partition_by": "'public.users (\"an odd one\")'", "cluster_by": "'public.logins (who)'"},
        {"types": "'public.users.email text'", "deletes": "'public.users (soft)'"},
        {"mask": "'* (email redact)'", "exclude": "'* (at)'"},
    ],
    ids=str,
)
def test_beside_other_options(replica: Replica, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those about how a table lies go by the Delta table's names, the others by the publisher's."""
    if options.pop("copied", ""):
        monkeypatch.setattr(choose_copier, "LEAST_JOB_BYTES", 1)
    replica.execute(SETUP)
    replica.subscribe(rename=f"'{RENAME}'", **options)
    for statements in ((), CHANGES):
        replica.execute(*statements)
        if "mask" in options:
            replica.caught_up()
            assert {row["mail"] for row in replica.rows("users")} == {"***"}
            assert columns(replica, "logins") == ["name", "who"]
        elif "deletes" in options:
            replica.caught_up()
            live = [
                row["user_id"] for row in replica.rows("users", "user_id FROM delta_t WHERE _pubsub_deleted_at IS NULL")
            ]
            assert sorted(live) == [row[0] for row in replica.query("SELECT id FROM users ORDER BY id")]
        else:
            assert_renamed(replica, "users", USERS)
            assert_renamed(replica, "logins", LOGINS, caught_up=False)
    assert set(outcomes(replica).values()) == {"equal"}
    if "partition_by" in options:
        assert DeltaTable(replica.path("users")).metadata().partition_columns == ["an odd one"]
        replica.assert_read_alike("logins")  # DuckDB reads NULL for a partition column that is mapped (docs/delta.md)
    else:
        replica.assert_read_alike("users", "logins")


@pytest.mark.full
def test_names_stay_through_copies_until_somebody_asks(replica: Replica) -> None:
    """Copies that nobody asked for, RESYNC TABLE with the same text and with another one, and a table that is made anew."""
    replica.execute(SETUP)
    replica.subscribe(rename=f"'{RENAME}'", on_slot_loss="resync")
    assert_renamed(replica, "users", USERS)
    before = replica.relation("users").copy_generation
    replica.execute(
        "ALTER TABLE users RENAME email TO contact; ALTER TABLE users ALTER name TYPE int USING length(name);"
        "UPDATE users SET name = 7 WHERE id = 1"
    )
    replica.until_copied("users", before)
    names = {"id": "user_id", "contact": "mail", "name": "name", "Odd": "an odd one"}
    assert_renamed(replica, "users", names)
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    assert_renamed(replica, "users", names)
    # Another text holds from RESYNC TABLE on.
    replica.alter("SET (rename = 'public.users (contact post)')")
    before = replica.relation("users").copy_generation
    replica.execute(
        "ALTER TABLE users ALTER name TYPE text USING 'n' || name; INSERT INTO users VALUES (30, 'c', 'n', 1)"
    )
    replica.until_copied("users", before)
    assert_renamed(replica, "users", names)
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    names = {"id": "id", "contact": "post", "name": "name", "Odd": "Odd"}
    assert_renamed(replica, "users", names)
    replica.execute("ALTER TABLE users RENAME contact TO other; UPDATE users SET other = 'o', name = 'm' WHERE id = 30")
    names = {"id": "id", "other": "post", "name": "name", "Odd": "Odd"}
    assert_renamed(replica, "users", names)
    # A table that is made anew while the slot is lost has the names that the earlier one had.
    replica.execute(
        'DROP TABLE users; CREATE TABLE users ("Odd" int, name text, id int PRIMARY KEY, other text);'
        "INSERT INTO users VALUES (1, 'n', 1, 'o');"
        "ALTER PUBLICATION p ADD TABLE users"
    )
    replica.drop_slot()
    oid = replica.query("SELECT 'users'::regclass::oid::int")[0][0]
    wait_until(lambda: replica.relation("users").relid == oid and replica.states()["public.users"] == "r", "the copy")
    replica.execute("INSERT INTO users VALUES (2, 'm', 2, 'p')")
    assert_renamed(replica, "users", names)
    assert_renamed(replica, "logins", LOGINS)


@pytest.mark.full
def test_names_meet_in_one_table_alone(replica: Replica) -> None:
    """on_table_error = isolate: a column that takes a name stops its table, and RESYNC TABLE under another text goes on."""
    replica.execute(SETUP)
    replica.subscribe(rename=f"'{RENAME}'", on_table_error="isolate")
    assert_renamed(replica, "users", USERS)
    replica.execute("ALTER TABLE users RENAME name TO mail; UPDATE users SET mail = 'm' WHERE id = 1")
    replica.execute("UPDATE logins SET ip = 'other'")
    wait_until(lambda: replica.relation("users").stopped, "the table to stop")
    assert 'columns "email" and "mail" of table "public.users" would have one name here, "mail"' in str(
        replica.relation("users").error
    )
    assert_renamed(replica, "logins", LOGINS)
    replica.alter("SET (rename = 'public.users (email post)')")
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    assert_renamed(replica, "users", {"id": "id", "email": "post", "mail": "mail", "Odd": "Odd"})


@pytest.mark.full
def test_a_history_with_other_names(replica: Replica) -> None:
    """A column that has a name which mode = history needs may have another one here."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, _pubsub_op text); INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION p FOR TABLE t"
    )
    assert "has a name that mode = history needs" in replica.refused("mode = history").message
    replica.subscribe(mode="history", rename="'public.t (_pubsub_op op, id ident)'")
    replica.until_ready()
    replica.execute("UPDATE t SET _pubsub_op = 'b'; ALTER TABLE t RENAME _pubsub_op TO o; UPDATE t SET o = 'c', id = 2")
    replica.caught_up()
    found = replica.rows("t", "* FROM delta_t ORDER BY _pubsub_lsn")
    assert [(row["ident"], row["op"]) for row in found if row["_pubsub_op"] != "delete"][-1] == (2, "c")
    assert {row["op"] for row in found} >= {"a", "b", "c"}


@pytest.mark.full
def test_rows_that_differ_are_copied_anew(replica: Replica) -> None:
    """verify shows the Delta table's names, and --repair finds rows by a renamed key, and without a key."""
    replica.execute(SETUP)
    replica.subscribe(rename=f"'{RENAME}'")
    replica.caught_up()
    spark = replica.node.spark.session
    spark.sql(f"UPDATE delta.`{replica.path('users')}` SET mail = 'spoilt' WHERE user_id = 1")
    spark.sql(f"DELETE FROM delta.`{replica.path('users')}` WHERE user_id = 2")
    spark.sql(f"UPDATE delta.`{replica.path('logins')}` SET at = 77 WHERE at = 1")
    verify = replica.node._node.verify
    (report, _) = replica.node.run(verify(replica.name, ("users", "logins"))).tables
    assert {(str(one.key), one.kind, *(one.delta or ())) for one in report.shown} == {
        ("{'user_id': '1'}", "different", "mail"),
        ("{'user_id': '2'}", "missing"),
    }
    found = replica.node.run(verify(replica.name, (), repair=True)).tables
    assert all(one.repaired for one in found), found
    assert_renamed(replica, "users", USERS)
    assert_renamed(replica, "logins", LOGINS)


@pytest.mark.full
def test_those_who_follow_the_delta_table_see_its_names(replica: Replica, stock_server: EmbeddedPostgres) -> None:
    """psql's \\d, a query with a parameter, and a stock subscriber of the Delta table."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v varchar(9)); INSERT INTO t VALUES (1, 'v'); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(rename="'public.t (id ident, v value)'")
    replica.caught_up()
    home, node = replica.node.home, replica.node
    (home / "followers").write_text(users.line("follower", Verifier.of_password("secret", iterations=1), "replication"))
    (home / "followers").chmod(0o600)
    settings = Settings.read({"walsender": {"listen": "127.0.0.1:0", "auth_file": "followers"}}, home)
    doors = node.run(Doors.open(settings, NodeBackend(settings, node._node)))
    assert doors.place is not None
    host, _, port = doors.place.rpartition(":")
    name = f"{replica.database.name}_lake"
    stock_server.create_database(name)
    try:
        with psycopg.connect(f"host={home} dbname=pubsub user=me", autocommit=True) as connection:
            kinds = connection.execute(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
                " WHERE attrelid = 'public.t'::regclass AND attnum > 0 ORDER BY attnum"
            ).fetchall()
            assert kinds == [("ident", "integer"), ("value", "character varying(9)")]
            assert connection.execute("SELECT * FROM t WHERE value = %s", ["v"]).fetchall() == [(1, "v")]
            connection.execute("CREATE PUBLICATION lake FOR ALL TABLES")
        stock_server.execute("CREATE TABLE t (ident int PRIMARY KEY, value text)", name)
        conninfo = f"host={host} port={port} dbname=pubsub user=follower password=secret"
        stock_server.execute(f"CREATE SUBSCRIPTION lake CONNECTION '{conninfo}' PUBLICATION lake", name)
        wait_until(lambda: stock_server.query("SELECT * FROM t", name) == [(1, "v")], "the copy")
        replica.execute("UPDATE t SET id = 2, v = 'w'")
        replica.caught_up()
        wait_until(lambda: stock_server.query("SELECT * FROM t", name) == [(2, "w")], "the change")
    finally:
        stock_server.execute("DROP SUBSCRIPTION IF EXISTS lake", name)
        stock_server.drop_database(name)
        node.run(doors.close())


def test_rows_are_read_anew_by_the_publishers_names(database: Database) -> None:
    """By a window: the keys that it looks for, and the rows that it gets, have the Delta table's."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, w text); INSERT INTO t VALUES (1, 'v', 'w'), (2, 'x', 'y')"
    )
    read = ReadTable("public", "t", ("id", "v", "w"), True, here=("w", "id", "v"))
    source = chunk_reader.CopySource(database.conninfo, "anew", read, "", None)
    target = TargetTable(
        "", pa.schema([pa.field("w", pa.int32(), False), ("id", pa.string()), ("v", pa.string())]), ("w",), "t"
    )
    found, _ = window.read_again(source, target, pa.table({"w": pa.array([2], pa.int32())}), {"id": "integer"}, Cut())
    assert found.to_pylist() == [{"w": 2, "id": "x", "v": "y"}]


@pytest.mark.full
def test_what_cannot_be_renamed_is_refused(replica: Replica) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, v text, w text); CREATE PUBLICATION p FOR TABLE t")
    for options, sqlstate, message in (
        ("rename = 'public.u (id x)'", "42P01", 'rename names tables that are not published: "public.u"'),
        ("rename = 'public.t (x y)'", "42703", 'column "x" of table "public.t" in subscription option rename'),
        ("rename = 'public.* (x y)'", "42703", 'column "x" of table "public.*" in subscription option rename'),
        ("rename = 'public.t (v W)'", "0A000", 'columns "v" and "w" of table "public.t" would have one name here, "w"'),
        ("rename = '* (v \"ID\")'", "0A000", 'columns "id" and "v" of table "public.t" would have one name here, "ID"'),
        (
            "rename = '* (v _pubsub_lsn)', metadata = '* (lsn)'",
            "0A000",
            'column "_pubsub_lsn" of table "public.t" has a name that metadata needs',
        ),
        ("rename = '* (v _pubsub_lsn)', mode = history", "0A000", "has a name that mode = history needs"),
        ("rename = 'public.t (v)'", "22023", 'invalid value for parameter "rename"'),
        ("rename = 'public.t (v a, w a)'", "22023", 'invalid value for parameter "rename"'),
        ("rename = '* (v a)', partition_by = 'public.t (v)'", "42703", "in subscription option partition_by"),
        ("rename = '* (v a)', schema_changes = refuse", "42601", "schema_changes = refuse and rename = … are"),
        ("rename = '* (v a)', copy_data = false", "0A000", 'need a copy, or a Delta table, of table "public.t"'),
    ):
        replica.assert_refused(options, sqlstate, message)
    assert replica.slots() == []
