"""Looking for a commit's record in WAL that a server streams: pages, records across them, and what is none."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from apply import last_commit
from apply.last_commit import check_last_commit, streams_from
from apply.publisher_identity import PublisherLost
from catalog.records import LastCommit
from pubsub.errors import PublisherError
from pubsub.protocol.copyboth import XLogData, write_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory
from pubsub.publisher import commit_record, replication
from pubsub.publisher.commit_record import CannotTell, is_commit_at
from pubsub.publisher.replication import SystemIdentity
from pubsub.publisher.slots import SlotInfo
from tests.unit.apply.test_publisher_identity import SLOT, SUBSCRIPTION

PAGE = 8192
SEGMENT = 4 * PAGE
TIME = 812_345_678_901_234


def record(length: int, *, manager: int = 1, time: int = TIME) -> bytes:
    header = struct.pack("<IIQBBxxI", length, 750, 0, 0, manager, 0)
    return header + b"\xff\x08" + struct.pack("<q", time) + bytes(length - len(header) - 10)


def wal(records: Sequence[bytes], begin: int, skip: int, magic: int = 0xD118) -> tuple[bytes, list[Lsn]]:
    """Lay records out on pages from `begin` on, the first `skip` bytes after the header; return where each begins."""
    out = bytearray()

    def header() -> None:
        long = (begin + len(out)) % SEGMENT == 0
        out.extend(
            struct.pack("<HHIQI", magic, 2 if long else 0, 1, begin + len(out), 0).ljust(40 if long else 24, b"\0")
        )

    def put(data: bytes) -> None:
        for byte in data:
            if len(out) % PAGE == 0:
                header()
            out.append(byte)

    put(bytes(skip))
    places = []
    for one in records:
        if len(out) % PAGE == 0:
            header()
        places.append(Lsn(begin + len(out)))
        put(one.ljust(-(-len(one) // 8) * 8, b"\0"))
    return bytes(out), places


class Server:
    """commit_record's connection and stream: it sends `data`, which begins at `begin`, in pieces."""

    def __init__(self, data: bytes, begin: int, piece: int) -> None:
        self.data, self.begin, self.piece = data, begin, piece
        self.command = ""
        self.size = str(PAGE)

    async def connect(self, *_: Any, **_more: Any) -> Server:
        return self

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def query(self, sql: str) -> list[tuple[str]]:
        assert sql == "SHOW wal_block_size"
        return [(self.size,)]

    async def start_copy_both(self, command: str) -> None:
        self.command = command

    async def receive(self) -> list[bytes]:
        if not self.data:
            raise PublisherError("the stream has ended")
        piece, self.data = self.data[: self.piece], self.data[self.piece :]
        frame = write_server_message(XLogData(Lsn(self.begin), Lsn(0), 0, piece))
        self.begin += len(piece)
        return [frame]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    def serve(data: bytes, begin: int, piece: int = 5000) -> Server:
        server = Server(data, begin, piece)
        monkeypatch.setattr(commit_record, "Connection", server)
        monkeypatch.setattr(commit_record, "ReplicationStream", lambda connection: connection)
        return server

    return serve


@pytest.mark.parametrize("skip", [0, 8, 100, PAGE - 24 - 8, PAGE - 24 - 16, PAGE - 24, 3 * PAGE])
@pytest.mark.parametrize("length", [34, 60, 9000, 40_000])
@pytest.mark.parametrize("page", [0, 1, 3])
async def test_a_commit_is_found_wherever_it_stands(serve: Any, skip: int, length: int, page: int) -> None:
    begin = SEGMENT * 7 + page * PAGE
    data, (place, after) = wal([record(length), record(50)], begin, skip)
    first = place - place % PAGE
    end = Lsn(begin + len(data))
    for piece in (1000, 1 << 20):
        server = serve(data[first - begin :], first, piece)
        assert await is_commit_at("", "s", 3, place, TIME, after)
        assert server.command == f"START_REPLICATION PHYSICAL {Lsn(first)} TIMELINE 3"
    serve(data[first - begin :], first)
    assert not await is_commit_at("", "s", 3, place, TIME + 1, end)
    # Its end is past what was received: it is another one.
    serve(data[first - begin :], first)
    assert not await is_commit_at("", "s", 3, place, TIME, Lsn(place + length - 1))


async def test_what_is_no_commit(serve: Any) -> None:
    begin = SEGMENT
    data, (place, other) = wal([record(600, manager=10), record(600)], begin, 0)
    end = Lsn(begin + len(data))
    serve(data, begin)
    assert not await is_commit_at("", "s", 1, place, TIME, end)
    # The middle of a record: its length and its kind are those of no record.
    serve(data, begin)
    assert not await is_commit_at("", "s", 1, Lsn(other + 16), TIME, end)


async def test_what_cannot_be_told(serve: Any) -> None:
    data, (place,) = wal([record(600)], SEGMENT, 0, magic=0x18D1)
    serve(data, SEGMENT)
    with pytest.raises(CannotTell, match="byte order"):
        await is_commit_at("", "s", 1, place, TIME, Lsn(place + 700))
    data, (place,) = wal([record(600)], SEGMENT, 0)
    serve(data[:300], SEGMENT)
    with pytest.raises(CannotTell, match="the stream has ended"):
        await is_commit_at("", "s", 1, place, TIME, Lsn(place + 700))
    for size in ("0", "-8192", "1", "8191", "many"):
        serve(data, SEGMENT).size = size
        with pytest.raises(CannotTell):
            await is_commit_at("", "s", 1, place, TIME, Lsn(place + 700))
    data, (place,) = wal([struct.pack("<I", 1 << 30) + record(600)[4:]], SEGMENT, 0)
    serve(data, SEGMENT)
    with pytest.raises(CannotTell, match="1073741824 bytes"):
        await is_commit_at("", "s", 1, place, TIME, Lsn(place + (1 << 31)))


@pytest.mark.parametrize(
    ("answer", "changes", "lost"),
    [
        (True, {}, False),
        (False, {}, True),
        (CannotTell("the WAL is removed"), {}, False),
        (False, {"system_identifier": "9"}, False),
    ],
)
async def test_only_a_commit_that_is_not_there_proves_a_loss(
    answer: bool | CannotTell, changes: dict[str, Any], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def history(connection: object, timeline: int) -> TimelineHistory:
        return TimelineHistory(((1, 40), (2, 120), (timeline, 1 << 64)))

    async def looked(*args: object) -> bool:
        asked.append(args)
        if isinstance(answer, CannotTell):
            raise answer
        return answer

    monkeypatch.setattr(replication, "timeline_history", history)
    monkeypatch.setattr(last_commit, "is_commit_at", looked)
    identity = SystemIdentity(changes.get("system_identifier", "1"), 3, Lsn(200), "db")
    nothing: Any = None
    await check_last_commit(nothing, SUBSCRIPTION, identity, None, Lsn(130))
    assert not asked
    check = check_last_commit(nothing, SUBSCRIPTION, identity, LastCommit(Lsn(100), TIME), Lsn(130))
    if lost:
        with pytest.raises(PublisherLost, match="the commit at 0/64") as caught:
            await check
        assert caught.value.lsn == 130
    else:
        await check
    if not changes:
        assert asked == [("", "s", 2, Lsn(100), TIME, Lsn(130))]


@pytest.mark.parametrize(
    ("confirmed", "last", "system", "begins"),
    [
        pytest.param(130, 100, "1", 130, id="the slot is where the origin is"),
        pytest.param(140, 100, "1", 130, id="the slot is past it"),
        pytest.param(120, 100, "1", 120, id="the slot is behind, past the last commit"),
        pytest.param(90, 100, "1", 101, id="the slot is before the last commit"),
        pytest.param(90, 129, "1", 130, id="the last commit ends at the origin"),
        pytest.param(None, 100, "1", 130, id="the slot is being made"),
        pytest.param(90, None, "1", 130, id="no transaction came"),
        pytest.param(90, 100, "9", 130, id="another system"),
    ],
)
def test_what_keepalives_have_passed_is_asked_for_again(
    confirmed: int | None, last: int | None, system: str, begins: int
) -> None:
    """A slot that stands before the origin may be that of a server that was restored, and writes there anew."""
    slot: SlotInfo = replace(SLOT, confirmed_flush_lsn=None if confirmed is None else Lsn(confirmed))
    commit = None if last is None else LastCommit(Lsn(last), TIME)
    identity = SystemIdentity(system, 3, Lsn(200), "db")
    assert streams_from(SUBSCRIPTION, identity, slot, commit, Lsn(130)) == begins
    assert streams_from(SUBSCRIPTION, identity, None, commit, Lsn(130)) == 130
