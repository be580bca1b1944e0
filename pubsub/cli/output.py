"""Rows as text: as psql prints them, as CSV, as JSON.

In tables and CSV values are PostgreSQL's text (t and f, \\x…, {a,b}); in JSON they are JSON's own where it has them
exactly: a number that a double can not hold, NaN and the infinities are text, times are ISO 8601 in UTC.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

_EXACT: Final = 1 << 53
_NEEDS_QUOTES: Final = frozenset('{}",\\ \t\n\r\v\f')


class Format(StrEnum):
    """--format"""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def render(columns: Sequence[str], rows: Sequence[Sequence[Any]], output: Format) -> str:
    """A query's answer, with a newline at its end."""
    match output:
        case Format.TABLE:
            return "\n".join(_table(columns, rows)) + "\n"
        case Format.CSV:
            lines: list[list[str | None]] = [list(columns)]
            lines += [[None if value is None else text(value) for value in row] for row in rows]
            return "".join(",".join(map(_csv_field, line)) + "\n" for line in lines)
        case Format.JSON:
            names = list(columns)
            documents = [json.dumps(dict(zip(names, map(plain, row), strict=True)), ensure_ascii=False) for row in rows]
            return "[" + ",\n ".join(documents) + "]\n"


def text(value: Any) -> str:
    """A value as PostgreSQL prints it; NULL is empty."""
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


def plain(value: Any) -> Any:
    """A value as json.dumps takes it."""
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
    # What the shortest text of the double nearest to it says again is exact for a reader too.
    return float(value) if Decimal(repr(float(value))) == value else format(value, "f")


def _float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    shown = repr(value)
    return shown.removesuffix(".0")


def _fraction(value: datetime, suffix: str) -> str:
    shown = value.isoformat(" ")
    return (shown.rstrip("0") if "." in shown else shown) + suffix


def _element(value: Any) -> str:
    """arrayfuncs.c: array_out."""
    if value is None:
        return "NULL"
    shown = text(value)
    if isinstance(value, tuple | list):
        return shown
    if not shown or shown.upper() == "NULL" or _NEEDS_QUOTES & set(shown):
        return '"' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shown


def _csv_field(field: str | None) -> str:
    """NULL is nothing, an empty string is quoted: as COPY … (FORMAT csv) tells them apart."""
    if field is None:
        return ""
    if not field or any(character in field for character in '",\n\r') or field != field.strip():
        return '"' + field.replace('"', '""') + '"'
    return field


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """psql's aligned format; a newline in a value goes on in the next line, with a plus sign."""
    right = [
        bool(rows)
        and all(_is_number(row[place]) for row in rows if row[place] is not None)
        and any(row[place] is not None for row in rows)
        for place in range(len(columns))
    ]
    cells = [[text(value).split("\n") for value in row] for row in rows]
    widths = [
        max([len(name), *(len(line) for row in cells for line in row[place])]) for place, name in enumerate(columns)
    ]
    yield "|".join(f" {name:^{width}} " for name, width in zip(columns, widths, strict=True)).rstrip()
    yield "+".join("-" * (width + 2) for width in widths)
    for row in cells:
        height = max(map(len, row), default=1)
        for number in range(height):
            parts = []
            for place, lines in enumerate(row):
                line = lines[number] if number < len(lines) else ""
                more = "+" if number + 1 < len(lines) else " "
                aligned = f"{line:>{widths[place]}}" if right[place] else f"{line:<{widths[place]}}"
                parts.append(f" {aligned}{more}")
            yield "|".join(parts).rstrip()
    yield f"({len(rows)} row{'' if len(rows) == 1 else 's'})"


def render_expanded(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """psql's expanded format: each row a block, each column a line of it (print.c: print_aligned_vertical)."""
    if not rows:
        return "(0 rows)\n"
    cells = [[text(value).split("\n") for value in row] for row in rows]
    names = max(map(len, columns))
    values = max(len(line) for row in cells for lines in row for line in lines)
    lines = []
    for number, row in enumerate(cells, start=1):
        head = f"-[ RECORD {number} ]"
        if len(head) <= names + 1:
            lines.append(f"{head:-<{names + 1}}+{'-' * (values + 1)}")
        else:
            lines.append(f"{head:-<{names + values + 3}}")
        for name, parts in zip(columns, row, strict=True):
            for place, part in enumerate(parts):
                more = place + 1 < len(parts)
                shown = f"{part:<{values}}+" if more else part
                lines.append(
                    f"{name if place == 0 else '':<{names}} | {shown}".rstrip()
                    if not more
                    else f"{name if place == 0 else '':<{names}} | {shown}"
                )
    return "\n".join(lines) + "\n"


def width_of(shown: str) -> int:
    """The longest line's."""
    return max(map(len, shown.splitlines()), default=0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)
