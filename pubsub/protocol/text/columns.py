"""Convert columns of PostgreSQL's text to Arrow columns, all rows at once.

`from_text` converts to the type that column_types.shaped_type chose.  Each value is converted exactly or refused
(InvalidText): nothing is rounded, clipped or made NULL.  The text must come from a session with datestyle ISO, TimeZone
UTC, bytea_output hex and extra_float_digits above 0 (every connection to a publisher sets them).

A natural type refuses the values that Delta lacks: infinity, BC and years past 9999 in dates and timestamps, NaN in
numeric.  Values that Arrow's own casts would let through (hexadecimal integers, floats out of range as infinity or
zero, a year 0) are checked here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.arrow_arrays import Bytes, bitmap, contents, slices, validity
from pubsub.protocol.column_types import is_nested, spark_ddl
from pubsub.protocol.nested_arrays import list_array, struct_array
from pubsub.protocol.refused_values import BadValue, Convert, InvalidText, first_refused, nested_values
from pubsub.protocol.text.nested import array_parts, record_parts
from pubsub.protocol.text.variant import variants
from pubsub.protocol.type_contract import VARIANT

_FIRST_DAY: Final = -719_162  # 0001-01-01, in days from 1970-01-01
_LAST_DAY: Final = 2_932_896  # 9999-12-31
_MICROSECONDS_PER_DAY: Final = 86_400_000_000
_DIGITS_AT_ONCE: Final = 1 << 20


def from_text(values: pa.BinaryArray | pa.StringArray, target: pa.DataType) -> pa.Array:
    """Convert PostgreSQL's text to values of `target`: a pyarrow Array to one of the same length, NULLs kept.

    `values` is a binary or string array (32-bit offsets); a NULL has no bytes.  Raises InvalidText for the first value
    that does not fit.
    """
    if pa.types.is_string(values.type):
        values = values.view(pa.binary())
    if is_nested(target):
        return nested_values(values, target, lambda: _nested(values, target), bytes)
    convert, sqlstate = _converter(target)
    try:
        return convert(values, target)
    except (pa.ArrowInvalid, BadValue) as error:
        index = first_refused(values, target, convert)
        raise InvalidText(index, values[index].as_py(), spark_ddl(target), sqlstate) from error


def _nested(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    valid = validity(values)
    if target == VARIANT:
        return variants(values)
    if pa.types.is_list(target):
        parts = array_parts(values)
        return list_array(parts.offsets, lambda: from_text(parts.texts, target.value_type), target, valid)
    texts = record_parts(values, target.num_fields)
    children = [from_text(text, field.type) for text, field in zip(texts, target, strict=True)]
    return struct_array(children, target, valid, len(values))


def _converter(target: pa.DataType) -> tuple[Convert, str]:
    """Return the function that converts text to `target`, and the SQLSTATE for a value that does not fit."""
    kinds = pa.types
    if kinds.is_string(target):
        return _text, "22021"
    if kinds.is_integer(target):
        return _integer, "22003"
    if kinds.is_decimal128(target):
        return _parse, "22003"
    if kinds.is_timestamp(target) or kinds.is_date32(target):
        return _date_or_timestamp, "22008"
    if kinds.is_boolean(target):
        return _boolean, "22P02"
    if kinds.is_float32(target) or kinds.is_float64(target):
        return _float, "22003"
    if kinds.is_binary(target):
        return _bytea, "22P02"
    raise FeatureNotSupported(f"PostgreSQL's text cannot be read as Arrow type {target}")


def _text(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    return values.cast(target)  # checks UTF-8, copies nothing


def _parse(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    """Parse with Arrow's own parser.  It works on bytes, so the text need not be checked as UTF-8 first."""
    return values.view(pa.string()).cast(target)


def _integer(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    data, _ = contents(values)
    if data.size and data.max() > ord("9"):  # Arrow reads 0x1F
        raise BadValue
    return _parse(values, target)


def _float(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    result = _parse(values, target)
    numbers = result.to_numpy(zero_copy_only=False)
    # PostgreSQL writes these values only so; any other text with such a result was out of range, or not PostgreSQL's.
    for found, names in (
        (np.isinf(numbers), ["Infinity", "-Infinity"]),
        (numbers == 0, ["0", "-0"]),
        (np.isnan(numbers), ["NaN"]),
    ):
        if found.any():
            texts = values.filter(pa.array(found)).drop_null()
            if not pc.all(pc.is_in(texts, pa.array([name.encode() for name in names])), min_count=0).as_py():
                raise BadValue
    return result


def _date_or_timestamp(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    result = _parse(values, target)
    days = pa.types.is_date32(target)
    unit = 1 if days else _MICROSECONDS_PER_DAY
    bounds = pc.min_max(result.view(pa.int32() if days else pa.int64()))
    least, greatest = bounds["min"].as_py(), bounds["max"].as_py()
    if least is not None and not (_FIRST_DAY * unit <= least and greatest < (_LAST_DAY + 1) * unit):
        raise BadValue
    return result


def _boolean(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    data, offsets = contents(values)
    valid = validity(values)
    first = data.take(offsets[:-1], mode="clip") if data.size else np.zeros(len(values), np.uint8)
    true = first == ord("t")
    good = (np.diff(offsets) == 1) & (true | (first == ord("f")))
    if not (good if valid is None else good | ~valid).all():
        raise BadValue
    return pa.Array.from_buffers(target, len(values), [bitmap(valid), bitmap(true)])


def _bytea(values: pa.BinaryArray, target: pa.DataType) -> pa.Array:
    """Decode hexadecimal, "\\x6162" (bytea.c: byteaout with bytea_output hex).

    All values are decoded as one run of digit pairs; each value's "\\x" counts as a pair, and its byte is left out
    afterwards.
    """
    valid = validity(values)
    data, offsets = contents(values if valid is None else pc.fill_null(values, b"\\x"))
    count = len(values)
    if count == 0:
        return pa.array([], target)
    lengths = np.diff(offsets)
    if (lengths < 2).any() or (lengths & 1).any():
        raise BadValue
    starts = offsets[:-1]
    if (data[starts] != ord("\\")).any() or (data[starts + 1] != ord("x")).any():
        raise BadValue
    pairs = np.empty(len(data) // 2, np.uint8)
    others = 0
    for begin in range(0, len(data), _DIGITS_AT_ONCE):  # whose intermediate results would take several times the values
        nibbles = _NIBBLES[data[begin : begin + _DIGITS_AT_ONCE]]
        others += int(np.count_nonzero(nibbles > 15))
        pairs[begin // 2 : (begin + len(nibbles)) // 2] = nibbles[0::2] << np.uint8(4) | nibbles[1::2]
    if others != 2 * count:  # the prefixes alone
        raise BadValue
    return slices(pairs, starts // 2 + 1, offsets[1:] // 2, target, valid=valid)


def _nibbles() -> Bytes:
    table = np.full(256, 16, np.uint8)
    for digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
        table[np.frombuffer(digits, np.uint8)] = np.arange(16, dtype=np.uint8)
    return table


_NIBBLES: Final = _nibbles()
