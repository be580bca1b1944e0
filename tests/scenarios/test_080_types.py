"""Every value of every type through copy and stream, on 15 to 19, compared as PostgreSQL's text."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import PubsubError
from pubsub.protocol.type_contract import RULES
from pubsub.testing.fixtures import VERSIONS, Database, Servers
from tests.support import corpus, duck, stores
from tests.support.replica import Replica, RunningNode, wait_until

TYPES = ", ".join(f"public.v.{name} text" for name in corpus.TEXT_COLUMNS)


@pytest.fixture
def any_replica(request: pytest.FixtureRequest, node: RunningNode, servers: Servers) -> Iterator[Replica]:
    """An empty database of the version that the test asks for."""
    name = f"types_{request.param}"
    servers[request.param].create_database(name)
    replica = Replica(node, Database(servers[request.param], name))
    yield replica
    if replica.created:
        replica.drop()
    servers[request.param].drop_database(name)


@pytest.mark.parametrize("any_replica", VERSIONS, indirect=True)
def test_corpus(any_replica: Replica) -> None:
    """Copied, inserted, updated from NULL, with and without the old row."""
    replica = any_replica
    version = int(replica.query("SHOW server_version_num")[0][0]) // 10000
    wanted = corpus.columns(version)
    replica.execute(corpus.SETUP, corpus.create("v", wanted), "CREATE PUBLICATION p FOR TABLE v")
    replica.execute(corpus.insert("v", wanted, 1))
    replica.subscribe(types=f"'{TYPES}'")
    replica.assert_equal("v")
    replica.execute(corpus.insert("v", wanted, 1001))
    replica.assert_equal("v")
    names = ", ".join(column.name for column in wanted)
    nulls = ", ".join("NULL" for _ in wanted)
    replica.execute(
        f"UPDATE v SET ({names}) = ROW ({nulls}) WHERE id < 1000",
        "ALTER TABLE v REPLICA IDENTITY FULL",
        f"UPDATE v SET ({names}) = (SELECT {names} FROM v o WHERE o.id = v.id + 1000) WHERE id < 1000",
        "DELETE FROM v WHERE id % 3 = 0",
    )
    replica.assert_equal("v")


@pytest.mark.parametrize("version", ["15", "18", "19"])
def test_the_contract_has_every_type(servers: Servers, version: str) -> None:
    """The contract has every type in pg_catalog of 15, 18 and 19, except arrays, row types and pseudo-types."""
    known = {(rule.oid, rule.name) for rule in RULES}
    found = servers[version].query(
        "SELECT oid::int8, typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace "
        "AND typtype IN ('b', 'r', 'm') AND typname !~ '^_'"
    )
    assert set(found) <= known
    if version == "18":
        assert set(found) == {(oid, name) for oid, name in known if name not in ("oid8", "regdatabase")}
    if version == "19":
        assert set(found) == known


def test_values_and_choices(replica: Replica) -> None:
    """A value outside the natural type stops everything, with table, column, key and LSN; text holds it."""
    replica.execute(
        "CREATE TABLE a (id int, part text, at timestamptz, d date, n numeric(6,2), PRIMARY KEY (part, id))",
        "CREATE PUBLICATION p FOR TABLE a",
    )
    for wrong in ("public.a.missing text", "public.b.at text", "sometype text", "uuid natural"):
        with pytest.raises(PubsubError):
            replica.subscribe(types=f"'{wrong}'")
    assert replica.slots() == []
    replica.subscribe(types="'public.a.d text'")
    replica.execute("INSERT INTO a VALUES (1, 'x', now(), 'infinity', 1)")
    replica.assert_equal("a")
    replica.execute("INSERT INTO a VALUES (2, 'x y', now(), '-infinity', 'NaN')")
    row = wait_until(lambda: one if (one := replica.node.statistics(replica.name))["error"] else None, "a failure")
    assert (
        row["error"] == 'column "n" of table "public.a": value "NaN" cannot be held exactly by Delta type DECIMAL(6,2)'
    )
    assert row["error_detail"].startswith("Key (id, part)=(2, x y). The transaction finished at ")
    assert "types = 'public.a.n text'" in row["error_hint"]
    replica.execute("UPDATE a SET n = 2 WHERE id = 2")
    replica.drop()
    # The same during the copy.
    replica.execute("UPDATE a SET at = '0044-03-15 BC' WHERE id = 1")
    replica.subscribe(types="'date text, numeric text'", target="'copied'")
    error = replica.error()
    assert 'column "at" of table "public.a": value "0044-03-15 00:00:00+00 BC" cannot be held exactly' in error
    assert "(key (part, id)=(x, 1), copied at " in error or "(key (id, part)=(1, x), copied at " in error
    replica.drop()
    replica.subscribe(types="'timestamptz text, date text'", target="'text'")
    replica.assert_equal("a")


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("LATIN1", "\u00e4\u00df\u00ff\u00a0"),
        ("EUC_JP", "\u65e5\u672c\u8a9e\u30bd"),
        ("SQL_ASCII", "\u00e4\u20ac\U0001f600"),
    ],
)
def test_encodings(encoding: str, text: str, node: RunningNode, servers: Servers) -> None:
    """Names and values of a database that is not in UTF8; SQL_ASCII, which knows no encoding, must hold UTF-8."""
    name = f"in_{encoding.lower()}"
    server = servers["18"]
    server.create_database(name, f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    replica = Replica(node, Database(server, name))
    with psycopg.connect(replica.conninfo, autocommit=True, client_encoding="UTF8") as connection:
        connection.execute(f'CREATE TABLE t (id int PRIMARY KEY, "{text}" text, n name, v text[])'.encode())
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        connection.execute(f"INSERT INTO t VALUES (1, '{text}', '{text}', ARRAY['{text}'])".encode())
        replica.subscribe(binary="true")
        replica.assert_equal("t")
        connection.execute(f"INSERT INTO t VALUES (2, '{text} x', NULL, '{{}}')".encode())
        connection.execute(f"UPDATE t SET v = ARRAY['{text}', NULL] WHERE id = 2".encode())
        replica.assert_equal("t")
    assert replica.rows("t", "n FROM delta_t WHERE id = 1") == [{"n": text}]
    if encoding == "SQL_ASCII":
        # The publisher itself refuses bytes that are not UTF-8.
        replica.execute("INSERT INTO t (id, n) VALUES (3, convert_from('\\xff', 'SQL_ASCII'))")
        assert 'invalid byte sequence for encoding "UTF8": 0xff' in replica.error()
    replica.drop()
    server.drop_database(name)


def test_names(replica: Replica, spark: Spark) -> None:
    """Names of schemas, tables and columns: of maximal length, with mixed case, quotes, dots, line ends."""
    columns = [
        "Id",
        'quo"te',
        "back`tick",
        "a.b",
        "line\nend",
        "a b,c;{}()=\t",
        "\u00e9" * 31 + "x",
        "select",
        "1",
        "'",
        "%s",
        "-",
    ]
    quoted = ['"' + column.replace('"', '""') + '"' for column in columns]
    table = '"My ""Schema"".x"."' + "t" * 50 + ' ."".`Z "'
    typed = ", ".join(f"{name} text" for name in quoted[1:])
    replica.execute(
        f'CREATE SCHEMA "My ""Schema"".x"; CREATE TABLE {table} ({quoted[0]} int, {typed}, PRIMARY KEY ({quoted[4]}, {quoted[0]}))',
        f"CREATE PUBLICATION p FOR TABLE {table}",
        f"INSERT INTO {table} SELECT g{', g' * (len(quoted) - 1)} FROM generate_series(1, 5) g",
    )
    replica.subscribe()
    replica.assert_equal(table)
    replica.execute(
        f"UPDATE {table} SET {quoted[5]} = 'new' WHERE {quoted[0]} < 3; UPDATE {table} SET {quoted[4]} = 'key' WHERE {quoted[0]} = 4",
        f"DELETE FROM {table} WHERE {quoted[0]} = 5; INSERT INTO {table} ({quoted[0]}, {quoted[4]}) VALUES (9, '')",
    )
    replica.assert_equal(table)
    frame = spark.session.read.format("delta").load(replica.path(table))
    assert frame.columns == columns
    assert frame.count() == 5


@pytest.mark.parametrize(
    "ddl", ['t (id int PRIMARY KEY, "Id" text)', 't (id int); CREATE TABLE "T" (id int PRIMARY KEY)']
)
def test_names_that_differ_only_in_case_are_refused(replica: Replica, ddl: str) -> None:
    replica.execute(f"CREATE TABLE {ddl}; CREATE PUBLICATION p FOR ALL TABLES")
    with pytest.raises(PubsubError, match="differ only in case"):
        replica.subscribe()
    assert replica.slots() == []


@pytest.mark.full
def test_other_readers(replica: Replica, spark: Spark) -> None:
    """Spark, DataFusion and DuckDB read the same values in the corpus' table."""
    wanted = corpus.columns(18)
    replica.execute(corpus.SETUP, corpus.create("v", wanted), "CREATE PUBLICATION p FOR TABLE v")
    replica.execute(corpus.insert("v", wanted, 1))
    replica.subscribe(types=f"'{TYPES}'")
    replica.caught_up()
    replica.execute(corpus.insert("v", wanted, 1001), "DELETE FROM v WHERE id % 4 = 0")
    replica.caught_up()
    theirs = spark.session.read.format("delta").load(replica.path("v")).orderBy("id").toArrow()
    ours = replica.rows("v", "* FROM delta_t ORDER BY id")
    assert [str(row) for row in theirs.to_pylist()] == [str(row) for row in ours]
    with duck.reader() as connection, stores.readable(replica.path("v")) as files:
        found = connection.sql(f"SELECT * FROM delta_scan('{files}') ORDER BY id").to_arrow_table()
    assert [str(row) for row in found.to_pylist()] == [str(row) for row in ours]
