"""The decoding processes: one for each database that has slots, for as long as it has.

feed ──► where the WAL ends ──► process
Stream ──► request, the client's socket ──► process ──► positions, the stream's end ──► Stream
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from pubsub.errors import PubsubError
from pubsub.forks.channel import Channel
from pubsub.forks.processes import Process, Processes
from walsender import checked_files
from walsender.historic.state import CatalogStates
from walsender.slots.slot import Slot, SlotStore
from walsender.streaming import requests
from walsender.streaming.requests import NUMBER, StreamEnd, StreamRequest, Task
from walsender.streaming.subscriber import CUT, STOPPED

if TYPE_CHECKING:
    from walsender.feed.feed import Feed
    from walsender.historic.upstream import SessionTexts
    from walsender.server.link import Upstream

PROGRAM: Final = "decoding"
_LOOK: Final = 1.0
"""Seconds between two looks at which databases have slots."""
_PAUSE: Final = 1.0
"""Seconds before a process that has failed is started again."""
_STOP: Final = 5.0

logger = structlog.get_logger()


class Served(Protocol):
    """A stream, as far as the process tells of it."""

    def moved(self, sent: int, written: int, flushed: int, applied: int, replied_at: float) -> None: ...
    def confirmed(self, lsn: int, restart: int) -> None: ...
    def counted(self, counted: Sequence[int]) -> None: ...
    def ended(self, end: StreamEnd) -> None: ...
    def warned(self, warning: PubsubError) -> None: ...
    def status_requested(self) -> None: ...


class Decoder:
    """One process.  `start` it; `failed` is set when it is gone."""

    def __init__(self, task: Task, feed: Feed, processes: Processes) -> None:
        self._task = task
        self._limit = 0
        self._feed = feed
        self._processes = processes
        self._numbers = itertools.count(1)
        self._streams: dict[int, Served] = {}
        self._process: Process
        self._channel: Channel
        self._error = PubsubError("the decoding process ended unexpectedly")
        """What its streams are told when it is gone."""
        self.failed = asyncio.Event()

    async def start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await self._processes.start(PROGRAM, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours, self._message, self._gone)
        self._channel.send(requests.TASK, self._task.write())
        self._feed.listeners.add(self.tell)
        self.tell(self._feed.received)

    def tell(self, tip: int) -> None:
        """Tell where the WAL ends; later, if the process has not read what it was told before."""
        if self._channel.is_clear:
            self._channel.send(requests.TIP, NUMBER.pack(tip))

    def limit(self, lsn: int) -> None:
        """Tell up to where streams of failover slots are sent WAL."""
        if lsn != self._limit and not self.failed.is_set():
            self._limit = lsn
            self._channel.send(requests.LIMIT, NUMBER.pack(lsn))

    def needs(self, lsn: int) -> None:
        """Tell from where on catalogs are needed."""
        self._channel.send(requests.NEEDED, NUMBER.pack(lsn))

    def begin(self, stream: Served, request: dict[str, Any], sock: int) -> int:
        """Hand a stream over, with the client's socket; return its number."""
        number = next(self._numbers)
        if self.failed.is_set():
            error = self._error.fields()
            stream.ended(StreamEnd(number, STOPPED, error, request["received"]))
            return number
        self._streams[number] = stream
        self._channel.send(requests.START, StreamRequest(number=number, **request).write(), [sock])
        return number

    def end(self, number: int) -> None:
        """End a stream; it tells when that is done."""
        self._channel.send(requests.END, NUMBER.pack(number))

    def change_settings(self, number: int, texts: SessionTexts, timeout: float) -> None:
        """Have a stream go on with other settings: `texts`, and wal_sender_timeout in seconds."""
        self._channel.send(requests.SETTINGS, json.dumps([number, asdict(texts), timeout]).encode())

    def primary_status(self, number: int, lsn: int, oldest: int, following: int) -> None:
        """Answer a stream's client that has asked for the primary's status."""
        self._channel.send(requests.PRIMARY_STATUS, requests.STATUS.pack(number, lsn, oldest, following))

    def kill(self) -> None:
        """Kill the process, which does not answer; its streams are cut."""
        if not self.failed.is_set():
            logger.error("a decoding process does not answer, and is killed", pid=self._process.pid)
            self._process.kill()

    async def stop(self) -> None:
        """End the process, with its streams."""
        self._feed.listeners.discard(self.tell)
        self._channel.close()
        try:
            async with asyncio.timeout(_STOP):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._gone()

    def _message(self, kind: bytes, contents: bytes, _files: list[int]) -> None:
        if kind == requests.POSITIONS:
            for number, *positions, confirmed, restart, counted in json.loads(contents):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.moved(*positions)
                    stream.confirmed(confirmed, restart)
                    stream.counted(counted)
        elif kind == requests.DONE:
            end = StreamEnd.read(contents)
            stream = self._streams.pop(end.number, None)
            if stream is not None:
                stream.ended(end)
        elif kind == requests.STATUS_REQUEST:
            stream = self._streams.get(NUMBER.unpack(contents)[0])
            if stream is not None:
                stream.status_requested()
        elif kind == requests.FAILURE:
            # It has not read yet what it was sent last, and answers that first.
            self._error = PubsubError(**json.loads(contents))
            self._feed.listeners.discard(self.tell)
            self.failed.set()
            self._channel.send(requests.BYE)
        elif kind == requests.WARNING:
            fields = json.loads(contents)
            stream = self._streams.get(fields.pop("number"))
            if stream is not None:
                stream.warned(PubsubError(**fields))

    def _gone(self) -> None:
        self._feed.listeners.discard(self.tell)
        self.failed.set()
        streams, self._streams = self._streams, {}
        error = self._error.fields()
        for number, stream in streams.items():
            stream.ended(StreamEnd(number, CUT, error, b""))


class Decoders:
    """All processes.  `directory`: where catalogs and spilled changes are kept.  `run` keeps those running that are needed."""

    def __init__(
        self,
        directory: Path,
        upstream: Upstream,
        feed: Feed,
        slots: SlotStore,
        work_mem: int,
        processes: Processes,
    ) -> None:
        self._directory = directory
        self._upstream = upstream
        self._feed = feed
        self._slots = slots
        self._work_mem = work_mem
        self._processes = processes
        self._limit = 0
        self._decoders: dict[int, Decoder] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._look = asyncio.Event()

    async def of(self, slot: Slot) -> Decoder:
        """Return the process of the slot's database; start it if need be."""
        oid = slot.database_oid
        async with self._locks.setdefault(oid, asyncio.Lock()):
            decoder = self._decoders.get(oid)
            if decoder is None or decoder.failed.is_set():
                decoder = await self._start(slot)
                self._decoders[oid] = decoder
                decoder.limit(self._limit)  # what holds now: it may have changed while the process started
            return decoder

    async def _start(self, slot: Slot) -> Decoder:
        feed = self._feed
        spill = self._directory / "spill"
        checked_files.prepare(spill)
        restart = self._needed(slot.database_oid) or slot.restart_lsn
        task = Task(
            self._upstream.conninfo,
            slot.database_oid,
            str(feed.spool.directory),
            str(self._states_of(slot.database_oid)),
            str(spill),
            feed.geometry.segment_size,
            feed.server.system_identifier,
            self._work_mem,
            feed.received,
            feed.redo_for(restart),
            feed.receiver_timeout,
        )
        decoder = Decoder(task, feed, self._processes)
        await decoder.start()
        return decoder

    def limit(self, reached: int | None) -> None:
        """Have streams of failover slots be sent WAL up to `reached` (standby_slots.py)."""
        self._limit = requests.UNLIMITED if reached is None else reached
        for decoder in self._decoders.values():
            decoder.limit(self._limit)

    def slots_changed(self) -> None:
        """Note that there is another slot, or one less."""
        self._look.set()

    async def run(self) -> None:
        """Keep the processes running of the databases that have slots, until cancelled."""
        while True:
            for oid, slot in self._wanted().items():
                decoder = self._decoders.get(oid)
                if decoder is not None and decoder.failed.is_set():
                    logger.error("a decoding process has ended unexpectedly", database=slot.database)
                    await asyncio.sleep(_PAUSE)
                try:
                    (await self.of(slot)).tell(self._feed.received)
                except (PubsubError, OSError) as error:
                    logger.error("a decoding process cannot be started", database=slot.database, reason=str(error))
                    await asyncio.sleep(_PAUSE)
            for oid in list(self._decoders):
                # Asked again each time: while the others were waited for, a slot may have been made, and is in use.
                if oid not in self._wanted() and oid in self._decoders:
                    await self._decoders.pop(oid).stop()
            self._forget_catalogs()
            self._look.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._look.wait()

    def _wanted(self) -> dict[int, Slot]:
        """Return a slot of each database that has any."""
        return {
            slot.database_oid: slot for slot in self._slots if slot.invalidation_reason is None and slot.database_oid
        }

    def _forget_catalogs(self) -> None:
        """Remove the catalogs of databases that have no slots any more: a slot to come begins later."""
        used = {*self._wanted(), *self._decoders, *(oid for oid, lock in self._locks.items() if lock.locked())}
        for oid in self._saved() - used:
            shutil.rmtree(self._states_of(oid), ignore_errors=True)

    async def stop(self) -> None:
        """End all processes; those that are needed are started again."""
        decoders, self._decoders = self._decoders, {}
        await asyncio.gather(*(one.stop() for one in decoders.values()))
        self._look.set()

    def forget_from(self, lsn: int) -> None:
        """Remove the catalogs from `lsn` on, before any process runs: the server may have left that WAL's timeline."""
        for oid in self._saved():
            CatalogStates(self._states_of(oid)).keep_before(lsn)

    async def begin_anew(self, lsn: int) -> None:
        """End all processes: WAL before `lsn` is missing, and those that are needed begin behind it."""
        await self.stop()
        for oid in self._saved():
            CatalogStates(self._states_of(oid)).remove_before(lsn)

    # What they need

    def oldest_needed(self) -> int | None:
        """Return the oldest LSN at which a slot's decoding would begin; None if none would."""
        found: list[int] = []
        for oid in {slot.database_oid for slot in self._slots}:
            needed = self._needed(oid)
            if needed is not None:
                position = CatalogStates(self._states_of(oid), writes=False).newest_before(needed)
                if position is None or position < self._feed.oldest <= needed:
                    # As the process chooses them (streaming/process.py).
                    position = needed
                found.append(position)
                decoder = self._decoders.get(oid)
                if decoder is not None and not decoder.failed.is_set():
                    decoder.needs(needed)
        return min(found, default=None)

    def _needed(self, oid: int) -> int | None:
        slots = [one for one in self._slots if one.database_oid == oid and one.invalidation_reason is None]
        return min((one.saved_restart_lsn or one.restart_lsn for one in slots), default=None)

    def _saved(self) -> set[int]:
        """Return the databases of which there are catalogs on disk."""
        directory = self._directory / "catalogs"
        return {int(path.name) for path in directory.iterdir()} if directory.exists() else set()

    def _states_of(self, oid: int) -> Path:
        return self._directory / "catalogs" / str(oid)
