"""What commands have done, for the daemon's log: a command runs in a process of its own, whose output is its user's.

A command leaves its text here once it has had its effect, and the daemon takes it.  While no daemon runs the latest stay.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import delete, insert, select

from catalog import schema
from catalog.database import Database, now
from catalog.records import Command

_KEPT: Final = 100
_T = schema.command


class Commands(Database):
    """The part of the catalog that holds commands that nobody has logged yet."""

    async def note_command(self, tag: str, statement: str) -> None:
        """A command was carried out.  `statement` holds no password."""
        async with self._write(bump=True) as connection:
            done = await connection.execute(insert(_T).values(tag=tag, statement=statement, executed=now()))
            key = done.inserted_primary_key
            assert key is not None
            await connection.execute(delete(_T).where(_T.c.id <= int(key[0]) - _KEPT))

    async def take_commands(self) -> list[Command]:
        """The commands that were not taken yet, oldest first."""
        async with self._read() as connection:
            rows = await connection.execute(select(_T).order_by(_T.c.id))
            found = [Command(row.id, row.tag, row.statement, row.executed) for row in rows]
        if found:
            async with self._write(bump=False) as connection:
                await connection.execute(delete(_T).where(_T.c.id <= found[-1].id))
        return found
