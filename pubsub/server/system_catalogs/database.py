"""The SQLite database of the system catalogs, and queries on it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedTable
from pubsub.server.system_catalogs import contents as rows
from pubsub.server.system_catalogs import functions
from pubsub.server.system_catalogs.contents import Contents
from pubsub.server.system_catalogs.definitions import Row, definitions
from pubsub.server.system_catalogs.result_types import Column
from pubsub.server.system_catalogs.translate import Translated
from pubsub.sql.identifiers import quote_identifier

_NUMBERS: Final = frozenset({"bool", "int2", "int4", "int8", "oid", "xid", "cid", "cardinal_number"})
_MOST_STEPS: Final = 200_000_000
"""Steps of SQLite's machine after which a query is given up, so that none holds the others up for long."""
_STEPS: Final = 100_000


@dataclass(slots=True)
class Caller:
    """Who asks: what session functions say.  `settings`: the session's parameters by lower-case name."""

    user: str
    pid: int
    settings: Mapping[str, str]
    version: str


class SystemCatalogs:
    """The catalogs of a node, shared by its sessions; methods may be called from any thread, and block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._shown: object = None
        self._fixed: dict[str, int] = {}
        """How many rows of a relation no state changes: they come first."""
        self._filled: dict[str, Sequence[Row]] = {}
        """The relations' other rows."""
        self._contents: Contents
        self._caller: Caller
        self._set: dict[str, str] = {}

    def query(
        self,
        key: object,
        make: Callable[[], Contents],
        translated: Translated,
        caller: Caller,
    ) -> list[tuple[Any, ...]]:
        """Run a query on the contents that `make` returns, which are made anew if `key` is another than before.

        Raises PubsubError.
        """
        with self._lock:
            connection = self._connection or self._open()
            if key is not self._shown:
                self._fill(connection, make())
                self._shown = key
            self._caller = caller
            self._steps = 0
            try:
                found = connection.execute(translated.sql).fetchall()
            except sqlite3.OperationalError as error:
                raise _complaint(str(error)) from error
            except sqlite3.Error as error:
                raise FeatureNotSupported(f"this query on system catalogs is not supported: {error}") from error
            return [
                tuple(_value(value, column) for value, column in zip(row, translated.columns, strict=True))
                for row in found
            ]

    def columns(self, sql: str) -> list[str]:
        """Return the names of a query's columns, with its stars resolved.  Raises PubsubError."""
        with self._lock:
            connection = self._connection or self._open()
            try:
                cursor = connection.execute(f"SELECT * FROM ({sql}) LIMIT 0")
            except sqlite3.Error as error:
                raise _complaint(str(error)) from error
            return [one[0] for one in cursor.description]

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        for schema, relations in definitions().relations.items():
            connection.execute(f"ATTACH ':memory:' AS {schema}")
            for name, (_, _, columns) in relations.items():
                declared = ", ".join(f"{_quoted(column)} {_affinity(kind)}" for column, kind in columns)
                connection.execute(f"CREATE TABLE {schema}.{_quoted(name)} ({declared})")
        for name, found in rows.fixed_rows().items():
            self._insert(connection, name, found)
            self._fixed[name] = len(found)
        self._functions(connection)
        connection.set_progress_handler(self._progress, _STEPS)
        self._connection = connection
        return connection

    def _progress(self) -> int:
        self._steps += _STEPS
        return int(self._steps > _MOST_STEPS)

    def _fill(self, connection: sqlite3.Connection, found: Contents) -> None:
        self._steps = 0
        changed = {name: new for name, new in found.rows.items() if new != self._filled.get(name)}
        connection.execute("BEGIN")
        try:
            for name, new in changed.items():
                schema, _, relation = name.rpartition(".")
                fixed = self._fixed.get(name, 0)
                connection.execute(f"DELETE FROM {schema or 'pg_catalog'}.{_quoted(relation)} WHERE rowid > {fixed}")
                self._insert(connection, name, new)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        self._filled.update(changed)
        self._contents = found

    @staticmethod
    def _insert(connection: sqlite3.Connection, name: str, found: Sequence[Row]) -> None:
        schema, _, relation = name.rpartition(".")
        schema = schema or "pg_catalog"
        columns = [column for column, _ in definitions().relations[schema][relation][2]]
        marks = ", ".join("?" * len(columns))
        connection.executemany(
            f"INSERT INTO {schema}.{_quoted(relation)} VALUES ({marks})",
            [[_stored(row.get(column)) for column in columns] for row in found],
        )

    def _functions(self, connection: sqlite3.Connection) -> None:
        make = connection.create_function
        for name, count, function in functions.PLAIN:
            make(name, count, function, deterministic=True)
        for name, answer in functions.CONSTANT.items():
            make(name, -1, lambda *_, answer=answer: answer)
        session: dict[str, Callable[[], str | int | None]] = {
            "current_user": lambda: self._caller.user,
            "session_user": lambda: self._caller.user,
            "current_role": lambda: self._caller.user,
            "current_database": lambda: rows.DATABASE,
            "current_catalog": lambda: rows.DATABASE,
            "current_schema": lambda: "public",
            "pg_backend_pid": lambda: self._caller.pid,
            "version": lambda: f"PostgreSQL {self._caller.version}",
            "pg_postmaster_start_time": lambda: None,
            "txid_current": lambda: 3,
            "pg_current_wal_lsn": lambda: None,
        }
        for name, own in session.items():
            make(name, 0, own)
        make("current_schemas", 1, lambda implicit: "{pg_catalog,public}" if implicit else "{public}")
        make("pg_get_userbyid", 1, self._role_name)
        make("current_setting", 1, lambda name: self._setting(name, missing=False))
        make("current_setting", 2, lambda name, missing: self._setting(name, missing=bool(missing)))
        make("set_config", 3, self._set_config)
        make("pg_regclass_oid", 1, self._relation_oid)
        make("pg_regclass_name", 1, self._relation_name)
        make("pg_regnamespace_oid", 1, lambda name: self._lookup(self._contents.schemas, name, "schema", "3F000"))
        make("pg_regnamespace_name", 1, lambda oid: self._named(self._contents.schemas, oid))
        make("pg_regrole_oid", 1, lambda name: self._lookup(self._contents.roles, name, "role", "42704"))
        make("pg_regrole_name", 1, lambda oid: self._named(self._contents.roles, oid))
        make("pg_regtype_oid", 1, _type_oid)
        make("pg_regtype_name", 1, lambda oid: functions.format_type(oid, -1))
        make("to_regclass", 1, lambda name: self._relation_oid(name, missing=True))
        make("pg_table_is_visible", 1, self._is_visible)
        make("pg_get_replica_identity_index", 1, self._identity_index)
        make("to_regtype", 1, lambda name: _type_oid(name, missing=True))
        make("to_regnamespace", 1, lambda name: self._contents.schemas.get(str(name)))
        make("to_regrole", 1, lambda name: self._contents.roles.get(str(name)))
        make("pg_get_indexdef", 1, self._index_definition)
        make("pg_get_indexdef", 3, self._index_definition)
        make("pg_get_constraintdef", 1, self._constraint_definition)
        make("pg_get_constraintdef", 2, self._constraint_definition)
        make("obj_description", 1, self._description)
        make("obj_description", 2, lambda oid, _: self._description(oid))
        make("col_description", 2, lambda *_: None)
        make("pg_total_relation_size", 1, self._size)
        make("pg_relation_size", 1, self._size)
        make("pg_relation_size", 2, lambda oid, _: self._size(oid))
        make("pg_database_size", 1, lambda _: None)
        for name, count, aggregate in (
            ("array_agg", 1, functions.ArrayAgg), ("array_agg_by", 2, functions.ArrayAggBy),
            ("string_agg", 2, functions.StringAgg), ("string_agg_by", 3, functions.StringAggBy),
        ):  # fmt: skip
            connection.create_aggregate(name, count, aggregate)  # type: ignore[arg-type]

    # What the functions look up

    def _role_name(self, oid: int | None) -> str | None:
        if oid is None:
            return None
        return next((name for name, one in self._contents.roles.items() if one == oid), f"unknown (OID={oid})")

    def _setting(self, name: str, *, missing: bool) -> str | None:
        found = self._caller.settings.get(str(name).lower())
        if found is None and not missing:
            raise PubsubError(f'unrecognized configuration parameter "{name}"', sqlstate="42704")
        return found

    def _set_config(self, name: str, value: str | None, _: object) -> str | None:
        self._set[name.lower()] = value or ""
        return value

    def take_set(self) -> dict[str, str]:
        """Return the parameters that set_config has set since the last call."""
        with self._lock:
            found, self._set = self._set, {}
        return found

    @staticmethod
    def _lookup(known: Mapping[str, int], name: object, what: str, sqlstate: str) -> int:
        text = str(name).strip('"')
        if text.isdecimal():
            return int(text)
        if text not in known:
            raise PubsubError(f'{what} "{text}" does not exist', sqlstate=sqlstate)
        return known[text]

    @staticmethod
    def _named(known: Mapping[str, int], oid: int | None) -> str | None:
        if oid is None:
            return None
        return next((quote_identifier(name) for name, one in known.items() if one == oid), str(oid))

    def _relation_oid(self, name: object, *, missing: bool = False) -> int | None:
        from pubsub.sql.identifiers import parse_qualified_name

        text = str(name)
        if text.isdecimal():
            return int(text)
        parsed = parse_qualified_name(text)
        for one in self._contents.tables:
            if one.name == parsed.name and one.schema == (parsed.schema or "public"):
                return one.oid
        for schema, relations in definitions().relations.items():
            if parsed.schema in (schema, None if schema == "pg_catalog" else schema) and parsed.name in relations:
                return relations[parsed.name][0]
        if missing:
            return None
        raise UndefinedTable(f'relation "{text}" does not exist')

    def _relation_name(self, oid: object) -> str | None:
        if oid is None:
            return None
        for one in self._contents.tables:
            if oid in (one.oid, one.index_oid):
                name = one.name if oid == one.oid else f"{one.name}_pkey"
                shown = quote_identifier(name)
                return shown if one.schema == "public" else f"{quote_identifier(one.schema)}.{shown}"
        for schema, relations in definitions().relations.items():
            for name, (found, _, _) in relations.items():
                if found == oid:
                    return name if schema == "pg_catalog" else f"{schema}.{name}"
        return "-" if oid == 0 else str(oid)

    def _is_visible(self, oid: object) -> int | None:
        """Return whether a relation is found without its schema: those of pg_catalog and public are."""
        if oid is None:
            return None
        for one in self._contents.tables:
            if oid in (one.oid, one.index_oid):
                return int(one.schema == "public")
        return int(any(found == oid for found, _, _ in definitions().relations["pg_catalog"].values()))

    def _identity_index(self, oid: object) -> int | None:
        return next((one.index_oid for one in self._contents.tables if one.key and one.oid == oid), None)

    def _index_definition(self, oid: int, column: int = 0, _: object = None) -> str | None:
        table = next((one for one in self._contents.tables if one.key and one.index_oid == oid), None)
        if table is None:
            return None
        names = [quote_identifier(table.attributes[number - 1].name) for number in table.key]
        if column:
            return names[column - 1] if column <= len(names) else ""
        name = f"{quote_identifier(table.schema)}.{quote_identifier(table.name)}"
        index = quote_identifier(f"{table.name}_pkey")
        return f"CREATE UNIQUE INDEX {index} ON {name} USING btree ({', '.join(names)})"

    def _constraint_definition(self, oid: int, _: object = None) -> str | None:
        for row in self._contents.rows["pg_constraint"]:
            if row["oid"] == oid:
                table = next(one for one in self._contents.tables if one.oid == row["conrelid"])
                names = [quote_identifier(table.attributes[number - 1].name) for number in table.key]
                return f"PRIMARY KEY ({', '.join(names)})"
        return None

    def _description(self, oid: object) -> str | None:
        return next((one.comment for one in self._contents.tables if one.oid == oid), None)

    def _size(self, oid: object) -> int | None:
        return 0 if oid is not None else None


def _type_oid(name: object, *, missing: bool = False) -> int | None:
    text = str(name).strip().lower().removeprefix("pg_catalog.").strip('"')
    if text.isdecimal():
        return int(text)
    known = definitions().type_oids
    by_sql = {functions.format_type(oid, -1): oid for oid in known.values()}
    found = known.get(text) or by_sql.get(text)
    if found is None and not missing:
        raise PubsubError(f'type "{text}" does not exist', sqlstate="42704")
    return found


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _affinity(kind: str) -> str:
    return "INTEGER" if kind in _NUMBERS else "REAL" if kind in ("float4", "float8") else "TEXT"


def _stored(value: object) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, tuple | list):
        return functions.array_text(value)
    if value is None or isinstance(value, int | float | str):
        return value
    from pubsub.texts import text

    return text(value)


def _value(value: Any, column: Column) -> Any:
    """Return a value as the column's type has it."""
    if value is None:
        return None
    if column.type_name == "bool":
        return bool(value) if not isinstance(value, str) else value in ("t", "true")
    return value


def _complaint(text: str) -> PubsubError:
    kind, _, rest = text.partition(": ")
    if kind == "no such table":
        return UndefinedTable(f'relation "{rest}" does not exist')
    if kind == "no such column":
        return PubsubError(f"column {rest} does not exist", sqlstate="42703")
    if kind == "no such function":
        return PubsubError(
            f"function {rest.lower()} does not exist",
            sqlstate="42883",
            hint="No function matches the given name and argument types. You might need to add explicit type casts.",
        )
    if text == "interrupted":
        return PubsubError("the query on system catalogs takes too long here", sqlstate="54000")
    return FeatureNotSupported(f"this query on system catalogs is not supported: {text}")
