"""List a Delta table's commits with their versions, taken from the names of their files in `_delta_log`.

deltalake's `history()` does not read the file names: it counts backwards from the version that it loaded, over files
that it lists afterwards.  A commit made in between makes every number one too low.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pubsub.delta.places import is_reached, place
from pubsub.errors import DataCorrupted, UndefinedTable

if TYPE_CHECKING:
    from pubsub.delta.log.transactions import Action

_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(
    r"(\d{20})\.checkpoint(?:\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)"
)
_LOG: Final = "_delta_log"
#: Listings tried: a log may be cleaned up between its listing and the check for files that the listing lacks.
_LISTINGS: Final = 3


@dataclass(frozen=True, slots=True)
class Commits:
    """The commits from version `oldest` to `newest`, without a gap; each of these versions can be read."""

    oldest: int
    newest: int
    _read: Callable[[str], bytes]

    def newest_first(self) -> Iterator[tuple[int, str | None]]:
        """Yield each version with its commit's userMetadata, reading a file for each; end at a file that is gone."""
        for version in range(self.newest, self.oldest - 1, -1):
            try:
                yield version, _user_metadata(self._read(_commit_name(version)))
            except FileNotFoundError:
                return


def commits(path: str) -> Commits:
    """List the log of the table at `path`, a directory or any URI that deltalake reads.  Blocks.

    Raises UndefinedTable if there is no table; DataCorrupted if commits are missing between existing ones; OSError.
    """
    names, exists, read = _reached(path) if is_reached(path) else _elsewhere(path)
    for _ in range(_LISTINGS):
        found = names()
        if not found:
            raise UndefinedTable(f'there is no Delta table at "{path}"')
        readable = readable_versions(found, exists)
        if readable is not None:
            return Commits(*readable, read)
    raise DataCorrupted(
        f'commits are missing in the log of the Delta table at "{path}"',
        hint="ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew.",
    )


def readable_versions(names: Sequence[str], exists: Callable[[str], bool]) -> tuple[int, int] | None:
    """Return the oldest and the newest version whose state and commit exist, given the names of the log's files.

    A version's state is a checkpoint, or version 0, and every commit since.  Versions before a gap are left out,
    because the commits in the gap are unknown.  A listing may lack a commit made meanwhile but contain the next one, so
    `exists` is asked about missing ones.  None: nothing can be read, since no checkpoint covers the gap before the
    newest commits.
    """
    versions = {int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))}
    if not versions:
        return None
    newest = oldest = max(versions)
    while oldest and (oldest - 1 in versions or exists(_commit_name(oldest - 1))):
        oldest -= 1
    if oldest == 0:
        return 0, newest
    bases = [version for version in _checkpoints(names) if oldest - 1 <= version <= newest]
    return (max(oldest, min(bases)), newest) if bases else None


def is_of_log(name: str) -> bool:
    """Return whether a file of this name is a commit, or of a checkpoint."""
    return bool(_COMMIT.fullmatch(name) or _CHECKPOINT.fullmatch(name))


def _commit_name(version: int) -> str:
    return f"{version:020d}.json"


def _checkpoints(names: Sequence[str]) -> Iterator[int]:
    """Yield the versions of the checkpoints whose parts all exist."""
    parts: dict[tuple[int, int], set[int]] = {}
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        if match is None:
            continue
        if match["part"] is None:
            yield int(match[1])
            continue
        have = parts.setdefault((int(match[1]), int(match["parts"])), set())
        have.add(int(match["part"]))
        if len(have) == int(match["parts"]):
            yield int(match[1])


#: Access to a log: list its files; tell whether one exists; read one (FileNotFoundError if it does not exist).
_Access = tuple[Callable[[], Sequence[str]], Callable[[str], bool], Callable[[str], bytes]]


def _reached(path: str) -> _Access:
    log = place(path) / _LOG

    def names() -> Sequence[str]:
        try:
            return [file.name for file in log.iterdir()]
        except FileNotFoundError:
            return ()

    return names, lambda name: (log / name).exists(), lambda name: (log / name).read_bytes()


def _elsewhere(path: str) -> _Access:
    from deltalake.fs import DeltaStorageHandler
    from pyarrow import fs

    files = fs.PyFileSystem(DeltaStorageHandler(path))

    def names() -> Sequence[str]:
        selector = fs.FileSelector(_LOG, allow_not_found=True)
        return [info.base_name for info in files.get_file_info(selector)]

    def exists(name: str) -> bool:
        return bool(files.get_file_info(f"{_LOG}/{name}").type == fs.FileType.File)

    def read(name: str) -> bytes:
        with files.open_input_file(f"{_LOG}/{name}") as file:
            return bytes(file.read())

    return names, exists, read


def _user_metadata(commit: bytes) -> str | None:
    """Return the userMetadata of the commit's commitInfo; a commit need not have either."""
    for line in commit.splitlines():
        if b'"commitInfo"' not in line:
            continue
        action: Action = json.loads(line)
        if (info := action.get("commitInfo")) is not None:
            metadata: str | None = info.get("userMetadata")
            return metadata
    return None
