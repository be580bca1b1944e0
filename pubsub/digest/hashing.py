"""PostgreSQL's hashtextextended for whole columns (hashfn.c: hash_bytes_extended, on a little-endian server).

The function is Bob Jenkins's lookup3: 12 bytes of the text at a time are added to three words and mixed.  Here each step
is done for all rows that still have 12 bytes, so the number of steps is that of the longest text; forms.LONGEST bounds it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.protocol.arrow_arrays import contents

Hashes = npt.NDArray[np.uint64]
_Words = npt.NDArray[np.uint32]

_BLOCK: Final = 12
_START: Final = np.uint32((0x9E3779B9 + 3923095) & 0xFFFFFFFF)
# The bytes of the last, incomplete block that belong to each of its words, by the block's length.
_MASKS: Final = np.array(
    [[(1 << 8 * max(0, min(4, length - 4 * word))) - 1 for word in range(3)] for length in range(_BLOCK)], np.uint32
)


def hash_texts(texts: pa.Array, seeds: Hashes) -> Hashes:
    """Return hashtextextended(text COLLATE "C", seed) for each row.

    `texts`: a binary or string array without NULLs, in the server's encoding; `seeds`: one for each row.
    """
    data, offsets = contents(texts)
    # Words are read up to 12 bytes past the end.
    padded = np.zeros(data.size + 2 * _BLOCK, np.uint8)
    padded[: data.size] = data
    return hash_bytes(padded, offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64), seeds)


def hash_bytes(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], seeds: Hashes
) -> Hashes:
    """Hash data[start:start + length] for each row; `data` has at least 12 bytes more."""
    # A view of the word that begins at each byte.
    words = np.ndarray((data.size - 3,), "<u4", data, strides=(1,))
    c = lengths.astype(np.uint32) + _START
    a, b = c.copy(), c.copy()
    a += (seeds >> np.uint64(32)).astype(np.uint32)
    b += seeds.astype(np.uint32)
    unseeded = np.flatnonzero(seeds == 0)
    if len(unseeded):
        before = a[unseeded]
        _mix(a, b, c)
        a[unseeded] = b[unseeded] = c[unseeded] = before
    else:
        _mix(a, b, c)
    at, left = starts.copy(), lengths.copy()
    rows = np.flatnonzero(left >= _BLOCK)
    while len(rows):
        if len(rows) == len(a):
            _add_block(a, b, c, words, at)
            _mix(a, b, c)
            at += _BLOCK
            left -= _BLOCK
        else:
            places = at[rows]
            some = a[rows], b[rows], c[rows]
            _add_block(*some, words, places)
            _mix(*some)
            a[rows], b[rows], c[rows] = some
            at[rows] = places + _BLOCK
            left[rows] -= _BLOCK
        rows = rows[left[rows] >= _BLOCK]
    masks = _MASKS[left]
    a += words[at] & masks[:, 0]
    b += words[at + 4] & masks[:, 1]
    # The last word's lowest byte stands for the length.
    c += (words[at + 8] & masks[:, 2]) << np.uint32(8)
    _finish(a, b, c)
    found: Hashes = b.astype(np.uint64) << np.uint64(32) | c
    return found


def _add_block(a: _Words, b: _Words, c: _Words, words: _Words, at: npt.NDArray[np.int64]) -> None:
    a += words[at]
    b += words[at + 4]
    c += words[at + 8]


def _rotated(word: _Words, bits: int) -> _Words:
    return word << np.uint32(bits) | word >> np.uint32(32 - bits)


def _mix(a: _Words, b: _Words, c: _Words) -> None:
    a -= c
    a ^= _rotated(c, 4)
    c += b
    b -= a
    b ^= _rotated(a, 6)
    a += c
    c -= b
    c ^= _rotated(b, 8)
    b += a
    a -= c
    a ^= _rotated(c, 16)
    c += b
    b -= a
    b ^= _rotated(a, 19)
    a += c
    c -= b
    c ^= _rotated(b, 4)
    b += a


def _finish(a: _Words, b: _Words, c: _Words) -> None:
    c ^= b
    c -= _rotated(b, 14)
    a ^= c
    a -= _rotated(c, 11)
    b ^= a
    b -= _rotated(a, 25)
    c ^= b
    c -= _rotated(b, 16)
    a ^= c
    a -= _rotated(c, 4)
    b ^= a
    b -= _rotated(a, 14)
    c ^= b
    c -= _rotated(b, 24)
