"""A Delta table of several sources: each subscription with the option source writes the rows that have its source in one column.

    one table, partitioned by _pubsub_source     tenant_1 ◄── subscription a, of one database
                                                 tenant_2 ◄── subscription b, of another, perhaps by another node

What a subscription reads, changes, replaces or removes is in the files of its own partition; others' commits leave these alone, and
are no conflict.  The columns are those of all sources; NULL where a source lacks one.  Key, and what a table has beside the
publisher's columns, are the same for all.  A property of the table says for each source whose it is:

    pubsub.source              the column
    pubsub.source.tenant_1     {"node": …, "subscription": …, "publisher": …}

Blocks.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from pubsub.delta import table as delta
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.other_commits import Partition
from pubsub.delta.log.row_count import rows_in_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict
from pubsub.delta.table import DELETES, METADATA, SOURCE, TRUNCATE, TargetTable
from pubsub.errors import DuplicateObject, NotInPrerequisiteState
from pubsub.protocol.column_types import folded_name
from pubsub.sql.source import Source

_OWNERS: Final = f"{SOURCE}."
_MODES: Final = {DELETES: "deletes", TRUNCATE: "truncate", METADATA: "metadata"}


def part_of(table: TargetTable) -> Partition | None:
    """Return the partition that has the table's rows; None if it has all of the Delta table's."""
    return None if table.source is None else (table.stored_name(table.source.column), table.source.value)


def own_files(log: TableLog, table: TargetTable) -> list[AddFile]:
    """Return the data files that have the table's rows."""
    files = list(log.files.values())
    part = part_of(table)
    if part is None:
        return files
    name, value = part
    return [file for file in files if file.partition.get(name) == value]


def has_files(log: TableLog, table: TargetTable, files: Sequence[AddFile]) -> bool:
    """Return whether the table has these data files still, with these deletion vectors, and no others."""
    now = own_files(log, table)
    return len(now) == len(files) and all(map(operator.is_, now, files))


def pass_others(log: TableLog, table: TargetTable, files: Sequence[AddFile], metadata: Mapping[str, object]) -> None:
    """Read on to the newest version of the log, for which holds what was worked out from the table's `files` and the `metadata`.

    Where that takes longer than other sources' commits come one after the other, none would ever be made of it otherwise: a
    commit is for the newest version.  Raises Conflict if files or metadata are others by now.
    """
    log.refresh()
    if log.metadata is not metadata or not has_files(log, table, files):
        raise Conflict("another writer has changed the source's files, or the table's columns")


def own_rows(log: TableLog, table: TargetTable) -> int | None:
    """Return the number of the table's rows in the log's state; None if a file's statistics lack it."""
    return rows_in_files(own_files(log, table))


def owner_property(source: Source) -> str:
    """Return the name of the property that says whose a source is."""
    return _OWNERS + source.value


def owner(node_id: str, subid: int, publisher: str) -> str:
    """Return what that property says of a subscription."""
    return json.dumps({"node": node_id, "subscription": str(subid), "publisher": publisher}, ensure_ascii=False)


def is_shared_with_others(properties: Mapping[str, str], node_id: str) -> bool:
    """Return whether another node writes a source of the table, as far as its properties tell."""
    return any(_of(text).get("node") != node_id for name, text in properties.items() if name.startswith(_OWNERS))


def refuse_unfit(table: TargetTable, found: Mapping[str, str]) -> None:
    """Raise NotInPrerequisiteState if the table has a source, and the Delta table with the properties `found` none, or conversely;
    if its rows are found by other columns, or have other columns of their own.
    """
    where = f'The Delta table lies at "{table.path}".'
    if table.source is None:
        if SOURCE in found:
            raise NotInPrerequisiteState(
                f'the Delta table for "{table.relation}" has the rows of several sources',
                detail=f'It lies at "{table.path}".',
                hint="Name the subscription's own in the option source, or choose another target.",
            )
        return
    if found.get(SOURCE) != table.source.column:
        has = "has no column of sources"
        if SOURCE in found:
            has = f'has its sources in column "{found[SOURCE]}", not "{table.source.column}"'
        raise NotInPrerequisiteState(
            f'the Delta table for "{table.relation}" {has}',
            detail=where,
            hint="Choose another target; the first subscription with a source makes the table.",
        )
    key = json.loads(found.get("pubsub.key", "[]"))
    if sorted(key) != sorted(table.key):
        raise NotInPrerequisiteState(
            f'table "{table.relation}" of source "{table.source.value}" has the key ({", ".join(table.key)}), its Delta table '
            f"({', '.join(key)})",
            detail=where,
            hint="All sources of a Delta table have the same key.",
        )
    wanted = delta.mode_of(table)
    for name, option in _MODES.items():
        if wanted.get(name) != found.get(name):
            raise NotInPrerequisiteState(
                f'the option {option} of table "{table.relation}" is another than that of its Delta table\'s other sources',
                detail=where,
                hint=f"It is the same for all sources of a Delta table; there it is {found.get(name, 'not given')}.",
            )


def refuse_unfit_types(table: TargetTable) -> None:
    """Raise NotInPrerequisiteState for a column that the Delta table has with another type, or in another spelling."""
    _refuse_other_types(table, delta.read_schema(table.path))


def refuse_unlike(table: TargetTable, first: TargetTable) -> None:
    """Raise as `refuse_unfit` and `refuse_unfit_types` for a table beside `first`, another source of a Delta table to come."""
    assert first.source is not None
    refuse_unfit(table, {SOURCE: first.source.column, "pubsub.key": json.dumps(first.key), **delta.mode_of(first)})
    _refuse_other_types(table, first.schema)


def _refuse_other_types(table: TargetTable, schema: pa.Schema) -> None:
    have = {folded_name(field.name): field for field in schema}
    for field in table.schema:
        there = have.get(folded_name(field.name))
        if there is not None and (there.name, there.type) != (field.name, field.type):
            raise other_type(table, field.name, f"{there.name} {there.type}", f"{field.name} {field.type}")


def other_type(table: TargetTable, column: str, there: str, wanted: str) -> NotInPrerequisiteState:
    """Return the error for a column that the Delta table has as `there`, and the source as `wanted`."""
    return NotInPrerequisiteState(
        f'column "{column}" of table "{table.relation}" does not fit the Delta table of source "{table.whose}"',
        detail=f'The Delta table at "{table.path}" has the column {there}, the source needs {wanted}.',
        hint="Give it the same type at all sources, choose one by the option types, or leave the column out.",
    )


def refuse_owned(table: TargetTable, found: Mapping[str, str], node_id: str, subid: int | None) -> bool:
    """Return whether the source is that of subscription `subid` of the node, by the Delta table's properties `found`.

    Raises DuplicateObject if another node has it.  One that an earlier subscription of this node had is free.
    """
    assert table.source is not None
    held = _of(found.get(owner_property(table.source)))
    if not held:
        return False
    if held.get("node") != node_id:
        raise DuplicateObject(
            f'source "{table.source.value}" of the Delta table for "{table.relation}" belongs to a subscription of another node',
            detail=f'The Delta table lies at "{table.path}"; the node is {held.get("node")}.',
            hint="If that subscription is gone, take the table's property "
            f'"{owner_property(table.source)}" away (ALTER TABLE … UNSET TBLPROPERTIES).',
        )
    return subid is not None and held.get("subscription") == str(subid)


def refuse_rows(table: TargetTable) -> None:
    """Raise NotInPrerequisiteState if the Delta table has rows of the source."""
    log = TableLog(table.path)
    log.refresh()
    mapped = delta.load(table.path, table.relation, None).mapped
    files = own_files(log, replace(table, mapped=mapped))
    if files and rows_in_files(files) != 0:
        assert table.source is not None
        raise NotInPrerequisiteState(
            f'the Delta table for "{table.relation}" holds rows of source "{table.source.value}" already',
            detail=f'It lies at "{table.path}".',
            hint=f"DELETE those with this value in {table.source.column}, or choose another source or target.",
        )


def _of(text: str | None) -> Mapping[str, str]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {"node": "", "text": str(text)}
    return found if isinstance(found, dict) else {}
