"""Read and write Delta's deletion vectors, the deleted row positions of data files (PROTOCOL.md, Deletion Vectors).

A vector is a magic number and a 64-bit Roaring bitmap of row positions.  The vectors of one commit share a file: a
version byte, then each vector's size, the vector, and its CRC-32.  Other writers may store small vectors inline in the
log.
"""

from __future__ import annotations

import base64
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from pubsub.delta.log import durable_files
from pubsub.delta.places import Place, StorePath, is_reached, read_at
from pubsub.errors import DataCorrupted, FeatureNotSupported
from pubsub.processor_time import spent_on

_MAGIC: Final = struct.pack("<i", 1681511377)
_VERSION: Final = b"\x01"
_SIZE: Final = struct.Struct(">i")
_CRC: Final = struct.Struct(">I")
# Delta's Base85 is ZeroMQ's (Z85); Python's b85 is the same coding with another alphabet.
_B85: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85: Final = bytes.maketrans(_B85, _Z85)
_FROM_Z85: Final = bytes.maketrans(_Z85, _B85)
_UUID_CHARS: Final = 20

Positions = npt.NDArray[np.int64]


def unique_id(descriptor: Mapping[str, Any] | None) -> str | None:
    """Return the id that distinguishes a data file's vectors in the log; None without a vector."""
    if descriptor is None:
        return None
    offset = descriptor.get("offset")
    return f"{descriptor['storageType']}{descriptor['pathOrInlineDv']}" + (f"@{offset}" if offset is not None else "")


def relative_path(descriptor: Mapping[str, Any] | None) -> str | None:
    """Return the path of a vector's file in the table's directory; None if there is none, or it lies elsewhere."""
    if descriptor is None or descriptor["storageType"] != "u":
        return None
    place = descriptor["pathOrInlineDv"]
    prefix, number = place[:-_UUID_CHARS], uuid.UUID(bytes=_decode_z85(place[-_UUID_CHARS:]))
    return f"{prefix}/deletion_vector_{number}.bin" if prefix else f"deletion_vector_{number}.bin"


def read(table: Place, descriptor: Mapping[str, Any]) -> BitMap64:
    """Return the deleted positions that `descriptor` in the log of `table` names.

    Raises DataCorrupted for a missing or damaged vector, FeatureNotSupported for an unknown kind of storage, OSError.
    """
    place = descriptor["pathOrInlineDv"]
    path = file_of(table, descriptor)
    if path is None:
        return _decode(base64.b85decode(place.encode("ascii").translate(_FROM_Z85))[: descriptor["sizeInBytes"]], place)
    try:
        wanted: int = descriptor["sizeInBytes"]
        found = read_at(path, descriptor.get("offset") or 0, _SIZE.size + wanted + _CRC.size)
    except FileNotFoundError as error:
        raise DataCorrupted(
            f'deletion vector file "{path}" of a Delta table does not exist',
            hint="ALTER SUBSCRIPTION … RESYNC TABLE copies the table anew.",
        ) from error
    if len(found) != _SIZE.size + wanted + _CRC.size:
        raise DataCorrupted(f'deletion vector file "{path}" is too short')
    (size,), (crc,) = _SIZE.unpack(found[: _SIZE.size]), _CRC.unpack(found[-_CRC.size :])
    data = found[_SIZE.size : -_CRC.size]
    if size != wanted or crc != zlib.crc32(data):
        raise DataCorrupted(f'deletion vector in "{path}" at {descriptor.get("offset")} is damaged')
    return _decode(data, str(path))


def file_of(table: Place, descriptor: Mapping[str, Any]) -> Place | None:
    """Return the file of a vector that the log of `table` names; None for one that the log itself holds.

    Raises FeatureNotSupported for an unknown kind of storage, DataCorrupted.
    """
    kind: str = descriptor["storageType"]
    place: str = descriptor["pathOrInlineDv"]
    if kind == "i":
        return None
    if (inside := relative_path(descriptor)) is not None:
        return table / inside
    if kind == "p" and place.startswith("file:"):
        return Path(unquote(place.removeprefix("file://").removeprefix("file:")))
    if kind == "p" and is_reached(place):
        return StorePath(unquote(place))
    raise FeatureNotSupported(f'a deletion vector stored as "{kind}" at "{place}" cannot be read')


@spent_on("writing")
def write(table: Place, bitmaps: Sequence[BitMap64]) -> tuple[Place, list[dict[str, Any]]]:
    """Write all `bitmaps` to one new file, durably; return its path and the descriptors for the log.

    A failure leaves nothing behind.
    """
    number = uuid.uuid4()
    path = table / f"deletion_vector_{number}.bin"
    descriptors: list[dict[str, Any]] = []
    parts = [_VERSION]
    offset = len(_VERSION)
    for bitmap in bitmaps:
        data = _MAGIC + bitmap.serialize()
        parts += [_SIZE.pack(len(data)), data, _CRC.pack(zlib.crc32(data))]
        descriptors.append(
            {
                "storageType": "u",
                "pathOrInlineDv": base64.b85encode(number.bytes).translate(_TO_Z85).decode("ascii"),
                "offset": offset,
                "sizeInBytes": len(data),
                "cardinality": len(bitmap),
            }
        )
        offset += _SIZE.size + len(data) + _CRC.size
    try:
        durable_files.write(path, b"".join(parts))
        durable_files.sync_directory(table)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path, descriptors


def positions(bitmap: BitMap64) -> Positions:
    """Return the positions in a bitmap, ascending."""
    return np.frombuffer(bitmap.to_array(), np.uint64).astype(np.int64)


def among(dead: Positions, positions: Positions) -> npt.NDArray[np.bool_]:
    """Mark those of the `positions` that are among the ascending `dead` ones."""
    if not len(dead):
        return np.zeros(len(positions), np.bool_)
    found: npt.NDArray[np.bool_] = dead[np.minimum(np.searchsorted(dead, positions), len(dead) - 1)] == positions
    return found


def _decode(data: bytes, where: str) -> BitMap64:
    if data[: len(_MAGIC)] != _MAGIC:
        raise DataCorrupted(f'deletion vector "{where}" is of an unknown format')
    try:
        return BitMap64.deserialize(data[len(_MAGIC) :])
    except (ValueError, RuntimeError, IndexError) as error:
        raise DataCorrupted(f'deletion vector "{where}" is damaged') from error


def _decode_z85(text: str) -> bytes:
    return base64.b85decode(text.encode("ascii").translate(_FROM_Z85))
