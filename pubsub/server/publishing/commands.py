"""Replication commands on a node's own database (walsender.c: exec_replication_command)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pubsub.backend import messages as m
from pubsub.errors import FeatureNotSupported, ObjectInUse
from pubsub.protocol.lsn import Lsn
from pubsub.server.publishing.stream import Stream
from walsender import repl_gram as gram
from walsender.slots.slot import Slot

if TYPE_CHECKING:
    from pubsub.server.publishing.publisher import Publisher
    from pubsub.server.session import Session

PLUGIN: Final = "pgoutput"


async def carry_out(session: Session, command: gram.Command) -> bytes:
    """Carry a command out; return its answer without ReadyForQuery.  Raises PubsubError."""
    publisher = session.backend.publisher
    match command:
        case gram.IdentifySystem():
            state = await session.backend.node.state()
            end = await publisher.collect(state)
            columns = [("systemid", m.TEXT), ("timeline", m.INT8), ("xlogpos", m.TEXT), ("dbname", m.TEXT)]
            return m.rows(columns, [[state.node.node_id, "1", str(Lsn(end)), "pubsub"]], "IDENTIFY_SYSTEM")
        case gram.Show(setting):
            known = session.parameters
            name, value = (
                known.show(setting) if known.known(setting) else (setting, session.backend.settings.show(setting))
            )
            return m.rows([(name, m.TEXT)], [[value]], "SHOW")
        case gram.ReadReplicationSlot():
            columns = [("slot_type", m.TEXT), ("restart_lsn", m.TEXT), ("restart_tli", m.INT8)]
            return m.rows(columns, [[None, None, None]], "READ_REPLICATION_SLOT")
        case gram.CreateReplicationSlot():
            return await _create(session, publisher, command)
        case gram.AlterReplicationSlot(name):
            slot = publisher.slots.acquire(name, session, session.pid, session.end)
            if command.failover is not None:
                slot.failover = command.failover
            publisher.slots.free(slot)
            return m.complete("ALTER_REPLICATION_SLOT")
        case gram.DropReplicationSlot(name, wait):
            await drop(session, publisher, name, wait=wait)
            return m.complete("DROP_REPLICATION_SLOT")
        case gram.StartLogicalReplication():
            return await _start(session, publisher, command)
        case _:
            raise FeatureNotSupported("a node has no physical replication and no timelines")


async def _create(session: Session, publisher: Publisher, command: gram.CreateReplicationSlot) -> bytes:
    if command.plugin is None:
        raise FeatureNotSupported("physical replication slots are not kept here")
    if command.plugin != PLUGIN:
        raise FeatureNotSupported(f'output plugin "{command.plugin}" is not supported for Delta tables: pgoutput is')
    publisher.slots.check_new(command.slot)
    state = await session.backend.node.state()
    if not command.slot.startswith("pg_") or "_sync_" not in command.slot:
        # The subscription's slot keeps what the slots of its copies need.
        await publisher.pin("pin", f"slot_{command.slot}", publisher.paths(state))
    lsn = await publisher.collect(state)
    temporary = command.temporary
    slot = Slot(
        command.slot,
        PLUGIN,
        "pubsub",
        lsn,
        lsn,
        temporary=temporary,
        failover=command.failover and not temporary,
        active_pid=session.pid if temporary else None,
        owner=session if temporary else None,
    )
    publisher.slots.add(slot)
    name = None
    if command.snapshot != "nothing":
        versions = await asyncio.to_thread(publisher.positions.versions_at, lsn, publisher.paths(state))
        if command.snapshot == "use":
            session.versions = versions
        else:
            name = f"{session.pid:08X}-{lsn:08X}-1"
            session.backend.snapshots[name] = versions
    columns = [(one, m.TEXT) for one in ("slot_name", "consistent_point", "snapshot_name", "output_plugin")]
    return m.rows(columns, [[slot.name, str(Lsn(lsn)), name, PLUGIN]], "CREATE_REPLICATION_SLOT")


async def drop(session: Session, publisher: Publisher, name: str, *, wait: bool) -> None:
    """Drop a slot, and let go of what it has kept.  Raises UndefinedObject, ObjectInUse."""
    while True:
        try:
            slot = publisher.slots.acquire(name, session, session.pid, session.end, valid=False)
        except ObjectInUse:
            if not wait:
                raise
            await asyncio.sleep(0.05)
            continue
        publisher.slots.drop(slot)
        state = await session.backend.node.state()
        await publisher.pin("release", f"slot_{name}", publisher.paths(state))
        return


async def _start(session: Session, publisher: Publisher, command: gram.StartLogicalReplication) -> bytes:
    options = gram.parse_pgoutput_options(command.options)
    slot = publisher.slots.acquire(command.slot, session, session.pid, session.end)
    stream = Stream(session, publisher, slot, options, max(slot.confirmed_flush_lsn, command.lsn))
    publisher.streams.add(stream)
    try:
        await stream.run()
    finally:
        publisher.streams.discard(stream)
        publisher.slots.free(slot)
    return m.complete("COPY 0") + m.complete("START_REPLICATION")
