"""launcher.share: which process runs which subscriptions."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.share import ALL, Share
from pubsub.sql.options import SubscriptionOptions


def subscription(oid: int, source: str | None = None) -> Any:
    return SimpleNamespace(oid=oid, options=SubscriptionOptions(source=source))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_subscription_is_one_process_s(count: int) -> None:
    shares = [Share(number, count) for number in range(count)]
    listed = [subscription(oid) for oid in range(16_384, 16_384 + 70)]
    owners = [[share.number for share in shares if share.has(one)] for one in listed]
    assert all(len(one) == 1 for one in owners)
    assert set(Counter(one[0] for one in owners).values()) <= {70 // count, 70 // count + 1}
    assert sorted(one.oid for share in shares for one in share.of(listed)) == [one.oid for one in listed]


def test_those_that_write_one_table_together_are_in_one_process() -> None:
    for oid in range(16_384, 16_390):
        assert Share(0, 3).has(subscription(oid, source="a"))
        assert not Share(1, 3).has(subscription(oid, source="a"))


def test_all() -> None:
    assert ALL.is_first
    assert ALL.has(subscription(16_385))
    assert ALL.part_of(1000) == 1000


@pytest.mark.parametrize(("limit", "parts"), [(1000, [334, 333, 333]), (4, [2, 1, 1]), (2, [1, 1, 1]), (0, [0, 0, 0])])
def test_a_limit_of_the_node_is_divided(limit: int, parts: list[int]) -> None:
    assert [Share(number, 3).part_of(limit) for number in range(3)] == parts
