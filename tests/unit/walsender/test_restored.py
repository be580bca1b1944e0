"""Segments that a restore_command fetches: what its end means, and how many of them stay."""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from pathlib import Path

import pytest

from pubsub.errors import DataCorrupted, PubsubError
from pubsub.protocol.timeline import TimelineHistory, parse_history
from walsender.source.restore import restore
from walsender.source.restored import KEPT, RestoredSegments
from walsender.xlog.geometry import Geometry

SIZE = 1 << 20
PATIENCE = 300.0
NAME = "000000010000000000000002"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "an archive"
    path.mkdir()
    return path


def test_a_command_has_its_places_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "fetched"
    assert restore("echo %f %r %% %x > %p", NAME, path)
    assert path.read_text() == f"{NAME} {'0' * 24} % %x\n"


@pytest.mark.parametrize("command", ["exit 1", "exit 125", "false"])
def test_a_file_that_is_not_there(tmp_path: Path, command: str) -> None:
    assert not restore(command, NAME, tmp_path / "fetched")


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("exit 126", "exited with exit code 126"),
        ("pubsub-no-such-program", "exited with exit code 127"),
        ("kill -TERM $$", "was terminated by signal 15"),
        ("sleep 1000 & wait", "took longer than 0.2 s"),
    ],
)
def test_a_command_that_could_not_tell(tmp_path: Path, command: str, how: str) -> None:
    with pytest.raises(
        PubsubError, match=f'could not restore file "{NAME}" from archive: child process {how}'
    ) as caught:
        restore(command, NAME, tmp_path / "fetched", timeout=0.2 if "sleep" in command else 0.0)
    assert caught.value.sqlstate == "58030"
    assert command in (caught.value.detail or "")


def test_a_command_is_killed_once_nobody_wants_the_file(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(PubsubError, match="signal 9"):
        restore("sleep 1000", NAME, tmp_path / "fetched", stop)


async def _provided(segments: RestoredSegments, lsn: int, history: TimelineHistory) -> list[str]:
    """Have a segment be there; return the names of all that are."""
    async for _ in segments.provide(lsn, history):
        pass
    return sorted(path.name for path in segments._path.iterdir())


def _segments(archive: Path, path: Path) -> RestoredSegments:
    command = f"cp {shlex.quote(str(archive))}/%f %p 2>/dev/null"
    return RestoredSegments(command, 60.0, path / "segments", Geometry(SIZE), 7)


async def test_a_few_segments_stay_and_those_that_are_wanted_again_first(archive: Path, tmp_path: Path) -> None:
    geometry, history = Geometry(SIZE), TimelineHistory.only(1)
    names = [geometry.segment_name(1, number * SIZE) for number in range(10)]
    for name in names[:-1]:
        (archive / name).write_bytes(bytes(SIZE))
    segments = _segments(archive, tmp_path)
    for number in (2, 3, 4, 5):
        found = await _provided(segments, number * SIZE, history)
    assert found == names[2:6]
    assert await _provided(segments, 2 * SIZE + 5, history) == names[2:6]
    (archive / names[2]).unlink()
    found = await _provided(segments, 6 * SIZE, history)
    assert len(found) == KEPT
    assert found == [names[2], *names[4:7]]
    assert await _provided(segments, 9 * SIZE, history) == found, "the archive does not have it"
    assert [segments.has_after(number * SIZE) for number in (5, 6)] == [True, False]


async def test_the_newest_timeline_that_has_the_segment_is_read(archive: Path, tmp_path: Path) -> None:
    geometry = Geometry(SIZE)
    history = parse_history(2, "1\t0/200064\tno recovery target specified\n")
    one, two = (geometry.segment_name(timeline, 2 * SIZE) for timeline in (1, 2))
    (archive / one).write_bytes(bytes(SIZE))
    segments = _segments(archive, tmp_path)
    assert await _provided(segments, 2 * SIZE, history) == [one]
    (archive / two).write_bytes(bytes(SIZE))
    assert await _provided(segments, 2 * SIZE, history) == [one, two]
    (archive / "00000002.history").write_text("1\t0/200064\tno recovery target specified\n")
    async for _ in segments.provide_history(2):
        pass
    assert segments.history(2).end_of(1) == 0x200064


async def test_a_file_of_another_size_is_no_segment(archive: Path, tmp_path: Path) -> None:
    name = Geometry(SIZE).segment_name(1, SIZE)
    (archive / name).write_bytes(bytes(1000))
    segments = _segments(archive, tmp_path)
    with pytest.raises(DataCorrupted, match=f'archive file "{name}" has wrong size: 1000 instead of {SIZE}'):
        await _provided(segments, SIZE, TimelineHistory.only(1))
    assert list(segments._path.iterdir()) == []


def _begun(pid: Path, path: Path) -> Path:
    """Wait until the command has written a file; return what the system shows of its process."""
    deadline = time.monotonic() + PATIENCE
    while not (pid.exists() and pid.read_text().strip() and list(path.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return Path("/proc") / pid.read_text().strip()


async def test_what_is_no_longer_wanted_leaves_neither_a_process_nor_a_file(tmp_path: Path) -> None:
    command = f"echo $$ > {tmp_path}/pid; echo half > %p; sleep 1000"
    segments = RestoredSegments(command, 0.0, tmp_path / "segments", Geometry(SIZE), 7)
    providing = asyncio.create_task(_provided(segments, SIZE, TimelineHistory.only(1)))
    process = await asyncio.to_thread(_begun, tmp_path / "pid", segments._path)
    assert process.exists()
    providing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await providing
    assert list(segments._path.iterdir()) == []
    assert not process.exists()
