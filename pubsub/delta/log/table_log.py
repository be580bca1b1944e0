"""A Delta table's state, by replaying its log without a JVM, and commits worked out for it (Delta's PROTOCOL.md).

A table's state is the replay of its log: a checkpoint (checkpoints.py), then the commits after it.  The state is kept
from commit to commit; commits by other writers are replayed before each new one.  Delta's own transaction commits
(transactions.py).  It refuses a commit if another changed rows or metadata after the version for which it was worked out;
commits that change neither, such as a copy's chunks, may come between.

Spark's statements must write tables whose features demand more of a writer than this; `unsupported` tells why.  Blocks.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from pubsub.delta.key_index.table_index import TableIndex
from pubsub.delta.log import checkpoints, deletion_vectors, demands, durable_files, earlier_releases, malformed
from pubsub.delta.log.add_file import AddFile, file_of_action
from pubsub.delta.log.other_commits import OtherCommit, Partition, other_commit, since_copy, writers_of
from pubsub.delta.log.transactions import (
    Action,
    CommitFailed,
    Conflict,
    Operation,
    Request,
    Transactions,
    UnknownOutcome,
    applications_of,
    text_of,
)
from pubsub.delta.places import Place, StorePath, place
from pubsub.errors import DataCorrupted, PubsubError, UndefinedTable
from pubsub.processor_time import spent_on

_CLUSTERING: Final = "delta.clustering"
# So many commits are read in a second or two.
_FAR_BACK: Final = 10_000
_RESYNC: Final = "ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew."

logger = structlog.get_logger()


@dataclass(slots=True)
class _State:
    version: int = -1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, AddFile] = field(default_factory=dict)
    versions_of_applications: dict[str, int] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Others:
    """Commits of others that an application is still to be told of: those after the version `known`.

    `part`: see TableLog.written_by_others.
    """

    part: Partition | None
    commits: list[OtherCommit]
    known: int = -1


def create(
    transactions: Transactions,
    path: str,
    columns: str,
    features: Sequence[str],
    properties: Mapping[str, str],
    partitioned_by: Sequence[str] = (),
) -> None:
    """Create an empty table.  `columns`: Delta's JSON of its schema; `features`: those that its columns need.

    Raises Conflict if a table exists already, and the errors of TableLog.commit.
    """
    table = TableLog(path, transactions)
    table.table.mkdir(parents=True, exist_ok=True)
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": columns,
        "partitionColumns": list(partitioned_by),
        "configuration": {**properties, **asking_for(features)},
        "createdTime": int(time.time() * 1000),
    }
    table.commit([{"metaData": metadata}], Operation.CREATE)


def clustered_by(paths: Sequence[Sequence[str]]) -> Action:
    """Return the action that clusters a table by columns with these physical names; none: it is clustered no more."""
    configuration = {"clusteringColumns": [list(path) for path in paths], "domainName": _CLUSTERING}
    return {"domainMetadata": {"domain": _CLUSTERING, "configuration": json.dumps(configuration), "removed": False}}


def asking_for(features: Iterable[str]) -> dict[str, str]:
    """Return the table properties that make Delta support table features; it does not keep the properties."""
    return {f"delta.feature.{name}": "supported" for name in features}


class TableLog:
    """The log of the table at `path`; call `refresh` before anything else.

    Hold `writing` while refreshing or committing: the state must not change while a commit is worked out from it.
    Meanwhile other threads may call `unsupported` and `vectors_enabled`, which describe the last refresh.
    """

    def __init__(self, path: str, transactions: Transactions | None = None) -> None:
        self.writing = threading.Lock()
        #: The index of the table's keys, if the node keeps one.
        self.index: TableIndex | None = None
        self._transactions = transactions
        self.table = place(path)
        self._directory = self.table / "_delta_log"
        self._state = _State()
        # Delta's cache of this table is stale: call `forget` before the next commit.
        self._replaced = False
        self._unsupported: str | None = None
        # The last metaData found to be a plain table's, so that each is parsed only once.
        self._plain_metadata: Mapping[str, Any] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._others: dict[str, _Others] = {}
        # The table version of each application's last commit, where known.
        self._committed: dict[str, int] = {}

    @property
    def version(self) -> int:
        """The table's version at the last refresh or commit."""
        return self._state.version

    @property
    def files(self) -> Mapping[str, AddFile]:
        """The table's data files by path: those of one version, which do not change."""
        return self._state.files

    @property
    def protocol(self) -> Mapping[str, Any]:
        """The `protocol` action in force."""
        return self._state.protocol

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The `metaData` action in force."""
        return self._state.metadata

    @property
    def properties(self) -> Mapping[str, str]:
        """The table's properties."""
        return self._state.metadata.get("configuration") or {}

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """The columns by whose values the table is partitioned."""
        return tuple(self._state.metadata.get("partitionColumns") or ())

    @property
    def cluster_paths(self) -> tuple[tuple[str, ...], ...]:
        """The physical names of the columns by which the table is clustered; of a nested field, those around it first."""
        domain = json.loads(self._state.domains.get(_CLUSTERING, "{}"))
        return tuple(tuple(path) for path in domain.get("clusteringColumns") or ())

    @property
    def cluster_columns(self) -> tuple[str, ...]:
        """`cluster_paths`, with dots."""
        return tuple(map(".".join, self.cluster_paths))

    @property
    def tracks_rows(self) -> bool:
        """Whether rows have ids that must outlive the files that hold them (row tracking)."""
        return self.properties.get("delta.enableRowTracking", "").lower() == "true"

    def application_version(self, app_id: str) -> int | None:
        """Return the version of the application's last transaction in the table (None: it has none)."""
        return self._state.versions_of_applications.get(app_id)

    @property
    def applications(self) -> Collection[str]:
        """The applications that have transactions in the table."""
        return self._state.versions_of_applications.keys()

    @spent_on("log")
    def refresh(self) -> None:
        """Replay the commits made since the last refresh.

        Raises UndefinedTable if there is no table; DataCorrupted for a broken log, or another table's log than before.
        """
        with malformed.refused(self.table):
            if self._state.version < 0:
                self._load()
            elif self._stamp != self._look(self._state.version):
                self._load_again()
            self._follow()
            self._stamp = self._look(self._state.version)
            self._unsupported = self._reason_against()

    def written_by_others(self, app_id: str, part: Partition | None = None) -> list[OtherCommit]:
        """Return others' commits since the application's last one that may change rows, oldest first.

        `part`: the partition whose rows are the application's; None: all are.  They are returned again until `forget_others`.
        If the application has not committed yet there are none, because the table's rows are then its starting point.  Raises
        DataCorrupted if a commit of the application was undone.  Call `refresh` first, and hold `writing`.
        """
        known = self._others.get(app_id)
        if known is None:
            table = app_id.rpartition("/")[0]
            for earlier in [one for one in self._others if one.rpartition("/")[0] == table]:
                del self._others[earlier]
            known = self._others[app_id] = _Others(part, self._find_others(app_id, part))
        known.commits = [commit for commit in known.commits if commit.version > known.known]
        others = [commit for commit in since_copy(known.commits, app_id) if app_id not in commit.applications]
        for commit in others:
            if commit.restored is not None and commit.restored < self._committed.get(app_id, 0):
                raise DataCorrupted(
                    f'the Delta table "{self.table}" was restored to an earlier version',
                    sqlstate="55000",
                    detail=f"Version {commit.version} undoes what was replicated to it.",
                    hint=_RESYNC,
                )
        return others

    def forget_others(self, app_id: str, version: int) -> None:
        """Forget the commits up to `version`, which `written_by_others` returned: they have been recorded durably."""
        # Another thread may be adding commits.
        known = self._others.get(app_id)
        if known is not None:
            known.known = max(known.known, version)

    def unsupported(self) -> str | None:
        """Return why Spark must write this table; None if it can be written here."""
        return self._unsupported

    def _reason_against(self) -> str | None:
        metadata = self._state.metadata
        reason = demands.of_properties(self._state.protocol, self.properties)
        if reason is None and metadata is not self._plain_metadata:
            reason = demands.of_columns(metadata, self.partition_columns, self.cluster_columns)
            if reason is None:
                self._plain_metadata = metadata
        if reason is None and not all(file.inside for file in self._state.files.values()):
            reason = "some of its files lie elsewhere"
        return reason

    def vectors_enabled(self) -> bool:
        """Return whether rows may be deleted by deletion vectors."""
        enabled = self.properties.get("delta.enableDeletionVectors", "").lower() == "true"
        return enabled and "deletionVectors" in (self.protocol.get("readerFeatures") or ())

    @spent_on("log")
    def commit(
        self,
        actions: Sequence[Action],
        operation: Operation,
        *,
        user_metadata: str | None = None,
        made: Iterable[Place] = (),
        part: Partition | None = None,
    ) -> None:
        """Commit `actions`, worked out for the present version; return when the commit is durable.

        The files that they name must be durable.  `made`: files of this commit alone, which are removed if it is not
        made.  `part`: the partition from which it was worked out; others may have changed rows outside it since.

        Raises Conflict if another writer was first, CommitFailed, UnknownOutcome (and keeps `made`); OSError if
        the commit was not tried; DataCorrupted if the commit before was replaced meanwhile, and PubsubError if the commit
        was made but could not be fsynced.
        """
        if self._transactions is None:
            raise ValueError("this log was opened for reading")
        if self._replaced:
            self._transactions.forget(str(self.table))
            self._replaced = False
        before, stamp = self._state.version, self._stamp
        table_id = self._state.metadata.get("id")
        request = Request(str(self.table), self._state.version, table_id, actions, operation, user_metadata, part)
        try:
            if before >= 0 and self._look(before) != stamp:
                raise Conflict("another program has replaced the last commit's file")
            try:
                txn_id = self._transactions.commit(request)
            except CommitFailed as error:
                txn_id = error.txn_id
                if not txn_id:
                    raise
                if not self._has(txn_id):
                    if isinstance(self.table, StorePath):
                        # The store may yet get to the request that Delta has given up.
                        raise UnknownOutcome(error.message, detail=error.detail, hint=error.hint) from error
                    raise
                logger.warning(
                    "a commit was made, but Delta failed after it", table=str(self.table), reason=error.message
                )
            else:
                if not self._has(txn_id):
                    self._replaced = True
                    self._remove_checkpoints(after=before)
                    raise Conflict("another program has replaced the commit's file")
        except UnknownOutcome:
            raise
        except Exception:
            for path in made:
                path.unlink(missing_ok=True)
            raise
        try:
            durable_files.sync_file(self._name(self._state.version))
            durable_files.sync_directory(self._directory)
            replaced = before >= 0 and self._look(before) not in (stamp, None)  # None: it has expired
        except Exception as error:
            # The commit is made but may be lost in a crash; callers must read the log again before relying on it.
            raise PubsubError(f'could not fsync "{self._directory}": {text_of(error)}', sqlstate="58030") from error
        if replaced:
            raise went_back(str(self.table), f"Version {before} was replaced.")

    def _has(self, txn_id: str) -> bool:
        """Replay the log up to our commit; return False if the log lacks it.

        Raises UnknownOutcome if the log cannot be read, for whatever reason: a file that the commit may name must not be
        removed then.
        """
        try:
            return self._follow_to(txn_id)
        except Exception as error:
            raise UnknownOutcome.of_commit(self.table, error) from error

    def _follow_to(self, txn_id: str) -> bool:
        before = self._state.version
        while (actions := self.actions(self._state.version + 1)) is not None:
            version = self._state.version + 1
            own = any(action.get("commitInfo", {}).get("txnId") == txn_id for action in actions)
            if own:
                self._committed.update(dict.fromkeys(applications_of(actions), version))
            else:
                self._note(version, actions)
            self._replay(actions, version)
            self._stamp = self._look(version)
            if own:
                return True
        if self._state.version == before:
            self._stamp = self._look(before)
        return False

    def _look(self, version: int) -> tuple[int, int, int] | None:
        """Return what distinguishes a version's file from another of the same name; None if there is no file."""
        try:
            found = self._name(version).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _follow(self) -> None:
        while (actions := self.actions(self._state.version + 1)) is not None:
            version = self._state.version + 1
            self._note(version, actions)
            self._replay(actions, version)

    def _load_again(self) -> None:
        """Load again: the last version's file is gone or replaced, by a cleanup or because the table is another."""
        before = self._state
        try:
            self._load()
            self._follow()
            state = self._state
            applications = before.versions_of_applications.items()
            if state.version < before.version or any(
                state.versions_of_applications.get(app_id, -1) < version for app_id, version in applications
            ):
                raise went_back(str(self.table), f"It was at version {before.version}, and is at {state.version}.")
        except BaseException:
            self._state = before
            raise
        self._others = {}
        self._replaced = True

    def _note(self, version: int, actions: Sequence[Action]) -> None:
        """Remember a commit that this log did not make, unless it does not change rows."""
        applications = applications_of(actions)
        if self._others and (found := other_commit(version, actions)) is not None:
            for app_id, known in self._others.items():
                if found.concerns(app_id, known.part):
                    known.commits.append(found)
        for app_id in applications:
            self._committed[app_id] = version

    def _find_others(self, app_id: str, part: Partition | None) -> list[OtherCommit]:
        """Search the log for others' commits, back to the application's last commit or the log's beginning.

        Of a partition only so far back that the commits of other sources, of which there may be any number since, do not take long.
        """
        if app_id not in self._state.versions_of_applications:
            return []
        found: list[OtherCommit] = []
        first = -1 if part is None else max(self._state.version - _FAR_BACK, -1)
        for version in range(self._state.version, first, -1):
            actions = self.actions(version)
            if actions is None:
                break
            if app_id in applications_of(actions):
                self._committed[app_id] = version
                break
            if (other := other_commit(version, actions)) is not None and other.concerns(app_id, part):
                found.append(other)
        return found[::-1]

    def _name(self, version: int) -> Place:
        return self._directory / f"{version:020}.json"

    def actions(self, version: int) -> list[Action] | None:
        """Return the actions of one commit; None if it does not exist, or no longer.  Raises DataCorrupted."""
        try:
            text = self._name(version).read_text("utf-8")
        except FileNotFoundError:
            return None
        try:
            actions = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            raise DataCorrupted(f'"{self._name(version)}" is not a Delta commit: {error}') from error
        if isinstance(self._directory, Path) and earlier_releases.mend(actions):
            self._put_mended(self._directory, version, actions)
        return actions

    def _put_mended(self, directory: Path, version: int, actions: Sequence[Action]) -> None:
        """Replace the file of a commit that no reader can parse by a corrected one.

        A later commit would not help: replaying the log, its history and reading an earlier version all meet the broken
        line.  No reader can have parsed it, and the file's time, by which versions are found, is kept.
        """
        path, aside = directory / self._name(version).name, directory / f".{uuid.uuid4()}.tmp"
        try:
            found = path.stat()
            durable_files.write(aside, earlier_releases.lines(actions))
            os.utime(aside, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.replace(aside, path)
            durable_files.sync_directory(directory)
        finally:
            aside.unlink(missing_ok=True)
        logger.warning("a commit that an earlier release wrote was mended", table=str(self.table), version=version)

    def _load(self) -> None:
        """Load the newest checkpoint; without one, require the first commit.

        A power cut may leave a checkpoint damaged: not all writers fsync it.  An earlier one, or none, will do if the
        log has all commits since.  Then the damaged one is removed, for the sake of readers that would not do without, and
        likewise a _last_checkpoint whose checkpoint did not survive.
        """
        hint = checkpoints.announced(self._directory)
        found = checkpoints.complete(self._directory)
        if hint is not None and hint not in [each.version for each in found]:
            (self._directory / "_last_checkpoint").unlink(missing_ok=True)
        damaged: list[tuple[checkpoints.Checkpoint, DataCorrupted]] = []
        for each in found:
            try:
                self._load_checkpoint(each)
                break
            except DataCorrupted as error:
                damaged.append((each, error))
        else:
            self._state = _State()
            if not self._name(0).exists() and not damaged:
                if any(self._directory.glob("*.json")):
                    raise DataCorrupted(
                        f'the log of the Delta table "{self.table}" has lost its beginning', hint=_RESYNC
                    )
                raise UndefinedTable(f'Delta table "{self.table}" does not exist', hint=_RESYNC)
        if damaged:
            self._do_without(damaged)

    def _load_checkpoint(self, found: checkpoints.Checkpoint) -> None:
        state = _State()
        for actions in checkpoints.actions(found):
            self._replay_into(state, actions)
        if not state.protocol or not state.metadata:
            raise DataCorrupted(f'the checkpoint "{found.files[0]}" of a Delta table is not whole', hint=_RESYNC)
        state.version = found.version
        self._state = state

    def _remove_checkpoints(self, *, after: int) -> None:
        """Remove what Delta has made of a commit that was lost: it would take the place of the log."""
        for each in checkpoints.complete(self._directory):
            if each.version > after:
                (self._directory / "_last_checkpoint").unlink(missing_ok=True)
                for path in each.files:
                    path.unlink(missing_ok=True)

    def _do_without(self, damaged: Sequence[tuple[checkpoints.Checkpoint, DataCorrupted]]) -> None:
        """Remove checkpoints that are damaged; raise what was said of the newest if commits after the loaded state are missing."""
        newest, error = damaged[0]
        if not all(self._name(version).exists() for version in range(self._state.version + 1, newest.version + 1)):
            raise error
        # It is only a hint, to a checkpoint that is about to go.
        (self._directory / "_last_checkpoint").unlink(missing_ok=True)
        for each, reason in damaged:
            for path in each.files:
                path.unlink(missing_ok=True)
            logger.warning("a damaged checkpoint was removed", table=str(self.table), reason=reason.message)

    def _replay(self, actions: Sequence[Action], version: int) -> None:
        """Apply the actions of the commit that made `version` to the state: all of them, or after an error none."""
        state = replace(
            self._state,
            files=dict(self._state.files),
            versions_of_applications=dict(self._state.versions_of_applications),
            domains=dict(self._state.domains),
            version=version,
        )
        self._replay_into(state, actions, writers_of(actions))
        # Look-ups in other threads see the files before a commit, or after it: never a merged file beside its parts.
        self._state = state

    def _replay_into(self, state: _State, actions: Sequence[Action], writers: frozenset[str] | None = None) -> None:
        """Apply a commit's or checkpoint's actions to `state`.  `writers`: the applications of the rows it adds."""
        files = state.files
        # A file that only gets another deletion vector keeps its rows and their writers.
        paths = (action["add"]["path"] for action in actions if "add" in action)
        known = {path: files[path].writers for path in paths if path in files}
        for action in actions:
            for kind, what in action.items():
                if kind == "add":
                    added = files[what["path"]] = file_of_action(what)
                    added.writers = known.get(added.path, writers) if what.get("dataChange", True) else None
                elif kind == "remove":
                    # A file that gets another vector is removed and added in one commit, in any order.
                    held = files.get(what["path"])
                    if held is not None and deletion_vectors.unique_id(held.vector) == deletion_vectors.unique_id(
                        what.get("deletionVector")
                    ):
                        del files[what["path"]]
                elif kind == "txn":
                    state.versions_of_applications[what["appId"]] = int(what["version"])
                elif kind == "domainMetadata":
                    state.domains[what["domain"]] = "{}" if what.get("removed") else what["configuration"]
                    if what["domain"] == _CLUSTERING:
                        self._plain_metadata = None
                elif kind == "protocol":
                    state.protocol = what
                elif kind == "metaData":
                    state.metadata = what


def log_at(path: str, version: int) -> TableLog:
    """Return the log of the table at `path` as of one version, to read it.

    Raises FileNotFoundError if the log no longer has the version, and DataCorrupted.
    """
    log = TableLog(path)
    with malformed.refused(path):
        base = next((one for one in checkpoints.complete(log._directory) if one.version <= version), None)
        if base is not None:
            log._load_checkpoint(base)
        for number in range(log.version + 1, version + 1):
            actions = log.actions(number)
            if actions is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(log._name(number)))
            log._replay(actions, number)
        log._unsupported = log._reason_against()
    return log


def files_at(path: str, version: int) -> Mapping[str, AddFile]:
    """Return the data files of one version of the table, by their paths in the log.  Raises as `log_at` does."""
    return log_at(path, version).files


def went_back(path: str, detail: str) -> DataCorrupted:
    """Return the error for a table that lacks commits which were made to it."""
    return DataCorrupted(
        f'the log of the Delta table "{path}" is not the one that was written to',
        sqlstate="55000",
        detail=detail,
        hint=_RESYNC,
    )
