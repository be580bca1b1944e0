"""Casts, implicit and explicit, with PostgreSQL's rounding and its errors."""

from __future__ import annotations

from decimal import Decimal

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.literals import constant, interval_text, shown
from pubsub.node.select.types import (
    BOOL,
    DIGITS,
    FLOAT8,
    INT8,
    INTERVAL,
    LSN,
    NUMERIC,
    TEXT,
    UNKNOWN,
    Type,
    numeric,
)
from pubsub.node.select.values import Value, composed, quoted, rounded

_UTC = """arrow_cast({}, 'Timestamp(Microsecond, Some("UTC"))')"""
_LOCAL = "arrow_cast({}, 'Timestamp(Microsecond, None)')"
_ZONED = r"(:\d{2}(?:\.\d+)?)\s*(?:[Zz]|UTC|[+-]\d{1,2}(?::?\d{2})?)$"


def coerced(value: Value, wanted: Type) -> Value:
    """Convert a value as PostgreSQL does implicitly; the caller has checked that `types.implicit` allows it."""
    if value.type == UNKNOWN:
        if isinstance(value.literal, str):
            return constant(value.literal, wanted)
        if value.sql == "NULL":
            has_name = wanted.element is None and not wanted.is_time
            return Value(wanted, f"CAST(NULL AS {wanted.engine})" if wanted.kept or has_name else _null(wanted))
        return cast(value.typed(TEXT), wanted)
    if (value.type.name, value.type.kept) == (wanted.name, wanted.kept):
        return value
    if value.type.name == "character" and wanted.is_text:
        return Value(wanted, f"rtrim({value.engine}, ' ')")
    if value.type.is_text and wanted.is_text:
        return value.typed(wanted)
    if wanted.name == "numeric" and value.type.is_integer:
        return Value(numeric(0), f"CAST({value.engine} AS DECIMAL(20, 0))", value.exact)
    return cast(value, wanted)


def _null(wanted: Type) -> str:
    if wanted.element is not None:
        return "NULL"
    if wanted.name == "date":
        return "CAST(NULL AS DATE)"
    return (_UTC if wanted.name == "timestamp with time zone" else _LOCAL).format("NULL")


def cast(value: Value, wanted: Type) -> Value:
    """Translate CAST(value AS wanted).

    Raises PubsubError (42846) for a cast that PostgreSQL lacks, and FeatureNotSupported.
    """
    given = value.type
    if wanted == NUMERIC:
        return _unscaled(value)
    if given == UNKNOWN:
        found = coerced(value, wanted)
        return found if found.type == wanted else _number(found, wanted)
    if (given.name, given.kept) == (wanted.name, wanted.kept) and given.name != "numeric":
        return value
    if wanted.is_text:
        return _text(value, wanted)
    if given.is_text or (given.kept and given.name == wanted.name):
        return _from_text(value, wanted)
    if given.is_number and wanted.is_number:
        return _number(value, wanted)
    if given.is_time and wanted.is_time:
        return Value(wanted, _moment(value.engine, given, wanted))
    if given == BOOL and wanted.name == "integer":
        return Value(wanted, f"CAST({value.engine} AS INT)")
    if given.name == "integer" and wanted == BOOL:
        return Value(wanted, f"({value.engine} <> 0)")
    if given.kept or wanted.kept or given.element or wanted.element:
        raise FeatureNotSupported(
            f"a cast of type {given.name} to {wanted.name} is not supported", hint=kept_hint(given)
        )
    raise PubsubError(f"cannot cast type {given.name} to {wanted.name}", sqlstate="42846")


def kept_hint(type_: Type) -> str | None:
    """Return a hint on how to use a value that is kept as PostgreSQL's text; None for other types."""
    if type_.kept and type_.name == "numeric":
        return "It is kept as text, since its scale is each value's own; cast it: …::numeric(38, 10)."
    return f"Values of type {type_.name} are kept as PostgreSQL's text: …::text gives it." if type_.kept else None


def _text(value: Value, wanted: Type) -> Value:
    given = value.type
    if given.kept and given.name == "inet":
        # The cast writes the length of the network in any case (network.c: network_show).
        whole = f"(CASE WHEN strpos({value.engine}, ':') > 0 THEN '/128' ELSE '/32' END)"
        return Value(
            wanted,
            f"(CASE WHEN strpos({value.engine}, '/') > 0 THEN {value.engine} ELSE {value.engine} || {whole} END)",
        )
    if given.kept or given.is_integer or given == BOOL or given.name in ("numeric", "date"):
        return Value(wanted, f"CAST({value.engine} AS VARCHAR)", _shown(value) if value.exact else None)
    if given.is_text:
        return coerced(value, wanted)
    if given == INTERVAL:
        return Value(wanted, None, composed(lambda n: n, interval_shown(value)))
    if given == LSN:
        half = "upper(to_hex(CAST({} AS BIGINT){}))"
        sql = value.engine
        return Value(wanted, f"concat({half.format(sql, ' >> 32')}, '/', {half.format(sql, ' & 4294967295')})")
    if given.element is not None:
        raise FeatureNotSupported(f"a cast of type {given.name} to {wanted.name} is not supported")
    return Value(wanted, None, _shown(value))


def interval_shown(value: Value) -> Value:
    """Return the text of an interval, which only Python can compute."""
    if isinstance(value.literal, tuple):
        text = interval_text(*value.literal)
        return Value(TEXT, None, composed(lambda _: text, Value(INT8, "1")))
    # The difference of two timestamps: days and a time of day (timestamp.c: timestamp_mi).
    day = 86_400_000_000

    def split(microseconds: int) -> str:
        days = abs(microseconds) // day * (1 if microseconds >= 0 else -1)
        return interval_text(0, days, microseconds - days * day)

    return Value(TEXT, None, composed(split, value))


def _shown(value: Value):  # type: ignore[no-untyped-def]
    given = value.type
    if given.name == "real":
        from pubsub.node.select.outputs import single

        return composed(lambda one: shown(single(one), given), value)
    return composed(lambda one: shown(one, given), value)


def _from_text(value: Value, wanted: Type) -> Value:
    if wanted in (INTERVAL, LSN) or wanted.element is not None or wanted.name == "bytea" or wanted.kept:
        raise FeatureNotSupported(f"a cast of a column to {wanted.name} is not supported")
    source = f"trim({value.engine})"
    if wanted.is_time:
        return Value(wanted, _read_moment(source, wanted))
    return Value(wanted, f"CAST({source} AS {wanted.engine})")


def _read_moment(source: str, wanted: Type) -> str:
    if wanted.name == "timestamp with time zone":
        return _UTC.format(source)
    # Only timestamptz heeds a zone.
    local = _LOCAL.format(f"regexp_replace({source}, {quoted(_ZONED)}, '\\1')")
    return f"arrow_cast({local}, 'Date32')" if wanted.name == "date" else local


def _unscaled(value: Value) -> Value:
    """Cast to numeric without a scale: a number keeps its digits."""
    if value.type == UNKNOWN:
        return coerced(value, numeric(0))
    if value.type.is_integer:
        return coerced(value, numeric(0))
    if value.type.name == "numeric":
        return value
    if value.type.is_number or value.type.is_text:
        raise FeatureNotSupported(
            f"a cast of type {value.type.name} to numeric without a scale is not supported",
            hint="Its digits follow from each value." if value.type.is_number else "Name precision and scale.",
        )
    return cast(value, numeric(0))


def bounded(value: Value, precision: int) -> Value:
    """Return a numeric that must have at most `precision` digits (numeric.c: apply_typmod)."""
    scale = value.type.scale
    if precision >= DIGITS:
        return value
    limit = Decimal(1).scaleb(precision - scale)

    def check(one: Decimal) -> Decimal:
        if abs(one) >= limit:
            raise PubsubError(
                "numeric field overflow",
                sqlstate="22003",
                detail=f"A field with precision {precision}, scale {scale} must round to an absolute value less than "
                f"{'1' if precision == scale else f'10^{precision - scale}'}.",
            )
        return one

    sql = f"CAST(CAST({value.engine} AS DECIMAL({precision}, {scale})) AS {value.type.engine})"
    return Value(value.type, sql, composed(check, value) if value.exact else None)


def _number(value: Value, wanted: Type) -> Value:
    given, sql = value.type, value.engine
    if wanted.is_integer:
        if given.is_integer:
            return Value(wanted, f"CAST({sql} AS {wanted.engine})")
        whole = f"round({sql})" if given.name == "numeric" else half_even(f"CAST({sql} AS DOUBLE)")
        return Value(wanted, f"CAST({whole} AS {wanted.engine})")
    if wanted.name == "numeric":
        if not given.is_exact:
            raise FeatureNotSupported(
                f"a cast of type {given.name} to numeric is not supported", hint="Its digits follow from each value."
            )
        exact = composed(lambda one: rounded(one, wanted.scale), value) if value.exact else None
        inner = f"round({sql}, {wanted.scale})" if given.name == "numeric" and given.scale > wanted.scale else sql
        return Value(wanted, f"CAST({inner} AS {wanted.engine})", exact)
    exact = composed(float, value) if value.exact and wanted == FLOAT8 else None
    return Value(wanted, f"CAST({sql} AS {wanted.engine})", exact)


def half_even(sql: str) -> str:
    """Return SQL that rounds a double as rint does, halves to even."""
    return f"(CASE WHEN abs({sql} - trunc({sql})) = 0.5 THEN 2.0 * round({sql} / 2.0) ELSE round({sql}) END)"


def _moment(sql: str, given: Type, wanted: Type) -> str:
    if given.name == wanted.name:
        return sql
    if wanted.name == "date":
        return f"arrow_cast({sql}, 'Date32')" if given.is_time else f"CAST({sql} AS DATE)"
    return (_UTC if wanted.name == "timestamp with time zone" else _LOCAL).format(sql)


def as_float(value: Value) -> str:
    """Return DataFusion's SQL for a number as a double."""
    return value.engine if value.type == FLOAT8 else f"CAST({value.engine} AS DOUBLE)"
