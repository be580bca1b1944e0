"""A standalone Spark cluster: its executors copy large tables and write large batches, with nothing installed on them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pubsub import object_stores
from pubsub.node.node import Node
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from pubsub.testing.s3_server import S3Server, can_build, program
from pubsub.testing.servers import EmbeddedPostgres
from pubsub.testing.spark_cluster import SparkCluster
from tests.fault.daemon import SETTINGS, Daemon, Subscribed
from tests.support.replica import PATIENCE, wait_until
from tests.support.unnamed_files import unnamed_files

pytestmark = pytest.mark.full

PASSWORD = "recognised-wherever-it-is"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def daemon(cluster: SparkCluster, tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path)
    configure(tmp_path, cluster)
    found.start()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that asks for passwords, with a role whose password can be recognised, and a table that executors copy."""
    with EmbeddedPostgres("18", auth="scram-sha-256", password="of-the-superuser") as server:
        server.execute(
            f"""
            CREATE ROLE replicator LOGIN REPLICATION PASSWORD '{PASSWORD}';
            CREATE TABLE a (id int PRIMARY KEY, t text);
            INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(1, 4000) g;
            GRANT SELECT ON a TO replicator;
            CREATE PUBLICATION p FOR TABLE a
            """
        )
        yield server


def with_password(server: EmbeddedPostgres) -> str:
    return server.conninfo(user="replicator", password=PASSWORD)


def configure(home: Path, cluster: SparkCluster, warehouse: str = "", conf: Mapping[str, str] | None = None) -> None:
    """Write a node's settings: those of its tests, the cluster, a warehouse and further configuration of Spark."""
    given = {
        # The interpreter without this environment's packages: they must come with the job.
        "spark.pyspark.python": sys._base_executable,
        "spark.executor.memory": "600m",
        **(conf or {}),
    }
    lines = "".join(f'"{name}" = "{value}"\n' for name, value in given.items())
    table = f'[spark]\nmaster = "{cluster.url}"\nstatement_rows = 500\n[spark.conf]\n{lines}'
    where = f'warehouse = "{warehouse}"\n' if warehouse else ""
    (home / "pubsub.toml").write_text(where + SETTINGS.replace("[spark.conf]", table))


@pytest.fixture
def subscribed(daemon: Daemon, database: Database) -> Iterator[Subscribed]:
    made = Subscribed(daemon, database)
    yield made
    daemon.ensure()
    made.drop()


def test_executors_copy_and_write_with_nothing_installed(
    cluster: SparkCluster, daemon: Daemon, subscribed: Subscribed, database: Database
) -> None:
    subscribed.grow()
    subscribed.subscribe()
    subscribed.assert_equal()
    assert list(cluster.directory.glob("worker*/app-*/*/pubsub_packages/pyarrow")), "packages came with the job"
    history = (daemon.home / "warehouse").rglob("_delta_log/*.json")
    assert not any("password" in path.read_text() for path in history)
    subscribed.write(3)
    subscribed.assert_equal()
    # More rows than statement_rows: Spark reads what was staged, in the warehouse.
    database.execute("UPDATE a SET n = n + 7; DELETE FROM a WHERE id BETWEEN 300001 AND 300700")
    subscribed.assert_equal()
    (path,) = (daemon.home / "warehouse").rglob("a/_delta_log")
    assert any("replaceOnCond" in one.read_text() for one in path.glob("*.json"))
    assert list((daemon.home / "warehouse" / "_pubsub_stage").glob("*/*")) == []
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE a")
    subscribed.assert_equal()


def test_an_executor_that_is_killed_costs_its_chunks(
    cluster: SparkCluster, daemon: Daemon, subscribed: Subscribed, database: Database
) -> None:
    database.execute("INSERT INTO a SELECT g, 0, repeat(md5(g::text), 30) FROM generate_series(400001, 560000) g")
    subscribed.subscribe()
    (path,) = wait_until(lambda: list((daemon.home / "warehouse").rglob("a/part-00000-*")), "the first chunk")[:1]
    executors = cluster.executors()
    executors[0].kill()
    subscribed.assert_equal()
    # Housekeeping may be about to commit a file.
    wait_until(lambda: not unnamed_files(path.parent), "what the executor left is gone")
    assert not daemon.said("worker failed"), daemon.tail()
    assert not daemon.said("starts over"), daemon.tail()


def test_a_password_is_in_nothing_that_spark_keeps(
    guarded: EmbeddedPostgres, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Executors that only speak to their own get it with their tasks, and it is gone with these."""
    home, events = tmp_path / "node", tmp_path / "events"
    home.mkdir()
    events.mkdir()
    with SparkCluster(tmp_path_factory.mktemp("private"), secret="of-the-cluster") as cluster:
        daemon = Daemon(home)
        logged = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
        }
        configure(home, cluster, conf={**cluster.conf(), **logged})
        daemon.start()
        try:
            daemon.execute(f"CREATE SUBSCRIPTION kept CONNECTION {quote_literal(with_password(guarded))} PUBLICATION p")
            wait_ready(daemon, "kept")
            assert compare_tables(guarded.conninfo(), "public.a", path_of(daemon, "kept")) is None
            assert not daemon.said("open to its network"), daemon.tail()
            assert daemon.terminate() == 0  # and Spark has written its log of events
            (log,) = [
                one for one in events.rglob("*") if one.is_file() and b"SparkListenerJobStart" in one.read_bytes()
            ]
            assert re.search(r'"pubsub\.[0-9a-f-]{36}":"[0-9a-f]+"', log.read_text()), "the job's property is listed"
            kept = [
                *files_with(PASSWORD, cluster.directory),
                *files_with(PASSWORD, events),
                *files_with(PASSWORD, home),
            ]
            assert {one.name.partition("-")[0] for one in kept} == {"catalog.db"}
            daemon.execute("DROP SUBSCRIPTION kept")
        finally:
            daemon.kill()


def test_an_open_cluster_is_sent_no_password(cluster: SparkCluster, guarded: EmbeddedPostgres, tmp_path: Path) -> None:
    """Its executors take their own, and before they have one no slot is made for a copy."""
    home, passwords = tmp_path / "node", tmp_path / "passwords"
    home.mkdir()
    daemon = Daemon(home)
    configure(home, cluster, conf={"spark.executorEnv.PGPASSFILE": str(passwords)})
    daemon.start()
    try:
        assert daemon.said("Executors are not sent the passwords")
        daemon.execute(f"CREATE SUBSCRIPTION open CONNECTION {quote_literal(with_password(guarded))} PUBLICATION p")
        refusal = "Spark's executors cannot connect to the publisher"
        wait_until(lambda: daemon.said(refusal), "the copy to be refused")
        assert daemon.said("no password supplied"), daemon.tail()
        assert daemon.said("spark.executorEnv.PGPASSFILE"), "the hint"
        slots = guarded.query("SELECT slot_name FROM pg_replication_slots")
        assert slots == [("open",)]
        passwords.touch(mode=0o600)
        passwords.write_text(f"*:*:*:replicator:{PASSWORD}\n")
        wait_ready(daemon, "open")
        assert compare_tables(guarded.conninfo(), "public.a", path_of(daemon, "open")) is None
        daemon.execute("DROP SUBSCRIPTION open")
    finally:
        daemon.kill()


def wait_ready(daemon: Daemon, name: str) -> None:
    daemon.client(lambda node: node.wait_for_catchup(name, timeout=PATIENCE))


def path_of(daemon: Daemon, name: str) -> str:
    async def find(node: Node) -> str:
        (relation,) = await node.catalog.relations((await node.catalog.subscription(name)).oid)
        return relation.path

    return str(daemon.client(find))


def files_with(text: str, directory: Path) -> list[Path]:
    """Return the files below that hold `text`, but for packages and jars."""
    files = (one for one in directory.rglob("*") if one.is_file() and "pubsub_packages" not in one.parts)
    return [one for one in files if one.suffix not in {".jar", ".zip"} and text.encode() in one.read_bytes()]


@pytest.mark.skipif(program() is None and not can_build(), reason="needs Go, or versitygw")
def test_executors_reach_tables_on_s3(cluster: SparkCluster, tmp_path: Path, database: Database) -> None:
    """With the jars, the keys and the endpoint that the driver has, and no others."""
    with S3Server(tmp_path / "s3") as store:
        store.bucket("lake")
        home = tmp_path / "node"
        home.mkdir()
        daemon = Daemon(home)
        configure(home, cluster, "s3a://lake/tables", store.conf())
        daemon.start()
        try:
            subscribed = Subscribed(daemon, database)
            subscribed.grow()
            subscribed.subscribe()
            subscribed.assert_equal()
            assert list(cluster.directory.glob("worker*/app-*/*/hadoop-aws-*.jar")), "the jars came with the job"
            subscribed.write(3)
            database.execute("UPDATE a SET n = n + 7; DELETE FROM a WHERE id BETWEEN 300001 AND 300700")
            subscribed.assert_equal()
            log = "".join(one.read_text() for one in (tmp_path / "s3").rglob("a/_delta_log/*.json"))
            assert "replaceOnCond" in log, "a statement has written the large batch"
            assert store.secret_key not in (home / "daemon.log").read_text()
            subscribed.drop()
        finally:
            daemon.kill()
            object_stores.configure({})
