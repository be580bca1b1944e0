"""Transactions larger than memory, written while the subscriber follows, and measured from their COMMIT on.

The changes are streamed while the transaction is in progress, so that only the cost of its commit is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import psycopg

from bench.workload import NEW_ROW, Orders
from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres

NAMES: Final = ("large", "large-updates", "large-many", "large-subtransactions")

#: The number of concurrent transactions, and of turns in which each is written.
INTERLEAVED: Final = 200
_TURNS: Final = 5
_SUBTRANSACTIONS: Final = 10_000

Commit = Callable[[], Lsn]
"""Commits the open transactions; returns an LSN inside the last one."""


@contextmanager
def inserts(publisher: EmbeddedPostgres, data: Orders, first: int, count: int) -> Iterator[Commit]:
    """Write one transaction of `count` inserts."""
    with _writer(publisher, data) as connection:
        connection.execute(f"INSERT INTO orders SELECT {NEW_ROW} FROM generate_series({first}, {first + count - 1}) i")
        yield lambda: _commit(connection)


@contextmanager
def updates(publisher: EmbeddedPostgres, data: Orders, first: int, count: int) -> Iterator[Commit]:
    """Write one transaction that updates the first `count` rows, from key 1 on."""
    with _writer(publisher, data) as connection:
        connection.execute(
            f"UPDATE orders SET name = 'large ' || {first} || id, quantity = quantity + 1 WHERE id <= {count}"
        )
        yield lambda: _commit(connection)


@contextmanager
def interleaved(publisher: EmbeddedPostgres, data: Orders, first: int, count: int) -> Iterator[Commit]:
    """Write INTERLEAVED concurrent transactions in turns, with `count` inserts in all."""
    each = max(1, count // (INTERLEAVED * _TURNS))
    with ExitStack() as stack:
        writers = [stack.enter_context(_writer(publisher, data)) for _ in range(INTERLEAVED)]
        low = first
        for _ in range(_TURNS):
            for connection in writers:
                connection.execute(
                    f"INSERT INTO orders SELECT {NEW_ROW} FROM generate_series({low}, {low + each - 1}) i"
                )
                low += each

        def commit() -> Lsn:
            return [_commit(connection) for connection in writers][-1]

        yield commit


@contextmanager
def subtransactions(publisher: EmbeddedPostgres, data: Orders, first: int, count: int) -> Iterator[Commit]:
    """Write one transaction of many subtransactions with `count` inserts in all; every other one is rolled back."""
    each = max(1, count // _SUBTRANSACTIONS)
    with _writer(publisher, data) as connection:
        connection.execute(
            f"""DO $$ BEGIN FOR s IN 0..{_SUBTRANSACTIONS - 1} LOOP BEGIN
                    INSERT INTO orders SELECT {NEW_ROW}
                        FROM generate_series({first} + s * {each}, {first} + s * {each} + {each - 1}) i;
                    IF s % 2 = 0 THEN RAISE EXCEPTION 'no'; END IF;
                EXCEPTION WHEN raise_exception THEN NULL; END; END LOOP; END $$"""
        )
        yield lambda: _commit(connection)


@contextmanager
def _writer(publisher: EmbeddedPostgres, data: Orders) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with publisher.connect(data.database) as connection:
        connection.autocommit = False
        yield connection


def _commit(connection: psycopg.Connection[tuple[object, ...]]) -> Lsn:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    connection.commit()
    assert row is not None
    return Lsn.parse(str(row[0]))
