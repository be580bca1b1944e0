"""Interrupted copies continue under another snapshot and keep the finished chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from catalog.store import Catalog
from pubsub.delta.places import place
from pubsub.delta.writers import arrow_writer, copy_chunks
from tablesync import choose_copier
from tests.support.replica import Faults, Replica, wait_until
from tests.support.unnamed_files import unnamed_files

TABLE = """
CREATE TABLE a (id int PRIMARY KEY, n int NOT NULL, t text, big text) WITH (fillfactor = 60);
ALTER TABLE a ALTER big SET STORAGE EXTERNAL;
INSERT INTO a SELECT g, 0, md5(g::text), CASE WHEN g % 3 = 0 THEN repeat(md5(g::text), 80) END FROM generate_series(1, 6000) g;
CREATE PUBLICATION p FOR TABLE a;
"""

#: Writes that move rows between blocks and back, change keys, and leave values out of the stream.
WRITES = (
    "UPDATE a SET n = n + 1 WHERE id % 7 = 0",
    "DELETE FROM a WHERE id % 10 = 1",
    "VACUUM a",
    "UPDATE a SET n = n + 1, t = t || 'x' WHERE id % 2 = 0",
    "INSERT INTO a SELECT id + 1, 0, 'new', repeat('new', 1000) FROM a WHERE id % 10 = 0",
    "UPDATE a SET id = -id WHERE id % 9 = 0",
    "UPDATE a SET n = n + 1 WHERE id < 0",
    "UPDATE a SET id = 100000 - id WHERE id < 0 AND id % 2 = 0",
    "BEGIN; UPDATE a SET id = id + 200000 WHERE id % 12 = 0; UPDATE a SET id = id - 200000, n = 7 WHERE id > 200000; COMMIT",
    "UPDATE a SET big = repeat('changed', 500) WHERE id % 33 = 0",
    "VACUUM a",
    "UPDATE a SET n = n + 1",
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide a few megabytes into some dozens of chunks."""
    monkeypatch.setattr(choose_copier, "_LEAST_CHUNK_BYTES", 16384)
    monkeypatch.setattr(choose_copier, "_MOST_CHUNK_BYTES", 16384)


class Interruptions:
    """Each attempt of a copy runs a function and fails after a given number of chunks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[str] = []
        self.files: list[Any] = []
        self._plans: list[tuple[int, Callable[[], None]]] = []
        self._commit = copy_chunks.commit
        monkeypatch.setattr(copy_chunks, "commit", self.commit)

    def after(self, count: int, do: Callable[[], None]) -> None:
        self._plans.append((count, do))

    def commit(
        self, log: object, copy: str, attempt: str, chunk: int, added: object, lsn: object, **more: object
    ) -> None:
        if self._plans:
            count, do = self._plans[0]
            if count == 0:
                del self._plans[0]
                do()
                raise RuntimeError("the disk is full")
            self._plans[0] = (count - 1, do)
        self._commit(log, copy, attempt, chunk, added, lsn, **more)  # type: ignore[arg-type]
        self.kept.append(copy_chunks.application_id(copy, chunk))
        self.files.append(added)


@pytest.fixture
def interruptions(monkeypatch: pytest.MonkeyPatch, small_chunks: None) -> Interruptions:
    return Interruptions(monkeypatch)


def run(replica: Replica, statements: tuple[str, ...]) -> Callable[[], None]:
    return lambda: replica.execute(*statements)


@pytest.mark.full
def test_rows_that_change_between_two_snapshots(replica: Replica, interruptions: Interruptions, fault: Faults) -> None:
    replica.execute(*TABLE.split(";")[:-1])
    interruptions.after(10, run(replica, WRITES))
    interruptions.after(10, run(replica, WRITES[3:9]))
    fault.arm("window public.a")
    fault.arm("read again public.a", "tell")
    replica.subscribe()
    fault.wait("window public.a")
    replica.execute(*WRITES[5:])
    fault.release("window public.a")
    replica.assert_equal("a")
    assert replica.relation("a").copy_generation == 1, "it went on"
    assert len(interruptions.kept) == len(set(interruptions.kept)), "no chunk was copied twice"
    assert len(interruptions.kept) > 25
    assert fault.is_reached("read again public.a")
    assert replica.slots() == [replica.name]
    data = {file["add"]["path"] for chunk in interruptions.files for file in chunk}
    assert data <= {path.name for path in place(replica.path("a")).glob("part-*")}
    # Later changes are applied as before.
    replica.execute(*WRITES)
    replica.assert_equal("a")


@pytest.mark.parametrize(
    "between",
    [
        "VACUUM FULL a",
        "ALTER TABLE a ADD COLUMN more int DEFAULT 5",
        "ALTER PUBLICATION p SET (publish = 'insert, update, delete')",
    ],
)
@pytest.mark.full
def test_what_changes_between_two_snapshots_makes_it_start_over(
    replica: Replica, interruptions: Interruptions, between: str
) -> None:
    replica.execute(*TABLE.split(";")[:-1])
    interruptions.after(5, run(replica, (*WRITES[:4], between, *WRITES[4:7])))
    replica.subscribe()
    replica.assert_equal("a")
    assert replica.relation("a").copy_generation == 2
    assert replica.slots() == [replica.name]


@pytest.mark.full
@pytest.mark.parametrize(
    "alter", ["SET (origin = none)", "SKIP (lsn = '{}')", "SET PUBLICATION q WITH (refresh = false)"]
)
def test_what_leaves_changes_out_before_it_is_whole_makes_it_start_over(
    replica: Replica, interruptions: Interruptions, fault: Faults, alter: str
) -> None:
    """The chunks of before the change lacked it for ever, those of after it had it."""
    replica.execute(
        *TABLE.split(";")[:-1],
        "CREATE TABLE b (at timestamptz)",
        "ALTER PUBLICATION p ADD TABLE b",
        "CREATE PUBLICATION q FOR TABLE a WITH (publish = 'insert')",
        "SELECT pg_replication_origin_create('elsewhere')",
    )
    finish = ""

    def change() -> None:
        nonlocal finish
        with psycopg.connect(replica.conninfo) as session:
            session.execute("SELECT pg_replication_origin_session_setup('elsewhere')")
            session.execute("UPDATE a SET n = n + 1")
            if "SKIP" in alter:
                session.execute("INSERT INTO b VALUES ('infinity')")  # which Delta cannot hold
            ((finish,),) = session.execute("SELECT pg_current_wal_insert_lsn()::text")

    try:
        interruptions.after(5, change)
        fault.arm("window public.a")
        replica.subscribe()
        fault.wait("window public.a")
        replica.alter(alter.format(finish))
        fault.release("window public.a")
        replica.until_copied("a", 1)
        replica.assert_equal("a")
        assert replica.slots() == [replica.name]
    finally:
        replica.execute("SELECT pg_replication_origin_drop('elsewhere')")


@pytest.mark.full
def test_the_end_of_the_wal_is_on_the_publisher_s_disk(
    replica: Replica, interruptions: Interruptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second snapshot saw was noted as received up to WAL that a crash could take back: the publisher was then taken
    for one that had lost it."""
    replica.execute(*TABLE.split(";")[:-1], "CREATE TABLE other (id int)")
    put, noted = Catalog.put_copy_plan, []

    async def put_copy_plan(catalog: Catalog, subid: Any, relid: Any, plan: Any) -> None:
        if len(plan.attempts) > 1:
            noted.append(
                replica.query(f"SELECT '{plan.until}' > pg_current_wal_flush_lsn(), '{plan.until}' > '{plan.start}'")
            )
        await put(catalog, subid, relid, plan)

    monkeypatch.setattr(Catalog, "put_copy_plan", put_copy_plan)
    with psycopg.connect(replica.conninfo) as writing:
        interruptions.after(5, lambda: writing.execute("INSERT INTO other SELECT generate_series(1, 30)"))
        replica.subscribe()
        wait_until(lambda: noted, "the copy goes on")
        writing.rollback()
    assert noted == [[(False, True)]]
    replica.assert_equal("a")


@pytest.mark.full
def test_a_table_without_a_key_starts_over(
    replica: Replica, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.execute(
        "CREATE TABLE a (n int, t text)",
        "INSERT INTO a SELECT g % 10, repeat('x', 200) FROM generate_series(1, 5000) g",
        "CREATE PUBLICATION p FOR TABLE a",
    )
    commit = arrow_writer.commit_copy

    def fail(*_: Any) -> None:
        monkeypatch.setattr(arrow_writer, "commit_copy", commit)
        replica.execute("INSERT INTO a VALUES (1, 'meanwhile')")
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(arrow_writer, "commit_copy", fail)
    replica.subscribe()
    replica.assert_equal("a")
    assert replica.relation("a").copy_generation == 2
    wait_until(lambda: not unnamed_files(replica.path("a")), "no file is left")
