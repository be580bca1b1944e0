"""Decide which tables of a subscription get a sync worker: how many at once, in which order, when again after a failure.

    at once    max_sync_workers_per_subscription tables, and none before the apply worker has its slot: a subscription
               that cannot begin copies nothing
    order      that of copy_first; the rest as in the catalog, by the tables' oids; a table that pauses lets the next one go first
    first      tables in state c, whatever the limit: the apply worker's commits wait for them, so copies of others must not
               stand before them
    window     no copy begins outside copies.window, nor anew; one that has begun goes on, because its slot retains WAL
    again      wal_retrieve_retry_interval after the table's failure, as in PostgreSQL

(tablesync.c: process_syncing_tables_for_apply.)  A sync worker that was chosen here still asks for one of the slots
that all subscriptions share (launcher.worker_slots), and counts while it waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from catalog.figures import Warned
from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.setting_tables import DailyWindow
from pubsub.sql.layout_rules import Pattern, matches

ALWAYS: Final = DailyWindow.parse("")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which tables get a sync worker now."""

    begin: Sequence[SubscriptionRel]
    """The tables whose sync workers begin now, in this order."""
    without: frozenset[int]
    """The oids of tables that need a worker and wait until another one ends, or until the apply worker has its slot."""
    pauses: Sequence[float]
    """For each table that pauses after its failure, the seconds until it may be tried again."""


class CopiesAtOnce:
    """Chooses the tables of one subscription that are copied.  Times are those of one monotonic clock, in seconds."""

    def __init__(
        self, most: int, pause: float, window: DailyWindow = ALWAYS, copy_first: Sequence[Pattern] = ()
    ) -> None:
        """`most` is max_sync_workers_per_subscription, `pause` wal_retrieve_retry_interval, `window` copies.window."""
        self._most = most
        self._pause = pause
        self._window = window
        self._copy_first = copy_first
        self._closed = False
        self._failed_at: dict[int, float] = {}

    def adjust(self, most: int, pause: float) -> None:
        """Take over settings that were reloaded."""
        self._most, self._pause = most, pause

    def may_begin(self, today: datetime) -> bool:
        """Return whether copies begin at this time of the day."""
        return not self._window.wait(today)

    @property
    def failing(self) -> bool:
        """Whether a table's sync worker failed and no later one of that table has succeeded."""
        return bool(self._failed_at)

    def failed(self, relid: int, now: float) -> None:
        """Note that the table's sync worker has failed: the next one begins after the pause."""
        self._failed_at[relid] = now

    def succeeded(self, relid: int) -> None:
        """Forget the failures of the table's earlier sync workers."""
        self._failed_at.pop(relid, None)

    def keep(self, relids: Collection[int]) -> None:
        """Forget the failures of all other tables: they have left the subscription."""
        for relid in self._failed_at.keys() - relids:
            del self._failed_at[relid]

    def choose(
        self,
        relations: Iterable[SubscriptionRel],
        running: Collection[int],
        *,
        promised: Collection[int] = (),
        applies: bool,
        now: float,
        today: datetime | None = None,
    ) -> Chosen:
        """Choose the tables whose sync workers begin now.

        `relations` are the subscription's tables in the catalog's order; `running` are the oids of those that have a
        worker, also one that waits for its slot.  `promised` are the oids of those in state c.  `applies`: the apply worker
        has its slot.  `today`: the time of the day, if there is a window.
        """
        opens = self._window.wait(today) if today is not None else 0.0
        self._closed = opens > 0
        begin: list[SubscriptionRel] = []
        without: set[int] = set()
        pauses: list[float] = []
        for relation in sorted(relations, key=lambda one: (one.relid not in promised, self._rank(one))):
            if not needs_sync_worker(relation) or relation.relid in running:
                continue
            rest = self._failed_at.get(relation.relid, -1e9) + self._pause - now
            if self._closed and not _has_begun(relation):
                without.add(relation.relid)
                pauses.append(opens)
            elif rest > 0:
                pauses.append(rest)
            elif not applies or (relation.relid not in promised and len(running) + len(begin) >= self._most):
                without.add(relation.relid)
            else:
                begin.append(relation)
        return Chosen(begin, frozenset(without), pauses)

    def _rank(self, relation: SubscriptionRel) -> int:
        of_table = (
            n for n, one in enumerate(self._copy_first) if matches(one, relation.schema, relation.published_name)
        )
        return next(of_table, len(self._copy_first))

    def turn(self, at_work: Iterable[str]) -> Warned:
        """Return why no more tables are copied now; `at_work` names those whose sync workers have a slot.

        PostgreSQL reports nothing about this.
        """
        if self._closed:
            return Warned("waits for the window of copies", f'Copies begin within "copies.window", {self._window}.')
        if self._most == 0:
            return Warned(
                "waits for a sync worker",
                '"max_sync_workers_per_subscription" is 0: no table is copied.',
                'Increase "max_sync_workers_per_subscription".',
            )
        names = ", ".join(at_work)
        return Warned(f"waits for one of {self._most} sync workers", f"They are at work on {names}." if names else None)


def _has_begun(relation: SubscriptionRel) -> bool:
    """Return whether the table is past the beginning of its copy, or has a slot of an earlier one to give up."""
    return relation.state is not RelState.INIT or relation.sync_slot is not None


def needs_sync_worker(relation: SubscriptionRel) -> bool:
    """Return whether the table is not synchronized, still has a sync slot to drop, or lacks its Delta table.

    A table that has stopped needs a worker only until its slot is dropped.
    """
    if relation.stopped:
        return relation.sync_slot is not None
    return (
        relation.state not in (RelState.SYNCDONE, RelState.READY)
        or relation.sync_slot is not None
        or relation.definition is None
    )
