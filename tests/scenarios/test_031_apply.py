"""Applying changes: the effect of each kind on the Delta table, beside the publisher and a stock subscriber."""

from __future__ import annotations

import re
from collections.abc import Callable

import psycopg
import pytest

from tests.support.replica import Faults, Replica, Stock, wait_until

#: Stored out of line and uncompressed: an update that does not touch the value leaves it out of the stream.
TOASTED = "string_agg(md5((g * 1000 + k)::text), '') FROM generate_series(1, 150) k"


def transactions(text: str) -> list[str]:
    """Split `text` at its empty lines."""
    return [part for part in (part.strip() for part in text.split("\n\n")) if part]


IDENTITIES = """
CREATE TABLE by_key (id int PRIMARY KEY, a int, t text);
CREATE TABLE by_index (id int, a int NOT NULL, t text NOT NULL, UNIQUE (t, a));
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_t_a_key;
CREATE TABLE full_key (id int PRIMARY KEY, a int, t text);
ALTER TABLE full_key REPLICA IDENTITY FULL;
CREATE TABLE full_keyless (a int, t text, x float8, n numeric(6,2), at timestamptz);
ALTER TABLE full_keyless REPLICA IDENTITY FULL;
CREATE TABLE no_identity (id int PRIMARY KEY, t text);
ALTER TABLE no_identity REPLICA IDENTITY NOTHING;
CREATE TABLE keyless (a int, t text);
CREATE TABLE wide_key (d date, n numeric(6,2), u uuid, y bytea, b boolean, at timestamptz, t text,
    PRIMARY KEY (d, n, u, y, b, at));
"""
ALL = ("by_key", "by_index", "full_key", "full_keyless", "no_identity", "keyless", "wide_key")


def test_inserts_updates_deletes_under_every_identity(replica: Replica, stock: Callable[[str], Stock]) -> None:
    beside = stock(IDENTITIES)
    replica.execute(
        IDENTITIES,
        """
        INSERT INTO by_key SELECT g, g, g FROM generate_series(1, 50) g;
        INSERT INTO by_index SELECT g, g % 5, g FROM generate_series(1, 50) g;
        INSERT INTO full_key SELECT g, g, g FROM generate_series(1, 50) g;
        INSERT INTO full_keyless SELECT g % 3, NULLIF(g % 4, 0)::text, g % 2, g % 3, timestamptz '2024-01-01 00:00:00.123456+00'
            FROM generate_series(1, 48) g;
        INSERT INTO no_identity SELECT g, g FROM generate_series(1, 5) g;
        INSERT INTO keyless SELECT g % 2, 'x' FROM generate_series(1, 6) g;
        INSERT INTO wide_key SELECT date '2024-01-01' + g % 3, g / 10.0, md5(g::text)::uuid, decode(md5(g::text), 'hex'), g % 2 = 0,
            timestamptz '2024-01-01' + g * interval '1.000001 s', g FROM generate_series(1, 50) g;
        CREATE PUBLICATION p FOR TABLE by_key, by_index, full_key, full_keyless, wide_key;
        CREATE PUBLICATION q FOR TABLE no_identity, keyless WITH (publish = 'insert, truncate')
        """,
    )
    replica.subscribe("p, q")
    beside.subscribe("p, q")
    replica.assert_equal(*ALL)
    for statement in transactions(
        """
        INSERT INTO by_key VALUES (51, 0, NULL), (52, 0, '');
        UPDATE by_key SET a = NULL, t = t || 'x' WHERE id < 20;
        DELETE FROM by_key WHERE id % 4 = 0

        UPDATE by_key SET id = id + 1000 WHERE id % 5 = 0;
        DELETE FROM by_key WHERE id = 1005;
        INSERT INTO by_key VALUES (5, 5, 'again')

        UPDATE by_index SET id = -id WHERE a = 1;
        UPDATE by_index SET a = a + 100, t = 'moved ' || t WHERE a = 2;
        DELETE FROM by_index WHERE a = 3

        UPDATE full_key SET a = 0 WHERE id < 20;
        UPDATE full_key SET id = id + 100 WHERE id > 40;
        DELETE FROM full_key WHERE id % 4 = 0

        DELETE FROM full_keyless WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a = 1 LIMIT 3)

        UPDATE full_keyless SET t = 'changed' WHERE ctid IN (SELECT ctid FROM full_keyless WHERE t IS NULL LIMIT 2)

        UPDATE full_keyless SET at = at + interval '1 microsecond', n = n + 0.01
            WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a = 2 LIMIT 5)

        INSERT INTO full_keyless SELECT * FROM full_keyless WHERE a = 0;
        DELETE FROM full_keyless WHERE a = 0 AND x = 0

        INSERT INTO full_keyless VALUES (NULL, NULL, NULL, NULL, NULL), (NULL, NULL, NULL, NULL, NULL), (9, '', 'NaN', 0, NULL)

        DELETE FROM full_keyless WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a IS NULL LIMIT 1)

        INSERT INTO no_identity VALUES (6, '6');
        INSERT INTO keyless SELECT 1, 'x' FROM generate_series(1, 3)

        UPDATE wide_key SET t = 'u' WHERE b;
        UPDATE wide_key SET y = y || '\\x00', at = at + interval '1 us' WHERE n < 2;
        DELETE FROM wide_key WHERE n > 4
        """
    ):
        replica.execute(statement)
        if "full_keyless" in statement:
            replica.assert_equal("full_keyless")  # otherwise all would be one batch, and these changes folded
    replica.assert_equal(*ALL)
    beside.assert_equal(*ALL)


def test_keys_that_change_within_a_transaction(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE c (id int PRIMARY KEY, t text)",
        "CREATE TABLE s (id int NOT NULL, t text, big text); CREATE UNIQUE INDEX s_id ON s (id)",
        "ALTER TABLE s REPLICA IDENTITY USING INDEX s_id; ALTER TABLE s ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO s SELECT g, g, (SELECT {TOASTED}) FROM generate_series(1, 20) g",
        "INSERT INTO c SELECT g, g FROM generate_series(1, 20) g; CREATE PUBLICATION p FOR TABLE c, s",
    )
    replica.subscribe()
    replica.assert_equal("c", "s")
    for statement in transactions(
        """
        UPDATE s SET id = -1 WHERE id = 1;
        UPDATE s SET id = 1 WHERE id = 2;
        UPDATE s SET id = 2 WHERE id = -1

        UPDATE s SET id = id + 100;
        UPDATE s SET id = id - 99

        DELETE FROM s WHERE id = 5;
        INSERT INTO s VALUES (5, 'again', 'small');
        UPDATE s SET t = 'and again' WHERE id = 5

        UPDATE s SET id = 99 WHERE id = 6;
        INSERT INTO s VALUES (6, 'new', NULL);
        DELETE FROM s WHERE id = 99

        INSERT INTO s VALUES (50, 'short-lived', '');
        UPDATE s SET id = 51 WHERE id = 50;
        DELETE FROM s WHERE id = 51

        UPDATE s SET id = 60 WHERE id = 7;
        UPDATE s SET id = 61 WHERE id = 60;
        UPDATE s SET id = 7 WHERE id = 61

        DELETE FROM c WHERE id = 1;
        INSERT INTO c VALUES (1, 'x');
        DELETE FROM c WHERE id = 1;
        INSERT INTO c VALUES (1, 'y')

        UPDATE c SET id = 0 WHERE id = 2;
        UPDATE c SET id = 2 WHERE id = 3;
        UPDATE c SET id = 3 WHERE id = 0

        DELETE FROM c WHERE id > 15
        """
    ):
        replica.execute(statement)
        replica.assert_equal("c", "s")


TOAST_CHANGES = transactions(
    """
    UPDATE {0} SET n = -n WHERE id <= #5

    UPDATE {0} SET id = id + 100 WHERE id IN (#1, #6)

    UPDATE {0} SET n = n + 1, other = 'short' WHERE id IN (#101, #2)

    UPDATE {0} SET n = n + 1 WHERE id IN (#101, #2, #7);
    UPDATE {0} SET id = #807, n = 0 WHERE id = #7;
    UPDATE {0} SET n = 1 WHERE id = #807

    UPDATE {0} SET big = NULL WHERE id = #3;
    UPDATE {0} SET n = 0 WHERE id = #3

    UPDATE {0} SET big = repeat('neu', 4000) WHERE id = #4;
    UPDATE {0} SET n = 0 WHERE id = #4;
    UPDATE {0} SET id = #104 WHERE id = #4

    DELETE FROM {0} WHERE id = #5;
    INSERT INTO {0} VALUES (#5, 0, repeat('again', 2000), NULL, NULL);
    UPDATE {0} SET n = 5 WHERE id = #5

    UPDATE {0} SET id = #900 WHERE id = #10;
    UPDATE {0} SET id = #10 WHERE id = #11;
    UPDATE {0} SET id = #11 WHERE id = #900

    UPDATE {0} SET n = 0 WHERE id = #12;
    DELETE FROM {0} WHERE id = #12

    INSERT INTO {0} VALUES (#500, 0, repeat('new', 4000), repeat('x', 9000), NULL);
    UPDATE {0} SET n = 1 WHERE id = #500;
    UPDATE {0} SET id = #501 WHERE id = #500
    """
)


def test_unchanged_toast_is_kept(replica: Replica, fault: Faults) -> None:
    names = ("toasted", "toasted_full")
    for name in names:
        replica.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, n int, big text, other text, bin bytea); "
            f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL, ALTER bin SET STORAGE EXTERNAL",
            f"INSERT INTO {name} SELECT g, g, (SELECT {TOASTED}), repeat('o' || g, 3000), decode(repeat('00ff', 3000), 'hex') "
            "FROM unnest(ARRAY[0, 1000]) base, LATERAL generate_series(base + 1, base + 15) g",
        )
    replica.execute(
        "ALTER TABLE toasted_full REPLICA IDENTITY FULL", "CREATE PUBLICATION p FOR TABLE toasted, toasted_full"
    )
    replica.subscribe()
    replica.assert_equal(*names)

    def change(text: str, base: int) -> None:
        text = re.sub(r"#(\d+)", lambda found: str(base + int(found[1])), text)
        for name in names:
            replica.execute(text.format(name))

    # Each in a batch of its own.
    for text in TOAST_CHANGES:
        change(text, 0)
        replica.assert_equal(*names)
    # All in one batch: it collects them while a commit is held.
    fault.arm("commit public.toasted")
    replica.execute("UPDATE toasted SET n = 77 WHERE id = 15")
    fault.wait("commit public.toasted")
    before = replica.batches("toasted_full")
    for text in TOAST_CHANGES:
        change(text, 1000)
    fault.release("commit public.toasted")
    replica.assert_equal(*names)
    assert replica.batches("toasted_full") == before + 1


@pytest.mark.full
def test_truncate(replica: Replica, stock: Callable[[str], Stock]) -> None:
    ddl = """
        CREATE TABLE parent (id int PRIMARY KEY, s serial);
        CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent);
        CREATE TABLE alone (id int PRIMARY KEY, t text);
        CREATE TABLE keyless (a int);
        CREATE TABLE kept (id int PRIMARY KEY);
    """
    beside = stock(ddl)
    fill = """
        INSERT INTO parent (id) SELECT g FROM generate_series(1, 10) g; INSERT INTO child SELECT g, g FROM generate_series(1, 10) g;
        INSERT INTO alone SELECT g, g FROM generate_series(1, 10) g; INSERT INTO keyless SELECT g FROM generate_series(1, 10) g;
    """
    replica.execute(
        ddl,
        fill + "INSERT INTO kept VALUES (1)",
        "CREATE PUBLICATION p FOR TABLE parent, child, alone, keyless; "
        "CREATE PUBLICATION q FOR TABLE kept WITH (publish = 'insert, update, delete')",
    )
    tables = ("parent", "child", "alone", "keyless")
    replica.subscribe("p, q")
    beside.subscribe("p, q")
    replica.assert_equal(*tables, "kept")
    for statement in transactions(
        f"""
        TRUNCATE alone, keyless

        TRUNCATE parent CASCADE

        {fill}

        TRUNCATE parent, child, alone RESTART IDENTITY CASCADE

        INSERT INTO parent (id) VALUES (1);
        INSERT INTO alone VALUES (1, 'a');
        TRUNCATE alone;
        INSERT INTO alone VALUES (2, 'b');
        UPDATE alone SET t = 'c'

        INSERT INTO alone VALUES (3, 'd');
        DELETE FROM alone WHERE id = 2;
        TRUNCATE keyless;
        INSERT INTO keyless VALUES (7), (7)

        TRUNCATE alone;
        TRUNCATE alone;
        TRUNCATE keyless
        """
    ):
        replica.execute(statement)
        replica.assert_equal(*tables)
    beside.assert_equal(*tables)
    replica.execute("TRUNCATE kept")
    replica.caught_up()
    assert [row["id"] for row in replica.rows("kept")] == [1], "a TRUNCATE that is not published"


@pytest.mark.full
def test_transactions_small_and_large(replica: Replica, stock: Callable[[str], Stock]) -> None:
    ddl = "CREATE TABLE a (id int PRIMARY KEY, n int, t text); CREATE TABLE b (id int PRIMARY KEY, n int)"
    beside = stock(ddl)
    replica.execute(ddl, "CREATE PUBLICATION p FOR TABLE a, b; CREATE TABLE unpublished (id int)")
    replica.subscribe()
    beside.subscribe()
    replica.caught_up()
    with replica.database.server.connect(replica.database.name) as connection:
        for number in range(1500):
            connection.execute(
                "INSERT INTO a VALUES (%s, 0, 'x') ON CONFLICT (id) DO UPDATE SET n = a.n + 1", [number % 500]
            )
        # Transactions that are rolled back, in whole or in part, and an empty one.
        with connection.transaction(force_rollback=True):
            connection.execute("INSERT INTO a VALUES (-1, 0, 'never'); TRUNCATE b")
        with connection.transaction():
            connection.execute("INSERT INTO b VALUES (1, 1)")
            with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
                connection.execute("UPDATE b SET n = 2; DELETE FROM a; INSERT INTO b VALUES (1, 1)")
            with connection.transaction():
                connection.execute("INSERT INTO b VALUES (2, 2)")
                with connection.transaction(force_rollback=True):
                    connection.execute("UPDATE b SET n = 3 WHERE id = 2; INSERT INTO b VALUES (3, 3)")
            connection.execute("UPDATE b SET n = 20 WHERE id = 2")
        connection.execute("INSERT INTO unpublished VALUES (1)")
        connection.execute("SELECT pg_current_xact_id()")
        with connection.transaction():
            connection.execute("INSERT INTO a VALUES (-2, 0, 'gone'); DELETE FROM a WHERE id = -2")
    replica.execute(
        "INSERT INTO a SELECT g, g, md5(g::text) FROM generate_series(1000, 200999) g; UPDATE a SET n = n + 1 WHERE id % 50 = 0"
    )
    replica.execute("UPDATE a SET n = -n WHERE id > 1000 AND id % 2 = 0; DELETE FROM a WHERE id > 1000 AND id % 3 = 0")
    replica.assert_equal("a", "b")
    beside.assert_equal("a", "b")
    counted = replica.node.statistics(replica.name)
    assert counted["batches"] < counted["transactions"] / 3, "small transactions were to be joined"


def test_a_value_that_delta_cannot_hold_stops_before_anything_is_applied(replica: Replica, fault: Faults) -> None:
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, at timestamptz); CREATE TABLE z (id int PRIMARY KEY, t text); "
        "CREATE PUBLICATION p FOR TABLE a, z"
    )
    replica.subscribe()
    replica.execute("INSERT INTO a VALUES (1, now()); INSERT INTO z VALUES (1, 'a')")
    replica.assert_equal("a", "z")
    before = {name: replica.version(name) for name in ("a", "z")}
    replica.execute(
        "INSERT INTO z VALUES (2, 'b'); INSERT INTO a VALUES (2, 'infinity'); INSERT INTO z VALUES (3, 'c')"
    )
    # Between two attempts the slot may still be in use, which is a different failure.
    counted = wait_until(
        lambda: next((row for row in [replica.node.statistics(replica.name)] if row["error_detail"]), None),
        "its failure",
    )
    assert counted["error"] == (
        'column "at" of table "public.a": value "infinity" cannot be held exactly by Delta type TIMESTAMP'
    )
    # The finish LSN is that of the transaction's commit record, which the server's own decoder knows.
    found = re.search(r"finished at ([0-9A-F]+/[0-9A-F]+)", counted["error_detail"])
    assert found is not None, counted["error_detail"]
    (finish,) = replica.query(
        "SELECT b.lsn::text FROM pg_create_logical_replication_slot('peek', 'pgoutput', true) s, LATERAL (SELECT s.lsn) b"
    )[0]
    confirmed = f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
    assert replica.query(f"SELECT ({confirmed}) <= '{found[1]}'::pg_lsn AND '{found[1]}'::pg_lsn < '{finish}'") == [
        (True,)
    ]
    assert {name: replica.version(name) for name in ("a", "z")} == before
    # The worker tries again and fails again.
    wait_until(lambda: replica.node.statistics(replica.name)["apply_error_count"] > 2, "another try")
    assert {name: replica.version(name) for name in ("a", "z")} == before
    assert len(replica.slots()) == 1


def test_a_row_without_identity_stops_with_its_reason(replica: Replica) -> None:
    """The publisher refuses an update without an identity, unless updates are not published.

    An update that arrives without the key that Delta has stops the subscription.
    """
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, n int); INSERT INTO a VALUES (1, 1); CREATE PUBLICATION p FOR TABLE a"
    )
    replica.subscribe(schema_changes="refuse")
    replica.assert_equal("a")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        replica.execute("ALTER TABLE a REPLICA IDENTITY NOTHING; UPDATE a SET n = 2")
    # Under FULL the old row still has the key that Delta knows.
    replica.execute("ALTER TABLE a REPLICA IDENTITY FULL", "UPDATE a SET n = 3", "UPDATE a SET id = 2")
    replica.assert_equal("a")
    replica.execute("CREATE UNIQUE INDEX other ON a (n)", "ALTER TABLE a ALTER n SET NOT NULL")
    replica.execute("ALTER TABLE a REPLICA IDENTITY USING INDEX other", "UPDATE a SET n = 4")
    assert (
        "publisher did not send replica identity column expected by the logical replication target relation"
        in replica.error()
    )
