"""ALTER SUBSCRIPTION (subscriptioncmds.c: AlterSubscription, AlterSubscription_refresh).

A running daemon sees the change in the catalog.  Some commands wait until the workers have ended: DISABLE, RESYNC
TABLE, SET (two_phase = false), and a REFRESH that removes tables whose sync workers may be about to create a slot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import assert_never

from apply.publisher_identity import check_system
from apply.schema_changes.column_choice import asking, of_table_made_anew
from catalog.beside import relid_of
from catalog.records import NewRelation, Subscription, SubscriptionChanges, SubscriptionRel
from catalog.requests import RequestTimeoutError
from catalog.states import RelState
from catalog.store import Catalog
from launcher import option_effects, published_sequences, published_tables
from launcher.client_session import Session, paused
from launcher.registered_names import refuse_one_name
from launcher.slot_creation import make_slot
from launcher.sync_slots import drop_slots_of, slot_names
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, PubsubError, UndefinedTable
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import INVALID_LSN
from pubsub.publisher import definitions, slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.conninfo import parse_conninfo
from pubsub.publisher.publication import PublishedTable
from pubsub.publisher.replication import alter_slot, cannot_decode, drop_slot, identify_system
from pubsub.sql import statements as sql
from pubsub.sql.identifiers import QualifiedName, quote_qualified
from pubsub.sql.layout_rules import name_beside
from pubsub.sql.layouts import Layouts
from pubsub.sql.options import (
    SubscriptionOptions,
    TwoPhaseState,
    refuse_new_tables_in_two_phase,
    refuse_unfit_source,
    refuse_unfollowed_choice,
)
from pubsub.sql.typechoices import TypeChoices

_REFRESH_REFUSED = "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions"


async def alter(session: Session, statement: sql.AlterSubscription) -> None:
    """Carry out ALTER SUBSCRIPTION.  Raises PubsubError."""
    subscription = await session.catalog.subscription(statement.name)
    catalog, oid = session.catalog, subscription.oid
    match statement.action:
        case sql.Enable():
            if subscription.slot_name is None:
                raise NotInPrerequisiteState("cannot enable subscription that does not have a slot name")
            # A DROP that was killed halfway may have left `dropping`: the subscription is still wanted.
            await catalog.alter_subscription(oid, enabled=True, dropping=False)
        case sql.Disable():
            await _disable(session, subscription)
        case sql.Connection(conninfo):
            parse_conninfo(conninfo)
            # The workers check which system this leads to when they connect (apply.publisher_identity).
            await catalog.alter_subscription(
                oid, conninfo=conninfo, publisher_lost_at=None, options=lambda stored: replace(stored, rebound=True)
            )
        case sql.RefreshPublication(copy_data):
            if not subscription.enabled:
                raise NotInPrerequisiteState("ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions")
            _refuse_copy_in_two_phase(
                subscription,
                copy_data,
                "ALTER SUBSCRIPTION ... REFRESH with copy_data is not allowed when two_phase is enabled",
                "Use ALTER SUBSCRIPTION ... REFRESH with copy_data = false, or use DROP/CREATE SUBSCRIPTION.",
            )
            await _refresh(session, subscription, copy_data=copy_data)
        case sql.RefreshSequences():
            await published_sequences.refresh(session, subscription)
        case sql.SetPublication() | sql.AddPublication() | sql.DropPublication() as action:
            await _set_publications(session, subscription, action)
        case sql.SetOptions(options):
            await _set_options(session, subscription, options)
        case sql.Rename(new_name):
            if new_name == subscription.name:
                raise DuplicateObject(f'subscription "{new_name}" already exists')
            await catalog.alter_subscription(oid, name=new_name)
        case sql.Owner():
            session.notice(
                "OWNER TO has no effect",
                detail="A node has no roles: who may read and write its directory owns its subscriptions.",
            )
        case sql.Skip(lsn):
            origin = await catalog.origin(oid)
            if lsn != INVALID_LSN and lsn < origin:
                raise PubsubError(
                    f"skip WAL location (LSN {lsn}) must be greater than origin LSN {origin}", sqlstate="22023"
                )
            await catalog.alter_subscription(oid, skip_lsn=lsn)
        case sql.ResyncTable():
            await resync(session, subscription, statement.action.tables, lets_columns_in=True)
        case _:
            assert_never(statement.action)


async def _disable(session: Session, subscription: Subscription) -> None:
    await session.catalog.alter_subscription(subscription.oid, enabled=False, dropping=False)
    try:
        await session.workers_ended(subscription)
    except RequestTimeoutError as error:
        session.notice("the subscription is disabled, but its workers have not ended yet", "WARNING", hint=error.hint)


async def _set_publications(
    session: Session,
    subscription: Subscription,
    action: sql.SetPublication | sql.AddPublication | sql.DropPublication,
) -> None:
    publications = action.apply(subscription.publications, subscription.name)
    if not action.refresh:
        await session.catalog.alter_subscription(
            subscription.oid, publications=lambda stored: action.apply(stored, subscription.name)
        )
        return
    adds = isinstance(action, sql.AddPublication)
    if not subscription.enabled:
        if isinstance(action, sql.SetPublication):
            hint = "Use ALTER SUBSCRIPTION ... SET PUBLICATION ... WITH (refresh = false)."
        else:
            verb = "ADD" if adds else "DROP"
            hint = f"Use ALTER SUBSCRIPTION ... {verb} PUBLICATION ... WITH (refresh = false) instead."
        raise NotInPrerequisiteState(_REFRESH_REFUSED, hint=hint)
    copy_data = not isinstance(action, sql.DropPublication) and action.copy_data
    way = "ADD" if adds else "SET" if isinstance(action, sql.SetPublication) else "DROP"
    _refuse_copy_in_two_phase(
        subscription,
        copy_data,
        "ALTER SUBSCRIPTION with refresh and copy_data is not allowed when two_phase is enabled",
        f"Use ALTER SUBSCRIPTION ... {way} PUBLICATION with refresh = false, or with copy_data = false, or use DROP/CREATE "
        "SUBSCRIPTION.",
    )
    await _refresh(
        session,
        replace(subscription, publications=publications),
        copy_data=copy_data,
        command=f"ALTER SUBSCRIPTION ... {way} PUBLICATION",
        validate=() if isinstance(action, sql.DropPublication) else action.publications,
        replaces=subscription.publications,
    )


async def _refresh(
    session: Session,
    subscription: Subscription,
    *,
    copy_data: bool,
    command: str = "ALTER SUBSCRIPTION ... REFRESH PUBLICATION",
    validate: tuple[str, ...] | None = None,
    replaces: tuple[str, ...] | None = None,
) -> None:
    """Add the tables that are published now and remove the others.

    `validate` names the publications that must exist (None: all of the subscription's).  `replaces`: the stored publications, if
    those of `subscription` take their place.  Every refusal comes before the first change.  Two commands at once would each take
    away what the other adds: the later one is refused, as in PostgreSQL (heapam.c: simple_heap_update).
    """
    async with await session.connect(subscription.name, subscription.conninfo) as connection:
        await published_tables.check_publications(
            connection, subscription.publications if validate is None else validate
        )
        published = await published_tables.published_tables(connection, subscription.publications)
        relations = await session.catalog.relations(subscription.oid)
        sequences = await published_sequences.published_sequences(connection, subscription.publications)
        present, left, joined = await published_sequences.difference(session, subscription, sequences)
        if subscription.options.origin == "none" and copy_data:
            await published_sequences.warn_of_foreign_values(
                session,
                connection,
                subscription.name,
                subscription.publications,
                besides=[one for one in present if not one.leaving],
            )
            have = [quote_qualified(r.schema, r.published_name) for r in relations]
            await published_tables.warn_of_foreign_rows(
                session, connection, subscription.name, subscription.publications, besides=have
            )
        if subscription.options.schema_changes == "follow":
            relations = await follow_names(session.catalog, subscription.oid, relations, published)
            await session.catalog.ask_for_columns(subscription.oid)
        gone, new, having = _difference(relations, published, subscription.options.layouts)
        if subscription.options.binary:
            await published_tables.refuse_binary(connection, new)
        changes = await first_connection(subscription, connection)
        target = changes.get("target", subscription.target)
        plans = await _plan(session, subscription, connection, new, gone, having, target, copy_data=copy_data)
        new_sequences = await published_sequences.joining(
            session,
            joined,
            subscription.name,
            target,
            copy_data=copy_data,
            create_tables=subscription.options.create_tables,
            present=present,
        )
        if replaces is not None:
            changes["publications"] = subscription.publications
        joining = [one.relation(copy_data=copy_data, lsn=None) for one in plans]
        async with _without_slots(session, subscription, connection, gone, command):
            leaving = [relation.relid for relation in gone]
            await session.catalog.refresh_subscription(
                subscription.oid,
                changes,
                leaving,
                joining,
                ([one.relid for one in left], new_sequences),
                publications=subscription.publications if replaces is None else replaces,
            )
        for relation in gone:
            name = relation.qualified_name
            session.notice(f'table "{name}" removed from subscription "{subscription.name}"', "DEBUG1")
        for one in plans:
            session.notice(f'table "{one.target.relation}" added to subscription "{subscription.name}"', "DEBUG1")
        for sequence in left:
            name = sequence.qualified_name
            session.notice(f'sequence "{name}" removed from subscription "{subscription.name}"', "DEBUG1")
        for new_one in new_sequences:
            name = f"{new_one.schema}.{new_one.name}"
            session.notice(f'sequence "{name}" added to subscription "{subscription.name}"', "DEBUG1")


async def _plan(
    session: Session,
    subscription: Subscription,
    connection: Connection,
    new: dict[Oid, PublishedTable],
    gone: list[SubscriptionRel],
    having: set[int],
    target: str,
    *,
    copy_data: bool,
) -> list[published_tables.Plan]:
    """Plan the tables that join, without those that the launcher adds meanwhile (new_tables = follow)."""
    leaving = {relation.relid for relation in gone}
    while True:
        try:
            return await published_tables.plan(
                session,
                connection,
                new,
                target,
                copy_data=copy_data,
                create_tables=subscription.options.create_tables,
                choices=TypeChoices.parse(subscription.options.types),
                layouts=subscription.options.layouts,
                subid=subscription.oid,
                leaving=gone,
                having=having,
            )
        except PubsubError:
            here = {relation.relid for relation in await session.catalog.relations(subscription.oid)} - leaving
            if not here - having:
                raise
            having |= here


async def follow_names(
    catalog: Catalog,
    subid: int,
    relations: list[SubscriptionRel],
    published: dict[Oid, PublishedTable],
) -> list[SubscriptionRel]:
    """Rename the tables that the publisher has renamed; return all relations with their current names."""
    found = []
    for relation in relations:
        now = published.get(relation.oid)
        if now is not None and (now.schema, now.name) != (relation.schema, relation.published_name):
            name = name_beside(now.name, relation.beside)
            await catalog.rename_relation(subid, relation.relid, now.schema, name)
            relation = replace(relation, schema=now.schema, name=name)
        found.append(relation)
    return found


def _difference(
    relations: list[SubscriptionRel], published: dict[Oid, PublishedTable], layouts: Layouts
) -> tuple[list[SubscriptionRel], dict[Oid, PublishedTable], set[int]]:
    """Return the tables that leave, those of which something joins, and the relids of what they have that stays.

    As in PostgreSQL, a table is identified by its name: a table that was dropped and created again on the publisher
    stays.  One whose copy is not finished leaves and joins again, because the copy finds the table by its oid.  What stands beside a
    mirror leaves when the option mode does not name it any more.
    """
    by_name = {(table.schema, table.name): oid for oid, table in published.items()}
    kept: set[int] = set()
    gone = []
    for relation in relations:
        name = relation.schema, relation.published_name
        oid = by_name.get(name)
        copied = relation.state in (RelState.SYNCDONE, RelState.READY)
        if oid is not None and relation.beside in layouts.relations_of(*name) and (oid == relation.oid or copied):
            kept.add(relid_of(oid, relation.beside))
        else:
            gone.append(relation)
    return gone, _lacking(published, layouts, kept), kept


def _lacking(
    published: Mapping[Oid, PublishedTable], layouts: Layouts, having: Collection[int]
) -> dict[Oid, PublishedTable]:
    """Return the tables that are not among the relids `having`, or beside whose mirrors something is missing."""
    return {
        oid: table
        for oid, table in published.items()
        if any(relid_of(oid, one) not in having for one in layouts.relations_of(table.schema, table.name))
    }


async def first_connection(subscription: Subscription, connection: Connection) -> SubscriptionChanges:
    """Return what CREATE SUBSCRIPTION … WITH (connect = false) could not know.  Refuses an unexpected system."""
    identity = await check_system(connection, subscription)
    if subscription.publisher_system_identifier is not None:
        return {}
    return {
        "publisher_system_identifier": identity.system_identifier,
        "publisher_timeline": identity.timeline,
        "publisher_database": connection.dbname,
        "target": subscription.target or connection.dbname,
    }


@asynccontextmanager
async def _without_slots(
    session: Session, subscription: Subscription, connection: Connection, gone: list[SubscriptionRel], command: str
) -> AsyncIterator[None]:
    """Run the body of `command`, which removes tables, when their slots are dropped.  If one may have a slot, stop the workers first.

    Otherwise a worker could create a slot after this command has looked, and the slot would remain.  So would one whose
    table is removed first, if this command is killed then; a table that has lost its slot is copied anew, or removed by
    the next REFRESH.
    """
    node_id = (await session.catalog.node()).node_id
    async with paused(session, subscription, command) if slot_names(gone, node_id) else nullcontext():
        await drop_slots_of(session, connection, gone, node_id)
        yield


async def resync(
    session: Session,
    subscription: Subscription,
    names: tuple[QualifiedName, ...],
    *,
    lets_columns_in: bool = False,
    resynced_at: tuple[float, ...] | None = None,
) -> None:
    """Have the named tables copied again; the copy's commit replaces the rows of their Delta tables.

    A table that was dropped and created again on the publisher is known by its new oid from then on, and with
    schema_changes = follow one that was renamed by its new name.  `lets_columns_in`: columns that were left out because they came
    later than the options columns, exclude and mask are copied, too.  `resynced_at` (SubscriptionOptions) is stored before the workers
    begin again, whom it would end with the copies that they have begun.
    """
    catalog, oid = session.catalog, subscription.oid
    if not subscription.enabled:
        raise NotInPrerequisiteState("ALTER SUBSCRIPTION ... RESYNC TABLE is not allowed for disabled subscriptions")
    relations = {(r.schema, r.name): r for r in await catalog.relations(oid)}
    wanted = []
    for name in names:
        found = relations.get((name.schema or "public", name.name))
        if found is None:
            raise UndefinedTable(f'table "{name}" is not part of subscription "{subscription.name}"')
        wanted.append(found)
    node_id = (await catalog.node()).node_id
    every = {relation.relid for relation in wanted} == {relation.relid for relation in relations.values()}
    async with await session.connect(subscription.name, subscription.conninfo) as connection:
        if not every:
            await _check_stream(connection, subscription)
        published = await published_tables.published_tables(connection, subscription.publications)
        oids = {(table.schema, table.name): oid for oid, table in published.items()}
        if subscription.options.schema_changes == "follow":
            # Of a stream that is lost, no message tells of a new name.
            wanted = await follow_names(catalog, oid, wanted, published)
        for relation in wanted:
            if (relation.schema, relation.published_name) not in oids:
                raise UndefinedTable(
                    f'table "{relation.qualified_name}" not found on publisher',
                    hint="ALTER SUBSCRIPTION … REFRESH PUBLICATION takes it out of the subscription.",
                )
        async with paused(session, subscription, "ALTER SUBSCRIPTION ... RESYNC TABLE"):
            # Read again: the workers have ended and no longer change the states.
            held = {relation.relid: relation for relation in await catalog.relations(oid)}
            await drop_slots_of(session, connection, [held[r.relid] for r in wanted if r.relid in held], node_id)
            again: dict[int, NewRelation | str | None] = {}
            for relation in wanted:
                now, here = oids[relation.schema, relation.published_name], held.get(relation.relid)
                before = None
                if here is not None and here.remembers_options and here.definition is not None:
                    before = asking(here.definition) if lets_columns_in else here.definition
                again[relation.relid] = before
                if now != relation.oid:
                    if before is not None:
                        before = of_table_made_anew(before, await definitions.table_definition(connection, now))
                    again[relation.relid] = NewRelation(
                        relid_of(now, relation.beside),
                        relation.schema,
                        relation.name,
                        relation.path,
                        definition=before,
                        known_source=relation.whose,
                    )
            if not every:
                await catalog.copy_again(oid, again, None)
                return
            if subscription.slot_name is None:
                raise NotInPrerequisiteState(f'subscription "{subscription.name}" does not have a slot name')
            identity = await identify_system(connection)
            await catalog.copy_again(oid, again, (identity.system_identifier, identity.timeline))
            # Last: if the command ends before it, no table lacks what the stream skips.
            await begin_stream_anew(session, subscription, connection, subscription.slot_name)
            if resynced_at is not None:
                await catalog.alter_subscription(oid, options=lambda options: replace(options, resynced_at=resynced_at))


async def _failed_to_decode(catalog: Catalog, oid: int) -> bool:
    """Return whether the subscription stands still since its publisher could not decode."""
    known = next((one for one in await catalog.subscription_stats() if one.subid == oid), None)
    return known is not None and cannot_decode(known.error, known.error_sqlstate)


async def _check_stream(connection: Connection, subscription: Subscription) -> None:
    """Check that the stream can continue for the tables that are not copied again.  Raises NotInPrerequisiteState."""
    await check_system(connection, subscription)
    name = subscription.slot_name
    slot = await slots.slot_info(connection, name) if name is not None else None
    if name is not None and (slot is None or slot.lost):
        state = "does not exist" if slot is None else "has been invalidated"
        raise NotInPrerequisiteState(
            f'replication slot "{name}" {state}',
            detail="What was changed meanwhile is missing in every table of the subscription.",
            hint="Name every table of the subscription: then RESYNC TABLE makes a new slot, too.",
        )


async def begin_stream_anew(session: Session, subscription: Subscription, connection: Connection, name: str) -> None:
    """Move the slot `name` to the publisher's current position, because every table is copied again.

    Creates the slot if there is none or it is lost.  Otherwise skips the changes that the slot retains, which also gets
    past changes that cannot be decoded.  With two-phase commit enabled it skips nothing: of a transaction prepared
    before the new position only the COMMIT PREPARED would arrive.  If what the slot retains cannot be decoded, it gets
    another one instead, to which such a transaction is sent whole, and whose creation waits for those that are prepared.
    The stream begins where the slot does: no origin is stored.
    """
    two_phase = subscription.options.two_phase_state == "e"
    slot = await slots.slot_info(connection, name)
    if slot is not None and (slot.lost or (two_phase and await _failed_to_decode(session.catalog, subscription.oid))):
        await drop_slot(connection, name, missing_ok=True, wait=True)
        slot = None
    if slot is None:
        await make_slot(
            session,
            connection,
            subscription.name,
            subscription.conninfo,
            name,
            two_phase=two_phase,
            failover=subscription.options.failover,
        )
        session.notice(f'created replication slot "{name}" on publisher')
    elif not two_phase:
        await slots.advance_slot(connection, name)


async def _set_options(session: Session, subscription: Subscription, options: SubscriptionOptions) -> None:
    given = options.specified
    merged = subscription.options.merge(options)
    option_effects.tell(session, options)
    if "register" in given:
        session.settings.spark.require_catalogs(options.layouts.catalogs())
        await refuse_one_name(session.catalog, options.layouts, subscription.oid)
    refuse_new_tables_in_two_phase(merged)
    refuse_unfollowed_choice(merged)
    refuse_unfit_source(merged)
    for relation in await session.catalog.relations(subscription.oid) if merged.gather else ():
        if relation.whose is not None:
            merged.layouts.refuse_unfit_for_sources(relation.schema, relation.published_name)
    published_tables.refuse_unreached_comments(session, options)
    changes: SubscriptionChanges = {"options": lambda stored: stored.merge(options)}
    if "slot_name" in given:
        if subscription.enabled and options.slot_name is None:
            raise NotInPrerequisiteState("cannot set slot_name = NONE for enabled subscription")
        changes["slot_name"] = options.slot_name
    if "two_phase" in given:
        state = await _set_two_phase(session, subscription, options)
        changes["options"] = lambda stored: replace(stored.merge(options), two_phase_state=state)
    if "failover" in given:
        await _set_failover(session, subscription, options.failover)
    if "types" in given:
        published_tables.refuse_unknown_types(TypeChoices.parse(options.types))
    if given & {"columns", "exclude", "mask", "rename", "where"}:
        async with await session.connect(subscription.name, subscription.conninfo) as connection:
            published = await published_tables.published_tables(connection, subscription.publications)
            here = {relation.oid for relation in await session.catalog.relations(subscription.oid)}
            published = {oid: table for oid, table in published.items() if oid in here}
            choices = TypeChoices.parse(merged.types)
            await published_tables.refuse_unfit_choice(connection, published, choices, merged.layouts)
        rules = [rule for rules in merged.layouts.mask.values() for rule in rules.values()]
        published_tables.tell_of_mask_key(session, any(rule.name == "hash" for rule in rules))
    if given & {"mode", "deletes", "truncate", "metadata", "columns", "exclude", "mask", "rename", "where"}:
        session.notice(
            "mode, deletes, truncate, metadata, columns, exclude, mask, rename and where hold for a table from its next copy on",
            hint=f"ALTER SUBSCRIPTION {subscription.name} RESYNC TABLE … copies a table anew. What is to stand beside a mirror "
            "(mirror + history) comes, and goes, with REFRESH PUBLICATION.",
        )
    if options.binary and not subscription.options.binary:
        async with await session.connect(subscription.name, subscription.conninfo) as connection:
            published = await published_tables.published_tables(connection, subscription.publications)
            await published_tables.refuse_binary(connection, published)
    await session.catalog.alter_subscription(subscription.oid, **changes)


def _refuse_copy_in_two_phase(subscription: Subscription, copy_data: bool, message: str, hint: str) -> None:
    """Refuse a copy while two_phase is enabled: the table would lack changes prepared before it.

    Follows subscriptioncmds.c: AlterSubscription.
    """
    if subscription.options.two_phase_state == "e" and copy_data:
        raise PubsubError(message, sqlstate="42601", hint=hint)


async def _set_two_phase(session: Session, subscription: Subscription, given: SubscriptionOptions) -> TwoPhaseState:
    """Return the new two_phase state (subscriptioncmds.c: AlterSubscription).

    Turning it off alters the slot here.  The apply worker turns it on, when it starts and all tables are ready.
    """
    if subscription.enabled:
        raise NotInPrerequisiteState('cannot set option "two_phase" for enabled subscription')
    if given.two_phase:
        return "p"
    if "slot_name" in given.specified:
        raise PubsubError('"slot_name" and "two_phase" cannot be altered at the same time', sqlstate="42601")
    if subscription.slot_name is None:
        raise NotInPrerequisiteState('cannot set option "two_phase" for a subscription that does not have a slot name')
    await session.workers_ended(subscription)
    state = await session.catalog.state()
    if subscription.options.two_phase_state == "e" and any(subid == subscription.oid for subid, _ in state.prepared):
        raise NotInPrerequisiteState(
            'cannot disable "two_phase" when prepared transactions exist',
            hint="Resolve these transactions and try again.",
        )
    async with await session.connect(subscription.name, subscription.conninfo) as connection:
        await alter_slot(connection, subscription.slot_name, two_phase=False)
    return "d"


async def _set_failover(session: Session, subscription: Subscription, failover: bool) -> None:
    """Alter the option `failover` of the slot (subscriptioncmds.c: CheckAlterSubOption)."""
    if subscription.enabled:
        raise NotInPrerequisiteState('cannot set option "failover" for enabled subscription')
    if subscription.slot_name is None:
        raise NotInPrerequisiteState('cannot set option "failover" for a subscription that does not have a slot name')
    async with await session.connect(subscription.name, subscription.conninfo) as connection:
        await alter_slot(connection, subscription.slot_name, failover=failover)
