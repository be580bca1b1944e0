"""A table that was copied under several snapshots, until the stream has made it whole.

A copy that was cut short goes on: its finished chunks stay, the others are read under a newer snapshot.  The sync slot has
outlived the crash, and the stream starts where the slot's snapshot was taken, at S; every change after it is in the stream.  W is
an LSN past every snapshot that was copied under.  From S to W changes are applied as upserts and tolerant deletes: every
row under a key that a change touches goes, then the change's row comes.  At W the table holds the publisher's rows:

    A key that no change in (S, W] touches.  Either no row stands under it from S to W, and no snapshot showed one; or one
    does, and no snapshot missed it.  Its tuple has not moved, since only an UPDATE moves a tuple to another ctid, or a rewrite of the
    table, which is noticed by the table's file and makes the copy start over.  Chunks divide the ctids, so just one chunk has it.

    A key that is touched.  The chunks may have anything under it: a row twice, from a chunk read early and again from
    one read late into whose blocks an UPDATE had moved it; no row, where it moved the other way; a row of the past, or of a future
    that the stream comes to later.  The last change to touch the key in (S, W] removes all of it, and leaves the row that stands
    there at W, or none.

Every change of the table must be in the stream, and only then is a copy resumed, and its window passed: all its publications publish
inserts, updates and deletes, whatever their origin, and none is skipped (may_resume).  If that changes before W, the table is copied
again.  And each snapshot must see what the slot's saw (publisher.snapshots.lacks).

The table's rows are read for one thing only: the unchanged TOAST values that an UPDATE leaves out.  Let an UPDATE at p leave out the
value v of its row r, and r stand under k.  If r stays under k up to W, each row that a chunk has under k and that outlives the changes
up to p is r's; and v either stays as it is up to W, so that each snapshot showed it, or is set by a later change.  If r leaves k
before W, the value under k may be another row's: it does no harm there, since the change that takes r away removes it, but it
must not go with r.  So the value is read from the publisher, by r's new key, under one more snapshot,

    when r has moved in the batch, and the row under its old key is in doubt;
    when there is no row under k at all.

W is moved past that snapshot.  The rows just read are in doubt up to there: r may have left the key before the snapshot saw it.
The copied rows are in doubt up to the W of the copy, later ones are not.  So each time fewer keys are left, those of rows
that move again and again; past `_MOST` rounds the copy starts over, under a single snapshot and without a window.

After a crash in the window all is in doubt again up to the W that was stored, which is stored before any row read under its
snapshot is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import structlog

from apply.schema_changes.diff import CopyAgain
from catalog.records import SubscriptionRel
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import AnyStaged
from pubsub.protocol.arrow_arrays import nulls, repeated
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.key_condition import equality_operators, is_one_of
from pubsub.publisher.read_table import hold_as_described
from pubsub.publisher.snapshots import BEGIN, END_OF_WAL, WAIT, flushed
from tablesync import chunk_reader
from tablesync.chunk_reader import CopySource

if TYPE_CHECKING:
    from psycopg import Connection

# How often the window may be lengthened.
_MOST: Final = 30
# Keys that one statement asks for.
_KEYS: Final = 1000

logger = structlog.get_logger()


class Window:
    """Implements apply.staging.destination.Window.  `until` is W; `key_types` are the key columns' SQL type names.

    `key_types` has the publisher's names, if the Delta table's are others.  Without a `source` no row can be read again, because
    the publisher's table has changed since it was copied.
    """

    def __init__(
        self,
        relation: SubscriptionRel,
        until: Lsn,
        schema: pa.Schema,
        source: CopySource | None,
        key_types: Mapping[str, str],
        *,
        catalog: Catalog,
        engine: Engine,
    ) -> None:
        self.until = until
        self._copied_until = until
        self._relation = relation
        self._schema = schema
        self._source = source
        self._key_types = key_types
        self._catalog = catalog
        self._engine = engine
        # The keys of rows that were read again, with the LSN up to which they are in doubt.
        self._read: list[tuple[Lsn, KeySet]] = []

    async def complete(self, staged: AnyStaged, commit: Commit) -> Commit:
        """See apply.staging.destination.Window.  Raises CopyAgain, and the errors of reading from the publisher."""
        if not isinstance(staged, DirectStaged):
            raise self._again("its Delta table is Spark's to write now")
        if staged.masked is not None:
            await self._complete(staged, commit.first)
        return replace(commit, until=self.until)

    def _again(self, reason: str) -> CopyAgain:
        return CopyAgain(self._relation.relid, self._relation.qualified_name, reason)

    async def _complete(self, staged: DirectStaged, first: Lsn) -> None:
        assert staged.masked is not None
        self._read = [(until, keys) for until, keys in self._read if until >= first]
        doubtful = None if first <= self._copied_until else [keys for _, keys in self._read]
        chosen = await self._engine.run_without_spark(arrow_writer.without_base, staged, doubtful)
        if not chosen.any():
            return
        if self._source is None or staged.table.schema != self._schema:
            raise self._again("its definition has changed, and values must be read again")
        if len(self._read) >= _MOST:
            raise self._again("rows with unchanged TOAST values change their keys all the time")
        keys = staged.masked.filter(pa.array(chosen)).select(list(staged.table.key)).combine_chunks()
        cut = Cut()
        rows, until = await self._engine.run_until_stopped(
            cut, read_again, self._source, staged.table, keys, self._key_types, cut
        )
        await faults.reached(f"read again {self._relation.qualified_name}")
        await self._catalog.lengthen_window(self._relation.subid, self._relation.relid, until)
        self.until = max(self.until, until)
        self._read.append((until, KeySet(keys)))
        await self._engine.run_without_spark(arrow_writer.complete_from, staged, chosen, rows)
        logger.info(
            "rows were read again from the publisher",
            relation=self._relation.qualified_name,
            rows=int(np.count_nonzero(chosen)),
            until=str(until),
        )


def read_again(
    source: CopySource, table: TargetTable, keys: pa.Table, key_types: Mapping[str, str], cut: Cut
) -> tuple[pa.Table, Lsn]:
    """Return the publisher's present rows under `keys`, with the table's columns, and an LSN past their snapshot (snapshots.py:
    flushed_end_of_wal).

    Blocks, also while another session has the table locked; `cut` interrupts it.  Raises SerializationFailure if the table was
    altered since it was described, or rewritten since the snapshot was taken: the next worker describes it anew.
    """
    with chunk_reader.session(source, cut) as connection, cut.watching(connection):
        connection.execute(BEGIN)
        rows = rows_under(connection, source, table, keys, key_types)
        ((text,),) = connection.execute(END_OF_WAL).fetchall()
        until = Lsn.parse(text)
        while connection.execute(f"SELECT {flushed(until)}").fetchall() != [(True,)]:
            connection.execute(WAIT)
        connection.execute("COMMIT")
    return rows, until


def rows_under(
    connection: Connection, source: CopySource, table: TargetTable, keys: pa.Table, key_types: Mapping[str, str]
) -> pa.Table:
    """Return the publisher's rows under `keys`, with the table's columns, as the connection's transaction sees them.

    `keys` has the Delta table's names, `key_types` the publisher's.  Blocks.  Raises SerializationFailure (hold_as_described).
    """
    hold_as_described(connection, source.table)
    schema = pa.schema([table.schema.field(name) for name in source.table.names])
    keys = keys.rename_columns([source.table.published(name) for name in keys.column_names])
    operators = equality_operators(connection, source.table.oid, {name: key_types[name] for name in keys.column_names})
    batches = []
    for first in range(0, keys.num_rows, _KEYS):
        condition = is_one_of(keys.slice(first, _KEYS), key_types, operators)
        batches += list(chunk_reader.read(connection, source, chunk_reader.statement(source, None, condition), schema))
    return with_columns(pa.Table.from_batches(batches, schema), table)


def with_columns(rows: pa.Table, table: TargetTable) -> pa.Table:
    """Return the rows with all of the table's columns; those that the publisher lacks are NULL, or say whose rows they are."""
    for field in table.schema:
        if table.source is not None and field.name == table.source.column:
            rows = rows.append_column(field, repeated(pa.scalar(table.source.value, field.type), rows.num_rows))
        elif field.name not in rows.column_names:
            rows = rows.append_column(field, nulls(rows.num_rows, field.type))
    return rows.select(table.schema.names).combine_chunks()
