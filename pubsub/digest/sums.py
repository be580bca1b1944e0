"""Counts and sums of row hashes by range of the key's hash.

The 2^64 values of a key's hash are divided into equal ranges; a row belongs to the range of its key's hash, in any table and
in any order.  Two tables whose ranges have equal counts and sums hold the same rows: rows that are equal several times are
counted as often.  In a range that differs, `surplus` finds the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.digest.hashing import Hashes
from pubsub.protocol.arrow_arrays import Indices

_LEAST_BITS, _MOST_BITS = 4, 14
#: Rows of one range, about.
_ROWS: Final = 700


def bits_for(rows: int) -> int:
    """Return the number of bits that tell the ranges of a table with so many rows, roughly, apart."""
    return min(max((max(rows, 1) // _ROWS).bit_length(), _LEAST_BITS), _MOST_BITS)


def range_of(keys: Hashes, bits: int) -> Indices:
    """Return the number of each key hash's range, from 0; `range_sql` is the same in SQL."""
    return (keys.view(np.int64) >> np.int64(64 - bits)) + (1 << bits - 1)


def range_sql(key: str, bits: int) -> str:
    """Return the number of a range in SQL; `key` names the key's hash."""
    return f"({key} >> {64 - bits}) + {1 << bits - 1}"


class Sums:
    """The counts and sums of one side; a sum is modulo 2^64."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.counts: Indices = np.zeros(1 << bits, np.int64)
        self._sums: Hashes = np.zeros(1 << bits, np.uint64)

    @property
    def rows(self) -> int:
        """How many rows were added."""
        return int(self.counts.sum())

    def add(self, keys: Hashes, rows: Hashes) -> None:
        """Add rows by the hashes of their keys and their own: at most 2^20 at a time."""
        ranges, size = range_of(keys, self.bits), len(self.counts)
        self.counts += np.bincount(ranges, minlength=size)
        # bincount adds doubles, which hold sums of so many halves exactly.
        low = np.bincount(ranges, (rows & np.uint64(0xFFFFFFFF)).astype(np.float64), size)
        high = np.bincount(ranges, (rows >> np.uint64(32)).astype(np.float64), size)
        self._sums += low.astype(np.uint64) + (high.astype(np.uint64) << np.uint64(32))

    def add_ranges(self, ranges: Indices, counts: Indices, sums: Sequence[int]) -> None:
        """Add the sums of some ranges, each of which is named once; PostgreSQL's sums are signed and exact."""
        self.counts[ranges] += counts
        self._sums[ranges] += np.array([value & 0xFFFFFFFFFFFFFFFF for value in sums], np.uint64)

    def merge(self, other: Sums) -> None:
        """Add the sums of other rows of this side."""
        self.counts += other.counts
        self._sums += other._sums

    def differing(self, other: Sums) -> Indices:
        """Return the ranges in which the two sides differ."""
        return np.flatnonzero((self.counts != other.counts) | (self._sums != other._sums))


@dataclass(frozen=True, slots=True, eq=False)
class Hashed:
    """Rows by their hashes; `at` tells the side that read them where each is."""

    keys: Hashes
    rows: Hashes
    at: pa.Array

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def joined(cls, parts: Sequence[Hashed]) -> Hashed:
        """Return the rows of several parts, at least one."""
        return cls(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.rows for part in parts]),
            pa.concat_arrays([part.at for part in parts]),
        )

    def take(self, places: Indices) -> Hashed:
        """Return the rows at these places."""
        return Hashed(self.keys[places], self.rows[places], self.at.take(pa.array(places)))


def surplus(ours: Hashed, theirs: Hashed) -> tuple[Indices, Indices]:
    """Return the places of the rows of each side that the other lacks; of equal rows, those beyond the other's number."""
    _, number = np.unique(np.concatenate([_pairs(ours), _pairs(theirs)]), return_inverse=True)
    left, right = number[: len(ours)], number[len(ours) :]
    size = int(number.max(initial=-1)) + 1
    have, want = np.bincount(left, minlength=size), np.bincount(right, minlength=size)
    return _beyond(left, want), _beyond(right, have)


def _pairs(hashed: Hashed) -> npt.NDArray[np.void]:
    pairs = np.empty(len(hashed), [("k", np.uint64), ("h", np.uint64)])
    pairs["k"], pairs["h"] = hashed.keys, hashed.rows
    return pairs


def _beyond(numbers: npt.NDArray[np.int64], allowed: npt.NDArray[np.int64]) -> Indices:
    """Return the places of the values that come after the first allowed[value] equal ones."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    rank = np.arange(len(numbers)) - np.searchsorted(ordered, ordered, side="left")
    return np.sort(order[rank >= allowed[ordered]])
