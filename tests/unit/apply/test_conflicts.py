"""Messages about conflicts: PostgreSQL 18's words, with the LSN and the key."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from apply.batch import Batch, OpenTransaction
from apply.conflicts import Conflicts, ConflictType, UniqueViolation, judge
from apply.staging.fold import SHOWN, fold
from pubsub.delta.writers.changeset import OURS, THEIRS
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.rows import OLD_KEY, OLD_ROW, Changes
from tests.support.captured_logs import captured_logs
from tests.support.memory import Holding

COLUMNS = {"a": pa.int64(), "b": pa.string(), "v": pa.string()}


def changes(
    *sent: tuple[str, tuple[object, ...] | None, tuple[object, ...] | None], old_kind: int = OLD_KEY
) -> Changes:
    """Make changes (op, old key or row, new row) of a table with the key (a, b)."""
    return Changes(
        np.arange(len(sent)),
        np.frombuffer("".join(op for op, _, _ in sent).encode(), np.uint8),
        {
            name: pa.array([new[i] if new else None for _, _, new in sent], kind)
            for i, (name, kind) in enumerate(COLUMNS.items())
        },
        {},
        np.array([old_kind if old else 0 for _, old, _ in sent], np.uint8),
        {
            name: pa.array([old[i] if old else None for _, old, _ in sent], kind)
            for i, (name, kind) in enumerate(COLUMNS.items())
            if i < 2 or old_kind == OLD_ROW
        },
    )


def batch(rows: int) -> Batch:
    found = Batch({})
    found.add(OpenTransaction(7, Lsn(0x50), 0, rows=[b""] * rows), Lsn(0x60), 0.0)
    return found


def judged(sent: Changes, key: list[str] | None, rows: int) -> Conflicts:
    nothing = Holding(Counter(), [0, 1])
    return judge(fold(sent, key, full=True, present=nothing), batch(rows), "public.t", "pg_5")


def test_missing_rows_are_counted_and_logged() -> None:
    sent = changes(("U", None, (1, "x", None)), ("U", (2, "y"), (3, "y", "v")), ("D", (4, "z"), None))
    found = judged(sent, ["a", "b"], 3)
    assert found.counts == {ConflictType.UPDATE_MISSING: 2, ConflictType.DELETE_MISSING: 1}
    with captured_logs() as logs:
        found.report("public.t")
    assert {(entry["event"], entry["relation"]) for entry in logs} == {("conflict was detected", "public.t")}
    assert [entry["reason"] for entry in logs] == [
        'conflict detected on relation "public.t": conflict=update_missing',
        'conflict detected on relation "public.t": conflict=update_missing',
        'conflict detected on relation "public.t": conflict=delete_missing',
    ]
    assert [entry["detail"] for entry in logs] == [
        "Could not find the row to be updated.\nRemote row (1, x, null); replica identity (a, b)=(1, x).",
        "Could not find the row to be updated.\nRemote row (3, y, v); replica identity (a, b)=(2, y).",
        "Could not find the row to be deleted.\nReplica identity (a, b)=(4, z).",
    ]
    assert {entry["lsn"] for entry in logs} == {"0/50"}
    assert logs[2]["context"] == (
        'processing remote data for replication origin "pg_5" during message type "DELETE" for replication target relation '
        '"public.t" in transaction 7, finished at 0/50'
    )


def test_only_the_first_of_many_conflicts_are_shown() -> None:
    found = judged(changes(*(("D", (number, "x"), None) for number in range(100))), ["a", "b"], 100)
    assert found.counts[ConflictType.DELETE_MISSING] == 100
    with captured_logs() as logs:
        found.report("public.t")
    assert len(logs) == SHOWN + 1
    assert logs[-1]["count"] == 100 - SHOWN


def test_without_a_key_the_whole_row_is_the_identity() -> None:
    found = judged(changes(("U", (1, "x", None), (2, "x", None)), old_kind=OLD_ROW), None, 1)
    (text,) = found.texts
    assert text["detail"] == (
        "Could not find the row to be updated.\nRemote row (2, x, null); replica identity full (1, x, null)."
    )


def test_existing_rows_stop_an_insert_or_update() -> None:
    sent = changes(("I", None, (1, "x", "new")), ("I", None, (2, "x", "w")), ("U", (2, "x"), (1, "x", "moved")))
    with pytest.raises(UniqueViolation) as raised:
        judged(sent, ["a", "b"], 3)
    error = raised.value
    assert error.message == 'conflict detected on relation "public.t": conflict=update_exists'
    assert error.detail == (
        "Key already exists in the Delta table.\nKey (a, b)=(1, x); remote row (1, x, moved); replica identity (a, b)=(2, x)."
    )
    assert error.hint is not None
    assert "SKIP (lsn = '0/50')" in error.hint
    assert (error.sqlstate, error.conflict, error.finish_lsn) == ("23505", ConflictType.UPDATE_EXISTS, 0x50)


def test_rows_of_other_writers_are_origin_conflicts() -> None:
    class Theirs(Holding):
        def keys(self, keys: Any) -> Any:
            return np.array([THEIRS if key < 10 else OURS for key in keys.column("a").to_pylist()])

    sent = changes(
        ("U", None, (1, "x", "v")),
        ("U", None, (1, "x", "w")),
        ("D", (2, "x"), None),
        ("U", (3, "x"), (3, "x", "v")),
        ("U", None, (11, "x", "v")),
    )
    found = judge(fold(sent, ["a", "b"], full=True, present=Theirs(Counter(), [0, 1])), batch(5), "public.t", "pg_5")
    assert found.counts == {ConflictType.UPDATE_ORIGIN_DIFFERS: 2, ConflictType.DELETE_ORIGIN_DIFFERS: 1}
    updating = "Updating the row that was modified by another writer of the Delta table.\nRemote row "
    assert [text["detail"] for text in found.texts] == [
        f"{updating}(1, x, v); replica identity (a, b)=(1, x).",
        "Deleting the row that was modified by another writer of the Delta table.\nReplica identity (a, b)=(2, x).",
        f"{updating}(3, x, v); replica identity (a, b)=(3, x).",
    ]
