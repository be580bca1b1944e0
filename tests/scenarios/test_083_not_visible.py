"""Transactions that alter tables arrive before the publisher's other sessions see them (083): here they wait for a standby."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import pytest

from apply.schema_changes.follow import Looked, Publisher
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, wait_until

_numbers = itertools.count(1)
_WELL_UNDER_WAY = 1.0
"""Seconds that a look at the catalog is given to end too early."""

TABLE = """
CREATE TABLE a (id int PRIMARY KEY, t text, n int);
INSERT INTO a SELECT g, 'row ' || g, 0 FROM generate_series(1, 200) g;
CREATE TABLE b (id int PRIMARY KEY, t text, n int);
CREATE PUBLICATION p FOR TABLE a, b;
"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server whose commits can be made to wait, which sends transactions in progress at 64 kB."""
    settings = {"logical_decoding_work_mem": "64kB", "max_prepared_transactions": "5"}
    with EmbeddedPostgres("18", settings=settings) as server:
        yield server


@pytest.fixture
def own(replica: Replica, server: EmbeddedPostgres) -> Iterator[Replica]:
    name = f"not_visible_{next(_numbers)}"
    server.create_database(name)
    own = Replica(replica.node, Database(server, name))
    yield own
    if own.created:
        own.drop()


@contextmanager
def standbys(own: Replica, server: EmbeddedPostgres, names: str) -> Generator[None]:
    """Let commits of new sessions wait for these standbys."""
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.query("SELECT pg_reload_conf()")
    try:
        wait_until(lambda: own.query("SHOW synchronous_standby_names") == [(names,)], "the setting is there")
        server.execute("CHECKPOINT")  # backends wait as soon as the checkpointer knows of it
        yield
    finally:
        server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.query("SELECT pg_reload_conf()")


class Looks:
    """Notes when a look at the publisher's catalog begins, and when it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.ended = threading.Event(), threading.Event()
        look = Publisher.__call__

        async def noted(publisher: Publisher, oids: Sequence[int], xids: Sequence[int]) -> Looked:
            self.began.set()
            try:
                return await look(publisher, oids, xids)
            finally:
                self.ended.set()

        monkeypatch.setattr(Publisher, "__call__", noted)


def write_unseen(own: Replica, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Run the statements in one session, whose last commit is seen only after the subscription has looked at the catalog."""
    looks = Looks(monkeypatch)
    with standbys(own, server, "nobody"):
        writing = threading.Thread(target=own.execute, args=statements)
        writing.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: own.query(waits), "the commit to wait")
        assert looks.began.wait(60)
        looks.ended.wait(_WELL_UNDER_WAY)
        assert writing.is_alive()
    writing.join()


def subscribed(own: Replica, **options: object) -> None:
    own.execute(TABLE)
    own.subscribe(**options)
    own.assert_equal("a", "b")


def columns(own: Replica) -> list[str]:
    return list(own.rows("a")[0])


def copies(own: Replica) -> int:
    return own.relation("a").copy_generation


def test_a_dropped_column(own: Replica, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribed(own, dropped_columns="drop")
    alter = "BEGIN; UPDATE a SET t = 'x' WHERE id < 9; ALTER TABLE a DROP t; UPDATE a SET n = 1 WHERE id < 5; COMMIT"
    write_unseen(own, server, monkeypatch, alter)
    own.assert_equal("a")
    assert columns(own) == ["id", "n"]
    assert copies(own) == 1, "it is known which column is which"


REMADE = "ALTER TABLE a DROP t; ALTER TABLE a ADD t text; ALTER TABLE a DROP n; ALTER TABLE a ADD n int DEFAULT 3"


@pytest.mark.parametrize(
    "alter", ["ALTER TABLE a ALTER t TYPE text USING upper(t)", pytest.param(REMADE, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "streaming", [pytest.param("off", marks=pytest.mark.full), pytest.param("on", marks=pytest.mark.full), "parallel"]
)
def test_values_that_no_message_shows(
    own: Replica, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, alter: str, streaming: str
) -> None:
    """Relation messages are the same before and after; other rows than those that are sent have other values."""
    subscribed(own, streaming=f"'{streaming}'")
    rows = "INSERT INTO a SELECT g, repeat('long', 100), 7 FROM generate_series(1001, 2000) g"
    write_unseen(own, server, monkeypatch, f"BEGIN; {rows}; {alter}; UPDATE a SET n = 1 WHERE id < 5; COMMIT")
    own.assert_equal("a")


@pytest.mark.full
def test_a_prepared_transaction(own: Replica, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribed(own, two_phase=True)
    alter = "BEGIN; ALTER TABLE a DROP t, ADD t text DEFAULT 'new'; UPDATE a SET n = 1 WHERE id < 5"
    own.execute("SET synchronous_commit = local", f"{alter}; PREPARE TRANSACTION 'one'")
    write_unseen(own, server, monkeypatch, "COMMIT PREPARED 'one'")
    own.assert_equal("a")
    assert copies(own) == 1


SWAP = "ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE c RENAME TO b"


def test_tables_that_swap_their_names(own: Replica, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribed(own)
    write_unseen(own, server, monkeypatch, f"BEGIN; {SWAP}; INSERT INTO a VALUES (1, 'was b', 1); COMMIT")
    own.assert_equal("a", "b")
    assert set(own.states()) == {"public.a", "public.b"}
    assert [row["t"] for row in own.rows("a")] == ["was b"]


def test_a_publisher_that_waits_for_the_subscription(own: Replica, server: EmbeddedPostgres) -> None:
    """Others see the transaction once Delta has it, so it must not wait for that; only what is altered is copied anew."""
    subscribed(own)
    with standbys(own, server, own.name):
        synchronous = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(lambda: own.query(synchronous), "the subscription to be a synchronous standby")
        own.execute("INSERT INTO b VALUES (1, 'x', 1)")
        own.execute(f"BEGIN; {REMADE}; UPDATE a SET n = 1 WHERE id < 5; INSERT INTO b VALUES (2, 'y', 2); COMMIT")
        own.execute("UPDATE a SET n = 2 WHERE id < 9")
    own.assert_equal("a", "b")
    assert copies(own) == 2
    assert own.relation("b").copy_generation == 1


@pytest.mark.full
def test_names_that_are_swapped_while_the_publisher_waits_for_the_subscription(
    own: Replica, server: EmbeddedPostgres
) -> None:
    subscribed(own)
    with standbys(own, server, own.name):
        own.execute("INSERT INTO a VALUES (0, 'was a', 1)")
        own.execute(f"BEGIN; {SWAP}; INSERT INTO a VALUES (1, 'was b', 1); COMMIT")
        own.execute("INSERT INTO a VALUES (2, 'was b', 1); INSERT INTO b VALUES (-1, 'was a', 1)")
    own.assert_equal("a", "b")
    assert {row["id"] for row in own.rows("a")} == {1, 2}


@pytest.mark.full
def test_a_synchronous_subscription_that_begins_again(own: Replica, server: EmbeddedPostgres) -> None:
    """It looks at the catalog for the first rows of each table: nothing is altered, and nothing waits."""
    subscribed(own)
    with standbys(own, server, own.name):
        own.execute("INSERT INTO a VALUES (1000, 'x', 1)")
        own.alter("DISABLE")
        own.alter("ENABLE")
        own.execute("INSERT INTO a VALUES (1001, 'x', 1); UPDATE b SET n = 3; CREATE INDEX ON a (n)")
    own.assert_equal("a", "b")
    assert copies(own) == 1
