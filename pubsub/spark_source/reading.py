"""Divide a span of a history among Spark's tasks, and read a task's rows, as Arrow batches.

A task has some files.  It reads a piece at a time (bounded_rows), so memory does not grow with the rows.  This runs in
executors: it needs nothing but the files, and of the node's directory, where there is one, what reaches their store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from pubsub import object_stores
from pubsub.delta.files.history_rows import Span, rows_within
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import is_local
from pubsub.delta.table import TargetTable
from pubsub.errors import DataCorrupted, UndefinedFile
from pubsub.settings import Settings

# Bytes of files that one task reads, if a file has no more.
_TASK_BYTES: Final = 16 << 20


@dataclass
class Share(InputPartition):
    """What one task reads: of these files of `table`, the rows in `span`."""

    table: TargetTable
    files: tuple[AddFile, ...]
    span: Span
    home: str | None


def shares(table: TargetTable, files: Sequence[AddFile], span: Span, home: str | None) -> list[Share]:
    """Divide the files among tasks; keep their order."""
    found: list[list[AddFile]] = []
    size = 0
    for file in files:
        if not found or size + file.size > _TASK_BYTES:
            found.append([])
            size = 0
        found[-1].append(file)
        size += file.size
    return [Share(table, tuple(held), span, home) for held in found]


def rows(share: Share, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a share, with `schema`, which is Spark's for Arrow (to_arrow_schema).

    Raises UndefinedFile if a file has been deleted since the share was made.
    """
    reach(share.table.path, share.home)
    log = TableLog(share.table.path)
    for file in share.files:
        try:
            for batch in rows_within(log, file, share.table, schema.names, share.span):
                # The names and the order of fields inside a type, which VARIANT has otherwise, are Spark's after the cast.
                columns = [one.cast(field.type) for one, field in zip(batch.columns, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
        except DataCorrupted as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise UndefinedFile(
                f'data file "{file.path}" of the Delta table at "{share.table.path}" was deleted before it was read',
                detail="Its rows are in another file by now.",
                hint="Start the query again: it finds them there. A longer deleted_file_retention keeps files for slow queries.",
            ) from error


def reach(path: str, home: str | None) -> None:
    """Let this process reach the table's store with the settings of the node in `home`, if they are on this machine.

    Without them the environment has to have the store's credentials, as for the store's own tools.
    """
    if home is not None and not is_local(path):
        object_stores.configure(Settings.load(Path(home)).spark.conf)
