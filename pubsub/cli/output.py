"""Format rows: as psql prints them, as CSV, as JSON.

In tables and CSV, values are PostgreSQL's text (t and f, \\x…, {a,b}).  In JSON they are JSON's own types where these
hold them exactly: a number that a double cannot hold, NaN and the infinities are strings, times are ISO 8601 in UTC.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from enum import StrEnum

from pubsub.texts import plain, text


class Format(StrEnum):
    """The values of --format."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def render(columns: Sequence[str], rows: Sequence[Sequence[object]], output: Format) -> str:
    """Format a query's answer, with a newline at its end."""
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


def _csv_field(field: str | None) -> str:
    """Quote a field where needed.  As in COPY … (FORMAT csv), NULL is empty and an empty string is quoted."""
    if field is None:
        return ""
    if not field or any(character in field for character in '",\n\r') or field != field.strip():
        return '"' + field.replace('"', '""') + '"'
    return field


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of psql's aligned format; a value with a newline continues on the next line, after a plus."""
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


def render_expanded(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as psql's expanded format does: a block for each row, a line for each column.

    Follows print.c: print_aligned_vertical.
    """
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
    """Return the length of the longest line."""
    return max(map(len, shown.splitlines()), default=0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)
