"""The order of the rows in a rewritten file: by the table's cluster columns, or else by its key.

    the sort columns of all live rows ─► each row's rank, its place in the new file
    a slice of ranks at a time: the rows of the files that have them ─► sorted

Readers leave out row groups by their statistics, and rows that batches have scattered over small files lie together
again.  In memory are the sort columns and one slice; every slice reads all the files, so files of more than a few slices
keep the order in which they lie.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.delta.file_rows import live_rows
from pubsub.delta.log import AddFile, TableLog, local_path
from pubsub.delta.table import TargetTable

_SLICE_BYTES: Final = 32 << 20
_MOST_SLICES: Final = 8

Ranks = npt.NDArray[np.int64]


def ranks(log: TableLog, files: Sequence[AddFile], table: TargetTable) -> Ranks | None:
    """Return the rank of each live row of the files, in their order; None if they are to keep their order.

    `table`: laid_out.  They keep it if they are in order, if nothing sorts them, and if they are too large.
    """
    names = _sort_columns(table)
    if not names or _slices(log, files) > _MOST_SLICES:
        return None
    found = list(live_rows(log, files, table, names))
    if not found:
        return None
    order = pc.sort_indices(pa.concat_tables(found), sort_keys=[(name, "ascending") for name in names]).to_numpy()
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return None if bool(np.all(places[1:] > places[:-1])) else places


def sorted_rows(log: TableLog, files: Sequence[AddFile], table: TargetTable, ranks: Ranks) -> Iterator[pa.Table]:
    """Yield the live rows of the files in the order of their ranks, a slice at a time."""
    slices = _slices(log, files)
    for part in range(slices):
        low, high = (len(ranks) * bound // slices for bound in (part, part + 1))
        pieces: list[pa.Table] = []
        found: list[Ranks] = []
        begin = 0
        for rows in live_rows(log, files, table):
            its = ranks[begin : begin + rows.num_rows]
            begin += rows.num_rows
            chosen = np.flatnonzero((its >= low) & (its < high))
            if len(chosen):
                pieces.append(rows.take(chosen))
                found.append(its[chosen])
        if pieces:
            yield pa.concat_tables(pieces).take(np.argsort(np.concatenate(found)))


def _sort_columns(table: TargetTable) -> list[str]:
    names = [name for name in table.clustered_by or table.key if name not in table.partitioned_by]
    return [name for name in names if not pa.types.is_nested(table.schema.field(name).type)]


def _slices(log: TableLog, files: Sequence[AddFile]) -> int:
    size = 0
    for file in files:
        metadata = pq.read_metadata(local_path(file, log.table))
        size += sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return max(-(-size // _SLICE_BYTES), 1)
