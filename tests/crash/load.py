"""Random schema and load at the publisher, written by sessions that outlive its crashes.

Statements look up the tables' columns in the server's catalog as they are then.  So nothing has to be known of which transactions
were committed: one that a lock, a deadlock or a crash ended is simply not there.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psycopg

from tests.crash.plan import BESIDE, Plan

_TYPES: Final = {
    "integer": "(random() * 1000)::int",
    "bigint": "(random() * 1e15)::bigint",
    "text": "md5(random()::text)",
    "numeric(12,2)": "round((random() * 1000)::numeric, 2)",
    "timestamp with time zone": "timestamptz '2020-01-01' + random() * interval '900 days'",
    "boolean": "random() < 0.5",
    "double precision": "random()",
    "jsonb": "jsonb_build_object('n', (random() * 10)::int)",
    "integer[]": "ARRAY[(random() * 10)::int, NULL]",
    "bytea": "decode(md5(random()::text), 'hex')",
}
_DEFAULTS: Final = {"integer": "42", "text": "'so far'", "boolean": "true", "numeric(12,2)": "1.25"}
_SCHEMA: Final = """
    CREATE TABLE plain (id int PRIMARY KEY, c0 integer, c1 text, c2 numeric(12,2));
    CREATE TABLE wide (id bigint PRIMARY KEY, c0 integer, big text, c1 text);
    ALTER TABLE wide ALTER big SET STORAGE EXTERNAL;
    CREATE TABLE pair (k text, id int, c0 jsonb, c1 timestamp with time zone, PRIMARY KEY (id, k));
    CREATE TABLE "Keyless" (id int, c0 integer, c1 text);
    ALTER TABLE "Keyless" REPLICA IDENTITY FULL;
    CREATE TABLE appended (id int, c0 boolean, c1 bytea);
    CREATE TABLE parted (id int, part int, c0 text, c1 double precision, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
    CREATE TABLE parted_0 PARTITION OF parted FOR VALUES IN (0);
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1, 2);
    CREATE TABLE parted_rest PARTITION OF parted DEFAULT;
"""
#: By name: the primary key's columns beside `id`, with a value; and whether rows can be changed.
_KEYS: Final = {"pair": {"k": "chr(97 + g % 26)"}, "parted": {"part": "g % 4"}}
APPENDED: Final = "appended"
PUBLICATION: Final = "p"


class Load:
    """The tables of a database, and the sessions that write to them until `end`.  Lines go to `log`."""

    def __init__(self, plan: Plan, connect: Callable[[], psycopg.Connection], log: Path) -> None:
        self.plan = plan
        self.done: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._connect = connect
        self._log = log.open("w")
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def create(self) -> None:
        """Create tables, rows in them if they will be copied, and the publication."""
        with self._connect() as connection:
            connection.execute(_SCHEMA.encode())
            if self.plan.copies:
                writer = _Writer(self, 99)
                for table in self.tables(connection):
                    connection.execute(writer.insert(connection, table, 300).encode())
            what = "ALL TABLES" if self.plan.everything else 'TABLE plain, wide, pair, "Keyless", appended, parted'
            connection.execute(
                f"CREATE PUBLICATION {PUBLICATION} FOR {what} WITH (publish_via_partition_root = true)".encode()
            )

    def start(self) -> None:
        for number in range(self.plan.writers):
            thread = threading.Thread(target=self._write, args=(number,), name=f"writer {number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """End the sessions; raise what one of them has failed with."""
        self._ending.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self.failures:
            raise self.failures[0]

    def close(self) -> None:
        self._log.close()

    def tables(self, connection: psycopg.Connection) -> list[str]:
        """Return all tables but partitions, quoted."""
        rows = connection.execute(
            "SELECT quote_ident(relname) FROM pg_class WHERE relnamespace = 'public'::regnamespace "
            "AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY relname"
        ).fetchall()
        return [name for (name,) in rows]

    def say(self, text: str) -> None:
        self._log.write(f"{time.strftime('%H:%M:%S')} {threading.current_thread().name}: {text}\n")
        self._log.flush()

    def _write(self, number: int) -> None:
        writer = _Writer(self, number)
        try:
            while not self._ending.is_set():
                try:
                    with self._connect() as connection:
                        connection.execute("SET lock_timeout = '300ms'; SET deadlock_timeout = '100ms'")
                        while not self._ending.is_set():
                            writer.step(connection)
                            self._ending.wait(writer.random.choice([0, 0, 0.01, 0.05, 0.3]))
                except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                    # The server is killed, or starts.
                    self.say(f"-- {error}")
                    self._ending.wait(0.1)
        except BaseException as error:
            self.failures.append(error)


class _Writer:
    def __init__(self, load: Load, number: int) -> None:
        self.random = random.Random(f"load {load.plan.seed} {number}")
        self._load = load
        self._number = number
        self._made = 0

    def step(self, connection: psycopg.Connection) -> None:
        """Run a transaction, or end a prepared one."""
        if self.random.random() < 0.1:
            self._end_prepared(connection)
            return
        statements: list[str] = []
        tables = self._load.tables(connection)
        calm = self.random.random() < 0.6
        for _ in range(self.random.choice([1, 1, 2, 4])):
            inner = [self._statement(connection, self.random.choice(tables), calm=calm)]
            if self.random.random() < 0.3:
                inner += [self._statement(connection, self.random.choice(tables), calm=calm)]
                ending = self.random.choice(["ROLLBACK TO s", "ROLLBACK TO s", "RELEASE s"])
                inner = ["SAVEPOINT s", *inner, ending]
            statements += inner
        if self.random.random() < 0.05:
            statements += self._subtransactions(connection, self.random.choice(tables))
        self._made += 1
        gid = f"g{self._number}_{self._made}"
        end = self.random.choices(["COMMIT", "ROLLBACK", f"PREPARE TRANSACTION '{gid}'"], [8, 1, 1.5])[0]
        self._run(connection, [*statements, end])

    def _run(self, connection: psycopg.Connection, statements: list[str]) -> None:
        try:
            connection.execute("BEGIN")
            for statement in statements:
                self._load.say(statement)
                connection.execute(statement.encode())
            self._load.done[statements[-1].split()[0]] += 1
        except psycopg.OperationalError as error:
            if connection.broken or not isinstance(
                error, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected
            ):
                raise
            connection.execute("ROLLBACK")
        except psycopg.DatabaseError as error:
            # Two sessions altered the same thing, or the other has the key: the transaction is not there.
            self._load.say(f"-- {type(error).__name__}: {error}")
            self._load.done[type(error).__name__] += 1
            if connection.broken:
                raise psycopg.OperationalError(str(error)) from error
            connection.execute("ROLLBACK")

    def _end_prepared(self, connection: psycopg.Connection) -> None:
        rows = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"
        ).fetchall()
        if rows:
            outcome = self.random.choice(["COMMIT", "COMMIT", "ROLLBACK"])
            statement = f"{outcome} PREPARED '{self.random.choice(rows)[0]}'"
            self._load.say(statement)
            try:
                connection.execute(statement.encode())
                self._load.done[f"{outcome} PREPARED"] += 1
            except (
                psycopg.errors.UndefinedObject,
                psycopg.errors.ObjectInUse,
                psycopg.errors.ObjectNotInPrerequisiteState,
            ):
                return  # the other session was first

    def _columns(self, connection: psycopg.Connection, table: str) -> dict[str, str]:
        """Return the columns that are no part of a key, quoted, with their types."""
        rows = connection.execute(
            "SELECT quote_ident(attname), format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [table],
        ).fetchall()
        return {name: kind for name, kind in rows if name != "id" and name not in _KEYS.get(table, {})}

    def _value(self, name: str, kind: str) -> str:
        if name == "big":
            # Kept out of line, for it is EXTERNAL, and an UPDATE of other columns leaves it out.
            return "repeat(md5(random()::text), 100)"
        return self.random.choice([_TYPES.get(kind, "NULL")] * 5 + ["NULL"])

    def insert(self, connection: psycopg.Connection, table: str, count: int) -> str:
        values = {"id": "m + g"} | _KEYS.get(table, {})
        for name, kind in self._columns(connection, table).items():
            values[name] = self._value(name, kind)
        # Each session has ids of its own, or all rows of a key would meet in one lock.
        first = (self._number % 50) * 10_000_000
        return (
            f"INSERT INTO {table} ({', '.join(values)}) SELECT {', '.join(values.values())} "
            f"FROM (SELECT coalesce(max(id), {first}) AS m FROM {table} WHERE id BETWEEN {first} AND {first + 9_999_999}) x, "
            f"generate_series(1, {count}) g"
        )

    def _some(self, table: str, most: int) -> str:
        """Return a condition for some rows that are next to each other."""
        return (
            f"id IN (SELECT id FROM {table} WHERE id >= (SELECT min(id) + random() * (max(id) - min(id)) FROM {table}) "
            f"ORDER BY id LIMIT {self.random.randint(1, most)})"
        )

    def _statement(self, connection: psycopg.Connection, table: str, *, calm: bool) -> str:
        """Return a random statement for `table`; if `calm` one of rows."""
        pick = self.random.random()
        if not calm and pick < 0.12:
            return f"TRUNCATE {table}"
        # Some ALTERs ask for a copy, which a table that joined without one does not get unasked (docs/schema-changes.md).
        if not calm and pick < 0.45 and self.plan.copies:
            return self._alter(connection, table)
        if pick < 0.6 or table == APPENDED:
            return self.insert(connection, table, self.random.choice([1, 3, 20, 20, 300, 300, 5000]))
        if pick < 0.68:
            return f"DELETE FROM {table} WHERE {self._some(table, 200)}"
        if pick < 0.75:
            return f"UPDATE {table} SET id = -id - {self.random.randint(1, 9)} WHERE {self._some(table, 20)}"
        columns = self._columns(connection, table)
        if not columns:
            return f"DELETE FROM {table} WHERE {self._some(table, 5)}"
        name = self.random.choice([*columns])
        value = self._value(name, columns[name])
        most = self.random.choice([1, 50, 50, 1000])
        return f"UPDATE {table} SET {name} = {value} WHERE {self._some(table, most)}"

    def _subtransactions(self, connection: psycopg.Connection, table: str) -> list[str]:
        found = []
        for number in range(self.random.choice([5, 50, 100])):
            end = "ROLLBACK TO" if self.random.random() < 0.4 else "RELEASE"
            found += [f"SAVEPOINT s{number}", self.insert(connection, table, 3), f"{end} s{number}"]
        return found

    def _alter(self, connection: psycopg.Connection, table: str) -> str:
        columns = self._columns(connection, table)
        self._made += 1
        new = f"n{self._number}_{self._made}"
        kinds = ["add"] if len(columns) < 7 else ["nothing"]
        if columns:
            kinds += ["add default", "drop", "rename", "type", "swap"]
        kind = self.random.choice(kinds)
        if kind in {"add", "add default"}:
            of = self.random.choice([*(_TYPES if kind == "add" else _DEFAULTS)])
            default = ""
            if kind == "add default":
                default = f" DEFAULT {self.random.choice([_DEFAULTS[of], _DEFAULTS[of], _TYPES[of]])}"
            return f"ALTER TABLE {table} ADD COLUMN {new} {of}{default}"
        if kind == "nothing":
            return f"ALTER TABLE {table} ALTER id SET STATISTICS 50"
        name = self.random.choice([*columns])
        if kind == "swap":
            other = self.random.choice([*columns])
            if name == other or (self.plan.kind == BESIDE and columns[name] != columns[other]):
                return f"ALTER TABLE {table} RENAME {name} TO {new}"
            return (
                f"ALTER TABLE {table} RENAME {name} TO {new}; ALTER TABLE {table} RENAME {other} TO {name}; "
                f"ALTER TABLE {table} RENAME {new} TO {other}"
            )
        if kind == "drop" and len(columns) > 1:
            return f"ALTER TABLE {table} DROP COLUMN {name}"
        if kind == "type" and self.plan.kind == BESIDE:
            # A history takes a wider type of the same kind, and stops for any other.
            wider = {"integer": "bigint", "numeric(12,2)": "numeric(14,2)"}.get(columns[name])
            return f"ALTER TABLE {table} ALTER {name} {f'TYPE {wider}' if wider else 'SET STATISTICS 50'}"
        if kind == "type":
            return f"ALTER TABLE {table} ALTER {name} TYPE text"
        return f"ALTER TABLE {table} RENAME {name} TO {new}"

    @property
    def plan(self) -> Plan:
        return self._load.plan
