"""Which sequences a command lets join a subscription and leave it, and the Delta table of a subscription's sequences.

Follows subscriptioncmds.c: fetch_relation_list, check_publications_origin_sequences, AlterSubscription_refresh_seq.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

from catalog.records import NewSequence, Subscription, SubscriptionSequence
from catalog.states import RelState
from launcher.client_session import Session
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, PublisherError
from pubsub.publisher import sequences
from pubsub.publisher.connection import Connection
from pubsub.publisher.sequences import PublishedSequence
from pubsub.sql.identifiers import table_path

#: The folder beside those of schemas that has the sequences: PostgreSQL lets no user's schema begin with pg_.
FOLDER: Final = "pg_sequences"


async def published_sequences(connection: Connection, publications: Sequence[str]) -> list[PublishedSequence]:
    """Return the published sequences.  Raises PublisherError in PostgreSQL's words."""
    try:
        return await sequences.published_sequences(connection, publications)
    except PublisherError as error:
        raise PublisherError(
            f"could not receive list of replicated sequences from the publisher: {error.message}",
            sqlstate=error.sqlstate,
            detail=error.detail,
            hint=error.hint,
        ) from error


async def warn_of_foreign_values(
    session: Session,
    connection: Connection,
    subscription: str,
    publications: Sequence[str],
    besides: Collection[SubscriptionSequence] = (),
) -> None:
    """Warn that sequences are synchronized whatever the origin of their values, despite origin = none."""
    have = [sequences.sql_name(one.schema, one.name) for one in besides]
    found = await sequences.publications_with_foreign_values(connection, publications, have)
    if not found:
        return
    names = ", ".join(f'"{name}"' for name in found)
    what = f"a publication ({names}) that contains" if len(found) == 1 else f"publications ({names}) that contain"
    session.notice(
        f'subscription "{subscription}" requested origin = NONE but might synchronize sequence values that had a '
        "different origin",
        "WARNING",
        detail=f"The subscription subscribes to {what} sequences that are synchronized from other subscriptions.",
        hint="Verify that the initial values copied from the publisher sequences did not come from other origins.",
    )


async def joining(
    session: Session,
    published: Sequence[PublishedSequence],
    subscription: str,
    target: str,
    *,
    copy_data: bool,
    create_tables: bool,
    present: Sequence[SubscriptionSequence] = (),
) -> list[NewSequence]:
    """Return the rows of sequences that join a subscription with the sequences `present`, those that leave it included.

    They come into the Delta table that these have; otherwise it is decided now, and refused if it is another's, or holds rows.
    """
    if not published:
        return []
    if present:
        path = present[0].path
    else:
        path = table_path(session.settings.warehouse_uri, target, FOLDER, subscription)
        await _refuse_taken(session, path, subscription, create_tables=create_tables)
    state = RelState.INIT if copy_data else RelState.READY
    return [NewSequence(one.oid, one.schema, one.name, path, one.definition, state) for one in published]


async def difference(
    session: Session, subscription: Subscription, published: Sequence[PublishedSequence]
) -> tuple[list[SubscriptionSequence], list[SubscriptionSequence], list[PublishedSequence]]:
    """Return the subscription's sequences, with those that have left; those that leave now; and those that join.

    As in PostgreSQL a sequence is known by its name: one that was dropped and created again on the publisher stays.
    """
    present = await session.catalog.sequences(subscription.oid)
    names = {(one.schema, one.name) for one in published}
    kept = {(one.schema, one.name) for one in present if not one.leaving} & names
    gone = [one for one in present if not one.leaving and (one.schema, one.name) not in names]
    return present, gone, [one for one in published if (one.schema, one.name) not in kept]


async def refresh(session: Session, subscription: Subscription) -> None:
    """Carry out ALTER SUBSCRIPTION … REFRESH SEQUENCES: the sequences are synchronized again.  Raises PubsubError."""
    if not subscription.enabled:
        raise NotInPrerequisiteState(
            "ALTER SUBSCRIPTION ... REFRESH SEQUENCES is not allowed for disabled subscriptions"
        )
    async with await session.connect(subscription.name, subscription.conninfo) as connection:
        require_version(connection)
        if subscription.options.origin == "none":
            await warn_of_foreign_values(session, connection, subscription.name, subscription.publications)
        await session.catalog.ask_for_sequences(subscription.oid)
    for one in await session.catalog.sequences(subscription.oid):
        if not one.leaving:
            session.notice(
                f'sequence "{one.qualified_name}" of subscription "{subscription.name}" set to INIT state', "DEBUG1"
            )


def require_version(connection: Connection) -> None:
    """Refuse a publisher that cannot tell of its sequences.  Raises NotInPrerequisiteState."""
    if connection.server_version < sequences.FIRST_VERSION:
        raise NotInPrerequisiteState(
            "cannot synchronize sequences if the publisher is running a version earlier than PostgreSQL 19"
        )


async def _refuse_taken(session: Session, path: str, subscription: str, *, create_tables: bool) -> None:
    from launcher.published_tables import refuse_taken
    from tablesync.sequence_table import sequence_table

    taken = {one.path.casefold(): one.subid for one in (await session.catalog.state()).sequences}
    if path.casefold() in taken:
        names = {one.oid: one.name for one in await session.catalog.subscriptions()}
        raise DuplicateObject(
            f'the Delta table for the sequences of subscription "{subscription}" belongs to subscription '
            f'"{names[taken[path.casefold()]]}"',
            detail=f"Both would write {path}.",
            hint="Give the subscription a folder of its own: WITH (target = '…').",
        )
    await asyncio.to_thread(refuse_taken, sequence_table(path), True, create_tables)
