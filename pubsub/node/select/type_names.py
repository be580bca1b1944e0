"""Find the types that casts name."""

from __future__ import annotations

from typing import Any, Final

from sqlglot import exp

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.types import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    INTERVAL,
    NUMERIC,
    OID,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    VARCHAR,
    Type,
    internal_name,
    numeric,
)

_TYPES: Final = {
    "BOOLEAN": BOOL, "SMALLINT": INT2, "INT": INT4, "BIGINT": INT8, "FLOAT": FLOAT4, "DOUBLE": FLOAT8, "TEXT": TEXT,
    "VARCHAR": VARCHAR, "CHAR": BPCHAR, "BPCHAR": BPCHAR, "NAME": TEXT, "DATE": DATE, "TIMESTAMP": TIMESTAMP,
    "TIMESTAMPTZ": TIMESTAMPTZ, "VARBINARY": BYTEA, "INTERVAL": INTERVAL, "UUID": Type("uuid", kept=True),
    "JSON": Type("json", kept=True), "JSONB": Type("jsonb", kept=True), "OID": OID, "BIGSERIAL": INT8, "SERIAL": INT4,
    "TIME": Type("time without time zone", kept=True), "INET": Type("inet", kept=True), "TIMESTAMPNTZ": TIMESTAMP,
}  # fmt: skip


def type_of(node: Any) -> tuple[Type, int | None]:
    """Return the type that a cast names, and the length of a character type or numeric's precision (None: unlimited)."""
    kind = node.this.name if hasattr(node.this, "name") else str(node.this)
    sizes = [one.this.this for one in node.expressions if isinstance(one, exp.DataTypeParam)]
    shown = node.sql("postgres").lower()
    if kind in ("DECIMAL", "BIGDECIMAL"):
        if not sizes:
            return NUMERIC, None
        precision, scale = int(sizes[0]), int(sizes[1]) if len(sizes) > 1 else 0
        if not 0 <= scale <= precision <= 38:
            raise FeatureNotSupported(f"type {shown} is not supported")
        return numeric(scale), precision
    if kind == "USERDEFINED" or kind not in _TYPES:
        if kind in ("UNKNOWN", "USERDEFINED"):
            raise PubsubError(f'type "{shown}" does not exist', sqlstate="42704")
        raise FeatureNotSupported(f"a cast to type {shown} is not supported")
    found = _TYPES[kind]
    if found in (VARCHAR, BPCHAR):
        return found, int(sizes[0]) if sizes else 1 if kind == "CHAR" else None
    if sizes and not found.is_time:
        raise FeatureNotSupported(f"type {shown} is not supported")
    if sizes and sizes[0] != "6":
        raise FeatureNotSupported(f"type {shown} is not supported")
    return found, None


def cast_name(node: Any) -> str:
    """Return the name that a cast to this type gives a column without an alias."""
    kind = node.this.name if hasattr(node.this, "name") else str(node.this)
    if kind in ("DECIMAL", "BIGDECIMAL"):
        return "numeric"
    found = _TYPES.get(kind)
    if kind == "TEXT" or found is None:
        return node.sql("postgres").lower() if found is None else "text"
    return internal_name(found)
