"""Split the texts of arrays and composites into their elements and attributes, for all rows at once.

    {1,NULL,"a \\"b"}      (1,"a ""b",)

Commas and braces outside quotes are separators.  A byte is inside quotes if an odd number of quotes precedes it.  Each
row has an even number of quotes, so they can be counted over all rows together.  At the end the escape characters are
removed.  (arrayfuncs.c: array_out; rowtypes.c: record_out.)
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.protocol.arrow_arrays import Bytes, Mask, contents, slices, validity
from pubsub.protocol.nested_arrays import Parts
from pubsub.protocol.refused_values import OtherShape

_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_NULL: Final = np.frombuffer(b"NULL", np.uint8)
Places = npt.NDArray[np.int64]


def array_parts(values: pa.BinaryArray) -> Parts:
    """Split the texts of arrays that are empty or have one dimension with lower bound 1; a NULL array has no elements.

    `values` is a binary array; a NULL has no bytes.  Raises OtherShape for any other array, and for text that is no
    array's.
    """
    data, there, starts, ends = _between(values, "{", "}")
    escapes = _escapes(data)
    quotes = _quotes(data, there, starts, ends, escapes)
    braces = _outside(np.flatnonzero((data == ord("{")) | (data == ord("}"))), quotes)
    _require(there, _counts(braces, starts, ends) == 2)
    places = _outside(np.flatnonzero(data == _COMMA), quotes)
    counts = _counts(places, starts, ends) + 1
    empty = ends - starts == 2
    counts[empty] = 0
    begins, stops = _bounds(starts[~empty] + 1, ends[~empty] - 1, counts[~empty], places)
    _require_some(there, np.repeat(np.arange(len(counts)), counts), stops > begins)
    is_null = stops - begins == len(_NULL)
    is_null[is_null] = (data[begins[is_null, None] + np.arange(len(_NULL))] == _NULL).all(axis=1)
    if len(quotes):
        begins, stops = _unquoted(data, begins, stops)
    offsets_of_rows = np.zeros(len(values) + 1, np.int32)
    offsets_of_rows[1:][there] = counts
    np.cumsum(offsets_of_rows, out=offsets_of_rows)
    return Parts(_texts(data, begins, stops, is_null, escapes), offsets_of_rows)


def record_parts(values: pa.BinaryArray, width: int) -> list[pa.BinaryArray]:
    """Split the texts of composites into `width` binary arrays, one per attribute; all are NULL if the composite is.

    `values` is a binary array; a NULL has no bytes.  Raises OtherShape for a composite with another number of
    attributes, and for text that is no composite's.
    """
    data, there, starts, ends = _between(values, "(", ")")
    quotes = _quotes(data, there, starts, ends, None)
    places = _outside(np.flatnonzero(data == _COMMA), quotes)
    _require(there, _counts(places, starts, ends) == width - 1)
    counts = np.full(len(starts), width)
    begins, stops = _bounds(starts + 1, ends - 1, counts, places)
    is_null = stops == begins
    escapes = None
    if len(quotes):
        begins, stops = _unquoted(data, begins, stops)
        escapes = _doubles(data, begins, stops)
    # Row after row, since slices must be in order; every width-th text then belongs to one attribute.
    texts = _texts(data, begins, stops, is_null, escapes)
    found = []
    for place in range(width):
        of_rows = np.full(len(values), -1, np.int64)
        of_rows[there] = np.arange(len(starts)) * width + place
        indices = pa.array(of_rows, mask=of_rows < 0) if len(starts) < len(values) else pa.array(of_rows)
        found.append(texts.take(indices))
    return found


def _between(values: pa.BinaryArray, first: str, last: str) -> tuple[Bytes, Places, Places, Places]:
    """Return the bytes of all texts, the rows that are not NULL, and where each one's text begins and ends.

    Raises OtherShape for a text that does not begin with `first` and end with `last`.
    """
    data, offsets = contents(values)
    there = _present(values)
    starts, ends = offsets[:-1].astype(np.int64)[there], offsets[1:].astype(np.int64)[there]
    _require(there, ends - starts >= 2)
    _require(there, (data[starts] == ord(first)) & (data[ends - 1] == ord(last)))
    return data, there, starts, ends


def _present(values: pa.BinaryArray) -> Places:
    """Return the rows that are not NULL."""
    valid = validity(values)
    return np.arange(len(values)) if valid is None else np.flatnonzero(valid)


def _require(rows: Places, good: Mask) -> None:
    if not good.all():
        raise OtherShape(int(rows[int(np.argmin(good))]))


def _require_some(rows: Places, of_elements: Places, good: Mask) -> None:
    if not good.all():
        raise OtherShape(int(rows[of_elements[int(np.argmin(good))]]))


def _escapes(data: Bytes) -> Mask | None:
    """Return which backslashes escape the next byte (every second one in a run is itself escaped); None without any."""
    found = data == _BACKSLASH
    if not found.any():
        return None
    places = np.flatnonzero(found)
    run_starts = np.ones(len(places), np.bool_)
    run_starts[1:] = np.diff(places) > 1
    first = np.maximum.accumulate(np.where(run_starts, places, 0))
    escaping: Mask = np.zeros(data.size, np.bool_)
    escaping[places] = (places - first) % 2 == 0
    return escaping


def _quotes(data: Bytes, rows: Places, starts: Places, ends: Places, escapes: Mask | None) -> Places:
    """Return the places of the quotes that open or close a value: those that are not escaped."""
    quotes = data == _QUOTE
    if escapes is not None:
        quotes[1:] &= ~escapes[:-1]
    places = np.flatnonzero(quotes)
    if len(places):
        _require(rows, _counts(places, starts, ends) % 2 == 0)
    return places


def _outside(places: Places, quotes: Places) -> Places:
    """Return the `places` outside quotes: those with an even number of quotes before them."""
    return places[np.searchsorted(quotes, places) % 2 == 0] if len(quotes) else places


def _counts(places: Places, starts: Places, ends: Places) -> Places:
    """Return how many of the `places` lie in each row."""
    return np.searchsorted(places, ends) - np.searchsorted(places, starts)


def _bounds(starts: Places, ends: Places, counts: Places, commas: Places) -> tuple[Places, Places]:
    """Return where each element begins and ends, row after row; a row has `counts` elements, separated by `commas`."""
    total = int(counts.sum())
    lasts = np.cumsum(counts) - 1
    begins, stops = np.empty(total, np.int64), np.empty(total, np.int64)
    last = np.zeros(total, np.bool_)
    last[lasts] = True
    first = np.roll(last, 1)
    begins[first], stops[last] = starts, ends
    begins[~first], stops[~last] = commas + 1, commas
    return begins, stops


def _unquoted(data: Bytes, begins: Places, stops: Places) -> tuple[Places, Places]:
    """Narrow the bounds of quoted values to the inside of their quotes."""
    quoted = (stops > begins) & (data.take(begins, mode="clip") == _QUOTE)
    return begins + quoted, stops - quoted


def _doubles(data: Bytes, begins: Places, stops: Places) -> Mask | None:
    """Return the second of each pair of quotes or backslashes within these values, None if there are none.

    A composite's text doubles both, so they come in pairs.
    """
    found: Mask | None = None
    for sign in (_QUOTE, _BACKSLASH):
        places = np.flatnonzero(data == sign)
        of_value = np.searchsorted(begins, places, side="right") - 1
        inside = (of_value >= 0) & (places < stops[of_value])
        if inside.any():
            found = np.zeros(data.size, np.bool_) if found is None else found
            found[places[inside][1::2]] = True
    return found


def _texts(data: Bytes, begins: Places, stops: Places, is_null: Mask, leave_out: Mask | None) -> pa.BinaryArray:
    """Return the values' bytes, without the bytes in `leave_out`."""
    if leave_out is not None:
        gone = np.flatnonzero(leave_out)
        data = data[~leave_out]
        begins, stops = begins - np.searchsorted(gone, begins), stops - np.searchsorted(gone, stops)
    if not is_null.any():
        return slices(data, begins, stops, pa.binary())
    return slices(data, begins, np.where(is_null, begins, stops), pa.binary(), valid=~is_null)
