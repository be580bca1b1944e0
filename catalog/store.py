"""The catalog: the durable state that commands and the daemon share.

Every method is one short transaction.  To wait for a change, poll `change_counter`, one row by its key: it rises with
every change of subscriptions, tables, their states, requests and answers, but not with origins and statistics.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Self

from sqlalchemy import select, update

from catalog import from_rows, schema
from catalog.commands import Commands
from catalog.copies import Copies
from catalog.database import TIMEOUT, connect
from catalog.leases import Leases, read_daemons, read_leases
from catalog.pauses import Pauses
from catalog.pinned_snapshots import PinnedSnapshots, read_pinned_snapshots
from catalog.prepared import Prepared, read_prepared
from catalog.records import NodeRow, State
from catalog.relations import Relations, read_relations
from catalog.requests import Requests
from catalog.sequences import Sequences, read_sequences
from catalog.statistics import (
    Statistics,
    read_copies,
    read_publishers,
    read_registrations,
    read_rows,
    read_statistics,
    read_storage,
    read_verifications,
    read_workers,
)
from catalog.subscriptions import read_origins, read_subscriptions
from pubsub.memory import Memory

_T = schema.node


class Catalog(Leases, Pauses, Relations, Sequences, Copies, Statistics, Prepared, PinnedSnapshots, Requests, Commands):
    """A node's catalog, for use from the event loop that opened it."""

    @classmethod
    async def open(cls, location: str | Path, timeout: float = TIMEOUT, *, make: bool = True) -> Self:
        """Open the catalog in a SQLite file or at a URL, and create it if it is missing.

        The file gets mode 0600.  A server that takes longer than `timeout` seconds for a transaction is given up; 0:
        never.  Raises NoCatalog if the catalog is missing and `make` is false, and other PubsubErrors.
        """
        catalog = cls(await connect(location, timeout, make=make))
        catalog.timeout = timeout
        return catalog

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def node(self) -> NodeRow:
        """Return the node's row."""
        async with self._read() as connection:
            row = (await connection.execute(select(_T.c.node_id, _T.c.created))).one()
            return NodeRow(row.node_id, row.created)

    async def change_counter(self) -> int:
        """Return the change counter, which rises with every change that someone may wait for."""
        async with self._read() as connection:
            return int((await connection.execute(select(_T.c.change_counter))).scalar_one())

    async def put_memory(self, memory: Memory) -> None:
        """Store what this process's daemon takes of the memory, as it has measured it."""
        d = schema.daemon.c
        async with self._write(bump=False) as connection:
            await connection.execute(
                update(schema.daemon).where(d.id == (self._epoch or 0)).values(memory=asdict(memory))
            )

    async def state(self) -> State:
        """Return the whole catalog as of one moment, for the views and status."""
        async with self._read() as connection:
            row = (await connection.execute(select(_T))).mappings().one()
            return State(
                node=from_rows.node(row),
                daemons=tuple(await read_daemons(connection)),
                subscriptions=tuple(await read_subscriptions(connection)),
                relations=tuple(await read_relations(connection)),
                origins=tuple(await read_origins(connection)),
                workers=tuple(await read_workers(connection)),
                copies=tuple(await read_copies(connection)),
                statistics=tuple(await read_statistics(connection)),
                prepared=tuple(await read_prepared(connection)),
                publishers=await read_publishers(connection),
                rows=await read_rows(connection),
                storage=await read_storage(connection),
                verifications=await read_verifications(connection),
                pinned_snapshots=tuple(await read_pinned_snapshots(connection)),
                sequences=await read_sequences(connection),
                registrations=await read_registrations(connection),
                leases=tuple(await read_leases(connection)),
            )
