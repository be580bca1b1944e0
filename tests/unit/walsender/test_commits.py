"""What is known of the commits around a snapshot that a new slot begins with."""

from __future__ import annotations

import struct

import pytest

from walsender.feed.commits import Commits, VisibleSet, fitting
from walsender.xlog import formats as f
from walsender.xlog.formats import Rmgr, format_of_version
from walsender.xlog.record import Record


def _commits() -> Commits:
    wal_format = format_of_version(180000)
    assert wal_format is not None
    return Commits(wal_format)


def _commit(lsn: int, xid: int) -> Record:
    return Record(lsn, lsn, xid, Rmgr.XACT, f.XLOG_XACT_COMMIT, [], bytes(8), 0, 0)


def _list(lsn: int, *xids: int) -> Record:
    main = struct.pack(f"<iiiIII{len(xids)}I", len(xids), 0, 0, 200, min(xids, default=200), 199, *xids)
    return Record(lsn, lsn, 0, Rmgr.STANDBY, f.XLOG_RUNNING_XACTS, [], main, 0, 0)


def test_a_list_forgets_the_commits_that_everyone_sees() -> None:
    commits = _commits()
    for record in (_commit(10, 100), _commit(20, 101), _list(30, 101)):
        commits.add(record)
    assert list(commits.recent) == [(20, 101)]


def test_a_list_keeps_what_lies_behind_a_commit_that_waits() -> None:
    """100 waits for its synchronous standby; 101 did not, and is visible: no LSN lies between them."""
    snapshot = VisibleSet.parse("100:103:100")
    commits = _commits()
    for record in (_commit(10, 100), _commit(20, 101), _commit(30, 102), _list(40, 100)):
        commits.add(record)
    assert fitting(commits.recent, snapshot, 50) is None
    assert len(commits.recent) == 2, "one of those behind it tells as much as all"
    for record in (_list(50, 100), _commit(60, 103), _list(70, 100, 103), _commit(80, 104), _list(90, 103)):
        commits.add(record)
    assert list(commits.recent) == [(60, 103), (80, 104)]
    commits.add(_list(100))
    assert not commits.recent


def test_the_checkpoint_before_a_slot_is_remembered_though_its_wal_is_archived() -> None:
    """It was taken to begin at its list of running transactions, from which the catalogs cannot be read."""
    commits = _commits()
    for record in (_shutdown(10), _shutdown(20), _list(25), _shutdown(30), _shutdown(40), _list(45), _shutdown(50)):
        commits.add(record)
    commits.forget_before(48, [25, 45])
    assert [commits.redo_before(lsn) for lsn in (19, 25, 45, 49, 50)] == [None, 20, 40, 40, 50]
    assert commits.restart_for(47, 48) is None
    commits.forget_before(48, [45])
    assert [commits.redo_before(lsn) for lsn in (25, 45)] == [None, 40]


def test_what_an_earlier_release_knew_of_commits_is_read_again() -> None:
    """It had forgotten commits behind one that waited."""
    wal_format = format_of_version(180000)
    assert wal_format is not None
    state = _commits().state()
    assert Commits.restored(wal_format, state).state() == state
    del state["version"]
    with pytest.raises(ValueError, match="version"):
        Commits.restored(wal_format, state)


def test_a_list_that_comes_while_a_snapshot_is_compared_forgets_nothing() -> None:
    """The snapshot was taken before the commit of 100, and is compared when a list from after that commit is known."""
    snapshot = VisibleSet.parse("100:101:100")
    commits = _commits()
    commits.add(_list(5, 100))
    with commits.all_kept():
        for record in (_commit(10, 100), _list(30), _commit(40, 102)):
            commits.add(record)
        assert fitting(commits.recent, snapshot, 50) == 10
    commits.add(_list(60))
    assert not commits.recent


def _shutdown(lsn: int) -> Record:
    return Record(lsn, lsn, 0, Rmgr.XLOG, f.XLOG_CHECKPOINT_SHUTDOWN, [], struct.pack("<Q", lsn) + bytes(80), 0, 0)


def _commit_prepared(lsn: int, xid: int) -> Record:
    info = f.XLOG_XACT_COMMIT_PREPARED | f.XLOG_XACT_HAS_INFO
    main = struct.pack("<qII", 0, f.XACT_XINFO_HAS_TWOPHASE, xid)
    return Record(lsn, lsn, 0, Rmgr.XACT, info, [], main, 0, 0)


def test_a_slot_begins_at_a_shutdown_only_behind_what_was_prepared_there() -> None:
    """Of one that was prepared before the WAL that is read, and has ended before it was read, only its end tells."""
    commits = _commits()
    for record in (_shutdown(10), _commit(20, 101)):
        commits.add(record)
    assert commits.restart_for(30, 0) == 10
    commits.add(_commit_prepared(40, 90))
    assert [commits.restart_for(lsn, 0) for lsn in (30, 40, 50)] == [None, None, 10]
    commits.add(_list(60))
    assert commits.restart_for(70, 0) == 60
