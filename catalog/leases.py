"""What each of the daemons that share a catalog does: leases of subscriptions, and of the work that is the node's.

    pubsub_daemon   one row for each daemon.  The key of its lock (catalog_lock) is made of the row's id
    pubsub_lease    one row for each unit that a daemon has

Every write of a daemon requires that its row is there, so one without a row stores nothing, and commits nothing.  A row goes
when its daemon ends in order, or when another finds its lock free (`expel`).  The leases go with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.catalog_lock import MEMBER_KEY, Holder
from catalog.records import OF_NODE, DaemonRow, Lease, unit_of

#: Which daemons hold their locks.
_ALIVE: Final = text("""
SELECT objid::int8 & 2147483647 FROM pg_catalog.pg_locks
 WHERE locktype = 'advisory' AND classid = 'pubsub_node'::regclass::oid AND objid::int8 >= 2147483648 AND objsubid = 1
       AND granted AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
""")
_IS_FREE: Final = f"SELECT pg_catalog.pg_try_advisory_xact_lock({MEMBER_KEY})"

_D = schema.daemon
_L = schema.lease


@dataclass(frozen=True, slots=True)
class Fleet:
    """The daemons that share a catalog, and what is to be divided among them.

    `alive`: the ids of those whose locks are held, and `me`.  `units`: by subscription's oid; `weights`: how many each has.
    `homes`: the units with prepared transactions, which are files of a daemon's home: its host, and the directory there.
    """

    me: int
    daemons: tuple[DaemonRow, ...]
    alive: frozenset[int]
    leases: tuple[Lease, ...]
    units: Mapping[int, int]
    weights: Mapping[int, int]
    homes: Mapping[int, tuple[str | None, str | None]]

    @property
    def ready(self) -> frozenset[int]:
        """The ids of those that can go on with a subscription at once, since their JVM runs; if none can, of all that live."""
        started = {one.id for one in self.daemons if one.memory is not None and one.memory.jvm is not None}
        return frozenset(started & self.alive) or self.alive


class Leases(Holder):
    """The part of the catalog by which daemons divide its subscriptions."""

    async def members(self) -> tuple[tuple[DaemonRow, ...], frozenset[int]]:
        """Return the daemons that share the catalog, of which this process's is one, and the ids of those that live."""
        async with self._read() as connection:
            return await self._members(connection)

    async def _members(self, connection: AsyncConnection) -> tuple[tuple[DaemonRow, ...], frozenset[int]]:
        assert self._epoch is not None
        daemons = tuple(await read_daemons(connection))
        return daemons, frozenset((await connection.execute(_ALIVE)).scalars()) | {self._epoch}

    async def fleet(self) -> Fleet:
        """Return the same, with the daemons' leases and what there is to be divided."""
        s, p = schema.subscription.c, schema.prepared.c
        assert self._epoch is not None
        async with self._read() as connection:
            weights = {OF_NODE: 0}
            units: dict[int, int] = {}
            for oid, source in (await connection.execute(select(s.oid, s.options["source"].as_string()))).all():
                unit = units[oid] = unit_of(oid, source)
                weights[unit] = weights.get(unit, 0) + 1
            homes = {
                units[row.subid]: (row.host, row.directory)
                for row in (await connection.execute(select(p.subid, p.host, p.directory))).all()
            }
            daemons, alive = await self._members(connection)
            return Fleet(
                me=self._epoch,
                daemons=daemons,
                alive=alive,
                leases=tuple(await read_leases(connection)),
                units=units,
                weights=weights,
                homes=homes,
            )

    async def lease(self, claimed: Collection[int], leaving: Collection[int]) -> None:
        """Take units that no daemon has, unless another is quicker, and begin to leave some of this daemon's."""
        async with self._write(bump=True) as connection:
            if claimed:
                rows = [{"unit": unit, "daemon": self._epoch, "leaving": False} for unit in claimed]
                await connection.execute(insert(_L).values(rows).on_conflict_do_nothing())
            if leaving:
                ours = (_L.c.daemon == self._epoch) & _L.c.unit.in_(leaving)
                await connection.execute(update(_L).where(ours).values(leaving=True))

    async def release(self, units: Collection[int], *, left: bool) -> None:
        """Give units up that this daemon has left; not `left`: keep them after all."""
        ours = (_L.c.daemon == self._epoch) & _L.c.unit.in_(units) & _L.c.leaving
        async with self._write(bump=True) as connection:
            await connection.execute(delete(_L).where(ours) if left else update(_L).where(ours).values(leaving=False))

    async def expel(self, daemon: int) -> bool:
        """Remove a daemon whose lock is free, with its leases: it stores nothing any more; return whether it was removed."""
        async with self._write(bump=True) as connection:
            # Held until this transaction ends: one that comes back finds that its row is gone.
            if not (await connection.exec_driver_sql(_IS_FREE.format(daemon))).scalar_one():
                return False
            return (await connection.execute(delete(_D).where(_D.c.id == daemon))).rowcount == 1


async def read_daemons(connection: AsyncConnection) -> list[DaemonRow]:
    """Return the daemons that have not ended in order."""
    found = await connection.execute(select(_D).order_by(_D.c.id))
    return [from_rows.daemon(row) for row in found.mappings()]


async def read_leases(connection: AsyncConnection) -> list[Lease]:
    """Return all leases, by unit."""
    found = await connection.execute(select(_L).order_by(_L.c.unit))
    return [from_rows.lease(row) for row in found.mappings()]
