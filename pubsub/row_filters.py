"""Evaluate the conditions of the option where on Arrow columns, as PostgreSQL evaluates them on a row.

A condition is true, false or unknown (NULL), and a row is one of the table's if it is true.  Only what comes out the same here as at
the publisher is evaluated, by the column's type at the publisher and here:

    int2, int4, int8, numeric with a scale    exact numbers: in order; a constant may have more digits than the column
    text, varchar, enums                      the texts are the same or not; their order is a collation's.  LIKE, but of enums
    uuid                                      likewise, in any spelling of the constant
    date, timestamp, timestamptz              in order; constants as 2026-01-31 and 2026-01-31 23:59:59.5, the last with an offset
    boolean                                   the same or not, and conditions by themselves

IS NULL is evaluated of every type but a composite one, where it asks for the attributes.  Functions raise FeatureNotSupported for
the rest, and InvalidValue for a constant that the publisher would not take.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, reduce
from math import ceil, floor
from typing import Any, Final, TypeVar, assert_never

import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import FeatureNotSupported, InvalidValue
from pubsub.protocol.arrow_arrays import Mask
from pubsub.sql.row_conditions import (
    Column,
    Comparison,
    Constant,
    Distinct,
    Expression,
    Junction,
    Like,
    Membership,
    Not,
    NullTest,
    Operator,
    RowCondition,
    TruthTest,
)

V = TypeVar("V")

_BOOL, _UUID, _DATE, _TIMESTAMP, _TIMESTAMPTZ, _NUMERIC = 16, 2950, 1082, 1114, 1184, 1700
_INTEGERS: Final = frozenset((21, 23, 20))
_TEXTS: Final = frozenset((25, 1043))
_COMPARE: Final[Mapping[Operator, Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_AS_DATE: Final = re.compile(r"(\d{4})-(\d{2})-(\d{2})", re.ASCII)
_AS_TIMESTAMP: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})(?:[ T](\d{2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?)( ?[+-]\d{2}(?::?\d{2})?|Z)?)?", re.ASCII
)
_AS_INTEGER: Final = re.compile(r"\s*[-+]?\d{1,1000}\s*", re.ASCII)
_AS_NUMERIC: Final = re.compile(r"\s*[-+]?(?:\d{1,1000}(?:\.\d{0,1000})?|\.\d{1,1000})\s*", re.ASCII)
_AS_UUID: Final = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}", re.ASCII)
#: bool.c: parse_bool_with_len, without the prefixes of words.
_TRUTHS: Final = {"true": True, "t": True, "yes": True, "on": True, "1": True}
_TRUTHS.update({"false": False, "f": False, "no": False, "off": False, "0": False})


@dataclass(frozen=True, slots=True)
class Typed:
    """A column of a condition: the oid of its type at the publisher, without domains, whether that is an enum or a composite type
    (pg_type.typtype), and its type in Arrow; `deterministic`: its collation tells every two texts apart.
    """

    name: str
    oid: int
    kind: str
    type: pa.DataType
    type_name: str
    deterministic: bool = True

    @property
    def _family(self) -> str:
        """What its values are compared as; "" if they are not."""
        kinds = pa.types
        fits = {
            "number": (self.oid in _INTEGERS and kinds.is_integer(self.type))
            or (self.oid == _NUMERIC and kinds.is_decimal(self.type)),
            "text": (self.oid in _TEXTS or self.kind == "e") and kinds.is_string(self.type) and self.deterministic,
            "uuid": self.oid == _UUID and kinds.is_string(self.type),
            "date": self.oid == _DATE and kinds.is_date32(self.type),
            "timestamp": (self.oid == _TIMESTAMP and kinds.is_timestamp(self.type) and self.type.tz is None)
            or (self.oid == _TIMESTAMPTZ and kinds.is_timestamp(self.type) and self.type.tz is not None),
            "boolean": self.oid == _BOOL and kinds.is_boolean(self.type),
        }
        return next((name for name, fit in fits.items() if fit), "")

    @property
    def is_composite(self) -> bool:
        return self.kind == "c"


def require_exact(condition: RowCondition, columns: Mapping[str, Typed], relation: str) -> None:
    """Raise FeatureNotSupported, or InvalidValue, naming the column, unless the condition comes out here as at the publisher."""
    _Checked(columns, relation).check(condition.expression)


@dataclass(frozen=True)
class RowFilter:
    """The condition of a Delta table's rows.  `text`: the condition; `columns`: the names that it has for its columns, each with the
    Delta table's name and the oid of its type at the publisher.

    `partitioned`: the publisher's table has partitions, whose old rows may be less than the message says.
    """

    text: str
    columns: tuple[tuple[str, str, int], ...]
    partitioned: bool = False

    @cached_property
    def _condition(self) -> RowCondition:
        return RowCondition.parse(self.text)

    @property
    def names(self) -> frozenset[str]:
        """The Delta table's names of its columns."""
        return frozenset(here for _, here, _ in self.columns)

    def matches(self, values: Mapping[str, pa.Array]) -> Mask:
        """Return for which rows the condition is true; `values`: at least its columns, by the Delta table's names."""
        held = {name: (values[here], oid) for name, here, oid in self.columns}
        found = _evaluated(self._condition.expression, held)
        mask: Mask = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
        return mask


class _Checked:
    """Looks at an expression's columns and constants."""

    def __init__(self, columns: Mapping[str, Typed], relation: str) -> None:
        self._columns = columns
        self._relation = relation

    def check(self, expression: Expression) -> None:
        match expression:
            case Column():
                self._require(expression, ("boolean",), "a condition by itself")
            case Comparison(operator, left, right):
                equality = operator in ("=", "<>")
                families = ("number", "date", "timestamp", *(("text", "uuid", "boolean") if equality else ()))
                column = self._require(left, families, f"compared by {operator}")
                if isinstance(right, Column):
                    self._require_same(column, right)
                else:
                    self._constant(column, right)
            case Distinct(left, constant):
                self._constant(self._require(left, _ALL, "compared by IS DISTINCT FROM"), constant)
            case Membership(left, constants):
                column = self._require(left, _ALL, "looked for by IN")
                for one in constants:
                    self._constant(column, one)
            case Like(left, _):
                column = self._require(left, ("text",), "compared by LIKE")
                if column.kind == "e":
                    raise self._unfit(column, "compared by LIKE")
            case NullTest(left):
                column = self._columns[left.name]
                if column.is_composite:
                    raise self._unfit(
                        column, "compared by IS NULL", "It is true of a value whose attributes are NULL, too."
                    )
            case TruthTest() | Not():
                self.check(expression.operand)
            case Junction():
                for part in expression.operands:
                    self.check(part)
            case _:
                assert_never(expression)

    def _require(self, column: Column, families: tuple[str, ...], how: str) -> Typed:
        found = self._columns[column.name]
        if found._family not in families:
            raise self._unfit(found, how)
        return found

    def _require_same(self, left: Typed, right: Column) -> None:
        other = self._require(right, ("number", "date", "timestamp", "boolean"), "compared with a column")
        integers = all(pa.types.is_integer(one.type) for one in (left, other))
        if not integers and left.type != other.type:
            raise self._unfit(left, f'compared with column "{other.name}" of type {other.type_name}')

    def _constant(self, column: Typed, constant: Constant) -> None:
        try:
            _converted(constant, column.oid, column.type)
        except (InvalidValue, FeatureNotSupported) as error:
            named = f'the condition of the option where of table "{self._relation}", column "{column.name}": '
            error.message = f"{named}{error.message}"
            error.args = (error.message,)
            raise

    def _unfit(self, column: Typed, how: str, why: str | None = None) -> FeatureNotSupported:
        if why is None and not column.deterministic:
            why = "Its collation takes different texts for the same."
        elif why is None and column.oid in _TEXTS and column._family == "text":
            why = "The order of texts is a collation's, which only the publisher has."
        elif why is None and not column._family:
            why = "Its values here do not tell what the publisher's comparison would say."
        return FeatureNotSupported(
            f'column "{column.name}" of table "{self._relation}" has type {column.type_name}, and cannot be {how} in a condition of '
            "the option where",
            detail=why,
            hint="A row filter of the publication can, and leaves rows out at the publisher.",
        )


_ALL: Final = ("number", "text", "uuid", "date", "timestamp", "boolean")

Held = Mapping[str, tuple[pa.Array, int]]


def _evaluated(expression: Expression, held: Held) -> pa.Array:
    """Return whether the expression is true of each row, as Booleans; NULL: unknown."""
    match expression:
        case Column(name):
            return held[name][0]
        case Comparison(operator, left, right):
            column, oid = held[left.name]
            if isinstance(right, Column):
                return _COMPARE[operator](column, held[right.name][0])
            return _compared(operator, column, _converted(right, oid, column.type))
        case Distinct(left, constant):
            column, oid = held[left.name]
            return pc.fill_null(_compared("<>", column, _converted(constant, oid, column.type)), True)
        case Membership(left, constants):
            column, oid = held[left.name]
            values = [_converted(one, oid, column.type) for one in constants]
            there = [one.value for one in values if one.value is not None]
            if not there:
                return _everywhere(column, False)
            found = pc.is_in(column, value_set=pa.array(there, column.type))
            return pc.if_else(column.is_valid(), found, pa.scalar(None, pa.bool_()))
        case Like(left, pattern):
            return pc.match_substring_regex(held[left.name][0], _regular(pattern))
        case NullTest(left):
            return held[left.name][0].is_null()
        case TruthTest(operand, value):
            found = _evaluated(operand, held)
            if value is None:
                return found.is_null()
            return pc.fill_null(found if value else pc.invert(found), False)
        case Not(operand):
            return pc.invert(_evaluated(operand, held))
        case Junction(word, operands):
            join = pc.and_kleene if word == "AND" else pc.or_kleene
            return reduce(join, (_evaluated(one, held) for one in operands))
    assert_never(expression)


@dataclass(frozen=True, slots=True)
class _Value:
    """A constant in a column's type.  `value` None: the type has no such value.  `below`: the greatest one that is not greater than
    the constant, None: all are greater; `above`: the least one that is not less, None: all are less.
    """

    value: Any
    below: Any
    above: Any


def _compared(operator: Operator, column: pa.Array, constant: _Value) -> pa.Array:
    """Compare a column with a constant that its type may not have."""
    match operator:
        case "=" | "<>":
            if constant.value is None:
                return _everywhere(column, operator == "<>")
            return _COMPARE[operator](column, pa.scalar(constant.value, column.type))
        case "<" | ">=":
            if constant.above is None:
                return _everywhere(column, operator == "<")
            return _COMPARE[operator](column, pa.scalar(constant.above, column.type))
        case "<=" | ">":
            if constant.below is None:
                return _everywhere(column, operator == ">")
            return _COMPARE[operator](column, pa.scalar(constant.below, column.type))
    assert_never(operator)


def _everywhere(column: pa.Array, value: bool) -> pa.Array:
    """Return the same truth value for each value of the column that is not NULL."""
    return pc.if_else(column.is_valid(), pa.scalar(value), pa.scalar(None, pa.bool_()))


def _converted(constant: Constant, oid: int, kind: pa.DataType) -> _Value:
    """Return a constant as a value of a column.  Raises InvalidValue and FeatureNotSupported."""
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return _number(constant, oid, kind)
    if isinstance(constant, Decimal) or (isinstance(constant, bool) and oid != _BOOL):
        shown = str(constant).upper() if isinstance(constant, bool) else constant
        raise FeatureNotSupported(f"{shown} is no constant of its type", hint="Write it in quotes.")
    if oid == _BOOL:
        truth = constant if isinstance(constant, bool) else _TRUTHS.get(str(constant).strip().lower())
        if truth is None:
            raise InvalidValue(f'invalid input syntax for type boolean: "{constant}"', sqlstate="22P02")
        return _Value(truth, truth, truth)
    text = str(constant)
    value: Any = text
    if oid == _UUID:
        if not _AS_UUID.fullmatch(text):
            raise InvalidValue(f'invalid input syntax for type uuid: "{text}"', sqlstate="22P02")
        value = str(uuid.UUID(text))
    elif oid == _DATE:
        value = _date(text)
    elif oid in (_TIMESTAMP, _TIMESTAMPTZ):
        value = _timestamp(text, zoned=oid == _TIMESTAMPTZ)
    return _Value(value, value, value)


def _number(constant: Constant, oid: int, kind: pa.DataType) -> _Value:
    if isinstance(constant, bool):
        raise FeatureNotSupported(f"{str(constant).upper()} is no number")
    if isinstance(constant, str):
        fits = _AS_NUMERIC if oid == _NUMERIC else _AS_INTEGER
        if not fits.fullmatch(constant):
            named = "numeric" if oid == _NUMERIC else "integer"
            raise InvalidValue(f'invalid input syntax for type {named}: "{constant}"', sqlstate="22P02")
        constant = Decimal(constant.strip())
        if oid != _NUMERIC and not -(1 << kind.bit_width - 1) <= constant < 1 << kind.bit_width - 1:
            raise InvalidValue(f'value "{constant}" is out of range for its type', sqlstate="22003")
    if pa.types.is_integer(kind):
        scale, least, greatest = 0, -(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1
    else:
        scale, greatest = kind.scale, 10**kind.precision - 1
        least = -greatest

    def within(unscaled: int) -> Any:
        if pa.types.is_integer(kind):
            return unscaled
        digits = tuple(map(int, str(abs(unscaled))))
        return Decimal((int(unscaled < 0), digits, -scale))

    exact = Fraction(constant) * 10**scale
    down, up = floor(exact), ceil(exact)
    return _Value(
        within(down) if down == up and least <= down <= greatest else None,
        None if down < least else within(min(down, greatest)),
        None if up > greatest else within(max(up, least)),
    )


def _date(text: str) -> date:
    found = _AS_DATE.fullmatch(text)
    if found is None:
        raise FeatureNotSupported(f'the date "{text}" is not written as 2026-01-31')
    return _valid("date", text, lambda: date.fromisoformat(text))


def _timestamp(text: str, *, zoned: bool) -> datetime:
    found = _AS_TIMESTAMP.fullmatch(text)
    if found is None:
        raise FeatureNotSupported(f'the timestamp "{text}" is not written as 2026-01-31 23:59:59.5')
    day, time, offset = found.groups()
    if zoned and offset is None:
        raise FeatureNotSupported(
            f'the timestamp "{text}" has no offset, and stands for another time in each session',
            hint="Add one, such as +00.",
        )
    if not zoned and offset is not None:
        raise FeatureNotSupported(f'the timestamp "{text}" has an offset, which its type ignores')

    def read() -> datetime:
        naive = datetime.fromisoformat(f"{day}T{time or '00:00'}")
        if not zoned:
            return naive
        digits = (offset or "").strip().replace(":", "")
        away = timedelta() if digits == "Z" else timedelta(hours=int(digits[1:3]), minutes=int(digits[3:5] or 0))
        return (naive + away if digits.startswith("-") else naive - away).replace(tzinfo=UTC)

    return _valid("timestamp", text, read)


def _valid(what: str, text: str, read: Callable[[], V]) -> V:
    try:
        return read()
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f'date/time field value out of range for type {what}: "{text}"', sqlstate="22008") from error


def _regular(pattern: str) -> str:
    """Return LIKE's pattern as a regular expression of RE2 (like_match.c: MatchText)."""
    found, place = [], 0
    while place < len(pattern):
        sign = pattern[place]
        if sign == "\\":
            place += 1
            found.append(re.escape(pattern[place]))
        else:
            found.append({"%": ".*", "_": "."}.get(sign) or re.escape(sign))
        place += 1
    return rf"(?s)\A{''.join(found)}\z"
