"""What a table wants now and then, beside its rows: small files merged, and checkpoints.

Small files are merged as they come, eight at a time of about one size (log-structured), so that their number grows with the
logarithm of the table.  Everything here blocks.
"""

from __future__ import annotations

import time
from typing import Final

from pubsub.delta import data_files
from pubsub.delta.arrow_writer import living_rows, remove_action, rows_in
from pubsub.delta.log import DataFile, TableLog
from pubsub.delta.table import TargetTable

# Files below these bounds are merged, so many of one size (each class is four times the one before) at once.
_SMALL_ROWS: Final = 1 << 19
_SMALL_BYTES: Final = 64 << 20
_MERGE: Final = 8


def merge_small(log: TableLog, table: TargetTable) -> None:
    """Merge small files when there are enough of them.

    The rows stay what they are (dataChange false).  Another writer's commit at the same time makes this a thing for later.
    """
    with log.writing:
        chosen = _mergeable(log)
        if not chosen:
            return
        added = data_files.write(table, living_rows(log, chosen, table))
        now = int(time.time() * 1000)
        for action in added:
            action["add"]["dataChange"] = False
        removed = [remove_action(file, now, data_change=False) for file in chosen]
        try:
            log.commit(
                [*removed, *added],
                operation="OPTIMIZE",
                metrics={"numRemovedFiles": len(removed), "numAddedFiles": len(added)},
                user_metadata=None,
                made=[log.table / action["add"]["path"] for action in added],
            )
        except FileExistsError:
            return


def checkpoint(log: TableLog) -> None:
    """Write a checkpoint when one is due.  Raises what TableLog.checkpoint_when_due raises."""
    with log.writing:
        log.checkpoint_when_due()


def _mergeable(log: TableLog) -> list[DataFile]:
    """Small files of one class of living rows, the smallest first, where there are enough of them."""
    classes: dict[int, list[DataFile]] = {}
    for file in log.files.values():
        living = rows_in(log, file) - file.deleted
        if living < _SMALL_ROWS and file.size < _SMALL_BYTES:
            classes.setdefault(max(living, 1).bit_length() // 2, []).append(file)
    for _, files in sorted(classes.items()):
        if len(files) >= _MERGE:
            return files
    return []
