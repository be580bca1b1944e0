"""A directory of segments: which file is read, how far, and of which system it is."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import random
from pathlib import Path

import pyarrow as pa
import pytest

from pubsub.errors import PubsubError
from pubsub.protocol.timeline import TimelineHistory
from tests.unit.walsender.wal import GEOMETRY, SEGMENT, SYSTEM, Wal, main_data
from walsender.source.segments import SegmentDirectory
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import XLOG_BLCKSZ

ONLY = TimelineHistory.only(1)
FIRST = "000000010000000000000001"
SECOND = "000000010000000000000002"


def segments(count: int) -> list[bytes]:
    """Make segments of timeline 1, from the first segment after the start of the WAL."""
    wal = Wal()
    while len(wal.data) < count * SEGMENT:
        wal.record(main_data(bytes(200)))
    return [bytes(wal.data[i * SEGMENT : (i + 1) * SEGMENT]) for i in range(count)]


def opened(path: Path, system: int = SYSTEM) -> SegmentDirectory:
    return SegmentDirectory(path, GEOMETRY, system)


def whole(directory: SegmentDirectory, lsn: int, history: TimelineHistory = ONLY) -> tuple[int, bytes]:
    pieces = list(directory.read(lsn, history))
    for (start, data), (behind, _) in itertools.pairwise(pieces):
        assert start + len(data) == behind
    return pieces[0][0], b"".join(data for _, data in pieces)


def test_plain_compressed_and_partial_files_are_read(tmp_path: Path) -> None:
    one, two, three = segments(3)
    (tmp_path / FIRST).write_bytes(one)
    (tmp_path / f"{SECOND}.gz").write_bytes(gzip.compress(two))
    (tmp_path / "000000010000000000000003.partial").write_bytes(three[:50_000])
    (tmp_path / "000000010000000000000003.00000028.backup").write_bytes(b"no segment")
    (tmp_path / "000000010000FFFF0000FFFF").write_bytes(b"no name of a segment of this size")
    directory = opened(tmp_path)
    start = SEGMENT + 123_456
    assert whole(directory, start) == (start, (one + two + three[:50_000])[123_456:])
    assert directory.find(4 * SEGMENT, ONLY) is None
    assert directory.has_after(2 * SEGMENT + 5)
    assert not directory.has_after(3 * SEGMENT)


@pytest.mark.parametrize(("codec", "name"), [("gzip", ".gz"), ("lz4", ".lz4"), ("zstd", ".zst")])
@pytest.mark.parametrize("order", ["{0}.partial", ".partial{0}", "{0}"])
def test_a_compressed_file_that_is_being_written(tmp_path: Path, codec: str, name: str, order: str) -> None:
    """Reading returns what is there, byte for byte."""
    one = random.Random(1).randbytes(SEGMENT)
    path = tmp_path / (FIRST + order.format(name))
    with pa.CompressedOutputStream(str(path), codec) as output:
        output.write(one)
    directory = opened(tmp_path)
    assert whole(directory, SEGMENT) == (SEGMENT, one)
    data = path.read_bytes()
    for size in (len(data) * 2 // 3, 100, 3, 0):
        path.write_bytes(data[:size])
        found = b"".join(piece for _, piece in directory.read(SEGMENT, ONLY))
        assert found == one[: len(found)]
        assert bool(found) == (size > 100)
        assert not directory.has_after(SEGMENT)


def test_files_that_a_server_keeps_for_later_are_not_written(tmp_path: Path) -> None:
    one, two = segments(2)
    directory = opened(tmp_path)
    (tmp_path / SECOND).write_bytes(bytes(SEGMENT))
    assert not directory.has_written(2 * SEGMENT, ONLY)
    (tmp_path / SECOND).write_bytes(one)
    assert not directory.has_written(2 * SEGMENT, ONLY)
    (tmp_path / SECOND).write_bytes(b"")
    assert not directory.has_written(2 * SEGMENT, ONLY)
    (tmp_path / SECOND).write_bytes(two)
    assert directory.has_written(2 * SEGMENT, ONLY)


def test_segments_of_another_cluster_are_refused(tmp_path: Path) -> None:
    one, two = segments(2)
    (tmp_path / FIRST).write_bytes(one)
    (tmp_path / SECOND).write_bytes(two)
    directory = opened(tmp_path, SYSTEM + 1)
    with pytest.raises(WalCorrupted, match="WAL file is from different database system") as caught:
        whole(directory, SEGMENT + 500_000)
    assert FIRST in str(caught.value.detail)
    with pytest.raises(WalCorrupted, match="WAL file is from different database system"):
        directory.has_written(2 * SEGMENT, ONLY)


def test_a_timeline_counts_up_to_where_it_was_left(tmp_path: Path) -> None:
    """WAL that a server wrote on the timeline after the switch is not part of the history."""
    one, two = segments(2)
    (tmp_path / FIRST).write_bytes(one)
    (tmp_path / SECOND).write_bytes(two)
    switch = SEGMENT + 10 * XLOG_BLCKSZ + 400
    history = TimelineHistory(((1, switch), (2, 1 << 64)))
    directory = opened(tmp_path)
    assert whole(directory, SEGMENT, history) == (SEGMENT, one[: switch - SEGMENT])
    # The new timeline's file begins with a copy of the old one's WAL.
    (tmp_path / "000000020000000000000001").write_bytes(one[: switch - SEGMENT] + b"2" * 100)
    assert whole(directory, SEGMENT, history) == (SEGMENT, one[: switch - SEGMENT] + b"2" * 100)


def test_an_unreadable_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are typed, with the system's words.  Denials are simulated: tests may be allowed to read everything."""
    (tmp_path / FIRST).write_bytes(b"")
    for path, text in (
        (tmp_path / "nowhere", "No such file or directory"),
        (tmp_path / FIRST, "Not a directory"),
    ):
        with pytest.raises(PubsubError) as caught:
            opened(path)
        assert caught.value.message == f'could not open directory "{path}": {text}'
        assert caught.value.sqlstate == "58P01"
    directory = opened(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PubsubError, match=r'could not read file ".*": Permission denied$'):
        list(directory.read(SEGMENT, ONLY))
    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PubsubError, match=r'could not stat file ".*": Permission denied$') as caught:
        list(directory.read(SEGMENT, ONLY))
    assert caught.value.sqlstate == "42501"
    with pytest.raises(PubsubError, match=r'could not open directory ".*": Permission denied$'):
        opened(tmp_path)
