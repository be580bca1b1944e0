"""Write a Delta table's data files: Parquet by Arrow, with statistics for the log's `add` actions.

The rows of each partition go to files of their own (partitions.py).  So do those that have ended, of a table with mode = scd2: who
looks for current rows need not open files of others.

A file is durable before its action is returned, and in no log until the caller commits the action.  Blocks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub import allocators
from pubsub.delta.files import bounded_rows, constraints, partitions
from pubsub.delta.log import durable_files
from pubsub.delta.log.transactions import Action
from pubsub.delta.places import Place, StorePath, place
from pubsub.delta.table import TargetTable
from pubsub.processor_time import spent_on

# The most rows of one data file, and the number of rows from which two files are written in parallel.
_FILE_ROWS: Final = 1 << 20
_SPLIT_ROWS: Final = 1 << 18
_ROW_GROUP_ROWS: Final = 1 << 18
_ROW_GROUP_BYTES: Final = 32 << 20
# Rows of more bytes are divided into row groups before the first is written.
_MOST_GROUP_BYTES: Final = 64 << 20
# A file of completed rows is closed at so many bytes of values, so that housekeeping can rewrite it in some seconds.
_FILE_BYTES: Final = 256 << 20
# What the allocators keep goes back to the system after so many bytes of wide rows: it would be several times what is in use.
_KEPT_BYTES: Final = 32 << 20
_WIDE_ROW: Final = 1 << 10
# The most files, of as many partitions, that one call of `write` keeps open.
_OPEN_FILES: Final = 64
# Strings longer than this make poor bounds.
_BOUND_CHARS: Final = 64

_writers = ThreadPoolExecutor(2, thread_name_prefix="parquet")


def write_table(table: TargetTable, rows: pa.Table) -> list[Action]:
    """Write `rows` to durable data files of the table; return their `add` actions."""
    count = rows.num_rows
    if count == 0:
        return []
    parts = max(-(-count // _FILE_ROWS), 2 if count >= _SPLIT_ROWS else 1)
    size = -(-count // parts)
    if parts > 1:
        rows = partitions.grouped(table, rows)
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
        remove(paths(table.path, added))
        raise failure
    return added


def write_later(table: TargetTable, parts: Sequence[pa.Table]) -> Future[list[Action]]:
    """Start `write` in one of two writer threads."""
    return _writers.submit(write, table, parts)


def paths(path: str | Place, added: Iterable[Action]) -> list[Place]:
    """Return the data files that `add` actions of the table at `path` name; in the log they are URL-encoded."""
    return [place(str(path)) / unquote(action["add"]["path"]) for action in added]


def remove(paths: Iterable[Place]) -> None:
    """Remove files that no log names."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_copy(path: str, name: str, but: Iterable[str] = ()) -> None:
    """Remove the files that `write` made under `name`, in any process, except those that `add` paths in `but` name."""
    kept = {PurePosixPath(unquote(one)).name for one in but}
    remove(file for file in place(path).rglob(f"part-*-{name}*-c*.zstd.parquet") if file.name not in kept)


@spent_on("writing")
def write(
    table: TargetTable,
    parts: Iterable[pa.Table],
    *,
    number: int = 0,
    name: str | None = None,
    several: bool = False,
    merging: bool = False,
) -> list[Action]:
    """Write tables one after the other into durable data files; return their `add` actions, none if they have no rows.

    There is one file, or for a partitioned table one of each partition.  Of a partition whose rows are far apart there
    may be several, since at most _OPEN_FILES are open at once, and rows of about one row group are held in memory.  With
    `several`, a file that has _FILE_ROWS or _FILE_BYTES is closed, and another begun.  So is one with a large value, unless
    files are being merged (`merging`): while it is open it keeps what writing the value took; ended rows are not told from
    others then, which is the caller's choice.  `number` and `name` name the files of one job, which `remove_copy` removes
    together.
    """
    name = f"part-{number:05}-{name or uuid.uuid4()}"
    made: list[_DataFile] = []
    # By their values, since the directory of NULL may be that of a text, too.
    opened: dict[tuple[str | bool | None, ...], _DataFile] = {}

    def divided(part: pa.Table) -> Iterator[tuple[partitions.Values, bool, pa.Table]]:
        for values, rows in partitions.divide(table, part):
            for ended, some in _by_end(table, rows) if table.versions and not merging else ((False, rows),):
                yield values, ended, some

    def write_group(part: pa.Table) -> None:
        for values, ended, rows in divided(part):
            partition = (*values.values(), ended)
            file = opened.pop(partition, None)
            if file is None:
                inside = partitions.directory(list(values), values)
                if len(opened) >= _OPEN_FILES:
                    opened.pop(next(iter(opened))).finish()
                file = _DataFile(table, inside, values, f"{name}-c{len(made):03}.zstd.parquet")
                made.append(file)
            file.write(rows)
            if (several and file.is_full()) or (bounded_rows.are_large(rows) and not merging):
                file.finish()
            else:
                opened[partition] = file  # the one written last is closed last

    try:
        for part in _row_groups(map(partial(_as_table, table), parts)):
            write_group(part)
            del part  # not kept while the next rows are worked out
        for file in opened.values():
            file.finish()
        for inside in _directories(made):
            durable_files.sync_directory(place(table.path) / inside)
    except BaseException:
        for file in made:
            file.abort()
        raise
    return [file.action() for file in made]


def _as_table(table: TargetTable, rows: pa.Table) -> pa.Table:
    """Return the rows with the table's columns.  Raises InvalidValue for NULL in a column that may not have it."""
    rows = rows.select(table.schema.names)
    constraints.require_not_null(table, rows)
    return rows.cast(table.schema)


def _by_end(table: TargetTable, rows: pa.Table) -> Iterator[tuple[bool, pa.Table]]:
    """Yield the rows that have ended, and the others."""
    assert table.mark is not None
    ended = pc.is_valid(rows.column(table.mark))
    for chosen in (False, True):
        mask = ended if chosen else pc.invert(ended)
        some = rows.filter(mask)
        if some.num_rows:
            yield chosen, some


def _directories(made: Iterable[_DataFile]) -> set[str]:
    """Return the directories whose names must become durable, relative to the table's: all from the files up to it."""
    return {str(above) for file in made for above in PurePosixPath(file.name).parents}


class _DataFile:
    """One data file while it is written.  `values`: its partition's."""

    def __init__(self, table: TargetTable, inside: str, values: partitions.Values, name: str) -> None:
        self.name = f"{inside}/{name}" if inside else name
        self._values = values
        self._path = place(table.path) / self.name
        self._columns = [column for column in table.schema.names if column not in table.partitioned_by]
        self._stored = table.stored_schema
        self._bounds = _Bounds(table)
        self._rows = self._bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._file = durable_files.create(self._path)
        try:
            self._writer = pq.ParquetWriter(
                self._file,
                self._stored,
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
                write_statistics=[table.stored_name(column) for column in self._bounds.columns],
                store_decimal_as_integer=True,
                store_schema=False,
            )
        except BaseException:
            self.abort()
            raise

    def write(self, rows: pa.Table) -> None:
        assert self._writer is not None
        self._writer.write_table(_as_stored(rows.select(self._columns), self._stored), row_group_size=_ROW_GROUP_ROWS)
        self._bounds.add(rows)
        self._rows += rows.num_rows
        before = self._bytes
        self._bytes += rows.nbytes
        if self._bytes // _KEPT_BYTES > before // _KEPT_BYTES and self._is_wide():
            allocators.give_back()

    def _is_wide(self) -> bool:
        return self._bytes > max(_KEPT_BYTES, self._rows * _WIDE_ROW)

    def is_full(self) -> bool:
        return self._rows >= _FILE_ROWS or self._bytes >= _FILE_BYTES

    def finish(self) -> None:
        """Make the contents durable, though not yet the name."""
        assert self._writer is not None
        self._writer.close()
        durable_files.finish(self._file, self._path)
        if self._is_wide():
            allocators.give_back()

    def abort(self) -> None:
        """Remove the file."""
        if isinstance(self._path, Path):
            self._path.unlink(missing_ok=True)
        # Both write what they still hold, which is not wanted.
        if self._writer is not None:
            with suppress(OSError, ValueError, pa.ArrowException):
                self._writer.close()
        with suppress(OSError):
            self._file.close()
        # An object is there once it is closed.  A store that fails will not remove it either; VACUUM does, later.
        if isinstance(self._path, StorePath):
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def action(self) -> Action:
        """Return the `add` action of the finished file."""
        stat = self._path.stat()
        return {
            "add": {
                "path": partitions.path_in_log(self.name),
                "partitionValues": dict(self._values),
                "size": stat.st_size,
                "modificationTime": int(stat.st_mtime * 1000),
                "dataChange": True,
                "stats": self._bounds.as_json(),
            }
        }


def _as_stored(rows: pa.Table, stored: pa.Schema) -> pa.Table:
    """Return the rows with the columns' physical names."""
    return rows if rows.schema is stored else pa.table(rows.columns, schema=stored)


def _row_groups(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join the parts to pieces of about one row group each; a large value has one of its own."""
    held: list[pa.Table] = []
    rows = size = 0
    for part in chain.from_iterable(map(_divided, parts)):
        if part.num_rows == 0:
            continue
        large = bounded_rows.are_large(part)
        if held and large:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
        held.append(part)
        rows += part.num_rows
        size += part.nbytes
        del part
        if large or rows >= _ROW_GROUP_ROWS or size >= _ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _divided(part: pa.Table) -> Iterable[pa.Table]:
    return bounded_rows.pieces(part) if part.nbytes > _MOST_GROUP_BYTES else (part,)


class _Bounds:
    """A data file's statistics: the number of rows, the least and greatest values of the key and the cluster columns, and NULLs.

    `columns`: those columns, whether they have bounds or not.
    """

    def __init__(self, table: TargetTable) -> None:
        self.columns = list(table.bounded)
        self._names = {
            name: table.stored_name(name) for name in self.columns if has_bounds(table.schema.field(name).type)
        }
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._counted = {**self._names}
        if table.mark in self.columns:
            self._counted[table.mark] = table.stored_name(table.mark)
        self._nulls = dict.fromkeys(self._counted, 0)
        self._rows = 0

    def add(self, rows: pa.Table) -> None:
        self._rows += rows.num_rows
        for name in self._counted:
            self._nulls[name] += rows.column(name).null_count
        for name in self._names:
            least_greatest = pc.min_max(rows.column(name)).as_py()
            low, high = least_greatest["min"], least_greatest["max"]
            if low is not None:
                self._low[name] = min(self._low.get(name, low), low)
                self._high[name] = max(self._high.get(name, high), high)

    def as_json(self) -> str:
        names = {
            name: stored
            for name, stored in self._names.items()
            if name in self._low and all(_short(bound[name]) for bound in (self._low, self._high))
        }
        return json.dumps(
            {
                "numRecords": self._rows,
                "minValues": {stored: _as_stat(self._low[name]) for name, stored in names.items()},
                "maxValues": {stored: _as_stat(self._high[name]) for name, stored in names.items()},
                "nullCount": {stored: self._nulls[name] for name, stored in self._counted.items()},
                "tightBounds": True,
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )


def has_bounds(kind: pa.DataType) -> bool:
    """Return whether files have statistics of a column of this type."""
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date32(kind))


def _short(bound: Any) -> bool:
    # Only ASCII strings, whose order in Python is that of their bytes.
    return not isinstance(bound, str) or (len(bound) <= _BOUND_CHARS and bound.isascii())


def _as_stat(bound: Any) -> Any:
    return bound if isinstance(bound, (int, str)) else bound.isoformat()
