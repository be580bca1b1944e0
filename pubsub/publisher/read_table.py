"""A table that is read under a snapshot, and the proof that a statement reads the table that was described.

A statement is parsed with the catalog of its moment, whatever its snapshot: names mean what they mean then, and the rows
are those of the files that the table has then, in which older snapshots see nothing after a TRUNCATE or a rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pubsub.errors import SerializationFailure
from pubsub.publisher.copy_out import part_of_table
from pubsub.publisher.definitions import TableDefinition
from pubsub.sql.identifiers import quote_identifier, quote_literal, quote_qualified

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.pq.abc import PGresult


@dataclass(frozen=True, slots=True)
class ReadTable:
    """What statements name: the table, `only` without its children, and the `columns` that they read.

    `here`: the names of these columns in the Delta table, if some are others (the option rename).
    """

    schema: str
    name: str
    columns: tuple[str, ...]
    only: bool
    oid: int = 0
    """0: nothing is known of the table, and nothing is proved."""
    attributes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Every column's attribute number, and the oid of its type without domains; also those that only a row filter reads."""
    here: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The Delta table's names of `columns`."""
        return self.here or self.columns

    def published(self, name: str) -> str:
        """Return the publisher's name of one of the Delta table's columns."""
        return self.columns[self.names.index(name)]

    @classmethod
    def of(cls, definition: TableDefinition, columns: Iterable[str], here: Iterable[str] = ()) -> ReadTable:
        """Return the table as it is defined."""
        return cls(
            definition.schema,
            definition.name,
            tuple(columns),
            definition.kind == "r",
            definition.oid,
            {one.name: (one.attnum, int(one.base_type_oid)) for one in definition.columns},
            tuple(here),
        )

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


def lock_sql(table: ReadTable, columns: Iterable[str] = ()) -> str:
    """Return SQL that keeps the table from being rewritten or altered until the transaction ends.

    It selects no rows: its lock is enough, and LOCK TABLE would require a privilege on the whole table.
    """
    listed = "".join(f" {quote_identifier(name)}," for name in columns).removesuffix(",")
    return f"SELECT{listed} FROM {part_of_table(table.schema, table.name, None, only=table.only)} LIMIT 0"


def hold_as_described(connection: Connection, table: ReadTable) -> None:
    """Lock the table until the transaction ends, and prove that its names mean what was described.  Blocks.

    `connection` is in a transaction whose snapshot reads the table.  Raises SerializationFailure if the table was renamed,
    dropped, altered or rewritten since, and psycopg.Error.
    """
    import psycopg

    if not table.oid:
        return
    try:
        # What the parser has found is what a COPY that comes next will find.
        found = connection.execute(lock_sql(table, table.columns).encode()).pgresult
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        what = "altered" if isinstance(error, psycopg.errors.UndefinedColumn) else "renamed or dropped"
        raise _changed(table, what, error.diag.message_primary) from error
    assert found is not None
    if _oid(connection, table, found) != table.oid:
        raise _changed(table, "renamed", "Another table has its name.")
    for place, name in enumerate(table.columns):
        if table.attributes[name] != (found.ftablecol(place), found.ftype(place)):
            raise _changed(table, "altered", f'Column "{name}" is another one, or has another type.')
    others = {number: name for name, (number, _) in table.attributes.items() if name not in table.columns}
    if others:
        renamed = connection.execute(_renamed_sql(table.oid, others).encode()).fetchall()
        if renamed:
            raise _changed(table, "altered", f'Column "{renamed[0][0]}" was renamed or dropped.')
    if connection.execute(_REWRITTEN.format(oid=int(table.oid)).encode()).fetchall():
        raise _changed(
            table, "rewritten or truncated", "The snapshot does not see its rows any more, or in other places."
        )


def _oid(connection: Connection, table: ReadTable, found: PGresult) -> int:
    """Return the oid of the table that was `found` under its name, and is locked."""
    if table.columns:
        return found.ftable(0)
    # As if all columns are masked: then the answer to the statement names no table.
    name = quote_literal(quote_qualified(table.schema, table.name))
    ((oid,),) = connection.execute(f"SELECT pg_catalog.to_regclass({name})::pg_catalog.oid".encode()).fetchall()
    return int(oid)


def _changed(table: ReadTable, how: str, detail: str | None) -> SerializationFailure:
    return SerializationFailure(f'table "{table}" was {how} while it was read', detail=detail)


def _renamed_sql(oid: int, columns: Mapping[int, str]) -> str:
    """Return SQL for those columns, by number, that have another name now or are dropped, whatever the snapshot.

    Queries of the catalog see what the snapshot sees; this function, as statements do, sees what is there now.
    """
    names = ", ".join(f"({int(number)}, {quote_literal(name)})" for number, name in columns.items())
    identity = f"(pg_catalog.pg_identify_object('pg_catalog.pg_class'::pg_catalog.regclass, {int(oid)}, {{}})).identity"
    return (
        f"SELECT name FROM (VALUES {names}) AS c (number, name) WHERE {identity.format('number')} "
        f"IS DISTINCT FROM {identity.format(0)} || '.' || pg_catalog.quote_ident(name)"
    )


# The table, or partitions of it, whose file is not the one that the snapshot knows.
_REWRITTEN: Final = """
SELECT oid FROM pg_catalog.pg_class
 WHERE (oid = {oid} OR oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({oid}::pg_catalog.regclass)))
   AND relfilenode <> 0 AND relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(oid)
 LIMIT 1
"""
