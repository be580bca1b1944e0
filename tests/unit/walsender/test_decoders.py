"""What a stream is told that is asked for while its decoding process is ending."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pubsub.errors import DataCorrupted
from pubsub.forks.channel import Channel
from pubsub.forks.processes import Processes
from pubsub.protocol.output.styles import Styles
from walsender.feed.feed import Feed
from walsender.historic.upstream import SessionTexts
from walsender.server.decoders import Decoder, Decoders, Served
from walsender.streaming import requests
from walsender.streaming.catalogs import Catalogs
from walsender.streaming.process import DecodingProcess
from walsender.streaming.requests import StreamEnd, StreamRequest, Task
from walsender.streaming.subscriber import STOPPED

REASON = "WAL file is from different database system"


async def _cannot_be_read(_catalogs: Catalogs, _lsn: int, _redo: int) -> Any:
    raise DataCorrupted(REASON)


async def test_a_stream_that_is_asked_for_meanwhile_is_told_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalogs, "before", _cannot_be_read)
    ours, theirs = socket.socketpair()
    received: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
    channel = Channel(ours, lambda kind, contents, _: received.put_nowait((kind, contents)), lambda: None)
    directories = {}
    for name in ("spool", "states", "spill"):
        (tmp_path / name).mkdir()
        directories[name] = str(tmp_path / name)
    task = Task(
        "", 5, **directories, segment_size=1 << 24, system_identifier=1, work_mem=1, tip=0, redo=0, answer_timeout=0
    )
    running = asyncio.create_task(DecodingProcess(theirs).run())
    channel.send(requests.TASK, task.write())
    kind, contents = await asyncio.wait_for(received.get(), 60)
    assert (kind, json.loads(contents)["message"]) == (requests.FAILURE, REASON)
    client, lent = socket.socketpair()
    with client, lent:
        request = StreamRequest(
            7, "test_decoding", {}, 0, 0, 0, None, "UTF8", SessionTexts(Styles(), False, (), False), 60.0
        )
        channel.send(requests.START, request.write(), [lent.fileno()])
        kind, contents = await asyncio.wait_for(received.get(), 60)
        while kind != requests.DONE:
            kind, contents = await asyncio.wait_for(received.get(), 60)
    end = StreamEnd.read(contents)
    assert (end.number, end.how) == (7, STOPPED)
    assert end.error is not None
    assert end.error["message"] == REASON
    channel.send(requests.BYE)
    await asyncio.wait_for(running, 60)
    channel.close()


async def test_an_exception_that_nobody_expects_ends_the_pass_s_streams() -> None:
    """It was written to the log, and the next record was read as if nothing had happened."""

    class Broken:
        subscribers: list[Any]
        is_consistent = False
        works = 0

        def work(self, _tip: int, *, patient: bool) -> bool:
            self.works += 1
            raise KeyError("a bug")

        def close(self) -> None: ...

        def remove(self, _subscriber: object) -> None: ...

    class Subscribed:
        number = 3
        ended: tuple[str, Any] | None = None

        def end(self, how: str, error: Any) -> None:
            self.ended = how, error

        def keep_alive(self, _now: float) -> None: ...

    class Process(DecodingProcess):
        def _tip_of(self, one: object) -> int:
            return 0

    ours, theirs = socket.socketpair()
    with ours:
        process = Process(theirs)
        base, other, subscribed = Broken(), Broken(), Subscribed()
        base.subscribers, other.subscribers = [], [subscribed]
        process._base = cast(Any, base)
        process._passes = cast(Any, [base, other])
        process._work()
        assert subscribed.ended is not None
        how, error = subscribed.ended
        assert (how, error.sqlstate, "KeyError" in error.message) == (STOPPED, "XX000", True)
        assert process._passes == []
        assert process._base is None
        process._work()
        assert (base.works, other.works) == (1, 1)
        process._channel.close()


async def test_an_exception_between_passes_ends_the_process() -> None:
    class Process(DecodingProcess):
        def _merge(self) -> None:
            raise KeyError("a bug")

    ours, theirs = socket.socketpair()
    received: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
    channel = Channel(ours, lambda kind, contents, _: received.put_nowait((kind, contents)), lambda: None)
    process = Process(theirs)
    process._work()
    kind, contents = await asyncio.wait_for(received.get(), 60)
    assert (kind, json.loads(contents)["sqlstate"]) == (requests.FAILURE, "XX000")
    channel.close()
    process._channel.close()


async def test_a_process_is_kept_whose_slot_was_made_meanwhile(tmp_path: Path) -> None:
    """While another process was started, or ended, a client may have begun to use one that had no slot before."""
    stopped: list[int] = []
    looked_again = asyncio.Event()

    class Slots(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            if stopped:
                looked_again.set()
            return super().__iter__()

    class Running:
        def __init__(self, oid: int) -> None:
            self.oid = oid
            self.failed = asyncio.Event()

        def tell(self, _lsn: int) -> None: ...

        async def stop(self) -> None:
            stopped.append(self.oid)
            slots[:] = [slot(1), slot(3)]

    def slot(oid: int) -> Any:
        return SimpleNamespace(database_oid=oid, database="d", invalidation_reason=None)

    slots = Slots([slot(1)])
    feed: Any = SimpleNamespace(received=0)
    decoders = Decoders(tmp_path, cast(Any, None), feed, cast(Any, slots), 1, Processes({}))
    decoders._decoders = cast(Any, {oid: Running(oid) for oid in (1, 2, 3)})
    running = asyncio.create_task(decoders.run())
    await asyncio.wait_for(looked_again.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert stopped == [2]
    assert sorted(decoders._decoders) == [1, 3]


async def test_a_process_that_starts_hears_what_the_others_were_told_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of its failover slots stood still for ever: it took them for limited."""
    starts, may_start = asyncio.Event(), asyncio.Event()

    class Starting:
        def __init__(self, _task: object, _feed: object, _processes: object) -> None:
            self.told = 0
            self.failed = asyncio.Event()

        async def start(self) -> None:
            starts.set()
            await may_start.wait()

        def limit(self, lsn: int) -> None:
            self.told = lsn

    monkeypatch.setattr("walsender.server.decoders.Decoder", Starting)
    feed: Any = SimpleNamespace(
        spool=SimpleNamespace(directory=tmp_path),
        geometry=SimpleNamespace(segment_size=1 << 24),
        server=SimpleNamespace(system_identifier="7"),
        received=0,
        receiver_timeout=60,
        redo_for=lambda lsn: lsn,
    )
    upstream: Any = SimpleNamespace(conninfo="")
    decoders = Decoders(tmp_path, upstream, feed, cast(Any, [_slot(1, 600)]), 1, Processes({}))
    started = asyncio.create_task(decoders.of(_slot(1, 600)))
    await starts.wait()
    decoders.limit(None)
    may_start.set()
    decoder: Any = await started
    assert decoder.told == requests.UNLIMITED


async def _look_once(decoders: Decoders, slots: _Slots) -> None:
    """Let the decoding processes be looked after until the slots have been looked at twice."""
    running = asyncio.create_task(decoders.run())
    await asyncio.wait_for(slots.looked_again.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class _Slots(list[Any]):
    """Slots of databases, which have the oids 1, 2 …; `looked_again` is set when they are looked at often."""

    def __init__(self, *slots: Any) -> None:
        super().__init__(slots)
        self.looked_again = asyncio.Event()
        self._looks = 0

    def __iter__(self) -> Iterator[Any]:
        self._looks += 1
        if self._looks > 10:
            self.looked_again.set()
        return super().__iter__()


def _slot(oid: int, restart: int = 0, reason: str | None = None) -> Any:
    return SimpleNamespace(
        database_oid=oid, database="d", invalidation_reason=reason, restart_lsn=restart, saved_restart_lsn=restart
    )


def _save_catalogs(directory: Path, oid: int, *positions: int) -> Path:
    """Put files there as the database's process saves them; return where they are."""
    at = directory / "catalogs" / str(oid)
    at.mkdir(parents=True)
    for position in positions:
        (at / f"{position:016X}.catalogs").write_bytes(b"")
    return at


async def test_catalogs_go_with_the_last_slot_of_a_database(tmp_path: Path) -> None:
    """A slot that was made much later began at them, and asked the archive for all the WAL since."""
    kept, gone, lost = (_save_catalogs(tmp_path, oid, 100, 200) for oid in (1, 2, 3))
    (gone / "0000000000000300.catalogs.tmp").touch()
    slots = _Slots(_slot(1), _slot(3, reason="wal_removed"))
    decoders = Decoders(
        tmp_path, cast(Any, None), cast(Any, SimpleNamespace(received=0)), cast(Any, slots), 1, Processes({})
    )
    running: Any = SimpleNamespace(failed=asyncio.Event(), tell=lambda _: None)
    decoders._decoders = {1: running}
    slots._looks = 8
    await _look_once(decoders, slots)
    assert len(list(kept.iterdir())) == 2
    assert [path.exists() for path in (gone, lost)] == [False, False]


def test_old_catalogs_hold_no_wal_for_a_slot_that_does_not_begin_at_them(tmp_path: Path) -> None:
    """They lie before the spool: who begins in the spool reads the catalogs from the server."""
    _save_catalogs(tmp_path, 1, 100, 700)
    _save_catalogs(tmp_path, 2, 200)
    feed: Any = SimpleNamespace(oldest=500)
    slots = _slot(1, 600), _slot(1, 800), _slot(2, 600), _slot(2, 400)
    stores = [Decoders(tmp_path, cast(Any, None), feed, cast(Any, [slot]), 1, Processes({})) for slot in slots]
    assert [one.oldest_needed() for one in stores] == [600, 700, 600, 200]


def test_a_look_at_the_catalogs_leaves_alone_what_is_being_written(tmp_path: Path) -> None:
    """The database's process writes them; its file that was not renamed yet was removed."""
    at = _save_catalogs(tmp_path, 1, 100)
    aside = at / "00000000000000C8.catalogs.tmp"
    aside.touch()
    feed: Any = SimpleNamespace(oldest=0)
    slots: Any = [_slot(1, 600), _slot(2, 300)]
    assert Decoders(tmp_path, cast(Any, None), feed, slots, 1, Processes({})).oldest_needed() == 100
    assert aside.exists()
    assert not (tmp_path / "catalogs" / "2").exists()


async def test_catalogs_from_before_missing_wal_are_removed(tmp_path: Path) -> None:
    catalogs = [_save_catalogs(tmp_path, oid, 100, 500, 600) for oid in (1, 2)]
    decoders = Decoders(tmp_path, cast(Any, None), cast(Any, None), cast(Any, []), 1, Processes({}))
    await decoders.begin_anew(500)
    for one in catalogs:
        assert sorted(path.stem[-3:] for path in one.iterdir()) == ["1F4", "258"]


def test_catalogs_from_behind_the_wal_that_is_there_are_removed(tmp_path: Path) -> None:
    """The server may have been promoted on another timeline since a power loss: there they are others."""
    catalogs = _save_catalogs(tmp_path, 1, 100, 500, 600)
    Decoders(tmp_path, cast(Any, None), cast(Any, None), cast(Any, []), 1, Processes({})).forget_from(500)
    assert [path.stem[-3:] for path in catalogs.iterdir()] == ["064"]


@pytest.mark.parametrize("stays", [False, True])
async def test_a_client_that_leaves_while_its_pass_is_prepared(stays: bool) -> None:
    """A pass that was made for it alone was never removed, and went on reading all that came."""
    streams = [SimpleNamespace(subscriber=SimpleNamespace(ending=None), restart=5, redo=1) for _ in range(2)]
    for stream in streams:
        stream.request = SimpleNamespace(failover=False)
        stream.wish = lambda start, stream=stream: (stream, start)
    made: list[list[Any]] = []

    async def before(lsn: int, redo: int) -> None:
        streams[0].subscriber.ending = "closed"
        if not stays:
            streams[1].subscriber.ending = "closed"

    class Process(DecodingProcess):
        def _new_pass(self, state: Any, *, limited: bool = False) -> Any:
            return SimpleNamespace(add=made.append)

    ours, theirs = socket.socketpair()
    with ours:
        process = Process(theirs)
        process._catalogs = cast(Any, SimpleNamespace(before=before))
        await process._begin_behind(cast(Any, [(stream, 7) for stream in streams]))
        assert made == ([[(streams[1], 7)]] if stays else [])
        process._channel.close()


async def test_a_stream_that_comes_too_late_is_told_the_reason() -> None:
    class Listening:
        listeners: set[object]

        def __init__(self) -> None:
            self.listeners = set()

    class Told:
        end: StreamEnd | None = None

        def ended(self, end: StreamEnd) -> None:
            self.end = end

    ours, theirs = socket.socketpair()
    decoder = Decoder(cast(Task, None), cast(Feed, Listening()), Processes({}))
    told: asyncio.Queue[bytes] = asyncio.Queue()
    process = Channel(theirs, lambda kind, _contents, _files: told.put_nowait(kind), lambda: None)
    decoder._channel = Channel(ours, decoder._message, decoder._gone)
    process.send(requests.FAILURE, json.dumps(DataCorrupted(REASON).fields()).encode())
    await asyncio.wait_for(decoder.failed.wait(), 60)
    assert await asyncio.wait_for(told.get(), 60) == requests.BYE
    stream = Told()
    decoder.begin(cast(Served, stream), {"received": b"rest"}, -1)
    assert stream.end is not None
    assert stream.end.error is not None
    assert (stream.end.error["message"], stream.end.rest) == (REASON, b"rest")
    process.close()
