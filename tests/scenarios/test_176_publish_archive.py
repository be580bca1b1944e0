"""WAL from an archive: what neither the spool nor the server has any more, for slots that lag and slots that begin in the past."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.archived import archive_of, archived_server
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until

_OF_SERVER = "SELECT count(*) FROM pg_replication_slots"


@pytest.fixture
def upstream() -> Iterator[EmbeddedPostgres]:
    """Keeps no WAL for longer than it needs it itself, and archives it."""
    with archived_server() as server:
        server.execute("CREATE TABLE t (id int, v text)")
        yield server


@pytest.fixture
def archive(upstream: EmbeddedPostgres) -> Path:
    return archive_of(upstream)


class Writer:
    """Inserts ids in order, each in a segment of its own, and has the server archive and remove them."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self.last = 0

    def write(self, count: int = 5) -> None:
        for _ in range(count):
            self.last += 1
            self._server.execute(f"INSERT INTO t VALUES ({self.last}, repeat('x', 1000))")
            self._server.query("SELECT pg_switch_wal()")

    @property
    def lsn(self) -> str:
        return str(self._server.query("SELECT pg_current_wal_insert_lsn()")[0][0])

    @property
    def oldest(self) -> str:
        """The oldest segment that the server still has."""
        name = "SELECT min(name) FROM pg_ls_waldir() WHERE name ~ '^[0-9A-F]{24}$'"
        return str(self._server.query(name)[0][0])

    def forget(self) -> None:
        """Wait until all WAL that was written is archived and removed."""
        ((current,),) = self._server.query("SELECT pg_walfile_name(pg_current_wal_lsn())")

        def is_gone() -> bool:
            self._server.execute("CHECKPOINT")
            return self.oldest >= str(current)

        wait_until(is_gone, "the server has removed the WAL")


def _options(kind: str, archive: Path) -> list[str]:
    if kind == "directory":
        return ["--archive-directory", str(archive)]
    return ["--restore-command", f"test 100%% != x && cp {archive}/%f %p"]


@pytest.fixture
def make(tmp_path: Path, upstream: EmbeddedPostgres) -> Iterator[Callable[..., Publish]]:
    made: list[Publish] = []

    def make(*options: str) -> Publish:
        made.append(Publish(tmp_path / "node", upstream.conninfo(), *options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def _compress(archive: Path) -> None:
    for path in list(archive.glob("0*[0-9A-F]"))[::2]:
        subprocess.run(["gzip", str(path)], check=True)


@pytest.mark.parametrize("kind", ["directory", pytest.param("command", marks=pytest.mark.full)])
def test_a_slot_begins_in_the_past(
    upstream: EmbeddedPostgres, archive: Path, make: Callable[..., Publish], kind: str
) -> None:
    """Also after a restart, with the same command."""
    writer = Writer(upstream)
    writer.write()
    upstream.execute("CREATE TABLE u (id int)", "postgres")
    start = writer.lsn
    writer.write()
    upstream.execute("ALTER TABLE t ADD w int DEFAULT 1")
    writer.write()
    writer.forget()
    if kind == "directory":
        _compress(archive)
    past = ["--slot", "s", "--plugin", "test_decoding", "--start", start]
    publish = make(*_options(kind, archive), *past)
    wait_until(lambda: publish.query("SELECT slot_name FROM pg_replication_slots") == [("s",)], "the slot is there")
    assert publish.query("SELECT wal_status, confirmed_flush_lsn::text FROM pg_replication_slots") == [
        ("unreserved", start)
    ]
    peeked = publish.query("SELECT data FROM pg_logical_slot_peek_changes('s', NULL, NULL) WHERE data LIKE 'table%'")
    assert len(peeked) == 10
    assert [" w[integer]:1" in data for (data,) in peeked] == [False] * 5 + [True] * 5
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: len(follower.ids) == 10 or follower.error, "what was written before has come")
        publish.terminate()
        publish.start()
        writer.write(2)
        wait_until(lambda: len(follower.ids) == 12 or follower.error, "and what is written now")
    assert follower.error is None
    assert follower.ids == list(range(6, 18))
    assert "replication slot is there already" in publish.read_log()
    assert upstream.query(_OF_SERVER) == [(0,)]


@pytest.mark.full
def test_a_slot_begins_in_the_past_of_the_server_itself(
    upstream: EmbeddedPostgres, make: Callable[..., Publish]
) -> None:
    """Without an archive: the server still has the WAL, and our spool has it from then on."""
    upstream.execute("ALTER SYSTEM SET wal_keep_size = '1GB'")
    upstream.query("SELECT pg_reload_conf()")
    writer = Writer(upstream)
    writer.write()
    start = writer.lsn
    writer.write(10)
    upstream.execute("CHECKPOINT")
    publish = make("--slot", "s", "--plugin", "test_decoding", "--start", start)
    wait_until(lambda: publish.query("SELECT wal_status FROM pg_replication_slots") == [("reserved",)], "the slot")
    upstream.execute("ALTER SYSTEM SET wal_keep_size = 0")
    upstream.query("SELECT pg_reload_conf()")
    writer.forget()
    publish.kill()
    publish.start()
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: len(follower.ids) == 10 or follower.error, "all have come")
    assert follower.ids == list(range(6, 16))


@pytest.mark.full
def test_where_no_one_has_the_wal_the_slot_is_refused(
    upstream: EmbeddedPostgres, archive: Path, tmp_path: Path
) -> None:
    writer = Writer(upstream)
    start = writer.lsn
    writer.write()
    writer.forget()
    for path in archive.iterdir():
        path.unlink()

    def refused(*options: str) -> str:
        command = [sys.executable, "-m", "pubsub.cli", "--home", str(tmp_path / "node"), "--verbose", "publish"]
        command += ["--upstream", upstream.conninfo(), "--listen", "127.0.0.1:0", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in {1, 2}, done.stderr
        return done.stderr

    for more, who in (
        ([], "neither the spool nor the upstream server has"),
        (_options("directory", archive), "neither the spool nor the archive nor the upstream server has"),
    ):
        told = refused(*more, "--slot", "s", "--start", start)
        assert f"58P01: cannot begin at {start}" in told
        assert who in told
    told = refused("--restore-command", "/no/such/command %f %p", "--slot", "s", "--start", start)
    assert "exited with exit code 127" in told
    assert "there is no output plugin" in refused("--slot", "s", "--start", start, "--plugin", "wal2xml")
    assert "the WAL ends at" in refused("--slot", "s", "--start", "FF/0")
    assert "invalid input syntax" in refused("--slot", "s", "--start", "here")
    assert "cannot both be set" in refused("--restore-command", "x", "--archive-directory", "y")
    assert not list((tmp_path / "node" / "walsender" / "slots").iterdir())


@pytest.mark.parametrize("kind", ["directory", "command"])
@pytest.mark.full
def test_a_slot_that_lags_past_the_limit_reads_the_archive(
    upstream: EmbeddedPostgres, archive: Path, make: Callable[..., Publish], kind: str
) -> None:
    """The spool stays within max_slot_wal_keep_size, and the slot is not lost."""
    publish = make(*_options(kind, archive), "--max-slot-wal-keep-size", "3MB")
    # The slot begins at a list that lies behind the page images of what is changed again.
    upstream.execute("CREATE TABLE u (id int)")
    upstream.execute("CHECKPOINT")
    upstream.execute("ALTER TABLE u ADD a int")
    upstream.query("SELECT pg_log_standby_snapshot()")
    publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
    upstream.execute("ALTER TABLE u ADD b int")
    writer = Writer(upstream)
    writer.write(20)
    upstream.execute("CHECKPOINT")
    spool = publish.home / "walsender" / "wal"

    def is_small() -> bool:
        writer.write(1)
        return len(list(spool.glob("0*"))) <= 7

    wait_until(is_small, "the spool is within its limit")
    assert publish.query("SELECT wal_status, invalidation_reason FROM pg_replication_slots") == [("unreserved", None)]
    # A function reads the catalogs anew, from a checkpoint before the slot.
    peek = "SELECT count(*) FROM pg_logical_slot_peek_changes('s', NULL, NULL) WHERE data LIKE 'table public.t:%'"
    assert publish.query(peek) == [(writer.last,)]
    publish.terminate()
    publish.start()
    assert publish.query(peek) == [(writer.last,)]
    gone = min(archive.glob("0*"))
    for path in archive.glob("0*"):
        path.rename(path.with_suffix(".away"))
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: follower.error, "the subscriber is told")
    assert follower.error is not None
    assert (follower.error.sqlstate, follower.ids) == ("58P01", [])
    assert "has already been removed" in follower.error.message
    assert "Neither the spool nor the archive has it" in (follower.error.detail or "")
    for path in archive.glob("*.away"):
        path.rename(path.with_suffix(""))
    assert gone.exists()
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: len(follower.ids) == writer.last or follower.error, "all have come")

        def is_back() -> bool:
            writer.write(1)
            upstream.execute("CHECKPOINT")
            return publish.query("SELECT wal_status FROM pg_replication_slots") == [("reserved",)]

        wait_until(is_back, "the slot has come back to the spool")
    assert follower.ids == list(range(1, len(follower.ids) + 1))
    assert follower.error is None


@pytest.mark.full
def test_a_new_slot_needs_nothing_of_what_an_earlier_one_needed(
    upstream: EmbeddedPostgres, archive: Path, make: Callable[..., Publish]
) -> None:
    """It began at the catalogs that were saved for the earlier one, and asked for WAL that the archive has no more."""
    publish = make(*_options("directory", archive), "--max-slot-wal-keep-size", "2MB")
    catalogs = publish.home / "walsender" / "catalogs"
    publish.execute("SELECT pg_create_logical_replication_slot('earlier', 'test_decoding')")
    upstream.execute("CHECKPOINT")
    wait_until(lambda: list(catalogs.glob("*/*.catalogs")), "the catalogs are saved")
    publish.execute("SELECT pg_drop_replication_slot('earlier')")
    writer = Writer(upstream)
    spool = publish.home / "walsender" / "wal"
    first = min(path.name for path in spool.glob("0*"))

    def is_gone() -> bool:
        writer.write(1)
        upstream.execute("CHECKPOINT")
        return min(path.name for path in spool.glob("0*")) > first

    wait_until(is_gone, "the spool begins later")
    for path in archive.glob("0*"):
        path.unlink()
    publish.execute("SELECT pg_create_logical_replication_slot('new', 'test_decoding')")
    with Follower(publish.conninfo, "new") as follower:
        writer.write(1)
        wait_until(lambda: follower.ids or follower.error, "it follows")
    assert (follower.ids, follower.error) == ([writer.last], None)


def test_wal_that_the_server_removed_while_we_were_away_comes_from_the_archive(
    upstream: EmbeddedPostgres, archive: Path, make: Callable[..., Publish]
) -> None:
    """Also when the archive cannot be read for a while."""
    publish = make("--restore-command", f"test ! -e {archive}/closed || exit 200; cp {archive}/%f %p")
    publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
    writer = Writer(upstream)
    with Follower(publish.conninfo, "s") as follower:
        writer.write(2)
        wait_until(lambda: len(follower.ids) == 2, "two have come")
        publish.terminate()
        writer.write(5)
        writer.forget()
        (archive / "closed").touch()
        publish.start()
        wait_until(lambda: "the archive cannot be read" in publish.read_log(), "the archive was asked")
        assert len(follower.ids) == 2
        (archive / "closed").unlink()
        writer.write(2)
        wait_until(lambda: len(follower.ids) == 9 or follower.error, "all have come")
    assert follower.ids == list(range(1, 10))
    assert follower.error is None
    assert "restored log file from archive" in publish.read_log()


@pytest.mark.full
def test_files_of_another_cluster_and_damaged_ones_are_not_taken(
    upstream: EmbeddedPostgres, archive: Path, make: Callable[..., Publish]
) -> None:
    writer = Writer(upstream)
    start = writer.lsn
    writer.write()
    writer.forget()
    publish = make(*_options("command", archive), "--slot", "s", "--plugin", "test_decoding", "--start", start)
    wait_until(lambda: publish.query("SELECT slot_name FROM pg_replication_slots") == [("s",)], "the slot is there")
    path = next(one for one in sorted(archive.glob("0*")) if one.name >= _file(upstream, start))
    good = path.read_bytes()
    for bad, said in (
        (good[:-1], "has wrong size"),
        (good[:24] + bytes(8) + good[32:], "WAL file is from different database system"),
        (bytes(len(good)), "does not begin with the header"),
        (good[:9000] + bytes(len(good) - 9000), ""),
    ):
        path.write_bytes(bad)
        with Follower(publish.conninfo, "s") as follower:
            wait_until(lambda: follower.error, "the subscriber is told")
        assert follower.error is not None
        assert said in follower.error.message
        assert follower.ids == []
    path.write_bytes(good)
    with Follower(publish.conninfo, "s") as follower:
        wait_until(lambda: len(follower.ids) == 5 or follower.error, "all have come")
    assert follower.ids == [1, 2, 3, 4, 5]
    assert os.path.getsize(path) == len(good)


def _file(server: EmbeddedPostgres, lsn: str) -> str:
    return str(server.query(f"SELECT pg_walfile_name('{lsn}')")[0][0])


@pytest.mark.full
def test_a_command_that_hangs_holds_no_end_up(
    upstream: EmbeddedPostgres, tmp_path: Path, make: Callable[..., Publish]
) -> None:
    """A thread waits for it, and the process for its threads."""
    writer = Writer(upstream)
    writer.write()
    start = writer.lsn
    writer.write()
    writer.forget()
    begun = tmp_path / "begun"
    command = f"echo $$ > {begun}.aside && mv {begun}.aside {begun} && sleep 1000"
    publish = make("--restore-command", command, "--slot", "s", "--plugin", "test_decoding", "--start", start)
    wait_until(begun.exists, "the command runs")
    os.kill(publish.pid, signal.SIGTERM)
    assert publish.wait(120) == 130, "ended before it has made its slot"
    assert not Path(f"/proc/{begun.read_text().strip()}").exists(), "the command has ended, too"


@pytest.mark.full
def test_a_command_that_takes_long_holds_up_no_other_stream(
    upstream: EmbeddedPostgres, archive: Path, tmp_path: Path, make: Callable[..., Publish]
) -> None:
    """One process decodes a database for all its streams; another slot's WAL is in the spool."""
    writer = Writer(upstream)
    writer.write()
    start = writer.lsn
    writer.write()
    writer.forget()
    closed = tmp_path / "closed"
    command = f"echo x >> {tmp_path}/asked; while test -e {closed}; do sleep 0.05; done; cp {archive}/%f %p"
    publish = make("--restore-command", command, "--slot", "past", "--plugin", "test_decoding", "--start", start)
    wait_until(lambda: publish.query("SELECT slot_name FROM pg_replication_slots") == [("past",)], "the slot is there")
    publish.execute("SELECT pg_create_logical_replication_slot('now', 'test_decoding')")
    with Follower(publish.conninfo, "now") as now:
        writer.write(1)
        wait_until(lambda: now.ids or now.error, "the new slot follows")
        closed.touch()
        (tmp_path / "asked").unlink()
        with Follower(publish.conninfo, "past") as past:
            wait_until((tmp_path / "asked").exists, "the archive is asked for the past")
            writer.write(2)
            wait_until(lambda: len(now.ids) == 3 or now.error, "what is written meanwhile has come")
            assert (past.ids, past.error) == ([], None)
            closed.unlink()
            wait_until(lambda: len(past.ids) == 8 or past.error, "the past has come, too")
    assert (past.ids, past.error) == (list(range(6, 14)), None)
    assert (now.ids, now.error) == ([11, 12, 13], None)
