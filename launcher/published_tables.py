"""Plan the Delta tables of published tables, and check them, before anything is created.

Tables that cannot be replicated are refused here, so that CREATE SUBSCRIPTION and REFRESH PUBLICATION leave nothing
behind.  Functions import the modules that need pyarrow, so that commands without a table to plan answer sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from catalog.beside import relid_of
from catalog.records import NewRelation, State, SubscriptionRel
from catalog.states import RelState
from launcher.client_session import Session
from launcher.registered_names import refuse_one_name
from pubsub.errors import (
    DuplicateObject,
    FeatureNotSupported,
    InsufficientPrivilege,
    NotInPrerequisiteState,
    PublisherError,
    UndefinedObject,
    UndefinedTable,
)
from pubsub.masks import SHORTEST, VARIABLE, configured_key
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions, publication
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import TableDefinition
from pubsub.publisher.publication import PublishedTable
from pubsub.sql.identifiers import quote_identifier, quote_qualified, table_path
from pubsub.sql.layout_rules import Mode, name_beside
from pubsub.sql.layouts import Layout, Layouts, not_published
from pubsub.sql.options import SubscriptionOptions
from pubsub.sql.typechoices import TypeChoices

if TYPE_CHECKING:
    from apply.schema_changes.column_choice import Choice
    from pubsub.delta.table import TargetTable

#: clusteringColumns: delta.clustering.validateNumClusteringColumns.
_MOST_CLUSTERED: Final = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """One published table and the Delta table planned for it."""

    published: PublishedTable
    definition: TableDefinition
    target: TargetTable
    choice: Choice
    exists: bool = False
    """Whether the Delta table exists."""
    beside: Mode | None = None
    """In which mode it is to stand beside the table's mirror; None: it does not."""

    def relation(self, *, copy_data: bool, lsn: Lsn | None) -> NewRelation:
        """Return the row that joins the subscription: in state `i`, or without a copy in `r` from `lsn` on.

        A row without a definition makes the sync worker create the Delta table first, which takes Spark.
        """
        from apply.schema_changes.table_definition import described_json

        return NewRelation(
            relid=relid_of(self.definition.oid, self.beside),
            schema=self.definition.schema,
            name=name_beside(self.definition.name, self.beside),
            path=self.target.path,
            state=RelState.INIT if copy_data else RelState.READY,
            lsn=None if copy_data else lsn,
            definition=described_json(self.target, self.definition, choice=self.choice)
            if copy_data or self.exists
            else None,
            estimated_rows=self.definition.estimated_rows,
        )


async def check_publications(connection: Connection, publications: Sequence[str]) -> None:
    """Refuse publications that do not exist (subscriptioncmds.c: check_publications, which only warns).

    PostgreSQL creates the subscription and its worker then fails forever; here nothing is created that cannot work.
    """
    missing = await publication.missing_publications(connection, publications)
    if not missing:
        return
    names = ", ".join(f'"{name}"' for name in missing)
    what = f"publication {names} does" if len(missing) == 1 else f"publications {names} do"
    raise UndefinedObject(
        f"{what} not exist on the publisher",
        hint=f'Create it in database "{connection.dbname}" with CREATE PUBLICATION, or correct the name.',
    )


async def warn_of_foreign_rows(
    session: Session,
    connection: Connection,
    subscription: str,
    publications: Sequence[str],
    besides: Collection[str] = (),
) -> None:
    """Warn that a copy takes rows of every origin, despite origin = none.

    Follows subscriptioncmds.c: check_publications_origin.
    """
    found = await publication.publications_with_foreign_rows(connection, publications, list(besides))
    if not found:
        return
    names = ", ".join(f'"{name}"' for name in found)
    what = f"a publication ({names}) that contains" if len(found) == 1 else f"publications ({names}) that contain"
    session.notice(
        f'subscription "{subscription}" requested copy_data with origin = NONE but might copy data that had a different origin',
        "WARNING",
        detail=f"The subscription being created subscribes to {what} tables that are written to by other subscriptions.",
        hint="Verify that initial data copied from the publisher tables did not come from other origins.",
    )


async def published_tables(connection: Connection, publications: Sequence[str]) -> dict[Oid, PublishedTable]:
    """Return the published tables by oid (subscriptioncmds.c: fetch_table_list).  Raises FeatureNotSupported."""
    try:
        tables = await publication.published_tables(connection, publications)
    except PublisherError as error:
        raise PublisherError(
            f"could not receive list of replicated tables from the publisher: {error.message}",
            sqlstate=error.sqlstate,
            detail=error.detail,
            hint=error.hint,
        ) from error
    return {table.oid: table for table in tables}


async def plan(
    session: Session,
    connection: Connection,
    tables: Mapping[Oid, PublishedTable],
    target: str,
    *,
    copy_data: bool,
    create_tables: bool,
    choices: TypeChoices | None = None,
    layouts: Layouts | None = None,
    subid: int | None = None,
    leaving: Collection[SubscriptionRel] = (),
    having: Collection[int] = (),
) -> list[Plan]:
    """Plan `tables`, without those that have no column to replicate, of which the client is told, and what stands beside them.

    `subid`: the subscription, if there is one yet; `leaving`: tables that leave it by the same command; `having`: relids that it has
    already.  Raises for the first that cannot be replicated or read, or whose Delta table may not be used.
    """
    from apply.schema_changes.column_choice import choose
    from apply.schema_changes.table_definition import planned_table

    plans = []
    layouts = layouts or Layouts()
    found = await definitions.table_definitions(connection, tables)
    for table in tables.values():
        definition = found.get(table.oid)
        if definition is None:
            continue  # dropped since it was listed
        if not definition.published(table.attnames):
            session.notice(
                f'table "{definition.schema}.{definition.name}" is left out: it has no column that is published',
                detail="A Delta table has at least one column.",
                hint="Once it has one, ALTER SUBSCRIPTION ... REFRESH PUBLICATION adds it.",
            )
            continue
        name = definition.schema, definition.name
        schema, place = layouts.sharing.place_of(*name)
        choice = choose(layouts, definition, table.attnames, None)
        source = layouts.sharing.source_of(*name)
        for beside in layouts.relations_of(*name):
            if relid_of(table.oid, beside) in having:
                continue
            path = table_path(session.settings.warehouse_uri, target, schema, name_beside(place, beside))
            planned = planned_table(definition, table.attnames, path, choices, choice, layouts, source, beside)
            _refuse_unfit_source(planned, copy_data)
            plans.append(Plan(table, definition, planned, choice, beside=beside))
    tell_of_mask_key(session, any(one.target.masks.are_keyed for one in plans))
    _tell_of_lookups(session, plans)
    if copy_data:
        await _refuse_unreadable(connection, plans)
    for one in plans:
        refuse_layout(one.target, layouts.beside(one.beside).of(one.definition.schema, one.definition.name))
    state = await session.catalog.state()
    node_id = state.node.node_id
    _refuse_owned(state, plans, leaving, subid)
    _refuse_unlike(plans)
    joining = [(one.definition.schema, one.definition.name, one.beside) for one in plans]
    await refuse_one_name(session.catalog, layouts, subid, joining, [one.path for one in leaving])
    plans = [
        replace(one, exists=await asyncio.to_thread(refuse_taken, one.target, copy_data, create_tables, node_id, subid))
        for one in plans
    ]
    for one in plans:
        if one.target.masks and not copy_data:
            raise FeatureNotSupported(
                f'the option mask needs a copy of table "{one.target.relation}"',
                detail="Values that the Delta table may have already would stay.",
                hint="Use copy_data = true.",
            )
        if one.target.where is not None and not copy_data:
            raise FeatureNotSupported(
                f'the option where needs a copy of table "{one.target.relation}"',
                detail="Rows that the Delta table may have already, and do not meet the condition, would stay.",
                hint="Use copy_data = true.",
            )
        if one.target.closed and not copy_data and not one.exists:
            raise FeatureNotSupported(
                f'the options columns, exclude and rename need a copy, or a Delta table, of table "{one.target.relation}"',
                detail="Until then its columns could be given other names.",
                hint="Use copy_data = true, or create the Delta table.",
            )
    return plans


async def refuse_binary(connection: Connection, tables: Mapping[Oid, PublishedTable]) -> None:
    """Refuse a table with a column that cannot be read from binary transfer.  Raises FeatureNotSupported naming it."""
    types = await definitions.binary_types(connection)
    found = await definitions.table_definitions(connection, tables)
    for relid, definition in found.items():
        for column in definition.published(tables[relid].attnames):
            try:
                types.check(column.type_oid)
            except FeatureNotSupported as error:
                raise FeatureNotSupported(
                    f'column "{column.name}" of table "{definition.schema}.{definition.name}": {error.message}',
                    hint=error.hint,
                ) from error


def refuse_unknown_types(choices: TypeChoices) -> None:
    """Refuse an entry of the option `types` for a type that does not exist or does not have that choice."""
    from pubsub.protocol import type_contract as contract

    for name, choice in choices.types.items():
        is_array = name == contract.ARRAYS or name.endswith("[]")
        rule = contract.BY_NAME.get(name.removesuffix("[]"))
        if is_array or name == contract.COMPOSITES or "." in name:
            if choice == "variant":
                raise FeatureNotSupported(f"type {name} cannot be replicated as variant", detail="Only jsonb can.")
            if rule is not None or name in (contract.ARRAYS, contract.COMPOSITES) or "." in name:
                continue  # only the publisher knows users' types: refuse_unknown_columns
        if rule is None:
            raise UndefinedObject(f'type "{name}" of subscription option types is not in the type contract')
        if choice not in rule.choices:
            raise FeatureNotSupported(
                f"type {rule.sql_name} cannot be replicated as {choice}", detail=f"It is kept as text: {rule.why}."
            )


def refuse_unknown_columns(choices: TypeChoices, plans: Collection[Plan]) -> None:
    """Refuse an entry of the option `types` for an unpublished column, or for a user's type of no published column."""
    from pubsub.protocol.column_types import type_names

    held = {
        name
        for one in plans
        for column in one.definition.columns
        for shape in column.shape.all()
        for name in type_names(shape)
    }
    for name in choices.types:
        if "." in name and name not in held:
            raise UndefinedObject(f'type "{name}" of subscription option types is no published column\'s')
    columns = {(one.definition.schema, one.definition.name, name) for one in plans for name in one.choice.names}
    for schema, table, column in choices.columns:
        if (schema, table, column) not in columns:
            raise UndefinedObject(
                f'column "{column}" of table "{schema}.{table}" in subscription option types is not published',
                sqlstate="42703",
            )


def refuse_unreached_comments(session: Session, options: SubscriptionOptions) -> None:
    """Refuse comments where only Spark reaches the Delta tables: each would be a statement, and a commit, of its own."""
    if not options.comments:
        return
    from pubsub.delta.places import is_reached

    if not is_reached(session.settings.warehouse_uri):
        raise FeatureNotSupported(
            "comments cannot be taken over where only Spark reaches the Delta tables",
            detail=f'They lie at "{session.settings.warehouse_uri}".',
        )


def _refuse_unfit_source(target: TargetTable, copy_data: bool) -> None:
    """Refuse a table of several sources that starts without a copy, or lies where only Spark reaches it."""
    from pubsub.delta.places import is_reached

    if target.source is None:
        return
    if not copy_data:
        raise FeatureNotSupported(
            f'a Delta table of several sources needs a copy of table "{target.relation}"',
            detail="Which of its rows are a source's is known from the copy on.",
            hint="Use copy_data = true.",
        )
    if not is_reached(target.path):
        raise FeatureNotSupported(
            f'the Delta table of "{target.relation}" cannot have several sources where only Spark reaches it',
            detail=f'It would lie at "{target.path}".',
        )


def _refuse_owned(
    state: State, plans: Collection[Plan], leaving: Collection[SubscriptionRel], subid: int | None
) -> None:
    """Refuse paths in the warehouse that another table has, or that differ from such a path only in case.

    Sources share a path, each with another text (pubsub.sql.sharing).

    Some file systems treat such names as the same, and so do engines that read tables by name.
    """
    names = {s.oid: s.name for s in state.subscriptions}
    own = {r.path: r for r in state.relations if r.subid == subid}
    # By path, and by whose rows they are: None, if all are.
    taken: dict[str, dict[str | None, tuple[str, str, str]]] = {}
    gone = {(r.subid, r.relid) for r in leaving}
    for r in state.relations:
        if (r.subid, r.relid) not in gone:
            owner = "" if r.subid == subid else names.get(r.subid, "")
            taken.setdefault(r.path.casefold(), {})[r.whose] = (r.path, r.qualified_name, owner)
    for one in plans:
        path, relation, whose = one.target.path, one.target.relation, one.target.whose
        there = taken.setdefault(path.casefold(), {})
        shared = whose is not None and None not in there and all(other == path for other, _, _ in there.values())
        if not there or (shared and whose not in there):
            there[whose] = (path, relation, "")
            continue
        other_path, other_relation, owner = there.get(whose) or next(iter(there.values()))
        if whose is None and path in own and own[path].qualified_name != relation:
            raise DuplicateObject(
                f'the Delta table for relation "{relation}" is that of relation "{other_relation}"',
                detail=f"That table had this name before; it lies at {path}.",
                hint="Give the new table another name on the publisher.",
            )
        if other_path == path and shared:
            raise DuplicateObject(
                f'the source of the Delta table for relation "{relation}" belongs to subscription "{owner}"'
                if owner
                else f'relations "{other_relation}" and "{relation}" would be one source of a Delta table, "{whose}"',
                detail=f"Both would write its rows at {path}.",
                hint="Give the subscription a source of its own." if owner else "Gather one of them elsewhere.",
            )
        if other_path == path:
            raise DuplicateObject(
                f'the Delta table for relation "{relation}" belongs to subscription "{owner}"'
                if owner
                else f'the Delta table for relation "{relation}" is that of relation "{other_relation}", too',
                detail=f"Both would write {path}.",
                hint="Give the subscription a folder of its own: WITH (target = '…')."
                if owner
                else "Gather both of them, or neither there.",
            )
        raise FeatureNotSupported(
            f'tables "{other_relation}" and "{relation}" differ only in case',
            detail=f"Their Delta tables would lie at {other_path} and {path}.",
            hint="Rename one of them, or give them to subscriptions with targets of their own."
            if not owner
            else "Give the subscription a folder of its own: WITH (target = '…').",
        )


def _refuse_unlike(plans: Collection[Plan]) -> None:
    """Refuse tables that join one Delta table and do not fit each other: a later one may lack columns, or bring some."""
    from pubsub.delta import sources

    found: dict[str, list[TargetTable]] = {}
    for one in plans:
        if one.target.source is not None:
            before = found.setdefault(one.target.path, [])
            for other in before:
                sources.refuse_unlike(one.target, other)
            before.append(one.target)


def refuse_unknown_tables(layouts: Layouts, plans: Collection[Plan]) -> None:
    """Refuse tables, and columns of no table, that are named by an option and are not published."""
    published = {(one.definition.schema, one.definition.name) for one in plans}
    for option, schema, name in layouts.tables():
        if (schema, name) not in published:
            raise not_published(option, [f'"{schema}.{name}"'])
    names = {
        (one.definition.schema, one.definition.name): one.definition.names(one.published.attnames) for one in plans
    }
    layouts.require_columns_somewhere(names)


def tell_of_mask_key(session: Session, needed: bool) -> None:
    """Tell the client that the daemon, which may be another process, needs a key, if this one has none.  Raises for a bad one."""
    if needed and configured_key() is None:
        session.notice(
            f"the daemon needs {VARIABLE} in its environment to mask columns by hash",
            hint=f"At least {SHORTEST} bytes that nobody can guess.  Without it these tables are not copied.",
        )


def _tell_of_lookups(session: Session, plans: Collection[Plan]) -> None:
    """Tell the client of tables whose changes do not say which rows met the condition of the option where before."""
    from apply.schema_changes.kept_rows import untold_column

    for one in plans:
        where, definition = one.choice.where, one.definition
        published = f"{definition.schema}.{definition.name}"
        lacking = None if where is None or not definition.identity_key else untold_column(where, definition)
        if lacking is not None:
            session.notice(
                f'rows of table "{one.target.relation}" are looked up in the Delta table whenever they change',
                detail=f'Column "{lacking}" of the condition of the option where is not part of the replica identity. A row that '
                "meets the condition by an UPDATE which leaves values unsent (TOAST) is an error.",
                hint=f"ALTER TABLE {published} REPLICA IDENTITY FULL; has changes tell what rows were before.",
            )


async def refuse_unfit_choice(
    connection: Connection, tables: Mapping[Oid, PublishedTable], choices: TypeChoices, layouts: Layouts
) -> None:
    """Refuse options columns, exclude, mask, rename and where that name what is not published, or what a table cannot do without."""
    from apply.schema_changes.column_choice import choose
    from apply.schema_changes.table_definition import target_table

    layouts = layouts.choices
    found = await definitions.table_definitions(connection, tables)
    plans = []
    for oid, definition in found.items():
        attnames = tables[oid].attnames
        if definition.published(attnames):
            choice = choose(layouts, definition, attnames, None)
            target = target_table(definition, attnames, "", choices, choice)
            plans.append(Plan(tables[oid], definition, target, choice))
    refuse_unknown_tables(layouts, plans)


def refuse_layout(target: TargetTable, layout: Layout) -> None:
    """Refuse what Delta cannot do: columns that are not there, or that cannot partition or cluster a table."""
    from pubsub.delta.table import can_cluster, can_partition

    for option, columns in (("partition_by", layout.partition_by), ("cluster_by", layout.cluster_by)):
        for column in columns:
            if column not in target.schema.names:
                raise UndefinedObject(
                    f'column "{column}" of table "{target.relation}" in subscription option {option} is not published',
                    sqlstate="42703",
                )
    for name in layout.partition_by:
        if not can_partition(target.schema.field(name).type):
            raise FeatureNotSupported(
                f'column "{name}" cannot partition the Delta table of "{target.relation}"',
                detail="Whole numbers, texts, dates, timestamps and Booleans can: values of other types have several texts.",
            )
    if len(layout.partition_by) == len(target.schema):
        raise FeatureNotSupported(
            f'the Delta table of "{target.relation}" cannot be partitioned by all of its columns',
            detail="Its data files would be empty.",
        )
    if len(layout.cluster_by) > _MOST_CLUSTERED:
        raise FeatureNotSupported(
            f'the Delta table of "{target.relation}" cannot be clustered by more than {_MOST_CLUSTERED} columns'
        )
    for name in layout.cluster_by:
        if not can_cluster(target.schema.field(name).type):
            raise FeatureNotSupported(
                f'column "{name}" cannot cluster the Delta table of "{target.relation}"',
                detail="Delta keeps no least and greatest value of its type.",
            )


async def _refuse_unreadable(connection: Connection, plans: Sequence[Plan]) -> None:
    readable = await definitions.readable_tables(connection, {one.definition.oid: _read(one) for one in plans})
    for one in plans:
        definition = one.definition
        if definition.oid in readable:
            continue
        name = quote_qualified(definition.schema, definition.name)
        role = quote_identifier(connection.user)
        raise InsufficientPrivilege(
            f"permission denied for table {definition.name}",
            detail=f'Role {role} may not read table "{one.target.relation}" on the publisher, and its rows are to be copied.',
            hint=f"GRANT SELECT ON {name} TO {role}; or use WITH (copy_data = false).",
        )


def _read(one: Plan) -> Sequence[str]:
    """Return the columns that a copy reads."""
    if one.choice.left_out or one.target.masks:
        return [*one.choice.read]
    return one.definition.names(one.published.attnames)


def refuse_taken(
    target: TargetTable, copy_data: bool, create_tables: bool, node_id: str = "", subid: int | None = None
) -> bool:
    """Return whether the Delta table exists; refuse a missing one, one with other columns, and rows before a copy.

    `node_id`, `subid`: whose a source of it may be.
    """
    from pubsub.delta import past, sources
    from pubsub.delta import table as delta

    if not delta.exists(target.path):
        if not create_tables:
            raise UndefinedTable(
                f'Delta table for "{target.relation}" does not exist',
                detail=f'It should lie at "{target.path}".',
                hint="Create it, or use WITH (create_tables = true).",
            )
        return False
    properties = delta.properties(target.path)
    past.refuse_to_replace(target, properties)
    sources.refuse_unfit(target, properties)
    if target.source is not None:
        sources.refuse_unfit_types(target)
        if not sources.refuse_owned(target, properties, node_id, subid):
            sources.refuse_rows(target)
        return True
    delta.check_columns(target)
    if copy_data and delta.row_count(target.path) > 0:
        raise NotInPrerequisiteState(
            f'the Delta table for "{target.relation}" holds rows already',
            detail=f'It lies at "{target.path}".',
            hint="Move it away, use WITH (copy_data = false), or choose another target.",
        )
    return True
