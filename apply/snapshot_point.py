"""Find an LSN at which the publisher and the Delta tables can both be read: a snapshot there, a boundary between batches here.

    hold back    frames are fed a second late from now on (apply.pipeline.held_back)
    slot         a temporary slot with an exported snapshot: what committed before its consistent point, S, and nothing else
    boundary     S is in the WAL that is still held back: the open batch ends at S, so that a version of each table shows S

Without the delay, transactions past S could be in a batch by the time that S is known, and no version would show S.  If they
are in spite of it, a new slot is tried.  The creation of a slot waits for the transactions that are running on the publisher; the
stream is late by the delay meanwhile, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from apply.pipeline.boundary import Boundary
from catalog.records import Subscription
from pubsub import faults
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication, slots, snapshots
from pubsub.publisher.connection import Connection

_DELAY: Final = 1.0
_ATTEMPTS: Final = 5
# How often the end of the publisher's WAL is asked for while it has not come to a wanted LSN, in seconds.
_LOOK: Final = 0.2

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SnapshotPoint:
    """`snapshot` is the exported snapshot of the transactions that committed before `lsn`; it can be imported while the point
    is held."""

    lsn: Lsn
    snapshot: str


def slot_name(subid: int, node_id: str) -> str:
    """Return the name of the temporary slot."""
    return f"pg_{subid}_point_{node_id}"


@asynccontextmanager
async def snapshot_point(
    boundary: Boundary, subscription: Subscription, node_id: str, *, at: Lsn | None = None, halts: bool = False
) -> AsyncIterator[SnapshotPoint]:
    """Hold a point as long as the body runs; the stream goes on past it at once, unless it `halts` there.

    `at`: the least LSN; the publisher may not have come there yet.  Raises PublisherError, ConnectionFailure; and
    NotInPrerequisiteState if no attempt was in time.
    """
    name = slot_name(subscription.oid, node_id)
    for attempt in range(1, _ATTEMPTS + 1):
        async with await Connection.connect(
            subscription.conninfo, replication=True, application_name=f"{subscription.name} snapshot point"
        ) as connection:
            await _until_written(connection, at)
            boundary.hold_back(_DELAY)
            try:
                created = await replication.create_slot(connection, name, snapshot="export", temporary=True)
                await faults.reached("snapshot point")
                in_time = await boundary.end_batch_at(created.consistent_point, halts=halts)
                if in_time:
                    assert created.snapshot_name is not None
                    async with await Connection.connect(subscription.conninfo) as reader:
                        await snapshots.settle(reader, created.snapshot_name)
                    yield SnapshotPoint(created.consistent_point, created.snapshot_name)
                    return
            finally:
                boundary.release()
            logger.info(
                "a snapshot point was passed before it was known",
                subscription=subscription.name,
                lsn=str(created.consistent_point),
                attempt=attempt,
            )
    raise NotInPrerequisiteState(
        f'no LSN was found at which subscription "{subscription.name}" and its publisher could both be read',
        detail="Each time the stream was further than the snapshot by the time that it was made.",
        hint="Try again when the machine is less busy.",
    )


async def _until_written(connection: Connection, lsn: Lsn | None) -> None:
    """Wait until the publisher's WAL has come to `lsn`."""
    while True:
        if lsn is None or await slots.current_wal_lsn(connection) >= lsn:
            return
        await asyncio.sleep(_LOOK)
