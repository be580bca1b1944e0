"""Create a subscription's slot for a command, with notices about what it waits for and hints for its errors."""

from __future__ import annotations

import asyncio
from typing import Final

from launcher.client_session import Session
from launcher.slot_warnings import about_wait
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import abandon_slot
from pubsub.publisher.sound_slots import create_slot

#: A part of a server's error text and the hint for it: no logical decoding, or no slot left.
_HINTS: Final = (
    (
        '"effective_wal_level" >= "logical" on the primary',
        "Set wal_level = logical on the primary, or make a logical slot there.",
    ),
    ("wal_level", "Set wal_level = logical in the publisher's postgresql.conf, and restart it."),
    ("all replication slots are in use", "Free one or increase max_replication_slots on the publisher."),
)
#: How long a slot may take before the command checks what it waits for, and the interval of these checks, in seconds.
_PATIENCE: Final = 2.0


async def make_slot(
    session: Session,
    connection: Connection,
    subscription: str,
    conninfo: str,
    slot: str,
    *,
    two_phase: bool,
    failover: bool,
) -> Lsn:
    """Create the slot and return its consistent point.  Cancelling leaves no slot behind.  Raises PublisherError."""
    there = await slots.slot_info(connection, slot) is not None
    telling = asyncio.create_task(_tell_what_it_waits_for(session, subscription, conninfo, slot))
    try:
        made = await create_slot(
            connection,
            slot,
            snapshot="nothing",
            tell=lambda altered, again: _tell_of_alterations(session, slot, altered, again=again),
            two_phase=two_phase,
            failover=failover,
        )
    except PubsubError as error:
        if error.hint is None:
            error.hint = next((hint for part, hint in _HINTS if part in error.message), None)
        raise
    except asyncio.CancelledError:
        if not there:  # the slot may have been finished at that moment, and the connection is closed
            async with await session.connect(subscription, conninfo) as another:
                await abandon_slot(another, slot, connection.backend_pid)
        raise
    finally:
        telling.cancel()
        await asyncio.wait({telling})
    return made.consistent_point


def _tell_of_alterations(session: Session, slot: str, altered: str, *, again: bool) -> None:
    detail = f"Altered while it was made: {altered}. PostgreSQL may decode its first changes with what was before."
    if again:
        session.notice(f'replication slot "{slot}" is made again', detail=detail)
    else:
        session.notice(
            f'replication slot "{slot}" may decode its first changes wrongly',
            "WARNING",
            detail=detail,
            hint="Make the subscription, or RESYNC TABLE with every table, when nobody alters tables.",
        )


async def _tell_what_it_waits_for(session: Session, subscription: str, conninfo: str, slot: str) -> None:
    """Emit a NOTICE for each transaction on the publisher that the slot's creation, and so the command, waits for."""
    announced: set[tuple[int | None, int | None]] = set()
    try:
        await asyncio.sleep(_PATIENCE)
        async with await session.connect(subscription, conninfo) as connection:
            while True:
                for wait in await slots.slot_waits(connection, slot.replace("_", "\\_")):
                    if (wait.xid, wait.pid) not in announced:
                        announced.add((wait.xid, wait.pid))
                        warned = about_wait(wait)
                        session.notice(warned.message, detail=warned.detail, hint=warned.hint)
                await asyncio.sleep(_PATIENCE)
    except PubsubError as error:
        session.notice(f"what the slot waits for is not known: {error.message}", "LOG")
