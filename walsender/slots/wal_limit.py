"""Say how much WAL slots may hold back: max_slot_wal_keep_size, in whole segments as PostgreSQL counts it."""

from __future__ import annotations


def kept_for_slots(received: int, redo: int, keep_size: int, segment_size: int) -> int:
    """Return from which LSN on WAL is kept for slots: the beginning of a segment (xlog.c: KeepLogSeg).

    `keep_size`: bytes, of which whole segments count.  `redo`: that of the last checkpoint; from there on a server keeps its WAL
    whatever the limit is, so a slot there is not given up (slot.c: InvalidateObsoleteReplicationSlots).
    """
    limit = received // segment_size - keep_size // segment_size
    return max(min(limit, redo // segment_size), 0) * segment_size


def safe_wal_size(received: int, restart_lsn: int, keep_size: int, segment_size: int) -> int:
    """Return how many bytes may come before a slot is past `keep_size` (slotfuncs.c: pg_get_replication_slots)."""
    return (restart_lsn // segment_size + keep_size // segment_size + 1) * segment_size - received
