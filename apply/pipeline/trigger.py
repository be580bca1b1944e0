"""Decide when the open batch closes.

    full      it has `rows` rows, `nbytes` bytes or half of `memory`, ends at `align_at`, or must be taken before the next
              transaction: it closes at once, and nothing is received until it has been taken
    age       its first transaction will be visible about `age` seconds after it joined, if the batch takes as long to
              stage and commit as the last ones did; at the earliest at half the age
    quiet     nothing has come for _QUIET seconds: it closes before its age, as long as that makes few batches of what would
              have been one.  A batch that closes early is paid for with one of `early`, unless the next begins when it would
              have closed anyway; one comes back in twice the age
    growing   while a commit runs, a batch of fewer than _WORTH_STAGING_AHEAD rows stays open beyond its age, so a backlog
              makes batches larger, not more numerous; a larger one closes at its age and is staged ahead
    backlog   the publisher sends transactions long after their commit: more frames are there already, so the batch stays
              open beyond its age until the stream runs dry

Nothing here waits or reads a clock: the pipeline does, and asks again whenever something has changed.
"""

from __future__ import annotations

from typing import Final

from apply.batch import Batch
from apply.pipeline.interfaces import Limits
from pubsub.protocol.lsn import Lsn

# A batch of this many rows is staged while another commits; a smaller one waits and grows.
_WORTH_STAGING_AHEAD: Final = 50_000
# A transaction sent more than this after its commit, in microseconds, belongs to a backlog.
_BACKLOG: Final = 2_000_000
# A backlog's stream has run dry after this long without a frame, in seconds.
_STALLED: Final = 0.25
# How much the last batch counts in the mean of how long they take.
_WEIGHT: Final = 0.25
# A batch may close early when nothing has come for this long, in seconds: what follows is then far behind, as a rule.
_QUIET: Final = 0.03


class Trigger:
    """Say when the batches of one stream close.

    `align_at`: the first batch that reaches this LSN closes there; None from then on.
    """

    def __init__(self, limits: Limits, align_at: Lsn | None = None) -> None:
        self.align_at = align_at
        self._limits = limits
        # The mean time from a batch's closing to its being durable, in seconds.
        self._takes = 0.0
        # How many batches may close early, when the last batch closed; when that was; when it would have closed by its age.
        self._early = float(limits.early)
        self._closed_at = 0.0
        self._paid_until: float | None = None

    def full(self, batch: Batch, *, closing: bool) -> bool:
        """Tell whether the batch closes at once, whatever its age.

        `closing`: the dispatcher cannot add its next transaction to this batch (Dispatcher.closing).
        """
        if not batch.transactions:
            return False
        if closing or self._reaches_alignment(batch):
            return True
        if batch.memory >= self._limits.memory // 2:
            return True
        return batch.rows >= self._limits.rows or batch.nbytes >= self._limits.nbytes

    def due_at(
        self, batch: Batch, *, closing: bool, committing: bool, sent_at: int, last_receive: float
    ) -> float | None:
        """Return when the batch closes, in monotonic seconds, if nothing changes until then; None: not by time alone.

        The batch has transactions.  `closing`: as in `full`, or the stream is being drained.  `committing`: a commit is running.
        `sent_at`: when the publisher sent the newest frame, by its clock, in microseconds since 2000-01-01 UTC.
        `last_receive`: when it arrived, in monotonic seconds.
        """
        opened_at = batch.opened_at
        assert opened_at is not None
        if self.full(batch, closing=closing):
            return opened_at
        if committing and batch.rows < _WORTH_STAGING_AHEAD:
            return None
        due = self._of_age(opened_at)
        if sent_at - batch.transactions[-1].commit_time > _BACKLOG:
            return max(due, last_receive + _STALLED)
        if self._may_be_early(opened_at, opened_at) >= 1:
            return min(due, max(opened_at, last_receive) + _QUIET)
        return due

    def closed(self, batch: Batch, at: float) -> None:
        """Note that the batch was taken, at that moment in monotonic seconds.

        Later ones no longer close at `align_at` if it has been reached.
        """
        if self._reaches_alignment(batch):
            self.align_at = None
        assert batch.opened_at is not None
        self._early = self._may_be_early(batch.opened_at, at)
        self._closed_at = at
        self._paid_until = None
        due = self._of_age(batch.opened_at)
        if self._early >= 1 and at < due and not self.full(batch, closing=False):
            self._early -= 1
            self._paid_until = due

    def _of_age(self, opened_at: float) -> float:
        """Return when a batch closes by its age."""
        age = self._limits.age
        return opened_at + max(age - self._takes, age / 2)

    def _may_be_early(self, opened_at: float, now: float) -> float:
        """Return how many batches may close early now, if one was opened at that moment."""
        found = self._early + (now - self._closed_at) / (2 * self._limits.age)
        if self._paid_until is not None and opened_at >= self._paid_until:
            found += 1  # it would have been a batch of its own
        return min(found, float(self._limits.early))

    def committed(self, seconds: float) -> None:
        """Note that a batch is durable so many seconds after it closed."""
        self._takes += (seconds - self._takes) * _WEIGHT

    def _reaches_alignment(self, batch: Batch) -> bool:
        return self.align_at is not None and batch.last_lsn >= self.align_at
