"""A Delta table's log, read and appended to without a JVM (Delta's PROTOCOL.md).

The state of a table is the replay of its log: a checkpoint, then the commits after it.  It is kept from commit to commit; what
another writer (Spark too) has committed meanwhile is replayed first.  A commit is a file that nobody else can make: written
aside, fsynced, and linked to the name of the next version, which fails when that name is taken.

Tables with features that ask more of a writer than this are Spark's to write: `unsupported` says why.  Blocks.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow.parquet as pq

from apply.delta import vectors
from pubsub.errors import DataCorrupted, FeatureNotSupported, PubsubError, UndefinedTable

# What a writer of these features must know, we know; each other one is left to Spark.
_KNOWN_FEATURES: Final = frozenset({"deletionVectors", "appendOnly", "invariants", "timestampNtz"})
# Table properties that ask something of each writer.
_DEMANDING: Final = {
    "delta.appendOnly": "true",
    "delta.enableChangeDataFeed": "true",
    "delta.enableRowTracking": "true",
    "delta.enableInCommitTimestamps": "true",
}
_CHECKPOINT_INTERVAL: Final = 20
# What link(2) says of a file system that has none.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


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

    @property
    def deleted(self) -> int:
        """How many of its rows are gone."""
        return int(self.vector["cardinality"]) if self.vector is not None else 0


@dataclass(slots=True)
class _State:
    version: int = -1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    versions_of_applications: dict[str, int] = field(default_factory=dict)


def create(path: str, schema: str, features: Sequence[str], properties: Mapping[str, str]) -> None:
    """Make a table without rows: `schema` is Delta's JSON of it, `features` are those of its readers.

    Raises FileExistsError when there is a table already, OSError.
    """
    log = TableLog(path)
    log.make_directory()
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": list(features),
        "writerFeatures": [*features, "invariants", "appendOnly"],
    }
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema,
        "partitionColumns": [],
        "configuration": dict(properties),
        "createdTime": int(time.time() * 1000),
    }
    log.commit(
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
        self._checkpoint = 0
        self._has_links: bool | None = None
        self._unsupported: str | None = None
        # The table's metadata that were found to be those of a plain table: parsed once.
        self._plain_metadata: Mapping[str, Any] | None = None

    @property
    def version(self) -> int:
        """The version that this is the state of."""
        return self._state.version

    @property
    def files(self) -> Mapping[str, DataFile]:
        """The table's data files by path."""
        return self._state.files

    @property
    def properties(self) -> Mapping[str, str]:
        """The table's properties."""
        return self._state.metadata.get("configuration") or {}

    def application_version(self, app_id: str) -> int | None:
        """The version of the application's last transaction in the table."""
        return self._state.versions_of_applications.get(app_id)

    def make_directory(self) -> None:
        """Make the directories of a table that is not there yet.  Raises FeatureNotSupported without hard links."""
        self._log.mkdir(parents=True, exist_ok=True)
        if not self._links():
            raise FeatureNotSupported(f'the file system of "{self.table}" has no hard links')

    def refresh(self) -> None:
        """Replay what has been committed since.  Raises UndefinedTable when there is no table, DataCorrupted for a broken log."""
        if self._state.version < 0:
            self._load()
        while (actions := self._read(self._state.version + 1)) is not None:
            self._replay(actions)
            self._state.version += 1
        self._unsupported = self._reason_against()

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
        if self.properties.get("delta.columnMapping.mode", "none") != "none":
            return "its columns are mapped"
        if metadata is not self._plain_metadata:
            for column in json.loads(metadata["schemaString"])["fields"]:
                if any(name.startswith("delta.") for name in column.get("metadata") or {}):
                    return f"column {column['name']} has constraints"
            self._plain_metadata = metadata
        if not all(file.plain for file in self._state.files.values()):
            return "some of its files lie elsewhere"
        return None

    def vectors_enabled(self) -> bool:
        """Whether rows may be deleted by deletion vectors."""
        return self.properties.get("delta.enableDeletionVectors", "").lower() == "true"

    def commit(
        self,
        actions: Sequence[Mapping[str, Any]],
        *,
        operation: str,
        metrics: Mapping[str, int],
        user_metadata: str | None,
    ) -> None:
        """Append `actions` as the next version.  Raises FileExistsError when another writer has committed it, OSError.

        The files that they name are there and durable already.  `version` tells whether a commit that failed is there.
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
        lines = [{"commitInfo": info}, *actions]
        data = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        self._put(version, data.encode())
        self._replay(actions)
        self._state.version = version
        try:
            sync_directory(self._log)
        except OSError as error:
            # It is committed, and may be gone after a crash: whoever trusts it must read the log again.
            raise PubsubError(f'could not fsync "{self._log}": {error}', sqlstate="58030") from error

    def checkpoint_when_due(self) -> None:
        """Every some commits a checkpoint, so that a reader need not replay the log from its beginning."""
        if self._state.version - self._checkpoint < _CHECKPOINT_INTERVAL:
            return
        from deltalake import DeltaTable

        DeltaTable(str(self.table)).create_checkpoint()
        self._checkpoint = self._state.version

    def _name(self, version: int) -> Path:
        return self._log / f"{version:020}.json"

    def _links(self) -> bool:
        """Whether a commit can be linked to its name: looked at once."""
        if self._has_links is None:
            aside, linked = (self._log / f".{uuid.uuid4()}.{end}" for end in ("tmp", "link"))
            try:
                aside.touch()
                os.link(aside, linked)
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
            with open(aside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, self._name(version))
        finally:
            aside.unlink(missing_ok=True)

    def _read(self, version: int) -> list[dict[str, Any]] | None:
        try:
            text = self._name(version).read_text("utf-8")
        except FileNotFoundError:
            return None
        try:
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            raise DataCorrupted(f'"{self._name(version)}" is not a Delta commit: {error}') from error

    def _load(self) -> None:
        """From the last checkpoint, or from the first commit."""
        state = self._state = _State()
        try:
            last = json.loads((self._log / "_last_checkpoint").read_text("utf-8"))
        except FileNotFoundError:
            if not self._name(0).exists():
                raise UndefinedTable(f'Delta table "{self.table}" does not exist') from None
            return
        version = int(last["version"])
        path = self._log / f"{version:020}.checkpoint.parquet"
        if not path.exists():
            # In parts, or of the newer kind: the commits may still be there.
            self._load_without_checkpoint()
            return
        table = pq.read_table(path)
        for name in ("protocol", "metaData", "add", "txn"):
            if name in table.column_names:
                column = table.column(name)
                self._replay({name: _plain(action)} for action in column.filter(column.is_valid()).to_pylist())
        state.version = self._checkpoint = version

    def _load_without_checkpoint(self) -> None:
        if not self._name(0).exists():
            raise DataCorrupted(f'the log of "{self.table}" has a checkpoint that can not be read here')

    def _replay(self, actions: Iterable[Mapping[str, Any]]) -> None:
        state = self._state
        for action in actions:
            for kind, what in action.items():
                if kind == "add":
                    state.files[what["path"]] = _data_file(what)
                elif kind == "remove":
                    # A file that stays, with another vector, is removed and added in one commit, in any order.
                    held = state.files.get(what["path"])
                    if held is not None and vectors.unique_id(held.vector) == vectors.unique_id(
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


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        plain=not add.get("partitionValues") and "://" not in path and not path.startswith(("/", "file:")),
    )


def _plain(action: Mapping[str, Any]) -> dict[str, Any]:
    """An action of a checkpoint as the JSON of a commit has it: Arrow has maps as lists of pairs, and NULLs."""
    found: dict[str, Any] = {}
    for name, value in action.items():
        if isinstance(value, list) and name in ("configuration", "partitionValues", "tags"):
            found[name] = dict(value)
        elif isinstance(value, dict):
            found[name] = _plain(value)
        elif value is not None:
            found[name] = value
    return found


def local_path(file: DataFile, table: Path) -> Path:
    """Where a data file lies: paths in the log are URL-encoded."""
    return table / unquote(file.path)
