"""What a verification found: a document for machines, and the records that the catalog keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from catalog.figures import Outcome, Verification
from catalog.records import SubscriptionRel
from pubsub.protocol.lsn import Lsn

if TYPE_CHECKING:
    from pubsub.node.verify.comparison import RowDifference

#: The most characters of a value that are shown.
LONGEST_SHOWN: Final = 1000


@dataclass(frozen=True, slots=True)
class TableReport:
    """One table's result, in the terms of catalog.figures.Verification.

    `version`: of the Delta table that was compared.  `expected`: differences that its publications explain, since they do not
    publish every operation, or the option truncate.  `shown`: some of the rows that differ.
    """

    relation: str
    outcome: Outcome
    lsn: Lsn | None = None
    version: int | None = None
    sampled: bool = False
    rows: int = 0
    delta_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    ranges_left: int = 0
    expected: int = 0
    repaired: int = 0
    reason: str | None = None
    hint: str | None = None
    shown: tuple[RowDifference, ...] = ()

    @property
    def differing(self) -> int:
        """How many rows were found to differ, those that publications explain left out."""
        return self.missing + self.extra + self.different

    def record(
        self, relation: SubscriptionRel, started: datetime, finished: datetime, before: Verification | None
    ) -> Verification:
        """Return what the catalog keeps; `before` is what it has of an earlier comparison."""
        equal_at = finished if self.outcome == "equal" else None
        differed_at = finished if self.outcome == "different" else None
        if before is not None and before.generation == relation.copy_generation:
            equal_at = equal_at or before.equal_at
            differed_at = differed_at or (before.compared_at if before.equal is False else before.differed_at)
        return Verification(
            relation.subid,
            relation.relid,
            relation.copy_generation,
            started,
            finished,
            self.lsn,
            self.outcome,
            self.sampled,
            self.rows,
            self.delta_rows,
            self.missing,
            self.extra,
            self.different,
            self.ranges_left,
            self.repaired,
            self.reason,
            self.hint,
            equal_at,
            differed_at,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the table's part of the document."""
        return {
            "outcome": self.outcome,
            "lsn": None if self.lsn is None else str(self.lsn),
            "version": self.version,
            "sampled": self.sampled,
            "rows": self.rows,
            "delta_rows": self.delta_rows,
            "missing": self.missing,
            "extra": self.extra,
            "different": self.different,
            "ranges_left": self.ranges_left,
            "expected": self.expected,
            "repaired": self.repaired,
            "reason": self.reason,
            "hint": self.hint,
            "differences": [
                {
                    "kind": one.kind,
                    "key": cut(one.key),
                    "publisher": None if one.publisher is None else cut(one.publisher),
                    "delta": None if one.delta is None else cut(one.delta),
                }
                for one in self.shown
            ],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """A verification's result.  `asked`: the LSN of --at; `lsn`: the one at which the tables were compared."""

    subscription: str
    asked: Lsn | None
    lsn: Lsn
    seconds: float
    tables: tuple[TableReport, ...] = field(default_factory=tuple)

    @property
    def outcome(self) -> Outcome:
        """The worst of the tables' outcomes, those that were not compared left out."""
        found = {table.outcome for table in self.tables}
        worst: tuple[Outcome, ...] = ("failed", "different", "equal")
        return next((one for one in worst if one in found), "not compared")

    def as_json(self) -> dict[str, Any]:
        """Return the document that `pubsub verify --json` prints.  Later versions may add keys but never rename one."""
        return {
            "subscription": self.subscription,
            "lsn": str(self.lsn),
            "asked_lsn": None if self.asked is None else str(self.asked),
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            "tables": {table.relation: table.as_json() for table in self.tables},
        }


def cut(texts: Mapping[str, str | None]) -> dict[str, str | None]:
    """Cut long values short."""
    return {
        name: text
        if text is None or len(text) <= LONGEST_SHOWN
        else f"{text[:LONGEST_SHOWN]}… ({len(text)} characters)"
        for name, text in texts.items()
    }
