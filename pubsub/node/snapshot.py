"""Find the versions of a subscription's tables that together show one LSN.

Delta cannot commit two tables together, so each commit records in its userMetadata the end LSNs of the first and the
last transaction in it.  Version v of a table shows L if last(v) <= L < first(v+1), up to the origin; a commit without
data shows what the version before it shows.  A copy replaces the rows that an earlier copy left: what the table would
have shown between the last commit of that one and this copy is not known, since its changes may not have been received.

    orders   v3: 0/100-0/200   v4: 0/500-0/600          v3 shows 0/200 to 0/4FF
    items    v7: 0/180-0/300   v8: 0/400-0/400          v7 shows 0/300 to 0/3FF
    asked for 0/350: orders v3, items v7;  for 0/520: rounded down to 0/4FF, orders v3, items v8
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.records import State, Subscription, SubscriptionRel
from catalog.states import RelState
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn


@dataclass(frozen=True, slots=True)
class Held:
    """What a commit says of itself: the end LSNs of its first and last transaction, and whether it is a copy of all rows."""

    first: Lsn
    last: Lsn
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A version and the LSNs that it shows, from `first` to `last`, both inclusive."""

    version: int
    first: Lsn
    last: Lsn


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tables` gives, by qualified name, the version to read and the Delta table's path."""

    subscription: str
    lsn: Lsn
    tables: Mapping[str, tuple[int, str]]

    def as_json(self) -> dict[str, Any]:
        """Return the document that `pubsub snapshot --json` prints."""
        tables = {name: {"version": version, "path": path} for name, (version, path) in self.tables.items()}
        return {"subscription": self.subscription, "lsn": str(self.lsn), "tables": tables}


def take(state: State, subscription: Subscription, at: Lsn | None = None) -> Snapshot:
    """Return the versions that show `at`, rounded down to the nearest LSN that all tables show.  Blocks.

    `at` None means the latest.  Tables that are not ready, or have stopped, are left out.  Raises
    NotInPrerequisiteState if `at` is past the origin, no table is ready, or no LSN is shown by all tables.
    """
    origin = next((o.remote_lsn for o in state.origins if o.subid == subscription.oid and o.relid is None), INVALID_LSN)
    if at is not None and at > origin:
        raise NotInPrerequisiteState(
            f'subscription "{subscription.name}" has not reached LSN {at}', detail=f"Its origin is at {origin}."
        )
    ready = [r for r in state.relations if r.subid == subscription.oid and r.state is RelState.READY and not r.stopped]
    if not ready:
        raise NotInPrerequisiteState(f'subscription "{subscription.name}" has no table that is ready')
    shown = {r.relid: shown_by(commits(state.node.node_id, r), origin) for r in ready}
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


def version_at(node_id: str, relation: SubscriptionRel, origin: Lsn, at: Lsn) -> int:
    """Return the version of one table that shows exactly `at`.  Blocks.  Raises NotInPrerequisiteState."""
    shown = next((one for one in shown_by(commits(node_id, relation), origin) if one.first <= at), None)
    if shown is not None and at <= shown.last:
        return shown.version
    raise NotInPrerequisiteState(
        f'no version of table "{relation.qualified_name}" shows LSN {at}',
        hint="pubsub snapshot --at rounds down to an LSN that all tables show.",
    )


def together(shown: Mapping[int, Iterable[Shown]], at: Lsn) -> tuple[Lsn, dict[int, Shown] | None]:
    """Return the greatest LSN up to `at` that every table shows, with the versions that show it; None if there is none.

    `shown` are each table's versions, newest first; they are read only as far back as needed.
    """
    older = {relid: iter(versions) for relid, versions in shown.items()}
    chosen: dict[int, Shown] = {}
    while True:
        lowest = at
        for relid, versions in older.items():
            fit: Shown | None = chosen.get(relid)
            while fit is None or fit.first > at:
                fit = next(versions, None)
                if fit is None:
                    return at, None
            chosen[relid] = fit
            lowest = min(lowest, fit.last)
        if lowest == at:
            return at, chosen
        at = lowest


def shown_by(log: Iterable[tuple[int, Held | None]], origin: Lsn) -> Iterator[Shown]:
    """Yield what each version shows, newest first.

    `log` gives the versions, newest first, with what their commits hold (None: a commit without data).  Versions that
    show no LSN are left out: a later version shows the same, or the commit reaches beyond the origin.
    """
    newest: int | None = None
    end = origin
    copied = False
    for version, held in log:
        # Later commits without data show the same as the one with the range: the last of them is the version to read.
        newest = version if newest is None else newest
        if held is None:
            continue
        if copied:
            end = min(end, held.last)
        if held.last <= end:
            yield Shown(newest, held.last, end)
        # `min`, because the commit of an ALTER has its own LSN, and the data after it may begin at a lower one.
        end = min(end, Lsn(max(held.first, 1) - 1))
        newest, copied = None, held.copied


def commits(node_id: str, relation: SubscriptionRel) -> Iterator[tuple[int, Held | None]]:
    """Yield the versions of the Delta table, newest first, with what each commit holds.  Blocks.

    Yields only versions that can be read, as far back as the log holds the commits' metadata (pubsub.delta.history).
    """
    from pubsub.delta import history

    found, whose = history.commits(relation.path), relation.whose
    for version, metadata in found.newest_first():
        held = _held(metadata, whose)
        if version == found.oldest and held is None and _is_as_it_joined(node_id, relation, version):
            # The table joined without a copy: the rows it held then show the LSN of that moment.
            joined = relation.lsn or INVALID_LSN
            held = Held(joined, joined)
        elif version == found.oldest and held is None and whose is not None:
            held = _of_idle_source(node_id, relation, version)
        yield version, held


def _of_idle_source(node_id: str, relation: SubscriptionRel, version: int) -> Held | None:
    """Return what a source's rows show at the oldest version, whose commit, and those before it, may be others'; None: nothing."""
    from pubsub.delta.log.deltalake_turns import ask
    from pubsub.delta.table import application_id

    app_id = application_id(node_id, relation.subid, relation.relid, relation.copy_generation)
    at = ask(relation.path, lambda table: table.transaction_version(app_id), version)
    if at is None:
        return None
    # Up to `relation.lsn` the copy was followed, and until then it was perhaps not whole.
    shown = max(Lsn(at), relation.lsn or INVALID_LSN)
    return Held(shown, shown)


def _is_as_it_joined(node_id: str, relation: SubscriptionRel, version: int) -> bool:
    """Return whether the table was never copied, and at `version` nothing had been applied to it yet."""
    if relation.copied:
        return False
    if version == 0:
        return True
    from pubsub.delta.log.deltalake_turns import ask
    from pubsub.delta.table import application_id

    app_id = application_id(node_id, relation.subid, relation.relid, relation.copy_generation)
    return ask(relation.path, lambda table: table.transaction_version(app_id), version) is None


def _held(metadata: str | None, source: str | None = None) -> Held | None:
    """Parse the metadata of this program's commits (pubsub.delta.table) to a table, or to a source's rows of it.

    Return None for other programs' metadata, and for commits to other sources' rows, whose LSNs are another publisher's.
    """
    try:
        found = json.loads(metadata or "null")
        if found.get("source") != source:
            return None
        first, last = Lsn.parse(found["first"]), Lsn.parse(found["last"])
        # A table copied under several snapshots shows nothing before `until`, which completes it (tablesync.window).
        last = max(last, Lsn.parse(found["until"])) if "until" in found else last
        return Held(first, last, bool(found.get("copied")))
    except (ValueError, TypeError, KeyError, AttributeError, PubsubError):
        return None
