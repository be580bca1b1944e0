"""Which of the subscriptions a process of a daemon runs (the setting worker_processes; several daemons on one catalog)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catalog.records import OF_NODE, Subscription, unit_of


@dataclass(slots=True)
class Share:
    """The share of process `number`, from 0, of `count`.  A subscription never moves between the processes of a daemon.

    Process 0 has started the others, and sees to what is the node's own.  It has all subscriptions that may write one Delta
    table together, since their commits take turns within a process.

    `leased`: of the catalog's subscriptions the oids of those that this daemon has (launcher.tenure), and OF_NODE; None: all.
    `leaving`: those of them that it is about to give up, and begins nothing of.
    """

    number: int = 0
    count: int = 1
    leased: frozenset[int] | None = None
    leaving: frozenset[int] = frozenset()

    @property
    def is_first(self) -> bool:
        """Whether this process sees to what is the node's own."""
        return self.number == 0 and (self.leased is None or OF_NODE in self.leased)

    def has(self, subscription: Subscription) -> bool:
        """Return whether the subscription is this process's, to run or to give up."""
        unit = unit_of(subscription.oid, subscription.options.source)
        return self.has_unit(unit) and (self.leased is None or subscription.oid in self.leased)

    def has_unit(self, unit: int) -> bool:
        """Return whether a unit of the daemon's is this process's."""
        return max(unit, 0) % self.count == self.number

    def may_begin(self, oid: int) -> bool:
        """Return whether something may begin now of a subscription that this process has, or had."""
        return self.leased is None or (oid in self.leased and oid not in self.leaving)

    def part_of(self, limit: int) -> int:
        """Return this process's part of a limit of the node's; each has 1 at least, unless the limit is 0."""
        part = limit // self.count + (self.number < limit % self.count)
        return max(part, min(limit, 1))

    def of(self, subscriptions: Iterable[Subscription]) -> list[Subscription]:
        """Return those that this process runs."""
        return [one for one in subscriptions if self.runs(one)]

    def runs(self, subscription: Subscription) -> bool:
        """Return whether this process runs the subscription."""
        return self.has(subscription) and self.may_begin(subscription.oid)


ALL = Share()
