"""The operators of a SELECT, resolved by their operands' types as PostgreSQL does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select import values
from pubsub.node.select.casts import as_float, cast, coerced, kept_hint
from pubsub.node.select.types import (
    BOOL,
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
    Type,
    common,
    implicit,
    numeric,
)
from pubsub.node.select.values import UNFINISHED, Value, composed, quoted

#: Regular expressions that mean the same in PostgreSQL and in DataFusion.
_PLAIN_REGEX: Final = re.compile(
    r"""(?: [^\\\[\](){}?*+|.^$] | \\[.\\*+?()\[\]{}|^$/\-"'_dsw] | [.^$|] | \((?!\?) | \)
        | \[\^?\]?(?: [^\]\[\\] | \\[\\\]\[.\-dsw] )*\] | [*+?]\?? | \{\d+(?:,\d*)?\}\?? )*""",
    re.VERBOSE,
)
_NUMBER: Final = r"(?:\d+|CAST\('[-\d.]+' AS DECIMAL\(\d+, \d+\)\))"
_SIGNED: Final = rf"(?:{_NUMBER}|\(- {_NUMBER}\))"
_LSN: Final = re.compile(r"'[0-9A-F]+/[0-9A-F]+'")
_CONSTANT: Final = re.compile(rf"{_SIGNED}|CAST\({_SIGNED} AS (?:REAL|DOUBLE)\)")
_DAY_OR_LESS: Final = (DATE, TIMESTAMP, TIMESTAMPTZ)


def undefined(operator: str, left: Value | None, right: Value) -> PubsubError:
    """Return the error for an operator that does not exist for these types (parse_oper.c: op_error)."""
    types = [*([left.type] if left is not None else []), right.type]
    kept = next((one for one in types if one.kept), None)
    shown = f"{types[0].name} {operator} {types[1].name}" if len(types) == 2 else f"{operator} {types[0].name}"
    if kept is not None:
        return FeatureNotSupported(f"operator {shown} is not supported", hint=kept_hint(kept))
    return PubsubError(
        f"operator does not exist: {shown}",
        sqlstate="42883",
        hint="No operator matches the given name and argument types. You might need to add explicit type casts.",
    )


def comparison(operator: str, left: Value, right: Value) -> Value:
    """Translate a comparison: = <> < <= > >= IS [NOT] DISTINCT FROM."""
    one, other = sides(operator, left, right)
    return Value(BOOL, f"({one} {operator} {other})")


def among(value: Value, others: Sequence[Value], *, every: bool = False) -> Value:
    """Translate value IN (others), or if `every` value <> ALL (others)."""
    operator = "<>" if every else "="
    pairs = [sides(operator, value, one) for one in others]
    if not pairs:
        return Value(BOOL, "TRUE" if every else "FALSE")
    if len({one for one, _ in pairs}) == 1 and all(map(_is_constant, others)):
        # A list of constants is one node, whereas comparisons joined by OR are a tree as deep as their number.
        constants = ", ".join(other for _, other in pairs)
        return Value(BOOL, f"({pairs[0][0]} {'NOT ' if every else ''}IN ({constants}))")
    return Value(
        BOOL, f"({(' AND ' if every else ' OR ').join(f'({one} {operator} {other})' for one, other in pairs)})"
    )


def in_one_type(values: Sequence[Value], *besides: Value) -> list[Value]:
    """Convert values to the type that they, and others, have in common, where that is a floating-point one.

    In every other type they are compared alike before and after.
    """
    type_ = common([one.type for one in (*besides, *values)])
    return [coerced(one, type_) for one in values] if type_ in (FLOAT4, FLOAT8) else list(values)


def _is_constant(value: Value) -> bool:
    """Return whether the value is a literal other than NULL."""
    if value is values.NULL or value.sql is None:
        return False
    return isinstance(value.literal, str) or _CONSTANT.fullmatch(value.sql) is not None


def sides(operator: str, left: Value, right: Value) -> tuple[str, str]:
    """Return the SQL of both sides, converted to the type in which they are compared.  Raises `undefined`."""
    type_ = operands(left.type, right.type)
    if type_ is None or type_.element is not None:
        raise undefined(operator, left, right)
    ordered = operator in ("<", "<=", ">", ">=")
    if not (type_.has_order if ordered else type_.has_equality):
        raise undefined(operator, left, right)
    if type_.name == "character" or {left.type.name, right.type.name} == {"character", "character varying"}:
        one, other = (f"rtrim({coerced(value, TEXT).engine}, ' ')" for value in (left, right))
    elif left.type.is_exact and right.type.is_exact:
        one, other = left.engine, right.engine
    else:
        one, other = coerced(left, type_).engine, coerced(right, type_).engine
    if type_.kept and type_.name == "pg_lsn":
        one, other = (_short_lsn(sql) for sql in (one, other))
    return one, other


def _short_lsn(sql: str) -> str:
    """Write an LSN as servers up to 18 do: 19 writes zeros after the slash (pg_lsn.c: pg_lsn_out), literals have none."""
    return sql if _LSN.fullmatch(sql) else f"regexp_replace({sql}, '/0+([0-9A-F])', '/\\1')"


def operands(left: Type, right: Type) -> Type | None:
    """Return the type whose operator is taken for two types: of real and another number that of double precision."""
    type_ = common([left, right])
    return FLOAT8 if type_ == FLOAT4 and UNKNOWN not in (left, right) and left != right else type_


def arithmetic(operator: str, left: Value, right: Value) -> Value:
    """Translate + - * / % on numbers, times and LSNs."""
    found = _on_times(operator, left, right)
    if found is not None:
        return found
    if left.type == UNKNOWN and right.type == UNKNOWN:
        raise PubsubError(f"operator is not unique: unknown {operator} unknown", sqlstate="42725")
    if left.type == UNKNOWN:
        left = coerced(left, right.type)
    if right.type == UNKNOWN:
        right = coerced(right, left.type)
    type_ = operands(left.type, right.type)
    if type_ is None or not type_.is_number or (operator == "%" and not type_.is_exact):
        raise undefined(operator, left, right)
    if type_.is_integer:
        return _integers(operator, left, right, type_)
    if type_.name == "numeric":
        return _numerics(operator, coerced(left, numeric(0)), coerced(right, numeric(0)))
    return _floats(operator, cast(left, FLOAT8), cast(right, FLOAT8), FLOAT8 if type_ != FLOAT4 else FLOAT4)


def _integers(operator: str, left: Value, right: Value, type_: Type) -> Value:
    """Compute in a wider type and cast back: the cast fails where PostgreSQL reports an overflow."""
    one, other = left.engine, right.engine
    if operator in ("/", "%"):
        return Value(type_, f"CAST((CAST({one} AS BIGINT) {operator} CAST({other} AS BIGINT)) AS {type_.engine})")
    wide = "BIGINT" if type_.name in ("smallint", "integer") else "DECIMAL(20, 0)"
    return Value(type_, f"CAST((CAST({one} AS {wide}) {operator} CAST({other} AS {wide})) AS {type_.engine})")


def _numerics(operator: str, left: Value, right: Value) -> Value:
    scales = left.type.scale, right.type.scale
    exact = {"+": values.add, "-": values.subtract, "*": values.multiply, "/": values.divide}.get(operator)
    one, other = left.engine, right.engine
    if operator == "/":
        assert exact is not None
        scale = max(scales[0], 12)
        sql = f"(CAST({one} AS DECIMAL(38, {scale})) / {other})"
        return Value(numeric(scale + 4), sql, composed(exact, left, right))
    scale = sum(scales) if operator == "*" else max(scales)
    if scale > 37:
        raise FeatureNotSupported("numeric values with more than 37 digits after the point are not supported")
    composition = composed(exact, left, right) if exact and (left.exact or right.exact) else None
    return Value(numeric(scale), f"({one} {operator} {other})", composition)


def _floats(operator: str, left: Value, right: Value, type_: Type) -> Value:
    one, other = left.engine, right.engine
    exact = composed(values.FLOATS[operator], left, right) if type_ == FLOAT8 and (left.exact or right.exact) else None
    if operator == "/":
        # The integer division raises for zero, where a division of doubles would give infinity.
        allowed = f"({other} <> 0.0 OR {one} IS NULL OR isnan({one}))"
        other = f"({other} * CAST(1 / CAST({allowed} AS BIGINT) AS DOUBLE))"
    sql = unsigned_nan(f"({one} {operator} {other})")
    return Value(type_, sql if type_ == FLOAT8 else f"CAST({sql} AS REAL)", exact)


def unsigned_nan(sql: str) -> str:
    """Return a double whose NaN, if it is one, has no sign: a negative one would be less than any number."""
    return f"nanvl({sql}, CAST('NaN' AS DOUBLE))"


def _on_times(operator: str, left: Value, right: Value) -> Value | None:
    one, other = left.type, right.type
    if operator == "-" and one == UNKNOWN and other in (*_DAY_OR_LESS, LSN):
        left, one = coerced(left, other), other
    if operator == "-" and other == UNKNOWN and one in (*_DAY_OR_LESS, LSN):
        right, other = coerced(right, one), one
    if one == LSN and other == LSN and operator == "-":
        return Value(numeric(0), f"({left.engine} - {right.engine})")
    if operator in ("+", "-") and one.is_time and other == INTERVAL:
        return _moved(operator, left, right)
    if operator == "+" and one == INTERVAL and other.is_time:
        return _moved(operator, right, left)
    if operator in ("+", "-") and one == DATE and other.is_integer and other != INT8:
        return Value(DATE, f"CAST((CAST({left.engine} AS INT) {operator} {right.engine}) AS DATE)")
    if operator == "+" and other == DATE and one.is_integer and one != INT8:
        return Value(DATE, f"CAST((CAST({right.engine} AS INT) + {left.engine}) AS DATE)")
    if operator == "-" and one == DATE and other == DATE:
        return Value(INT4, f"(CAST({left.engine} AS INT) - CAST({right.engine} AS INT))")
    if operator == "-" and one.is_time and other.is_time:
        type_ = common([one, other])
        assert type_ is not None
        parts = (f"arrow_cast({coerced(value, type_).engine}, 'Int64')" for value in (left, right))
        return Value(INTERVAL, f"({' - '.join(parts)})")
    return None


def _moved(operator: str, moment: Value, interval: Value) -> Value:
    if not isinstance(interval.literal, tuple):
        raise FeatureNotSupported("adding an interval that is no literal is not supported")
    if moment.type == DATE:
        moment = cast(moment, TIMESTAMP)
    months, days, microseconds = interval.literal
    sql = moment.engine
    for amount, unit in ((months, "months"), (days, "days"), (microseconds, "microseconds")):
        if amount:
            # For a negative amount the operator is inverted: DataFusion does not read a sign in an interval.
            turned = operator if amount > 0 else {"+": "-", "-": "+"}[operator]
            sql = f"({sql} {turned} INTERVAL '{abs(amount)} {unit}')"
    return Value(moment.type, sql)


def negated(value: Value) -> Value:
    """Translate - value."""
    if value.type == UNKNOWN:
        value = coerced(value, FLOAT8)
    if not value.type.is_number:
        raise undefined("-", None, value)
    if value.type.is_integer:
        if value.engine.isdigit():
            return Value(value.type, f"(- {value.engine})")
        return Value(value.type, f"CAST(- CAST({value.engine} AS DECIMAL(20, 0)) AS {value.type.engine})")
    exact = composed(lambda one: -one, value) if value.exact else None
    if not value.type.is_exact:
        return Value(value.type, f"CAST({unsigned_nan(f'(- {as_float(value)})')} AS {value.type.engine})", exact)
    return Value(value.type, f"(- {value.engine})", exact)


def concatenated(left: Value, right: Value) -> Value:
    """Translate left || right."""
    texts = [value.type.is_text or value.type == UNKNOWN for value in (left, right)]
    if not any(texts) or any(value.type.element is not None for value in (left, right)):
        raise undefined("||", left, right)
    if any(value.type.kept and value.type.name in ("json", "jsonb", "bytea", OTHER) for value in (left, right)):
        raise undefined("||", left, right)
    if left.sql is None or right.sql is None:
        one, other = (coerced(value, TEXT) if value.type == UNKNOWN else cast(value, TEXT) for value in (left, right))
        return Value(TEXT, None, composed(lambda *both: "".join(both), one, other))
    parts = [_own_text(value) for value in (left, right)]
    return Value(TEXT, f"({parts[0]} || {parts[1]})")


def _own_text(value: Value) -> str:
    return coerced(value, TEXT).engine if value.type.is_text or value.type == UNKNOWN else cast(value, TEXT).engine


def like(operator: str, left: Value, right: Value, escape: str | None) -> Value:
    """Translate LIKE or ILIKE.  `escape` is the character of ESCAPE, for a literal pattern only; None: a backslash."""
    shown = {"LIKE": "~~", "ILIKE": "~~*"}[operator]
    if not (implicit(left.type, TEXT) and implicit(right.type, TEXT)):
        raise undefined(shown, left, right)
    pattern = coerced(right, TEXT).engine
    if escape is not None:
        if not isinstance(right.literal, str) or len(escape) > 1:
            raise FeatureNotSupported("ESCAPE is supported with a literal pattern and one character only")
        pattern = quoted(_escaped(right.literal, escape))
    elif isinstance(right.literal, str):
        if _ends_in_escape(right.literal):
            raise FeatureNotSupported(UNFINISHED)
    elif right is not values.NULL:
        # DataFusion takes the escape for a character.  PostgreSQL raises an error for some texts, and others do not match.
        one = _with_blanks(left)
        odd = f"(character_length({pattern}) - character_length(rtrim({pattern}, '\\'))) % 2 = 1"
        error = f"(CAST(concat({quoted(UNFINISHED)}, {pattern}) AS INT) = 0)"
        return Value(BOOL, f"(CASE WHEN {one} IS NOT NULL AND {odd} THEN {error} ELSE {one} {operator} {pattern} END)")
    return Value(BOOL, f"({_with_blanks(left)} {operator} {pattern})")


def _with_blanks(value: Value) -> str:
    """Return a text as LIKE and regular expressions see it: they have operators for character, with its blanks."""
    return value.engine if value.type.name == "character" else coerced(value, TEXT).engine


def _ends_in_escape(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _escaped(pattern: str, escape: str) -> str:
    """Rewrite the pattern to use a backslash as escape."""
    found, place = "", 0
    while place < len(pattern):
        one = pattern[place]
        if escape and one == escape:
            place += 1
            if place == len(pattern):
                raise FeatureNotSupported(UNFINISHED)
            found += ("\\" if pattern[place] in "%_\\" else "") + pattern[place]
        else:
            found += "\\\\" if one == "\\" else one
        place += 1
    return found


def matches(left: Value, right: Value, *, ignore_case: bool) -> Value:
    """Translate left ~ right.  Raises FeatureNotSupported for a pattern that DataFusion might read differently."""
    operator = "~*" if ignore_case else "~"
    if not (implicit(left.type, TEXT) and implicit(right.type, TEXT)):
        raise undefined(operator, left, right)
    if right is values.NULL:
        return Value(BOOL, "CAST(NULL AS BOOLEAN)")
    if not isinstance(right.literal, str):
        raise FeatureNotSupported("a regular expression that is no literal is not supported")
    if not _PLAIN_REGEX.fullmatch(right.literal):
        raise FeatureNotSupported(
            f"the regular expression {quoted(right.literal)} is not supported",
            detail="Literals, . ^ $ | ( ) [ ] * + ? { } and \\d, \\s, \\w are.",
        )
    # In PostgreSQL a point matches any character, also a newline.
    return Value(BOOL, f"({_with_blanks(left)} {operator} {quoted('(?s)' + right.literal)})")
