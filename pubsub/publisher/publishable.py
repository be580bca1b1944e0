"""Judge, before a publication is made, which tables it may hold.

From the moment at which a publication of updates and deletes holds a table without a replica identity, the publisher
refuses UPDATE and DELETE on it (execReplication.c: CheckCmdReplicaIdentity).  It asks the table that the row is in: of a
partitioned table each partition, and each child of an inherited one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import TableDefinition
from pubsub.publisher.fields import array, as_oid, text, truth
from pubsub.publisher.replica_identities import Unfit, full, unfit_identities
from pubsub.sql.identifiers import quote_qualified


@dataclass(frozen=True, slots=True)
class Publishable:
    """A table that a publication could hold.  `change`: the statements without which its updates would be refused."""

    schema: str
    name: str
    owned: bool
    """Whether the role may publish it, as its owner."""
    inherited: bool
    change: tuple[str, ...]

    @property
    def alone(self) -> str:
        """The table as FOR TABLE names it without its children, which are tables of their own."""
        return f"{'ONLY ' if self.inherited else ''}{quote_qualified(self.schema, self.name)}"


async def publishable_tables(
    connection: Connection, named: Sequence[tuple[str, str]] | None = None
) -> list[Publishable]:
    """Return the tables of the database, by schema and name: partitions go with their root, other children by themselves.

    `named`: those of these, by schema and name, that exist; they are judged with their partitions and children, as
    FOR TABLE publishes them.
    """
    rows = await connection.query(
        _PUBLISHABLE,
        [
            "f" if named is None else "t",
            [schema for schema, _ in named or ()],
            [name for _, name in named or ()],
        ],
    )
    holding = [tuple(map(as_oid, array(text(row[4])))) for row in rows]
    known = await definitions.table_definitions(connection, (oid for oids in holding for oid in oids), sizes=False)
    unfit = await unfit_identities(connection, ((table, None) for table in known.values()))
    found = []
    for (schema, name, owned, inherited, _), oids in zip(rows, holding, strict=True):
        changes = [_change(known[oid], unfit[oid]) for oid in oids if oid in known]
        change = tuple(line for line in changes if line is not None)
        found.append(Publishable(text(schema), text(name), truth(owned), truth(inherited), change))
    return found


def _change(table: TableDefinition, unfit: Sequence[Unfit]) -> str | None:
    if table.replica_identity == "f":
        return None
    if not table.identity_key:
        return full(table)
    return next((one.change for one in unfit if one.refused), None)


# pg_publication.c: is_publishable_class.  A table is judged by those that hold its rows.
_PUBLISHABLE: Final = """
WITH RECURSIVE chosen AS (
    SELECT c.oid, n.nspname, c.relname, c.relkind = 'p' AS partitioned, pg_has_role(c.relowner, 'USAGE') AS owned,
           EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid) AS inherited
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
           AND n.nspname NOT IN ('pg_catalog', 'pg_toast', 'information_schema')
           AND CASE WHEN $1::boolean
                    THEN (n.nspname, c.relname) IN (SELECT * FROM unnest($2::text[], $3::text[]))
                    ELSE NOT c.relispartition END
), tree AS (
    SELECT oid AS root, oid FROM chosen
    UNION
    SELECT chosen.oid, i.inhrelid
      FROM tree JOIN chosen ON chosen.oid = tree.root JOIN pg_inherits i ON i.inhparent = tree.oid
     WHERE chosen.partitioned OR $1::boolean
)
SELECT nspname, relname, owned, inherited AND NOT partitioned,
       ARRAY (SELECT c.oid FROM tree JOIN pg_class c USING (oid)
               WHERE tree.root = chosen.oid AND c.relkind = 'r' ORDER BY c.oid)
  FROM chosen
 ORDER BY nspname COLLATE "C", relname COLLATE "C"
"""
