"""kill -9 of `pubsub publish` at the points between its durable writes: nothing is skipped, and the slots are there again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import Faults, wait_until

_POINTS = [
    "slot written aside",
    "slot renamed",
    "spool write",
    "feed synced",
    "state written aside",
    "state renamed",
    "spool compressed aside",
    "spool compressed",
    "spool removed",
]


class Writer:
    """Inserts ids in order, a transaction each, some of them with wide rows."""

    def __init__(self, server: EmbeddedPostgres, dbname: str) -> None:
        self._server = server
        self._dbname = dbname
        self._stop = threading.Event()
        self.last = 0
        """The last id that was committed."""

    def write(self, count: int = 1, width: int = 10) -> None:
        for _ in range(count):
            self.last += 1
            self._server.execute(f"INSERT INTO t VALUES ({self.last}, repeat('x', {width}))", self._dbname)

    def segment(self) -> None:
        """End the WAL's segment."""
        self._server.query("SELECT pg_switch_wal()", self._dbname)

    @contextmanager
    def running(self) -> Iterator[None]:
        def run() -> None:
            while not self._stop.is_set():
                self.write()

        self._stop.clear()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


@pytest.fixture
def upstream() -> Iterator[EmbeddedPostgres]:
    # A server keeps WAL for us only while it needs it itself: here, long enough.
    settings: dict[str, str | int] = {"min_wal_size": "2MB", "max_wal_size": "4MB"}
    with EmbeddedPostgres("18", settings=settings, initdb=["--wal-segsize=1"]) as server:
        _keep_wal(server, "1GB")
        server.execute("CREATE TABLE t (id int, v text)")
        yield server


def _keep_wal(server: EmbeddedPostgres, size: str) -> None:
    server.execute(f"ALTER SYSTEM SET wal_keep_size = '{size}'")
    server.execute("SELECT pg_reload_conf()")
    wait_until(lambda: server.query("SHOW wal_keep_size") == [(size,)], "the server has read its settings again")


@pytest.fixture
def fault(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


@pytest.fixture
def publish(upstream: EmbeddedPostgres, fault: Faults, tmp_path: Path) -> Iterator[Publish]:
    publish = Publish(tmp_path / "node", upstream.conninfo(), faults=fault.directory)
    publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
    yield publish
    publish.kill()


def _more(follower: Follower, count: int, or_else: Callable[[], bool] = lambda: False) -> None:
    before = len(follower.ids)
    wait_until(lambda: len(follower.ids) >= before + count or or_else(), f"{count} more rows have come")


@pytest.mark.full
def test_a_kill_between_any_two_durable_writes_skips_nothing(
    upstream: EmbeddedPostgres, publish: Publish, fault: Faults
) -> None:
    writer = Writer(upstream, "postgres")
    with Follower(publish.conninfo, "s") as follower, writer.running():
        for point in _POINTS:
            fault.arm(point, "kill")
            while not fault.is_reached(point):
                writer.segment()
                _more(follower, 5, lambda: fault.is_reached(point))  # noqa: B023
            assert publish.wait() == -signal.SIGKILL, point
            fault.clear()
            publish.start()
            _more(follower, 5)
            assert follower.ids == list(range(1, len(follower.ids) + 1)), point
    with Follower(publish.conninfo, "s") as last:
        last.applied, last.ids = follower.applied, follower.ids
        wait_until(lambda: len(last.ids) >= writer.last, "the last one has come")
    assert last.ids == list(range(1, writer.last + 1))
    assert (follower.error, last.error) == (None, None)
    publish.execute("SELECT pg_drop_replication_slot('s')")


def test_what_was_confirmed_is_sent_again_only_if_that_was_not_saved(
    upstream: EmbeddedPostgres, publish: Publish
) -> None:
    writer = Writer(upstream, "postgres")
    confirmed = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots"
    with Follower(publish.conninfo, "s") as follower:
        writer.write(20)
        wait_until(lambda: len(follower.ids) == 20, "all have come")
        wait_until(lambda: publish.query(confirmed) >= [(follower.applied,)], "the slot has moved")
        saved = publish.home / "walsender" / "slots" / "s.slot"
        ((lsn,),) = publish.query(confirmed)
        wait_until(lambda: f'"confirmed_flush_lsn": {lsn}' in saved.read_text(), "the slot is saved")
        publish.kill()
        publish.start()
        writer.write(5)
        wait_until(lambda: len(follower.ids) == 25, "the new ones have come")
        assert follower.again == []
        follower.confirms = False
        publish.kill()
        publish.start()
        writer.write(5)
        wait_until(lambda: len(follower.ids) == 30, "the new ones have come")
        before = list(follower.again)
        publish.kill()
        publish.start()
        wait_until(lambda: len(follower.again) >= len(before) + 5, "what was not confirmed comes again")
    assert follower.ids == list(range(1, 31))


@pytest.mark.full
def test_a_second_process_is_refused(publish: Publish, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pubsub.cli", "--home", str(publish.home), "publish"]
    command += ["--upstream", publish.upstream, "--listen", "127.0.0.1:0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "already running" in second.stderr
    assert str(publish.pid) in second.stderr
    assert publish.query("SELECT slot_name FROM pg_replication_slots") == [("s",)]


@pytest.mark.full
def test_a_stream_ends_in_good_order_when_wal_that_it_needs_is_gone(
    upstream: EmbeddedPostgres, publish: Publish
) -> None:
    """As after the upstream server has removed it, or somebody has removed our files: the slot is lost, and says so."""
    writer = Writer(upstream, "postgres")
    writer.write(3)
    publish.terminate()
    for path in (publish.home / "walsender" / "wal").iterdir():
        path.unlink()
    _keep_wal(upstream, "0")
    for _ in range(5):
        writer.write()
        writer.segment()
    upstream.execute("CHECKPOINT")
    kept = upstream.query("SELECT name FROM pg_ls_waldir()")
    assert ("000000010000000000000008",) not in kept
    publish.start()
    wait_until(
        lambda: (
            publish.query("SELECT wal_status, invalidation_reason FROM pg_replication_slots")
            == [("lost", "wal_removed")]
        ),
        "the slot is lost",
    )
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: follower.error, "the subscriber is told")
    assert follower.error is not None
    assert follower.error.sqlstate == "55000"
    assert 'can no longer access replication slot "s"' in follower.error.message


@pytest.mark.full
def test_a_damaged_state_of_the_feed_is_read_from_the_wal_again(upstream: EmbeddedPostgres, publish: Publish) -> None:
    writer = Writer(upstream, "postgres")
    writer.segment()
    state = publish.home / "walsender" / "feed.state"
    upstream.execute("CHECKPOINT")
    wait_until(state.exists, "what is known of transactions is saved")
    publish.kill()
    state.write_bytes(b"damaged")
    publish.start()
    with Follower(publish.conninfo, "s") as follower:
        writer.write(3)
        wait_until(lambda: len(follower.ids) == writer.last, "all have come")
    assert "is read from it again" in publish.tail()
    publish.execute("SELECT pg_create_logical_replication_slot('t', 'test_decoding')")
    assert os.path.getsize(publish.home / "walsender" / "slots" / "t.slot")
