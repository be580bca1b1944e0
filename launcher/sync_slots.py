"""The slots that sync workers may have left on a publisher: their names, and how commands drop them.

A sync worker records its slot with its table (SubscriptionRel.sync_slot) before it creates it; a slot that is no longer
recorded was dropped.  A table that is not ready may have a slot under the name that sync_slot_name gives.
"""

from __future__ import annotations

from collections.abc import Iterable

from catalog.records import SubscriptionRel
from catalog.states import RelState
from launcher.client_session import Session
from pubsub.errors import PubsubError
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import drop_slot


def slot_names(relations: Iterable[SubscriptionRel], node_id: str) -> list[str]:
    """Return the names of the slots that these tables may have, each once."""
    names: dict[str, None] = {}
    for relation in relations:
        if relation.sync_slot is not None:
            names[relation.sync_slot] = None
        if relation.state not in (RelState.READY, RelState.SYNCDONE):
            # Imported here because it loads Arrow, which most commands do not need.
            from tablesync.worker import sync_slot_name

            names[sync_slot_name(relation.subid, relation.relid, node_id)] = None
    return list(names)


async def drop_slots_of(
    session: Session, connection: Connection, relations: Iterable[SubscriptionRel], node_id: str
) -> None:
    """Drop these tables' slots; only log a missing one (tablesync.c: ReplicationSlotDropAtPubNode, missing_ok)."""
    for name in slot_names(relations, node_id):
        try:
            dropped = await drop_slot(connection, name, missing_ok=False, wait=True)
        except PubsubError as error:
            if error.sqlstate != "42704":
                raise
            session.notice(error.message, "LOG")
            continue
        if dropped:
            session.notice(f'dropped replication slot "{name}" on publisher')
