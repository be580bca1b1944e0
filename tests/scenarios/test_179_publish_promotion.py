"""The upstream server fails over: slots go on along the new timeline where the WAL is continuous, and are refused where not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until

_SETTINGS: dict[str, str | int] = {"autovacuum": "off", "wal_keep_size": "64MB"}


@contextmanager
def _pair() -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres, str]]:
    """Yield a primary, its standby, and the connection string of whichever takes writes."""
    with EmbeddedPostgres("18", settings=_SETTINGS) as primary:
        primary.execute("CREATE TABLE t (id int, v text)")
        with primary.make_standby("sb") as standby:
            one, two = (dict(part.split("=", 1) for part in s.conninfo().split()) for s in (primary, standby))
            hosts = f"host={two['host']},{one['host']} port={two['port']},{one['port']}"
            yield primary, standby, f"user={one['user']} dbname=postgres {hosts} target_session_attrs=read-write"


class _Proxied(Publish):
    """Its clients go where the upstream connection string's first host is not."""

    def conninfo(self, **more: object) -> str:
        user = psycopg.conninfo.conninfo_to_dict(self.upstream)["user"]
        return psycopg.conninfo.make_conninfo(
            **{"user": user, "dbname": "postgres", "host": "127.0.0.1", "port": self.port} | more
        )


def _insert(server: EmbeddedPostgres, first: int, last: int) -> None:
    for number in range(first, last + 1):
        server.execute(f"INSERT INTO t VALUES ({number}, repeat('x', 300))")


def test_slots_go_on_along_the_new_timeline(tmp_path: Path) -> None:
    """Twice: while the server runs, and while it is away."""
    with _pair() as (primary, standby, conninfo):
        publish = _Proxied(tmp_path / "node", conninfo)
        try:
            publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
            publish.execute("SELECT pg_create_logical_replication_slot('idle', 'test_decoding')")
            with Follower(publish.conninfo, "s") as follower:
                _insert(primary, 1, 10)
                wait_until(lambda: len(follower.ids) == 10, "what the primary wrote has come")
                wait_until(lambda: follower.is_confirmed(publish.query), "the slot's position has followed")
                # A transaction in progress ends with its server.
                open_one = psycopg.connect(primary.conninfo("postgres"))
                open_one.execute("INSERT INTO t VALUES (1000)")
                _insert(primary, 11, 15)
                primary.stop()
                open_one.close()
                standby.promote()
                _insert(standby, 16, 20)
                wait_until(lambda: len(follower.ids) == 20 or follower.error, "what the new primary writes comes, too")
                assert follower.error is None
                assert "to a new timeline" in publish.read_log()
                with standby.make_standby("sc") as third:
                    publish.terminate()
                    _insert(standby, 21, 25)
                    standby.stop()
                    third.promote()
                    _insert(third, 26, 30)
                    one = dict(part.split("=", 1) for part in third.conninfo().split())
                    publish.upstream = f"user={one['user']} dbname=postgres host={one['host']} port={one['port']}"
                    publish.start()
                    wait_until(lambda: len(follower.ids) == 30 or follower.error, "and the one after that")
                    assert follower.error is None
                    peeked = publish.query("SELECT data FROM pg_logical_slot_peek_changes('idle', NULL, NULL)")
                    ids = [data.split("integer]:")[1].split()[0] for (data,) in peeked if data.startswith("table")]
                    assert ids == [str(one) for one in range(1, 31)]
                    assert third.query("SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical'") == [
                        (0,)
                    ]
            assert follower.ids == list(range(1, 31))
            # What was sent and not yet confirmed when a server ended comes again, as from PostgreSQL; nothing older does.
            assert all(10 < one <= 25 for one in follower.again)
        finally:
            publish.kill()


@pytest.mark.full
def test_a_timeline_that_left_before_what_was_read_is_refused(tmp_path: Path) -> None:
    """The standby lacks what the subscriber has: nothing is doubled or left out, the server says where both are, and ends."""
    with _pair() as (primary, standby, conninfo):
        publish = _Proxied(tmp_path / "node", conninfo)
        try:
            publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
            with Follower(publish.conninfo, "s") as follower:
                _insert(primary, 1, 5)
                wait_until(lambda: standby.query("SELECT max(id) FROM t", "postgres") == [(5,)], "the standby follows")
                standby.stop()
                _insert(primary, 6, 10)
                wait_until(lambda: len(follower.ids) == 10, "the subscriber has what the standby lacks")
                primary.stop()
                standby.start()
                standby.promote()
                _insert(standby, 6, 6)
                assert publish.wait() == 1
                assert "timeline 2 left timeline 1 before" in publish.read_log()
                # It stays so.
                publish_again = [publish.read_log().count("timeline 2 left timeline 1")]
                try:
                    publish.start()
                except AssertionError:
                    pass
                else:
                    assert publish.wait() == 1
                assert publish.read_log().count("timeline 2 left timeline 1") > publish_again[0]
            assert follower.ids == list(range(1, 11))
        finally:
            publish.kill()


@pytest.mark.full
def test_a_timeline_that_left_before_what_was_confirmed_is_refused(tmp_path: Path) -> None:
    """After a power loss slots may be ahead of the WAL that is here: what was read is not all that was sent."""
    with _pair() as (primary, standby, conninfo):
        publish = _Proxied(tmp_path / "node", conninfo)
        try:
            publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
            _insert(primary, 1, 5)
            wait_until(lambda: standby.query("SELECT max(id) FROM t", "postgres") == [(5,)], "the standby follows")
            ((end,),) = standby.query("SELECT pg_last_wal_replay_lsn() - '0/0'", "postgres")
            standby.stop()
            with Follower(publish.conninfo, "s") as follower:
                _insert(primary, 6, 10)
                wait_until(lambda: len(follower.ids) == 10, "the subscriber has what the standby lacks")
                wait_until(lambda: follower.is_confirmed(publish.query), "the slot's position has followed")
                publish.terminate()
            directory = publish.home / "walsender"
            segment = max((directory / "wal").glob("0*"))
            with segment.open("r+b") as file:
                file.truncate(int(end) - int(segment.name, 16))
            (directory / "feed.state").unlink(missing_ok=True)
            primary.stop()
            standby.start()
            standby.promote()
            _insert(standby, 11, 11)
            with pytest.raises(AssertionError):
                publish.start()
            assert publish.wait() == 1
            assert "timeline 2 left timeline 1 before" in publish.read_log()
        finally:
            publish.kill()
