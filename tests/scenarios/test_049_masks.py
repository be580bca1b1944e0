"""mask: what stands for values in Delta tables, and that the values themselves are nowhere."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

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
from tests.support.replica import Replica, wait_until

KEY, OTHER = "a key of these tests, of no others", "another key of these tests"
#: In every value that is masked.
CLEAR = "ClearText"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with captured_logs() as found:
        yield found


def hashed(text: str, key: str = KEY) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def masked(value: Any, rule: str | None) -> Any:
    """Return what stands for a value, by Python's own means."""
    if value is None or rule is None:
        return value
    match MaskRule.parse(rule):
        case MaskRule("null"):
            return None
        case MaskRule("redact"):
            return "***"
        case MaskRule("truncate", length):
            return str(value)[:length]
        case _:
            return hashed(str(value))


def assert_masked(replica: Replica, table: str, rules: Mapping[str, str], *, caught_up: bool = True) -> None:
    """Check that the Delta table has the publisher's rows, masked; `rules` by the columns' present names."""
    if caught_up:
        replica.caught_up()
    found = replica.rows(table)
    names = list(found[0]) if found else []
    read = {name: "NULL" if rules.get(name) == "null" else f"{name}::text" for name in rules}
    listed = ", ".join(read.get(name, name) for name in names) or "1"
    wanted = [
        tuple(masked(value, rules.get(name)) for name, value in zip(names, row, strict=True))
        for row in replica.query(f"SELECT {listed} FROM {table}")
    ]
    assert sorted(map(repr, (tuple(row.values()) for row in found))) == sorted(map(repr, wanted))


def stored(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield what each file of a node says, data files by their values and statistics."""
    for path in home.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            text += str(pq.read_table(path, partitioning=None).to_pydict())
            metadata = pq.read_metadata(path)
            text += str([metadata.row_group(number).to_dict() for number in range(metadata.num_row_groups)])
        yield path, text


def assert_nowhere(replica: Replica, logged: list[Any], *texts: str) -> None:
    """Check that no file of the node, no event of its log and no view has one of these texts."""
    views = ("pg_stat_subscription_stats", "pg_subscription_rel", "pg_stat_subscription")
    shown = [(Path(view), str(replica.node.fetch(f"SELECT * FROM {view}"))) for view in views]
    shown.append((Path("the log"), str(logged)))
    for path, said in (*stored(replica.node.home), *shown):
        for text in (*texts, KEY, OTHER):
            assert text not in said, f"{text} is in {path}"


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
        error = replica.refused(options)
        assert error.sqlstate == sqlstate, error
        assert message in error.message
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
    replica.subscribe(mask="'* (v hash)'")
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


def columns(replica: Replica, table: str) -> list[str]:
    return [field.name for field in DeltaTable(replica.path(table)).schema().fields]


@pytest.mark.full
def test_nothing_unmasks_a_column_unasked(replica: Replica, logged: list[Any]) -> None:
    """Other names of columns and table, columns that come later, copies that nobody asked for, and another text."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text, note text, n int); CREATE PUBLICATION p FOR ALL TABLES;"
        f"INSERT INTO users SELECT g, 'name', '{CLEAR}' || g, 'note', g FROM generate_series(1, 9) g"
    )
    replica.subscribe(mask="'public.users (ssn hash)'", on_slot_loss="resync")
    assert_masked(replica, "users", {"ssn": "hash"})
    for statement, name in (
        (f"ALTER TABLE users RENAME ssn TO social; UPDATE users SET social = '{CLEAR}x' WHERE id = 1", "social"),
        ("ALTER TABLE users RENAME note TO ssn; UPDATE users SET ssn = 'new' WHERE id = 2", "social"),
        (
            (
                "BEGIN; ALTER TABLE users RENAME ssn TO t; ALTER TABLE users RENAME social TO ssn;"
                "ALTER TABLE users RENAME t TO social;"
                f"UPDATE users SET ssn = '{CLEAR}y' WHERE id = 3; COMMIT"
            ),
            "ssn",
        ),
        (
            f"ALTER TABLE users ADD COLUMN more text DEFAULT '{CLEAR}'; INSERT INTO users VALUES (10, 'm', '{CLEAR}', 'n', 1)",
            "ssn",
        ),
        (f"ALTER TABLE users RENAME TO people; UPDATE people SET ssn = '{CLEAR}z' WHERE id = 4", "ssn"),
        ("ALTER TABLE people RENAME ssn TO hidden; UPDATE people SET name = 'named' WHERE id = 4", "hidden"),
    ):
        replica.execute(statement)
        table = "people" if "people" in statement else "users"
        replica.caught_up()
        assert_masked(replica, table, {name: "hash"})
    assert columns(replica, "people") == ["id", "name", "hidden", "social", "n"]
    # Copies that nobody asked for.
    before = replica.relation("people").copy_generation
    replica.execute(
        f"ALTER TABLE people ALTER n TYPE text USING 'n'; UPDATE people SET hidden = '{CLEAR}c' WHERE id = 5"
    )
    replica.until_copied("people", before)
    assert_masked(replica, "people", {"hidden": "hash"})
    before = replica.relation("people").copy_generation
    replica.drop_slot()
    replica.until_copied("people", before)
    assert_masked(replica, "people", {"hidden": "hash"})
    # A text that counts at the next RESYNC TABLE; a copy before it masks what either masks.
    replica.execute("ALTER TABLE people RENAME TO users; UPDATE users SET name = 'now' WHERE id = 6")
    replica.caught_up()
    replica.alter("SET (mask = 'public.users (name redact)')")
    replica.execute("INSERT INTO users VALUES (11, 'not masked yet', 'c', 's', 'n')")
    assert_masked(replica, "users", {"hidden": "hash"})
    before = replica.relation("users").copy_generation
    replica.execute("ALTER TABLE users ALTER n TYPE int USING 1; UPDATE users SET n = 2 WHERE id = 7")
    replica.until_copied("users", before)
    assert_masked(replica, "users", {"hidden": "hash", "name": "redact"})
    assert_nowhere(replica, logged, CLEAR)
    # RESYNC TABLE goes by the names of now, and lets in what came later.
    replica.alter("SET (mask = 'public.users (hidden truncate 3, more null)')")
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    replica.execute(f"UPDATE users SET hidden = '{CLEAR}d', more = '{CLEAR}' WHERE id = 8")
    assert_masked(replica, "users", {"hidden": "truncate 3", "more": "null"})
    assert set(columns(replica, "users")) == {"id", "name", "hidden", "social", "n", "more"}
    assert_nowhere(replica, logged, CLEAR)
    # Another type, and a table that is made anew.
    before = replica.relation("users").copy_generation
    replica.execute("ALTER TABLE users ALTER hidden TYPE varchar(60), ALTER social TYPE varchar(60)")
    replica.execute("UPDATE users SET hidden = 'abcd'; ALTER TABLE users ALTER hidden TYPE int USING 70707071")
    replica.execute("UPDATE users SET hidden = 70707072 WHERE id = 8")
    replica.until_copied("users", before)
    assert_masked(replica, "users", {"hidden": "truncate 3", "more": "null"})
    assert_nowhere(replica, logged, CLEAR)


@pytest.mark.full
def test_a_table_that_is_made_anew_while_the_slot_is_lost(replica: Replica, logged: list[Any]) -> None:
    """It is masked, and gets columns, by the names that the earlier one had."""
    replica.execute(
        f"CREATE TABLE users (id int PRIMARY KEY, ssn text, pin int); INSERT INTO users VALUES (1, '{CLEAR}', 70707071);"
        "CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(mask="'public.users (ssn hash, pin truncate 3)'", on_slot_loss="resync")
    replica.execute("ALTER TABLE users RENAME ssn TO social; UPDATE users SET id = 2")
    assert_masked(replica, "users", {"social": "hash", "pin": "truncate 3"})
    replica.execute(
        "DROP TABLE users; CREATE TABLE users (id int PRIMARY KEY, later text, pin text, social text);"
        f"INSERT INTO users VALUES (1, '{CLEAR}', '707{CLEAR}', '{CLEAR}')"
    )
    replica.drop_slot()
    oid = replica.query("SELECT 'users'::regclass::oid::int")[0][0]
    wait_until(lambda: replica.relation("users").relid == oid and replica.states()["public.users"] == "r", "the copy")
    replica.execute(f"INSERT INTO users VALUES (2, '{CLEAR}', '707{CLEAR}', '{CLEAR}')")
    assert_masked(replica, "users", {"social": "hash", "pin": "truncate 3"})
    assert set(columns(replica, "users")) == {"id", "pin", "social"}
    assert_nowhere(replica, logged, CLEAR, "7070")


@pytest.mark.full
def test_a_column_list_that_takes_it_in_again(replica: Replica, logged: list[Any]) -> None:
    """Under another name meanwhile: RESYNC TABLE knows it by its number."""
    replica.execute(
        f"CREATE TABLE users (id int PRIMARY KEY, name text, ssn text); INSERT INTO users VALUES (1, 'a', '{CLEAR}');"
        "CREATE PUBLICATION p FOR TABLE users"
    )
    replica.subscribe(mask="'public.users (ssn hash)'")
    replica.caught_up()
    replica.execute(
        "ALTER PUBLICATION p SET TABLE users (id, name); INSERT INTO users VALUES (2, 'b', 's')",
        f"ALTER TABLE users RENAME ssn TO social; INSERT INTO users VALUES (3, 'c', '{CLEAR}')",
        f"ALTER PUBLICATION p SET TABLE users (id, name, social); INSERT INTO users VALUES (4, 'd', '{CLEAR}')",
    )
    replica.caught_up()
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    replica.execute(f"INSERT INTO users VALUES (5, 'e', '{CLEAR}')")
    assert_masked(replica, "users", {"social": "hash"})
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


@pytest.mark.full
@pytest.mark.parametrize(("option", "left"), [("mask = '* (v hash)'", "hash"), ("exclude = '* (v)'", "null")])
def test_the_value_of_older_rows_goes_from_the_delta_tables_properties(
    replica: Replica, option: str, left: str
) -> None:
    """They tell which columns the table has, also with which value an added column began."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe()
    replica.caught_up()
    replica.execute(f"ALTER TABLE t ADD COLUMN v text DEFAULT '{CLEAR}'; INSERT INTO t VALUES (2)")
    replica.caught_up()
    assert CLEAR in str(DeltaTable(replica.path("t")).metadata().configuration)
    replica.alter(f"SET ({option})")
    before = replica.relation("t").copy_generation
    replica.alter("RESYNC TABLE public.t")
    replica.until_copied("t", before)
    replica.caught_up()
    assert CLEAR not in str(DeltaTable(replica.path("t")).metadata().configuration)
    replica.execute("INSERT INTO t VALUES (3)")
    assert_masked(replica, "t", {"v": left})


@pytest.mark.full
def test_a_column_becomes_text_and_a_number_again(replica: Replica) -> None:
    """RESYNC TABLE gives the Delta column another type; what is there until then is followed as before."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, pin int, due date); INSERT INTO t VALUES (1, 70707071, '1970-07-07');"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe()
    replica.caught_up()
    for mask, rules in (("* (pin redact, due null)", {"pin": "redact", "due": "null"}), ("", {})):
        replica.alter(f"SET (mask = '{mask}')")
        before = replica.relation("t").copy_generation
        replica.alter("RESYNC TABLE public.t")
        replica.until_copied("t", before)
        replica.execute("UPDATE t SET pin = pin + 1; INSERT INTO t SELECT max(id) + 1, 2, 'now' FROM t")
        assert_masked(replica, "t", rules)
        assert replica.relation("t").masked == tuple(rules)
    replica.execute("ALTER TABLE t ADD COLUMN later int DEFAULT 3; UPDATE t SET pin = 4")
    replica.assert_equal("t")


@pytest.mark.full
def test_a_masked_column_joins_the_key(replica: Replica) -> None:
    """Its hash does; other masks stop the table, whose rows could not be told apart."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL, w text NOT NULL); CREATE PUBLICATION p FOR TABLE t;"
        f"CREATE UNIQUE INDEX of_v ON t (v); CREATE UNIQUE INDEX of_w ON t (w); INSERT INTO t VALUES (1, '{CLEAR}', 'w')"
    )
    replica.subscribe(mask="'* (v hash, w redact)'")
    assert_masked(replica, "t", {"v": "hash", "w": "redact"})
    replica.execute(
        "ALTER TABLE t REPLICA IDENTITY USING INDEX of_v",
        f"UPDATE t SET v = '{CLEAR}2'; INSERT INTO t VALUES (2, '{CLEAR}', 'x')",
        f"UPDATE t SET id = 3 WHERE v = '{CLEAR}'",
    )
    assert_masked(replica, "t", {"v": "hash", "w": "redact"})
    replica.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX of_w", "UPDATE t SET w = 'y' WHERE w = 'x'")
    wait_until(
        lambda: 'column "w" of table "public.t" cannot be masked by redact: it is part of the key' in replica.error(),
        "the table to stop",
    )
