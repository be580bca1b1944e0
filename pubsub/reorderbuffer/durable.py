"""A whole transaction in one durable file: a prepared transaction that waits for its outcome.

    Arrow IPC stream | its end mark | trailer (JSON) | length and CRC-32 of the trailer, magic

The trailer holds the caller's metadata and each segment's place and checksum.  Readers of Arrow streams stop at the end
mark, so any of them can read the changes.  The file is written under a temporary name, flushed and renamed, and then
its directory is flushed: the file exists whole or not at all.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Final

from pubsub.errors import DataCorrupted
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer import files
from pubsub.reorderbuffer.block import schema
from pubsub.reorderbuffer.segments import Segment, SegmentFile
from pubsub.reorderbuffer.transaction import State, Transaction

TEMPORARY: Final = ".tmp"
"""The suffix of a file that is being written.  `files.remove_all` removes those that a killed process left."""

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAGIC: Final = b"pubsubTX"
_FOOT: Final = Struct("<QI8s")
_MAX_TRAILER: Final = 1 << 30
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A transaction read back, in state COMMITTED.  `metadata` is what `persist` was given.

    `transaction.release` leaves the file alone.
    """

    transaction: Transaction
    metadata: Mapping[str, Any]


def persist(transaction: Transaction, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write `transaction`, without its aborted subtransactions, to the file `path`; it is durable on return.

    `metadata` is stored with it and must be JSON values.  An existing file of that name is replaced.  Needs memory for
    a few blocks.  Raises DiskFull and FileFailure (and leaves no temporary file), and what Transaction.blocks raises.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    files.make_directory(path.parent)
    files.remove(temporary)
    stored = SegmentFile(temporary, transaction.own_log().header)
    try:
        for block in transaction.blocks():
            stored.append(block)
        head = b"" if stored.segments else schema(stored.header).serialize().to_pybytes()
        trailer = {
            "version": _VERSION,
            "xid": transaction.xid,
            "first_lsn": int(transaction.first_lsn),
            "header": stored.header,
            "sizes": [[xid, *transaction.size_of(xid)] for xid in sorted(transaction.xids)],
            "end": stored.end + len(head),
            "segments": [astuple(segment) for segment in stored.segments],
            "metadata": dict(metadata),
        }
        data = json.dumps(trailer, separators=(",", ":")).encode()
        foot = _FOOT.pack(len(data), zlib.crc32(data), _MAGIC)
        tail = memoryview(b"".join((head, _END_OF_STREAM, data, foot)))
        files.write_at(temporary, stored.end, [tail], create=not stored.segments)
        files.make_durable(temporary, path)
    except BaseException:
        files.remove(temporary)
        raise


def load(path: Path) -> Stored:
    """Open the transaction stored in `path`.  Only its `chunks` read the changes and check their checksums.

    Raises FileFailure (58P01 if the file is missing) and DataCorrupted.
    """
    with files.opened(path) as file:
        with files.doing("read", path):
            size = os.fstat(file).st_size
        foot = files.read_at(file, path, max(0, size - _FOOT.size), min(size, _FOOT.size))
        if len(foot) != _FOOT.size:
            raise _corrupted(path, "it is too short")
        length, checksum, magic = _FOOT.unpack(foot)
        if magic != _MAGIC or length > min(size - _FOOT.size, _MAX_TRAILER):
            raise _corrupted(path, "its end is missing")
        data = files.read_at(file, path, size - _FOOT.size - length, length)
    if zlib.crc32(data) != checksum:
        raise _corrupted(path, "checksum mismatch in its trailer")
    trailer = json.loads(data)
    if trailer["version"] != _VERSION:
        raise _corrupted(path, f"its version is {trailer['version']}, not {_VERSION}")
    if trailer["end"] + len(_END_OF_STREAM) + length + _FOOT.size != size:
        raise _corrupted(path, "its parts do not add up to its length")
    segments = [Segment(*fields) for fields in trailer["segments"]]
    stored = SegmentFile(path, trailer["header"], segments, trailer["end"], durable=True)
    transaction = Transaction(trailer["xid"], trailer["header"], _nothing, _nothing, state=State.COMMITTED, file=stored)
    transaction.first_lsn = Lsn(trailer["first_lsn"])
    transaction.set_sizes(trailer["sizes"])
    return Stored(transaction, trailer["metadata"])


def remove(path: Path) -> None:
    """Remove a transaction's file durably, after its outcome; it may be gone already.  Raises FileFailure."""
    files.remove(path)
    files.sync_directory(path.parent)


def _corrupted(path: Path, why: str) -> DataCorrupted:
    return DataCorrupted(f'file "{path}" does not hold a transaction: {why}')


def _nothing(_: object) -> None:
    """Ignore accounts and the release: the transaction belongs to no buffer."""
