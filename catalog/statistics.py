"""The daemon's statistics, for the views and status: written once a second, never needed for replication.

A report about a subscription that was dropped meanwhile is ignored, since its worker may report one last time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, Unpack

from sqlalchemy import Table, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog import from_rows, schema
from catalog.database import Database, now
from catalog.records import (
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
        """Store all of the daemon's statistics in one transaction: one fsync a second instead of one per worker."""
        workers, counters = list(workers), list(counters)
        of_tables: list[tuple[Table, CopyProgress | TableRows | TableStorage | Verification | Registration]] = [
            *((schema.copy, one) for one in copies),
            *((schema.rows, one) for one in rows),
            *((schema.storage, one) for one in storage),
            *((schema.verification, one) for one in verifications),
            *((schema.registration, one) for one in registrations),
        ]
        if not (workers or counters or publishers or of_tables):
            return
        async with self._write(bump=False) as connection:
            known = set((await connection.execute(select(schema.subscription.c.oid))).scalars())
            for subid, relid, fields in workers:
                default = "apply" if relid is None else "table synchronization"
                if subid in known:
                    key = {"subid": subid, "relid": relid or 0}
                    await _upsert(connection, schema.worker, key, dict(fields), {"worker_type": default})
            for subid, added in counters:
                await _add(connection, subid, added)
            for subid, status in (publishers or {}).items():
                if subid in known:
                    await _upsert(connection, schema.publisher, {"subid": subid}, _status_values(status), {})
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
        async with self._write(bump=False) as connection:
            await connection.execute(statement)
            if subid is None:
                await connection.execute(delete(schema.publisher))

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
