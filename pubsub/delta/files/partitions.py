"""Divide rows among a table's partitions, and write and read the text of a partition's values (PROTOCOL.md).

A data file belongs to one partition.  Its rows do not hold the partition columns; the log has their values as text, by
the columns' physical names, and NULL as null.  The file's directory repeats them for people: `p=2024-01-01/q=a%2Fb`.

Delta reads an empty text as NULL, whatever the type; so '' cannot be stored in a partition column, nor can bytes that are no
text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta.places import is_local
from pubsub.delta.table import TargetTable
from pubsub.errors import DataCorrupted, InvalidValue
from pubsub.protocol.arrow_arrays import repeated

_NULL_DIRECTORY: Final = "__HIVE_DEFAULT_PARTITION__"
# The longest name of a directory that every file system takes.
_LONGEST_NAME: Final = 255
# How much of a value that is refused an error shows.
_SHOWN_BYTES: Final = 50
# What Spark escapes there (ExternalCatalogUtils.scala: escapePathName).
_ESCAPED: Final = re.compile(rb"""[\x01-\x1f"#%'*/:=?\\\x7f{\[\]^]""")
# What a directory's name has unescaped; ASCII alone, since a JVM in the C locale takes no other names.
_SAFE: Final = " !$&'()+,;@~"

# A partition's values as text, by physical name; None: NULL.
Values = Mapping[str, str | None]


def divide(table: TargetTable, rows: pa.Table) -> Iterator[tuple[Values, pa.Table]]:
    """Yield the rows of each partition together, with all their columns; in an unpartitioned table, all rows.

    Raises InvalidValue for a value that a partition column cannot hold.
    """
    if not table.partitioned_by:
        yield {}, rows
        return
    rows = grouped(table, rows)
    if not rows.num_rows:
        return
    columns = {name: rows.column(name).combine_chunks() for name in _present(table, rows)}
    changes = np.zeros(rows.num_rows, np.bool_)
    changes[0] = True
    for column in columns.values():
        codes = _codes(column)
        changes[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(changes)
    for start, end in zip(starts, [*starts[1:], rows.num_rows], strict=True):
        values = {
            table.stored_name(name): as_text(table, name, columns[name][int(start)]) if name in columns else None
            for name in table.partitioned_by
        }
        yield values, rows.slice(start, end - start)


def _present(table: TargetTable, rows: pa.Table | pa.RecordBatch) -> list[str]:
    """Return the partition columns that the rows have; one that the publisher lacks is NULL in a copy."""
    return [name for name in table.partitioned_by if name in rows.column_names]


def grouped(table: TargetTable, rows: pa.Table) -> pa.Table:
    """Return the rows with those of each partition together, otherwise in their order."""
    names = _present(table, rows)
    if not names or rows.num_rows < 2:
        return rows
    order = np.lexsort([_codes(rows.column(name).combine_chunks()) for name in reversed(names)])
    if (order[1:] > order[:-1]).all():
        return rows
    return rows.take(pa.array(order))


def _codes(column: pa.Array) -> Any:
    """Return a number for each value, equal for equal values; NULL is a value."""
    return pc.dictionary_encode(column, null_encoding="encode").indices.to_numpy(zero_copy_only=False)


def require_storable(table: TargetTable, rows: pa.Table | pa.RecordBatch) -> None:
    """Raise InvalidValue if a partition column's value cannot be stored; Spark would store it as another.

    It makes '' NULL, and a directory's name for it, and reads bytes as UTF-8.  A text that is too long for a directory's name
    fails there.
    """
    bounded = is_local(table.path) or table.path.startswith("hdfs:")
    for name in _present(table, rows):
        kind, column = table.schema.field(name).type, rows.column(name)
        if pa.types.is_binary(kind):
            bad = next((value for value in column.unique() if value.is_valid and not _is_text(value.as_py())), None)
            if bad is not None:
                shown = f"\\x{bad.as_py()[:_SHOWN_BYTES].hex()}"
                raise _not_storable(table, name, shown, ", and Delta keeps a partition's value as text.")
        elif pa.types.is_string(kind):
            for text in ("", _NULL_DIRECTORY):
                if pc.any(pc.equal(column, text)).as_py():
                    raise _not_storable(table, name, text, ", and Spark reads this as NULL there.")
        else:
            continue
        if bounded and (long := _too_long(table.stored_name(name), column)) is not None:
            why = f", and Spark's directory of this value would be longer than {_LONGEST_NAME} bytes."
            raise _not_storable(table, name, f"{long[:_SHOWN_BYTES]}…", why)


def _too_long(name: str, column: pa.Array | pa.ChunkedArray) -> str | None:
    """Return a text of the column that is too long for the directory that Spark makes for it; None if there is none."""
    room = _LONGEST_NAME - len(_escaped_by_spark(name.encode())) - 1
    lengths = pc.binary_length(column)
    # A byte becomes three at most.
    suspects = column.filter(pc.fill_null(pc.greater(lengths, room // 3), False)).unique()
    for value in suspects.to_pylist():
        text = value.encode() if isinstance(value, str) else value
        if len(_escaped_by_spark(text)) > room:
            return str(text.decode())
    return None


def _escaped_by_spark(text: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: b"%%%02X" % found[0][0], text)


def _is_text(value: bytes) -> bool:
    """Return whether a partition column can have these bytes."""
    try:
        return value.decode() not in ("", _NULL_DIRECTORY) and b"\0" not in value
    except UnicodeDecodeError:
        return False


def as_text(table: TargetTable, name: str, value: pa.Scalar) -> str | None:
    """Return a partition column's value as the log has it; None for NULL.  Raises InvalidValue."""
    if not value.is_valid:
        return None
    kinds, kind = pa.types, value.type
    try:
        found = value.as_py()
    except (OverflowError, ValueError) as error:
        raise _not_storable(table, name, str(value.cast(pa.int64()))) from error
    if kinds.is_boolean(kind):
        return str(found).lower()
    if kinds.is_decimal(kind):
        return f"{found:f}"
    if kinds.is_timestamp(kind):
        # As Delta writes them: a timestamp with a zone in UTC.
        if kind.tz is not None:
            return f"{found.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
        return str(found.isoformat(" ", "microseconds"))
    if kinds.is_date(kind):
        return str(found.isoformat())
    if kinds.is_integer(kind) or (kinds.is_string(kind) and found):
        return str(found)
    raise _not_storable(table, name, str(found))


def _not_storable(table: TargetTable, name: str, shown: str, why: str = ".") -> InvalidValue:
    if not shown:
        why = ", and Delta reads an empty text there as NULL."
    return InvalidValue(
        f'value "{shown}" cannot be stored in column "{name}" of the Delta table of "{table.relation}"',
        detail=f"The Delta table is partitioned by the column{why}",
        hint="Partition the Delta table by another column.",
    )


def column(table: TargetTable, name: str, values: Values, count: int) -> pa.Array:
    """Return a partition column of `count` rows of a data file with these partition values."""
    kind = table.schema.field(name).type
    return repeated(_as_scalar(values[table.stored_name(name)], kind), count)


@lru_cache(maxsize=1 << 12)
def _as_scalar(text: str | None, kind: pa.DataType) -> pa.Scalar:
    if not text:
        return pa.scalar(None, kind)
    try:
        if pa.types.is_timestamp(kind):
            naive = pa.scalar(text.removesuffix("Z").replace("T", " ")).cast(pa.timestamp("us"))
            return naive if kind.tz is None else pc.assume_timezone(naive, "UTC").cast(kind)
        return pa.scalar(text).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataCorrupted(f'partition value "{text}" of a Delta table is not a {kind}: {error}') from error


class Partitions:
    """The partitions that rows of a batch can be in, as far as the columns of `keys` tell."""

    def __init__(self, table: TargetTable, keys: pa.Table) -> None:
        self._table = table
        self._names = _present(table, keys)
        self._wanted: frozenset[tuple[Any, ...]] | None = None
        if self._names:
            distinct = keys.select(self._names).group_by(self._names).aggregate([])
            columns = (distinct.column(name).cast(table.schema.field(name).type) for name in self._names)
            # A timestamp that Python lacks is in no partition; the others are then sought everywhere.
            with suppress(OverflowError, ValueError):
                self._wanted = frozenset(zip(*(values.to_pylist() for values in columns), strict=True))

    def exclude(self, values: Values) -> bool:
        """Return whether no row of the batch can be in a data file with these partition values."""
        if self._wanted is None:
            return False
        found = (
            _as_scalar(values[self._table.stored_name(name)], self._table.schema.field(name).type).as_py()
            for name in self._names
        )
        return tuple(found) not in self._wanted


def directory(names: Sequence[str], values: Values) -> str:
    """Return the directory, relative to the table's, for a data file of a partition; "" in an unpartitioned table."""
    parts = []
    for name in names:
        text = values[name]
        part = f"{_escaped(name)}={_NULL_DIRECTORY if text is None else _escaped(text)}"
        if len(part) > _LONGEST_NAME:
            part = f"partition-{hashlib.sha256(part.encode()).hexdigest()}"
        parts.append(part)
    return "/".join(parts)


def path_in_log(name: str) -> str:
    """Return a data file's path in the log, of its name with the partition's directory.

    The escapes are those of Java's URI, and no others: Delta's VACUUM compares the texts of paths, and takes a file for one that no
    version names if the log has it as `o%27brien`.
    """
    return quote(name, safe=_SAFE.replace(" ", "") + "/=")


def _escaped(text: str) -> str:
    return quote(text, safe=_SAFE)
