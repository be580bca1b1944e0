"""Where the files of a table lie: a local directory, S3 or HDFS, with the same operations for all.

A local file is a pathlib.Path.  `StorePath` has of Path's methods those that tables need, with the same errors.  A store's
file, here called an object, is there as a whole once it is closed, and as durable as the store makes it; there are no
directories.  Blocks.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from pubsub import object_stores

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

# Bytes of an object that are read ahead of what is asked for.
_BUFFER: Final = 1 << 20


def is_local(path: str) -> bool:
    """Return whether the table lies in a file system that this process sees."""
    return path.startswith("file://") or "://" not in path


def is_reached(path: str) -> bool:
    """Return whether this process reads and writes files at `path`, so that `place` serves it; otherwise only Spark does."""
    return is_local(path) or object_stores.is_store(path)


def place(path: str) -> Place:
    """Return the directory of the table at `path`, for which `is_reached` holds."""
    return directory(path) if is_local(path) else StorePath(path)


def directory(path: str) -> Path:
    """Return the directory of the table at `path`, for which `is_local` holds."""
    return Path(path.removeprefix("file://"))


@dataclass(frozen=True, slots=True)
class StoreStat:
    """Of an object, what os.stat_result tells of a file.  Times in seconds and nanoseconds since the epoch."""

    st_size: int
    st_mtime_ns: int
    st_ino: int = 0

    @property
    def st_mtime(self) -> float:
        return self.st_mtime_ns / 1e9


class StorePath:
    """An object, or what the names of several begin with.  `uri`: scheme, bucket or name node, and key."""

    __slots__ = ("_uri",)

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    def __truediv__(self, name: str | PurePosixPath) -> StorePath:
        return StorePath(f"{self._uri}/{name}") if str(name) not in ("", ".") else self

    def __str__(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"StorePath({self._uri!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and other._uri == self._uri

    def __hash__(self) -> int:
        return hash(self._uri)

    @property
    def name(self) -> str:
        return self._uri.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> StorePath:
        return StorePath(self._uri.rpartition("/")[0])

    @property
    def _files(self) -> FileSystem:
        return object_stores.file_system(self._uri)

    @property
    def _key(self) -> str:
        return self._uri.partition("://")[2]

    def exists(self) -> bool:
        return self._info() is not None

    def stat(self) -> StoreStat:
        info = self._info()
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._uri)
        return _stat(info)

    def _info(self) -> FileInfo | None:
        from pyarrow.fs import FileType

        with _errors(self._uri):
            info = self._files.get_file_info(self._key)
        return info if info.type == FileType.File else None

    def read_bytes(self) -> bytes:
        with _errors(self._uri), self._files.open_input_file(self._key) as file:
            return bytes(file.read())

    def read_text(self, encoding: str) -> str:
        return self.read_bytes().decode(encoding)

    def read_at(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes from `start` on."""
        with _errors(self._uri), self._files.open_input_file(self._key) as file:
            return bytes(file.read_at(max(0, min(size, file.size() - start)), start))

    def open_input(self) -> pa.NativeFile:
        with _errors(self._uri):
            return self._files.open_input_file(self._key)

    def open_output(self) -> pa.NativeFile:
        with _errors(self._uri):
            return self._files.open_output_stream(self._key)

    def write_bytes(self, data: bytes) -> None:
        with _errors(self._uri), self._files.open_output_stream(self._key) as file:
            file.write(data)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with _errors(self._uri):
                self._files.delete_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove all objects below this path, and the directory where the store has one.  Raises FileNotFoundError."""
        if object_stores.has_directories(self._uri):
            with _errors(self._uri):
                self._files.delete_dir(self._key)
            return
        for file, _ in self.walk():
            file.unlink(missing_ok=True)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a directory is there with its first object."""

    def iterdir(self) -> Iterator[StorePath]:
        for info in self._list(recursive=False):
            yield self / info.base_name

    def glob(self, pattern: str) -> Iterator[StorePath]:
        return (path for path in self._there(self.iterdir()) if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        below = (path for path, _ in self.walk())
        return (path for path in self._there(below) if fnmatch.fnmatchcase(path.name, pattern))

    @staticmethod
    def _there(found: Iterator[StorePath]) -> Iterator[StorePath]:
        """As Path.glob does, yield nothing of a directory that is not there."""
        with suppress(FileNotFoundError):
            yield from found

    def walk(self) -> Iterator[tuple[StorePath, StoreStat]]:
        """Yield all objects below this path."""
        from pyarrow.fs import FileType

        start = len(self._key) + 1
        for info in self._list(recursive=True):
            if info.type == FileType.File:
                yield self / info.path[start:], _stat(info)

    def _list(self, *, recursive: bool) -> list[FileInfo]:
        from pyarrow.fs import FileSelector

        with _errors(self._uri):
            found: list[FileInfo] = self._files.get_file_info(FileSelector(self._key, recursive=recursive))
        return found


#: A file or directory of a table.
Place: TypeAlias = Path | StorePath


#: The unit of INT96, in which Spark writes timestamps by default.  Arrow's own choice, nanoseconds, overflows past 2262.
INT96_UNIT: Final = "us"


def open_parquet(path: Place) -> pq.ParquetFile:
    """Open a Parquet file for reading.  Raises FileNotFoundError, OSError."""
    if isinstance(path, Path):
        # Arrow would keep what it has read ahead until the file is closed.
        return pq.ParquetFile(path, memory_map=False, pre_buffer=False, coerce_int96_timestamp_unit=INT96_UNIT)
    return pq.ParquetFile(
        path.open_input(), pre_buffer=True, buffer_size=_BUFFER, coerce_int96_timestamp_unit=INT96_UNIT
    )


def open_output(path: Place) -> pa.NativeFile:
    """Open a file for writing by Arrow; whether a local one becomes durable is the system's affair."""
    return path.open_output() if isinstance(path, StorePath) else pa.OSFile(str(path), "wb")


def parquet_rows(path: Place) -> int:
    """Return the number of rows in a Parquet file, from its footer."""
    with open_parquet(path) as file:
        return int(file.metadata.num_rows)


def read_at(path: Place, start: int, size: int) -> bytes:
    """Return up to `size` bytes of a file, from `start` on."""
    if isinstance(path, StorePath):
        return path.read_at(start, size)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def input_of(path: Place) -> IO[bytes] | Path:
    """Return what Arrow reads a small file of, all of it at once: of an object store, an error in between is no bad data."""
    return path if isinstance(path, Path) else io.BytesIO(path.read_bytes())


def files_below(path: Place) -> Iterator[tuple[str, os.stat_result | StoreStat]]:
    """Yield the files of a table's directory and its partitions, each by its path there; those that vanish are left out."""
    if isinstance(path, StorePath):
        start = len(str(path)) + 1
        for file, stat in path.walk():
            inside = str(file)[start:]
            if not any(_is_hidden(name) for name in inside.split("/")[:-1]):
                yield inside, stat
        return
    for entry in _scan(path):
        with suppress(FileNotFoundError):
            yield os.path.relpath(entry.path, path), entry.stat()


def _scan(path: Path | str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif not _is_hidden(entry.name):
                with suppress(FileNotFoundError):
                    yield from _scan(entry.path)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_")) and "=" not in name


def remove_tree(path: Place) -> None:
    """Remove a directory with all it holds, if it is there."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        path.remove_tree()


def _stat(info: FileInfo) -> StoreStat:
    return StoreStat(int(info.size or 0), int(info.mtime_ns or 0))


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    """Give Arrow's errors of a store an errno: those without one are of data that does not decode."""
    try:
        yield
    except FileNotFoundError as error:
        if error.errno is not None:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri) from error
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None) is not None:
            raise
        text = str(error).strip()
        if "ACCESS_DENIED" in text:
            raise PermissionError(errno.EACCES, text, uri) from error
        raise OSError(errno.EIO, text, uri) from error
