"""What PostgreSQL's tables held at any LSN: the changes that its own test_decoding decodes, replayed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import psycopg

from pubsub.protocol.lsn import INVALID_LSN, Lsn

_COLUMN = re.compile(r"""("(?:[^"]|"")*"|\w+)\[([^\]]+)\]:('(?:[^']|'')*'|\S+)""")
_CHANGE = re.compile(r"table public\.(\w+): (INSERT|UPDATE|DELETE|TRUNCATE): (.*)", re.DOTALL)

Row = dict[str, Any]


@dataclass
class Table:
    """A table's rows as of some moment: by their key, or counted where `key` is None.

    `added`: the columns that an ALTER has added, with the end LSN of its transaction.  `changed`: that of the last
    transaction that changed rows.
    """

    key: str | None
    by_key: dict[Any, Row] = field(default_factory=dict)
    counted: Counter[tuple[tuple[str, Any], ...]] = field(default_factory=Counter)
    columns: set[str] = field(default_factory=set)
    added: dict[str, Lsn] = field(default_factory=dict)
    changed: Lsn = INVALID_LSN

    def change(self, kind: str, values: str) -> None:
        if kind == "TRUNCATE":
            self.by_key.clear()
            self.counted.clear()
            return
        before, new = values, values
        if values.startswith("old-key: "):
            before, new = values.removeprefix("old-key: ").split(" new-tuple: ")
        if kind != "INSERT":
            self._remove(_row(before))
        if kind != "DELETE":
            self._insert(_row(new))

    def add_column(self, name: str, value: Any) -> None:
        before = self.rows()
        self.by_key.clear()
        self.counted.clear()
        for row in before:
            self._insert({**row, name: value})
        self.columns.add(name)

    def rows(self) -> Iterator[Row]:
        found = [dict(row) for row in self.counted.elements()] if self.key is None else [*self.by_key.values()]
        return iter(found)

    def _insert(self, row: Row) -> None:
        if self.key is None:
            self.counted[_tuple(row)] += 1
        else:
            assert row[self.key] not in self.by_key
            self.by_key[row[self.key]] = row

    def _remove(self, row: Row) -> None:
        if self.key is not None:
            del self.by_key[row[self.key]]
            return
        found = _tuple(row)
        assert self.counted[found], row
        self.counted[found] -= 1
        if not self.counted[found]:
            del self.counted[found]


class DecodedRecord:
    """A slot of test_decoding; make it before any row.  A context manager, which drops the slot.

    A transaction that adds a column says so by a row of the table `alters`: the table, the column, its default.
    """

    def __init__(self, conninfo: str, keys: dict[str, str | None]) -> None:
        self._conninfo = conninfo
        self.tables = {name: Table(key) for name, key in keys.items()}
        self.transactions = 0
        self._at = INVALID_LSN

    def __enter__(self) -> Self:
        self._slot("SELECT pg_create_logical_replication_slot('record', 'test_decoding')")
        for name, table in self.tables.items():
            columns = f"SELECT attname FROM pg_attribute WHERE attrelid = 'public.{name}'::regclass AND attnum > 0"
            table.columns |= {column for (column,) in self._slot(columns)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slot("SELECT pg_drop_replication_slot('record')")

    def transactions_in_order(self) -> Iterator[tuple[Lsn, list[str]]]:
        """Yield each transaction that has committed since, with its end LSN and its changes."""
        changes: list[str] = []
        for lsn, text in self._slot(
            "SELECT lsn, data FROM pg_logical_slot_get_changes('record', NULL, NULL, 'include-xids', '0')"
        ):
            if text == "BEGIN":
                changes = []
            elif text == "COMMIT":
                yield Lsn.parse(lsn), changes
            else:
                changes.append(text)

    def apply(self, end: Lsn, changes: Sequence[str]) -> None:
        """Apply the next transaction."""
        assert end > self._at
        self._at = end
        self.transactions += 1
        for text in changes:
            match = _CHANGE.fullmatch(text)
            assert match is not None, text
            name, kind, values = match.groups()
            if name == "alters":
                row = _row(values)
                table = self.tables[row["relation"]]
                table.add_column(row["name"], row["value"])
                table.added[row["name"]] = end
            else:
                self.tables[name].change(kind, values)
                self.tables[name].changed = end

    def _slot(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    def difference(self, name: str, rows: Sequence[Row], columns: Sequence[str]) -> str | None:
        """Compare a table with rows of Delta's; None if they are the same.

        A column whose table has not changed since it was added may be missing: a stream does not tell of it earlier.
        """
        table = self.tables[name]
        late = {column for column, end in table.added.items() if table.changed < end}
        if not table.columns - late <= set(columns) <= table.columns:
            return f"{name} has columns {sorted(columns)}, not {sorted(table.columns)}"
        wanted = Counter(_tuple({c: value for c, value in row.items() if c in columns}) for row in table.rows())
        found = Counter(map(_tuple, rows))
        if wanted == found:
            return None
        return f"{name}: missing {list((wanted - found).items())[:5]}, too many {list((found - wanted).items())[:5]}"


def _tuple(row: Row) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(row.items()))


def _row(text: str) -> Row:
    return {name.strip('"'): _value(kind, value) for name, kind, value in _COLUMN.findall(text)}


def _value(kind: str, text: str) -> Any:
    if text == "null":
        return None
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    assert kind in ("integer", "bigint"), kind
    return int(text)
