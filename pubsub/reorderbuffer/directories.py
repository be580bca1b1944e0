"""Directories for what a process moves out of its memory: of no use once the process has ended, however it did.

A process holds its directory by a lock on it (flock), which the system takes back when the process is gone.  Whoever finds one
that nobody holds may remove what is in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from pubsub.errors import ObjectInUse
from pubsub.reorderbuffer import files


class SpillDirectory:
    """Made by `at` or `within`; held until `release`, or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def at(cls, path: Path) -> Self:
        """The directory `path`, empty.  Raises ObjectInUse where another process holds it, and FileFailure."""
        while True:
            files.make_directory(path)
            descriptor = _lock(path)
            if descriptor is None:
                raise ObjectInUse(f'directory "{path}" is in use by another process')
            if _is_at(descriptor, path):
                break
            os.close(descriptor)
        _empty(path)
        return cls(path, descriptor)

    @classmethod
    def within(cls, parent: Path, prefix: str) -> Self:
        """A new one, after those of this user in `parent`, with names that begin with `prefix`, that nobody holds were removed.

        Raises FileFailure.
        """
        _remove_abandoned(parent, prefix)
        while True:
            with files.doing("create", parent / prefix):
                path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            descriptor = _lock(path)
            if descriptor is None:
                continue  # another process was quicker, and takes it for an abandoned one
            if _is_at(descriptor, path):
                return cls(path, descriptor)
            os.close(descriptor)

    def release(self) -> None:
        """Remove it, and let it go.  Raises FileFailure."""
        try:
            _remove(self.path)
        finally:
            # Not by closing alone: a child that is about to become another program still has the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(path: Path) -> int | None:
    """A descriptor that holds the directory; None where another process does, or there is none."""
    with files.doing("open", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the directory still has its name: it may have been removed before it was held."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _remove_abandoned(parent: Path, prefix: str) -> None:
    with files.doing("read", parent):
        found = [entry for entry in os.scandir(parent) if entry.name.startswith(prefix)]
    for entry in found:
        path = Path(entry.path)
        try:
            mine = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        descriptor = _lock(path) if mine else None
        if descriptor is not None:
            try:
                if _is_at(descriptor, path):
                    _remove(path)
            finally:
                os.close(descriptor)


def _empty(directory: Path) -> None:
    with files.doing("remove", directory):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                _remove(Path(entry.path))
            else:
                Path(entry.path).unlink(missing_ok=True)


def _remove(directory: Path) -> None:
    """Remove a directory with what is in it.  A child that outlived its process may be at work there: what it has removed itself
    is no error, and what it adds is left for the next time."""

    def failed(_function: object, path: str, info: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        error = info[1]
        if not isinstance(error, OSError) or error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
            raise error

    with files.doing("remove", directory):
        shutil.rmtree(directory, onerror=failed)
