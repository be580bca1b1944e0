"""Check that the publisher is the one that the subscription follows, and continues where the subscription stands.

A promoted standby, an upgraded server or a restored backup may answer at the same address, or at one that ALTER
SUBSCRIPTION … CONNECTION names.  The subscription may go on if the stream has no gap and the publisher has everything
that is in Delta:

    system    the one copied from; another one (pg_upgrade makes one) only after ALTER SUBSCRIPTION … CONNECTION
    timeline  the one followed, or a later one that left it past everything applied (TIMELINE_HISTORY), whatever
              the slot says: transactions applied past that point were lost in the failover, and others stand in their
              place.
              If a standby is promoted while it publishes, its new timeline is stored before anything of it is
              committed (promotion.py), so its transactions are never taken for lost ones
    WAL       reaches everything applied; if that of a server that is no standby does not, the server was restored from an
              older copy, and is refused from then on, since later its WAL will reach it (last_commit.py).
              A standby may still receive it
    slot      exists, and begins no later than the applied position

If the server itself refuses (the slot is missing, lost or in use), its message is passed on with a hint.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Final

from catalog.figures import Warned
from catalog.records import Subscription
from catalog.store import Catalog
from pubsub.errors import NotInPrerequisiteState, ProtocolViolation, PublisherError, UndefinedObject
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.timeline import TimelineHistory
from pubsub.publisher import publication, replication, slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import SystemIdentity
from pubsub.publisher.slots import SlotInfo

RESYNC_HINT: Final = (
    "What was changed on the publisher since cannot be received any more: ALTER SUBSCRIPTION ... RESYNC TABLE with every "
    "table of the subscription makes a new slot and copies them anew."
)
_GAP_HINT: Final = (
    "Transactions are missing that only a new copy can bring: use ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the "
    "subscription."
)

_UNPUBLISHED_HINT: Final = (
    "What was written while the publication did not exist cannot be decoded, though it is there again: use ALTER SUBSCRIPTION "
    "... RESYNC TABLE with every table of the subscription, which passes over it."
)


_UNDEFINED_FILE: Final = "58P01"

#: How often a sync worker checks whether the publisher is followed, in seconds.
_LOOK_AGAIN: Final = 0.2


class PublisherLost(NotInPrerequisiteState):
    """The publisher lacks transactions, up to `lsn`, that it once sent: no later WAL of it continues them."""

    def __init__(self, message: str, lsn: Lsn) -> None:
        super().__init__(
            message,
            detail="It was restored from an older copy of its files, and has other transactions there, or will have.",
            hint="Correct the connection with ALTER SUBSCRIPTION ... CONNECTION; the same one has the server looked at again.  "
            "To follow the server as it is: ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the subscription.",
        )
        self.lsn = lsn


class SlotLost(PublisherError):
    """The slot does not keep what is to be applied next, and never will: only a copy of every table goes on from here.

    `copies`: whether that takes new copies; not while every table is still to be copied.
    """

    copies = True


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a subscription stands.  `origin`: everything up to it is in Delta; `held`: no table holds anything past it.

    `copied`: some tables await no copy, so a gap in the stream would lose changes for them.  `prepared`: the end of the
    last stored prepared transaction.  `least`: no synchronized table holds less.  `continues_at`: nothing is missing before
    it, since the slot of another system began there when that was accepted.  LSNs are exclusive, 0 before the first.
    """

    origin: Lsn
    held: Lsn
    copied: bool
    prepared: Lsn = INVALID_LSN
    least: Lsn = INVALID_LSN
    continues_at: Lsn = INVALID_LSN

    @property
    def begins(self) -> Lsn:
        """Where the stream must begin at the latest; 0 if it may begin anywhere."""
        if not self.copied:
            return INVALID_LSN
        # Before the first origin the copies alone tell.
        return max(self.origin or self.least, self.continues_at)


async def check_system(connection: Connection, subscription: Subscription) -> SystemIdentity:
    """Return the publisher's identity.  Another system than the one copied from needs ALTER SUBSCRIPTION … CONNECTION.

    Raises NotInPrerequisiteState; PublisherLost if the publisher was found to be that.
    """
    identity = await replication.identify_system(connection)
    known = subscription.publisher_system_identifier
    if known is not None and identity.system_identifier != known and not subscription.options.rebound:
        raise NotInPrerequisiteState(
            f'the publisher of subscription "{subscription.name}" is another database system',
            detail=f"Its system identifier is {identity.system_identifier}, not {known}.",
            hint="Correct the connection.  If that server was upgraded with its slots, or has all that the subscription was "
            "sent, confirm it with ALTER SUBSCRIPTION ... CONNECTION; else drop the subscription and create it again.",
        )
    if subscription.publisher_lost_at is not None:
        lost = subscription.publisher_lost_at
        raise PublisherLost(
            f"the publisher was found to lack WAL before {lost}, which the subscription has received", lost
        )
    return identity


async def check_position(
    connection: Connection,
    subscription: Subscription,
    identity: SystemIdentity,
    slot: SlotInfo | None,
    standing: Standing,
    *,
    standby: bool,
) -> Lsn | None:
    """Check the publisher's timeline, WAL and slot.  Return where its timeline began; None if the server does not know.

    Raises NotInPrerequisiteState (PublisherLost) or ProtocolViolation, saying what does not fit.  A missing or lost slot is
    not refused here; the server refuses it when the stream starts.
    """
    other = subscription.publisher_system_identifier not in (None, identity.system_identifier)
    history = await _history(connection, subscription, identity)
    if not other:
        # Checked first: waiting for missing WAL, as the next hint says, does not help on another timeline.
        _check_timeline(subscription, identity, history, standing)
    start = history.start_of(identity.timeline) if history is not None else None
    began = None if start is None else Lsn(start)
    if standing.held > identity.xlogpos:
        await _check_end_of_wal(connection, standing, other=other, standby=standby)
    if slot is None or slot.lost or slot.confirmed_flush_lsn is None:
        return began
    if other:
        _check_slot_of_another_system(slot, standing)
        return began
    if standing.begins and slot.confirmed_flush_lsn > standing.begins:
        raise SlotLost(
            f'replication slot "{slot.name}" begins at {slot.confirmed_flush_lsn}, after {standing.begins}, where the '
            "subscription stands",
            sqlstate=NotInPrerequisiteState.default_sqlstate,
            detail="The slot was made anew, advanced, or read by someone else.",
            hint=_GAP_HINT,
        )
    return began


async def _check_end_of_wal(connection: Connection, standing: Standing, *, other: bool, standby: bool) -> None:
    """Require that the WAL reaches `held`.  Asks anew: a sync worker may have received more since the identity was read."""
    identity = await replication.identify_system(connection)
    if standing.held <= identity.xlogpos:
        return
    message = (
        f"the publisher's WAL ends at {identity.xlogpos}, before {standing.held}, which the subscription has received"
    )
    if not other and not standby:
        raise PublisherLost(message, standing.held)
    raise ProtocolViolation(
        message,
        detail="It is a standby that has not received everything."
        if standby
        else "It is another system, with WAL of its own.",
        hint="Let the server catch up, or correct the connection.  If it is to be followed as it is: "
        "ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the subscription.",
    )


def _check_slot_of_another_system(slot: SlotInfo, standing: Standing) -> None:
    """Require a slot at or past `held`: pg_upgrade makes one past the old WAL, and only if all of that was received."""
    assert slot.confirmed_flush_lsn is not None
    if slot.confirmed_flush_lsn < standing.held:
        raise NotInPrerequisiteState(
            f'replication slot "{slot.name}" of the new system stands at {slot.confirmed_flush_lsn}, before {standing.held}, '
            "which the subscription has received",
            detail="Positions of another system mean nothing here, unless pg_upgrade has carried the slot over.",
            hint=_GAP_HINT,
        )


async def _history(
    connection: Connection, subscription: Subscription, identity: SystemIdentity
) -> TimelineHistory | None:
    """Return the timeline's history; None for the timeline already followed if the server lacks its file."""
    try:
        return await replication.timeline_history(connection, identity.timeline)
    except PublisherError as error:
        if error.sqlstate == _UNDEFINED_FILE and identity.timeline == subscription.publisher_timeline:
            return None
        raise


def _check_timeline(
    subscription: Subscription, identity: SystemIdentity, history: TimelineHistory | None, standing: Standing
) -> None:
    known = subscription.publisher_timeline
    if known is None:
        return
    if identity.timeline < known:
        raise NotInPrerequisiteState(
            f'the publisher of subscription "{subscription.name}" is on timeline {identity.timeline}, the subscription on {known}',
            detail="It is a server that another one has taken over from.",
            hint="Correct the connection.",
        )
    if history is None:
        return
    received = max(standing.held, standing.prepared)
    lost = (
        "Use ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the subscription.  synchronized_standby_slots on "
        "a primary keeps subscribers from running ahead of its standby."
    )
    followed_since, began = subscription.publisher_timeline_start, history.start_of(known)
    if followed_since is not None and began not in (None, followed_since):
        # Two standbys promoted without a common archive both take the next timeline number.
        common = min(Lsn(began or 0), followed_since)
        if received > common:
            raise NotInPrerequisiteState(
                f"the publisher's timeline {known} began at {Lsn(began or 0)}, the one that the subscription follows at "
                f"{followed_since}, before {received}, which the subscription has received",
                detail="They are two timelines of the same number, of two servers that were promoted.",
                hint=f"Correct the connection.  To follow this server: {lost}",
            )
    if identity.timeline == known:
        return
    left = history.end_of(known)
    if left is None:
        raise NotInPrerequisiteState(
            f"timeline {known}, which the subscription follows, is not in the history of the publisher's timeline "
            f"{identity.timeline}",
            hint="Correct the connection; to follow this server, use ALTER SUBSCRIPTION ... RESYNC TABLE with every table.",
        )
    if received > left:
        raise NotInPrerequisiteState(
            f"the publisher's timeline {identity.timeline} left timeline {known} at {Lsn(left)}, before {received}, "
            "which the subscription has received",
            detail="The subscription has transactions that were lost in the failover.",
            hint=lost,
        )


async def is_followed(catalog: Catalog, subscription: Subscription, identity: SystemIdentity, patience: float) -> bool:
    """Return whether the apply worker follows this publisher; wait at most `patience` seconds for that.

    If a sync worker copied from another publisher before apply has accepted it, its table would hold changes past the
    end of the followed timeline.
    """
    deadline = time.monotonic() + patience
    while True:
        current = await catalog.subscription(subscription.oid)
        known = (current.publisher_system_identifier, current.publisher_timeline)
        if None in known or known == (identity.system_identifier, identity.timeline):
            return True
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_LOOK_AGAIN)


async def remember(
    catalog: Catalog, subscription: Subscription, identity: SystemIdentity, began: Lsn | None, slot_begins: Lsn
) -> bool:
    """Store the identity to follow and where its timeline began; return whether the identity has changed.

    Of another system, where its slot begins is stored, too: until something of it is applied, the subscription stands at
    a position of the former one, before that.
    """
    known = (subscription.publisher_system_identifier, subscription.publisher_timeline)
    same = known == (identity.system_identifier, identity.timeline) and not subscription.options.rebound
    if same and began in (None, subscription.publisher_timeline_start):
        return False
    other = known[0] not in (None, identity.system_identifier)
    continues_at = slot_begins if other else None
    await catalog.set_publisher(subscription.oid, identity.system_identifier, identity.timeline, began, continues_at)
    return not same


async def check_publications(connection: Connection, subscription: Subscription) -> None:
    """Raise UndefinedObject if a publication is missing, so that nothing is received.

    A stream without it would fail at the next change, or on PostgreSQL 18 leave out its changes.
    """
    missing = await publication.missing_publications(connection, subscription.publications)
    if missing:
        names = ", ".join(f'"{name}"' for name in missing)
        raise UndefinedObject(
            f"publication {names} does not exist on the publisher"
            if len(missing) == 1
            else f"publications {names} do not exist on the publisher",
            hint="Create it again on the publisher, or take it out with ALTER SUBSCRIPTION ... DROP PUBLICATION.  Nothing is "
            "received until then.",
        )


def skipped_publication(warning: PublisherError) -> Warned | None:
    """Return what to report if the warning is of a skipped publication: PostgreSQL 18 goes on without a missing one
    (pgoutput.c: LoadPublications).
    """
    if not warning.message.startswith("skipped loading publication"):
        return None
    return Warned(
        f"{warning.message}: what it should have published is missing",
        detail="The publication did not exist when that was written.",
        hint=_UNPUBLISHED_HINT,
    )


def explained_stream(error: PublisherError) -> PublisherError:
    """Return the running stream's `error` with a hint."""
    hint = error.hint
    if error.sqlstate == replication.UNDEFINED_OBJECT and "publication" in error.message:
        hint = _UNPUBLISHED_HINT
    elif "can no longer access replication slot" in error.message or "invalidat" in error.message:
        hint = RESYNC_HINT
    return PublisherError(error.message, sqlstate=error.sqlstate, detail=error.detail, hint=hint, context=error.context)


async def explained(
    connection: Connection, error: PublisherError, slot: SlotInfo | None, *, standby: bool = False
) -> PublisherError:
    """Return START_REPLICATION's `error` with a hint and, if the slot is in use, its user."""
    detail, hint, kind = error.detail, error.hint, PublisherError
    if "wal_level" in error.message:
        hint = "Set wal_level = logical in the publisher's postgresql.conf, and restart it."
    elif error.sqlstate == replication.UNDEFINED_OBJECT and slot is None and standby:
        # The primary's slots are not here, unless they are synchronized, and the primary may come back.
        detail = detail or "The server is a standby."
        hint = "Connect to the primary (target_session_attrs=read-write), where the slot is.  " + RESYNC_HINT
    elif error.sqlstate == replication.UNDEFINED_OBJECT and slot is None:
        hint, kind = RESYNC_HINT, SlotLost
    elif slot is not None and slot.lost:
        # invalidation_reason came with 17; an older server's detail tells the reason.
        reason = f"Its wal_status is lost; invalidation_reason: {slot.invalidation_reason or 'wal_removed'}."
        detail = f"{detail} {reason}" if detail else reason
        hint, kind = RESYNC_HINT, SlotLost
    elif error.sqlstate == "55006":
        user = await slots.slot_user(connection, slot.name) if slot is not None and not connection.closed else None
        detail = detail or user
        hint = "A slot has one reader.  Another subscription reads it, or a connection that the server has not found dead yet."
    return kind(error.message, sqlstate=error.sqlstate, detail=detail, hint=hint, context=error.context)


def followed(subscription: Subscription, current: Subscription) -> Subscription:
    """Return `subscription` with the publisher's identity from `current`: storing it does not change the generation."""
    return replace(
        subscription,
        publisher_system_identifier=current.publisher_system_identifier,
        publisher_timeline=current.publisher_timeline,
        publisher_timeline_start=current.publisher_timeline_start,
        publisher_lost_at=current.publisher_lost_at,
        options=replace(
            subscription.options, rebound=current.options.rebound, continues_at=current.options.continues_at
        ),
    )
