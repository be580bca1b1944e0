"""Trace a batch that is visible (pubsub.tracing)."""

from __future__ import annotations

from collections.abc import Sequence

from apply.batch import Batch
from apply.worker_statistics import Figures
from pubsub import tracing


def trace(batch: Batch, closed: float, staged: float, commits: Sequence[tracing.TableCommit], figures: Figures) -> None:
    """Make a batch's spans.  `closed`, `staged`: when it was, in monotonic seconds; `figures` have counted it already."""
    attributes: dict[str, str | int | float] = {
        "pubsub.lsn": str(batch.last_lsn),
        "pubsub.transactions": len(batch.transactions),
        "pubsub.rows": batch.rows,
        "pubsub.tables": len(commits),
    }
    if commits and figures.lag.latest is not None:
        attributes["pubsub.lag_seconds"] = figures.lag.latest
    tracing.batch(closed if batch.opened_at is None else batch.opened_at, closed, staged, commits, attributes)
