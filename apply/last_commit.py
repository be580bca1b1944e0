"""Recognise a publisher that was restored from a copy of its files, and has written as much WAL since as the lost one had.

    WAL of the publisher    … C₁ … C₂ … │ …             C₂: the last commit stored with the origin, which keepalives have
    WAL of a restored one   … C₁ … other records …      moved to │; no commit of C₂'s time is where C₂ was
    WAL of another one      … C₁ … C₂ … other records   it has all that was sent, and C₃ before │ is still to come

While its WAL still ends before what was received, publisher_identity.check_position recognises it.
"""

from __future__ import annotations

import structlog

from apply.publisher_identity import PublisherLost
from catalog.records import LastCommit, Subscription
from pubsub.errors import PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication
from pubsub.publisher.commit_record import CannotTell, is_commit_at
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import SystemIdentity
from pubsub.publisher.slots import SlotInfo

logger = structlog.get_logger()


async def check_last_commit(
    connection: Connection, subscription: Subscription, identity: SystemIdentity, last: LastCommit | None, origin: Lsn
) -> None:
    """Require that the publisher's WAL has the last transaction that the subscription has applied, up to `origin`.

    Passes if the server does not show it (its WAL is removed, say) and for another system, whose WAL is its own.  Raises
    PublisherLost.
    """
    if last is None or subscription.publisher_system_identifier != identity.system_identifier:
        return
    try:
        timeline = await _timeline(connection, identity, last.lsn)
        there = await is_commit_at(subscription.conninfo, subscription.name, timeline, last.lsn, last.time, origin)
    except CannotTell as error:
        logger.info(
            "the publisher does not show whether it has the last transaction",
            subscription=subscription.name,
            lsn=str(last.lsn),
            reason=str(error),
        )
        return
    if not there:
        raise PublisherLost(
            f"the publisher's WAL does not have the commit at {last.lsn}, which the subscription has applied", origin
        )


def streams_from(
    subscription: Subscription, identity: SystemIdentity, slot: SlotInfo | None, last: LastCommit | None, origin: Lsn
) -> Lsn:
    """Return where the stream must begin so that nothing behind the `last` commit is missed; `origin` or before it.

    Keepalives move the origin past that commit, and nothing that was published lies between.  In a server that was restored to a
    moment between the two something may: it was written since.  Such a server's slot stands before the origin; so does one
    whose server has crashed, which sends nothing twice.  PostgreSQL's own origin is always that of a commit.
    """
    if last is None or slot is None or subscription.publisher_system_identifier != identity.system_identifier:
        return origin
    if slot.confirmed_flush_lsn is None or slot.confirmed_flush_lsn >= origin:
        return origin
    # Every commit that begins at this LSN or later is sent, so the last one is not.
    return min(origin, max(Lsn(last.lsn + 1), slot.confirmed_flush_lsn))


async def _timeline(connection: Connection, identity: SystemIdentity, lsn: Lsn) -> int:
    try:
        return (await replication.timeline_history(connection, identity.timeline)).timeline_of(lsn)
    except PublisherError as error:
        raise CannotTell(error.message) from error
