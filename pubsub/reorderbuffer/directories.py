"""Directories for data that a process spills from memory; the data is useless once the process has ended.

A process locks its directory with flock; the system releases the lock when the process ends, in whatever way.  Any
process may remove the contents of an unlocked directory.
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
    """A directory locked by this process, until `release` or the process's end.  `at` and `within` make one."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def at(cls, path: Path) -> Self:
        """Make, lock and empty the directory `path`.

        Raises ObjectInUse if another process has it locked, and FileFailure.
        """
        while True:
            files.make_directory(path)
            descriptor = _lock(path)
            if descriptor is None:
                raise ObjectInUse(f'directory "{path}" is in use by another process')
            if _is_at(descriptor, path):
                break
            os.close(descriptor)
        try:
            _empty(path)
        except BaseException:
            os.close(descriptor)  # and unlock: this process may try again
            raise
        return cls(path, descriptor)

    @classmethod
    def within(cls, parent: Path, prefix: str) -> Self:
        """Make and lock a new directory in `parent` whose name begins with `prefix`.

        First remove this user's unlocked directories of that prefix in `parent`.  Raises FileFailure.
        """
        _remove_abandoned(parent, prefix)
        while True:
            with files.doing("create", parent / prefix):
                path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            descriptor = _lock(path)
            if descriptor is None:
                continue  # another process locked it first: it takes the directory for an abandoned one
            if _is_at(descriptor, path):
                return cls(path, descriptor)
            os.close(descriptor)

    def release(self) -> None:
        """Remove the directory and release its lock.  Raises FileFailure."""
        try:
            _remove(self.path)
        finally:
            # Closing alone would not unlock it: a forked child holds the descriptor until its exec.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(path: Path) -> int | None:
    """Lock the directory and return its descriptor; None if another process has it locked or it does not exist."""
    with files.doing("open", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
    with files.doing("lock", path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the locked directory: it may have been removed before the lock was taken."""
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
    """Remove a directory and its contents.

    A child that outlived its process may still be using it: files that the child has removed already are no error, and
    files that it adds meanwhile remain until the next removal.
    """

    def failed(_function: object, path: str, info: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        error = info[1]
        if not isinstance(error, OSError) or error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
            raise error

    with files.doing("remove", directory):
        shutil.rmtree(directory, onerror=failed)
