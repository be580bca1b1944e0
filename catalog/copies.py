"""How the tables' copies are made, so that one that was cut short goes on where it was."""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, insert, select, update

from catalog import schema
from catalog.database import Database
from catalog.records import CopyPlan
from pubsub.protocol.lsn import Lsn

_P = schema.copy_plan


class Copies(Database):
    """The part of the catalog that holds copies under way, and the last ones."""

    async def copy_plan(self, subid: int, relid: int) -> CopyPlan | None:
        """The plan of the table's last copy; None before the first, and of a table that joined without one."""
        async with self._read() as connection:
            row = (await connection.execute(select(_P).where(_here(subid, relid)))).one_or_none()
        if row is None:
            return None
        return CopyPlan(
            generation=row.generation,
            start=row.start_lsn,
            until=row.until_lsn,
            version=row.version,
            edges=tuple(row.edges),
            snapshot=row.snapshot,
            fingerprint=row.fingerprint,
            attempts=tuple(row.attempts),
        )

    async def put_copy_plan(self, subid: int, relid: int, plan: CopyPlan) -> None:
        """Store the plan in place of the one before."""
        async with self._write(bump=False) as connection:
            await connection.execute(delete(_P).where(_here(subid, relid)))
            await connection.execute(
                insert(_P).values(
                    subid=subid,
                    relid=relid,
                    generation=plan.generation,
                    start_lsn=plan.start,
                    until_lsn=plan.until,
                    version=plan.version,
                    edges=list(plan.edges),
                    snapshot=plan.snapshot,
                    fingerprint=plan.fingerprint,
                    attempts=list(plan.attempts),
                )
            )

    async def lengthen_window(self, subid: int, relid: int, until: Lsn) -> None:
        """The stream must be followed at least up to `until` for the copy to be whole."""
        async with self._write(bump=False) as connection:
            await connection.execute(
                update(_P).where(_here(subid, relid), _P.c.until_lsn < until).values(until_lsn=until)
            )


def _here(subid: int, relid: int) -> ColumnElement[bool]:
    return (_P.c.subid == subid) & (_P.c.relid == relid)
