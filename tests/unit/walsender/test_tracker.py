"""Looking a relation up costs a transaction nothing for its subtransactions."""

from __future__ import annotations

from collections.abc import Iterator

from walsender.historic.tracker import CatalogTracker


class Many(set[int]):
    """The ids of a transaction with more subtransactions than may be gone through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all subtransactions are gone through")


def test_a_relations_generation_for_a_transaction_with_many_subtransactions() -> None:
    tracker = CatalogTracker(5, 1663, {}, {}, lambda _: True)
    tracker.catalogs.generations |= {0: 1, 7: 2}
    own = Many(range(10, 1000))
    assert tracker.generation(7, own) == (1, 2)
    tracker.catalogs.redefined |= {11: {7: 3}, 12: {8: 4}, 5000: {7: 5}, 13: {0: 6}}
    assert tracker.generation(7, own) == (1, 2, 0, 3, 6, 0)
    assert tracker.generation(9, own) == (1, 0, 6, 0)
    assert tracker.generation(7, frozenset({5000})) == (1, 2, 0, 5)
    assert tracker.generation(7, frozenset()) == (1, 2)
