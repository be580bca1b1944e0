"""Pin snapshots, so that their versions stay readable, and drop them.

    the catalog lists the snapshot ─► each table's properties hold its files and its log (pubsub.delta.pins)
    ─► every version is looked at once more, file by file ─► the catalog's row is complete

Only then is the look final: before the commits, a VACUUM could have removed what it has just seen.  A command that is
interrupted in between takes everything back; one that is killed leaves a row that is not complete, which can be dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from catalog.database import now
from catalog.pinned_snapshots import undefined
from catalog.records import PinnedSnapshot, PinnedTable
from catalog.store import Catalog
from pubsub.delta.log import version_files
from pubsub.errors import PubsubError
from pubsub.node.snapshot import Snapshot

#: The longest name in bytes, as PostgreSQL's names (NAMEDATALEN - 1).
_LONGEST: Final = 63

#: Carries out the request "pin" or "release" for the pin of that name in the tables at those paths.
Carry = Callable[[str, str, Sequence[str]], Awaitable[None]]


def require_name(name: str) -> None:
    """Raise PubsubError for a name that no snapshot can have (slot.c: ReplicationSlotValidateName)."""
    if not name:
        raise PubsubError('pinned snapshot name "" is too short', sqlstate="42602")
    if len(name.encode()) > _LONGEST:
        raise PubsubError(f'pinned snapshot name "{name}" is too long', sqlstate="42622")


async def pin(catalog: Catalog, carry: Carry, snapshot: Snapshot, name: str) -> None:
    """Keep the versions of `snapshot` readable under `name`, until `drop`.

    Raises DuplicateObject for a name that is taken; UndefinedFile if a version cannot be read any more, and what `carry`
    raises: then nothing is pinned, nor if it is cancelled.
    """
    require_name(name)
    tables = tuple(
        PinnedTable(relation, path, version) for relation, (version, path) in sorted(snapshot.tables.items())
    )
    paths = [one.path for one in tables]
    new = PinnedSnapshot(name, snapshot.subscription, snapshot.lsn, now(), False, tables)
    try:
        await catalog.add_pinned_snapshot(new)
        await carry("pin", name, paths)
        for one in tables:
            await asyncio.to_thread(version_files.require_readable, one.path, one.relation, one.version)
        await catalog.complete_pinned_snapshot(name)
    except (Exception, asyncio.CancelledError):
        # If that fails, too, the snapshot stays in the catalog, not complete, and can be dropped.
        with suppress(PubsubError):
            if await _is_there(catalog, new):
                await carry("release", name, paths)
                await catalog.drop_pinned_snapshot(name)
        raise


async def _is_there(catalog: Catalog, new: PinnedSnapshot) -> bool:
    """Return whether the catalog lists this very snapshot, and not an earlier one that has its name."""
    return any(replace(one, complete=False) == new for one in (await catalog.state()).pinned_snapshots)


async def drop(catalog: Catalog, carry: Carry, name: str) -> None:
    """Let go of the versions that are pinned under `name`.  Raises UndefinedObject, and what `carry` raises."""
    found = next((one for one in (await catalog.state()).pinned_snapshots if one.name == name), None)
    if found is None:
        raise undefined(name)
    await carry("release", name, [one.path for one in found.tables])
    await catalog.drop_pinned_snapshot(name)
