"""The file layer: directories that only the node's user can read, writes at an offset, SQLSTATEs for an OSError.

All the reorder buffer's disk access goes through this module, which knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pubsub import faults, fsync
from pubsub.errors import DataCorrupted, PubsubError

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700


class FileFailure(PubsubError):
    """A file could not be made, written, read or removed.  SQLSTATEs follow elog.c: errcode_for_file_access."""

    default_sqlstate = "58030"


class DiskFull(FileFailure):
    """The disk is full.  The data is still in memory, and the write can be tried again."""

    default_sqlstate = "53100"


_STATES: Final = {
    errno.EPERM: "42501",
    errno.EACCES: "42501",
    errno.EROFS: "42501",
    errno.ENOENT: "58P01",
    errno.EEXIST: "58P02",
    errno.EMFILE: "53000",
    errno.ENFILE: "53000",
}


def private(path: str, flags: int) -> int:
    """Open a file as the `opener` of open(): a new one is this user's alone, whatever the umask."""
    return os.open(path, flags, FILE_MODE)


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into a FileFailure: could not `what` file "`path`"."""
    try:
        yield
    except OSError as error:
        message = f'could not {what} file "{path}": {error.strerror}'
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(message, hint="Free space on the disk: it is tried again.") from error
        raise FileFailure(message, sqlstate=_STATES.get(error.errno or 0)) from error


def make_directory(path: Path) -> None:
    """Make the directory `path` and its missing parents, durably and accessible to this user alone."""
    with doing("create", path):
        make_missing(path)
        path.chmod(DIRECTORY_MODE)


def make_missing(path: Path) -> None:
    """Make the directories down to `path` that are missing, durably and accessible to this user alone.

    Raises OSError, FileFailure.
    """
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)
            sync_directory(directory.parent)


def remove_all(directory: Path, suffix: str) -> None:
    """Remove the files in `directory` whose names end with `suffix`; do nothing if there is no directory."""
    with doing("remove", directory):
        try:
            found = [entry.path for entry in os.scandir(directory) if entry.name.endswith(suffix)]
        except FileNotFoundError:
            return
        for path in found:
            os.unlink(path)


def write_at(path: Path, offset: int, pieces: Sequence[memoryview], *, create: bool = False) -> None:
    """Write `pieces` one after the other at `offset`.  The file must exist; with `create` it must not.

    On an error, remove what was written (with `create`, the file) before raising it.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
    with doing("write", path):
        file = os.open(path, flags, FILE_MODE)
        try:
            faults.point("spill.write")
            _write(file, offset, pieces)
        except OSError:
            if create:
                os.unlink(path)
            else:
                os.ftruncate(file, offset)
            raise
        finally:
            os.close(file)


def _write(file: int, offset: int, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        while piece:
            written = os.pwrite(file, piece, offset)
            piece = piece[written:]
            offset += written


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading, yield its descriptor, and close it at the end."""
    with doing("open", path):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def read_at(file: int, path: Path, offset: int, length: int) -> bytes:
    """Read exactly `length` bytes from `offset`.  Raises DataCorrupted if the file ends before that."""
    pieces = []
    with doing("read", path):
        while length:
            piece = os.pread(file, length, offset)
            if not piece:
                raise DataCorrupted(
                    f'could not read file "{path}": it ends at {offset}, {length} bytes before its time'
                )
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def remove(path: Path) -> None:
    """Remove a file, which may be gone already."""
    with doing("remove", path):
        path.unlink(missing_ok=True)


def make_durable(temporary: Path, path: Path) -> None:
    """Flush `temporary` to disk and rename it to `path`, replacing a file of that name (fd.c: durable_rename)."""
    with doing("fsync", temporary):
        fsync.sync_file(temporary, follow=False)
    faults.point("persist.rename")
    with doing("rename", temporary):
        temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names added to or removed from `directory` durable."""
    with doing("fsync", directory):
        fsync.sync_directory(directory)
