"""Format values as PostgreSQL's output functions do, and for JSON."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

_EXACT: Final = 1 << 53
#: Characters that make a terminal do something, or reorder what is written after them; as their pictures, or U+FFFD.
_UNPRINTABLE: Final = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    **dict.fromkeys(
        [*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A)],
        0xFFFD,
    ),
}
_NEEDS_QUOTES: Final = frozenset('{}",\\ \t\n\r\v\f')


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says: not py4j's "An error occurred while calling o70.save.", but the next one.

    An error that says nothing gives its type's name.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling "):
        del lines[0]
    return lines[0].removeprefix(": ") if lines else type(error).__name__


def text(value: object) -> str:
    """Format a value as PostgreSQL prints it; None, for NULL, gives the empty string."""
    match value:
        case None:
            return ""
        case bool():
            return "t" if value else "f"
        case float():
            return _float(value)
        case bytes():
            return "\\x" + value.hex()
        case datetime():
            shown = value.astimezone(UTC) if value.tzinfo is not None else value
            return _fraction(shown.replace(tzinfo=None), "") + ("+00" if value.tzinfo is not None else "")
        case date():
            return value.isoformat()
        case tuple() | list():
            return "{" + ",".join(map(_element, value)) + "}"
        case dict():
            return json.dumps(plain(value), ensure_ascii=False)
        case Decimal():
            return format(value, "f") if value.is_finite() else str(value)
        case _:
            return str(value)


class Single(float):
    """A real: the double whose shortest text is also the shortest one that denotes the real."""


def _float(value: float) -> str:
    """Follows float.c (float8out_internal) and d2s.c, f2s.c: from how many digits on there is an exponent."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    shown = float.__repr__(value)
    digits = 6 if isinstance(value, Single) else 15
    if "e" not in shown and abs(value) >= 10**digits:
        mantissa = shown.removesuffix(".0").lstrip("-").replace(".", "").rstrip("0")
        exponent = len(shown.lstrip("-").partition(".")[0]) - 1
        point = "." if len(mantissa) > 1 else ""
        return f"{'-' if value < 0 else ''}{mantissa[0]}{point}{mantissa[1:]}e+{exponent:02}"
    return shown.removesuffix(".0")


def _fraction(value: datetime, suffix: str) -> str:
    shown = value.isoformat(" ")
    return (shown.rstrip("0") if "." in shown else shown) + suffix


def _element(value: object) -> str:
    """Format an element of an array (arrayfuncs.c: array_out)."""
    if value is None:
        return "NULL"
    shown = text(value)
    if isinstance(value, tuple | list):
        return shown
    if not shown or shown.upper() == "NULL" or _NEEDS_QUOTES & set(shown):
        return '"' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shown


def plain(value: object) -> Any:
    """Convert a value to one that json.dumps takes; numbers that a double cannot hold exactly become strings."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if -_EXACT <= value <= _EXACT else str(value)
        case float():
            return value if math.isfinite(value) else text(value)
        case Decimal():
            return _number(value)
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z") if value.tzinfo else value.isoformat()
        case date() | time():
            return value.isoformat()
        case timedelta():
            return str(value)
        case tuple() | list():
            return [plain(one) for one in value]
        case dict():
            return {str(key): plain(one) for key, one in value.items()}
        case _:
            return text(value)


def _number(value: Decimal) -> int | float | str:
    if not value.is_finite():
        return str(value)
    if value == value.to_integral_value():
        return int(value) if abs(value) <= _EXACT else format(value, "f")
    # A number is safe as a double if the shortest text of the nearest double denotes the same number.
    return float(value) if Decimal(repr(float(value))) == value else format(value, "f")


def printable(value: str) -> str:
    """Return a text that a terminal may show: other control characters than tab and newline are replaced."""
    return value.translate(_UNPRINTABLE)
