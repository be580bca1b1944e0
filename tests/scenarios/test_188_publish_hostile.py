"""Clients that send nonsense, too much, or read nothing, to `pubsub publish`: answered as PostgreSQL answers them, and bounded."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pubsub.backend import messages as m
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import PATIENCE, wait_until

LAST: Final = m.message(b"Q", b"COPY (SELECT 4711) TO STDOUT\0")
"""What is asked last; nothing else answers with this number."""
SLOTS: Final = b"SELECT count(slot_name) FROM pg_replication_slots WHERE slot_name = "


def _parse(text: bytes) -> bytes:
    return m.message(b"P", b"\0" + text + b"\0\0\0")


def _bound(body: bytes) -> bytes:
    """A statement over slots with one parameter, and a Bind that goes on like this after the names."""
    return _parse(SLOTS + b"$1") + m.message(b"B", b"\0\0" + body) + m.message(b"E", bytes(5)) + m.message(b"S")


LONG: Final = b"x" * 100_000
SENT: Final = {
    "unknown type": m.message(b"z", b"abc"),
    "nothing but zeros": bytes(40),
    "another protocol": b"GET / HTTP/1.0\r\n\r\n",
    "password": m.message(b"p", b"secret\0"),
    "length 3": b"Q\0\0\0\3",
    "length 0": b"Q\0\0\0\0",
    "negative length": b"Q\xff\xff\xff\xff",
    "two gigabytes": b"Q\x7f\xff\xff\xff",
    "long Sync": b"S\0\0\x40\0",
    "no end of the text": m.message(b"Q", b"SELECT 1"),
    "no text": m.message(b"Q"),
    "empty": m.message(b"Q", b"\0") + m.message(b"Q", b" ; \0"),
    "two texts": m.message(b"Q", b"SELECT 1\0SELECT 2\0"),
    "pipelined": b"".join(m.message(b"Q", one + b"\0") for one in (b"SELECT 1", b"SELECT nope", b"SHOW wal_level")),
    "long name": m.message(b"Q", b"DROP_REPLICATION_SLOT " + LONG + b"\0"),
    "long quoted name": m.message(b"Q", b'DROP_REPLICATION_SLOT "' + LONG + b'"\0'),
    "long plugin": m.message(b"Q", b"CREATE_REPLICATION_SLOT s LOGICAL " + LONG + b"\0"),
    "long option": m.message(b"Q", b"CREATE_REPLICATION_SLOT s LOGICAL pgoutput (SNAPSHOT '" + LONG + b"')\0"),
    "long setting": m.message(b"Q", b"SHOW " + b"a." * 100 + b"b\0"),
    "no end of the name": m.message(b"Q", b'DROP_REPLICATION_SLOT "abc\0'),
    "no end of the option": m.message(b"Q", b"CREATE_REPLICATION_SLOT s LOGICAL pgoutput (SNAPSHOT 'abc\0"),
    "LSN too long": m.message(b"Q", b"START_REPLICATION SLOT nope LOGICAL FFFFFFFFF/0\0"),
    "half an LSN": m.message(b"Q", b"START_REPLICATION SLOT nope LOGICAL 0/\0"),
    "copy data": m.message(b"d", b"x" * 200_000) + m.message(b"c") + m.message(b"f", b"x\0"),
    "terminated": m.message(b"X", b"abc") + m.message(b"Q", b"SELECT 1\0"),
    "describes what is nothing": m.message(b"D", b"Q\0") + m.message(b"S"),
    "closes what is nothing": m.message(b"C", b"Z\0") + m.message(b"S"),
    "half a Parse": m.message(b"P", b"a") + m.message(b"S"),
    "half an Execute": m.message(b"E", b"\0\0") + m.message(b"S"),
    "Sync with more": m.message(b"S", b"abc"),
    "half a Bind": _bound(b""),
    "no parameter": _bound(bytes(6)),
    "too long a parameter": _bound(b"\0\0\0\1\0\0\0\x09abc\0\0"),
    "a parameter of length -2": _bound(b"\0\0\0\1\xff\xff\xff\xfe\0\0"),
    "more behind": _bound(b"\0\0\0\1\0\0\0\1a\0\0zzz"),
    "format 7": _bound(b"\0\1\0\7\0\1\0\0\0\1a\0\0"),
    "too many result formats": _bound(b"\0\0\0\1\0\0\0\1a\0\2\0\0\0\1"),
    "no UTF-8": m.message(b"Q", SLOTS + b"'\xff'\0"),
    "no UTF-8 to be parsed": _parse(SLOTS + b"'\xff'") + m.message(b"S"),
    "no end of the literal": m.message(b"Q", SLOTS + b"'abc\0"),
    "deep": m.message(
        b"Q", b"SELECT " + b"(" * 4000 + b"1" + b")" * 4000 + b" FROM pg_replication_slots WHERE false\0"
    ),
}


def _connected(conninfo: str, **more: str) -> socket.socket:
    """Connect, and return the socket when the session is ready."""
    given = conninfo_to_dict(conninfo)
    connection = socket.create_connection((str(given["host"]), int(str(given["port"]))), timeout=PATIENCE)
    parameters = {"user": str(given["user"]), "database": str(given["dbname"]), **more}
    connection.sendall(m.startup(3 << 16, parameters))
    while _message(connection)[0] != b"Z":
        pass
    return connection


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read so many bytes; fewer at the end."""
    found = bytearray()
    with suppress(ConnectionError):
        while len(found) < count and (data := connection.recv(count - len(found))):
            found += data
    return bytes(found)


def _message(connection: socket.socket) -> tuple[bytes, bytes]:
    """Read a message; its type is empty at the end."""
    kind = _exactly(connection, 1)
    return kind, _exactly(connection, int.from_bytes(_exactly(connection, 4), "big") - 4) if kind else b""


def _answers(conninfo: str, sent: bytes, **more: str) -> list[object]:
    """Return what a server answers to a session that sends this and a last query; errors by their fields."""
    found: list[object] = []
    with _connected(conninfo, **more) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent + LAST)
        while True:
            kind, body = _message(connection)
            if kind == b"E":
                error = m.read_error(body)
                found.append((kind, m.read_fields(body)["S"], error.sqlstate, error.message, error.hint))
            elif kind != b"N":
                found.append((kind, body))
            if not kind or (kind == b"d" and body == b"4711\n"):
                return found


@pytest.mark.full
@pytest.mark.parametrize("replication", ["false", "database"])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT.keys())
def test_nonsense_is_answered_as_postgresql_answers_it(
    served: Publish, database: Database, sent: bytes, replication: str
) -> None:
    ours = served.conninfo(dbname=database.name)
    assert _answers(ours, sent, replication=replication) == _answers(database.conninfo, sent, replication=replication)


@pytest.fixture
def slot(served: Publish, database: Database) -> Iterator[str]:
    name = f"hostile_{database.name}"
    served.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')", dbname=database.name)
    yield name

    def dropped() -> bool:
        with suppress(psycopg.errors.ObjectInUse):
            served.execute(f"SELECT pg_drop_replication_slot('{name}')", dbname=database.name)
            return True
        return False

    wait_until(dropped, "the slot is dropped")


def _status(lsn: int, *, reply: bool = False) -> bytes:
    return m.message(b"d", struct.pack(">cQQQqB", b"r", lsn, lsn, lsn, 0, reply))


def _inserted(connection: socket.socket) -> bytes:
    """Read up to the next row that was inserted, and return it."""
    while True:
        kind, body = _message(connection)
        assert kind == b"d", "the stream has ended"
        if body[:1] == b"w" and b"INSERT" in body:
            return body[25:]


def _memory(publish: Publish) -> int:
    """Bytes that the server and its processes have."""
    server = psutil.Process(publish.pid)
    return sum(one.memory_info().rss for one in (server, *server.children(recursive=True)))


def _stream(conninfo: str, slot: str, **more: str) -> socket.socket:
    """Begin a stream; nothing of it is read."""
    connection = _connected(conninfo, replication="database", **more)
    connection.sendall(m.message(b"Q", f"START_REPLICATION SLOT {slot} LOGICAL 0/0\0".encode()))
    assert _message(connection)[0] == b"W"
    return connection


def test_a_flood_of_status_messages_is_bounded_and_loses_nothing(
    served: Publish, database: Database, slot: str
) -> None:
    """LSNs of the future do not count, replies that nobody reads are not written without end, and others are served."""
    database.execute("CREATE TABLE t (id int); INSERT INTO t VALUES (0)")
    with ExitStack() as stack:
        flood = stack.enter_context(_stream(served.conninfo(dbname=database.name), slot))
        _inserted(flood)  # by a process that has its catalogs by now
        before = _memory(served)
        future = (1 << 63) - 1
        some = _status(future, reply=True) * 1000
        for _ in range(400):  # 14 MB, and answers of 9 MB that nobody reads
            flood.sendall(some)
        database.execute("INSERT INTO t VALUES (1)")
        ((confirmed, end),) = served.query(
            f"SELECT confirmed_flush_lsn, pg_current_wal_lsn() FROM pg_replication_slots WHERE slot_name = '{slot}'",
            dbname=database.name,
        )
        assert _lsn(confirmed) <= _lsn(end)
        assert _memory(served) - before < 40 << 20
        rows = [_inserted(flood)]  # among the answers
        flood.sendall(m.message(b"c"))
        while (kind := _message(flood)[0]) != b"Z":
            assert kind, "the session has ended"
    database.execute("INSERT INTO t VALUES (2)")
    get = f"SELECT data FROM pg_logical_slot_get_changes('{slot}', NULL, NULL) WHERE data ~ 'INSERT'"
    found = [*rows, *(data.encode() for (data,) in served.query(get, dbname=database.name))]
    assert found == [b"table public.t: INSERT: id[integer]:%d" % number for number in (1, 2)]


_PATIENT: Final = {"options": "-c wal_sender_timeout=0"}


@pytest.mark.full
def test_a_client_that_reads_nothing_is_given_up(tmp_path: Path) -> None:
    """After wal_sender_timeout, its connection full, as by PostgreSQL; other streams go on, and nothing is lost."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres("18"))

        def set_timeout(value: str) -> None:
            server.execute(f"ALTER SYSTEM SET wal_sender_timeout = '{value}'")
            server.query("SELECT pg_reload_conf()")

        set_timeout("0")
        server.execute("CREATE TABLE t (id int, v text)")
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.terminate)
        both = server.conninfo("postgres"), publish.conninfo()
        for conninfo in both:
            with psycopg.connect(conninfo, autocommit=True) as session:
                for slot in ("silent", "other"):
                    session.execute("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", [slot])
        silent = [stack.enter_context(_stream(conninfo, "silent")) for conninfo in both]
        reading = [stack.enter_context(_stream(conninfo, "other", **_PATIENT)) for conninfo in both]

        def insert(first: int, last: int) -> None:
            """Insert rows of 100 kB, which come to those that read."""
            server.execute(f"INSERT INTO t SELECT n, repeat('x', 100000) FROM generate_series({first}, {last}) n")
            for one in reading:
                assert [_number(_inserted(one)) for _ in range(first, last + 1)] == list(range(first, last + 1))

        def active() -> list[list[tuple[bool]]]:
            query = "SELECT active FROM pg_replication_slots WHERE slot_name = 'silent'"
            return [server.query(query), publish.query(query)]

        insert(0, 0)
        before = _memory(publish)
        insert(1, 800)
        assert _memory(publish) - before < 40 << 20
        assert active() == [[(True,)]] * 2
        set_timeout("1s")
        wait_until(lambda: active() == [[(False,)]] * 2, "they are given up")
        insert(801, 801)
        for conninfo, one in zip(both, silent, strict=True):
            while kind := _message(one)[0]:
                assert kind == b"d", "it is told nothing behind what it was sent"
            again = stack.enter_context(_stream(conninfo, "silent", **_PATIENT))
            assert [_number(_inserted(again)) for _ in range(802)] == list(range(802))


def _number(row: bytes) -> int:
    return int(row.split(b"id[integer]:")[1].split()[0])


def _lsn(text: str) -> int:
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)
