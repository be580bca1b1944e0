"""The versions of a subscription's tables that together show one LSN (delta.md, Several tables, one LSN).

Delta commits no two tables together, so each commit says in its userMetadata the end LSNs of the first and the last
transaction in it.  Version v of a table shows L if last(v) <= L < first(v+1), up to the origin; a commit without data
shows what the version before it shows.

    orders   v3: 0/100-0/200   v4: 0/500-0/600          v3 shows 0/200 to 0/4FF
    items    v7: 0/180-0/300   v8: 0/400-0/400          v7 shows 0/300 to 0/3FF
    asked for 0/350: orders v3, items v7;  for 0/520: rounded down to 0/4FF, orders v3, items v8
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from catalog.records import State, Subscription, SubscriptionRel
from catalog.states import RelState
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn


@dataclass(frozen=True, slots=True)
class Shown:
    """A version and the LSNs that it shows: from `first` to `last`, both inclusive."""

    version: int
    first: Lsn
    last: Lsn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tables` by qualified name: the version to read, and where."""

    subscription: str
    lsn: Lsn
    tables: Mapping[str, tuple[int, str]]

    def as_json(self) -> dict[str, Any]:
        """As interface.md has it."""
        tables = {name: {"version": version, "path": path} for name, (version, path) in self.tables.items()}
        return {"subscription": self.subscription, "lsn": str(self.lsn), "tables": tables}


def take(state: State, subscription: Subscription, at: Lsn | None = None) -> Snapshot:
    """The versions that show `at`, rounded down to the nearest LSN that all tables show; None: the latest.  Blocks.

    Tables that are not ready, or have stopped, are left out.  Raises NotInPrerequisiteState when no LSN can be shown.
    """
    origin = next((o.remote_lsn for o in state.origins if o.subid == subscription.oid and o.relid is None), INVALID_LSN)
    if at is not None and at > origin:
        raise NotInPrerequisiteState(
            f'subscription "{subscription.name}" has not reached LSN {at}', detail=f"Its origin is at {origin}."
        )
    ready = [r for r in state.relations if r.subid == subscription.oid and r.state is RelState.READY and not r.stopped]
    if not ready:
        raise NotInPrerequisiteState(f'subscription "{subscription.name}" has no table that is ready')
    shown = {relation.relid: shown_by(commits(relation), origin) for relation in ready}
    lsn, chosen = together(shown, origin if at is None else at)
    if chosen is None:
        raise NotInPrerequisiteState(
            f'no LSN up to {at or origin} is shown by all tables of subscription "{subscription.name}"',
            hint="Ask for a later LSN: versions from before a table's copy, or whose log entries are cleaned up, show none.",
        )
    return Snapshot(
        subscription.name,
        lsn,
        {relation.qualified_name: (chosen[relation.relid].version, relation.path) for relation in ready},
    )


def version_at(relation: SubscriptionRel, origin: Lsn, at: Lsn) -> int:
    """The version of one table that shows exactly `at`.  Blocks.  Raises NotInPrerequisiteState."""
    for shown in shown_by(commits(relation), origin):
        if shown.first <= at <= shown.last:
            return shown.version
    raise NotInPrerequisiteState(
        f'no version of table "{relation.qualified_name}" shows LSN {at}',
        hint="pubsub snapshot --at rounds down to an LSN that all tables show.",
    )


def together(shown: Mapping[int, Sequence[Shown]], at: Lsn) -> tuple[Lsn, dict[int, Shown] | None]:
    """The greatest LSN up to `at` that every table shows, with the versions that do; None for no such LSN."""
    while True:
        chosen = {}
        lowest = at
        for relid, versions in shown.items():
            fit = next((one for one in reversed(versions) if one.first <= at), None)
            if fit is None:
                return at, None
            chosen[relid] = fit
            lowest = min(lowest, fit.last)
        if lowest == at:
            return at, chosen
        at = lowest


def shown_by(log: Iterable[tuple[int, tuple[Lsn, Lsn] | None]], origin: Lsn) -> list[Shown]:
    """What each version shows, oldest first; `log` are the versions in order with their ranges (None: without data).

    Versions that show nothing are left out: a later commit shows the same, or starts at an LSN beyond the origin.
    """
    ranges: list[tuple[int, Lsn, Lsn]] = []
    for version, given in log:
        if given is not None:
            ranges.append((version, *given))
        elif ranges:
            _, first, last = ranges[-1]
            ranges[-1] = (version, first, last)
    # What altered a table says of which LSN it is; the data that it stands before may have begun earlier.
    firsts = list(accumulate((first for _, first, _ in reversed(ranges)), min))[::-1]
    ends = [Lsn(following - 1) for following in firsts[1:]] + [origin]
    found = []
    for (version, _, last), end in zip(ranges, ends, strict=True):
        if last <= min(end, origin):
            found.append(Shown(version, last, min(end, origin)))
    return found


def commits(relation: SubscriptionRel) -> list[tuple[int, tuple[Lsn, Lsn] | None]]:
    """The versions in the Delta log, oldest first, with the range that each commit holds.  Blocks."""
    from deltalake import DeltaTable

    history = DeltaTable(relation.path).history()
    log = [(int(entry["version"]), _range(entry.get("userMetadata"))) for entry in history]
    log.sort()
    if log and relation.copy_generation == 0:
        # It joined without a copy: what it held then shows the LSN of that moment.
        joined = relation.lsn or INVALID_LSN
        log[0] = (log[0][0], (joined, joined))
    return log


def _range(metadata: str | None) -> tuple[Lsn, Lsn] | None:
    """What apply and tablesync write (apply.delta.writer); other programs' metadata is none of ours."""
    try:
        found = json.loads(metadata or "null")
        first, last = Lsn.parse(found["first"]), Lsn.parse(found["last"])
        # A table that was copied under several snapshots shows nothing before it is whole (tablesync.window).
        return first, max(last, Lsn.parse(found["until"])) if "until" in found else last
    except (ValueError, TypeError, KeyError, PubsubError):
        return None
