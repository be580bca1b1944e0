"""The catalogs on disk."""

from __future__ import annotations

from pathlib import Path

from walsender.historic.state import CatalogState, CatalogStates, DatabaseFacts
from walsender.historic.upstream import Builtins, Upstream


def test_catalogs_are_the_same_only_along_one_pass(tmp_path: Path) -> None:
    """Another pass counts its changes anew: as many of them are not the same ones."""
    server = Upstream(180000, 5, "UTF8", 1, 16 << 20, True, True)
    state = CatalogState(100, DatabaseFacts(server, Builtins({}, {}, frozenset())), [], {}, {}, [])
    states = CatalogStates(tmp_path)
    first, second = (state.tracker(lambda _: False) for _ in range(2))
    taken = states.take(first, 100, state)
    assert taken is not None
    states.write(taken)
    for tracker, is_same in ((first, True), (second, False)):
        taken = states.take(tracker, 200, state)
        assert taken is not None
        assert (taken.contents is None) == is_same


def test_who_is_prepared_is_saved_with_the_catalogs(tmp_path: Path) -> None:
    """What names an older file would otherwise say who was prepared there."""
    server = Upstream(180000, 5, "UTF8", 1, 16 << 20, True, True)
    state = CatalogState(100, DatabaseFacts(server, Builtins({}, {}, frozenset())), [], {}, {}, [], {7: None})
    states = CatalogStates(tmp_path)
    tracker = state.tracker(lambda _: False)
    tracker.prepare(8, (9, 10))
    for position, prepared in ((100, {7: None, 8: (9, 10)}), (200, {8: (9, 10)}), (300, {})):
        taken = states.take(tracker, position, state)
        assert taken is not None
        states.write(taken)
        assert states.load(position).prepared == prepared
        tracker.finish_prepared(7 if position == 100 else 8)
