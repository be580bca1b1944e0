"""How much WAL slots may hold back."""

from __future__ import annotations

import pytest

from walsender.slots.wal_limit import kept_for_slots, safe_wal_size

SEGMENT = 16 << 20


@pytest.mark.parametrize(
    ("received", "redo", "keep_size", "kept"),
    [
        # Whole segments, of a limit that is rounded down.
        (10 * SEGMENT + 5, 10 * SEGMENT + 3, 3 * SEGMENT, 7 * SEGMENT),
        (10 * SEGMENT + 5, 10 * SEGMENT + 3, 3 * SEGMENT + 1, 7 * SEGMENT),
        (10 * SEGMENT + 5, 10 * SEGMENT + 3, SEGMENT - 1, 10 * SEGMENT),
        # A server keeps what is behind its last checkpoint, and looks for slots in what it does not keep.
        (10 * SEGMENT + 5, 4 * SEGMENT + 3, 3 * SEGMENT, 4 * SEGMENT),
        (10 * SEGMENT + 5, 4 * SEGMENT + 3, 0, 4 * SEGMENT),
        (2 * SEGMENT, 2 * SEGMENT, 8 * SEGMENT, 0),
    ],
)
def test_what_is_kept_for_slots(received: int, redo: int, keep_size: int, kept: int) -> None:
    """A slot that began in the segment of the last checkpoint was given up, which no server does."""
    assert kept_for_slots(received, redo, keep_size, SEGMENT) == kept


@pytest.mark.parametrize("keep_size", [0, SEGMENT - 1, SEGMENT, 3 * SEGMENT + 1])
@pytest.mark.parametrize("restart_lsn", [2 * SEGMENT, 2 * SEGMENT + 7, 3 * SEGMENT - 1])
def test_wal_that_may_still_come_before_a_slot_is_lost(restart_lsn: int, keep_size: int) -> None:
    received = 3 * SEGMENT + 5
    edge = received + safe_wal_size(received, restart_lsn, keep_size, SEGMENT)
    assert kept_for_slots(edge - 1, edge, keep_size, SEGMENT) <= restart_lsn
    assert kept_for_slots(edge, edge, keep_size, SEGMENT) > restart_lsn
