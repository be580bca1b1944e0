"""The states of a table in a subscription, and which side moves it from one to the next.

    i ──► d ──► f ──► w ──► c ──► s ──► r
    init  data  copy  wait  catch sync  ready
          sync  done        up    done

`i d f s r` are stored in the catalog (pg_subscription_rel.h: SUBREL_STATE_*).  `w` and `c` exist only in the memory
that the apply worker and the table's sync worker share: after a crash such a table is in `f`.

A worked example.  CREATE SUBSCRIPTION stores `i`.  The sync worker stores `d`, creates its slot and copies under the
slot's snapshot.  Once the copy is committed in Delta it stores `f` and announces `w` with the LSN that it has
reached.  The apply worker answers `c` with the LSN that the sync worker must reach; there the sync worker stores `s`
with the LSN where it stopped, and ends.  The apply worker stores `r` once its durable origin is at or past that LSN;
until then it drops the table's changes that the sync worker has applied.

With copy_data = false a table joins as `r`.  RESYNC TABLE moves a table from any state back to `i`.  A sync worker
that finds its slot gone in `f` goes back to `d` for a new copy; one that finds `d` and the slot continues with the
missing chunks.  A table copied under several snapshots stays in `f` until the stream passes them (tablesync.window).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

Mover = Literal["sync", "apply", "command"]


class RelState(StrEnum):
    """srsubstate, with PostgreSQL's letters."""

    INIT = "i"
    DATASYNC = "d"
    FINISHEDCOPY = "f"
    SYNCWAIT = "w"
    CATCHUP = "c"
    SYNCDONE = "s"
    READY = "r"

    @property
    def stored(self) -> bool:
        """Whether the catalog stores it; w and c exist in memory only."""
        return self in STORED


STORED: Final = frozenset({RelState.INIT, RelState.DATASYNC, RelState.FINISHEDCOPY, RelState.SYNCDONE, RelState.READY})

#: Which side may move a table from one state to another.
TRANSITIONS: Final[dict[tuple[RelState, RelState], Mover]] = {
    (RelState.INIT, RelState.DATASYNC): "sync",
    (RelState.DATASYNC, RelState.DATASYNC): "sync",  # a new copy: the slot was lost, or the copy cannot resume
    (RelState.DATASYNC, RelState.FINISHEDCOPY): "sync",
    (RelState.FINISHEDCOPY, RelState.DATASYNC): "sync",  # the slot is gone: copy again
    (RelState.FINISHEDCOPY, RelState.SYNCWAIT): "sync",
    (RelState.SYNCWAIT, RelState.CATCHUP): "apply",
    (RelState.CATCHUP, RelState.SYNCDONE): "sync",
    (RelState.SYNCDONE, RelState.READY): "apply",
    **{(state, RelState.INIT): "command" for state in RelState},
}

#: The transitions that the catalog sees: from f straight to s, since w and c are not stored.
STORED_TRANSITIONS: Final = frozenset(
    {pair for pair in TRANSITIONS if pair[0] in STORED and pair[1] in STORED}
    | {(RelState.FINISHEDCOPY, RelState.SYNCDONE)}
)


def may_move(old: RelState, new: RelState, mover: Mover | None = None) -> bool:
    """Return whether TRANSITIONS allows this step (to `mover`, when given)."""
    found = TRANSITIONS.get((old, new))
    return found is not None and (mover is None or found == mover)


def may_store(old: RelState, new: RelState) -> bool:
    """Return whether the catalog accepts this step; storing the same state again is idempotent."""
    return new in STORED and (old == new or (old, new) in STORED_TRANSITIONS)
