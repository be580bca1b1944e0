"""Put something else in the place of slots' views and functions in SQL (slot_sql.py); the rest of the text stays as it is.

What is put there reads JSON: a literal in a simple query; in a prepared statement a parameter of ours after the client's,
so that each execution shows the slots of its own moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from pubsub.sql.identifiers import quote_literal
from walsender.server.slot_sql import Call, View

_OF_FUNCTION: Final = (
    *((name, 0) for name in ("slot_name", "plugin", "slot_type", "datoid", "temporary", "active", "active_pid")),
    *((name, 0) for name in ("xmin", "catalog_xmin", "restart_lsn", "confirmed_flush_lsn", "wal_status")),
    *(("safe_wal_size", 0), ("two_phase", 0), ("two_phase_at", 180000), ("inactive_since", 170000)),
    *(("conflicting", 160000), ("invalidation_reason", 170000), ("failover", 170000), ("synced", 170000)),
    ("slotsync_skip_reason", 190000),
)
"""The columns of pg_get_replication_slots, each with the server's release that has it."""
_SINCE_19: Final = {"mem_exceeded_count", "slotsync_skip_count", "slotsync_last_skip"}
"""Columns of pg_stat_get_replication_slot that a server before 19 does not have."""


def edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """Return the text with each (start, end) replaced."""
    parts: list[str] = []
    at = 0
    for start, end, new in sorted(edits):
        parts += (text[at:start], new)
        at = end
    return "".join([*parts, text[at:]])


def literal(rows: Iterable[object]) -> str:
    """Return a JSON array as a literal of type jsonb."""
    # Row by row, so that a thread that makes a large one lets others run.
    text = ",".join([json.dumps(row) for row in rows])
    return f"{quote_literal(f'[{text}]')}::pg_catalog.jsonb"


def view_edit(view: View, rows: str, version: int = 180000) -> tuple[int, int, str]:
    """Return what puts rows, an expression of a JSON array of objects, in the view's place.

    Columns that the server's view lacks are left out there.  `version`: the server's.
    """
    if view.name is None:
        return view.start, view.end, ""
    relation, columns = view.name, "*"
    if relation == "pg_get_replication_slots":
        # The view has the database's name as well.
        relation = "pg_replication_slots"
        columns = ", ".join(name for name, since in _OF_FUNCTION if since <= version)
    if relation == "pg_replication_slots":
        rows = (
            "(SELECT pg_catalog.jsonb_agg(x.value || CASE WHEN d.oid IS NULL THEN '{}'::pg_catalog.jsonb"
            " ELSE pg_catalog.jsonb_build_object('datoid', d.oid, 'database', d.datname) END)"
            f" FROM pg_catalog.jsonb_array_elements({rows}) x LEFT JOIN pg_catalog.pg_database d"
            # Of a database that was renamed the number is known, and of a slot that was never used the name only.
            " ON CASE WHEN x.value -> 'datoid' = 'null' THEN d.datname = x.value ->> 'database'"
            " ELSE d.oid = (x.value ->> 'datoid')::pg_catalog.oid END)"
        )
    elif relation == "pg_stat_replication":
        # What a role may not see of a stream is not among the rows.
        rows = (
            "(SELECT pg_catalog.jsonb_agg(x.value || CASE WHEN r.oid IS NULL THEN '{}'::pg_catalog.jsonb"
            " ELSE pg_catalog.jsonb_build_object('usename', r.rolname) END)"
            f" FROM pg_catalog.jsonb_array_elements({rows}) x LEFT JOIN pg_catalog.pg_roles r"
            " ON r.oid = (x.value ->> 'usesysid')::pg_catalog.oid)"
        )
    source = f"pg_catalog.jsonb_populate_recordset(NULL::pg_catalog.{relation}, {rows})"
    new = f"(SELECT {columns} FROM {source} AS _)" + ("" if view.has_alias else f" AS {view.name}")
    return view.start, view.end, f"SELECT * FROM {new}" if view.is_table_command else new


def call_edit(call: Call, results: str, version: int = 180000) -> tuple[int, int, str]:
    """Return what puts results in the call's place.

    `results`: an expression of a JSON array with an object for each row: the result's columns, and `k`, see Call.of_row.
    `version`: the server's.
    """
    columns = [one for one in call.signature.columns if version >= 190000 or one[0] not in _SINCE_19]
    if not columns and call.is_relation:
        return call.start, call.end, "pg_catalog.lower('')" + _alias(call)
    if not columns:
        # NULL where an argument is, since the functions are strict: there is no result then.
        source = f"pg_catalog.jsonb_to_recordset({results}) AS _(k pg_catalog.jsonb) WHERE {call.of_row()}"
        return call.start, call.end, f"(SELECT ''::pg_catalog.void FROM {source} LIMIT 1)" + _alias(call)
    typed = ", ".join(f"{name} pg_catalog.{kind}" for name, kind in columns)
    names = ", ".join(name for name, _ in columns)
    source = f"pg_catalog.jsonb_to_recordset({results}) AS _(k pg_catalog.jsonb, {typed})"
    if call.signature.in_hex:
        shown = ", ".join(_from_hex(name) if name == call.signature.in_hex else name for name, _ in columns)
        source = f"(SELECT k, {shown} FROM {source}) _"
    source += f" WHERE {call.of_row()}"
    if call.is_relation:
        numbered = ", pg_catalog.row_number() OVER () AS ordinality" if call.ordinality else ""
        return call.start, call.end, f"(SELECT {names}{numbered} FROM {source})" + _alias(call)
    wanted = names.split(", ") if call.field == "*" else [call.field] if call.field else [None]
    parts = []
    for one in wanted:
        if call.signature.variadic:
            part = f"pg_catalog.unnest(ARRAY(SELECT {one or f'ROW({names})'} FROM {source}))"
        else:
            part = f"(SELECT {one or 'r'} FROM (SELECT {names} FROM {source}) r)"
        parts.append(f"{part} AS {one}" if call.field == "*" else part + _alias(call))
    return call.start, call.end, ", ".join(parts)


def _from_hex(name: str) -> str:
    """Return an expression of a text of the database's encoding, of its bytes in hexadecimal: JSON could not hold it."""
    decoded = f"pg_catalog.decode({name}, 'hex')"
    return f"pg_catalog.convert_from({decoded}, pg_catalog.getdatabaseencoding()) AS {name}"


def _alias(call: Call) -> str:
    named = call.is_column or (call.is_relation and not call.has_alias)
    return f" AS {call.field or call.name}" if named else ""
