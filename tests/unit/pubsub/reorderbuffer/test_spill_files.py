"""Spill files that are missing, cut short, altered or replaced, and a disk without room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pubsub.errors import DataCorrupted
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.files import DiskFull, FileFailure
from tests.support.disk import room_for
from tests.support.reorderbuffer import WORK_MEM, on_disk, read, rows, spilled


@pytest.fixture
def buffer(tmp_path: Path) -> ReorderBuffer:
    return ReorderBuffer(tmp_path / "spill", WORK_MEM)


def test_a_missing_file(buffer: ReorderBuffer) -> None:
    transaction, path = on_disk(buffer)
    path.unlink()
    with pytest.raises(FileFailure) as caught:
        read(transaction)
    assert caught.value.sqlstate == "58P01"
    transaction.release()
    assert buffer.memory == 0


def test_a_file_missing_when_more_is_to_be_written(buffer: ReorderBuffer, tmp_path: Path) -> None:
    buffer.append(10, rows(10, 1000))
    buffer.spill()
    [path] = spilled(tmp_path / "spill")
    path.unlink()
    buffer.append(10, rows(10, 1000))
    with pytest.raises(FileFailure) as caught:
        buffer.spill()
    assert caught.value.sqlstate == "58P01"


def test_a_torn_file(buffer: ReorderBuffer) -> None:
    transaction, path = on_disk(buffer)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DataCorrupted) as caught:
        read(transaction)
    assert caught.value.sqlstate == "XX001"


def test_any_altered_byte_is_noticed(buffer: ReorderBuffer) -> None:
    transaction, path = on_disk(buffer)
    whole = path.read_bytes()
    good = read(transaction)
    file = transaction.files[0]
    first = file.segments[0].offset
    for place in [*range(first, first + 600), *range(first + 600, len(whole), 997), len(whole) - 1]:
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        with pytest.raises(DataCorrupted, match="checksum"):
            read(transaction)
    path.write_bytes(whole)
    assert read(transaction) == good


def test_a_symbolic_link_in_place_of_a_spill_file_is_refused(buffer: ReorderBuffer, tmp_path: Path) -> None:
    transaction, path = on_disk(buffer)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileFailure):
        read(transaction)


@pytest.mark.parametrize("room", [0, 1, 50_000, 2_500_000])
def test_a_full_disk(buffer: ReorderBuffer, tmp_path: Path, room: int) -> None:
    """Nothing is lost, and spilling succeeds once there is room."""
    frames = rows(10, 50_000)
    buffer.append(10, frames)
    with room_for(room), pytest.raises(DiskFull) as caught:
        buffer.spill()
    assert caught.value.sqlstate == "53100"
    transaction = buffer.get(10)
    assert transaction is not None
    assert buffer.memory == transaction.memory > 0
    # A partly written segment is removed again.
    assert [path.stat().st_size for path in spilled(tmp_path / "spill")] == [file.end for file in transaction.files]
    assert buffer.statistics.spill_count == (room > 2_000_000)
    buffer.spill()
    assert buffer.memory == 0
    assert buffer.statistics.spill_bytes == 5_000_000
    assert buffer.statistics.spill_txns == 1
    assert read(buffer.commit(10)) == frames
