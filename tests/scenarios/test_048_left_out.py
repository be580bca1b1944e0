"""columns and exclude: what a Delta table does not get of its publisher's columns, and that nothing lets it in unasked."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pubsub.errors import PubsubError
from pubsub.sql.identifiers import quote_literal
from tests.support.replica import Replica, wait_until


def columns(replica: Replica, table: str) -> list[str]:
    return [field.name for field in DeltaTable(replica.path(table)).schema().fields]


def test_columns_stay_out(replica: Replica) -> None:
    """Copied, changed, renamed at the publisher, and beside columns that are added later."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text, pin int); ALTER TABLE users ALTER ssn SET STORAGE EXTERNAL;"
        "CREATE TABLE logins (ssn text, at int, ip text); ALTER TABLE logins REPLICA IDENTITY FULL;"
        "INSERT INTO users SELECT g, 'n', repeat('9', 4000), g FROM generate_series(1, 9) g;"
        "INSERT INTO logins SELECT 's' || g % 2, g % 3, 'x' FROM generate_series(1, 9) g; CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(exclude="'* (ssn), public.users (pin)'", columns="'public.logins (at, ssn)'")
    shown = {"users": ["id", "name"], "logins": ["at"]}
    for table, names in shown.items():
        replica.assert_equal(table, columns=names)
        assert columns(replica, table) == names
    for statement in (
        "UPDATE users SET ssn = 'short', name = 'changed' WHERE id = 1; UPDATE users SET name = 'kept' WHERE id = 2",
        "UPDATE logins SET ip = 'y'; DELETE FROM logins WHERE at = 1; INSERT INTO logins VALUES ('s', 7, 'z')",
        "ALTER TABLE users RENAME ssn TO social; UPDATE users SET social = 'under another name' WHERE id = 3",
        "ALTER TABLE users ADD COLUMN more text DEFAULT 'secret'; INSERT INTO users VALUES (10, 'new', 's', 1, 'm')",
        "ALTER TABLE users RENAME more TO most; UPDATE users SET id = id + 100 WHERE id < 5",
        "ALTER TABLE users DROP COLUMN pin; DELETE FROM users WHERE id = 9",
        "ALTER TABLE users ALTER name TYPE varchar(40); UPDATE users SET name = 'typed' WHERE id = 8",
    ):
        replica.execute(statement)
        for table, names in shown.items():
            replica.assert_equal(table, columns=names)
            assert columns(replica, table) == names
    (row,) = replica.node.fetch("SELECT left_out FROM pg_subscription_rel WHERE relation = 'public.users'")
    assert row["left_out"] == "social, most"
    replica.execute("ALTER TABLE users RENAME social TO hidden; ALTER TABLE users ADD COLUMN later int DEFAULT 1")
    report = replica.node.run(replica.node._node.verify(replica.name, ()))
    assert {one.outcome for one in report.tables} == {"equal"}, "no row has told of the new names yet"
    replica.alter("REFRESH PUBLICATION")
    wait_until(
        lambda: replica.relation("users").left_out == ("hidden", "most", "later"), "the new names to be looked at"
    )
    replica.execute("ALTER TABLE users RENAME hidden TO social; ALTER TABLE users DROP COLUMN later")
    # An automatic copy lets nothing in; RESYNC TABLE lets in what no option names.
    before = replica.relation("users").copy_generation
    replica.execute("ALTER TABLE users ALTER name TYPE int USING id; UPDATE users SET name = 3 WHERE id = 8")
    replica.until_copied("users", before)
    replica.assert_equal("users", columns=["id", "name"])
    assert columns(replica, "users") == ["id", "name"]
    for exclude in ("public.users (ssn)", "public.users (id)", "public.user (social)", "* (pin)"):
        with pytest.raises(PubsubError):
            replica.alter(f"SET (exclude = '{exclude}')")
    replica.alter("SET (exclude = 'public.users (social), public.logins (ip)')")
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    replica.execute("UPDATE users SET social = 'again', most = 'shown' WHERE id = 8")
    replica.assert_equal("users", columns=["id", "name", "most"])
    assert columns(replica, "users") == ["id", "name", "most"]


def assert_out(replica: Replica, table: str, *tokens: str) -> None:
    """Check that the Delta table equals the publisher's in its columns, and that none of its values has one of these texts."""
    replica.caught_up()
    names = columns(replica, table)
    replica.assert_equal(table, columns=names)
    shown = str(replica.rows(table))
    for token in tokens:
        assert token not in shown


@pytest.mark.full
def test_nothing_lets_a_column_in_unasked(replica: Replica) -> None:
    """Copies of every kind, other names of the column and of its table, and a table that is made anew."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text, note text); CREATE PUBLICATION p FOR ALL TABLES;"
        "INSERT INTO users SELECT g, 'n', 'secret', 'note' FROM generate_series(1, 9) g"
    )
    replica.subscribe(exclude="'public.users (ssn)'", on_slot_loss="resync")
    assert_out(replica, "users", "secret")

    # An ALTER that takes a copy, with a column that no message has told of.
    before = replica.relation("users").copy_generation
    replica.execute(
        "ALTER TABLE users ADD salary text DEFAULT 'later', ALTER name TYPE int USING length(name);"
        "UPDATE users SET name = 2, ssn = 'secret', salary = 'later' WHERE id = 1"
    )
    replica.until_copied("users", before)
    assert_out(replica, "users", "secret", "later")
    # A slot that is lost, with a column that has no row yet.
    before = replica.relation("users").copy_generation
    replica.execute("ALTER TABLE users ADD late text DEFAULT 'later'")
    replica.drop_slot()
    replica.until_copied("users", before)
    replica.execute("INSERT INTO users VALUES (10, 1, 'secret', 'n', 'later', 'later')")
    assert_out(replica, "users", "secret", "later")
    # A copied column takes the excluded name.
    replica.execute("ALTER TABLE users RENAME ssn TO social; ALTER TABLE users RENAME note TO ssn")
    replica.execute("UPDATE users SET ssn = 'note', social = 'secret' WHERE id = 2")
    assert_out(replica, "users", "secret", "later")
    assert columns(replica, "users") == ["id", "name", "ssn"]
    # RESYNC TABLE lets in what came later, not what the option left out, under whatever name.
    before = replica.relation("users").copy_generation
    replica.alter("RESYNC TABLE public.users")
    replica.until_copied("users", before)
    assert_out(replica, "users", "secret")
    assert sorted(columns(replica, "users")) == ["id", "late", "name", "salary", "ssn"]
    # The table gets another name, which no option has.
    replica.execute("ALTER TABLE users RENAME TO people; INSERT INTO people VALUES (11, 1, 'secret', 'n', 'l', 'l')")
    replica.caught_up()
    before = replica.relation("people").copy_generation
    replica.alter("RESYNC TABLE public.people")
    replica.until_copied("people", before)
    replica.execute("ALTER TABLE people ADD COLUMN more text DEFAULT 'afterwards'; UPDATE people SET social = 'secret'")
    assert_out(replica, "people", "secret", "afterwards")


@pytest.mark.full
def test_a_table_that_is_made_anew_while_the_slot_is_lost(replica: Replica) -> None:
    """It gets the columns that the earlier one had, by their names."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text); CREATE PUBLICATION p FOR ALL TABLES;"
        "INSERT INTO users VALUES (1, 'n', 'secret')"
    )
    replica.subscribe(exclude="'public.users (ssn)'", on_slot_loss="resync")
    assert_out(replica, "users", "secret")
    replica.execute(
        "DROP TABLE users; CREATE TABLE users (id int PRIMARY KEY, tax text DEFAULT 'later', social text, name text);"
        "INSERT INTO users VALUES (1, 'later', 'secret', 'n')"
    )
    replica.drop_slot()
    oid = replica.query("SELECT 'users'::regclass::oid::int")[0][0]
    wait_until(lambda: replica.relation("users").relid == oid and replica.states()["public.users"] == "r", "the copy")
    replica.execute("INSERT INTO users VALUES (2, 'later', 'secret', 'm')")
    assert_out(replica, "users", "secret", "later")
    assert columns(replica, "users") == ["id", "name"]


@pytest.mark.full
def test_columns_that_are_chosen_keep_their_place_under_other_names(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, name text, other text); INSERT INTO t VALUES (1, 'a', 'secret');"
        "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(columns="'public.t (id, name)'")
    assert_out(replica, "t", "secret")
    replica.execute(
        "ALTER TABLE t RENAME id TO uid; ALTER TABLE t RENAME name TO full_name; INSERT INTO t VALUES (2, 'b', 'secret')"
    )
    assert_out(replica, "t", "secret")
    before = replica.relation("t").copy_generation
    replica.execute(
        "ALTER TABLE t ALTER full_name TYPE int USING length(full_name); INSERT INTO t VALUES (3, 3, 'secret')"
    )
    replica.until_copied("t", before)
    assert_out(replica, "t", "secret")
    assert columns(replica, "t") == ["uid", "full_name"]


@pytest.mark.full
def test_a_name_that_goes_while_the_daemon_is_behind(replica: Replica) -> None:
    """Rows under names that are gone by now: what they were is told by numbers, or the table is copied again."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text, note text);"
        "CREATE TABLE v (id int PRIMARY KEY, a text, ssn text); CREATE PUBLICATION p FOR TABLE users, v"
    )
    replica.subscribe(exclude="'* (ssn)'")
    assert_out(replica, "users")
    replica.alter("DISABLE")
    replica.execute(
        "ALTER TABLE v DROP COLUMN a; ALTER TABLE v RENAME ssn TO a",
        "INSERT INTO v VALUES (1, 'secret')",
        "ALTER TABLE v DROP COLUMN a",
        "ALTER TABLE users RENAME ssn TO foo",
        "INSERT INTO users VALUES (1, 'a', 'secret', 'n')",
        "ALTER TABLE users DROP COLUMN foo; ALTER TABLE users RENAME note TO n2; ALTER TABLE users ADD COLUMN x text",
    )
    replica.alter("ENABLE")
    replica.execute("INSERT INTO users VALUES (2, 'b', 'm', 'later'); INSERT INTO v VALUES (2)")
    assert_out(replica, "users", "secret", "later")
    replica.assert_equal("v", columns=["id"])
    assert "secret" not in str(replica.rows("v"))
    assert columns(replica, "users")[:2] == ["id", "name"]


@pytest.mark.full
def test_a_column_list_that_takes_it_in_again(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text, note text); INSERT INTO users VALUES (1, 'a', 'secret', 'n');"
        "CREATE PUBLICATION p FOR TABLE users"
    )
    replica.subscribe(exclude="'public.users (ssn)'")
    assert_out(replica, "users", "secret")
    replica.execute(
        "ALTER PUBLICATION p SET TABLE users (id, name, ssn)",
        "INSERT INTO users VALUES (2, 'b', 'secret', 'n')",
    )
    replica.caught_up()
    replica.execute(
        "ALTER PUBLICATION p SET TABLE users (id, name, ssn, note)",
        "INSERT INTO users VALUES (3, 'c', 'secret', 'unseen')",
    )
    replica.assert_equal("users", columns=["id", "name"])
    assert "secret" not in str(replica.rows("users"))
    assert "unseen" not in str(replica.rows("users")), "it is told to be left out"
    assert set(replica.relation("users").left_out) == {"ssn", "note"}


@pytest.mark.full
def test_an_error_does_not_show_it(replica: Replica) -> None:
    """Under REPLICA IDENTITY FULL every column is part of what an error names a row by."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, at date, ssn text); ALTER TABLE users REPLICA IDENTITY FULL;"
        "CREATE PUBLICATION p FOR TABLE users"
    )
    replica.subscribe(exclude="'public.users (ssn)'")
    assert_out(replica, "users")
    replica.execute("INSERT INTO users VALUES (1, 'infinity', 'secret')")
    assert 'column "at"' in replica.error()
    statistics = replica.node.statistics(replica.name)
    assert "(id, at)=(1, infinity)" in str(statistics["error_detail"])
    assert "secret" not in str(statistics)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"binary": "true"}, {"mode": "history"}])
def test_beside_other_options(replica: Replica, options: dict[str, str]) -> None:
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, at point, ssn text); CREATE PUBLICATION p FOR TABLE users",
        "INSERT INTO users VALUES (1, 'a', '(1,2)', 's')",
    )
    replica.subscribe(exclude="'public.users (ssn, at)'", **options)
    replica.until_ready()
    replica.execute("INSERT INTO users VALUES (2, 'b', '(1,2)', 's')", "UPDATE users SET name = 'c' WHERE id = 2")
    replica.caught_up()
    if options.get("mode") == "history":
        assert [row["name"] for row in replica.rows("users", "* FROM delta_t ORDER BY _pubsub_lsn")] == ["a", "b", "c"]
    else:
        replica.assert_equal("users", columns=["id", "name"])
    assert columns(replica, "users")[-2:] == ["id", "name"]


@pytest.mark.full
def test_a_transaction_that_is_staged_while_it_arrives(replica: Replica) -> None:
    """streaming = parallel, with a column that is added meanwhile, and one that is left unchanged out of line."""
    replica.execute(
        f"ALTER DATABASE \"{replica.database.name}\" SET logical_decoding_work_mem = '64kB'",
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text); ALTER TABLE users ALTER ssn SET STORAGE EXTERNAL;"
        "INSERT INTO users SELECT g, 'n', repeat('9', 4000) FROM generate_series(1, 300) g; CREATE PUBLICATION p FOR TABLE users",
    )
    replica.subscribe(exclude="'* (ssn)'", streaming="parallel")
    replica.assert_equal("users", columns=["id", "name"])
    rows = "INSERT INTO users SELECT g, 'n', repeat('s', 900){} FROM generate_series({}) g"
    for transaction in (
        f"{rows.format('', '1000, 30000')}; UPDATE users SET name = 'm'",
        "UPDATE users SET ssn = 'other'; ALTER TABLE users ADD COLUMN later text DEFAULT 'secret'; "
        + rows.format(", 'l'", "40000, 60000"),
    ):
        replica.execute(f"BEGIN; {transaction}; COMMIT")
        replica.assert_equal("users", columns=["id", "name"])
    assert columns(replica, "users") == ["id", "name"]
    assert replica.node.statistics(replica.name)["stream_txns"] > 0


@pytest.mark.full
def test_a_role_that_may_not_read_what_is_left_out(replica: Replica) -> None:
    """The rights that PostgreSQL asks for are those of the columns that are copied."""
    replica.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, ssn text); INSERT INTO users VALUES (1, 'a', 's');"
        "CREATE PUBLICATION p FOR TABLE users; DROP ROLE IF EXISTS limited; CREATE ROLE limited LOGIN REPLICATION;"
        "GRANT SELECT (id, name) ON users TO limited"
    )
    replica.node.execute(
        f"CREATE SUBSCRIPTION {replica.name} CONNECTION {quote_literal(replica.conninfo + ' user=limited')} PUBLICATION p "
        "WITH (exclude = 'public.users (ssn)', batch_age = '20ms')"
    )
    replica.created = True
    replica.execute("INSERT INTO users VALUES (2, 'b', 's')")
    replica.assert_equal("users", columns=["id", "name"])


def test_what_cannot_be_left_out_is_refused(replica: Replica) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION p FOR TABLE t")
    for options, sqlstate, message in (
        ("exclude = 'public.u (id)'", "42P01", 'exclude names tables that are not published: "public.u"'),
        ("exclude = 'public.t (w)'", "42703", 'column "w" of table "public.t" in subscription option exclude'),
        ("exclude = 'public.* (w)'", "42703", 'column "w" of table "public.*" in subscription option exclude'),
        ("columns = 'public.t (id, w)'", "42703", 'column "w" of table "public.t" in subscription option columns'),
        ("exclude = '* (id)'", "0A000", 'column "id" of table "public.t" cannot be left out: it is part of the key'),
        ("columns = 'public.t (v)'", "0A000", 'column "id" of table "public.t" cannot be left out'),
        ("exclude = 'public.t'", "22023", 'invalid value for parameter "exclude"'),
        (
            "exclude = '* (v)', schema_changes = refuse",
            "42601",
            "schema_changes = refuse and exclude = … are mutually exclusive",
        ),
        ("exclude = '* (v)', copy_data = false", "0A000", 'need a copy, or a Delta table, of table "public.t"'),
    ):
        replica.assert_refused(options, sqlstate, message)
    assert replica.slots() == []
