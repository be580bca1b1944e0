"""Tell which found rows of a table the publisher's table has: those that are not marked as deleted, or as ended (TargetTable.mark)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pubsub.delta.files import file_rows
from pubsub.delta.files.sought_rows import Found
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import TargetTable

Mask = npt.NDArray[np.bool_]


def divided(log: TableLog, table: TargetTable, found: Iterable[Found]) -> Iterator[tuple[Found, Found]]:
    """Yield the rows found in each file as those that are live and those that are marked.

    In a table that marks none all are live.  Reads nothing where statistics tell.  Blocks.
    """
    for one in found:
        live = _live(log, table, one)
        yield _only(one, live), _only(one, ~live)


def only_live(log: TableLog, table: TargetTable, found: Iterable[Found]) -> Iterator[Found]:
    """Yield the rows found that are live, by file.  Blocks."""
    for live, _ in divided(log, table, found):
        if len(live.positions):
            yield live


def _live(log: TableLog, table: TargetTable, found: Found) -> Mask:
    count = len(found.positions)
    if table.mark is None:
        return np.ones(count, np.bool_)
    known = file_rows.known_live(log, table, found.file)
    if known is not None:
        return np.full(count, known)
    live = np.empty(count, np.bool_)
    order = np.argsort(found.positions, kind="stable")
    at = found.positions[order]
    for start, batch in file_rows.read_columns(log, found.file, table, [table.mark], at=at):
        first, last = np.searchsorted(at, (start, start + batch.num_rows))
        null = batch.column(0).is_null().to_numpy(zero_copy_only=False)
        live[order[first:last]] = null[at[first:last] - start]
    return live


def _only(found: Found, chosen: Mask) -> Found:
    if chosen.all():
        return found
    return replace(found, positions=found.positions[chosen], key_rows=found.key_rows[chosen])
