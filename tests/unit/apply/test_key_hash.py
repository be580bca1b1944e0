"""Key hashes: equal keys have equal numbers, in whatever form they arrive."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from apply.staging.key_hash import key_hashes
from pubsub.protocol.rows import DELETE, INSERT, OLD_KEY, UPDATE, Changes


def changes(op: list[int], new: list[Any], old: list[Any], kind: Any) -> Changes:
    kinds = np.array([OLD_KEY if value is not None else 0 for value in old], np.uint8)
    return Changes(
        np.arange(len(op)),
        np.array(op, np.uint8),
        {"k": pa.array(new, kind)},
        {},
        kinds,
        {"k": pa.array(old, kind)},
    )


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (1, 2, pa.int64()),
        ("a", "ab", pa.string()),
        ("", "\0", pa.string()),
        (b"\xff\x00", b"\xff", pa.binary()),
        (True, False, pa.bool_()),
        (Decimal("1.50"), Decimal("1.05"), pa.decimal128(10, 2)),
        (0.0, 1.0, pa.float64()),
    ],
)
def test_a_key_is_the_same_in_every_place(one: Any, other: Any, kind: Any) -> None:
    own, left = key_hashes(
        changes([INSERT, UPDATE, UPDATE, DELETE], [one, one, other, None], [None, None, one, one], kind), ("k",)
    )
    assert own[0] == own[1] == own[3] == left[2]
    assert own[2] != own[0]
    assert list(left[:2]) == list(own[:2])


def test_the_two_zeros_are_one_key() -> None:
    own, _ = key_hashes(changes([INSERT, INSERT], [0.0, -0.0], [None, None], pa.float64()), ("k",))
    assert own[0] == own[1]


def test_keys_are_spread() -> None:
    count = 100_000
    for values in (pa.array(np.arange(count)), pa.array([f"customer {n}" for n in range(count)])):
        none = np.zeros(count, np.uint8)
        own, _ = key_hashes(
            Changes(np.arange(count), np.full(count, INSERT, np.uint8), {"k": values}, {}, none, {}), ("k",)
        )
        sizes = np.bincount(own % 7)
        assert sizes.min() > count / 7 * 0.9
        assert sizes.max() < count / 7 * 1.1


def test_values_of_several_have_hashes_too() -> None:
    """Whole rows of a table without a key are divided by these."""
    lists = pa.array([[1, 2], [1, 2], [2, 1], None])
    structs = pa.array([{"a": 1.0, "b": "x"}, {"a": 1.0, "b": "x"}, {"a": 1.0, "b": "y"}, None])
    kinds = np.zeros(4, np.uint8)
    changes = Changes(np.arange(4), np.full(4, INSERT, np.uint8), {"l": lists, "s": structs}, {}, kinds, {})
    own, left = key_hashes(changes, ["l", "s"])
    assert own.tolist() == left.tolist()
    assert own[0] == own[1]
    assert len(set(own.tolist())) == 3
