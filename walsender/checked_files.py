"""Small files that are whole or not there: a checksum, then the contents; written aside, fsynced and renamed.

Follows slot.c (SaveSlotToPath, RestoreSlotFromDisk) and fd.c (durable_rename).
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Final

from pubsub import faults
from pubsub.errors import DataCorrupted
from pubsub.reorderbuffer import files

_ASIDE: Final = ".tmp"
_CHECKSUM_BYTES: Final = 9


def write(path: Path, contents: bytes) -> None:
    """Put `contents` in the place of what `path` has, durably.

    Raises FileFailure, DiskFull; the file is as it was then, or has the new contents.  Fault points: "NAME written aside" and
    "NAME renamed", with the file's ending for NAME.
    """
    aside = path.with_name(path.name + _ASIDE)
    name = path.suffix.removeprefix(".") or path.name
    files.remove(aside)
    files.write_at(aside, 0, [memoryview(_checksum(contents)), memoryview(contents)], create=True)
    faults.point(f"{name} written aside")
    files.make_durable(aside, path)
    faults.point(f"{name} renamed")


def read(path: Path, what: str, hint: str | None = None) -> bytes:
    """Return the contents of `path`.

    Raises FileFailure (58P01 if there is none); DataCorrupted, with `hint`, if they are not what was written: `what` names the file.
    """
    with files.doing("read", path):
        data = path.read_bytes()
    contents = data[_CHECKSUM_BYTES:]
    if data[:_CHECKSUM_BYTES] != _checksum(contents):
        raise DataCorrupted(f'checksum mismatch for {what} "{path}"', hint=hint)
    return contents


def remove(path: Path) -> None:
    """Remove a file durably; it may be gone already.  Raises FileFailure."""
    files.remove(path)
    files.sync_directory(path.parent)


def prepare(directory: Path) -> None:
    """Make the directory, durably, and remove what a process that was killed left half written.  Raises FileFailure."""
    files.make_directory(directory)
    files.remove_all(directory, _ASIDE)


def _checksum(contents: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(contents)
