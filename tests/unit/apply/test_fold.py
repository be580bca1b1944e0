"""Folding, case by case."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from apply.staging.fold import fold
from pubsub.delta.writers.changeset import BASE_PREFIX, UNCHANGED_PREFIX, Folded
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.rows import Changes

UNSENT = object()
Event = tuple[str, Any, Any] | tuple[str, Any, Any, Any]


def changes(*events: Event, key: Any = None, full: bool = False) -> Changes:
    """Make changes of columns k, v, from number 0: ("I", k, v), ("U", k, v), ("U", k, v, old key), ("D", k, None)."""
    key = key or pa.int64()
    op = np.frombuffer("".join(event[0] for event in events).encode(), np.uint8)
    delete = [event[0] == "D" for event in events]
    old = [event[3] if len(event) == 4 else event[1] if event[0] == "D" else None for event in events]
    unsent = np.array([event[2] is UNSENT for event in events], np.bool_)
    has_old = np.array([value is not None for value in old])
    v = [None if event[2] is UNSENT else event[2] for event in events]
    return Changes(
        np.arange(len(events)),
        op,
        {
            "k": pa.array([None if gone else event[1] for event, gone in zip(events, delete, strict=True)], key),
            "v": pa.array([None if gone else value for value, gone in zip(v, delete, strict=True)], pa.string()),
        },
        {"v": unsent} if unsent.any() else {},
        np.where(has_old, ord("O" if full else "K"), 0).astype(np.uint8),
        {"k": pa.array(old, key), "v": pa.array(v if full else [None] * len(v), pa.string())} if any(has_old) else {},
    )


def keyed(*events: Event, key: Any = None, **options: Any) -> Folded:
    return fold(changes(*events, key=key), ["k"], full=False, **options)


def rows(table: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


def deleted(folded: Folded) -> list[Any]:
    return sorted(folded.deleted_keys.column("k").to_pylist())


def test_the_worked_example_of_the_module() -> None:
    folded = keyed(("I", 7, "a"), ("U", 8, "b", 7), ("U", 8, "c"), ("D", 9, None))
    assert rows(folded.images) == [(8, "c")]
    assert deleted(folded) == [8, 9]
    assert (folded.inserts, folded.updates, folded.deletes) == (1, 2, 1)
    assert not folded.insert_only


def test_inserts_alone_are_appended_as_they_are() -> None:
    sent = changes(("I", 2, "a"), ("I", 1, "b"))
    folded = fold(sent, ["k"], full=False)
    assert folded.insert_only
    assert folded.images.column("v").chunk(0) is not None
    assert folded.images.column("v").chunk(0).buffers()[2].address == sent.new["v"].buffers()[2].address
    assert deleted(folded) == []


def test_a_row_made_in_the_batch_needs_nothing_deleted() -> None:
    folded = keyed(("I", 1, "a"), ("U", 1, "b"), ("I", 2, "c"), ("D", 2, None))
    assert rows(folded.images) == [(1, "b")]
    assert folded.insert_only


def test_delete_and_insert_of_one_key() -> None:
    folded = keyed(("D", 1, None), ("I", 1, "new"))
    assert (rows(folded.images), deleted(folded)) == ([(1, "new")], [1])


def test_swapped_keys_keep_their_unsent_values() -> None:
    folded = keyed(("U", 3, UNSENT, 1), ("U", 1, UNSENT, 2), ("U", 2, UNSENT, 3))
    assert folded.images.num_rows == 0
    assert folded.masked.column_names == ["k", "v", f"{UNCHANGED_PREFIX}1", f"{BASE_PREFIX}0"]
    assert sorted(rows(folded.masked)) == [(1, None, True, 2), (2, None, True, 1)]
    assert deleted(folded) == [1, 2, 3]


def test_unsent_values_come_from_the_batch_where_it_has_them() -> None:
    folded = keyed(("U", 1, "sent"), *[("U", 1, UNSENT)] * 9, ("U", 5, UNSENT, 1), ("U", 2, UNSENT))
    assert rows(folded.images) == [(5, "sent")]
    assert rows(folded.masked) == [(2, None, True, 2)]


def test_masks_are_there_only_for_what_misses() -> None:
    folded = keyed(("I", 1, "a"), ("U", 1, UNSENT))
    assert rows(folded.images) == [(1, "a")]
    assert folded.masked.column_names == ["k", "v", f"{BASE_PREFIX}0"]
    assert folded.masked.num_rows == 0


def test_a_row_that_is_gone_is_not_changed() -> None:
    folded = keyed(("D", 1, None), ("U", 1, "x"), ("U", 2, "y", 1), ("D", 1, None), ("U", 2, "z"))
    assert rows(folded.images) == [(2, "z")]
    # the skipped change did not create 2: the last change is the first of key 2
    assert deleted(folded) == [1, 2]
    chain = keyed(("D", 1, None), ("D", 2, None), ("U", 2, "y", 1), ("U", 3, "z", 2), ("U", 3, "z"))
    assert rows(chain.images) == [(3, "z")]


def test_truncate() -> None:
    folded = keyed(("I", 1, "a"), ("D", 2, None), ("I", 1, "b"), ("U", 3, "lost"), ("D", 4, None), truncate_before=2)
    assert rows(folded.images) == [(1, "b")]
    assert deleted(folded) == []
    assert folded.truncated
    assert (folded.inserts, folded.deletes) == (2, 2)
    last = keyed(("I", 1, "a"), truncate_before=1)
    assert (rows(last.images), last.insert_only, last.truncated) == ([], True, True)
    assert last.images.column_names == ["k", "v"]


def expected_of(folded: Folded) -> tuple[list[Any], ...]:
    assert folded.expected is not None
    keys = folded.expected.standing, folded.expected.free, folded.expected.either
    return tuple(sorted(one.column("k").to_pylist()) for one in keys)


def test_a_row_that_stands_gives_way() -> None:
    """It may have stayed after a TRUNCATE; what the batch itself inserted, too."""
    events = ("I", 1, "a"), ("I", 1, "b"), ("U", 2, UNSENT, 3), ("I", 2, "c"), ("U", 2, "d", 4), ("D", 5, None)
    folded = keyed(*events, gives_way=True)
    assert sorted(rows(folded.images)) == [(1, "b"), (2, "d")]
    assert folded.masked.num_rows == 0
    assert folded.collisions is None
    assert deleted(folded) == [1, 2, 3, 4, 5]
    assert expected_of(folded) == ([3, 4, 5], [], [1, 2])
    assert keyed(*events).collisions is not None
    assert expected_of(keyed(*events)) == ([3, 4, 5], [1, 2], [])


def test_nothing() -> None:
    empty = changes()
    for folded in (fold(empty, ["k"], full=False), fold(empty, None, full=True)):
        assert folded.insert_only
        assert folded.images.num_rows == 0


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_float_keys_are_equal_as_in_postgresql(kind: Any) -> None:
    folded = keyed(("U", -0.0, "a", 0.0), ("U", math.nan, "b"), ("U", math.nan, "c"), ("U", 0.0, "d"), key=kind)
    images = rows(folded.images)
    assert [value for _, value in images] == ["c", "d"]
    assert folded.deleted_keys.num_rows == 2
    kept = keyed(("U", -0.0, "a", 0.0), key=kind)
    assert math.copysign(1, rows(kept.images)[0][0]) == -1


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (pa.decimal128(38, 18), "1.5", "2.5"),
        (pa.binary(), b"", b"\0"),
        (pa.timestamp("us"), 0, 1),
        (pa.timestamp("us", "UTC"), -1, 1),
        (pa.date32(), 0, 40_000),
        (pa.bool_(), True, False),
        (pa.int16(), -5, 5),
    ],
)
def test_key_types(kind: Any, first: Any, second: Any) -> None:
    if pa.types.is_decimal(kind):
        first, second = pa.array([first, second]).cast(kind).to_pylist()
    folded = keyed(("U", first, "a"), ("U", second, "b"), ("U", first, "c"), ("D", second, None), key=kind)
    assert folded.images.column("v").to_pylist() == ["c"]
    assert folded.deleted_keys.num_rows == 2


def test_keys_too_wide_for_one_number() -> None:
    wide = pa.array([0, 1 << 60, 0, 1 << 60, 0, 1 << 60], pa.int64())
    count = len(wide)
    sent = Changes(
        np.arange(count),
        np.full(count, ord("U"), np.uint8),
        {"a": wide, "b": pa.array([0, 0, 1 << 60, 1 << 60, 0, 1 << 60]), "v": pa.array(range(count))},
        {},
        np.zeros(count, np.uint8),
        {},
    )
    folded = fold(sent, ["a", "b"], full=False)
    assert folded.images.column("v").to_pylist() == [1, 2, 4, 5]
    assert folded.deleted_keys.num_rows == 4


def test_a_column_that_only_the_target_has() -> None:
    """Old tuples lack it, and an UPDATE keeps the target's value."""
    sent = Changes(
        np.arange(2),
        np.frombuffer(b"UD", np.uint8),
        {"k": pa.array([2, None]), "extra": pa.nulls(2, pa.string())},
        {"extra": np.array([True, False])},
        np.frombuffer(b"OO", np.uint8),
        {"k": pa.array([1, 3])},
    )
    folded = fold(sent, ["k"], full=False)
    assert rows(folded.masked) == [(2, None, True, 1)]
    assert deleted(folded) == [1, 2, 3]
    net = fold(sent, None, full=True)
    assert (rows(net.images), rows(net.removed)) == ([(2, None)], [(1, None, 1), (3, None, 1)])


def test_a_change_without_a_replica_identity_is_refused() -> None:
    with pytest.raises(NotInPrerequisiteState, match="replica identity column"):
        keyed(("U", None, "a"))
    with pytest.raises(NotInPrerequisiteState):
        fold(changes(("U", 1, "a")), None, full=True)
    with pytest.raises(NotInPrerequisiteState):
        fold(changes(("D", 1, None), full=True), None, full=False)
    assert rows(fold(changes(("I", 1, "a")), None, full=False).images) == [(1, "a")]


def test_multiset() -> None:
    sent = changes(("I", 1, "a"), ("I", 1, "a"), ("D", 1, None), ("D", 2, None), ("D", 2, None), full=True)
    folded = fold(sent, None, full=True)
    assert rows(folded.images) == [(1, "a"), (1, "a")]
    assert sorted(rows(folded.removed)) == [(1, None, 1), (2, None, 2)]
    emptied = fold(sent, None, full=True, truncate_before=0)
    assert (emptied.images.num_rows, emptied.removed.num_rows) == (2, 0)


def test_multiset_tells_zeros_apart() -> None:
    sent = changes(("D", 0.0, None), ("I", -0.0, None), key=pa.float64(), full=True)
    folded = fold(sent, None, full=True)
    assert math.copysign(1, rows(folded.images)[0][0]) == -1
    assert math.copysign(1, rows(folded.removed)[0][0]) == 1
