"""SnapBuild: when decoding is reliable."""

from __future__ import annotations

import pytest

from pubsub.protocol.timeline import TimelineHistory, parse_history
from walsender.decode.snapbuild import SnapshotBuilder, State
from walsender.xlog.xact import RunningXacts


def building() -> SnapshotBuilder:
    builder = SnapshotBuilder()
    builder.enter(State.BUILDING)
    return builder


def test_consistent_at_once_if_no_transaction_runs() -> None:
    builder = building()
    builder.running(100, RunningXacts((), 10, 10))
    assert builder.consistent
    assert builder.consistent_point == 100


def test_consistent_once_every_listed_transaction_has_ended() -> None:
    builder = building()
    builder.running(100, RunningXacts((7, 8, 9), 10, 7))
    builder.ended(200, (7, 8))
    assert builder.state is State.FULL
    builder.ended(250, (11,))
    builder.ended(300, (9,))
    assert builder.consistent_point == 300


def test_a_crash_ends_listed_transactions() -> None:
    builder = building()
    builder.running(100, RunningXacts((7, 8), 10, 7))
    builder.running(200, RunningXacts((8, 12), 13, 8))
    assert not builder.consistent
    builder.running(300, RunningXacts((12,), 13, 12))
    assert builder.consistent_point == 300
    other = building()
    other.shutdown(50)
    assert other.consistent_point == 50


def test_prepared_transactions_outlive_a_shutdown() -> None:
    builder = building()
    builder.running(100, RunningXacts((7, 8), 10, 7))
    builder.shutdown(200, prepared=[8, 9])
    assert not builder.consistent
    assert builder.may_have_begun_before(8)
    builder.ended(300, [8])
    assert builder.consistent_point == 300


def test_transactions_that_are_prepared_at_a_first_shutdown_are_waited_for() -> None:
    builder = building()
    builder.shutdown(100, prepared=[8, 9])
    assert builder.state is State.FULL
    builder.running(200, RunningXacts((9, 12), 13, 9))
    assert not builder.consistent
    builder.ended(300, [9])
    assert builder.consistent_point == 300


def test_before_the_first_list_any_transaction_may_have_begun_before() -> None:
    """One that ended then was once left out without a word, if it had changed nothing since."""
    builder = building()
    assert builder.may_have_begun_before(7)
    builder.running(100, RunningXacts((8,), 10, 8))
    assert builder.may_have_begun_before(8)
    assert not builder.may_have_begun_before(9)
    builder.begin_again()
    assert builder.may_have_begun_before(9)
    builder.running(200, RunningXacts((), 10, 10))
    assert not builder.may_have_begun_before(9)


def test_a_list_tells_who_has_ended() -> None:
    """One that holds no subtransactions tells it only of those that are older than all that run."""
    assert RunningXacts((7, 9), 12, 7).ended(range(5, 12)) == [5, 6, 8, 10, 11]
    assert RunningXacts((7, 9), 12, 7, overflowed=True).ended(range(5, 12)) == [5, 6]
    around = [0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF, 3, 4, 5]
    assert RunningXacts((0xFFFFFFFE, 4), 6, 0xFFFFFFFE).ended(around) == [0xFFFFFFFD, 0xFFFFFFFF, 3, 5]


def test_states_change_only_forward() -> None:
    builder = SnapshotBuilder()
    with pytest.raises(ValueError, match="cannot go"):
        builder.enter(State.CONSISTENT)


def test_timelines() -> None:
    history = parse_history(3, "1\t0/3000000\tno recovery target specified\n\n2\t0/5000100\tx\n")
    assert history.entries[:2] == ((1, 0x3000000), (2, 0x5000100))
    assert [history.timeline_of(lsn) for lsn in (0, 0x2FFFFFF, 0x3000000, 0x5000100)] == [1, 1, 2, 3]
    assert history.timelines_of_segment(0x5000000, 1 << 24) == [3, 2]
    assert history.end_of(2) == 0x5000100
    assert history.end_of(3) is None
    assert TimelineHistory.only(4).timelines_of_segment(0, 1 << 24) == [4]
