"""The commands that were executed, for the daemon's log.

A command may run in a process of its own, whose output goes to its user.  After it has taken effect it stores its text
here, and the daemon takes the text to log it.  While no daemon runs, the latest 100 are kept.
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
    """The part of the catalog that holds the commands not logged yet."""

    async def note_command(self, tag: str, statement: str) -> None:
        """Store a command that was carried out.  `statement` must hold no password."""
        async with self._write(bump=True) as connection:
            done = await connection.execute(insert(_T).values(tag=tag, statement=statement, executed=now()))
            key = done.inserted_primary_key
            assert key is not None
            await connection.execute(delete(_T).where(_T.c.id <= int(key[0]) - _KEPT))

    async def take_commands(self) -> list[Command]:
        """Remove and return the stored commands, oldest first."""
        async with self._read() as connection:
            rows = await connection.execute(select(_T).order_by(_T.c.id))
            found = [Command(row.id, row.tag, row.statement, row.executed) for row in rows]
        if found:
            async with self._write(bump=False) as connection:
                await connection.execute(delete(_T).where(_T.c.id <= found[-1].id))
        return found
