"""Positions of Delta commits: an LSN for each version of a published table that changes rows, given once and kept.

They are given in the order in which commits are noticed, and kept in a file of the node's directory, so that an LSN means the
same for ever.  A transaction's commit record begins at its LSN and ends _LENGTH later.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pubsub.delta.history import commits
from pubsub.delta.log.table_log import TableLog
from pubsub.errors import NotInPrerequisiteState

FILE: Final = "positions.db"
_BASE: Final = 0x1000000
_STEP: Final = 0x100
_LENGTH: Final = 0x40


@dataclass(frozen=True, slots=True)
class Position:
    """A commit.  `time`: microseconds since 1970."""

    lsn: int
    path: str
    version: int
    time: int

    @property
    def end_lsn(self) -> int:
        return self.lsn + _LENGTH


class Positions:
    """The positions of the node in `home`.  Methods block, and may be called from any thread."""

    def __init__(self, home: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(home / FILE, check_same_thread=False, isolation_level=None)
        (home / FILE).chmod(0o600)
        self._database.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
            "CREATE TABLE IF NOT EXISTS commits (lsn INTEGER PRIMARY KEY, path TEXT, version INTEGER, time INTEGER);"
            "CREATE TABLE IF NOT EXISTS seen (path TEXT PRIMARY KEY, version INTEGER);"
            "CREATE TABLE IF NOT EXISTS base (path TEXT, lsn INTEGER, version INTEGER, PRIMARY KEY (path, lsn))"
        )

    def close(self) -> None:
        self._database.close()

    def end(self) -> int:
        """Return the LSN up to which everything is known."""
        with self._lock:
            return self._end()

    def _end(self) -> int:
        ((last,),) = self._database.execute("SELECT max(lsn) FROM commits").fetchall()
        return _BASE if last is None else int(last) + _LENGTH

    def collect(self, paths: Iterable[str]) -> bool:
        """Give positions to the commits of these tables that have none yet; return whether there were any.

        A table that is new here begins at its present version.  Raises NotInPrerequisiteState if commits are missing.
        """
        found = False
        for path in paths:
            found |= self._collect(path)
        return found

    def _collect(self, path: str) -> bool:
        with self._lock:
            row = self._database.execute("SELECT version FROM seen WHERE path = ?", [path]).fetchone()
        if row is None:
            newest = commits(path).newest
            with self._lock:
                self._database.execute("BEGIN")
                self._database.execute("INSERT INTO seen VALUES (?, ?)", [path, newest])
                self._database.execute("INSERT INTO base VALUES (?, ?, ?)", [path, self._end(), newest])
                self._database.execute("COMMIT")
            return False
        log, version, found = TableLog(path), int(row[0]), False
        while (actions := log.actions(version + 1)) is not None:
            version += 1
            moment = next((one["commitInfo"].get("timestamp") for one in actions if "commitInfo" in one), None)
            with self._lock:
                self._database.execute("BEGIN")
                if changes_rows(actions):
                    found = True
                    ((last,),) = self._database.execute("SELECT max(lsn) FROM commits").fetchall()
                    lsn = _BASE if last is None else int(last) + _STEP
                    microseconds = int((moment or time.time() * 1000) * 1000)
                    self._database.execute(
                        "INSERT INTO commits VALUES (?, ?, ?, ?)", [lsn, path, version, microseconds]
                    )
                self._database.execute("UPDATE seen SET version = ? WHERE path = ?", [version, path])
                self._database.execute("COMMIT")
        if not found and commits(path).newest > version:
            raise NotInPrerequisiteState(f'the log of the Delta table "{path}" lacks version {version + 1}')
        return found

    def after(self, lsn: int, limit: int = 100) -> list[Position]:
        """Return the commits that end after `lsn`, in order."""
        with self._lock:
            rows = self._database.execute(
                "SELECT lsn, path, version, time FROM commits WHERE lsn + ? > ? ORDER BY lsn LIMIT ?",
                [_LENGTH, lsn, limit],
            ).fetchall()
        return [Position(*row) for row in rows]

    def versions_at(self, lsn: int, paths: Sequence[str]) -> Mapping[str, int]:
        """Return the version of each table that has every change before `lsn` and none after it."""
        found: dict[str, int] = {}
        with self._lock:
            for path in paths:
                row = self._database.execute(
                    "SELECT max(version) FROM (SELECT version FROM commits WHERE path = ? AND lsn < ?"
                    " UNION ALL SELECT version FROM base WHERE path = ? AND lsn <= ?)",
                    [path, lsn, path, lsn],
                ).fetchone()
                if row is not None and row[0] is not None:
                    found[path] = int(row[0])
        return found


def changes_rows(actions: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a commit changes rows; OPTIMIZE, checkpoints of settings and the like do not."""
    return any(
        "cdc" in one or next(iter(one.values())).get("dataChange", True)
        for one in actions
        if one.keys() & {"add", "remove", "cdc"}
    )
