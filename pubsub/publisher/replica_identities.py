"""Find replica identities on a publisher that do not identify rows as the published table's key does.

A partitioned table that is published as its root has one key in Delta, and its Relation message describes the root's
replica identity.  The old values of an update or a delete are those of the partition's own (pgoutput.c: pgoutput_change
converts the tuple, not the identity):

    root REPLICA IDENTITY FULL, no key     every partition must have FULL
    root with a key                        each partition has FULL, or an identity with all columns of that key

A key with a generated column that is not published is no key in Delta.  Up to 17 the publisher sends updates and deletes
without it; from 18 on it refuses them (execReplication.c: CheckCmdReplicaIdentity).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.ids import Oid
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.publisher.fields import as_oid
from pubsub.sql.identifiers import quote_qualified

_REFUSES_GENERATED: Final = 180000


@dataclass(frozen=True, slots=True)
class Unfit:
    """A replica identity that does not fit.  `change`: the SQL for the publisher that makes it fit.

    `refused`: the publisher refuses the updates and deletes by itself.
    """

    message: str
    detail: str
    change: str
    refused: bool = False


def refused_keys(columns: Iterable[ColumnDefinition], key: Collection[str], relation: str) -> list[FeatureNotSupported]:
    """Return an error for each of a table's columns that may not be in its key: keys that PostgreSQL takes for equal differ."""
    return [
        FeatureNotSupported(
            f'column "{column.name}" of the key of table "{relation}" has a nondeterministic collation',
            detail="Values that are equal to PostgreSQL would be different keys to whoever reads the Delta table.",
            hint="Give the table a key without it: REPLICA IDENTITY USING INDEX, or FULL and no primary key.",
        )
        for column in columns
        if column.name in key and not column.collation_deterministic
    ]


async def unfit_identities(
    connection: Connection, tables: Iterable[tuple[TableDefinition, Sequence[str] | None]]
) -> dict[Oid, list[Unfit]]:
    """Return the unfit identities of published tables and their partitions, by the table; attnames as in PublishedTable."""
    listed = list(tables)
    leaves = await _partitions(connection, [table for table, _ in listed if table.kind == "p"])
    return {
        table.oid: _of_partitions(table, attnames, leaves.get(table.oid, []))
        if table.kind == "p"
        else _of_table(connection.server_version, table, attnames)
        for table, attnames in listed
    }


def _of_table(server_version: int, definition: TableDefinition, attnames: Sequence[str] | None) -> list[Unfit]:
    key = definition.identity_key
    generated = [c.name for c in definition.columns if c.generated and c.name in key]
    unsent = [f'"{name}"' for name in generated if attnames is None or name not in attnames]
    if not unsent:
        return []
    name = f"{definition.schema}.{definition.name}"
    refused = server_version >= _REFUSES_GENERATED
    what = f"generated column {', '.join(unsent)}"
    return [
        Unfit(
            f'cannot update table "{definition.name}"'
            if refused
            else f'updates and deletes of table "{name}" cannot be applied',
            "Replica identity must not contain unpublished generated columns."
            if refused
            else f'The replica identity of table "{name}" has {what}, which is not published.',
            full(definition),
            refused,
        )
    ]


async def _partitions(connection: Connection, roots: Sequence[TableDefinition]) -> dict[Oid, list[TableDefinition]]:
    """Return the partitions that have rows, by their root."""
    if not roots:
        return {}
    pairs = [
        (as_oid(root), as_oid(leaf)) for root, leaf in await connection.query(_LEAVES, [[one.oid for one in roots]])
    ]
    known = await definitions.table_definitions(connection, (leaf for _, leaf in pairs), sizes=False)
    found: dict[Oid, list[TableDefinition]] = defaultdict(list)
    for root, leaf in pairs:
        if leaf in known:
            found[root].append(known[leaf])
    return found


def _of_partitions(
    root: TableDefinition, attnames: Sequence[str] | None, leaves: Iterable[TableDefinition]
) -> list[Unfit]:
    published = {column.name for column in root.published(attnames)}
    key = definitions.row_key(root, published)
    if not key and root.replica_identity != "f":
        return []
    found = []
    for leaf in leaves:
        # With NOTHING, or without the key of DEFAULT, the publisher refuses updates and deletes by itself.
        if leaf.replica_identity == "f" or (not leaf.identity_key and root.replica_identity != "f"):
            continue
        if key and set(key) <= set(leaf.identity_key):
            continue
        name, of_root = f"{leaf.schema}.{leaf.name}", f"{root.schema}.{root.name}"
        needed = f"its key is ({', '.join(key)})" if key else "it has REPLICA IDENTITY FULL and no key"
        has = f"({', '.join(leaf.identity_key)})" if leaf.identity_key else "none"
        by_default = bool(key) and set(key) <= set(leaf.primary_key)
        found.append(
            Unfit(
                f'the replica identity of partition "{name}" does not fit that of its root "{of_root}"',
                f'The replica identity of partition "{name}" is {has}; it is published as "{of_root}": {needed}.',
                f"ALTER TABLE {quote_qualified(leaf.schema, leaf.name)} REPLICA IDENTITY DEFAULT;"
                if by_default
                else full(leaf),
            )
        )
    return found


def full(table: TableDefinition) -> str:
    """Return the SQL with which a table's updates and deletes are published without a key."""
    return f"ALTER TABLE {quote_qualified(table.schema, table.name)} REPLICA IDENTITY FULL;"


_LEAVES: Final = """
SELECT root, tree.relid::oid
  FROM unnest($1::oid[]) AS root, pg_partition_tree(root) AS tree
 WHERE tree.isleaf
 ORDER BY 1, 2
"""
