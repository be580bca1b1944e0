"""An output plugin of a user's own: wal2json's format 2, a JSON object for each change (wal2json.c: pg_decode_change_v2).

Options: include-xids, include-timestamp, include-lsn, include-types, include-transaction, include-pk, filter-tables,
add-tables, actions, format-version (2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from walsender.historic.relation import ColumnInfo, RelationInfo, RelationResolver
from walsender.plugins.plugin import Plugin, PluginContext, RowChange, SentTransaction
from walsender.types.layout import Raw, ToastPointer

_NUMBERS: Final = frozenset({21, 23, 20, 700, 701, 1700, 26})
_BOOL: Final = 16
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_SWITCHES: Final = {
    "include-xids": False,
    "include-timestamp": False,
    "include-lsn": False,
    "include-types": True,
    "include-transaction": True,
    "include-pk": False,
}


@dataclass(frozen=True, slots=True)
class _Table:
    columns: tuple[tuple[int, ColumnInfo], ...]
    identity: tuple[tuple[int, ColumnInfo], ...]


class Wal2Json(Plugin[_Table]):
    """The plugin."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        options = dict(context.options)
        if options.pop("format-version", "2") != "2":
            raise PubsubError("client sent format-version=1 but only version 2 is here", sqlstate="22023")
        self._tables = _names(options.pop("add-tables", "*.*"))
        self._without = _names(options.pop("filter-tables", ""))
        self._actions = set(options.pop("actions", "insert,update,delete,truncate,message").split(","))
        self._on = {name: _switch(options.pop(name, None), default) for name, default in _SWITCHES.items()}
        if options:
            name, value = next(iter(options.items()))
            raise PubsubError(f'option "{name}" = "{value}" is unknown', sqlstate="22023")

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> _Table | None:
        names = {(relation.schema, relation.name), (relation.schema, "*"), ("*", relation.name), ("*", "*")}
        if not names & self._tables or names & self._without or relation.rewrites:
            return None
        columns = tuple((at, one) for at, one in enumerate(relation.columns) if not one.dropped and not one.generated)
        whole = relation.replica_identity == "f"
        return _Table(columns, tuple(one for one in columns if whole or one[1].number in relation.identity))

    def begin(self, txn: SentTransaction) -> None:
        self._boundary(txn, "B", txn.first_lsn)

    def commit(self, txn: SentTransaction) -> None:
        self._boundary(txn, "C", txn.end_lsn)

    def _boundary(self, txn: SentTransaction, action: str, lsn: int) -> None:
        if not self._on["include-transaction"]:
            return
        found: dict[str, Any] = {"action": action, **self._of(txn)}
        if self._on["include-lsn"]:
            found |= {
                "lsn": str(Lsn(txn.final_lsn if action == "C" else txn.first_lsn)),
                "nextlsn": str(Lsn(txn.end_lsn)),
            }
        self._put(lsn, txn, found)

    def change(self, txn: SentTransaction, relation: RelationInfo, entry: _Table, change: RowChange) -> None:
        if change.kind not in self._actions:
            return
        found = {"action": change.kind[0].upper(), **self._of(txn)}
        if self._on["include-lsn"]:
            found["lsn"] = str(Lsn(change.lsn))
        found |= {"schema": relation.schema, "table": relation.name}
        if change.new is not None:
            found["columns"] = [
                self._value(one, change.new[at]) for at, one in entry.columns if not _is_kept(change.new[at])
            ]
        if change.kind != "insert":
            row = change.old if change.old is not None else change.new
            assert row is not None
            found["identity"] = [self._value(one, row[at]) for at, one in entry.identity]
        if self._on["include-pk"]:
            found["pk"] = [{"name": one.name, "type": _label(one)} for _, one in entry.identity]
        self._put(change.lsn, txn, found)

    def _value(self, column: ColumnInfo, value: Raw | None) -> dict[str, Any]:
        found: dict[str, Any] = {"name": column.name}
        if self._on["include-types"]:
            found["type"] = _label(column)
        assert column.type is not None
        if value is None or isinstance(value, ToastPointer):
            return {**found, "value": None}
        text = column.type.out(value).decode(self.context.encoding)
        shown: Any = text
        if column.type_oid == _BOOL:
            shown = text == "t"
        elif column.type_oid in _NUMBERS:
            shown = None if text in {"NaN", "Infinity", "-Infinity"} else json.loads(text)
        return {**found, "value": shown}

    def truncate(
        self,
        txn: SentTransaction,
        lsn: int,
        xid: int,
        relations: list[tuple[RelationInfo, _Table | None]],
        cascade: bool,
        restart_seqs: bool,
    ) -> None:
        if "truncate" not in self._actions:
            return
        for relation, entry in relations:
            if entry is not None:
                found = {"action": "T", **self._of(txn), "schema": relation.schema, "table": relation.name}
                self._put(lsn, txn, found)

    def message(
        self, txn: SentTransaction | None, lsn: int, xid: int, transactional: bool, prefix: bytes, content: bytes
    ) -> None:
        if "message" in self._actions:
            encoding = self.context.encoding
            found = {"action": "M", "transactional": transactional, "prefix": prefix.decode(encoding)}
            found["content"] = content.decode(encoding)
            self._put(lsn, txn, found)

    def _of(self, txn: SentTransaction) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._on["include-xids"]:
            found["xid"] = txn.xid
        if self._on["include-timestamp"]:
            found["timestamp"] = str(_EPOCH + timedelta(microseconds=txn.time))
        return found

    def _put(self, lsn: int, txn: SentTransaction | None, found: Mapping[str, Any]) -> None:
        text = json.dumps(found, separators=(",", ":"), ensure_ascii=False)
        self.context.write(lsn, txn.xid if txn is not None else 0, text.encode(self.context.encoding))


def _label(column: ColumnInfo) -> str:
    return column.type.label if column.type is not None else ""


def _is_kept(value: Raw | None) -> bool:
    return isinstance(value, ToastPointer)


def _names(text: str) -> set[tuple[str, str]]:
    found = set()
    for one in filter(None, text.split(",")):
        schema, _, name = one.partition(".")
        found.add((schema, name))
    return found


def _switch(text: str | None, default: bool) -> bool:
    if text is None:
        return default
    if text.lower() not in {"t", "true", "on", "1", "yes", "f", "false", "off", "0", "no", ""}:
        raise PubsubError(f'could not parse value "{text}"', sqlstate="22023")
    return text.lower() in {"t", "true", "on", "1", "yes", ""}
