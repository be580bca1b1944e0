"""A run's arrays: the hashes of keys in buckets, each with its row, and how keys are sought in them.

    starts   uint32   where each bucket begins; there are 2**bits buckets
    sums     uint32   a checksum of each bucket
    lows     uint64   64 bits of a key's hash (hashing.py)
    rows     uint32   the key's row
    highs    uint16   the 16 other bits of its hash; only where there are fewer than 2**16 buckets, since a bucket's number
                      begins with them

A bucket's number is the first bits of the 80.  Hashes are even, so a bucket has some twelve to twenty-four entries, and a
key is sought by reading one bucket, whole: that costs the same in any run, and shows whether the bucket is damaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pubsub.delta.key_index.hashing import HIGH_BITS, LOW_BITS, Hashes, Words
from pubsub.protocol.arrow_arrays import Indices

Rows: TypeAlias = npt.NDArray[np.uint32]
Array: TypeAlias = npt.NDArray[Any]

#: The bytes of a bucket's start and sum, and those of an entry on disk.
BUCKET_BYTES: Final = 8
ENTRY_BYTES: Final = 12
_FEWEST_IN_BUCKET: Final = 12
_MOST_BITS: Final = 28
# No bucket of even hashes is so large.
_MOST_IN_BUCKET: Final = 4096
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_OTHER_FACTOR: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)


class Damaged(Exception):
    """A run's bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """See the module.  `starts` has one more entry than there are buckets."""

    bits: int
    starts: Array
    sums: Array
    lows: Array
    rows: Array
    highs: Array | None = None

    def __len__(self) -> int:
        return len(self.lows)

    @property
    def nbytes(self) -> int:
        """The bytes that they take."""
        highs = self.highs.nbytes if self.highs is not None else 0
        return int(self.starts.nbytes + self.sums.nbytes + self.lows.nbytes + self.rows.nbytes + highs)


def bits_for(entries: int, *, least: int = 0, fewest: int = _FEWEST_IN_BUCKET) -> int:
    """Return the bits of the buckets' numbers for so many entries, `fewest` to twice as many in a bucket."""
    return max(min(max(entries // fewest, 1).bit_length() - 1, _MOST_BITS), least)


def buckets_of(hashes: Hashes, bits: int) -> Indices:
    """Return the bucket of each hash."""
    if bits <= HIGH_BITS:
        return (hashes.high >> np.uint64(HIGH_BITS - bits)).astype(np.int64)
    more = np.uint64(bits - HIGH_BITS)
    return ((hashes.high << more) | (hashes.low >> (np.uint64(LOW_BITS) - more))).astype(np.int64)


def arrange(hashes: Hashes, rows: Rows, bits: int, first: int = 0, count: int | None = None) -> tuple[Array, Arrays]:
    """Put entries into `count` buckets from the bucket `first` on; return each bucket's size, and their arrays."""
    count = 1 << bits if count is None else count
    order = np.argsort((hashes.high << np.uint64(LOW_BITS - HIGH_BITS)) | (hashes.low >> np.uint64(HIGH_BITS)))
    lows, rows = hashes.low[order], rows[order]
    sizes = np.bincount(buckets_of(hashes, bits) - first, minlength=count)
    ends = np.cumsum(sizes)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    sums = _sums(lows, rows, starts, np.arange(first, first + count))
    highs = hashes.high[order].astype(np.uint16) if bits < HIGH_BITS else None
    return sizes, Arrays(bits, starts.astype(np.uint32), sums, lows, rows, highs)


def seek(arrays: Arrays, wanted: Hashes) -> tuple[Indices, Indices]:
    """Return the rows that have one of the wanted hashes, and for each of them the number of its key.

    Raises Damaged.
    """
    buckets = buckets_of(wanted, arrays.bits)
    order = np.argsort(buckets)  # so that memory is read in its order
    buckets = buckets[order]
    starts = arrays.starts[buckets].astype(np.int64)
    sizes = arrays.starts[buckets + 1].astype(np.int64) - starts
    if len(sizes) and (sizes.min() < 0 or sizes.max() > _MOST_IN_BUCKET or int((starts + sizes).max()) > len(arrays)):
        raise Damaged
    ends = np.cumsum(sizes)
    begins = ends - sizes
    at = np.repeat(starts - begins, sizes) + np.arange(int(ends[-1]) if len(ends) else 0)
    lows, rows = arrays.lows[at], arrays.rows[at]
    if not np.array_equal(_sums(lows, rows, np.append(begins, len(at)), buckets), arrays.sums[buckets]):
        raise Damaged
    same = lows == np.repeat(wanted.low[order], sizes)
    if arrays.highs is not None:
        same &= arrays.highs[at] == np.repeat(wanted.high[order], sizes)
    hits = np.flatnonzero(same)
    keys = order[np.searchsorted(ends, hits, side="right")]
    return rows[hits].astype(np.int64), wanted.which[keys]


def entries(arrays: Arrays, first: int, count: int) -> tuple[Hashes, Rows]:
    """Return the entries of `count` buckets from the bucket `first` on.  Raises Damaged."""
    bounds = arrays.starts[first : first + count + 1].astype(np.int64)
    sizes = np.diff(bounds)
    if sizes.min() < 0 or int(bounds[-1]) > len(arrays):
        raise Damaged
    buckets = np.arange(first, first + count)
    lows, rows = arrays.lows[bounds[0] : bounds[-1]], arrays.rows[bounds[0] : bounds[-1]]
    if not np.array_equal(_sums(lows, rows, bounds - bounds[0], buckets), arrays.sums[first : first + count]):
        raise Damaged
    if arrays.highs is not None:
        high = arrays.highs[bounds[0] : bounds[-1]].astype(np.uint64)
    else:
        high = np.repeat(buckets.astype(np.uint64) >> np.uint64(arrays.bits - HIGH_BITS), sizes)
    return Hashes(high, lows, np.arange(len(lows))), rows


def _sums(lows: Words, rows: Rows, bounds: Array, buckets: Array) -> Array:
    """Return the checksum of each bucket, whose entries are those from one bound to the next."""
    mixed = lows + rows.astype(np.uint64) * _FACTOR
    mixed ^= mixed >> _HALF
    mixed *= _OTHER_FACTOR
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])[bounds]
    sums = totals[1:] - totals[:-1] + (buckets.astype(np.uint64) + np.uint64(1)) * _FACTOR
    sums *= _OTHER_FACTOR
    halves: Array = (sums >> _HALF).astype(np.uint32)
    return halves
