"""pubsub.snapshot: the LSNs that each version shows."""

from __future__ import annotations

from pubsub.protocol.lsn import Lsn
from pubsub.snapshot import Shown, shown_by, together

ORDERS = [(1, (Lsn(0x100), Lsn(0x100))), (2, None), (3, (Lsn(0x150), Lsn(0x200))), (4, (Lsn(0x500), Lsn(0x600)))]
ITEMS = [(7, (Lsn(0x180), Lsn(0x300))), (8, (Lsn(0x400), Lsn(0x400)))]


def test_a_version_shows_from_its_last_to_before_the_next_first() -> None:
    assert shown_by(ORDERS, Lsn(0x700)) == [
        Shown(2, Lsn(0x100), Lsn(0x14F)),
        Shown(3, Lsn(0x200), Lsn(0x4FF)),
        Shown(4, Lsn(0x600), Lsn(0x700)),
    ]


def test_a_commit_past_the_origin_shows_nothing_yet() -> None:
    assert shown_by(ORDERS, Lsn(0x550))[-1] == Shown(3, Lsn(0x200), Lsn(0x4FF))


def test_a_version_before_any_data_shows_nothing() -> None:
    assert shown_by([(0, None), (1, (Lsn(5), Lsn(6)))], Lsn(9)) == [Shown(1, Lsn(6), Lsn(9))]


def test_an_altered_table_is_shown_from_the_lsn_of_its_change() -> None:
    # The batch began before its last transaction, which altered the table: up to there only the old version shows
    # anything.
    altered = (5, (Lsn(0x300), Lsn(0x300)))
    before, after = (4, (Lsn(0x100), Lsn(0x200))), (6, (Lsn(0x280), Lsn(0x300)))
    assert shown_by([before, altered, after], Lsn(0x400)) == [
        Shown(4, Lsn(0x200), Lsn(0x27F)),
        Shown(6, Lsn(0x300), Lsn(0x400)),
    ]
    assert shown_by([before, altered], Lsn(0x400)) == [
        Shown(4, Lsn(0x200), Lsn(0x2FF)),
        Shown(5, Lsn(0x300), Lsn(0x400)),
    ]


def test_asked_lsn_that_all_show() -> None:
    lsn, chosen = _together(0x350)
    assert lsn == 0x350
    assert chosen == {1: 3, 2: 7}


def test_rounded_down_until_all_show_it() -> None:
    lsn, chosen = _together(0x520)
    assert lsn == 0x4FF
    assert chosen == {1: 3, 2: 8}


def test_rounding_one_table_may_round_another() -> None:
    # The second can show 0x3FF; the first cannot show 0x380 to 0x3FF, so both are rounded below that.
    first = [Shown(1, Lsn(0x300), Lsn(0x37F)), Shown(2, Lsn(0x450), Lsn(0x500))]
    second = [Shown(5, Lsn(0x100), Lsn(0x3FF)), Shown(6, Lsn(0x480), Lsn(0x500))]
    lsn, chosen = together({1: first, 2: second}, Lsn(0x460))
    assert chosen is not None
    assert (lsn, chosen[1].version, chosen[2].version) == (0x37F, 1, 5)


def test_no_lsn_that_all_show() -> None:
    _, chosen = together({1: [Shown(1, Lsn(0x100), Lsn(0x1FF))], 2: [Shown(1, Lsn(0x200), Lsn(0x300))]}, Lsn(0x300))
    assert chosen is None


def _together(at: int) -> tuple[Lsn, dict[int, int]]:
    shown = {1: shown_by(ORDERS, Lsn(0x700)), 2: shown_by(ITEMS, Lsn(0x700))}
    lsn, chosen = together(shown, Lsn(at))
    assert chosen is not None
    return lsn, {relid: one.version for relid, one in chosen.items()}
