"""Write a Delta table's data files: Parquet by Arrow, with statistics for the log's `add` actions.

A file is durable before its action is returned, and in no log until the caller commits the action.  Blocks.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.delta.commit_files import sync_directory
from pubsub.delta.table import TargetTable

# The most rows of one data file, and the number of rows from which two files are written in parallel.
_FILE_ROWS: Final = 1 << 20
_SPLIT_ROWS: Final = 1 << 18
_ROW_GROUP_ROWS: Final = 1 << 18
_ROW_GROUP_BYTES: Final = 32 << 20
# Strings longer than this make poor bounds.
_BOUND_CHARS: Final = 64

Action = dict[str, Any]
_writers = ThreadPoolExecutor(2, thread_name_prefix="parquet")


def write_table(table: TargetTable, rows: Any) -> list[Action]:
    """Write `rows` to durable data files of the table; return their `add` actions."""
    count = rows.num_rows
    if count == 0:
        return []
    parts = max(-(-count // _FILE_ROWS), 2 if count >= _SPLIT_ROWS else 1)
    size = -(-count // parts)
    slices = [rows.slice(start, size) for start in range(0, count, size)]
    if len(slices) == 1:
        return write(table, slices)
    written = [_writers.submit(write, table, [part]) for part in slices]
    added: list[Action] = []
    failure: BaseException | None = None
    for future in written:
        try:
            added += future.result()
        except BaseException as error:
            failure = error
    if failure is not None:
        remove(directory(table.path) / action["add"]["path"] for action in added)
        raise failure
    return added


def write_later(table: TargetTable, parts: Sequence[Any]) -> Future[list[Action]]:
    """Start `write` in one of two writer threads."""
    return _writers.submit(write, table, parts)


def directory(path: str) -> Path:
    """Return the local directory of the table at `path`."""
    return Path(path.removeprefix("file://"))


def remove(paths: Iterable[Path]) -> None:
    """Remove files that no log names."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_copy(path: str, name: str, but: Container[str] = ()) -> None:
    """Remove the files that `write` made under `name`, in any process, except the files named in `but`."""
    remove(file for file in directory(path).glob(f"part-*-{name}-c000.zstd.parquet") if file.name not in but)


def write(table: TargetTable, parts: Iterable[Any], *, number: int = 0, name: str | None = None) -> list[Action]:
    """Write tables one after the other into one durable data file; return its `add` action, or [] if they have no rows.

    `number` and `name` name the files of one job, which `remove_copy` removes together.
    """
    name = f"part-{number:05}-{name or uuid.uuid4()}-c000.zstd.parquet"
    path = directory(table.path) / name
    bounds = _Bounds(table)
    stored = table.stored_schema
    writer: pq.ParquetWriter | None = None
    try:
        with open(path, "xb") as file:
            for part in _row_groups(part.select(table.schema.names).cast(table.schema) for part in parts):
                if writer is None:
                    writer = pq.ParquetWriter(
                        file,
                        stored,
                        compression="zstd",
                        compression_level=1,
                        use_dictionary=False,
                        write_statistics=[table.stored_name(column) for column in table.key],
                        store_decimal_as_integer=True,
                        store_schema=False,
                    )
                writer.write_table(_as_stored(part, stored), row_group_size=_ROW_GROUP_ROWS)
                bounds.add(part)
            if writer is not None:
                writer.close()
                file.flush()
                os.fsync(file.fileno())
        if writer is None:
            path.unlink()
            return []
        sync_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    stat = path.stat()
    return [
        {
            "add": {
                "path": name,
                "partitionValues": {},
                "size": stat.st_size,
                "modificationTime": int(stat.st_mtime * 1000),
                "dataChange": True,
                "stats": bounds.as_json(),
            }
        }
    ]


def _as_stored(rows: Any, stored: pa.Schema) -> Any:
    """Return the rows with the columns' physical names."""
    return rows if rows.schema is stored else pa.table(rows.columns, schema=stored)


def _row_groups(parts: Iterable[Any]) -> Iterator[Any]:
    """Join the parts to pieces of about one row group each."""
    held: list[Any] = []
    rows = size = 0
    for part in parts:
        if part.num_rows == 0:
            continue
        held.append(part)
        rows += part.num_rows
        size += part.nbytes
        if rows >= _ROW_GROUP_ROWS or size >= _ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_tables(held)


class _Bounds:
    """A data file's statistics: the number of rows, and the least and greatest values of the key's columns."""

    def __init__(self, table: TargetTable) -> None:
        self._names = {
            name: table.stored_name(name) for name in table.key if _has_bounds(table.schema.field(name).type)
        }
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._rows = 0

    def add(self, rows: Any) -> None:
        self._rows += rows.num_rows
        for name in self._names:
            least_greatest = pc.min_max(rows.column(name)).as_py()
            low, high = least_greatest["min"], least_greatest["max"]
            self._low[name] = min(self._low.get(name, low), low)
            self._high[name] = max(self._high.get(name, high), high)

    def as_json(self) -> str:
        names = {
            name: stored
            for name, stored in self._names.items()
            if all(_short(bound[name]) for bound in (self._low, self._high))
        }
        return json.dumps(
            {
                "numRecords": self._rows,
                "minValues": {stored: _as_stat(self._low[name]) for name, stored in names.items()},
                "maxValues": {stored: _as_stat(self._high[name]) for name, stored in names.items()},
                "nullCount": dict.fromkeys(names.values(), 0),
                "tightBounds": True,
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )


def _has_bounds(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date32(kind))


def _short(bound: Any) -> bool:
    # Only ASCII strings, whose order in Python is that of their bytes.
    return not isinstance(bound, str) or (len(bound) <= _BOUND_CHARS and bound.isascii())


def _as_stat(bound: Any) -> Any:
    return bound if isinstance(bound, (int, str)) else bound.isoformat()
