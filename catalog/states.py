"""The states of a table under a subscription, and who moves it from one to the next.

    i ──► d ──► f ──► w ──► c ──► s ──► r
    init  data  copy  wait  catch sync  ready
          sync  done        up    done

`i d f s r` are stored in the catalog (pg_subscription_rel.h: SUBREL_STATE_*); `w` and `c` live only in the memory that
the apply worker and the table's sync worker share, so after a crash a table in them is found in `f`.

A worked example.  CREATE SUBSCRIPTION stores `i`.  The sync worker stores `d`, makes its slot and copies under its
snapshot; when the copy is committed in Delta it stores `f` and says `w` with the LSN that it has reached.  Apply
answers `c` with the LSN that the sync worker must reach; there the sync worker stores `s` with the LSN where it
stopped, and ends.  Apply stores `r` once its durable origin is at or past that LSN; before that it drops what the sync
worker has applied.

A table joins as `r` when copy_data = false.  RESYNC TABLE takes a table from any state back to `i`; a sync worker that
finds its slot gone in `f` goes back to `d` for a new copy.  Found in `d` with its slot, a copy goes on with the chunks
that are missing; a table copied under several snapshots stays in `f` until the stream has passed them (tablesync.window).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

Mover = Literal["sync", "apply", "command"]


class RelState(StrEnum):
    """srsubstate, by PostgreSQL's letters."""

    INIT = "i"
    DATASYNC = "d"
    FINISHEDCOPY = "f"
    SYNCWAIT = "w"
    CATCHUP = "c"
    SYNCDONE = "s"
    READY = "r"

    @property
    def stored(self) -> bool:
        """Whether the catalog holds it; w and c live in memory only."""
        return self in STORED


STORED: Final = frozenset({RelState.INIT, RelState.DATASYNC, RelState.FINISHEDCOPY, RelState.SYNCDONE, RelState.READY})

#: Who may move a table from one state to another.
TRANSITIONS: Final[dict[tuple[RelState, RelState], Mover]] = {
    (RelState.INIT, RelState.DATASYNC): "sync",
    (RelState.DATASYNC, RelState.DATASYNC): "sync",  # a new copy: its slot was lost, or it can not go on
    (RelState.DATASYNC, RelState.FINISHEDCOPY): "sync",
    (RelState.FINISHEDCOPY, RelState.DATASYNC): "sync",  # the slot is gone: copy again
    (RelState.FINISHEDCOPY, RelState.SYNCWAIT): "sync",
    (RelState.SYNCWAIT, RelState.CATCHUP): "apply",
    (RelState.CATCHUP, RelState.SYNCDONE): "sync",
    (RelState.SYNCDONE, RelState.READY): "apply",
    **{(state, RelState.INIT): "command" for state in RelState},
}

#: The same as the catalog sees it: from f straight to s, since w and c are not stored.
STORED_TRANSITIONS: Final = frozenset(
    {pair for pair in TRANSITIONS if pair[0] in STORED and pair[1] in STORED}
    | {(RelState.FINISHEDCOPY, RelState.SYNCDONE)}
)


def may_move(old: RelState, new: RelState, mover: Mover | None = None) -> bool:
    """Whether the table above has this step (for this mover, when one is given)."""
    found = TRANSITIONS.get((old, new))
    return found is not None and (mover is None or found == mover)


def may_store(old: RelState, new: RelState) -> bool:
    """Whether the catalog takes this step; storing a state again is idempotent."""
    return new in STORED and (old == new or (old, new) in STORED_TRANSITIONS)
