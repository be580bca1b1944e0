"""The SQL condition that a row has one of some keys, which are given as Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from pubsub.sql.identifiers import quote_identifier, quote_literal


def is_one_of(keys: pa.Table, key_types: Mapping[str, str]) -> str:
    """Return the condition; `key_types`: the columns' SQL type names."""
    columns = [
        [f"{quote_literal(text)}::{key_types[name]}" for text in _texts(keys.column(name))]
        for name in keys.column_names
    ]
    values = ", ".join(f"({', '.join(row)})" for row in zip(*columns, strict=True))
    return f"({', '.join(map(quote_identifier, keys.column_names))}) IN (VALUES {values})"


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Return a key column's values as text for PostgreSQL."""
    if pa.types.is_binary(column.type):
        return [f"\\x{value.hex()}" for value in column.to_pylist()]
    return [str(text) for text in column.cast(pa.string()).to_pylist()]
