"""Prepared transactions without an outcome, for pg_prepared_xacts.

The transactions themselves are files (apply.twophase), which are written before the catalog lists them.  The list
is also what tells a transaction whose file was lost from one that never had anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.database import Database
from catalog.records import PreparedXact

_T = schema.prepared


class Prepared(Database):
    """The part of the catalog that lists prepared transactions."""

    async def prepared(self, subid: int) -> list[PreparedXact]:
        """Return the subscription's prepared transactions."""
        async with self._read() as connection:
            found = await connection.execute(select(_T).where(_T.c.subid == subid))
            return [from_rows.prepared(row)[1] for row in found.mappings()]

    async def set_prepared(self, subid: int, xacts: Sequence[PreparedXact]) -> None:
        """Replace the subscription's prepared transactions by these."""
        async with self._write(bump=False) as connection:
            await connection.execute(delete(_T).where(_T.c.subid == subid))
            for xact in xacts:
                await connection.execute(insert(_T).values(subid=subid, **asdict(xact)))


async def read_prepared(connection: AsyncConnection) -> list[tuple[int, PreparedXact]]:
    """Return all prepared transactions, each with its subscription's oid, by subscription and time of PREPARE."""
    found = await connection.execute(select(_T).order_by(_T.c.subid, _T.c.prepared))
    return [from_rows.prepared(row) for row in found.mappings()]
