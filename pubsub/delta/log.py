"""Read a Delta table's log and append to it, without a JVM (Delta's PROTOCOL.md).

A table's state is the replay of its log: a checkpoint (checkpoints.py), then the commits after it.  The state is kept
from commit to commit; commits by other writers, such as Spark, are replayed before each new one.  A commit is
exclusive: its file is written under another name, fsynced, and linked to the name of the next version, which fails if
that name is taken.

Spark must write tables whose features demand more of a writer than this; `unsupported` tells why.  Blocks.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import structlog

from pubsub.delta import checkpoints, commit_files, deletion_vectors, schema
from pubsub.errors import DataCorrupted, FeatureNotSupported, PubsubError, UndefinedTable

# The features that this writer implements; a table with any other is left to Spark.
_KNOWN_FEATURES: Final = frozenset(
    {"deletionVectors", "appendOnly", "invariants", "timestampNtz", "columnMapping", "variantType"}
)
# Table properties that demand something of each writer.
_DEMANDING: Final = {
    "delta.appendOnly": "true",
    "delta.enableChangeDataFeed": "true",
    "delta.enableRowTracking": "true",
    "delta.enableInCommitTimestamps": "true",
}
_MAPPING: Final = frozenset({schema.ID, schema.PHYSICAL})
_CHECKPOINT_INTERVAL: Final = 20
_RESYNC: Final = "ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew."
# The errors of link(2) on a file system without hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})

log = structlog.get_logger()


@dataclass(slots=True)
class DataFile:
    """One AddFile of the log.  `bounds`: each column's least and greatest value, where its statistics have them."""

    path: str
    size: int
    modification_time: int
    rows: int | None
    bounds: Mapping[str, tuple[Any, Any]]
    stats: str | None
    vector: Mapping[str, Any] | None
    plain: bool
    """Whether it has a relative path and no partition, as the files written here have."""
    tags: Mapping[str, Any] | None = None
    """The `tags` that other writers store with the file; passed on unchanged."""
    writers: frozenset[str] | None = None
    """The applications that wrote its rows (empty: another engine); None: unknown, or it has others' rows, too."""

    @property
    def deleted(self) -> int:
        """The number of rows that its deletion vector removes."""
        return int(self.vector["cardinality"]) if self.vector is not None else 0


@dataclass(frozen=True, slots=True)
class OtherCommit:
    """A commit that may change rows.  `applications`: those whose transactions it records.

    `restored`: the version that RESTORE went back to (-1: it was given as a timestamp), None for other operations.
    """

    version: int
    operation: str
    engine: str
    applications: frozenset[str]
    restored: int | None


class OthersWereFirst(Exception):
    """Others have written the table since the batch was staged for it."""

    def __init__(self, commits: Sequence[OtherCommit]) -> None:
        super().__init__(f"{len(commits)} commits")
        self.commits = commits


@dataclass(slots=True)
class _State:
    version: int = -1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    versions_of_applications: dict[str, int] = field(default_factory=dict)


def create(path: str, columns: str, features: Sequence[str], properties: Mapping[str, str]) -> None:
    """Create an empty table.  `columns`: Delta's JSON of its schema; `features`: the reader features.

    Raises FeatureNotSupported without hard links, FileExistsError if a table exists already, OSError.
    """
    table = TableLog(path)
    table.make_directory()
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": list(features),
        "writerFeatures": [*features, "invariants", "appendOnly"],
    }
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": columns,
        "partitionColumns": [],
        "configuration": dict(properties),
        "createdTime": int(time.time() * 1000),
    }
    table.commit(
        [{"metaData": metadata}, {"protocol": protocol}], operation="CREATE TABLE", metrics={}, user_metadata=None
    )


class TableLog:
    """The log of the table at `path`; call `refresh` before anything else.

    Hold `writing` while refreshing or committing: the state must not change while a commit is worked out from it.
    Meanwhile other threads may call `unsupported` and `vectors_enabled`, which describe the last refresh.
    """

    def __init__(self, path: str) -> None:
        self.writing = threading.Lock()
        self.table = Path(path.removeprefix("file://"))
        self._log = self.table / "_delta_log"
        self._state = _State()
        # A checkpoint is due _CHECKPOINT_INTERVAL versions after this one.
        self._checkpoint = 0
        self._has_links: bool | None = None
        self._unsupported: str | None = None
        # The last metaData found to be a plain table's, so that each is parsed only once.
        self._plain_metadata: Mapping[str, Any] | None = None
        self._stamp: tuple[int, int] | None = None
        self._others: list[OtherCommit] | None = None
        # The table version of each application's last commit, where known.
        self._committed: dict[str, int] = {}

    @property
    def version(self) -> int:
        """The table's version at the last refresh or commit."""
        return self._state.version

    @property
    def files(self) -> Mapping[str, DataFile]:
        """The table's data files by path."""
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

    def application_version(self, app_id: str) -> int | None:
        """Return the version of the application's last transaction in the table (None: it has none)."""
        return self._state.versions_of_applications.get(app_id)

    @property
    def applications(self) -> Collection[str]:
        """The applications that have transactions in the table."""
        return self._state.versions_of_applications.keys()

    def make_directory(self) -> None:
        """Create the directories of a new table.  Raises FeatureNotSupported without hard links."""
        self._log.mkdir(parents=True, exist_ok=True)
        if not self._links():
            raise FeatureNotSupported(f'the file system of "{self.table}" has no hard links')

    def refresh(self) -> None:
        """Replay the commits made since the last refresh.

        Raises UndefinedTable if there is no table; DataCorrupted for a broken log, or another table's log than before.
        """
        if self._state.version < 0:
            self._load()
        elif self._stamp != self._look(self._state.version):
            self._load_again()
        self._follow()
        self._stamp = self._look(self._state.version)
        self._unsupported = self._reason_against()

    def written_by_others(self, app_id: str) -> list[OtherCommit]:
        """Return others' commits since the application's last one that may change rows, oldest first.

        They are returned again until `forget_others`.  If the application has not committed yet there are none, because
        the table's rows are then its starting point.  Raises DataCorrupted if a commit of the application was undone.
        Call `refresh` first.
        """
        if self._others is None:
            self._others = self._find_others(app_id)
        others = [commit for commit in self._others if app_id not in commit.applications]
        for commit in others:
            if commit.restored is not None and commit.restored < self._committed.get(app_id, 0):
                raise DataCorrupted(
                    f'the Delta table "{self.table}" was restored to an earlier version',
                    sqlstate="55000",
                    detail=f"Version {commit.version} undoes what was replicated to it.",
                    hint=_RESYNC,
                )
        return others

    def forget_others(self) -> None:
        """Forget the commits that `written_by_others` returned: they have been recorded durably."""
        self._others = []

    def unsupported(self) -> str | None:
        """Return why Spark must write this table; None if it can be written here."""
        return self._unsupported

    def _reason_against(self) -> str | None:
        protocol, metadata = self._state.protocol, self._state.metadata
        if not self._links():
            return "its file system has no hard links"
        features = {*(protocol.get("writerFeatures") or ()), *(protocol.get("readerFeatures") or ())}
        if protocol.get("minReaderVersion", 0) > 3 or protocol.get("minWriterVersion", 0) > 7:
            return "its protocol is newer"
        if protocol.get("minWriterVersion", 0) < 7:
            # Old writer versions demand constraints, generated columns and the change feed of all writers.
            return "its protocol is older"
        if features - _KNOWN_FEATURES:
            return f"it has the features {', '.join(sorted(features - _KNOWN_FEATURES))}"
        if metadata.get("partitionColumns"):
            return "it is partitioned"
        for name, value in _DEMANDING.items():
            if self.properties.get(name, "").lower() == value:
                return f"{name} is set"
        if metadata is not self._plain_metadata:
            columns = schema.fields(metadata)
            if self.properties.get(schema.MODE, "none") not in ("none", "name") or schema.maps_nested(columns):
                return "its columns are mapped in another way"
            for column in columns:
                if any(name.startswith("delta.") for name in (column.get("metadata") or {}).keys() - _MAPPING):
                    return f"column {column['name']} has constraints"
            self._plain_metadata = metadata
        if not all(file.plain for file in self._state.files.values()):
            return "some of its files lie elsewhere"
        return None

    def vectors_enabled(self) -> bool:
        """Tell whether rows may be deleted by deletion vectors."""
        enabled = self.properties.get("delta.enableDeletionVectors", "").lower() == "true"
        return enabled and "deletionVectors" in (self.protocol.get("readerFeatures") or ())

    def commit(
        self,
        actions: Sequence[Mapping[str, Any]],
        *,
        operation: str,
        metrics: Mapping[str, int],
        user_metadata: str | None,
        made: Iterable[Path] = (),
    ) -> None:
        """Append `actions` as the next version; the files that they name must be durable.

        `made`: files of this commit alone, which are removed if it is not made.  Raises FileExistsError if another
        writer has committed that version, OSError, UnknownOutcome (and keeps `made`), and PubsubError if the commit was
        made but the directory could not be fsynced.
        """
        version = self._state.version + 1
        info = {
            "timestamp": int(time.time() * 1000),
            "operation": operation,
            "operationParameters": {},
            "isolationLevel": "Serializable",
            "isBlindAppend": not any("remove" in action for action in actions),
            "operationMetrics": {name: str(value) for name, value in metrics.items()},
            "engineInfo": "pubsub",
            "txnId": str(uuid.uuid4()),
        }
        if version > 0:
            info["readVersion"] = self._state.version
        if operation == "WRITE":
            info["operationParameters"] = {"mode": "Append" if info["isBlindAppend"] else "Overwrite"}
        if user_metadata is not None:
            info["userMetadata"] = user_metadata
        try:
            self._put(version, commit_files.lines([{"commitInfo": info}, *actions]))
        except commit_files.UnknownOutcome:
            raise
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise
        self._replay(actions, _applications(actions))
        self._state.version = version
        self._stamp = self._look(version)
        self._committed.update(dict.fromkeys(_applications(actions), version))
        try:
            commit_files.sync_directory(self._log)
        except OSError as error:
            # The commit is made but may be lost in a crash; callers must read the log again before relying on it.
            raise PubsubError(f'could not fsync "{self._log}": {error}', sqlstate="58030") from error

    def checkpoint_when_due(self) -> None:
        """Write a checkpoint every 20 commits, so that readers need not replay the log from its beginning.

        Raises deltalake's errors and OSError; the next attempt is another 20 commits later.
        """
        if self._state.version - self._checkpoint < _CHECKPOINT_INTERVAL:
            return
        self._checkpoint = self._state.version
        from deltalake import DeltaTable

        DeltaTable(str(self.table)).create_checkpoint()

    def actions(self, version: int) -> list[dict[str, Any]] | None:
        """Return the actions of one commit; None if it does not exist, or no longer.  Raises DataCorrupted."""
        return self._read(version)

    def _look(self, version: int) -> tuple[int, int] | None:
        """Return what distinguishes a version's file from another of the same name; None if there is no file."""
        try:
            found = self._name(version).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _follow(self) -> None:
        while (actions := self._read(self._state.version + 1)) is not None:
            self._note(self._state.version + 1, actions)
            self._replay(actions, _writers(actions))
            self._state.version += 1

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
                raise DataCorrupted(
                    f'the log of the Delta table "{self.table}" is not the one that was written to',
                    sqlstate="55000",
                    detail=f"It was at version {before.version}, and is at {state.version}.",
                    hint=_RESYNC,
                )
        except PubsubError:
            self._state = before
            raise
        self._others = None

    def _note(self, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
        """Remember a commit that this log did not make, unless it does not change rows."""
        applications = _applications(actions)
        if self._others is not None:
            if any(app_id not in self._state.versions_of_applications for app_id in applications):
                # An application's first commit is a copy, which replaces all rows.
                self._others.clear()
            if (found := _other_commit(version, actions)) is not None:
                self._others.append(found)
        for app_id in applications:
            self._committed[app_id] = version

    def _find_others(self, app_id: str) -> list[OtherCommit]:
        """Search the log for others' commits, back to the application's last commit or the log's beginning."""
        if app_id not in self._state.versions_of_applications:
            return []
        found: list[OtherCommit] = []
        for version in range(self._state.version, -1, -1):
            actions = self._read(version)
            if actions is None:
                break
            if app_id in _applications(actions):
                self._committed[app_id] = version
                break
            if (other := _other_commit(version, actions)) is not None:
                found.append(other)
        return found[::-1]

    def _name(self, version: int) -> Path:
        return self._log / f"{version:020}.json"

    def _links(self) -> bool:
        """Tell whether the file system has hard links; tried only once."""
        if self._has_links is None:
            aside, linked = (self._log / f".{uuid.uuid4()}.{end}" for end in ("tmp", "link"))
            try:
                aside.touch()
                commit_files.link(aside, linked)
                self._has_links = True
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._has_links = False
            finally:
                linked.unlink(missing_ok=True)
                aside.unlink(missing_ok=True)
        return self._has_links

    def _put(self, version: int, data: bytes) -> None:
        aside = self._log / f".{uuid.uuid4()}.tmp"
        try:
            commit_files.write_durably(aside, data)
            commit_files.link(aside, self._name(version))
        finally:
            aside.unlink(missing_ok=True)

    def _read(self, version: int) -> list[dict[str, Any]] | None:
        try:
            text = self._name(version).read_text("utf-8")
        except FileNotFoundError:
            return None
        try:
            actions = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            raise DataCorrupted(f'"{self._name(version)}" is not a Delta commit: {error}') from error
        if commit_files.mend(actions):
            self._put_mended(version, actions)
        return actions

    def _put_mended(self, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
        """Replace the file of a commit that no reader can parse by a corrected one.

        A later commit would not help: replaying the log, its history and reading an earlier version all meet the broken
        line.  No reader can have parsed it, and the file's time, by which versions are found, is kept.
        """
        path, aside = self._name(version), self._log / f".{uuid.uuid4()}.tmp"
        try:
            found = path.stat()
            commit_files.write_durably(aside, commit_files.lines(actions))
            os.utime(aside, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.replace(aside, path)
            commit_files.sync_directory(self._log)
        finally:
            aside.unlink(missing_ok=True)
        log.warning("a commit that an earlier release wrote was mended", table=str(self.table), version=version)

    def _load(self) -> None:
        """Load the newest checkpoint; without one, require the first commit."""
        state = self._state = _State()
        found = checkpoints.newest(self._log)
        if found is None:
            if not self._name(0).exists():
                if any(self._log.glob("*.json")):
                    raise DataCorrupted(
                        f'the log of the Delta table "{self.table}" has lost its beginning', hint=_RESYNC
                    )
                raise UndefinedTable(f'Delta table "{self.table}" does not exist', hint=_RESYNC)
            return
        for actions in checkpoints.actions(found):
            self._replay(actions)
        if not state.protocol or not state.metadata:
            raise DataCorrupted(f'the checkpoint "{found.files[0]}" of a Delta table is not whole', hint=_RESYNC)
        state.version = self._checkpoint = found.version

    def _replay(self, actions: Iterable[Mapping[str, Any]], writers: frozenset[str] | None = None) -> None:
        """Apply a commit's or checkpoint's actions to the state.  `writers`: the applications of the rows it adds."""
        state = self._state
        actions = list(actions)
        # A file that only gets another deletion vector keeps its rows and their writers.
        paths = (action["add"]["path"] for action in actions if "add" in action)
        known = {path: state.files[path].writers for path in paths if path in state.files}
        for action in actions:
            for kind, what in action.items():
                if kind == "add":
                    added = state.files[what["path"]] = _data_file(what)
                    added.writers = known.get(added.path, writers) if what.get("dataChange", True) else None
                elif kind == "remove":
                    # A file that gets another vector is removed and added in one commit, in any order.
                    held = state.files.get(what["path"])
                    if held is not None and deletion_vectors.unique_id(held.vector) == deletion_vectors.unique_id(
                        what.get("deletionVector")
                    ):
                        del state.files[what["path"]]
                elif kind == "txn":
                    state.versions_of_applications[what["appId"]] = int(what["version"])
                elif kind == "protocol":
                    state.protocol = what
                elif kind == "metaData":
                    state.metadata = what


def is_local(path: str) -> bool:
    """Tell whether the table lies in a file system that this process sees."""
    return path.startswith("file://") or "://" not in path


def _data_file(add: Mapping[str, Any]) -> DataFile:
    stats = add.get("stats")
    known = json.loads(stats) if stats else {}
    least, greatest = known.get("minValues") or {}, known.get("maxValues") or {}
    path = add["path"]
    return DataFile(
        path=path,
        size=int(add["size"]),
        modification_time=int(add["modificationTime"]),
        rows=known.get("numRecords"),
        bounds={name: (least[name], greatest[name]) for name in least.keys() & greatest.keys()},
        stats=stats,
        vector=add.get("deletionVector"),
        tags=add.get("tags"),
        plain=not add.get("partitionValues") and "://" not in path and not path.startswith(("/", "file:")),
    )


def _applications(actions: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(action["txn"]["appId"] for action in actions if "txn" in action)


def _writers(actions: Sequence[Mapping[str, Any]]) -> frozenset[str] | None:
    """Return a commit's applications; None if the commit also copied rows without changing them."""
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    metrics = info.get("operationMetrics") or {}
    if any("copied" in name.lower() and "file" not in name.lower() and str(n) != "0" for name, n in metrics.items()):
        return None
    return _applications(actions)


def _other_commit(version: int, actions: Sequence[Mapping[str, Any]]) -> OtherCommit | None:
    """Describe a commit; None if it changes no rows, as OPTIMIZE and VACUUM mark each file."""
    files = (what for action in actions for kind, what in action.items() if kind in ("add", "remove"))
    if not any(what.get("dataChange", True) for what in files):
        return None
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    operation = str(info.get("operation", "an unnamed operation"))
    restored = None
    if operation == "RESTORE":
        asked = str((info.get("operationParameters") or {}).get("version"))
        restored = int(asked) if asked.isdecimal() else -1
    return OtherCommit(
        version, operation, str(info.get("engineInfo", "an unnamed engine")), _applications(actions), restored
    )


def local_path(file: DataFile, table: Path) -> Path:
    """Return a data file's path; in the log it is URL-encoded."""
    return table / unquote(file.path)
