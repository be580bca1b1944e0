"""mask: what stands for values in Delta tables, and that the values themselves are nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from apply.staging import stage_batch
from pubsub.backend import users
from pubsub.backend.scram import Verifier
from pubsub.delta.table import TargetTable
from pubsub.errors import PubsubError
from pubsub.masks import VARIABLE, Masks, fingerprint_of
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.read_table import ReadTable
from pubsub.server.backend import NodeBackend
from pubsub.server.doors import Doors
from pubsub.settings import Settings
from pubsub.sql.mask_rules import MaskRule
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import choose_copier, chunk_reader, window
from tests.support import corpus
from tests.support.captured_logs import captured_logs
from tests.support.masks import CLEAR, KEY, OTHER, assert_masked, assert_nowhere, hashed
from tests.support.replica import Replica, wait_until


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with captured_logs() as found:
        yield found


RULES = {
    "users": {
        "email": "hash",
        "phone": "null",
        "name": "redact",
        "card": "truncate 4",
        "born": "truncate 4",
        "big": "hash",
    },
    "accounts": {"login": "hash"},
    "logins": {"ssn": "hash", "pin": "null", "why": "redact"},
}
MASK = ", ".join(
    f"public.{table} ({', '.join(f'{name} {rule}' for name, rule in rules.items())})" for table, rules in RULES.items()
)
SETUP = (
    "CREATE TABLE users (id int PRIMARY KEY, email text, phone bigint, name varchar(40), card text, born date, big text, note text);"
    "ALTER TABLE users ALTER big SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL;"
    "CREATE TABLE accounts (login text, n int, PRIMARY KEY (login, n), v text);"
    "CREATE TABLE logins (ssn text, pin int, at int, why text); ALTER TABLE logins REPLICA IDENTITY FULL;"
    f"INSERT INTO users SELECT g, '{CLEAR}' || g % 3, 7070707000 + g, '{CLEAR}n', '411{CLEAR}', '1999-12-01',"
    f" repeat('{CLEAR}', 500) || g, repeat('n', 4000) || g FROM generate_series(1, 9) g;"
    "INSERT INTO users (id) VALUES (10);"
    f"INSERT INTO accounts SELECT '{CLEAR}' || g, g % 2, 'v' FROM generate_series(1, 9) g;"
    f"INSERT INTO logins SELECT '{CLEAR}' || g % 2, 7070707, g % 3, '{CLEAR}w' FROM generate_series(1, 9) g;"
    "CREATE PUBLICATION p FOR TABLE users, accounts, logins"
)
CHANGES = (
    (
        f"INSERT INTO users VALUES (11, '{CLEAR}1', 7070707001, 'ünicode{CLEAR}', 'ä', '0099-01-01', 'short{CLEAR}', 'n');"
        "INSERT INTO users (id) VALUES (12);"
        f"INSERT INTO accounts VALUES ('{CLEAR}1', 7, 'w'); INSERT INTO logins VALUES (NULL, NULL, 5, NULL)"
    ),
    # Of a masked column, and of another one, values that are not sent.
    (
        f"UPDATE users SET email = '{CLEAR}2' WHERE id = 1; UPDATE users SET big = '{CLEAR}new' WHERE id = 2;"
        "UPDATE users SET note = 'new' WHERE id = 3; UPDATE users SET phone = 7070707009 WHERE id = 4"
    ),
    "UPDATE users SET id = id + 100 WHERE id < 4; DELETE FROM users WHERE id = 9",
    (
        f"UPDATE accounts SET v = 'x' WHERE login = '{CLEAR}3'; UPDATE accounts SET login = '{CLEAR}moved' WHERE login = '{CLEAR}4';"
        f"DELETE FROM accounts WHERE login = '{CLEAR}5'; UPDATE accounts SET n = 9 WHERE login = '{CLEAR}6'"
    ),
    (
        f"UPDATE logins SET why = '{CLEAR}other'; DELETE FROM logins WHERE at = 1; UPDATE logins SET ssn = '{CLEAR}z' WHERE at = 2;"
        "UPDATE logins SET pin = 7070708 WHERE at = 0; DELETE FROM logins WHERE ssn IS NULL"
    ),
)


@pytest.mark.parametrize(
    "options",
    [
        {"binary": "true"},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"copied": "by a job"}, marks=pytest.mark.full),
        pytest.param({"table_properties": "'* (delta.enableChangeDataFeed = true)'"}, marks=pytest.mark.full),
        pytest.param({"partition_by": "'public.users (card, phone)'"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_values_are_masked(
    replica: Replica, options: dict[str, str], logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied and changed, as a key, and where rows are found by all their values."""
    if options.pop("copied", ""):
        monkeypatch.setattr(choose_copier, "LEAST_JOB_BYTES", 1)
    replica.execute(SETUP)
    replica.subscribe(mask=f"'{MASK}'", **options)
    for statements in ((), CHANGES):
        replica.execute(*statements)
        replica.caught_up()
        for table, rules in RULES.items():
            assert_masked(replica, table, rules, caught_up=False)
    found = replica.node.fetch(
        "SELECT relation, masked, left_out FROM pg_subscription_rel WHERE relation LIKE 'public.%'"
    )
    mine = {row["relation"]: (row["masked"], row["left_out"]) for row in found}
    assert mine["public.users"] == ("email, phone, name, card, born, big", "")
    assert mine["public.accounts"] == ("login", "")
    assert_nowhere(replica, logged, CLEAR, "7070707")
    # Others read it as text.
    (row,) = replica.node.fetch("SELECT born, phone, email FROM public.users WHERE id = 101")
    assert row == {"born": "1999", "phone": None, "email": hashed(f"{CLEAR}2")}
    report = replica.node.run(replica.node._node.verify(replica.name, ()))
    outcomes = {one.relation: (one.outcome, one.reason) for one in report.tables}
    assert outcomes["public.users"] == (
        "equal",
        "columns that are masked are not compared: email, phone, name, card, born, big",
    )
    assert outcomes["public.accounts"] == (
        "not compared",
        'column "login", by which its rows are found, is masked',
    )


def test_what_cannot_be_masked_is_refused(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, v text, m money); CREATE PUBLICATION p FOR TABLE t")
    for options, sqlstate, message in (
        ("mask = 'public.u (id hash)'", "42P01", 'mask names tables that are not published: "public.u"'),
        ("mask = 'public.t (w hash)'", "42703", 'column "w" of table "public.t" in subscription option mask'),
        ("mask = 'public.* (w null)'", "42703", 'column "w" of table "public.*" in subscription option mask'),
        ("mask = '* (id redact)'", "0A000", 'column "id" of table "public.t" cannot be masked by redact'),
        (
            "mask = '* (m hash)'",
            "0A000",
            'column "m" of table "public.t" has type money, which cannot be masked by hash',
        ),
        ("mask = '* (id hash)', types = 'public.t.id natural'", "0A000", "cannot be masked by hash and replicated as"),
        ("mask = 'public.t (v shown)'", "22023", 'invalid value for parameter "mask"'),
        ("mask = '* (v null)', schema_changes = refuse", "42601", "are mutually exclusive"),
        ("mask = '* (v null)', copy_data = false", "0A000", 'the option mask needs a copy of table "public.t"'),
    ):
        replica.assert_refused(options, sqlstate, message)
    monkeypatch.setenv(VARIABLE, "short")
    assert "fewer than 16 bytes" in replica.refused("mask = '* (v hash)'").message
    assert replica.slots() == []


def test_there_is_one_key(replica: Replica, monkeypatch: pytest.MonkeyPatch, logged: list[Any]) -> None:
    """Without it, and with another one, nothing is written; RESYNC TABLE takes the other one."""
    replica.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, '{CLEAR}');"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    monkeypatch.delenv(VARIABLE)
    replica.subscribe(mask="'* (v hash)'", on_table_error="isolate")
    assert f'columns of table "public.t" are masked by hash, and {VARIABLE} is not set' in replica.error()
    assert replica.states() == {"public.t": "d"}
    monkeypatch.setenv(VARIABLE, KEY)
    assert_masked(replica, "t", {"v": "hash"})
    monkeypatch.setenv(VARIABLE, OTHER)
    replica.node.execute("SELECT pg_stat_reset_subscription_stats(NULL)")
    replica.execute(f"INSERT INTO t VALUES (2, '{CLEAR}')")
    wait_until(lambda: f"{VARIABLE} is not the key" in replica.error(), "the other key to be refused")
    assert [row["v"] for row in replica.rows("t")] == [hashed(CLEAR)]
    monkeypatch.setenv(VARIABLE, KEY)
    assert_masked(replica, "t", {"v": "hash"})
    monkeypatch.setenv(VARIABLE, OTHER)
    before = replica.relation("t").copy_generation
    replica.alter("RESYNC TABLE public.t")
    replica.until_copied("t", before)
    replica.execute(f"INSERT INTO t VALUES (3, '{CLEAR}')")
    replica.caught_up()
    assert [row["v"] for row in replica.rows("t")] == [hashed(CLEAR, OTHER)] * 3
    assert_nowhere(replica, logged, CLEAR)


@pytest.mark.full
def test_histories(replica: Replica, logged: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change is masked, old rows too; another key is refused as long as there are rows under the first."""
    replica.execute(SETUP)
    replica.subscribe(mask=f"'{MASK}'", mode="history")
    replica.caught_up()
    for statement in CHANGES:
        replica.execute(statement)
    replica.caught_up()
    assert_nowhere(replica, logged, CLEAR, "7070707")
    changes = replica.rows("accounts", "_pubsub_op, login, n FROM delta_t ORDER BY _pubsub_lsn, _pubsub_seq")
    moved = [tuple(row.values()) for row in changes if row["login"] in (hashed(f"{CLEAR}4"), hashed(f"{CLEAR}moved"))]
    assert moved == [("R", hashed(f"{CLEAR}4"), 0), ("O", hashed(f"{CLEAR}4"), 0), ("U", hashed(f"{CLEAR}moved"), 0)]
    old = replica.rows("logins", "* FROM delta_t WHERE _pubsub_op = 'D' AND at = 1")
    assert {(row["ssn"], row["pin"], row["why"]) for row in old} == {
        (hashed(f"{CLEAR}{number}"), None, "***") for number in (0, 1)
    }
    monkeypatch.setenv(VARIABLE, OTHER)
    replica.alter("RESYNC TABLE public.accounts")
    assert 'the history of table "public.accounts" is masked by another key' in replica.error()
    monkeypatch.setenv(VARIABLE, KEY)
    replica.caught_up()


@pytest.mark.full
def test_large_transactions(replica: Replica, logged: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """streaming = parallel, and batches that are decoded in parts, by a masked key and without one."""
    monkeypatch.setattr(stage_batch, "_WHOLE", 100_000)
    replica.execute(
        f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE users (name text PRIMARY KEY, ssn text, big text); ALTER TABLE users ALTER big SET STORAGE EXTERNAL;"
        "CREATE TABLE logins (ssn text, at int); ALTER TABLE logins REPLICA IDENTITY FULL;"
        f"INSERT INTO users SELECT '{CLEAR}' || g, g, repeat('{CLEAR}', 300) FROM generate_series(1, 300) g;"
        "CREATE PUBLICATION p FOR TABLE users, logins",
    )
    rules = {"name": "hash", "ssn": "truncate 1", "big": "redact"}
    replica.subscribe(mask="'* (ssn hash), public.users (name hash, ssn truncate 1, big redact)'", streaming="parallel")
    replica.caught_up()
    for statement in (
        (
            f"INSERT INTO users SELECT '{CLEAR}' || g, g, repeat('s', 900) FROM generate_series(1000, 20000) g;"
            f"INSERT INTO logins SELECT '{CLEAR}' || g % 100, g FROM generate_series(1, 20000) g"
        ),
        f"UPDATE users SET ssn = '{CLEAR}' WHERE ssn::int % 2 = 0; UPDATE logins SET at = -at WHERE at % 3 = 0",
        f"UPDATE users SET name = name || 'x' WHERE ssn <> '{CLEAR}' AND ssn::int % 3 = 0; DELETE FROM logins WHERE at % 7 = 0",
    ):
        replica.execute(f"BEGIN; {statement}; COMMIT")
        assert_masked(replica, "users", rules)
        assert_masked(replica, "logins", {"ssn": "hash"})
    assert_nowhere(replica, logged, CLEAR)


@pytest.mark.full
@pytest.mark.parametrize("binary", [False, True])
def test_every_type_has_one_hash(replica: Replica, binary: bool) -> None:
    """The copy, which reads text, and the stream find the same for each value of each type."""
    found = [one for one in corpus.columns(18) if not any(name in one.type for name in ("money", "aclitem", "reg"))]
    found = [one for one in found if one.binary or not binary]
    listed = ", ".join(f"{one.name} {one.type}" for one in found)
    rows = max(len(one.values) for one in found)
    values = [", ".join(one.values[row] if row < len(one.values) else "NULL" for one in found) for row in range(rows)]
    replica.execute(
        corpus.SETUP,
        f"CREATE TABLE v (id int PRIMARY KEY, {listed}); CREATE PUBLICATION p FOR TABLE v",
        *(f"INSERT INTO v VALUES ({number}, {one})" for number, one in enumerate(values)),
    )
    replica.subscribe(
        mask="'public.v (" + ", ".join(f"{one.name} hash" for one in found) + ")'", binary=str(binary).lower()
    )
    replica.until_ready()
    replica.execute("INSERT INTO v SELECT id + 1000, " + ", ".join(one.name for one in found) + " FROM v")
    replica.caught_up()
    stored = {row.pop("id"): row for row in replica.rows("v")}
    assert len(stored) == 2 * rows
    for number in range(rows):
        assert stored[number] == stored[number + 1000]
    assert all(len(value) == 64 for row in stored.values() for value in row.values() if value is not None)


@pytest.mark.full
def test_an_error_does_not_show_it(replica: Replica, logged: list[Any]) -> None:
    """Under REPLICA IDENTITY FULL every column is part of what an error names a row by."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, at date, ssn text, due date); ALTER TABLE users REPLICA IDENTITY FULL;"
        "CREATE PUBLICATION p FOR TABLE users"
    )
    replica.subscribe(mask="'public.users (ssn hash, due null)'")
    replica.caught_up()
    replica.execute(f"INSERT INTO users VALUES (1, '2000-01-01', '{CLEAR}', 'infinity')")
    assert_masked(replica, "users", {"ssn": "hash", "due": "null"})
    replica.execute(f"INSERT INTO users VALUES (2, 'infinity', '{CLEAR}', '1970-07-07')")
    assert 'column "at"' in replica.error()
    statistics = replica.node.statistics(replica.name)
    assert "(id, at)=(2, infinity)" in str(statistics["error_detail"])
    assert_nowhere(replica, logged, CLEAR, "1970-07-07")


@pytest.mark.full
@pytest.mark.parametrize("copied", [False, True])
def test_bytes_that_are_no_text_are_not_shown(
    replica: Replica, logged: list[Any], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database in SQL_ASCII may hold what is no UTF-8; neither its copy, by a job, nor its stream tells of it."""
    monkeypatch.setattr(choose_copier, "LEAST_JOB_BYTES", 1)
    name = f"{replica.database.name}_ascii"
    server = replica.database.server
    server.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    replica.database = Database(server, name)
    bad = f"INSERT INTO users VALUES (E'{CLEAR}\\xff', '{CLEAR}', E'{CLEAR}\\xff')"
    replica.execute(
        "CREATE TABLE users (login text PRIMARY KEY, v text, w text); CREATE PUBLICATION p FOR TABLE users",
        *([bad] if copied else []),
    )
    replica.subscribe(mask="'* (login hash, w redact)'")
    if not copied:
        replica.caught_up()
        replica.execute(bad)
    assert "invalid byte sequence" in replica.error()
    assert_nowhere(replica, logged, CLEAR)
    replica.execute("TRUNCATE users")
    replica.drop()
    replica.created = False


@pytest.mark.full
def test_rows_that_differ_are_copied_anew_masked(replica: Replica, logged: list[Any]) -> None:
    """verify --repair, by a key in clear; without a key it leaves the table."""
    replica.execute(SETUP)
    replica.subscribe(mask=f"'{MASK}'")
    replica.caught_up()
    spark = replica.node.spark.session
    spark.sql(f"UPDATE delta.`{replica.path('users')}` SET note = 'spoilt', email = 'spoilt' WHERE id = 1")
    spark.sql(f"DELETE FROM delta.`{replica.path('users')}` WHERE id = 2")
    spark.sql(f"UPDATE delta.`{replica.path('logins')}` SET at = 77 WHERE at = 1")
    report = replica.node.run(replica.node._node.verify(replica.name, (), repair=True))
    found = {one.relation: one for one in report.tables}
    assert found["public.users"].repaired
    assert "it has no key, and columns that are masked" in str(found["public.logins"].reason)
    assert_masked(replica, "users", RULES["users"])
    assert_nowhere(replica, logged, CLEAR, "7070707")


@pytest.mark.full
def test_they_are_text_to_those_who_follow_the_delta_table(replica: Replica, stock_server: EmbeddedPostgres) -> None:
    """An integer's mask in psql's \\d, in a query with a parameter, and at a stock subscriber."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, pin int, due date, v text); INSERT INTO t VALUES (1, 70707071, '2000-01-01', 'v');"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(mask="'public.t (pin truncate 3, due null)'")
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
            assert kinds == [("id", "integer"), ("pin", "text"), ("due", "date"), ("v", "text")]
            for binary in (False, True):
                found = connection.execute("SELECT * FROM t WHERE pin = %s", ["707"], binary=binary).fetchall()
                assert found == [(1, "707", None, "v")]
            connection.execute("CREATE PUBLICATION lake FOR ALL TABLES")
        stock_server.execute("CREATE TABLE t (id int PRIMARY KEY, pin text, due date, v text)", name)
        conninfo = f"host={host} port={port} dbname=pubsub user=follower password=secret"
        stock_server.execute(f"CREATE SUBSCRIPTION lake CONNECTION '{conninfo}' PUBLICATION lake", name)
        wait_until(lambda: stock_server.query("SELECT * FROM t", name) == [(1, "707", None, "v")], "the copy")
        replica.execute("UPDATE t SET pin = 80808, v = 'w'")
        replica.caught_up()
        wait_until(lambda: stock_server.query("SELECT * FROM t", name) == [(1, "808", None, "w")], "the change")
    finally:
        stock_server.execute("DROP SUBSCRIPTION IF EXISTS lake", name)
        stock_server.drop_database(name)
        node.run(doors.close())


def test_rows_that_are_read_anew_are_masked(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a window, or by a task, which has the key from its job or its environment."""
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, w date); INSERT INTO t VALUES (1, '{CLEAR}', '2000-01-01')"
    )
    monkeypatch.delenv(VARIABLE)
    masks = Masks({"v": MaskRule("hash"), "w": MaskRule("null")}, fingerprint_of(KEY.encode()))
    source = chunk_reader.CopySource(
        database.conninfo, "anew", ReadTable("public", "t", ("id", "v"), True), "", None, masks=masks
    )
    schema = pa.schema([pa.field("id", pa.int32(), False), ("v", pa.string()), ("w", pa.date32())])
    target = TargetTable("", schema, ("id",), "public.t", masks=masks)
    keys = pa.table({"id": pa.array([1], pa.int32())})

    def read() -> list[dict[str, Any]]:
        return window.read_again(source, target, keys, {"id": "integer"}, Cut())[0].to_pylist()

    with pytest.raises(PubsubError, match="is not set"):
        read()
    monkeypatch.setenv(VARIABLE, OTHER)
    with pytest.raises(PubsubError, match="is not the key"):
        read()
    source = replace(source, mask_key=KEY.encode())
    assert read() == [{"id": 1, "v": hashed(CLEAR), "w": None}]
    assert KEY not in repr(source)
