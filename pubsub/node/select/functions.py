"""The functions of a SELECT: resolves them by name and types as PostgreSQL does, and gives DataFusion's SQL.

A function is here only if its results equal PostgreSQL's for all arguments that it takes.  Any other function does not
exist (42883).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pubsub import __version__
from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.casts import cast, coerced, half_even, kept_hint
from pubsub.node.select.literals import DAY, moment
from pubsub.node.select.types import (
    BOOL,
    BPCHAR,
    DATE,
    FLOAT4,
    FLOAT8,
    INT4,
    INT8,
    INTERVAL,
    LSN,
    OTHER,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    VOID,
    Type,
    array_of,
    common,
    implicit,
    numeric,
    ordering,
)
from pubsub.node.select.values import NULL, Value, composed, divide, quoted, rounded

_TYPES: Final = {
    "text": TEXT, "int4": INT4, "int8": INT8, "float8": FLOAT8, "bool": BOOL, "date": DATE, "bpchar": BPCHAR, "ts": TIMESTAMP,
    "tstz": TIMESTAMPTZ, "lsn": LSN,
}  # fmt: skip
#: name(types) result: DataFusion's SQL.  The first line that fits is taken.
_TABLE: Final = """
lower(text) text: lower({0})
upper(text) text: upper({0})
length(text) int4: character_length({0})
char_length(text) int4: character_length({0})
character_length(text) int4: character_length({0})
octet_length(bpchar) int4: octet_length({0})
reverse(text) text: reverse({0})
md5(text) text: md5({0})
left(text, int4) text: left({0}, {1})
right(text, int4) text: right({0}, {1})
substr(text, int4) text: substr({0}, {1})
substring(text, int4) text: substr({0}, {1})
lpad(text, int4) text: lpad({0}, CASE WHEN {1} < 0 THEN 0 ELSE {1} END)
lpad(text, int4, text) text: lpad({0}, CASE WHEN {1} < 0 THEN 0 ELSE {1} END, {2})
rpad(text, int4) text: rpad({0}, CASE WHEN {1} < 0 THEN 0 ELSE {1} END)
rpad(text, int4, text) text: rpad({0}, CASE WHEN {1} < 0 THEN 0 ELSE {1} END, {2})
btrim(text) text: btrim({0}, ' ')
btrim(text, text) text: btrim({0}, {1})
ltrim(text) text: ltrim({0}, ' ')
ltrim(text, text) text: ltrim({0}, {1})
rtrim(text) text: rtrim({0}, ' ')
rtrim(text, text) text: rtrim({0}, {1})
replace(text, text, text) text: CASE WHEN {1} = '' AND {2} IS NOT NULL THEN {0} ELSE replace({0}, {1}, {2}) END
repeat(text, int4) text: repeat({0}, CASE WHEN {1} < 0 THEN 0 ELSE {1} END)
split_part(text, text, int4) text: split_part({0}, {1}, {2})
strpos(text, text) int4: strpos({0}, {1})
position(text, text) int4: strpos({0}, {1})
starts_with(text, text) bool: starts_with({0}, {1})
translate(text, text, text) text: translate({0}, {1}, {2})
ascii(text) int4: ascii({0})
to_hex(int4) text: to_hex(CAST({0} AS BIGINT) & 4294967295)
to_hex(int8) text: to_hex({0})
date(ts) date: arrow_cast({0}, 'Date32')
date(tstz) date: arrow_cast({0}, 'Date32')
"""
_SIGNATURE: Final = re.compile(r"(\w+)\((.*?)\) (\w+): (.*)")
AGGREGATES: Final = frozenset(
    ["count", "sum", "avg", "min", "max", "bool_and", "bool_or", "every", "string_agg", "array_agg"]
)
#: Functions that need OVER, with their result types; None: the type of the first argument.
WINDOWS: Final = {
    "row_number": INT8, "rank": INT8, "dense_rank": INT8, "percent_rank": FLOAT8, "cume_dist": FLOAT8, "ntile": INT4,
    "lag": None, "lead": None, "first_value": None, "last_value": None, "nth_value": None,
}  # fmt: skip
_FIELDS: Final = {
    "year": "year", "years": "year", "month": "month", "months": "month", "day": "day", "days": "day", "dow": "dow",
    "doy": "doy", "week": "week", "quarter": "quarter", "hour": "hour", "hours": "hour", "minute": "minute",
    "minutes": "minute",
}  # fmt: skip
_TRUNCATED: Final = frozenset(["second", "minute", "hour", "day", "week", "month", "quarter", "year"])


BEGUN: Final[ContextVar[datetime]] = ContextVar("BEGUN")
"""When the statement began that is being translated: now() is the same moment all through it."""


@dataclass(frozen=True, slots=True)
class _Function:
    takes: tuple[Type, ...]
    gives: Type
    sql: str


def _read(table: str) -> dict[str, list[_Function]]:
    found: dict[str, list[_Function]] = {}
    for line in table.strip().split("\n"):
        match = _SIGNATURE.fullmatch(line)
        assert match is not None, line
        takes = tuple(_TYPES[one.strip()] for one in match[2].split(",") if one.strip())
        found.setdefault(match[1], []).append(_Function(takes, _TYPES[match[3]], match[4]))
    return found


_FUNCTIONS: Final = _read(_TABLE)


def call(name: str, given: Sequence[Value]) -> Value:
    """Translate the call of a plain function.  Raises PubsubError, with 42883 if no function fits."""
    if made := _SPECIAL.get(name):
        found = made(name, given)
        if found is not None:
            return found
    for function in _FUNCTIONS.get(name, ()):
        if len(function.takes) == len(given) and all(
            implicit(value.type, type_) for value, type_ in zip(given, function.takes, strict=True)
        ):
            values = [coerced(value, type_) for value, type_ in zip(given, function.takes, strict=True)]
            return Value(function.gives, "(" + function.sql.format(*(value.engine for value in values)) + ")")
    raise undefined(name, given)


def undefined(name: str, given: Sequence[Value]) -> PubsubError:
    """Return the error for a call that fits no function (parse_func.c: ParseFuncOrColumn).

    If the function is known but a value is kept as text, the error is FeatureNotSupported.
    """
    types = ", ".join(value.type.name for value in given)
    kept = next((value.type for value in given if value.type.kept and value.type.name in ("numeric", OTHER)), None)
    if kept is not None and (name in _FUNCTIONS or name in _SPECIAL or name in AGGREGATES):
        return FeatureNotSupported(f"function {name}({types}) is not supported", hint=kept_hint(kept))
    return PubsubError(
        f"function {name}({types}) does not exist",
        sqlstate="42883",
        hint="No function matches the given name and argument types. You might need to add explicit type casts.",
    )


def unified(what: str, values: Sequence[Value]) -> tuple[Type, list[Value]]:
    """Convert values to their common type.  Raises PubsubError (42804) if they have none."""
    type_ = common([value.type for value in values])
    if type_ is None:
        known = [value.type for value in values if value.type != UNKNOWN]
        other = next(one for one in known if common([known[0], one]) is None)
        raise PubsubError(f"{what} types {known[0].name} and {other.name} cannot be matched", sqlstate="42804")
    return type_, [_as(value, type_) for value in values]


def _as(value: Value, type_: Type) -> Value:
    if type_.name == "numeric" and not type_.kept and value.type != UNKNOWN:
        return Value(type_, f"CAST({value.engine} AS {type_.engine})")
    return coerced(value, type_)


def _coalesce(name: str, given: Sequence[Value]) -> Value | None:
    if not given:
        return None
    type_, values = unified(name.upper(), given)
    # Characters of several lengths are equal, and the first is taken.
    if name != "coalesce" and not (type_.has_order and type_.element is None and type_ != BPCHAR):
        raise FeatureNotSupported(f"{name.upper()} of type {type_.name} is not supported", hint=kept_hint(type_))
    return Value(type_, f"{name}({', '.join(value.engine for value in values)})")


def _nullif(_: str, given: Sequence[Value]) -> Value | None:
    if len(given) != 2:
        return None
    from pubsub.node.select.operators import comparison, operands

    condition = comparison("=", given[0], given[1]).engine
    # The result has the type in which the operator takes it (parse_expr.c: transformAExprNullIf).
    value, other = given[0], given[1].type
    if value.type == UNKNOWN:
        value = coerced(value, TEXT)
    elif operands(value.type, other) == FLOAT8 and value.type not in (FLOAT4, FLOAT8):
        value = cast(value, FLOAT8)
    elif value.type == BPCHAR and other == TEXT:
        value = coerced(value, TEXT)
    return Value(value.type, f"(CASE WHEN {condition} THEN NULL ELSE {value.engine} END)")


def _concat(name: str, given: Sequence[Value]) -> Value | None:
    if not given or (name == "concat_ws" and len(given) < 2):
        return None
    texts = ["''" if value is NULL else _concatenated(value) for value in given]
    if name == "concat_ws" and given[0] is NULL:
        return Value(TEXT, "CAST(NULL AS VARCHAR)")
    if name == "concat_ws":
        texts = [
            texts[0],
            *(one if value is not NULL else "NULL" for value, one in zip(given[1:], texts[1:], strict=True)),
        ]
    return Value(TEXT, f"{name}({', '.join(texts)})")


def _concatenated(value: Value) -> str:
    """Convert to text with the type's output function: unlike a cast, it gives t and f for booleans, and a character's blanks."""
    if value.type == BOOL:
        return f"(CASE WHEN {value.engine} THEN 't' WHEN NOT {value.engine} THEN 'f' END)"
    if value.type == BPCHAR:
        return value.engine
    if value.type.kept:
        return f"CAST({value.engine} AS VARCHAR)"
    return cast(value, TEXT).engine if value.type != UNKNOWN else coerced(value, TEXT).engine


def _abs(name: str, given: Sequence[Value]) -> Value | None:
    if len(given) != 1 or not (given[0].type.is_number or given[0].type == UNKNOWN):
        return None
    value = given[0] if given[0].type != UNKNOWN else coerced(given[0], FLOAT8)
    type_ = value.type
    if name == "abs":
        if type_.is_integer:
            return Value(type_, f"CAST(abs(CAST({value.engine} AS DECIMAL(20, 0))) AS {type_.engine})")
        return Value(type_, f"abs({value.engine})", composed(abs, value) if value.exact else None)
    if type_ == FLOAT4 or type_.is_integer:  # for integers, too, ceil, floor and sign are those of double precision
        value, type_ = cast(value, FLOAT8), FLOAT8
    if name == "sign":
        # Neither is NaN (float.c: dsign), which DataFusion takes for the greatest.
        nan = f"WHEN isnan({value.engine}) THEN 0 " if type_ == FLOAT8 else ""
        sign = f"(CASE {nan}WHEN {value.engine} > 0 THEN 1 WHEN {value.engine} < 0 THEN -1 ELSE {value.engine} * 0 END)"
        return Value(
            numeric(0) if type_ != FLOAT8 else FLOAT8,
            f"CAST({sign} AS {'DOUBLE' if type_ == FLOAT8 else 'DECIMAL(38, 0)'})",
        )
    if type_ == FLOAT8:
        return Value(type_, f"{name}({value.engine})")
    return Value(numeric(0), f"CAST({name}({value.engine}) AS DECIMAL(38, 0))")


def _round(name: str, given: Sequence[Value]) -> Value | None:
    """Round or truncate to a literal number of digits: DataFusion's scales cannot depend on values."""
    if not given or not (given[0].type.is_number or given[0].type == UNKNOWN) or len(given) > 2:
        return None
    value = given[0] if given[0].type != UNKNOWN else coerced(given[0], FLOAT8)
    if (len(given) == 1 and not value.type.is_exact) or (len(given) == 1 and value.type.is_integer):
        sql = cast(value, FLOAT8).engine
        return Value(FLOAT8, half_even(sql) if name == "round" else f"trunc({sql})")
    if not value.type.is_exact:
        return None
    digits = given[1].engine if len(given) == 2 else "0"
    if len(given) == 2 and not given[1].type.is_integer:
        return None
    match = re.fullmatch(r"\(?-? ?(\d+)\)?", digits)
    if match is None:
        raise FeatureNotSupported(f"{name} to a number of digits that is no literal is not supported")
    places = -int(match[1]) if "-" in digits else int(match[1])
    scale = max(places, 0)
    if scale > 30 or places < -30:
        raise FeatureNotSupported(f"{name} to {places} digits is not supported")
    value = coerced(value, numeric(0)) if value.type.is_integer else value
    exact = composed(lambda one: rounded(one, places), value) if value.exact and name == "round" else None
    if places >= value.type.scale:
        return Value(numeric(scale), f"CAST({value.engine} AS DECIMAL(38, {scale}))", exact)
    return Value(numeric(scale), f"CAST({name}({value.engine}, {places}) AS DECIMAL(38, {scale}))", exact)


def _now(name: str, given: Sequence[Value]) -> Value | None:
    if given:
        return None
    return moment(BEGUN.get(), DATE if name == "current_date" else TIMESTAMPTZ)


def _version(_: str, given: Sequence[Value]) -> Value | None:
    if given:
        return None
    return Value(TEXT, quoted(f"PostgreSQL 18.0 (pubsub {__version__}, a subscriber to PostgreSQL 15 to 19)"))


def _date_trunc(_: str, given: Sequence[Value]) -> Value | None:
    if len(given) != 2 or not (given[1].type.is_time or given[1].type == UNKNOWN):
        return None
    unit = given[0].literal
    value = given[1] if given[1].type not in (UNKNOWN, DATE) else coerced(given[1], TIMESTAMPTZ)
    if not isinstance(unit, str) or unit.lower() not in _TRUNCATED:
        raise FeatureNotSupported(f'unit "{unit}" not supported for type {value.type.name}')
    return Value(value.type, f"date_trunc('{unit.lower()}', {value.engine})")


def extract(field: str, value: Value) -> Value:
    """Translate EXTRACT(field FROM value), which gives a numeric."""
    field = field.lower()
    if value.type == UNKNOWN:
        value = coerced(value, TIMESTAMPTZ)
    micro, type_ = None, value.type
    if type_.name == "interval":
        if field != "epoch":
            raise FeatureNotSupported(f'unit "{field}" not supported for type interval')
        micro = str(_epoch(*value.literal)) if isinstance(value.literal, tuple) else value.engine
    elif not type_.is_time:
        raise undefined("extract", [Value(UNKNOWN, "''"), value])
    elif field in ("epoch", "second", "seconds", "milliseconds", "microseconds"):
        if type_ == DATE:
            if field != "epoch":
                raise FeatureNotSupported(f'unit "{field}" not supported for type date')
            return Value(numeric(0), f"CAST(CAST(CAST({value.engine} AS INT) AS BIGINT) * 86400 AS DECIMAL(38, 0))")
        micro = f"arrow_cast({value.engine}, 'Int64')"
        if field != "epoch":
            micro = f"((({micro}) % 60000000 + 60000000) % 60000000)"
    if micro is not None:
        scale = {"milliseconds": 3, "microseconds": 0}.get(field, 6)
        return Value(
            numeric(scale), f"(CAST({micro} AS DECIMAL(20, 0)) * CAST('{10**-scale:.{scale}f}' AS DECIMAL(7, {scale})))"
        )
    if field not in _FIELDS:
        raise FeatureNotSupported(f'unit "{field}" not recognized for type {type_.name}')
    if type_ == DATE and field.rstrip("s") in ("hour", "minute"):
        raise FeatureNotSupported(f'unit "{field}" not supported for type date')
    return Value(numeric(0), f"CAST(date_part('{_FIELDS[field]}', {value.engine}) AS DECIMAL(38, 0))")


def _epoch(months: int, days: int, microseconds: int) -> int:
    """Return the microseconds of an interval, with years of 365.25 days (timestamp.c: interval_part_common)."""
    years, rest = abs(months) // 12, abs(months) % 12
    quarters = (1461 * years + 120 * rest) * (1 if months >= 0 else -1) + 4 * days
    return quarters * (DAY // 4) + microseconds


def _date_part(_: str, given: Sequence[Value]) -> Value | None:
    if len(given) != 2 or not isinstance(given[0].literal, str):
        return None
    return cast(extract(given[0].literal, given[1]), FLOAT8)


def _substring(_: str, given: Sequence[Value]) -> Value | None:
    """Translate substring with a length; for a negative one DataFusion, too, raises an error (outputs.complaint)."""
    if len(given) != 3 or not implicit(given[0].type, TEXT) or not all(implicit(one.type, INT4) for one in given[1:]):
        return None
    text, start, length = coerced(given[0], TEXT), coerced(given[1], INT4), coerced(given[2], INT4)
    return Value(TEXT, f"substr({text.engine}, {start.engine}, {length.engine})")


def _to_hex(name: str, given: Sequence[Value]) -> Value | None:
    if len(given) == 1 and given[0].type.name == "smallint":
        raise PubsubError("function to_hex(smallint) is not unique", sqlstate="42725")
    return None


def _array_length(name: str, given: Sequence[Value]) -> Value | None:
    if not given or given[0].type.element is None:
        return None
    if name == "cardinality" and len(given) == 1:
        return Value(
            INT4,
            f"(CASE WHEN {given[0].engine} IS NULL THEN NULL ELSE coalesce(array_length({given[0].engine}), 0) END)",
        )
    if name == "array_length" and len(given) == 2 and given[1].sql == "1":
        return Value(INT4, f"nullif(array_length({given[0].engine}), 0)")
    return None


def _lsn_diff(_: str, given: Sequence[Value]) -> Value | None:
    if len(given) != 2 or not all(implicit(one.type, LSN) for one in given):
        return None
    one, other = (coerced(value, LSN) for value in given)
    return Value(numeric(0), f"({one.engine} - {other.engine})")


_SPECIAL: Final[dict[str, Callable[[str, Sequence[Value]], Value | None]]] = {
    **dict.fromkeys(("coalesce", "greatest", "least"), _coalesce),
    "nullif": _nullif,
    **dict.fromkeys(("concat", "concat_ws"), _concat),
    **dict.fromkeys(
        ("abs", "ceil", "ceiling", "floor", "sign"), lambda name, given: _abs(name.replace("ceiling", "ceil"), given)
    ),
    **dict.fromkeys(("round", "trunc"), _round),
    **dict.fromkeys(
        ("now", "current_timestamp", "current_date", "transaction_timestamp", "statement_timestamp", "clock_timestamp"),
        _now,
    ),
    "to_hex": _to_hex,
    "version": _version,
    "date_trunc": _date_trunc,
    "date_part": _date_part,
    **dict.fromkeys(("substr", "substring"), _substring),
    **dict.fromkeys(("array_length", "cardinality"), _array_length),
    "pg_wal_lsn_diff": _lsn_diff,
}


def aggregate(name: str, given: Sequence[Value], *, distinct: bool, order: str, star: bool, window: bool) -> Value:
    """Translate the call of an aggregate; `order` is DataFusion's ORDER BY within it."""
    if name == "count":
        if star or len(given) == 1:
            if given and not given[0].type.has_equality and distinct:
                raise FeatureNotSupported(
                    f"DISTINCT of type {given[0].type.name} is not supported", hint=kept_hint(given[0].type)
                )
            return Value(INT8, f"count({'*' if star else _counted(given[0], distinct=distinct)})")
        raise undefined(name, given)
    if name == "string_agg" and len(given) == 2 and all(implicit(value.type, TEXT) for value in given):
        text, between = (coerced(value, TEXT).engine for value in given)
        return Value(TEXT, f"string_agg({_distinct(distinct)}{text}, {between}{order})")
    if len(given) != 1:
        raise undefined(name, given)
    if name == "array_agg" and given[0].type == UNKNOWN:
        raise PubsubError("function array_agg(unknown) is not unique", sqlstate="42725")
    if name == "array_agg" and given[0].type == INTERVAL:
        raise FeatureNotSupported("function array_agg(interval) is not supported")
    value = given[0] if given[0].type != UNKNOWN else coerced(given[0], TEXT)
    type_, inner = value.type, _distinct(distinct)
    match name:
        case "sum" if type_.is_number:
            if type_ in (FLOAT4, FLOAT8):
                return Value(type_, f"CAST(sum({_counted(value, distinct=distinct)}) AS {type_.engine})")
            if type_.name in ("smallint", "integer"):
                return Value(INT8, f"sum({inner}CAST({value.engine} AS BIGINT))")
            wide = numeric(type_.scale)
            return Value(wide, f"sum({inner}CAST({value.engine} AS {wide.engine}))")
        case "avg" if type_.is_number:
            if not type_.is_exact:
                return Value(FLOAT8, f"avg({_counted(cast(value, FLOAT8), distinct=distinct)})")
            wide = numeric(type_.scale)
            total = f"sum({inner}CAST({value.engine} AS {wide.engine}))"
            many = f"count({inner}{value.engine})"
            scale = max(type_.scale, 12)
            sql = f"(CAST({total} AS DECIMAL(38, {scale})) / CAST(nullif({many}, 0) AS DECIMAL(20, 0)))"
            return Value(
                numeric(scale + 4),
                None if window else sql,
                None if window else composed(divide, Value(wide, total), Value(INT8, f"nullif({many}, 0)")),
            )
        case "min" | "max" if type_ in (FLOAT4, FLOAT8) and not window:
            # In groups, DataFusion's own begin with the greatest finite number, and order NaN in ways of their own.
            down = " DESC" if name == "max" else ""
            return Value(type_, f"first_value({value.engine} ORDER BY {value.engine}{down} NULLS LAST)")
        case "min" | "max" if type_ not in (BOOL, VOID) and type_.has_order and type_.element is None:
            shown = TEXT if type_.is_text and type_.name != "character" else type_
            return Value(shown, f"{name}({value.engine})")
        case "bool_and" | "bool_or" | "every" if type_ == BOOL:
            return Value(BOOL, f"{name.replace('every', 'bool_and')}({value.engine})")
        case "array_agg" if type_.element is None and not type_.kept:
            return Value(array_of(type_), f"array_agg({inner}{value.engine}{order})")
        case _:
            if type_.kept and name in ("min", "max", "sum", "avg", "array_agg"):
                raise FeatureNotSupported(f"function {name}({type_.name}) is not supported", hint=kept_hint(type_))
            raise undefined(name, given)


def _counted(value: Value, *, distinct: bool) -> str:
    """Return what an aggregate is given, with DISTINCT as PostgreSQL tells values from each other."""
    return f"DISTINCT {ordering(value.type, value.engine)}" if distinct else value.engine


def _distinct(distinct: bool) -> str:
    return "DISTINCT " if distinct else ""


def window(name: str, given: list[Value]) -> Value:
    """Translate a call of a window function, without its OVER.  Raises PubsubError if there is none for the arguments."""
    type_ = WINDOWS[name]
    if type_ is not None:
        if len(given) != (1 if name == "ntile" else 0):
            raise undefined(name, given)
        return Value(type_, f"{name}({', '.join(value.engine for value in given)})")
    if not 1 <= len(given) <= 3 or (len(given) > 1 and not given[1].type.is_integer):
        raise undefined(name, given)
    given = [coerced(given[0], TEXT) if given[0].type == UNKNOWN else given[0], *given[1:]]
    if len(given) == 3:
        given[2] = coerced(given[2], given[0].type)
    return Value(given[0].type, f"{name}({', '.join(value.engine for value in given)})")
