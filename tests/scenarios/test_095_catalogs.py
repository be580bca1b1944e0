"""register: names of Delta tables in Spark's catalogs, among them a Hive metastore (docs/catalogs.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher import registrar
from pubsub.delta.spark import table_names
from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import DuplicateObject, FeatureNotSupported, PubsubError
from pubsub.sql.layouts import TableName
from pubsub.testing.daemon import SETTINGS, Daemon
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, RunningNode, wait_until

HIVE = {"spark.sql.catalogImplementation": "hive"}
SETUP = (
    "CREATE TABLE a (id int PRIMARY KEY, v text); INSERT INTO a VALUES (1, 'one');"
    'CREATE SCHEMA other; CREATE TABLE other.b (id int PRIMARY KEY); CREATE TABLE "Odd Name" (id int PRIMARY KEY);'
    "CREATE PUBLICATION p FOR TABLE a, other.b"
)


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node that takes the test process's catalog, which is in its JVM's memory, for a metastore."""
    with RunningNode(tmp_path_factory.mktemp("node"), spark, spark={"conf": HIVE}) as running:
        yield running


@pytest.fixture
def schema(replica: Replica) -> Iterator[str]:
    """The name of a schema for this test."""
    name = f"of_{replica.name}"
    yield name
    replica.node.spark.session.sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")


def registered(replica: Replica) -> dict[str, tuple[Any, ...]]:
    """Return each table's name and what was in the way."""
    found = replica.node.fetch(
        "SELECT relation, registered, register_error FROM pg_subscription_rel r JOIN pg_subscription s "
        f"ON r.srsubid = s.oid WHERE subname = '{replica.name}'"
    )
    return {row["relation"]: (row["registered"], row["register_error"]) for row in found}


def until(replica: Replica, condition: Callable[[dict[str, tuple[Any, ...]]], object]) -> dict[str, tuple[Any, ...]]:
    """Wait until what is registered is so."""

    def found() -> dict[str, tuple[Any, ...]] | None:
        now = registered(replica)
        return now if condition(now) else None

    return wait_until(found, "the names in the catalog")


def tables(replica: Replica, schema: str) -> set[str]:
    return {row.tableName for row in replica.node.spark.session.sql(f"SHOW TABLES IN {schema}").collect()}


def read(replica: Replica, name: str) -> list[Any]:
    return sorted(map(tuple, replica.node.spark.session.table(name).collect()))


def test_tables_are_found_by_name(replica: Replica, schema: str) -> None:
    """A table has its name once it is ready, gets another when it is renamed, and loses it when none is wanted."""
    replica.execute(SETUP)
    replica.subscribe(register=f"'other.b (spark_catalog.{schema}.bees), public.* (spark_catalog.{schema})'")
    until(
        replica,
        lambda now: now == {
            "public.a": (f"spark_catalog.{schema}.a", None),
            "other.b": (f"spark_catalog.{schema}.bees", None),
        },
    )  # fmt: skip
    assert read(replica, f"{schema}.a") == [(1, "one")]
    replica.execute(
        "INSERT INTO a VALUES (2, 'two'); ALTER TABLE a ADD n int; ALTER TABLE a RENAME TO c; INSERT INTO c VALUES (3)"
    )
    until(replica, lambda now: now.get("public.c") == (f"spark_catalog.{schema}.c", None))
    assert tables(replica, schema) == {"c", "bees"}
    replica.caught_up()
    assert read(replica, f"{schema}.c") == [(1, "one", None), (2, "two", None), (3, None, None)]
    replica.alter(f"SET (register = 'other.* (spark_catalog.{schema})')")
    until(replica, lambda now: now == {"public.c": (None, None), "other.b": (f"spark_catalog.{schema}.b", None)})
    assert tables(replica, schema) == {"b"}
    replica.execute("INSERT INTO other.b VALUES (5)")
    replica.caught_up()
    assert read(replica, f"{schema}.b") == [(5,)]
    replica.drop()
    assert tables(replica, schema) == {"b"}, "the Delta table stays, too"


@pytest.mark.full
def test_names_are_swapped(replica: Replica, schema: str) -> None:
    """As by a load into another table; and a name that changes in its case alone is not lost."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); INSERT INTO a VALUES (1);"
        "INSERT INTO b VALUES (2); CREATE PUBLICATION p FOR TABLE a, b"
    )
    replica.subscribe(register=f"'spark_catalog.{schema}'")
    until(replica, lambda now: now.get("public.b") == (f"spark_catalog.{schema}.b", None))
    until(replica, lambda now: now.get("public.a") == (f"spark_catalog.{schema}.a", None))
    paths = {name: replica.path(name) for name in "ab"}
    replica.execute(
        "ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE c RENAME TO b; INSERT INTO a VALUES (3);"
        "INSERT INTO b VALUES (4)"
    )
    named = sorted([("public.a", paths["b"]), ("public.b", paths["a"])])
    wait_until(
        lambda: sorted((one.qualified_name, one.path) for one in replica.node.relations(replica.name)) == named,
        "the tables' names",
    )

    both = {f"public.{name}": (f"spark_catalog.{schema}.{name}", None) for name in "ab"}
    until(replica, lambda now: now == both)
    replica.caught_up()
    assert (read(replica, f"{schema}.a"), read(replica, f"{schema}.b")) == ([(2,), (3,)], [(1,), (4,)])
    replica.execute('ALTER TABLE a RENAME TO "A"; INSERT INTO "A" VALUES (5)')
    until(replica, lambda now: now.get('public."A"') == (f"spark_catalog.{schema}.A", None))
    replica.caught_up()
    assert read(replica, f"{schema}.a") == [(2,), (3,), (5,)]


@pytest.mark.full
def test_what_is_in_the_way_is_told(replica: Replica, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's table keeps its name; the table is replicated, and tried again once a command has changed something."""
    monkeypatch.setattr(registrar, "_AFTER_FAILURE", 0.2)
    session = replica.node.spark.session
    replica.execute(SETUP)
    session.sql(f"CREATE SCHEMA {schema}")
    session.sql(f"CREATE TABLE {schema}.a (x int) USING delta")
    session.sql(f"CREATE VIEW {schema}.b AS SELECT 1 AS one")
    replica.subscribe(register=f"'spark_catalog.{schema}'")
    found = until(replica, lambda now: all(error for _, error in now.values()))
    assert found == {
        "public.a": (None, f'"spark_catalog.{schema}.a" is another table'),
        "other.b": (None, f'"spark_catalog.{schema}.b" is another table'),
    }
    replica.assert_equal("a", "other.b")
    session.sql(f"DROP TABLE {schema}.a")
    until(replica, lambda now: now["public.a"] == (f"spark_catalog.{schema}.a", None))
    session.sql(f"DROP VIEW {schema}.b")
    until(replica, lambda now: now["other.b"] == (f"spark_catalog.{schema}.b", None))
    assert read(replica, f"{schema}.a") == [(1, "one")]
    # A name that somebody has dropped is forgotten without a word.
    session.sql(f"DROP TABLE {schema}.a")
    replica.alter(f"SET (register = 'public.a (spark_catalog.{schema}.again)')")
    until(replica, lambda now: now == {"public.a": (f"spark_catalog.{schema}.again", None), "other.b": (None, None)})
    assert tables(replica, schema) == {"again"}


@pytest.mark.full
def test_a_managed_table_is_not_dropped(replica: Replica, schema: str) -> None:
    """A table whose files would go with its name keeps both."""
    session = replica.node.spark.session
    session.sql(f"CREATE SCHEMA {schema}")
    session.sql(f"CREATE TABLE {schema}.m (x int) USING delta")
    path = session.sql(f"DESCRIBE DETAIL {schema}.m").collect()[0].location
    name = TableName("spark_catalog", schema, "m")
    assert not table_names.register(session, path, name), "it has this name"
    with pytest.raises(FeatureNotSupported, match="is not dropped: the catalog would delete its files"):
        table_names.forget(session, path, name)
    with pytest.raises(DuplicateObject, match="is another table"):
        table_names.register(session, path + "x", name)
    assert not table_names.forget(session, path + "x", name)
    assert tables(replica, schema) == {"m"}


@pytest.mark.full
def test_a_thread_that_has_run_no_sql(replica: Replica, schema: str, tmp_path: Path) -> None:
    """As that of a daemon that finds the new name there after a crash, and has only to take the old one away."""
    session = replica.node.spark.session
    session.sql(f"CREATE SCHEMA {schema}")
    session.sql(f"CREATE TABLE {schema}.t (x int) USING delta LOCATION '{tmp_path}/t'")
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(
            table_names.forget, session, f"{tmp_path}/t", TableName("spark_catalog", schema, "t")
        ).result()
    assert tables(replica, schema) == set()


@pytest.mark.full
@pytest.mark.parametrize(
    ("register", "words"),
    [
        ("lake", 'catalog "lake" does not exist'),
        ("public.a (spark_catalog.s.t), other.b (spark_catalog.s.T)", "would both be registered as"),
        ("public.nope (spark_catalog)", "names tables that are not published"),
        ("* (spark_catalog.s.t)", 'invalid value for parameter "register"'),
        ("a.b.c", 'invalid value for parameter "register"'),
    ],
)
def test_refused(replica: Replica, register: str, words: str) -> None:
    """Before anything is made."""
    replica.execute(SETUP)
    assert words in str(replica.refused(f"register = '{register}'"))
    assert replica.slots() == []


@pytest.mark.full
def test_two_subscriptions_want_one_name(replica: Replica, schema: str) -> None:
    """The second one is refused, also by REFRESH and SET."""
    replica.execute(SETUP)
    replica.subscribe(register=f"'spark_catalog.{schema}'", target="one", slot_name=f"{replica.name}_slot")
    second = Replica(replica.node, replica.database)
    try:
        words = f'relations "other.b" and "other.b" would both be registered as "spark_catalog.{schema}.b"'
        assert words in str(second.refused(f"register = 'spark_catalog.{schema}', target = two"))
        second.subscribe(target="two")
        with pytest.raises(PubsubError, match="would both be registered"):
            second.alter(f"SET (register = 'spark_catalog.{schema}')")
        replica.execute(
            "CREATE SCHEMA third; CREATE TABLE third.a (id int PRIMARY KEY); ALTER PUBLICATION p ADD TABLE third.a"
        )
        with pytest.raises(PubsubError, match="would both be registered"):
            replica.alter("REFRESH PUBLICATION")
    finally:
        if second.created:
            second.drop()


HIVE_SETTINGS = """\
"spark.sql.catalogImplementation" = "hive"
"spark.hadoop.javax.jdo.option.ConnectionURL" = "jdbc:derby:;databaseName={directory}/metastore;create=true"
"""


@pytest.mark.full
def test_a_hive_metastore_across_kills(database: Database, tmp_path: Path) -> None:
    """A metastore in Derby: names survive kill -9 between the statements, and another Spark reads the tables by them."""
    database.execute(SETUP)
    settings = SETTINGS + HIVE_SETTINGS.format(directory=tmp_path)
    daemon = Daemon(tmp_path / "node", settings, {"PUBSUB_LOG_FORMAT": "json"})

    def names() -> dict[str, Any]:
        found = daemon.fetch("SELECT relation, registered, register_error FROM pg_subscription_rel")
        return {row["relation"]: row["registered"] or row["register_error"] for row in found}

    try:
        daemon.faults.arm("table registered", "kill")
        daemon.start()
        daemon.execute(
            f"CREATE SUBSCRIPTION s CONNECTION '{database.conninfo}' PUBLICATION p WITH (register = 'spark_catalog.shop')"
        )
        daemon.killed_by_fault()
        assert set(names().values()) == {None}
        daemon.faults.clear()
        daemon.start()
        both = {"public.a": "spark_catalog.shop.a", "other.b": "spark_catalog.shop.b"}
        wait_until(lambda: names() == both, "both names")
        daemon.faults.arm("table registered", "kill")
        daemon.execute(
            "ALTER SUBSCRIPTION s SET (register = 'public.* (spark_catalog.shop2), other.* (spark_catalog.shop)')"
        )
        daemon.killed_by_fault()
        daemon.faults.clear()
        daemon.start()
        wait_until(lambda: names() == both | {"public.a": "spark_catalog.shop2.a"}, "the new name")
        database.execute("INSERT INTO a VALUES (2, 'two')")
        daemon.wait_for_catchup("s")
        # A name that the source's has not in common with the catalog's rules is told of.
        database.execute('ALTER PUBLICATION p ADD TABLE "Odd Name"')
        daemon.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        wait_until(lambda: "INVALID_SCHEMA_OR_RELATION_NAME" in (names().get('public."Odd Name"') or ""), "the refusal")
        assert daemon.terminate() == 0
        assert other_spark(tmp_path, "SHOW TABLES IN shop") == [["shop", "b", False]]
        assert other_spark(tmp_path, "SELECT * FROM shop2.a ORDER BY id") == [[1, "one"], [2, "two"]]
    finally:
        daemon.kill()


def other_spark(directory: Path, query: str) -> list[list[Any]]:
    """Return what a Spark that knows nothing of this program answers."""
    code = f"""
import json, sys
from pubsub import jars
from pyspark.sql import SparkSession
builder = (
    SparkSession.builder.master("local[1]")
    .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    .config("spark.driver.extraClassPath", ":".join(map(str, jars.class_path())))
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.hadoop.javax.jdo.option.ConnectionURL", "jdbc:derby:;databaseName={directory}/metastore")
    .enableHiveSupport()
)
print(json.dumps([list(row) for row in builder.getOrCreate().sql({query!r}).collect()]))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[list[Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found
