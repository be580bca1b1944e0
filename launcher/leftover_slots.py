"""Find slots on a publisher that sync workers of this node have left: they retain WAL until the disk is full.

A sync worker's slot is recorded with its table before it is made, and a table that leaves is removed after its slot
(launcher.sync_slots).  A slot of such a name without a record is one of a subscription that was dropped while its publisher was
away, of a catalog that was restored from a backup, or of a defect.
"""

from __future__ import annotations

import re
from typing import Final

from catalog.figures import Warned
from catalog.store import Catalog
from launcher.sync_slots import slot_names
from pubsub.publisher import slots
from pubsub.publisher.connection import Connection

_NAME: Final = re.compile(r"pg_(\d+)_sync_\d+_")


async def leftover_slots(
    connection: Connection, catalog: Catalog, node_id: str, subid: int | None = None
) -> dict[str, Warned]:
    """Return the slots of this node that no table explains, each with a warning about it.

    With `subid` only those of this subscription, and of subscriptions that are no more.  A slot that is dropped just now may be
    among them, so ask twice.  Raises what queries raise.
    """
    # Asked before the catalog is: a slot is recorded before it is made.
    found = await slots.slots_like(connection, f"pg\\_%\\_sync\\_%\\_{node_id}")
    if not found:
        return {}
    subscriptions = {one.oid for one in await catalog.subscriptions()}
    relations = [relation for oid in subscriptions for relation in await catalog.relations(oid)]
    explained = {*slot_names(relations, node_id)}
    left = {}
    for name, retained in found.items():
        match = _NAME.match(name)
        owner = int(match[1]) if match is not None else None
        if name not in explained and (subid is None or owner == subid or owner not in subscriptions):
            left[name] = _about(name, retained)
    return left


def _about(name: str, retained: int | None) -> Warned:
    size = "" if retained is None else f", and retains {retained} bytes of WAL"
    return Warned(
        f'replication slot "{name}" on the publisher is left over',
        f"It has the name of a sync slot of this node, but no table has it{size}.",
        f"SELECT pg_drop_replication_slot('{name}') on the publisher.",
    )
