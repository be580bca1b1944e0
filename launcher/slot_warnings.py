"""Warnings for commands and `status`: slots that are lost or soon will be, waits for a slot's creation or a lock."""

from __future__ import annotations

from collections import deque
from typing import Final

from catalog.figures import Warned
from pubsub.publisher.locks import LockWait
from pubsub.publisher.slots import SlotInfo, SlotWait
from pubsub.sql.options import RESTORE_COMMAND

#: The share of the WAL that a slot may retain at which the warning begins.
_NEARLY: Final = 0.8
#: How soon a slot must be lost, at the rate at which its room shrinks, to be warned of earlier; the share at which that begins.
_SOON: Final = 3600.0
_EARLY: Final = 0.25
#: For how long the room is remembered, and what is the least to tell a rate from, in seconds.
_REMEMBERED: Final = 600.0
_LEAST: Final = 60.0
_NO_SLOT_HINT: Final = (
    "A new slot lacks what was changed since: ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the subscription makes "
    "one and copies them anew."
)


class Room:
    """The room that a slot has had of late: how much WAL could still be written before it is lost."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, slot: SlotInfo | None, now: float) -> None:
        """Note the slot's safe_wal_size.  `now`: time.monotonic()."""
        if slot is None or slot.safe_wal_size is None:
            self._seen.clear()
            return
        self._seen.append((now, slot.safe_wal_size))
        while now - self._seen[0][0] > _REMEMBERED:
            self._seen.popleft()

    def seconds_left(self) -> float | None:
        """Return when it is used up at the rate of the last minutes; None if it does not shrink, or was not seen for a minute."""
        if not self._seen:
            return None
        (since, before), (now, left) = self._seen[0], self._seen[-1]
        if now - since < _LEAST or left >= before:
            return None
        return max(left, 0) * (now - since) / (before - left)


def about_slot(
    name: str, slot: SlotInfo | None, archive: str | None, seconds_left: float | None = None
) -> Warned | None:
    """Return a warning if the slot is missing (None) or lost, or is close to being lost to max_slot_wal_keep_size.

    `seconds_left`: until it is lost, if that goes on as of late.  `archive`: the directory from which what the slot lacks is
    decoded (apply.gap), or RESTORE_COMMAND, if there is one.
    """
    hint = (
        _NO_SLOT_HINT
        if archive is None
        else "What it lacks is decoded from what restore_command fetches; then a new one is made."
        if archive == RESTORE_COMMAND
        else f'What it lacks is decoded from the archive "{archive}"; then a new one is made.'
    )
    if slot is None:
        return Warned(f'replication slot "{name}" does not exist on the publisher', hint=hint)
    if slot.lost:
        return _invalidated(slot, hint)
    return _nearly_lost(
        slot,
        f'replication slot "{slot.name}"',
        seconds_left,
        'Let the subscription catch up, or raise "max_slot_wal_keep_size" on the publisher.',
    )


def about_slot_of_a_copy(slot: SlotInfo, table: str, seconds_left: float | None = None) -> Warned | None:
    """Return a warning if the slot with which `table` is copied is lost, or close to it; `seconds_left` as in `about_slot`."""
    if slot.lost:
        return _invalidated(slot, f"Table {table} is copied anew, with a new slot.")
    return _nearly_lost(
        slot,
        f'replication slot "{slot.name}", with which table {table} is copied,',
        seconds_left,
        'Raise "max_slot_wal_keep_size" on the publisher: if the slot is lost before the copy is done, the copy begins anew.',
    )


def _invalidated(slot: SlotInfo, hint: str) -> Warned:
    reason = slot.invalidation_reason or "wal_removed"
    return Warned(f'replication slot "{slot.name}" has been invalidated', f"The reason is {reason}.", hint)


def _nearly_lost(slot: SlotInfo, named: str, seconds_left: float | None, hint: str) -> Warned | None:
    kept, safe = slot.retained_bytes or 0, slot.safe_wal_size
    if safe is None:
        return None
    share = kept / max(kept + max(safe, 0), 1)
    soon = seconds_left is not None and seconds_left < _SOON and share >= _EARLY
    if slot.wal_status != "unreserved" and share < _NEARLY and not soon:
        return None
    left = f"after {safe} bytes more" if safe > 0 else "at the next checkpoint"
    if safe > 0 and seconds_left is not None:
        left += f", in about {_about(seconds_left)} at the rate of the last minutes"
    return Warned(
        f"{named} retains {kept} bytes of WAL and is lost {left}",
        detail=f"Its wal_status is {slot.wal_status}.",
        hint=hint,
    )


def about_wait(wait: SlotWait) -> Warned:
    """Return a warning that says what a slot's creation waits for."""
    message = f'replication slot "{wait.slot}" cannot be created yet'
    if wait.xid is None:
        return Warned(
            message,
            detail="The publisher is a standby, and waits for its primary to say which transactions run.",
            hint="SELECT pg_log_standby_snapshot() on the primary.",
        )
    if wait.gid is not None:
        return Warned(
            message,
            detail=f'It waits for transaction {wait.xid}, prepared as "{wait.gid}"{_since(wait.age)}.',
            hint="COMMIT PREPARED or ROLLBACK PREPARED on the publisher.",
        )
    who = f' of "{wait.application}"' if wait.application else ""
    role = f', role "{wait.user}"' if wait.user else ""
    return Warned(
        message,
        detail=f"It waits for transaction {wait.xid} of process {wait.pid}{who}{role}{_since(wait.age)}"
        + (f", {wait.state}." if wait.state else "."),
        hint=f"End that transaction on the publisher; SELECT pg_terminate_backend({wait.pid}) does.",
    )


def about_lock(wait: LockWait) -> Warned:
    """Return a warning that says which lock a session on the publisher waits for, and who holds it."""
    message = (
        "waits for a lock on the publisher" if wait.relation is None else f"waits for a lock on table {wait.relation}"
    )
    waited = f"Process {wait.pid} has waited for {wait.seconds:.0f} s"
    if wait.gid is not None:
        return Warned(
            message,
            detail=f'{waited} for the transaction prepared as "{wait.gid}"{_since(wait.age)}.',
            hint="COMMIT PREPARED or ROLLBACK PREPARED on the publisher.",
        )
    if wait.holder is None:
        return Warned(message, detail=f"{waited}.", hint="See pg_locks on the publisher.")
    who = f' of "{wait.holder_application}"' if wait.holder_application else ""
    role = f', role "{wait.user}"' if wait.user else ""
    mode = f" ({wait.modes})" if wait.modes else ""
    state = f", {wait.state}" if wait.state else ""
    return Warned(
        message,
        detail=f"{waited} for process {wait.holder}{who}{role}{mode}{_since(wait.age)}{state}.",
        hint=f"End that transaction on the publisher; SELECT pg_terminate_backend({wait.holder}) does.",
    )


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", open for {seconds:.0f} s"


def _about(seconds: float) -> str:
    """Return a time in one unit, as people say it."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 1):.0f} seconds"
