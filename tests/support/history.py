"""Reads a table in mode history as its docs say that it can be read: the publisher's rows as of any LSN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pubsub.delta import change_rows

Row = tuple[Any, ...]


def as_of(rows: Iterable[Mapping[str, Any]], lsn: int, columns: Sequence[str], key: Sequence[str]) -> Counter[Row]:
    """Return the publisher's rows, their `columns`, as of the end of the transaction that ended at or before `lsn`."""
    found: Counter[Row] = Counter()
    held: dict[Row, Row] = {}
    moved: Row | None = None
    known = sorted(
        (row for row in rows if row[change_rows.LSN] <= lsn),
        key=lambda row: (row[change_rows.LSN], row[change_rows.SEQ]),
    )
    begins = max((place + 1 for place, row in enumerate(known) if row[change_rows.OP] == "T"), default=0)
    for row in known[begins:]:
        op, values = row[change_rows.OP], tuple(row[name] for name in columns)
        if not key:
            found[values] += 1 if op in "RIU" else -1
            assert found[values] >= 0, f"{row} has no row"
            continue
        at = tuple(row[name] for name in key)
        if op in "RI":
            assert at not in held, f"{row} comes where {held[at]} is"
            held[at] = values
        elif op == "O":
            moved = held.pop(at)
        elif op == "D":
            del held[at]
        else:
            before, moved = held.get(at, moved), None
            assert before is not None, f"{row} has no row"
            same = set(row[change_rows.UNCHANGED] or ())
            merged = zip(columns, before, values, strict=True)
            held[at] = tuple(old if name in same else new for name, old, new in merged)
    return Counter(held.values()) if key else +found
