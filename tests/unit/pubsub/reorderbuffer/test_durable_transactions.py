"""Prepared transactions as files: complete or absent after a crash, and refused when damaged."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from pubsub.errors import DataCorrupted
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Insert
from pubsub.protocol.rows import split_by_relation
from pubsub.reorderbuffer import durable, files
from pubsub.reorderbuffer.block import STREAM_HEADER
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.files import DiskFull, FileFailure
from tests.support.disk import room_for
from tests.support.frames import frame
from tests.support.reorderbuffer import WORK_MEM, on_disk, read, rows, spilled


@pytest.fixture
def buffer(tmp_path: Path) -> ReorderBuffer:
    return ReorderBuffer(tmp_path / "spill", WORK_MEM)


@pytest.fixture
def stored(buffer: ReorderBuffer, tmp_path: Path) -> Path:
    """A prepared transaction with an aborted subtransaction, some of it spilled."""
    buffer.append(10, rows(10, 1000), lsn=Lsn(77))
    buffer.append(11, rows(11, 10), top=10)
    buffer.spill()
    buffer.append(12, rows(12, 10), top=10)
    buffer.abort(11)
    path = tmp_path / "prepared" / "one"
    with buffer.prepare(10, "one") as transaction:
        durable.persist(transaction, path, {"gid": "one", "prepare_lsn": 5})
    buffer.close()
    return path


def test_a_persisted_transaction_is_loaded_as_it_was(stored: Path) -> None:
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert stat.S_IMODE(stored.parent.stat().st_mode) == 0o700
    assert spilled(stored.parent) == [stored]
    for _ in range(2):
        found = durable.load(stored)
        assert found.metadata == {"gid": "one", "prepare_lsn": 5}
        with found.transaction as transaction:
            assert (transaction.xid, transaction.first_lsn, transaction.xids) == (10, 77, {10, 12})
            assert (transaction.count, transaction.nbytes) == (1010, 101_000)
            assert read(transaction) == [*rows(10, 1000), *rows(12, 10)]
    with pa.ipc.open_stream(stored.read_bytes()) as stream:
        assert stream.read_all().num_rows == 1010
    durable.remove(stored)
    durable.remove(stored)
    with pytest.raises(FileFailure) as caught:
        durable.load(stored)
    assert caught.value.sqlstate == "58P01"


def test_a_file_is_synced_before_it_is_renamed(
    buffer: ReorderBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    fsync, rename = os.fsync, Path.rename

    def synced(file: int) -> None:
        steps.append(("fsync", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        fsync(file)

    def renamed(path: Path, target: Path) -> Path:
        steps.append(("rename", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    buffer.append(10, rows(10, 3))
    durable.persist(buffer.prepare(10, "one"), tmp_path / "prepared" / "one", {})
    # The directory is new: its name is made durable first.
    written = [("fsync", "one" + durable.TEMPORARY), ("rename", "one"), ("fsync", "prepared")]
    assert steps == [("fsync", tmp_path.name), *written]
    steps.clear()
    durable.remove(tmp_path / "prepared" / "one")
    assert steps == [("fsync", "prepared")]


PERSISTING = """
import sys
from pathlib import Path
from pubsub.reorderbuffer import durable
from pubsub.reorderbuffer.buffer import ReorderBuffer
home = Path(sys.argv[1])
buffer = ReorderBuffer(home / "spill", 64 << 10)
buffer.append(10, [b"x" * 100] * 1000)
buffer.spill()
durable.persist(buffer.prepare(10, "one"), home / "prepared" / "one", {})
"""


@pytest.mark.parametrize("point", ["spill.write", "persist.rename"])
def test_killed_while_writing(tmp_path: Path, point: str) -> None:
    """The file is complete or absent; leftovers are removed at the next start."""
    faults_directory = tmp_path / "faults"
    faults_directory.mkdir()
    (faults_directory / point).write_text("kill")
    environment = os.environ | {"PUBSUB_FAULT": str(faults_directory)}
    killed = subprocess.run([sys.executable, "-c", PERSISTING, str(tmp_path)], env=environment, check=False)
    assert killed.returncode == -9
    assert (faults_directory / f"{point}.reached").exists()
    assert not (tmp_path / "prepared" / "one").exists()
    assert len(spilled(tmp_path / "spill")) == 1
    ReorderBuffer(tmp_path / "spill", WORK_MEM)
    assert spilled(tmp_path / "spill") == []
    files.remove_all(tmp_path / "prepared", durable.TEMPORARY)
    assert spilled(tmp_path / "prepared") == []


def test_an_empty_transaction_can_be_persisted(buffer: ReorderBuffer, tmp_path: Path) -> None:
    path = tmp_path / "prepared" / "empty"
    path.parent.mkdir()
    path.with_name(path.name + durable.TEMPORARY).write_bytes(b"of a killed process")
    durable.persist(buffer.prepare(10, "empty"), path, {})
    assert read(durable.load(path).transaction) == []
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        assert stream.read_all().num_rows == 0


def test_a_streamed_transaction_can_be_persisted(buffer: ReorderBuffer, tmp_path: Path) -> None:
    plain = frame(Insert(Oid(50), (b"1", b"a")))
    buffer.append_tagged(10, [plain[:26] + (10).to_bytes(4, "big") + plain[26:]])
    durable.persist(buffer.prepare(10, "one"), tmp_path / "one", {})
    [block] = durable.load(tmp_path / "one").transaction.blocks()
    assert block.header == STREAM_HEADER
    assert list(split_by_relation([block])) == [50]


def test_any_altered_byte_of_a_persisted_transaction_is_noticed(stored: Path) -> None:
    whole = stored.read_bytes()
    segments = durable.load(stored).transaction.files[0].segments
    first, end = segments[0].offset, segments[-1].offset + segments[-1].length
    places = [*range(first, end, 997), *range(end + 8, len(whole))]
    for place in places:
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        stored.write_bytes(altered)
        with pytest.raises(DataCorrupted):
            read(durable.load(stored).transaction)


def test_a_torn_persisted_transaction_is_refused(stored: Path) -> None:
    whole = stored.read_bytes()
    for length in [*range(100), *range(100, len(whole), 997), len(whole) - 1]:
        stored.write_bytes(whole[:length])
        with pytest.raises(DataCorrupted):
            read(durable.load(stored).transaction)
    for altered in (whole + whole[-20:], whole[:50_000] + whole[50_001:], whole[:50_000] + b"." + whole[50_000:]):
        stored.write_bytes(altered)
        with pytest.raises(DataCorrupted):
            durable.load(stored)


def test_a_full_disk_while_persisting(buffer: ReorderBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room at all, room for half, or for all but the last byte."""
    buffer.append(10, rows(10, 1000))
    transaction = buffer.prepare(10, "one")
    path = tmp_path / "prepared" / "one"
    durable.persist(transaction, path, {})
    size = path.stat().st_size
    path.unlink()
    for room in (0, size // 2, size - 1):
        with room_for(room), pytest.raises(DiskFull):
            durable.persist(transaction, path, {})
        assert spilled(path.parent) == []
    durable.persist(transaction, path, {})
    assert read(durable.load(path).transaction) == rows(10, 1000)


def test_a_transaction_with_a_damaged_spill_file_is_not_persisted(buffer: ReorderBuffer, tmp_path: Path) -> None:
    transaction, path = on_disk(buffer)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DataCorrupted):
        durable.persist(transaction, tmp_path / "prepared" / "one", {})
    assert spilled(tmp_path / "prepared") == []


def test_unfinished_files_are_removed_by_their_name(stored: Path) -> None:
    stored.rename(stored.with_name("two" + durable.TEMPORARY))
    files.remove_all(stored.parent, durable.TEMPORARY)
    assert spilled(stored.parent) == []
    files.remove_all(stored.parent / "nowhere", durable.TEMPORARY)
