"""Back up a catalog into one file, and restore it from there, whether it is in a SQLite file or on a PostgreSQL server.

    file      one line of JSON (_Header), then a SQLite database with the catalog's tables
    backup    one read transaction, so the rows are of one moment; a daemon may run meanwhile
    restore   one write transaction replaces every row: after a crash the catalog is the old one or the new one

A restored catalog stands where the backup stood.  What was reported to a publisher since cannot be received again, so a
subscription that has gone on is refused by its slot (apply/publisher_identity.py), and RESYNC TABLE brings it back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import MetaData, Table, create_engine, delete, insert, select, text
from sqlalchemy.engine import URL

from catalog import schema
from catalog.database import now, present
from catalog.from_rows import SCHEMA_VERSION
from catalog.home_lock import DaemonLock
from catalog.store import Catalog
from pubsub.concurrency import finish
from pubsub.errors import DataCorrupted, NoCatalog, ObjectInUse, PubsubError
from pubsub.protocol.lsn import INVALID_LSN
from pubsub.reorderbuffer import files

_KIND: Final = "pubsub catalog backup"
_FORMAT: Final = 1
_LONGEST_HEADER: Final = 4096

_Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup's first line says.  `bytes` and `sha256` are those of the database after it."""

    node_id: str
    taken: str
    schema_version: int
    change_counter: int
    subscriptions: int
    bytes: int
    sha256: str
    kind: str = _KIND
    format: int = _FORMAT


async def back_up(catalog: Catalog, path: Path) -> Backup:
    """Write a new file, readable by this user only, and durable.  Raises PubsubError, also if the file exists.

    The catalog may be an older version's (catalog.upgrade): its backup is, too, for that version and for later ones.  If it
    is cancelled there is no file.
    """
    async with catalog._read() as connection:
        there = _tables(await connection.run_sync(present))
        found: _Rows = {
            table.name: [dict(row) for row in (await connection.execute(select(table))).mappings()]
            for table in there.sorted_tables
        }
    writing = asyncio.create_task(asyncio.to_thread(_write, there, found, path))
    try:
        return await finish(writing)
    except asyncio.CancelledError:
        if writing.exception() is None:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        raise
    except OSError as error:
        raise PubsubError(f'could not write backup "{path}": {error.strerror}', sqlstate="58030") from error


async def restore(home: Path, location: str | Path, timeout: float, path: Path) -> Backup:
    """Replace the catalog at `location`, of the node at `home`, by a backup; make it if there is none.

    Raises ObjectInUse if a daemon runs, or the catalog is another node's or newer than the backup; DataCorrupted for a
    file that is damaged; other PubsubErrors.
    """
    backup, rows = await asyncio.to_thread(_read, path)
    with DaemonLock.acquire(home):
        try:
            async with await Catalog.open(location, timeout, make=False) as present:
                await _check_replaceable(present, backup, rows)
        except NoCatalog:
            pass
        async with await Catalog.open(location, timeout) as catalog:
            await catalog.hold(home)
            try:
                # Looked at again: a daemon of another home may have had the catalog until now.
                await _check_replaceable(catalog, backup, rows)
                await _replace(catalog, rows)
            finally:
                await catalog.let_go()
    return backup


async def _check_replaceable(catalog: Catalog, backup: Backup, rows: _Rows) -> None:
    state = await catalog.state()
    shown = f'catalog "{catalog.url}"'
    hint = "If the backup is to go before it, move that catalog away first."
    if not state.subscriptions and not state.pinned_snapshots:
        return
    if state.node.node_id != backup.node_id:
        raise ObjectInUse(f"{shown} belongs to another node than the backup", hint=hint)
    theirs = {
        (row["subid"], row["relid"] or None): row["remote_lsn"] or INVALID_LSN for row in rows[schema.origin.name]
    }
    ahead = [one for one in state.origins if one.remote_lsn > theirs.get((one.subid, one.relid), INVALID_LSN)]
    counter = await catalog.change_counter()
    if ahead or counter > backup.change_counter:
        detail = f"Its change counter is {counter}, the backup's is {backup.change_counter}."
        if ahead:
            first = ahead[0]
            at = theirs.get((first.subid, first.relid), INVALID_LSN)
            detail = f"A subscription has reached {first.remote_lsn} there, and {at} in the backup of {backup.taken}."
        raise ObjectInUse(f"{shown} is newer than the backup", detail=detail, hint=hint)


async def _replace(catalog: Catalog, rows: _Rows) -> None:
    async with catalog._write(bump=False) as connection:
        epoch = (await connection.execute(select(schema.node.c.daemon_epoch))).scalar_one()
        (node,) = rows[schema.node.name]
        rows |= {schema.daemon.name: [], schema.lease.name: []}
        # A daemon that was cut off from this catalog must not write to it when it comes back.
        epochs = [one for one in (epoch, node["daemon_epoch"]) if one is not None]
        node |= {"schema_version": SCHEMA_VERSION, "daemon_epoch": max(epochs) + 1 if epochs else None}
        for table in reversed(schema.metadata.sorted_tables):
            await connection.execute(delete(table))
        for table in schema.metadata.sorted_tables:
            if rows[table.name]:
                await connection.execute(insert(table), rows[table.name])
        if connection.dialect.name == "postgresql":
            for table in (schema.command, schema.request):
                last = f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), coalesce(max(id), 0) + 1, false)"
                await connection.execute(text(f"{last} FROM {table.name}"))


def _tables(have: Mapping[str, frozenset[str]]) -> MetaData:
    """Return the tables and columns of an older catalog, as a backup of it must have them: all of them for one of today."""
    found = MetaData()
    for table in schema.metadata.sorted_tables:
        if table.name in have:
            Table(table.name, found, *(one._copy() for one in table.columns if one.name in have[table.name]))
    return found


def _write(tables: MetaData, rows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Backup:
    (node,) = rows[schema.node.name]
    with tempfile.TemporaryDirectory(prefix=".pubsub-backup-", dir=path.parent) as directory:
        database = Path(directory) / "catalog.db"
        engine = create_engine(URL.create("sqlite", database=str(database)), hide_parameters=True)
        try:
            with engine.begin() as connection:
                tables.create_all(connection)
                for table in tables.sorted_tables:
                    if rows[table.name]:
                        connection.execute(insert(table), list(rows[table.name]))
        finally:
            engine.dispose()
        body = database.read_bytes()
        backup = Backup(
            node_id=node["node_id"],
            taken=now().isoformat(timespec="seconds"),
            schema_version=node["schema_version"],
            change_counter=node["change_counter"],
            subscriptions=len(rows[schema.subscription.name]),
            bytes=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
        )
        whole = Path(directory) / "backup"
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(json.dumps(asdict(backup)).encode() + b"\n")
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.link(whole, path)  # unlike a rename, it replaces nothing
    files.sync_directory(path.parent)
    return backup


def _read(path: Path) -> tuple[Backup, _Rows]:
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_HEADER)
            body = file.read()
    except OSError as error:
        raise PubsubError(f'could not read backup "{path}": {error.strerror}', sqlstate="58030") from error
    try:
        values = json.loads(first)
        if values["kind"] != _KIND:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise DataCorrupted(f'"{path}" is not a backup of a catalog') from None
    if values["format"] != _FORMAT or values["schema_version"] > SCHEMA_VERSION:
        raise DataCorrupted(
            f'backup "{path}" has version {values["format"]}.{values["schema_version"]}, this program reads up to '
            f"{_FORMAT}.{SCHEMA_VERSION}",
            hint="Use the version of this program that made it, or a later one.",
        )
    backup = Backup(**values)
    if len(body) != backup.bytes or hashlib.sha256(body).hexdigest() != backup.sha256:
        raise DataCorrupted(
            f'backup "{path}" is damaged',
            detail=f"It has {len(body)} of {backup.bytes} bytes, and their SHA-256 is not the one that it names.",
        )
    return backup, _rows(body)


def _rows(body: bytes) -> _Rows:
    """Return the tables' rows, with the columns that an earlier version's catalog lacks."""
    with tempfile.TemporaryDirectory(prefix="pubsub-restore-") as directory:
        database = Path(directory) / "catalog.db"
        database.touch(0o600)
        database.write_bytes(body)

        async def read() -> _Rows:
            # Opening it upgrades it.
            async with await Catalog.open(database) as catalog, catalog._read() as connection:
                return {
                    table.name: [dict(row) for row in (await connection.execute(select(table))).mappings()]
                    for table in schema.metadata.sorted_tables
                }

        return asyncio.run(read())
