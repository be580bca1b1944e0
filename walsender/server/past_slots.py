"""A slot that begins in the past, made when the server starts (`pubsub publish --slot NAME --start LSN`)."""

from __future__ import annotations

import structlog

from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection
from walsender.feed import past
from walsender.plugins import registered
from walsender.server.service import Service
from walsender.slots.slot import Slot

logger = structlog.get_logger()


async def make(service: Service, name: str, plugin: str, start: Lsn) -> None:
    """Make the slot, in the upstream connection string's database; leave it if it is there already, wherever it stands.

    Raises NotInPrerequisiteState for a slot of another plugin or database, WalMissing if WAL from before `start` is missing,
    and what a new slot raises (SlotStore.check_new).
    """
    conninfo = service.options.upstream
    async with await Connection.connect(conninfo, application_name="walsender") as connection:
        ((number,),) = await connection.query(
            "SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
        )
        database, oid = connection.dbname, int(str(number))
    slot = service.slots.find(name)
    if slot is not None:
        # A database may have had another name before.
        same = slot.database_oid == oid if slot.database_oid else slot.database == database
        if slot.plugin != plugin or not same:
            raise NotInPrerequisiteState(
                f'replication slot "{name}" is there already, for another plugin or database',
                detail=f'It is for the plugin "{slot.plugin}" and the database "{slot.database}".',
            )
        logger.info(
            "replication slot is there already", slot=name, confirmed_flush_lsn=str(Lsn(slot.confirmed_flush_lsn))
        )
        return
    service.slots.check_new(name)
    registered.check(plugin)
    try:
        restart = await past.restart_for(service.feed, conninfo, start)
        # The server listens already: a client may have made one meanwhile.
        service.slots.check_new(name)
        service.slots.add(Slot(name, plugin, database, restart, start, database_oid=oid))
        service.decoders.slots_changed()
    finally:
        service.feed.held = None
    logger.info("replication slot begins", slot=name, start=str(start), restart_lsn=str(Lsn(restart)))
