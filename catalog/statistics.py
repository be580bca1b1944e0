"""The daemon's statistics, for the views and status: written once a second as far as they have changed, never needed for replication.

A report about a subscription that was dropped meanwhile is ignored, since its worker may report one last time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Literal, Unpack, cast

from sqlalchemy import Table, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from catalog import from_rows, schema
from catalog.database import Database, now
from catalog.figures import (
    CopyProgress,
    Counters,
    PublisherStatus,
    Registration,
    SubscriptionStats,
    TableRows,
    TableStorage,
    Verification,
    WorkerFields,
    WorkerStats,
)
from pubsub.errors import PubsubError


class Statistics(Database):
    """The part of the catalog that holds statistics."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        # What the daemon has stored last of workers (by subscription and table) and publishers (by subscription), whose rows
        # have no other writer: most of it is the same a second later.
        self._of_workers: dict[tuple[int, int], dict[str, Any]] = {}
        self._of_publishers: dict[int, PublisherStatus] = {}

    async def put_worker_stats(self, subid: int, relid: int | None, fields: WorkerFields) -> None:
        """Store a worker's row; fields that are not given keep their values.  `relid` None: the apply worker."""
        await self.put_statistics(workers=[(subid, relid, fields)])

    async def put_copy_progress(
        self,
        subid: int,
        relid: int,
        tuples_processed: int,
        tuples_total: int | None = None,
        bytes_processed: int = 0,
        bytes_total: int | None = None,
        *,
        finished: bool = False,
    ) -> None:
        """Store a copy's progress; `tuples_total` is the publisher's estimate."""
        progress = CopyProgress(subid, relid, tuples_processed, tuples_total, bytes_processed, bytes_total, finished)
        await self.put_statistics(copies=[progress])

    async def put_statistics(
        self,
        workers: Iterable[tuple[int, int | None, WorkerFields]] = (),
        copies: Iterable[CopyProgress] = (),
        counters: Iterable[tuple[int, Counters]] = (),
        publishers: Mapping[int, PublisherStatus] | None = None,
        rows: Iterable[TableRows] = (),
        storage: Iterable[TableStorage] = (),
        verifications: Iterable[Verification] = (),
        registrations: Iterable[Registration] = (),
    ) -> None:
        """Store what has changed of the daemon's statistics in one transaction: one fsync a second instead of one per worker."""
        changed = [
            (subid, relid or 0, new)
            for subid, relid, fields in workers
            if (new := _changed(self._of_workers.get((subid, relid or 0)), fields)) is not None
        ]
        added = [(subid, counts) for subid, fields in counters if (counts := _counted(fields))]
        looked = {oid: status for oid, status in (publishers or {}).items() if self._of_publishers.get(oid) != status}
        of_tables: list[tuple[Table, CopyProgress | TableRows | TableStorage | Verification | Registration]] = [
            *((schema.copy, one) for one in copies),
            *((schema.rows, one) for one in rows),
            *((schema.storage, one) for one in storage),
            *((schema.verification, one) for one in verifications),
            *((schema.registration, one) for one in registrations),
        ]
        if not (changed or added or looked or of_tables):
            return
        async with self._storing() as connection:
            known = set((await connection.execute(select(schema.subscription.c.oid))).scalars())
            for subid, relid, fields in changed:
                default = "table synchronization" if relid else "apply"
                if subid in known:
                    await _upsert(
                        connection, schema.worker, {"subid": subid, "relid": relid}, fields, {"worker_type": default}
                    )
                    self._of_workers[subid, relid] = self._of_workers.get((subid, relid), {}) | fields
            for subid, counts in added:
                await _add(connection, subid, counts)
            for subid in self._of_publishers.keys() - known:
                del self._of_publishers[subid]
            for subid, status in looked.items():
                if subid in known:
                    await _upsert(connection, schema.publisher, {"subid": subid}, _status_values(status), {})
                    self._of_publishers[subid] = status
            for table, one in of_tables:
                if one.subid in known:
                    values = {name: getattr(one, name) for name in type(one).__slots__}
                    key = {name: values.pop(name) for name in ("subid", "relid")}
                    await _upsert(connection, table, key, values, {})

    async def clear_worker_stats(self, subid: int | None = None, relid: int | None = None) -> None:
        """Remove the row of a worker that ended.

        Without a subscription, remove every worker's row and the publishers' statuses (the daemon starts or stops).
        """
        w = schema.worker
        statement = delete(w)
        if subid is not None:
            statement = statement.where(w.c.subid == subid, w.c.relid == (relid or 0))
        async with self._storing() as connection:
            await connection.execute(statement)
            if subid is None:
                await connection.execute(delete(schema.publisher))
                self._of_workers.clear()
                self._of_publishers.clear()
            else:
                self._of_workers.pop((subid, relid or 0), None)

    async def clear_worker_stats_of(self, subids: Collection[int]) -> None:
        """Remove the rows of all workers of these subscriptions, and their publishers' statuses."""
        async with self._storing() as connection:
            for table in (schema.worker, schema.publisher):
                await connection.execute(delete(table).where(table.c.subid.in_(subids)))
            self._of_workers.clear()
            self._of_publishers.clear()

    @asynccontextmanager
    async def _storing(self) -> AsyncIterator[AsyncConnection]:
        """Open a write transaction in which what was stored is noted as well; forget all of that if it fails."""
        try:
            async with self._write(bump=False) as connection:
                yield connection
        except BaseException:
            self._of_workers.clear()
            self._of_publishers.clear()
            raise

    async def add_counters(self, subid: int, **added: Unpack[Counters]) -> None:
        """Add to the counters of a subscription."""
        async with self._write(bump=False) as connection:
            await _add(connection, subid, added)

    async def set_subscription_error(
        self, subid: int, error: PubsubError, *, count: Literal["apply", "sync", "sync_seq"] | None = None
    ) -> None:
        """Store a worker's failure for status and the views; `count` adds one to the errors of that kind."""
        s = schema.statistics
        values: dict[str, Any] = {
            "error": error.message,
            "error_detail": error.detail,
            "error_hint": error.hint,
            "error_sqlstate": error.sqlstate,
            "error_time": now(),
        }
        if count is not None:
            column = s.c[f"{count}_error_count"]
            values[column.name] = column + 1
        async with self._write(bump=False) as connection:
            await connection.execute(update(s).where(s.c.subid == subid).values(**values))

    async def clear_subscription_error(self, subid: int) -> None:
        """Clear the subscription's failure and those of its tables that have not stopped; the counters stay."""
        s, r, i = schema.statistics, schema.relation, schema.incident
        names = ("error", "error_detail", "error_hint", "error_sqlstate", "error_time")
        stopped = select(i.c.relid).where(i.c.subid == subid, i.c.stopped)
        async with self._write(bump=False) as connection:
            await connection.execute(update(s).where(s.c.subid == subid).values(dict.fromkeys(names)))
            await connection.execute(
                update(r)
                .where(r.c.subid == subid, r.c.error.is_not(None), r.c.relid.not_in(stopped))
                .values(error=None, error_hint=None)
            )

    async def reset_statistics(self, subid: int | None = None) -> None:
        """Set the counters of one or all subscriptions to 0 (pgstatfuncs.c: pg_stat_reset_subscription_stats)."""
        s = schema.statistics
        statement = update(s).values(stats_reset=now(), **dict.fromkeys(schema.COUNTERS, 0))
        async with self._write(bump=False) as connection:
            await connection.execute(statement if subid is None else statement.where(s.c.subid == subid))

    async def worker_stats(self) -> list[WorkerStats]:
        """Return every running worker."""
        async with self._read() as connection:
            return await read_workers(connection)

    async def copy_progress(self) -> list[CopyProgress]:
        """Return the progress of every running or past copy."""
        async with self._read() as connection:
            return await read_copies(connection)

    async def subscription_stats(self) -> list[SubscriptionStats]:
        """Return the counters and the last failure of every subscription."""
        async with self._read() as connection:
            return await read_statistics(connection)


async def read_publishers(connection: AsyncConnection) -> dict[int, PublisherStatus]:
    """Return the publishers' statuses by subscription's oid."""
    found = await connection.execute(select(schema.publisher))
    return dict(from_rows.publisher(row) for row in found.mappings())


def _status_values(status: PublisherStatus) -> dict[str, Any]:
    values = {name: getattr(status, name) for name in PublisherStatus.__slots__}
    values["warnings"] = [asdict(one) for one in status.warnings]
    values["waits"] = {str(relid): asdict(one) for relid, one in status.waits.items()}
    return values


async def read_workers(connection: AsyncConnection) -> list[WorkerStats]:
    w = schema.worker
    found = await connection.execute(select(w).order_by(w.c.subid, w.c.relid))
    return [from_rows.worker(row) for row in found.mappings()]


async def read_copies(connection: AsyncConnection) -> list[CopyProgress]:
    c = schema.copy
    found = await connection.execute(select(c).order_by(c.c.subid, c.c.relid))
    return [from_rows.copy(row) for row in found.mappings()]


async def read_rows(connection: AsyncConnection) -> tuple[TableRows, ...]:
    found = await connection.execute(select(schema.rows))
    return tuple(from_rows.table_rows(row) for row in found.mappings())


async def read_storage(connection: AsyncConnection) -> tuple[TableStorage, ...]:
    s = schema.storage
    found = await connection.execute(select(s).order_by(s.c.subid, s.c.relid))
    return tuple(from_rows.table_storage(row) for row in found.mappings())


async def read_registrations(connection: AsyncConnection) -> tuple[Registration, ...]:
    r = schema.registration
    found = await connection.execute(select(r).order_by(r.c.subid, r.c.relid))
    return tuple(from_rows.registration(row) for row in found.mappings())


async def read_verifications(connection: AsyncConnection) -> tuple[Verification, ...]:
    v = schema.verification
    found = await connection.execute(select(v).order_by(v.c.subid, v.c.relid))
    return tuple(from_rows.verification(row) for row in found.mappings())


async def read_statistics(connection: AsyncConnection) -> list[SubscriptionStats]:
    s = schema.statistics
    found = await connection.execute(select(s).order_by(s.c.subid))
    return [from_rows.statistics(row) for row in found.mappings()]


def _changed(before: Mapping[str, Any] | None, fields: WorkerFields) -> dict[str, Any] | None:
    """Return what of a worker's fields is not stored yet; None if nothing is to be written: `before` None has no row yet."""
    if before is None:
        return dict(fields)
    return {name: value for name, value in fields.items() if name not in before or before[name] != value} or None


def _counted(added: Counters) -> Counters:
    """Return the counters that count."""
    return cast(Counters, {name: value for name, value in added.items() if value})


async def _upsert(
    connection: AsyncConnection, table: Table, key: dict[str, int], values: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Update a row or insert it.  Each row has one writer, so this needs no dialect's own statement."""
    here = [table.c[name] == value for name, value in key.items()]
    found = (await connection.execute(select(table.c.subid).where(*here))).first()
    if found is None:
        await connection.execute(insert(table).values(**key, **defaults | values))
    elif values:
        await connection.execute(update(table).where(*here).values(**values))


async def _add(connection: AsyncConnection, subid: int, added: Counters) -> None:
    s = schema.statistics
    values = {name: s.c[name] + value for name, value in added.items()}
    if values:
        await connection.execute(update(s).where(s.c.subid == subid).values(values))
