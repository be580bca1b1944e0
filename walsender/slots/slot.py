"""Logical replication slots, one file each, safe in a crash (slot.c).

A slot moves in memory, and is saved soon after: what was confirmed since is sent again after a crash, and subscribers
skip it by their origins.  WAL that a slot needs is what its saved position needs, `needed`; so WAL is removed only
after the positions that no longer need it are on disk.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final, NamedTuple

from pubsub.errors import (
    DataCorrupted,
    DuplicateObject,
    NotInPrerequisiteState,
    ObjectInUse,
    PubsubError,
    UndefinedObject,
)
from pubsub.reorderbuffer.buffer import Statistics
from walsender import checked_files

_ENDING: Final = ".slot"
_NAME: Final = re.compile("[a-z0-9_]+")
_LONGEST: Final = 63
_HINT: Final = "Remove it, and make the slot anew."


@dataclass(eq=False, slots=True)
class Slot:
    """A logical slot.  LSNs are integers; times are seconds since 1970."""

    name: str
    plugin: str
    database: str
    restart_lsn: int
    """Where decoding must begin, to send everything from confirmed_flush_lsn on: a list of running transactions."""
    confirmed_flush_lsn: int
    database_oid: int = 0
    temporary: bool = False
    two_phase: bool = False
    two_phase_at: int = 0
    """From here on transactions are sent at PREPARE."""
    failover: bool = False
    invalidation_reason: str | None = None
    inactive_since: float | None = field(default_factory=time.time)
    statistics: Statistics = field(default_factory=Statistics)
    """What was decoded for it (pg_stat_replication_slots), since `stats_reset` or ever."""
    stats_reset: float | None = None
    active_pid: int | None = None
    """The upstream backend of the session that has acquired it; not saved."""
    owner: object = None
    """The session that has acquired it, or made it as temporary; not saved."""
    release: Callable[[], None] | None = None
    """Ends the session that has acquired it; not saved."""
    changed: bool = False
    """Whether it differs from its file."""
    saved_restart_lsn: int = 0
    """restart_lsn as the file has it (last_saved_restart_lsn)."""
    taken: int = 0
    """How often its contents were taken to be saved, and which of these `written` are on disk."""
    written: int = 0


_NOT_SAVED: Final = {"active_pid", "owner", "release", "changed", "saved_restart_lsn", "taken", "written"}
_SAVED: Final = tuple(one.name for one in fields(Slot) if one.name not in _NOT_SAVED)


class _Contents(NamedTuple):
    """What a slot's file is to have."""

    slot: Slot
    number: int
    restart_lsn: int
    text: bytes


def check_name(name: str) -> None:
    """Raise PubsubError for a name that no slot can have (slot.c: ReplicationSlotValidateName)."""
    if not name:
        raise PubsubError(f'replication slot name "{name}" is too short', sqlstate="42602")
    if len(name.encode()) > _LONGEST:
        raise PubsubError(f'replication slot name "{name}" is too long', sqlstate="42622")
    if not _NAME.fullmatch(name):
        raise PubsubError(
            f'replication slot name "{name}" contains invalid character',
            sqlstate="42602",
            hint="Replication slot names may only contain lower case letters, numbers, and the underscore character.",
        )


class SlotStore:
    """The slots of a server, in `directory`, which no other process uses.

    Raises DataCorrupted for a file whose checksum is wrong, FileFailure.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self.limit = limit
        self._slots: dict[str, Slot] = {}
        self._writing = threading.Lock()
        checked_files.prepare(directory)
        for path in sorted(directory.glob(f"*{_ENDING}")):
            slot = _read(path)
            self._slots[slot.name] = slot

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, name: str) -> Slot | None:
        return self._slots.get(name)

    def get(self, name: str) -> Slot:
        """Raises UndefinedObject."""
        slot = self._slots.get(name)
        if slot is None:
            raise UndefinedObject(f'replication slot "{name}" does not exist')
        return slot

    def check_new(self, name: str) -> None:
        """Raise what keeps a slot of this name from being made (slot.c: ReplicationSlotCreate)."""
        check_name(name)
        if name in self._slots:
            raise DuplicateObject(f'replication slot "{name}" already exists')
        if len(self._slots) >= self.limit:
            raise PubsubError(
                "all replication slots are in use",
                sqlstate="53400",
                hint='Free one or increase "max_replication_slots".',
            )

    def add(self, slot: Slot) -> None:
        """Add a slot, durably unless it is temporary.  Raises FileFailure; then there is none."""
        self._slots[slot.name] = slot
        try:
            self.save(slot)
        except BaseException:
            del self._slots[slot.name]
            raise

    def acquire(self, name: str, owner: object, pid: int, release: Callable[[], None], *, valid: bool = True) -> Slot:
        """Give a slot to a session (slot.c: ReplicationSlotAcquire).

        Raises UndefinedObject, ObjectInUse; NotInPrerequisiteState for an invalidated one, unless not `valid`.
        """
        slot = self.get(name)
        if (slot.active_pid is not None or slot.temporary) and slot.owner is not owner:
            raise ObjectInUse(f'replication slot "{name}" is active for PID {slot.active_pid or pid}')
        if valid and slot.invalidation_reason is not None:
            raise NotInPrerequisiteState(
                f'can no longer access replication slot "{name}"',
                detail=f'This replication slot has been invalidated due to "{slot.invalidation_reason}".',
            )
        slot.active_pid, slot.owner, slot.release, slot.inactive_since = pid, owner, release, None
        return slot

    def free(self, slot: Slot) -> None:
        """Take a slot back from its session (slot.c: ReplicationSlotRelease)."""
        slot.release = None
        slot.inactive_since = time.time()
        if not slot.temporary:
            slot.active_pid = slot.owner = None
        slot.changed = True

    def drop(self, slot: Slot) -> None:
        """Remove a slot durably.  Raises FileFailure; then it is still there."""
        with self._writing:
            if not slot.temporary:
                checked_files.remove(self._path(slot.name))
            del self._slots[slot.name]

    def invalidate(self, slot: Slot, reason: str) -> None:
        """Give a slot up, durably, and end the session that uses it (slot.c: InvalidatePossiblyObsoleteSlot).

        Raises FileFailure; it is given up nevertheless, and saved with those that have changed.
        """
        slot.invalidation_reason = reason
        slot.changed = True
        if slot.release is not None:
            slot.release()
        self.save(slot)

    def save(self, slot: Slot) -> None:
        """Save a slot durably; temporary ones have no file.  Raises FileFailure."""
        self._save([self._contents(slot)])

    async def save_changed(self) -> None:
        """Save the slots that have moved.  Raises FileFailure; those that were not saved stay `changed`."""
        contents = [self._contents(slot) for slot in self._slots.values() if slot.changed]
        if contents:
            await asyncio.shield(asyncio.to_thread(self._save, contents))

    def _contents(self, slot: Slot) -> _Contents:
        """Take what is to be saved, of one moment: restart_lsn must not be newer than confirmed_flush_lsn."""
        slot.changed = False
        slot.taken += 1
        text = json.dumps({name: getattr(slot, name) for name in _SAVED}, default=asdict) + "\n"
        return _Contents(slot, slot.taken, slot.restart_lsn, text.encode())

    def _save(self, contents: Sequence[_Contents]) -> None:
        """Write files; one that has newer contents already, or whose slot was dropped, is left alone."""
        for slot, number, restart_lsn, text in contents:
            try:
                with self._writing:
                    if self._slots.get(slot.name) is slot and number > slot.written:
                        if not slot.temporary:
                            checked_files.write(self._path(slot.name), text)
                        slot.written = number
                        slot.saved_restart_lsn = restart_lsn
            except BaseException:
                for one in contents:
                    one.slot.changed |= one.number > one.slot.written
                raise

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{_ENDING}"

    @property
    def restarts(self) -> list[int]:
        """Where the decoding for each slot would begin after a crash: now, or later."""
        return [one.saved_restart_lsn for one in self._slots.values() if one.invalidation_reason is None]

    @property
    def needed(self) -> int | None:
        """The oldest LSN that a slot needs, now or after a crash; None if none needs any."""
        return min(self.restarts, default=None)


def _read(path: Path) -> Slot:
    text = checked_files.read(path, "replication slot file", _HINT)
    try:
        contents = json.loads(text)
        slot = Slot(**{**contents, "statistics": Statistics(**contents.get("statistics", {}))})
    except (ValueError, TypeError) as error:
        raise DataCorrupted(f'replication slot file "{path}" cannot be read: {error}', hint=_HINT) from error
    if path.name != f"{slot.name}{_ENDING}":
        raise DataCorrupted(f'replication slot file "{path}" is that of the slot "{slot.name}"', hint=_HINT)
    slot.saved_restart_lsn = slot.restart_lsn
    # Its time begins anew (slot.c: RestoreSlotFromDisk).
    slot.inactive_since = time.time()
    return slot
