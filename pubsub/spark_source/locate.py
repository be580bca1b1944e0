"""Find the Delta table that the options name: by its path, or in a node's catalog.  In the driver's processes alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pubsub.delta.places import directory, is_local
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, PubsubError, UndefinedObject, UndefinedTable
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.spark_source.options import Options

if TYPE_CHECKING:
    from catalog.records import State, SubscriptionRel


@dataclass(frozen=True, slots=True)
class Located:
    """A history.  `home`: the node's directory whose settings reach its store; None: the environment does.

    `covered`: the catalog knows that the table has every change up to this LSN; 0 if it is not asked.
    """

    path: str
    home: str | None
    covered: Lsn


def located(options: Options) -> Located:
    """Return the table.  Blocks.

    Raises UndefinedObject and UndefinedTable if the catalog lacks the subscription or the table; FeatureNotSupported for
    a mirror, and if the subscription has several histories and none is named; NoCatalog, and the catalog's errors.
    """
    from pubsub.node.node import home_directory

    if options.path is not None:
        # Executors work in other directories.
        path = str(directory(options.path).absolute()) if is_local(options.path) else options.path
        return Located(path, None if options.home is None else str(home_directory(options.home)), INVALID_LSN)
    home = home_directory(options.home)

    async def read() -> State:
        from pubsub.node.node import Node

        async with Node(home, workers=False, make=False) as node:
            return await node.state()

    state = asyncio.run(read())
    relation = _relation(state, options)
    if relation.mode is None:
        raise _has_no_rows(relation.qualified_name)
    if relation.mode != "history":
        besides = [
            one
            for one in state.relations
            if (one.subid, one.oid, one.beside) == (relation.subid, relation.oid, "history")
        ]
        raise FeatureNotSupported(
            f'table "{relation.qualified_name}" does not keep its changes',
            detail="It is a mirror." if relation.mode == "mirror" else f"Its mode is {relation.mode}.",
            hint=f'"{besides[0].qualified_name}" does, which stands beside it.'
            if besides
            else "Subscribe to it with mode = history: the source reads the changes that a history keeps.",
        )
    return Located(relation.path, str(home), _covered(state, relation))


def _relation(state: State, options: Options) -> SubscriptionRel:
    from pubsub.node.query import find_relation
    from pubsub.sql.identifiers import parse_qualified_name

    relations = state.relations
    if options.subscription is not None:
        known = [one.oid for one in state.subscriptions if one.name == options.subscription]
        if not known:
            raise UndefinedObject(f'subscription "{options.subscription}" does not exist')
        relations = tuple(one for one in relations if one.subid == known[0])
    if options.table is None:
        return _only(relations, options)
    name = parse_qualified_name(options.table)
    schema = name.schema or "public"
    if options.subscription is None:
        return find_relation(state, schema, name.name)
    for relation in relations:
        if (relation.schema, relation.name) == (schema, name.name):
            return relation
    raise UndefinedTable(f'subscription "{options.subscription}" has no table "{schema}.{name.name}"')


def _only(relations: Sequence[SubscriptionRel], options: Options) -> SubscriptionRel:
    histories = [one for one in relations if one.mode == "history"]
    if len(histories) == 1:
        return histories[0]
    if not histories:
        raise NotInPrerequisiteState(
            f'subscription "{options.subscription}" has no history',
            hint="A table keeps its changes if the option mode says so when it is copied.",
        )
    raise FeatureNotSupported(
        f'subscription "{options.subscription}" has {len(histories)} histories, and a stream reads one',
        detail=f"They are {', '.join(sorted(one.qualified_name for one in histories))}.",
        hint="Name one in the option table; several streams can go on beside each other.",
    )


def _covered(state: State, relation: SubscriptionRel) -> Lsn:
    from catalog.states import RelState

    if relation.state is not RelState.READY or relation.stopped:
        return INVALID_LSN
    origins = (one.remote_lsn for one in state.origins if one.subid == relation.subid and one.relid is None)
    return next(origins, INVALID_LSN)


def _has_no_rows(name: str) -> PubsubError:
    return UndefinedTable(
        f'table "{name}" has no rows yet',
        detail="Its initial copy has not been committed.",
        hint="pubsub status shows how far it is.",
    )
