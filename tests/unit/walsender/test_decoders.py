"""What a stream is told that is asked for while its decoding process is ending."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, cast

from pubsub.errors import DataCorrupted
from pubsub.protocol.output.styles import Styles
from walsender.feed.feed import Feed
from walsender.historic.upstream import SessionTexts
from walsender.server.decoders import Decoder, Served
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
