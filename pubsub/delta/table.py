"""A Delta table of the warehouse: its location, its creation, and how much of the stream it holds.

The table is its own replication origin: each commit records (application id, end LSN) as a SetTransaction, so data and
position become durable together.  Reading it needs no JVM, as the deltalake package reads the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as of_dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa

from pubsub.delta import change_rows, history, metadata_columns, soft_deletes, versions
from pubsub.delta import schema_json as delta_schema
from pubsub.delta.log import table_log
from pubsub.delta.log.deltalake_turns import ask
from pubsub.delta.log.row_count import count_rows
from pubsub.delta.log.transactions import Transactions, commit_retrying
from pubsub.delta.places import is_local, is_reached, place
from pubsub.errors import (
    FeatureNotSupported,
    NotInPrerequisiteState,
    Overtaken,
    PubsubError,
    UndefinedTable,
)
from pubsub.masks import NO_MASKS, Masks
from pubsub.protocol import column_types
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.type_contract import VARIANT
from pubsub.row_filters import RowFilter
from pubsub.sql.identifiers import quote_for_spark as quote
from pubsub.sql.source import Source

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from pubsub.sql.layout_rules import Truncate

_T = TypeVar("_T")

HISTORY: Final = "pubsub.history"
"""The property of a table in mode history: what identifies a row of the publisher's table, as JSON."""
DELETES: Final = "pubsub.deletes"
"""The property of a table whose deleted rows stay: "soft"."""
TRUNCATE: Final = "pubsub.truncate"
"""The property of a table to which a TRUNCATE does something else than to empty it: what (Truncate)."""
MODE: Final = "pubsub.mode"
"""The property of a table that keeps every version of its rows: "scd2"."""
METADATA: Final = "pubsub.metadata"
"""The property of a table with metadata columns: their kinds and names, as JSON."""
SOURCE: Final = "pubsub.source"
"""The property of a table whose rows are those of several sources: the column that says whose they are (sources)."""
STATISTICS: Final = "delta.dataSkippingStatsColumns"
CHECKPOINT_INTERVAL: Final = "delta.checkpointInterval"
# Delta's own interval is 10: at a commit a second its checkpoints would take most of the time.
_CHECKPOINT_INTERVAL: Final = 100


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A replicated table.  `schema`: in column order, NOT NULL as non-nullable; `key`: columns that identify a row."""

    path: str
    schema: pa.Schema
    key: tuple[str, ...]
    relation: str
    """The qualified name at the publisher, for messages and the table's properties."""
    mapped: delta_schema.Mapped = of_dataclass(default_factory=dict)
    """The columns that have other names in data files."""
    partitioned_by: tuple[str, ...] = ()
    """The partition columns, which data files lack; known only where our files are read or written (file_rows.laid_out)."""
    clustered_by: tuple[str, ...] = ()
    """The cluster columns (CLUSTER BY), whose statistics data files need; known as the partition columns are."""
    by_id: bool = False
    """Whether the mapped columns are known in data files by their ids instead of their names."""
    history: tuple[str, ...] | None = None
    """In mode history (change_rows): the columns that identify a row of the publisher's table.  The table has no `key` then."""
    soft_deletes: bool = False
    """Whether deleted rows stay, marked (soft_deletes).  The table has a `key` then."""
    truncate: Truncate = "follow"
    """What a TRUNCATE does to it."""
    versions: bool = False
    """In mode scd2 (versions): whether every version of a row stays.  The table has a `key` then, and `truncate` is "follow"."""
    metadata: metadata_columns.Metadata = ()
    """The columns that say which change made a row.  The table has a `key` then."""
    closed: bool = False
    """Whether the publisher's columns are known by their numbers alone, since some may be left out, or have other names here; known
    only where they are read."""
    masks: Masks = NO_MASKS
    """The columns that do not have the publisher's values (the option mask); known as `closed` is."""
    where: RowFilter | None = None
    """The condition of the publisher's rows that it has (the option where), None: it has all; known as `closed` is."""
    source: Source | None = None
    """The rows of the Delta table that are this table's, by whose column it is partitioned; None: all are (sources)."""
    others: frozenset[str] = frozenset()
    """The columns that only other sources have, NULL in this one's rows; known as `closed` is."""
    sent: frozenset[str] = frozenset()
    """The columns whose values the publisher sends; known as `closed` is, and empty for a table that joined without a copy."""
    outdated: frozenset[str] = frozenset()
    """The columns that are to leave the Delta table when it is copied; known only where it is."""

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row of the publisher's table; () if there are none."""
        return self.key if self.history is None else self.history

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns that tell its rows apart, those of the past among them; () if there are none."""
        return (*self.key, versions.VALID_FROM_LSN) if self.versions else self.key

    @property
    def gives_way(self) -> bool:
        """Whether a row that stands under the key of one that arrives leaves, since a TRUNCATE may have left it there."""
        return self.truncate == "ignore" and bool(self.key)

    @property
    def keeps_past(self) -> bool:
        """Whether it has what the publisher's table had before, which no copy may take away."""
        return self.history is not None or self.versions

    @property
    def mark(self) -> str | None:
        """The column that is NULL in rows which the publisher's table has, and in no others; None: there are no others."""
        return _mark(self.versions, self.soft_deletes)

    @property
    def whose(self) -> str | None:
        """The source whose rows the table's are; None: it has no sources."""
        return None if self.source is None else self.source.value

    @property
    def marks_truncated(self) -> bool:
        """Whether rows stay that a TRUNCATE takes from the publisher's table, marked."""
        return self.truncate == "soft" or self.versions

    @property
    def bounded(self) -> tuple[str, ...]:
        """The columns of which data files have the least and the greatest value, if their types allow it."""
        first = () if self.history is None else (change_rows.LSN, *self.history)
        names = dict.fromkeys((*first, *self.key, *self._own, *self.clustered_by))
        return tuple(name for name in names if name not in self.partitioned_by)

    @property
    def replicated(self) -> list[str]:
        """The columns that are not this project's own (change_rows, metadata_columns, soft_deletes, versions, sources)."""
        own = self._own if self.history is None else change_rows.NAMES
        source = None if self.source is None else self.source.column
        return [name for name in self.schema.names if name not in own and name != source]

    @property
    def _own(self) -> tuple[str, ...]:
        """The columns that a mirror has for itself."""
        marking = versions.NAMES if self.versions else (soft_deletes.DELETED_AT,) if self.soft_deletes else ()
        return (*(name for _, name in self.metadata), *marking)

    def identified_by(self, names: tuple[str, ...]) -> TargetTable:
        """Return the table with these columns as its identity."""
        return replace(self, key=names) if self.history is None else replace(self, history=names)

    def stored_name(self, name: str) -> str:
        """Return a column's name in data files."""
        return self.mapped[name][0] if name in self.mapped else name

    @property
    def stored_schema(self) -> pa.Schema:
        """The schema of the data files."""
        if not self.mapped and not self.partitioned_by:
            return self.schema
        inside = [field for field in self.schema if field.name not in self.partitioned_by]
        return pa.schema([self._stored(field) if self.mapped else field for field in inside])

    def _stored(self, field: pa.Field) -> pa.Field:
        name, number = self.mapped[field.name]
        return field.with_name(name).with_metadata({"PARQUET:field_id": str(number)})


@dataclass(frozen=True, slots=True)
class Commit:
    """The identity under which a commit is recorded.  `first`, `last`: the end LSNs of its first and last transaction.

    `until`: below this LSN the table matches no state of the publisher, as it was copied under several snapshots
    (tablesync.window).  `previous`: the table's version under `app_id` for which the commit was staged (None: it has
    none); at any other version the commit is refused (Overtaken).  `copied`: the commit replaces all rows by a copy.
    `source`: whose rows it changes, in a table of several sources.
    """

    app_id: str
    first: Lsn
    last: Lsn
    until: Lsn | None = None
    previous: Lsn | None = None
    copied: bool = False
    source: str | None = None

    @property
    def user_metadata(self) -> str:
        """The commit's userMetadata (pubsub.node.snapshot reads it)."""
        until = {} if self.until is None else {"until": str(self.until)}
        copied = {"copied": True} if self.copied else {}
        source = {} if self.source is None else {"source": self.source}
        return json.dumps({"first": str(self.first), "last": str(self.last), **until, **copied, **source})


def application_id(node_id: str, subid: int, relid: int, generation: int) -> str:
    """Return the id under which a table records its position: the same for the copy, the catch-up and apply."""
    return f"pubsub/{node_id}/{subid}/{relid}/{generation}"


def moved_on(held: int | None, record: Commit) -> str:
    """Return the detail of an Overtaken error: what the table holds, and what the commit expected."""
    return f"It holds everything up to {Lsn(held or 0)}; the commit was worked out for {Lsn(record.previous or 0)}."


def not_at_version(table: TargetTable, held: int | None, record: Commit) -> PubsubError:
    """Return the error for a table that holds another version than `record.previous`: Overtaken if it is a later one.

    Otherwise the table has lost commits, which its subscription would not make again: DataCorrupted.
    """
    if (held or 0) < (record.previous or 0):
        return table_log.went_back(table.path, moved_on(held, record))
    return Overtaken(table.relation, moved_on(held, record))


def is_of_later_copy(other: str, app_id: str) -> bool:
    """Return whether the application id `other`, a copy's or a chunk's, is of a later copy of `app_id`'s table."""
    generation = app_id.rpartition("/")[2]
    return generation.isdecimal() and generation_of(other, app_id) > int(generation)


def generation_of(other: str, app_id: str) -> int:
    """Return the generation of the application id `other`, a copy's or a chunk's; 0 if it is not of `app_id`'s table."""
    table = app_id.rpartition("/")[0]
    generation = other.removeprefix(f"{table}/").split("/", 1)[0] if other.startswith(f"{table}/") else ""
    return int(generation) if generation.isdecimal() else 0


def exists(path: str) -> bool:
    """Return whether there is a Delta table at `path`."""
    if not is_local(path) and is_reached(path):
        # deltalake would keep every other thread waiting for the store.
        return any(history.is_of_log(file.name) for file in (place(path) / "_delta_log").glob("*"))
    from deltalake import DeltaTable

    return bool(DeltaTable.is_deltatable(path))


def opened(path: str) -> DeltaTable:
    """Open the newest version of the table at `path` with the deltalake package.  Raises as `_ask` does."""
    return _ask(path, lambda table: table)


def _ask(path: str, question: Callable[[DeltaTable], _T]) -> _T:
    """Return what the deltalake package answers for the newest version of the table at `path`.

    If deltalake cannot read it, TableLog does: that corrects a commit of an earlier release, or raises DataCorrupted
    with a hint.  Raises UndefinedTable if there is no table, and as `deltalake_turns.ask` does.
    """
    from deltalake.exceptions import DeltaError

    try:
        return ask(path, question)
    except DeltaError:
        if not is_reached(path):
            raise
        table_log.TableLog(path).refresh()
        return ask(path, question)


def committed_lsn(path: str, app_id: str) -> Lsn | None:
    """Return the end LSN of the table's last transaction under `app_id` in its newest version; None if it has none.

    TableLog.application_version answers for the version that a commit is worked out for.  To open a log for this question
    alone it would replay every file (some hundred times as long where there are many), and it does not reach tables that
    only Spark reaches; deltalake does.
    """
    if not exists(path):
        return None
    version = _ask(path, lambda table: table.transaction_version(app_id))
    return None if version is None else Lsn(version)


def properties(path: str) -> Mapping[str, str]:
    """Return the table's properties.  Raises UndefinedTable if there is no table at `path`."""
    if not exists(path):
        raise UndefinedTable(f'Delta table "{path}" does not exist')
    return _properties(opened(path))


def _properties(table: DeltaTable) -> Mapping[str, str]:
    return {k: v or "" for k, v in table.metadata().configuration.items()}


def has_files(path: str) -> bool:
    """Return whether the table's newest version has data files, and so may hold rows."""
    return _ask(path, lambda table: bool(table.file_uris()))


def filled_columns(path: str) -> list[str]:
    """Return the table's generated and identity columns, whose values Delta makes."""
    return delta_schema.filled(_fields(path))


def identity_columns(path: str) -> list[str]:
    """Return the table's identity columns."""
    return delta_schema.identities(_fields(path))


def _fields(path: str) -> list[delta_schema.Field]:
    """Return the table's columns as JSON."""
    found: list[delta_schema.Field] = json.loads(opened(path).schema().to_json())["fields"]
    return found


def partition_fields(path: str) -> list[pa.Field]:
    """Return the table's partition columns."""
    schema = read_schema(path)
    return [schema.field(name) for name in opened(path).metadata().partition_columns]


def row_count(path: str) -> int:
    """Return the number of rows, from the log, or by counting them if it does not know.  Raises as `query` does."""
    known = count_rows(path)
    if known is not None:
        return known
    return int(query(path, "SELECT count(*) AS n FROM t").read_all().column("n")[0].as_py())


def query(path: str, statement: str) -> pa.RecordBatchReader:
    """Run a SELECT over the table `t`, the newest version of the one at `path`, by the deltalake package.

    Raises FeatureNotSupported if the package lacks a feature that the table's readers need.
    """
    from deltalake import QueryBuilder
    from deltalake.exceptions import DeltaError

    table = opened(path)
    try:
        return pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(statement))
    except DeltaError as error:
        if "Unsupported table features" not in str(error):
            raise
        raise FeatureNotSupported(
            f'the Delta table at "{path}" has features that only Spark reads', detail=str(error)
        ) from error


def create_empty(transactions: Transactions, table: TargetTable, identity: Mapping[str, str]) -> bool:
    """Create the Delta table of `table` without a Spark job if there is none; return False if that takes a statement.

    One of several sources may have been made by another since, whom the caller joins.

    `identity`: the properties pubsub.node, pubsub.subscription and pubsub.publisher, and others that it shall have.
    Raises NotInPrerequisiteState if an existing table lacks a column or has another type for it, SerializationFailure.
    """
    if not is_reached(table.path) or _needs_mapping(table):
        return False

    def commit() -> None:
        # After a conflict another has made it just now; or Delta still knew a table that was there before, and has forgotten it.
        if exists(table.path):
            if table.source is None:
                check_columns(table)
            return
        columns = delta_schema.schema_string([delta_schema.field_of(field) for field in table.schema])
        table_log.create(
            transactions,
            table.path,
            columns,
            delta_schema.features(table.schema),
            _settings(table, identity),
            table.partitioned_by,
        )

    commit_retrying(f'create the Delta table of "{table.relation}"', commit)
    return True


def create(spark: SparkSession, table: TargetTable, identity: Mapping[str, str]) -> None:
    """Create the table as `create_empty` does, but by Spark's statement, and so partitioned or clustered as `table` says."""
    if exists(table.path):
        if table.source is None:
            check_columns(table)
        return
    from delta.tables import DeltaTable

    builder = DeltaTable.createIfNotExists(spark).location(table.path)
    for field in table.schema:
        builder = builder.addColumn(field.name, column_types.spark_ddl(field.type), nullable=field.nullable)
    for name, value in _settings(table, identity).items():
        builder = builder.property(name, value)
    if table.partitioned_by:
        builder = builder.partitionedBy(*table.partitioned_by)
    if table.clustered_by:
        builder = builder.clusterBy(*table.clustered_by)
    builder.execute()


def _settings(table: TargetTable, identity: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a new table."""
    settings = dict(identity) | described(table)
    settings["delta.enableDeletionVectors"] = "true"
    settings.setdefault(CHECKPOINT_INTERVAL, str(_CHECKPOINT_INTERVAL))
    if _needs_mapping(table):
        settings[delta_schema.MODE] = "name"
    return settings


def mode_of(table: TargetTable) -> dict[str, str]:
    """Return the properties that say which columns of its own the table has, and what stays in it; {} if nothing is to be said."""
    if table.history is not None:
        return {HISTORY: json.dumps(list(table.history), ensure_ascii=False)}
    metadata = {METADATA: json.dumps(table.metadata, ensure_ascii=False)} if table.metadata else {}
    truncate = {TRUNCATE: table.truncate} if table.truncate != "follow" else {}
    mode = {MODE: "scd2"} if table.versions else {}
    source = {SOURCE: table.source.column} if table.source is not None else {}
    return metadata | truncate | mode | source | ({DELETES: "soft"} if table.soft_deletes else {})


def mark_of(found: Mapping[str, str]) -> str | None:
    """Return TargetTable.mark of a Delta table with these properties."""
    return _mark(found.get(MODE) == "scd2", found.get(DELETES) == "soft")


def _mark(keeps_versions: bool, keeps_deleted: bool) -> str | None:
    return versions.VALID_TO_LSN if keeps_versions else soft_deletes.DELETED_AT if keeps_deleted else None


def described(table: TargetTable) -> dict[str, str]:
    """Return the properties that follow from the table's name, columns and key."""
    settings = {
        "pubsub.relation": table.relation,
        "pubsub.key": json.dumps(list(table.key), ensure_ascii=False),
    }
    settings |= mode_of(table)
    # Delta keeps none of partition columns, and demands them of cluster columns.
    ordered = [name for name in table.bounded if _has_statistics(table.schema.field(name).type)]
    if ordered:
        settings[STATISTICS] = ",".join(map(quote, ordered))
    return settings


def _needs_mapping(table: TargetTable) -> bool:
    return any(needs_mapping(field.name) for field in table.schema)


def needs_mapping(name: str) -> bool:
    """Return whether the name is not allowed for a column in data files, so that the column must be mapped."""
    return bool(column_types.UNSAFE_NAME & set(name))


def can_partition(data_type: pa.DataType) -> bool:
    """Return whether a column of this type can partition a table that our files go to (log/demands.py)."""
    kinds = pa.types
    of_values = (kinds.is_integer, kinds.is_string, kinds.is_date32, kinds.is_boolean, kinds.is_timestamp)
    return any(is_kind(data_type) for is_kind in of_values)


def can_cluster(data_type: pa.DataType) -> bool:
    """Return whether Delta takes a column of this type into CLUSTER BY."""
    return _has_statistics(data_type) and not pa.types.is_nested(data_type)


def _has_statistics(data_type: pa.DataType) -> bool:
    """Return whether Delta accepts such a column for statistics (SkippingEligibleDataType)."""
    return not (pa.types.is_boolean(data_type) or pa.types.is_binary(data_type))


def read_schema(path: str) -> pa.Schema:
    """Return the schema of the Delta table at `path` in Arrow's types, the same as column_types.delta_type returns."""
    return _read_columns(path)[0]


def described_at(path: str, version: int) -> tuple[pa.Schema, delta_schema.Mapped, Mapping[str, str]]:
    """Return the schema of one version of the table, as `read_schema` does, the columns with other names in files, and
    its properties.

    Raises deltalake's errors if the log no longer has the version.
    """
    table = ask(path, lambda table: table, version)
    return *_columns(table), _properties(table)


def _read_columns(path: str) -> tuple[pa.Schema, delta_schema.Mapped]:
    return _columns(opened(path))


def _columns(table: DeltaTable) -> tuple[pa.Schema, delta_schema.Mapped]:
    found = table.schema()
    arrow = pa.schema(found.to_arrow())
    schema = pa.schema([pa.field(f.name, f.type, f.nullable) for f in arrow])
    return schema, delta_schema.mapping(json.loads(found.to_json())["fields"])


def spark_ddl(data_type: pa.DataType) -> str:
    """Return a type in Spark's DDL, for a replicated column or one that only the target has.

    Raises FeatureNotSupported for a type that is not possible for either.
    """
    kinds = pa.types
    if kinds.is_list(data_type):
        return f"ARRAY<{spark_ddl(data_type.value_type)}>"
    if kinds.is_map(data_type):
        return f"MAP<{spark_ddl(data_type.key_type)}, {spark_ddl(data_type.item_type)}>"
    if kinds.is_struct(data_type) and data_type != VARIANT:
        return f"STRUCT<{', '.join(f'{quote(field.name)}: {spark_ddl(field.type)}' for field in data_type)}>"
    if kinds.is_int8(data_type):
        return "TINYINT"
    try:
        return column_types.spark_ddl(data_type)
    except KeyError:
        raise FeatureNotSupported(f"a Delta table with a column of type {data_type} cannot be replicated to") from None


def check_exists(path: str, relation: str) -> None:
    """Raise UndefinedTable if there is no table."""
    if not exists(path):
        raise UndefinedTable(
            f'the Delta table of "{relation}" does not exist',
            detail=f'There is none at "{path}".',
            hint=f"ALTER SUBSCRIPTION … RESYNC TABLE {relation} makes it anew.",
        )


def load(path: str, relation: str, definition: str | None) -> TargetTable:
    """Load the table from its own log; the catalog's `definition`, or else the table's properties, name the key.

    Raises UndefinedTable if there is no table.
    """
    check_exists(path, relation)
    schema, mapped = _read_columns(path)
    table = TargetTable(path, schema, (), relation, mapped)
    if definition is None:
        return as_said(table, properties(path))
    known = json.loads(definition)
    history = known.get("history")
    return replace(
        table,
        key=tuple(known["key"]),
        history=None if history is None else tuple(history),
        soft_deletes=known.get("deletes") == "soft",
        truncate=known.get("truncate", "follow"),
        versions=known.get("mode") == "scd2",
        metadata=_pairs(known.get("metadata", ())),
        source=Source(*known["source"]) if "source" in known else None,
    )


def as_said(table: TargetTable, properties: Mapping[str, str]) -> TargetTable:
    """Return the table with the mode and the key that its properties name."""
    history = properties.get(HISTORY)
    return replace(
        table,
        key=tuple(json.loads(properties["pubsub.key"])),
        history=None if history is None else tuple(json.loads(history)),
        soft_deletes=properties.get(DELETES) == "soft",
        truncate=_truncate(properties.get(TRUNCATE)),
        versions=properties.get(MODE) == "scd2",
        metadata=_pairs(json.loads(properties.get(METADATA, "[]"))),
    )


def _truncate(said: str | None) -> Truncate:
    return "ignore" if said == "ignore" else "soft" if said == "soft" else "follow"


def _pairs(found: Iterable[Sequence[str]]) -> metadata_columns.Metadata:
    return tuple((kind, name) for kind, name in found)


def fits(table: TargetTable) -> bool:
    """Return whether the existing Delta table has all the columns, with their types, and none that is to leave it."""
    have = {field.name: field.type for field in read_schema(table.path)}
    return not table.outdated & have.keys() and all(have.get(field.name) == field.type for field in table.schema)


def check_columns(table: TargetTable) -> None:
    """Raise NotInPrerequisiteState if the existing table cannot take the publisher's columns.

    Columns match by name; one that the publisher lacks stays and gets NULL (relation.c: logicalrep_rel_open).
    """
    have = {field.name: field for field in read_schema(table.path)}
    never_null = [field.name for field in have.values() if not field.nullable]
    if table.keeps_past and never_null:
        kind = "a history" if table.history is not None else "a table with mode = scd2"
        raise NotInPrerequisiteState(
            f'column "{never_null[0]}" of the Delta table for "{table.relation}" is NOT NULL, which no column of {kind} can be',
            detail=f'The Delta table lies at "{table.path}".',
        )
    missing = [field.name for field in table.schema if field.name not in have]
    if missing:
        listed = ", ".join(f'"{name}"' for name in missing)
        raise NotInPrerequisiteState(
            f'logical replication target relation "{table.relation}" is missing replicated columns: {listed}',
            detail=f'The Delta table lies at "{table.path}".',
            hint="Add the columns to the Delta table, or give the subscription another target.",
        )
    for field in table.schema:
        if have[field.name].type != field.type:
            raise NotInPrerequisiteState(
                f'column "{field.name}" of the Delta table for "{table.relation}" has type {have[field.name].type}, '
                f"the publisher's values need {field.type}",
                detail=f'The Delta table lies at "{table.path}".',
            )
