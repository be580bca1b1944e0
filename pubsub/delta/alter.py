"""Alter a Delta table as its publisher's table was altered: in one commit, rewriting data files only where needed.

    add a column filled with NULL         metadata
    rename or drop a column               metadata; the table uses column mapping from then on
    add a column with a value, or retype  metadata, and every data file rewritten with the value or type
    change the key or the name            metadata

The commit also sets the table property pubsub.attributes, which records the publisher's columns that the table has, so
that after a crash the alteration is known to be done.  Blocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta import change_rows
from pubsub.delta import schema_json as schema
from pubsub.delta.files import data_files
from pubsub.delta.files.file_rows import laid_out, live_rows
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog, asking_for, clustered_by
from pubsub.delta.log.transactions import Action, Conflict, Operation, Transactions, commit_retrying, transaction
from pubsub.delta.past import another_history, goes_on_keeping
from pubsub.delta.places import is_reached
from pubsub.delta.sources import other_type, own_files, part_of, pass_others
from pubsub.delta.table import (
    DELETES,
    HISTORY,
    METADATA,
    MODE,
    SOURCE,
    STATISTICS,
    TRUNCATE,
    Commit,
    TargetTable,
    as_said,
    can_cluster,
    described,
    needs_mapping,
    read_schema,
)
from pubsub.delta.writers.arrow_writer import remove_action, require_version
from pubsub.errors import NotInPrerequisiteState, Overtaken, SerializationFailure
from pubsub.protocol.arrow_arrays import repeated
from pubsub.protocol.column_types import folded_name

_ATTEMPTS: Final = 10
# The properties that `described` returns.
_DESCRIBED: Final = ("pubsub.relation", "pubsub.key", HISTORY, DELETES, TRUNCATE, MODE, METADATA, SOURCE, STATISTICS)
# Those that the first source has given to a table of several: others may write the key's columns in another order.
_OF_FIRST: Final = ("pubsub.relation", "pubsub.key")
_NOTHING: Final[dict[str, str | None]] = dict.fromkeys(_DESCRIBED)


@dataclass(frozen=True, slots=True)
class Alteration:
    """Changes to a table: drop, rename, retype, add, in this order.  Each step uses the column names that it finds.

    `drop`: columns to drop.  `rename`: old to new names.  `retype`: new types, to which each value can be cast.
    `add`: new columns, each with the value for existing rows.
    `key` and `relation`: the table's key and name afterwards.
    """

    key: tuple[str, ...]
    relation: str
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    retype: Mapping[str, pa.DataType] = field(default_factory=dict)
    add: tuple[tuple[pa.Field, pa.Scalar], ...] = ()

    @property
    def rewrites(self) -> bool:
        """Whether data files are rewritten."""
        return bool(self.retype) or any(value.is_valid for _, value in self.add)


def alter(
    transactions: Transactions, table: TargetTable, change: Alteration, properties: Mapping[str, str], record: Commit
) -> TargetTable:
    """Commit `change` together with `properties`, and return the altered table.

    `record` gives the LSN from which on the table is so.  Raises NotInPrerequisiteState for a table that only Spark can
    write; Overtaken if the table differs from `table` or holds another version than `record.previous`; OSError.
    """
    log = _alterable_log(table, transactions)

    def commit() -> TargetTable:
        log.refresh()
        require_version(log, table.relation, record)
        now = _with_others_columns(log, table)
        if [column["name"] for column in schema.fields(log.metadata)] != now.schema.names:
            raise Overtaken(table.relation, "Its columns were altered.")
        files, metadata = own_files(log, now), log.metadata
        actions, altered, made = _actions(log, now, change, properties)
        paths = data_files.paths(log.table, made)
        if table.source is not None:
            try:
                pass_others(log, now, files, metadata)
                require_version(log, table.relation, record)
            except BaseException:
                data_files.remove(paths)
                raise
        held = log.application_version(record.app_id)
        if held is not None:
            # Repeat the version unchanged, so that the log shows the commit as the subscription's own.
            actions.append(transaction(record.app_id, held))
        log.commit(actions, Operation.ALTER, user_metadata=record.user_metadata, made=paths, part=part_of(table))
        return altered

    return commit_retrying(f'alter the Delta table of "{table.relation}"', commit)


def _with_others_columns(log: TableLog, table: TargetTable) -> TargetTable:
    """Return the table with the columns that other sources have added to its Delta table since it was read."""
    if table.source is None:
        return table
    found, columns = read_schema(table.path), schema.fields(log.metadata)
    if found.names != [column["name"] for column in columns]:
        raise Conflict("another source has altered the table")
    if not set(table.schema.names) <= set(found.names):
        return table
    own = {field.name: field for field in table.schema}
    fields = [own.get(field.name, field) for field in found]
    return replace(table, schema=pa.schema(fields), mapped=schema.mapping(columns))


def rename(transactions: Transactions, table: TargetTable, relation: str) -> TargetTable:
    """Return the table under the publisher's new name; update its property, too, if its log can be written here."""
    renamed = replace(table, relation=relation)
    if is_reached(table.path) and table.source is None:  # its other sources keep their name
        log = TableLog(table.path, transactions)

        def commit() -> None:
            log.refresh()
            if log.unsupported() is None and log.properties.get("pubsub.relation") != relation:
                log.commit(_definition(log, renamed, schema.fields(log.metadata), {}), Operation.ALTER)

        with suppress(SerializationFailure):  # the property is for people
            commit_retrying(f'rename the Delta table of "{table.relation}"', commit)
    return renamed


def _alterable_log(table: TargetTable, transactions: Transactions) -> TableLog:
    reason: str | None = "it lies where only Spark reaches it"
    if is_reached(table.path):
        log = TableLog(table.path, transactions)
        log.refresh()
        reason = log.unsupported()
        if reason is None:
            return log
    assert reason is not None
    raise _not_alterable(table, reason)


def _not_alterable(table: TargetTable, reason: str) -> NotInPrerequisiteState:
    return NotInPrerequisiteState(
        f'the Delta table of "{table.relation}" cannot be altered as the publisher\'s table was: {reason}',
        detail=f'The Delta table lies at "{table.path}".',
        hint="Alter it by hand, or set schema_changes = refuse.",
    )


def _actions(
    log: TableLog, table: TargetTable, change: Alteration, properties: Mapping[str, str]
) -> tuple[list[Action], TargetTable, list[Action]]:
    """Return the commit's actions, the table after it, and the `add` actions of new files among the actions."""
    _require_partitions_kept(log, table, change)
    columns = _columns(log, table, change)
    altered = TargetTable(
        table.path,
        _arrow(table, change, columns),
        table.key,
        change.relation,
        schema.mapping(columns),
        history=table.history,
        soft_deletes=table.soft_deletes,
        truncate=table.truncate,
        versions=table.versions,
        metadata=table.metadata,
        closed=table.closed,
        masks=replace(
            table.masks, rules={change.rename.get(name, name): rule for name, rule in table.masks.rules.items()}
        ),
        source=table.source,
        others=table.others,
    ).identified_by(change.key)
    partitioned_by = tuple(change.rename.get(name, name) for name in log.partition_columns)
    actions = _definition(log, altered, columns, properties, partitioned_by)
    made: list[Action] = []
    if change.rewrites:
        now = int(time.time() * 1000)
        try:
            for file in own_files(log, table):
                laid = replace(laid_out(log, altered), partitioned_by=partitioned_by)
                made += data_files.write(laid, _rewritten(log, file, table, altered, change))
        except BaseException:
            data_files.remove(data_files.paths(log.table, made))
            raise
        actions += [remove_action(file, now) for file in own_files(log, table)]
        actions += made
    return actions, altered, made


def _require_partitions_kept(log: TableLog, table: TargetTable, change: Alteration) -> None:
    """Raise NotInPrerequisiteState for a change that Delta does not make to a table's partitions."""
    changed = [name for name in log.partition_columns if name in change.drop or name in change.retype]
    if changed:
        raise _not_alterable(table, f"it is partitioned by {changed[0]}")


def _definition(
    log: TableLog,
    table: TargetTable,
    columns: list[schema.Field],
    properties: Mapping[str, str],
    partitioned_by: Sequence[str] | None = None,
) -> list[Action]:
    """Return the actions that give the table this definition.  `partitioned_by`: its partition columns (None: as before)."""
    table = _laid_out_anew(log, table, columns)
    if partitioned_by is not None:
        table = replace(table, partitioned_by=tuple(partitioned_by))
    configuration = dict(log.properties)
    for name in (STATISTICS, DELETES, TRUNCATE, MODE, METADATA, SOURCE):
        configuration.pop(name, None)
    kept = {name: log.properties[name] for name in _OF_FIRST if table.source is not None and name in log.properties}
    configuration |= {**described(table), **kept, **properties}
    if table.mapped:
        greatest = max(_greatest(log), *(number for _, number in table.mapped.values()))
        configuration |= {schema.MODE: _mode(log) or "name", schema.MAX_ID: str(greatest)}
    configuration |= asking_for(schema.features(table.schema))
    definition = {
        "schemaString": schema.schema_string(columns),
        "partitionColumns": list(table.partitioned_by),
        "configuration": configuration,
    }
    clustered = _clustered(log, table, columns)
    others = [clustered_by(clustered)] if tuple(clustered) != log.cluster_paths else []
    return [{"metaData": {**log.metadata, **definition}}, *others]


def _laid_out_anew(log: TableLog, table: TargetTable, columns: list[schema.Field]) -> TargetTable:
    """Return `laid_out` for a table that is about to have these columns."""
    names = {schema.stored_name(column): column["name"] for column in columns}
    clustered = (names.get(".".join(path)) for path in _clustered(log, table, columns))
    return replace(laid_out(log, table), clustered_by=tuple(name for name in clustered if name is not None))


def _clustered(log: TableLog, table: TargetTable, columns: list[schema.Field]) -> list[tuple[str, ...]]:
    """Return log.cluster_paths for a table that is about to have these columns.

    A column that a copy makes anew under its name has another physical one.  Delta fails on a table that is clustered by a
    column which it lacks.
    """
    before = {schema.stored_name(column): column["name"] for column in schema.fields(log.metadata)}
    after = {schema.stored_name(column): column["name"] for column in columns}
    anew = {name: stored for stored, name in after.items()}
    found: list[tuple[str, ...]] = []
    for path in log.cluster_paths:
        if len(path) > 1:
            found += [path] if path[0] in after else []
            continue
        stored = path[0] if path[0] in after else anew.get(before.get(path[0], ""))
        if stored is not None and _can_cluster(table, after[stored]):
            found.append((stored,))
    return found


def _can_cluster(table: TargetTable, name: str) -> bool:
    return name not in table.schema.names or can_cluster(table.schema.field(name).type)


def _mode(log: TableLog) -> str | None:
    """Return how columns are mapped, `name` or `id`; None if they are not."""
    mode = log.properties.get(schema.MODE, "none")
    return None if mode == "none" else mode


def for_copy(log: TableLog, table: TargetTable) -> tuple[TargetTable, list[Action]]:
    """Return the table as a copy of all rows must write it, and the definition actions for the copy's commit.

    There are none if the Delta table has the columns already, and none that is to leave it.  Otherwise it gets exactly the
    publisher's columns, and loses any others together with its rows.  One that keeps the past keeps its columns, too, and gets
    those that it lacks; raises NotInPrerequisiteState if one has another type.
    """
    have = schema.fields(log.metadata)
    by_name = {column["name"]: column for column in have}
    if table.source is not None:
        laid, actions = _for_source(log, table, have)
        if actions:
            raise NotInPrerequisiteState(
                f'the Delta table of "{table.relation}" was altered before it was copied to',
                detail=f'The Delta table lies at "{table.path}".',
                hint="The worker starts again.",
            )
        return laid, actions
    if goes_on_keeping(table, log.properties):
        return _with_past(log, table, have)
    columns = [schema.field_of(field) for field in table.schema]
    ours = "pubsub.key" in log.properties
    laid = laid_out(log, replace(table, mapped=schema.mapping(have)))
    same = not table.outdated & by_name.keys() and all(
        _same(column, by_name.get(column["name"]), ours) for column in columns
    )
    if same and (not ours or {name: log.properties.get(name) for name in _DESCRIBED} == _NOTHING | described(laid)):
        return laid, []
    if _mode(log) is not None or any(needs_mapping(field.name) for field in table.schema):
        greatest = _greatest(log)
        for column in columns:
            greatest = schema.map_new(column, greatest)
    table = _laid_out_anew(log, replace(table, mapped=schema.mapping(columns)), columns)
    # A partition column that the publisher lacks goes with the others.
    table = replace(table, partitioned_by=tuple(name for name in table.partitioned_by if name in table.schema.names))
    return table, _definition(log, table, columns, {}, table.partitioned_by)


def join(transactions: Transactions, table: TargetTable) -> None:
    """Give a Delta table of several sources the columns that it lacks for this one.

    Raises NotInPrerequisiteState for a column that it has with another type, and for a table that only Spark can write.
    """
    log = _alterable_log(table, transactions)

    def commit() -> None:
        log.refresh()
        _, actions = _for_source(log, table, schema.fields(log.metadata))
        if actions:
            log.commit(actions, Operation.ALTER, part=part_of(table))

    commit_retrying(f'add columns to the Delta table of "{table.relation}"', commit)


def _for_source(log: TableLog, table: TargetTable, have: list[schema.Field]) -> tuple[TargetTable, list[Action]]:
    added = []
    for one, column, other in _beside(table, have):
        if other is None:
            added.append((one, column))
        else:
            _require_same(table, column, other)
    return _with_added(log, table, have, added)


def _require_same(table: TargetTable, column: schema.Field, other: schema.Field) -> None:
    """Raise NotInPrerequisiteState unless the column `other` of a table of several sources is this source's `column`, too."""
    if (other["name"], other["type"]) != (column["name"], column["type"]):
        raise other_type(table, column["name"], f"{other['name']} {_text(other)}", f"{column['name']} {_text(column)}")


def _beside(
    table: TargetTable, have: Sequence[schema.Field]
) -> Iterator[tuple[pa.Field, schema.Field, schema.Field | None]]:
    """Yield each of the table's columns, what it is in Delta's schema, and the column of `have` with its name, in any spelling."""
    by_name = {folded_name(column["name"]): column for column in have}
    for one in table.schema:
        yield one, schema.field_of(one), by_name.get(folded_name(one.name))


def _with_past(log: TableLog, table: TargetTable, have: list[schema.Field]) -> tuple[TargetTable, list[Action]]:
    added = []
    for one, column, other in _beside(table, have):
        if other is None:
            added.append((one, column))
        elif other["name"] != one.name:
            raise NotInPrerequisiteState(
                f'column "{one.name}" of table "{table.relation}" differs only in case from "{other["name"]}" in its history',
                hint=another_history(table),
            )
        elif column["type"] != other["type"]:
            raise NotInPrerequisiteState(
                f'column "{one.name}" of table "{table.relation}" has another type than in its history',
                detail=f"The history has {_text(other)}, new values need {_text(column)}.",
                hint=another_history(table),
            )
    return _with_added(log, table, have, added)


def _with_added(
    log: TableLog, table: TargetTable, have: list[schema.Field], added: Sequence[tuple[pa.Field, schema.Field]]
) -> tuple[TargetTable, list[Action]]:
    """Return the table with all of its columns and those that are added, and the actions that define it, if it is not so already."""
    if _mode(log) is not None or any(needs_mapping(one.name) for one, _ in added):
        if _mode(log) is None:
            schema.map_columns(have, _greatest(log))
        greatest = max(_greatest(log), *(number for _, number in schema.mapping(have).values()))
        for _, column in added:
            greatest = schema.map_new(column, greatest)
    columns = [*have, *(column for _, column in added)]
    ours = {one.name: one for one in table.schema}
    there = {column["name"] for column in have}
    fields = [ours.get(one.name, one) for one in read_schema(table.path) if one.name in there]
    whole = replace(table, schema=pa.schema([*fields, *(one for one, _ in added)]), mapped=schema.mapping(columns))
    laid = laid_out(log, whole)
    described_so = {name: log.properties.get(name) for name in _DESCRIBED} == _NOTHING | described(laid)
    # What a table of several sources is was settled by the first one.
    described_so |= table.source is not None
    return laid, [] if described_so and not added else _definition(log, laid, columns, {}, laid.partitioned_by)


def widen(log: TableLog, table: TargetTable) -> None:
    """Give the columns of a table that keeps the past the types of `table` where these hold every value of theirs.

    Rewrites its files if any does.
    """
    log.refresh()
    properties = log.properties
    found, columns = read_schema(table.path), schema.fields(log.metadata)
    there = as_said(TargetTable(table.path, found, (), table.relation, schema.mapping(columns)), properties)
    wanted = {field.name: field.type for field in table.schema if field.name in found.names}
    retyped = {name: kind for name, kind in wanted.items() if _holds(kind, found.field(name).type)}
    if not retyped:
        return
    change = Alteration(there.identity, table.relation, retype=retyped)

    def commit() -> None:
        log.refresh()
        actions, _, made = _actions(log, there, change, {})
        log.commit(actions, Operation.ALTER, made=data_files.paths(log.table, made))

    commit_retrying(f'widen columns of the Delta table of "{table.relation}"', commit)


def _holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Return whether the type is another than `other`, and has all of its values."""
    if kind == other:
        return False
    if pa.types.is_decimal(kind) and pa.types.is_decimal(other):
        return bool(kind.scale == other.scale and kind.precision > other.precision)
    both = [kind, other]
    of_numbers = all(map(pa.types.is_integer, both)) or all(map(pa.types.is_floating, both))
    return of_numbers and bool(kind.bit_width > other.bit_width)


def _text(column: schema.Field) -> str:
    kind = column["type"]
    return kind if isinstance(kind, str) else json.dumps(kind)


def _added(table: TargetTable, rows: pa.Table, value: pa.Scalar) -> pa.Array:
    """Return a new column of rows that are there already; of a history, only whole rows have its value."""
    values = repeated(value, rows.num_rows)
    if table.history is None:
        return values
    whole = pc.is_in(rows.column(change_rows.OP), pa.array(change_rows.WHOLE)).combine_chunks()
    return pc.if_else(whole, values, pa.scalar(None, value.type))


def _same(column: schema.Field, other: schema.Field | None, ours: bool) -> bool:
    if other is None or column["type"] != other["type"]:
        return False
    return not ours or bool(column["nullable"] == other["nullable"])


def _columns(log: TableLog, table: TargetTable, change: Alteration) -> list[schema.Field]:
    """Return the columns after the change, as Delta's JSON fields."""
    columns = [column for column in schema.fields(log.metadata) if column["name"] not in change.drop]
    mapped = _mode(log) is not None
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
    there = {folded_name(column["name"]): column for column in columns} if table.source is not None else {}
    for one, _ in change.add:
        column = schema.field_of(one)
        if (other := there.get(folded_name(one.name))) is not None:
            _require_same(table, column, other)
            continue  # another source has it already
        if mapped:
            greatest = schema.map_new(column, greatest)
        columns.append(column)
    if table.keeps_past:
        return columns  # any may be NULL
    left = {change.rename.get(name, name) for name in table.key} - set(change.key)
    for column in columns:
        column["nullable"] = column["name"] not in change.key and (column["nullable"] or column["name"] in left)
    return columns


def _greatest(log: TableLog) -> int:
    return int(log.properties.get(schema.MAX_ID, 0))


def _arrow(table: TargetTable, change: Alteration, columns: list[schema.Field]) -> pa.Schema:
    """Return the columns after the change as an Arrow schema."""
    types: dict[str, pa.DataType] = {
        change.rename.get(field.name, field.name): field.type for field in table.schema if field.name not in change.drop
    }
    types |= change.retype
    types |= {field.name: field.type for field, _ in change.add}
    return pa.schema([pa.field(c["name"], types[c["name"]], nullable=c["nullable"]) for c in columns])


def _rewritten(
    log: TableLog, file: AddFile, table: TargetTable, altered: TargetTable, change: Alteration
) -> Iterator[pa.Table]:
    """Yield the file's live rows as the altered table has them."""
    before = laid_out(log, replace(table, mapped=schema.mapping(schema.fields(log.metadata))))
    for rows in live_rows(log, [file], before):
        rows = rows.drop_columns(list(change.drop)) if change.drop else rows
        rows = rows.rename_columns([change.rename.get(name, name) for name in rows.column_names])
        for one, value in change.add:
            if one.name in rows.column_names:  # another source has it already
                rows = rows.drop_columns([one.name])
            rows = rows.append_column(one.name, _added(table, rows, value))
        yield rows.select(altered.schema.names).cast(altered.schema)
