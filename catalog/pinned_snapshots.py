"""Pinned snapshots: which versions of which Delta tables stay readable.

The catalog lists them; the tables themselves keep the versions (pubsub.delta.pins).
"""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.database import Database
from catalog.records import PinnedSnapshot
from pubsub.errors import DuplicateObject, UndefinedObject

_T = schema.pinned_snapshot


class PinnedSnapshots(Database):
    """The part of the catalog that holds pinned snapshots."""

    async def add_pinned_snapshot(self, new: PinnedSnapshot) -> None:
        """Store a pinned snapshot.  Raises DuplicateObject for a name that is taken."""
        values = asdict(new) | {"tables": [asdict(table) for table in new.tables]}
        try:
            async with self._write(bump=False) as connection:
                await connection.execute(insert(_T).values(values))
        except IntegrityError:
            raise DuplicateObject(f'pinned snapshot "{new.name}" already exists') from None

    async def complete_pinned_snapshot(self, name: str) -> None:
        """Note that its tables keep the versions.  Raises UndefinedObject if it was dropped meanwhile."""
        async with self._write(bump=False) as connection:
            done = await connection.execute(update(_T).where(_T.c.name == name).values(complete=True))
        if not done.rowcount:
            raise undefined(name)

    async def drop_pinned_snapshot(self, name: str) -> None:
        """Remove a pinned snapshot; do nothing if there is none."""
        async with self._write(bump=False) as connection:
            await connection.execute(delete(_T).where(_T.c.name == name))


async def read_pinned_snapshots(connection: AsyncConnection) -> list[PinnedSnapshot]:
    """Return all pinned snapshots, the oldest first."""
    found = await connection.execute(select(_T).order_by(_T.c.created, _T.c.name))
    return [from_rows.pinned_snapshot(row) for row in found.mappings()]


def undefined(name: str) -> UndefinedObject:
    """Return the error for a name that no pinned snapshot has."""
    return UndefinedObject(f'pinned snapshot "{name}" does not exist')
