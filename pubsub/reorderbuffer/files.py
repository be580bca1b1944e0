"""The file layer: directories that only the node's user can read, writes at a given place, and what an OSError means.

Everything that touches a disk for the reorder buffer goes through here; nothing here knows what the bytes are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pubsub import faults
from pubsub.errors import DataCorrupted, PubsubError

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700


class FileFailure(PubsubError):
    """A file could not be made, written, read or removed.  SQLSTATEs as elog.c: errcode_for_file_access gives them."""

    default_sqlstate = "58030"


class DiskFull(FileFailure):
    """There is no room.  What was to be written is still held: it can be tried again."""

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


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    """An OSError inside becomes a FileFailure: could not `what` file "`path`"."""
    try:
        yield
    except OSError as error:
        message = f'could not {what} file "{path}": {error.strerror}'
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(message, hint="Free space on the disk: it is tried again.") from error
        raise FileFailure(message, sqlstate=_STATES.get(error.errno or 0)) from error


def make_directory(path: Path) -> None:
    """Make the directory `path`, and those of its parents that are missing, for this user alone."""
    with doing("create", path):
        for directory in (*reversed(path.parents), path):
            if not directory.exists():
                directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        path.chmod(DIRECTORY_MODE)


def remove_all(directory: Path, suffix: str) -> None:
    """Remove the files in `directory` whose names end with `suffix`; nothing where there is no directory."""
    with doing("remove", directory):
        try:
            found = [entry.path for entry in os.scandir(directory) if entry.name.endswith(suffix)]
        except FileNotFoundError:
            return
        for path in found:
            os.unlink(path)


def write_at(path: Path, offset: int, pieces: Sequence[memoryview], *, create: bool = False) -> None:
    """Write `pieces`, one behind the other, at `offset`; the file must exist, or with `create` must not.

    Where that fails what was written of it is taken off again, and the error raised.
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
    """A file descriptor for reading; closed at the end."""
    with doing("open", path):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def read_at(file: int, path: Path, offset: int, length: int) -> bytes:
    """Exactly `length` bytes from `offset`.  Raises DataCorrupted where the file ends before."""
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
    """Remove a file that may be gone already."""
    with doing("remove", path):
        path.unlink(missing_ok=True)


def make_durable(temporary: Path, path: Path) -> None:
    """Flush `temporary` to the disk and give it its name, which another file may have had (fd.c: durable_rename)."""
    with doing("fsync", temporary):
        file = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    faults.point("persist.rename")
    with doing("rename", temporary):
        temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names that were given or removed in `directory` durable."""
    with doing("fsync", directory):
        file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
