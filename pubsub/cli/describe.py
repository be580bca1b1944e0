"""The answers to \\d and its relatives: the replicated tables, their columns, the views and the subscriptions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog.records import State, SubscriptionRel
from catalog.system_views import VIEWS
from pubsub.errors import PubsubError

_STREAMING: Final = {"off": "off", "on": "on", "parallel": "parallel"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A table to show, with a title above it and lines below it."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    footer: tuple[str, ...] = ()


def described(state: State, command: str, pattern: str) -> Iterator[Answer]:
    """Yield the answers to a command: d, dt, dv or dRs, with or without a plus sign.

    `pattern` is psql's, empty for no restriction.  Raises PubsubError if nothing is found.
    """
    plus, name = command.endswith("+"), command.removesuffix("+")
    if name == "dRs":
        yield _subscriptions(state, pattern, plus)
    elif name == "dv":
        yield _views(pattern)
    elif name == "d" and pattern:
        yield from _columns(state, pattern)
    else:
        yield _tables(state, pattern)


def _tables(state: State, pattern: str) -> Answer:
    names = {one.oid: one.name for one in state.subscriptions}
    rows = sorted(
        (one.schema, one.name, names.get(one.subid, ""), _said(one))
        for one in state.relations
        if _matches(one, pattern)
    )
    if not rows:
        raise _nothing("tables", "table", pattern)
    return Answer("List of tables", ("Schema", "Name", "Subscription", "State"), list(rows))


def _said(relation: SubscriptionRel) -> str:
    words = {
        "i": "waiting to be copied",
        "d": "being copied",
        "f": "copied, catching up",
        "s": "synchronized",
        "r": "ready",
    }
    return "stopped" if relation.stopped else f"{relation.state.value} ({words[relation.state.value]})"


def _views(pattern: str) -> Answer:
    rows = [("pg_catalog", name) for name in sorted(VIEWS) if _fits(pattern, "pg_catalog", name)]
    if not rows:
        raise _nothing("views", "view", pattern)
    return Answer("List of views", ("Schema", "Name"), rows)


def _columns(state: State, pattern: str) -> Iterator[Answer]:
    found = False
    for relation in sorted(state.relations, key=lambda one: (one.schema, one.name, one.subid)):
        if _matches(relation, pattern):
            found = True
            yield _table(state, relation)
    for name, view in VIEWS.items():
        if _fits(pattern, "pg_catalog", name):
            found = True
            yield Answer(
                f'View "pg_catalog.{name}"', ("Column", "Type"), [(one, kind.value) for one, kind in view.columns]
            )
    if not found:
        raise PubsubError(f'Did not find any relation named "{pattern}".', sqlstate="42P01")


def _table(state: State, relation: SubscriptionRel) -> Answer:
    from pubsub.node.select.types import typed_name

    definition: dict[str, Any] = json.loads(relation.definition or "{}")
    attributes = json.loads(definition.get("attributes") or "{}").get("columns") or []
    types = {column[1]: typed_name(column[2], column[3]) for column in attributes}
    key = definition.get("key") or []
    stored = _stored(relation)
    names = definition.get("columns") or list(stored)
    rows = [(name, types.get(name, ""), stored.get(name, ""), "not null" if name in key else "") for name in names]
    subscription = next((one.name for one in state.subscriptions if one.oid == relation.subid), "")
    footer = [
        f"Key: ({', '.join(key)})" if key else "No key",
        f'Subscription: "{subscription}", state {_said(relation)}',
    ]
    if relation.error:
        footer.append(f"Error: {relation.error}")
    footer.append(f"Delta table: {relation.path}")
    columns = ("Column", "Type", "Delta type", "Nullable")
    return Answer(f'Table "{relation.schema}.{relation.name}"', columns, rows, tuple(footer))


def _stored(relation: SubscriptionRel) -> dict[str, str]:
    """Return the Delta table's columns and types; none while there is no table."""
    from pubsub.delta.table import exists, opened

    if not exists(relation.path):
        return {}
    return {field.name: _delta(json.loads(field.type.to_json())) for field in opened(relation.path).schema().fields}


def _delta(kind: Any) -> str:
    """Format a type from Delta's log as SQL."""
    if isinstance(kind, str):
        words = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
        return words.get(kind, kind).upper()
    match kind["type"]:
        case "array":
            return f"ARRAY<{_delta(kind['elementType'])}>"
        case "map":
            return f"MAP<{_delta(kind['keyType'])}, {_delta(kind['valueType'])}>"
        case _:
            return f"STRUCT<{', '.join(one['name'] + ': ' + _delta(one['type']) for one in kind['fields'])}>"


def _subscriptions(state: State, pattern: str, plus: bool) -> Answer:
    columns: tuple[str, ...] = ("Name", "Owner", "Enabled", "Publication")
    if plus:
        columns += (
            "Binary", "Streaming", "Two-phase commit", "Disable on error", "Origin", "Password required", "Run as owner?",
            "Failover", "Synchronous commit", "Conninfo", "Skip LSN", "Target", "Types", "On table error", "Stop LSN",
            "WAL archive", "On slot loss", "New tables",
        )  # fmt: skip
    from pubsub.sql.conninfo import mask_conninfo

    rows: list[tuple[object, ...]] = []
    for one in sorted(state.subscriptions, key=lambda one: one.name):
        if pattern and not _like(pattern, one.name):
            continue
        row: tuple[object, ...] = (one.name, one.owner, one.enabled, one.publications)
        if plus:
            o = one.options
            row += (
                o.binary, _STREAMING[o.streaming], o.two_phase_state, o.disable_on_error, o.origin, o.password_required,
                o.run_as_owner, o.failover, o.synchronous_commit, mask_conninfo(one.conninfo), str(one.skip_lsn),
                one.target, o.types, o.on_table_error, None if o.stop_lsn is None else str(o.stop_lsn),
                o.wal_archive, o.on_slot_loss, o.new_tables,
            )  # fmt: skip
        rows.append(row)
    return Answer("List of subscriptions", columns, rows)


def _matches(relation: SubscriptionRel, pattern: str) -> bool:
    return _fits(pattern, relation.schema, relation.name)


def _fits(pattern: str, schema: str, name: str) -> bool:
    """Return whether a name fits a pattern as in psql: [schema.]name, with * and ?, folded unless quoted."""
    if not pattern:
        return True
    parts = re.findall(r'(?:"(?:[^"]|"")*"|[^".])+', pattern)
    if len(parts) > 1:
        return _like(parts[-2], schema) and _like(parts[-1], name)
    return _like(pattern, name)


def _like(pattern: str, name: str) -> bool:
    found = ""
    for quoted, plain in re.findall(r'"((?:[^"]|"")*)"|([^"]+)', pattern):
        if plain:
            found += re.escape(plain.lower()).replace(r"\*", ".*").replace(r"\?", ".")
        else:
            found += re.escape(quoted.replace('""', '"'))
    return re.fullmatch(found, name, re.DOTALL) is not None


def _nothing(kinds: str, kind: str, pattern: str) -> PubsubError:
    shown = f'Did not find any {kind} named "{pattern}".' if pattern else f"Did not find any {kinds}."
    return PubsubError(shown, sqlstate="42P01")
