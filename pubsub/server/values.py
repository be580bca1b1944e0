"""Values between Python and a client: types' oids, PostgreSQL's text and binary, parameters.

Every value has a text (pubsub/texts.py).  Types that a client may ask for in binary have a form here; what else there is, such
as inet kept as text, is described as text, whose two forms are one.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.copyboth import PG_EPOCH
from pubsub.protocol.lsn import Lsn
from pubsub.texts import text

BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT, OID = 16, 17, 19, 20, 21, 23, 25, 26
JSON, FLOAT4, FLOAT8, UNKNOWN, BPCHAR, VARCHAR = 114, 700, 701, 705, 1042, 1043
DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID, LSN, JSONB = 1082, 1114, 1184, 1700, 2950, 3220, 3802
TEXTS: Final = 1009

#: Types by the names that pubsub.node.select has for them, with the bytes of a value (-1: it varies).
_BY_NAME: Final[Mapping[str, tuple[int, int]]] = {
    "boolean": (BOOL, 1), "bytea": (BYTEA, -1), "name": (NAME, 64), "bigint": (INT8, 8), "smallint": (INT2, 2),
    "integer": (INT4, 4), "text": (TEXT, -1), "oid": (OID, 4), "json": (JSON, -1), "real": (FLOAT4, 4),
    "double precision": (FLOAT8, 8), "character": (BPCHAR, -1), "character varying": (VARCHAR, -1), "date": (DATE, 4),
    "timestamp without time zone": (TIMESTAMP, 8), "timestamp with time zone": (TIMESTAMPTZ, 8), "numeric": (NUMERIC, -1),
    "uuid": (UUID, 16), "jsonb": (JSONB, -1), "pg_lsn": (LSN, 8), "text[]": (TEXTS, -1),
}  # fmt: skip
_BY_PG_NAME: Final[Mapping[str, tuple[int, int]]] = {
    "bool": (BOOL, 1), "bytea": (BYTEA, -1), "name": (NAME, 64), "int8": (INT8, 8), "int2": (INT2, 2), "int4": (INT4, 4),
    "oid": (OID, 4), "float4": (FLOAT4, 4), "float8": (FLOAT8, 8), "varchar": (VARCHAR, -1), "bpchar": (BPCHAR, -1),
    "pg_lsn": (LSN, 8), "char": (18, 1), "_text": (TEXTS, -1), "xid": (28, 4), "timestamptz": (TIMESTAMPTZ, 8),
}  # fmt: skip
#: SQL's name of a parameter's type.
PARAMETER_TYPES: Final[Mapping[int, str]] = {
    BOOL: "boolean", INT8: "bigint", INT2: "smallint", INT4: "integer", FLOAT4: "real", FLOAT8: "double precision",
    DATE: "date", TIMESTAMP: "timestamp", TIMESTAMPTZ: "timestamptz", NUMERIC: "numeric", UUID: "uuid", BYTEA: "bytea",
    OID: "oid",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """A result's column: its name, type's oid and size."""

    name: str
    oid: int
    size: int


def field_of(name: str, type_name: str) -> Field:
    """Return a column whose type has this name in SQL."""
    oid, size = _BY_NAME.get(type_name, (TEXT, -1))
    return Field(name, oid, size)


def catalog_field(name: str, type_name: str) -> Field:
    """Return a column whose type has this name in pg_type."""
    oid, size = _BY_PG_NAME.get(type_name, (TEXT, -1))
    return Field(name, oid, size)


def as_text(value: object, zone: tzinfo | None = None) -> bytes | None:
    """Return a value's text; `zone`: the session's, for times with one."""
    if value is None:
        return None
    if zone is not None and isinstance(value, datetime) and value.tzinfo is not None:
        return _zoned(value, zone).encode()
    return text(value).encode("utf-8", "surrogateescape")


def _zoned(value: datetime, zone: tzinfo) -> str:
    try:
        local = value.astimezone(zone)
    except OverflowError:
        return text(value)
    offset = local.utcoffset() or timedelta(0)
    seconds = int(offset.total_seconds())
    sign, seconds = "-" if seconds < 0 else "+", abs(seconds)
    shown = f"{sign}{seconds // 3600:02}"
    if seconds % 3600:
        shown += f":{seconds % 3600 // 60:02}"
    return text(local.replace(tzinfo=None)) + shown


def as_binary(value: object, oid: int) -> bytes | None:
    """Return a value in the type's binary form.  Raises FeatureNotSupported for one that has none here."""
    if value is None:
        return None
    write = _BINARY.get(oid)
    if write is not None:
        return write(value)
    if oid in _TEXTUAL:
        return text(value).encode("utf-8", "surrogateescape")
    raise FeatureNotSupported(f"no binary output function available for type with OID {oid} here")


_TEXTUAL: Final = frozenset({TEXT, VARCHAR, BPCHAR, NAME, JSON, UNKNOWN, 18})
_DAY: Final = date(2000, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)


def _moment(value: Any) -> bytes:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return struct.pack(">q", (aware - PG_EPOCH) // _MICROSECOND)


def numeric_binary(value: Any) -> bytes:
    """Return numeric's binary form (numeric.c: numeric_send)."""
    number = Decimal(value)
    if number.is_nan():
        return struct.pack(">hhHh", 0, 0, 0xC000, 0)
    if number.is_infinite():
        return struct.pack(">hhHh", 0, 0, 0xD000 if number > 0 else 0xF000, 0)
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    scale = max(-exponent, 0)
    shown = "".join(map(str, digits)) + "0" * max(exponent, 0)
    whole, fraction = (shown[:-scale], shown[-scale:]) if scale else (shown, "")
    if len(shown) < scale:
        whole, fraction = "", shown.rjust(scale, "0")
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    groups = [int((whole + fraction)[place : place + 4]) for place in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while groups and groups[0] == 0:
        groups.pop(0)
        weight -= 1
    while groups and groups[-1] == 0:
        groups.pop()
    if not groups:
        weight = 0
    head = struct.pack(">hhHh", len(groups), weight, 0x4000 if sign and groups else 0, scale)
    return head + b"".join(struct.pack(">h", one) for one in groups)


def _texts(value: Any) -> bytes:
    if isinstance(value, str):
        from pubsub.server.system_catalogs.functions import array_values

        value = array_values(value)
    parts = [struct.pack(">iiiii", 1 if value else 0, int(any(one is None for one in value)), TEXT, len(value), 1)]
    if not value:
        return struct.pack(">iii", 0, 0, TEXT)
    for one in value:
        data = None if one is None else text(one).encode()
        parts.append(struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data)
    return b"".join(parts)


_BINARY: Final[Mapping[int, Callable[[Any], bytes]]] = {
    BOOL: lambda value: b"\1" if value else b"\0",
    BYTEA: bytes,
    INT8: lambda value: struct.pack(">q", value),
    INT2: lambda value: struct.pack(">h", value),
    INT4: lambda value: struct.pack(">i", value),
    OID: lambda value: struct.pack(">I", value),
    28: lambda value: struct.pack(">I", value),
    FLOAT4: lambda value: struct.pack(">f", value),
    FLOAT8: lambda value: struct.pack(">d", value),
    DATE: lambda value: struct.pack(">i", (value - _DAY).days),
    TIMESTAMP: _moment,
    TIMESTAMPTZ: _moment,
    NUMERIC: numeric_binary,
    UUID: lambda value: uuid.UUID(str(value)).bytes,
    LSN: lambda value: struct.pack(">Q", Lsn.parse(str(value))),
    JSONB: lambda value: b"\1" + text(value).encode(),
    TEXTS: _texts,
}


def parameter_text(data: bytes, oid: int, binary: bool) -> str:
    """Return a parameter's value as text.  Raises PubsubError (22P03, …) for bytes that are none."""
    if not binary or oid in _TEXTUAL or oid == 0:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PubsubError('invalid byte sequence for encoding "UTF8"', sqlstate="22021") from error
    read = _FROM_BINARY.get(oid)
    if read is None:
        raise FeatureNotSupported(f"no binary input function available for type with OID {oid} here")
    try:
        return read(data)
    except (struct.error, ValueError, OverflowError) as error:
        raise PubsubError("incorrect binary data format in bind parameter", sqlstate="22P03") from error


def _from_numeric(data: bytes) -> str:
    count, weight, sign, scale = struct.unpack_from(">hhHh", data)
    if sign == 0xC000:
        return "NaN"
    if sign in (0xD000, 0xF000):
        return "Infinity" if sign == 0xD000 else "-Infinity"
    groups = struct.unpack_from(f">{count}h", data, 8)
    total = sum((Decimal(one).scaleb(4 * (weight - place)) for place, one in enumerate(groups)), Decimal(0))
    return f"{'-' if sign else ''}{total:.{scale}f}"


_FROM_BINARY: Final[Mapping[int, Callable[[bytes], str]]] = {
    BOOL: lambda data: "true" if data == b"\1" else "false",
    BYTEA: lambda data: "\\x" + data.hex(),
    INT8: lambda data: str(struct.unpack(">q", data)[0]),
    INT2: lambda data: str(struct.unpack(">h", data)[0]),
    INT4: lambda data: str(struct.unpack(">i", data)[0]),
    OID: lambda data: str(struct.unpack(">I", data)[0]),
    FLOAT4: lambda data: text(struct.unpack(">f", data)[0]),
    FLOAT8: lambda data: text(struct.unpack(">d", data)[0]),
    DATE: lambda data: text(_DAY + timedelta(days=struct.unpack(">i", data)[0])),
    TIMESTAMP: lambda data: text(
        (PG_EPOCH + timedelta(microseconds=struct.unpack(">q", data)[0])).replace(tzinfo=None)
    ),
    TIMESTAMPTZ: lambda data: text(PG_EPOCH + timedelta(microseconds=struct.unpack(">q", data)[0])),
    NUMERIC: _from_numeric,
    UUID: lambda data: str(uuid.UUID(bytes=data)),
    LSN: lambda data: str(Lsn(struct.unpack(">Q", data)[0])),
    JSONB: lambda data: data[1:].decode(),
}
