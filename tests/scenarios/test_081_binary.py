"""binary = true: the same rows as with text; a type that cannot be read is refused by name (t/014_binary.pl)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol import rows
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.column_types import delta_type
from pubsub.protocol.refused_values import InvalidText
from pubsub.protocol.text.columns import from_text
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection
from pubsub.testing.fixtures import VERSIONS, Database, Servers
from tests.support import corpus
from tests.support.random_types import RandomTypes
from tests.support.replica import Replica

TEXT = ", ".join(f"public.v.{name} text" for name in corpus.TEXT_COLUMNS)


@pytest.mark.parametrize("version", VERSIONS)
async def test_each_value_as_its_text_says(version: str, servers: Servers) -> None:
    """The server's own text and binary form of each value of the corpus give one value, without a subscription."""
    server = servers[version]
    name = f"binary_{version}"
    server.create_database(name)
    database = Database(server, name)
    database.execute(corpus.SETUP)
    async with await Connection.connect(database.conninfo, replication=False) as connection:
        types = await definitions.binary_types(connection)
    settings = "-c timezone=UTC -c extra_float_digits=3"
    with psycopg.connect(database.conninfo, autocommit=True, options=settings, client_encoding="UTF8") as connection:
        for column in corpus.columns(int(version)):
            connection.execute("DROP TABLE IF EXISTS probe")
            connection.execute(f"CREATE TABLE probe (a {column.type})".encode())
            ((oid, modifier),) = connection.execute(
                "SELECT atttypid, atttypmod FROM pg_attribute WHERE attrelid = 'probe'::regclass AND attnum = 1"
            ).fetchall()
            if not column.binary or column.type == "aclitem":
                if not column.binary:
                    with pytest.raises(FeatureNotSupported):
                        types.check(oid)
                continue
            types.check(oid)
            text, binary = (_values(connection, column, result_format) for result_format in (0, 1))
            for target in (delta_type(types.base(oid), modifier), pa.string()):
                wanted = _outcome(from_text, text, target)
                found = _outcome(from_binary, binary, oid, target, types)
                assert found == wanted, column.name
    server.drop_database(name)


def _values(connection: psycopg.Connection[Any], column: corpus.Column, result_format: int) -> pa.Array:
    rows = ", ".join(f"({value}::{column.type})" for value in (*column.values, "NULL"))
    result = connection.pgconn.exec_params(
        f"SELECT a FROM (VALUES {rows}) t (a)".encode(), [], result_format=result_format
    )
    assert not result.error_message, result.error_message
    return pa.array([result.get_value(row, 0) for row in range(result.ntuples)], pa.binary())


def _outcome(convert: Any, *given: Any) -> Any:
    """Return the values, with floats as texts, or the error's message and index."""
    try:
        return [str(value) if isinstance(value, float) else value for value in convert(*given).to_pylist()]
    except InvalidText as error:
        return error.message, error.index


def test_corpus(replica: Replica) -> None:
    wanted = [column for column in corpus.columns(18) if column.binary]
    replica.execute(corpus.SETUP, corpus.create("v", wanted), "CREATE PUBLICATION p FOR TABLE v")
    replica.execute(corpus.insert("v", wanted, 1))
    replica.subscribe(types=f"'{TEXT}'", binary="true")
    replica.assert_equal("v")
    replica.execute(corpus.insert("v", wanted, 1001))
    replica.assert_equal("v")
    names = ", ".join(column.name for column in wanted)
    replica.execute(
        "ALTER TABLE v REPLICA IDENTITY FULL",
        f"UPDATE v SET ({names}) = (SELECT {names} FROM v o WHERE o.id = v.id + 1) WHERE id < 1000",
        "DELETE FROM v WHERE id % 3 = 0",
    )
    replica.assert_equal("v")
    # Types that are made while it runs; both formats of transfer, one after the other.
    replica.execute(
        "CREATE TYPE later AS (m mood, r textrange); ALTER TYPE mood ADD VALUE 'new'",
        "CREATE TABLE w (id int PRIMARY KEY, a later[], d date)",
        "ALTER PUBLICATION p ADD TABLE w",
    )
    replica.alter("REFRESH PUBLICATION")
    replica.execute("""INSERT INTO w VALUES (1, '{"(new,\\"[a,b)\\")"}', '2024-01-01')""")
    replica.assert_equal("v", "w")
    replica.alter("SET (binary = false)")
    replica.execute("INSERT INTO w VALUES (2, '{NULL}', '2024-01-02')", "UPDATE v SET c_mood = 'new'")
    replica.assert_equal("v", "w")
    replica.alter("SET (binary = true)")
    replica.execute("INSERT INTO w VALUES (3, '{}', NULL)", "UPDATE v SET c_int4 = 5")
    replica.assert_equal("v", "w")


def test_streamed_and_unchanged_values(replica: Replica) -> None:
    """TOAST values that are not sent again, a large transaction in progress, a key that changes."""
    replica.execute(
        "CREATE TABLE t (id int, part text, big bytea, n numeric, u uuid, PRIMARY KEY (part, id))",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR TABLE t",
        "INSERT INTO t SELECT g, 'a', decode(repeat(md5(g::text), 200), 'hex'), g / 3.0, md5(g::text)::uuid "
        "FROM generate_series(1, 50) g",
    )
    replica.subscribe(binary="true", streaming="on")
    replica.execute("UPDATE t SET n = -n WHERE id < 20", "UPDATE t SET part = 'b' WHERE id BETWEEN 10 AND 30")
    replica.assert_equal("t")
    replica.execute(
        "SET logical_decoding_work_mem = '64kB'; INSERT INTO t SELECT g, 'c', decode(repeat(md5(g::text), 60), 'hex'), "
        "g * 1e10, NULL FROM generate_series(1, 3000) g; UPDATE t SET n = 0 WHERE id % 7 = 0; DELETE FROM t WHERE id % 5 = 0"
    )
    replica.assert_equal("t")


def test_rows_with_nan_are_found_without_a_key(replica: Replica) -> None:
    """Infinity - Infinity is a NaN with the sign bit, which its text does not show: the copy is made of text."""
    replica.execute(
        "CREATE TABLE t (id int, f float8, g float4, a float8[])",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT g, i - i, (i - i)::float4, ARRAY[i - i] FROM generate_series(1, 3) g, (SELECT 'Infinity'::float8 i)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    assert replica.query("SELECT DISTINCT encode(float8send(f), 'hex') FROM t") == [("fff8000000000000",)]
    replica.subscribe(binary="true", types="'public.t.a natural'")
    replica.caught_up()
    replica.execute(
        "UPDATE t SET id = 11 WHERE id = 1", "DELETE FROM t WHERE id = 2", "INSERT INTO t VALUES (4, 'NaN')"
    )
    replica.assert_equal("t")
    replica.execute("UPDATE t SET id = id + 1", "DELETE FROM t WHERE id = 12")
    replica.assert_equal("t")


@pytest.mark.parametrize("type_", ["money", "regclass[]", "holder", "holders", "aclitem[]"])
def test_refused_by_name(replica: Replica, type_: str) -> None:
    replica.execute(
        "CREATE TYPE holder AS (a int, m money); CREATE DOMAIN holders AS holder[]",
        f"CREATE TABLE t (id int PRIMARY KEY, odd {type_})",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    with pytest.raises(PubsubError, match=r'column "odd" of table "public\.t"') as caught:
        replica.subscribe(binary="true")
    assert "binary = false" in (caught.value.hint or "")
    assert replica.slots() == []


def test_value_outside_of_its_natural_type(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a value is refused, and the values did come in binary."""
    seen = []
    monkeypatch.setattr(rows, "from_binary", lambda *given: seen.append(given[1]) or from_binary(*given))
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, d date)", "CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe(binary="true")
    replica.caught_up()
    replica.execute("INSERT INTO t VALUES (1, '2024-01-01'), (2, '-infinity')")
    error = replica.error()
    assert 'column "d" of table "public.t"' in error
    assert '"-infinity" cannot be held exactly by Delta type DATE' in error
    assert 1082 in seen


def test_random_types_and_values(database: Database) -> None:
    """Text and binary form of random expressions of random types, both made by the server, agree."""
    settings_ = "-c timezone=UTC -c extra_float_digits=3"

    @given(st.integers(min_value=0, max_value=2**32))
    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    def agree(seed: int) -> None:
        made = RandomTypes(random.Random(seed), f"t{seed}_")
        type_, value = made.make(3)
        for statement in made.declared:
            connection.execute(statement.encode())
        rows = ", ".join(f"({value()})" for _ in range(20))
        query = f"SELECT a::{type_} FROM (VALUES {rows}, (NULL)) t (a)".encode()
        results = [connection.pgconn.exec_params(query, [], result_format=one) for one in (0, 1)]
        assert not results[0].error_message, (results[0].error_message, query)
        types = asyncio.run(_types(database))
        text, binary = (
            pa.array([result.get_value(row, 0) for row in range(result.ntuples)], pa.binary()) for result in results
        )
        oid = results[0].ftype(0)
        types.check(oid)
        for target in (delta_type(types.base(oid), results[0].fmod(0)), pa.string()):
            wanted = _outcome(from_text, text, target)
            assert _outcome(from_binary, binary, oid, target, types) == wanted, type_

    with psycopg.connect(database.conninfo, autocommit=True, options=settings_, client_encoding="UTF8") as connection:
        agree()


async def _types(database: Database) -> BinaryTypes:
    async with await Connection.connect(database.conninfo, replication=False) as connection:
        return await definitions.binary_types(connection)


def test_a_random_table(replica: Replica) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    made = RandomTypes(random.Random(seed))
    columns = [made.make() for _ in range(24)]

    def insert(first: int) -> str:
        rows = [
            f"({number}, {', '.join('NULL' if made.rnd.random() < 0.2 else value() for _, value in columns)})"
            for number in range(first, first + 12)
        ]
        return f"INSERT INTO t VALUES {', '.join(rows)}"

    listed = ", ".join(f"c{number} {type_}" for number, (type_, _) in enumerate(columns))
    replica.execute(
        *made.declared, f"CREATE TABLE t (id int PRIMARY KEY, {listed})", "CREATE PUBLICATION p FOR TABLE t"
    )
    replica.execute(insert(0))
    replica.subscribe(binary="true")
    replica.execute(insert(100), "DELETE FROM t WHERE id % 5 = 0")
    replica.assert_equal("t")
    replica.alter("SET (binary = false)")
    replica.execute(insert(200), "UPDATE t SET id = id + 1000 WHERE id % 2 = 0")
    replica.assert_equal("t")
