"""The table of state transitions."""

from __future__ import annotations

from catalog.states import STORED, RelState, may_move, may_store


def test_each_step_belongs_to_one_side() -> None:
    way = [RelState(letter) for letter in "idfwcsr"]
    movers = ["sync", "sync", "sync", "apply", "sync", "apply"]
    for old, new, mover in zip(way, way[1:], movers, strict=False):
        assert may_move(old, new, mover)  # type: ignore[arg-type]
        other = "apply" if mover == "sync" else "sync"
        assert not may_move(old, new, other)  # type: ignore[arg-type]


def test_w_and_c_are_never_stored() -> None:
    assert {state.value for state in STORED} == set("idfsr")
    for old in RelState:
        assert not may_store(old, RelState.SYNCWAIT)
        assert not may_store(old, RelState.CATCHUP)


def test_steps_that_the_catalog_stores() -> None:
    taken = {old.value + new.value for old in STORED for new in STORED if old != new and may_store(old, new)}
    assert taken == {"id", "df", "fd", "fs", "sr", "di", "fi", "si", "ri"}
