"""Transactions, by way of `pubsub publish`, on stock subscribers: streamed, prepared, aborted, from elsewhere, refused, skipped.

Checks what PostgreSQL's own tests of subscriptions check of a publisher (src/test/subscription/t 004, 014 to 019, 021 to 023,
027, 029, 030, 035).  Our server streams what exceeds 64 kB here.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.replica import wait_until
from tests.support.stock_pairs import Make, Pair

_FULL = [pytest.param(one, marks=pytest.mark.full) for one in ("15-18", "18-15", "16-17", "17-16", "15-15")]
versions_of_both = pytest.mark.parametrize("versions", ["18-18", *_FULL])

_LARGE = "INSERT INTO t SELECT g, md5(g::text) FROM generate_series({0}, {0} + 1499) g"
_MIXED = "UPDATE t SET b = md5(b) WHERE mod(a, 2) = 0 AND a > 2; DELETE FROM t WHERE mod(a, 3) = 0 AND a > 2"


def streaming(pair: Pair, options: str) -> None:
    """Set up a table `t` with rows 1 and 2, and local columns on the subscriber."""
    pair.run("CREATE TABLE t (a int PRIMARY KEY, b text); INSERT INTO t VALUES (1, 'foo'), (2, 'bar')")
    pair.sub("CREATE TABLE t (a int PRIMARY KEY, b text, c timestamptz DEFAULT now(), d bigint DEFAULT 999)")
    pair.sub("ALTER TABLE t ADD COLUMN e int, ADD COLUMN f int")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe(options=f"WITH ({options})")
    pair.synced()
    # Its worker starts again to enable two_phase: what is prepared before is sent at its COMMIT PREPARED.
    pair.gives(f"SELECT subtwophasestate = 'p' FROM pg_subscription WHERE subname = '{pair.name}'", False)


def modes(versions: str) -> list[str]:
    """Return the modes of streaming that both versions have."""
    return ["on", "parallel"] if all(int(one) >= 16 for one in versions.split("-")) else ["on"]


def equal(pair: Pair) -> None:
    pair.equal("SELECT a, b FROM t ORDER BY a")
    pair.gives("SELECT DISTINCT d, c IS NULL FROM t", (999, False))


@versions_of_both
@pytest.mark.parametrize("mode", [pytest.param("on", marks=pytest.mark.full), "parallel"])
def test_streamed_transactions(pairs: Make, versions: str, mode: str) -> None:
    """Two at a time with small ones between, subtransactions at every depth, DDL inside, aborts of parts and of all."""
    if mode not in modes(versions):
        pytest.skip("parallel needs 16")
    pair = pairs(*versions.split("-"))
    streaming(pair, f"streaming = {mode}")
    with pair.publisher.connect(pair.name) as held, held.transaction():
        held.execute(_LARGE.format(3).encode())
        held.execute(_MIXED.encode())
        pair.run("BEGIN; INSERT INTO t SELECT g, 'small' FROM generate_series(9001, 9010) g; COMMIT")
        pair.run(f"BEGIN; {_LARGE.format(20000)}; UPDATE t SET b = 'other' WHERE a BETWEEN 20000 AND 20100; COMMIT")
        held.execute(_LARGE.format(10000).encode())
    equal(pair)
    pair.sub("UPDATE t SET c = '2000-01-01 00:00Z'")
    pair.run(
        # Subtransactions, released and not.
        "BEGIN; INSERT INTO t VALUES (100001, 'a'); SAVEPOINT s1; "
        + "; SAVEPOINT s; ".join(_LARGE.format(110000 + 5000 * n) for n in range(4))
        + f"; RELEASE s; {_MIXED}; COMMIT",
        # Rolled back to, at several depths, and gone on.
        f"BEGIN; {_LARGE.format(200000)}; SAVEPOINT a; {_LARGE.format(210000)}; SAVEPOINT b; {_LARGE.format(220000)};"
        f"ROLLBACK TO a; {_LARGE.format(230000)}; SAVEPOINT c; UPDATE t SET b = 'x'; ROLLBACK TO c; {_LARGE.format(240000)}; COMMIT",
        # Rolled back whole, after a part was streamed.
        f"BEGIN; {_LARGE.format(300000)}; SAVEPOINT a; {_LARGE.format(310000)}; ROLLBACK",
        # Rolled back to the first savepoint, so that nothing is left but what came first.
        f"BEGIN; SAVEPOINT a; {_LARGE.format(400000)}; ROLLBACK TO a; INSERT INTO t VALUES (499999, 'left'); COMMIT",
        # DDL inside: columns come, also in subtransactions that end in ROLLBACK.
        f"BEGIN; {_LARGE.format(500000)}; ALTER TABLE t ADD COLUMN e int; {_LARGE.format(510000)};"
        f"ALTER TABLE t DROP COLUMN e; {_LARGE.format(520000)}; COMMIT",
        f"BEGIN; {_LARGE.format(600000)}; SAVEPOINT a; ALTER TABLE t ADD COLUMN f int; {_LARGE.format(610000)}; ROLLBACK TO a;"
        f"{_LARGE.format(620000)}; COMMIT",
        f"BEGIN; {_LARGE.format(700000)}; TRUNCATE t; {_LARGE.format(710000)}; COMMIT",
        "INSERT INTO t VALUES (999999, 'last')",
    )
    equal(pair)
    pair.caught_up()


@pytest.mark.full
@versions_of_both
@pytest.mark.parametrize("two_phase", [pytest.param("off", marks=pytest.mark.full), "on"])
def test_a_rolled_back_column(pairs: Make, versions: str, two_phase: str) -> None:
    """Rows with a column that a subscriber reads of after it is gone are not sent: it has none for them, and would stop for ever."""
    pair = pairs(*versions.split("-"))
    # A parallel worker applies what comes at once.
    streaming(pair, f"streaming = {modes(versions)[-1]}, two_phase = {two_phase}")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE")
    column, gid = "ALTER TABLE t ADD COLUMN only_here int DEFAULT 7", f"{pair.name}_1"
    pair.run(
        f"BEGIN; {_LARGE.format(1000)}; SAVEPOINT a; {column}; {_LARGE.format(3000)}; ROLLBACK TO a; {_LARGE.format(5000)}; COMMIT",
        # The column is of a part that was released, in one that is rolled back.
        f"BEGIN; SAVEPOINT a; {_LARGE.format(11000)}; SAVEPOINT b; {column}; RELEASE b; {_LARGE.format(13000)}; ROLLBACK TO a;"
        f"{_LARGE.format(15000)}; SAVEPOINT c; {column}; {_LARGE.format(17000)}; ROLLBACK TO c; {_LARGE.format(19000)}; COMMIT",
        f"BEGIN; {_LARGE.format(21000)}; {column}; {_LARGE.format(23000)}; ROLLBACK",
        f"BEGIN; {_LARGE.format(31000)}; {column}; {_LARGE.format(33000)}; PREPARE TRANSACTION '{gid}'",
        f"ROLLBACK PREPARED '{gid}'",
        f"BEGIN; {column}; INSERT INTO t VALUES (41000, 'a'); PREPARE TRANSACTION '{gid}'",
        f"ROLLBACK PREPARED '{gid}'",
        "INSERT INTO t VALUES (51000, 'last')",
    )
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} ENABLE")
    equal(pair)
    pair.caught_up()


@pytest.mark.full
def test_a_deadlock_of_parallel_workers(pairs: Make) -> None:
    """An index that only the subscriber has lets two transactions wait for each other; PostgreSQL tries again."""
    pair = pairs()
    pair.both("CREATE TABLE t (a int)")
    pair.sub("CREATE UNIQUE INDEX only_here ON t (a)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe(options="WITH (streaming = parallel)")
    pair.synced()
    # A parallel worker is started when the leader knows that the table is ready, which it may do a transaction after it has said so.
    pair.run("INSERT INTO t VALUES (0)")
    pair.gives("SELECT count(*) FROM t", 1)
    begin = len(pair.subscriber.read_log())
    rows = "INSERT INTO t SELECT g FROM generate_series(1, 5000) g"
    with pair.publisher.connect(pair.name) as held, held.transaction():
        held.execute(rows.encode())
        wait_until(
            lambda: pair.subscribed("SELECT 1 FROM pg_stat_subscription WHERE worker_type LIKE 'parallel%'"),
            "it streams",
        )
        # Else the other transaction comes first, and there is no deadlock.
        wait_until(
            lambda: pair.subscribed("SELECT pg_relation_size('t') > 30000") == [(True,)], "its first rows are there"
        )
        pair.run("INSERT INTO t VALUES (1)")
    pair.subscriber_says("deadlock detected", begin)
    pair.sub("DROP INDEX only_here")
    pair.gives("SELECT count(*) FROM t", 5002)


_PREPARED = "SELECT gid IS NOT NULL FROM pg_prepared_xacts WHERE database = current_database()"


def prepared(pair: Pair, *gids: bool) -> None:
    """Wait until the subscriber has so many prepared transactions."""
    pair.gives(_PREPARED, *gids)


@versions_of_both
@pytest.mark.parametrize(
    "mode", [pytest.param("off", marks=pytest.mark.full), "on", pytest.param("parallel", marks=pytest.mark.full)]
)
def test_prepared_transactions(pairs: Make, versions: str, mode: str) -> None:
    """Committed and rolled back, over restarts of each side, with savepoints, names of the subscriber's own, large ones."""
    if mode != "off" and mode not in modes(versions):
        pytest.skip("parallel needs 16")
    pair = pairs(*versions.split("-"))
    streaming(pair, f"two_phase, streaming = {mode}")
    gid = pair.name
    rows = 10 if mode == "off" else 1499
    size = f"INSERT INTO t SELECT g, md5(g::text) FROM generate_series({{0}}, {{0}} + {rows}) g"
    pair.run(f"BEGIN; {size.format(1000)}; {_MIXED}; PREPARE TRANSACTION '{gid}_1'")
    prepared(pair, True)
    pair.run(f"COMMIT PREPARED '{gid}_1'")
    equal(pair)
    prepared(pair)
    pair.run(f"BEGIN; {size.format(20000)}; DELETE FROM t WHERE a < 1010; PREPARE TRANSACTION '{gid}_1'")
    prepared(pair, True)
    pair.run(f"ROLLBACK PREPARED '{gid}_1'")
    prepared(pair)
    equal(pair)
    # Savepoints, an insert after them by somebody else, and a name with quotes.
    pair.run(
        f"BEGIN; SAVEPOINT a; {size.format(30000)}; SAVEPOINT b; {size.format(40000)}; ROLLBACK TO b; {size.format(50000)};"
        f"PREPARE TRANSACTION 'O''{gid}''s \"quoted\" name'",
        "INSERT INTO t VALUES (99999, 'another')",
    )
    prepared(pair, True)
    # Two at a time, ended the other way round.
    pair.run(f"BEGIN; {size.format(60000)}; PREPARE TRANSACTION '{gid}_2'")
    prepared(pair, True, True)
    pair.run(f"ROLLBACK PREPARED '{gid}_2'", f"COMMIT PREPARED 'O''{gid}''s \"quoted\" name'")
    equal(pair)
    prepared(pair)
    # An empty one, one that only locks, and one of an unpublished table.
    pair.run("CREATE TABLE aside (a int)")
    for body in ("SELECT count(*) FROM t", "SELECT a FROM t WHERE a = 1 FOR UPDATE", "INSERT INTO aside VALUES (1)"):
        pair.run(f"BEGIN; {body}; PREPARE TRANSACTION '{gid}_3'", f"COMMIT PREPARED '{gid}_3'")
    pair.run("INSERT INTO t VALUES (99998, 'last')")
    equal(pair)


def test_two_phase_is_switched(pairs: Make) -> None:
    """Prepared before two_phase is on: sent at COMMIT PREPARED.  18 switches it for a subscription that exists."""
    pair = pairs()
    streaming(pair, "two_phase = off")
    gid = pair.name
    pair.run(f"BEGIN; INSERT INTO t VALUES (10, 'x'); PREPARE TRANSACTION '{gid}_1'")
    pair.run("INSERT INTO t VALUES (11, 'y')")
    equal_without = "SELECT a, b FROM t ORDER BY a"
    pair.equal(equal_without)
    prepared(pair)
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE")
    wait_until(
        lambda: pair.served(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pair.name}'") == [(False,)],
        "the slot is free",
    )
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} SET (two_phase = on)")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} ENABLE")
    prepares = f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{pair.name}'"
    wait_until(lambda: pair.served(prepares) == [(True,)], "the slot has two_phase")
    pair.run(f"BEGIN; INSERT INTO t VALUES (12, 'z'); PREPARE TRANSACTION '{gid}_2'")
    pair.gives("SELECT count(*) > 0 FROM pg_prepared_xacts WHERE database = current_database()", True)
    pair.run(f"COMMIT PREPARED '{gid}_1'", f"COMMIT PREPARED '{gid}_2'")
    pair.equal(equal_without)
    prepared(pair)
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE")
    wait_until(
        lambda: pair.served(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pair.name}'") == [(False,)],
        "the slot is free",
    )
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} SET (two_phase = off)")
    assert pair.served(prepares) == [(False,)]
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} ENABLE")
    pair.run(f"BEGIN; INSERT INTO t VALUES (13, 'z'); PREPARE TRANSACTION '{gid}_3'", "INSERT INTO t VALUES (14, 'w')")
    pair.equal(equal_without)
    prepared(pair)
    pair.run(f"COMMIT PREPARED '{gid}_3'")
    pair.equal(equal_without)


@versions_of_both
def test_binary_transfer(pairs: Make, versions: str) -> None:
    """Switched on and off; types that differ fail, as behind PostgreSQL, and work as text (014)."""
    pair = pairs(*versions.split("-"))
    ddl = "CREATE TABLE n (a numeric PRIMARY KEY, b numeric, c numeric[]); CREATE TABLE w (a text PRIMARY KEY, b int[], c text[])"
    pair.both(ddl)
    pair.run(
        "INSERT INTO n VALUES (1.2, 3.4, '{5.6,7.8}'); INSERT INTO w VALUES ('x', '{1,2}', '{\"a b\",c}')",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    pair.subscribe(options="WITH (binary)")
    pair.synced()
    pair.run("INSERT INTO n VALUES (2.2, 'NaN', NULL); UPDATE w SET b = '{3}'; UPDATE n SET a = 1.3 WHERE a = 1.2")
    pair.equal("n", "w")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} SET (binary = false)")
    pair.run("INSERT INTO n VALUES (3.2, 0, '{}')")
    pair.equal("n")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} SET (binary)")
    pair.run("CREATE TABLE other (a bigint PRIMARY KEY)")
    pair.sub("CREATE TABLE other (a int PRIMARY KEY)", f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION")
    pair.synced()  # a copy from or to 15 is text
    begin = len(pair.subscriber.read_log())
    pair.run("INSERT INTO other VALUES (1)")
    pair.subscriber_says("incorrect binary data format", begin)
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} SET (binary = false)")
    pair.equal("other")


def test_origins(pairs: Make) -> None:
    """Two nodes that follow each other: what came from the other is not sent back, and the warning of it is PostgreSQL's."""
    one, other = pairs(), pairs()
    # Each database is a publisher's and, under the other's name, a subscriber's: the subscriber's server is the publisher of none.
    one.both("CREATE TABLE t (a int PRIMARY KEY, b text)")
    other.run("CREATE TABLE t (a int PRIMARY KEY, b text)")
    one.run("CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (1, 'one')")
    other.run("CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (2, 'other')")

    def follow(here: Pair, there: Pair, copy: str) -> None:
        where = f"'{there.conninfo} application_name={here.name}'"
        there.publish.execute(
            f"SELECT pg_create_logical_replication_slot('{here.name}', 'pgoutput')", dbname=there.name
        )
        here.run(
            f"CREATE SUBSCRIPTION {here.name} CONNECTION {where} PUBLICATION p "
            f"WITH (origin = none, copy_data = {copy}, create_slot = false)"
        )

    follow(one, other, "false")
    follow(other, one, "false")
    try:
        one.subscribe(f"{one.name}_any", options="WITH (origin = any)")
        one.synced()
        one.run("INSERT INTO t VALUES (3, 'from one')")
        other.run("INSERT INTO t VALUES (4, 'from other')")
        one.run("UPDATE t SET b = 'changed' WHERE a = 3")
        rows = "SELECT a, b FROM t WHERE a > 2 ORDER BY a"
        wait_until(
            lambda: one.published(rows) == other.published(rows) == [(3, "changed"), (4, "from other")],
            "both have both",
        )
        one.gives(rows, (3, "changed"), (4, "from other"))
        # A third one that wants local changes only.
        one.run("INSERT INTO t VALUES (5, 'x')")
        one.gives("SELECT b FROM t WHERE a = 5", "x")
        one.sub(f"ALTER SUBSCRIPTION {one.name}_any SET (origin = none)")
        other.run("INSERT INTO t VALUES (6, 'other')")
        wait_until(lambda: one.published("SELECT 1 FROM t WHERE a = 6") == [(1,)], "it has come")
        one.run("INSERT INTO t VALUES (7, 'local')")
        one.gives("SELECT a FROM t WHERE a > 5", 7)
    finally:
        for node in (one, other):
            node.run(f"DROP SUBSCRIPTION {node.name}")


def test_an_error_disables_and_is_skipped(pair: Pair) -> None:
    """disable_on_error and ALTER SUBSCRIPTION … SKIP, of a small, a streamed and a prepared transaction (029)."""
    pair.run("CREATE TABLE t (i int, v text)", "CREATE PUBLICATION p FOR TABLE t")
    pair.sub("CREATE TABLE t (i int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'in the way')")
    pair.subscribe(options="WITH (disable_on_error, streaming = on, two_phase)")
    pair.synced()
    gid = pair.name
    for number, failing in enumerate(
        (
            "INSERT INTO t VALUES (1, 'failing')",
            "BEGIN; INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 5000) g; COMMIT",
            f"BEGIN; INSERT INTO t VALUES (1, 'p'); PREPARE TRANSACTION '{gid}'",
        ),
        start=1,
    ):
        begin = len(pair.subscriber.read_log())
        pair.run(failing)
        pair.gives("SELECT subenabled FROM pg_subscription WHERE subname = current_database()", False)
        said = pair.subscriber.read_log()[begin:]
        found = re.findall(r"conflict=insert_exists|finished at ([0-9A-F]+/[0-9A-F]+)", said)
        lsn = next(one for one in reversed(found) if one)
        pair.sub(f"ALTER SUBSCRIPTION {pair.name} SKIP (lsn = '{lsn}')", f"ALTER SUBSCRIPTION {pair.name} ENABLE")
        if "PREPARE" in failing:
            pair.run(f"COMMIT PREPARED '{gid}'")
        pair.run(f"INSERT INTO t VALUES ({100_000 + number}, 'after')")
        pair.gives(f"SELECT v FROM t WHERE i = {100_000 + number}", "after")
    pair.gives("SELECT i FROM t WHERE i < 100000", 1)


def test_conflicts_are_told_with_the_publisher_s_times(pair: Pair) -> None:
    """18's conflicts name origin, commit time and transaction of the remote change, which the stream has to carry (035)."""
    pair.both("CREATE TABLE t (a int PRIMARY KEY, b int UNIQUE, c int UNIQUE)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.sub("INSERT INTO t VALUES (2, 2, 2), (3, 3, 3), (4, 4, 4)")
    begin = len(pair.subscriber.read_log())
    pair.run("INSERT INTO t VALUES (2, 3, 4)")
    begin = pair.subscriber_says("conflict=multiple_unique_conflicts", begin)
    pair.sub("TRUNCATE t")
    pair.equal("t")
    pair.sub("UPDATE t SET c = 9")
    begin = len(pair.subscriber.read_log())
    pair.run("UPDATE t SET c = 10")
    pair.subscriber_says("conflict=update_origin_differs", begin)
    pair.sub("DELETE FROM t")
    pair.run("UPDATE t SET c = 11; DELETE FROM t")
    pair.subscriber_says("conflict=update_missing", begin)
    pair.subscriber_says("conflict=delete_missing", begin)


@pytest.mark.full
@versions_of_both
def test_copies_that_fail_and_start_again(pairs: Make, versions: str) -> None:
    """A copy in the way of rows, one whose worker is killed, tables that come during a copy, dropped while it waits (004)."""
    pair = pairs(*versions.split("-"))
    pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    pair.run("INSERT INTO t SELECT generate_series(1, 10)", "CREATE PUBLICATION p FOR ALL TABLES")
    pair.sub("INSERT INTO t VALUES (5)")
    pair.subscribe()
    pair.gives("SELECT srsubstate FROM pg_subscription_rel", "d")
    pair.subscriber_says('duplicate key value violates unique constraint "t_pkey"')
    pair.run("INSERT INTO t VALUES (11)", "DELETE FROM t WHERE a = 1")
    pair.sub("TRUNCATE t")
    pair.synced()
    pair.equal("t")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE", f"ALTER SUBSCRIPTION {pair.name} SET (slot_name = NONE)")
    pair.sub(f"DROP SUBSCRIPTION {pair.name}")
    pair.made.clear()
    assert pair.slots() == [pair.name]
    pair.sub("TRUNCATE t")
    error = pair.refused(f"CREATE SUBSCRIPTION {pair.name} CONNECTION '{pair.conninfo}' PUBLICATION p")
    assert error.diag.message_primary is not None
    assert f'replication slot "{pair.name}" already exists' in error.diag.message_primary
    wait_until(
        lambda: pair.served(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pair.name}'") == [(False,)],
        "the slot is free",
    )
    pair.publish.execute(f"SELECT pg_drop_replication_slot('{pair.name}')", dbname=pair.name)
    pair.subscribe()
    pair.synced()
    pair.equal("t")
    # A subscription that is dropped while its copy cannot go on leaves no slot.
    pair.both("CREATE TABLE u (a int PRIMARY KEY)")
    pair.run("INSERT INTO u SELECT generate_series(1, 10)")
    pair.sub("INSERT INTO u VALUES (5)", f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION")
    pair.gives("SELECT srsubstate FROM pg_subscription_rel WHERE srrelid = 'u'::regclass", "d")
    pair.drop()
    wait_until(lambda: pair.slots() == [], "no slot is left")


@pytest.mark.full
def test_a_slot_made_by_hand_and_connections_that_fail(pair: Pair) -> None:
    """connect = false, create_slot = false, slots of other names; a wrong role, database, host, slot."""
    pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    pair.run("CREATE PUBLICATION p FOR TABLE t; INSERT INTO t VALUES (1)")
    where = f"CONNECTION '{pair.conninfo}' PUBLICATION p"
    for wrong, said in (
        ("dbname=nope", 'database "nope" does not exist'),
        ("user=nope", 'role "nope" does not exist'),
        ("port=1", "Connection refused"),
    ):
        error = pair.refused(f"CREATE SUBSCRIPTION x CONNECTION '{pair.conninfo} {wrong}' PUBLICATION p")
        assert said in str(error), wrong
    name = pair.name
    pair.publish.execute(f"SELECT pg_create_logical_replication_slot('{name}_own', 'pgoutput')", dbname=name)
    pair.sub(f"CREATE SUBSCRIPTION {name} {where} WITH (connect = false, slot_name = '{name}_own')")
    pair.made.append(name)
    pair.run("INSERT INTO t VALUES (2)")
    pair.sub(
        f"ALTER SUBSCRIPTION {name} ENABLE", f"ALTER SUBSCRIPTION {name} REFRESH PUBLICATION WITH (copy_data = true)"
    )
    pair.synced()
    pair.equal("t")
    pair.sub(f"ALTER SUBSCRIPTION {name} DISABLE", f"ALTER SUBSCRIPTION {name} SET (slot_name = 'nope')")
    pair.sub(f"ALTER SUBSCRIPTION {name} ENABLE")
    pair.subscriber_says('replication slot "nope" does not exist')
    pair.sub(f"ALTER SUBSCRIPTION {name} DISABLE", f"ALTER SUBSCRIPTION {name} SET (slot_name = '{name}_own')")
    pair.sub(f"ALTER SUBSCRIPTION {name} ENABLE")
    pair.run("INSERT INTO t VALUES (3)")
    pair.equal("t")


@pytest.mark.full
def test_a_subscription_s_failover_is_switched(pair: Pair) -> None:
    pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe(options="WITH (failover)")
    pair.synced()
    flag = f"SELECT failover FROM pg_replication_slots WHERE slot_name = '{pair.name}'"
    assert pair.served(flag) == [(True,)]
    free = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pair.name}'"
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE")
    wait_until(lambda: pair.served(free) == [(False,)], "the slot is free")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} SET (failover = false)", f"ALTER SUBSCRIPTION {pair.name} ENABLE")
    assert pair.served(flag) == [(False,)]
    pair.run("INSERT INTO t VALUES (1)")
    pair.equal("t")


@pytest.mark.full
@pytest.mark.parametrize("versions", ["18-18", "15-15"])
def test_a_subscription_of_a_plain_role(pairs: Make, versions: str) -> None:
    """The publisher's role has REPLICATION and SELECT only; what it may not read fails with the server's words (027)."""
    pair = pairs(*versions.split("-"))
    role = f"{pair.name}_reader"
    pair.both("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE hidden (a int PRIMARY KEY)")
    pair.run(
        f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON t TO {role}; INSERT INTO t VALUES (1); INSERT INTO hidden VALUES (1)"
    )
    try:
        pair.run("CREATE PUBLICATION p FOR TABLE t, hidden")
        pair.subscribe(conninfo=f"{pair.conninfo} user={role}")
        pair.subscriber_says("permission denied for table hidden")
        pair.run(
            f"GRANT SELECT ON hidden TO {role}; INSERT INTO hidden VALUES (2); DELETE FROM t; INSERT INTO t VALUES (3)"
        )
        pair.synced()
        pair.equal("t", "hidden")
    finally:
        for name in list(pair.made):
            pair.drop(name)
        pair.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.full
def test_commits_wait_for_a_synchronous_subscriber(make: Make) -> None:
    """synchronous_standby_names names the subscriber, which the publisher does not know (010)."""
    pair = make()
    pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe("waited_for")
    pair.synced()
    pair.publisher.execute("ALTER SYSTEM SET synchronous_commit = 'remote_apply'")
    pair.publisher.execute("ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (Waited_For)'")
    pair.publisher.query("SELECT pg_reload_conf()")
    state = "SELECT sync_priority, sync_state FROM pg_stat_replication WHERE application_name = 'waited_for'"
    try:
        wait_until(lambda: pair.served(state) == [(1, "sync")], "our view shows that it is synchronous")
        for number in range(20):
            pair.run(f"INSERT INTO t VALUES ({number})")
            assert pair.subscribed("SELECT max(a) FROM t") == [(number,)], "it is applied when the commit returns"
        pair.sub("ALTER SUBSCRIPTION waited_for DISABLE")
        with ThreadPoolExecutor(1) as threads:
            committing = threads.submit(pair.run, "INSERT INTO t VALUES (100)")
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: pair.published(waits) == [(1,)], "the commit waits")
            assert not committing.done()
            pair.sub("ALTER SUBSCRIPTION waited_for ENABLE")
            committing.result(60)
        pair.equal("t")
        # The WAL that is received here makes no commit safe.
        pair.sub("ALTER SUBSCRIPTION waited_for DISABLE")
        pair.publisher.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        pair.publisher.query("SELECT pg_reload_conf()")
        with ThreadPoolExecutor(1) as threads:
            committing = threads.submit(pair.run, "INSERT INTO t VALUES (200)")
            wait_until(lambda: pair.published(waits) == [(1,)], "the commit waits")
            pair.sub("ALTER SUBSCRIPTION waited_for ENABLE")
            committing.result(60)
        pair.equal("t")
        # A server that is shut down waits until all its walsenders have their WAL confirmed.
        pair.publisher.restart()
        wait_until(lambda: pair.served(state) == [(1, "sync")], "it is synchronous again")
        pair.run("INSERT INTO t VALUES (300)")
        assert pair.subscribed("SELECT max(a) FROM t") == [(300,)]
    finally:
        pair.publisher.execute("ALTER SYSTEM RESET synchronous_standby_names")
        pair.publisher.query("SELECT pg_reload_conf()")
