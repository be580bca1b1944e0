"""Which of a node's subscriptions a process of the daemon runs (the setting worker_processes)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catalog.records import Subscription


@dataclass(frozen=True, slots=True)
class Share:
    """The share of process `number`, from 0, of `count`.  It depends on nothing else: a subscription never moves.

    Process 0 has started the others, and sees to what is the node's own.  It has all subscriptions that may write one Delta
    table together, since their commits take turns within a process.
    """

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def has(self, subscription: Subscription) -> bool:
        """Return whether this process runs the subscription."""
        if subscription.options.source is not None:
            return self.is_first
        return subscription.oid % self.count == self.number

    def part_of(self, limit: int) -> int:
        """Return this process's part of a limit of the node's; each has 1 at least, unless the limit is 0."""
        part = limit // self.count + (self.number < limit % self.count)
        return max(part, min(limit, 1))

    def of(self, subscriptions: Iterable[Subscription]) -> list[Subscription]:
        """Return those that this process runs."""
        return [one for one in subscriptions if self.has(one)]


ALL = Share()
