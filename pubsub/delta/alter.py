"""Alter a Delta table as its publisher's table was altered: in one commit, rewriting data files only where needed.

    add a column filled with NULL         metadata
    rename or drop a column               metadata; the table uses column mapping from then on
    add a column with a value, or retype  metadata, and every data file rewritten with the value or type
    change the key or the name            metadata

The commit also sets the table property pubsub.attributes, which records the publisher's columns that the table has, so
that after a crash the alteration is known to be done.  Blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from pubsub.delta import data_files, schema
from pubsub.delta.arrow_writer import living_rows, remove_action, require_version
from pubsub.delta.data_files import Action
from pubsub.delta.log import DataFile, TableLog, is_local
from pubsub.delta.table import STATISTICS, Commit, TargetTable, described, needs_mapping
from pubsub.errors import NotInPrerequisiteState, Overtaken
from pubsub.protocol.types import repeated

_ATTEMPTS: Final = 10
# The properties that `described` returns.
_DESCRIBED: Final = ("pubsub.relation", "pubsub.key", STATISTICS)
_NOTHING: Final[dict[str, str | None]] = dict.fromkeys(_DESCRIBED)


@dataclass(frozen=True, slots=True)
class Alteration:
    """Changes to a table: drop, rename, retype, add, in this order.  Each step uses the column names that it finds.

    `drop`: columns to drop.  `rename`: old to new names.  `retype`: new types, to which each value can be cast.
    `add`: new columns, each with the value (a pyarrow Scalar) for existing rows.
    `key` and `relation`: the table's key and name afterwards.
    """

    key: tuple[str, ...]
    relation: str
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    retype: Mapping[str, Any] = field(default_factory=dict)
    add: tuple[tuple[pa.Field, Any], ...] = ()

    @property
    def rewrites(self) -> bool:
        """Whether data files are rewritten."""
        return bool(self.retype) or any(value.is_valid for _, value in self.add)


def alter(table: TargetTable, change: Alteration, properties: Mapping[str, str], record: Commit) -> TargetTable:
    """Commit `change` together with `properties`, and return the altered table.

    `record` tells from which LSN on the table is so.  Raises NotInPrerequisiteState for a table that only Spark can
    write; Overtaken if the table differs from `table` or holds another version than `record.before`; OSError.
    """
    log = _log_of(table)
    for _ in range(_ATTEMPTS):
        log.refresh()
        require_version(log, table.relation, record)
        if [column["name"] for column in schema.fields(log.metadata)] != table.schema.names:
            raise Overtaken(table.relation, "Its columns were altered.")
        actions, altered, made = _actions(log, table, change, properties)
        try:
            held = log.application_version(record.app_id)
            if held is not None:
                # Repeat the version unchanged, so that the log shows the commit as the subscription's own.
                actions.append(
                    {"txn": {"appId": record.app_id, "version": held, "lastUpdated": int(time.time() * 1000)}}
                )
            log.commit(
                actions,
                operation="ALTER TABLE",
                metrics={"numAddedFiles": len(made)},
                user_metadata=record.user_metadata,
                made=[log.table / action["add"]["path"] for action in made],
            )
            return altered
        except FileExistsError:
            continue
    raise NotInPrerequisiteState(
        f'could not alter the Delta table of "{table.relation}": other writers were first {_ATTEMPTS} times',
        sqlstate="40001",
    )


def rename(table: TargetTable, relation: str) -> TargetTable:
    """Return the table under the publisher's new name; update its property, too, if its log can be written here."""
    renamed = replace(table, relation=relation)
    if is_local(table.path):
        log = TableLog(table.path)
        for _ in range(_ATTEMPTS):
            log.refresh()
            if log.unsupported() is not None or log.properties.get("pubsub.relation") == relation:
                break
            try:
                log.commit(
                    _definition(log, renamed, schema.fields(log.metadata), {}),
                    operation="SET TBLPROPERTIES",
                    metrics={},
                    user_metadata=None,
                )
                break
            except FileExistsError:
                continue
    return renamed


def _log_of(table: TargetTable) -> TableLog:
    reason: str | None = "it lies in another file system"
    if is_local(table.path):
        log = TableLog(table.path)
        log.refresh()
        reason = log.unsupported()
        if reason is None:
            return log
    raise NotInPrerequisiteState(
        f'the Delta table of "{table.relation}" can not be altered as the publisher\'s table was: {reason}',
        detail=f'The Delta table lies at "{table.path}".',
        hint="Alter it by hand, or set schema_changes = refuse.",
    )


def _actions(
    log: TableLog, table: TargetTable, change: Alteration, properties: Mapping[str, str]
) -> tuple[list[Action], TargetTable, list[Action]]:
    """Return the commit's actions, the table after it, and the `add` actions of new files among the actions."""
    columns = _columns(log, table, change)
    altered = TargetTable(
        table.path, _arrow(table, change, columns), change.key, change.relation, schema.mapping(columns)
    )
    actions = _definition(log, altered, columns, properties)
    made: list[Action] = []
    if change.rewrites:
        now = int(time.time() * 1000)
        try:
            for file in log.files.values():
                made += data_files.write(altered, _rewritten(log, file, table, altered, change))
        except BaseException:
            data_files.remove(log.table / action["add"]["path"] for action in made)
            raise
        actions += [remove_action(file, now) for file in log.files.values()]
        actions += made
    return actions, altered, made


def _definition(
    log: TableLog, table: TargetTable, columns: list[schema.Field], properties: Mapping[str, str]
) -> list[Action]:
    """Return the actions that give the table this definition."""
    configuration = dict(log.properties)
    configuration.pop(STATISTICS, None)
    configuration |= {**described(table), **properties}
    if table.mapped:
        greatest = max(_greatest(log), *(number for _, number in table.mapped.values()))
        configuration |= {schema.MODE: "name", schema.MAX_ID: str(greatest)}
    metadata = {**log.metadata, "schemaString": schema.schema_string(columns), "configuration": configuration}
    actions: list[Action] = [{"metaData": metadata}]
    features = [*(["columnMapping"] if table.mapped else []), *schema.features(table.schema)]
    protocol = schema.protocol_with(log.protocol, features)
    if protocol != log.protocol:
        actions.append({"protocol": protocol})
    return actions


def for_copy(log: TableLog, table: TargetTable) -> tuple[TargetTable, list[Action]]:
    """Return the table as a copy of all rows must write it, and the definition actions for the copy's commit.

    There are none if the Delta table has the columns already.  Otherwise it gets exactly the publisher's columns, and
    loses any others together with its rows.
    """
    have = schema.fields(log.metadata)
    by_name = {column["name"]: column for column in have}
    columns = [schema.field_of(field) for field in table.schema]
    ours = "pubsub.key" in log.properties
    if all(_same(column, by_name.get(column["name"]), ours) for column in columns) and (
        not ours or {name: log.properties.get(name) for name in _DESCRIBED} == _NOTHING | described(table)
    ):
        return replace(table, mapped=schema.mapping(have)), []
    if log.properties.get(schema.MODE) == "name" or any(needs_mapping(field.name) for field in table.schema):
        greatest = _greatest(log)
        for column in columns:
            greatest = schema.map_new(column, greatest)
    table = replace(table, mapped=schema.mapping(columns))
    return table, _definition(log, table, columns, {})


def _same(column: schema.Field, other: schema.Field | None, ours: bool) -> bool:
    if other is None or column["type"] != other["type"]:
        return False
    return not ours or bool(column["nullable"] == other["nullable"])


def _columns(log: TableLog, table: TargetTable, change: Alteration) -> list[schema.Field]:
    """Return the columns after the change, as Delta's JSON fields."""
    columns = [column for column in schema.fields(log.metadata) if column["name"] not in change.drop]
    mapped = log.properties.get(schema.MODE) == "name"
    renamed = {old: new for old, new in change.rename.items() if old != new}
    greatest = _greatest(log)
    if not mapped and (change.drop or renamed or any(needs_mapping(field.name) for field, _ in change.add)):
        mapped = True
        # Count the numbers of dropped columns, too, so that no number is used twice.
        greatest = schema.map_columns(schema.fields(log.metadata), greatest)
        schema.map_columns(columns, 0)
    for column in columns:
        column["name"] = renamed.get(column["name"], column["name"])
        if column["name"] in change.retype:
            column["type"] = schema.field_of(pa.field("c", change.retype[column["name"]]))["type"]
    for one, _ in change.add:
        column = schema.field_of(one)
        if mapped:
            greatest = schema.map_new(column, greatest)
        columns.append(column)
    left = {change.rename.get(name, name) for name in table.key} - set(change.key)
    for column in columns:
        column["nullable"] = column["name"] not in change.key and (column["nullable"] or column["name"] in left)
    return columns


def _greatest(log: TableLog) -> int:
    return int(log.properties.get(schema.MAX_ID, 0))


def _arrow(table: TargetTable, change: Alteration, columns: list[schema.Field]) -> pa.Schema:
    """Return the columns after the change as an Arrow schema."""
    types: dict[str, Any] = {
        change.rename.get(field.name, field.name): field.type for field in table.schema if field.name not in change.drop
    }
    types |= change.retype
    types |= {field.name: field.type for field, _ in change.add}
    return pa.schema([pa.field(c["name"], types[c["name"]], nullable=c["nullable"]) for c in columns])


def _rewritten(
    log: TableLog, file: DataFile, table: TargetTable, altered: TargetTable, change: Alteration
) -> Iterator[Any]:
    """Yield the file's living rows as the altered table has them."""
    before = replace(table, mapped=schema.mapping(schema.fields(log.metadata)))
    for rows in living_rows(log, [file], before):
        rows = rows.drop_columns(list(change.drop)) if change.drop else rows
        rows = rows.rename_columns([change.rename.get(name, name) for name in rows.column_names])
        for one, value in change.add:
            rows = rows.append_column(one.name, repeated(value, rows.num_rows))
        yield rows.select(altered.schema.names).cast(altered.schema)
