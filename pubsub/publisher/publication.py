"""Publications, and the tables, columns and row filters that several of them publish together.

Follows subscriptioncmds.c (check_publications, fetch_table_list) and pg_publication.c (pg_get_publication_tables,
filter_partitions).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.ids import Oid
from pubsub.publisher.connection import Connection, Row
from pubsub.publisher.fields import array, as_oid, text, truth


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication and the operations it publishes."""

    name: str
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    via_root: bool


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as several publications together publish it."""

    oid: Oid
    schema: str
    name: str
    attnames: tuple[str, ...] | None
    """The published columns in the table's order; None: all except generated ones."""
    row_filter: str | None
    """An SQL expression; None: all rows."""
    relkind: str
    is_partition: bool
    replica_identity: str
    publishes_updates: bool
    """Whether any publication of the table publishes updates or deletes, which need a replica identity."""


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations on a table that its publications together publish."""

    insert: bool
    update: bool
    delete: bool
    truncate: bool

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of those that are not published."""
        published = {"insert": self.insert, "update": self.update, "delete": self.delete, "truncate": self.truncate}
        return tuple(name for name, there in published.items() if not there)


async def operations(connection: Connection, names: Sequence[str]) -> dict[Oid, Operations]:
    """Return, by table, the operations that the publications publish."""
    rows = await connection.query(_OPERATIONS, [list(names)])
    return {as_oid(row[0]): Operations(*map(truth, row[1:])) for row in rows}


async def publications(connection: Connection) -> list[Publication]:
    """Return all publications of the database, ordered by name."""
    rows = await connection.query(_PUBLICATIONS)
    return [Publication(text(row[0]), *(truth(value) for value in row[1:])) for row in rows]


async def missing_publications(connection: Connection, names: Sequence[str]) -> list[str]:
    """Return those of `names` that do not exist on the publisher, in order."""
    rows = await connection.query(_EXISTING_PUBLICATIONS, [list(names)])
    existing = {row[0] for row in rows}
    return [name for name in dict.fromkeys(names) if name not in existing]


async def publications_with_foreign_rows(
    connection: Connection, names: Sequence[str], besides: Sequence[str]
) -> list[str]:
    """Return the publications with tables to which the publisher's own subscriptions write.

    `besides` are tables to ignore, as schema.table in SQL.  Follows subscriptioncmds.c: check_publications_origin.
    """
    rows = await connection.query(_FOREIGN_ROWS, [list(names), list(besides)])
    return [text(row[0]) for row in rows]


async def published_tables(
    connection: Connection, names: Sequence[str], only: int | None = None
) -> list[PublishedTable]:
    """Return the tables that the publications publish, each once, by schema and name; with `only`, just that oid.

    A partitioned table published via its root is listed in place of its partitions; otherwise the partitions are
    listed.  Row filters of several publications are combined with OR; a publication without one publishes all rows.
    Raises FeatureNotSupported for different column lists, as CREATE SUBSCRIPTION does.
    """
    found: dict[Oid, PublishedTable] = {}
    unfiltered: set[Oid] = set()
    filters: dict[Oid, list[str]] = defaultdict(list)
    for row in await connection.query(_PUBLISHED_TABLES, [list(names), only]):
        table = _published_table(row)
        seen = found.get(table.oid)
        if seen is not None and seen.attnames != table.attnames:
            raise FeatureNotSupported(
                f'cannot use different column lists for table "{table.schema}.{table.name}" in different publications'
            )
        if table.row_filter is None:
            unfiltered.add(table.oid)
        elif table.row_filter not in filters[table.oid]:
            filters[table.oid].append(table.row_filter)
        found[table.oid] = table
    return [
        PublishedTable(
            oid=oid,
            schema=table.schema,
            name=table.name,
            attnames=table.attnames,
            row_filter=None if oid in unfiltered else _any_of(filters[oid]),
            relkind=table.relkind,
            is_partition=table.is_partition,
            replica_identity=table.replica_identity,
            publishes_updates=table.publishes_updates,
        )
        for oid, table in found.items()
    ]


async def published_columns(
    connection: Connection, publications: Sequence[str], oids: Iterable[int]
) -> dict[Oid, tuple[str, ...]]:
    """Return the published columns' names of those tables that have a column list or publish generated columns.

    Unlike published_tables it takes no lock.
    """
    rows = await connection.query(_PUBLISHED_COLUMNS, [list(publications), list(oids)])
    return {as_oid(oid): array(text(names)) for oid, names in rows}


_PUBLICATIONS: Final = """
SELECT pubname, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
  FROM pg_publication
 ORDER BY pubname COLLATE "C"
"""


_OPERATIONS: Final = """
SELECT gpt.relid, bool_or(p.pubinsert), bool_or(p.pubupdate), bool_or(p.pubdelete), bool_or(p.pubtruncate)
  FROM pg_publication p, LATERAL pg_get_publication_tables(p.pubname) gpt
 WHERE p.pubname = ANY ($1::text[])
 GROUP BY 1
"""


_EXISTING_PUBLICATIONS: Final = "SELECT pubname FROM pg_publication WHERE pubname = ANY ($1::text[])"


# pg_get_publication_tables is called for one publication at a time, since 15 accepts only one.  For several, 16 and
# later leave out partitions whose root is published too if any publication publishes via the root; the query does so
# for all versions.  Without a column list the server names all columns, so attrs is compared with the full list.
_PUBLISHED_TABLES: Final = """
WITH published AS (
    SELECT p.pubname, p.pubviaroot, p.pubupdate OR p.pubdelete AS updates, gpt.relid, gpt.attrs, gpt.qual
      FROM pg_publication p, LATERAL pg_get_publication_tables(p.pubname) gpt
     WHERE p.pubname = ANY ($1::text[])
)
SELECT c.oid, n.nspname, c.relname,
       CASE WHEN published.attrs IS NOT NULL
             AND ARRAY (SELECT unnest(published.attrs::int2[]) ORDER BY 1) <> ARRAY (
                     SELECT a.attnum FROM pg_attribute a
                      WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
                      ORDER BY 1)
            THEN ARRAY (SELECT a.attname::text FROM pg_attribute a
                         WHERE a.attrelid = c.oid AND a.attnum = ANY (published.attrs::int2[]) ORDER BY a.attnum)
       END,
       pg_get_expr(published.qual, c.oid),
       c.relkind, c.relispartition, c.relreplident,
       bool_or(published.updates) OVER (PARTITION BY c.oid)
  FROM published
  JOIN pg_class c ON c.oid = published.relid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE NOT (c.relispartition
            AND EXISTS (SELECT FROM published WHERE pubviaroot)
            AND EXISTS (SELECT FROM pg_partition_ancestors(c.oid) a
                          JOIN published ON published.relid = a.relid WHERE a.relid <> c.oid))
   AND ($2::oid IS NULL OR c.oid = $2::oid)
 ORDER BY n.nspname COLLATE "C", c.relname COLLATE "C", published.pubname COLLATE "C"
"""


_FOREIGN_ROWS: Final = """
SELECT DISTINCT p.pubname
  FROM pg_publication p, LATERAL pg_get_publication_tables(p.pubname) gpt
  JOIN pg_subscription_rel sr
    ON gpt.relid = sr.srrelid
    OR gpt.relid IN (SELECT relid FROM pg_partition_ancestors(sr.srrelid) UNION SELECT relid FROM pg_partition_tree(sr.srrelid))
  JOIN pg_class c ON c.oid = gpt.relid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY ($1::text[]) AND NOT format('%I.%I', n.nspname, c.relname) = ANY ($2::text[])
 ORDER BY 1
"""


# From 18 on a publication may include generated columns, from 19 on leave out tables (EXCEPT) with their partitions;
# to_jsonb reads pubgencols and prexcept where the server has them.
_PUBLISHED_COLUMNS: Final = """
WITH named AS (SELECT p.oid, p.puballtables, to_jsonb(p) ->> 'pubgencols' = 's' AS generated FROM pg_publication p
                WHERE p.pubname = ANY ($1::text[]))
SELECT c.oid, ARRAY (SELECT a.attname::text FROM pg_attribute a
                      WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                        AND CASE WHEN listed.attrs IS NULL THEN a.attgenerated IN ('', 's')
                                 ELSE a.attnum = ANY (listed.attrs) END
                      ORDER BY a.attnum)
  FROM pg_class c
  LEFT JOIN LATERAL (SELECT r.prattrs::int2[] AS attrs FROM pg_publication_rel r JOIN named ON named.oid = r.prpubid
                      WHERE r.prrelid = c.oid AND r.prattrs IS NOT NULL LIMIT 1) listed ON true
 WHERE c.oid = ANY ($2::oid[])
   AND (listed.attrs IS NOT NULL
        OR EXISTS (SELECT FROM named
                    WHERE named.generated
                      AND NOT EXISTS (SELECT FROM pg_publication_rel r
                                       WHERE r.prpubid = named.oid AND to_jsonb(r) ->> 'prexcept' = 'true'
                                         AND r.prrelid IN (SELECT c.oid UNION SELECT relid FROM pg_partition_ancestors(c.oid)))
                      AND (named.puballtables
                           OR EXISTS (SELECT FROM pg_publication_rel r
                                       WHERE r.prpubid = named.oid
                                         AND r.prrelid IN (SELECT c.oid UNION SELECT relid FROM pg_partition_ancestors(c.oid)))
                           OR EXISTS (SELECT FROM pg_publication_namespace n
                                       WHERE n.pnpubid = named.oid AND n.pnnspid = c.relnamespace))))
"""


def _any_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else " OR ".join(f"({expression})" for expression in expressions)


def _published_table(row: Row) -> PublishedTable:
    oid, schema, name, attnames, row_filter, relkind, is_partition, identity, updates = row
    return PublishedTable(
        oid=as_oid(oid),
        schema=text(schema),
        name=text(name),
        attnames=None if attnames is None else array(attnames),
        row_filter=row_filter,
        relkind=text(relkind),
        is_partition=truth(is_partition),
        replica_identity=text(identity),
        publishes_updates=truth(updates),
    )
