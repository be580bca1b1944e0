"""Read and write Delta's schema JSON: types and column mapping (PROTOCOL.md, Column Mapping, mode name).

A mapped column's physical name, in data files and statistics, stays the same when its name in the schema changes, so a
rename or a drop changes only metadata.  A table is mapped when it first needs it; existing columns keep their names in
the files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from pubsub.protocol.type_contract import VARIANT

ID: Final = "delta.columnMapping.id"
PHYSICAL: Final = "delta.columnMapping.physicalName"
MODE: Final = "delta.columnMapping.mode"
#: The types that a column had before (type widening); files written then are read as the new type.
TYPE_CHANGES: Final = "delta.typeChanges"
MAX_ID: Final = "delta.columnMapping.maxColumnId"
# Metadata of columns that Delta fills.
_GENERATED: Final = "delta.generationExpression"
_IDENTITY: Final = "delta.identity."
Field = dict[str, Any]
# By column name: its physical name in data files, and its column id.
Mapped = Mapping[str, tuple[str, int]]


def fields(metadata: Mapping[str, Any]) -> list[Field]:
    """Return the columns of a `metaData` action as JSON fields."""
    found: list[Field] = json.loads(metadata["schemaString"])["fields"]
    return found


def schema_string(columns: Sequence[Field]) -> str:
    return json.dumps({"type": "struct", "fields": list(columns)}, ensure_ascii=False, separators=(",", ":"))


def field_of(field: pa.Field) -> Field:
    """Return an Arrow field as Delta's JSON.  Raises deltalake's errors for a type that Delta lacks."""
    from deltalake import Schema

    if field.type == VARIANT:
        return {"name": field.name, "type": "variant", "nullable": field.nullable, "metadata": {}}
    found: Field = json.loads(Schema.from_arrow(pa.schema([field.remove_metadata()])).to_json())["fields"][0]
    return found


def features(columns: pa.Schema) -> list[str]:
    """Return the table features that readers need for columns of these types."""
    kinds = [kind for field in columns for kind in _kinds(field.type)]
    wanted = {
        "timestampNtz": any(pa.types.is_timestamp(kind) and kind.tz is None for kind in kinds),
        "variantType": VARIANT in kinds,
    }
    return [name for name, needed in wanted.items() if needed]


def _kinds(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and all types within it."""
    yield kind
    if kind != VARIANT:
        for place in range(kind.num_fields):
            yield from _kinds(kind.field(place).type)


def mapping(columns: Sequence[Field]) -> Mapped:
    """Return the mapped columns."""
    return {
        column["name"]: (column["metadata"][PHYSICAL], int(column["metadata"][ID]))
        for column in columns
        if PHYSICAL in (column.get("metadata") or {})
    }


def stored_name(column: Field) -> str:
    """Return a column's name in data files."""
    return str((column.get("metadata") or {}).get(PHYSICAL, column["name"]))


def filled(columns: Sequence[Field]) -> list[str]:
    """Return the generated and identity columns, whose values Delta makes."""
    return _marked(columns, (_GENERATED, _IDENTITY))


def identities(columns: Sequence[Field]) -> list[str]:
    """Return the identity columns."""
    return _marked(columns, (_IDENTITY,))


def _marked(columns: Sequence[Field], prefixes: tuple[str, ...]) -> list[str]:
    return [
        column["name"] for column in columns if any(name.startswith(prefixes) for name in column.get("metadata") or {})
    ]


def nests(columns: Sequence[Field]) -> bool:
    """Return whether a column has nested fields."""
    return any(True for column in columns for _ in _structs(column["type"]))


def maps_nested(columns: Sequence[Field]) -> bool:
    """Return whether nested fields have other names in data files."""
    return any(
        inner["metadata"][PHYSICAL] != inner["name"]
        for column in columns
        for inner in _structs(column["type"])
        if PHYSICAL in (inner.get("metadata") or {})
    )


def map_columns(columns: Sequence[Field], greatest: int) -> int:
    """Map the unmapped columns under their present names.  `greatest`: the last id used; return the new one."""
    for column in columns:
        for field in (column, *_structs(column["type"])):
            metadata = field.setdefault("metadata", {})
            if PHYSICAL not in metadata:
                greatest += 1
                metadata |= {ID: greatest, PHYSICAL: field["name"]}
    return greatest


def map_new(column: Field, greatest: int) -> int:
    """Map a column that is added to a mapped table, under a new physical name; return the last id used."""
    greatest = map_columns([column], greatest)
    column["metadata"][PHYSICAL] = f"col-{uuid.uuid4()}"
    return greatest


def _structs(kind: Any) -> Iterator[Field]:
    """Yield the fields of all structs within a type."""
    if not isinstance(kind, dict):
        return
    match kind["type"]:
        case "struct":
            for field in kind["fields"]:
                yield field
                yield from _structs(field["type"])
        case "array":
            yield from _structs(kind["elementType"])
        case "map":
            yield from _structs(kind["keyType"])
            yield from _structs(kind["valueType"])
