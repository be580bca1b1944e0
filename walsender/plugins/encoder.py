"""The fast path from rows to pgoutput's tuples, in one pass.

It serves relations whose rows are sent as they are, as text, and rows without values that lie in a TOAST table.  An
encoder says what it cannot do; such a row takes the general path.

If the hot modules are compiled, rows.py does it.  Otherwise an encoder is made of one step for each run of columns:
runs of fixed length are unpacked together, and integers are written without a `bytes` in between.  layout.py and
pgoutput.py do the same, slower; tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

from pubsub.protocol.output import times
from pubsub.protocol.output.texts import as_is
from walsender import hot
from walsender.hot.rows import RowEncoder
from walsender.types.layout import HEAP_HASNULL, HEAP_NATTS_MASK, ROW_HEADER, ROW_IN_TUPLE, read_varlena
from walsender.types.registry import BUILTIN

Encoder = Callable[[bytes, bytes, int], "bytes | None"]
"""Takes (head, data, offset of the row, which reaches to the end of the data); returns head and tuple, or None.

None: the row takes the general path.
Raises IndexError or struct.error if the row is too short, and what output functions raise.
"""

_Variant = Callable[[bytes, bytes, int], "bytes | None"]

Text = Callable[[bytes], bytes]

_SHORT: Final = [b"t" + n.to_bytes(4, "big") for n in range(512)]
_U32: Final = Struct(">I")

_CODES: Final = {20: "q", 21: "h", 23: "i", 26: "I", 1082: "i", 1083: "q", 1114: "q", 1184: "q", 28: "I"}
_FROM_INTEGER: Final[dict[int, Callable[[int], bytes]]] = {
    1082: times.date_text,
    1083: times.time_text,
    1114: times.timestamp_text,
    1184: times.timestamptz_text,
}

_RUN, _NULL, _ALIGNED, _PLAIN, _WRITTEN = range(5)


Column = tuple[int, int, int, Text, bool]
"""Type, length, alignment, output, whether it is sent."""

_MAX_VARIANTS: Final = 64


def make_encoder(columns: Sequence[Column], count: int) -> Encoder | None:
    """Make an encoder for rows of `columns`, of which `count` are sent; None if one is a C string (length -2)."""
    if any(length == -2 for _, length, _, _, _ in columns):
        return None
    columns = [(_quick(oid, out), length, alignment, out, sent) for oid, length, alignment, out, sent in columns]
    return (compiled_encoder if hot.COMPILED else interpreted_encoder)(columns, count)


def _quick(oid: int, out: Text) -> int:
    """Return the type if it is written as usual; else 0, as for a timestamp in a session with DateStyle German."""
    return oid if oid in BUILTIN and out is BUILTIN[oid][0] else 0


def compiled_encoder(columns: Sequence[Column], count: int) -> Encoder:
    """Make an encoder with rows.py; fast only if the hot modules are compiled."""
    return RowEncoder(
        [(oid, length, alignment, out, out is as_is, sent) for oid, length, alignment, out, sent in columns], count
    ).encode


def interpreted_encoder(columns: Sequence[Column], count: int) -> Encoder:
    """Make an encoder of steps, one variant per set of NULL columns, on which the places of the others depend.

    A variant is made when its set is first met.
    """
    natts = len(columns)
    bitmap = (natts + 7) >> 3
    start = ROW_HEADER.size
    plain = _variant(columns, frozenset(), count)
    variants: dict[bytes, _Variant] = {}
    unpack_header = ROW_HEADER.unpack_from

    def encode(head: bytes, data: bytes, at: int) -> bytes | None:
        infomask2, infomask, hoff = unpack_header(data, at)
        if infomask2 & HEAP_NATTS_MASK != natts:
            return None
        base = at + hoff - ROW_IN_TUPLE
        if not infomask & HEAP_HASNULL:
            return plain(head, data, base)
        bits = data[at + start : at + start + bitmap]
        variant = variants.get(bits)
        if variant is None:
            if len(variants) >= _MAX_VARIANTS or len(bits) != bitmap:
                return None
            nulls = frozenset(number for number in range(natts) if not bits[number >> 3] >> (number & 7) & 1)
            variant = variants[bits] = _variant(columns, nulls, count)
        return variant(head, data, base)

    return encode


def _steps(columns: Sequence[Column], nulls: frozenset[int]) -> list[tuple[int, Any, Any]]:
    """Return the steps for a row in which the columns `nulls` are NULL."""
    steps: list[tuple[int, Any, Any]] = []
    layout = "<"
    written: list[tuple[int, Any]] = []
    unpacked = 0
    offset: int | None = 0
    for number, (oid, length, alignment, out, sent) in enumerate(columns):
        convert = _FROM_INTEGER.get(oid) if oid in _CODES else out
        code = _CODES.get(oid, f"{length}s")
        if number in nulls:
            if offset is None:
                if sent:
                    steps.append((_NULL, None, None))
            elif sent:
                written.append((-1, None))
        elif length > 0 and offset is not None:
            padding = -offset % alignment
            layout += f"{padding}x{code}" if padding else code
            offset += padding + length
            if sent:
                written.append((unpacked, convert))
            unpacked += 1
        elif length > 0:
            # After a varlena the place depends on the row.
            steps.append((_ALIGNED, Struct("<" + code), (alignment - 1, convert, sent)))
        else:
            if offset is not None:
                steps.append((_RUN, Struct(layout), tuple(written)))
                offset = None
            steps.append((_PLAIN if out is as_is else _WRITTEN, out, (alignment - 1, sent)))
    if offset is not None:
        steps.append((_RUN, Struct(layout), tuple(written)))
    return steps


def _variant(columns: Sequence[Column], nulls: frozenset[int], count: int) -> _Variant:
    """Make an encoder of (head, data, offset of the first column) for one set of NULL columns."""
    mark = b"N" + count.to_bytes(2, "big")
    steps = tuple(_steps(columns, nulls))
    short = _SHORT

    def encode(head: bytes, data: bytes, base: int) -> bytes | None:
        position = base
        parts = [head, mark]
        for kind, what, more in steps:
            if kind == 0:  # _RUN
                values = what.unpack_from(data, position)
                position += what.size
                for number, convert in more:
                    if number < 0:
                        parts.append(b"n")
                        continue
                    text = b"%d" % values[number] if convert is None else convert(values[number])
                    size = len(text)
                    parts += (short[size] if size < 512 else b"t" + _U32.pack(size), text)
                continue
            if kind == 1:  # _NULL
                parts.append(b"n")
                continue
            if kind == 2:  # _ALIGNED
                mask, convert, sent = more
                position = base + ((position - base + mask) & ~mask)
                if sent:
                    (value,) = what.unpack_from(data, position)
                    text = b"%d" % value if convert is None else convert(value)
                    size = len(text)
                    parts += (short[size] if size < 512 else b"t" + _U32.pack(size), text)
                position += what.size
                continue
            mask, sent = more
            first = data[position]
            if not first:
                position = base + ((position - base + mask) & ~mask)
                first = data[position]
            if first & 1:
                if first == 1:
                    return None
                end = position + (first >> 1)
                text = data[position + 1 : end]
                position = end
            else:
                raw, position = read_varlena(data, position)
                assert isinstance(raw, bytes)
                text = raw
            if sent:
                if kind == 4:  # _WRITTEN
                    text = what(text)
                size = len(text)
                parts += (short[size] if size < 512 else b"t" + _U32.pack(size), text)
        if position > len(data):
            return None
        return b"".join(parts)

    return encode
