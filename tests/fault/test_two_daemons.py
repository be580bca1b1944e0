"""Two daemons of one node: one is stopped in the middle of a commit, another takes its place, and then the first goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from deltalake import DeltaTable

from pubsub.testing.fixtures import Database
from pubsub.testing.ports import Port
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


def restart_workers(daemon: Daemon) -> None:
    """Have the settings reloaded with one that is not taken over in place."""
    settings = daemon.home / "pubsub.toml"
    settings.write_text('logical_decoding_work_mem = "65MB"\n' + settings.read_text())
    daemon.mark()
    daemon.process.send_signal(signal.SIGHUP)


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


@pytest.mark.full
def test_one_that_stands_by_takes_over(tmp_path: Path, database: Database, publisher: EmbeddedPostgres) -> None:
    """At once when the other is killed, and as soon as a session is ended that a machine without power left behind.  Twice: the
    first one stands by in its turn."""
    publisher.create_database("two_daemons")
    catalog = f"postgresql://{publisher.user}@{publisher.host}:{publisher.port}/two_daemons"
    first, second = (daemon_at(tmp_path / name, tmp_path / "warehouse", catalog) for name in ("first", "second"))
    (tmp_path / "warehouse").mkdir()
    port = Port.reserve()
    with (second.home / "pubsub.toml").open("a") as settings:
        settings.write(f'[http]\nlisten = "127.0.0.1:{port.number}"\n')
    first.start("--standby")
    try:
        subscribed = Subscribed(first, database)
        subscribed.subscribe()
        subscribed.assert_equal()
        second.start("--standby")
        wait_until(lambda: second.said("daemon stands by"), "the second daemon to stand by")
        assert asked(port, "health") == (200, {"status": "alive"})
        assert asked(port, "ready") == (503, {"status": "standing by"})
        with urlopen(f"http://127.0.0.1:{port.number}/metrics") as answer:
            assert b"\npubsub_standing_by 1.0\n" in answer.read()
        # A reload while it stands by, and the other's rows meanwhile.
        restart_workers(second)
        wait_until(lambda: second.said("daemon stands by"), "the second daemon to stand by again")
        # Nor is one of the daemon that works an end for which the other waits.
        restart_workers(first)
        wait_until(lambda: first.said("daemon has started"), "the first daemon to have started again")
        subscribed.write(3)
        subscribed.assert_equal()
        assert not first.said("daemon stands by")
        assert not second.said("takes over")

        first.kill()
        wait_until(lambda: second.said("daemon has started"), "the second daemon to take over")
        subscribed.write(3)
        subscribed.daemon = second
        subscribed.assert_equal()
        assert asked(port, "ready") == (200, {"status": "ready"})

        first.start("--standby")
        wait_until(lambda: first.said("daemon stands by"), "the first daemon to stand by")
        second.process.suspend()
        subscribed.write(3)
        # What the server does by itself when a machine has not answered for twenty seconds.
        publisher.query(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = 'two_daemons' AND application_name = 'pubsub daemon'"
        )
        database.query("SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE active")
        wait_until(lambda: first.said("daemon has started"), "the first daemon to take over")
        subscribed.daemon = first
        subscribed.assert_equal()
        second.process.resume()
        # It finds that the catalog is another's.
        wait_until(lambda: not second.running, "the second daemon to end")
        assert second.said("another daemon")
        subscribed.write(3)
        subscribed.assert_equal()
        subscribed.drop()
        assert first.terminate() == 0
    finally:
        first.kill()
        second.kill()
        publisher.drop_database("two_daemons")


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("", 'parameter "warehouse" is not set'),
        ('warehouse = "/srv/lake"\n', "a daemon that stands by needs a catalog on PostgreSQL"),
    ],
)
def test_who_cannot_stand_by(tmp_path: Path, settings: str, says: str) -> None:
    """The tables of a warehouse in its own home are not the other's; a catalog in a file is one machine's."""
    (tmp_path / "pubsub.toml").write_text(settings)
    command = [sys.executable, "-m", "pubsub.cli", "--home", str(tmp_path), "daemon", "--standby"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert says in ran.stderr


def asked(port: Port, path: str) -> tuple[int, object]:
    """Return the status and the document of an answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port.number}/{path}") as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


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
