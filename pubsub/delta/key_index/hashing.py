"""Hash keys of any type to 80 bits, whole columns at a time.

    high   16 bits, in a number of 64: the first bits of a key's bucket
    low    64 bits; for a key of one integer column no two keys have the same

The hash depends on a secret of the node, so nobody can choose keys that have the same one.  Among 100 million keys a given
other key has the hash of one of them with a probability of 1e-16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pubsub.protocol.arrow_arrays import Indices, contents

Words: TypeAlias = npt.NDArray[np.uint64]

HIGH_BITS: Final = 16
LOW_BITS: Final = 64
# The constants of MurmurHash3's fmix64: odd, so multiplying by them loses nothing.
_FIRST: Final = np.uint64(0xFF51AFD7ED558CCD)
_SECOND: Final = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT: Final = np.uint64(33)
_WORD: Final = 8
# The bytes of a word that belong to a value of so many bytes.
_MASKS: Final = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)


@dataclass(frozen=True, slots=True)
class Secret:
    """A node's secret number; runs that were made with another one are of no use to it."""

    seeds: tuple[np.uint64, np.uint64]
    fingerprint: str

    @classmethod
    def of(cls, data: bytes) -> Secret:
        """Return the secret that random bytes stand for."""
        digest = hashlib.sha256(data).digest()
        low, high = np.frombuffer(digest[:16], np.uint64)
        return cls((low, high), hashlib.sha256(digest).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class Hashes:
    """The hashes of keys, and the number of the key that each belongs to: keys with a NULL have none."""

    high: Words
    low: Words
    which: Indices

    def __len__(self) -> int:
        return len(self.low)


def can_hash(kind: pa.DataType) -> bool:
    """Return whether keys of such a column can be hashed: where equal values have the same bytes."""
    kinds = pa.types
    return bool(
        kinds.is_integer(kind)
        or kinds.is_boolean(kind)
        or kinds.is_date32(kind)
        or kinds.is_timestamp(kind)
        or kinds.is_decimal128(kind)
        or kinds.is_string(kind)
        or kinds.is_binary(kind)
    )


def hash_keys(columns: Sequence[pa.Array], secret: Secret) -> Hashes:
    """Hash the keys whose columns these are.  `can_hash` must hold for each."""
    count = len(columns[0])
    which = np.arange(count)
    if any(column.null_count for column in columns):
        there = np.logical_and.reduce([np.asarray(column.is_valid()) for column in columns])
        which = np.flatnonzero(there)
        columns = [column.filter(pa.array(there)) for column in columns]
    low, high = (np.full(len(which), seed, np.uint64) for seed in secret.seeds)
    for column in columns:
        for words, rows in _words(column):
            if rows is None:
                low, high = _mixed(low, words), _mixed(high, words)
            else:
                low[rows], high[rows] = _mixed(low[rows], words), _mixed(high[rows], words)
    return Hashes(high >> np.uint64(LOW_BITS - HIGH_BITS), low, which)


def _mixed(hashes: Words, words: Words) -> Words:
    """Mix a word into each hash; different words into different hashes."""
    mixed = hashes ^ words
    mixed ^= mixed >> _SHIFT
    mixed *= _FIRST
    mixed ^= mixed >> _SHIFT
    mixed *= _SECOND
    mixed ^= mixed >> _SHIFT
    return mixed


def _words(column: pa.Array) -> Iterator[tuple[Words, Indices | None]]:
    """Yield the values' bytes eight at a time, with the rows that still have some (None: all)."""
    kinds = pa.types
    if kinds.is_string(column.type) or kinds.is_binary(column.type):
        yield from _words_of_bytes(column)
        return
    if kinds.is_decimal128(column.type):
        pairs = np.frombuffer(column.buffers()[1], np.uint64)[2 * column.offset : 2 * (column.offset + len(column))]
        yield pairs[0::2], None
        yield pairs[1::2], None
        return
    if kinds.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif kinds.is_date32(column.type):
        column = column.view(pa.int32())
    elif kinds.is_timestamp(column.type):
        column = column.view(pa.int64())
    yield column.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64), None


def _words_of_bytes(column: pa.Array) -> Iterator[tuple[Words, Indices | None]]:
    """Yield the lengths, and then the bytes: so no value is the beginning of another."""
    data, offsets = contents(column)
    lengths = np.diff(offsets).astype(np.int64)
    yield lengths.view(np.uint64), None
    if len(lengths) and lengths.min() == lengths.max():
        width = int(lengths[0])
        filled = np.zeros((len(lengths), -(-width // _WORD) * _WORD), np.uint8)
        filled[:, :width] = data.reshape(len(lengths), width)
        for words in filled.view(np.uint64).T:
            yield words, None
        return
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    at_any_byte: Words = np.ndarray((len(padded) - _WORD + 1,), np.uint64, padded.data, strides=(1,))
    rows = np.flatnonzero(lengths)
    starts, left = offsets[:-1][rows].astype(np.int64), lengths[rows]
    while len(rows):
        yield at_any_byte[starts] & _MASKS[np.minimum(left, _WORD)], rows
        more = left > _WORD
        rows, starts, left = rows[more], starts[more] + _WORD, left[more] - _WORD
