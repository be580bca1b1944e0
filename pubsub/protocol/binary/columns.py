"""A column of binary transfer as what its text would have given (types.from_text), all rows at once where the type allows it.

By columns: booleans, integers, oid, floats, dates and timestamps, numeric, uuid, bytea, jsonb and whatever is text already.  All
else goes value by value (values.py), and so does a pair of types that is not the natural one (a date that is kept as text).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.errors import ProtocolViolation
from pubsub.protocol.arrays import Bytes, Mask, bitmap, contents, slices, validity
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.types import BadValue, InvalidText, first_refused, from_text, spark_ddl

_UUID: Final = 2950
_NUMERIC: Final = 1700
_VERSIONED: Final = frozenset((3802, 4072))

_EPOCH_DAYS: Final = 10_957  # 2000-01-01 from 1970-01-01
_MICROSECONDS_PER_DAY: Final = 86_400_000_000
_FIRST_DAY: Final = -719_162 - _EPOCH_DAYS  # 0001-01-01
_LAST_DAY: Final = 2_932_896 - _EPOCH_DAYS  # 9999-12-31


def from_binary(values: Any, type_oid: int, target: Any, types: BinaryTypes) -> Any:
    """The send function's bytes as values of `target`: pyarrow Array to Array of the same length, NULLs kept.

    `values` is a binary array (32-bit offsets).  Raises InvalidText as from_text does, for the value's text; UnknownBinary;
    ProtocolViolation for bytes that no value has.
    """
    oid = types.base(type_oid)
    if pa.types.is_string(target):
        if types.is_text(oid):
            return from_text(values, target)
        if oid in _VERSIONED:
            return from_text(_without_version(values), target)
        if oid == _UUID:
            return _uuid_texts(values)
        if oid == _NUMERIC:
            return from_text(numeric_texts(values), target)
    elif oid == _NUMERIC:
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


def _invalid(error: InvalidText, values: Any, oid: int, types: BinaryTypes) -> InvalidText:
    return InvalidText(error.index, types.out(oid)(values[error.index].as_py()), error.target, str(error.sqlstate))


def _texts_one_by_one(values: Any, oid: int, types: BinaryTypes) -> Any:
    out = types.out(oid)
    return pa.array([None if value is None else out(value) for value in values.to_pylist()], pa.binary())


def _fixed(values: Any, width: int) -> tuple[Bytes, Mask | None]:
    """The bytes of values of `width` bytes each, zeros for NULL, as a matrix; which are not NULL.  Raises ProtocolViolation."""
    data, offsets = contents(values)
    valid = validity(values)
    lengths = np.diff(offsets)
    good = lengths == width
    if not (good if valid is None else good | ~valid).all():
        raise ProtocolViolation("incorrect binary data format", sqlstate="22P03")
    if valid is None:
        return data.reshape(len(values), width), None
    matrix = np.zeros((len(values), width), np.uint8)
    matrix[valid] = (
        data[np.repeat(valid, lengths)].reshape(-1, width) if lengths[~valid].any() else data.reshape(-1, width)
    )
    return matrix, valid


def _numbers(values: Any, kind: str) -> tuple[npt.NDArray[Any], Mask | None]:
    """Numbers of numpy's big-endian type `kind`, in the machine's order."""
    big = np.dtype(kind)
    matrix, valid = _fixed(values, big.itemsize)
    return np.ascontiguousarray(matrix).view(big).reshape(-1).astype(big.newbyteorder("=")), valid


def _array(numbers: npt.NDArray[Any], valid: Mask | None, target: Any) -> Any:
    return pa.Array.from_buffers(target, len(numbers), [bitmap(valid), pa.py_buffer(np.ascontiguousarray(numbers))])


def _number(kind: str) -> Callable[[Any, Any], Any]:
    def convert(values: Any, target: Any) -> Any:
        numbers, valid = _numbers(values, kind)
        return _array(numbers, valid, target)

    return convert


def _oid(values: Any, target: Any) -> Any:
    numbers, valid = _numbers(values, ">u4")
    return _array(numbers.astype(np.int64), valid, target)


def _boolean(values: Any, target: Any) -> Any:
    matrix, valid = _fixed(values, 1)
    return pa.Array.from_buffers(target, len(values), [bitmap(valid), bitmap(matrix.reshape(-1) != 0)])


def _since_2000(kind: str, unit: int) -> Callable[[Any, Any], Any]:
    """Dates and timestamps: counted from 2000-01-01; the ends of the range are infinities."""

    def convert(values: Any, target: Any) -> Any:
        numbers, valid = _numbers(values, kind)
        outside = (numbers < _FIRST_DAY * unit) | (numbers >= (_LAST_DAY + 1) * unit)
        if (outside if valid is None else outside & valid).any():
            raise BadValue
        return _array(numbers + numbers.dtype.type(_EPOCH_DAYS * unit), valid, target)

    return convert


def _as_is(values: Any, target: Any) -> Any:
    return values.cast(target)


_CONVERTERS: Final[dict[int, Callable[[Any, Any], Any]]] = {
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
_NATURAL: Final[dict[int, Any]] = {
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


def _without_version(values: Any) -> Any:
    """Texts behind a version byte, which is 1."""
    data, offsets = contents(values)
    valid = validity(values)
    there = np.ones(len(values), np.bool_) if valid is None else valid
    starts, ends = offsets[:-1], offsets[1:]
    if (ends - starts < 1)[there].any() or (data.take(starts[there]) != 1).any():
        raise ProtocolViolation("unsupported version number", sqlstate="22P03")
    return slices(data, np.where(there, starts + 1, starts), np.where(there, ends, starts), pa.binary(), valid=valid)


_HEX: Final = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint8).reshape(256, 2)
_UUID_LENGTH: Final = 36
_UUID_PLACES: Final = [place for place in range(_UUID_LENGTH) if place not in (8, 13, 18, 23)]


def _uuid_texts(values: Any) -> Any:
    matrix, valid = _fixed(values, 16)
    count = len(values)
    texts = np.full((count, _UUID_LENGTH), ord("-"), np.uint8)
    texts[:, _UUID_PLACES] = _HEX[matrix].reshape(count, 32)
    return _strings(texts.reshape(-1), np.full(count, _UUID_LENGTH), valid, pa.string())


def _strings(data: Bytes, lengths: npt.NDArray[Any], valid: Mask | None, target: Any) -> Any:
    """Texts one after the other."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(target, len(lengths), [bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)])


# numeric

_DIGITS: Final = np.array([list(f"{group:04d}".encode()) for group in range(10_000)], np.uint8)
_NEGATIVE: Final = 0x4000
_SPECIAL: Final = {0xC000: b"NaN", 0xD000: b"Infinity", 0xF000: b"-Infinity"}


def numeric_texts(values: Any) -> Any:
    """numeric_out of each value, as a binary array.

    Values of one shape (digits, weight, sign, scale, digits before the point) are written side by side: a column has few shapes.
    """
    data, offsets = contents(values)
    valid = validity(values)
    there = np.flatnonzero(np.diff(offsets) if valid is None else valid)
    starts = offsets[:-1][there].astype(np.int64)
    lengths = np.diff(offsets)[there]
    if len(there) != len(values) - values.null_count or (lengths < 8).any():
        raise ProtocolViolation("incorrect binary data format", sqlstate="22P03")
    head = data[starts[:, None] + np.arange(8)].astype(np.int64)
    count, weight, sign, scale = (head[:, place] << 8 | head[:, place + 1] for place in (0, 2, 4, 6))
    weight = np.where(weight >= 1 << 15, weight - (1 << 16), weight)
    if (lengths != 8 + 2 * count).any():
        raise ProtocolViolation("incorrect binary data format", sqlstate="22P03")
    first = np.zeros(len(there), np.int64)
    some = count > 0
    first[some] = data[starts[some] + 8].astype(np.int64) << 8 | data[starts[some] + 9]
    leading = 1 + (first > 9) + (first > 99) + (first > 999)
    shape = ((((count << 16 | weight + (1 << 15)) << 16 | sign) << 14 | scale & 0x3FFF) << 2) | (leading - 1)
    shapes, member = np.unique(shape, return_inverse=True)
    order = np.argsort(member, kind="stable")
    borders = np.searchsorted(member[order], np.arange(len(shapes) + 1))
    matrices: list[tuple[npt.NDArray[np.int64], Bytes]] = []
    text_lengths = np.zeros(len(values), np.int64)
    for index in range(len(shapes)):
        rows = order[borders[index] : borders[index + 1]]
        one = rows[0]
        groups = data[starts[rows][:, None] + 8 + np.arange(2 * count[one])].astype(np.int64)
        written = _numeric_group(
            groups[:, 0::2] << 8 | groups[:, 1::2], int(weight[one]), int(sign[one]), int(scale[one]), int(leading[one])
        )
        matrices.append((rows, written))
        text_lengths[there[rows]] = written.shape[1]
    ends = np.cumsum(text_lengths)
    result = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    for rows, written in matrices:
        width = written.shape[1]
        result[(ends[there[rows]] - width)[:, None] + np.arange(width)] = written
    return _strings(result, text_lengths, valid, pa.binary())


def _numeric_group(digits: npt.NDArray[np.int64], weight: int, sign: int, scale: int, leading: int) -> Bytes:
    """The texts of values of one shape, a row each; `digits` are groups of four, `leading` the first group's length."""
    rows, count = digits.shape
    if sign & 0xC000 == 0xC000:
        text = _SPECIAL.get(sign)
        if text is None:
            raise ProtocolViolation("invalid sign in external numeric value", sqlstate="22P03")
        return np.tile(np.frombuffer(text, np.uint8), (rows, 1))
    if count and (digits > 9999).any():
        raise ProtocolViolation("invalid digit in external numeric value", sqlstate="22P03")
    parts: list[Bytes] = []

    def fill(text: bytes) -> None:
        parts.append(np.tile(np.frombuffer(text, np.uint8), (rows, 1)))

    def groups(begin: int, end: int) -> Bytes:
        """Groups `begin` to `end`, with zeros for those that are not sent."""
        written = np.full((rows, 4 * (end - begin)), ord("0"), np.uint8)
        low, high = max(begin, 0), min(end, count)
        if high > low:
            written[:, 4 * (low - begin) : 4 * (high - begin)] = _DIGITS[digits[:, low:high]].reshape(rows, -1)
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
