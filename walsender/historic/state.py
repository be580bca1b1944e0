"""The catalogs at a position of the WAL, and on disk: what decoding begins with.

    bootstrap (bootstrap.py) ──► CatalogState ──► tracker ──► CatalogState ──► file ──► CatalogState ──► …

A file holds all that is needed to begin at its position without asking the server: the rows of the catalogs, what
transactions in progress have done to them, and facts of the database.  Where nothing of that changed since another file,
the new one only names it.  A file that is damaged, or was written for another server or by another version of this
program, is no loss but of time: decoding can begin further back, or with a bootstrap.

Serves the purpose of snapbuild.c (SnapBuildSerialize, SnapBuildRestore).
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from pubsub.errors import DataCorrupted
from pubsub.reorderbuffer import files
from walsender import checked_files
from walsender.historic.catalog_layouts import CatalogAttribute, CatalogLayout, CatalogName, definition_of
from walsender.historic.encodings import python_encoding
from walsender.historic.tracker import CatalogTracker, Prepared
from walsender.historic.upstream import Builtins, CatalogFile, Upstream
from walsender.hot.catalogs import NOBODY, CatalogTable
from walsender.hot.walk import file_key
from walsender.xlog.record import GLOBAL_TABLESPACE

_VERSION: Final = 2
_WHOLE: Final = ".catalogs"
_SAME: Final = ".same"
_LENGTHS: Final = struct.Struct("<QI")
"""Bytes before compression, and of the description before the rows."""
_VERSION_16: Final = 160000

Pending = dict[int, list[tuple[CatalogTable, int, bool]]]
"""What each transaction in progress has done: the table, the place, and whether it was inserted or deleted there."""


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What does not change while a database is decoded."""

    server: Upstream
    builtins: Builtins


@dataclass(eq=False, slots=True)
class CatalogState:
    """The catalogs of a database at `position`: before the record that begins there.

    `aborted`: transactions known to have been rolled back before; `prepared`: those that were
    prepared before and had not ended.
    """

    position: int
    facts: DatabaseFacts
    files: list[CatalogFile]
    tables: dict[CatalogName, CatalogTable]
    pending: Pending
    aborted: list[int]
    prepared: Prepared = field(default_factory=dict)

    def tracker(self, in_progress: Callable[[int], bool]) -> CatalogTracker:
        """Return what follows the catalogs from here on; it uses these tables."""
        server = self.facts.server
        oids = {file.name: file.oid for file in self.files}
        databases = self.tables.get("pg_database")
        own = databases.first(server.database, frozenset()) if databases is not None else None
        # Where the database's row is not committed yet, the database is made later, in the tablespace that is known.
        space = own.number("dattablespace") if own is not None else server.tablespace
        tables: dict[int, CatalogTable] = {}
        for file in self.files:
            table = self.tables[file.name]
            tables[file_key(GLOBAL_TABLESPACE if table.layout.shared else space, file.number)] = table
        tracker = CatalogTracker(server.database, space, tables, oids, in_progress, self.aborted, self.prepared)
        for xid, changes in self.pending.items():
            for table, tid, inserted in changes:
                tracker.remember(xid, table, tid, inserted)
        return tracker


def layout_of(file: CatalogFile, server: Upstream) -> CatalogLayout:
    """Return how the rows of a catalog are read."""
    definition = definition_of(file.name)
    invalidates = definition.invalidates
    if file.name == "pg_namespace" and server.version < _VERSION_16:
        # Only since 16 are subscribers told of a schema's new name at once.
        invalidates = NOBODY
    return CatalogLayout(definition, file.attributes, python_encoding(server.encoding), invalidates=invalidates)


@dataclass(frozen=True, slots=True)
class Taken:
    """Catalogs to be saved.  `changes`: the tracker, and its count of changes.

    `contents`: None if nothing has changed since the position `whole`.
    """

    position: int
    changes: tuple[object, int]
    contents: bytes | None
    whole: int


class CatalogStates:
    """The files of one database, in `directory`.  Methods block, and raise FileFailure.

    `writes`: no other process does so meanwhile; who only looks leaves what that process is writing.
    """

    def __init__(self, directory: Path, *, writes: bool = True) -> None:
        self._directory = directory
        self._newest: tuple[int, tuple[object, int]] | None = None
        """The position of the last whole file of this process, and what says that nothing has changed since (Taken)."""
        if writes:
            checked_files.prepare(directory)

    def positions(self) -> list[int]:
        """Return the positions at which there are catalogs, in order."""
        return sorted({int(path.stem, 16) for path in self._paths()})

    def newest_before(self, lsn: int) -> int | None:
        """Return the newest position up to `lsn`."""
        return max((one for one in self.positions() if one <= lsn), default=None)

    def take(self, tracker: CatalogTracker, position: int, like: CatalogState) -> Taken | None:
        """Take the catalogs, which are as they were before the record at `position`; None if that cannot be now.

        `like`: what the tracker began with.  `write` puts it on disk; it may run in a thread.
        """
        if not tracker.settled:
            return None
        changes = (tracker.identity, int(tracker.catalogs.changes))
        if self._newest is not None and self._newest[1] == changes and self._newest[0] <= position:
            return Taken(position, changes, None, self._newest[0])
        return Taken(position, changes, _pack(tracker, position, like), position)

    def write(self, taken: Taken) -> None:
        """Save what was taken."""
        if taken.contents is None:
            if self._path(taken.whole, _WHOLE).exists():
                checked_files.write(self._path(taken.position, _SAME), b"%016X\n" % taken.whole)
            return
        checked_files.write(self._path(taken.position, _WHOLE), taken.contents)
        self._newest = (taken.position, taken.changes)

    def load(self, position: int, server: Upstream | None = None) -> CatalogState:
        """Return the catalogs at a position.

        Raises DataCorrupted if they cannot be read, or belong to another server than `server`.
        """
        whole = position
        same = self._path(position, _SAME)
        if same.exists():
            try:
                whole = int(checked_files.read(same, "file"), 16)
            except ValueError as error:
                raise DataCorrupted(f'file "{same}" cannot be read') from error
        path = self._path(whole, _WHOLE)
        data = checked_files.read(path, "file")
        try:
            state = _unpack(data, position)
        except (ValueError, KeyError, TypeError, IndexError, StopIteration, struct.error, pa.ArrowException) as error:
            raise DataCorrupted(f'file "{path}" cannot be read: {error}') from error
        if server is not None and _identity(state.facts.server) != _identity(server):
            raise DataCorrupted(f'file "{path}" is of another server or database')
        return state

    def remove(self, position: int) -> None:
        """Remove what is at a position; whole files that others name stay."""
        self._remove({position})

    def keep_from(self, lsn: int, apart: int) -> None:
        """Remove what is older than the newest position up to `lsn`, and thin out what is newer, to one in `apart` bytes."""
        positions = self.positions()
        first = max((one for one in positions if one <= lsn), default=0)
        gone = {one for one in positions if one < first}
        kept = first
        for one in positions[: -_RECENT or None]:
            if one > first:
                if one - kept < apart:
                    gone.add(one)
                else:
                    kept = one
        self._remove(gone)

    def remove_before(self, lsn: int) -> None:
        """Remove what is before `lsn`."""
        self._remove({one for one in self.positions() if one < lsn})

    def keep_before(self, lsn: int) -> None:
        """Remove what is from `lsn` on."""
        self._remove({one for one in self.positions() if one >= lsn})

    def _remove(self, gone: set[int]) -> None:
        if not gone:
            return
        named: set[int] = set()
        for path in self._paths():
            if path.suffix == _SAME:
                if int(path.stem, 16) in gone:
                    files.remove(path)
                else:
                    named.add(_named(path))
        for position in gone - named:
            files.remove(self._path(position, _WHOLE))

    def _paths(self) -> list[Path]:
        if not self._directory.exists():
            return []
        with files.doing("read", self._directory):
            return [path for path in self._directory.iterdir() if path.suffix in {_WHOLE, _SAME}]

    def _path(self, position: int, ending: str) -> Path:
        return self._directory / f"{position:016X}{ending}"


_RECENT: Final = 20
"""Positions that are not thinned out."""


def _named(path: Path) -> int:
    try:
        return int(checked_files.read(path, "file"), 16)
    except (DataCorrupted, ValueError):
        return 0


def _identity(server: Upstream) -> tuple[object, ...]:
    return server.system_identifier, server.database, server.version // 10000, server.encoding, server.segment_size


def _pack(tracker: CatalogTracker, position: int, like: CatalogState) -> bytes:
    catalogs = []
    rows: list[bytes] = []
    places: dict[int, int] = {}
    for place, file in enumerate(like.files):
        number, table = tracker.active(file.name)
        places[id(table)] = place
        tuples = table.tuples
        found = tuples.values()
        rows += (
            array("Q", tuples.keys()).tobytes(),
            array("I", [one.xmin for one in found]).tobytes(),
            array("I", [one.xmax for one in found]).tobytes(),
            array("I", [len(one.row) for one in found]).tobytes(),
        )
        contents = [one.row for one in found]
        rows += contents
        attributes = [[one.name, one.type_oid, one.length, one.alignment] for one in file.attributes]
        catalogs.append([file.name, file.oid, number, attributes, len(tuples), sum(map(len, contents))])
    description = {
        "version": _VERSION,
        "server": asdict(like.facts.server),
        "builtins": {
            "operators": [[oid, *one] for oid, one in like.facts.builtins.operators.items()],
            "functions": [[oid, *one] for oid, one in like.facts.builtins.functions.items()],
            "keywords": sorted(like.facts.builtins.keywords),
        },
        "catalogs": catalogs,
        "pending": [
            [xid, [[places[id(table)], tid, inserted] for table, tid, inserted in changes]]
            for xid, changes in tracker.catalogs.touched.items()
        ],
        "aborted": tracker.aborted(),
        "prepared": [[xid, subxids] for xid, subxids in tracker.prepared.items()],
        "position": position,
    }
    head = json.dumps(description).encode()
    data = b"".join((head, *rows))
    packed: bytes = pa.Codec("zstd", compression_level=1).compress(data, asbytes=True)
    return _LENGTHS.pack(len(data), len(head)) + packed


def _unpack(data: bytes, position: int) -> CatalogState:
    length, size = _LENGTHS.unpack_from(data)
    whole: bytes = pa.Codec("zstd").decompress(data[_LENGTHS.size :], length, asbytes=True)
    description: dict[str, Any] = json.loads(whole[:size])
    if description["version"] != _VERSION:
        raise ValueError(f"its version is {description['version']}, not {_VERSION}")
    server = Upstream(**description["server"])
    found: list[CatalogFile] = []
    tables: dict[CatalogName, CatalogTable] = {}
    at = size
    for name, oid, number, attributes, count, _ in description["catalogs"]:
        file = CatalogFile(name, oid, number, "", tuple(CatalogAttribute(*one) for one in attributes))
        found.append(file)
        table = tables[file.name] = CatalogTable(layout_of(file, server))
        tids, at = _numbers("Q", whole, at, count)
        xmins, at = _numbers("I", whole, at, count)
        xmaxs, at = _numbers("I", whole, at, count)
        lengths, at = _numbers("I", whole, at, count)
        for tid, xmin, xmax, row in zip(tids, xmins, xmaxs, lengths, strict=True):
            table.insert(tid, whole[at : at + row], xmin, xmax)
            at += row
    if at != len(whole):
        raise ValueError("its parts do not add up to its length")
    given = description["builtins"]
    builtins = Builtins(
        {oid: (name, function) for oid, name, function in given["operators"]},
        {oid: (name, tuple(arguments)) for oid, name, arguments in given["functions"]},
        frozenset(given["keywords"]),
    )
    pending = {
        int(xid): [(tables[found[place].name], int(tid), bool(inserted)) for place, tid, inserted in changes]
        for xid, changes in description["pending"]
    }
    prepared: Prepared = {
        int(xid): None if subxids is None else tuple(map(int, subxids)) for xid, subxids in description["prepared"]
    }
    facts = DatabaseFacts(server, builtins)
    return CatalogState(position, facts, found, tables, pending, list(description["aborted"]), prepared)


def _numbers(code: str, data: bytes, at: int, count: int) -> tuple[Iterable[int], int]:
    found = array(code)
    end = at + count * found.itemsize
    found.frombytes(data[at:end])
    if len(found) != count:
        raise ValueError("it is too short")
    return found, end
