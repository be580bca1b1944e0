"""Texts that depend on a session's settings: TimeZone, DateStyle, IntervalStyle, extra_float_digits, bytea_output.

Follows datetime.c (EncodeDateOnly, EncodeDateTime, EncodeInterval), timestamp.c (timestamp2tm), localtime.c (localsub,
whose rules repeat after 400 years), float.c (float8out_internal with extra_float_digits <= 0), bytea.c (byteaout).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Final

from pubsub.protocol.output import geometry, texts, times

Output = Callable[[bytes], bytes]

REPEAT: Final = 146_097 * 86_400
"""Seconds in 400 years, after which the calendar repeats."""
_EPOCH: Final = 946_684_800
"""2000-01-01 in seconds since 1970."""
_DAY: Final = 86_400_000_000
_I8: Final = Struct("<q").unpack
_I4: Final = Struct("<i").unpack
_F4: Final = Struct("<f").unpack
_F8: Final = Struct("<d").unpack
_FOREVER: Final = frozenset((2**63 - 1, -(2**63)))
"""infinity and -infinity."""
_DAYS: Final = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True, slots=True)
class TimeZone:
    """A time zone's offsets (seconds east of Greenwich) and abbreviations.

    `offsets[i]` and `names[i]` hold from `since[i]` on, in seconds since 1970, ascending.  From `end` on, the 400 years
    before `end` repeat.  Before `since[0]`, a zone that `is_rule` (one rule at all times) repeats the 400 years after
    it; any other zone has the first offset and name.
    """

    since: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ("UTC",)
    end: int = 1 << 62
    is_rule: bool = False

    @property
    def is_utc(self) -> bool:
        """Whether ISO text, which omits the abbreviation, is the same as in UTC."""
        return self.offsets == (0,)

    def at(self, seconds: int) -> tuple[int, str]:
        """Return the offset and abbreviation at a time in seconds since 1970."""
        if seconds >= self.end:
            seconds -= ((seconds - self.end) // REPEAT + 1) * REPEAT
        elif seconds < self.since[0] and self.is_rule:
            seconds += -((seconds - self.since[0]) // REPEAT) * REPEAT
        number = max(bisect_right(self.since, seconds) - 1, 0)
        return self.offsets[number], self.names[number]


@dataclass(frozen=True, slots=True)
class Styles:
    """A session's settings.  `date` is ISO, SQL, German or Postgres; `interval` a value of IntervalStyle."""

    zone: TimeZone = TimeZone()
    date: str = "ISO"
    day_first: bool = False
    """Whether DateStyle has DMY."""
    interval: str = "postgres"
    float_digits: int = 1
    bytea_escape: bool = False

    def outputs(self) -> dict[int, Output]:
        """Return the output functions, by oid, of the built-in types that these settings change.

        The reference is a session with DateStyle ISO, TimeZone UTC, IntervalStyle postgres, extra_float_digits above 0
        and bytea_output hex.
        """
        found: dict[int, Output] = {}
        if self.date != "ISO":
            found[1082] = self.date_out
            found[1114] = self.timestamp_out
        if self.date != "ISO" or not self.zone.is_utc:
            found[1184] = self.timestamptz_out
        if self.interval != "postgres":
            found[1186] = partial(_interval_out, write=_INTERVALS[self.interval])
        if self.float_digits <= 0:
            found[700] = partial(_float_out, unpack=_F4, digits=max(6 + self.float_digits, 1))
            float8out = found[701] = partial(_float_out, unpack=_F8, digits=max(15 + self.float_digits, 1))
            found |= {oid: partial(out, number=float8out) for oid, out in geometry.OUTPUTS.items()}
        if self.bytea_escape:
            found[17] = found[5017] = texts.bytea_escape_out
        return found

    def date_out(self, value: bytes) -> bytes:
        (days,) = _I4(value)
        if days in {2**31 - 1, -(2**31)}:
            return times.date_text(days)
        year, month, day = times.calendar_date(days)
        return (self._numeric(year, month, day) + _era(year)).encode()

    def timestamp_out(self, value: bytes) -> bytes:
        (microseconds,) = _I8(value)
        if microseconds in _FOREVER:
            return times.timestamp_text(microseconds)
        return self._date_time(microseconds, "").encode()

    def timestamptz_out(self, value: bytes) -> bytes:
        if self.date == "ISO":
            return self.timestamptz_iso(value)
        (microseconds,) = _I8(value)
        if microseconds in _FOREVER:
            return times.timestamptz_text(microseconds)
        offset, name = self.zone.at(microseconds // 1_000_000 + _EPOCH)
        return self._date_time(microseconds + offset * 1_000_000, " " + name).encode()

    def timestamptz_iso(self, value: bytes) -> bytes:
        """Write in ISO format in the session's zone, whatever its DateStyle (timestamptz_to_str)."""
        (microseconds,) = _I8(value)
        if self.zone.is_utc or microseconds in _FOREVER:
            return times.timestamptz_text(microseconds)
        offset, _ = self.zone.at(microseconds // 1_000_000 + _EPOCH)
        return times.timestamp_text(microseconds + offset * 1_000_000, times.zone_text(-offset))

    def _date_time(self, microseconds: int, zone: str) -> str:
        days, rest = divmod(microseconds, _DAY)
        year, month, day = times.calendar_date(days)
        clock = times.time_text(rest).decode()
        if self.date == "Postgres":
            date = f"{day:02d} {_MONTHS[month - 1]}" if self.day_first else f"{_MONTHS[month - 1]} {day:02d}"
            return f"{_DAYS[(days + 6) % 7]} {date} {clock} {_year(year)}{zone}{_era(year)}"
        return f"{self._numeric(year, month, day)} {clock}{zone}{_era(year)}"

    def _numeric(self, year: int, month: int, day: int) -> str:
        """Return a date in numbers, without its era."""
        first, second = (day, month) if self.day_first or self.date == "German" else (month, day)
        mark = {"SQL": "/", "German": ".", "Postgres": "-"}[self.date]
        return f"{first:02d}{mark}{second:02d}{mark}{_year(year)}"


def _year(year: int) -> str:
    return f"{year if year > 0 else 1 - year:04d}"


def _era(year: int) -> str:
    return "" if year > 0 else " BC"


def _float_out(value: bytes, unpack: Callable[[bytes], tuple[float]], digits: int) -> bytes:
    (number,) = unpack(value)
    if number != number:
        return b"NaN"
    if number in {math.inf, -math.inf}:
        return b"Infinity" if number > 0 else b"-Infinity"
    return f"{number:.{digits}g}".encode()


Fields = tuple[int, int, int, int, int, int, int]
"""Years, months, days, hours, minutes, seconds, microseconds; years and months share a sign, as do the time fields."""


def _interval_out(value: bytes, write: Callable[[Fields], str]) -> bytes:
    time, day, month = times.INTERVAL.unpack(value)
    if times.is_infinite_interval(time, day, month):
        return times.interval_out(value)
    seconds, fraction = times.toward_zero(time, 1_000_000)
    minutes, second = times.toward_zero(seconds, 60)
    hour, minute = times.toward_zero(minutes, 60)
    return write((*times.toward_zero(month, 12), day, hour, minute, second, fraction)).encode()


def _seconds(second: int, fraction: int, width: int) -> str:
    """Return the seconds without a sign, at least `width` digits before the point (AppendSeconds)."""
    text = f"{abs(second):0{width}d}"
    return text + f".{abs(fraction):06d}".rstrip("0") if fraction else text


def _iso_8601(fields: Fields) -> str:
    if not any(fields):
        return "PT0S"
    *whole, second, fraction = fields
    parts = [f"{number}{unit}" if number else "" for number, unit in zip(whole, "YMDHM", strict=True)]
    parts.insert(3, "T" if any(fields[3:]) else "")
    if second or fraction:
        parts.append(f"{'-' if second < 0 or fraction < 0 else ''}{_seconds(second, fraction, 1)}S")
    return "P" + "".join(parts)


def _sql_standard(fields: Fields) -> str:
    if not any(fields):
        return "0"
    negative = any(number < 0 for number in fields)
    mixed = negative and any(number > 0 for number in fields)
    months, rest = any(fields[:2]), any(fields[2:])
    year, month, day, hour, minute, second, fraction = map(abs, fields)
    clock = f"{hour}:{minute:02d}:{_seconds(second, fraction, 2)}"
    if mixed or (months and rest):
        # One sign for all parts would not be enough: each gets its own.
        signs = ["-" if any(n < 0 for n in part) else "+" for part in (fields[:2], fields[2:3], fields[3:])]
        return f"{signs[0]}{year}-{month} {signs[1]}{day} {signs[2]}{clock}"
    sign = "-" if negative else ""
    if months:
        return f"{sign}{year}-{month}"
    return f"{sign}{day} {clock}" if day else sign + clock


def _postgres_verbose(fields: Fields) -> str:
    *whole, second, fraction = fields
    parts = ["@"]
    ago = False
    for number, unit in zip(whole, ("year", "mon", "day", "hour", "min"), strict=True):
        if not number:
            continue
        # The first part's sign decides whether the interval is "ago".
        if len(parts) == 1:
            ago = number < 0
        shown = -number if ago else number
        parts.append(f"{shown} {unit}{'' if shown == 1 else 's'}")
    if second or fraction:
        below = second < 0 or fraction < 0
        if len(parts) == 1:
            ago = below
        sign = "-" if below != ago else ""
        parts.append(f"{sign}{_seconds(second, fraction, 1)} sec{'' if abs(second) == 1 and not fraction else 's'}")
    if len(parts) == 1:
        parts.append("0")
    return " ".join(parts) + (" ago" if ago else "")


_INTERVALS: Final[dict[str, Callable[[Fields], str]]] = {
    "iso_8601": _iso_8601,
    "sql_standard": _sql_standard,
    "postgres_verbose": _postgres_verbose,
}
