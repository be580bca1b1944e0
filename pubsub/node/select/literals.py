"""Read untyped literals as their type's input function does, and write values as its output function does.

Dates and times are read in ISO 8601's forms only; others that PostgreSQL accepts are refused as invalid.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.kept_literals import canonical
from pubsub.node.select.types import INTERVAL, Type, bits_of, numeric
from pubsub.node.select.values import NULL, Value, quoted
from pubsub.protocol.lsn import Lsn

_INTEGER: Final = re.compile(r"\s*[+-]?\d+\s*")
_NUMERIC: Final = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")
_FLOAT_WORDS: Final = {
    "nan": "NaN",
    "inf": "Infinity",
    "infinity": "Infinity",
    "-inf": "-Infinity",
    "-infinity": "-Infinity",
}
_MOMENT: Final = re.compile(
    r"\s*(\d{4}-\d{1,2}-\d{1,2})(?:[ T]+(\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?)\s*(Z|z|UTC|[+-]\d{1,2}(?::?\d{2})?)?)?\s*"
)
_TRUTHS: Final = {
    **dict.fromkeys(("t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"), True),
    **dict.fromkeys(("f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0"), False),
}
_SECOND: Final = 1_000_000
#: Months, days and microseconds of each unit (datetime.c: deltatktbl).
_UNITS: Final = {
    ("year", "years", "y", "yr", "yrs"): (12, 0, 0),
    ("month", "months", "mon", "mons"): (1, 0, 0),
    ("week", "weeks", "w"): (0, 7, 0),
    ("day", "days", "d"): (0, 1, 0),
    ("hour", "hours", "h", "hr", "hrs"): (0, 0, 3600 * _SECOND),
    ("minute", "minutes", "min", "mins", "m"): (0, 0, 60 * _SECOND),
    ("second", "seconds", "sec", "secs", "s"): (0, 0, _SECOND),
    ("millisecond", "milliseconds", "ms", "msec", "msecs"): (0, 0, 1000),
    ("microsecond", "microseconds", "us", "usec", "usecs"): (0, 0, 1),
}
_UNIT: Final = {word: amounts for words, amounts in _UNITS.items() for word in words}
_PART: Final = re.compile(
    r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([a-zA-Z]+)|([+-]?)(\d+):(\d{2})(?::(\d{2}(?:\.\d{1,6})?))?"
)
DAY: Final = 86_400 * _SECOND


def number(text: str, *, negative: bool = False) -> Value:
    """Translate a number in a statement, with the sign before it (scan.l, gram.y: doNegate, make_const)."""
    from pubsub.node.select.types import INT4, INT8

    if re.fullmatch(r"\d+", text):
        size = int(text)
        least = size - negative
        if least < 1 << 63:
            sql = text if not negative else f"(- {text})" if size < 1 << 63 else f"CAST('-{text}' AS BIGINT)"
            return Value(INT4 if least < 1 << 31 else INT8, sql)
    if not _NUMERIC.fullmatch(text):
        raise FeatureNotSupported(f"the number {text} is not supported")
    found = _decimal(Decimal(text))
    return Value(found.type, f"(- {found.engine})") if negative else found


def constant(text: str, type_: Type) -> Value:
    """Convert an untyped literal to the type.  Raises PubsubError in the words of the type's input function."""
    if type_.is_integer:
        return Value(type_, str(_integer(text, type_)))
    if type_.element is not None:
        raise FeatureNotSupported("a literal of an array is not supported", hint="Write ARRAY[…].")
    match type_.name if not type_.kept else "":
        case "boolean":
            truth = _TRUTHS.get(text.strip().lower())
            if truth is None:
                raise _invalid(text, type_)
            return Value(type_, "TRUE" if truth else "FALSE")
        case "numeric":
            try:
                return _decimal(Decimal(text.strip())) if _NUMERIC.fullmatch(text) else _refuse_numeric(text, type_)
            except InvalidOperation as error:
                raise _invalid(text, type_) from error
        case "real" | "double precision":
            word = _FLOAT_WORDS.get(text.strip().lower())
            if word is None and not _NUMERIC.fullmatch(text):
                raise _invalid(text, type_)
            return Value(type_, f"CAST({quoted(word or text.strip())} AS {type_.engine})")
        case "date" | "timestamp without time zone" | "timestamp with time zone":
            return moment(_moment(text, type_), type_)
        case "bytea":
            if not re.fullmatch(r"\\x(?:[0-9a-fA-F]{2})*", text):
                raise FeatureNotSupported("a literal of bytea is supported in hexadecimal digits only")
            return Value(type_, f"arrow_cast(X'{text[2:]}', 'Binary')")
        case "interval":
            return interval(text)
        case "pg_lsn":
            return Value(type_, f"CAST({int(Lsn.parse(text))} AS DECIMAL(20, 0))")
        case _:
            pass
    return Value(type_, quoted(canonical(text, type_.name) if type_.kept else text))


def moment(value: datetime, type_: Type) -> Value:
    """Return a date or a timestamp; `value` is in UTC, without a zone if the type has none."""
    if type_.name == "date":
        return Value(type_, f"CAST('{value.date().isoformat()}' AS DATE)")
    shown = value.replace(tzinfo=None).isoformat(timespec="microseconds")
    if type_.name == "timestamp without time zone":
        return Value(type_, f"""arrow_cast('{shown}', 'Timestamp(Microsecond, None)')""")
    return Value(type_, f"""arrow_cast('{shown}Z', 'Timestamp(Microsecond, Some("UTC"))')""")


def interval(text: str) -> Value:
    """Parse an interval.  Raises PubsubError (22007), and FeatureNotSupported for fractions of days or longer units."""
    months = days = microseconds = 0
    rest = text.strip().removeprefix("@").strip()
    place = 0
    while place < len(rest):
        match = _PART.match(rest, place)
        if match is None or (match[2] is not None and match[2].lower() not in _UNIT):
            raise _invalid(text, INTERVAL, "22007")
        if match[2] is not None:
            amount, unit = Decimal(match[1]), _UNIT[match[2].lower()]
            if unit[2]:
                microseconds += round(amount * unit[2])
            elif amount == int(amount):
                months, days = months + int(amount) * unit[0], days + int(amount) * unit[1]
            else:
                raise FeatureNotSupported("fractions of days, months and years in an interval are not supported")
        else:
            sign = -1 if match[3] == "-" else 1
            seconds = int(match[4]) * 3600 + int(match[5]) * 60
            microseconds += sign * (seconds * _SECOND + int(Decimal(match[6] or 0) * _SECOND))
        place = match.end()
        while rest[place : place + 1].isspace():
            place += 1
    if not rest:
        raise _invalid(text, INTERVAL, "22007")
    return Value(INTERVAL, str((months * 30 + days) * DAY + microseconds), literal=(months, days, microseconds))


def interval_text(months: int, days: int, microseconds: int) -> str:
    """Format an interval (datetime.c: EncodeInterval, intervalstyle postgres)."""
    years, months = (abs(months) // 12 * (1 if months >= 0 else -1)), (abs(months) % 12 * (1 if months >= 0 else -1))
    parts: list[str] = []
    negative = False
    for amount, unit in ((years, "year"), (months, "mon"), (days, "day")):
        if amount:
            sign = "+" if negative and amount > 0 else ""
            parts.append(f"{sign}{amount} {unit}{'' if amount == 1 else 's'}")
            negative = amount < 0
    if microseconds or not parts:
        whole, fraction = divmod(abs(microseconds), _SECOND)
        sign = "-" if microseconds < 0 else "+" if negative else ""
        clock = f"{sign}{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"
        parts.append(clock + (f".{fraction:06}".rstrip("0") if fraction else ""))
    return " ".join(parts)


def _integer(text: str, type_: Type) -> int:
    if not _INTEGER.fullmatch(text):
        raise _invalid(text, type_)
    value, most = int(text), 1 << bits_of(type_)
    if not -most <= value < most:
        raise PubsubError(f'value "{text}" is out of range for type {type_.name}', sqlstate="22003")
    return value


def _decimal(value: Decimal) -> Value:
    _sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    scale = max(-exponent, 0)
    if len(digits) + max(exponent, 0) > 38 or scale > 37:
        raise FeatureNotSupported("numeric literals of more than 38 digits are not supported")
    precision = max(len(digits) + max(exponent, 0), scale + 1)
    return Value(numeric(scale), f"CAST('{value:f}' AS DECIMAL({precision}, {scale}))")


def _refuse_numeric(text: str, type_: Type) -> Value:
    if text.strip().lower() in ("nan", *_FLOAT_WORDS):
        raise FeatureNotSupported("NaN and infinity of type numeric are not supported")
    raise _invalid(text, type_)


def _moment(text: str, type_: Type) -> datetime:
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise _invalid(text, type_, "22007")
    year, month, day = match[1].split("-")
    try:
        start = datetime.combine(date(int(year), int(month), int(day)), datetime.min.time())
        hours, minutes, *seconds = (match[2] or "0:00").split(":")
        clock = Decimal(seconds[0]) if seconds else Decimal(0)
        whole = int(clock)
        found = start.replace(
            hour=int(hours), minute=int(minutes), second=whole, microsecond=int((clock - whole) * _SECOND)
        )
        if type_.name != "timestamp with time zone":
            return found
        zone = "+00:00" if match[3] in (None, "Z", "z", "UTC") else _zone(match[3])
        return datetime.fromisoformat(found.isoformat() + zone).astimezone(UTC)
    except ValueError as error:
        raise PubsubError(f'date/time field value out of range: "{text}"', sqlstate="22008") from error


def _zone(text: str) -> str:
    hours, _, minutes = text[1:].partition(":")
    if not minutes and len(hours) > 2:
        hours, minutes = hours[:-2], hours[-2:]
    return f"{text[0]}{int(hours):02}:{minutes or '00'}"


def _invalid(text: str, type_: Type, sqlstate: str = "22P02") -> PubsubError:
    if type_.is_time:
        sqlstate = "22007"
    return PubsubError(f'invalid input syntax for type {type_.name}: "{text}"', sqlstate=sqlstate)


def shown(value: object, type_: Type) -> str:
    """Return a value's text as a cast to text gives it."""
    from pubsub.texts import text

    if type_.name == "boolean":
        return "true" if value else "false"
    return text(value)


__all__ = ["DAY", "NULL", "constant", "interval", "interval_text", "moment", "number", "shown"]
