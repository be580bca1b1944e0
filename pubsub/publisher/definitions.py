"""Queries about a publisher's server, its tables and their types.  (Publications: publication.py; slots: slots.py.)

Tried on PostgreSQL 15, 16 and 18.  Every function takes an open Connection, for replication or not, and raises what
`Connection.query` raises.  search_path is empty: functions and types are found in pg_catalog, names come out qualified.

Follows tablesync.c (fetch_remote_table_info).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pubsub.errors import UndefinedTable
from pubsub.protocol.ids import Oid
from pubsub.protocol.shapes import TypeShape
from pubsub.publisher.connection import Connection, Row
from pubsub.publisher.fields import as_oid, number, text, truth

if TYPE_CHECKING:
    from pubsub.protocol.binary.single_values import BinaryTypes


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A publisher's server, seen from one of its databases."""

    version: int
    """libpq's number: 180004 is 18.4."""
    version_text: str
    wal_level: str
    """From 19 on effective_wal_level: on a standby it is that of the primary, and logical slots raise it from replica."""
    max_replication_slots: int
    free_replication_slots: int
    max_wal_senders: int
    free_wal_senders: int
    system_identifier: str
    database: str
    encoding: str
    in_recovery: bool
    user: str


@dataclass(frozen=True, slots=True)
class ColumnDefinition:
    """A column; `base_…` is the type under any domains: the type itself if it is not a domain."""

    name: str
    attnum: int
    type_oid: Oid
    type_modifier: int
    type_name: str
    type_kind: str
    """pg_type.typtype: b, c, d(omain), e(num), p, r, m."""
    base_type_oid: Oid
    base_typmod: int
    base_type_kind: str
    not_null: bool
    generated: str
    """"", "s" (stored) or "v" (virtual)."""
    collation_deterministic: bool
    missing: str | None = None
    """The value, as text, of rows stored before the column was added (pg_attribute.attmissingval); for a partitioned
    table, that of its partitions."""
    xmin: int = 0
    """The transaction that last altered the column, or added it."""
    held: TypeShape | None = None
    """For an array or a composite, the base type with its element or attribute types."""
    missing_differs: bool = False
    """Whether partitions differ in `missing`: some have a different value, or none."""

    @property
    def shape(self) -> TypeShape:
        """The base type, with the types it contains."""
        return self.held or TypeShape(self.base_type_oid, self.base_typmod, self.base_type_kind, self.type_name)


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table of the publisher, its columns in order, without dropped ones."""

    oid: Oid
    schema: str
    name: str
    kind: str
    """relkind: r, p(artitioned)."""
    replica_identity: str
    """d(efault: the primary key), i(ndex), f(ull), n(othing)."""
    columns: tuple[ColumnDefinition, ...]
    primary_key: tuple[str, ...]
    identity_key: tuple[str, ...]
    """The columns of the replica identity's index, in its order; () for full, nothing, or without a key."""
    estimated_rows: int | None
    """The last VACUUM's or ANALYZE's count scaled to the current size, partitions included.  None: the table was never counted."""
    pages: int
    """Pages of the main fork, including the last, partly filled one; 0 for a partitioned table."""
    row_security: bool
    attributes: int = 0
    """How many columns the table has ever had (pg_class.relnatts); an added column gets the next number."""
    storage: str = ""
    """The files of its rows, "<oid>:<relfilenode>" for each partition, separated by spaces: see `rewritten`."""
    bytes: int = 0
    """On disk, with TOAST and partitions, without indexes."""

    def published(self, attnames: Sequence[str] | None) -> list[ColumnDefinition]:
        """Return the columns that are published, in order; `attnames` as in PublishedTable."""
        return [
            column
            for column in self.columns
            if (column.name in attnames if attnames is not None else not column.generated)
        ]

    def names(self, attnames: Sequence[str] | None) -> list[str]:
        """Return the names of the published columns."""
        return [column.name for column in self.published(attnames)]


def row_key(definition: TableDefinition, names: set[str]) -> tuple[str, ...]:
    """Return the columns that identify a row: the replica identity's; under FULL and NOTHING the primary key's, if published.

    `names` are the published columns.
    """
    key = definition.identity_key if definition.replica_identity == "i" else definition.primary_key
    return tuple(key) if key and names.issuperset(key) else ()


def rewritten(before: str, now: str) -> bool:
    """Return whether a table's files were replaced between two values of its `storage`.

    VACUUM FULL, TRUNCATE and some ALTER TABLEs do so.  A new table's first file has the number of its oid (heap.c:
    heap_create), so this detects a rewrite of a partition that was added in between, too.
    """
    known = {oid: file for oid, _, file in (one.partition(":") for one in before.split())}
    return any(known.get(oid, oid) != file for oid, _, file in (one.partition(":") for one in now.split()))


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of some sessions' running COPY commands: rows, and bytes of their text."""

    tuples: int
    bytes: int


async def server_info(connection: Connection) -> ServerInfo:
    (row,) = await connection.query(_SERVER_INFO)
    version, wal_level, slots, used_slots, senders, used_senders, identifier, database, encoding, recovery, user = row
    return ServerInfo(
        version=connection.server_version,
        version_text=text(version),
        wal_level=text(wal_level),
        max_replication_slots=number(slots),
        free_replication_slots=max(number(slots) - number(used_slots), 0),
        max_wal_senders=number(senders),
        free_wal_senders=max(number(senders) - number(used_senders), 0),
        system_identifier=text(identifier),
        database=text(database),
        encoding=text(encoding),
        in_recovery=truth(recovery),
        user=text(user),
    )


async def table_definition(connection: Connection, oid: int) -> TableDefinition:
    """Return the definition of the table with this oid.  Raises UndefinedTable if there is none."""
    definitions = await table_definitions(connection, [oid])
    if oid not in definitions:
        raise UndefinedTable(f"relation with OID {oid} does not exist on the publisher")
    return definitions[Oid(oid)]


async def table_definitions(
    connection: Connection, oids: Iterable[int], *, sizes: bool = True
) -> dict[Oid, TableDefinition]:
    """Return the definitions of those tables among `oids` that exist.

    The queries share one snapshot only if the caller's transaction gives them one.  Without `sizes` (estimated_rows,
    pages and bytes are then 0) no lock is taken, so the call never waits for an ALTER TABLE.
    """
    wanted = list(dict.fromkeys(oids))
    held = _Held(await connection.query(_HELD_TYPES, [wanted]))
    columns: dict[Oid, list[ColumnDefinition]] = defaultdict(list)
    for row in await connection.query(_COLUMNS, [wanted]):
        column = _column(row[1:])
        shape = held.shape(column.base_type_oid, column.base_typmod)
        columns[as_oid(row[0])].append(replace(column, held=shape) if shape.element or shape.attributes else column)
    definitions = {}
    for row in await connection.query(_TABLES, [wanted, "t" if sizes else "f"]):
        oid, schema, name, kind, identity, primary_key, identity_key, *others = row
        rows, pages, row_security, attributes, storage, size = others
        by_number = {column.attnum: column.name for column in columns[as_oid(oid)]}
        definitions[as_oid(oid)] = TableDefinition(
            oid=as_oid(oid),
            schema=text(schema),
            name=text(name),
            kind=text(kind),
            replica_identity=text(identity),
            columns=tuple(columns[as_oid(oid)]),
            primary_key=_names(primary_key, by_number),
            identity_key=_names(identity_key, by_number),
            estimated_rows=None if rows is None else number(rows),
            pages=number(pages),
            row_security=truth(row_security),
            attributes=number(attributes),
            storage=storage or "",
            bytes=number(size),
        )
    return definitions


async def partition_roots(connection: Connection, oids: Iterable[int]) -> dict[Oid, str]:
    """Return, for those of `oids` that are partitions, the name of the topmost partitioned table, as messages spell it."""
    rows = await connection.query(_PARTITION_ROOTS, [list(oids)])
    return {as_oid(oid): text(root) for oid, root in rows}


async def binary_types(connection: Connection) -> BinaryTypes:
    """Return how to read each type's values from binary transfer, by the publisher's types as they are now."""
    # Imported here because it loads Arrow, which most commands do not need.
    from pubsub.protocol.binary.single_values import FIRST_LISTED_OID, BinaryTypes, TypeRow

    rows = await connection.query(_TYPES, [FIRST_LISTED_OID])
    listed = [
        TypeRow(
            oid=number(oid),
            name=text(name),
            kind=text(kind),
            base=number(base),
            element=number(element),
            delimiter=text(delimiter),
            send=text(send),
            subtype=number(subtype),
            attributes=tuple(map(int, (attributes or "").split())),
        )
        for oid, name, kind, base, element, delimiter, send, subtype, attributes in rows
    ]
    return BinaryTypes(listed, connection.server_version)


async def copy_progress(connection: Connection, application_name: str) -> CopyProgress:
    """Sum the COPY progress of this database's sessions of that application_name (PostgreSQL keeps 63 bytes of it)."""
    (row,) = await connection.query(_COPY_PROGRESS, [application_name])
    return CopyProgress(number(row[0]), number(row[1]))


async def can_replicate(connection: Connection) -> bool:
    """Return whether the role is a superuser or has REPLICATION; a cloud provider may have other means."""
    (row,) = await connection.query("SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user")
    return truth(row[0])


async def is_superuser(connection: Connection) -> bool:
    """Return whether the role is a superuser, who alone may publish all tables."""
    (row,) = await connection.query("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    return truth(row[0])


async def readable_tables(connection: Connection, columns: Mapping[Oid, Sequence[str]]) -> set[Oid]:
    """Return those of the tables whose `columns` the role may read, and whose schema it may use.

    `ctid` is one that a grant of the others does not include; a grant of the table does.
    """
    pairs = [(oid, name) for oid, names in columns.items() for name in names]
    rows = await connection.query(_READABLE, [list(columns), [oid for oid, _ in pairs], [name for _, name in pairs]])
    return {as_oid(row[0]) for row in rows}


async def under_row_security(connection: Connection, oids: Sequence[Oid]) -> set[Oid]:
    """Return those of the tables of which row security would hide rows: a copy fails then (row_security off)."""
    rows = await connection.query("SELECT oid FROM unnest($1::oid[]) AS oid WHERE row_security_active(oid)", [oids])
    return {as_oid(row[0]) for row in rows}


_SERVER_INFO: Final = """
SELECT current_setting('server_version'),
       coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')),
       current_setting('max_replication_slots'),
       (SELECT count(*) FROM pg_replication_slots),
       current_setting('max_wal_senders'),
       (SELECT count(*) FROM pg_stat_get_wal_senders()),
       (SELECT system_identifier FROM pg_control_system()),
       current_database(),
       current_setting('server_encoding'),
       pg_is_in_recovery(),
       current_user
"""


# A missing value is the only element of an array, whose text would be quoted by rules that depend on its type: boxes are
# divided by semicolons, so that a box's commas are not quoted.
_COLUMNS: Final = """
WITH RECURSIVE types AS (
    SELECT t.oid AS declared, t.oid, t.typtype, -1 AS typmod, t.typbasetype, t.typtypmod FROM pg_type t
     WHERE t.oid IN (SELECT atttypid FROM pg_attribute WHERE attrelid = ANY ($1::oid[]))
    UNION ALL
    SELECT types.declared, t.oid, t.typtype, types.typtypmod, t.typbasetype, t.typtypmod
      FROM types JOIN pg_type t ON t.oid = types.typbasetype
     WHERE types.typtype = 'd'
)
SELECT a.attrelid, a.attname, a.attnum, a.atttypid, a.atttypmod, format_type(a.atttypid, a.atttypmod), t.typtype,
       base.oid, CASE WHEN t.typtype = 'd' THEN base.typmod ELSE a.atttypmod END, base.typtype,
       a.attnotnull, a.attgenerated, coalesce(co.collisdeterministic, true),
       CASE WHEN a.atthasmissing THEN array_to_string(a.attmissingval, '') ELSE leaves.missing END, coalesce(leaves.differ, false),
       a.xmin::text
  FROM pg_attribute a
  JOIN pg_class c ON c.oid = a.attrelid
  JOIN pg_type t ON t.oid = a.atttypid
  JOIN types base ON base.declared = a.atttypid AND base.typtype <> 'd'
  LEFT JOIN pg_collation co ON co.oid = a.attcollation
  LEFT JOIN LATERAL (
    WITH RECURSIVE tree AS (
        SELECT c.oid
        UNION ALL
        SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
    )
    SELECT min(array_to_string(l.attmissingval, '')) AS missing,
           count(DISTINCT l.attmissingval::text) + count(DISTINCT l.atthasmissing) FILTER (WHERE NOT l.atthasmissing) > 1 AS differ
      FROM tree
      JOIN pg_class leaf ON leaf.oid = tree.oid AND leaf.relkind <> 'p'
      JOIN pg_attribute l ON l.attrelid = leaf.oid AND l.attname = a.attname
  ) leaves ON c.relkind = 'p'
 WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attrelid, a.attnum
"""

# Only a type written by array_out counts as an array: int2vector and oidvector have elements too, but do not count.
_HELD_TYPES: Final = """
WITH RECURSIVE held AS (
    SELECT a.atttypid AS oid FROM pg_attribute a WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
    UNION
    SELECT inner_type.oid
      FROM held JOIN pg_type t ON t.oid = held.oid,
      LATERAL (
        SELECT t.typbasetype AS oid WHERE t.typtype = 'd'
        UNION ALL SELECT t.typelem WHERE t.typoutput = 'array_out'::regproc
        UNION ALL SELECT a.atttypid FROM pg_attribute a
                   WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
      ) inner_type
)
SELECT t.oid, format_type(t.oid, NULL), t.typtype, t.typbasetype, t.typtypmod,
       CASE WHEN t.typoutput = 'array_out'::regproc THEN t.typelem ELSE 0 END, e.typdelim,
       a.attname, a.atttypid, a.atttypmod
  FROM held JOIN pg_type t ON t.oid = held.oid
  LEFT JOIN pg_type e ON e.oid = t.typelem
  LEFT JOIN pg_attribute a ON t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY t.oid, a.attnum
"""

_TYPES: Final = """
SELECT t.oid, format_type(t.oid, NULL), t.typtype, t.typbasetype,
       CASE WHEN p.proname = 'array_send' THEN t.typelem ELSE 0 END, t.typdelim, coalesce(p.proname, '-'),
       coalesce((SELECT r.rngsubtype FROM pg_range r WHERE r.rngtypid = t.oid),
                (SELECT r.rngtypid FROM pg_range r WHERE r.rngmultitypid = t.oid), 0),
       (SELECT string_agg(a.atttypid::text, ' ') FROM pg_attribute a
         WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_type t
  LEFT JOIN pg_proc p ON p.oid = t.typsend
 WHERE t.oid >= $1::oid
"""

# A deferrable key does not identify a row: two rows can have it at once (relcache.c: RelationGetIndexList).
# reltuples is -1 before the first VACUUM or ANALYZE: then only a table without pages has a known count, 0.
_TABLES: Final = """
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident,
       (SELECT array_to_string((i.indkey::int2[])[0:i.indnkeyatts - 1], ' ') FROM pg_index i
         WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate),
       (SELECT array_to_string((i.indkey::int2[])[0:i.indnkeyatts - 1], ' ') FROM pg_index i
         WHERE i.indrelid = c.oid AND i.indimmediate AND (i.indisvalid OR c.relkind = 'p')
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END),
       size.rows, CASE WHEN c.relkind = 'p' THEN 0 ELSE size.pages END,
       c.relrowsecurity, c.relnatts, size.storage, size.bytes
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace,
  LATERAL (
    WITH RECURSIVE tree AS (
        SELECT c.oid
        UNION ALL
        SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid WHERE c.relkind = 'p'
    )
    SELECT CASE WHEN bool_or(leaf.pages > 0 AND (leaf.reltuples < 0 OR leaf.relpages = 0)) THEN NULL
                ELSE coalesce(sum(CASE WHEN leaf.pages = 0 THEN 0
                                       ELSE leaf.reltuples::float8 / nullif(leaf.relpages, 0) * leaf.pages END), 0)::int8 END AS rows,
           coalesce(sum(leaf.pages), 0)::int8 AS pages,
           coalesce(sum(CASE WHEN $2::boolean THEN pg_table_size(leaf.oid) END), 0)::int8 AS bytes,
           string_agg(format('%s:%s', leaf.oid, leaf.relfilenode), ' ' ORDER BY leaf.oid) AS storage
      FROM (SELECT l.oid, l.relfilenode, l.reltuples, l.relpages,
                   CASE WHEN $2::boolean THEN coalesce(pg_relation_size(l.oid), 0) / current_setting('block_size')::int8
                        ELSE 0 END AS pages
              FROM pg_class l
             WHERE l.relkind <> 'p'
               AND l.oid IN (SELECT oid FROM tree)) leaf
  ) size
 WHERE c.oid = ANY ($1::oid[])
"""


_PARTITION_ROOTS: Final = """
SELECT c.oid, n.nspname || '.' || r.relname
  FROM pg_class c
  JOIN pg_class r ON r.oid = pg_partition_root(c.oid)
  JOIN pg_namespace n ON n.oid = r.relnamespace
 WHERE c.relispartition AND c.oid = ANY ($1::oid[])
"""

_COPY_PROGRESS: Final = """
SELECT coalesce(sum(p.tuples_processed), 0), coalesce(sum(p.bytes_processed), 0)
  FROM pg_stat_progress_copy p
  JOIN pg_stat_activity a ON a.pid = p.pid
 WHERE a.application_name = $1::name::text AND p.datname = current_database()
"""

# The columns are asked for only where no grant has the whole table.
_READABLE: Final = """
SELECT c.oid
  FROM pg_class c
 WHERE c.oid = ANY ($1::oid[])
       AND has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
UNION ALL
SELECT c.oid
  FROM pg_class c JOIN unnest($2::oid[], $3::text[]) AS wanted (oid, attname) ON wanted.oid = c.oid
 WHERE has_schema_privilege(c.relnamespace, 'USAGE') AND NOT has_table_privilege(c.oid, 'SELECT')
 GROUP BY c.oid
HAVING bool_and(has_column_privilege(c.oid, wanted.attname, 'SELECT'))
"""


def _column(row: Row) -> ColumnDefinition:
    (
        name, attnum, oid, modifier, type_name, kind, base, base_modifier, base_kind, not_null, generated, deterministic,
        missing, differs, xmin,
    ) = row  # fmt: skip
    return ColumnDefinition(
        name=text(name),
        attnum=number(attnum),
        type_oid=as_oid(oid),
        type_modifier=number(modifier),
        type_name=text(type_name),
        type_kind=text(kind),
        base_type_oid=as_oid(base),
        base_typmod=number(base_modifier),
        base_type_kind=text(base_kind),
        not_null=truth(not_null),
        generated=text(generated),
        collation_deterministic=truth(deterministic),
        missing=missing,
        missing_differs=truth(differs),
        xmin=number(xmin),
    )


class _Held:
    """The types of some tables' columns and all types nested in them, from the rows of _HELD_TYPES."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[int, Row] = {}
        self._attributes: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for row in rows:
            oid = number(row[0])
            self._rows[oid] = row
            if row[7] is not None:
                self._attributes[oid].append((row[7], number(row[8]), number(row[9])))

    def shape(self, oid: int, modifier: int, within: tuple[int, ...] = ()) -> TypeShape:
        """Return a type with the types nested in it, except those of a type that contains itself."""
        if oid not in self._rows:
            return TypeShape(oid, modifier)  # altered between two queries: treated as a plain type
        _, name, kind, base, base_modifier, element, delimiter, *_ = self._rows[oid]
        if oid in within:
            return TypeShape(oid, modifier, text(kind), text(name))
        within = (*within, oid)
        if kind == "d":
            return self.shape(number(base), number(base_modifier), within)
        return TypeShape(
            oid,
            modifier,
            text(kind),
            text(name),
            self.shape(number(element), modifier, within) if number(element) else None,
            text(delimiter) if number(element) else ",",
            tuple((label, self.shape(inner, typmod, within)) for label, inner, typmod in self._attributes[oid]),
        )


def _names(attnums: str | None, by_number: dict[int, str]) -> tuple[str, ...]:
    return tuple(by_number[attnum] for attnum in map(int, (attnums or "").split()))
