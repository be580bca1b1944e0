"""Slots and WAL on disk: what is there after a kill between any two writes, on a full disk, and with damaged files."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pubsub import faults
from pubsub.errors import DataCorrupted, DuplicateObject, NotInPrerequisiteState, ObjectInUse, PubsubError
from pubsub.reorderbuffer.files import DiskFull, FileFailure
from walsender import checked_files
from walsender.feed.commits import Commits
from walsender.feed.feed import Feed
from walsender.feed.spool import Spool, SpoolWriter, SyncFailure
from walsender.slots.slot import Slot, SlotStore
from walsender.xlog.errors import WalMissing
from walsender.xlog.formats import format_of_version

SEGMENT = 1 << 20
DATA = bytes(range(256)) * (3 * SEGMENT // 256)
END = SEGMENT + len(DATA)


def killed_at(point: str, directory: Path, work: Callable[[], object]) -> None:
    """Run `work` in a process of its own, which is killed at the fault point."""
    directory.mkdir(exist_ok=True)
    (directory / point).write_text("kill")
    child = os.fork()
    if not child:
        os.environ[faults.VARIABLE] = str(directory)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{point} was not reached"
    assert os.WTERMSIG(status) == signal.SIGKILL
    (directory / point).unlink()


class Synced:
    """Which files were fsynced; `meanwhile` is called before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def _note(self, number: int) -> None:
        self.meanwhile()
        self.names.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        self._fsync(number)


# Slots


def make_store(directory: Path) -> tuple[SlotStore, Slot]:
    store = SlotStore(directory, 2)
    slot = Slot("a", "pgoutput", "db", 100, 200, two_phase=True, two_phase_at=150, failover=True)
    store.add(slot)
    return store, slot


def test_slots_are_there_again_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    store, slot = make_store(tmp_path)
    store.add(Slot("b", "pgoutput", "db", 50, 60, temporary=True))
    with pytest.raises(DuplicateObject):
        store.check_new("a")
    with pytest.raises(PubsubError, match="all replication slots are in use"):
        store.check_new("c")
    slot.confirmed_flush_lsn, slot.changed = 300, True
    asyncio.run(store.save_changed())
    again = SlotStore(tmp_path, 2)
    (found,) = again
    assert (found.name, found.confirmed_flush_lsn, found.two_phase_at, found.failover) == ("a", 300, 150, True)
    assert again.needed == 100
    again.acquire("a", self_ := object(), 7, lambda: None)
    with pytest.raises(ObjectInUse, match="is active for PID 7"):
        again.acquire("a", object(), 8, lambda: None)
    again.acquire("a", self_, 7, lambda: None)
    ended: list[bool] = []
    found.release = lambda: ended.append(True)
    again.invalidate(found, "wal_removed")
    assert (ended, again.needed) == ([True], None)
    again.free(found)
    with pytest.raises(NotInPrerequisiteState, match='can no longer access replication slot "a"'):
        again.acquire("a", object(), 8, lambda: None)
    path = next(tmp_path.glob("*.slot"))
    path.write_text(path.read_text().replace("300", "301"))
    with pytest.raises(DataCorrupted, match="checksum mismatch"):
        SlotStore(tmp_path, 2)


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        (b"", "checksum mismatch"),
        (b"00000000\n", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"name": "x", "plugin": "p", "database": "d", "restart_lsn": 1, "confirmed_flush_lsn": 2}', 'the slot "x"'),
    ],
)
def test_a_slot_file_that_is_none(tmp_path: Path, contents: bytes, error: str) -> None:
    if contents.startswith(b"{"):
        checked_files.write(tmp_path / "a.slot", contents)
    else:
        (tmp_path / "a.slot").write_bytes(contents)
    with pytest.raises(DataCorrupted, match=error):
        SlotStore(tmp_path, 2)


@pytest.mark.parametrize("point", ["slot written aside", "persist.rename", "slot renamed"])
def test_a_slot_that_is_saved_through_a_kill_is_as_before_or_after(tmp_path: Path, point: str) -> None:
    store, slot = make_store(tmp_path / "slots")

    def save() -> None:
        slot.restart_lsn, slot.confirmed_flush_lsn = 150, 300
        store.save(slot)

    killed_at(point, tmp_path / "faults", save)
    (found,) = SlotStore(tmp_path / "slots", 2)
    expected = (150, 300) if point == "slot renamed" else (100, 200)
    assert (found.restart_lsn, found.confirmed_flush_lsn) == expected
    assert [path.name for path in (tmp_path / "slots").iterdir()] == ["a.slot"], "nothing is left half written"
    killed_at(point, tmp_path / "faults", lambda: store.add(Slot("new", "pgoutput", "db", 1, 2)))
    assert {one.name for one in SlotStore(tmp_path / "slots", 2)} >= {"a"}


def test_what_is_removed_waits_until_slots_are_saved(tmp_path: Path) -> None:
    store, slot = make_store(tmp_path)
    slot.restart_lsn, slot.confirmed_flush_lsn, slot.changed = 150, 300, True
    assert store.needed == 100, "a crash now would need it"
    asyncio.run(store.save_changed())
    assert store.needed == 150


def test_a_full_disk_loses_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, slot = make_store(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFull):
            store.add(Slot("b", "pgoutput", "db", 1, 2))
        assert store.find("b") is None, "a slot that could not be saved is none"
        slot.restart_lsn, slot.changed = 150, True
        with pytest.raises(DiskFull):
            asyncio.run(store.save_changed())
        assert (slot.changed, store.needed) == (True, 100)
    asyncio.run(store.save_changed())
    assert (slot.changed, store.needed) == (False, 150)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(FileFailure):
            store.drop(slot)
        assert store.find("a") is slot, "it would be back after a restart"
    store.drop(slot)
    assert list(SlotStore(tmp_path, 2)) == []


def test_a_save_that_failed_after_its_file_was_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, slot = make_store(tmp_path)

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    slot.confirmed_flush_lsn = 300
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(FileFailure):
            store.save(slot)
    store.save(slot)
    assert next(iter(SlotStore(tmp_path, 2))).confirmed_flush_lsn == 300


def test_a_slot_that_was_dropped_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, slot = make_store(tmp_path)
    synced = Synced(monkeypatch)
    left: list[bool] = []
    synced.meanwhile = lambda: left.append((tmp_path / "a.slot").exists())
    store.drop(slot)
    assert (synced.names, left) == ([tmp_path.name], [False]), "the directory is fsynced when the name is gone"


def test_the_newest_contents_win(tmp_path: Path) -> None:
    """A save in a thread may come after a later one."""
    store, slot = make_store(tmp_path)
    older = store._contents(slot)
    slot.confirmed_flush_lsn = 400
    store.save(slot)
    store._save([older])
    assert next(iter(SlotStore(tmp_path, 2))).confirmed_flush_lsn == 400
    late = store._contents(slot)
    store.drop(slot)
    store._save([late])
    assert list(SlotStore(tmp_path, 2)) == []


# The spool


def written(directory: Path) -> SpoolWriter:
    """Return a spool of three whole segments, on disk."""
    checked_files.prepare(directory)
    spool = SpoolWriter(directory, SEGMENT)
    for place in range(0, len(DATA), 70_000):
        spool.write(SEGMENT + place, DATA[place : place + 70_000])
    spool.sync(END)
    return spool


def kept(directory: Path, lsn: int = SEGMENT) -> bytes:
    return b"".join(data for _, data in Spool(directory, SEGMENT).read_kept(lsn, 1 << 40))


def test_the_spool_gives_back_what_was_written(tmp_path: Path) -> None:
    spool = written(tmp_path)
    spool.compress_before(END - SEGMENT)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".zst", ".zst"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    reader = Spool(tmp_path, SEGMENT)
    begin = SEGMENT + 12_345
    assert b"".join(part for _, part in reader.read(begin, END)) == DATA[12_345:]
    assert b"".join(part for _, part in reader.read(begin, END - 5)) == DATA[12_345:-5], "backwards, too"
    with pytest.raises(WalMissing):
        list(reader.read(begin, END + 1))
    spool.write(END - SEGMENT - 8192, b"\1" * 8192)
    assert kept(tmp_path) == DATA[: -SEGMENT - 8192] + b"\1" * 8192 + DATA[-SEGMENT:]
    spool.remove_before(2 * SEGMENT)
    assert spool.starts() == [2 * SEGMENT, 3 * SEGMENT]
    with pytest.raises(WalMissing):
        list(reader.read(SEGMENT, END))


def test_a_reader_goes_on_while_segments_are_compressed(tmp_path: Path) -> None:
    spool = written(tmp_path)
    reading = Spool(tmp_path, SEGMENT).read(SEGMENT, END)
    first = next(reading)
    spool.compress_before(END)
    assert first[1] + b"".join(part for _, part in reading) == DATA


def test_what_is_not_on_disk_is_not_compressed(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path, SEGMENT)
    spool.write(SEGMENT, DATA)
    spool.compress_before(END)
    assert {path.suffix for path in tmp_path.iterdir()} == {""}
    spool.sync(END)
    spool.compress_before(END)
    assert {path.suffix for path in tmp_path.iterdir()} == {".zst"}


def test_a_segment_that_ends_during_a_sync_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync is a thread's; what it reports as durable lets the upstream server remove its WAL."""
    spool = SpoolWriter(tmp_path, SEGMENT)
    spool.write(SEGMENT, DATA[: SEGMENT + 100])
    synced = Synced(monkeypatch)
    synced.meanwhile = lambda: spool.write(3 * SEGMENT, b"x")
    spool.sync(2 * SEGMENT + 100)
    assert {f"{SEGMENT:016X}", f"{2 * SEGMENT:016X}", tmp_path.name} <= set(synced.names)


async def test_what_could_not_be_made_durable_ends_the_feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells of a write that failed once: a second fsync said that all was on disk, and the server let the WAL go."""
    (tmp_path / "wal").mkdir()
    spool = SpoolWriter(tmp_path / "wal", SEGMENT)
    spool.write(SEGMENT, DATA)
    fsync = os.fsync

    def failing(_number: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        raise OSError(errno.EIO, "Input/output error")

    feed = Feed("", tmp_path, SlotStore(tmp_path / "slots", 1))
    feed.spool = spool
    feed._reader = cast(Any, SimpleNamespace(position=END, received=END))
    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr("walsender.feed.feed._SYNC", 0)
    with pytest.raises(SyncFailure, match="could not fsync"):
        await asyncio.wait_for(feed._keep_house(), 60)
    with pytest.raises(SyncFailure):
        spool.sync(END)
    assert spool.synced == 0
    spool.close()


def test_what_a_killed_process_has_written_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as received, and nobody sends it again."""
    SpoolWriter(tmp_path, SEGMENT).write(SEGMENT, DATA)
    synced = Synced(monkeypatch)
    SpoolWriter(tmp_path, SEGMENT).sync(END)
    assert {*(f"{number * SEGMENT:016X}" for number in (1, 2, 3)), tmp_path.name} <= set(synced.names)


@pytest.mark.parametrize("point", ["spool compressed aside", "persist.rename", "spool compressed"])
def test_segments_that_are_compressed_through_a_kill_are_whole(tmp_path: Path, point: str) -> None:
    spool = written(tmp_path / "wal")
    killed_at(point, tmp_path / "faults", lambda: spool.compress_before(END))
    again = SpoolWriter(tmp_path / "wal", SEGMENT)
    assert not list((tmp_path / "wal").glob("*.tmp"))
    assert kept(tmp_path / "wal") == DATA
    again.sync(END)
    again.compress_before(END)
    assert (kept(tmp_path / "wal"), len(list((tmp_path / "wal").iterdir()))) == (DATA, 3)


def test_segments_that_are_removed_through_a_kill_leave_no_gap(tmp_path: Path) -> None:
    spool = written(tmp_path / "wal")
    killed_at("spool removed", tmp_path / "faults", lambda: spool.remove_before(3 * SEGMENT))
    assert spool.starts() == [2 * SEGMENT, 3 * SEGMENT]
    assert spool.run_start(END - 1) == 2 * SEGMENT


def test_a_segment_that_is_written_to_again_through_a_kill(tmp_path: Path) -> None:
    """It is unpacked aside: half of it would hide the whole one."""
    spool = written(tmp_path / "wal")
    spool.compress_before(END)
    killed_at("persist.rename", tmp_path / "faults", lambda: spool.write(SEGMENT + 100, b"\1"))
    assert kept(tmp_path / "wal") == DATA


def test_the_run_of_segments_that_holds_a_position(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path, SEGMENT)
    for number in (1, 2, 4, 5):
        spool.write(number * SEGMENT, b"x")
    assert [spool.run_start(lsn * SEGMENT + 7) for lsn in (2, 3, 5, 9)] == [
        SEGMENT,
        4 * SEGMENT,
        4 * SEGMENT,
        10 * SEGMENT,
    ]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_segment_that_ended_early_is_whole_when_the_next_one_begins(tmp_path: Path, goes_on: bool) -> None:
    """As after a connection that was cut behind XLOG_SWITCH, before the zeros that follow it; by this process or the next."""
    spool = SpoolWriter(tmp_path, SEGMENT)
    spool.write(SEGMENT, b"switch")
    if not goes_on:
        spool.close()
        spool = SpoolWriter(tmp_path, SEGMENT)
    spool.write(2 * SEGMENT, b"next")
    spool.sync(2 * SEGMENT + 4)
    spool.close()
    assert b"".join(data for _, data in Spool(tmp_path, SEGMENT).read(SEGMENT, 2 * SEGMENT + 4)) == (
        b"switch" + bytes(SEGMENT - 6) + b"next"
    )


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_segment_is_named(tmp_path: Path, damage: str) -> None:
    spool = written(tmp_path)
    spool.compress_before(END)
    path = tmp_path / f"{2 * SEGMENT:016X}.zst"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\0" * 100 + data[100:])
    with pytest.raises(DataCorrupted, match=path.name):
        list(Spool(tmp_path, SEGMENT).read(SEGMENT, END))


def test_a_disk_that_fills_up_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write near the end may write a part only."""
    spool = SpoolWriter(tmp_path, SEGMENT)
    whole = os.pwrite
    room = 1000

    def filling(number: int, data: bytes, offset: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = whole(number, data[:room], offset)
        room -= written
        return written

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(DiskFull):
        spool.write(SEGMENT, DATA[:5000])
    assert kept(tmp_path) == DATA[:1000]
    room = 4000
    spool.write(SEGMENT + 1000, DATA[1000:5000])
    assert kept(tmp_path) == DATA[:5000]


def test_what_is_known_of_transactions_is_restored() -> None:
    wal_format = format_of_version(180000)
    assert wal_format is not None
    commits = Commits(wal_format, [9])
    commits._redos.append(90)
    commits._list(100, {5, 7})
    commits._list(400, {8})
    commits.recent.append((150, 5))
    commits._ended([5], 150)
    again = Commits.restored(wal_format, commits.state())
    assert again.state() == commits.state()
    again._ended([7], 300)
    assert (again.restart_for(301, 0), again.redo_before(100)) == (100, 90)
    assert again.restart_for(301, 95) is None, "no checkpoint is before it"
    assert commits.restart_for(301, 0) is None
    again.forget_before(150, [])
    assert again.restart_for(301, 0) is None
