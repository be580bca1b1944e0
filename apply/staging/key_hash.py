"""Hash keys, equal keys to equal numbers in every batch: large batches are divided by these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from apply.staging.row_codes import comparable
from pubsub.delta.files.comparable_bytes import canonical
from pubsub.protocol.arrow_arrays import contents
from pubsub.protocol.column_types import is_nested
from pubsub.protocol.rows import DELETE, UPDATE, Changes

Hashes = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]

_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: multiplying by it loses nothing
_HIGH: Final = np.uint64(32)


def key_hashes(changes: Changes, key: Sequence[str]) -> tuple[Hashes, Hashes]:
    """Return `key_words` reduced to 32 bits."""
    own, left = key_words(changes, key)
    return _high_half(own), _high_half(left)


def key_words(changes: Changes, key: Sequence[str]) -> tuple[Words, Words]:
    """Return for each change the hash of the key that it always touches, and of the key that its row had before it.

    `changes` has at least the columns of `key`.  The hash of a NULL is arbitrary: folding refuses it.
    """
    deletes = pa.array(changes.op == DELETE)
    with_old = (changes.op == UPDATE) & (changes.old_kind != 0)
    own = np.zeros(changes.count, np.uint64)
    left = np.zeros(changes.count, np.uint64)
    for name in key:
        new = changes.new[name]
        old = changes.old.get(name, pa.nulls(changes.count, new.type))
        new = pc.if_else(deletes, old, new)
        own = _mixed(own, _words(new))
        left = _mixed(left, _words(pc.if_else(pa.array(with_old), old, new)))
    return own * _FACTOR, left * _FACTOR


def _mixed(hashes: Words, words: Words) -> Words:
    mixed = (hashes ^ words) * _FACTOR
    return mixed ^ (mixed >> _HIGH)


def _high_half(hashes: Words) -> Hashes:
    return (hashes >> _HIGH).astype(np.uint32)


def _words(column: pa.Array) -> Words:
    """Map a column's values to numbers, equal where PostgreSQL finds the values equal."""
    kinds = pa.types
    if is_nested(column.type):
        column = canonical(column)
    elif kinds.is_floating(column.type):
        column = comparable(column, exact=False)
    elif kinds.is_date32(column.type):
        column = column.view(pa.int32())
    elif kinds.is_timestamp(column.type):
        column = column.view(pa.int64())
    if kinds.is_integer(column.type):
        numbers: Words = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
        return numbers
    if not (kinds.is_string(column.type) or kinds.is_binary(column.type)):
        column = column.cast(pa.string())
    return _of_bytes(column.fill_null(b"" if kinds.is_binary(column.type) else ""))


def _of_bytes(column: pa.Array) -> Words:
    """Evaluate each value's bytes as the coefficients of a polynomial, modulo 2^64."""
    data, offsets = contents(column)
    bounds = offsets.astype(np.int64)
    lengths = np.diff(bounds)
    longest = int(lengths.max(initial=0))
    powers = np.cumprod(np.full(longest + 1, _FACTOR, np.uint64), dtype=np.uint64)
    place = np.arange(data.size) - np.repeat(bounds[:-1], lengths)
    terms = (data.astype(np.uint64) + np.uint64(1)) * powers[place]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    words: Words = sums[bounds[1:]] - sums[bounds[:-1]]
    return words
