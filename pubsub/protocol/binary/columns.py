"""Columns in binary transfer, converted to what text.columns makes of their text; all rows at once where possible.

Converted by columns: booleans, integers, oid, floats, dates and timestamps, numeric, uuid, bytea, jsonb, jsonpath,
types whose binary form is text, and plain arrays.  Other types are converted value by value (values.py), and so is a
type with another target than its natural one (a date kept as text).
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import ProtocolViolation
from pubsub.protocol.arrow_arrays import Bytes, Mask, bitmap, contents, slices, validity
from pubsub.protocol.binary.nested import array_elements, array_texts, plain_rows, record_columns
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.column_types import is_nested, spark_ddl
from pubsub.protocol.nested_arrays import list_array, struct_array
from pubsub.protocol.refused_values import BadValue, Convert, InvalidText, OtherShape, first_refused, nested_values
from pubsub.protocol.text.columns import from_text
from pubsub.protocol.type_contract import VARIANT

_UUID: Final = 2950
_NUMERIC: Final = 1700
_INTEGERS: Final = frozenset((20, 21, 23, 26))
_NEVER_QUOTED: Final = frozenset((16, 20, 21, 23, 26, 700, 701, 1700, 2950))
_VERSIONED: Final = frozenset((3802, 4072))

_EPOCH_DAYS: Final = 10_957  # 2000-01-01 from 1970-01-01
_MICROSECONDS_PER_DAY: Final = 86_400_000_000
_FIRST_DAY: Final = -719_162 - _EPOCH_DAYS  # 0001-01-01
_LAST_DAY: Final = 2_932_896 - _EPOCH_DAYS  # 9999-12-31

_Numbers = npt.NDArray[np.integer] | npt.NDArray[np.floating]
# Indices of rows, or all of them.
_Rows = npt.NDArray[np.int64] | slice


def from_binary(values: pa.BinaryArray, type_oid: int, target: pa.DataType, types: BinaryTypes) -> pa.Array:
    """Convert a send function's bytes to values of `target`, one for each, NULLs kept.

    Raises InvalidText with the value's text, like from_text; UnknownBinary; ProtocolViolation for malformed bytes.
    """
    oid = types.base(type_oid)
    if target == VARIANT and oid in _VERSIONED:
        return from_text(_without_version(values), target)
    if is_nested(target):
        return nested_values(values, target, lambda: _nested(values, oid, target, types), types.out(oid))
    if pa.types.is_string(target):
        if types.is_text(oid):
            return from_text(values, target)
        if oid in _VERSIONED:
            return from_text(_without_version(values), target)
        if oid == _UUID:
            return _uuid_texts(values)
        if oid == _NUMERIC:
            return from_text(numeric_texts(values), target)
        if oid in _INTEGERS:
            return _CONVERTERS[oid](values, _NATURAL[oid]).cast(target)
        if types.is_array(oid):
            return from_text(_array_texts(values, oid, types), target)
    elif oid == _NUMERIC:
        if pa.types.is_decimal128(target) and (decimals := _decimals(values, target)) is not None:
            return decimals
        try:
            return from_text(numeric_texts(values), target)
        except InvalidText as error:
            raise _invalid(error, values, oid, types) from error
    elif _NATURAL.get(oid) == target:
        convert = _CONVERTERS[oid]
        try:
            return convert(values, target)
        except BadValue as error:
            index = first_refused(values, target, convert)
            text = types.out(oid)(values[index].as_py())
            raise InvalidText(index, text, spark_ddl(target), "22008") from error
    return from_text(_texts_one_by_one(values, oid, types), target)


def _nested(values: pa.BinaryArray, oid: int, target: pa.DataType, types: BinaryTypes) -> pa.Array:
    """Convert to a list, a struct, or a VARIANT's text: arrays and composites from their binary elements."""
    valid = validity(values)
    if pa.types.is_list(target) and types.is_array(oid):
        plain, element = plain_rows(values)
        if not plain.all():
            raise OtherShape(int(np.argmin(plain)))
        parts = array_elements(values)
        kind = target.value_type
        return list_array(
            parts.offsets,
            lambda: from_binary(parts.texts, element, kind, types) if element else pa.nulls(len(parts.texts), kind),
            target,
            valid,
        )
    if pa.types.is_struct(target) and types.is_record(oid):
        columns = record_columns(values, target.num_fields)
        children = [
            from_binary(column, inner, field.type, types) if inner else pa.nulls(len(column), field.type)
            for (inner, column), field in zip(columns, target, strict=True)
        ]
        return struct_array(children, target, valid, len(values))
    return from_text(_texts_one_by_one(values, oid, types), target)


def _invalid(error: InvalidText, values: pa.BinaryArray, oid: int, types: BinaryTypes) -> InvalidText:
    return InvalidText(error.index, types.out(oid)(values[error.index].as_py()), error.target, str(error.sqlstate))


def _texts_one_by_one(values: pa.BinaryArray, oid: int, types: BinaryTypes) -> pa.BinaryArray:
    out = types.out(oid)
    return pa.array([None if value is None else out(value) for value in values.to_pylist()], pa.binary())


def _array_texts(values: pa.BinaryArray, oid: int, types: BinaryTypes) -> pa.BinaryArray:
    """Return arrays' texts: those of plain arrays by columns, the others' one by one."""
    plain, element = plain_rows(values)
    if types.delimiter(element) != b",":
        return _texts_one_by_one(values, oid, types)

    def convert(elements: pa.BinaryArray) -> pa.Array:
        return from_binary(elements, element, pa.string(), types) if element else elements

    try:
        if plain.all():
            return array_texts(values, convert, quote=element not in _NEVER_QUOTED)
        of_plain, none = pa.array(plain), pa.scalar(None, pa.binary())
        return pc.if_else(
            of_plain,
            array_texts(pc.if_else(of_plain, values, none), convert, quote=element not in _NEVER_QUOTED),
            _texts_one_by_one(pc.if_else(of_plain, none, values), oid, types),
        )
    except InvalidText:  # its index is an element's, not the row's: convert one by one to find the row
        return _texts_one_by_one(values, oid, types)


def _fixed(values: pa.BinaryArray, width: int) -> tuple[Bytes, Mask | None]:
    """Return values of `width` bytes as a matrix, zeros for NULL, and which are not NULL.  Raises ProtocolViolation."""
    data, offsets = contents(values)
    valid = validity(values)
    lengths = np.diff(offsets)
    good = lengths == width
    if not (good if valid is None else good | ~valid).all():
        raise _malformed()
    if valid is None:
        return data.reshape(len(values), width), None
    matrix = np.zeros((len(values), width), np.uint8)
    matrix[valid] = (
        data[np.repeat(valid, lengths)].reshape(-1, width) if lengths[~valid].any() else data.reshape(-1, width)
    )
    return matrix, valid


def _numbers(values: pa.BinaryArray, kind: str) -> tuple[_Numbers, Mask | None]:
    """Read numbers of numpy's big-endian type `kind`; return them in native byte order, and which are not NULL."""
    big = np.dtype(kind)
    matrix, valid = _fixed(values, big.itemsize)
    return np.ascontiguousarray(matrix).view(big).reshape(-1).astype(big.newbyteorder("=")), valid


def _array(numbers: _Numbers, valid: Mask | None, target: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(target, len(numbers), [bitmap(valid), pa.py_buffer(np.ascontiguousarray(numbers))])


def _number(kind: str) -> Convert:
    def convert(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
        numbers, valid = _numbers(values, kind)
        if numbers.dtype.kind == "f":
            # The server's has any sign and bits; a table must not show by which transfer it came.
            numbers[np.isnan(numbers)] = np.nan
        return _array(numbers, valid, target)

    return convert


def _oid(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    numbers, valid = _numbers(values, ">u4")
    return _array(numbers.astype(np.int64), valid, target)


def _boolean(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    matrix, valid = _fixed(values, 1)
    return pa.Array.from_buffers(target, len(values), [bitmap(valid), bitmap(matrix.reshape(-1) != 0)])


def _since_2000(kind: str, unit: int) -> Convert:
    """Make the converter of a date or timestamp, counted from 2000-01-01 with `unit` to the day.

    The converter raises BadValue for values outside the years 1 to 9999; infinities, the ends of the range, are among
    them.
    """

    def convert(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
        numbers, valid = _numbers(values, kind)
        outside = (numbers < _FIRST_DAY * unit) | (numbers >= (_LAST_DAY + 1) * unit)
        if (outside if valid is None else outside & valid).any():
            raise BadValue
        return _array(numbers + numbers.dtype.type(_EPOCH_DAYS * unit), valid, target)

    return convert


def _as_is(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    return values.cast(target)


_CONVERTERS: Final[dict[int, Convert]] = {
    16: _boolean,
    17: _as_is,
    20: _number(">i8"),
    21: _number(">i2"),
    23: _number(">i4"),
    26: _oid,
    700: _number(">f4"),
    701: _number(">f8"),
    1082: _since_2000(">i4", 1),
    1114: _since_2000(">i8", _MICROSECONDS_PER_DAY),
    1184: _since_2000(">i8", _MICROSECONDS_PER_DAY),
}
_NATURAL: Final[dict[int, pa.DataType]] = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
}


def _without_version(values: pa.BinaryArray) -> pa.BinaryArray:
    """Return the texts without the version byte before them, which must be 1."""
    data, offsets = contents(values)
    valid = validity(values)
    there = np.ones(len(values), np.bool_) if valid is None else valid
    starts, ends = offsets[:-1], offsets[1:]
    if (ends - starts < 1)[there].any() or (data.take(starts[there]) != 1).any():
        raise ProtocolViolation("unsupported version number", sqlstate="22P03")
    return slices(data, np.where(there, starts + 1, starts), np.where(there, ends, starts), pa.binary(), valid=valid)


_HEX: Final = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)
_UUID_LENGTH: Final = 36
_UUID_PARTS: Final = ((0, 0, 8), (9, 8, 12), (14, 12, 16), (19, 16, 20), (24, 20, 32))


def _uuid_texts(values: pa.BinaryArray) -> pa.StringArray:
    matrix, valid = _fixed(values, 16)
    count = len(values)
    digits = _HEX.take(matrix).view(np.uint8)
    texts = np.full((count, _UUID_LENGTH), ord("-"), np.uint8)
    for place, begin, end in _UUID_PARTS:
        texts[:, place : place + end - begin] = digits[:, begin:end]
    return _strings(texts.reshape(-1), np.full(count, _UUID_LENGTH), valid, pa.string())


def _strings(data: Bytes, lengths: npt.NDArray[np.int64], valid: Mask | None, target: pa.DataType) -> pa.Array:
    """Return the concatenated texts `data`, of these lengths, as an array."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(target, len(lengths), [bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)])


# numeric

_DIGITS: Final = np.frombuffer("".join(f"{group:04d}" for group in range(10_000)).encode(), np.uint32)
"""The four digits of each group as the bytes of one number."""
_NEGATIVE: Final = 0x4000
_SPECIAL: Final = {0xC000: b"NaN", 0xD000: b"Infinity", 0xF000: b"-Infinity"}


class _Numerics:
    """The parts of the numerics that are not NULL.

    `there` are their indices among the values.  `digits` are their groups of four digits, with as many columns as the
    longest value has groups; shorter ones are filled with 0.  The constructor raises ProtocolViolation.
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        self.valid = validity(values)
        self.there = np.arange(len(values)) if self.valid is None else np.flatnonzero(self.valid)
        data, offsets = contents(values if self.valid is None else values.drop_null())
        starts, lengths = offsets[:-1], np.diff(offsets)
        if (lengths < 8).any() or (lengths & 1).any():
            raise _malformed()
        bytes_read = int(lengths.max(initial=8))
        pairs = data.view(">u2")
        if int(lengths.min(initial=bytes_read)) == bytes_read:
            words = pairs.reshape(len(starts), bytes_read >> 1).astype(np.int64)
        else:
            words = pairs.take((starts >> 1)[:, None] + np.arange(bytes_read >> 1), mode="clip").astype(np.int64)
        self.count, self.weight, self.sign, self.scale = words[:, 0], words[:, 1], words[:, 2], words[:, 3]
        self.weight = self.weight - (self.weight >> 15 << 16)  # signed
        if (lengths != 8 + 2 * self.count).any():
            raise _malformed()
        self.digits = words[:, 4:]
        if self.count.min(initial=bytes_read) * 2 + 8 < bytes_read:
            self.digits = np.where(np.arange(self.digits.shape[1]) < self.count[:, None], self.digits, 0)
        if self.digits.max(initial=0) > 9999:
            raise ProtocolViolation("invalid digit in external numeric value", sqlstate="22P03")


def _malformed() -> ProtocolViolation:
    return ProtocolViolation("incorrect binary data format", sqlstate="22P03")


_POWERS: Final = 10 ** np.arange(19, dtype=np.int64)
_WHOLE_GROUPS: Final = 4
"""The number of digit groups that fit into one 64-bit integer."""


def _decimals(values: pa.BinaryArray, target: pa.Decimal128Type) -> pa.Decimal128Array | None:
    """Convert numerics to a decimal; None if 18 digits do not hold each, or a value is not finite or does not fit."""
    parts = _Numerics(values)
    scale, weight, digits = target.scale, parts.weight, parts.digits
    most = int(weight.max(initial=-1))
    if (parts.sign >= 0xC000).any() or 4 * (most + 1) + scale > 18:
        return None
    width = digits.shape[1]
    if int(weight.min(initial=most)) == most:
        weight = weight[:1]  # the same for all
    first = min(width, _WHOLE_GROUPS)
    whole = np.zeros(len(digits), np.int64)
    for place in range(first):
        whole = whole * 10_000 + digits[:, place]
    sums = _shifted(whole, 4 * (weight - (first - 1)) + scale)
    for place in range(first, width):
        more = _shifted(digits[:, place], 4 * (weight - place) + scale)
        sums = None if sums is None or more is None else sums + more
    if sums is None:
        return None
    if target.precision < 19 and sums.max(initial=0) >= 10**target.precision:
        return None
    words = np.zeros((len(values), 2), np.int64)
    words[parts.there, 0] = np.where(parts.sign == _NEGATIVE, -sums, sums)
    words[:, 1] = words[:, 0] >> 63
    return pa.Array.from_buffers(target, len(values), [bitmap(parts.valid), pa.py_buffer(words)])


def _shifted(numbers: npt.NDArray[np.int64], exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Multiply `numbers` by powers of ten, one for each or one for all; None if digits would be lost."""
    if exponents.min(initial=0) < 0:
        divisors = _POWERS[np.clip(-exponents, 0, 18)]
        if (numbers % divisors).any():
            return None
        numbers = numbers // divisors
    return numbers * _POWERS[np.clip(exponents, 0, 18)] if exponents.max(initial=0) > 0 else numbers


def numeric_texts(values: pa.BinaryArray) -> pa.BinaryArray:
    """Return numeric_out of each value.

    Values of the same shape (number of groups, weight, sign, scale, length of the first group) are written together: a
    column has few shapes.
    """
    parts = _Numerics(values)
    count, weight, sign, scale, there = parts.count, parts.weight, parts.sign, parts.scale, parts.there
    first = parts.digits[:, 0] if parts.digits.shape[1] else count
    leading = 1 + (first > 9) + (first > 99) + (first > 999)
    shape = ((((count << 16 | weight + (1 << 15)) << 16 | sign) << 14 | scale & 0x3FFF) << 2) | (leading - 1)
    if len(shape) and int(shape.min()) == int(shape.max()):
        picks: list[_Rows] = [slice(None)]  # one shape: no rows to sort or gather
    else:
        order = np.argsort(shape, kind="stable")
        borders = np.flatnonzero(np.diff(shape[order], prepend=-1, append=-1))
        picks = [order[begin:end] for begin, end in itertools.pairwise(borders.tolist())]
    matrices: list[tuple[_Rows, Bytes]] = []
    text_lengths = np.zeros(len(values), np.int64)
    for rows in picks:
        one = 0 if isinstance(rows, slice) else rows[0]
        digits = parts.digits[rows, : count[one]]
        written = _numeric_group(digits, int(weight[one]), int(sign[one]), int(scale[one]), int(leading[one]))
        matrices.append((rows, written))
        text_lengths[there[rows]] = written.shape[1]
    if len(matrices) == 1 and len(there) == len(values):
        return _strings(matrices[0][1].reshape(-1), text_lengths, None, pa.binary())
    ends = np.cumsum(text_lengths)
    result = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    for rows, written in matrices:
        width = written.shape[1]
        result[(ends[there[rows]] - width)[:, None] + np.arange(width)] = written
    return _strings(result, text_lengths, parts.valid, pa.binary())


def _numeric_group(digits: npt.NDArray[np.int64], weight: int, sign: int, scale: int, leading: int) -> Bytes:
    """Return the texts of values of one shape, a row each; `digits` are groups, `leading` is the first one's length."""
    rows, count = digits.shape
    if sign & 0xC000 == 0xC000:
        text = _SPECIAL.get(sign)
        if text is None:
            raise ProtocolViolation("invalid sign in external numeric value", sqlstate="22P03")
        return np.tile(np.frombuffer(text, np.uint8), (rows, 1))
    parts: list[Bytes] = []

    def fill(text: bytes) -> None:
        parts.append(np.tile(np.frombuffer(text, np.uint8), (rows, 1)))

    def groups(begin: int, end: int) -> Bytes:
        """Return the digits of groups `begin` to `end`, with zeros for groups that were not sent."""
        written = np.full((rows, 4 * (end - begin)), ord("0"), np.uint8)
        low, high = max(begin, 0), min(end, count)
        if high > low:
            written[:, 4 * (low - begin) : 4 * (high - begin)] = _DIGITS.take(digits[:, low:high]).view(np.uint8)
        return written

    if sign == _NEGATIVE:
        fill(b"-")
    if weight < 0 or not count:
        fill(b"0")
    else:
        parts.append(groups(0, weight + 1)[:, 4 - leading :])
    if scale:
        fill(b".")
        parts.append(groups(weight + 1, weight + 1 + (scale + 3) // 4)[:, :scale])
    return np.concatenate(parts, axis=1)
