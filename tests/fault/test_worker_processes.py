"""worker_processes: a process of a daemon is killed, or the daemon, or the JVM that they share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pubsub.testing.fixtures import Database
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import wait_until

pytestmark = pytest.mark.full


@pytest.fixture
def pair(tmp_path: Path, databases: list[Database]) -> Iterator[tuple[Daemon, list[Subscribed]]]:
    """A daemon of two processes, and a subscription in each."""
    daemon = Daemon(tmp_path / "node")
    settings = daemon.home / "pubsub.toml"
    settings.write_text(f"worker_processes = 2\n{settings.read_text()}")
    daemon.start()
    both = [Subscribed(daemon, database) for database in databases]
    try:
        for one in both:
            one.subscribe()
        for one in both:
            one.assert_equal()
        yield daemon, both
        daemon.ensure()
        for one in both:
            one.write()
            one.assert_equal()
            one.drop()
    finally:
        daemon.kill()


def workers(daemon: Daemon) -> list[psutil.Process]:
    """Return the daemon's worker processes."""
    return [one for one in daemon.process.children() if one.name() == "pubsub-worker"]


def write(both: list[Subscribed], times: int = 3) -> None:
    for one in both:
        one.write(times)


def test_a_worker_process_is_killed(pair: tuple[Daemon, list[Subscribed]]) -> None:
    """Again and again, at any moment: its subscription goes on in another one, the daemon's own as if nothing were."""
    daemon, both = pair
    for _ in range(4):
        (worker,) = wait_until(lambda: workers(daemon), "a worker process")
        write(both)
        daemon.mark()
        worker.kill()
        write(both)
        wait_until(lambda: daemon.said("worker process is started again"), "another one")
        for one in both:
            one.assert_equal()
    assert daemon.running


def test_the_daemon_is_killed(pair: tuple[Daemon, list[Subscribed]]) -> None:
    """Its worker process ends with it, and the next daemon waits for one that cannot, which does no more."""
    daemon, both = pair
    for stopped in (False, True):
        (worker,) = wait_until(lambda: workers(daemon), "a worker process")
        write(both)
        if stopped:
            worker.suspend()
        daemon.kill()
        write(both)
        daemon.start()
        if stopped:
            wait_until(lambda: daemon.said("an earlier daemon's worker processes to end"), "the next daemon to wait")
            assert workers(daemon) == []
            worker.resume()
        wait_until(lambda worker=worker: not worker.is_running() or worker.status() == "zombie", "its end")
        for one in both:
            one.assert_equal()


def test_the_jvm_is_killed(pair: tuple[Daemon, list[Subscribed]]) -> None:
    daemon, both = pair
    jvm = daemon.jvm()
    write(both)
    jvm.kill()
    write(both)
    for one in both:
        one.assert_equal()
    assert daemon.jvm().pid != jvm.pid


def test_spark_copies_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Its tasks run this Python, whatever python3 is on the daemon's PATH, also for a process that began before the JVM."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho 'this is another Python' >&2; exit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    _, both = request.getfixturevalue("pair")
    for one in both:
        one.database.execute(
            """
            CREATE TABLE large (id int PRIMARY KEY, t text);
            INSERT INTO large SELECT g, repeat(md5(g::text), 8) FROM generate_series(1, 30000) g;
            ALTER PUBLICATION p ADD TABLE large
            """
        )
        one.daemon.execute(f"ALTER SUBSCRIPTION {one.name} REFRESH PUBLICATION")
    for one in both:
        one.caught_up()
        one.assert_equal(["large"])


def test_a_service_manager_signals_all_processes(pair: tuple[Daemon, list[Subscribed]]) -> None:
    """The daemon has the others drain; settings that are reloaded reach them."""
    daemon, both = pair
    settings = daemon.home / "pubsub.toml"
    settings.write_text(f'drain_timeout = "40s"\n{settings.read_text()}')
    for one in (daemon.process, *workers(daemon)):
        one.send_signal(signal.SIGHUP)
    wait_until(lambda: daemon.said("the workers go on with them"), "settings")
    write(both)
    (worker,) = workers(daemon)
    worker.send_signal(signal.SIGTERM)
    assert daemon.terminate() == 0
    wait_until(lambda: not worker.is_running() or worker.status() == "zombie", "the other's end")
    assert not daemon.said("did not end in time")
