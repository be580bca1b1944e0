"""Types: how a value of each is written, as text (typoutput) and in binary (typsend).

Built-in types are known by their oids.  Arrays, composites, domains, enums, ranges and multiranges are put together
from the historic catalog as the decoded transaction sees it: an enum's label, say, is the one of that moment.  Types
made with a built-in type's functions, like citext, are written like that type (historic/relation.py).  All other types
(of further extensions, or dependent on a locale) are refused: `UnsupportedType` names them.

Follows arrayfuncs.c (array_out, array_send), rowtypes.c (record_out, record_send), rangetypes.c, multirangetypes.c,
enum.c, format_type.c (format_type_extended).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.errors import DataCorrupted, FeatureNotSupported
from pubsub.protocol.output import (
    extensions,
    geometry,
    jsonpath,
    numbers,
    spatial,
    statistics,
    texts,
    times,
    vectors,
    xml,
)
from pubsub.protocol.output.containers import (
    RANGE_EMPTY,
    RANGE_LB_INF,
    RANGE_UB_INF,
    array_text,
    multirange_text,
    range_text,
    record_text,
)
from walsender.types.layout import Raw, RowLayout, read_varlena

Output = Callable[[bytes], bytes]
"""From a value's bytes, as layout.py gives them, to text or to the binary form."""


class UnsupportedType(FeatureNotSupported):
    """A type whose values cannot be written."""


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """A type.  `length`, `alignment`: as in ColumnLayout.  `out` and `send` take what layout.py gives."""

    oid: int
    namespace: str
    name: str
    length: int
    alignment: int
    out: Output
    send: Output
    base_namespace: str
    base_name: str
    """The name of the type below domains, which pgoutput's Type message has."""
    kind: str = "b"
    label: str = ""
    """The name as format_type_be writes it."""
    base_oid: int = 0
    """The type below domains."""
    refusal: UnsupportedType | None = None
    """Why its values cannot be written: `out` and `send` raise it."""
    named: bool = False
    """Its values name catalog objects: call `out` while the catalogs are as they were when the value was written."""
    has_binary: bool = True
    """Whether there is a binary form; otherwise the text is sent."""


_n = numbers.reversed_bytes

BUILTIN: Final[dict[int, tuple[Output, Output]]] = {
    16: (numbers.boolout, texts.as_is),
    17: (texts.bytea_out, texts.as_is),
    18: (texts.char_out, texts.as_is),
    19: (texts.name_out, texts.name_out),
    20: (numbers.int8out, _n),
    21: (numbers.int2out, _n),
    23: (numbers.int4out, _n),
    25: (texts.as_is, texts.as_is),
    26: (numbers.oidout, _n),
    27: (texts.tid_out, texts.tid_send),
    28: (numbers.oidout, _n),
    29: (numbers.oidout, _n),
    114: (texts.as_is, texts.as_is),
    142: (xml.xml_out, xml.xml_send("UTF8")),
    194: (texts.as_is, texts.as_is),
    600: (geometry.point_out, geometry.floats_send),
    601: (geometry.lseg_out, geometry.floats_send),
    602: (geometry.path_out, geometry.path_send),
    603: (geometry.box_out, geometry.floats_send),
    604: (geometry.polygon_out, geometry.polygon_send),
    628: (geometry.line_out, geometry.floats_send),
    650: (texts.cidr_out, texts.cidr_send),
    700: (numbers.float4out, _n),
    701: (numbers.float8out, _n),
    718: (geometry.circle_out, geometry.floats_send),
    774: (texts.macaddr_out, texts.as_is),
    829: (texts.macaddr_out, texts.as_is),
    869: (texts.inet_out, texts.inet_send),
    1042: (texts.as_is, texts.as_is),
    1043: (texts.as_is, texts.as_is),
    1082: (times.date_out, _n),
    1083: (times.time_out, _n),
    1114: (times.timestamp_out, _n),
    1184: (times.timestamptz_out, _n),
    1186: (times.interval_out, times.interval_send),
    1266: (times.timetz_out, times.timetz_send),
    1560: (texts.bit_out, texts.bit_send),
    1562: (texts.bit_out, texts.bit_send),
    1700: (numbers.numeric_out, numbers.numeric_send),
    1790: (texts.as_is, texts.as_is),
    2950: (texts.uuid_out, texts.as_is),
    2970: (texts.snapshot_out, texts.snapshot_send),
    3220: (texts.pg_lsn_out, _n),
    3361: (statistics.ndistinct_out, texts.as_is),
    3402: (statistics.dependencies_out, texts.as_is),
    3614: (texts.tsvector_out, texts.tsvector_send),
    3615: (texts.tsquery_out, texts.tsquery_send),
    3802: (texts.jsonb_out, texts.jsonb_send),
    4072: (jsonpath.jsonpath_out, jsonpath.jsonpath_send),
    5017: (texts.bytea_out, texts.as_is),
    5038: (texts.snapshot_out, texts.snapshot_send),
    5069: (numbers.xid8out, _n),
    6437: (numbers.xid8out, _n),
}
"""oid → output, send."""

_OUTPUTS_FROM: Final[dict[int, dict[int, Output]]] = {
    190000: {
        3220: texts.pg_lsn_out_19,
        3361: statistics.ndistinct_out_19,
        3402: statistics.dependencies_out_19,
    },
}


def outputs_of(server_version: int) -> dict[int, Output]:
    """Return the output functions, by oid, of the built-in types that a version writes otherwise than BUILTIN."""
    return {oid: out for since, outs in _OUTPUTS_FROM.items() if server_version >= since for oid, out in outs.items()}


EXTENSIONS: Final[dict[tuple[str, str], tuple[Output, Output]]] = {
    ("hstore", "hstore_out"): (extensions.hstore_out, extensions.hstore_send),
    ("ltree", "ltree_out"): (extensions.ltree_out, extensions.ltree_send),
    ("ltree", "lquery_out"): (extensions.lquery_out, extensions.lquery_send),
    ("ltree", "ltxtq_out"): (extensions.ltxtquery_out, extensions.ltxtquery_send),
    ("cube", "cube_out"): (extensions.cube_out, extensions.cube_send),
    ("vector", "vector_out"): (vectors.vector_out, vectors.vector_send),
    ("vector", "halfvec_out"): (vectors.halfvec_out, vectors.halfvec_send),
    ("vector", "sparsevec_out"): (vectors.sparsevec_out, vectors.sparsevec_send),
    ("postgis-3", "LWGEOM_out"): (spatial.geometry_out, spatial.geometry_send),
    ("postgis-3", "geography_out"): (spatial.geometry_out, spatial.geometry_send),
}
"""Types of extensions, by the library and the symbol of their output function: output, send."""

INTERNAL_LANGUAGE: Final = 12
"""pg_language.h: the language of functions that are a built-in type's under another name, as citext's are."""

SPECIAL_NAMES: Final = {
    16: "boolean",
    20: "bigint",
    21: "smallint",
    23: "integer",
    114: "json",
    700: "real",
    701: "double precision",
    1042: "character",
    1043: "character varying",
    1083: "time without time zone",
    1114: "timestamp without time zone",
    1184: "timestamp with time zone",
    1186: "interval",
    1266: "time with time zone",
    1560: "bit",
    1562: "bit varying",
    1700: "numeric",
}
"""format_type.c: names that are not pg_type's."""

TEXT: Final = 25
_TEXT_AT: Final[dict[int | str, int]] = {
    **dict.fromkeys((19, TEXT, 114, 142, 194, 1042, 1043), 0),
    **dict.fromkeys((3802, 4072, "ltree"), 1),
}
"""Where the text begins in the binary form of types, by oid, or by an extension's library."""
_SEVERAL_TEXTS: Final[frozenset[int | str]] = frozenset({3614, 3615, "hstore"})
"""Types with several texts in their binary form."""
XML: Final = 142
"""Its binary form names the encoding."""
MONEY: Final = 790
"""Supported if lc_monetary is one of `DOLLARS`."""
DOLLARS: Final = frozenset({"C", "POSIX", "en_US", "en_US.UTF-8", "en_US.utf8"})
"""Values of lc_monetary under which money is written in dollars."""
INT2VECTOR: Final = 22
OIDVECTOR: Final = 30
ARRAY_OUT: Final = 751


def read_element(data: bytes, position: int, length: int, alignment: int, *, nominal: bool) -> tuple[bytes, int]:
    """Read a value inside another one; return it and where it ends.  `nominal`: aligned regardless of its first byte."""
    mask = alignment - 1
    if length > 0:
        position = (position + mask) & ~mask
        if position + length > len(data):
            raise DataCorrupted("an element reaches past its value")
        return data[position : position + length], position + length
    if length == -1:
        if nominal or not data[position]:
            position = (position + mask) & ~mask
        value, end = read_varlena(data, position)
        if not isinstance(value, bytes):
            raise DataCorrupted("an element lies in a TOAST table")
        return value, end
    end = data.index(b"\0", position)
    return data[position:end], end + 1


def array_elements(value: bytes, length: int, alignment: int) -> tuple[list[int], list[int], list[bytes | None]]:
    """Return the dimensions, lower bounds and elements of an array.  Raises DataCorrupted."""
    try:
        ndim, offset = struct.unpack_from("<ii", value)
        if not 0 <= ndim <= 6:
            raise DataCorrupted("an array has an impossible number of dimensions")
        dims = list(struct.unpack_from(f"<{ndim}i", value, 12))
        lower = list(struct.unpack_from(f"<{ndim}i", value, 12 + 4 * ndim))
        count = 1 if ndim else 0
        for dim in dims:
            count *= dim
        if count < 0 or count > len(value) * 8:
            raise DataCorrupted("an array has more elements than it can hold")
        header = 16 + 8 * ndim  # including the varlena header, which was cut off
        start = (offset or (header + 7) & ~7) - 4
        bitmap = value[header - 4 :] if offset else b""
        data = value[start:]
        elements: list[bytes | None] = []
        position = 0
        for number in range(count):
            if bitmap and not bitmap[number >> 3] >> (number & 7) & 1:
                elements.append(None)
                continue
            element, position = read_element(data, position, length, alignment, nominal=True)
            elements.append(element)
    except (struct.error, IndexError, ValueError) as error:
        raise DataCorrupted("an array is too short") from error
    return dims, lower, elements


def array_type(element: TypeInfo, delimiter: str) -> tuple[Output, Output]:
    """Make array_out and array_send for one element type."""
    length, alignment, out, send = element.length, element.alignment, element.out, element.send
    comma = delimiter.encode()

    def array_out(value: bytes) -> bytes:
        dims, lower, elements = array_elements(value, length, alignment)
        return array_text(dims, lower, [None if e is None else out(e) for e in elements], comma)

    def array_send(value: bytes) -> bytes:
        dims, lower, elements = array_elements(value, length, alignment)
        nulls = int(struct.unpack_from("<i", value, 4)[0] != 0)
        parts = [struct.pack(">iiI", len(dims), nulls, element.oid)]
        parts += [struct.pack(">ii", dim, low) for dim, low in zip(dims, lower, strict=True)]
        for e in elements:
            if e is None:
                parts.append(b"\xff\xff\xff\xff")
            else:
                sent = send(e)
                parts += (struct.pack(">i", len(sent)), sent)
        return b"".join(parts)

    return array_out, array_send


def vector_type(element: TypeInfo) -> tuple[Output, Output]:
    """Make the functions of int2vector or oidvector: text with spaces, binary as an array."""
    _, send = array_type(element, ",")

    def vector_out(value: bytes) -> bytes:
        _, _, elements = array_elements(value, element.length, element.alignment)
        return b" ".join(element.out(e) for e in elements if e is not None)

    return vector_out, send


def composite_type(columns: Sequence[tuple[TypeInfo, bool]], layout: RowLayout) -> tuple[Output, Output]:
    """Make record_out and record_send; `columns`: each one's type, and whether it was dropped."""

    def values(value: bytes) -> list[Raw]:
        # The value is a tuple as on a page, with the tuple's length and type at its start; the row begins at byte 14.
        return layout.deform(value[14:])

    def record_out(value: bytes) -> bytes:
        return record_text(
            None if raw is None else info.out(_in_place(raw))
            for raw, (info, dropped) in zip(values(value), columns, strict=True)
            if not dropped
        )

    def record_send(value: bytes) -> bytes:
        parts = [struct.pack(">i", sum(not dropped for _, dropped in columns))]
        for raw, (info, dropped) in zip(values(value), columns, strict=True):
            if dropped:
                continue
            parts.append(struct.pack(">I", info.oid))
            if raw is None:
                parts.append(b"\xff\xff\xff\xff")
            else:
                sent = info.send(_in_place(raw))
                parts += (struct.pack(">i", len(sent)), sent)
        return b"".join(parts)

    return record_out, record_send


def _in_place(raw: Raw) -> bytes:
    if not isinstance(raw, bytes):
        raise DataCorrupted("a composite's field lies in a TOAST table")
    return raw


class RangeType:
    """range_out, range_send and the multirange's functions, for one subtype."""

    def __init__(self, subtype: TypeInfo) -> None:
        self._subtype = subtype

    def out(self, value: bytes) -> bytes:
        return self._text(*self._parts(value))

    def send(self, value: bytes) -> bytes:
        return self._binary(*self._parts(value))

    def multirange_out(self, value: bytes) -> bytes:
        return multirange_text(self._text(*parts) for parts in self._ranges(value))

    def multirange_send(self, value: bytes) -> bytes:
        ranges = [self._binary(*parts) for parts in self._ranges(value)]
        return struct.pack(">I", len(ranges)) + b"".join([struct.pack(">I", len(r)) + r for r in ranges])

    def _parts(self, value: bytes) -> tuple[int, bytes | None, bytes | None]:
        # Offsets count from the start of the varlena's header, four bytes before.
        return (value[-1], *self._bounds(b"\0\0\0\0" + value[:-1], 8, value[-1]))

    def _bounds(self, data: bytes, position: int, flags: int) -> tuple[bytes | None, bytes | None]:
        subtype = self._subtype
        lower = upper = None
        try:
            if not flags & (RANGE_EMPTY | RANGE_LB_INF):
                lower, position = read_element(data, position, subtype.length, subtype.alignment, nominal=False)
            if not flags & (RANGE_EMPTY | RANGE_UB_INF):
                upper, _ = read_element(data, position, subtype.length, subtype.alignment, nominal=False)
        except (struct.error, IndexError, ValueError) as error:
            raise DataCorrupted("a range is too short") from error
        return lower, upper

    def _ranges(self, value: bytes) -> list[tuple[int, bytes | None, bytes | None]]:
        try:
            (count,) = struct.unpack_from("<I", value, 4)
            if not count:
                return []
            items = struct.unpack_from(f"<{count - 1}I", value, 8)
            flags = value[8 + 4 * (count - 1) :][:count]
            data = b"\0\0\0\0" + value
            mask = self._subtype.alignment - 1
            start = (12 + 4 * (count - 1) + count + mask) & ~mask
            body = data[start:]
            offset = 0
            found = []
            for number in range(count):
                if number:
                    item = items[number - 1]
                    offset = item & 0x7FFFFFFF if item & 0x80000000 else offset + item
                found.append((flags[number], *self._bounds(body, offset, flags[number])))
        except (struct.error, IndexError) as error:
            raise DataCorrupted("a multirange is too short") from error
        return found

    def _text(self, flags: int, lower: bytes | None, upper: bytes | None) -> bytes:
        out = self._subtype.out
        return range_text(flags, None if lower is None else out(lower), None if upper is None else out(upper))

    def _binary(self, flags: int, lower: bytes | None, upper: bytes | None) -> bytes:
        parts = [bytes((flags,))]
        for bound in (lower, upper):
            if bound is not None:
                sent = self._subtype.send(bound)
                parts += (struct.pack(">I", len(sent)), sent)
        return b"".join(parts)


def enum_type(name: str, labels: dict[int, bytes]) -> Output:
    """Make enum_out, which serves as enum_send, too; `labels`: by the label's oid."""

    def enum_out(value: bytes) -> bytes:
        label = labels.get(int.from_bytes(value, "little"))
        if label is None:
            raise DataCorrupted(f"invalid internal value for enum {name}: {int.from_bytes(value, 'little')}")
        return label

    return enum_out


def converted_send(convert: Output, what: int | str, name: str, send: Output) -> Output:
    """Return `send` with the text in the binary form converted to the client's encoding.

    `what`: the type's oid, or an extension's library.
    """
    at = _TEXT_AT.get(what)
    if at is not None:
        return lambda value: (sent := send(value))[:at] + convert(sent[at:])
    if what not in _SEVERAL_TEXTS:
        return send

    def refuse(value: bytes) -> bytes:
        raise UnsupportedType(
            f"binary transfer of type {name} in another encoding than the database's is not supported",
            hint="Subscribe with binary = false.",
        )

    return refuse
