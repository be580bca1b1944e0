"""The process that decodes a database for all its streams; it is forked (pubsub/forks).

    server ──► requests (requests.py), with the clients' sockets ──► passes ──► subscribers
    subscribers ──► positions ──► server, which keeps the slots

One pass, the base, follows the end of the WAL for as long as the process runs, with or without streams, and saves the
catalogs from time to time: a stream, or this process after a restart, begins there.  A stream that begins further back has
a pass of its own until that has reached the end.  One whose client is slow for long gets one again.

It ends when the server is gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pubsub.backend import messages as m
from pubsub.errors import PubsubError
from pubsub.forks.channel import Channel
from pubsub.reorderbuffer.directories import SpillDirectory
from walsender.feed.spool import Spool
from walsender.historic.state import CatalogState
from walsender.historic.tracker import CatalogDiverged
from walsender.plugin_request import PluginRequest
from walsender.streaming import requests
from walsender.streaming.backlog import Backlog
from walsender.streaming.catalogs import Catalogs
from walsender.streaming.passes import Pass, Wish
from walsender.streaming.requests import NUMBER, UNLIMITED, StreamEnd, StreamRequest, Task
from walsender.streaming.subscriber import STOPPED, Subscriber

_SPILL: Final = "decoding-"
_TICK: Final = 0.1
"""Seconds between two reports of positions, and looks at the clock."""
_PAUSE: Final = 0.005
"""Seconds between two beginnings of work, so that what comes in many pieces is done together."""
_GATHER: Final = 0.03
"""Seconds for which streams that begin are waited for, so that they can share a pass."""
_HELD: Final = 4 << 20
"""Bytes that wait for a client in memory; the rest is in a file."""
_SLOW: Final = 32 << 20
"""Bytes that may wait for a client of the base pass, before it gets a pass of its own."""
_NEAR: Final = 64 << 20
"""Bytes of WAL between streams that begin in one pass: one far behind does not keep the others waiting."""
_RETRY: Final = 1.0
"""Seconds after the base pass has failed, before there is another one."""


class _Stream:
    """A stream: its client, what it asks for, and from where it can begin again."""

    def __init__(self, request: StreamRequest, subscriber: Subscriber) -> None:
        self.request = request
        self.subscriber = subscriber
        self.restart = request.restart
        self.redo = request.redo
        self.reported: tuple[Any, ...] = ()
        self.stale = False
        """Whether it is fed with settings that are no longer its own."""
        self.resumes_at: int | None = None
        """Where it goes on once its client has taken everything; None: it is in a pass, or about to be."""

    def wish(self, start: int) -> Wish:
        one = self.request
        self.stale = False
        asked = PluginRequest(one.plugin, one.options, start, one.two_phase_at, one.client_encoding)
        return Wish(self.subscriber, asked, one.texts)


class DecodingProcess:
    """The process.  `run` lasts until the server is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._channel = Channel(sock, self._message, self._gone.set)
        self._task: Task
        self._begun = asyncio.Event()
        self._tip = 0
        self._failure: PubsubError | None = None
        """What the process ends because of; streams that are still asked for get it."""
        self._limit = 0
        """Where the WAL ends for failover slots; UNLIMITED: where it ends for all."""
        self._base: Pass | None = None
        self._passes: list[Pass] = []
        self._garbage = False
        """Whether a pass has ended, and still takes memory."""
        self._streams: dict[int, _Stream] = {}
        self._starting: list[tuple[_Stream, int]] = []
        """Streams that are to begin, each with where."""
        self._wanted = asyncio.Event()
        self._ended: list[tuple[Subscriber, str, PubsubError | None]] = []
        self._scheduled: asyncio.Handle | None = None
        self._worked = 0.0
        self._catalogs: Catalogs
        self._pause = 0.0
        self._rooms = 0
        self._spill_directory: SpillDirectory
        self._spill: Path

    async def run(self) -> None:
        """Work until the server is gone."""
        begun = asyncio.create_task(self._begun.wait())
        gone = asyncio.create_task(self._gone.wait())
        await asyncio.wait({begun, gone}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._gone.is_set():
            return
        with self._spill_directory:
            work: list[Coroutine[Any, Any, None]] = [self._begin(), self._tick()]
            running = {gone, *map(asyncio.create_task, work)}
            done, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for one in done:
                one.result()

    # Messages of the server

    def _message(self, kind: bytes, contents: bytes, files: list[int]) -> None:
        if kind == requests.TIP:
            (self._tip,) = NUMBER.unpack(contents)
            self._catalogs.reaches(self._tip)
            self._work_soon()
        elif kind == requests.TASK:
            self._task = Task.read(contents)
            self._tip = self._task.tip
            self._spill_directory = SpillDirectory.within(Path(self._task.spill), _SPILL)
            self._spill = self._spill_directory.path
            self._catalogs = Catalogs(self._task)
            self._begun.set()
        elif kind == requests.START:
            self._start(StreamRequest.read(contents), socket.socket(fileno=files[0]))
        elif kind == requests.END:
            stream = self._streams.get(NUMBER.unpack(contents)[0])
            if stream is not None:
                stream.subscriber.end(STOPPED)
        elif kind == requests.LIMIT:
            self._set_limit(NUMBER.unpack(contents)[0])
        elif kind == requests.SETTINGS:
            number, fields, timeout = json.loads(contents)
            texts = requests.texts_of(fields)
            stream = self._streams.get(number)
            if stream is not None:
                stream.subscriber.timeout = timeout
                if texts != stream.request.texts:
                    stream.request = replace(stream.request, texts=texts)
                    stream.stale = True
        elif kind == requests.PRIMARY_STATUS:
            number, lsn, oldest, following = requests.STATUS.unpack(contents)
            stream = self._streams.get(number)
            if stream is not None:
                stream.subscriber.primary_status(lsn, oldest, following)
        elif kind == requests.NEEDED:
            (self._catalogs.needed,) = NUMBER.unpack(contents)
        elif kind == requests.BYE:
            self._gone.set()

    def _set_limit(self, limit: int) -> None:
        before, self._limit = self._limit, limit
        if limit == UNLIMITED:
            for one in self._passes:
                one.limited = False
        elif before == UNLIMITED:
            # They leave the passes of the others, before these read on.
            for stream in self._streams.values():
                stream.stale |= stream.request.failover
            self._leave_passes()
        self._work_soon()

    def _tip_of(self, one: Pass) -> int:
        """Return where the WAL ends for a pass."""
        return min(self._tip, self._limit) if one.limited else self._tip

    def _start(self, request: StreamRequest, sock: socket.socket) -> None:
        subscriber = Subscriber(
            request.number,
            sock,
            Backlog(self._spill, _HELD),
            start=request.start,
            timeout=request.timeout,
            received=request.received,
            on_room=self._work_soon,
            on_end=self._note_end,
            on_status_request=self._ask_status,
        )
        stream = self._streams[request.number] = _Stream(request, subscriber)
        if self._failure is not None:
            subscriber.end(STOPPED, self._failure)
            self._sweep()
            return
        self._starting.append((stream, request.start))
        self._wanted.set()

    def _ask_status(self, subscriber: Subscriber) -> None:
        self._channel.send(requests.STATUS_REQUEST, NUMBER.pack(subscriber.number))

    def _note_end(self, subscriber: Subscriber, how: str, error: PubsubError | None) -> None:
        self._ended.append((subscriber, how, error))
        self._work_soon()

    # Beginnings

    async def _begin(self) -> None:
        """Begin passes: the base, and those of streams that begin further back."""
        while True:
            if self._base is None:
                await asyncio.sleep(self._pause)
                try:
                    state = await self._catalogs.before(self._tip, self._task.redo)
                    self._base = base = self._new_pass(state)
                except (PubsubError, OSError) as error:
                    # The server starts another process, and knows from where.
                    self._fail(_reported(error))
                    await self._gone.wait()
                    return
                base.decoder.on_list = partial(self._catalogs.take, base)
                if state.position == self._task.redo:
                    self._catalogs.take(base, state.position)
                gc.collect()
                gc.freeze()
                self._work_soon()
            await self._wanted.wait()
            await asyncio.sleep(_GATHER)
            self._wanted.clear()
            starting = [one for one in self._starting if not one[0].subscriber.ending]
            self._starting = []
            behind = []
            limited = []
            for stream, start in starting:
                base = self._base
                if stream.request.failover and self._limit != UNLIMITED:
                    limited.append((stream, start))
                elif base is not None and base.is_consistent and base.is_at(self._tip) and base.is_quiet_since(start):
                    base.add([stream.wish(start)])
                else:
                    behind.append((stream, start))
            for alike in _near(behind):
                await self._begin_behind(alike)
            for alike in _near(limited):
                await self._begin_behind(alike, limited=True)
            self._work_soon()

    async def _begin_behind(self, behind: list[tuple[_Stream, int]], *, limited: bool = False) -> None:
        try:
            restart = min(stream.restart for stream, _ in behind)
            state = await self._catalogs.before(restart, min(stream.redo for stream, _ in behind))
            # Those that have ended meanwhile are forgotten already: a pass would keep them for ever.
            behind = [one for one in behind if one[0].subscriber.ending is None]
            if not behind:
                return
            if not limited and self._limit != UNLIMITED and any(stream.request.failover for stream, _ in behind):
                # Since just now they have to wait for standbys.
                self._starting += behind
                self._wanted.set()
                return
            made = self._new_pass(state, limited=limited and self._limit != UNLIMITED)
        except (PubsubError, OSError) as error:
            for stream, _ in behind:
                stream.subscriber.end(STOPPED, _reported(error))
            return
        made.add([stream.wish(start) for stream, start in behind])

    def _fail(self, error: PubsubError) -> None:
        """End all streams, and those that the server asks for until it knows; the process ends when it does."""
        self._failure = error
        print(error.report(), file=sys.stderr, flush=True)
        self._channel.send(requests.FAILURE, json.dumps(error.fields()).encode())
        for stream in self._streams.values():
            stream.subscriber.end(STOPPED, error)
        self._sweep()

    def _new_pass(self, state: CatalogState, *, limited: bool = False) -> Pass:
        spool = Spool(Path(self._task.spool), self._task.segment_size)
        made = Pass(state, spool, self._task.work_mem, self._room, self._warn, self._work_soon, limited=limited)
        self._passes.append(made)
        return made

    def _room(self) -> Path:
        self._rooms += 1
        return self._spill / str(self._rooms)

    # Work

    def _work_soon(self) -> None:
        if self._scheduled is None:
            wait = self._worked + _PAUSE - self._loop.time()
            self._scheduled = self._loop.call_soon(self._work) if wait <= 0 else self._loop.call_later(wait, self._work)

    def _work(self) -> None:
        self._scheduled = None
        self._worked = self._loop.time()
        try:
            more = self._work_at_passes()
        except Exception as error:
            # The state of the streams is unknown now: the server starts another process.
            self._fail(_reported(error))
            return
        if more:
            self._scheduled = self._loop.call_soon(self._work)
            return
        now = time.monotonic()
        for stream in self._streams.values():
            stream.subscriber.keep_alive(now)

    def _work_at_passes(self) -> bool:
        """Let each pass do a piece of work; return whether there is more that can be done now."""
        self._sweep()
        more = False
        for one in [] if self._failure is not None else list(self._passes):
            try:
                more |= one.work(self._tip_of(one), patient=one is not self._base)
            except Exception as error:
                # Whatever it is: of the transaction that is being sent, the rest cannot be.
                self._pass_failed(one, _reported(error))
                more = True
        self._merge()
        self._sweep()
        return more

    def _merge(self) -> None:
        """Put passes together that are at the same place."""
        ready = [one for one in self._passes if one.is_consistent and one.is_at(self._tip_of(one))]
        for here in ([one for one in ready if one.limited is limited] for limited in (False, True)):
            here.sort(key=lambda one: one is not self._base)
            for other in here[1:]:
                if other.position == here[0].position:
                    here[0].absorb(other)
                    self._end_pass(other)
        for one in ready:
            one.fold()

    def _end_pass(self, one: Pass) -> None:
        self._passes.remove(one)
        one.close()
        self._garbage = True

    def _pass_failed(self, one: Pass, error: PubsubError) -> None:
        for subscriber in one.subscribers:
            subscriber.end(STOPPED, error)
        self._end_pass(one)
        if isinstance(error, CatalogDiverged):
            # What was saved is from the same source: the server starts another process, which reads the catalogs anew.
            self._catalogs.forget()
            self._fail(error)
            return
        if one is self._base:
            print(error.report(), file=sys.stderr, flush=True)
            self._base = None
            self._pause = _RETRY
            self._wanted.set()

    def _sweep(self) -> None:
        """Report the streams that have ended."""
        ended, self._ended = self._ended, []
        for subscriber, how, error in ended:
            stream = self._streams.pop(subscriber.number, None)
            if stream is None:
                continue
            for one in list(self._passes):
                one.remove(subscriber)
                if one is not self._base and not one.subscribers:
                    self._end_pass(one)
            self._report([stream], last=True)
            fields = None if error is None else error.fields()
            done = StreamEnd(subscriber.number, how, fields, subscriber.rest)
            self._channel.send(requests.DONE, done.write())

    def _warn(self, subscriber: Subscriber, warning: PubsubError) -> None:
        subscriber.put(m.error(warning, "WARNING"))
        contents = {"number": subscriber.number, **warning.fields()}
        self._channel.send(requests.WARNING, json.dumps(contents).encode())

    # From time to time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                stream.subscriber.check(now)
                stream.subscriber.keep_alive(now)
            self._report(list(self._streams.values()))
            self._leave_passes()
            await self._catalogs.save()
            if self._garbage:
                # A pass has cycles, and its catalogs can be large.
                self._garbage = False
                gc.collect()

    def _report(self, streams: list[_Stream], *, last: bool = False) -> None:
        """Tell the server the positions that have changed, unless it has not taken those before; the `last` ones in any case."""
        changed = []
        for each in self._passes:
            each.count()
        for stream in streams:
            one = stream.subscriber
            confirmed = min(one.flushed, one.sent)
            home = self._home(one)
            if home is not None:
                stream.restart = max(
                    (restart for position, restart in home.restarts if position <= confirmed), default=stream.restart
                )
            counted = astuple(one.statistics)
            found = (
                one.sent,
                one.written,
                one.flushed,
                one.applied,
                one.replied_at,
                confirmed,
                stream.restart,
                counted,
            )
            if found != stream.reported:
                stream.reported = found
                changed.append([one.number, *found])
        if changed and (last or self._channel.is_clear):
            self._channel.send(requests.POSITIONS, json.dumps(changed).encode())
        elif changed:
            for stream in streams:
                stream.reported = ()

    def _home(self, subscriber: Subscriber) -> Pass | None:
        """Return the pass that feeds a stream; None if none does now."""
        return next((one for one in self._passes if subscriber in one.subscribers), None)

    def _leave_passes(self) -> None:
        """Let streams leave their passes, to begin again when their clients have taken everything.

        Those are streams with clients far behind, in passes with others, and streams with other settings than before.
        """
        for stream in self._streams.values():
            one = stream.subscriber
            home = self._home(one) if stream.stale or one.behind > _SLOW else None
            if home is not None and (stream.stale or home is self._base or len(home.subscribers) > 1):
                if home.leaves_off(one):
                    stream.resumes_at = home.position
                    home.remove(one)
            elif stream.resumes_at is not None and not one.behind:
                self._starting.append((stream, stream.resumes_at))
                stream.resumes_at = None
                self._wanted.set()


def _near(streams: list[tuple[_Stream, int]]) -> list[list[tuple[_Stream, int]]]:
    """Return the streams in groups that one pass each is for."""
    groups: list[list[tuple[_Stream, int]]] = []
    for one in sorted(streams, key=lambda each: each[0].restart):
        if groups and one[0].restart - groups[-1][0][0].restart < _NEAR:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _reported(error: Exception) -> PubsubError:
    """Return what streams are told; the traceback of any other exception goes to standard error."""
    if isinstance(error, PubsubError):
        return error
    if isinstance(error, OSError):
        return PubsubError(str(error), sqlstate="58030")
    traceback.print_exception(error)
    sys.stderr.flush()
    return PubsubError(f"decoding has failed: {type(error).__name__}: {error}", sqlstate="XX000")


def main(descriptor: int) -> int:
    """Run the process at one end of a socket; return the exit code."""

    async def run() -> None:
        await DecodingProcess(socket.socket(fileno=descriptor)).run()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        return 1
    return 0
