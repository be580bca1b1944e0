"""The printed figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pubsub.demo.figures import Copy, percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurements: times in seconds, sizes in bytes, `lags` sorted.

    `copies` are the initial copies with their rows; `applied` the row changes of each subscription during `seconds`;
    `fastest` the highest rate per second over five seconds.
    """

    copies: Sequence[tuple[Copy, int]]
    applied: Mapping[str, int]
    fastest: Mapping[str, float]
    seconds: float
    lags: Sequence[float]
    transactions: int | None
    python: int
    jvm: int
    workers: int


def report(found: Figures) -> str:
    """Return the figures as a few lines of text."""
    lines = ["Figures:"]
    if found.copies:
        lines += _copies(found.copies)
    changes = sum(found.applied.values())
    rate = changes / found.seconds if found.seconds > 0 else 0.0
    fastest = ", ".join(f"{name} {rate:,.0f}" for name, rate in found.fastest.items())
    lines.append(f"  applied   {changes:,} row changes in {found.seconds:.1f} s: {rate:,.0f} rows/s")
    if fastest:
        lines.append(f"            in the best five seconds, rows/s: {fastest}")
    if found.transactions is not None:
        lines.append(f"            of {found.transactions:,} transactions that the writers committed meanwhile")
    lines.append(f"  lag       from commit to visible in Delta: {_lags(found.lags)}")
    lines.append(
        f"  memory    at most: the daemon's Python {_megabytes(found.python)}, its JVM {_megabytes(found.jvm)}, "
        f"Spark's Python workers during the copies {_megabytes(found.workers)}"
    )
    return "\n".join(lines)


def _copies(copies: Sequence[tuple[Copy, int]]) -> list[str]:
    rows = sum(count for _, count in copies)
    seconds = max(copy.ended for copy, _ in copies) - min(copy.started for copy, _ in copies)
    lines = [
        f"  copied    {rows:,} rows of {len(copies)} tables in {seconds:.1f} s: {rows / max(seconds, 0.001):,.0f} rows/s"
    ]
    largest, count = max(copies, key=lambda one: one[1])
    lines.append(
        f"            {largest.relation} alone: {count:,} rows in {largest.seconds:.1f} s: "
        f"{count / max(largest.seconds, 0.001):,.0f} rows/s"
    )
    return lines


def _lags(lags: Sequence[float]) -> str:
    middle, high = percentile(lags, 50), percentile(lags, 95)
    if middle is None or high is None:
        return "nothing was written"
    return f"p50 {middle:.2f} s, p95 {high:.2f} s, max {lags[-1]:.2f} s"


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MB" if size else "not seen"
