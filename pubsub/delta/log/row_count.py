"""Count a Delta table's rows from its log alone: each file's numRecords less the cardinality of its deletion vector."""

from __future__ import annotations

from collections.abc import Iterable

from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import is_reached


def rows_in_log(log: TableLog) -> int | None:
    """Return the number of rows in `log`'s state; None if a file's statistics lack numRecords.  Reads no files."""
    return rows_in_files(list(log.files.values()))


def rows_in_files(files: Iterable[AddFile]) -> int | None:
    """Return the number of rows in these data files, as `rows_in_log` does."""
    total = 0
    for file in files:
        if file.rows is None:
            return None
        total += file.rows - file.deleted
    return total


def count_rows(path: str) -> int | None:
    """Return `rows_in_log` of the table at `path`; None if only Spark reaches it.  Blocks; raises as TableLog does."""
    if not is_reached(path):
        return None
    log = TableLog(path)
    log.refresh()
    return rows_in_log(log)
