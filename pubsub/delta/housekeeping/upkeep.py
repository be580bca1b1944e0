"""Visit a table: write checkpoints, delete the files that no version needs any more, clean its log, and say what it takes.

    checkpoint once 400 commits have been made since the last one, or 20 to a table that rests
    VACUUM     once commits have removed files and the retention has passed since: as LITE, which takes the files from the
               log.  The first time in a process, and where Delta refuses LITE since commits are missing, from a list of
               the table's files, so that files of a killed process go, too; again when the youngest of these have come
               to the retention's age.
    the log    commits up to the newest checkpoint that leaves every version of the retention readable, and that VACUUM
               does not need; and files that a killed process has not made commits of

No file goes that a version within the retention needs, since Delta decides that.  Files that no version names yet (of a
batch, a streamed transaction, a deletion vector) are in no `remove`, so LITE leaves them, however old they are.  A list
has only files that a commit removed or that are older than this process; and a table is not cleaned at all before its
copy has ended (launcher/housekeeper.py), whose chunks are older than the process that resumes it.  Blocks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import structlog

from pubsub import faults
from pubsub.delta import sources
from pubsub.delta.housekeeping import inventory
from pubsub.delta.housekeeping.choose_files import SMALL_BYTES
from pubsub.delta.housekeeping.inventory import LogListing
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import DELETING, Cleaning, Listed, Retention

# VACUUM reads the table's state with Spark, so it is run for several minutes' commits at once: this part of the
# retention, in seconds between the bounds.
_PART: Final = 0.25
_SOONEST: Final = 60.0
_LATEST: Final = 3600.0
# A checkpoint takes four seconds of processor time; without one a commit takes 0.07 ms more for each one since the last, so
# that about 400 commits cost least.  Of a table that rests each reader reads those commits.
CHECKPOINT: Final = 400
_CHECKPOINT_AT_REST: Final = 20
# A commit's file has its name within moments.
_ABANDONED: Final = 3600.0
# Delta rounds the time to which it cleans the log down to a minute.
_MINUTE: Final = 60.0

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a table takes on disk, in bytes, at its version `version`.

    `live`: the files of that version.  `retained`: other files, which earlier versions need.  `log`: the log's files.
    `small_files`: those that are merged with more of their size; `deleted_rows`: what deletion vectors take out.
    """

    version: int
    files: int
    live: int
    retained: int
    log: int
    small_files: int
    deleted_rows: int


@dataclass(frozen=True, slots=True)
class Visit:
    """What a visit found.  `vacuumed`: whether VACUUM was run.  `due`: when to come again (time.time()); None: never."""

    usage: Usage
    vacuumed: bool
    due: float | None


class Upkeep:
    """The visits to one table by one process, which started at `started` (time.time()), of the node `node_id`."""

    def __init__(self, table: TableLog, cleaning: Cleaning, started: float, node_id: str = "") -> None:
        self._node_id = node_id
        self._table = table
        self._cleaning = cleaning
        self._started = started
        self._listed = False
        # When to list the table's files again, for those that were too young to be deleted; None: never.
        self._list_at: float | None = None
        self._asked_at = 0.0
        # Up to this version no removed file waits for VACUUM.
        self._done = -1
        self._retention: tuple[tuple[str | None, ...], Retention] | None = None

    def visit(self, *, clean: bool, resting: bool = False) -> Visit:
        """Visit the table; with `clean` false only write checkpoints.  Raises as TableLog and Cleaning do, and OSError.

        `resting`: the table has not been written for a while.
        """
        with DELETING:
            return self._visit(clean=clean, resting=resting)

    def _visit(self, *, clean: bool, resting: bool) -> Visit:
        with self._table.writing:
            self._table.refresh()
            files = list(self._table.files.values())
        retention = self._ask()
        listing = inventory.list_log(self._table.table)
        since = listing.newest - max(listing.checkpoints, default=listing.oldest)
        if since >= (_CHECKPOINT_AT_REST if resting else CHECKPOINT):
            self._cleaning.checkpoint(str(self._table.table))
            faults.point("checkpoint written")
            listing = inventory.list_log(self._table.table)
        self._done = max(self._done, -1 if listing.vacuumed is None else listing.vacuumed)
        if clean:
            _remove_abandoned(listing)
        vacuumed = clean and self._vacuum(listing, retention)
        if vacuumed:
            listing = inventory.list_log(self._table.table)
        if clean and retention.cleans_log and self._clean_log(listing, retention):
            listing = inventory.list_log(self._table.table)
        needed = inventory.needed(files)
        live = retained = 0
        for file in inventory.list_files(self._table.table):
            if file.path in needed:
                live += file.size
            else:
                retained += file.size
        small = sum(file.size < SMALL_BYTES for file in files)
        deleted = sum(file.deleted for file in files)
        usage = Usage(self._table.version, len(files), live, retained, listing.size, small, deleted)
        return Visit(usage, vacuumed, self._due(listing, retention))

    def _ask(self) -> Retention:
        """Return the table's retention, asking Delta only when its properties have changed."""
        names = ("delta.deletedFileRetentionDuration", "delta.logRetentionDuration", "delta.enableExpiredLogCleanup")
        properties = tuple(self._table.properties.get(name) for name in names)
        if self._retention is None or self._retention[0] != properties:
            self._retention = properties, self._cleaning.retention(str(self._table.table))
        return self._retention[1]

    def _vacuum(self, listing: LogListing, retention: Retention) -> bool:
        now = time.time()
        expired = sorted(
            version
            for version, made in listing.commits.items()
            if version > self._done and made <= now - retention.files
        )
        lists = self._list_at is not None and self._list_at <= now
        if not expired and not lists:
            return False
        if self._listed and not lists and listing.commits[expired[0]] > now - retention.files - _pause(retention):
            return False
        goes = any(self._removes(version) for version in expired)
        listed = None
        if not self._listed or lists or not _lite_suffices(listing):
            listed = self._candidates(listing, now, retention)
            self._listed = True
            goes |= any(one.modification_time < (now - retention.files) * 1000 for one in listed)
        if goes:
            faults.point("before vacuum")
            self._cleaning.vacuum(
                str(self._table.table), None if not listed and _lite_suffices(listing) else listed or []
            )
            faults.point("vacuumed")
        self._done = max([self._done, *expired])
        return goes

    def _removes(self, version: int) -> bool:
        return any("remove" in action for action in self._table.actions(version) or ())

    def _candidates(self, listing: LogListing, now: float, retention: Retention) -> list[Listed]:
        """Return the files of the table's directory that Delta may delete if no version needs them.

        A file that this process wrote and no commit named may belong to a batch that is not committed yet.  Those of
        earlier processes that are too young are listed again when they no longer are; but in a table of several sources
        such a file may be another node's, whose copy is older than this process.  Files that a commit removed are listed
        at any age: Delta's clock goes on from ours, and it notes all commits up to its own bound as seen to, so that LITE
        passes over those between the two.
        """
        shared = sources.is_shared_with_others(self._table.properties, self._node_id)
        named: set[str] = set()
        for version in sorted(listing.commits):
            named |= inventory.removed(self._table.actions(version) or ())
        with self._table.writing:
            needed = inventory.needed(self._table.files.values())
        ours, expired = self._started * 1000, (now - retention.files) * 1000
        files = [one for one in inventory.list_files(self._table.table) if one.path not in needed]
        strays = {one.path: one.modification_time for one in files if one.path not in named}
        young = [made for made in strays.values() if expired <= made < ours]
        self._list_at = max(young) / 1000 + retention.files + _SOONEST if young else None
        if shared:
            return [one for one in files if one.path in named]
        return [one for one in files if one.path in named or one.modification_time < min(expired, ours)]

    def _clean_log(self, listing: LogListing, retention: Retention) -> bool:
        """Remove the commits and checkpoints that no version needs, if there are any; return whether Delta was asked."""
        keep = _oldest_needed(listing, retention, self._done)
        if keep is None:
            return False
        until = listing.commits[keep] - 0.001
        first = listing.oldest
        goes = any(
            first < base <= keep and listing.commits.get(base - 1, until) <= until - _MINUTE
            for base in listing.checkpoints
        )
        if goes:
            self._cleaning.clean_log(str(self._table.table), int(until * 1000))
            self._asked_at = time.time()
        return goes

    def _due(self, listing: LogListing, retention: Retention) -> float | None:
        """Return when something will have expired: removed files, or commits before a checkpoint."""
        times = [] if self._list_at is None else [self._list_at]
        waiting = [made for version, made in listing.commits.items() if version > self._done]
        if waiting:
            times.append(min(waiting) + retention.files + _pause(retention))
        # Those that VACUUM has not come to yet are looked at when it has.
        bases = [
            base for base in listing.checkpoints if listing.oldest < base <= self._done and base in listing.commits
        ]
        if bases and retention.cleans_log:
            # Delta may have its reasons to leave them, so it is not asked every minute.
            times.append(
                max(listing.commits[min(bases)] + retention.log + 2 * _MINUTE, self._asked_at + _pause(retention))
            )
        return max(min(times), time.time() + _SOONEST) if times else None


def _remove_abandoned(listing: LogListing) -> None:
    for path, made in listing.asides.items():
        if made < time.time() - _ABANDONED:
            path.unlink(missing_ok=True)


def _pause(retention: Retention) -> float:
    return min(max(retention.files * _PART, _SOONEST), _LATEST)


def _lite_suffices(listing: LogListing) -> bool:
    """Return whether the log has every commit since the last VACUUM, without which Delta refuses LITE."""
    return listing.oldest == 0 or (listing.vacuumed is not None and listing.vacuumed >= listing.oldest)


def _oldest_needed(listing: LogListing, retention: Retention, done: int) -> int | None:
    """Return the oldest version that must stay readable; None if nothing may go.

    It is the version that the table had when the retention began: a reader may have asked for that moment.  Commits
    that VACUUM LITE has not read yet stay, too.
    """
    then = listing.at(time.time() - retention.log)
    if then is None:
        return None
    keep = min(then, done)
    return keep if keep in listing.commits else None
