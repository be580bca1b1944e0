"""Tables that are copied while they are written: nothing is lost or doubled, and no slot is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from pubsub.delta.table import exists
from pubsub.protocol.lsn import Lsn
from tests.support import stores
from tests.support.replica import Faults, Replica, wait_until

TABLE = """
CREATE TABLE {0} (id int PRIMARY KEY, n int NOT NULL, t text, big text);
ALTER TABLE {0} ALTER big SET STORAGE EXTERNAL;
INSERT INTO {0} SELECT g, 0, md5(g::text), CASE WHEN g % 100 = 0 THEN repeat(md5(g::text), 100) END FROM generate_series(1, 5000) g;
"""


class Writer:
    """A thread that writes to tables, one transaction after another, until it is stopped."""

    def __init__(self, replica: Replica, tables: Sequence[str], number: int) -> None:
        self.transactions = 0
        self._replica = replica
        self._tables = list(tables)
        self._number = number
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"writer {number}")
        self._thread.start()

    def _run(self) -> None:
        try:
            database = self._replica.database
            with database.server.connect(database.name) as connection:
                # Some dozens of transactions a second: the machine has other work.
                while not self._stop.wait(0.02):
                    connection.execute(self._transaction().encode())
                    self.transactions += 1
        except BaseException as error:
            self._failure = error

    def _transaction(self) -> str:
        """Return changes in which a lost or repeated replay shows.

        Each writer has rows of its own, so that no writer waits for another.
        """
        step = self.transactions
        table = self._tables[step % len(self._tables)]
        mine, own = f"id % 10 = {self._number}", 10 * (100_000 + step) + self._number
        return "; ".join(
            [
                f"UPDATE {table} SET n = n + 1 WHERE {mine} AND id BETWEEN {step % 490 * 10} AND {step % 490 * 10 + 100}",
                f"INSERT INTO {table} VALUES ({own}, 0, 'new', NULL)",
                f"DELETE FROM {table} WHERE id = {own - 70}",
                f"UPDATE {table} SET id = -id WHERE id = {step % 500 * 10 + self._number}",
                f"INSERT INTO log VALUES ({step}), ({step})",
            ]
        )

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def passes(self, count: int) -> None:
        """Wait until the writer has done `count` more transactions."""
        goal = self.transactions + count
        wait_until(lambda: self.transactions >= goal or self._failure, "the writers")


@contextmanager
def writing(replica: Replica, *tables: str) -> Iterator[Writer]:
    """Run two writers; yield the first."""
    writers = [Writer(replica, tables, number) for number in (1, 2)]
    try:
        yield writers[0]
    finally:
        for writer in writers:
            writer.stop()


def all_ready(replica: Replica) -> None:
    replica.until_ready()


def only_the_main_slot(replica: Replica) -> None:
    wait_until(lambda: replica.slots() == [replica.name], "the sync slots to be dropped")


def setup(replica: Replica, *tables: str) -> None:
    for table in tables:
        replica.execute(TABLE.format(table))
    replica.execute("CREATE TABLE log (n int)", f"CREATE PUBLICATION p FOR TABLE log, {', '.join(tables)}")


def test_written_while_copied(replica: Replica) -> None:
    setup(replica, "a", "b", "c")
    with writing(replica, "a", "b", "c") as writer:
        writer.passes(20)
        replica.subscribe()
        all_ready(replica)
        writer.passes(100)
    replica.assert_equal("a", "b", "c", "log")
    only_the_main_slot(replica)
    assert {r.copy_generation for r in replica.node.relations(replica.name)} == {1}


def test_a_batch_across_the_hand_over(replica: Replica, fault: Faults) -> None:
    """One batch of apply's spans C: the sync worker has applied the transactions before C, apply those after it."""
    setup(replica, "a")
    fault.arm("copy committed public.a")
    replica.subscribe()
    fault.wait("copy committed public.a")
    wait_until(lambda: replica.states()["public.log"] == "r", "the other table")
    fault.arm("commit public.log")
    replica.execute("INSERT INTO log VALUES (0)")
    fault.wait("commit public.log")

    def write(number: int) -> None:
        replica.execute(
            f"INSERT INTO a VALUES ({100_000 + number}, 0); UPDATE a SET n = n + 1 WHERE id < 100; DELETE FROM a WHERE id = {number}; "
            f"UPDATE a SET id = {200_000 + number} WHERE id = {1000 + number}; INSERT INTO log VALUES ({number})"
        )

    for number in (1, 2, 3):
        write(number)
    wanted = Lsn.parse(replica.query("SELECT pg_current_wal_lsn()::text")[0][0])
    wait_until(lambda: replica.received_lsn() >= wanted, "apply to receive it")
    fault.release("copy committed public.a")
    wait_until(lambda: replica.states()["public.a"] == "s", "the hand-over")
    for number in (4, 5):
        write(number)
    fault.release("commit public.log")
    replica.assert_equal("a", "log")


@pytest.mark.full
def test_refreshed_while_written(replica: Replica) -> None:
    setup(replica, "a", "gone")
    for table in ("d", "e"):
        replica.execute(TABLE.format(table))
    with writing(replica, "a", "gone", "d", "e") as writer:
        replica.subscribe()
        writer.passes(20)
        # REFRESH before the first tables are ready, and again after one of them has left.
        replica.execute("ALTER PUBLICATION p ADD TABLE d, e")
        replica.alter("REFRESH PUBLICATION")
        writer.passes(20)
        replica.execute("ALTER PUBLICATION p DROP TABLE gone")
        replica.alter("REFRESH PUBLICATION")
        all_ready(replica)
        writer.passes(50)
    replica.assert_equal("a", "d", "e", "log")
    assert set(replica.states()) == {"public.a", "public.d", "public.e", "public.log"}
    only_the_main_slot(replica)
    # A table that comes back can be copied again: the rows in its Delta table are our own.
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "gone"
    assert exists(str(path)), "the Delta table of a table that left stays"


def test_a_table_that_leaves_while_it_is_copied(replica: Replica, fault: Faults) -> None:
    setup(replica, "a", "gone")
    fault.arm("slot created public.gone")
    replica.subscribe()
    fault.wait("slot created public.gone")
    assert len(replica.slots()) >= 2
    replica.execute("ALTER PUBLICATION p DROP TABLE gone")
    refreshing = threading.Thread(target=replica.alter, args=("REFRESH PUBLICATION",))
    refreshing.start()
    fault.release("slot created public.gone")
    refreshing.join()
    replica.execute("UPDATE a SET n = 1")
    replica.assert_equal("a", "log")
    only_the_main_slot(replica)


@pytest.mark.full
def test_disabled_and_enabled_while_written(replica: Replica, fault: Faults) -> None:
    setup(replica, "a", "b")
    with writing(replica, "a", "b") as writer:
        # In the middle of the copy, in the middle of the catch-up, and twice while all tables are ready.
        fault.arm("slot created public.a")
        replica.subscribe()
        fault.wait("slot created public.a")
        disabling = threading.Thread(target=replica.alter, args=("DISABLE",))
        disabling.start()
        fault.release("slot created public.a")
        disabling.join()
        writer.passes(20)
        fault.arm("catchup public.a")
        replica.alter("ENABLE")
        fault.wait("catchup public.a")
        disabling = threading.Thread(target=replica.alter, args=("DISABLE",))
        disabling.start()
        fault.release("catchup public.a")
        disabling.join()
        replica.alter("ENABLE")
        all_ready(replica)
        for _ in range(2):
            writer.passes(20)
            replica.alter("DISABLE")
            (active,) = replica.query(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{replica.name}'")[0]
            assert not active, "DISABLE waits until the worker has ended"
            writer.passes(20)
            replica.alter("ENABLE")
    replica.assert_equal("a", "b", "log")
    only_the_main_slot(replica)


@pytest.mark.full
def test_dropped_while_it_is_copied(replica: Replica, fault: Faults) -> None:
    setup(replica, "a", "b")
    for point in ("slot created public.a", "copy committed public.a", "caught up public.a"):
        fault.arm(point)
        replica.subscribe(target=f"'{replica.database.name} {point}'")
        fault.wait(point)
        dropping = threading.Thread(target=replica.drop)
        dropping.start()
        fault.release(point)
        dropping.join()
        assert replica.slots() == [], point


@pytest.mark.full
def test_more_tables_than_workers(replica: Replica) -> None:
    names = [f"t{number}" for number in range(8)]
    for name in names:
        replica.execute(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)")
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}")
    replica.subscribe()
    most = 0
    while set(replica.states().values()) != {"r"}:
        most = max(most, sum(slot != replica.name for slot in replica.slots()))
    assert 1 <= most <= 3, "max_sync_workers_per_subscription"
    replica.assert_equal(*names)
    only_the_main_slot(replica)


def test_a_slot_that_is_made_after_the_copies(replica: Replica) -> None:
    """What is written between them is in no stream but those of the sync workers."""
    replica.execute(TABLE.format("a"), "CREATE PUBLICATION p FOR TABLE a")
    replica.subscribe(create_slot="false")
    wait_until(lambda: replica.states() == {"public.a": "f"}, "the copy")
    replica.execute("UPDATE a SET n = 1 WHERE id < 10", "INSERT INTO a VALUES (6000, 0, 'before the slot', NULL)")
    replica.query(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')")
    replica.assert_equal("a")
    replica.execute("INSERT INTO a VALUES (6001, 0, 'after it', NULL)")
    replica.assert_equal("a")
