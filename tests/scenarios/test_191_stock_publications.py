"""What a publication can say, by way of `pubsub publish`: schemas, row filters, column lists, partitions, several at once.

Checks what PostgreSQL's own tests of subscriptions check of a publisher (src/test/subscription/t 013, 021, 024, 025, 028,
031, and the publications in 100).
"""

from __future__ import annotations

import pytest

from tests.support.stock_pairs import Make, Pair

_FULL = [pytest.param(one, marks=pytest.mark.full) for one in ("15-18", "18-15", "16-17", "17-16")]
versions_of_both = pytest.mark.parametrize("versions", ["18-18", *_FULL])


@versions_of_both
def test_tables_in_a_schema(pairs: Make, versions: str) -> None:
    """Also those that come, leave, are dropped, or whose partitions lie elsewhere."""
    pair = pairs(*versions.split("-"))
    ddl = """
        CREATE SCHEMA one; CREATE TABLE one.a (a int PRIMARY KEY); CREATE TABLE one.b (a int);
        CREATE TABLE one.parent (a int PRIMARY KEY, b text) PARTITION BY LIST (a);
        CREATE TABLE public.child PARTITION OF one.parent FOR VALUES IN (1, 2, 3);
        CREATE TABLE public.child2 PARTITION OF one.parent FOR VALUES IN (4, 5, 6);
    """
    pair.both(ddl)
    pair.run(
        "INSERT INTO one.a SELECT generate_series(1, 10); INSERT INTO one.parent VALUES (1), (4)",
        "CREATE PUBLICATION p FOR TABLES IN SCHEMA one",
    )
    pair.subscribe()
    pair.synced()
    pair.run(
        "INSERT INTO one.a SELECT generate_series(11, 20); INSERT INTO one.parent VALUES (2), (5); DELETE FROM one.a WHERE a = 3"
    )
    pair.equal("one.a", "one.parent")
    pair.both("CREATE TABLE one.late (a int)")
    pair.run("INSERT INTO one.late VALUES (1)")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION")
    pair.synced()
    pair.run("INSERT INTO one.late VALUES (2)")
    pair.equal("one.late")
    pair.run("ALTER TABLE one.late SET SCHEMA public; INSERT INTO late VALUES (3); INSERT INTO one.a VALUES (30)")
    pair.equal("one.a")
    pair.gives("SELECT a FROM one.late ORDER BY 1", 1, 2)
    pair.run("DROP TABLE one.b")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION")
    pair.gives("SELECT count(*) FROM pg_subscription_rel", 3)
    pair.run(
        "INSERT INTO one.a VALUES (40); ALTER PUBLICATION p DROP TABLES IN SCHEMA one; INSERT INTO one.a VALUES (41)",
        "ALTER PUBLICATION p ADD TABLES IN SCHEMA one; INSERT INTO one.a VALUES (42)",
    )
    pair.gives("SELECT a FROM one.a WHERE a >= 40 ORDER BY 1", 40, 42)


@versions_of_both
def test_row_filters(pairs: Make, versions: str) -> None:
    """Of inserts, of updates that enter and leave, of large values, of several publications, and none for ALL TABLES."""
    pair = pairs(*versions.split("-"))
    ddl = """
        CREATE TABLE one (a int PRIMARY KEY, b text);
        CREATE TABLE two (c int PRIMARY KEY);
        CREATE TABLE three (a int PRIMARY KEY, b bool);
        CREATE TABLE toast (a text NOT NULL, b text NOT NULL, c int);
        CREATE TABLE child (b text) INHERITS (two);
        CREATE TABLE open (a int PRIMARY KEY);
        CREATE SCHEMA rf; CREATE TABLE rf.t (x int PRIMARY KEY);
    """
    pair.both(ddl, "ALTER TABLE toast REPLICA IDENTITY FULL; ALTER TABLE toast ALTER a SET STORAGE EXTERNAL")
    pair.run("ALTER TABLE one REPLICA IDENTITY FULL; ALTER TABLE three REPLICA IDENTITY FULL")
    pair.run("ALTER TABLE child REPLICA IDENTITY FULL")
    pair.run(
        "INSERT INTO one SELECT g, 'test ' || g FROM generate_series(990, 1002) g",
        "INSERT INTO one VALUES (1, 'not'), (1500, 'filtered')",
        "INSERT INTO two SELECT generate_series(1, 20); INSERT INTO three SELECT g, g % 3 = 0 FROM generate_series(1, 10) g",
        "INSERT INTO toast VALUES (repeat('1234567890', 200), '1234567890', 1); INSERT INTO child VALUES (30, 'x')",
        "CREATE PUBLICATION p1 FOR TABLE one WHERE (a > 1000 AND b <> 'filtered'), three WHERE (b IS TRUE)",
        "CREATE PUBLICATION p2 FOR TABLE two WHERE (c % 2 = 0), toast WHERE (a = repeat('1234567890', 200) AND b < '10')",
        "CREATE PUBLICATION p3 FOR TABLE two WHERE (c % 3 = 0), open WHERE (a > 10)",
        "CREATE PUBLICATION p4 FOR TABLES IN SCHEMA rf; ALTER PUBLICATION p4 ADD TABLE open WHERE (a % 2 = 0)",
        "INSERT INTO open SELECT generate_series(1, 20); INSERT INTO rf.t SELECT generate_series(1, 5)",
    )
    pair.subscribe(publication="p1, p2, p3, p4")
    pair.synced()
    one = "SELECT a, b FROM one WHERE a > 1000 AND b <> 'filtered' ORDER BY 1"
    two = "SELECT c FROM two WHERE c % 2 = 0 OR c % 3 = 0 ORDER BY 1"
    either = "SELECT a FROM open WHERE a > 10 OR a % 2 = 0 ORDER BY 1"
    pair.equal(one, two, either, "rf.t", "SELECT a FROM three WHERE b ORDER BY 1")
    pair.gives("SELECT count(*) FROM toast", 0)
    pair.run(
        "INSERT INTO one VALUES (800, 'no'), (1600, 'yes'), (1601, 'yes'), (1602, 'filtered'), (1700, 'yes')",
        "UPDATE one SET b = 'updated' WHERE a = 1600; UPDATE one SET b = 'enters' WHERE a = 1602",
        "UPDATE one SET a = a - 1000 WHERE a = 1601; UPDATE one SET a = 1603 WHERE a = 800; DELETE FROM one WHERE a = 1700",
        "UPDATE one SET a = a + 3000 WHERE a = 1602; UPDATE one SET b = NULL WHERE a = 1001",
        "INSERT INTO two SELECT generate_series(21, 25); UPDATE two SET c = c + 100; DELETE FROM two WHERE c > 122",
        "UPDATE three SET b = NOT b; INSERT INTO three VALUES (100, NULL); INSERT INTO open VALUES (-1), (-2), (99)",
        "UPDATE toast SET b = '1'; INSERT INTO rf.t VALUES (100)",
    )
    pair.equal(one, either, "rf.t", "SELECT a FROM three WHERE b ORDER BY 1")
    pair.equal("SELECT length(a), b, c FROM toast")
    pair.run("UPDATE toast SET c = 2", "TRUNCATE two", "INSERT INTO two VALUES (1), (2)", "TRUNCATE three")
    pair.equal(two, "SELECT length(a), b, c FROM toast", "three")
    pair.run("CREATE PUBLICATION everything FOR ALL TABLES")
    pair.alter("ADD PUBLICATION everything")
    pair.synced()
    pair.run("INSERT INTO one VALUES (7, 'now it comes')")
    pair.gives("SELECT b FROM one WHERE a = 7", "now it comes")


def test_row_filters_of_partitions(pair: Pair) -> None:
    """The root's filter counts if the root is published, else the partition's own."""
    ddl = """
        CREATE TABLE parent (a int PRIMARY KEY, b int) PARTITION BY RANGE (a);
        CREATE TABLE low PARTITION OF parent FOR VALUES FROM (0) TO (5000);
        CREATE TABLE high (b int, a int PRIMARY KEY);
        ALTER TABLE parent ATTACH PARTITION high FOR VALUES FROM (5000) TO (20000);
    """
    pair.both(ddl)
    pair.run(
        "INSERT INTO parent VALUES (1, 100), (4001, 30), (4500, 450), (7000, 101), (15000, 102)",
        "CREATE PUBLICATION p FOR TABLE parent WHERE (a > 4000), low WHERE (a < 2000) WITH (publish_via_partition_root)",
    )
    pair.subscribe()
    pair.synced()
    pair.gives("SELECT a, b FROM parent ORDER BY a", (4001, 30), (4500, 450), (7000, 101), (15000, 102))
    pair.run("INSERT INTO parent VALUES (4002, 1), (3, 1), (17000, 5); UPDATE parent SET a = 6000 WHERE a = 3")
    pair.run("UPDATE parent SET a = 10 WHERE a = 4500; DELETE FROM parent WHERE a = 7000")
    pair.equal("SELECT a, b FROM parent WHERE a > 4000 ORDER BY a")
    pair.run("ALTER PUBLICATION p DROP TABLE parent; ALTER PUBLICATION p SET (publish_via_partition_root = false)")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION WITH (copy_data = false)")
    pair.run("INSERT INTO parent VALUES (11, 1), (4010, 1)")
    pair.gives("SELECT a FROM parent WHERE a IN (11, 4010)", 11)


@versions_of_both
def test_column_lists(pairs: Make, versions: str) -> None:
    """Lists that change, with keys in and out of them, large values, dropped columns, several publications."""
    pair = pairs(*versions.split("-"))
    pair.run(
        'CREATE TABLE a (a int PRIMARY KEY, "B" int, c int); CREATE TABLE b (a int PRIMARY KEY, b varchar, c int)',
        "CREATE TYPE mood AS ENUM ('red', 'blue'); CREATE TABLE c (a int PRIMARY KEY, b mood, c text, d int)",
        "INSERT INTO a VALUES (1, 2, 3), (4, 5, 6); INSERT INTO b VALUES (1, 'abc', 3); INSERT INTO c VALUES (1, 'red', 'oh', 1)",
        'CREATE PUBLICATION p FOR TABLE a (a, "B"), b (a, b), c (a, b, c)',
    )
    pair.sub(
        'CREATE TABLE a (a int PRIMARY KEY, "B" int, c int DEFAULT 99); CREATE TABLE b (a int PRIMARY KEY, b varchar, c int)',
        "CREATE TYPE mood AS ENUM ('red', 'blue'); CREATE TABLE c (a int PRIMARY KEY, b mood, c text)",
    )
    pair.subscribe()
    pair.synced()
    pair.gives('SELECT a, "B", c FROM a ORDER BY a', (1, 2, 99), (4, 5, 99))
    pair.run(
        'INSERT INTO a VALUES (2, 3, 4); UPDATE a SET "B" = 7 WHERE a = 1; UPDATE a SET c = 8; DELETE FROM a WHERE a = 4',
        "INSERT INTO c VALUES (2, 'blue', repeat(md5('x'), 5000), 2); UPDATE c SET d = 3; UPDATE c SET b = 'red'",
        "UPDATE b SET c = 9; UPDATE b SET a = 10",
    )
    pair.gives('SELECT a, "B", c FROM a ORDER BY a', (1, 7, 99), (2, 3, 99))
    pair.equal("SELECT a, b, c FROM c ORDER BY a", "SELECT a, b FROM b")
    pair.run(
        "ALTER PUBLICATION p SET TABLE b (a, c), c (a, b, c)",
        "UPDATE b SET b = 'unseen', c = 11",
        "INSERT INTO a VALUES (9)",
    )
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION")
    pair.gives("SELECT a, b, c FROM b", (10, "abc", 11))
    pair.run("ALTER TABLE b DROP COLUMN b; INSERT INTO b VALUES (20, 21)")
    pair.gives("SELECT c FROM b WHERE a = 20", 21)
    pair.run(
        "CREATE TABLE k (a int PRIMARY KEY, b int NOT NULL, c int); CREATE UNIQUE INDEX k_b ON k (b)",
        "CREATE PUBLICATION keys FOR TABLE k (a, b)",
    )
    pair.sub("CREATE TABLE k (a int, b int PRIMARY KEY, c int)")
    pair.subscribe(f"{pair.name}_2", "keys")
    pair.synced()
    pair.run(
        "INSERT INTO k VALUES (1, 2, 3), (2, 5, 6)",
        "ALTER TABLE k REPLICA IDENTITY USING INDEX k_b; UPDATE k SET a = a * 10",
        "ALTER PUBLICATION keys SET TABLE k (b)",
    )
    pair.gives("SELECT * FROM k ORDER BY 1", (10, 2, None), (20, 5, None))


def test_different_column_lists_are_refused(pair: Pair) -> None:
    """At CREATE by the subscriber; later by the publisher, which ends the stream, as PostgreSQL does."""
    pair.both("CREATE TABLE t (a int PRIMARY KEY, b int, c int)")
    pair.run("CREATE PUBLICATION p FOR TABLE t (a, b); CREATE PUBLICATION q FOR TABLE t (a, c)")
    where = f"'{pair.conninfo}'"
    refusal = 'cannot use different column lists for table "public.t" in different publications'
    error = pair.refused(f"CREATE SUBSCRIPTION {pair.name} CONNECTION {where} PUBLICATION p, q")
    assert error.diag.message_primary == refusal
    assert pair.slots() == []
    pair.run("ALTER PUBLICATION q SET TABLE t (a, b)")
    pair.subscribe(publication="p, q")
    pair.synced()
    pair.run("INSERT INTO t VALUES (1, 2, 3)")
    pair.gives("SELECT * FROM t", (1, 2, None))
    pair.run("ALTER PUBLICATION q SET TABLE t (a, c)", "INSERT INTO t VALUES (2, 3, 4)")
    pair.subscriber_says(refusal)
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE")


@versions_of_both
def test_partitions(pairs: Make, versions: str) -> None:
    """As themselves, as their root, as a root in the middle; to other partitions, to plain tables; attached and detached."""
    pair = pairs(*versions.split("-"))
    pair.run(
        """
        CREATE TABLE r (a int PRIMARY KEY, b text) PARTITION BY LIST (a);
        CREATE TABLE r1 (b text, a int NOT NULL); ALTER TABLE r ATTACH PARTITION r1 FOR VALUES IN (1, 2, 3);
        CREATE TABLE r2 PARTITION OF r FOR VALUES IN (4, 5, 6) PARTITION BY LIST (a);
        CREATE TABLE r2_1 PARTITION OF r2 FOR VALUES IN (4); CREATE TABLE r2_2 PARTITION OF r2 FOR VALUES IN (5, 6);
        CREATE TABLE rd PARTITION OF r DEFAULT;
        CREATE TABLE v (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
        CREATE TABLE v1 PARTITION OF v FOR VALUES FROM (0) TO (10);
        CREATE TABLE v2 (LIKE v); ALTER TABLE v2 ADD PRIMARY KEY (a);
        INSERT INTO r VALUES (1, 'a'), (4, 'b'), (0, 'c'); INSERT INTO v VALUES (1, 'x');
        CREATE PUBLICATION p FOR TABLE r; CREATE PUBLICATION q FOR TABLE v WITH (publish_via_partition_root);
        CREATE PUBLICATION m FOR TABLE r2 WITH (publish_via_partition_root);
        """
    )
    pair.sub(
        """
        CREATE TABLE r (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (1) TO (4); CREATE TABLE r2 (a int PRIMARY KEY, b text);
        CREATE TABLE r2_1 (a int PRIMARY KEY, b text); CREATE TABLE r2_2 (b text, c int DEFAULT 5, a int PRIMARY KEY);
        CREATE TABLE rd PARTITION OF r DEFAULT; CREATE TABLE v (a int PRIMARY KEY, b text);
        """
    )
    pair.subscribe(publication="p, q")
    pair.synced()
    pair.run(
        "INSERT INTO r VALUES (2, 'd'), (5, 'e'), (100, 'f'); UPDATE r SET a = 6 WHERE a = 5; UPDATE r SET a = 3 WHERE a = 100",
        "INSERT INTO v SELECT g, 'y' FROM generate_series(2, 9) g; UPDATE v SET b = 'z' WHERE a > 5; DELETE FROM v WHERE a = 2",
        "UPDATE r SET a = 4 WHERE a = 1 AND false; UPDATE r SET b = b || '!'",
    )
    for table in ("r1", "r2_1", "r2_2", "rd", "v"):
        pair.equal(f"SELECT a, b FROM {table} ORDER BY 1")
    pair.run(
        "ALTER TABLE v ATTACH PARTITION v2 FOR VALUES FROM (10) TO (100); INSERT INTO v VALUES (10, 'new'), (5000 % 99, 'n')"
    )
    pair.run("UPDATE v SET a = a + 20 WHERE a < 6; TRUNCATE r1; DELETE FROM r WHERE a = 6", "TRUNCATE v1")
    pair.run(
        "ALTER TABLE v DETACH PARTITION v2; INSERT INTO v2 VALUES (99, 'no longer'); INSERT INTO v VALUES (0, 'still')"
    )
    pair.gives("SELECT count(*) FROM v WHERE a = 99", 0)
    pair.gives("SELECT b FROM v WHERE a = 0", "still")
    pair.equal("SELECT a, b FROM r1 ORDER BY 1", "SELECT a, b FROM r2_2 ORDER BY 1")
    pair.run("TRUNCATE v", "INSERT INTO v VALUES (8, 'last')")
    pair.equal("SELECT a, b FROM v")
    pair.alter("SET PUBLICATION m")
    pair.run("INSERT INTO r VALUES (5, 'middle'); UPDATE r SET a = 6 WHERE a = 5")
    pair.equal("SELECT a, b FROM r2 ORDER BY 1")


def test_a_root_and_its_partitions_in_several_publications(pair: Pair) -> None:
    """Copied once, and sent once: as the topmost published root."""
    ddl = """
        CREATE TABLE r (a int PRIMARY KEY, b int, c int) PARTITION BY RANGE (a);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (a);
        CREATE TABLE r11 PARTITION OF r1 FOR VALUES FROM (0) TO (50);
        CREATE TABLE r12 PARTITION OF r1 FOR VALUES FROM (50) TO (100);
    """
    pair.both(ddl)
    pair.run(
        "INSERT INTO r SELECT g, g, g FROM generate_series(0, 99) g",
        "CREATE PUBLICATION p FOR TABLE r, r11 WITH (publish_via_partition_root)",
        "CREATE PUBLICATION q FOR TABLE r1, r12 WITH (publish_via_partition_root)",
        "CREATE PUBLICATION o FOR TABLE r12 (a, b)",
    )
    pair.subscribe(publication="p, q")
    pair.synced()
    pair.equal("r")
    pair.run("UPDATE r SET b = -b; DELETE FROM r WHERE a % 10 = 0; INSERT INTO r VALUES (0, 1, 2), (50, 1, 2)")
    pair.equal("r")
    # Before r12 is copied, as a table of its own: a partition that is copied into and its root are locked in another order.
    pair.sub("TRUNCATE r")
    pair.alter("SET PUBLICATION o")
    pair.synced()
    pair.run(
        "INSERT INTO r12 VALUES (60, 7, 7) ON CONFLICT (a) DO NOTHING; DELETE FROM r; INSERT INTO r VALUES (70, 8, 9), (7, 8, 9)"
    )
    pair.gives("SELECT * FROM r WHERE a IN (7, 70)", (70, 8, None))


@versions_of_both
def test_publications_are_added_and_dropped(pairs: Make, versions: str) -> None:
    pair = pairs(*versions.split("-"))
    pair.both("CREATE TABLE a (a int); CREATE TABLE b (a int); CREATE TABLE c (a int)")
    pair.run(*(f"INSERT INTO {t} SELECT generate_series(1, 10); CREATE PUBLICATION p{t} FOR TABLE {t}" for t in "abc"))
    pair.subscribe(publication="pa, pb")
    pair.synced()
    pair.alter("DROP PUBLICATION pa")
    pair.run("INSERT INTO a VALUES (11); INSERT INTO b VALUES (11)")
    pair.equal("b")
    pair.gives("SELECT count(*) FROM a", 10)
    pair.sub("TRUNCATE a")
    pair.alter("ADD PUBLICATION pa, pc")
    pair.synced()
    pair.run("INSERT INTO a VALUES (12); INSERT INTO c VALUES (12)")
    pair.equal("a", "b", "c")
    pair.alter("SET PUBLICATION pb WITH (refresh = false)")
    pair.run("ALTER PUBLICATION pb SET (publish = 'insert'); DELETE FROM b; INSERT INTO b VALUES (13)")
    pair.gives("SELECT count(*) FROM b", 12)
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION WITH (copy_data = false)")
    pair.gives("SELECT srrelid::regclass::text FROM pg_subscription_rel", "b")


@pytest.mark.full
def test_dropped_and_renamed_while_they_are_used(pair: Pair) -> None:
    """A publication dropped under its subscriber ends, or with 18 empties, the stream; made anew, it goes on (100_bugs)."""
    pair.both("CREATE TABLE t (a int)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.run(
        "DROP PUBLICATION p", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (2)"
    )
    pair.gives("SELECT a FROM t", 2)
    pair.run(
        "CREATE PUBLICATION q; ALTER PUBLICATION q ADD TABLE t",
        "BEGIN; INSERT INTO t VALUES (3); DROP PUBLICATION q; COMMIT",
    )
    pair.gives("SELECT a FROM t ORDER BY 1", 2, 3)


@pytest.mark.full
def test_a_table_that_replaces_another(pair: Pair) -> None:
    """Renames, swaps of schemas, and a table dropped and made again under its name."""
    pair.both(
        "CREATE SCHEMA s; CREATE TABLE t (a int PRIMARY KEY, b text); CREATE TABLE s.t (a int PRIMARY KEY, b text)"
    )
    pair.run("CREATE PUBLICATION p FOR ALL TABLES")
    pair.subscribe()
    pair.synced()
    pair.run(
        "INSERT INTO t VALUES (1, 'public'); INSERT INTO s.t VALUES (1, 's')",
        "BEGIN; ALTER SCHEMA s RENAME TO x; CREATE SCHEMA s; CREATE TABLE s.t (a int PRIMARY KEY, b text);"
        "INSERT INTO s.t VALUES (2, 'new'); COMMIT",
        "BEGIN; DROP TABLE t; CREATE TABLE t (a int PRIMARY KEY, b text); INSERT INTO t VALUES (3, 'again'); COMMIT",
    )
    pair.gives("SELECT * FROM t ORDER BY 1", (1, "public"), (3, "again"))
    pair.gives("SELECT * FROM s.t ORDER BY 1", (1, "s"), (2, "new"))
