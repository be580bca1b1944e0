"""One decoding pass feeds all slots of a database: each gets what PostgreSQL's own walsender would send it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from pubsub.protocol.copyboth import Keepalive, XLogData, read_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import Faults, wait_until

_PGOUTPUT = {"proto_version": "1", "publication_names": "a"}
_SLOTS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "one": ("pgoutput", False, _PGOUTPUT),
    "same": ("pgoutput", False, _PGOUTPUT),
    "other": ("pgoutput", False, {"proto_version": "2", "publication_names": "b", "binary": "true"}),
    "both": ("pgoutput", False, {"proto_version": "4", "publication_names": "a,b", "messages": "true"}),
    "prepared": ("pgoutput", True, {"proto_version": "3", "publication_names": "a,b"}),
    "text": ("test_decoding", False, {"include-timestamp": "on"}),
    "text_prepared": ("test_decoding", True, {}),
}
"""Plugin, two_phase, options."""
_DESCRIPTIONS = (b"R", b"Y")
"""Messages of pgoutput that come again whenever a subscriber joins others."""
_FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 100000))"


class Reader:
    """Reads a slot's stream by way of `conninfo`, and confirms nothing."""

    def __init__(self, conninfo: str, slot: str, options: dict[str, str], start: int = 0) -> None:
        self._conninfo, self._slot, self._options, self._start = conninfo, slot, options, start
        self.messages: list[bytes] = []

    async def __aenter__(self) -> Reader:
        self._connection = await Connection.connect(self._conninfo, replication=True)
        await self._connection.__aenter__()
        self._stream = await replication.start(self._connection, self._slot, self._start, self._options)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.__aexit__(None, None, None)

    async def read(self, end: int) -> None:
        """Read until everything before `end` has come."""
        reached = False
        while not reached:
            # Frames that came together with the keepalive that tells of `end` are read, too: none is asked for again.
            for frame in await self._stream.receive():
                message = read_server_message(frame)
                if isinstance(message, XLogData):
                    self.messages.append(message.data)
                elif isinstance(message, Keepalive) and message.wal_end >= end:
                    reached = True


def _end(database: Database) -> int:
    ((end,),) = database.query("SELECT pg_current_wal_flush_lsn()")
    return Lsn.parse(str(end))


def _rows(messages: list[bytes], plugin: str) -> list[bytes]:
    return [one for one in messages if plugin != "pgoutput" or one[:1] not in _DESCRIPTIONS]


def _load(database: Database, number: int) -> None:
    first = number * 100
    for statement in (
        f"INSERT INTO a SELECT i, repeat('a', 20) FROM generate_series({first}, {first + 99}) i",
        f"INSERT INTO b SELECT i, repeat('b', 3000) FROM generate_series({first}, {first + 99}) i",
        (
            f"BEGIN; UPDATE a SET v = 'new' WHERE id >= {first + 50}; SAVEPOINT s; DELETE FROM b WHERE id % 7 = 0;"
            f" ROLLBACK TO s; DELETE FROM b WHERE id = {first + 1}; COMMIT"
        ),
        (f"BEGIN; INSERT INTO b VALUES ({-number - 1}, 'p'), ({-number - 1001}, 'q'); PREPARE TRANSACTION 'g{number}'"),
        f"SELECT pg_logical_emit_message(true, 'm', 'in {number}'), pg_logical_emit_message(false, 'm', 'out')",
        f"ALTER TABLE a ADD COLUMN c{number} int DEFAULT {number}",
        f"UPDATE a SET c{number} = 0 WHERE id < {first + 3}",
        f"{'COMMIT' if number % 2 else 'ROLLBACK'} PREPARED 'g{number}'",
        "TRUNCATE b" if number == 2 else "SELECT 1",
    ):
        database.server.execute(statement, database.name)


@pytest.fixture
def fault(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults")


@pytest.fixture
def upstream() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres("18", settings={"max_prepared_transactions": 10, "wal_sender_timeout": 0}) as server:
        yield server


@pytest.fixture
def publish(upstream: EmbeddedPostgres, fault: Faults, tmp_path: Path) -> Iterator[Publish]:
    publish = Publish(tmp_path / "node", upstream.conninfo(), faults=fault.directory)
    yield publish
    publish.kill()


@pytest.fixture
def slots(upstream: EmbeddedPostgres, publish: Publish) -> Database:
    """A database with the same slots there and at our server."""
    database = Database(upstream, "postgres")
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text);"
        " CREATE PUBLICATION a FOR TABLE a; CREATE PUBLICATION b FOR TABLE b"
    )
    for name, (plugin, two_phase, _) in _SLOTS.items():
        make = f"SELECT pg_create_logical_replication_slot('{name}', '{plugin}', false, {two_phase})"
        database.query(make)
        publish.execute(make)
    return database


def test_each_slot_gets_what_postgresql_sends_it(slots: Database, publish: Publish) -> None:
    """Slots with other options side by side; the first half of the load is behind them, the second comes meanwhile."""

    async def read() -> dict[str, list[bytes]]:
        readers = {name: Reader(publish.conninfo(), name, options) for name, (_, _, options) in _SLOTS.items()}
        for number in range(3):
            await asyncio.to_thread(_load, slots, number)
        for reader in readers.values():
            await reader.__aenter__()
        reading = [asyncio.create_task(one.read(_end(slots))) for one in readers.values()]
        for number in range(3, 6):
            await asyncio.to_thread(_load, slots, number)
        await asyncio.gather(*reading)
        await asyncio.gather(*(one.read(_end(slots)) for one in readers.values()))
        for reader in readers.values():
            await reader.__aexit__()
        return {name: one.messages for name, one in readers.items()}

    found = asyncio.run(asyncio.wait_for(read(), 300))
    for name, (plugin, _, options) in _SLOTS.items():
        listed = ", ".join(f"'{one}'" for pair in options.items() for one in pair)
        peek = f"SELECT data FROM pg_logical_slot_peek_binary_changes('{name}', NULL, NULL, VARIADIC "
        expected = [bytes(one) for (one,) in slots.query(peek + f"ARRAY[{listed}]::text[])")]
        assert _rows(found[name], plugin) == _rows(expected, plugin), name


@pytest.mark.full
def test_a_client_that_reads_nothing_keeps_nobody_waiting(slots: Database, publish: Publish) -> None:
    """Its changes wait on disk; then it leaves the others' pass, and gets everything when it reads."""

    async def read() -> tuple[list[bytes], list[bytes]]:
        conninfo = publish.conninfo()
        async with (
            Reader(conninfo, "same", _PGOUTPUT) as slow,
            Reader(conninfo, "one", _PGOUTPUT) as fast,
        ):
            for number in range(8):
                rows = f"SELECT i + {number * 10_000}, repeat('w', 1000) FROM generate_series(1, 10000) i"
                await asyncio.to_thread(slots.execute, f"INSERT INTO a {rows}")
                await fast.read(_end(slots))
            await slow.read(_end(slots))
            await asyncio.to_thread(slots.execute, "INSERT INTO a VALUES (-1, 'last')")
            await asyncio.gather(fast.read(_end(slots)), slow.read(_end(slots)))
        return slow.messages, fast.messages

    slow, fast = asyncio.run(asyncio.wait_for(read(), 300))
    assert sum(one[:1] == b"I" for one in fast) == 80_001
    assert _rows(slow, "pgoutput") == _rows(fast, "pgoutput")


@pytest.mark.full
def test_a_stream_that_begins_later_beside_one_that_is_behind(slots: Database, publish: Publish) -> None:
    """Both join a third one; what begins then is sent to each once, and not before its start."""

    async def read(other: psycopg.Connection) -> list[list[bytes]]:
        conninfo, future = publish.conninfo(), _end(slots) + (1 << 20)
        behind, there = Reader(conninfo, "one", _PGOUTPUT), Reader(conninfo, "same", _PGOUTPUT)
        later, alike = (
            Reader(conninfo, slot, options, future)
            for slot, options in (("other", _SLOTS["other"][2]), ("both", _PGOUTPUT))
        )
        async with there:
            await there.read(_end(slots))
            # A transaction in progress: otherwise a stream that begins later joins those at the end at once.
            await asyncio.to_thread(other.execute, "BEGIN; INSERT INTO b VALUES (0, 'open')")
            await asyncio.to_thread(slots.execute, "INSERT INTO a VALUES (1, 'behind')")
            await asyncio.gather(*(one.__aenter__() for one in (behind, later)))
            await behind.read(_end(slots))
            await alike.__aenter__()
            for number in range(2, 5):
                await asyncio.to_thread(slots.execute, f"INSERT INTO a VALUES ({number}, 'new')")
                await asyncio.to_thread(slots.execute, f"INSERT INTO b VALUES ({number}, 'early')")
                await behind.read(_end(slots))
            await asyncio.to_thread(other.execute, "ROLLBACK")
            await asyncio.to_thread(slots.execute, "INSERT INTO a VALUES (6, 'new')")
            while _end(slots) < future:
                await asyncio.to_thread(slots.query, _FILLER)
            for table in ("a", "b"):
                await asyncio.to_thread(slots.execute, f"INSERT INTO {table} VALUES (5, 'in time')")
            await asyncio.gather(*(one.read(_end(slots)) for one in (behind, there, later, alike)))
        for reader in (behind, later, alike):
            await reader.__aexit__()
        return [_rows(one.messages, "pgoutput") for one in (behind, there, later, alike)]

    with slots.server.connect(slots.name) as other:
        behind, there, later, alike = asyncio.run(asyncio.wait_for(read(other), 300))
    assert [one[:1] for one in behind] == [b"B", b"I", b"C"] * 6
    assert there == behind
    assert [one[:1] for one in later] == [b"B", b"I", b"C"]
    assert alike == behind[-3:]


def test_a_stream_that_begins_later_beside_one_that_gets_the_same(slots: Database, publish: Publish) -> None:
    async def read() -> tuple[list[bytes], list[bytes]]:
        conninfo, future = publish.conninfo(), _end(slots) + (1 << 20)
        async with Reader(conninfo, "one", _PGOUTPUT) as there, Reader(conninfo, "same", _PGOUTPUT, future) as later:
            await there.read(_end(slots))
            await asyncio.to_thread(slots.execute, "INSERT INTO a VALUES (1, 'early')")
            await there.read(_end(slots))
            while _end(slots) < future:
                await asyncio.to_thread(slots.query, _FILLER)
            await asyncio.to_thread(slots.execute, "INSERT INTO a VALUES (2, 'in time')")
            await asyncio.gather(*(one.read(_end(slots)) for one in (there, later)))
            return _rows(there.messages, "pgoutput"), _rows(later.messages, "pgoutput")

    there, later = asyncio.run(asyncio.wait_for(read(), 300))
    assert [one[:1] for one in there] == [b"B", b"I", b"C"] * 2
    assert later == there[-3:]


# Kills


@pytest.fixture
def followed(upstream: EmbeddedPostgres, publish: Publish) -> Publish:
    """Our server with two slots and a table for followers."""
    upstream.execute("CREATE TABLE t (id int, v text)")
    for name in ("s", "t"):
        publish.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')")
    return publish


def _decoding(publish: Publish) -> int | None:
    """Return the process id of the decoding process, which is a child of the one that it was forked from."""
    with suppress(OSError):
        for fork_server in _children(publish.pid):
            for one in _children(fork_server):
                if Path(f"/proc/{one}/comm").read_text() == "decoding\n":
                    return one
    return None


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
def test_a_decoding_process_that_dies_is_started_again(
    upstream: EmbeddedPostgres, followed: Publish, fault: Faults
) -> None:
    """Killed at any moment, and between the durable writes of the catalogs: every subscriber gets everything once."""
    last = 0

    def write(count: int) -> None:
        nonlocal last
        for _ in range(count):
            last += 1
            upstream.execute(f"INSERT INTO t VALUES ({last}, 'x')")

    def complete() -> bool:
        return all(len(one.ids) == last for one in (first, second))

    with Follower(followed.conninfo, "s") as first, Follower(followed.conninfo, "t") as second:
        write(3)
        wait_until(complete, "all have come")
        for point in ("catalogs written aside", "catalogs renamed"):
            fault.arm(point, "kill")
            upstream.execute(f"CREATE TABLE {point.replace(' ', '_')} (a int)")

            def killed() -> bool:
                # The catalogs are saved at a checkpoint's list of running transactions, if that was not done lately.
                write(1)
                upstream.execute("CHECKPOINT")
                return fault.is_reached(point)  # noqa: B023

            wait_until(killed, f"it was killed: {point}")
            fault.clear()
            write(3)
            wait_until(complete, "all have come")
        process = _decoding(followed)
        assert process is not None
        write(3)
        os.kill(process, signal.SIGKILL)
        write(3)
        wait_until(complete, "all have come")
    assert first.ids == second.ids == list(range(1, last + 1))
    assert (first.error, second.error) == (None, None)
    assert followed.terminate() == 0


@pytest.mark.full
def test_a_decoding_process_that_hangs_holds_no_end_up(upstream: EmbeddedPostgres, followed: Publish) -> None:
    """A stream's end is the decoding process's to tell; the session, and the server, once waited for it for ever."""
    with Follower(followed.conninfo, "s") as follower:
        upstream.execute("INSERT INTO t VALUES (1, 'x')")
        wait_until(lambda: follower.ids == [1], "the row has come")
        process = _decoding(followed)
        assert process is not None
        os.kill(process, signal.SIGSTOP)
        os.kill(followed.pid, signal.SIGTERM)
        assert followed.wait(180) == 0
    assert "does not answer, and is killed" in followed.read_log()
    assert not Path(f"/proc/{process}").exists()


def test_decoding_begins_with_the_catalogs_on_disk_and_without_them(
    upstream: EmbeddedPostgres, followed: Publish
) -> None:
    """After a restart it begins with what was saved; what is damaged costs no more than time."""
    catalogs = followed.home / "walsender" / "catalogs"
    upstream.execute("CHECKPOINT")
    wait_until(lambda: list(catalogs.glob("*/*.catalogs")), "the catalogs are saved")
    with Follower(followed.conninfo, "s") as follower:
        for number in range(1, 4):
            upstream.execute(f"ALTER TABLE t ADD COLUMN c{number} int")
            upstream.execute(f"INSERT INTO t VALUES ({number}, 'x')")
            wait_until(lambda: len(follower.ids) == number, "it has come")  # noqa: B023
            decoding = _decoding(followed)
            followed.kill()
            if number == 1:
                # As a power loss leaves them: of WAL that is not here.
                ahead = next(catalogs.glob("*/*.catalogs")).with_name("00000FFF00000000.catalogs")
                ahead.touch()
            if number == 2:
                assert not ahead.exists()
                # It may be saving: what is damaged before it ends would be whole again.
                wait_until(lambda: not Path(f"/proc/{decoding}").exists(), "its decoding process has ended")  # noqa: B023
                for path in catalogs.glob("*/*"):
                    path.write_bytes(b"damaged")
            followed.start()
        wait_until(
            lambda: followed.query("SELECT active FROM pg_replication_slots WHERE slot_name = 's'")[0][0], "it follows"
        )
        upstream.execute("INSERT INTO t VALUES (4, 'x')")
        wait_until(lambda: len(follower.ids) == 4, "it has come")
    assert (follower.ids, follower.error) == ([1, 2, 3, 4], None)
    assert "checksum mismatch" in followed.home.with_suffix(".log").read_text()


@pytest.mark.full
def test_a_stream_that_begins_before_the_catalogs_that_were_saved_last(
    upstream: EmbeddedPostgres, followed: Publish
) -> None:
    """The base pass began at them after a restart, and took the slot for one that had missed nothing of a quiet server."""
    upstream.execute("INSERT INTO t VALUES (1, 'x')")
    ((committed,),) = upstream.query("SELECT pg_current_wal_flush_lsn() - '0/0'")
    catalogs = followed.home / "walsender" / "catalogs"

    def saved() -> bool:
        # They are saved at a checkpoint's list of running transactions, if that was not done lately.
        upstream.execute("CHECKPOINT")
        # One that is being written has another ending.
        paths = [path for path in catalogs.glob("*/*") if path.suffix in {".catalogs", ".same"}]
        return any(int(path.stem, 16) >= committed for path in paths)

    wait_until(saved, "the catalogs are saved")
    followed.kill()
    followed.start()
    with Follower(followed.conninfo, "s") as follower:
        sent = f"SELECT sent_lsn - '0/0' >= {committed} FROM pg_stat_replication"
        wait_until(lambda: followed.query(sent) == [(True,)], "it was sent what there is")
        upstream.execute("INSERT INTO t VALUES (2, 'x')")
        wait_until(lambda: 2 in follower.ids, "the new row has come")
    assert (follower.ids, follower.error) == ([1, 2], None)


@pytest.mark.full
def test_a_database_is_dropped_while_nobody_looks(upstream: EmbeddedPostgres, publish: Publish) -> None:
    """Its slots and catalogs go at the start; its decoding could never begin again.  Those of others stay."""
    for name in ("gone", "kept"):
        upstream.create_database(name)
        publish.execute(f"SELECT pg_create_logical_replication_slot('of_{name}', 'test_decoding')", dbname=name)
    catalogs = publish.home / "walsender" / "catalogs"
    upstream.execute("CHECKPOINT")
    wait_until(lambda: len(list(catalogs.glob("*/*.catalogs"))) == 2, "the catalogs are saved")
    publish.kill()
    upstream.execute("DROP DATABASE gone WITH (FORCE)")
    publish.start()
    left = "SELECT slot_name FROM pg_replication_slots"
    wait_until(lambda: publish.query(left) == [("of_kept",)], "the slot is gone")
    wait_until(lambda: len(list(catalogs.iterdir())) == 1, "the catalogs are gone")
    publish.kill()
    publish.start()
    assert publish.query(left) == [("of_kept",)]


@pytest.mark.full
def test_databases_that_swap_their_names_keep_their_slots(upstream: EmbeddedPostgres, publish: Publish) -> None:
    """The decoding began in the database that had the name: its changes were sent for the other one's slot."""
    names = {"a": 1, "b": 2}
    for name in names:
        upstream.create_database(name)
        upstream.execute("CREATE TABLE t (id int, v text)", name)
    publish.execute("SELECT pg_create_logical_replication_slot('of_a', 'test_decoding')", dbname="a")
    catalogs = publish.home / "walsender" / "catalogs"
    upstream.execute("CHECKPOINT")
    wait_until(lambda: list(catalogs.glob("*/*.catalogs")), "the catalogs are saved")
    process = _decoding(publish)
    publish.kill()
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "its decoding process has ended")
    for path in catalogs.glob("*/*"):
        path.unlink()
    for before, after in (("a", "c"), ("b", "a"), ("c", "b")):
        upstream.execute(f"ALTER DATABASE {before} RENAME TO {after}")
    publish.start()
    wait_until(lambda: list(catalogs.glob("*/*.catalogs")), "the catalogs are read anew")
    with Follower(lambda: publish.conninfo(dbname="b"), "of_a") as follower:
        for name, number in names.items():
            upstream.execute(f"INSERT INTO t VALUES ({number}, 'x')", name)
        wait_until(lambda: follower.ids or follower.error, "a row has come")
    assert (follower.ids, follower.error) == ([2], None)
