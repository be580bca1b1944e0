"""WAL of the archive is fetched beside what the event loop does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pubsub.protocol.timeline import TimelineHistory
from tests.unit.walsender.wal import SEGMENT, SYSTEM, Wal
from walsender.feed.archive import Archive
from walsender.feed.spool import Spool
from walsender.streaming.spool_reader import SpoolReader
from walsender.xlog.errors import WalMissing

SIZE = SEGMENT


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A spool that has the segment at 2 MB, and an archive that has the one at 1 MB, once the file `open` is there."""
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / f"{2 * SIZE:016X}").write_bytes(bytes([2]) * SIZE)
    wal = Wal(SIZE)
    wal.record(b"")
    (tmp_path / "000000010000000000000001").write_bytes(wal.data.ljust(SIZE, b"\x01"))
    wait = f"echo $$ >> {tmp_path}/asked; until test -e {tmp_path}/open; do sleep 0.02; done"
    Archive(None, f"{wait}; cp {tmp_path}/%f %p 2>/dev/null", SIZE, SYSTEM, TimelineHistory.only(1).entries).save(spool)
    return tmp_path


def _read(reader: SpoolReader, lsn: int, end: int) -> int:
    """Return up to where can be read."""
    for position, data in reader.read(lsn, end):
        assert position == lsn
        assert data[-1] == lsn // SIZE
        lsn += len(data)
    return lsn


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - a process, and a thread of the loop
            await asyncio.sleep(0.01)


async def test_a_segment_comes_from_the_archive_while_the_loop_goes_on(room: Path) -> None:
    fetched = asyncio.Event()
    reader = SpoolReader(Spool(room / "spool", SIZE), fetched.set)
    assert _read(reader, SIZE + 100, 3 * SIZE) == SIZE + 100
    assert reader.is_fetching
    await _until((room / "asked").exists)
    assert _read(reader, SIZE + 100, 3 * SIZE) == SIZE + 100, "it is not asked for twice"
    (room / "open").touch()
    async with asyncio.timeout(300):
        await fetched.wait()
    assert not reader.is_fetching
    assert _read(reader, SIZE + 100, 3 * SIZE) == 3 * SIZE
    assert len((room / "asked").read_text().split()) == 1
    reader.close()


async def test_what_nobody_has_is_missing_at_the_next_read(room: Path) -> None:
    (room / "open").touch()
    (room / "000000010000000000000001").unlink()
    reader = SpoolReader(Spool(room / "spool", SIZE))
    assert _read(reader, SIZE, 3 * SIZE) == SIZE
    async with asyncio.timeout(300):
        await reader.fetched()
    with pytest.raises(WalMissing, match="has already been removed"):
        _read(reader, SIZE, 3 * SIZE)
    assert not reader.is_fetching
    reader.close()


async def test_closing_ends_the_command_and_leaves_nothing_open(room: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = SpoolReader(Spool(room / "spool", SIZE))
    _read(reader, SIZE, 3 * SIZE)
    await _until((room / "asked").exists)
    reader.close()
    (command,) = (room / "asked").read_text().split()
    await _until(lambda: not Path(f"/proc/{command}").exists())
    # One that has come, and that nobody reads.
    (room / "open").touch()
    reader = SpoolReader(Spool(room / "spool", SIZE))
    _read(reader, SIZE, 3 * SIZE)
    await _until(lambda: not reader.is_fetching)
    reader.close()
    await _until(lambda: len(os.listdir("/proc/self/fd")) == before)


async def test_it_can_be_read_again_after_closing(room: Path) -> None:
    """Catalogs are read in two passes over the same source, which is closed between them."""
    (room / "open").touch()
    reader = SpoolReader(Spool(room / "spool", SIZE))
    for _ in range(2):
        assert _read(reader, SIZE, 3 * SIZE) == SIZE
        async with asyncio.timeout(300):
            await reader.fetched()
        assert _read(reader, SIZE, 3 * SIZE) == 3 * SIZE
        reader.close()
    # While a segment is being fetched, too.
    _read(reader, SIZE, 3 * SIZE)
    reader.close()
    _read(reader, SIZE, 3 * SIZE)
    async with asyncio.timeout(300):
        await reader.fetched()
    assert _read(reader, SIZE, 3 * SIZE) == 3 * SIZE
    reader.close()
