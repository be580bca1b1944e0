"""The results of the benchmarks: every single measurement, and the figures computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

THEIRS: Final = "theirs"
"""The reference side: the stock subscriber, pg_recvlogical, or ours on local disk."""
OURS: Final = "ours"


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of one side; `cpu` is processor seconds by process, memory is the peak in bytes."""

    side: str
    seconds: float
    cpu: dict[str, float] = field(default_factory=dict)
    daemon_memory: int | None = None
    jvm_memory: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same work done by both sides: `changes` row changes; `goal` is the rate to reach, as a share of theirs."""

    name: str
    title: str
    changes: int
    goal: float | None
    runs: Sequence[Run]

    def seconds(self, side: str) -> float:
        """Return the median of a side's runs."""
        return statistics.median(run.seconds for run in self.runs if run.side == side)

    def rate(self, side: str) -> float:
        """Return a side's changes per second."""
        return self.changes / self.seconds(side)

    @property
    def ratio(self) -> float:
        """Our rate as a share of theirs."""
        return self.rate(OURS) / self.rate(THEIRS)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else self.ratio >= self.goal

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "changes": self.changes,
            "theirs_seconds": self.seconds(THEIRS),
            "ours_seconds": self.seconds(OURS),
            "theirs_changes_per_second": self.rate(THEIRS),
            "ours_changes_per_second": self.rate(OURS),
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure of ours, to stay below `goal` if set; `theirs` is PostgreSQL's.  `unit`: seconds, bytes, rate, times."""

    name: str
    title: str
    unit: str
    ours: float
    theirs: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else self.ours < self.goal

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}


@dataclass(slots=True)
class Results:
    """All results; `failures` are the scenarios that could not be measured, or left wrong tables."""

    comparisons: list[Comparison] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "comparisons": [comparison.document() for comparison in self.comparisons],
            "limits": [limit.document() for limit in self.limits],
            "failures": self.failures,
        }
