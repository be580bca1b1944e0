"""The publisher's side of a comparison: the hashes of a table's rows, by SQL, under the snapshot of the caller's session.

A table is read in stretches of blocks, a statement for each, so that the load can be bounded and a statement does not run
for hours; of a partitioned table a stretch has the same blocks of each partition.  Every function takes a psycopg connection
within a transaction that has the snapshot, blocks, and raises psycopg's errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from pubsub.digest.forms import RowForm
from pubsub.digest.hashing import hash_texts
from pubsub.digest.sums import Hashed, Sums, range_sql
from pubsub.errors import FeatureNotSupported, InsufficientPrivilege
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.text.copy_csv import parse_copy
from pubsub.publisher import copy_out
from pubsub.publisher.key_condition import equality_operators, is_one_of
from pubsub.publisher.read_table import ReadTable
from pubsub.sql.identifiers import quote_identifier, quote_literal, quote_qualified

if TYPE_CHECKING:
    from psycopg import Connection

BLOCK: Final = 8192
#: The least stretch, in blocks: 32 MB.
_LEAST_STRETCH: Final = 4096
_MOST_STRETCHES: Final = 512
#: Rows that one statement asks for by their places.
_PLACES: Final = 1000

#: A session's further settings: one core at a time, no compilation that takes longer than a stretch.
SESSION: Final = "SET max_parallel_workers_per_gather = 0; SET jit = off"

Stretch = tuple[int, int | None] | None
"""The first block, and the block after the last one; None for the whole relation."""

NOTHING: Final = Hashed(np.empty(0, np.uint64), np.empty(0, np.uint64), pa.array([], pa.string()))
_SUMS: Final = pa.schema([("range", pa.int64()), ("count", pa.int64()), ("sum", pa.string())])
_ROWS: Final = pa.schema([("k", pa.int64()), ("h", pa.int64()), ("at", pa.string())])


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A published table.  `row_filter`: the publications' WHERE as SQL.

    `blocks`: how many its largest file has; None if its rows have no places (a foreign table is among its partitions).
    `nbytes`: on disk, with TOAST.
    """

    table: ReadTable
    row_filter: str | None
    form: RowForm
    blocks: int | None
    nbytes: int
    key_types: Mapping[str, str] = field(default_factory=dict)
    """The SQL type names of the key's columns, by the publisher's names."""

    def stretches(self) -> list[Stretch]:
        """Return the stretches that together are the table; the last is open-ended."""
        if self.blocks is None:
            return [None]
        size = max(_LEAST_STRETCH, -(-self.blocks // _MOST_STRETCHES))
        edges = list(range(0, max(self.blocks, 1), size))
        return [(first, edges[place + 1] if place + 1 < len(edges) else None) for place, first in enumerate(edges)]

    def bytes_of(self, stretch: Stretch) -> int:
        """Return about how many bytes a stretch has."""
        if stretch is None or not self.blocks:
            return self.nbytes
        first, end = stretch
        return self.nbytes * ((end or self.blocks) - first) // self.blocks

    def _source(self, stretch: Stretch, condition: str | None = None, sample: float | None = None) -> str:
        row_filter = None if self.row_filter is None else f"({self.row_filter})"
        return copy_out.part_of_table(
            self.table.schema, self.table.name, stretch, condition, row_filter, only=self.table.only, sample=sample
        )

    def sums(self, connection: Connection, stretch: Stretch, bits: int) -> Sums:
        """Return the sums of a stretch's rows."""
        statement = (
            f"COPY (SELECT {range_sql('k', bits)}, count(*), sum(h) FROM {self.form.select(self._source(stretch))}"
            " GROUP BY 1) TO STDOUT (FORMAT csv)"
        )
        found = Sums(bits)
        for batch in copy_out.batches(connection, statement, _SUMS, parse_copy):
            ranges, counts, totals = batch.columns
            found.add_ranges(ranges.to_numpy(), counts.to_numpy(), [int(total) for total in totals.to_pylist()])
        return found

    def rows_in(self, connection: Connection, stretch: Stretch, bits: int, ranges: Indices) -> Hashed:
        """Return a stretch's rows whose keys' hashes are in these ranges; `at` has their places."""
        listed = "{" + ",".join(map(str, ranges.tolist())) + "}"
        hashed = self.form.select(self._source(stretch))
        return self._hashed(connection, f"{hashed} WHERE {range_sql('k', bits)} = ANY ('{listed}'::pg_catalog.int8[])")

    def sample(self, connection: Connection, percent: float) -> Hashed:
        """Return the rows of some of the table's blocks, chosen at random."""
        return self._hashed(connection, self.form.select(self._source(None, sample=percent)))

    def rows_under(self, connection: Connection, keys: pa.Table) -> Hashed:
        """Return the rows under these keys, which have the Delta table's names."""
        keys = keys.rename_columns([self.form.published_names[name] for name in keys.column_names])
        operators = equality_operators(connection, self.table.oid, self.key_types)
        found = [NOTHING]
        for first in range(0, keys.num_rows, _PLACES):
            condition = is_one_of(keys.slice(first, _PLACES), self.key_types, operators)
            found.append(self._hashed(connection, self.form.select(self._source(None, condition))))
        return Hashed.joined(found)

    def rows_like(self, connection: Connection, stretch: Stretch, hashes: Sequence[int]) -> Hashed:
        """Return a stretch's rows with one of these hashes, signed; `at` has their places."""
        listed = "{" + ",".join(map(str, hashes)) + "}"
        hashed = self.form.select(self._source(stretch))
        return self._hashed(connection, f"{hashed} WHERE h = ANY ('{listed}'::pg_catalog.int8[])")

    def _hashed(self, connection: Connection, rows: str) -> Hashed:
        statement = f"COPY (SELECT k, h, oid || ' ' || at FROM {rows}) TO STDOUT (FORMAT csv)"
        batches = list(copy_out.batches(connection, statement, _ROWS, parse_copy))
        found = pa.Table.from_batches(batches, _ROWS)
        keys, hashes = (found.column(name).to_numpy().view(np.uint64) for name in ("k", "h"))
        return Hashed(keys, hashes, found.column("at").combine_chunks())

    def values_at(
        self, connection: Connection, places: Sequence[str], expressions: Sequence[str]
    ) -> dict[str, tuple[str | None, ...]]:
        """Return the values of text expressions for rows by their places, which `rows_in` has found."""
        found: dict[str, tuple[str | None, ...]] = {}
        for rows in self._at(places):
            statement = f"SELECT tableoid || ' ' || ctid, {', '.join(expressions)} FROM {rows}"
            for place, *values in connection.execute(statement.encode()).fetchall():
                found[place] = tuple(values)
        return found

    def copy_at(self, connection: Connection, places: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the columns of `schema`, which has the Delta table's names, of rows by their places, in any order."""
        names = self.form.published_names
        listed = ", ".join(quote_identifier(names[name]) for name in schema.names)
        for rows in self._at(places):
            statement = f"COPY (SELECT {listed} FROM {rows}) TO STDOUT (FORMAT csv, ENCODING 'UTF8')"
            yield from copy_out.batches(connection, statement, schema, parse_copy)

    def _at(self, places: Sequence[str]) -> Iterator[str]:
        """Yield SQL after FROM for some of the rows at these places: "<oid of the table> (<block>,<line>)"."""
        by_table: dict[str, list[str]] = {}
        for place in places:
            oid, _, at = place.partition(" ")
            by_table.setdefault(oid, []).append(at)
        for oid, lines in by_table.items():
            for first in range(0, len(lines), _PLACES):
                listed = ",".join(f'"{at}"' for at in lines[first : first + _PLACES])
                at = f"ctid = ANY ('{{{listed}}}'::pg_catalog.tid[])"
                yield self._source(None, at if self.table.only else f"tableoid = {int(oid)} AND {at}")


def require_same_hashes(connection: Connection) -> None:
    """Raise FeatureNotSupported if the publisher hashes texts in another way, as a big-endian server does."""
    text = "PostgreSQL's hashtextextended"
    ((theirs,),) = connection.execute(
        f'SELECT hashtextextended({quote_literal(text)} COLLATE "C", 1)'.encode()
    ).fetchall()
    ours = hash_texts(pa.array([text]), np.ones(1, np.uint64)).view(np.int64)[0]
    if theirs != ours:
        raise FeatureNotSupported(
            "the publisher's hash functions give other results than expected",
            detail="Its processor is big-endian, or its PostgreSQL is of a version with other functions.",
        )


def require_places(connection: Connection, table: ReadTable) -> None:
    """Raise InsufficientPrivilege, with the GRANT, if the role may not ask where the table's rows are.

    A grant of the table includes that, one of its columns does not.
    """
    ((allowed, role),) = connection.execute(_MAY_ASK_FOR_PLACES.encode(), {"oid": table.oid}).fetchall()
    if not allowed:
        name = quote_qualified(table.schema, table.name)
        raise InsufficientPrivilege(
            f"permission denied for table {table.name}",
            detail=f'Rows of "{table}" are compared by their places, which a grant of its columns does not include.',
            hint=f"GRANT SELECT (ctid, tableoid) ON {name} TO {quote_identifier(role)};",
        )


_MAY_ASK_FOR_PLACES: Final = """
SELECT bool_and(has_column_privilege(%(oid)s::oid, name, 'SELECT')), current_user
  FROM (VALUES ('ctid'), ('tableoid')) AS of_system (name)
"""


def largest_file(connection: Connection, oid: int) -> int | None:
    """Return how many blocks the largest partition of a table has, or the table itself; None if one is a foreign table."""
    ((blocks,),) = connection.execute(_LARGEST_FILE.encode(), [oid]).fetchall()
    return None if blocks is None else int(blocks)


_LARGEST_FILE: Final = """
WITH RECURSIVE tree AS (
    SELECT c.oid, c.relkind FROM pg_class c WHERE c.oid = %s
    UNION ALL
    SELECT c.oid, c.relkind FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid JOIN pg_class c ON c.oid = i.inhrelid
     WHERE tree.relkind = 'p'
)
SELECT CASE WHEN bool_and(relkind IN ('r', 'p'))
            THEN coalesce(max(pg_relation_size(oid)), 0) / current_setting('block_size')::int8 END
  FROM tree
"""
