"""The initial copy: every kind of table and value, compared whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.delta.places import remove_tree
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, UndefinedTable
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.text.copy_csv import parse_copy
from pubsub.publisher import copy_out, snapshots
from pubsub.publisher.connection import Connection
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import stores
from tests.support.replica import Faults, Replica, RunningNode, wait_until

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'so so', 'ha,"ppy');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN price AS numeric(12,2) CHECK (VALUE >= 0);
CREATE DOMAIN tag AS text;
CREATE TABLE types (
    id bigint PRIMARY KEY,
    b boolean, i2 smallint, i4 int, i8 bigint, o oid,
    f4 real, f8 double precision,
    n12 numeric(12,2), n38 numeric(38,10), n38_0 numeric(38), n_small numeric(5,5), n_negative numeric(5,-2),
    n_wide numeric(60,30), n_free numeric,
    t text, v varchar(20), c char(5), one "char", nam name,
    d date, ts timestamp, ts0 timestamp(0), tz timestamptz, tz3 timestamptz(3), tim time, timtz timetz, iv interval,
    by bytea, u uuid, j json, jb jsonb, x xml,
    ai int[], at text[], an numeric(6,2)[], m mood, am mood[], p pair,
    mo money, ip inet, ci cidr, mac macaddr, bi bit(5), vb varbit,
    r int4range, mr int8multirange, tr tstzrange, pt point, po polygon, tsv tsvector, tsq tsquery, lsn pg_lsn,
    dp price, dt tag
)"""

# One row per line; columns that are not named are NULL.
TYPE_ROWS = r"""
INSERT INTO types (id) VALUES (0);
INSERT INTO types VALUES (1,
    true, 32767, 2147483647, 9223372036854775807, 4294967295,
    3.4028235e38, 1.7976931348623157e308,
    9999999999.99, 9999999999999999999999999999.9999999999, 99999999999999999999999999999999999999, 0.99999, 9999900,
    123456789012345678901234567890.123456789012345678901234567890, 1e100,
    E'a,"b"\n\\N\t\r\\.', 'ünïcödé ☃ 𝄞', 'ab', 'x', 'a name',
    '9999-12-31', '9999-12-31 23:59:59.999999', '9999-12-31 23:59:59', '9999-12-31 23:59:59.999999+00',
    '9999-12-31 23:59:59.999+00', '24:00:00', '23:59:59.999999-15:59:59', '178000000 years 11 mons -3 days +04:05:06.789',
    '\x00ff5c0a0d2c22', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a" :  [1, null, "\u00e9"]}', '{"b": 1.50, "a": "x"}',
    '<a b="c">d</a>',
    '{1,NULL,-3}', '{"a,b",NULL,"NULL","","q\"uote"}', '{1.50,NULL}', 'ha,"ppy', '{sad,"so so"}', '(1,"x,y")',
    '92233720368547758.07', '::ffff:1.2.3.4/128', '10.0.0.0/8', '08:00:2b:01:02:03', '10101', '1',
    '[1,10)', '{[1,5),[7,9)}', '["2024-01-01 00:00+00",infinity)', '(1.5,-2)', '((0,0),(1,1),(1,0))',
    'fat:2,4 cat:3A', 'fat & (rat | !cat)', '16/B374D848',
    12.5, 'tagged');
INSERT INTO types VALUES (2,
    false, -32768, -2147483648, -9223372036854775808, 0,
    -1.4e-45, 4.9406564584124654e-324,
    -9999999999.99, -0.0000000001, -1, -0.00001, -100, 0, 'NaN',
    '', '', '', '', '',
    '0001-01-01', '0001-01-01 00:00:00', '1969-12-31 23:59:59', '0001-01-01 00:00:00+00', '1969-12-31 23:59:59.999+00',
    '00:00:00', '00:00:00+15:59:59', '-1 mons +2 days -00:00:00.000001',
    '\x', '00000000-0000-0000-0000-000000000000', '[]', 'null', '',
    '{}', '{}', '{}', 'sad', '{}', '(,)',
    '-92233720368547758.08', '0.0.0.0/0', '::/0', 'ff:ff:ff:ff:ff:ff', '00000', '',
    'empty', '{}', '(,)', '(-0,NaN)', '((0,0))', '', '', '0/0',
    0, '');
INSERT INTO types (id, f4, f8, n_free, n_wide, t, c, by, ai, d, ts, tz) VALUES
    (3, 'NaN', 'NaN', 'Infinity', 'NaN', repeat('x', 300000), '     ', decode(repeat('00ff', 100000), 'hex'), '{{1,2},{3,4}}',
        '1582-10-10', '1582-10-10 12:00:00', '1582-10-10 12:00:00+00'),
    (4, 'Infinity', '-Infinity', '-Infinity', -1, ' ', 'a    ', '\x0a', '[-1:0]={1,2}',
        '1900-01-01', '1900-01-01 00:00:00.000001', '1900-01-01 00:00:00.000001+00'),
    (5, '-0', '-0', 0.000000000000000000001, 1, E'\\', E'\n', '\x22', NULL,
        '1970-01-01', '1970-01-01 00:00:00', '2024-03-31 02:30:00+02'),
    (6, 1e-5, 0.1, 100, 0.10, E'\u00a0\u200b\ufeff', 'é', '\x5c', NULL, '2000-02-29', '2000-02-29 00:00:00.1', NULL),
    (7, 16777217, 9007199254740993, 1.10, 1e29, '"', '"', NULL, NULL, NULL, NULL, NULL);
"""


def test_every_type_and_its_edge_values(replica: Replica) -> None:
    replica.execute(TYPES, TYPE_ROWS, "CREATE PUBLICATION p FOR TABLE types")
    replica.subscribe()
    replica.assert_equal("types")
    schema = pa.schema(DeltaTable(replica.path("types")).schema().to_arrow())
    natural = {
        "b": pa.bool_(), "i2": pa.int16(), "i4": pa.int32(), "i8": pa.int64(), "o": pa.int64(),
        "f4": pa.float32(), "f8": pa.float64(), "n12": pa.decimal128(12, 2), "n38": pa.decimal128(38, 10),
        "n38_0": pa.decimal128(38, 0), "n_small": pa.decimal128(5, 5), "dp": pa.decimal128(12, 2), "d": pa.date32(),
        "ts": pa.timestamp("us"), "tz": pa.timestamp("us", "UTC"), "by": pa.binary(),
    }  # fmt: skip
    assert {name: schema.field(name).type for name in natural} == natural
    # The same values again, through the stream.
    replica.execute("CREATE TABLE kept AS TABLE types", "TRUNCATE types", "INSERT INTO types TABLE kept")
    replica.assert_equal("types")
    replica.execute("UPDATE types SET id = id + 100")
    replica.assert_equal("types")


TABLES = """
CREATE TABLE empty (id int PRIMARY KEY, t text);
CREATE TABLE keyless (a int, b text);
INSERT INTO keyless SELECT g % 3, NULLIF(g % 5, 0)::text FROM generate_series(1, 100) g;
CREATE TABLE only_null (a int);
INSERT INTO only_null SELECT NULL FROM generate_series(1, 10);
CREATE TABLE parent (id int PRIMARY KEY, t text);
INSERT INTO parent VALUES (1, 'of the parent');
CREATE TABLE child (extra int, PRIMARY KEY (id)) INHERITS (parent);
INSERT INTO child VALUES (2, 'of the child', 3);
CREATE TABLE generated (id int PRIMARY KEY, a int, double int GENERATED ALWAYS AS (a * 2) STORED,
    virtual int GENERATED ALWAYS AS (a * 3) VIRTUAL);
INSERT INTO generated SELECT g, g FROM generate_series(1, 10) g;
CREATE TABLE dropped (gone int, id int PRIMARY KEY, also_gone text, t text);
INSERT INTO dropped SELECT g, g, g, g FROM generate_series(1, 10) g;
ALTER TABLE dropped DROP COLUMN gone, DROP COLUMN also_gone, ADD COLUMN late text DEFAULT 'late';
CREATE TABLE composite (b text, a int, c date, t text, PRIMARY KEY (c, a, b));
INSERT INTO composite SELECT g % 3, g, date '2024-01-01' + g % 7, g FROM generate_series(1, 100) g;
CREATE TABLE identity_index (id int PRIMARY KEY, a int NOT NULL, b text NOT NULL, UNIQUE (b, a));
ALTER TABLE identity_index REPLICA IDENTITY USING INDEX identity_index_b_a_key;
INSERT INTO identity_index SELECT g, g % 10, g FROM generate_series(1, 100) g;
CREATE TABLE dead (id int PRIMARY KEY, t text) WITH (autovacuum_enabled = off);
INSERT INTO dead SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g;
UPDATE dead SET t = 'updated' WHERE id % 2 = 0;
DELETE FROM dead WHERE id % 3 = 0;
CREATE SCHEMA other;
CREATE TABLE other.empty (id int PRIMARY KEY, u uuid);
INSERT INTO other.empty VALUES (1, gen_random_uuid());
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
"""
# The unlogged table is not published.
NAMES = (
    "empty", "keyless", "only_null", "parent", "child", "generated", "dropped", "composite", "identity_index", "dead",
    "other.empty",
)  # fmt: skip


@pytest.mark.full
def test_all_tables_of_a_database(replica: Replica) -> None:
    replica.execute(TABLES, "CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe()
    replica.assert_equal(*NAMES)
    assert set(replica.states()) == {name if "." in name else f"public.{name}" for name in NAMES}
    assert replica.slots() == [replica.name]
    fields = [field.name for field in DeltaTable(replica.path("generated")).schema().fields]
    assert fields == ["id", "a"], "a stock publication does not publish generated columns"
    assert [f.nullable for f in DeltaTable(replica.path("composite")).schema().fields] == [False, False, False, True]


def test_partitions_and_their_root(replica: Replica) -> None:
    ddl = """
        CREATE TABLE {0} (id int, at date, t text, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
        CREATE TABLE {0}_1 PARTITION OF {0} FOR VALUES FROM ('2024-01-01') TO ('2024-02-01');
        CREATE TABLE {0}_2 (t text, id int NOT NULL, at date NOT NULL, PRIMARY KEY (id, at));
        ALTER TABLE {0} ATTACH PARTITION {0}_2 FOR VALUES FROM ('2024-02-01') TO ('2024-03-01');
        CREATE TABLE {0}_3 PARTITION OF {0} FOR VALUES FROM ('2024-03-01') TO ('2025-01-01') PARTITION BY HASH (id);
        CREATE TABLE {0}_3a PARTITION OF {0}_3 FOR VALUES WITH (MODULUS 2, REMAINDER 0);
        CREATE TABLE {0}_3b PARTITION OF {0}_3 FOR VALUES WITH (MODULUS 2, REMAINDER 1);
        INSERT INTO {0} SELECT g, date '2024-01-01' + g % 300, g FROM generate_series(1, 600) g
    """
    replica.execute(
        ddl.format("apart"),
        ddl.format("whole"),
        "CREATE PUBLICATION p FOR TABLE apart; "
        "CREATE PUBLICATION root FOR TABLE whole WITH (publish_via_partition_root)",
    )
    replica.subscribe("p, root")
    leaves = ("apart_1", "apart_2", "apart_3a", "apart_3b")
    replica.assert_equal(*leaves, "whole")
    assert set(replica.states()) == {f"public.{name}" for name in (*leaves, "whole")}
    # Rows that change their partition: a delete and an insert, or an update of the root.
    for name in ("apart", "whole"):
        replica.execute(
            f"UPDATE {name} SET at = at + 31 WHERE at < '2024-02-15'; UPDATE {name} SET id = -id WHERE id % 7 = 0; "
            f"DELETE FROM {name} WHERE id % 5 = 0"
        )
    replica.assert_equal(*leaves, "whole")
    replica.execute("TRUNCATE whole_3; TRUNCATE apart_3a")
    replica.assert_equal(*leaves)


def test_column_lists_row_filters_and_generated_columns(replica: Replica) -> None:
    replica.execute(
        """
        CREATE TABLE listed (secret text, id int PRIMARY KEY, "W, x" int, b text);
        INSERT INTO listed SELECT 's', g, g, g FROM generate_series(1, 100) g;
        CREATE TABLE filtered (id int PRIMARY KEY, a int, b text);
        INSERT INTO filtered SELECT g, g % 10, g FROM generate_series(1, 100) g;
        CREATE TABLE generated (id int PRIMARY KEY, a int, double int GENERATED ALWAYS AS (a * 2) STORED);
        INSERT INTO generated SELECT g, g FROM generate_series(1, 10) g;
        CREATE TABLE big_filtered (id int PRIMARY KEY, t text);
        INSERT INTO big_filtered SELECT g, repeat('x', 1000) FROM generate_series(1, 25000) g;
        CREATE PUBLICATION p FOR TABLE listed (b, "W, x", id), filtered WHERE (id > 40 AND id < 60), big_filtered WHERE (id % 5 = 0);
        CREATE PUBLICATION q FOR TABLE filtered WHERE (id < 5) WITH (publish_via_partition_root);
        CREATE PUBLICATION r FOR TABLE generated WITH (publish_generated_columns = stored)
        """
    )
    replica.subscribe("p, q, r")
    listed = ["id", "W, x", "b"]
    where = "id > 40 AND id < 60 OR id < 5"
    replica.assert_equal("listed", columns=listed)
    assert [field.name for field in DeltaTable(replica.path("listed")).schema().fields] == listed
    replica.assert_equal("filtered", where=where)
    replica.assert_equal("big_filtered", where="id % 5 = 0")
    replica.assert_equal("generated", columns=["id", "a", "double"])
    replica.execute(
        "UPDATE listed SET secret = 'x', b = b || '!' WHERE id < 10; UPDATE filtered SET b = 'moved' WHERE id = 50; "
        "UPDATE filtered SET id = 200 WHERE id = 41; UPDATE filtered SET id = -1 WHERE id = 70; "
        "INSERT INTO filtered VALUES (0, 0, 'in'), (130, 0, 'out'); UPDATE generated SET a = a + 1"
    )
    replica.assert_equal("listed", columns=listed)
    replica.assert_equal("filtered", where=where)
    replica.assert_equal("generated", columns=["id", "a", "double"])


@pytest.mark.full
def test_odd_names(replica: Replica) -> None:
    schemas = ['Ünï "cö" dé', "a.b", "..", "select", "x'; DROP TABLE y; --"]
    tables = [
        'quo"te',
        "do.t",
        " space ",
        "UPPER",
        "näme ☃",
        "back`tick\\",
        "new\nline",
        "a/b",
        "%25",
        "tab\t=",
        "é" * 31,
    ]
    columns = [
        "t",
        "ID",
        "a b",
        "c.d",
        'q"q',
        "b`b",
        "ünï ☃",
        "x,y;z",
        "{(=)}",
        "n\nl",
        "select",
        "__op",
        "s'q\\",
        "-dash",
        "1",
    ]

    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    names = []
    listed = ", ".join(f"{quoted(column)} text" for column in columns)
    for number, table in enumerate(tables):
        schema = schemas[number % len(schemas)]
        name = f"{quoted(schema)}.{quoted(table)}"
        replica.execute(
            f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}; "
            f"CREATE TABLE {name} ({listed}, PRIMARY KEY ({quoted(columns[number])}, {quoted(columns[number + 1])})); "
            f"INSERT INTO {name} SELECT {', '.join(f'g || {ord(c[-1])}::text' for c in columns)} FROM generate_series(1, 3) g"
        )
        names.append(name)
    replica.execute('CREATE PUBLICATION "The ""p"".x" FOR ALL TABLES')
    replica.subscribe('"The ""p"".x"')
    replica.assert_equal(*names)
    for name in names:
        key = quoted(columns[names.index(name)])
        replica.execute(
            f"UPDATE {name} SET {key} = 'new' WHERE {key} LIKE '1%'; UPDATE {name} SET \"-dash\" = '' WHERE {key} LIKE '2%'; "
            f"DELETE FROM {name} WHERE {key} LIKE '3%'"
        )
    replica.assert_equal(*names)
    warehouse = stores.local_files(stores.warehouse(replica.node.home)).resolve()
    assert all(stores.local_files(replica.path(name)).resolve().is_relative_to(warehouse) for name in names)


def test_a_table_named_by_its_columns(replica: Replica) -> None:
    """A column may have the name of an alias: `t.id` must not become a field of that column."""
    replica.execute(
        "CREATE TYPE pair AS (id int, b int); "
        "CREATE TABLE t (t pair, s text, id int PRIMARY KEY, source int, target int); "
        "INSERT INTO t VALUES ((7, 8), 'a', 1, 2, 3), (NULL, 'b', 2, 3, 4); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe()
    replica.assert_equal("t")
    replica.execute(
        "UPDATE t SET s = 'c', id = 7 WHERE id = 1; DELETE FROM t WHERE id = 2; INSERT INTO t (id) VALUES (1)"
    )
    replica.assert_equal("t")


def test_columns_named_as_our_own(replica: Replica) -> None:
    """The user's columns have the names that the writer gives to its own."""
    keyed = ["id", "__base_0", "__unchanged_1", "__unchanged_2", "__op", "c0", "h", "c"]
    keyless = ["__count", "__row", "__have", "__image", "c0", "h"]
    replica.execute(
        f"CREATE TABLE keyed ({' text, '.join(keyed)} text, PRIMARY KEY (id)); "
        f"CREATE TABLE keyless ({' text, '.join(keyless)} text); ALTER TABLE keyless REPLICA IDENTITY FULL; "
        'ALTER TABLE keyed ALTER __base_0 SET STORAGE EXTERNAL, ALTER "__unchanged_1" SET STORAGE EXTERNAL; '
        f"INSERT INTO keyed SELECT g, {', '.join(['repeat(g::text, 5000)'] * (len(keyed) - 1))} FROM generate_series(1, 9) g; "
        f"INSERT INTO keyless SELECT {', '.join(['g % 3'] * len(keyless))} FROM generate_series(1, 9) g; "
        "CREATE PUBLICATION p FOR TABLE keyed, keyless"
    )
    replica.subscribe()
    replica.assert_equal("keyed", "keyless")
    replica.execute(
        "UPDATE keyed SET c = 'x' WHERE id < '4'; UPDATE keyed SET id = '77', h = 'y' WHERE id = '7'; "
        "DELETE FROM keyed WHERE id = '8'; "
        "DELETE FROM keyless WHERE ctid IN (SELECT ctid FROM keyless LIMIT 4); "
        "UPDATE keyless SET h = 'x' WHERE ctid IN (SELECT ctid FROM keyless LIMIT 2)"
    )
    replica.assert_equal("keyed", "keyless")


@pytest.mark.full
def test_a_database_in_another_encoding(node: RunningNode, publisher: EmbeddedPostgres) -> None:
    publisher.create_database("latin1", "TEMPLATE template0 ENCODING 'LATIN1'")
    replica = Replica(node, Database(publisher, "latin1"))
    try:
        with psycopg.connect(replica.conninfo, client_encoding="utf8", autocommit=True) as connection:
            connection.execute('CREATE TABLE "täble" (id int PRIMARY KEY, "cölumn" text)')
            connection.execute("INSERT INTO \"täble\" VALUES (1, 'äöüß')")
            connection.execute('CREATE PUBLICATION p FOR TABLE "täble"')
            replica.subscribe()
            replica.assert_equal('"täble"')
            connection.execute("INSERT INTO \"täble\" VALUES (2, 'é')")
            connection.execute('UPDATE "täble" SET "cölumn" = \'ÿ\' WHERE id = 1')
            replica.assert_equal('"täble"')
        assert {row["cölumn"] for row in replica.rows('"täble"')} == {"ÿ", "é"}
        replica.drop()
    finally:
        publisher.drop_database("latin1")


def test_a_table_of_several_ranges(replica: Replica) -> None:
    """40 MB: more than two ranges, read side by side under one snapshot."""
    replica.execute(
        "CREATE TABLE big (id bigint PRIMARY KEY, t text, n numeric(12,2), at timestamptz) WITH (autovacuum_enabled = off); "
        "INSERT INTO big SELECT g, md5(g::text) || repeat('y', 100), g / 100.0, timestamptz '2024-01-01' + g * interval '1 s' "
        "FROM generate_series(1, 200000) g; DELETE FROM big WHERE id % 10 = 0; CREATE PUBLICATION p FOR TABLE big"
    )
    (blocks,) = replica.query("SELECT pg_relation_size('big') / 8192")[0]
    assert blocks > 2 * 2048, "not large enough for two ranges"
    replica.subscribe()
    replica.assert_equal("big")
    versions = range(replica.version("big") + 1)
    assert max(len(DeltaTable(replica.path("big"), version=version).file_uris()) for version in versions) >= 2


def test_a_role_that_may_read_columns_only(replica: Replica) -> None:
    """From 2 MB on a table is read by the places of its rows, which no grant of columns includes."""
    role = f"reader_{replica.database.name}"
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text)",
        "INSERT INTO a SELECT g, repeat(md5(g::text), 5) FROM generate_series(1, 20000) g",
        f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT (id, t) ON a TO {role}; CREATE PUBLICATION p FOR TABLE a",
    )
    try:
        conninfo = replica.database.server.conninfo(replica.database.name, user=role)
        replica.node.execute(f"CREATE SUBSCRIPTION {replica.name} CONNECTION {quote_literal(conninfo)} PUBLICATION p")
        replica.created = True
        replica.assert_equal("a")
        # A comparison needs the places, and says so.
        (report,) = replica.node.run(replica.node._node.verify(replica.name)).tables
        assert (report.outcome, report.reason) == ("failed", "permission denied for table a"), report
        grant = f"GRANT SELECT (ctid, tableoid) ON public.a TO {role};"
        assert report.hint == grant
        replica.execute(grant)
        (report,) = replica.node.run(replica.node._node.verify(replica.name)).tables
        assert report.outcome == "equal", report
        replica.drop()
    finally:
        replica.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_copy_data_false(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text); INSERT INTO a VALUES (1, 'before'); CREATE PUBLICATION p FOR TABLE a"
    )
    with pytest.raises(UndefinedTable, match=r'Delta table for "public\.a" does not exist'):
        replica.subscribe(copy_data="false", create_tables="false")
    assert replica.slots() == []
    replica.subscribe(copy_data="false")
    replica.execute("INSERT INTO a VALUES (2, 'after')")
    replica.assert_equal("a", where="id > 1")
    # Tables that join later, with and without new rows of their own.
    replica.execute(
        "CREATE TABLE b (id int PRIMARY KEY); INSERT INTO b VALUES (1); CREATE TABLE c (id int PRIMARY KEY); "
        "ALTER PUBLICATION p ADD TABLE b, c"
    )
    replica.alter("REFRESH PUBLICATION WITH (copy_data = false)")
    replica.execute("INSERT INTO b VALUES (2); INSERT INTO a VALUES (3, 'later'); UPDATE a SET t = 'x' WHERE id = 2")
    replica.assert_equal("a", where="id > 1")
    replica.assert_equal("c")
    assert {row["id"] for row in replica.rows("b")} >= {2}


@pytest.mark.full
def test_a_table_that_leaves_and_joins_again_without_a_copy(replica: Replica) -> None:
    """Its Delta table has the commits of its first stay, which are not taken for another worker's."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text); INSERT INTO a VALUES (1, 'copied'); CREATE TABLE b (id int)",
        "CREATE PUBLICATION p FOR TABLE a, b",
    )
    replica.subscribe()
    replica.execute("INSERT INTO a VALUES (2, 'applied')")
    replica.assert_equal("a", "b")
    for _ in range(2):
        replica.execute("ALTER PUBLICATION p DROP TABLE a")
        replica.alter("REFRESH PUBLICATION")
        replica.execute("ALTER PUBLICATION p ADD TABLE a")
        replica.alter("REFRESH PUBLICATION WITH (copy_data = false)")
        replica.execute("INSERT INTO a SELECT max(id) + 1, 'joined' FROM a", "UPDATE a SET t = 'changed' WHERE id = 1")
        replica.execute("INSERT INTO b VALUES (1)")
        replica.assert_equal("a", "b")


def test_copy_data_false_and_an_alter_while_the_table_is_made(replica: Replica, fault: Faults) -> None:
    """The worker ends between the Delta table's creation and the storing of its definition: then the table has older columns."""
    replica.execute("CREATE TABLE a (id int PRIMARY KEY, t text); CREATE PUBLICATION p FOR TABLE a")
    fault.arm("target made public.a")
    replica.subscribe(copy_data="false")
    fault.wait("target made public.a")
    replica.execute(
        "INSERT INTO a VALUES (1, 'one'); ALTER TABLE a RENAME t TO u; ALTER TABLE a ADD COLUMN n int; "
        "INSERT INTO a VALUES (2, 'two', 2)"
    )
    replica.alter("DISABLE")
    fault.release("target made public.a")
    replica.alter("ENABLE")
    replica.assert_equal("a")
    assert replica.relation("a").error is None


@pytest.mark.full
@pytest.mark.parametrize("partitioned", ["", "PARTITION BY RANGE (id)"])
def test_columns_that_exchange_names_between_the_snapshot_and_the_copy(
    replica: Replica, fault: Faults, partitioned: str
) -> None:
    """COPY means the columns that have these names by then, and reads the snapshot's rows: values would change places."""
    part = "CREATE TABLE a_1 PARTITION OF a DEFAULT;" if partitioned else ""
    replica.execute(
        f"CREATE TABLE a (id int PRIMARY KEY, t text, u text) {partitioned}; {part}"
        "INSERT INTO a SELECT g, 't', 'u' FROM generate_series(1, 9) g;"
        "CREATE PUBLICATION p FOR TABLE a WITH (publish_via_partition_root)"
    )
    fault.arm("slot created public.a")
    fault.arm("copy planned public.a")
    replica.subscribe()
    fault.wait("slot created public.a")
    fault.release("slot created public.a")
    fault.wait("copy planned public.a")
    replica.execute("ALTER TABLE a RENAME t TO x; ALTER TABLE a RENAME u TO t; ALTER TABLE a RENAME x TO u")
    fault.release("copy planned public.a")
    replica.execute("INSERT INTO a (id, t, u) VALUES (10, 'now u', 'now t')")
    replica.assert_equal("a")


@pytest.mark.full
@pytest.mark.parametrize("alter", ["ALTER TABLE a DROP COLUMN t", "ALTER TABLE a RENAME TO b"])
def test_an_alter_between_the_snapshot_and_the_copy_stops_no_table(replica: Replica, fault: Faults, alter: str) -> None:
    """Another attempt has another snapshot: with isolate, too, the failure passes."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text); INSERT INTO a VALUES (1, 'one'); CREATE PUBLICATION p FOR TABLE a"
    )
    fault.arm("copy planned public.a")
    replica.subscribe(on_table_error="isolate")
    fault.wait("copy planned public.a")
    replica.execute(alter)
    fault.release("copy planned public.a")
    replica.alter("REFRESH PUBLICATION")
    replica.caught_up()
    (relation,) = replica.node.relations(replica.name)
    assert relation.error is None
    assert not relation.stopped
    replica.assert_equal(relation.name)


def test_copy_data_false_and_an_alter_while_the_publisher_is_asked(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition and its LSN are of one moment: else a row with the columns from before the ALTER stops the table."""
    replica.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE a")
    altered: list[Lsn] = []

    async def flushed(connection: Connection) -> Lsn:
        lsn = await flushed_end_of_wal(connection)
        if len(altered) < 2:
            row = f"INSERT INTO a (id) VALUES ({len(altered) + 1})"
            replica.execute(f"{row}; ALTER TABLE a ADD COLUMN n{len(altered) + 1} int")
            altered.append(Lsn.parse(replica.database.query("SELECT pg_current_wal_insert_lsn()")[0][0]))
            return lsn
        # A quiet server writes nothing after the transaction.
        return min(lsn, altered[-1])

    flushed_end_of_wal = snapshots.flushed_end_of_wal
    monkeypatch.setattr(snapshots, "flushed_end_of_wal", flushed)
    replica.subscribe(copy_data="false")
    wait_until(lambda: len(altered) == 2, "it was altered twice")
    replica.execute("INSERT INTO a VALUES (3, 3)")
    replica.assert_equal("a")


@pytest.mark.full
def test_targets_that_are_there(replica: Replica, tmp_path: Path) -> None:
    """create_tables = false: a user's table with one more column, in another order, is filled; one with rows is not."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text, n numeric(8,2)); INSERT INTO a SELECT g, g, g FROM generate_series(1, 5) g; "
        "CREATE PUBLICATION p FOR TABLE a"
    )
    options = {"create_tables": "false", "target": f"'{replica.database.name}_own'"}
    path = stores.warehouse(replica.node.home) / f"{replica.database.name}_own" / "public" / "a"
    with pytest.raises(UndefinedTable) as missing:
        replica.subscribe(**options)
    assert str(path) in (missing.value.detail or "")
    own = pa.schema([("own", pa.int64()), ("t", pa.string()), ("n", pa.decimal128(8, 2)), ("id", pa.int32())])
    write_deltalake(str(path), pa.table({n: pa.array([], own.field(n).type) for n in own.names}, schema=own))
    replica.subscribe(**options)
    replica.assert_equal("a")
    assert {row["own"] for row in replica.rows("a")} == {None}
    # An update leaves the column that only Delta has as it is.
    DeltaTable(str(path)).update(updates={"own": "id * 10"})
    replica.execute("UPDATE a SET t = 'x' WHERE id = 2; INSERT INTO a VALUES (6, '6', 6); DELETE FROM a WHERE id = 3")
    replica.assert_equal("a")
    assert {row["id"]: row["own"] for row in replica.rows("a")} == {1: 10, 2: 20, 4: 40, 5: 50, 6: None}


def test_a_target_that_holds_rows_is_refused(replica: Replica) -> None:
    replica.execute("CREATE TABLE a (id int PRIMARY KEY); INSERT INTO a VALUES (1); CREATE PUBLICATION p FOR TABLE a")
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "a"
    write_deltalake(str(path), pa.table({"id": pa.array([7], pa.int32())}))
    with pytest.raises(NotInPrerequisiteState, match="holds rows already"):
        replica.subscribe()
    assert replica.slots() == []
    assert DeltaTable(str(path)).version() == 0
    remove_tree(path)
    # The replicated column is missing, or has another type.
    write_deltalake(str(path), pa.table({"other": pa.array([], pa.int32())}))
    with pytest.raises(NotInPrerequisiteState, match='missing replicated columns: "id"'):
        replica.subscribe()
    remove_tree(path)
    write_deltalake(str(path), pa.table({"id": pa.array([], pa.string())}))
    with pytest.raises(NotInPrerequisiteState, match=r'column "id".* has type string'):
        replica.subscribe()
    remove_tree(path)
    replica.subscribe()
    replica.assert_equal("a")


def test_columns_that_differ_only_in_case(replica: Replica) -> None:
    replica.execute('CREATE TABLE a (id int PRIMARY KEY, "ID" int); CREATE PUBLICATION p FOR TABLE a')
    with pytest.raises(FeatureNotSupported, match=r'columns "id" and "ID" of table "public\.a" differ only in case'):
        replica.subscribe()
    assert replica.slots() == []


def test_a_value_that_delta_lacks_stops_the_copy(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, at timestamptz); INSERT INTO a VALUES (1, 'infinity'); "
        "CREATE TABLE b (id int PRIMARY KEY); INSERT INTO b VALUES (1); CREATE PUBLICATION p FOR TABLE a, b"
    )
    replica.subscribe()
    error = replica.error()
    assert 'value "infinity"' in error
    assert '"at"' in error
    # After the value is corrected the copy is made again.
    replica.execute("UPDATE a SET at = now()")
    replica.assert_equal("a", "b")
    assert compare_tables(replica.conninfo, "public.a", replica.path("a"), version=0) is not None


@pytest.mark.parametrize("rows", [0, 20_000])
def test_a_server_that_is_silent_in_a_copy_stops_no_other_thread(database: Database, rows: int) -> None:
    """The copy waits for a lock that only another thread of this process gives up."""
    series = f"SELECT g FROM generate_series(1, {rows}) g UNION ALL " if rows else ""
    query = f"{series}SELECT 0 FROM pg_advisory_lock(7) FETCH FIRST {rows + 1} ROWS ONLY"
    with copy_out.session(database.conninfo, "copies") as copying, database.server.connect(database.name) as holder:
        copying.execute("SET statement_timeout = '30s'")
        holder.execute("SELECT pg_advisory_lock(7)")
        (pid,) = copying.execute("SELECT pg_backend_pid()").fetchone() or ()

        def give_up() -> None:
            waits = f"SELECT 1 FROM pg_locks WHERE pid = {pid} AND locktype = 'advisory' AND NOT granted"
            wait_until(lambda: holder.execute(waits.encode()).fetchall(), "the copy to wait")
            holder.execute("SELECT pg_advisory_unlock(7)")

        copy, schema = f"COPY ({query}) TO STDOUT (FORMAT csv)", pa.schema([("n", pa.int32())])
        with ThreadPoolExecutor(1) as other:
            unlocked = other.submit(give_up)
            batches = list(copy_out.batches(copying, copy, schema, parse_copy))
            unlocked.result()
        assert [n for batch in batches for n in batch.column(0).to_pylist()] == [*range(1, rows + 1), 0]
