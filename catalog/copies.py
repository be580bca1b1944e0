"""The plans of tables' copies, from which a copy resumes after an interruption."""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, insert, select, update

from catalog import schema
from catalog.database import Database
from catalog.records import CopyPlan
from pubsub.protocol.lsn import Lsn

_P = schema.copy_plan


class Copies(Database):
    """The part of the catalog that holds the plan of each table's current or last copy."""

    async def copy_plan(self, subid: int, relid: int) -> CopyPlan | None:
        """Return the plan of the table's last copy, or None if it never had one."""
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
        """Store the plan, replacing the previous one."""
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
        """Raise the plan's `until`, if it is lower: following the stream up to there completes the copy."""
        async with self._write(bump=False) as connection:
            await connection.execute(
                update(_P).where(_here(subid, relid), _P.c.until_lsn < until).values(until_lsn=until)
            )


def _here(subid: int, relid: int) -> ColumnElement[bool]:
    return (_P.c.subid == subid) & (_P.c.relid == relid)
