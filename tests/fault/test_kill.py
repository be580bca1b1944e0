"""kill -9 of a real daemon, in every state of a table and around a batch's commits; two daemons; a JVM that lives on.

Each test stops the daemon at a named fault point (pubsub.faults), starts it again, and compares every row.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable

from catalog.home_lock import running_daemon
from pubsub.delta.places import place
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults, wait_until


@pytest.mark.full
def test_killed_in_states_i_and_d(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """A table killed in these states is copied again, with a new slot, snapshot and generation."""
    fault.arm("init public.a", "kill")
    subscribed.subscribe()
    daemon.killed_by_fault()
    assert subscribed.state("a") == "i"
    for point in (
        "datasync public.a",  # d is stored, the slot is not made
        "slot created public.a",  # nothing is copied
        "copying public.a",  # in one of the daemon's threads
        "grown",
        "copying public.a",  # in Spark's Python workers, which outlive the daemon for a moment
        "copy committed public.a",  # in Delta; f is not stored
    ):
        subscribed.write()
        if point == "grown":
            subscribed.grow()
            continue
        fault.clear()
        if point.startswith("copying"):
            fault.arm(point)
            daemon.start()
            fault.wait(point)
            daemon.kill()
        else:
            fault.arm(point, "kill")
            daemon.start()
            daemon.killed_by_fault()
        assert subscribed.state("a") == "d", point
    subscribed.write()
    fault.clear()
    daemon.start()
    subscribed.assert_equal()
    assert subscribed.relations()["a"].copy_generation == 5, "a copy that was committed is recognised"


@pytest.mark.full
def test_killed_in_states_f_w_c_s_and_r(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """The copy is not made again; each worker continues where its predecessor was killed."""
    (oid,) = subscribed.database.query("SELECT 'a'::regclass::oid")[0]
    fault.arm("copy committed public.a")
    fault.arm("copy finished public.a", "kill")
    subscribed.subscribe()
    fault.wait("copy committed public.a")
    # Apply has passed these transactions already, so the sync worker must catch up with them.
    subscribed.write(3)
    origin_passes(subscribed)
    fault.release("copy committed public.a")
    daemon.killed_by_fault()
    assert subscribed.state("a") == "f"
    for point, state in (
        (f"sync wait {oid}", "f"),  # w: apply has not answered
        ("catchup public.a", "f"),  # c: nothing of the catch-up is applied
        ("committed public.a", "f"),  # c: one batch of the catch-up is applied
        ("caught up public.a", "f"),  # c: the whole catch-up is applied
        ("sync done public.a", "s"),  # the slot is not dropped
        ("synced public.a", "s"),  # the origin is past it; r is not stored
        ("ready public.a", "r"),
    ):
        subscribed.write()
        fault.clear()
        fault.arm(point, "kill")
        daemon.start()
        daemon.killed_by_fault()
        assert subscribed.state("a") == state, point
    subscribed.write()
    fault.clear()
    daemon.start()
    subscribed.assert_equal()
    assert subscribed.relations()["a"].copy_generation == 1


def origin_passes(subscribed: Subscribed) -> None:
    """Wait until apply has decided all that is written, so that C is past the sync worker's copy."""
    (lsn,) = subscribed.database.query("SELECT pg_current_wal_lsn()")[0]
    wait_until(
        lambda: subscribed.database.query(
            f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{subscribed.name}' AND confirmed_flush_lsn >= '{lsn}'"
        ),
        "apply to pass what was written",
    )


@pytest.mark.full
def test_killed_between_the_commits_of_one_batch(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    """One table holds the batch and the others do not: the replay is dropped for the first alone."""
    subscribed.subscribe()
    subscribed.assert_equal()
    fault.arm("commit public.keyless")
    fault.arm("committed public.a", "kill")
    subscribed.write(3)
    daemon.killed_by_fault()
    before = {name: delta_version(subscribed, name) for name in ("a", "keyless")}
    subscribed.write(2)
    # All tables hold the next batch, but not the origin: the whole batch comes again and is dropped.
    fault.clear()
    fault.arm("batch committed", "kill")
    daemon.start()
    daemon.killed_by_fault()
    assert delta_version(subscribed, "a") == before["a"], "the first batch ends where the cut one ended"
    assert delta_version(subscribed, "keyless") == before["keyless"] + 1
    fault.clear()
    daemon.start()
    subscribed.assert_equal()


def delta_version(subscribed: Subscribed, table: str) -> int:
    return int(DeltaTable(subscribed.relations()[table].path).version())


@pytest.mark.full
def test_a_sync_slot_that_is_gone_makes_a_new_copy(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    fault.arm("copy finished public.a", "kill")
    subscribed.subscribe()
    daemon.killed_by_fault()
    before = subscribed.relations()["a"]
    assert before.state.value == "f"
    assert before.sync_slot is not None
    subscribed.database.server.drop_slot(before.sync_slot)
    subscribed.write(2)
    fault.clear()
    daemon.start()
    subscribed.assert_equal()
    assert subscribed.relations()["a"].copy_generation > before.copy_generation


@pytest.mark.full
def test_the_jvm_of_a_killed_daemon_is_waited_for(subscribed: Subscribed, daemon: Daemon) -> None:
    """The JVM is stopped in the middle of a commit, which may still land after the next daemon has started."""
    subscribed.subscribe()
    subscribed.assert_equal()
    path = place(subscribed.relations()["a"].path)
    jvm = daemon.jvm()
    while True:
        files = len(list(path.glob("*.parquet")))
        log = len(list((path / "_delta_log").glob("*.json")))
        subscribed.database.execute("UPDATE a SET n = n + 1; INSERT INTO keyless VALUES (1)")
        wait_until(lambda files=files: len(list(path.glob("*.parquet"))) > files, "a data file")  # type: ignore[misc]
        jvm.suspend()
        if len(list((path / "_delta_log").glob("*.json"))) == log:
            break
        jvm.resume()
        subscribed.caught_up()
    try:
        daemon.kill()
        subscribed.database.execute("UPDATE a SET n = n + 1; DELETE FROM a WHERE id > 1500")
        daemon.start()
        wait_until(lambda: daemon.said("waiting for an earlier daemon's JVM to end"), "the new daemon at the fence")
        assert len(list((path / "_delta_log").glob("*.json"))) == log
    finally:
        jvm.resume()
    subscribed.assert_equal()
    assert not psutil.pid_exists(jvm.pid) or jvm.status() == psutil.STATUS_ZOMBIE


def test_a_second_daemon_is_refused(daemon: Daemon) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pubsub.cli", "--home", str(daemon.home), "daemon"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert f'ERROR:  a daemon is already running on node "{daemon.home}"' in ran.stderr
    assert f"DETAIL:  Its process id is {daemon.process.pid}." in ran.stderr
    assert daemon.running


@pytest.mark.full
def test_new_settings_do_not_make_the_daemon_leave_its_node(daemon: Daemon) -> None:
    """Its workers end and start again; a client that finds no daemon meanwhile fails, and a second daemon would take the node."""
    settings = daemon.home / "pubsub.toml"
    before = settings.read_text()
    wait_until(lambda: daemon.said("daemon has started"), "the daemon")
    daemon.mark()
    settings.write_text(f"max_logical_replication_workers = 7\n{before}")
    holders = set()
    daemon.process.send_signal(signal.SIGHUP)

    def started_again() -> bool:
        holders.update(running_daemon(daemon.home) for _ in range(5000))
        return daemon.said("daemon has started")

    try:
        wait_until(started_again, "the workers to start again")
        assert holders == {daemon.process.pid}
    finally:
        settings.write_text(before)


@pytest.mark.full
def test_a_daemon_that_is_stopped_leaves_nothing_undone(subscribed: Subscribed, daemon: Daemon) -> None:
    subscribed.grow()
    subscribed.subscribe()
    subscribed.assert_equal()
    jvm = daemon.jvm()
    subscribed.write(5)
    assert daemon.terminate() == 0, daemon.tail()
    wait_until(lambda: not psutil.pid_exists(jvm.pid), "the JVM's end")
    slot = subscribed.database.query("SELECT active FROM pg_replication_slots WHERE database = current_database()")
    assert slot == [(False,)]
    daemon.start()
    subscribed.assert_equal()


@pytest.mark.full
def test_a_daemon_ends_though_its_jvm_hangs(subscribed: Subscribed, daemon: Daemon) -> None:
    """A commit waits for the JVM, and the daemon for the commit."""
    subscribed.subscribe()
    subscribed.caught_up()
    jvm = daemon.jvm()
    wait_until(lambda: daemon.said("Spark has started"), "Spark")
    jvm.suspend()
    subscribed.write()
    assert daemon.terminate() == 0, daemon.tail()
    assert daemon.said("Spark does not answer: its JVM is killed")
    wait_until(lambda: not jvm.is_running(), "the JVM's end")
    daemon.start()
    subscribed.assert_equal()


@pytest.mark.full
def test_a_jvm_that_hangs_holds_no_command_up(subscribed: Subscribed, daemon: Daemon) -> None:
    """DISABLE waits for the workers, these for a commit, and that for the JVM; the launcher once waited with them."""
    subscribed.subscribe()
    subscribed.caught_up()
    wait_until(lambda: daemon.said("Spark has started"), "Spark")
    jvm = daemon.jvm()
    jvm.suspend()
    subscribed.write()
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} DISABLE")
    assert daemon.said("Spark does not answer: its JVM is killed")
    wait_until(lambda: not jvm.is_running(), "the JVM's end")
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} ENABLE")
    subscribed.write()
    subscribed.assert_equal()


@pytest.mark.full
def test_a_jvm_that_hangs_while_it_starts_holds_no_end_up(tmp_path: Path) -> None:
    """As one does whose cluster does not answer."""
    daemon = Daemon(tmp_path)
    daemon.faults.arm("Spark launched")
    daemon.start()
    try:
        daemon.faults.wait("Spark launched")
        jvm = daemon.jvm()
        jvm.suspend()
        daemon.faults.release("Spark launched")
        wait_until(lambda: daemon.said("daemon has started"), "the daemon")
        assert daemon.terminate() == 0, daemon.tail()
        assert daemon.said("Spark does not answer: its JVM is killed")
        assert not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE
    finally:
        daemon.kill()
