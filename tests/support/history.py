"""Reads a table in mode history as its docs say that it can be read: the publisher's rows as of any LSN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pubsub.delta import change_rows

Row = tuple[Any, ...]


def as_of(rows: Iterable[Mapping[str, Any]], lsn: int, columns: Sequence[str], key: Sequence[str]) -> Counter[Row]:
    """Return the publisher's rows, their `columns`, as of the end of the transaction that ended at or before `lsn`."""
    known = sorted(
        (row for row in rows if row[change_rows.LSN] <= lsn),
        key=lambda row: (row[change_rows.LSN], row[change_rows.SEQ]),
    )
    ops = [row[change_rows.OP] for row in known]
    if key:
        keys = [tuple(row[name] for name in key) for row in known]
        held = newest(ops, keys, [row[change_rows.UNCHANGED] for row in known], columns)
        return Counter(
            tuple(known[number][name] for name, number in zip(columns, numbers, strict=True)) for numbers in held
        )
    found: Counter[Row] = Counter()
    for row in known[since_emptied(ops) :]:
        values = tuple(row[name] for name in columns)
        found[values] += 1 if row[change_rows.OP] in "RIU" else -1
        assert found[values] >= 0, f"{row} has no row"
    return +found


def since_emptied(ops: Sequence[str]) -> int:
    """Return the number of the first change that counts: the one after the last `T`."""
    return max((number + 1 for number, op in enumerate(ops) if op == "T"), default=0)


def newest(
    ops: Sequence[str], keys: Sequence[Row], unchanged: Sequence[Sequence[str] | None], columns: Sequence[str]
) -> list[list[int]]:
    """Return, for each row that the changes end with and each of its columns, the number of the change with its value.

    Raises AssertionError if a change follows none that it needs.
    """
    held: dict[Row, list[int]] = {}
    moved: list[int] | None = None
    for number in range(since_emptied(ops), len(ops)):
        op, at = ops[number], keys[number]
        whole = [number] * len(columns)
        if op in "RI":
            assert at not in held, f"change {number}, {op} of {at}, which is there"
            held[at] = whole
        elif op in "OD":
            assert at in held, f"change {number}, {op} of {at}, which is not there"
            gone = held.pop(at)
            moved = gone if op == "O" else moved
        else:
            before, moved = held.get(at, moved), None
            assert before is not None, f"change {number}, {op} of {at}, which is not there"
            same = set(unchanged[number] or ())
            held[at] = [old if name in same else new for name, old, new in zip(columns, before, whole, strict=True)]
    return list(held.values())
