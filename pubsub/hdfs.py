"""HDFS as one of pyarrow's file systems, by hdfs-native, a client that needs no JVM.  Blocks; other threads go on.

pyarrow's own HadoopFileSystem needs libhdfs and a JVM in this process.

On HDFS a file is seen while it is being written.  Here it is written beside its name, as `NAME.UUID.tmp`, and renamed
once it is closed, so a name is always that of a whole file.  What a writer that was killed leaves is no file of a table,
and VACUUM removes it.

    create NAME.UUID.tmp      the name node: there is a file, of no bytes
    blocks                    the data nodes: each has written to all of its pipeline
    complete, again and again the name node: true once a data node has reported the last block
    rename to NAME            the name node: replaces a file of that name

hdfs-native waits half a second before it asks a second time whether the file is complete, and a data node reports a
millisecond after it has answered.  So `_close` asks again itself, as soon as the name node has the last block's length.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeVar

import pyarrow as pa
from hdfs_native import AsyncClient, AsyncFileWriter, FileStatus, WriteOptions
from pyarrow import fs

_T = TypeVar("_T")

# Attempts, and seconds before the second one, which double: some six seconds in all.
_ATTEMPTS: Final = 5
_PAUSE: Final = 0.4
# Seconds for one answer; a call that has taken as long is not repeated.
_PATIENCE: Final = 60.0
# Bytes that are sent at once.  A file that is not larger is written again as a whole when that fails.
_BUFFER: Final = 4 << 20
# Seconds from one look at a file that is being closed to the next.
_LOOK: Final = 0.002
_TRANSIENT: Final = ("StandbyException", "SafeModeException", "RetriableException", "NotReplicatedYetException")
_OWN: Final = ("DataTransferError", "OperationFailed")
_REFUSED: Final = ("AccessControlException", "AuthorizationException")
_RPC: Final = re.compile(r'^(?:Fatal)?RPCError\("([\w.$]+)", "(.*)"\)$', re.DOTALL)


class _Transient(OSError):
    """A failure that another attempt may not have."""


class _Loop:
    """The event loop of hdfs-native's calls, in a thread of its own; one in each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work` returns; meanwhile this thread waits, and no other."""
        return asyncio.run_coroutine_threadsafe(work, self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                threading.Thread(target=self._loop.run_forever, name="hdfs", daemon=True).start()
            return self._loop


_loop = _Loop()


class Hdfs(fs.FileSystemHandler):  # type: ignore[misc]
    """The files of one name node or name service.  Paths begin with its name, as a bucket's objects do with the bucket's.

    `authority`: HOST:PORT, or a name service that `conf` has.  `conf`: Hadoop's settings (object_stores.hadoop_settings).
    Raises OSError with an errno.
    """

    def __init__(self, authority: str, conf: Mapping[str, str]) -> None:
        self._authority = authority
        self._conf = dict(conf)
        self._lock = threading.Lock()
        self._client: AsyncClient | None = None

    def _call(self, path: str, ask: Callable[[AsyncClient], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `ask` returns, which may be asked several times."""

        async def patient() -> _T:
            deadline = time.monotonic() + _PATIENCE
            for attempt in range(1, _ATTEMPTS + 1):
                client = self._connected(path)
                try:
                    return await _answer(path, ask(client))
                except _Transient as error:
                    if error.errno == errno.ETIMEDOUT:
                        # Its connection may be dead, and nobody would tell.
                        self._forget(client)
                    if attempt == _ATTEMPTS or time.monotonic() > deadline:
                        raise OSError(error.errno, error.strerror, path) from error
                await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
            raise AssertionError

        return _loop.run(patient())

    def _connected(self, path: str) -> AsyncClient:
        with self._lock:
            if self._client is None:
                try:
                    self._client = AsyncClient(f"hdfs://{self._authority}", self._settings())
                except Exception as error:
                    _raise(error, path)
            return self._client

    def _settings(self) -> dict[str, str]:
        # Between two rounds of all name nodes hdfs-native would sleep, which fails outside its own event loop.
        others = len(self._conf.get(f"dfs.ha.namenodes.{self._authority}", "").split(",")) - 1
        return {**self._conf, "dfs.client.failover.max.attempts": str(others)}

    def _forget(self, client: AsyncClient) -> None:
        with self._lock:
            if self._client is client:
                self._client = None

    def _inside(self, path: str) -> str:
        """Return the path on the name node."""
        return "/" + path.removeprefix(self._authority).strip("/")

    # What pyarrow calls.

    def get_type_name(self) -> str:
        return "hdfs"

    def normalize_path(self, path: str) -> str:
        return path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hdfs) and (other._authority, other._conf) == (self._authority, self._conf)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        try:
            return _info(path, self._call(path, lambda client: client.get_file_info(self._inside(path))))
        except FileNotFoundError:
            return fs.FileInfo(path, fs.FileType.NotFound)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        inside = self._inside(selector.base_dir)

        async def listed(client: AsyncClient) -> list[FileStatus]:
            return [one async for one in client.list_status(inside, selector.recursive)]

        while True:
            try:
                found = self._call(selector.base_dir, listed)
            except FileNotFoundError:
                if self._info(selector.base_dir).type == fs.FileType.Directory:
                    # A directory below it was removed meanwhile.
                    continue
                if selector.allow_not_found:
                    return []
                raise
            return [_info(selector.base_dir + one.path.removeprefix(inside.rstrip("/")), one) for one in found]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._call(path, lambda client: client.mkdirs(self._inside(path), create_parent=recursive))

    def delete_dir(self, path: str) -> None:
        self._delete(path, recursive=True)

    def delete_file(self, path: str) -> None:
        self._delete(path, recursive=False)

    def _delete(self, path: str, *, recursive: bool) -> None:
        if not self._call(path, lambda client: client.delete(self._inside(path), recursive)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._not_needed()

    def delete_root_dir_contents(self) -> None:
        self._not_needed()

    def copy_file(self, src: str, dest: str) -> None:
        self._not_needed()

    def move(self, src: str, dest: str) -> None:
        self._not_needed()

    def open_append_stream(self, path: str, metadata: object) -> NoReturn:
        self._not_needed()

    @staticmethod
    def _not_needed() -> NoReturn:
        raise NotImplementedError("tables do not need this")

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(_Reader(self, path), mode="r")

    def open_output_stream(self, path: str, metadata: object) -> pa.PythonFile:
        return pa.PythonFile(_Writer(self, path), mode="w")


class _Reader(io.RawIOBase):
    """A file that is open for reading."""

    def __init__(self, files: Hdfs, path: str) -> None:
        self._files = files
        self._path = path
        self._at = 0
        self._file = files._call(path, lambda client: client.read(files._inside(path)))
        self._size = len(self._file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size < 0 else min(size, left)
        if not wanted:
            return b""
        found = self._files._call(self._path, lambda _: self._file.read_range(self._at, wanted))
        if len(found) != wanted:
            raise OSError(errno.EIO, f"the data nodes sent {len(found)} bytes instead of {wanted}", self._path)
        self._at += wanted
        return found

    def readall(self) -> bytes:
        return self.read()


class _Writer(io.RawIOBase):
    """A file that is being written beside its name, and has the name once it is closed without an error before."""

    def __init__(self, files: Hdfs, path: str) -> None:
        self._files = files
        self._path = path
        self._held = bytearray()
        self._size = 0
        self._file: AsyncFileWriter | None = None
        self._aside = self._name()
        self._broken = False

    def _name(self) -> str:
        return f"{self._files._inside(self._path)}.{uuid.uuid4()}.tmp"

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with memoryview(data) as view:
            self._held += view
            written = view.nbytes
        if len(self._held) >= _BUFFER:
            self._send()
        return written

    def _send(self) -> None:
        """Send what is held.  A file of which a part is lost cannot be had again."""
        self._broken = True
        if self._file is None:
            self._file = self._files._call(self._path, lambda client: _created(client, self._aside))
        file, held = self._file, bytes(self._held)
        _loop.run(_answer(self._path, file.write(held)))
        self._size += len(held)
        self._held.clear()
        self._broken = False

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._broken:
                raise OSError(errno.EIO, "a part of the file could not be written", self._path)
            if self._file is None:
                self._files._call(self._path, self._whole)
            else:
                self._send()
                self._files._call(self._path, self._completed)
            self._files._call(self._path, self._named)
        except BaseException:
            # The file that was not finished is nobody's; what is still there of it goes when VACUUM runs.
            with suppress(OSError):
                self._files._delete(f"{self._files._authority}{self._aside}", recursive=False)
            raise
        finally:
            super().close()

    async def _whole(self, client: AsyncClient) -> None:
        # Each attempt has a name of its own: the one before may not have ended yet.
        self._aside = self._name()
        self._file = await _created(client, self._aside)
        await self._file.write(bytes(self._held))
        self._size = len(self._held)
        await _close(client, self._file, self._aside, self._size)

    async def _completed(self, client: AsyncClient) -> None:
        assert self._file is not None
        await _close(client, self._file, self._aside, self._size)

    async def _named(self, client: AsyncClient) -> None:
        inside = self._files._inside(self._path)
        try:
            await client.rename(self._aside, inside, True)
        except FileNotFoundError:
            # The answer to an earlier attempt was lost.
            if (await client.get_file_info(inside)).length != self._size:
                raise


async def _created(client: AsyncClient, path: str) -> AsyncFileWriter:
    return await client.create(path, WriteOptions(create_parent=True, overwrite=True))


async def _close(client: AsyncClient, file: AsyncFileWriter, path: str, size: int) -> None:
    """Close a file of `size` bytes that has the name `path`."""
    closing = asyncio.ensure_future(file.close())
    known = False
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            await asyncio.wait({closing}, timeout=_LOOK)
            if closing.done():
                closing.result()
                return
            if time.monotonic() > deadline:
                raise TimeoutError
            # The name node has the length from the first request to complete the file: all data nodes have answered then.
            known = known or (size > 0 and (await client.get_file_info(path)).length == size)
            if known and not closing.done():
                closing.cancel()
                with suppress(asyncio.CancelledError):
                    await closing
                closing = asyncio.ensure_future(file.close())
    except RuntimeError as error:
        # The request that was given up had completed it.
        if not (known and "File is not open for writing" in str(error)):
            raise
    finally:
        if not closing.done():
            closing.cancel()


async def _answer(path: str, work: Coroutine[Any, Any, _T]) -> _T:
    try:
        async with asyncio.timeout(_PATIENCE):
            return await work
    except Exception as error:
        _raise(error, path)
    except BaseException as error:
        # hdfs-native's own bugs; callers know Exceptions alone.
        if type(error).__name__ == "PanicException":
            raise OSError(errno.EIO, f"hdfs-native failed: {error}", path) from error
        raise


def _raise(error: Exception, path: str) -> NoReturn:
    """Raise hdfs-native's error with an errno; _Transient if another attempt may do."""
    text = str(error).strip()
    if isinstance(error, TimeoutError):
        raise _Transient(errno.ETIMEDOUT, f"no answer in {_PATIENCE:g} s", path) from error
    kind = ""
    if (rpc := _RPC.match(text)) is not None:
        kind, text = rpc.groups()
        text = text.replace("\\n", "\n").replace('\\"', '"')
    text = f"{text.partition(chr(10))[0].strip()}"
    if kind:
        text = f"{kind.rpartition('.')[2]}: {text}"
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    if isinstance(error, FileExistsError):
        raise FileExistsError(errno.EEXIST, text, path) from error
    if kind.endswith(_REFUSED):
        raise PermissionError(errno.EACCES, text, path) from error
    if isinstance(error, OSError) or kind.endswith(_TRANSIENT) or text.startswith(_OWN):
        raise _Transient(
            error.errno if isinstance(error, OSError) and error.errno else errno.EIO, text, path
        ) from error
    raise OSError(errno.EIO, text, path) from error


def _info(path: str, status: FileStatus) -> fs.FileInfo:
    kind = fs.FileType.Directory if status.isdir else fs.FileType.File
    return fs.FileInfo(path, kind, size=status.length, mtime_ns=status.modification_time * 1_000_000)
