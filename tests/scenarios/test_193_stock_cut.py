"""Stock subscribers behind `pubsub publish`, on a network that breaks at any byte, falls silent, or is slow; and kills.

After each, the tables are equal: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pubsub.errors import PublisherError
from pubsub.publisher.connection import Connection
from pubsub.testing.bad_network import BadNetwork
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until
from tests.support.stock_pairs import SETTINGS, Make, Pair

_TABLES = (
    "CREATE TABLE t (a int PRIMARY KEY, b text, n int DEFAULT 0); CREATE TABLE log (id bigserial PRIMARY KEY, v int)"
)
_ROWS = "INSERT INTO t SELECT g, repeat('x', g % 90) FROM generate_series(1, 2000) g"

# PostgreSQL's sync worker drops its slot in the transaction that stores s, and a slot that is missing is an error then (tablesync.c:
# process_syncing_tables_for_sync): if the answer is lost, the table stays in f without a slot, with any publisher.
_SPARED = b"DROP_REPLICATION_SLOT"

# An apply worker that starts reports what the one before it has applied as flushed (worker.c: send_feedback knows the new one's
# transactions only).  With synchronous_commit = off, the default, a subscriber that is killed then loses it, with any publisher.
_KILLED = "WITH (streaming = parallel, two_phase, synchronous_commit = on)"

_UNANSWERED = "the upstream server does not answer"


def change(pair: Pair, number: int) -> None:
    """Make some transactions, one of them large enough to be streamed."""
    pair.run(
        f"UPDATE t SET n = n + 1, b = b || '{number}' WHERE a % 50 = {number % 50}; INSERT INTO log (v) VALUES ({number})",
        f"BEGIN; INSERT INTO log (v) SELECT {number} FROM generate_series(1, 10); SAVEPOINT s; DELETE FROM t WHERE a % 3 = 0;"
        f"ROLLBACK TO s; UPDATE t SET n = n + 1 WHERE a % 9 = {number % 9}; COMMIT",
        f"DELETE FROM t WHERE a = {number}; INSERT INTO t VALUES ({10_000 + number}, 'new')",
    )
    if number % 5 == 0:
        pair.run(f"INSERT INTO log (v) SELECT {number} FROM generate_series(1, 3000)")


@contextmanager
def writing(pair: Pair) -> Iterator[None]:
    """Go on making transactions in another thread."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        number = 0
        try:
            while not ended.wait(0.02):
                number += 1
                change(pair, number)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert failed == []


def equal(pair: Pair) -> None:
    pair.synced()
    pair.equal("t", "SELECT id, v FROM log ORDER BY 1")


def places(seed: int, count: int) -> Iterator[int]:
    """Draw byte counts: small ones cut logins and commands, large ones copies and streams."""
    r = random.Random(seed)
    for _ in range(count):
        yield r.choice((r.randrange(0, 300), r.randrange(0, 3000), r.randrange(0, 200_000)))


@pytest.mark.parametrize(
    ("options", "seed", "cuts"),
    [
        ("", 1, 12),
        pytest.param("WITH (streaming = parallel, two_phase, binary)", 2, 25, marks=pytest.mark.full),
        pytest.param("WITH (streaming = on)", 3, 25, marks=pytest.mark.full),
    ],
)
def test_the_subscriber_s_network_is_cut_at_any_byte(pairs: Make, options: str, seed: int, cuts: int) -> None:
    """While tables are copied, and while the stream runs."""
    pair = pairs()
    with BadNetwork(pair.publish.port, spares=_SPARED) as network:
        pair.both(_TABLES)
        pair.run(_ROWS, "CREATE PUBLICATION p FOR TABLE t, log")
        pair.subscribe(options=options, conninfo=f"{pair.conninfo} port={network.port}")
        with writing(pair):
            for count in places(seed, cuts):
                before = network.cuts
                network.cut_after(count)
                wait_until(lambda before=before: network.cuts > before, f"seed {seed}: a connection is cut")
        equal(pair)
        pair.drop()


@pytest.mark.parametrize(("seed", "cuts"), [(4, 10), (5, 30)])
@pytest.mark.full
def test_the_upstream_server_s_network_is_cut_at_any_byte(tmp_path: Path, seed: int, cuts: int) -> None:
    """Between our server and PostgreSQL: the WAL, clients' SQL, and what decoding processes ask."""
    with EmbeddedPostgres("18", settings=SETTINGS) as first, EmbeddedPostgres("18", settings=SETTINGS) as second:
        with BadNetwork(first.port) as network:
            upstream = first.conninfo(port=network.port)
            pair = Pair(Publish(tmp_path / "node", upstream), first, second, "s")
            pair.both(_TABLES)
            pair.run(_ROWS, "CREATE PUBLICATION p FOR TABLE t, log")
            pair.subscribe()
            with writing(pair):
                for count in places(seed, cuts):
                    before = network.cuts
                    network.cut_after(count)
                    wait_until(lambda before=before: network.cuts > before, f"seed {seed}: a connection is cut")
            equal(pair)
            pair.close()
            assert pair.publish.terminate() == 0, pair.publish.tail()


@pytest.mark.full
def test_a_network_that_delivers_byte_by_byte(pairs: Make) -> None:
    """Messages come in pieces, and slowly."""
    pair = pairs()
    with BadNetwork(pair.publish.port, piece=7) as network:
        pair.both(_TABLES)
        pair.run(
            "INSERT INTO t SELECT g, repeat('x', g % 90) FROM generate_series(1, 200) g",
            "CREATE PUBLICATION p FOR TABLE t, log",
        )
        pair.subscribe(conninfo=f"{pair.conninfo} port={network.port}")
        for number in range(1, 5):
            change(pair, number)
        network.delay = 0.001
        pair.run("INSERT INTO log (v) SELECT 1 FROM generate_series(1, 50)")
        equal(pair)
        network.delay = 0.0
        pair.drop()


@pytest.mark.full
def test_half_open_connections(make: Make) -> None:
    """The network falls silent: our server gives the slot free after wal_sender_timeout, the subscriber connects again."""
    pair = make("18", "18", wal_sender_timeout="2s")
    pair.subscriber.execute("ALTER SYSTEM SET wal_receiver_timeout = '3s'")
    pair.subscriber.query("SELECT pg_reload_conf()")
    with BadNetwork(pair.publish.port) as network:
        pair.both(_TABLES)
        pair.run(_ROWS, "CREATE PUBLICATION p FOR TABLE t, log")
        pair.subscribe(conninfo=f"{pair.conninfo} port={network.port}")
        equal(pair)
        active = "SELECT active_pid FROM pg_replication_slots WHERE active"
        ((old,),) = wait_until(lambda: pair.served(active), "it streams")
        network.silence()
        change(pair, 1)
        wait_until(lambda: pair.served(active) not in ([(old,)], []), "another session has the slot")
        change(pair, 2)
        equal(pair)
        pair.drop()


@pytest.mark.full
def test_the_upstream_server_falls_silent(tmp_path: Path) -> None:
    """Our server notices that the WAL has stopped coming, and asks for it again after wal_receiver_timeout."""
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "pubsub.toml").write_text('wal_receiver_timeout = "3s"\n')
    with EmbeddedPostgres("18", settings=SETTINGS) as first, EmbeddedPostgres("18", settings=SETTINGS) as second:
        with BadNetwork(first.port) as network:
            pair = Pair(Publish(tmp_path / "node", first.conninfo(port=network.port)), first, second, "s")
            pair.both(_TABLES)
            pair.run(_ROWS, "CREATE PUBLICATION p FOR TABLE t, log")
            pair.subscribe()
            equal(pair)
            network.silence()
            change(pair, 1)
            equal(pair)
            network.cut()
            wait_until(lambda: pair.slots() == ["s"], "the slot is seen")
            pair.close()
            assert pair.publish.terminate() == 0, pair.publish.tail()


@pytest.mark.full
@pytest.mark.parametrize("when", ["before the stream", "in it"])
def test_the_upstream_server_falls_silent_where_a_session_asks_it(tmp_path: Path, when: str) -> None:
    """As a stream begins or ends: its slot is free again after wal_receiver_timeout, whether the client is there or not."""
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "pubsub.toml").write_text('wal_receiver_timeout = "2s"\n')
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres("18", settings=SETTINGS))
        network = stack.enter_context(BadNetwork(server.port))
        publish = Publish(tmp_path / "node", server.conninfo(port=network.port))
        stack.callback(publish.terminate)

        async def ask() -> None:
            async with await Connection.connect(publish.conninfo(), replication=True) as client:
                await client.execute("CREATE_REPLICATION_SLOT s LOGICAL test_decoding (SNAPSHOT 'nothing')")
                start = "START_REPLICATION SLOT s LOGICAL 0/0"
                if when == "in it":
                    await client.start_copy_both(start)
                network.silence()
                if when == "in it":
                    client.pgconn.put_copy_end()
                    await client.flush()
                    wait_until(lambda: _UNANSWERED in publish.read_log(), "the session is ended")
                else:
                    with pytest.raises(PublisherError, match=_UNANSWERED):
                        await client.start_copy_both(start)

        asyncio.run(ask())
        active = "SELECT active FROM pg_replication_slots"
        wait_until(lambda: publish.query(active) == [(False,)], "the slot is free")


@pytest.mark.full
@pytest.mark.parametrize("seed", [6, 7])
def test_each_program_is_killed_again_and_again(make: Make, seed: int) -> None:
    """Ours, the subscriber and the publisher, at any moment of copies and streams under load."""
    pair = make("18", "18", "--work-mem", "64kB")
    pair.both(_TABLES)
    pair.run(_ROWS, "CREATE PUBLICATION p FOR TABLE t, log")
    pair.subscribe(options=_KILLED)
    rows = "SELECT count(*) FROM log"
    r = random.Random(seed)
    for number in range(9):
        change(pair, number + 1)
        with pair.keeps_sync_slots():
            program = (pair.publish, pair.subscriber, pair.publisher)[(number + seed) % 3]
            program.kill()
        if program is not pair.publisher:
            change(pair, 20 + number)
        program.start()
        if program is pair.publisher:
            change(pair, 20 + number)
        had = pair.subscribed(rows)
        if r.random() < 0.5:
            wait_until(
                lambda had=had: pair.subscribed(rows) != had or had == pair.published(rows), f"seed {seed}: it moves on"
            )
    equal(pair)


@pytest.mark.full
@pytest.mark.parametrize("seed", [8, 9])
def test_ours_is_killed_while_two_releases_follow(make: Make, seed: int) -> None:
    """Two slots of one database, streamed and two-phase: a transaction is killed before and after its PREPARE, too."""
    first = make("18", "18", "--work-mem", "64kB")
    r = random.Random(seed)
    with EmbeddedPostgres("15", settings=SETTINGS) as server:
        second = first.beside(server)
        for pair in (first, second):
            pair.sub(_TABLES)
        first.run(_TABLES, _ROWS, "CREATE PUBLICATION p FOR TABLE t, log")
        for pair, name in ((first, "later"), (second, "earlier")):
            pair.subscribe(name, options="WITH (streaming = on, two_phase)")
            pair.synced()

        def have() -> int:
            return sum(int(pair.subscribed("SELECT count(*) FROM log")[0][0]) for pair in (first, second))

        with writing(first):
            for number in range(8):
                lines = f"INSERT INTO log (v) SELECT {number} FROM generate_series(1, 500)"
                first.run(f"BEGIN; {lines}; PREPARE TRANSACTION 'p{number}'")
                enough = have() + r.choice((0, r.randrange(100), r.randrange(3000)))
                wait_until(lambda enough=enough: have() >= enough, f"seed {seed}: they follow")
                first.publish.kill()
                if r.random() < 0.5:
                    first.run(f"COMMIT PREPARED 'p{number}'")
                    first.publish.start()
                else:
                    first.publish.start()
                    first.run(f"{r.choice(('COMMIT', 'ROLLBACK'))} PREPARED 'p{number}'")
        for pair in (first, second):
            equal(pair)
            pair.gives("SELECT count(*) FROM pg_prepared_xacts", 0)
        second.drop("earlier")
