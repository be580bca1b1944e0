"""Decide whether an interrupted copy can resume under another snapshot (tablesync.window has the reasons)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from catalog.records import CopyPlan, Subscription
from pubsub.delta.table import TargetTable
from pubsub.protocol.lsn import INVALID_LSN
from pubsub.publisher.definitions import TableDefinition
from pubsub.publisher.publication import PublishedTable
from pubsub.publisher.snapshots import Publishing


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions for resuming a copy.

    `fingerprint` changes whenever anything does that must stay the same; None: the copy cannot resume, for `reason`.  `incomplete`:
    why the stream does not have every change of the table; `published`: what must stay the same for it to have them.
    """

    fingerprint: str | None
    reason: str | None
    incomplete: str | None
    published: tuple[str, ...]

    def obstacle(self, plan: CopyPlan, kept: int) -> str | None:
        """Return why the copy of `plan`, with `kept` finished chunks, must start over; None if it can resume."""
        if self.reason is not None:
            return self.reason
        if plan.fingerprint is None:
            return "its Delta table is written by Spark"
        if plan.fingerprint != self.fingerprint:
            return "the table, or how it is published, has changed meanwhile"
        return None if kept else "no chunk of it was finished"

    def missing(self, plan: CopyPlan) -> str | None:
        """Return why the stream may lack a change that the resumed copy of `plan` needs; None if it has all of them.

        What is true when the copy resumes must be so until its window is passed: the stream is asked for with the options of then.
        """
        if self.incomplete is not None:
            return self.incomplete
        known = json.loads(plan.fingerprint)["publications"] if plan.fingerprint is not None else None
        return None if known == list(self.published) else "how it is published has changed meanwhile"


def conditions(
    subscription: Subscription,
    published: PublishedTable,
    definition: TableDefinition,
    target: TargetTable,
    publishing: Publishing,
    filenode: int,
) -> Conditions:
    """Return the current conditions, for the table as one snapshot sees it."""
    incomplete, reason = _incomplete(subscription, publishing), None
    published_by = (*subscription.publications, publishing.marks)
    if target.keeps_past:
        kept = "the history" if target.history is not None else "every version of its rows"
        reason = f"its Delta table keeps {kept}, and has to begin at one moment"
    elif not target.key:
        reason = "it has no key"
    elif not target.masks.rules.keys().isdisjoint(target.key):
        reason = "its key is masked, and rows cannot be read again by it"
    elif definition.kind != "r":
        reason = "it is no plain table"
    elif incomplete is not None:
        reason = incomplete
    elif subscription.skip_lsn != INVALID_LSN:
        reason = "a transaction is to be skipped"
    if reason is not None:
        return Conditions(None, reason, incomplete, published_by)
    facts: dict[str, object] = {
        "columns": [
            [column.name, column.attnum, int(column.type_oid), column.type_modifier, column.generated]
            for column in definition.columns
        ],
        "schema": str(target.schema),
        "key": target.key,
        "identity": definition.replica_identity,
        "published": published.attnames,
        "filter": published.row_filter,
        "publications": published_by,
        "file": filenode,
    }
    if target.masks:
        masks = target.masks
        facts["masks"] = [{name: str(rule) for name, rule in sorted(masks.rules.items())}, masks.fingerprint]
    return Conditions(json.dumps(facts, ensure_ascii=False), None, incomplete, published_by)


def _incomplete(subscription: Subscription, publishing: Publishing) -> str | None:
    if not publishing.everything:
        return "its publications do not publish all of its changes"
    if subscription.options.origin == "none":
        return "changes of other origins are left out (origin = none)"
    return None
