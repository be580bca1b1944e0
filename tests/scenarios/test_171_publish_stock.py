"""PostgreSQL's own subscribers behind `pubsub publish`: what a subscription can ask for, between the versions, through every kill.

Each test ends with the subscriber's tables equal to the publisher's, and no logical slot on the publisher.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.replica import wait_until
from tests.support.stock_pairs import Make, Pair

_TABLES = """
CREATE TABLE a (id int PRIMARY KEY, v text, n numeric, at timestamptz DEFAULT '2020-01-01 00:00+00');
CREATE TABLE b (id bigint, v text, CONSTRAINT pk PRIMARY KEY (id));
CREATE TABLE full_rows (x int, y text);
ALTER TABLE full_rows REPLICA IDENTITY FULL;
"""
_ROWS = """
INSERT INTO a SELECT g, repeat('x', g % 50), g / 7.0 FROM generate_series(1, 3000) g;
INSERT INTO b SELECT g, md5(g::text) FROM generate_series(1, 3000) g;
INSERT INTO full_rows SELECT g % 10, g::text FROM generate_series(1, 300) g;
"""


def change(pair: Pair, first: int, count: int = 10) -> None:
    """Make transactions of every kind of change."""
    for number in range(first, first + count):
        pair.run(
            f"""
            BEGIN;
            INSERT INTO a SELECT g, 'new' FROM generate_series({10_000 + 100 * number}, {10_000 + 100 * number} + 99) g;
            SAVEPOINT s; DELETE FROM b; ROLLBACK TO s;
            UPDATE a SET n = coalesce(n, 0) + 1 WHERE id % 7 = {number % 7};
            UPDATE b SET v = repeat(md5(v), 100) WHERE id % 31 = {number % 31};
            DELETE FROM full_rows WHERE x = {number % 10};
            UPDATE full_rows SET y = y || '!' WHERE x = {(number + 3) % 10};
            DELETE FROM b WHERE id % 97 = {number % 97};
            UPDATE a SET id = -id WHERE id = {number + 1};
            COMMIT;
            """
        )


@pytest.mark.parametrize(
    ("publisher", "subscriber"),
    [
        ("18", "18"),
        ("15", "18"),
        ("18", "15"),
        ("16", "17"),
        ("17", "16"),
        ("15", "15"),
        ("19", "19"),
        ("19", "18"),
        ("18", "19"),
    ],
)
@pytest.mark.full
def test_copy_and_stream_through_every_kill(make: Make, publisher: str, subscriber: str) -> None:
    pair = make(publisher, subscriber)
    pair.both(_TABLES)
    pair.run(f"{_ROWS} CREATE PUBLICATION p FOR TABLE a, b, full_rows")
    # What it has not flushed a subscriber may lose (test_193_stock_cut.py).
    pair.subscribe(options="WITH (synchronous_commit = on)")
    change(pair, 0)
    pair.synced()
    pair.equal("a", "b", "full_rows")
    change(pair, 10)
    pair.publish.kill()
    change(pair, 20)
    pair.publish.start()
    pair.equal("a", "b", "full_rows")
    change(pair, 30)
    pair.publisher.kill()
    pair.publisher.start()
    change(pair, 40)
    pair.equal("a", "b", "full_rows")
    change(pair, 50)
    pair.subscriber.kill()
    change(pair, 60)
    pair.subscriber.start()
    pair.equal("a", "b", "full_rows")
    assert pair.publish.terminate() == 0
    change(pair, 70)
    pair.publish.start()
    pair.equal("a", "b", "full_rows")


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ("binary", "18"),
        ("streaming = on", "18"),
        ("streaming = parallel, two_phase", "18"),
        ("failover, origin = none", "18"),
        ("streaming = on, two_phase", "15"),
        ("streaming = parallel, binary", "16"),
        ("streaming = parallel, two_phase", "19"),
    ],
)
@pytest.mark.full
def test_options(make: Make, options: str, version: str) -> None:
    pair = make(version, version, "--work-mem", "64kB")
    pair.both(_TABLES)
    pair.run(f"{_ROWS} CREATE PUBLICATION p FOR ALL TABLES")
    pair.subscribe(options=f"WITH ({options})")
    pair.synced()
    change(pair, 0)
    pair.run(
        "BEGIN; INSERT INTO b SELECT g, md5(g::text) FROM generate_series(100000, 120000) g; "
        "SAVEPOINT s; UPDATE a SET v = 'lost'; ROLLBACK TO s; COMMIT"
    )
    pair.run("BEGIN; UPDATE a SET v = 'rolled back'; DELETE FROM b; ROLLBACK")
    pair.run(
        "BEGIN; INSERT INTO a VALUES (1000000, 'prepared'); UPDATE a SET v = 'p' WHERE id < 500; PREPARE TRANSACTION 'one'"
    )
    pair.run("BEGIN; INSERT INTO a VALUES (1000001, 'never'); PREPARE TRANSACTION 'two'")
    if "two_phase" in options:
        gids = "SELECT count(*) FROM pg_prepared_xacts"
        wait_until(lambda: pair.subscribed(gids) == [(2,)], "both are prepared there")
        pair.publish.kill()
        pair.publish.start()
    pair.run("COMMIT PREPARED 'one'")
    pair.run("ROLLBACK PREPARED 'two'")
    change(pair, 10)
    pair.equal("a", "b", "full_rows", "SELECT count(*) FROM pg_prepared_xacts")
    if "failover" in options:
        assert pair.publish.query("SELECT failover FROM pg_replication_slots") == [(True,)]


def test_row_filters_column_lists_and_partition_roots(make: Make) -> None:
    pair = make()
    pair.run(
        """
        CREATE TABLE f (id int, region text, secret text);
        ALTER TABLE f ADD PRIMARY KEY (id, region);
        CREATE TABLE parted (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
        CREATE TABLE parted1 PARTITION OF parted FOR VALUES FROM (0) TO (100);
        CREATE TABLE parted2 PARTITION OF parted FOR VALUES FROM (100) TO (1000);
        INSERT INTO f SELECT g, CASE WHEN g % 2 = 0 THEN 'eu' ELSE 'us' END, 's' FROM generate_series(1, 100) g;
        INSERT INTO parted SELECT g, 'x' FROM generate_series(0, 500) g;
        CREATE PUBLICATION p FOR TABLE f (id, region) WHERE (region = 'eu'), parted WITH (publish_via_partition_root)
        """
    )
    pair.sub(
        "CREATE TABLE f (id int, region text, PRIMARY KEY (id, region)); CREATE TABLE parted (id int PRIMARY KEY, v text)"
    )
    pair.subscribe()
    pair.synced()
    pair.run(
        "UPDATE f SET region = 'us' WHERE id <= 10; UPDATE f SET region = 'eu' WHERE id > 90; DELETE FROM f WHERE id = 50"
    )
    pair.run("UPDATE parted SET id = id + 900 WHERE id < 20; DELETE FROM parted WHERE id % 5 = 0")
    pair.equal("SELECT id, region FROM f WHERE region = 'eu' ORDER BY 1", "SELECT id, v FROM parted ORDER BY 1")
    assert pair.subscribed("SELECT count(*) FROM f WHERE region <> 'eu'") == [(0,)]
    pair.run(
        "CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later VALUES (1); ALTER PUBLICATION p ADD TABLE later"
    )
    pair.sub("CREATE TABLE later (id int PRIMARY KEY)")
    pair.sub("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    pair.synced()
    pair.run("INSERT INTO later VALUES (2); TRUNCATE parted")
    pair.equal("later", "SELECT id, v FROM parted ORDER BY 1")


@contextmanager
def load(pair: Pair, statement: str, clients: int) -> Iterator[None]:
    """Run a statement again and again, from several clients, while the block lasts."""
    ended = threading.Event()

    def run() -> None:
        with pair.publisher.connect(pair.name) as connection:
            while not ended.is_set():
                connection.execute("BEGIN")
                connection.execute(statement)
                connection.execute("COMMIT")

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(run) for _ in range(clients)]
        try:
            yield
        finally:
            ended.set()
    for one in running:
        one.result()


@pytest.mark.full
def test_copies_fit_their_streams_under_load(make: Make) -> None:
    """Every table is copied while it is written: a change that both have, or neither, would show in the sums."""
    pair = make("18", "18", "--max-replication-slots", "20", "--max-wal-senders", "20")
    tables = [f"t{number}" for number in range(12)]
    for table in tables:
        pair.both(f"CREATE TABLE {table} (id int PRIMARY KEY, n int)")
        pair.run(f"INSERT INTO {table} SELECT g, 0 FROM generate_series(1, 200) g")
    pair.both("CREATE TABLE log (id bigserial PRIMARY KEY, v int)")
    pair.run("CREATE PUBLICATION p FOR ALL TABLES")
    body = "; ".join(f"UPDATE {table} SET n = n + 1 WHERE id = 1 + (random() * 199)::int" for table in tables[:4])
    with load(pair, f"{body}; INSERT INTO log (v) VALUES (1)", clients=8):
        for _ in range(3):
            pair.subscribe()
            pair.synced()
            pair.drop()
            pair.sub(f"TRUNCATE {', '.join(tables)}, log")
        pair.subscribe()
        pair.synced()
    pair.equal(*tables, "SELECT count(*), sum(id) FROM log")


@pytest.mark.full
def test_wal_that_a_slot_holds_back_is_bounded(make: Make) -> None:
    """Past max_slot_wal_keep_size the slot is lost, and the subscriber is told; the publisher kept nothing for it."""
    pair = make("18", "18", "--max-slot-wal-keep-size", "32MB", max_wal_size="64MB")
    pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.run("CREATE PUBLICATION p FOR TABLE t")
    pair.subscribe()
    pair.synced()
    pair.sub("ALTER SUBSCRIPTION s DISABLE")
    wait_until(lambda: pair.publish.query("SELECT active FROM pg_replication_slots") == [(False,)], "the slot is free")
    for number in range(6):
        pair.run(
            f"INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series({number * 100_000}, {number * 100_000 + 99_999}) g"
        )
    lost = "SELECT wal_status, invalidation_reason FROM pg_replication_slots"
    wait_until(lambda: pair.publish.query(lost) == [("lost", "wal_removed")], "the slot is lost")
    wal = pair.publish.home / "walsender" / "wal"
    # What it held back goes at the next look, a moment after the slot is lost.
    wait_until(lambda: len(list(wal.glob("0*"))) <= 5, "its WAL is removed")
    pair.sub("ALTER SUBSCRIPTION s ENABLE")
    wait_until(lambda: 'can no longer access replication slot "s"' in pair.subscriber.read_log(), "it is told")
