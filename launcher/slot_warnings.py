"""Warnings for commands and `status`: slots that are lost or soon will be, waits for a slot's creation or a lock."""

from __future__ import annotations

from typing import Final

from catalog.records import Warned
from pubsub.publisher.locks import LockWait
from pubsub.publisher.slots import SlotInfo, SlotWait

#: The share of the WAL that a slot may retain at which the warning begins.
_NEARLY: Final = 0.8
_NO_SLOT_HINT: Final = (
    "A new slot lacks what was changed since: ALTER SUBSCRIPTION ... RESYNC TABLE with every table of the subscription makes "
    "one and copies them anew."
)


def about_slot(name: str, slot: SlotInfo | None, archive: str | None) -> Warned | None:
    """Return a warning if the slot is missing (None) or lost, or is close to being lost to max_slot_wal_keep_size.

    `archive`: the directory from which what the slot lacks is decoded (apply.gap), if there is one.
    """
    hint = (
        _NO_SLOT_HINT
        if archive is None
        else f'What it lacks is decoded from the archive "{archive}"; then a new one is made.'
    )
    if slot is None:
        return Warned(f'replication slot "{name}" does not exist on the publisher', hint=hint)
    if slot.wal_status == "lost":
        reason = slot.invalidation_reason or "wal_removed"
        return Warned(f'replication slot "{name}" has been invalidated', f"The reason is {reason}.", hint)
    kept, safe = slot.retained_bytes or 0, slot.safe_wal_size
    if safe is None:
        return None
    if slot.wal_status != "unreserved" and kept < _NEARLY * (kept + max(safe, 0)):
        return None
    left = f"after {safe} bytes more" if safe > 0 else "at the next checkpoint"
    return Warned(
        f'replication slot "{slot.name}" retains {kept} bytes of WAL and is lost {left}',
        detail=f"Its wal_status is {slot.wal_status}.",
        hint='Let the subscription catch up, or raise "max_slot_wal_keep_size" on the publisher.',
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
