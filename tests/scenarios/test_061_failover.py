"""A real standby takes over from the publisher: the subscription goes on there with every row, or says why not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, RunningNode, wait_until

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, n int, note text);
CREATE TABLE log (line text);
INSERT INTO t SELECT g, 0, md5(g::text) FROM generate_series(1, 500) g;
CREATE PUBLICATION p FOR TABLE t, log
"""


class Pair:
    """A primary and its standby."""

    def __init__(self, version: str, **settings: str | int) -> None:
        self.primary = EmbeddedPostgres(version, settings=settings).start()
        self.numbers = itertools.count(1000)
        try:
            self.primary.execute(TABLES)
            self.standby = self.primary.make_standby("sb")
        except BaseException:
            self.primary.close()
            raise

    def write(self, server: EmbeddedPostgres, times: int = 1) -> None:
        for _ in range(times):
            number = next(self.numbers)
            server.execute(
                f"UPDATE t SET n = n + 1 WHERE id % 7 = {number % 7}; INSERT INTO t VALUES ({number}, 0, 'new'); "
                f"DELETE FROM t WHERE id = {number - 1000}; INSERT INTO log VALUES ('{number}')"
            )

    def replayed(self) -> None:
        """Wait until the standby has replayed all that the primary has written."""
        ((lsn,),) = self.primary.query("SELECT pg_current_wal_lsn()::text")
        wait_until(
            lambda: self.standby.query(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'") == [(True,)],
            "the standby's replay",
        )

    def close(self) -> None:
        self.standby.close()
        self.primary.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair("18", synchronized_standby_slots="sb")
    yield made
    made.close()


@pytest.fixture
def follower(node: RunningNode, pair: Pair) -> Iterator[Replica]:
    replica = Replica(node, Database(pair.primary, "postgres"))
    yield replica
    if replica.created:
        replica.drop()


def move(replica: Replica, server: EmbeddedPostgres) -> None:
    """Run ALTER SUBSCRIPTION … CONNECTION."""
    replica.database = Database(server, "postgres")
    replica.alter(f"CONNECTION '{replica.conninfo}'")


def synced(pair: Pair, slot: str) -> bool:
    return pair.standby.query(
        f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}' AND synced AND NOT temporary "
        "AND invalidation_reason IS NULL"
    ) == [(1,)]


@pytest.mark.full
def test_the_standby_takes_over(pair: Pair, follower: Replica) -> None:
    follower.subscribe(failover="true", target="'failover'")
    pair.write(pair.primary, 5)
    follower.assert_equal("t", "log")
    wait_until(lambda: synced(pair, follower.name), "the slot on the standby")
    follower.alter("DISABLE")
    pair.write(pair.primary, 20)  # rows that are not received yet must come from the standby
    follower.alter("ENABLE")
    pair.write(pair.primary, 20)
    pair.primary.kill()
    pair.standby.promote()
    assert "not connect" in follower.error() or "connection" in follower.error()
    move(follower, pair.standby)
    pair.write(pair.standby, 5)
    follower.assert_equal("t", "log")
    ((count,),) = follower.query("SELECT count(*) FROM log")
    assert count == 50
    (row,) = follower.node.fetch(f"SELECT publisher_timeline FROM pg_subscription WHERE subname = '{follower.name}'")
    assert row["publisher_timeline"] == 2
    wait_until(lambda: follower.node.statistics(follower.name)["error"] is None, "the error to be overcome")
    # Back to the old primary, which lacks all of this: refused, and nothing is lost.
    pair.primary.start()
    pair.write(pair.primary, 5)
    move(follower, pair.primary)
    error = follower.error()
    assert "timeline 1" in error, error
    move(follower, pair.standby)
    pair.write(pair.standby, 1)
    follower.assert_equal("t", "log")


@pytest.mark.full
def test_several_hosts(node: RunningNode) -> None:
    """On 17, target_session_attrs = primary finds the new primary without a command."""
    pair = Pair("17", synchronized_standby_slots="sb")
    try:
        replica = Replica(node, Database(pair.primary, "postgres"))
        hosts = (
            f"host=127.0.0.1,127.0.0.1 port={pair.primary.port},{pair.standby.port} target_session_attrs=primary "
            "dbname=postgres user=postgres"
        )
        node.execute(
            f"CREATE SUBSCRIPTION {replica.name} CONNECTION {quote_literal(hosts)} PUBLICATION p "
            "WITH (failover = true, target = 'hosts', batch_age = '20ms')"
        )
        pair.write(pair.primary, 5)
        replica.assert_equal("t", "log")
        wait_until(lambda: synced(pair, replica.name), "the slot on the standby")
        pair.write(pair.primary, 5)
        pair.primary.kill()
        pair.standby.promote()
        replica.database = Database(pair.standby, "postgres")
        pair.write(pair.standby, 5)
        replica.assert_equal("t", "log")
        replica.drop()
    finally:
        pair.close()


@pytest.mark.full
def test_a_standby_that_lacks_what_was_received(node: RunningNode) -> None:
    """Without synchronized_standby_slots a subscriber may be ahead of the standby: an error says so."""
    pair = Pair("18")
    try:
        replica = Replica(node, Database(pair.primary, "postgres"))
        replica.subscribe(failover="true", target="'ahead'")
        replica.assert_equal("t", "log")
        wait_until(lambda: synced(pair, replica.name), "the slot on the standby")
        pair.replayed()
        pair.standby.query("SELECT pg_wal_replay_pause()")
        pair.standby.stop("immediate")
        pair.write(pair.primary, 3)
        for _ in range(5):
            pair.primary.execute("UPDATE t SET note = md5(note)")
        replica.assert_equal("t", "log")
        pair.primary.kill()
        pair.standby.start()
        pair.standby.promote()
        # A new slot begins past the switch, and before the end of what was received.
        pair.standby.query(f"SELECT pg_drop_replication_slot('{replica.name}')")
        pair.standby.query(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')")
        # The standby's WAL goes on past where ours ended: other transactions, at the same positions.
        for _ in range(10):
            pair.standby.execute("UPDATE t SET note = md5(note)")
        pair.write(pair.standby, 20)
        move(replica, pair.standby)
        wait_until(lambda: "left timeline 1" in replica.error(), "the reason")
        assert replica.query(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{replica.name}' AND active") == []
        (row,) = replica.node.fetch(f"SELECT error_hint FROM pg_stat_subscription WHERE subname = '{replica.name}'")
        assert "RESYNC TABLE" in row["error_hint"]
        replica.alter("RESYNC TABLE t, log")
        pair.write(pair.standby, 1)
        replica.assert_equal("t", "log")
        replica.drop()
    finally:
        pair.close()


def test_a_standby_publishes(node: RunningNode) -> None:
    """From 16 on.  The standby is promoted while it publishes, and the stream goes on."""
    pair = Pair("16")
    try:
        replica = Replica(node, Database(pair.standby, "postgres"))
        stop = threading.Event()

        def beat() -> None:
            """Log the primary's running transactions: a slot on a standby waits for such a record to begin at."""
            while not stop.wait(0.5):
                pair.primary.query("SELECT pg_log_standby_snapshot()")

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            replica.subscribe(target="'standby'")
            pair.write(pair.primary, 3)
            pair.replayed()
            replica.assert_equal("t", "log")
        finally:
            stop.set()
            beating.join()
        pair.write(pair.primary, 3)
        pair.replayed()
        replica.assert_equal("t", "log")
        pair.standby.promote()
        pair.write(pair.standby, 3)
        replica.assert_equal("t", "log")
        # The new timeline is stored by then, since what is received next lies past its beginning.
        known = f"SELECT publisher_timeline FROM pg_subscription WHERE subname = '{replica.name}'"
        assert replica.node.fetch(known) == [{"publisher_timeline": 2}]
        replica.alter("DISABLE")
        pair.write(pair.standby, 3)
        replica.alter("ENABLE")
        replica.assert_equal("t", "log")
        replica.drop()
    finally:
        pair.close()
