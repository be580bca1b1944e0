"""Each kind of change, by way of `pubsub publish`, on stock subscribers: statements, keys, types, DDL, encodings, messages.

Checks what PostgreSQL's own tests of subscriptions check of a publisher (src/test/subscription/t 001 to 011, 020, 034).
"""

from __future__ import annotations

import psycopg
import pytest

from tests.support.stock_pairs import Make, Pair

PAIRS = ["18-18", "15-18", "18-15", "16-17", "17-16"]


def of(versions: str) -> tuple[str, str]:
    publisher, _, subscriber = versions.partition("-")
    return publisher, subscriber


def version_pairs() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "versions", ["18-18", *(pytest.param(one, marks=pytest.mark.full) for one in PAIRS[1:])]
    )


_KEYS = """
CREATE TABLE no_key (a int);
CREATE TABLE full_key (a int, t text);
CREATE TABLE key (a int PRIMARY KEY);
CREATE TABLE covering (a int, b text, CONSTRAINT covering_key PRIMARY KEY (a) INCLUDE (b));
CREATE TABLE full_with_key (a int PRIMARY KEY, b text);
CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, c text);
CREATE UNIQUE INDEX by_index_key ON by_index (b, a);
CREATE TABLE nothing (a int);
CREATE TABLE no_columns ();
ALTER TABLE full_key REPLICA IDENTITY FULL;
ALTER TABLE full_with_key REPLICA IDENTITY FULL;
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
"""


@version_pairs()
def test_every_statement_and_every_replica_identity(pairs: Make, versions: str) -> None:
    """Columns in another order, local columns, rows of FULL that are equal, and keys that change."""
    pair = pairs(*of(versions))
    pair.both(_KEYS)
    pair.run(
        "CREATE TABLE mixed (a int PRIMARY KEY, b text, c numeric); CREATE TABLE aside (a int)",
        "INSERT INTO no_key SELECT generate_series(1, 1000); INSERT INTO full_key VALUES (1, 'a'), (2, 'b'), (2, 'b')",
        "INSERT INTO mixed VALUES (1, 'foo', 1.1); INSERT INTO no_columns DEFAULT VALUES",
        "CREATE PUBLICATION p; CREATE PUBLICATION inserts FOR TABLE no_key WITH (publish = insert)",
        "ALTER PUBLICATION p ADD TABLE full_key, key, covering, full_with_key, by_index, nothing, no_columns, mixed",
    )
    pair.sub(
        "CREATE TABLE mixed (d text DEFAULT 'local', c numeric, b text, a int PRIMARY KEY); CREATE TABLE aside (a int)"
    )
    pair.subscribe(publication="p, inserts")
    pair.synced()
    pair.run(
        "INSERT INTO aside VALUES (1); INSERT INTO no_key SELECT generate_series(1, 50); DELETE FROM no_key WHERE a > 20",
        "INSERT INTO key SELECT generate_series(1, 50); DELETE FROM key WHERE a > 20; UPDATE key SET a = -a",
        "INSERT INTO full_key SELECT g, g::text FROM generate_series(1, 10) g; UPDATE full_key SET a = a * a",
        "UPDATE full_key SET t = 'bb' WHERE t = 'b'; DELETE FROM full_key WHERE a = 16",
        "INSERT INTO mixed VALUES (2, 'bar', 2.2), (3, 'x', NULL); UPDATE mixed SET b = 'baz' WHERE a = 1",
        "INSERT INTO covering SELECT g, 'x' FROM generate_series(1, 20) g; DELETE FROM covering WHERE a > 10",
        "UPDATE covering SET a = -a, b = 'y'",
        "INSERT INTO full_with_key VALUES (1, 'foo'), (2, 'baz'); UPDATE full_with_key SET b = 'bar' WHERE a = 1",
        "INSERT INTO by_index SELECT g, g % 3, 'c' FROM generate_series(1, 9) g; UPDATE by_index SET b = 7 WHERE a = 2",
        "DELETE FROM by_index WHERE a = 3; INSERT INTO nothing SELECT generate_series(1, 20)",
        "INSERT INTO no_columns DEFAULT VALUES",
        "INSERT INTO mixed VALUES (1, 'taken') ON CONFLICT (a) DO UPDATE SET c = 9",
        "MERGE INTO mixed m USING (VALUES (3), (4)) v (a) ON m.a = v.a WHEN MATCHED THEN DELETE "
        "WHEN NOT MATCHED THEN INSERT VALUES (v.a, 'merged')",
        "COPY mixed FROM PROGRAM 'printf \"5\\tcopied\\t\\\\\\\\N\\n\"'",
        "WITH moved AS (DELETE FROM full_with_key WHERE a = 2 RETURNING *) INSERT INTO full_with_key SELECT a + 10, b FROM moved",
    )
    pair.equal("key", "full_key", "covering", "full_with_key", "by_index", "nothing")
    pair.equal("SELECT a, b, c FROM mixed ORDER BY a", "SELECT count(*) FROM no_columns")
    pair.gives("SELECT DISTINCT d FROM mixed", "local")
    pair.gives("SELECT count(*), max(a) FROM no_key", (1050, 1000))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="does not have a replica identity"):
        pair.run("UPDATE nothing SET a = 1")
    pair.gives("SELECT count(*) FROM aside", 0)


def test_large_values_and_columns_that_go(pair: Pair) -> None:
    """TOASTed values that an UPDATE leaves alone, with the key only and with FULL; columns dropped on either side."""
    ddl = "CREATE TABLE t (a int PRIMARY KEY, b text, c numeric, d text); CREATE TABLE f (a int, b text, c int)"
    pair.both(ddl, "ALTER TABLE f REPLICA IDENTITY FULL; ALTER TABLE f ALTER b SET STORAGE EXTERNAL")
    pair.run("CREATE PUBLICATION p FOR TABLE t, f")
    pair.subscribe()
    pair.synced()
    pair.run(
        "INSERT INTO t VALUES (1, repeat('xyzzy', 100000), 1), (2, 'short', 2)",
        "INSERT INTO f VALUES (1, repeat('xyzzy', 20000), 1), (2, repeat('y', 9000), 2)",
        "UPDATE t SET c = 3.3; UPDATE f SET c = c + 1; UPDATE t SET a = a + 10",
        "DELETE FROM f WHERE a = 2; UPDATE t SET b = b || '!' WHERE a = 11",
    )
    pair.equal("t", "f")
    pair.run(
        "UPDATE t SET d = 'before it goes'; ALTER TABLE t DROP COLUMN d; UPDATE t SET c = 4",
        "INSERT INTO t VALUES (3, 'new', 5)",
    )
    pair.equal("SELECT a, b, c FROM t ORDER BY 1")
    pair.sub("ALTER TABLE t DROP COLUMN d")
    pair.run("UPDATE t SET c = 5.5 WHERE a = 3; DELETE FROM t WHERE a = 12")
    pair.equal("t")


@version_pairs()
def test_truncate(pairs: Make, versions: str) -> None:
    """With identities, with several tables that refer to each other, where some are not published, by two subscriptions."""
    pair = pairs(*of(versions))
    ddl = "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); CREATE TABLE c (id int REFERENCES a);"
    pair.both(ddl, "CREATE TABLE twice (id int)")
    pair.sub("CREATE SEQUENCE s OWNED BY a.id; ALTER SEQUENCE s START 101")
    pair.run(
        "CREATE PUBLICATION p FOR TABLE a, c; CREATE PUBLICATION inserts FOR TABLE b WITH (publish = insert)",
        "CREATE PUBLICATION q FOR TABLE twice",
    )
    pair.subscribe(publication="p, inserts")
    one, other = pair.subscribe(f"{pair.name}_1", "q"), pair.subscribe(f"{pair.name}_2", "q")
    pair.synced()
    pair.sub("INSERT INTO a VALUES (1), (2); INSERT INTO c VALUES (1); INSERT INTO b VALUES (1)")
    pair.run("TRUNCATE a, b, c")
    pair.gives("SELECT count(*) FROM a UNION ALL SELECT count(*) FROM c", 0, 0)
    pair.gives("SELECT count(*), nextval('s') FROM b", (1, 1))
    pair.run("TRUNCATE a RESTART IDENTITY CASCADE")
    pair.caught_up()
    pair.gives("SELECT nextval('s')", 101)
    pair.run("ALTER PUBLICATION inserts SET (publish = 'insert, truncate')", "TRUNCATE b")
    pair.gives("SELECT count(*) FROM b", 0)
    pair.run("INSERT INTO twice VALUES (1), (2)")
    pair.gives("SELECT count(*) FROM twice", 4)
    pair.run("TRUNCATE twice")
    # One subscription's TRUNCATE may come after the other's INSERT.
    pair.caught_up(one)
    pair.caught_up(other)
    pair.run("INSERT INTO twice VALUES (3)")
    pair.gives("SELECT count(*) FROM twice", 2)
    pair.caught_up(one)
    pair.caught_up(other)


def test_ddl_between_changes(pair: Pair) -> None:
    """Columns that come, rewrites, a new key, a new name; a materialized view's contents are not published."""
    pair.both("CREATE TABLE t (a int, b text)")
    pair.run("CREATE PUBLICATION p FOR ALL TABLES")
    pair.subscribe()
    pair.synced()
    pair.run("INSERT INTO t VALUES (1, 'one'), (2, 'two')")
    for change in (
        "ALTER TABLE t ADD c int NOT NULL DEFAULT 0",
        "ALTER TABLE t ADD d timestamptz DEFAULT now()",  # a rewrite
        "ALTER TABLE t ALTER a TYPE bigint",
        "ALTER TABLE t ADD PRIMARY KEY (a)",
    ):
        pair.sub(change)
        pair.run(f"{change}; INSERT INTO t (a, b) SELECT max(a) + 1, 'more' FROM t")
    pair.run(
        "UPDATE t SET b = 'changed' WHERE a = 2; DELETE FROM t WHERE a = 1", "VACUUM FULL t", "CLUSTER t USING t_pkey"
    )
    pair.run("UPDATE t SET b = 'moved' WHERE a = 3")
    pair.equal("SELECT a, b, c FROM t ORDER BY a")
    pair.both("CREATE TABLE later (a int)")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} REFRESH PUBLICATION")
    pair.run(
        "INSERT INTO later VALUES (1)",
        "CREATE MATERIALIZED VIEW v AS SELECT * FROM t; REFRESH MATERIALIZED VIEW v",
        "CREATE TEMP TABLE x (a int); INSERT INTO x VALUES (1); CREATE UNLOGGED TABLE u (a int); INSERT INTO u VALUES (1)",
    )
    pair.equal("later")
    pair.both("ALTER TABLE t RENAME TO renamed")
    pair.run("INSERT INTO renamed (a, b) VALUES (100, 'renamed')")
    pair.equal("SELECT a, b, c FROM renamed ORDER BY a")


@pytest.mark.parametrize(
    ("publisher", "subscriber"),
    [
        ("UTF8", "LATIN1"),
        pytest.param("EUC_JP", "UTF8", marks=pytest.mark.full),
        pytest.param("LATIN1", "UTF8", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("binary", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_a_subscriber_of_another_encoding(pairs: Make, publisher: str, subscriber: str, binary: str) -> None:
    """What is sent is in the subscriber's encoding: texts, also inside other types, names of tables, columns and types."""
    word = "'日本'" if publisher == "EUC_JP" else "'Motörhead ßÿ'"
    name = '"表"' if publisher == "EUC_JP" else '"Tößel"'
    kind = f'"kind of {name[1:]}'
    pair = pairs(encodings=(publisher, subscriber))
    pair.both(
        f"CREATE TYPE {kind} AS ENUM ('a', {word}); CREATE TYPE both_of AS (a text, b {kind});"
        "CREATE DOMAIN word AS varchar(50);"
        f"CREATE TABLE {name} (a int PRIMARY KEY, {name} text, c char(20), n name, j json, b jsonb, l text[],"
        f" e {kind}, r both_of, w word)"
    )
    row = f"{word}, {word}, {word}, json_build_object({word}, 1), jsonb_build_object({word}, 1), ARRAY[{word}, 'x']"
    row = f"{row}, {word}, ROW({word}, {word})::both_of, {word}"
    pair.run(f"INSERT INTO {name} VALUES (1, {row})", f"CREATE PUBLICATION p FOR TABLE {name}")
    pair.subscribe(options=f"WITH (binary = {binary})")
    pair.synced()
    pair.run(f"INSERT INTO {name} VALUES (2, {row}); UPDATE {name} SET a = 3 WHERE a = 2")
    pair.run(
        f"ALTER TABLE {name} REPLICA IDENTITY FULL; UPDATE {name} SET a = 4 WHERE a = 3; DELETE FROM {name} WHERE a = 1"
    )
    pair.equal(f"SELECT * FROM {name}")


def test_a_character_that_the_subscriber_s_encoding_lacks(pairs: Make) -> None:
    pair = pairs(encodings=("UTF8", "LATIN1"))
    pair.both("CREATE TABLE t (a int PRIMARY KEY, b text)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.run("INSERT INTO t VALUES (1, 'fine'), (2, '10 €')")
    pair.subscriber_says(
        'character with byte sequence 0xe2 0x82 0xac in encoding "UTF8" has no equivalent in encoding "LATIN1"'
    )
    pair.gives("SELECT count(*) FROM t", 0)
    pair.run("ALTER PUBLICATION p DROP TABLE t")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} DISABLE")


_TYPES = """
CREATE EXTENSION IF NOT EXISTS hstore;
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TYPE place AS (name text, at point, moods mood[]);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE textrange AS RANGE (subtype = text);
CREATE TABLE types (
    id int PRIMARY KEY, i2 smallint, i8 bigint, f4 real, f8 float8, n numeric, m money, b bool, t text, vc varchar(10), c char(5),
    by bytea, ts timestamp, tz timestamptz, d date, ti time, tt timetz, iv interval, u uuid, j json, jb jsonb, x xml, bi bit(5),
    vb varbit, ip inet, ci cidr, ma macaddr, p point, bx box, pa path, po polygon, cc circle, ts_v tsvector, ts_q tsquery,
    ar int[], ar2 text[][], md mood, mds mood[], pl place, pls place[], po_d positive, po_a positive[], ir int4range,
    tr textrange, nr nummultirange, h hstore, lsn pg_lsn, oi oid, rc regclass, nm name
);
"""
_VALUES = """
%s, 7, 8, 1.5, 'NaN', 12345.678900, '12.34', true, 'text', 'varchar', 'char', '\\x0001ff', '2020-02-29 12:34:56.789',
'2020-02-29 12:34:56+05', '0044-03-15 BC', '24:00', '12:00+03', '1 year 2 days 03:04:05.6', gen_random_uuid(), '{"a" : 1}',
'{"b": [1, null]}', '<a>x</a>', B'10101', B'101', '10.0.0.1/8', '10.0.0.0/8', '08:00:2b:01:02:03', '(1,2)', '(1,2),(3,4)',
'[(0,0),(1,1)]', '((0,0),(1,1),(2,0))', '<(0,0),1>', 'a fat cat', 'fat & (rat | cat)', '{1,NULL,3}', '{{a,b},{"c d",NULL}}', 'ok',
'{sad,happy}', ROW('x', '(1,1)', '{ok}'), ARRAY[ROW('y', NULL, NULL)::place], 5, '{1,2}', '[1,10)', '[a,z)', '{[1,2),[3,4)}',
'k => v, "n" => NULL', '0/16B3748', 26, 'pg_class', 'name'
"""


@version_pairs()
@pytest.mark.parametrize("options", ["", "WITH (binary)"])
def test_types(pairs: Make, versions: str, options: str) -> None:
    pair = pairs(*of(versions))
    pair.both(_TYPES)
    pair.run(
        f"INSERT INTO types VALUES ({_VALUES % 1})",
        "INSERT INTO types (id) VALUES (2)",
        "CREATE PUBLICATION p FOR TABLE types",
    )
    if options and int(versions[-2:]) >= 16 and int(versions[:2]) >= 16:
        # Binary copies write the regclass and the enums' elements with their oids, which differ.
        options = "WITH (binary, copy_data = false)"
        pair.run("TRUNCATE types")
    pair.sub("ALTER TABLE types DROP COLUMN rc; ALTER TABLE types ADD COLUMN rc text" if options else "SELECT 1")
    if options:
        pair.run(
            "ALTER PUBLICATION p DROP TABLE types; ALTER TABLE types DROP COLUMN mds, DROP COLUMN pl, DROP COLUMN pls, "
            "DROP COLUMN po_a, DROP COLUMN rc; ALTER PUBLICATION p ADD TABLE types"
        )
        pair.sub("ALTER TABLE types DROP COLUMN mds, DROP COLUMN pl, DROP COLUMN pls, DROP COLUMN po_a, DROP COLUMN rc")
    pair.subscribe(options=options)
    pair.synced()
    if not options:
        pair.run(f"INSERT INTO types VALUES ({_VALUES % 3})")
    pair.run(
        "INSERT INTO types (id, ar, md, n, f8) VALUES (4, '[-1:1]={1,2,3}', 'sad', 'NaN', '-Infinity')",
        "INSERT INTO types (id, tz, d, n, jb, tr) VALUES (5, 'infinity', '-infinity', 1e-20, '\"x\"', 'empty')",
        "UPDATE types SET id = id + 10, t = 'changed'; ALTER TYPE mood ADD VALUE 'great'",
    )
    pair.sub("ALTER TYPE mood ADD VALUE 'great'")
    pair.run("INSERT INTO types (id, md) VALUES (6, 'great')")
    pair.equal("types")


@version_pairs()
def test_generated_columns(pairs: Make, versions: str) -> None:
    """They are not published, but for 18's publish_generated_columns and its column lists."""
    pair = pairs(*of(versions))
    pair.run("CREATE TABLE t (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a * 2) STORED, b int)")
    pair.sub("CREATE TABLE t (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a * 22) STORED, b int)")
    pair.run("INSERT INTO t VALUES (1), (2)", "CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.run("INSERT INTO t VALUES (3), (4)", "UPDATE t SET a = 6 WHERE a = 4", "DELETE FROM t WHERE a = 1")
    pair.gives("SELECT a, g FROM t ORDER BY 1", (2, 44), (3, 66), (6, 132))
    if versions != "18-18":
        return
    pair.run(
        "CREATE TABLE s (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a * 2) STORED, v int GENERATED ALWAYS AS (a * 3) VIRTUAL)",
        "CREATE TABLE l (a int, g int GENERATED ALWAYS AS (a * 2) STORED, h int GENERATED ALWAYS AS (a * 3) STORED)",
        "INSERT INTO s VALUES (1); INSERT INTO l VALUES (1)",
        "CREATE PUBLICATION stored FOR TABLE s WITH (publish_generated_columns = stored)",
        "CREATE PUBLICATION listed FOR TABLE l (g)",
    )
    pair.sub("CREATE TABLE s (a int PRIMARY KEY, g int, v int); CREATE TABLE l (a int, g int, h int)")
    pair.subscribe(f"{pair.name}_2", "stored, listed")
    pair.synced()
    pair.run("INSERT INTO s VALUES (2), (3); INSERT INTO l VALUES (2)", "UPDATE s SET a = 10 WHERE a = 1")
    pair.gives("SELECT * FROM s ORDER BY 1", (2, 4, None), (3, 6, None), (10, 20, None))
    pair.gives("SELECT * FROM l ORDER BY g", (None, 2, None), (None, 4, None))
    pair.run("ALTER PUBLICATION stored SET (publish_generated_columns = none)", "INSERT INTO s VALUES (4)")
    pair.gives("SELECT g FROM s WHERE a = 4", None)


def test_generated_columns_on_the_subscriber_are_refused(pair: Pair) -> None:
    pair.run("CREATE TABLE t (a int, b int, c int); INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    pair.sub(
        "CREATE TABLE t (a int, b int GENERATED ALWAYS AS (a + 2) STORED, c int GENERATED ALWAYS AS (a + 2) STORED)"
    )
    pair.subscribe()
    pair.subscriber_says('logical replication target relation "public.t" has incompatible generated columns: "b", "c"')


@pytest.mark.full
def test_messages_do_not_reach_subscribers_but_clients(pair: Pair) -> None:
    """pg_logical_emit_message, in transactions and beside them: a subscriber moves on over them."""
    pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.run(
        "SELECT pg_logical_emit_message(true, 'pgoutput', 'in a transaction')",
        "SELECT pg_logical_emit_message(false, 'pgoutput', 'beside it'); INSERT INTO t VALUES (1)",
        "BEGIN; SELECT pg_logical_emit_message(false, 'x', 'aborted'); INSERT INTO t VALUES (2); ROLLBACK; SELECT pg_switch_wal()",
    )
    pair.caught_up()
    pair.equal("t")


@pytest.mark.full
def test_temporal_keys(pair: Pair) -> None:
    """18's keys WITHOUT OVERLAPS are no replica identity; FULL is."""
    ddl = "CREATE TABLE t (id int4range, valid_at daterange, a text, CONSTRAINT t_key PRIMARY KEY (id, valid_at WITHOUT OVERLAPS))"
    pair.both("CREATE EXTENSION IF NOT EXISTS btree_gist", ddl)
    pair.run("INSERT INTO t VALUES ('[1,2)', '[2000-01-01,2010-01-01)', 'a')", "CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.run("INSERT INTO t VALUES ('[2,3)', '[2000-01-01,2010-01-01)', 'b'), ('[3,4)', '[2000-01-01,)', 'c')")
    pair.equal("t")
    pair.both("ALTER TABLE t REPLICA IDENTITY FULL")
    pair.run("UPDATE t SET a = 'x' WHERE id = '[2,3)'; DELETE FROM t WHERE id = '[3,4)'")
    pair.equal("t")


def test_missing_publications_are_warned_of(pair: Pair) -> None:
    """As behind PostgreSQL: at CREATE and ALTER, and later in the stream, where the publication may still come."""
    pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    pair.run("INSERT INTO t VALUES (0)", "CREATE PUBLICATION p FOR TABLE t")
    begin = len(pair.subscriber.read_log())
    with pair.subscriber.connect(pair.name) as connection:
        notices: list[str] = []
        connection.add_notice_handler(lambda one: notices.append(one.message_primary or ""))
        where = f"'{pair.conninfo}'"
        connection.execute(f"CREATE SUBSCRIPTION {pair.name} CONNECTION {where} PUBLICATION p, missing".encode())
        pair.made.append(pair.name)
        connection.execute(f"ALTER SUBSCRIPTION {pair.name} ADD PUBLICATION none1, none2".encode())
    assert 'publication "missing" does not exist on the publisher' in notices
    assert 'publications "none1", "none2" do not exist on the publisher' in notices
    pair.synced()
    assert "skipped loading publication" not in pair.subscriber.read_log()[begin:], "nothing was sent yet"
    pair.run("CREATE TABLE aside (a int PRIMARY KEY); INSERT INTO aside VALUES (1)", "INSERT INTO t VALUES (1)")
    pair.equal("t")
    pair.subscriber_says('skipped loading publication "missing"', begin)


def test_publications_that_change_their_names(pair: Pair) -> None:
    pair.both("CREATE TABLE t (a int)")
    pair.run("CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION empty")
    pair.subscribe()
    pair.synced()
    pair.run("INSERT INTO t VALUES (1)")
    swap = "ALTER PUBLICATION p RENAME TO x; ALTER PUBLICATION empty RENAME TO p; ALTER PUBLICATION x RENAME TO empty"
    pair.run(swap, "INSERT INTO t VALUES (2)", swap, "INSERT INTO t VALUES (3)")
    pair.gives("SELECT a FROM t ORDER BY 1", 1, 3)


@pytest.mark.full
def test_a_connection_s_settings_and_restarts_of_the_worker(pair: Pair) -> None:
    """A changed CONNECTION, name or list of publications restarts the stream; the connection's options reach the server."""
    pair.both("CREATE TABLE t (a int, at timestamptz)")
    pair.run("CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q FOR TABLE t WITH (publish = 'insert')")
    pair.subscribe()
    pair.synced()
    options = "options='-c log_statement_stats=on -c TimeZone=Asia/Tokyo'".replace("'", "''")
    pair.alter(f"CONNECTION '{pair.conninfo} application_name={pair.name} {options}'")
    pair.run("INSERT INTO t VALUES (1, '2020-01-01 00:00Z')")
    pair.equal("t")
    assert "QUERY STATISTICS" in pair.publisher.read_log()
    pair.alter("SET PUBLICATION q WITH (copy_data = false)")
    pair.sub(f"ALTER SUBSCRIPTION {pair.name} RENAME TO {pair.name}_renamed")
    pair.made[:] = [f"{pair.name}_renamed"]
    pair.run("INSERT INTO t VALUES (2, now())")
    pair.equal("t")
