"""Look at what lies in a table's directory and its log: sizes, times, and files that no version needs.  Blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from pubsub.delta.log import deletion_vectors
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.transactions import Action, Listed
from pubsub.delta.places import Place, files_below

_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\b.*")
# What is not a commit yet (LinkLogStore.java, table_log.py).
_ASIDE: Final = re.compile(r"\..*[0-9a-f-]{36}\.tmp")
_LAST_VACUUM: Final = "_last_vacuum_info"
_DATA: Final = (".parquet", ".bin")


@dataclass(frozen=True, slots=True)
class LogListing:
    """A table's log: each commit's time in seconds by version, its checkpoints' versions, the bytes of all its files.

    `asides`: the times of files that are to become commits, or were, until their writer was killed.
    `vacuumed`: Delta's record of the version up to which VACUUM has deleted all removed files; None: there is none.
    """

    commits: Mapping[int, float]
    checkpoints: frozenset[int]
    size: int
    vacuumed: int | None
    asides: Mapping[Place, float]

    @property
    def oldest(self) -> int:
        return min(self.commits)

    @property
    def newest(self) -> int:
        return max(self.commits)

    def at(self, time: float) -> int | None:
        """Return the version that the table had at `time`; None if its commit is gone, or was made later."""
        return max((version for version, made in self.commits.items() if made <= time), default=None)


def list_log(table: Place) -> LogListing:
    """List the log of the table in the directory `table`.  Raises OSError."""
    directory = table / "_delta_log"
    commits: dict[int, float] = {}
    checkpoints: set[int] = set()
    asides: dict[Place, float] = {}
    size = 0
    for name, stat in files_below(directory):
        size += stat.st_size
        if match := _COMMIT.fullmatch(name):
            commits[int(match[1])] = stat.st_mtime
        elif match := _CHECKPOINT.fullmatch(name):
            checkpoints.add(int(match[1]))
        elif _ASIDE.fullmatch(name):
            asides[directory / name] = stat.st_mtime
    return LogListing(commits, frozenset(checkpoints), size, _vacuumed(directory), asides)


def newest_version(table: Place) -> int:
    """Return the newest version in the log of the table in the directory `table`; -1: none.  Raises OSError."""
    versions = (int(match[1]) for file in (table / "_delta_log").iterdir() if (match := _COMMIT.fullmatch(file.name)))
    return max(versions, default=-1)


def _vacuumed(directory: Place) -> int | None:
    try:
        found = json.loads((directory / _LAST_VACUUM).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    version = found.get("latestCommitVersionOutsideOfRetentionWindow") if isinstance(found, dict) else None
    return version if isinstance(version, int) else None


def list_files(table: Place) -> list[Listed]:
    """List the data files and deletion vectors in a table's directory and its partitions.  Raises OSError."""
    return [
        Listed(name, stat.st_size, int(stat.st_mtime * 1000))
        for name, stat in files_below(table)
        if name.endswith(_DATA)
    ]


def needed(files: Iterable[AddFile]) -> set[str]:
    """Return the paths of data files and of their deletion vectors, in the table's directory."""
    paths: set[str] = set()
    for file in files:
        paths.add(unquote(file.path))
        if (vector := deletion_vectors.relative_path(file.vector)) is not None:
            paths.add(vector)
    return paths


def removed(actions: Iterable[Action]) -> set[str]:
    """Return the paths of the data files and deletion vectors that the `remove` actions among `actions` name."""
    paths: set[str] = set()
    for action in actions:
        if (what := action.get("remove")) is not None:
            paths.add(unquote(what["path"]))
            if (vector := deletion_vectors.relative_path(what.get("deletionVector"))) is not None:
                paths.add(vector)
    return paths
