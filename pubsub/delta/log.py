"""A Delta table's log, read and appended to without a JVM (Delta's PROTOCOL.md).

The state of a table is the replay of its log: a checkpoint (checkpoints), then the commits after it.  It is kept from commit to
commit; what another writer (Spark too) has committed meanwhile is replayed first.  A commit is a file that nobody else can make:
written aside, fsynced, and linked to the name of the next version, which fails when that name is taken.

Tables with features that ask more of a writer than this are Spark's to write: `unsupported` says why.  Blocks.
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

# What a writer of these features must know, we know; each other one is left to Spark.
_KNOWN_FEATURES: Final = frozenset(
    {"deletionVectors", "appendOnly", "invariants", "timestampNtz", "columnMapping", "variantType"}
)
# Table properties that ask something of each writer.
_DEMANDING: Final = {
    "delta.appendOnly": "true",
    "delta.enableChangeDataFeed": "true",
    "delta.enableRowTracking": "true",
    "delta.enableInCommitTimestamps": "true",
}
_MAPPING: Final = frozenset({schema.ID, schema.PHYSICAL})
_CHECKPOINT_INTERVAL: Final = 20
_RESYNC: Final = "ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew."
# What link(2) says of a file system that has none.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})

log = structlog.get_logger()


@dataclass(slots=True)
class DataFile:
    """One `add` of the log.  `bounds` are the least and the greatest value of statistics by column, where there are any."""

    path: str
    size: int
    modification_time: int
    rows: int | None
    bounds: Mapping[str, tuple[Any, Any]]
    stats: str | None
    vector: Mapping[str, Any] | None
    plain: bool
    """Relative path and no partition: a file as we write them."""
    tags: Mapping[str, Any] | None = None
    """What other writers keep with it."""
    writers: frozenset[str] | None = None
    """The applications whose transaction wrote its rows, none for another engine's; None: not known, or others' rows too."""

    @property
    def deleted(self) -> int:
        """How many of its rows are gone."""
        return int(self.vector["cardinality"]) if self.vector is not None else 0


@dataclass(frozen=True, slots=True)
class OtherCommit:
    """A commit that this log did not make and that can change rows: `applications` are those whose transactions it records.

    `restored`: the version that RESTORE went back to (-1: a moment's), None for other operations.
    """

    version: int
    operation: str
    engine: str
    applications: frozenset[str]
    restored: int | None


class OthersWereFirst(Exception):
    """The batch was worked out for a table that others have written since."""

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
    """Make a table without rows: `columns` is Delta's JSON of its schema, `features` are those of its readers.

    Raises FileExistsError when there is a table already, OSError.
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
    """The log of the table at `path`; `refresh` before anything else.

    Whoever refreshes it or commits holds `writing`: what a commit was worked out from must not move under it.  `unsupported` and
    `vectors_enabled` may be asked by others meanwhile; they say what held at the last refresh.
    """

    def __init__(self, path: str) -> None:
        self.writing = threading.Lock()
        self.table = Path(path.removeprefix("file://"))
        self._log = self.table / "_delta_log"
        self._state = _State()
        # A checkpoint is due so long after this version.
        self._checkpoint = 0
        self._has_links: bool | None = None
        self._unsupported: str | None = None
        # The table's metadata that were found to be those of a plain table: parsed once.
        self._plain_metadata: Mapping[str, Any] | None = None
        self._stamp: tuple[int, int] | None = None
        self._others: list[OtherCommit] | None = None
        # The version of an application's last commit, as far as it is known.
        self._committed: dict[str, int] = {}

    @property
    def version(self) -> int:
        """The version that this is the state of."""
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
        """The version of the application's last transaction in the table."""
        return self._state.versions_of_applications.get(app_id)

    @property
    def applications(self) -> Collection[str]:
        """The applications that have transactions in the table."""
        return self._state.versions_of_applications.keys()

    def make_directory(self) -> None:
        """Make the directories of a table that is not there yet.  Raises FeatureNotSupported without hard links."""
        self._log.mkdir(parents=True, exist_ok=True)
        if not self._links():
            raise FeatureNotSupported(f'the file system of "{self.table}" has no hard links')

    def refresh(self) -> None:
        """Replay what has been committed since.

        Raises UndefinedTable when there is no table, DataCorrupted for a broken log, or for one that is another than before.
        """
        if self._state.version < 0:
            self._load()
        elif self._stamp != self._look(self._state.version):
            self._load_again()
        self._follow()
        self._stamp = self._look(self._state.version)
        self._unsupported = self._reason_against()

    def written_by_others(self, app_id: str) -> list[OtherCommit]:
        """Commits since the application's last one that are not its own and can change rows, oldest first.

        They are given again until `forget_others`.  A table in which the application has nothing yet has none: what it holds is
        what it began with.  Raises DataCorrupted when what the application has committed was undone.  `refresh` first.
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
        """What `written_by_others` gave is known, durably."""
        self._others = []

    def unsupported(self) -> str | None:
        """Why Spark must write this table; None when we can."""
        return self._unsupported

    def _reason_against(self) -> str | None:
        protocol, metadata = self._state.protocol, self._state.metadata
        if not self._links():
            return "its file system has no hard links"
        features = {*(protocol.get("writerFeatures") or ()), *(protocol.get("readerFeatures") or ())}
        if protocol.get("minReaderVersion", 0) > 3 or protocol.get("minWriterVersion", 0) > 7:
            return "its protocol is newer"
        if protocol.get("minWriterVersion", 0) < 7:
            # What a table feature was later, an old writer version asked of all: constraints, generated columns, the feed.
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
        """Whether rows may be deleted by deletion vectors."""
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
        """Append `actions` as the next version.  Raises FileExistsError when another writer has committed it, OSError, UnknownOutcome.

        The files that they name are there and durable already.  Those of them that are this commit's alone, `made`, are removed
        when it was not made.  `version` tells whether a commit that failed is there.
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
            # It is committed, and may be gone after a crash: whoever trusts it must read the log again.
            raise PubsubError(f'could not fsync "{self._log}": {error}', sqlstate="58030") from error

    def checkpoint_when_due(self) -> None:
        """Every some commits a checkpoint, so that a reader need not replay the log from its beginning.

        Raises what deltalake raises, OSError; the next attempt is as many commits later.
        """
        if self._state.version - self._checkpoint < _CHECKPOINT_INTERVAL:
            return
        self._checkpoint = self._state.version
        from deltalake import DeltaTable

        DeltaTable(str(self.table)).create_checkpoint()

    def actions(self, version: int) -> list[dict[str, Any]] | None:
        """The actions of one commit; None when it is not there, or no longer.  Raises DataCorrupted."""
        return self._read(version)

    def _look(self, version: int) -> tuple[int, int] | None:
        """What tells a version's file from another of its name; None when it is gone."""
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
        """The version that was last is not there, or another: cleaned up after a checkpoint, or not the same table."""
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
        """Remember a commit that was found, unless it leaves the rows as they are."""
        applications = _applications(actions)
        if self._others is not None:
            if any(app_id not in self._state.versions_of_applications for app_id in applications):
                # An application's first commit is a copy, which replaces what was there.
                self._others.clear()
            if (found := _other_commit(version, actions)) is not None:
                self._others.append(found)
        for app_id in applications:
            self._committed[app_id] = version

    def _find_others(self, app_id: str) -> list[OtherCommit]:
        """As `written_by_others`, from the log itself: back to the application's last commit, or to where the log begins."""
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
        """Whether a commit can be linked to its name: looked at once."""
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
        """Put a commit that no reader can parse in order, in its place.

        A later commit would not do: whoever replays the log, looks at its history or reads an earlier version meets the line.
        No reader holds anything else of it, and the time of the file, by which versions are found, stays.
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
        """From the newest checkpoint, or from the first commit."""
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
        """Take the actions of a commit, or of a checkpoint, over; `writers` are those of the rows that a commit adds."""
        state = self._state
        actions = list(actions)
        # A file that only gets another vector keeps the rows that it had, and who wrote them.
        paths = (action["add"]["path"] for action in actions if "add" in action)
        known = {path: state.files[path].writers for path in paths if path in state.files}
        for action in actions:
            for kind, what in action.items():
                if kind == "add":
                    added = state.files[what["path"]] = _data_file(what)
                    added.writers = known.get(added.path, writers) if what.get("dataChange", True) else None
                elif kind == "remove":
                    # A file that stays, with another vector, is removed and added in one commit, in any order.
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
    """Whether the table lies in a file system that this process sees."""
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
    """The applications of a commit; None for one that also copied rows which it did not change."""
    info: Mapping[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    metrics = info.get("operationMetrics") or {}
    if any("copied" in name.lower() and "file" not in name.lower() and str(n) != "0" for name, n in metrics.items()):
        return None
    return _applications(actions)


def _other_commit(version: int, actions: Sequence[Mapping[str, Any]]) -> OtherCommit | None:
    """None for one that changes no rows: OPTIMIZE and VACUUM say so of each file."""
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
    """Where a data file lies: paths in the log are URL-encoded."""
    return table / unquote(file.path)
