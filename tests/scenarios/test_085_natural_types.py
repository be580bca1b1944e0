"""types = '… natural': arrays, composites and jsonb as Delta's own types, through copy and stream, text and binary."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import PubsubError
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.column_types import shaped_type
from pubsub.protocol.refused_values import InvalidText
from pubsub.protocol.text.columns import from_text
from pubsub.protocol.type_contract import VARIANT
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection
from pubsub.testing import nested
from pubsub.testing.fixtures import Database
from tests.support import duck
from tests.support.random_types import RandomTypes
from tests.support.replica import Replica, wait_until

SETUP = """
CREATE TYPE mood AS ENUM ('sad', 'o k', 'a,b', '"');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN ints AS int[];
CREATE TYPE pair AS (a int, b text);
CREATE TYPE nested AS (p pair, ps pair[], at timestamptz, d positive, m mood, n numeric(8,3), raw bytea, j jsonb);
CREATE TABLE t (
    id int PRIMARY KEY, ints int[], longs bigint[], texts text[], prices numeric(8,3)[], loose numeric[], stamps timestamptz[],
    days date[], flags bool[], doubles float8[], reals real[], raws bytea[], uuids uuid[], moods mood[], positives positive[],
    domained ints, matrix ints[], p pair, n nested, ns nested[], ranges int4range[], j jsonb
);
CREATE PUBLICATION p FOR TABLE t;
"""

ROWS = (
    """1, '{1,2,NULL,-2147483648}', '{9223372036854775807}', '{a,NULL,"NULL","","a b","q\\"\\\\,{}"}', '{1.5,-99999.999,NULL}',
    '{1.50,1e40,NaN}', '{"2024-02-29 12:34:56.7+00",NULL}', '{0001-01-01,9999-12-31}', '{t,f,NULL}',
    '{0,-0,1e22,NaN,-Infinity,0.0001,123456.789}', '{0.1,1e6,NaN}', '{"\\\\x00ff","\\\\x"}', '{00112233-4455-6677-8899-aabbccddeeff}',
    '{"o k","\\""}', '{1,2}', '{3}', ARRAY['{1,2}'::ints, '{}'::ints], '(1,"a ""b"", c")',
    ROW (ROW (1, NULL), ARRAY[ROW (2, 'x')::pair, NULL], '2024-01-01', 5, 'a,b', 1.5, '\\xdead', '{"a": 1}'),
    ARRAY[ROW (NULL, '{}', NULL, NULL, NULL, NULL, NULL, NULL)::nested], '{"[1,2)",empty}',
    '{"b": [1, 2.50, -1e-10, 123456789012345678901234567890], "aa": {"x": null, "\u00e9\U0001f600": "\\u0001\\n\\\\"}, "": true}'""",
    "2" + ", NULL" * 21,
    """3, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '(,)',
    '(,,,,,,,)', '{}', '{}', 'null'""",
    """4, '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}',
    '{NULL}', '{NULL}', '{NULL}', '{NULL}', '(,"")',
    ROW (NULL, '{NULL}', NULL, NULL, 'sad', NULL, '\\x', '[]'), '{NULL}', '{NULL}', '"x"'""",
)
Documents = list[tuple[int, str | None]]
CHOICES = "'arrays natural, composites natural, jsonb variant'"


def insert(first: int) -> str:
    rows = []
    for row in ROWS:
        number, rest = row.split(",", 1)
        rows.append(f"({int(number) + first}, {rest})")
    return "INSERT INTO t VALUES " + ", ".join(rows)


def arrow_schema(replica: Replica) -> pa.Schema:
    return pa.schema(DeltaTable(replica.path("t")).schema().to_arrow())


@pytest.mark.parametrize("binary", ["false", "true"])
def test_corpus(replica: Replica, binary: str) -> None:
    """Copied, inserted, updated, deleted; also with the whole old row."""
    replica.execute(SETUP, insert(0))
    replica.subscribe(types=CHOICES, binary=binary)
    replica.assert_equal("t")
    names = "ints, texts, prices, n, ns, j"
    replica.execute(
        insert(10),
        f"UPDATE t SET ({names}) = (SELECT {names} FROM t o WHERE o.id = 14 - t.id) WHERE id < 10",
        "DELETE FROM t WHERE id = 12",
    )
    replica.assert_equal("t")
    replica.execute("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET p = (7, 'new'), j = '[1]' WHERE id = 13")
    replica.assert_equal("t")


@pytest.mark.parametrize("binary", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_without_a_key(replica: Replica, binary: str) -> None:
    """Rows are found by all their values: of equal rows exactly one changes."""
    replica.execute(
        SETUP,
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "ALTER TABLE t ALTER id DROP NOT NULL",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        *(insert(0) for _ in range(3)),
    )
    replica.subscribe(types=CHOICES, binary=binary)
    replica.execute(
        insert(0),
        "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE id = 1)",
        "UPDATE t SET ints = ints || 7, texts[1] = 'a b,c' WHERE ctid IN (SELECT min(ctid) FROM t GROUP BY id)",
        "UPDATE t SET n.p.a = 8 WHERE ctid IN (SELECT max(ctid) FROM t GROUP BY id)",
    )
    replica.assert_equal("t")
    replica.execute(
        "UPDATE t SET j = '{\"a\": 1.0}' WHERE id = 3",
        "DELETE FROM t WHERE ctid IN (SELECT min(ctid) FROM t GROUP BY id)",
    )
    replica.assert_equal("t")


@pytest.mark.full
def test_other_readers(replica: Replica, spark: Spark) -> None:
    """Spark, DataFusion and DuckDB read the same values."""
    replica.execute(SETUP, insert(0))
    replica.subscribe(types=CHOICES)
    replica.execute(insert(10), "DELETE FROM t WHERE id = 2")
    replica.assert_equal("t")
    schema = arrow_schema(replica)
    assert schema.field("prices").type == pa.list_(pa.decimal128(8, 3))
    assert schema.field("loose").type == schema.field("moods").type == pa.list_(pa.string())
    assert schema.field("ns").type.value_type.field("ps").type.value_type.field("a").type == pa.int32()
    assert schema.field("j").type == VARIANT
    ours = replica.rows("t", "* EXCEPT (j) FROM delta_t ORDER BY id")
    frame = spark.session.read.format("delta").load(replica.path("t")).orderBy("id")
    theirs = frame.drop("j").toArrow().to_pylist()
    assert list(map(str, theirs)) == list(map(str, ours))
    documents = [(row.id, row.text) for row in frame.selectExpr("id", "to_json(j) AS text").collect()]
    wanted: Documents = replica.query("SELECT id, j::text FROM t ORDER BY id")
    assert_same_documents(replica, wanted, documents)
    with duck.reader() as connection:
        scan = f"delta_scan('{replica.path('t')}') ORDER BY id"
        found = connection.sql(f"SELECT * EXCLUDE (j) FROM {scan}").to_arrow_table()
        assert list(map(str, found.to_pylist())) == list(map(str, ours))
        # DuckDB writes .5 where all digits are fractional, and takes the JSON null for NULL.
        shown = "regexp_replace(j::json::varchar, '([\\[:,-])\\.', '\\10.', 'g')"
        documents = connection.sql(f"SELECT id, CASE WHEN j IS NOT NULL THEN {shown} END FROM {scan}").fetchall()
    assert_same_documents(replica, [(key, None if text == "null" else text) for key, text in wanted], documents)


@pytest.mark.full
def test_tables_that_spark_writes(replica: Replica, spark: Spark) -> None:
    """In data files the fields of structs have names of their own, because a column's name may not stand there."""
    replica.execute(
        "CREATE TYPE pair AS (a int, b text[])",
        'CREATE TABLE t (id int PRIMARY KEY, "a b" int[], p pair, ps pair[], j jsonb)',
        "ALTER TABLE t ALTER ps SET STORAGE EXTERNAL",
        'CREATE TYPE plain AS (a int, b text); CREATE TABLE u ("a b" int, ints int[], texts text[], p plain, j jsonb)',
        "ALTER TABLE u REPLICA IDENTITY FULL",
        "CREATE PUBLICATION p FOR TABLE t, u",
        "INSERT INTO u VALUES (1, '{1}', NULL, NULL, '1'), (1, '{1}', NULL, NULL, '1'), (2, '{}', '{a,b}', '(1,)', NULL), "
        "(2, '{}', '{\"a, b\"}', '(1,)', NULL), (2, '{}', '{a,b}', '(1,\"\")', NULL)",
        "INSERT INTO u (j) VALUES ('{\"a\": [1.50]}'), ('{\"a\": [1.5]}'), ('{\"a\": [1.5]}'), ('1.0'), ('1')",
        "INSERT INTO t SELECT g, ARRAY[g, NULL], ROW (g, '{a,NULL}')::pair, array_fill(ROW (g, NULL)::pair, ARRAY[900]), "
        "json_build_object('a', g, 'b', '[1.5, null]'::json) FROM generate_series(1, 9) g",
        "INSERT INTO t (id) VALUES (20)",
    )
    replica.subscribe(types=CHOICES, binary="true")
    replica.execute(
        "INSERT INTO t VALUES (30, '{}', '(,{})', '{NULL}', 'null')",
        "UPDATE t SET p.a = 7, j = '[{}]' WHERE id < 4; UPDATE t SET id = 40 WHERE id = 5; DELETE FROM t WHERE id = 6",
    )
    replica.assert_equal("t")
    # Without a key: rows that differ in little; deletes alone.
    replica.execute(
        "UPDATE u SET ints = ints || 7 WHERE ctid = (SELECT min(ctid) FROM u WHERE texts IS NULL)",
        "DELETE FROM u WHERE texts = '{\"a, b\"}'; DELETE FROM u WHERE (p).b = ''",
    )
    replica.assert_equal("t", "u")
    # Spark's texts of numbers lack the zeros after the point: the other row once took the place of the one that was deleted.
    replica.execute("DELETE FROM u WHERE j::text = '{\"a\": [1.50]}'; DELETE FROM u WHERE j::text = '1'")
    replica.execute("UPDATE u SET p = '(8,)' WHERE ctid = (SELECT min(ctid) FROM u WHERE j ? 'a')")
    replica.assert_equal("t", "u")
    frame = spark.session.read.format("delta").load(replica.path("t"))
    assert frame.where("id = 40").selectExpr("size(ps)", "ps[899].a", "to_json(j)").collect() == [
        (900, 5, '{"a":5,"b":[1.5,null]}')
    ]


async def test_random_types(database: Database) -> None:
    """For random expressions of random types, the server's text and binary form are the same values.

    The text of these values is the server's text again.
    """
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    made = RandomTypes(random.Random(seed))
    columns = [made.make(3) for _ in range(80)]
    columns = [(name, value) for name, value in columns if name.endswith("[]") or name.startswith(made.prefix)]
    listed = ", ".join(f"c{place} {name}" for place, (name, _) in enumerate(columns))
    for statement in (*made.declared, f"CREATE TABLE t ({listed})"):
        database.execute(statement)
    async with await Connection.connect(database.conninfo, replication=False) as connection:
        types = await definitions.binary_types(connection)
        ((oid,),) = await connection.query("SELECT 'public.t'::regclass::oid")
        definition = await definitions.table_definition(connection, int(str(oid)))
    session = "-c timezone=UTC -c extra_float_digits=3"
    compared = 0
    with psycopg.connect(database.conninfo, autocommit=True, options=session, client_encoding="UTF8") as client:
        for column, (name, value) in zip(definition.columns, columns, strict=True):
            values = ", ".join(f"({value()})" for _ in range(20))
            query = f"SELECT a::{name} FROM (VALUES {values}, (NULL)) t (a)".encode()
            results = [client.pgconn.exec_params(query, [], result_format=one) for one in (0, 1)]
            text, binary = ([result.get_value(row, 0) for row in range(result.ntuples)] for result in results)
            target = shaped_type(column.shape, lambda names: None, "natural")
            for one, its in zip(text, binary, strict=True):
                found = outcome(from_text, one, target)
                assert repr(outcome(from_binary, its, column.type_oid, target, types)) == repr(found), (name, one)
                if isinstance(found, list) and nested.is_nested(target) and one is not None:
                    assert nested.texts(pa.array(found, target))[0].as_py() == one.decode()
                    compared += 1
            good = [place for place, one in enumerate(text) if isinstance(outcome(from_text, one, target), list)]
            texts, binaries = (pa.array([side[place] for place in good], pa.binary()) for side in (text, binary))
            whole = from_binary(binaries, column.type_oid, target, types)
            assert repr(whole.to_pylist()) == repr(from_text(texts, target).to_pylist())
    assert compared > 100


def outcome(convert: Any, value: bytes | None, *more: Any) -> list[Any] | str:
    """Return the values, or the reason why they are refused."""
    try:
        return list(convert(pa.array([value], pa.binary()), *more).to_pylist())
    except InvalidText as error:
        return error.message


@pytest.mark.parametrize("binary", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_streamed_transactions(replica: Replica, binary: str) -> None:
    """Transactions are decoded in parts while in progress, and divided by keys; some values are not sent again."""
    replica.execute(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE t (id int PRIMARY KEY, big int[], p pair, j jsonb)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR TABLE t",
        "INSERT INTO t SELECT g, array_fill(g, ARRAY[700]), ROW (g, 'x')::pair FROM generate_series(1, 20) g",
    )
    replica.subscribe(types=CHOICES, binary=binary)
    replica.execute(
        "SET logical_decoding_work_mem = '64kB'; INSERT INTO t SELECT g, ARRAY[g, NULL], ROW (g, '\"q')::pair, "
        "jsonb_build_object('g', g) FROM generate_series(100, 4000) g; UPDATE t SET p.a = 0 WHERE id % 7 = 0; "
        "UPDATE t SET id = id + 10000, j = NULL WHERE id % 5 = 0; DELETE FROM t WHERE id % 3 = 0"
    )
    replica.assert_equal("t")


def assert_same_documents(replica: Replica, wanted: Documents, found: Documents) -> None:
    """Assert that the documents are equal; the server says whether two are."""
    for (key, text), (_, other) in zip(wanted, found, strict=True):
        if text is None or other is None:
            assert text is other, key
        else:
            assert replica.query(f"SELECT $${text}$$::jsonb = $${other}$$::jsonb") == [(True,)], (key, text, other)


def test_choices_that_are_refused(replica: Replica) -> None:
    """Refused before anything is made.  A key's column is refused by name; its type's choice leaves it text."""
    replica.execute(
        SETUP,
        'CREATE TYPE cased AS (a int, "A" int); CREATE TYPE nothing AS ()',
        "CREATE TABLE u (tags text[] PRIMARY KEY, c cased, b box[], o nothing, d text)",
        "ALTER PUBLICATION p ADD TABLE u",
    )
    for wrong, why in {
        "public.u.tags natural": "key",
        "public.cased natural": "only in case",
        "composites natural": "",
        "public.u.b natural": "divided by",
        "public.nothing natural": "no attributes",
        "public.u.d variant": "Only jsonb",
        "json variant": "",
        "arrays variant": "Only jsonb",
        "public.missing natural": "",
        "uuid natural": "",
    }.items():
        with pytest.raises(PubsubError) as caught:
            replica.subscribe(types=f"'{wrong}'")
        assert why in f"{caught.value.message} {caught.value.detail}", wrong
    assert replica.slots() == []
    replica.execute("INSERT INTO u VALUES ('{a,b}', '(1,2)', '{(1,1),(0,0)}', '()', 'x')")
    replica.subscribe(types="'arrays natural, box[] text, public.pair natural'")
    replica.execute("UPDATE u SET tags = '{c}'", "INSERT INTO u VALUES ('{a,b}')", "DELETE FROM u WHERE tags = '{c}'")
    replica.assert_equal("t", "u")


@pytest.mark.parametrize("binary", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_values_that_are_refused(replica: Replica, binary: str) -> None:
    """The error names the table, the column and the LSN; nothing of the transaction is there."""
    replica.execute(
        "CREATE TYPE pair AS (a int, b numeric(6,2)[])",
        "CREATE TABLE t (id int PRIMARY KEY, a int[], p pair, j jsonb)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe(
        types="'arrays natural, composites natural, jsonb variant'", binary=binary, on_table_error="isolate"
    )
    bad = {
        "a": ("'{{1},{2}}'", '"{{1},{2}}" cannot be held exactly by Delta type ARRAY<INT>'),
        "p": ("'(1,\"{1,NaN}\")'", '"(1,"{1.00,NaN}")" cannot be held exactly by Delta type STRUCT<'),
        "j": (f"'{'1' * 39}'", f'"{"1" * 39}" cannot be held exactly by Delta type VARIANT'),
    }
    for number, (column, (value, words)) in enumerate(bad.items()):
        replica.caught_up()
        replica.execute(
            f"INSERT INTO t (id) VALUES ({number}); INSERT INTO t (id, {column}) VALUES ({number + 100}, {value})"
        )
        error = str(wait_until(lambda: replica.relation("t").error, "the table's failure"))
        assert f'column "{column}" of table "public.t": value {words}' in error
        assert replica.relation("t").error_lsn is not None
        assert {one["id"] for one in replica.rows("t")} == set(range(number))
        replica.execute(f"DELETE FROM t WHERE id = {number + 100}")
        replica.alter("RESYNC TABLE public.t")
        replica.assert_equal("t")


@pytest.mark.full
@pytest.mark.usefixtures("frequent_checkpoints")
def test_schema_changes(replica: Replica) -> None:
    """Columns that are added with a default; values that are not sent again; a composite type that is altered."""
    replica.execute(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE t (id int PRIMARY KEY, big int[], p pair)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR TABLE t",
        "INSERT INTO t SELECT g, ARRAY(SELECT generate_series(g, g + 2000)), ROW (g, 'x y')::pair FROM generate_series(1, 3) g",
    )
    replica.subscribe(types="'arrays natural, composites natural, jsonb variant'")
    replica.execute("UPDATE t SET p.a = 7 WHERE id = 1", "UPDATE t SET id = 20 WHERE id = 2")
    replica.assert_equal("t")
    replica.execute(
        "ALTER TABLE t ADD texts text[] DEFAULT '{a,NULL,\"b c\"}', ADD q pair DEFAULT (1, 'z'), "
        "ADD j jsonb DEFAULT '{\"a\": [1.0]}', "
        "ADD stamps timestamp[]",
        "INSERT INTO t (id) VALUES (30)",
        "UPDATE t SET stamps = '{2024-01-01}' WHERE id = 1",
    )
    replica.assert_equal("t")
    replica.execute("ALTER TABLE t RENAME texts TO words", "UPDATE t SET words = array_append(words, 'd') WHERE id = 3")
    replica.assert_equal("t")
    replica.execute("ALTER TABLE t ALTER big TYPE bigint[]", "UPDATE t SET big = '{9000000000}' WHERE id = 1")
    replica.assert_equal("t")
    # The first value with one more attribute is refused; the worker's next start sees why and copies the table again.
    replica.execute("INSERT INTO t (id, p) VALUES (39, (1, 'a'))")
    replica.assert_equal("t")
    replica.execute("ALTER TYPE pair ADD ATTRIBUTE c int[]", "INSERT INTO t (id, p) VALUES (40, (1, 'a', '{2}'))")
    replica.assert_equal("t")
    assert "c" in {field.name for field in arrow_schema(replica).field("p").type}
    # The number of attributes stays the same, so the rename is seen only when the table is next altered.
    replica.execute(
        "ALTER TYPE pair RENAME ATTRIBUTE b TO d",
        "ALTER TABLE t ADD more jsonb",
        "INSERT INTO t (id, p) VALUES (50, (1, 'a', '{2}'))",
    )
    replica.assert_equal("t")
    replica.execute("ALTER TABLE t ADD last jsonb", "INSERT INTO t (id) VALUES (60)", "DELETE FROM t WHERE id = 50")
    replica.assert_equal("t")
    replica.execute(
        "UPDATE t SET last = '2' WHERE id = 3; UPDATE t SET id = 61 WHERE id = 60; INSERT INTO t (id) VALUES (62)"
    )
    replica.assert_equal("t")
    assert "d" in {field.name for field in arrow_schema(replica).field("p").type}
