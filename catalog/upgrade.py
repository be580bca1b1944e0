"""Bring an older version's catalog to this one, by command: with a backup, and while no daemon runs.

Opening a catalog does the same without either.  Versions only add tables and columns, so nothing is lost in it; but the
older program refuses the catalog from then on, and the backup is what it can go back to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from catalog import backup, schema
from catalog.database import connect, failures, prepare, present, typed
from catalog.from_rows import SCHEMA_VERSION
from catalog.home_lock import DaemonLock
from catalog.store import Catalog
from pubsub.concurrency import uncancelled
from pubsub.errors import ObjectInUse


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What a catalog lacks.  `place`: its URL, without a password; `backup`: the one that was made, None for none."""

    place: str
    version: int
    lacks: tuple[str, ...]
    backup: Path | None = None

    @property
    def is_needed(self) -> bool:
        return self.version < SCHEMA_VERSION


async def look(location: str | Path, timeout: float) -> Upgrade:
    """Tell what an upgrade would add; changes nothing.

    Raises NoCatalog, DataCorrupted for a newer version's catalog, and other PubsubErrors.
    """
    async with await _opened(location, timeout) as catalog:
        return await _look(catalog)


async def upgrade(home: Path, location: str | Path, timeout: float, file: Path | None) -> Upgrade:
    """Upgrade the catalog of the node at `home`, after a backup: in `file`, or by the version's name in `home`.

    Does nothing if it has this program's version.  Raises ObjectInUse if a daemon runs, and as `look` does.
    """
    async with await _opened(location, timeout) as catalog:
        found = await _look(catalog)
        if not found.is_needed:
            return found
        with DaemonLock.acquire(home):
            if await catalog.has_daemon():
                raise ObjectInUse(
                    f'a daemon is running on catalog "{catalog.url}"',
                    hint="Stop it first: its program is older than this one, and would not read the catalog again.",
                )
            path = file or home / f"catalog.v{found.version}.backup"
            await backup.back_up(catalog, path)
            try:
                await uncancelled(prepare)(catalog._engine)
            except failures(catalog._engine) as error:
                raise typed(error) from error
        return Upgrade(found.place, found.version, found.lacks, path)


async def _opened(location: str | Path, timeout: float) -> Catalog:
    catalog = Catalog(await connect(location, timeout, make=False, upgrade=False))
    catalog.timeout = timeout
    return catalog


async def _look(catalog: Catalog) -> Upgrade:
    async with catalog._read() as connection:
        version = (await connection.execute(select(schema.node.c.schema_version))).scalar_one()
        have = await connection.run_sync(present)
    lacks: list[str] = []
    for table in schema.metadata.sorted_tables:
        if table.name not in have:
            lacks.append(f"table {table.name}")
        else:
            lacks += [f"column {table.name}.{one.name}" for one in table.columns if one.name not in have[table.name]]
    return Upgrade(catalog.url, version, tuple(lacks))
