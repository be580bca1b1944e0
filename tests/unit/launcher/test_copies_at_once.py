"""Which tables of a subscription get a sync worker: how many at once, in which order, and when again after a failure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from catalog.figures import Warned
from catalog.records import SubscriptionRel
from catalog.states import RelState
from launcher.copies_at_once import Chosen, CopiesAtOnce, needs_sync_worker
from pubsub.setting_tables import DailyWindow
from pubsub.sql.layout_rules import patterns_of

PAUSE = 5.0


def table(relid: int, **values: Any) -> SubscriptionRel:
    made = SubscriptionRel(
        1, relid, "public", f"t{relid}", RelState.INIT, None, 0, None, f"/w/t{relid}", None, None, None, None
    )
    return replace(made, **values)


TABLES = [table(relid) for relid in (1, 2, 3, 4)]


def choose(copies: CopiesAtOnce, *running: int, applies: bool = True, now: float = 0.0) -> Chosen:
    return copies.choose(TABLES, running, applies=applies, now=now)


def begun(chosen: Chosen) -> list[int]:
    return [relation.relid for relation in chosen.begin]


def test_no_more_tables_than_the_setting_says_in_the_catalog_s_order() -> None:
    chosen = choose(CopiesAtOnce(2, PAUSE))
    assert (begun(chosen), chosen.without, list(chosen.pauses)) == ([1, 2], {3, 4}, [])


def test_a_table_that_apply_waits_for_comes_first_whatever_the_limit() -> None:
    copies = CopiesAtOnce(2, PAUSE)
    chosen = copies.choose(TABLES, [1, 2], promised=[4], applies=True, now=0.0)
    assert (begun(chosen), chosen.without) == ([4], {3})
    # Of those that begin together it is the first, so it takes one of the two places.
    chosen = copies.choose(TABLES, [], promised=[4], applies=True, now=0.0)
    assert (begun(chosen), chosen.without) == ([4, 1], {2, 3})
    assert begun(CopiesAtOnce(0, PAUSE).choose(TABLES, [], promised=[3], applies=True, now=0.0)) == [3]
    # It pauses after its failure all the same, and asks for nothing while the apply worker has no slot.
    copies.failed(4, 0.0)
    assert begun(copies.choose(TABLES, [1, 2], promised=[4], applies=True, now=1.0)) == []
    assert begun(copies.choose(TABLES, [1, 2], promised=[4], applies=False, now=9.0)) == []


def test_a_worker_that_ends_makes_room_for_the_next_table() -> None:
    copies = CopiesAtOnce(2, PAUSE)
    assert begun(choose(copies, 1, 2)) == []
    chosen = choose(copies, 2, 3)
    assert (begun(chosen), chosen.without) == ([], {1, 4})
    assert begun(choose(copies, 3)) == [1]


def test_no_table_before_the_apply_worker_has_its_slot() -> None:
    chosen = choose(CopiesAtOnce(2, PAUSE), applies=False)
    assert (begun(chosen), chosen.without) == ([], {1, 2, 3, 4})


def test_a_table_that_failed_pauses_and_lets_the_others_go_first() -> None:
    copies = CopiesAtOnce(2, PAUSE)
    copies.failed(1, 100.0)
    chosen = choose(copies, now=102.0)
    assert (begun(chosen), chosen.without, list(chosen.pauses)) == ([2, 3], {4}, [3.0])
    assert begun(choose(copies, now=105.0)) == [1, 2]


def test_a_table_fails_until_a_later_worker_succeeds() -> None:
    copies = CopiesAtOnce(2, PAUSE)
    copies.failed(1, 100.0)
    choose(copies, now=200.0)
    assert copies.failing
    copies.succeeded(1)
    copies.succeeded(2)
    assert not copies.failing


def test_a_table_that_has_left_is_forgotten() -> None:
    copies = CopiesAtOnce(2, PAUSE)
    copies.failed(1, 100.0)
    copies.failed(9, 100.0)
    copies.keep({1, 2})
    assert copies.failing
    copies.keep({2})
    assert not copies.failing


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, True),
        ({"state": RelState.DATASYNC}, True),
        ({"state": RelState.FINISHEDCOPY, "definition": "{}"}, True),
        ({"state": RelState.SYNCDONE, "definition": "{}"}, False),
        ({"state": RelState.READY, "definition": "{}"}, False),
        ({"state": RelState.READY, "definition": "{}", "sync_slot": "pg_1_sync_1_n"}, True),
        ({"state": RelState.READY}, True),  # joined without a copy: its Delta table is still to be created
        ({"stopped": True}, False),
        ({"stopped": True, "sync_slot": "pg_1_sync_1_n"}, True),
    ],
)
def test_a_table_needs_a_sync_worker_until_it_is_synchronized_and_its_slot_is_dropped(
    values: dict[str, Any], needs: bool
) -> None:
    assert needs_sync_worker(table(1, **values)) is needs


def test_what_the_other_tables_wait_for() -> None:
    assert CopiesAtOnce(2, PAUSE).turn(["public.t1", "public.t2"]) == Warned(
        "waits for one of 2 sync workers", "They are at work on public.t1, public.t2."
    )
    assert CopiesAtOnce(2, PAUSE).turn([]) == Warned("waits for one of 2 sync workers", None)
    assert CopiesAtOnce(0, PAUSE).turn([]).hint == 'Increase "max_sync_workers_per_subscription".'


def test_copies_begin_within_their_window_and_go_on_behind_it() -> None:
    """What has begun retains WAL by its slot: it is followed up whatever the time."""
    copies = CopiesAtOnce(9, PAUSE, DailyWindow.parse("22:00-04:00"))
    tables = [
        table(1),
        table(2, state=RelState.DATASYNC),
        table(3, state=RelState.FINISHEDCOPY),
        table(4, state=RelState.READY, sync_slot="s"),
        table(5, stopped=True, sync_slot="s"),
        table(6),
        # Copied again: its slot must not retain WAL until then.
        table(7, sync_slot="s"),
    ]
    at = datetime(2026, 5, 4, 21, 59, 30, tzinfo=UTC)
    chosen = copies.choose(tables, [], applies=True, now=0.0, today=at)
    assert (begun(chosen), chosen.without, list(chosen.pauses)) == ([2, 3, 4, 5, 7], {1, 6}, [30.0, 30.0])
    assert copies.turn([]) == Warned(
        "waits for the window of copies", 'Copies begin within "copies.window", 22:00-04:00.'
    )
    chosen = copies.choose(
        tables, [2, 3, 4, 5, 7], applies=True, now=30.0, today=at.replace(hour=22, minute=0, second=0)
    )
    assert (begun(chosen), chosen.without) == ([1, 6], frozenset())
    assert copies.turn([]).message == "waits for one of 9 sync workers"


def test_tables_that_are_to_be_copied_first() -> None:
    """In the option's order, then the others; one that apply waits for comes before all."""
    tables = [table(1), table(2), table(3, schema="s"), table(4), table(5, schema="s")]
    copies = CopiesAtOnce(9, PAUSE, copy_first=patterns_of("copy_first", "public.t4, s.*"))
    assert begun(copies.choose(tables, [], applies=True, now=0.0)) == [4, 3, 5, 1, 2]
    assert begun(copies.choose(tables, [], promised=[2], applies=True, now=0.0)) == [2, 4, 3, 5, 1]
