"""Read the rows of a history between two places (change_rows.Place), in files that are found by their statistics.  Blocks.

Rows of a history are never rewritten but as they are, so the rows between two places are the same in every later version,
whatever files hold them: a change of the table's columns alone gives them other columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta import change_rows
from pubsub.delta.change_rows import Place
from pubsub.delta.files.file_rows import deleted_positions, read_columns, without
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import TargetTable
from pubsub.protocol.lsn import Lsn


@dataclass(frozen=True, slots=True)
class Span:
    """The rows after the place `start`, up to the place `end`."""

    start: Place
    end: Place

    def outside(self, bounds: tuple[Any, Any] | None) -> bool:
        """Return whether rows whose LSNs have these bounds are all outside; None: nothing is known of them."""
        if bounds is None:
            return False
        least, greatest = bounds
        # At the first LSN itself only later copies can stand.
        before = greatest < self.start.lsn or (
            greatest == self.start.lsn and self.end.generation <= self.start.generation
        )
        return bool(before or least > self.end.lsn)

    def rows(self, lsn: pa.Array, seq: pa.Array) -> pa.Array:
        """Return which of the rows with these columns are inside, as booleans; of a row without an LSN, NULL."""
        return pc.and_(_after(lsn, seq, self.start), pc.invert(_after(lsn, seq, self.end)))


def _after(lsn: pa.Array, seq: pa.Array, place: Place) -> pa.Array:
    at = int(place.lsn)
    return pc.or_(pc.greater(lsn, at), pc.and_(pc.equal(lsn, at), pc.greater(seq, place.seq)))


def files_within(log: TableLog, table: TargetTable, span: Span) -> list[AddFile]:
    """Return the files that can have rows of the span, those with the least LSNs first."""
    name = table.stored_name(change_rows.LSN)
    found = [file for file in log.files.values() if not span.outside(file.bounds.get(name))]
    return sorted(found, key=lambda file: (least_lsn(file, table), file.path))


def least_lsn(file: AddFile, table: TargetTable) -> Lsn:
    """Return an LSN that no row of the file is below, by its statistics."""
    bounds = file.bounds.get(table.stored_name(change_rows.LSN))
    return Lsn(0 if bounds is None else bounds[0])


def rows_within(
    log: TableLog, file: AddFile, table: TargetTable, names: Sequence[str], span: Span
) -> Iterator[pa.RecordBatch]:
    """Yield the named columns of the file's live rows that are in the span, a piece (bounded_rows) at a time.

    `table` is as file_rows.laid_out returns it; of `log` only the table's place is used.
    """
    places = (change_rows.LSN, change_rows.SEQ)
    read = [*places, *(name for name in names if name not in places)]
    gone = deleted_positions(log, file)
    for start, batch in read_columns(log, file, table, read, span):
        live = without(batch, start, gone)
        inside = live.filter(span.rows(live.column(0), live.column(1)))
        if inside.num_rows:
            yield inside.select(list(names))
