"""Fill the gap between a subscription's origin and its slot, which was lost, dropped, or made anew.

    origin ── decoded from the archive, then from the server ─────────────────►
                                     caught up ─► a new slot, which begins at C
                                                                 origin >= C ─► the apply worker starts again, from the slot

A slot sends every transaction whose commit begins at or after its confirmed_flush_lsn (snapbuild.c: SnapBuildXactNeedsSkip), and
the decoder every one from the origin on: once the origin has reached C both send the same from there.  Nothing else is to be
remembered.  A worker that is killed on the way finds the slot where it was, or the new one, which begins after the origin: a
gap, too.  The slot is made last, since it keeps WAL on the publisher, and may be lost in turn.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from apply.gap.decoding_process import DecodingProcess, RestoreCommand
from apply.pipeline.pipeline import Pipeline
from apply.publisher_identity import SlotLost, Standing, explained_stream
from catalog.records import Subscription
from pubsub import faults
from pubsub.errors import ConnectionFailure, PublisherError, StartAgain
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication, slots, sound_slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import CreatedSlot, SystemIdentity
from pubsub.publisher.slots import SlotInfo
from pubsub.settings import Settings
from pubsub.sql.options import RESTORE_COMMAND

logger = structlog.get_logger()

_SEGMENT: Final = re.compile(r"[0-9A-F]{24}")

_UNDEFINED_FILE: Final = "58P01"

_COST: Final = """
SELECT count(*), pg_size_pretty(coalesce(sum(pg_table_size(oid)), 0))
  FROM (SELECT DISTINCT c.oid
          FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname
          JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
         WHERE t.pubname = ANY ($1::name[])) published
"""


@dataclass(frozen=True, slots=True)
class Gap:
    """What the slot does not keep, from `begins` on; 0: no table lacks anything.

    `slot`: as it is; None: there is none, or it is lost.
    """

    begins: Lsn
    slot: SlotInfo | None
    reason: str


def find(subscription: Subscription, identity: SystemIdentity, slot: SlotInfo | None, standing: Standing) -> Gap | None:
    """Return what the slot does not keep; None if it keeps everything, or if no archive is named to fill it from."""
    if subscription.options.wal_archive is None:
        return None
    if subscription.publisher_system_identifier not in (None, identity.system_identifier):
        return None  # positions of another system mean nothing here
    if slot is None:
        return Gap(standing.begins, None, "it does not exist")
    if slot.lost:
        return Gap(standing.begins, None, f"it was invalidated: {slot.invalidation_reason or 'wal_removed'}")
    if standing.begins and slot.confirmed_flush_lsn is not None and slot.confirmed_flush_lsn > standing.begins:
        return Gap(standing.begins, slot, f"it begins at {slot.confirmed_flush_lsn}")
    return None


class Filler:
    """Fills one gap of `subscription`, whose slot is `slot_name`."""

    def __init__(self, subscription: Subscription, slot_name: str, gap: Gap) -> None:
        self._subscription = subscription
        self._slot_name = slot_name
        self._gap = gap

    @property
    def reads_nothing(self) -> bool:
        """Whether every table is still to be copied, so that a new slot is all that is missing."""
        return not self._gap.begins

    async def start(
        self,
        options: Mapping[str, str],
        settings: Settings,
        receiver_timeout: float,
        on_warning: Callable[[PublisherError], None],
    ) -> DecodingProcess:
        """Start decoding at the gap's beginning; `options` are pgoutput's.  Raises PublisherError, ConnectionFailure."""
        gap, archive = self._gap, self._subscription.options.wal_archive
        assert archive is not None
        logger.warning(
            "replication slot does not keep what is to be applied next; it is decoded from the archive",
            subscription=self._subscription.name,
            slot=self._slot_name,
            reason=gap.reason,
            lsn=str(gap.begins),
            archive=archive,
        )
        source: Path | RestoreCommand = Path(archive)
        if archive == RESTORE_COMMAND:
            if not settings.restore_command:
                raise PublisherError(
                    f'could not fill the gap that replication slot "{self._slot_name}" leaves from {gap.begins} on: '
                    "there is no restore_command",
                    sqlstate="55000",
                    hint='Set restore_command in pubsub.toml and reload the daemon, or name a directory in "wal_archive".',
                )
            source = RestoreCommand(settings.restore_command, settings.restore_timeout)
        scratch = settings.spill_directory
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            return await DecodingProcess.start(
                self._subscription.conninfo,
                options,
                gap.begins,
                source,
                work_mem=settings.logical_decoding_work_mem,
                receiver_timeout=receiver_timeout,
                scratch=scratch,
                on_warning=on_warning,
            )
        except PublisherError as error:
            raise await self.explained(error) from error

    async def run(self, pipeline: Pipeline) -> None:
        """Make the slot, if it is missing, once everything up to now is applied; return when it keeps everything to come."""
        await faults.reached("gap: being filled")
        slot, begins = self._gap.slot, self._gap.begins
        if slot is not None and slot.confirmed_flush_lsn is not None:
            begins = slot.confirmed_flush_lsn
        else:
            async with await self._connect() as connection:
                now = await slots.current_wal_lsn(connection)
            await pipeline.until_stored_to(now)
            begins = (await self.make_slot()).consistent_point
        await faults.reached("gap: slot made")
        await pipeline.until_stored_to(begins)
        logger.info(
            "replication slot keeps again what is to be applied next",
            subscription=self._subscription.name,
            slot=self._slot_name,
            lsn=str(begins),
        )

    async def make_slot(self) -> CreatedSlot:
        """Make the slot, in place of the lost one.  Raises PublisherError; StartAgain if somebody else has made it."""
        options = self._subscription.options
        async with await self._connect() as connection:
            await faults.reached("gap: caught up")
            there = await slots.slot_info(connection, self._slot_name)
            if there is not None and not there.lost:
                raise StartAgain(f'replication slot "{self._slot_name}" has been made: it is looked at again')
            await replication.drop_slot(connection, self._slot_name, missing_ok=True)
            return await sound_slots.create_slot(
                connection,
                self._slot_name,
                snapshot="nothing",
                two_phase=options.two_phase_state == "e",
                failover=options.failover,
            )

    async def _connect(self) -> Connection:
        return await Connection.connect(
            self._subscription.conninfo, replication=True, application_name=self._subscription.name
        )

    async def explained(self, error: PublisherError) -> PublisherError:
        """Return an error of the decoding with what to do about it; for missing WAL, what a copy of all tables would cost."""
        hint, kind = explained_stream(error).hint, PublisherError
        # A position is told of WAL, not of a directory that cannot be read.
        archive = self._subscription.options.wal_archive
        named = archive is not None and archive != RESTORE_COMMAND
        if error.sqlstate == _UNDEFINED_FILE and named and not await asyncio.to_thread(_has_wal, archive or ""):
            hint = f'"{archive}" has no file of WAL: is it the archive, and is what holds it mounted?'
        elif error.sqlstate == _UNDEFINED_FILE and error.context is not None:
            kind = SlotLost
            hint = (
                "Restore the file to the archive, or copy anew with ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the "
                f"subscription{await self._cost()}."
            )
        return kind(
            f'could not fill the gap that replication slot "{self._slot_name}" leaves from {self._gap.begins} on: {error.message}',
            sqlstate=error.sqlstate,
            detail=error.detail,
            hint=hint,
            context=error.context,
        )

    async def _cost(self) -> str:
        """Return how much a copy of every table would read, as a part of a sentence; nothing if the publisher does not say."""
        try:
            async with await self._connect() as connection:
                ((tables, size),) = await connection.query(_COST, [list(self._subscription.publications)])
        except (PublisherError, ConnectionFailure):
            return ""
        return f", which would read {tables} tables of {size} in all"


def _has_wal(archive: str) -> bool:
    """Return whether the directory has segments of WAL, of whatever form; False if it cannot be read."""
    try:
        with os.scandir(archive) as files:
            return any(_SEGMENT.match(one.name) for one in files)
    except OSError:
        return False
