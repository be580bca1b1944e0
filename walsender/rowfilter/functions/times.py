"""Functions of dates, times, timestamps and intervals (date.c, timestamp.c, datetime.c).

Dates are days, times and timestamps microseconds, both since 2000-01-01.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.output.times import calendar_date, toward_zero
from walsender.rowfilter.functions.comparison import COMPARE
from walsender.rowfilter.functions.numbers import EXACT, in_range, quotient
from walsender.rowfilter.functions.values import (
    FixedFunction,
    Interval,
    Maker,
    Number,
    Settings,
    fixed,
    float_number,
    plain_float,
)

_DAY: Final = 86_400_000_000
_HOUR: Final = 3_600_000_000
_MINUTE: Final = 60_000_000
_SECOND: Final = 1_000_000
_I4: Final = (-(2**31), 2**31 - 1)
_I8: Final = (-(2**63), 2**63 - 1)
_FIRST_DAY: Final = -2451545
_END_DAY: Final = 2145031949 - 1
"""The end of dates, exclusive; timestamps end sooner."""
_FIRST_TIMESTAMP: Final = -211813488000000000
_END_TIMESTAMP: Final = 9223371331200000000
_EPOCH_JULIAN: Final = 2451545
_UNIX_EPOCH: Final = 10957 * 86400
"""Seconds from 1970 to 2000."""

_DATE, _TIME, _TIMESTAMP, _TIMESTAMPTZ, _INTERVAL = 1082, 1083, 1114, 1184, 1186


def _out_of_range(what: str) -> PubsubError:
    return PubsubError(f"{what} out of range", sqlstate="22008")


# Days and calendar dates


def _julian_days(year: int, month: int, day: int) -> int:
    """Return the days from 2000-01-01 to a date (datetime.c: date2j)."""
    if month > 2:
        month, year = month + 1, year + 4800
    else:
        month, year = month + 13, year + 4799
    century = year // 100
    julian = year * 365 - 32167 + year // 4 - century + century // 4 + 7834 * month // 256 + day
    return julian - _EPOCH_JULIAN


def _days_of_month(year: int, month: int) -> int:
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return (31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]


def _on_date(day: int) -> int:
    if not _FIRST_DAY <= day < _END_DAY:
        raise _out_of_range("date")
    return day


def _date_plus(day: int, count: int) -> int:
    return day if day in _I4 else _on_date(day + count)


def _date_minus(a: int, b: int) -> int:
    if a in _I4 or b in _I4:
        raise PubsubError("cannot subtract infinite dates", sqlstate="22008")
    return a - b


def _date_to_timestamp(day: int) -> int:
    if day in _I4:
        return _I8[day > 0]
    if day * _DAY >= _END_TIMESTAMP:
        raise PubsubError("date out of range for timestamp", sqlstate="22008")
    return day * _DAY


def _timestamp_to_date(timestamp: int) -> int:
    return _I4[timestamp > 0] if timestamp in _I8 else timestamp // _DAY


# Timestamps and intervals


_INFINITE: Final = (Interval(_I8[0], _I4[0], _I4[0]), Interval(_I8[1], _I4[1], _I4[1]))


def _is_infinite(span: Interval) -> bool:
    return span in _INFINITE


def _plus_interval(timestamp: int, span: Interval) -> int:
    """Add months, ending on the last day of a month that is too short; then days; then time (timestamp_pl_interval)."""
    if timestamp in _I8:
        return timestamp
    if _is_infinite(span):
        return _I8[span.time > 0]
    days, time = divmod(timestamp, _DAY)
    if span.month:
        year, month, day = calendar_date(days)
        year, month = divmod(year * 12 + month - 1 + span.month, 12)
        days = _julian_days(year, month + 1, min(day, _days_of_month(year, month + 1)))
    found = (days + span.day) * _DAY + time + span.time
    if not _FIRST_TIMESTAMP <= found < _END_TIMESTAMP:
        raise _out_of_range("timestamp")
    return found


def _negated(span: Interval) -> Interval:
    return Interval(in_range(-span.time, 8), in_range(-span.day, 4), in_range(-span.month, 4))


def _minus_interval(timestamp: int, span: Interval) -> int:
    return _plus_interval(timestamp, _negated(span))


def _timestamp_minus(types: tuple[int, ...], settings: Settings) -> FixedFunction:
    """Make the difference of timestamps, in days and time; of infinite ones, too, since 17 (timestamp_mi)."""

    def difference(a: int, b: int) -> Interval:
        if a in _I8 or b in _I8:
            if settings.version < 170000:
                raise PubsubError("cannot subtract infinite timestamps", sqlstate="22008")
            if a == b:
                raise _out_of_range("interval")
            return _INFINITE[a == _I8[1] or b == _I8[0]]
        days, time = toward_zero(a - b, _DAY)
        return Interval(time, days, 0)

    return difference


def _combined(sign: int) -> Callable[[Interval, Interval], Interval]:
    def applied(a: Interval, b: Interval) -> Interval:
        try:
            return Interval(
                in_range(a.time + sign * b.time, 8),
                in_range(a.day + sign * b.day, 4),
                in_range(a.month + sign * b.month, 4),
            )
        except PubsubError:
            raise _out_of_range("interval") from None

    return applied


# date_trunc, extract

_UNITS: Final = {
    "microsecond": "microseconds",
    "us": "microseconds",
    "usec": "microseconds",
    "millisecond": "milliseconds",
    "ms": "milliseconds",
    "msec": "milliseconds",
    "seconds": "second",
    "sec": "second",
    "s": "second",
    "minutes": "minute",
    "min": "minute",
    "m": "minute",
    "hours": "hour",
    "hr": "hour",
    "h": "hour",
    "days": "day",
    "d": "day",
    "weeks": "week",
    "w": "week",
    "months": "month",
    "mon": "month",
    "quarters": "quarter",
    "qtr": "quarter",
    "years": "year",
    "yr": "year",
    "y": "year",
    "decades": "decade",
    "dec": "decade",
    "centuries": "century",
    "cent": "century",
    "c": "century",
    "millennia": "millennium",
    "mil": "millennium",
    "j": "julian",
}
_OF_TIME: Final = frozenset({"microseconds", "milliseconds", "second", "minute", "hour"})
_FOREVER: Final = frozenset({"epoch", "year", "decade", "century", "millennium", "julian", "isoyear"})
"""Units of which an infinite date has an infinite value instead of NULL."""


def _unit(text: bytes) -> str:
    name = text.decode("latin-1").lower()
    return _UNITS.get(name, name)


def _not_known(unit: str, of: str) -> PubsubError:
    return PubsubError(f'unit "{unit}" not recognized for type {of}', sqlstate="22023")


_STEPS: Final = {
    "microseconds": 1,
    "milliseconds": 1000,
    "second": _SECOND,
    "minute": _MINUTE,
    "hour": _HOUR,
    "day": _DAY,
}


def _first_year(unit: str, year: int) -> int:
    if unit == "decade":
        return year // 10 * 10
    size = 100 if unit == "century" else 1000
    return (year - 1) // size * size + 1


def _truncated(unit: bytes, timestamp: int) -> int:
    name = _unit(unit)
    if step := _STEPS.get(name):
        return timestamp if timestamp in _I8 else timestamp // step * step
    if name not in {"week", "month", "quarter", "year", "decade", "century", "millennium"}:
        raise _not_known(name, "timestamp without time zone")
    if timestamp in _I8:
        return timestamp
    days = timestamp // _DAY
    if name == "week":
        return (days - (days + 5) % 7) * _DAY
    year, month, _ = calendar_date(days)
    if name == "quarter":
        month = (month - 1) // 3 * 3 + 1
    elif name != "month":
        month = 1
    if name in {"decade", "century", "millennium"}:
        year = _first_year(name, year)
    return _julian_days(year, month, 1) * _DAY


def _iso_week(days: int) -> tuple[int, int]:
    """Return the ISO year and week: those of the week's Thursday."""
    thursday = days - (days + 5) % 7 + 3
    year, _, _ = calendar_date(thursday)
    return year, (thursday - _julian_days(year, 1, 1)) // 7 + 1


def _part_of_day(unit: str, microseconds: int) -> Decimal | None:
    """Return a field of a time of day."""
    if unit == "hour":
        return Decimal(microseconds // _HOUR)
    if unit == "minute":
        return Decimal(microseconds // _MINUTE % 60)
    return _part_of_minute(unit, microseconds % _MINUTE)


def _part_of_minute(unit: str, microseconds: int) -> Decimal | None:
    scale = {"second": 6, "milliseconds": 3, "microseconds": 0}.get(unit)
    return None if scale is None else Decimal(microseconds).scaleb(-scale)


def _sized(year: int, size: int) -> int:
    return (year + size - 1) // size if year > 0 else -((size - 1 - (year - 1)) // size)


def _part_of_date(unit: str, days: int) -> int | None:
    year, month, day = calendar_date(days)
    shown = year if year > 0 else year - 1
    if unit in {"day", "month", "year", "quarter"}:
        return {"day": day, "month": month, "year": shown, "quarter": (month - 1) // 3 + 1}[unit]
    if unit in {"week", "isoyear"}:
        iso_year, week = _iso_week(days)
        return week if unit == "week" else iso_year if iso_year > 0 else iso_year - 1
    if unit == "decade":
        return year // 10
    if unit in {"century", "millennium"}:
        return _sized(year, 100 if unit == "century" else 1000)
    if unit in {"dow", "isodow"}:
        weekday = (days + 6) % 7
        return weekday if unit == "dow" or weekday else 7
    if unit == "doy":
        return days - _julian_days(year, 1, 1) + 1
    return None


def _infinite_part(unit: str, known: bool, sign: int, of: str) -> Number | None:
    if not known:
        raise _not_known(unit, of)
    return (sign, Decimal(0)) if unit in _FOREVER else None


_DATE_UNITS: Final = frozenset(
    {"day", "month", "year", "quarter", "week", "isoyear", "decade", "century", "millennium", "dow", "isodow", "doy"}
)


def _extract_timestamp(unit: str, timestamp: int) -> Number | None:
    of = "timestamp without time zone"
    if timestamp in _I8:
        known = unit in _DATE_UNITS | _OF_TIME | {"epoch", "julian"}
        return _infinite_part(unit, known, 1 if timestamp > 0 else -1, of)
    days, time = divmod(timestamp, _DAY)
    if unit == "epoch":
        return 0, Decimal(timestamp + _UNIX_EPOCH * _SECOND).scaleb(-6)
    if unit == "julian":
        return 0, EXACT.add(Decimal(days + _EPOCH_JULIAN), quotient(Decimal(time), Decimal(_DAY)))
    value = _part_of_day(unit, time) if unit in _OF_TIME else _part_of_date(unit, days)
    if value is None:
        raise _not_known(unit, of)
    return 0, Decimal(value)


def _extract_date(unit: str, day: int) -> Number | None:
    if unit in _OF_TIME:
        raise PubsubError(f'unit "{unit}" not supported for type date', sqlstate="0A000")
    if day in _I4:
        return _infinite_part(unit, unit in _DATE_UNITS | {"epoch", "julian"}, 1 if day > 0 else -1, "date")
    if unit == "epoch":
        return 0, Decimal(day * 86400 + _UNIX_EPOCH)
    if unit == "julian":
        return 0, Decimal(day + _EPOCH_JULIAN)
    value = _part_of_date(unit, day)
    if value is None:
        raise _not_known(unit, "date")
    return 0, Decimal(value)


def _extract_time(unit: str, time: int) -> Number:
    value = Decimal(time).scaleb(-6) if unit == "epoch" else _part_of_day(unit, time)
    if value is None:
        raise _not_known(unit, "time without time zone")
    return 0, value


def _extract_interval(unit: str, span: Interval) -> Number | None:
    if _is_infinite(span):
        return ((1 if span.time > 0 else -1), Decimal(0)) if unit in _FOREVER | {"hour", "day"} else None
    years, months = toward_zero(span.month, 12)
    hours, rest = toward_zero(span.time, _HOUR)
    minutes, rest = toward_zero(rest, _MINUTE)
    if unit == "epoch":
        # Years of 365.25 days, months of 30.
        seconds = years * (36525 * 864) + months * (30 * 86400) + span.day * 86400
        return 0, Decimal(seconds * _SECOND + span.time).scaleb(-6)
    if unit in {"quarter", "week"}:
        raise FeatureNotSupported(f'unit "{unit}" of an interval is not supported in a row filter')  # versions differ
    sizes = {"decade": 10, "century": 100, "millennium": 1000}
    if size := sizes.get(unit):
        return 0, Decimal(toward_zero(years, size)[0])
    whole = {"year": years, "month": months, "day": span.day, "hour": hours, "minute": minutes}.get(unit)
    if whole is not None:
        return 0, Decimal(whole)
    part = _part_of_minute(unit, rest)
    if part is None:
        if unit in _DATE_UNITS | {"julian"}:
            raise PubsubError(f'unit "{unit}" not supported for type interval', sqlstate="0A000")
        raise _not_known(unit, "interval")
    return 0, part


_EXTRACT: Final[dict[int, Callable[[str, Any], Number | None]]] = {
    _DATE: _extract_date,
    _TIME: _extract_time,
    _TIMESTAMP: _extract_timestamp,
    _INTERVAL: _extract_interval,
}


def _extract(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    part = _EXTRACT.get(types[1])
    return None if part is None else lambda unit, value: part(_unit(unit), value)


def _date_part(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    part = _EXTRACT.get(types[1])
    if part is None:
        return None

    def applied(unit: bytes, value: Any) -> Number | None:
        found = part(_unit(unit), value)
        return None if found is None else float_number(plain_float(found))

    return applied


# Functions by name


def _for(kind: int, function: FixedFunction) -> Maker:
    """Make a function of one argument, of type `kind`."""
    return lambda types, _: function if types[0] == kind and len(types) == 1 else None


def _is_finite(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    infinite = {_DATE: _I4, _TIMESTAMP: _I8, _TIMESTAMPTZ: _I8, _INTERVAL: _INFINITE}.get(types[0])
    return None if infinite is None else lambda value: value not in infinite


def _truncating(types: tuple[int, ...], _: Settings) -> FixedFunction | None:
    return _truncated if types[1] == _TIMESTAMP and len(types) == 2 else None


def _crossed(holds: Callable[[Any, Any], bool]) -> tuple[FixedFunction, FixedFunction]:
    """Compare a date with a timestamp, and a timestamp with a date; a date may lie past all timestamps."""

    def wide(day: int) -> int:
        return _I8[day > 0] if day in _I4 else day * _DAY

    def key(timestamp: int) -> tuple[int, int]:
        return (timestamp > 0) - (timestamp < 0) if timestamp in _I8 else 0, timestamp

    def from_date(day: int, timestamp: int) -> bool:
        return holds(key(wide(day)), key(timestamp))

    def from_timestamp(timestamp: int, day: int) -> bool:
        return holds(key(timestamp), key(wide(day)))

    return from_date, from_timestamp


FUNCTIONS: Final[dict[str, Maker]] = {
    "date_pli": fixed(_date_plus),
    "date_mii": fixed(lambda day, count: _date_plus(day, -count)),
    "integer_pl_date": fixed(lambda count, day: _date_plus(day, count)),
    "date_mi": fixed(_date_minus),
    "date_pl_interval": fixed(lambda day, span: _plus_interval(_date_to_timestamp(day), span)),
    "date_mi_interval": fixed(lambda day, span: _minus_interval(_date_to_timestamp(day), span)),
    "interval_pl_date": fixed(lambda span, day: _plus_interval(_date_to_timestamp(day), span)),
    "timestamp_pl_interval": fixed(_plus_interval),
    "timestamp_mi_interval": fixed(_minus_interval),
    "interval_pl_timestamp": fixed(lambda span, timestamp: _plus_interval(timestamp, span)),
    "timestamp_mi": _timestamp_minus,
    "timestamptz_mi": _timestamp_minus,
    "time_pl_interval": fixed(lambda time, span: (time + span.time) % _DAY),
    "interval_pl_time": fixed(lambda span, time: (time + span.time) % _DAY),
    "time_mi_interval": fixed(lambda time, span: (time - span.time) % _DAY),
    "time_mi_time": fixed(lambda a, b: Interval(a - b, 0, 0)),
    "datetime_pl": fixed(lambda day, time: _plus_interval(_date_to_timestamp(day), Interval(time, 0, 0))),
    "interval_pl": fixed(_combined(1)),
    "interval_mi": fixed(_combined(-1)),
    "interval_um": fixed(_negated),
    "date": _for(_TIMESTAMP, _timestamp_to_date),
    "time": _for(_TIMESTAMP, lambda timestamp: None if timestamp in _I8 else timestamp % _DAY),
    "timestamp": _for(_DATE, _date_to_timestamp),
    "isfinite": _is_finite,
    "date_trunc": _truncating,
    "extract": _extract,
    "date_part": _date_part,
    **{f"date_{name}_timestamp": fixed(_crossed(holds)[0]) for name, holds in COMPARE.items()},
    **{f"timestamp_{name}_date": fixed(_crossed(holds)[1]) for name, holds in COMPARE.items()},
}
