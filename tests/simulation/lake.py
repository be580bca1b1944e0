"""The store of the Delta tables, in memory, and a model of Delta's transactions on it.

The tables lie in what the code takes for S3: pubsub.delta reads and writes them by `Files`, Arrow's data files included.  A commit
is made to the version that it was worked out for, or refused; or it is made and the answer is lost; or nobody can tell.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from pubsub.delta import schema_json
from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import CommitFailed, Conflict, Operation, Request, UnknownOutcome
from pubsub.delta.places import StorePath
from tests.simulation.chance import Chance
from tests.simulation.life import Killed, Life
from tests.support.json_transactions import with_protocol

if TYPE_CHECKING:
    pass

ROOT = "s3a://lake"


@dataclass(frozen=True, slots=True)
class _Info:
    path: str
    type: FileType
    size: int
    mtime_ns: int

    @property
    def base_name(self) -> str:
        return self.path.rpartition("/")[2]


class _Output(io.BytesIO):
    """An object is there once it is closed."""

    def __init__(self, files: Files, path: str) -> None:
        super().__init__()
        self._files, self._path = files, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._files.put(self._path, data)


class Files:
    """Objects by path; has of pyarrow.fs.FileSystem what places.StorePath uses."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._writes = 0

    def put(self, path: str, data: bytes) -> None:
        life = Life.current()
        if life is not None:
            life.writes(f"before {_short(path)} is written")
        self._writes += 1
        self._objects[path] = data, 1_700_000_000_000_000_000 + self._writes * 1_000_000
        if life is not None:
            life.writes(f"after {_short(path)} is written")

    def names(self, prefix: str) -> list[str]:
        """Return all paths that begin so."""
        return [path for path in self._objects if path.startswith(prefix)]

    def read(self, path: str) -> bytes:
        return self._objects[path][0]

    def __contains__(self, path: str) -> bool:
        return path in self._objects

    # pyarrow.fs.FileSystem

    def get_file_info(self, what: str | FileSelector) -> Any:
        _check()
        if isinstance(what, str):
            return self._info(what)
        base = what.base_dir + "/"
        found = [path for path in self._objects if path.startswith(base)]
        if not what.recursive:
            found = [path for path in found if "/" not in path[len(base) :]]
        return [self._info(path) for path in sorted(found)]

    def _info(self, path: str) -> _Info:
        if path not in self._objects:
            return _Info(path, FileType.NotFound, 0, 0)
        data, modified = self._objects[path]
        return _Info(path, FileType.File, len(data), modified)

    def open_input_file(self, path: str) -> pa.BufferReader:
        _check()
        if path not in self._objects:
            raise FileNotFoundError(path)
        return pa.BufferReader(self._objects[path][0])

    def open_output_stream(self, path: str) -> pa.PythonFile:
        _check()
        return pa.PythonFile(_Output(self, path), "w")

    def delete_file(self, path: str) -> None:
        _check()
        if path not in self._objects:
            raise FileNotFoundError(path)
        life = Life.current()
        if life is not None:
            life.writes(f"before {_short(path)} is removed")
        del self._objects[path]


def _check() -> None:
    life = Life.current()
    if life is not None:
        life.check()


def _short(path: str) -> str:
    table, _, name = path.partition("/")[2].rpartition("/")
    return f"{name[:18]} of {table.removesuffix('/_delta_log').rpartition('/')[2]}"


class LakeTransactions:
    """Implements transactions.Transactions for one life, whose JVM it stands for.

    `fate`: what becomes of the next commits: "refused", "failed", "lost answer", "unknown, made", "unknown, not made".
    """

    def __init__(self, lake: Lake, life: Life) -> None:
        self._lake, self._life = lake, life

    def commit(self, request: Request) -> str:
        life, lake = self._life, self._lake
        life.check()
        fate = lake.next_fate()
        if life.dies_in is not None and life.dies_in <= 1 and lake.chance.random.random() < 0.5:
            # The JVM has the request when the daemon dies.
            life.die("while the JVM commits")
        if not life.alive:
            lake.pending.append(lambda: lake.try_commit(request, life.name))
            raise Killed
        life.writes("before a Delta commit")
        lake.meanwhile(request.path)
        if fate == "refused":
            raise Conflict("another writer was first")
        if fate == "failed":
            error = CommitFailed("Delta failed before the commit")
            raise error
        if fate == "unknown, not made":
            raise UnknownOutcome("could not find out whether a commit was made")
        txn_id = lake.commit(request, life.name)
        life.writes("after a Delta commit")
        if fate == "unknown, made":
            raise UnknownOutcome("could not find out whether a commit was made")
        if fate == "lost answer":
            error = CommitFailed("Delta failed after the commit")
            error.txn_id = txn_id
            raise error
        return txn_id

    def forget(self, path: str) -> None:
        self._life.check()

    def change_properties(self, path: str, change: Callable[[Mapping[str, str]], Mapping[str, str]]) -> None:
        """See pins.Properties."""
        self._life.check()
        log = TableLog(path)
        log.refresh()
        metadata = dict(log.metadata)
        metadata["configuration"] = dict(change(metadata["configuration"]))
        self._lake.commit(Request(path, log.version, metadata["id"], [{"metaData": metadata}], Operation.ALTER), "")


class Lake:
    """The tables, and what becomes of commits.  `checked` is called with each commit, when it is made."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.files = Files()
        self.fates: list[str] = []
        self.pending: list[Callable[[], None]] = []
        """Commits that JVMs of dead daemons have not made yet."""
        self.interlopers: dict[str, Callable[[], None]] = {}
        """By table: another writer's commit that comes just before the next one."""
        self.on_commit: Callable[[str, int, list[dict[str, Any]]], None] = lambda *_: None
        self._commits = 0

    def remove(self, path: str) -> None:
        """Move a table away."""
        for name in self.files.names(f"{path.partition('://')[2]}/"):
            del self.files._objects[name]

    def next_fate(self) -> str | None:
        return self.fates.pop(0) if self.fates else None

    def meanwhile(self, path: str) -> None:
        interloper = self.interlopers.pop(path, None)
        if interloper is not None:
            interloper()

    def version(self, path: str) -> int:
        """Return the table's newest version; -1 if there is no table."""
        prefix = f"{path.partition('://')[2]}/_delta_log/"
        return max((int(name[len(prefix) : -5]) for name in self.files.names(prefix)), default=-1)

    def commit(self, request: Request, engine: str) -> str:
        """Commit, or raise Conflict.  Commits of chunks have come between: they conflict with nothing."""
        newest = self.version(request.path)
        for version in range(request.read_version + 1, newest + 1):
            if not self._is_chunk(request.path, version) or request.read_version < 0:
                raise Conflict(f"the table is at version {newest}")
        self._commits += 1
        txn_id = f"txn{self._commits}"
        info = {
            "timestamp": self._commits,
            "operation": request.operation.value,
            "operationParameters": {},
            "engineInfo": engine,
            "txnId": txn_id,
        }
        if request.user_metadata is not None:
            info["userMetadata"] = request.user_metadata
        lines = [{"commitInfo": info}, *with_protocol(request)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        key = f"{request.path.partition('://')[2]}/_delta_log/{newest + 1:020}.json"
        assert key not in self.files
        self.files._writes += 1
        self.files._objects[key] = text.encode(), self.files._writes
        self.on_commit(request.path, newest + 1, lines)
        return txn_id

    def try_commit(self, request: Request, engine: str) -> None:
        try:
            self.commit(request, engine)
        except Conflict:
            return
        self.chance.tell(f"the JVM of the dead {engine} commits version {self.version(request.path)} of {request.path}")

    def _is_chunk(self, path: str, version: int) -> bool:
        key = f"{path.partition('://')[2]}/_delta_log/{version:020}.json"
        actions = [json.loads(line) for line in self.files.read(key).splitlines()]
        return all("commitInfo" in action or "/chunk/" in action.get("txn", {}).get("appId", "") for action in actions)


class OpenedTable:
    """Has of deltalake.DeltaTable what pubsub.delta.table asks for."""

    def __init__(self, path: str) -> None:
        self._log = TableLog(path)
        self._log.refresh()

    def transaction_version(self, app_id: str) -> int | None:
        return self._log.application_version(app_id)

    def metadata(self) -> Any:
        return _Metadata(dict(self._log.properties), list(self._log.partition_columns))

    def file_uris(self) -> list[str]:
        return list(self._log.files)

    def schema(self) -> Any:
        return _Schema(self._log)


@dataclass
class _Metadata:
    configuration: dict[str, str]
    partition_columns: list[str]


class _Schema:
    def __init__(self, log: TableLog) -> None:
        self._fields = schema_json.fields(log.metadata)

    def to_arrow(self) -> pa.Schema:
        types = {"long": pa.int64(), "string": pa.string(), "date": pa.date32()}
        return pa.schema([pa.field(f["name"], types[f["type"]], f["nullable"]) for f in self._fields])

    def to_json(self) -> str:
        return json.dumps({"fields": self._fields})


class Contents:
    """The rows of each version of each table: by data file, without those that a vector removes."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._versions: dict[str, list[tuple[dict[str, frozenset[int]], dict[str, str]]]] = {}

    def apply(self, path: str, version: int, actions: list[dict[str, Any]]) -> None:
        """Add a version."""
        versions = self._versions.setdefault(path, [])
        assert len(versions) == version
        table, names = (dict(versions[-1][0]), versions[-1][1]) if versions else ({}, {})
        added = {action["add"]["path"] for action in actions if "add" in action}
        for action in actions:
            if "metaData" in action:
                fields = json.loads(action["metaData"]["schemaString"])["fields"]
                names = {_stored(one): one["name"] for one in fields}
            if "remove" in action and action["remove"]["path"] not in added:
                table.pop(action["remove"]["path"], None)
            if "add" in action:
                add = action["add"]
                table[add["path"]] = _gone(path, add.get("deletionVector"))
        versions.append((table, names))

    def forget(self, path: str) -> None:
        """Forget a table that was moved away."""
        self._versions.pop(path, None)

    def rows(self, path: str, version: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of a version, by default the newest, values by the columns' names."""
        if path not in self._versions:
            return []
        table, names = self._versions[path][-1 if version is None else version]
        found = []
        for file, gone in table.items():
            for place, row in enumerate(self._read(f"{path.partition('://')[2]}/{file}")):
                if place not in gone:
                    found.append({name: row.get(stored) for stored, name in names.items()})
        return found

    def _read(self, key: str) -> list[dict[str, Any]]:
        if key not in self._rows:
            with pq.ParquetFile(pa.BufferReader(self._files.read(key))) as file:
                self._rows[key] = file.read(use_threads=False).to_pylist()
        return self._rows[key]


def _stored(one: Mapping[str, Any]) -> str:
    return str(one.get("metadata", {}).get("delta.columnMapping.physicalName", one["name"]))


def _gone(path: str, vector: Mapping[str, Any] | None) -> frozenset[int]:
    if vector is None:
        return frozenset()
    return frozenset(map(int, deletion_vectors.positions(deletion_vectors.read(StorePath(path), vector))))
