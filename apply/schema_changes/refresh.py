"""Take over the columns that REFRESH asks about: those of an ALTER TABLE that no row has announced.

The publisher's catalog is ahead of the stream, so one look at it is not enough.  A table with the same columns in two looks had
them all the time between.  Once the stream is past the end of WAL of the first look, it is between the two, so its rows have the
columns that both looks saw:

    REFRESH ─► first look, WAL ends at 0/180 ─► committed up to 0/180 ─► second look ─┬─ same columns: the table is altered
                                                                                      └─ others: it is the next first look
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from apply.isolation import StopAlone
from apply.schema_changes.diff import CopyAgain, Described
from apply.schema_changes.follow import Columns, Follower, Looked
from catalog.store import Catalog
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn


class Table(Protocol):
    """A table of the subscription, as far as REFRESH is concerned."""

    columns: Columns | None
    after: Lsn | None
    version: Lsn
    synced: bool
    refresh_requests: int


class ColumnRefresh:
    """Compares the columns of a subscription's tables with the publisher's, for REFRESH."""

    def __init__(self, catalog: Catalog, subid: int, follower: Follower) -> None:
        self._catalog = catalog
        self._subid = subid
        self._follower = follower
        self._first_look: Looked | None = None

    @property
    def pending(self) -> bool:
        """Whether the first look was taken, so that `take_over` will take the second one."""
        return self._first_look is not None

    def is_due(self, at: Lsn) -> bool:
        """Tell whether the stream, if everything up to `at` is committed, is past the first look."""
        return self._first_look is not None and at >= self._first_look.lsn

    async def take_first_look(self, tables: Mapping[int, Table]) -> None:
        """Take the first look at the publisher's columns of the tables that REFRESH asks about, unless it was taken."""
        asked = _asked_for(tables)
        if asked and self._first_look is None:
            self._first_look = await self._follower.look([columns for _, columns, _ in asked])

    async def take_over(self, at: Lsn, tables: Mapping[int, Table], stop_alone: StopAlone) -> list[CopyAgain]:
        """If it is due at `at`, take the second look and alter the tables; return those that must be copied again.

        Everything up to `at` must be committed.  `tables`, by relid, may change while this waits.
        """
        first = self._first_look
        if first is None or at < first.lsn:
            return []
        asked = _asked_for(tables)
        now = await self._follower.look([columns for _, columns, _ in asked])
        known: dict[int, int] = {}
        again: list[CopyAgain] = []
        for table, columns, requests in asked:
            relid = columns.relid
            if tables.get(relid) is not table or table.columns is not columns:
                continue  # removed or copied anew since the publisher was asked
            described = now.tables.get(columns.oid)
            if altered_between(first.tables.get(columns.oid), described):
                continue
            if described is not None and table.after is not None:
                try:
                    since = max(first.lsn, table.after)
                    await self._follower.take_over(columns, described, since, table.version)
                except CopyAgain as error:
                    again.append(error)
                except PubsubError as error:
                    await stop_alone(relid, error, at)
            known[relid] = requests
            if table.refresh_requests == requests:  # a REFRESH that came meanwhile needs another look
                table.refresh_requests = 0
        await self._catalog.columns_are_known(self._subid, known)
        self._first_look = now if _asked_for(tables) else None
        return again


def altered_between(first: Described | None, second: Described | None) -> bool:
    """Tell whether a table was altered, or created, between two looks.  One that was dropped needs no third look."""
    return second is not None and (first is None or not first.same_columns(second))


def _asked_for(tables: Mapping[int, Table]) -> list[tuple[Table, Columns, int]]:
    """Return the tables whose columns are asked for, with their known columns and the number of requests."""
    return [
        (table, table.columns, table.refresh_requests)
        for table in tables.values()
        if table.refresh_requests and table.synced and table.after is not None and table.columns is not None
    ]
