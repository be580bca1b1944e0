"""The WAL of the upstream server, received once for all slots and kept in the spool.

    server ─► spool ─► decoding processes, which are told how far it goes (streaming/)
           └► commits and checkpoints (commits.py), for new slots and their snapshots

Where the spool ends, the server goes on, however long it was away.  WAL that it has removed meanwhile comes from the archive
(archive.py); if that does not have it either, the slots are invalidated.  With an archive, slots may also need WAL from before
the spool: who reads the spool takes it from there.

What is on disk, and in which order:

    the timeline ► its first bytes in the spool
    the spool's bytes ► what they say about transactions, up to one of its records (`feed.state`)
    slots ► WAL that no slot needs is removed;  a compressed segment ► the plain one is removed
    slots that are given up ► WAL that they need is removed
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final

import structlog

from pubsub import faults
from pubsub.errors import ConnectionFailure, DataCorrupted, NotInPrerequisiteState, PublisherError, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import identify_system, timeline_history
from pubsub.reorderbuffer.files import FileFailure
from walsender import checked_files
from walsender.feed.archive import Archive
from walsender.feed.commits import IRRELEVANT, Commits
from walsender.feed.spool import SpoolWriter, SyncFailure
from walsender.historic import upstream
from walsender.historic.upstream import Upstream
from walsender.hot.walk import Skim
from walsender.slots.slot import Slot, SlotStore
from walsender.slots.wal_limit import kept_for_slots
from walsender.source.retry import RETRY_SECONDS
from walsender.source.source import WalSource, check_descent
from walsender.source.stream import RECEIVER_TIMEOUT
from walsender.xlog import formats as f
from walsender.xlog.errors import WalMissing
from walsender.xlog.formats import XLOG_BLCKSZ, Rmgr, WalFormat, format_of_version
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader
from walsender.xlog.record import parse_record

_DROPS: Final = Rmgr.DBASE << 4 | f.XLOG_DBASE_DROP >> 4
_IRRELEVANT: Final = bytes(irrelevant and kind != _DROPS for kind, irrelevant in enumerate(IRRELEVANT))
"""Kinds of records that nothing is learnt from here, as Walk has them."""
_SYSTEM: Final = "system_identifier"
_WAL: Final = "wal"
_STATE: Final = "feed.state"
_TIMELINE: Final = "timeline"
_RETRY: Final = 1.0
_CHUNK: Final = 1 << 20
_SYNC: Final = 5.0
"""Seconds between two times that what was received is made durable."""
_FOR_NEW_SLOTS: Final = 1 << 30
"""Bytes of WAL that are kept at most only so that a new slot can begin at once."""

logger = structlog.get_logger()


async def _nothing(_lsn: int) -> None:
    pass


class Feed:
    """One upstream server's WAL, kept in `directory`/wal.  `open` it, then let `run` run.

    `slot`: a physical slot at the server, which keeps the WAL while this is away.  `keep_size`: bytes of WAL that slots may
    hold back (max_slot_wal_keep_size); None: as many as they need.  `receiver_timeout`: seconds after which a silent server
    is asked again for its WAL (wal_receiver_timeout); 0: never.  `archive_directory` or `restore_command` names an archive.
    `idle_timeout`: seconds that a slot may be unused (idle_replication_slot_timeout); 0: for ever.  `wal_source`: the connection
    string of a standby of the server to receive the WAL from; the `slot` is there, then.
    """

    def __init__(
        self,
        conninfo: str,
        directory: Path,
        slots: SlotStore,
        slot: str | None = None,
        keep_size: int | None = None,
        receiver_timeout: float = RECEIVER_TIMEOUT,
        archive_directory: str | None = None,
        restore_command: str | None = None,
        idle_timeout: float = 0.0,
        wal_source: str | None = None,
    ) -> None:
        self.wal_conninfo = wal_source or conninfo
        self._idle_timeout = idle_timeout
        self._archive_directory = archive_directory
        self._restore_command = restore_command
        self.archive: Archive | None = None
        """Where WAL is taken from that neither the spool nor the server has; None: nowhere."""
        self._conninfo = conninfo
        self._directory = directory
        self._slots = slots
        self._slot = slot
        self._keep_size = keep_size
        self.receiver_timeout = receiver_timeout
        self._changed = asyncio.Event()
        self._segment_ended = asyncio.Event()
        # Ends a restore_command, whose thread would otherwise keep the process from ending.
        self._stop = threading.Event()
        self.server: Upstream
        self.spool: SpoolWriter
        self.geometry: Geometry
        self.commits: Commits
        self._reader: WalReader
        self._source: WalSource
        self._format: WalFormat
        self._followed = 0
        """The timeline that the WAL here is of."""
        self._state: tuple[int, dict[str, Any]] | None = None
        """The position of the last list of running transactions, and what was known there; saved once it is on disk."""
        self.oldest = 0
        """The LSN from which on there is WAL here."""
        self.failing: str | None = None
        """Why no WAL comes from the upstream server; None while it does."""
        self.held: int | None = None
        """An LSN from which on WAL must stay here although no slot needs it yet."""
        self.listeners: set[Callable[[int], None]] = set()
        """Called with the LSN up to which there is WAL, whenever there is more."""
        self.on_files_dropped: Callable[[int, int], None] = lambda _database, _xid: None
        """Called when the files of a database are removed, with its oid and the transaction."""
        self.needed_for_decoding: Callable[[], int | None] = lambda: None
        """Returns the oldest LSN at which the decoding for a slot would begin."""
        self.on_gap: Callable[[int], Awaitable[None]] = _nothing
        """Called when WAL is left out, with the LSN behind it."""

    async def open(self) -> None:
        """Look at the server and at what is kept here.

        Raises ConnectionFailure, PublisherError, FileFailure, and NotInPrerequisiteState if the server cannot be decoded, or is
        another one than before.
        """
        async with await self.connect(self._conninfo) as connection:
            server = self.server = await upstream.inspect(connection)
            redo = await upstream.checkpoint(connection, may_checkpoint=False)
            prepared = await upstream.prepared_transactions(connection)
        wal_format = format_of_version(server.version)
        assert wal_format is not None
        self._format = wal_format
        self.geometry = Geometry(server.segment_size)
        self._check_system()
        checked_files.prepare(self._directory / _WAL)
        self.spool = SpoolWriter(self._directory / _WAL, server.segment_size)
        self._source = WalSource(
            self.wal_conninfo,
            server,
            None,
            self._slot,
            self.spool.write,
            self.receiver_timeout,
            self._follow_timeline,
            self._check_timeline if self.wal_conninfo != self._conninfo else None,
        )
        if self._slot is not None:
            async with await self.connect(self.wal_conninfo) as connection:
                await upstream.check_slot(connection, self._slot)
        await self._source.open()
        path = self._directory / _TIMELINE
        self._followed = int(checked_files.read(path, "file")) if path.exists() else self.timeline
        self._name_archive()
        starts = self.spool.starts()
        if not starts:
            check_descent(self.history, self._followed, self._confirmed)
            self._followed = self.timeline
        restored = self._restored()
        if restored is not None:
            self.oldest = self.spool.run_start(restored[0])
            self._read_from(restored[0], restored[1])
        else:
            first = min(redo, self._slots.needed or redo)
            self._begin(starts[0] if starts else first - first % server.segment_size, prepared)
        if self.archive is None:
            self._give_up_before(self.oldest)
        await asyncio.to_thread(self.spool.remove_before, self.oldest)
        # Where decoding begins, and where slots can, is known only when all that is here was read.
        await self._replay()

    async def connect(self, conninfo: str, *, replication: bool = False) -> Connection:
        """Connect to a server that is taken for lost when it does not answer for wal_receiver_timeout."""
        return await Connection.connect(
            conninfo, replication=replication, application_name="walsender", answer_timeout=self.receiver_timeout
        )

    def _name_archive(self) -> None:
        """Name the archive, with the timelines that are followed now, to all who read the spool."""
        if self._archive_directory is None and self._restore_command is None:
            Archive.forget(self.spool.directory)
            return
        archive = Archive(
            self._archive_directory,
            self._restore_command,
            self.server.segment_size,
            self.server.system_identifier,
            self._source.history.entries,
        )
        if archive != self.archive:
            archive.save(self.spool.directory)
            self.archive = archive

    def _check_system(self) -> None:
        path = self._directory / _SYSTEM
        ours = str(self.server.system_identifier)
        if not path.exists():
            checked_files.write(path, ours.encode())
            return
        theirs = checked_files.read(path, "file").decode()
        if theirs != ours:
            raise NotInPrerequisiteState(
                "the upstream server is another one than before",
                detail=f"Its system identifier is {ours}; the WAL and the slots here are of {theirs}.",
                hint="Use another directory, or remove this one with its slots.",
            )

    def _restored(self) -> tuple[int, Commits] | None:
        """Return the position up to which transactions are known, and what is known; None: all WAL here must be read."""
        path = self._directory / _STATE
        if not path.exists():
            return None
        try:
            state = json.loads(checked_files.read(path, "file"))
            position = int(state["lsn"])
            commits = Commits.restored(self._format, state["commits"])
        except (DataCorrupted, FileFailure, KeyError, TypeError, ValueError) as error:
            logger.warning("what is known of the WAL is read from it again", reason=str(error))
            return None
        if self.spool.run_start(position) > position:
            return None
        commits.forget_before(self.spool.run_start(position), self._slots.restarts)
        return position, commits

    def _begin(self, start: int, prepared: set[int]) -> None:
        """Begin to read at the segment `start`, whose first record may have begun before it."""
        self.oldest = start
        self.commits = Commits(self._format, prepared)
        self._state = None
        self._reader = WalReader(self.geometry, start, find_first=True)
        self._reader.walk = Skim(_IRRELEVANT)

    def _read_from(self, lsn: int, commits: Commits) -> None:
        """Begin to read at the record at `lsn`."""
        self.commits = commits
        self._reader = WalReader(self.geometry, lsn)
        self._reader.walk = Skim(_IRRELEVANT)

    def _give_up_before(self, lsn: int) -> None:
        """Invalidate the slots that need WAL from before `lsn`, which is not here."""
        for slot in self._slots:
            if slot.invalidation_reason is None and slot.restart_lsn < lsn:
                logger.error(
                    "a replication slot needs WAL that is no longer there",
                    slot=slot.name,
                    restart_lsn=str(Lsn(slot.restart_lsn)),
                    oldest=str(Lsn(lsn)),
                )
                self._slots.invalidate(slot, "wal_removed")

    @property
    def history(self) -> TimelineHistory:
        return self._source.history

    @property
    def timeline(self) -> int:
        return self._source.history.newest

    @property
    def position(self) -> int:
        """LSN of the end of the last record that was read."""
        return self._reader.position

    @property
    def received(self) -> int:
        """LSN up to which whole records are here: after a switch of timelines others follow them."""
        return min(self._reader.position, self._reader.received)

    @property
    def _confirmed(self) -> int:
        """LSN up to which a subscriber has everything: a power loss may have left less WAL here."""
        slots = (slot for slot in self._slots if slot.invalidation_reason is None)
        return max((self.end_of_record(slot.confirmed_flush_lsn) for slot in slots), default=0)

    async def wait_for(self, lsn: int) -> None:
        """Wait until all records before `lsn` were read."""
        wanted = self.geometry.to_byte_position(lsn)
        while self.geometry.to_byte_position(self.position) < wanted:
            await self._changed.wait()

    def end_of_record(self, lsn: int) -> int:
        """Return where the record before `lsn` ends: a place right after a page's header is that page's start."""
        page = lsn - lsn % XLOG_BLCKSZ
        return page if lsn - page == self.geometry.header_bytes(page) else lsn

    async def wait_for_more(self) -> None:
        """Wait until more WAL was read."""
        await self._changed.wait()

    async def run(self) -> None:
        """Receive until cancelled.  Raises what makes going on impossible."""
        work = [asyncio.create_task(self._follow(), name="wal"), asyncio.create_task(self._keep_house(), name="spool")]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            self._stop.set()
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._source.flushed = 0
            await self._source.close()
            with suppress(FileFailure, SyncFailure):
                self._save(self.received)
            self.spool.close()

    async def _follow(self) -> None:
        """Receive WAL, for ever."""
        missing: WalMissing | None = None
        while True:
            try:
                if missing is not None:
                    if not await self._from_elsewhere():
                        await self._start_anew(missing)
                    missing = None
                await self._receive(self._source)
            except WalMissing as error:
                missing = error
                continue
            except (ConnectionFailure, PublisherError) as error:
                logger.warning("the upstream server cannot be reached", reason=error.message)
                self.failing = error.message
            except FileFailure as error:
                logger.error("WAL cannot be kept", reason=error.message, hint=error.hint)
                self.failing = error.message
            await asyncio.sleep(_RETRY)
            self._reader.restart_at(self._reader.position)

    async def _replay(self) -> None:
        """Read what the spool has."""
        self._reader.final = False
        begin = self.position - self.position % self.geometry.segment_size
        for lsn, data in self.spool.read_kept(begin, 1 << 63):
            self._reader.feed(lsn, data)
            self._take()
            await asyncio.sleep(0)
        if self.received > begin:
            logger.info("WAL was read", first=str(Lsn(self.oldest)), last=str(Lsn(self.position)))
        # The last bytes may be those of a write that a crash cut off.
        self._reader.restart_at(self.position)
        # The server may have been promoted, or another one put in its place, while this was away.
        self._follow_timeline()
        self._tell()

    async def _check_timeline(self, timeline: int) -> None:
        """Raise NotInPrerequisiteState unless the upstream server's history has the timeline on which the standby is."""
        async with await self.connect(self._conninfo, replication=True) as connection:
            newest = (await identify_system(connection)).timeline
            history = await timeline_history(connection, newest)
        if timeline != newest and history.end_of(timeline) is None:
            raise NotInPrerequisiteState(
                f"the server that the WAL comes from is on timeline {timeline}, which the upstream server's does not come from",
                detail=f"The upstream server is on timeline {newest}.",
                hint="The standby was promoted by itself, or the upstream connection string names the old primary.",
            )

    def _follow_timeline(self) -> None:
        """Note which timeline the WAL here is of, before there is any of it.

        Raises FileFailure, and NotInPrerequisiteState unless it goes on where the WAL here ends, and what was sent of it.
        """
        check_descent(self.history, self._followed, max(self.position, self._confirmed))
        checked_files.write(self._directory / _TIMELINE, str(self.timeline).encode())
        if self.timeline != self._followed:
            logger.info(
                "following the server to a new timeline", timeline=self.timeline, position=str(Lsn(self.position))
            )
        self._followed = self.timeline
        self._name_archive()

    async def _receive(self, source: WalSource, *, one_segment: bool = False) -> None:
        size = self.geometry.segment_size
        segment = self.received // size
        async with aclosing(source.feed(self._reader)) as feeding:
            async for nothing_more in feeding:
                self.failing = None
                self._take()
                if nothing_more:
                    self._tell()
                if self.received // size != segment:
                    segment = self.received // size
                    self._segment_ended.set()
                    if one_segment:
                        return
                source.flushed = self.spool.synced if self._slot is not None else 0

    async def _from_elsewhere(self) -> bool:
        """Take WAL that is missing where it comes from elsewhere; return whether there was any."""
        if self.wal_conninfo == self._conninfo:
            return await self._from_archive()
        # A standby that was made anew lacks what the upstream server may still have.
        source = WalSource(self._conninfo, self.server, None, None, self.spool.write, self.receiver_timeout)
        try:
            await source.open()
            await self._receive(source, one_segment=True)
        except WalMissing:
            return await self._from_archive()
        finally:
            await source.close()
        return True

    async def _from_archive(self) -> bool:
        """Take WAL that the server has removed from the archive; return False if that has not had it for a while."""
        if self.archive is None:
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETRY_SECONDS
        while True:
            try:
                if await self._take_archived(self.archive):
                    return True
                if loop.time() > deadline:
                    return False
            except FileFailure as error:
                logger.error("WAL cannot be kept", reason=error.message, hint=error.hint)
            except PubsubError as error:
                # Who cannot be asked has not said that it is gone.
                logger.error("the archive cannot be read", reason=error.message, detail=error.detail)
            await asyncio.sleep(_RETRY)

    async def _take_archived(self, archive: Archive) -> bool:
        """Read on in the archive, as far as it goes; return whether it had anything."""
        reader, size = self._reader, self.geometry.segment_size
        reader.final = True
        if reader.received % size:
            reader.restart_at(reader.position)
        begin = reader.received
        while True:
            lsn = reader.received
            number = await asyncio.to_thread(archive.fetch, lsn, self._stop)
            if number is None:
                return lsn > begin
            with os.fdopen(number, "rb") as segment:
                segment.seek(lsn % size)
                while data := segment.read(_CHUNK):
                    self.spool.write(lsn, data)
                    reader.feed(lsn, data)
                    self._take()
                    lsn += len(data)
                    await asyncio.sleep(0)
            logger.info("restored log file from archive", file=archive.name(lsn - 1))
            self._segment_ended.set()
            self._tell()

    def _take(self) -> None:
        reader = self._reader
        for data, offset, length, lsn, xid, info, rmgr in reader.records():
            record = parse_record(data, offset, length, lsn, lsn, xid, info, rmgr)
            if rmgr == Rmgr.DBASE:
                if info & f.XLR_RMGR_INFO_MASK == f.XLOG_DBASE_DROP:
                    self.on_files_dropped(int.from_bytes(record.main[:4], "little"), xid)
                continue
            before = self.commits.last_list
            self.commits.add(record)
            if self.commits.last_list != before:
                # From the record after this one on.
                self._state = reader.position, self.commits.state()

    def redo_for(self, restart: int) -> int:
        """Return the redo position from which the catalogs can be read for decoding from `restart` on.

        A slot that was made in the past begins at one, which may lie before all WAL that was read here (past.py).
        """
        return self.commits.redo_before(restart) or restart

    def _tell(self) -> None:
        self._changed.set()
        self._changed.clear()
        for listener in list(self.listeners):
            listener(self.received)

    # On disk

    async def _keep_house(self) -> None:
        """Make durable what was received, and remove and compress what is old, for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SYNC):
                    await self._segment_ended.wait()
            try:
                self._give_up_idle()
                if self._segment_ended.is_set():
                    self._segment_ended.clear()
                    await self._clean()
                else:
                    await asyncio.to_thread(self._save, self.received)
            except FileFailure as error:
                logger.error("WAL is kept as it is", reason=error.message, hint=error.hint)

    def _save(self, received: int) -> None:
        """Make durable what was `received`; save what it says about transactions, if there is anything new."""
        state, self._state = self._state, None
        self.spool.sync(received)
        if state is None:
            return
        faults.point("feed synced")
        try:
            contents = json.dumps({"lsn": state[0], "commits": state[1]})
            checked_files.write(self._directory / _STATE, contents.encode())
        except BaseException:
            self._state = self._state or state
            raise

    async def _clean(self) -> None:
        """Invalidate slots that hold back too much, compress what is whole, and remove what no slot needs."""
        checkpoint = self.commits.redo_before(self.received)
        if self._keep_size is not None and self.archive is None and checkpoint is not None:
            kept = kept_for_slots(self.received, checkpoint, self._keep_size, self.geometry.segment_size)
            for slot in self._slots:
                past = kept - slot.restart_lsn
                if slot.invalidation_reason is None and past > 0:
                    detail = f"The slot's restart_lsn {Lsn(slot.restart_lsn)} exceeds the limit by {past} bytes."
                    self._invalidate(slot, "wal_removed", detail, "max_slot_wal_keep_size")
        # What is removed below must not be needed by a slot as a crash would leave it.
        await self._slots.save_changed()
        await asyncio.to_thread(self._save, self.received)
        size = self.geometry.segment_size
        last = self.received - self.received % size
        newest = self.commits.newest_restart()
        if newest is not None:
            for_new = max(newest, self.received - (self._keep_size or _FOR_NEW_SLOTS))
            decoding = (self.needed_for_decoding(), self._slots.needed)
            floor = min(one for one in (for_new, last - size, self.held) if one is not None)
            needed = min((one for one in decoding if one is not None), default=floor)
            if needed < floor:
                floor = await self._archived(needed, floor)
            # The catalogs can be read from a checkpoint's redo position only.
            redo = self.commits.redo_before(floor)
            if redo is None or redo < self.oldest:
                redo = floor if self.archive is not None and needed < self.oldest else None
            if redo is not None and (floor := min(floor, redo)) - floor % size > self.oldest:
                self.oldest = floor - floor % size
                self.commits.forget_before(self.oldest, self._slots.restarts)
                await asyncio.to_thread(self.spool.remove_before, self.oldest)
        await asyncio.to_thread(self.spool.compress_before, last - size)

    def _give_up_idle(self) -> None:
        """Invalidate the slots that nobody has used for too long (slot.c: CanInvalidateIdleSlot).  Raises FileFailure."""
        for slot in self._slots:
            since = slot.inactive_since
            if not self._idle_timeout or slot.invalidation_reason or slot.active_pid is not None or since is None:
                continue
            if (idle := time.time() - since) >= self._idle_timeout:
                name = "idle_replication_slot_timeout"
                detail = f'The slot\'s idle time of {idle:.0f}s exceeds the configured "{name}" duration of '
                self._invalidate(slot, "idle_timeout", f"{detail}{self._idle_timeout:.0f}s.", name)

    def _invalidate(self, slot: Slot, reason: str, detail: str, parameter: str) -> None:
        """Give a slot up, and say why (slot.c: ReportSlotInvalidation).  Raises FileFailure."""
        if slot.active_pid is not None:
            what = f'terminating process {slot.active_pid} to release replication slot "{slot.name}"'
        else:
            what = f'invalidating obsolete replication slot "{slot.name}"'
        hint = f'You might need to increase "{parameter}".'
        logger.warning("slot is invalidated", slot=slot.name, reason=what, detail=detail, hint=hint)
        self._slots.invalidate(slot, reason)

    async def _archived(self, needed: int, floor: int) -> int:
        """Return up to where WAL may be removed: what slots need from `needed` on, only past the limit and if it is archived."""
        if self._keep_size is None or self.archive is None:
            return needed
        size = self.geometry.segment_size
        floor = min(floor, self.received - self._keep_size)
        reached = max(needed - needed % size, self.oldest)
        try:
            while reached + size <= floor and await asyncio.to_thread(self.archive.has, reached, self._stop):
                reached += size
        except PubsubError as error:
            logger.error("the archive cannot be read", reason=error.message, detail=error.detail)
        if reached + size <= floor:
            logger.warning(
                "WAL is kept past max_slot_wal_keep_size",
                reason="the archive does not have it",
                first=str(Lsn(reached)),
            )
        return max(reached, needed)

    async def _start_anew(self, missing: WalMissing) -> None:
        """Begin behind WAL that is neither here nor at the server any more.  Slots that need it are lost.

        That is where the spool goes on, if a segment in the middle is missing or damaged; else at the server's last checkpoint.
        """
        logger.error("the upstream server has removed WAL that was not received yet", reason=missing.message)
        async with await self.connect(self._conninfo) as connection:
            redo = await upstream.checkpoint(connection, may_checkpoint=False)
            prepared = await upstream.prepared_transactions(connection)
        start = redo - redo % self.geometry.segment_size
        start = next((one for one in self.spool.starts() if one > missing.lsn), start)
        self._give_up_before(start)
        await self.on_gap(start)
        faults.point("slots given up")
        self.spool.close()
        await asyncio.to_thread(self.spool.remove_before, start)
        self._begin(start, prepared)
        await self._replay()
