"""Sessions that read many rows of a publisher by COPY … TO STDOUT: psycopg's blocking connections, for threads and tasks."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

from pubsub.errors import ConnectionFailure
from pubsub.publisher.connection import open_session
from pubsub.publisher.conninfo import parse_conninfo
from pubsub.publisher.session_settings import session_settings_sql
from pubsub.sql.identifiers import quote_qualified

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg import Connection
    from psycopg.pq.abc import PGconn, PGresult

# Bytes of CSV parsed by Arrow at once.
_CHUNK_BYTES: Final = 4 << 20
_LOOK_AGAIN: Final = 1000  # milliseconds
_LONGEST_WAIT: Final = 3600.0  # seconds: poll takes no number of milliseconds


def part_of_table(
    schema: str,
    name: str,
    blocks: tuple[int, int | None] | None,
    *conditions: str | None,
    only: bool,
    sample: float | None = None,
) -> str:
    """Return what follows FROM for the rows in a range of blocks (first; behind the last, None: open) that meet all conditions.

    `only`: without the table's children; `sample`: per cent of the blocks.
    """
    found = []
    if blocks is not None:
        first, end = blocks
        if first > 0:
            found.append(f"ctid >= '({first},0)'::pg_catalog.tid")
        if end is not None:
            found.append(f"ctid < '({end},0)'::pg_catalog.tid")
    found += [one for one in conditions if one is not None]
    where = f" WHERE {' AND '.join(found)}" if found else ""
    sampled = f" TABLESAMPLE SYSTEM ({sample:.6f})" if sample is not None else ""
    return f"{'ONLY ' if only else ''}{quote_qualified(schema, name)}{sampled}{where}"


class RowTooLong(Exception):
    """A COPY has sent a row of `size` bytes, more than is taken."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a row of {size} bytes")
        self.size = size


class Cut:
    """Breaks the watched connections when called from another thread, whatever they are waiting for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._attempts: list[Callable[[], object]] = []
        self._cut = False

    def __call__(self) -> None:
        with self._lock:
            self._cut = True
            for watched in self._sockets:
                _break(watched)
            for give_up in self._attempts:
                give_up()

    @contextmanager
    def watching_all(self, connections: Iterable[Connection]) -> Iterator[None]:
        """Watch all of the connections while the body runs."""
        with ExitStack() as stack:
            for connection in connections:
                stack.enter_context(self.watching(connection))
            yield

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """Watch the connection while the body runs."""
        watched = socket.socket(fileno=os.dup(connection.fileno()))
        with self._lock:
            self._sockets.append(watched)
            if self._cut:
                _break(watched)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.remove(watched)
                watched.close()

    @contextmanager
    def attempting(self, give_up: Callable[[], object]) -> Iterator[None]:
        """While the body runs, which connects, have a cut call `give_up`; at once if this is cut already."""
        with self._lock:
            self._attempts.append(give_up)
            if self._cut:
                give_up()
        try:
            yield
        finally:
            with self._lock:
                self._attempts.remove(give_up)


def _break(watched: socket.socket) -> None:
    with suppress(OSError):  # the other side has closed it
        watched.shutdown(socket.SHUT_RDWR)


def session(conninfo: str, application_name: str, cut: Cut | None = None) -> Connection:
    """Open a connection, with the usual session parameters; a `cut` ends the attempt.  Blocks.  Raises ConnectionFailure.

    A host that does not answer is given up after connect_timeout, or after a minute where that is not set: whoever waits for this
    thread, or this task of Spark's, would otherwise wait for ever.
    """
    import psycopg

    pgconn = _connected(conninfo, application_name, cut)
    pgconn.nonblocking = 0
    connection = psycopg.Connection(pgconn)
    try:
        connection.autocommit = True
        with cut.watching(connection) if cut is not None else nullcontext():
            connection.execute(session_settings_sql(connection.info.server_version).encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _connected(conninfo: str, application_name: str, cut: Cut | None) -> PGconn:
    parameters = parse_conninfo(conninfo) | {"application_name": application_name, "client_encoding": "UTF8"}
    parameters.pop("replication", None)
    # A loop of this thread's own, so that the attempt has one implementation, and ends when it is told to.
    loop = asyncio.new_event_loop()
    try:
        opening = loop.create_task(open_session(parameters))
        with cut.attempting(lambda: loop.call_soon_threadsafe(opening.cancel)) if cut is not None else nullcontext():
            return loop.run_until_complete(opening)
    except asyncio.CancelledError:
        raise ConnectionFailure("could not connect to the publisher: the attempt was ended") from None
    finally:
        loop.close()


def batches(
    connection: Connection,
    statement: str,
    schema: pa.Schema,
    parse: Callable[[list[bytes], pa.Schema], pa.RecordBatch],
    longest: int | None = None,
    max_rate: float = 0,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a COPY statement (FORMAT csv), some megabytes at a time, `max_rate` bytes per second at most (0: no limit).

    `parse` takes rows out of the list that it gets, which is used again.  Raises psycopg.Error, RowTooLong for a row of more than
    `longest` bytes, and as `parse` does.

    libpq returns one row per call, so the loop does little else.  Whatever waits for the server waits in poll: psycopg's own calls
    that block (get_copy_data(0), get_result) would stop every thread of this process until the server sends.
    """
    from psycopg import pq
    from psycopg.errors import error_from_result

    pgconn = connection.pgconn
    result = pgconn.exec_(statement.encode())
    if result.status != pq.ExecStatus.COPY_OUT:
        raise error_from_result(result)
    next_row = pgconn.get_copy_data
    held: list[bytes] = []
    size = 0
    looked = False
    rate = Rate(max_rate)
    while True:
        length, row = next_row(1)
        if length == 0:
            _receive(pgconn, wait=looked)
            looked = True
            continue
        if length < 0:
            break
        looked = False
        # Copied to free libpq's buffer at once: keeping a million of those costs six times the whole loop.
        held.append(bytes(row))
        size += length
        if size >= _CHUNK_BYTES:
            # A row may take a gigabyte: it is gone before its values are written.
            del row
            yield _parsed(held, size, longest, schema, parse)
            rate.keep(pgconn.socket, size)
            size = 0
    ended = _result(pgconn)
    assert ended is not None
    if ended.status != pq.ExecStatus.COMMAND_OK:
        raise error_from_result(ended)
    while _result(pgconn) is not None:
        pass
    if held:
        yield _parsed(held, size, longest, schema, parse)


class Rate:
    """Keeps a reader to a number of bytes per second; 0: no limit."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def keep(self, connection: int, nbytes: int) -> None:
        """Wait until so many more bytes may be read; no longer than the socket `connection` lives (Cut)."""
        if not self._rate:
            return
        self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
        broken = select.poll()
        broken.register(connection, 0)
        while (left := self._free_at - time.monotonic()) > 0 and not broken.poll(min(left, _LONGEST_WAIT) * 1000):
            pass


def _parsed(
    rows: list[bytes],
    size: int,
    longest: int | None,
    schema: pa.Schema,
    parse: Callable[[list[bytes], pa.Schema], pa.RecordBatch],
) -> pa.RecordBatch:
    """Parse rows of `size` bytes, which empties the list.  Raises RowTooLong, and as `parse` does."""
    _require_short(rows, size, longest)
    return parse(rows, schema)


def _require_short(rows: list[bytes], size: int, longest: int | None) -> None:
    if longest is not None and size > longest and (found := max(map(len, rows))) > longest:
        raise RowTooLong(found)


def _receive(pgconn: PGconn, *, wait: bool) -> None:
    """Take what the server has sent, or wait for more, at most a moment, while other threads run.  Raises psycopg.OperationalError."""
    if wait:
        waiting = select.poll()
        waiting.register(pgconn.socket, select.POLLIN)
        # TLS may hold bytes that the socket does not show, so it is looked at again and again.
        waiting.poll(_LOOK_AGAIN)
    pgconn.consume_input()


def _result(pgconn: PGconn) -> PGresult | None:
    looked = False
    while pgconn.is_busy():
        _receive(pgconn, wait=looked)
        looked = True
    return pgconn.get_result()
