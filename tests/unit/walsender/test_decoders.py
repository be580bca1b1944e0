"""What a stream is told that is asked for while its decoding process is ending."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pubsub.errors import DataCorrupted
from pubsub.protocol.output.styles import Styles
from walsender.feed.feed import Feed
from walsender.historic.upstream import SessionTexts
from walsender.server.decoders import Decoder, Decoders, Served
from walsender.streaming import requests
from walsender.streaming.channel import Channel
from walsender.streaming.process import DecodingProcess
from walsender.streaming.requests import StreamEnd, StreamRequest, Task
from walsender.streaming.subscriber import STOPPED

REASON = "WAL file is from different database system"


class _Failing(DecodingProcess):
    """A process that cannot read the catalogs."""

    async def _catalogs(self, lsn: int, redo: int) -> Any:
        raise DataCorrupted(REASON)


async def test_a_stream_that_is_asked_for_meanwhile_is_told_the_reason(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    received: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
    channel = Channel(ours, lambda kind, contents, _: received.put_nowait((kind, contents)), lambda: None)
    directories = {}
    for name in ("spool", "states", "spill"):
        (tmp_path / name).mkdir()
        directories[name] = str(tmp_path / name)
    task = Task(
        "", **directories, segment_size=1 << 24, system_identifier=1, work_mem=1, tip=0, redo=0, answer_timeout=0
    )
    running = asyncio.create_task(_Failing(theirs).run())
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
    decoders = Decoders(tmp_path, cast(Any, None), feed, cast(Any, slots), 1)
    decoders._decoders = cast(Any, {oid: Running(oid) for oid in (1, 2, 3)})
    running = asyncio.create_task(decoders.run())
    await asyncio.wait_for(looked_again.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert stopped == [2]
    assert sorted(decoders._decoders) == [1, 3]


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
    decoder = Decoder(cast(Task, None), cast(Feed, Listening()), 0)
    told: asyncio.Queue[bytes] = asyncio.Queue()
    process = Channel(theirs, lambda kind, _contents, _files: told.put_nowait(kind), lambda: None)
    decoder._channel = Channel(ours, decoder._message, decoder._gone)
    process.send(requests.FAILURE, json.dumps(requests.error_fields(DataCorrupted(REASON))).encode())
    await asyncio.wait_for(decoder.failed.wait(), 60)
    assert await asyncio.wait_for(told.get(), 60) == requests.BYE
    stream = Told()
    decoder.begin(cast(Served, stream), {"received": b"rest"}, -1)
    assert stream.end is not None
    assert stream.end.error is not None
    assert (stream.end.error["message"], stream.end.rest) == (REASON, b"rest")
    process.close()
