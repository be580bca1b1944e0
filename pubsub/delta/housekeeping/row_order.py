"""The order of the rows in a rewritten file: by the table's cluster columns, or else by its key.

    the sort columns of all live rows ─► each row's rank, its place in the new file
    a slice of ranks at a time: the rows of the files that have them ─► sorted

Readers leave out row groups by their statistics, and rows that batches have scattered over small files lie together
again.  In memory are the sort columns and one slice; every slice reads all the files, so files of more than a few slices
keep the order in which they lie.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta.files.file_rows import live_rows
from pubsub.delta.log.add_file import AddFile, path_of
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import open_parquet
from pubsub.delta.table import TargetTable

_SLICE_BYTES: Final = 32 << 20
_MOST_SLICES: Final = 8

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of the live rows of some files: `ranks` has each one's place in the new file, which `slices` slices make."""

    ranks: Ranks
    slices: int

    def rows(self, log: TableLog, files: Sequence[AddFile], table: TargetTable) -> Iterator[pa.Table]:
        """Yield the rows in this order, a slice at a time."""
        for part in range(self.slices):
            low, high = (len(self.ranks) * bound // self.slices for bound in (part, part + 1))
            pieces: list[pa.Table] = []
            found: list[Ranks] = []
            begin = 0
            for rows in live_rows(log, files, table):
                its = self.ranks[begin : begin + rows.num_rows]
                begin += rows.num_rows
                chosen = np.flatnonzero((its >= low) & (its < high))
                if len(chosen):
                    pieces.append(rows.take(chosen))
                    found.append(its[chosen])
            if pieces:
                yield pa.concat_tables(pieces).take(np.argsort(np.concatenate(found)))


def order_of(log: TableLog, files: Sequence[AddFile], table: TargetTable) -> RowOrder | None:
    """Return the order for the live rows of the files; None if they are to keep theirs.

    `table`: laid_out.  They keep it if they are in order, if nothing sorts them, and if they are too large.
    """
    names = _sort_columns(table)
    slices = _slices(log, files) if names else 0
    if not 0 < slices <= _MOST_SLICES:
        return None
    found = list(live_rows(log, files, table, names))
    if not found:
        return None
    order = pc.sort_indices(pa.concat_tables(found), sort_keys=[(name, "ascending") for name in names]).to_numpy()
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return None if bool(np.all(ranks[1:] > ranks[:-1])) else RowOrder(ranks, slices)


def _sort_columns(table: TargetTable) -> list[str]:
    names = [name for name in table.clustered_by or table.key if name not in table.partitioned_by]
    return [name for name in names if not pa.types.is_nested(table.schema.field(name).type)]


def _slices(log: TableLog, files: Sequence[AddFile]) -> int:
    size = 0
    for file in files:
        with open_parquet(path_of(file, log.table)) as parquet:
            metadata = parquet.metadata
        size += sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return max(-(-size // _SLICE_BYTES), 1)
