"""Dates, times and intervals in datestyle ISO and intervalstyle postgres, timestamptz in UTC; styles.py has the others.

Follows datetime.c (EncodeDateTime, EncodeDateOnly, EncodeTimeOnly, EncodeInterval, j2date), date.c, timestamp.c.
"""

from __future__ import annotations

import functools
from struct import Struct
from typing import Final

_I4: Final = Struct("<i").unpack
_I8: Final = Struct("<q").unpack
_TIMETZ: Final = Struct("<qi")
INTERVAL: Final = Struct("<qii")
"""Microseconds, days, months."""

_EPOCH_JULIAN: Final = 2451545
_DAY: Final = 86_400_000_000
_I4_MAX: Final = 2**31 - 1
_I4_MIN: Final = -(2**31)
_I8_MAX: Final = 2**63 - 1
_I8_MIN: Final = -(2**63)


def date_out(value: bytes) -> bytes:
    return date_text(_I4(value)[0])


def time_out(value: bytes) -> bytes:
    return _time(_I8(value)[0]).encode()


def timetz_out(value: bytes) -> bytes:
    microseconds, zone = _TIMETZ.unpack(value)
    return (_time(microseconds) + zone_text(zone)).encode()


def timestamp_out(value: bytes) -> bytes:
    return _timestamp(value, "")


def timestamptz_out(value: bytes) -> bytes:
    return _timestamp(value, "+00")


def date_text(days: int) -> bytes:
    """Write a date from its number of days since 2000-01-01."""
    if days == _I4_MAX:
        return b"infinity"
    if days == _I4_MIN:
        return b"-infinity"
    text, era = _date(days)
    return (text + era).encode()


def time_text(microseconds: int) -> bytes:
    """Write a time of day from its number of microseconds."""
    return _time(microseconds).encode()


def timestamp_text(microseconds: int, zone: str = "") -> bytes:
    """Write a timestamp from its number of microseconds since 2000-01-01, followed by `zone`."""
    return _timestamp_text(microseconds, zone)


def timestamptz_text(microseconds: int) -> bytes:
    """Write a timestamp with time zone from its number of microseconds since 2000-01-01 UTC, in UTC."""
    return _timestamp_text(microseconds, "+00")


def _timestamp(value: bytes, zone: str) -> bytes:
    return _timestamp_text(_I8(value)[0], zone)


def _timestamp_text(microseconds: int, zone: str) -> bytes:
    if microseconds == _I8_MAX:
        return b"infinity"
    if microseconds == _I8_MIN:
        return b"-infinity"
    days, rest = divmod(microseconds, _DAY)
    text, era = _date(days)
    return f"{text} {_time(rest)}{zone}{era}".encode()


def calendar_date(days: int) -> tuple[int, int, int]:
    """Convert days since 2000-01-01 to year, month, day of the proleptic Gregorian calendar; the year before 1 is 0."""
    # Julian day to date (datetime.c: j2date), in whole 400-year cycles.
    julian = days + _EPOCH_JULIAN + 32044
    quad, extra = divmod(julian, 146097)
    century = min(extra // 36524, 3)
    extra -= century * 36524
    four, extra = divmod(extra, 1461)
    year_in_four = min(extra // 365, 3)
    day_of_year = extra - year_in_four * 365
    month_index = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_index + 2) // 5 + 1
    month = month_index + 3 if month_index < 10 else month_index - 9
    year = quad * 400 + century * 100 + four * 4 + year_in_four - 4800 + (month <= 2)
    return year, month, day


@functools.lru_cache(4096)
def _date(days: int) -> tuple[str, str]:
    """Write days since 2000-01-01 as a date; return it and the era: " BC" before the year 1."""
    year, month, day = calendar_date(days)
    if year > 0:
        return f"{year:04d}-{month:02d}-{day:02d}", ""
    return f"{1 - year:04d}-{month:02d}-{day:02d}", " BC"


@functools.lru_cache(86_401)
def _clock(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}"


def _time(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    text = _clock(seconds)
    return text + f".{fraction:06d}".rstrip("0") if fraction else text


def zone_text(west: int) -> str:
    """Write a zone's offset, given in seconds west of Greenwich (EncodeTimezone)."""
    sign = "-" if west > 0 else "+"
    minutes, second = divmod(abs(west), 60)
    hour, minute = divmod(minutes, 60)
    if second:
        return f"{sign}{hour:02d}:{minute:02d}:{second:02d}"
    return f"{sign}{hour:02d}:{minute:02d}" if minute else f"{sign}{hour:02d}"


def interval_out(value: bytes) -> bytes:
    time, day, month = INTERVAL.unpack(value)
    if is_infinite_interval(time, day, month):
        return b"infinity" if time > 0 else b"-infinity"
    years, months = toward_zero(month, 12)
    parts: list[str] = []
    negative_before = False
    for count, unit in ((years, "year"), (months, "mon"), (day, "day")):
        if not count:
            continue
        sign = "+" if negative_before and count > 0 else ""
        parts.append(f"{sign}{count} {unit}{'' if count == 1 else 's'}")
        negative_before = count < 0
    if not parts or time:
        seconds, fraction = divmod(abs(time), 1_000_000)
        minutes, second = divmod(seconds, 60)
        hour, minute = divmod(minutes, 60)
        sign = "-" if time < 0 else "+" if negative_before else ""
        text = f"{sign}{hour:02d}:{minute:02d}:{second:02d}"
        parts.append(text + f".{fraction:06d}".rstrip("0") if fraction else text)
    return " ".join(parts).encode()


def is_infinite_interval(time: int, day: int, month: int) -> bool:
    """Whether the interval is infinity or -infinity (timestamp.h: INTERVAL_NOT_FINITE)."""
    return (time, day, month) in {(_I8_MAX, _I4_MAX, _I4_MAX), (_I8_MIN, _I4_MIN, _I4_MIN)}


def toward_zero(value: int, by: int) -> tuple[int, int]:
    """Divide as in C: return the quotient, rounded toward zero, and the remainder."""
    quotient = abs(value) // by
    if value < 0:
        quotient = -quotient
    return quotient, value - quotient * by


def interval_send(value: bytes) -> bytes:
    time, day, month = INTERVAL.unpack(value)
    return Struct(">qii").pack(time, day, month)


def timetz_send(value: bytes) -> bytes:
    return Struct(">qi").pack(*_TIMETZ.unpack(value))
