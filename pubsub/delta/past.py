"""Delta tables that keep what the publisher's table had before (mode history and scd2): no copy takes that away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from pubsub.delta.table import HISTORY, MODE, TargetTable, properties, read_schema
from pubsub.errors import NotInPrerequisiteState


def goes_on_keeping(table: TargetTable, found: Mapping[str, str]) -> bool:
    """Return whether a Delta table with the properties `found` keeps what it has, and goes on doing so."""
    return HISTORY in found if table.history is not None else table.versions and MODE in found


def refuse_to_replace(table: TargetTable, found: Mapping[str, str]) -> None:
    """Raise NotInPrerequisiteState if the Delta table with the properties `found` keeps the past, and would be replaced."""
    kept = "the history" if HISTORY in found else "every version of its rows" if MODE in found else None
    if kept is not None and not goes_on_keeping(table, found):
        mode = "a history" if table.history is not None else "mode = scd2" if table.versions else "a mirror"
        raise NotInPrerequisiteState(
            f'the Delta table for "{table.relation}" keeps {kept}, which {mode} would replace',
            detail=f'It lies at "{table.path}".',
            hint="Move it away, or name the table in the option mode.",
        )


def another_history(table: TargetTable) -> str:
    """Return the hint for a history that cannot go on."""
    return f"Move the Delta table at {table.path} away: RESYNC TABLE then begins another one."


def with_kept_columns(table: TargetTable) -> TargetTable:
    """Return a table that is about to be copied with the columns that stay, since it keeps the past or has other sources."""
    if table.source is None and not (table.keeps_past and goes_on_keeping(table, properties(table.path))):
        return table
    held = read_schema(table.path)
    added = [field for field in table.schema if field.name not in held.names]
    return replace(table, schema=pa.schema([*held, *added]))
