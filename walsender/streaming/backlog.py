"""What a client has not taken yet: in memory, and from a bound on in a file, so that nobody has to wait for a slow one."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections import deque
from pathlib import Path
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted
from pubsub.reorderbuffer import files

_HEAD: Final = Struct("<II")
"""Length and checksum of a chunk in the file."""


class Backlog:
    """Chunks of bytes, first in, first out.

    Those past `bound` bytes are in a file without a name in `directory`, which goes with the process.  Raises DiskFull,
    FileFailure.
    """

    def __init__(self, directory: Path, bound: int) -> None:
        self.size = 0
        """Bytes of all chunks."""
        self._directory = directory
        self._bound = bound
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._file = -1
        self._read = self._written = 0

    def put(self, chunk: bytes) -> None:
        """Add a chunk at the end."""
        if self._written == self._read and self._held + len(chunk) <= self._bound:
            self._chunks.append(chunk)
            self._held += len(chunk)
        else:
            self._write(chunk)
        self.size += len(chunk)

    def take(self) -> bytes | None:
        """Return the first chunk, which is no longer here then; None if there is none.  Raises DataCorrupted."""
        if self._chunks:
            chunk = self._chunks.popleft()
            self._held -= len(chunk)
        elif self._read < self._written:
            chunk = self._read_one()
        else:
            return None
        self.size -= len(chunk)
        return chunk

    def clear(self) -> None:
        """Drop everything."""
        self._chunks.clear()
        self._held = self.size = self._read = self._written = 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, chunk: bytes) -> None:
        with files.doing("write", self._directory):
            if self._file < 0:
                with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
                    self._file = os.dup(file.fileno())
            place = self._written
            for part in (_HEAD.pack(len(chunk), zlib.crc32(chunk)), chunk):
                data = memoryview(part)
                while data:
                    count = os.pwrite(self._file, data, place)
                    data = data[count:]
                    place += count
        self._written = place

    def _read_one(self) -> bytes:
        length, checksum = _HEAD.unpack(files.read_at(self._file, self._directory, self._read, _HEAD.size))
        chunk = files.read_at(self._file, self._directory, self._read + _HEAD.size, length)
        if zlib.crc32(chunk) != checksum:
            raise DataCorrupted(f'checksum mismatch in a file of waiting output in "{self._directory}"')
        self._read += _HEAD.size + length
        if self._read == self._written:
            with files.doing("truncate", self._directory):
                os.ftruncate(self._file, 0)
            self._read = self._written = 0
        return chunk
