"""The publisher's server: what its sessions share.  A listener (pubsub/backend) brings the clients.

clients ─► Session ─┬─► the upstream server: authentication, SQL
                    └─► slots, and streams that decoding processes send
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import structlog

from catalog.home_lock import DaemonLock
from pubsub.backend.cancel_keys import CancelKeys
from pubsub.backend.listener import Client
from pubsub.errors import ConnectionFailure
from pubsub.forks.processes import Processes
from pubsub.protocol.output.styles import TimeZone
from pubsub.reorderbuffer.files import FileFailure
from pubsub.settings import Settings
from walsender import checked_files
from walsender.feed.feed import Feed
from walsender.server import decoders, slot_changes
from walsender.server.decoders import Decoders
from walsender.server.dropped_databases import DroppedDatabases
from walsender.server.link import Upstream
from walsender.server.session import Session
from walsender.server.standby_slots import StandbySlots
from walsender.server.stream import Stream
from walsender.server.synchronous import SynchronousStandbys
from walsender.slots.slot import SlotStore
from walsender.source.stream import RECEIVER_TIMEOUT

_SAVE: Final = 1.0
"""Seconds between two savings of slots that have moved."""
_PROGRAMS: Final = {
    decoders.PROGRAM: "walsender.streaming.process",
    slot_changes.PROGRAM: "walsender.streaming.changes",
}
_LOCK: Final = "publisher.pid"

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server is told.  `slot`, `keep_size` and the archive: see Feed."""

    upstream: str
    directory: Path
    slot: str | None = None
    keep_size: int | None = None
    auth_file: Path | None = None
    """Users and their verifiers, if clients authenticate here and not at the upstream server."""
    max_replication_slots: int = 10
    max_wal_senders: int = 10
    work_mem: int = 64 << 20
    """logical_decoding_work_mem, in bytes, of each stream."""
    receiver_timeout: float = RECEIVER_TIMEOUT
    """wal_receiver_timeout, in seconds; 0: none."""
    archive_directory: str | None = None
    restore_command: str | None = None
    idle_timeout: float = 0.0
    """idle_replication_slot_timeout, in seconds; 0: none."""
    wal_source: str | None = None
    """The connection string of a standby to receive the WAL from."""
    allow_trust: bool = False
    """Whether clients of other hosts may be let in at the upstream server without having been asked for anything."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Take them from a node's settings, whose `walsender.upstream` is set."""
        ours = settings.walsender
        assert ours.upstream is not None
        return cls(
            ours.upstream,
            settings.home / "walsender",
            ours.primary_slot_name,
            ours.max_slot_wal_keep_size if ours.max_slot_wal_keep_size >= 0 else None,
            settings.home / ours.auth_file if ours.auth_file else None,
            ours.max_replication_slots,
            ours.max_wal_senders,
            settings.logical_decoding_work_mem,
            settings.wal_receiver_timeout,
            str(settings.home / ours.archive_directory) if ours.archive_directory else None,
            ours.restore_command or None,
            ours.idle_replication_slot_timeout,
            ours.wal_source,
            ours.allow_trust,
        )


class Service:
    """A server.  `start` it, serve clients, and wait for `failed`.

    Raises ObjectInUse if another process serves the same directory; DataCorrupted, FileFailure.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.upstream = Upstream(options.upstream)
        checked_files.prepare(options.directory)
        self._lock = DaemonLock.acquire(
            options.directory,
            file=_LOCK,
            what=f'the slots in "{options.directory}"',
            hint="Stop it first, or use another --home.",
        )
        try:
            self.slots = SlotStore(options.directory / "slots", options.max_replication_slots)
        except BaseException:
            self._lock.release()
            raise
        self.feed = Feed(
            options.upstream,
            options.directory,
            self.slots,
            options.slot,
            options.keep_size,
            options.receiver_timeout,
            options.archive_directory,
            options.restore_command,
            options.idle_timeout,
            options.wal_source,
        )
        self.processes = Processes(_PROGRAMS)
        self.decoders = Decoders(
            options.directory, self.upstream, self.feed, self.slots, options.work_mem, self.processes
        )
        self.feed.needed_for_decoding = self.decoders.oldest_needed
        self.feed.on_gap = self.decoders.begin_anew
        self.dropped_databases = DroppedDatabases(options.upstream, self.feed, self.slots, self.decoders)
        self.feed.on_files_dropped = self.dropped_databases.seen
        self.zones: dict[str, TimeZone] = {}
        """Time zones as the upstream server knows them, by name."""
        self.standbys = SynchronousStandbys(options.upstream, self._streams, options.receiver_timeout)
        self.standby_slots = StandbySlots(
            options.upstream,
            self.feed,
            lambda: any(stream.failover for stream in self._streams()),
            lambda: self.decoders.limit(self.standby_slots.reached),
        )
        self.sessions: set[Session] = set()
        self.keys = CancelKeys()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, options: ServerOptions) -> Self:
        """Look at the upstream server and begin to receive its WAL.  Raises PubsubError."""
        service = cls(options)
        try:
            await service.feed.open()
            # A power loss may have left less WAL here than was decoded.
            service.decoders.forget_from(service.feed.position)
        except BaseException:
            service._lock.release()
            raise
        service._tasks = [
            asyncio.create_task(service.feed.run(), name="feed"),
            asyncio.create_task(service._save(), name="slots"),
            asyncio.create_task(service.standbys.run(), name="synchronous standbys"),
            asyncio.create_task(service.decoders.run(), name="decoders"),
            asyncio.create_task(service.standby_slots.run(), name="standby slots"),
            asyncio.create_task(service.dropped_databases.run(), name="dropped databases"),
        ]
        return service

    def _streams(self) -> list[Stream]:
        return [session.stream for session in self.sessions if session.stream is not None]

    def streams_changed(self) -> None:
        """Note that a stream has begun or ended."""
        self.standbys.look_soon()
        self.standby_slots.look_soon()

    async def failed(self) -> None:
        """Wait until the server can no longer go on, and raise why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Receive no more, and save the slots; the sessions have ended with their listener."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.decoders.stop()
        await self.processes.close()
        try:
            await self.slots.save_changed()
        finally:
            self._lock.release()

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(_SAVE)
            try:
                await self.slots.save_changed()
            except FileFailure as error:
                logger.error("replication slots cannot be saved", reason=error.message, hint=error.hint)

    # What a listener asks for (pubsub/backend/listener.py: Backend)

    async def serve(self, client: Client) -> None:
        """Serve a client until it leaves.  Raises PubsubError, which is fatal for the session."""
        session = Session(self, client)
        self.sessions.add(session)
        try:
            await session.run()
        finally:
            self.sessions.discard(session)

    async def cancel(self, request: bytes) -> bool:
        """End what the session with this key does, here and at the upstream server; return whether there is one."""
        if not self.keys.cancel(request):
            return False
        with suppress(ConnectionFailure):
            await self.upstream.cancel(request)
        return True
