"""Arrow columns as text: PostgreSQL's own (`output_texts`), and the one that both sides hash (`canonical_texts`).

The canonical text is the quickest of those that PostgreSQL and Arrow can both make exactly: hexadecimal digits of the
binary form for floats, dates, timestamps and bytea, PostgreSQL's text for everything else.  Both functions take an array of
a type that column_types.shaped_type returns, and return a string array of the same length; a NULL stays NULL.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.protocol.arrow_arrays import bitmap, contents, validity
from pubsub.protocol.output.numbers import float4out, float8out
from pubsub.protocol.output.variants import variant_text
from pubsub.protocol.type_contract import VARIANT

_EPOCH_DAYS: Final = 10_957  # 2000-01-01, in days from 1970-01-01
_EPOCH_MICROSECONDS: Final = _EPOCH_DAYS * 86_400_000_000
_DIGITS: Final = np.array([list(f"{byte:02x}".encode()) for byte in range(256)], np.uint8).view(np.uint16).reshape(-1)
NOT_A_NUMBER: Final = "NaN"

#: What makes array_out and record_out put a value into quotes (arrayfuncs.c, rowtypes.c).
_QUOTED_ELEMENT: Final = r'^$|^[nN][uU][lL][lL]$|[ \t\n\r\x0b\x0c{}",\\]'
_QUOTED_ATTRIBUTE: Final = r'^$|[ \t\n\r\x0b\x0c()",\\]'


def canonical_texts(column: pa.Array) -> pa.Array:
    """Return the texts that are hashed; forms.py has the same in SQL."""
    kind, kinds = column.type, pa.types
    if kinds.is_string(kind):
        return column
    if kinds.is_boolean(kind):
        return pc.if_else(column, "true", "false")
    if kinds.is_floating(kind):
        return _float_digits(column)
    if kinds.is_date32(kind):
        days = _numbers(column, pa.int32()).astype(np.int64) - _EPOCH_DAYS
        return _fixed_digits(days.astype(">i4"), validity(column))
    if kinds.is_timestamp(kind):
        since = _numbers(column, pa.int64()) - _EPOCH_MICROSECONDS
        return _fixed_digits(since.astype(">i8"), validity(column))
    if kinds.is_binary(kind):
        return digits(column)
    return output_texts(column)


def output_texts(column: pa.Array) -> pa.Array:
    """Return the texts of the types' output functions, as in a session with pubsub.publisher's settings."""
    kind, kinds = column.type, pa.types
    if kinds.is_string(kind):
        return column
    if kinds.is_boolean(kind):
        return pc.if_else(column, "t", "f")
    if kinds.is_integer(kind) or kinds.is_date32(kind):
        return column.cast(pa.string())
    if kinds.is_decimal128(kind):
        return _decimals(column)
    if kinds.is_timestamp(kind):
        text = pc.utf8_rtrim(column.cast(pa.timestamp("us")).cast(pa.string()), "0")
        # Without the fraction the zeros of the seconds must stay: Arrow always writes six digits.
        text = pc.utf8_rtrim(text, ".")
        return text if kind.tz is None else pc.binary_join_element_wise(text, "+00", "")
    if kinds.is_floating(kind):
        return pa.array([None if value is None else _float_text(value, kind) for value in column.to_pylist()])
    if kinds.is_binary(kind):
        return pc.binary_join_element_wise("\\x", digits(column), "")
    if kind == VARIANT:
        return _variants(column)
    if kinds.is_list(kind):
        return _arrays(column)
    if kinds.is_struct(kind):
        return _records(column)
    raise TypeError(f"no text is known for Arrow type {kind}")


def digits(values: pa.Array) -> pa.Array:
    """Return encode(value, 'hex') for a binary or string array."""
    data, offsets = contents(values)
    return pa.Array.from_buffers(
        pa.string(),
        len(values),
        [bitmap(validity(values)), pa.py_buffer(offsets.astype(np.int32) * 2), pa.py_buffer(_DIGITS[data])],
    )


def _numbers(column: pa.Array, kind: pa.DataType) -> npt.NDArray[np.int64]:
    """Return the stored integers, 0 for NULL."""
    plain = column.view(kind)
    found: npt.NDArray[np.int64] = (pc.fill_null(plain, 0) if plain.null_count else plain).to_numpy()
    return found


def _fixed_digits(numbers: npt.NDArray[np.generic], valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    """Return the hexadecimal digits of big-endian numbers, all of one width."""
    count, width = len(numbers), 2 * numbers.itemsize
    offsets = np.arange(count + 1, dtype=np.int32) * width
    data = _DIGITS[numbers.view(np.uint8)]
    return pa.Array.from_buffers(pa.string(), count, [bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)])


def _float_digits(column: pa.Array) -> pa.Array:
    double = pa.types.is_float64(column.type)
    bits = _numbers(column, pa.int64() if double else pa.int32())
    text = _fixed_digits(bits.astype(">i8" if double else ">i4"), validity(column))
    # The bits of a NaN say how it came about.
    nan = np.isnan(bits.astype(np.int64 if double else np.int32).view(np.float64 if double else np.float32))
    return pc.if_else(pa.array(nan), pc.if_else(column.is_valid(), NOT_A_NUMBER, None), text) if nan.any() else text


def _decimals(column: pa.Array) -> pa.Array:
    """Return decimals without an exponent, with as many digits after the point as the type has."""
    scale = column.type.scale
    whole = column.view(pa.decimal128(38, 0)).cast(pa.string())
    if scale == 0:
        return whole
    negative = pc.starts_with(whole, "-")
    unsigned = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
    text = pc.binary_replace_slice(unsigned, -scale, -scale, ".") if scale else unsigned
    return pc.if_else(negative, pc.binary_join_element_wise("-", text, ""), text)


def _float_text(value: float, kind: pa.DataType) -> str:
    if kind.bit_width == 64:
        return float8out(struct.pack("<d", value)).decode()
    return float4out(struct.pack("<f", value)).decode()


def _variants(column: pa.Array) -> pa.Array:
    values = column.to_pylist()
    return pa.array(
        [None if one is None else variant_text(one["metadata"], one["value"]) for one in values], pa.string()
    )


def _arrays(column: pa.Array) -> pa.Array:
    """Return the texts of arrays (array_out)."""
    elements = output_texts(column.flatten())
    quoted = _quoted(elements, _QUOTED_ELEMENT, ('"', '\\"'), "NULL")
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False), out=offsets[1:])
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), quoted), ",")
    return _where_valid(column, pc.binary_join_element_wise("{", joined, "}", ""))


def _records(column: pa.Array) -> pa.Array:
    """Return the texts of composites (record_out)."""
    parts = [_quoted(output_texts(one), _QUOTED_ATTRIBUTE, ('"', '""'), "") for one in column.flatten()]
    joined = pc.binary_join_element_wise(*parts, ",")
    return _where_valid(column, pc.binary_join_element_wise("(", joined, ")", ""))


def _quoted(texts: pa.Array, special: str, quote: tuple[str, str], null: str) -> pa.Array:
    """Put the texts that need it into quotes, with backslashes and quotes in them escaped."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    texts = texts.cast(pa.string())
    chosen = pc.match_substring_regex(texts, special)
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), *quote)
    quoted = pc.if_else(chosen, pc.binary_join_element_wise('"', escaped, '"', ""), texts)
    return pc.fill_null(quoted, null)


def _where_valid(column: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), texts, None) if column.null_count else texts
