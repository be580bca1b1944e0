"""A table with the option where has, after any changes, the rows that meet its condition, whatever the publisher sends of old rows."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apply.staging.destination import Reading
from apply.staging.matching_rows import matching, settled
from pubsub.delta.table import TargetTable
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.ids import Oid
from pubsub.protocol.pgoutput import COLUMN_IN_REPLICA_IDENTITY, Column, Relation
from pubsub.protocol.rows import DELETE, INSERT, OLD_KEY, OLD_ROW, UPDATE, Changes
from pubsub.row_filters import RowFilter
from pubsub.sql.row_conditions import RowCondition

SCHEMA = pa.schema([pa.field("id", pa.int32(), False), ("n", pa.int32()), ("big", pa.string())])
Row = tuple[int, int | None, str | None]
#: What may happen: the kind, the key, and what the row gets; the last says whether the large value stays as it is, unsent.
EVENTS = st.tuples(
    st.sampled_from("IUUUD"),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.booleans(),
)


def table(condition: str) -> TargetTable:
    where = RowFilter(condition, tuple((name, name, 23) for name in RowCondition.parse(condition).columns))
    return TargetTable("/t", SCHEMA, ("id",), "public.t", where=where, closed=True)


def relation(identity: str) -> Relation:
    columns = tuple(
        Column(COLUMN_IN_REPLICA_IDENTITY * (identity == "f" or name == "id"), name, Oid(oid), -1)
        for name, oid in (("id", 23), ("n", 23), ("big", 25))
    )
    return Relation(Oid(1), "public", "t", identity, columns)  # type: ignore[arg-type]


class Holds:
    """Looks keys up in rows."""

    def __init__(self, rows: dict[int, Row]) -> None:
        self._rows = rows

    def keys(self, keys: pa.Table) -> Indices:
        return np.array([int(key in self._rows) for key in keys.column("id").to_pylist()], np.int64)

    def copies(self, rows: pa.Table) -> Indices:
        raise AssertionError


def publish(
    rows: dict[int, Row], wanted: list[tuple[str, int, int, int | None, bool]], full: bool
) -> list[dict[str, Any]]:
    """Carry out what can be, and return what a publisher sends of it."""
    sent: list[dict[str, Any]] = []
    for kind, key, other, n, stays in wanted:
        old = rows.get(key)
        if kind == "I" and old is None:
            rows[key] = (key, n, f"big {len(sent)}")
            sent.append({"op": INSERT, "new": rows[key], "old": None, "unsent": False})
        elif kind == "D" and old is not None:
            del rows[key]
            sent.append({"op": DELETE, "new": (None,) * 3, "old": old if full else (key, None, None), "unsent": False})
        elif kind == "U" and old is not None:
            to = other if other not in rows else key
            new: Row = (to, n, old[2] if stays else f"big {len(sent)}")
            del rows[key]
            rows[to] = new
            before = old if full else (key, None, None) if to != key else None
            shown = new if full or not stays else (to, n, None)
            sent.append({"op": UPDATE, "new": shown, "old": before, "unsent": stays and not full})
    return sent


def changes_of(sent: list[dict[str, Any]], full: bool) -> Changes:
    def columns(which: str) -> dict[str, pa.Array]:
        values = [one[which] or (None,) * 3 for one in sent]
        return {field.name: pa.array([row[place] for row in values], field.type) for place, field in enumerate(SCHEMA)}

    unsent = np.array([one["unsent"] for one in sent], np.bool_)
    kinds = [0 if one["old"] is None else OLD_ROW if full else OLD_KEY for one in sent]
    return Changes(
        np.arange(len(sent)),
        np.array([one["op"] for one in sent], np.uint8),
        columns("new"),
        {"big": unsent} if unsent.any() else {},
        np.array(kinds, np.uint8),
        columns("old") if any(kinds) else {},
    )


def applied(rows: dict[int, Row], changes: Changes) -> None:
    """Apply changes of which each must find the row that it changes, and no row where one comes."""
    new = [tuple(row) for row in zip(*(changes.new[name].to_pylist() for name in SCHEMA.names), strict=True)]
    old = changes.old["id"].to_pylist() if "id" in changes.old else [None] * changes.count
    unsent = changes.unchanged.get("big", np.zeros(changes.count, np.bool_))
    for place, op in enumerate(changes.op.tolist()):
        row: Any = new[place]
        left = old[place] if changes.old_kind[place] else row[0]
        if op == INSERT:
            assert row[0] not in rows
            assert not unsent[place]
        else:
            before = rows.pop(left)
            if unsent[place]:
                row = (row[0], row[1], before[2])
        if op != DELETE:
            assert row[0] not in rows
            rows[row[0]] = row


CONDITIONS = {
    "n >= 2": lambda row: row[1] is not None and row[1] >= 2,
    "n IS NULL OR id = 1": lambda row: row[1] is None or row[0] == 1,
    "id IN (1, 2)": lambda row: row[0] in (1, 2),
    "NOT (n = 1)": lambda row: row[1] is not None and row[1] != 1,
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("identity", ["f", "d"])
@given(
    copied=st.lists(st.sampled_from([None, 0, 1, 2, 3]), max_size=4),
    batches=st.lists(st.lists(EVENTS, max_size=8), max_size=3),
)
def test_the_rows_that_meet_the_condition(
    condition: str, identity: str, copied: list[int | None], batches: list[Any]
) -> None:
    """Batch by batch.  Under FULL nothing is looked up; else a row that comes incomplete is refused, and no other."""
    publisher: dict[int, Row] = {key: (key, n, "copied") for key, n in enumerate(copied)}
    here = {key: row for key, row in publisher.items() if CONDITIONS[condition](row)}
    target, message, full = table(condition), relation(identity), identity == "f"
    told = full or condition == "id IN (1, 2)"
    reading = Reading(tuple(SCHEMA), {})
    for wanted in batches:
        sent = publish(publisher, wanted, full)
        meets = {key: row for key, row in publisher.items() if CONDITIONS[condition](row)}
        refused = nullcontext() if full else suppress(NotInPrerequisiteState)
        found = None
        with refused:
            of_rows = matching(changes_of(sent, full), message, reading, target)
            found = of_rows if told else settled(of_rows, target, Holds(here))
        if found is None:
            assert any(one["unsent"] for one in sent)
            return
        if not told:
            assert set(found.old) <= {"id"}
        applied(here, found)
        assert here == meets
