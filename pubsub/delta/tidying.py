"""Merge a table's small files and write its checkpoints.

Small files are merged as they come, at least eight of about the same size at a time (log-structured), so their number
grows with the logarithm of the table's size.  Everything here blocks.
"""

from __future__ import annotations

import time
from typing import Final

from pubsub.delta import data_files
from pubsub.delta.arrow_writer import living_rows, remove_action, rows_in
from pubsub.delta.log import DataFile, TableLog
from pubsub.delta.table import TargetTable

# Files below both bounds are merged once a size class (each four times the one before) has at least _MERGE of them.
_SMALL_ROWS: Final = 1 << 19
_SMALL_BYTES: Final = 64 << 20
_MERGE: Final = 8


def merge_small(log: TableLog, table: TargetTable) -> None:
    """Merge small files if there are enough of them.

    The rows stay the same (dataChange false).  If another writer commits meanwhile, leave it to a later call.
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
    """Write a checkpoint when one is due.  Raises as TableLog.checkpoint_when_due does."""
    with log.writing:
        log.checkpoint_when_due()


def _mergeable(log: TableLog) -> list[DataFile]:
    """Return the small files of the smallest class by living rows that has enough of them; [] if none has."""
    classes: dict[int, list[DataFile]] = {}
    for file in log.files.values():
        living = rows_in(log, file) - file.deleted
        if living < _SMALL_ROWS and file.size < _SMALL_BYTES:
            classes.setdefault(max(living, 1).bit_length() // 2, []).append(file)
    for _, files in sorted(classes.items()):
        if len(files) >= _MERGE:
            return files
    return []
