"""When decoding can be relied on: the states of PostgreSQL's snapshot builder (snapbuild.c).

    START      nothing is known
    BUILDING   the catalogs are known at the starting position, and followed from there
    FULL       a list of running transactions was seen: transactions that begin from now on are seen whole
    CONSISTENT all transactions on that list have ended: every commit from now on is decoded whole

PostgreSQL needs three such lists because it learns the catalog from the transactions themselves.  Here the catalogs are
known from the start, and the ends of the listed transactions are seen one by one.  The meaning of the consistent point
is the same: every transaction that commits after it is decoded, with all of its changes, and none before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from walsender.xlog.xact import RunningXacts


class State(Enum):
    START = "start"
    BUILDING = "building"
    FULL = "full"
    CONSISTENT = "consistent"


STEPS: Final = {
    State.START: frozenset({State.BUILDING}),
    State.BUILDING: frozenset({State.FULL, State.CONSISTENT}),
    State.FULL: frozenset({State.CONSISTENT, State.BUILDING}),
    State.CONSISTENT: frozenset[State](),
}


class SnapshotBuilder:
    """The state and the consistent point of one decoding."""

    def __init__(self) -> None:
        self.state = State.START
        self.consistent_point = 0
        self._waiting: set[int] = set()

    def enter(self, state: State) -> None:
        if state not in STEPS[self.state]:
            raise ValueError(f"the snapshot builder cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def consistent(self) -> bool:
        return self.state is State.CONSISTENT

    def begin_again(self) -> None:
        """Wait for a new list: the transactions that run now are not seen whole, listed or not."""
        if self.state is State.FULL:
            self.enter(State.BUILDING)

    def running(self, lsn: int, running: RunningXacts) -> None:
        """Take note of a list of running transactions at `lsn` (SnapBuildFindSnapshot)."""
        if self.state is State.BUILDING:
            self._waiting = set(running.xids)
            if self._waiting:
                self.enter(State.FULL)
            else:
                self._become_consistent(lsn)
        elif self.state is State.FULL:
            # Transactions of the first list that are not on this one have ended, perhaps in a crash.
            self._waiting &= set(running.xids)
            if not self._waiting:
                self._become_consistent(lsn)

    def shutdown(self, lsn: int, prepared: Iterable[int] = ()) -> None:
        """Take note of a shutdown checkpoint or the end of a recovery: only `prepared` transactions still run."""
        if self.state is State.BUILDING:
            # As good as a list: what begins from now on is seen whole.
            self._waiting = set(prepared)
            self.enter(State.FULL)
        elif self.state is State.FULL:
            self._waiting.intersection_update(prepared)
        if self.state is State.FULL and not self._waiting:
            self._become_consistent(lsn)

    def ended(self, lsn: int, xids: Iterable[int]) -> None:
        """Take note that transactions ended with the record that starts at `lsn`."""
        if self.state is State.FULL:
            self._waiting.difference_update(xids)
            if not self._waiting:
                self._become_consistent(lsn)

    def may_have_begun_before(self, xid: int) -> bool:
        """Return whether a transaction that has not ended may have changes from before the decoding began.

        It may before the first list, and if it is on that.
        """
        return self.state in (State.START, State.BUILDING) or xid in self._waiting

    def _become_consistent(self, lsn: int) -> None:
        self.enter(State.CONSISTENT)
        self.consistent_point = lsn
