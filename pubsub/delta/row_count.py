"""How many rows a Delta table holds, by its log alone: each file's numRecords, less the cardinality of its deletion vector."""

from __future__ import annotations

from pubsub.delta.log import TableLog, is_local


def living_rows(log: TableLog) -> int | None:
    """The rows of the table as `log` has it; None where a file's statistics do not say how many it has.  No file is read."""
    total = 0
    for file in list(log.files.values()):
        if file.rows is None:
            return None
        total += file.rows - file.deleted
    return total


def count_rows(path: str) -> int | None:
    """`living_rows` of a table that another engine commits to; None in another file system.  Blocks; raises as TableLog does."""
    if not is_local(path):
        return None
    log = TableLog(path)
    log.refresh()
    return living_rows(log)
