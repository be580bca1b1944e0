"""Single values in binary transfer as PostgreSQL's text: the inverse of a send function, then the output function.

Each function takes the bytes that a type's send function wrote.  Built-in types are known by oid; user-defined and
extension types by their rows of pg_type (TypeRow).  A type without a row, or whose binary form does not determine its
text, raises UnknownBinary.

Follows the receive functions: numeric.c (numeric_recv), timestamp.c (interval_recv), network.c (network_recv),
varbit.c, geo_ops.c, tsvector.c, tsquery.c, arrayfuncs.c (array_recv), rowtypes.c (record_recv), rangetypes.c,
multirangetypes.c; hstore_io.c (hstore_send), ltree_io.c, pgvector's vector.c, halfvec.c and sparsevec.c, PostGIS's
lwgeom_inout.c.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pubsub.errors import FeatureNotSupported, ProtocolViolation
from pubsub.protocol.output import containers, extensions, geometry, numbers, texts, times
from pubsub.protocol.type_contract import BY_OID

Out = Callable[[bytes], bytes]
"""Turns a send function's bytes into the output function's."""

FIRST_LISTED_OID: Final = 10000
"""Types from this oid on are known by their rows of pg_type (transam.h: FirstGenbkiObjectId)."""


class UnknownBinary(FeatureNotSupported):
    """The binary form of a type cannot be read; `type_name` is the type's name, or its oid in words."""

    def __init__(self, type_name: str) -> None:
        super().__init__(
            f"values of type {type_name} cannot be read from binary transfer",
            hint="Use WITH (binary = false), or ALTER SUBSCRIPTION … SET (binary = false).",
        )
        self.type_name = type_name


@dataclass(frozen=True, slots=True)
class TypeRow:
    """A row of pg_type for a type that is not built in; oids that do not apply are 0, names empty."""

    oid: int
    name: str
    kind: str
    """pg_type.typtype: b, c, d, e, r, m."""
    base: int
    """A domain's underlying type."""
    element: int
    """An array's element type."""
    delimiter: str
    """The delimiter between the elements of an array of this type."""
    send: str
    """The send function's name; "-" if there is none, and values come as text."""
    subtype: int
    """A range's type of bounds; a multirange's range type."""
    attributes: tuple[int, ...] = ()
    """A composite's column types."""


class BinaryTypes:
    """Finds the function that reads each type's values.  Immutable but for its cache, so threads may share it."""

    def __init__(self, rows: Iterable[TypeRow] = (), server_version: int = 0) -> None:
        """`server_version` is libpq's number of the publisher's, whose texts the values are to have."""
        self._builtin = _BUILTIN | (_BUILTIN_19 if server_version >= 190000 else {})
        self._rows: Mapping[int, TypeRow] = {row.oid: row for row in rows}
        self._made: dict[int, Out] = {}

    def knows(self, oid: int) -> bool:
        """Whether the type is built in or among `rows`."""
        return oid < FIRST_LISTED_OID or oid in self._rows

    def base(self, oid: int) -> int:
        """Return the type with domains resolved."""
        while (row := self._rows.get(oid)) is not None and row.kind == "d":
            oid = row.base
        return oid

    def is_text(self, oid: int) -> bool:
        """Whether the binary form is the text itself."""
        row = self._rows.get(oid)
        return oid in _AS_IS if row is None else row.kind == "e" or row.send in _TEXT_SENDS

    def is_array(self, oid: int) -> bool:
        """Whether the type's values are arrays; int2vector and oidvector do not count."""
        row = self._rows.get(oid)
        return oid in _ARRAYS if row is None else row.send == "array_send"

    def is_record(self, oid: int) -> bool:
        """Whether the type's values are composites."""
        row = self._rows.get(oid)
        return row is not None and row.send == "record_send"

    def delimiter(self, element: int) -> bytes:
        """Return the delimiter between the elements of an array of `element`."""
        row = self._rows.get(self.base(element))
        return b";" if self.base(element) == _BOX else b"," if row is None else row.delimiter.encode()

    def out(self, oid: int) -> Out:
        """Return the function that writes a value's text.

        Raises UnknownBinary; the function raises UnknownBinary, and ProtocolViolation for malformed bytes.
        """
        if oid not in self._made:
            self._made[oid] = _checked(self._find(oid))
        return self._made[oid]

    def check(self, oid: int, depth: int = 0) -> None:
        """Raise UnknownBinary if the binary form of the type, or of a type within it, cannot be read."""
        row = self._rows.get(oid)
        if depth == 0 and (BY_OID[oid].binary == "text" if oid in BY_OID else row is not None and row.send == "-"):
            return  # its values come as text
        self._find(oid)
        held: tuple[int, ...] = ()
        if row is not None and depth < _DEEPEST:
            held = tuple(filter(None, (row.base, row.element, row.subtype, *row.attributes)))
        elif oid in _ARRAYS:
            held = (_ARRAYS[oid],)
        for one in held:
            self.check(one, depth + 1)

    def _find(self, oid: int) -> Out:
        if oid in self._builtin:
            return self._builtin[oid]
        if oid in _RANGES:
            return _range(lambda: self.out(_RANGES[oid]))
        if oid in _MULTIRANGES:
            return _multirange(lambda: self.out(_MULTIRANGES[oid]))
        if oid in _ARRAYS:
            return self._array
        row = self._rows.get(oid)
        if row is None:
            raise UnknownBinary(BY_OID[oid].sql_name if oid in BY_OID else f"with OID {oid}")
        if row.kind == "d":
            return self.out(row.base)
        if self.is_text(oid):
            return texts.as_is
        if row.kind == "r":
            return _range(lambda: self.out(row.subtype))
        if row.kind == "m":
            return _multirange(lambda: self.out(row.subtype))
        found = {"array_send": self._array, "record_send": self._record, **_SENDS}.get(row.send)
        if found is None:
            raise UnknownBinary(row.name)
        return found

    def _array(self, value: bytes) -> bytes:
        ndim, _, oid = _ARRAY_HEADER.unpack_from(value)
        if not 0 <= ndim <= 6:
            raise ProtocolViolation("an array has an impossible number of dimensions")
        edges = struct.unpack_from(f">{2 * ndim}i", value, 12)
        elements, end = _elements(value, 12 + 8 * ndim)
        out = self.out(oid)
        delimiter = self.delimiter(oid)
        written = [None if element is None else out(element) for element in elements]
        count = 1 if ndim else 0
        for dim in edges[0::2]:
            count *= dim
        if end != len(value) or count != len(written):
            raise ProtocolViolation("an array has not the elements that its dimensions say")
        return containers.array_text(edges[0::2], edges[1::2], written, delimiter)

    def _record(self, value: bytes) -> bytes:
        (count,) = struct.unpack_from(">i", value)
        at = 4
        written: list[bytes | None] = []
        for _ in range(count):
            oid, length = struct.unpack_from(">Ii", value, at)
            at += 8
            if length < 0:
                written.append(None)
                continue
            written.append(self.out(oid)(value[at : at + length]))
            at += length
        if at != len(value):
            raise ProtocolViolation("a composite has not the bytes that its columns say")
        return containers.record_text(written)


def _checked(out: Out) -> Out:
    def read(value: bytes) -> bytes:
        try:
            return out(value)
        except (struct.error, IndexError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolViolation("incorrect binary data format", sqlstate="22P03") from error

    return read


_DEEPEST: Final = 100  # a composite may hold an array of itself
_BOX: Final = 603
_ARRAY_HEADER: Final = struct.Struct(">iiI")
_COUNT: Final = struct.Struct(">i")


def _elements(value: bytes, at: int) -> tuple[list[bytes | None], int]:
    """Read length-prefixed values (length -1: NULL) to the end of `value`; return them and the end position.

    A position past the end of `value` means that the last value was cut off.
    """
    elements: list[bytes | None] = []
    while at < len(value):
        (length,) = struct.unpack_from(">i", value, at)
        at += 4
        if length < 0:
            elements.append(None)
            continue
        elements.append(value[at : at + length])
        at += length
    return elements, at


def _counted(value: bytes, at: int, count: int) -> list[bytes]:
    """Read exactly `count` length-prefixed values, none of them NULL, to the end of `value`.  Raises ProtocolViolation."""
    elements, end = _elements(value, at)
    found = [element for element in elements if element is not None]
    if end != len(value) or len(elements) != count or len(found) != count:
        raise ProtocolViolation("a value has not the elements that its count says")
    return found


def _reversed(out: Out) -> Out:
    return lambda value: out(value[::-1])


def _versioned(value: bytes) -> bytes:
    """Read jsonb, jsonpath or ltree: the version, 1, then the text."""
    if value[0] != 1:
        raise ProtocolViolation(f"unsupported version number {value[0]}", sqlstate="22P03")
    return value[1:]


def _vector(out: Out) -> Out:
    """Make the reader of int2vector or oidvector, which are sent as arrays."""

    def read(value: bytes) -> bytes:
        ndim = _ARRAY_HEADER.unpack_from(value)[0]
        if ndim != 1:
            raise ProtocolViolation("a vector has not one dimension")
        (count,) = _COUNT.unpack_from(value, 12)
        return b" ".join(map(out, _counted(value, 20, count)))

    return read


def _range(subtype: Callable[[], Out]) -> Out:
    def read(value: bytes) -> bytes:
        flags = value[0]
        bounds, end = _elements(value, 1)
        if end != len(value):
            raise ProtocolViolation("a range has not the bytes that its bounds say")
        empty = flags & containers.RANGE_EMPTY
        has_lower = not empty and not flags & containers.RANGE_LB_INF
        has_upper = not empty and not flags & containers.RANGE_UB_INF
        if len(bounds) != has_lower + has_upper or None in bounds:
            raise ProtocolViolation("a range has not the bounds that its flags say")
        lower = bounds[0] if has_lower else None
        upper = bounds[-1] if has_upper else None
        out = subtype()
        return containers.range_text(
            flags, None if lower is None else out(lower), None if upper is None else out(upper)
        )

    return read


def _multirange(range_type: Callable[[], Out]) -> Out:
    def read(value: bytes) -> bytes:
        (count,) = _COUNT.unpack_from(value)
        return containers.multirange_text(map(range_type(), _counted(value, 4, count)))

    return read


def _numeric(value: bytes) -> bytes:
    count, weight, sign, scale = struct.unpack_from(">HhHH", value)
    if sign & 0xC000 == 0xC000:
        return numbers.numeric_out(struct.pack("<H", sign))
    digits = struct.unpack_from(f">{count}H", value, 8)
    return numbers.numeric_out(struct.pack(f"<Hh{count}H", sign | scale, weight, *digits))


def _floats(value: bytes, at: int = 0) -> bytes:
    count = (len(value) - at) // 8
    return struct.pack(f"<{count}q", *struct.unpack_from(f">{count}q", value, at))


def _path(value: bytes) -> bytes:
    closed, count = struct.unpack_from(">?i", value)
    return geometry.path_out(struct.pack("<iii", count, closed, 0) + _floats(value, 5))


def _polygon(value: bytes) -> bytes:
    (count,) = struct.unpack_from(">i", value)
    return geometry.polygon_out(struct.pack("<i32x", count) + _floats(value, 4))


def _snapshot(value: bytes) -> bytes:
    (count,) = struct.unpack_from(">I", value)
    return texts.snapshot_out(struct.pack(f"<I{count + 2}Q", count, *struct.unpack_from(f">{count + 2}Q", value, 4)))


def _tsvector(value: bytes) -> bytes:
    (count,) = struct.unpack_from(">I", value)
    at = 4
    lexemes = []
    for _ in range(count):
        end = value.index(b"\0", at)
        (positions,) = struct.unpack_from(">H", value, end + 1)
        lexemes.append((value[at:end], struct.unpack_from(f">{positions}H", value, end + 3)))
        at = end + 3 + 2 * positions
    return texts.tsvector_text(lexemes)


def _tsquery(value: bytes) -> bytes:
    """Convert to the stored form, items of 12 bytes followed by the operands, and write that."""
    (count,) = struct.unpack_from(">I", value)
    items: list[bytes] = []
    operands = b""
    at = 4
    for _ in range(count):
        if value[at] == 1:
            end = value.index(b"\0", at + 3)
            operand = value[at + 3 : end]
            items.append(value[at : at + 3] + struct.pack("<xiI", 0, len(operand) | len(operands) << 12))
            operands += operand + b"\0"
            at = end + 1
        else:
            phrase = value[at + 1] == 4
            distance = struct.unpack_from(">h", value, at + 2)[0] if phrase else 0
            items.append(value[at : at + 2] + struct.pack("<hq", distance, 0))
            at += 4 if phrase else 2
    return texts.tsquery_out(struct.pack("<i", count) + b"".join(items) + operands)


def _hstore(value: bytes) -> bytes:
    (count,) = _COUNT.unpack_from(value)
    strings, end = _elements(value, 4)
    if end != len(value) or len(strings) != 2 * count:
        raise ProtocolViolation("an hstore has not the pairs that its count says")
    return extensions.hstore_text(zip(strings[0::2], strings[1::2], strict=True))


def _pgvector(value: bytes) -> bytes:
    (count,) = struct.unpack_from(">h", value)
    return b"[" + b",".join(numbers.float4out(value[at + 3 : at - 1 : -1]) for at in range(4, 4 + 4 * count, 4)) + b"]"


def _halfvec(value: bytes) -> bytes:
    (count,) = struct.unpack_from(">h", value)
    numbers_ = struct.unpack_from(f">{count}e", value, 4)
    return b"[" + b",".join(numbers.float4out(struct.pack("<f", one)) for one in numbers_) + b"]"


def _sparsevec(value: bytes) -> bytes:
    """Write a sparsevec; indices start at 0 in the binary form and at 1 in the text."""
    dimensions, count, _ = struct.unpack_from(">iii", value)
    places = struct.unpack_from(f">{count}i", value, 12)
    found = struct.unpack_from(f">{count}f", value, 12 + 4 * count)
    pairs = [
        b"%d:%b" % (place + 1, numbers.float4out(struct.pack("<f", one)))
        for place, one in zip(places, found, strict=True)
    ]
    return b"{" + b",".join(pairs) + b"}/%d" % dimensions


def _ewkb(value: bytes) -> bytes:
    """Write PostGIS's geometry or geography: the binary form in hexadecimal digits."""
    return value.hex().upper().encode()


def _restruct(sent: str, stored: str, out: Out) -> Out:
    read, write = struct.Struct(sent), struct.Struct(stored)
    return lambda value: out(write.pack(*read.unpack(value)))


_AS_IS: Final = frozenset((19, 25, 114, 142, 1042, 1043, 1790))
_TEXT_SENDS: Final = frozenset(("textsend", "varcharsend", "bpcharsend", "namesend", "citextsend", "enum_send"))

_BUILTIN: Final[dict[int, Out]] = {
    **dict.fromkeys(_AS_IS, texts.as_is),
    16: numbers.boolout,
    17: texts.bytea_out,
    18: texts.char_out,
    20: _reversed(numbers.int8out),
    21: _reversed(numbers.int2out),
    22: _vector(_reversed(numbers.int2out)),
    23: _reversed(numbers.int4out),
    26: _reversed(numbers.oidout),
    27: _restruct(">HHH", "<HHH", texts.tid_out),
    28: _reversed(numbers.oidout),
    29: _reversed(numbers.oidout),
    30: _vector(_reversed(numbers.oidout)),
    600: lambda value: geometry.point_out(_floats(value)),
    601: lambda value: geometry.lseg_out(_floats(value)),
    602: _path,
    603: lambda value: geometry.box_out(_floats(value)),
    604: _polygon,
    628: lambda value: geometry.line_out(_floats(value)),
    650: lambda value: texts.cidr_out(value[:2] + value[4:]),
    700: _reversed(numbers.float4out),
    701: _reversed(numbers.float8out),
    718: lambda value: geometry.circle_out(_floats(value)),
    774: texts.macaddr_out,
    829: texts.macaddr_out,
    869: lambda value: texts.inet_out(value[:2] + value[4:]),
    1082: _reversed(times.date_out),
    1083: _reversed(times.time_out),
    1114: _reversed(times.timestamp_out),
    1184: _reversed(times.timestamptz_out),
    1186: _restruct(">qii", "<qii", times.interval_out),
    1266: _restruct(">qi", "<qi", times.timetz_out),
    1560: lambda value: texts.bit_out(value[3::-1] + value[4:]),
    1562: lambda value: texts.bit_out(value[3::-1] + value[4:]),
    1700: _numeric,
    2950: texts.uuid_out,
    2970: _snapshot,
    3220: _reversed(texts.pg_lsn_out),
    3614: _tsvector,
    3615: _tsquery,
    3802: _versioned,
    4072: _versioned,
    5038: _snapshot,
    5069: _reversed(numbers.xid8out),
    6437: _reversed(numbers.xid8out),
}

#: What 19 and later write otherwise.
_BUILTIN_19: Final[dict[int, Out]] = {3220: _reversed(texts.pg_lsn_out_19)}
_SENDS: Final[dict[str, Out]] = {
    "hstore_send": _hstore,
    "ltree_send": _versioned,
    "lquery_send": _versioned,
    "ltxtq_send": _versioned,
    "vector_send": _pgvector,
    "halfvec_send": _halfvec,
    "sparsevec_send": _sparsevec,
    "geometry_send": _ewkb,
    "geography_send": _ewkb,
}
_RANGES: Final = {3904: 23, 3906: 1700, 3908: 1114, 3910: 1184, 3912: 1082, 3926: 20}
_MULTIRANGES: Final = {4451: 3904, 4532: 3906, 4533: 3908, 4534: 3910, 4535: 3912, 4536: 3926}
# fmt: off
_ARRAYS: Final = {
    143: 142, 199: 114, 271: 5069, 629: 628, 651: 650, 719: 718, 775: 774, 791: 790, 1000: 16, 1001: 17, 1002: 18,
    1003: 19, 1005: 21, 1006: 22, 1007: 23, 1008: 24, 1009: 25, 1010: 27, 1011: 28, 1012: 29, 1013: 30, 1014: 1042,
    1015: 1043, 1016: 20, 1017: 600, 1018: 601, 1019: 602, 1020: 603, 1021: 700, 1022: 701, 1027: 604, 1028: 26,
    1034: 1033, 1040: 829, 1041: 869, 1115: 1114, 1182: 1082, 1183: 1083, 1185: 1184, 1187: 1186, 1231: 1700,
    1270: 1266, 1561: 1560, 1563: 1562, 2201: 1790, 2207: 2202, 2208: 2203, 2209: 2204, 2210: 2205, 2211: 2206,
    2949: 2970, 2951: 2950, 3221: 3220, 3643: 3614, 3644: 3642, 3645: 3615, 3735: 3734, 3770: 3769, 3807: 3802,
    3905: 3904, 3907: 3906, 3909: 3908, 3911: 3910, 3913: 3912, 3927: 3926, 4073: 4072, 4090: 4089, 4097: 4096,
    4192: 4191, 5039: 5038, 6150: 4451, 6151: 4532, 6152: 4533, 6153: 4534, 6155: 4535, 6157: 4536,
    6442: 6437, 6491: 6490,
}
# fmt: on
"""The element type of each built-in array type."""
