"""Arrays and composites in binary transfer, all rows at once: arrays as PostgreSQL's text, or their elements as values.

Plain arrays, those that are empty or have one dimension with lower bound 1, are converted by columns; nearly all arrays
are plain.  The elements of all rows are walked in parallel, converted as one column, and joined again.  The caller
converts arrays of other shapes one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import ProtocolViolation
from pubsub.protocol.arrow_arrays import Bytes, Mask, contents, slices, validity
from pubsub.protocol.nested_arrays import Parts
from pubsub.protocol.refused_values import OtherShape

_HEADER: Final = 12  # dimensions, flags, the element's type
_FIRST: Final = 20  # the first element, after the one dimension's length and lower bound
_NEEDS_QUOTES: Final = r'^$|^(?i:null)$|["\\{} \t\n\r\v\f,]'
_SPECIAL: Final = np.isin(np.arange(256), np.frombuffer(b'"\\{} \t\n\r\v\f,', np.uint8))
Places = npt.NDArray[np.int64]


def plain_rows(values: pa.BinaryArray) -> tuple[Mask, int]:
    """Return which values are plain (NULL is), and their elements' type (0 if none has elements).

    Arrays of another element type than the first's do not count as plain.  Raises ProtocolViolation.
    """
    data, offsets = contents(values)
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    valid = validity(values)
    if (lengths[slice(None) if valid is None else valid] < _HEADER).any():
        raise ProtocolViolation("incorrect binary data format", sqlstate="22P03")
    dimensions = _words(data, starts)
    one = (dimensions == 1) & (lengths >= _FIRST)
    one[one] = _words(data, starts[one] + 16) == 1
    if valid is not None:
        one &= valid
    types = _words(data, starts[one] + 8)
    plain = one | (dimensions == 0) if valid is None else one | (dimensions == 0) | ~valid
    if not len(types):
        return plain, 0
    if (types != types[0]).any():
        plain[one] = types == types[0]
    return plain, int(np.uint32(types[0]))


def array_elements(values: pa.BinaryArray) -> Parts:
    """Return the elements, in binary, of values that are all plain.  Raises ProtocolViolation."""
    data, offsets = contents(values)
    starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    valid = validity(values)
    there = ends - starts >= _FIRST
    if valid is not None:
        there &= valid
    counts = np.zeros(len(values), np.int64)
    counts[there] = _words(data, starts[there] + 12)
    if (counts * 4 > ends - starts).any() or (counts < 0).any():
        raise ProtocolViolation("an array has more elements than it can hold")
    begins, stops, present = _walk(data, starts + _FIRST, ends, counts)
    elements = slices(data, begins, stops, pa.binary(), valid=None if present.all() else present)
    return Parts(elements, np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)]))


def array_texts(
    values: pa.BinaryArray, convert: Callable[[pa.BinaryArray], pa.Array], *, quote: bool
) -> pa.BinaryArray:
    """Return the texts of values that are all plain.

    `convert` turns the elements' bytes into their texts.  `quote`: elements of this type may need quotes.
    """
    parts, valid = array_elements(values), validity(values)
    texts = convert(parts.texts).cast(pa.string())
    texts = (_quoted(texts) if quote else texts).fill_null("NULL")
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(parts.offsets), texts), ",")
    result = pc.binary_join_element_wise("{", joined, "}", "")
    if valid is not None:
        result = pc.if_else(pa.array(valid), result, pa.scalar(None, pa.string()))
    return result.cast(pa.binary())


def record_columns(values: pa.BinaryArray, width: int) -> list[tuple[int, pa.BinaryArray]]:
    """Return each attribute of composites as its type and its values in binary; NULL if the composite is.

    Raises OtherShape for a composite with another number of attributes, or with an attribute of another type than in
    the first row, and ProtocolViolation.
    """
    data, offsets = contents(values)
    valid = validity(values)
    rows = np.arange(len(values)) if valid is None else np.flatnonzero(valid)
    starts, ends = offsets[:-1].astype(np.int64)[rows], offsets[1:].astype(np.int64)[rows]
    if (ends - starts < 4).any():
        raise ProtocolViolation("incorrect binary data format", sqlstate="22P03")
    _require(rows, _words(data, starts) == width)
    positions = starts + 4
    found = []
    for _ in range(width):
        if (positions + 8 > ends).any():
            raise ProtocolViolation("a composite has not the bytes that its columns say")
        types, lengths = _words(data, positions), _words(data, positions + 4)
        present = lengths >= 0
        begins = positions + 8
        stops = begins + np.where(present, lengths, 0)
        if (stops > ends).any():
            raise ProtocolViolation("a composite has not the bytes that its columns say")
        _require(rows, types == types[:1])
        all_begins, all_valid = offsets[:-1].astype(np.int64), np.zeros(len(values), np.bool_)
        all_stops = all_begins.copy()
        all_begins[rows], all_stops[rows], all_valid[rows] = begins, stops, present
        column = slices(data, all_begins, all_stops, pa.binary(), valid=None if all_valid.all() else all_valid)
        found.append((int(np.uint32(types[0])) if len(types) else 0, column))
        positions = stops
    if (positions != ends).any():
        raise ProtocolViolation("a composite has not the bytes that its columns say")
    return found


def _require(rows: Places, good: Mask) -> None:
    if not good.all():
        raise OtherShape(int(rows[int(np.argmin(good))]))


def _walk(data: Bytes, positions: Places, ends: Places, counts: Places) -> tuple[Places, Places, Mask]:
    """Return where each element begins and ends, row after row, and which are not NULL.  Raises ProtocolViolation."""
    firsts = np.cumsum(counts) - counts
    total = int(counts.sum())
    begins, stops = np.zeros(total, np.int64), np.zeros(total, np.int64)
    present = np.ones(total, np.bool_)
    rows = np.flatnonzero(counts)
    positions = positions.copy()
    step = 0
    while len(rows):
        lengths = _words(data, positions[rows])
        null = lengths < 0
        begin = positions[rows] + 4
        stop = begin + np.where(null, 0, lengths)
        if (stop > ends[rows]).any():
            raise ProtocolViolation("an array has not the elements that its dimensions say")
        places = firsts[rows] + step
        begins[places], stops[places], present[places] = begin, stop, ~null
        positions[rows] = stop
        step += 1
        rows = rows[counts[rows] > step]
    if (positions[counts > 0] != ends[counts > 0]).any():
        raise ProtocolViolation("an array has not the elements that its dimensions say")
    return begins, stops, present


def _words(data: Bytes, positions: Places) -> Places:
    """Read signed numbers of four bytes at `positions`; a position past the end gives an arbitrary number."""
    if not data.size:
        return np.zeros(len(positions), np.int64)
    return data.take(positions[:, None] + np.arange(4), mode="clip").view(">i4").reshape(-1).astype(np.int64)


def _quoted(texts: pa.StringArray) -> pa.StringArray:
    """Quote the elements that need quotes in an array's text (arrayfuncs.c: array_out)."""
    data, offsets = contents(texts)
    lengths = np.diff(offsets)
    if not (_SPECIAL.take(data).any() or ((lengths == 0) | (lengths == 4)).any()):
        return texts
    special = pc.match_substring_regex(texts, _NEEDS_QUOTES)
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    return pc.if_else(special, pc.binary_join_element_wise('"', escaped, '"', ""), texts)
