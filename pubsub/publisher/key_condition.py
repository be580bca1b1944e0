"""The SQL condition that a row has one of some keys, which are given as Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, islice
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pubsub.sql.identifiers import quote_identifier, quote_literal

if TYPE_CHECKING:
    from psycopg import Connection


def is_one_of(keys: pa.Table, key_types: Mapping[str, str], operators: Mapping[str, str]) -> str:
    """Return the condition.  `key_types`: the columns' SQL type names; `operators`: see `equality_operators`."""
    columns = [
        [f"{quote_literal(text)}::{key_types[name]}" for text in _texts(keys.column(name))]
        for name in keys.column_names
    ]
    values = ", ".join(f"({', '.join(row)})" for row in zip(*columns, strict=True))
    if not operators:
        return f"({', '.join(map(quote_identifier, keys.column_names))}) IN (VALUES {values})"
    # IN would look for operators by the search_path.  The values' columns must not hide those of the key.
    free = (name for name in map("v{}".format, count()) if name not in keys.column_names)
    sought = list(islice(free, keys.num_columns))
    same = [
        f"{quote_identifier(name)} {operators.get(name, '=')} {one}"
        for name, one in zip(keys.column_names, sought, strict=True)
    ]
    return f"EXISTS (SELECT FROM (VALUES {values}) AS sought ({', '.join(sought)}) WHERE {' AND '.join(same)})"


def equality_operators(connection: Connection, oid: int, key_types: Mapping[str, str]) -> dict[str, str]:
    """Return the operators by which the table's key finds the columns with types of extensions, qualified, by column.

    `key_types` as in `is_one_of`.  The operators of others are in pg_catalog, and found without a search_path.  Blocks.
    """
    if not any("." in name for name in key_types.values()):
        return {}
    found = connection.execute(_OPERATORS, [oid]).fetchall()
    return {column: f"OPERATOR({quote_identifier(schema)}.{name})" for column, schema, name in found}


# What btree takes for equal (strategy 3) in the operator classes of the primary key and the replica identity.
_OPERATORS: Final = """
SELECT a.attname, n.nspname, o.oprname
  FROM pg_catalog.pg_index i
 CROSS JOIN LATERAL ROWS FROM (
           pg_catalog.unnest(i.indkey::pg_catalog.int2[]), pg_catalog.unnest(i.indclass::pg_catalog.oid[])
       ) AS k (attnum, opclass)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
  JOIN pg_catalog.pg_opclass c ON c.oid = k.opclass
  JOIN pg_catalog.pg_am m ON m.oid = c.opcmethod AND m.amname = 'btree'
  JOIN pg_catalog.pg_amop e ON e.amopfamily = c.opcfamily AND e.amoplefttype = c.opcintype
   AND e.amoprighttype = c.opcintype AND e.amopstrategy = 3
  JOIN pg_catalog.pg_operator o ON o.oid = e.amopopr
  JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
 WHERE i.indrelid = %s AND (i.indisprimary OR i.indisreplident) AND n.nspname <> 'pg_catalog'
"""


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Return a key column's values as text for PostgreSQL."""
    if pa.types.is_binary(column.type):
        return [f"\\x{value.hex()}" for value in column.to_pylist()]
    return [str(text) for text in column.cast(pa.string()).to_pylist()]
