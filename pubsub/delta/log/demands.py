"""What a Delta table demands of its writers that our files do not do: such a table is written by Spark's statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pubsub.delta import schema_json as schema

# The features that our files serve, or that Delta's transaction serves for them, or that demand something only where a
# property or a column says so, which is looked for; a table with any other is left to Spark.
_KNOWN_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "clustering",
        "columnMapping",
        "deletionVectors",
        "domainMetadata",
        "generatedColumns",
        "identityColumns",
        "inCommitTimestamp",
        "invariants",
        "rowTracking",
        "timestampNtz",
        "typeWidening",
        "v2Checkpoint",
        "variantType",
    }
)
# With these the log alone does not tell the table's newest version: a catalog does, and decides what may go.
_OF_A_CATALOG: Final = frozenset({"catalogManaged", "catalogOwned-preview"})
# Table properties that demand something of each writer that our files do not do.
_DEMANDING: Final = {"delta.appendOnly": "true", "delta.enableChangeDataFeed": "true"}
_CONSTRAINT: Final = "delta.constraints."
# What a column's metadata may say without demanding anything of a writer; what else begins with `delta.` is a constraint.
_UNDEMANDING: Final = frozenset({schema.ID, schema.PHYSICAL, schema.TYPE_CHANGES})
# Spark's metadata of CHAR(n) and VARCHAR(n), whose lengths it checks.
_LENGTH: Final = "__CHAR_VARCHAR_TYPE_STRING"
# Types of cluster columns of which data files have statistics (data_files.has_bounds).
_CLUSTERED: Final = frozenset({"byte", "short", "integer", "long", "string", "date"})
# Types of partition columns whose values have one text that each reader reads back exactly (partitions.py).  A float has
# two zeros and NaN; engines differ in how they write binary.
_PARTITIONED: Final = _CLUSTERED | {"boolean", "timestamp", "timestamp_ntz"}


def managed_by_catalog(protocol: Mapping[str, Any]) -> bool:
    """Return whether a catalog manages the table, so that cleaning it is that catalog's affair."""
    return bool(_OF_A_CATALOG & {*(protocol.get("writerFeatures") or ()), *(protocol.get("readerFeatures") or ())})


def of_readers(protocol: Mapping[str, Any]) -> str | None:
    """Return what the table's protocol demands of readers that is not known here; None if nothing."""
    unknown = set(protocol.get("readerFeatures") or ()) - _KNOWN_FEATURES
    if protocol.get("minReaderVersion", 0) > 3:
        return "its protocol is newer"
    return f"it has the features {', '.join(sorted(unknown))}" if unknown else None


def of_properties(protocol: Mapping[str, Any], properties: Mapping[str, str]) -> str | None:
    """Return what the table's protocol and properties demand; None if nothing."""
    features = {*(protocol.get("writerFeatures") or ()), *(protocol.get("readerFeatures") or ())}
    if protocol.get("minReaderVersion", 0) > 3 or protocol.get("minWriterVersion", 0) > 7:
        return "its protocol is newer"
    if features - _KNOWN_FEATURES:
        return f"it has the features {', '.join(sorted(features - _KNOWN_FEATURES))}"
    for name, value in _DEMANDING.items():
        if properties.get(name, "").lower() == value:
            return f"{name} is set"
    for name in properties:
        if name.lower().startswith(_CONSTRAINT):
            return f"it has the constraint {name[len(_CONSTRAINT) :]}"
    return None


def of_columns(
    metadata: Mapping[str, Any], partition_columns: Sequence[str], cluster_columns: Sequence[str]
) -> str | None:
    """Return what the columns in the table's `metaData` action demand; None if nothing.

    `cluster_columns`: by their names in data files.
    """
    columns = schema.fields(metadata)
    mode = (metadata.get("configuration") or {}).get(schema.MODE, "none")
    # By id, a nested field would need its own in the data file.
    if mode not in ("none", "name", "id") or (schema.nests(columns) if mode == "id" else schema.maps_nested(columns)):
        return "its columns are mapped in another way"
    for column in columns:
        about = column.get("metadata") or {}
        if _LENGTH in about or any(name.startswith("delta.") for name in about.keys() - _UNDEMANDING):
            return f"column {column['name']} has constraints"
    kinds = {column["name"]: column["type"] for column in columns}
    for name in partition_columns:
        kind = kinds.get(name)
        if not (isinstance(kind, str) and (kind in _PARTITIONED or kind.startswith("decimal("))):
            return f"it is partitioned by {name}, a {kind}"
    stored = {schema.stored_name(column): column for column in columns}
    for name in cluster_columns:
        if name not in stored or str(stored[name]["type"]) not in _CLUSTERED:
            return f"it is clustered by {name}, of which data files written here have no statistics"
    return None
