"""mask: columns stay masked under other names, in automatic copies, and until RESYNC TABLE says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from pubsub.delta.table import properties
from pubsub.masks import VARIABLE
from tests.support.captured_logs import captured_logs
from tests.support.masks import CLEAR, KEY, assert_masked, assert_nowhere, hashed
from tests.support.replica import Replica, wait_until

#: A value that is in the catalog of the node, which the tests share, until its column is masked.
OPEN = "OpenText"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with captured_logs() as found:
        yield found


def columns(replica: Replica, table: str) -> list[str]:
    return [field.name for field in DeltaTable(replica.path(table)).schema().fields]


@pytest.mark.full
def test_nothing_unmasks_a_column_unasked(replica: Replica, logged: list[Any]) -> None:
    """Other names of columns and table, columns that come later, automatic copies, and another text."""
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
    # Automatic copies.
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
    assert_nowhere(replica, logged, CLEAR, "70707071")


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
@pytest.mark.parametrize(("option", "left"), [("mask = '* (v hash)'", "hash"), ("exclude = '* (v)'", "null")])
def test_the_value_of_older_rows_goes_from_the_delta_tables_properties(
    replica: Replica, option: str, left: str
) -> None:
    """They tell which columns the table has, also with which value an added column began."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe()
    replica.caught_up()
    replica.execute(f"ALTER TABLE t ADD COLUMN v text DEFAULT '{OPEN}'; INSERT INTO t VALUES (2)")
    replica.caught_up()
    assert OPEN in str(DeltaTable(replica.path("t")).metadata().configuration)
    replica.alter(f"SET ({option})")
    before = replica.relation("t").copy_generation
    replica.alter("RESYNC TABLE public.t")
    replica.until_copied("t", before)
    replica.caught_up()
    assert OPEN not in str(DeltaTable(replica.path("t")).metadata().configuration)
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


@pytest.mark.parametrize("mode", ["mirror", pytest.param("history", marks=pytest.mark.full)])
def test_a_column_that_is_dropped_stays_masked(replica: Replica, logged: list[Any], mode: str) -> None:
    """Its rows from before come in one batch with the message that does without it."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, email text, phone text, name text); CREATE PUBLICATION p FOR TABLE users"
    )
    replica.subscribe(mask="'public.users (email hash, phone null)'", mode=f"'public.users ({mode})'")
    replica.caught_up()
    replica.alter("DISABLE")
    replica.execute(
        f"INSERT INTO users VALUES (1, '{CLEAR}', '{CLEAR}', 'a')",
        f"UPDATE users SET email = '{CLEAR}2' WHERE id = 1",
        "ALTER TABLE users DROP COLUMN email, DROP COLUMN phone",
        "INSERT INTO users VALUES (2, 'b')",
    )
    replica.alter("ENABLE")
    replica.caught_up()
    found = {(row["id"], row["email"], row["phone"]) for row in replica.rows("users")}
    assert {(1, hashed(f"{CLEAR}2"), None), (2, None, None)} <= found
    assert_nowhere(replica, logged, CLEAR)


@pytest.mark.full
def test_a_table_of_another_subscription_gives_no_starting_value(replica: Replica) -> None:
    """It is empty, and its properties had the value with which a column began."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1); CREATE PUBLICATION p FOR TABLE users"
    )
    replica.subscribe(target="'shared'")
    replica.caught_up()
    replica.execute(f"ALTER TABLE users ADD email text DEFAULT '{OPEN}'; INSERT INTO users VALUES (2)")
    replica.assert_equal("users")
    path = replica.path("users")
    assert OPEN in str(properties(path))
    replica.execute("TRUNCATE users")
    replica.assert_equal("users")
    replica.drop()
    replica.subscribe(target="'shared'", mask="'public.users (email hash)'")
    assert_masked(replica, "users", {"email": "hash"})
    assert replica.path("users") == path
    assert OPEN not in str(properties(path))
