"""What a commit to a Delta table takes and what can become of it, by any implementation.

`Transactions` is the one way into a table's log.  In a node it is Delta itself, in Spark's JVM (jvm_transactions.py).
"""

from __future__ import annotations

import enum
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

from pubsub.errors import PubsubError, SerializationFailure

#: How many times a commit is worked out while other writers are first.
ATTEMPTS: Final = 10

T = TypeVar("T")

# A line of Delta's log, as a JSON object with one member, such as `add`.
Action = dict[str, Any]


class Operation(enum.Enum):
    """What a commit does, as DESCRIBE HISTORY names it."""

    CREATE = "CREATE TABLE"
    WRITE = "WRITE"
    ALTER = "UPDATE SCHEMA"
    MERGE_FILES = "OPTIMIZE"


class Conflict(Exception):
    """Another writer's commit came first; nothing was committed.  Read the log again and work the commit out anew."""


def commit_retrying(what: str, commit: Callable[[], T]) -> T:
    """Return what `commit` returns; call it again, ATTEMPTS times in all, as long as it raises Conflict.

    `commit` reads the log and works the commit out anew each time.  `what`: what then could not be done, as in "commit to
    the Delta table …".  Raises SerializationFailure, and whatever else `commit` raises.
    """
    for _ in range(ATTEMPTS):
        try:
            return commit()
        except Conflict:
            continue
    raise SerializationFailure(f"could not {what}: other writers were first {ATTEMPTS} times")


def text_of(error: Exception) -> str:
    """Return what the error says, or its type's name if it says nothing, as MemoryError does."""
    return str(error) or type(error).__name__


class UnknownOutcome(PubsubError):
    """Whether the commit was made cannot be determined, so its files must stay."""

    default_sqlstate = "08007"

    @classmethod
    def of_commit(cls, path: object, error: Exception) -> Self:
        """Return it for a commit to the table at `path`; `error`: what kept it from being found out."""
        return cls(
            f'could not find out whether a commit to the Delta table "{path}" was made: {text_of(error)}',
            hint="The worker starts again and looks.",
        )


class CommitFailed(PubsubError):
    """Delta failed to commit, or failed after the commit: then the log has `txn_id`.  Nothing will be committed later."""

    default_sqlstate = "58000"
    txn_id = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A commit worked out for version `read_version` of the table at `path` (-1: there is no table).

    `table_id`: the `id` of its metadata, by which a table that was created anew is known.

    `actions`: lines of Delta's log (`add`, `remove`, `txn`, `metaData`) as JSON objects.  Delta itself adds the
    `protocol` that the metadata asks for, and `commitInfo`.

    `part`: the partition, by a column's physical name and its value, that the commit is worked out from; None: the whole table.
    """

    path: str
    read_version: int
    table_id: str | None
    actions: Sequence[Action]
    operation: Operation
    user_metadata: str | None = None
    part: tuple[str, str] | None = None

    @property
    def applications(self) -> frozenset[str]:
        """The applications whose transactions the commit records."""
        return applications_of(self.actions)


def applications_of(actions: Iterable[Action]) -> frozenset[str]:
    """Return the applications whose transactions a commit's actions record."""
    return frozenset(action["txn"]["appId"] for action in actions if "txn" in action)


def transaction(app_id: str, version: int) -> Action:
    """Return the action that records `version` as the application's, now."""
    return {"txn": {"appId": app_id, "version": version, "lastUpdated": int(time.time() * 1000)}}


class Transactions(Protocol):
    """Commits to tables' logs."""

    def commit(self, request: Request) -> str:
        """Commit as a version after `request.read_version`, and return the commit's txnId.

        The version is greater than the next one if commits came between that do not conflict, such as a chunk's.
        Raises Conflict, CommitFailed, and UnknownOutcome if Spark's JVM was lost meanwhile.
        """

    def forget(self, path: str) -> None:
        """Drop everything known of the table at `path`: it was created anew, or its log was replaced."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What a table's properties ask for, in seconds.

    `files`: how long a file stays after the version that removed it (delta.deletedFileRetentionDuration).  `log`: how
    long commits stay (delta.logRetentionDuration); `cleans_log`: whether they go at all (delta.enableExpiredLogCleanup).
    `managed`: whether a catalog manages the table, and nothing may be deleted here.
    """

    files: float
    log: float
    cleans_log: bool
    managed: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a table: its path in the table's directory, its size in bytes, its time in milliseconds."""

    path: str
    size: int
    modification_time: int


class Deleting:
    """A lock of this process, and of all that name the same file.  It blocks: take it in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._descriptor = -1

    def between_processes(self, path: Path | None) -> None:
        """Share the lock with the other processes that name this file; None: with none."""
        self._path = path

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._path is not None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._release()
            raise

    def __exit__(self, *exc: object) -> None:
        self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._lock.release()


#: Held from the reading of a table's retention until what it allows is deleted.  A pin that was committed meanwhile came too
#: late for that reading, so it waits for the end before it looks whether its version can still be read.
DELETING: Final = Deleting()


class Cleaning(Protocol):
    """Writes checkpoints, and removes what a table no longer needs.  The methods raise py4j's errors, and PubsubError."""

    def checkpoint(self, path: str) -> None:
        """Write a checkpoint of the table's newest version."""

    def retention(self, path: str) -> Retention:
        """Return what the table's properties ask for, with Delta's defaults."""

    def vacuum(self, path: str, listed: Sequence[Listed] | None) -> None:
        """Run Delta's VACUUM at the table's retention; it makes no commit.

        Without `listed` it is VACUUM LITE: files that commits since the last VACUUM have removed; Delta refuses if the
        log lacks one of these.  With it, those of the listed files that neither the table's state names nor a removal
        within the retention.
        """

    def vacuum_elsewhere(self, path: str, older_than: int) -> None:
        """Run VACUUM LITE on a table that only Spark reaches; where Delta refuses it, VACUUM with a list that Spark makes.

        The list has the files that were made before the time `older_than` (milliseconds).
        """

    def clean_log(self, path: str, until: int) -> None:
        """Remove commits and checkpoints up to the time `until` (milliseconds), rounded down to a minute.

        The newest checkpoint that leaves every later version readable stays.
        """
