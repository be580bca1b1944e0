"""Write the decoded messages to standard output or a file.

A message of pgoutput comes after its LSN (8 bytes; 0 where a walsender sends none) and its length (4 bytes), big-endian.
test_decoding gives lines of LSN, xid and data, separated by tabs.  As a stream, the output of either is what a walsender
sends in copy-both mode: CopyData of XLogData and keepalives, a NoticeResponse for a warning, and at the end CopyDone or an
ErrorResponse.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import BinaryIO, Final, Self

from pubsub import fsync
from pubsub.backend import messages
from pubsub.errors import PubsubError
from pubsub.protocol.copyboth import Keepalive, XLogData, pg_now, write_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer import files

_HEADER: Final = Struct(">QI")
_KEEPALIVES: Final = 1.0
"""Seconds between the keepalives of a stream."""


class OutputFailure(PubsubError):
    """The decoded messages could not be written."""

    default_sqlstate = "58030"

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"{what}: {error.strerror}", sqlstate="53100" if error.errno == errno.ENOSPC else None)
        self.nobody_reads = error.errno == errno.EPIPE


class Output:
    """Messages in the form of the command's output, in the file `path` or on standard output.

    A context manager.  An existing file is emptied by `begin`, no sooner; a new one is its owner's alone, whatever the umask, since
    it holds rows.  All methods raise OutputFailure.
    """

    def __init__(self, path: Path | None, plugin: str, *, as_stream: bool = False) -> None:
        self._name = "standard output" if path is None else f'file "{path}"'
        self._as_stream = as_stream
        self._told_at = 0.0
        if as_stream:
            self.write = self._copy_data
        else:
            self.write = self._framed if plugin == "pgoutput" else self._line
        try:
            if path is None and sys.stdout is None:
                # It was closed: the descriptor may be another file's by now.
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._file: BinaryIO = (
                open(1, "wb", closefd=False) if path is None else open(path, "ab", opener=files.private)  # noqa: SIM115
            )
        except OSError as error:
            raise OutputFailure(f"could not open {self._name}", error) from error
        self._put: Callable[[bytes], object] = self._file.write
        self._empties = path is not None
        self._directory = None if path is None else path.absolute().parent
        """Where the file's name is, until it is durable."""
        self.given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            # A failed write is reported only once.
            if not isinstance(error, OutputFailure):
                raise self._failure(failure) from failure

    def begin(self) -> None:
        """Empty an existing file, now that the decoding is ready to write."""
        if self._empties and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)

    def end(self) -> None:
        """Accept no further messages: the next one raises CancelledError.  Earlier ones are still written."""
        self._put = _ended

    def give_up(self) -> None:
        """Discard the output that has not been read yet, so that nothing waits for its reader."""
        self.given_up = True
        if not self._file.closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Make what was written durable, if it lies in a file; a pipe has been given it."""
        self.flush()
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                os.fsync(self._file.fileno())
                if self._directory is not None:
                    fsync.sync_directory(self._directory)
                    self._directory = None
        except OSError as error:
            raise OutputFailure(f"could not fsync {self._name}", error) from error

    def keepalive(self, position: int, *, at_once: bool) -> None:
        """Tell the reader of a stream, about once a second or `at_once`, that everything before `position` is written."""
        now = time.monotonic()
        if self._as_stream and (at_once or now - self._told_at >= _KEEPALIVES):
            self._told_at = now
            self._send(messages.message(b"d", write_server_message(Keepalive(Lsn(position), pg_now(), False))))

    def warn(self, warning: PubsubError) -> None:
        """Tell the reader of a stream what the plugin warns of."""
        if self._as_stream:
            self._send(messages.error(warning, "WARNING"))

    def done(self, failure: PubsubError | None = None) -> None:
        """End a stream, with the failure that has ended the decoding."""
        if self._as_stream and not self.given_up and self._put is not _ended:
            self._send(messages.message(b"c") if failure is None else messages.error(failure))
            self.flush()

    def _copy_data(self, lsn: int, xid: int, data: bytes) -> None:
        self._send(messages.message(b"d", write_server_message(XLogData(Lsn(lsn), Lsn(lsn), pg_now(), data))))

    def _send(self, data: bytes) -> None:
        try:
            self._put(data)
        except OSError as error:
            raise self._failure(error) from error

    def _framed(self, lsn: int, xid: int, data: bytes) -> None:
        try:
            self._put(_HEADER.pack(lsn, len(data)) + data)
        except OSError as error:
            raise self._failure(error) from error

    def _line(self, lsn: int, xid: int, data: bytes) -> None:
        # A text ends at a NUL, where a logical message brought one.
        try:
            self._put(b"%s\t%d\t%s\n" % (str(Lsn(lsn)).encode(), xid, data.partition(b"\0")[0]))
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputFailure:
        return OutputFailure(f"could not write to {self._name}", error)


def _ended(_data: bytes) -> None:
    raise asyncio.CancelledError
