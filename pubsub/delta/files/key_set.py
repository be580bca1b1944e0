"""Find the rows of a data file whose keys are among a batch's, by whole columns instead of single values."""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta.files.comparable_bytes import canonical
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.column_types import is_nested

Column: TypeAlias = pa.Array | pa.ChunkedArray
_NOT_FOUND: Final = -1
# A lookup table of integer keys has at most _SPARSEST slots per key, or _SMALL_SPAN in all.
_SPARSEST: Final = 16
_SMALL_SPAN: Final = 1 << 20


def can_match(schema: pa.Schema) -> bool:
    """Return whether Arrow compares such columns as keys must be compared; not so for floats, which have two zeros."""
    return all(_exact(field.type) for field in schema)


def can_match_whole(schema: pa.Schema) -> bool:
    """Return whether whole rows of such columns can be compared: floats by their bits, as by their text; no maps."""
    return all(_can_match_whole(field.type) for field in schema)


def _can_match_whole(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _can_match_whole(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_can_match_whole(field.type) for field in kind)
    return _exact(kind) or _is_float(kind)


class KeySet:
    """A set of distinct keys without NULLs, from a table of the key's columns.  Of floats 0 and -0 are one key.

    With `whole` they are whole rows of a table without a key, where NULL equals NULL, and the zeros differ.
    """

    def __init__(self, keys: pa.Table, *, whole: bool = False) -> None:
        self.keys = keys
        self._schema: pa.Schema = keys.schema
        self._rows: int = keys.num_rows
        self._whole = whole
        columns = [_comparable(column.combine_chunks(), whole) for column in keys.columns]
        plain = not whole and len(columns) == 1 and pa.types.is_integer(self._schema.field(0).type)
        self._integers = _Integers(columns[0]) if plain else None
        if self._integers is not None:
            return
        # Each step pairs the codes so far with the next column's, and renumbers the pairs found: codes stay small.
        self._values = [column.unique() for column in columns]
        self._pairs: list[pa.Array] = []
        codes = pc.index_in(columns[0], self._values[0])
        for column, values in zip(columns[1:], self._values[1:], strict=True):
            paired = _pair(codes, pc.index_in(column, values), len(values))
            self._pairs.append(paired.unique())
            codes = pc.index_in(paired, self._pairs[-1])
        # The row in `keys` of each code.
        self._row_of_code = np.empty(self._rows, np.int64)
        self._row_of_code[codes.to_numpy(zero_copy_only=False)] = np.arange(self._rows)

    def __len__(self) -> int:
        return self._rows

    @property
    def distinct(self) -> bool:
        """Whether no two of the keys are equal.  If some are, only the number of one of them is found."""
        if self._integers is not None:
            return bool((self._integers.ordered[1:] != self._integers.ordered[:-1]).all())
        return len(self._pairs[-1] if self._pairs else self._values[0]) == self._rows

    def outside(self, bounds: tuple[Any, Any] | None) -> bool:
        """Return whether no key lies within `bounds`, a file's least and greatest first key column (None: unknown)."""
        if self._integers is None or bounds is None or not all(isinstance(bound, int) for bound in bounds):
            return False
        return self._integers.outside(*bounds)

    def rows(self, columns: pa.Table | pa.RecordBatch) -> Indices:
        """Return the number among the keys, or -1, of each row of `columns`, which are the key's."""
        if self._integers is not None:
            return self._integers.rows(columns.column(0))
        found = pc.index_in(
            _comparable(columns.column(0).cast(self._schema.field(0).type), self._whole), self._values[0]
        )
        for index, (values, pairs) in enumerate(zip(self._values[1:], self._pairs, strict=True), 1):
            column = _comparable(columns.column(index).cast(self._schema.field(index).type), self._whole)
            found = pc.index_in(_pair(found, pc.index_in(column, values), len(values)), pairs)
        codes = pc.fill_null(found, _NOT_FOUND)
        if isinstance(codes, pa.ChunkedArray):
            codes = codes.combine_chunks()
        numbers: Indices = codes.to_numpy(zero_copy_only=False).astype(np.int64)
        return np.where(numbers >= 0, self._row_of_code[numbers], _NOT_FOUND) if self._rows else numbers


class _Integers:
    """Keys of one integer column, found by a lookup table if they are dense, else by binary search."""

    def __init__(self, column: pa.Array) -> None:
        values = column.to_numpy(zero_copy_only=False)
        self.order = np.argsort(values, kind="stable")
        self.ordered = values[self.order]
        self._table: npt.NDArray[np.int32] | None = None
        if not len(values):
            return
        self._low, self._high = int(self.ordered[0]), int(self.ordered[-1])
        span = self._high - self._low + 1
        if span <= max(_SPARSEST * len(values), _SMALL_SPAN):
            self._table = np.full(span, _NOT_FOUND, np.int32)
            self._table[values.astype(np.int64) - self._low] = np.arange(len(values))

    def outside(self, low: int, high: int) -> bool:
        """Return whether no key lies from `low` to `high`, both inclusive."""
        first = int(np.searchsorted(self.ordered, low, side="left"))
        return first == len(self.ordered) or int(self.ordered[first]) > high

    def rows(self, column: Column) -> Indices:
        """See KeySet.rows."""
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        found = np.full(len(column), _NOT_FOUND, np.int64)
        if not len(self.ordered):
            return found
        there = None
        if column.null_count:
            there = np.asarray(pc.is_valid(column))
            column = pc.fill_null(column, 0)
        values = column.to_numpy(zero_copy_only=False)
        inside = (values >= self._low) & (values <= self._high)
        if there is not None:
            inside &= there
        near = values[inside].astype(np.int64)
        if self._table is not None:
            found[inside] = self._table[near - self._low]
        else:
            places = np.searchsorted(self.ordered, near)
            found[inside] = np.where(self.ordered[places] == near, self.order[places], _NOT_FOUND)
        return found


def _pair(left: Column, right: Column, count: int) -> Column:
    """Combine two codes into one; NULL where either is NULL."""
    return pc.add(pc.multiply(left.cast(pa.int64()), count), right.cast(pa.int64()))


def _comparable(column: Column, whole: bool) -> Column:
    """Convert floats to their bits, of a single NaN, so that NaN equals NaN and, if `whole`, the zeros differ.

    Arrays and composites become bytes.
    """
    if is_nested(column.type):
        return canonical(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
    if not _is_float(column.type):
        return column
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    column = pc.if_else(pc.is_nan(column), pa.scalar(math.nan, column.type), column)
    if not whole:
        column = pc.add(column, pa.scalar(0.0, column.type))  # -0 becomes 0
    return column.view(pa.int64() if pa.types.is_float64(column.type) else pa.int32())


def _is_float(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float32(kind) or pa.types.is_float64(kind))


def _exact(kind: pa.DataType) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_integer(kind)
        or kinds.is_string(kind)
        or kinds.is_binary(kind)
        or kinds.is_boolean(kind)
        or kinds.is_date(kind)
        or kinds.is_timestamp(kind)
        or kinds.is_decimal(kind)
    )
