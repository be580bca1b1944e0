"""Mask columns that are read from a publisher, before anything looks at their values (the option mask).

Both ways into a table come through here: what a copy reads (tablesync.chunk_reader) and what the stream brings
(apply.staging.decode).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.masks import Masks
from pubsub.protocol.arrow_arrays import contents, nulls
from pubsub.sql.mask_rules import MaskRule

REDACTED: Final = "***"
_BLOCK: Final = 64
_DIGITS: Final = 64


def apply(masks: Masks, columns: Mapping[str, pa.Array], key: bytes) -> dict[str, pa.Array]:
    """Return the columns, those that are masked by what stands for their values; `key`: Masks.key."""
    return {
        name: column if (rule := masks.rules.get(name)) is None else mask(column, rule, key)
        for name, column in columns.items()
    }


def mask(values: pa.Array, rule: MaskRule, key: bytes) -> pa.Array:
    """Return what stands for the values, which are strings unless the rule is null."""
    match rule.name:
        case "null":
            return nulls(len(values), values.type)
        case "redact":
            return pc.if_else(values.is_valid(), REDACTED, pa.scalar(None, pa.string()))
        case "truncate":
            return pc.utf8_slice_codeunits(values, 0, rule.length)
        case "hash":
            return _hashed(values, key)


def _hashed(values: pa.StringArray, key: bytes) -> pa.StringArray:
    """Return the HMAC-SHA-256 of each value, in hexadecimal digits; of equal values once."""
    encoded = values.dictionary_encode()
    data, offsets = contents(encoded.dictionary)
    text, bounds = memoryview(data), offsets.tolist()  # type: ignore[arg-type]
    if len(key) > _BLOCK:
        key = hashlib.sha256(key).digest()
    padded = key.ljust(_BLOCK, b"\0")
    # RFC 2104.  The state after the key's block is made once.
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))
    found = bytearray()
    start = bounds[0]
    for end in bounds[1:]:
        within = inner.copy()
        within.update(text[start:end])
        whole = outer.copy()
        whole.update(within.digest())
        found += whole.digest()
        start = end
    count = len(bounds) - 1
    digits = pa.py_buffer(bytes(found).hex().encode())
    places = pa.py_buffer(np.arange(0, count + 1, dtype=np.int32) * _DIGITS)
    return pa.Array.from_buffers(pa.string(), count, [None, places, digits]).take(encoded.indices)
