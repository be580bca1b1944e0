"""Two daemons of one node: one is stopped in the middle of a commit, another takes its place, and then the first goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.fault.daemon import SETTINGS, Daemon, Subscribed
from tests.support.replica import wait_until

TABLES = ("a", "keyless", "statement")


def daemon_at(home: Path, warehouse: Path, catalog: str | None) -> Daemon:
    home.mkdir(exist_ok=True)
    daemon = Daemon(home)
    url = f'[catalog]\nurl = "{catalog}"\n' if catalog is not None else ""
    (home / "pubsub.toml").write_text(f'warehouse = "{warehouse}"\n{SETTINGS}{url}')
    return daemon


@pytest.fixture(params=["a copied home", "one catalog on PostgreSQL"])
def catalog(request: pytest.FixtureRequest, publisher: EmbeddedPostgres) -> Iterator[str | None]:
    """The URL of the catalog, None for a file in the home."""
    if request.param == "a copied home":
        yield None
        return
    publisher.create_database("two_daemons")
    yield f"postgresql://{publisher.user}@{publisher.host}:{publisher.port}/two_daemons"
    publisher.drop_database("two_daemons")


@pytest.mark.soak
def test_a_daemon_that_was_stopped_in_its_commit_commits_nothing(
    tmp_path: Path, database: Database, catalog: str | None, publisher: EmbeddedPostgres
) -> None:
    """A commit of our files, and one of a statement.  Rows without a key show a transaction that is applied twice."""
    first = daemon_at(tmp_path / "first", tmp_path / "warehouse", catalog)
    (tmp_path / "warehouse").mkdir()
    first.start()
    second: Daemon | None = None
    try:
        subscribed = Subscribed(first, database)
        database.execute("CREATE TABLE statement (n int); ALTER PUBLICATION p ADD TABLE statement")
        subscribed.subscribe()
        subscribed.assert_equal(TABLES)
        # A change data feed is Spark's to write.
        statement = DeltaTable(subscribed.relations()["statement"].path)
        statement.alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
        write(subscribed, 1)
        subscribed.assert_equal(TABLES)
        stopped = stop_in_commits(first, subscribed)
        second = take_over(first, tmp_path, database, catalog, publisher)
        subscribed.daemon = second
        write(subscribed, 3)
        subscribed.caught_up()
        for process in stopped:
            process.resume()
        # Its worker ends only after its commits; it tells of them, or of the connection that it lost meanwhile.  A daemon
        # whose catalog another has taken over ends, too.
        ended = ("was changed by another process", "worker failed")
        wait_until(lambda: not first.running or any(map(first.said, ended)), "the first daemon's commits to end")
        first.kill()
        write(subscribed, 4)
        subscribed.assert_equal(TABLES)
        subscribed.drop()
    finally:
        first.kill()
        if second is not None:
            second.kill()


def write(subscribed: Subscribed, number: int) -> None:
    subscribed.database.execute(
        f"INSERT INTO keyless VALUES ({number}); INSERT INTO statement VALUES ({number}); UPDATE a SET n = n + 1 WHERE id = {number}"
    )


def stop_in_commits(daemon: Daemon, subscribed: Subscribed) -> list[psutil.Process]:
    """Stop the daemon and its JVM while it waits for the JVM to begin the transactions of a batch's commits."""
    jvm = daemon.jvm()
    for table in ("keyless", "statement"):
        daemon.faults.arm(f"commit public.{table}")
    write(subscribed, 2)
    for table in ("keyless", "statement"):
        daemon.faults.wait(f"commit public.{table}")
    jvm.suspend()
    daemon.faults.clear()
    # The daemon has looked at the tables' versions, and its requests wait in the JVM's sockets.
    wait_until(lambda: waiting(jvm) >= 2, "the daemon's requests")
    process = daemon.process
    process.suspend()
    return [jvm, process]


def waiting(jvm: psutil.Process) -> int:
    """Return the number of the JVM's connections that have unread bytes."""
    ports = {connection.laddr.port for connection in jvm.net_connections("tcp") if connection.raddr}
    unread = 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, _, _, queues = line.split()[1:5]
            unread += int(local.rpartition(":")[2], 16) in ports and int(queues.partition(":")[2], 16) > 0
    return unread


def take_over(
    first: Daemon, directory: Path, database: Database, catalog: str | None, publisher: EmbeddedPostgres
) -> Daemon:
    """Start a daemon in the first one's place, which has been taken for dead."""
    database.query("SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE active")
    home = directory / "second"
    if catalog is not None:
        publisher.query("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = 'two_daemons'")
        second = daemon_at(home, directory / "warehouse", catalog)
        second.start()
        return second
    shutil.copytree(first.home, home)
    second = daemon_at(home, directory / "warehouse", None)
    # A copy is refused while its original is there to be seen.
    away = first.home.rename(directory / "away")
    second.start()
    wait_until(lambda: second.said("daemon has started"), "the second daemon")
    away.rename(first.home)
    return second
