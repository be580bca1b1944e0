"""Transactions that overlap while a publisher makes a slot, so that PostgreSQL gets the slot's first picture of the catalogs wrong.

See pubsub/publisher/sound_slots.py.  The database needs the table `b (id, t)`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import psycopg

from tests.support.replica import Replica, wait_until


class Overlapping:
    """Three transactions.  Of `last`'s changes the slot that `begin` makes does not know what is altered `meanwhile`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._first, self._second, self.last = (
            self._stack.enter_context(psycopg.connect(self._replica.conninfo)) for _ in range(3)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def begin(self, make: Callable[[], object], *, meanwhile: str) -> None:
        """Have a slot made, by `make`, which does not wait for it, up to its second step; `last` may begin then."""
        self._first.execute("INSERT INTO b VALUES (-1, 'first')")
        make()
        self.waited_for(self._first)
        self._second.execute("INSERT INTO b VALUES (-2, 'second')")
        self._replica.execute(meanwhile)
        self._first.commit()
        self.waited_for(self._second)

    def go_on(self) -> None:
        """Let the slot's creation end."""
        self._second.commit()

    def waited_for(self, transaction: psycopg.Connection) -> None:
        """Wait until a slot's creation waits for a transaction."""
        row = transaction.execute("SELECT pg_current_xact_id()::xid::text").fetchone()
        assert row is not None
        wait_until(
            lambda: self._replica.query(f"SELECT 1 FROM pg_locks WHERE NOT granted AND transactionid = '{row[0]}'"),
            "the slot's creation to wait for a transaction",
        )
