"""CREATE and DROP SUBSCRIPTION (subscriptioncmds.c: CreateSubscription, DropSubscription).

A statement creates its slot after every check, and drops it again when a later step fails: after an error there is no
slot and no row in the catalog.  Texts, SQLSTATEs, NOTICEs and command tags are PostgreSQL's.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import assert_never

from catalog.records import NewSubscription, Subscription
from launcher import option_effects, published_sequences, published_tables
from launcher.altersubscription import alter
from launcher.client_session import Session, paused
from launcher.slot_creation import make_slot
from launcher.sync_slots import drop_slots_of, slot_names
from pubsub.errors import ConnectionFailure, DuplicateObject, PublisherError, PubsubError, UndefinedObject
from pubsub.publisher import slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.conninfo import parse_conninfo
from pubsub.publisher.replication import SystemIdentity, drop_slot, identify_system
from pubsub.sql.statements import AlterSubscription, CreateSubscription, DropSubscription, command_tag
from pubsub.sql.typechoices import TypeChoices


async def execute(session: Session, statement: CreateSubscription | AlterSubscription | DropSubscription) -> str:
    """Carry the statement out and return its command tag.  Raises PubsubError."""
    match statement:
        case CreateSubscription():
            await create(session, statement)
        case AlterSubscription():
            await alter(session, statement)
        case DropSubscription():
            await drop(session, statement)
        case _:
            assert_never(statement)
    tag = command_tag(statement)
    try:
        await session.catalog.note_command(tag, str(statement))
    except PubsubError as error:
        # The statement has taken effect: whoever is told that it failed gives it again.
        session.notice(
            f"{tag} was carried out, but could not be noted for the log",
            "WARNING",
            detail=error.message,
            hint=error.hint,
        )
    session.wake()
    return tag


async def create(session: Session, statement: CreateSubscription) -> Subscription:
    """Carry out CREATE SUBSCRIPTION: connect, check and plan the published tables, create the slot, store the rows."""
    options = statement.options
    if any(s.name == statement.name for s in await session.catalog.subscriptions()):
        raise DuplicateObject(f'subscription "{statement.name}" already exists')
    parse_conninfo(statement.connection)
    option_effects.tell(session, options)
    published_tables.refuse_unreached_comments(session, options)
    session.settings.spark.require_catalogs(options.layouts.catalogs())
    if not options.connect:
        created = await session.catalog.create_subscription(_row(statement, None, None))
        session.notice(
            "subscription was created, but is not connected",
            "WARNING",
            hint="To initiate replication, you must manually create the replication slot, enable the subscription, "
            "and refresh the subscription.",
        )
        return created
    async with await session.connect(statement.name, statement.connection) as connection:
        return await _create_connected(session, statement, connection)


async def _create_connected(session: Session, statement: CreateSubscription, connection: Connection) -> Subscription:
    # Imported here because a command that makes no tables needs nothing of Delta.
    from pubsub.delta.warehouse_check import require_writable

    options = statement.options
    identity = await identify_system(connection)
    await published_tables.check_publications(connection, statement.publications)
    if options.origin == "none" and options.copy_data:
        await published_tables.warn_of_foreign_rows(session, connection, statement.name, statement.publications)
        await published_sequences.warn_of_foreign_values(session, connection, statement.name, statement.publications)
    row = _row(statement, identity, connection.dbname)
    choices = TypeChoices.parse(options.types)
    published_tables.refuse_unknown_types(choices)
    published = await published_tables.published_tables(connection, statement.publications)
    if options.binary:
        await published_tables.refuse_binary(connection, published)
    await asyncio.to_thread(require_writable, session.settings.warehouse_uri)
    plans = await published_tables.plan(
        session,
        connection,
        published,
        row.target,
        copy_data=options.copy_data,
        create_tables=options.create_tables,
        choices=choices,
        layouts=options.layouts,
    )
    published_tables.refuse_unknown_columns(choices, plans)
    published_tables.refuse_unknown_tables(options.layouts, plans)
    sequences = await published_sequences.joining(
        session,
        await published_sequences.published_sequences(connection, statement.publications),
        statement.name,
        row.target,
        copy_data=options.copy_data,
        create_tables=options.create_tables,
    )
    slot = row.slot_name if options.create_slot else None
    lsn = None
    if slot is not None:
        # With nothing to copy, two_phase can be enabled at once (subscriptioncmds.c: CreateSubscription).
        at_once = options.two_phase and not options.copy_data and bool(plans)
        lsn = await make_slot(
            session,
            connection,
            statement.name,
            statement.connection,
            slot,
            two_phase=at_once,
            failover=options.failover,
        )
        if at_once:
            row = replace(row, options=replace(row.options, two_phase_state="e"))
    elif row.slot_name is not None:
        found = await slots.slot_info(connection, row.slot_name)
        if found is not None:
            lsn = found.confirmed_flush_lsn
            if found.failover != options.failover:
                session.notice(
                    f'option "failover" of replication slot "{found.name}" is {_word(found.failover)}, '
                    f"the subscription's {_word(options.failover)}",
                    "WARNING",
                    hint="The slot is used as it is; ALTER SUBSCRIPTION ... SET (failover = ...) alters both.",
                )
    relations = [one.relation(copy_data=options.copy_data, lsn=lsn) for one in plans]
    storing = asyncio.ensure_future(session.catalog.create_subscription(row, relations, sequences))
    try:
        created = await asyncio.shield(storing)
    except BaseException:
        # On cancellation wait for the transaction: the slot is dropped only if the rows were not stored.
        await asyncio.wait({storing})
        failure = storing.exception()
        if slot is not None and failure is not None and not await _may_be_stored(session, row, failure):
            await drop_slot(connection, slot, missing_ok=True, wait=True)
        raise
    if slot is not None:
        session.notice(f'created replication slot "{slot}" on publisher')
    return created


async def _may_be_stored(session: Session, row: NewSubscription, failure: BaseException) -> bool:
    """Return whether the subscription may be in the catalog though storing it has failed: its COMMIT was not answered."""
    if isinstance(failure, DuplicateObject):
        return False
    try:
        found = await session.catalog.subscription(row.name)
    except UndefinedObject:
        return False
    except PubsubError:
        session.notice(
            f'replication slot "{row.slot_name}" on publisher is left as it is',
            "WARNING",
            detail="Whether the subscription is stored is not known: the catalog does not answer.",
            hint=f'If there is no subscription "{row.name}" then, drop the slot on the publisher.',
        )
        return True
    return (found.conninfo, found.slot_name) == (row.conninfo, row.slot_name)


async def drop(session: Session, statement: DropSubscription) -> None:
    """Carry out DROP SUBSCRIPTION: stop the workers, drop every slot on the publisher, delete the rows.

    The Delta tables stay.  An error leaves the subscription as it was, and a kill, too, unless the slot was about to be dropped: then
    it is marked `dropping`, and the next DROP accepts that the slot is gone.
    """
    try:
        subscription = await session.catalog.subscription(statement.name)
    except UndefinedObject:
        if not statement.if_exists:
            raise
        session.notice(f'subscription "{statement.name}" does not exist, skipping')
        return
    async with paused(session, subscription, "DROP SUBSCRIPTION"):
        await _drop_slots(session, await session.catalog.subscription(subscription.oid))
        await session.catalog.drop_subscription(subscription.oid)
    # The outcomes of prepared transactions can no longer arrive.
    await asyncio.to_thread(
        shutil.rmtree, session.settings.home / "prepared" / str(subscription.oid), ignore_errors=True
    )


async def _drop_slots(session: Session, subscription: Subscription) -> None:
    catalog, slot = session.catalog, subscription.slot_name
    connection = await _connect_to_drop(session, subscription)
    if connection is None:
        return
    async with connection:
        relations = await catalog.relations(subscription.oid)
        await drop_slots_of(session, connection, relations, (await catalog.node()).node_id)
        if slot is None:
            return
        interrupted = subscription.dropping
        await catalog.alter_subscription(subscription.oid, dropping=True)
        try:
            dropped = await drop_slot(connection, slot, missing_ok=interrupted, wait=True)
        except PublisherError:
            await catalog.alter_subscription(subscription.oid, dropping=interrupted)
            raise
        if dropped:
            session.notice(f'dropped replication slot "{slot}" on publisher')


async def _connect_to_drop(session: Session, subscription: Subscription) -> Connection | None:
    """Connect to the publisher to drop slots there.

    Returns None if there are none, or if slot_name is NONE and the publisher cannot be reached.  Raises
    ConnectionFailure in the words of subscriptioncmds.c: ReportSlotConnectionError.
    """
    slot = subscription.slot_name
    relations = await session.catalog.relations(subscription.oid)
    sync_slots = slot_names(relations, (await session.catalog.node()).node_id)
    if slot is None and not sync_slots:
        return None
    try:
        return await Connection.connect(subscription.conninfo, replication=True, application_name=subscription.name)
    except ConnectionFailure as error:
        if slot is None:
            return None  # the user has to clean up the slots that remain
        for name in sync_slots:
            session.notice(f'could not drop tablesync replication slot "{name}"', "WARNING")
        reason = error.message.removeprefix("could not connect to the publisher: ")
        raise ConnectionFailure(
            f'could not connect to publisher when attempting to drop replication slot "{slot}": {reason}',
            detail=error.detail,
            hint="Use ALTER SUBSCRIPTION ... DISABLE to disable the subscription, and then use "
            "ALTER SUBSCRIPTION ... SET (slot_name = NONE) to disassociate it from the slot.",
        ) from error


def _row(statement: CreateSubscription, identity: SystemIdentity | None, database: str | None) -> NewSubscription:
    """Return the row to store.  Without a connection `target` may stay empty until the first REFRESH decides it."""
    return NewSubscription(
        name=statement.name,
        conninfo=statement.connection,
        publications=statement.publications,
        options=replace(statement.options, two_phase_state="p" if statement.options.two_phase else "d"),
        target=statement.options.target or database or "",
        slot_name=statement.slot_name,
        enabled=statement.options.enabled,
        publisher_system_identifier=None if identity is None else identity.system_identifier,
        publisher_timeline=None if identity is None else identity.timeline,
        publisher_database=database,
    )


def _word(value: bool) -> str:
    return "true" if value else "false"
