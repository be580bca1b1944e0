"""The rows that one version of a Delta table changes: from its change data feed where it has one, else from its files.

    files      removed files and rows of new deletion vectors ─► rows removed; added files ─► rows added
    by key     the same key on both sides: an update, or nothing if the rows are the same; else a delete or an insert

So a writer that rewrites files whole, and one that marks rows in vectors, give the same changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pubsub.delta.files.file_rows import deleted_positions, laid_out, read_columns
from pubsub.delta.log.add_file import AddFile, file_of_action
from pubsub.delta.log.table_log import TableLog, files_at
from pubsub.delta.places import INT96_UNIT, input_of
from pubsub.delta.table import TargetTable

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A row's change: `old` is None for an insert, `new` for a delete."""

    old: Row | None
    new: Row | None


def changes(path: str, table: TargetTable, version: int) -> Iterator[Change]:
    """Yield the changes of a version, deletes first.  Blocks.  Raises FileNotFoundError for what VACUUM has removed."""
    log = TableLog(path)
    log.refresh()
    actions = log.actions(version)
    if actions is None:
        raise FileNotFoundError(f"version {version} of {path}")
    feed = [one["cdc"] for one in actions if "cdc" in one]
    if feed:
        yield from _of_feed(log, table, feed)
        return
    before = files_at(path, version - 1) if version else {}
    removed, added = _pieces(before, actions)
    old = [row for piece in removed for row in _rows(log, table, piece)]
    new = [row for piece in added for row in _rows(log, table, piece)]
    yield from matched(old, new, [table.schema.names.index(name) for name in table.row_key])


def matched(old: Sequence[Row], new: Sequence[Row], key: Sequence[int]) -> Iterator[Change]:
    """Yield what makes `new` of `old`: rows with the same key belong together; without a key, the same rows do."""

    def key_of(row: Row) -> Any:
        values = [row[place] for place in key] if key else row
        return tuple(_comparable(value) for value in values)

    left: dict[Any, list[Row]] = {}
    for row in old:
        left.setdefault(key_of(row), []).append(row)
    fresh: list[Change] = []
    for row in new:
        same = left.get(key_of(row))
        if not same:
            fresh.append(Change(None, row))
            continue
        was = same.pop()
        if tuple(map(_comparable, was)) != tuple(map(_comparable, row)):
            fresh.append(Change(was, row))
    for rows in left.values():
        for row in rows:
            yield Change(row, None)
    yield from fresh


def _comparable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((name, _comparable(one)) for name, one in value.items())
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a file: those that are live in it, but not in `other`, the same file with another vector."""

    file: AddFile
    other: AddFile | None = None


def _pieces(before: Mapping[str, AddFile], actions: Sequence[Mapping[str, Any]]) -> tuple[list[_Piece], list[_Piece]]:
    """Return what a commit removes and adds; a file that only gets another vector is read for the difference alone."""
    gone = {one["remove"]["path"] for one in actions if "remove" in one}
    come = {one["add"]["path"]: file_of_action(one["add"]) for one in actions if "add" in one}
    held = {path: before[path] for path in gone | come.keys() if path in before}
    removed = [_Piece(file, come.get(path)) for path, file in held.items()]
    added = [_Piece(file, held.get(path)) for path, file in come.items()]
    return removed, added


def _rows(log: TableLog, table: TargetTable, piece: _Piece) -> Iterator[Row]:
    laid = laid_out(log, table)
    gone = deleted_positions(log, piece.file)
    wanted = None if piece.other is None else np.setdiff1d(deleted_positions(log, piece.other), gone)
    if wanted is not None and not len(wanted):
        return
    for start, batch in read_columns(log, piece.file, laid, laid.schema.names):
        chosen = gone if wanted is None else wanted
        first, last = np.searchsorted(chosen, (start, start + batch.num_rows))
        there = np.full(batch.num_rows, wanted is None, np.bool_)
        there[chosen[first:last] - start] = wanted is not None
        yield from _values(batch.filter(pa.array(there)))


def _values(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = [column.to_pylist() for column in batch.columns]
    yield from zip(*columns, strict=True)


def _of_feed(log: TableLog, table: TargetTable, feed: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    names = table.schema.names
    kinds: dict[str, list[Row]] = {}
    for one in feed:
        with pq.ParquetFile(
            input_of(log.table / unquote(one["path"])), coerce_int96_timestamp_unit=INT96_UNIT
        ) as parquet:
            read = parquet.read()
        partition = one.get("partitionValues") or {}
        columns = []
        for field in table.schema:
            stored = table.stored_name(field.name)
            if stored in read.column_names:
                columns.append(read.column(stored).cast(field.type))
            else:
                columns.append(pa.array([partition.get(stored)] * read.num_rows, pa.string()).cast(field.type))
        kind = (
            read.column("_change_type").to_pylist()
            if "_change_type" in read.column_names
            else ["insert"] * read.num_rows
        )
        for what, row in zip(kind, zip(*(column.to_pylist() for column in columns), strict=True), strict=True):
            kinds.setdefault(what, []).append(row)
    old = kinds.get("delete", []) + kinds.get("update_preimage", [])
    new = kinds.get("insert", []) + kinds.get("update_postimage", [])
    yield from matched(old, new, [names.index(name) for name in table.row_key])
