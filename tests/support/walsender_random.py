"""Random DDL and DML in concurrent sessions, from a seed, and a replica in memory to which decoded changes are applied.

Every table has a key `id`.  A column added with a default has the default in its name (c7_d42), so that the replica
knows its value in existing rows, which is not in the WAL.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import psycopg

from pubsub.protocol.pgoutput import (
    UNCHANGED,
    BeginPrepare,
    CommitPrepared,
    Delete,
    Insert,
    Prepare,
    Relation,
    RollbackPrepared,
    Truncate,
    Update,
    Value,
    read_message,
)
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.walsender_decodings import Message
from tests.support.walsender_options import EVERYTHING, PUBLICATIONS, alteration

CATALOGS = (
    "pg_class",
    "pg_attribute",
    "pg_type",
    "pg_index",
    "pg_publication_rel",
    "pg_enum",
    "pg_namespace",
    "pg_inherits",
)


class Worker(threading.Thread):
    """One session: transactions of random statements until `deadline`, some prepared, some with an origin."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        dbname: str,
        seed: str,
        deadline: float,
        *,
        replayed: bool,
        publications: str,
    ) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.name = f"w{seed.rpartition('-')[2]}"
        self._server = server
        self._dbname = dbname
        self._deadline = deadline
        self._replayed = replayed
        self._publications = publications
        self._prepared: list[str] = []
        """Prepared transactions without an outcome yet."""
        self._from_elsewhere = False
        self._count = 0
        self.done = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self._server.connect(self._dbname) as connection:
                connection.execute("SET lock_timeout = '500ms'; SET deadlock_timeout = '50ms'")
                while time.monotonic() < self._deadline:
                    self._transaction(connection)
                    # Other sessions wait for a prepared transaction's locks.
                    while self._prepared and (len(self._prepared) > 1 or self.random.random() < 0.3):
                        self._end_prepared(connection)
                while self._prepared:
                    self._end_prepared(connection)
        except BaseException as error:
            self.failure = error

    def _try(self, connection: psycopg.Connection[tuple[object, ...]], statement: str) -> bool:
        try:
            connection.execute(statement.encode())
            self.done += 1
            return True
        except psycopg.errors.OperationalError:
            if connection.closed:
                raise
            return False
        except psycopg.Error:
            return False

    def _end_prepared(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        finish = "COMMIT" if self.random.random() < 0.7 else "ROLLBACK"
        # PREPARE of a failed transaction rolls it back without an error: there may be none to end.
        self._try(connection, f"{finish} PREPARED '{self._prepared.pop(0)}'")

    def _origin(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        """Set or reset the session's replication origin, or give the transaction an origin LSN and time."""
        if self._from_elsewhere and self.random.random() < 0.5:
            lsn, day = self.random.randint(1, 1 << 30), self.random.randint(1, 28)
            self._try(connection, f"SELECT pg_replication_origin_xact_setup('0/{lsn:X}', '2020-01-{day}')")
        elif self._from_elsewhere:
            self._from_elsewhere = not self._try(connection, "SELECT pg_replication_origin_session_reset()")
        else:
            self._from_elsewhere = self._try(
                connection, f"SELECT pg_replication_origin_session_setup('from {self.name}')"
            )

    def _transaction(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        choice = self.random.random()
        if self.random.random() < 0.03:
            self._origin(connection)
        if choice < 0.08:
            self._try(connection, self._alone())
            return
        if choice < 0.4:
            self._try(connection, self._statement())
            return
        self._try(connection, "BEGIN")
        depth = 0
        for _ in range(self.random.randint(1, 12)):
            if connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                if not depth:
                    break
                self._try(connection, f"ROLLBACK TO s{depth}")
                continue
            if self.random.random() < 0.004:
                self._origin(connection)
            roll = self.random.random()
            if roll < 0.2:
                depth += 1
                self._try(connection, f"SAVEPOINT s{depth}")
            elif roll < 0.3 and depth:
                self._try(connection, f"ROLLBACK TO s{depth}")
            elif roll < 0.4 and depth:
                self._try(connection, f"RELEASE s{depth}")
                depth -= 1
            else:
                self._try(connection, self._statement())
        end = self.random.random()
        if end < 0.1:
            gid = f"{self.name}_{self.done}{'_nodecode' if self.random.random() < 0.1 else ''}"
            if self._try(connection, f"PREPARE TRANSACTION '{gid}'"):
                self._prepared.append(gid)
                if self.random.random() < 0.4:
                    self._end_prepared(connection)
                elif self.random.random() < 0.5:
                    self._try(connection, self._statement())
                return
        self._try(connection, "ROLLBACK" if end > 0.85 else "COMMIT")

    def _alone(self) -> str:
        """Return a statement that cannot run in a transaction, or that rewrites much."""
        r = self.random
        return r.choice(
            (
                "VACUUM",
                f"VACUUM FULL {self._table()}",
                f"VACUUM {r.choice(CATALOGS)}",
                f"VACUUM FULL {r.choice(CATALOGS)}",
                f"CLUSTER {self._table()} USING {self._table()}_pkey",
                f"VACUUM (FREEZE) {r.choice(CATALOGS)}",
                f"ANALYZE {self._table()}",
                "CHECKPOINT",
                f"REINDEX TABLE {self._table()}",
                f"ALTER TYPE e ADD VALUE IF NOT EXISTS 'v{r.randint(1, 40)}'",
            )
        )

    def _table(self) -> str:
        return self.random.choice(("t1", "t2", "t3", "t4", "p", "p1", "p2", f"{self.name}_a", f"{self.name}_b"))

    def _text(self) -> str:
        r = self.random
        size = r.choice((0, 1, 5, 5, 20, 200, 3000, 9000))
        if r.random() < 0.1:
            return "NULL"
        return f"(SELECT string_agg(md5(({r.randint(1, 9999)} + g)::text), '') FROM generate_series(1, {size // 32 + 1}) g)"

    def _statement(self) -> str:
        r = self.random
        if r.random() < 0.02 and (altered := alteration(self._publications, r)):
            return altered
        if r.random() < 0.02:
            return f"SELECT FROM {self._table()} WHERE id < 100 FOR {r.choice(('UPDATE', 'SHARE'))}"
        if r.random() < 0.06:
            return self._definition()
        table = self._table()
        number = r.randint(1, 400)
        roll = r.random()
        if roll < 0.22:
            return f"INSERT INTO {table} (id, a, b) VALUES ({number}, {r.randint(1, 9)}, {self._text()}) ON CONFLICT DO NOTHING"
        if roll < 0.3:
            return (
                f"INSERT INTO {table} (id, a, b) SELECT g, {r.randint(1, 9)}, {self._text()} "
                f"FROM generate_series({number}, {number + r.randint(0, 30)}) g ON CONFLICT (id) DO UPDATE SET a = EXCLUDED.a + 1"
            )
        if roll < 0.45:
            return f"UPDATE {table} SET a = a + 1 WHERE id BETWEEN {number} AND {number + r.randint(0, 20)}"
        if roll < 0.53:
            return f"UPDATE {table} SET b = {self._text()} WHERE id BETWEEN {number} AND {number + r.randint(0, 5)}"
        if roll < 0.57:
            return f"UPDATE {table} SET id = id + 1000 WHERE id = {number}"
        if roll < 0.65:
            return f"DELETE FROM {table} WHERE id BETWEEN {number} AND {number + r.randint(0, 10)}"
        if roll < 0.67:
            return f"TRUNCATE {table}"
        if roll < 0.7:
            self._count += 1
            return f"CREATE TABLE IF NOT EXISTS {self.name}_{r.choice('ab')} (id int PRIMARY KEY, a int, b text, m e)"
        if roll < 0.72:
            return f"DROP TABLE IF EXISTS {self.name}_{r.choice('ab')}"
        if roll < 0.78:
            default = r.randint(1, 99)
            name = f"c{r.randint(1, 30)}"
            if r.random() < 0.5:
                return f"ALTER TABLE {table} ADD COLUMN {name}_d{default} int DEFAULT {default}"
            return f"ALTER TABLE {table} ADD COLUMN {name} text"
        if roll < 0.83:
            return (
                f"DO $$ DECLARE c text; BEGIN SELECT attname INTO c FROM pg_attribute WHERE attrelid = '{table}'::regclass AND "
                "attnum > 3 AND NOT attisdropped AND attislocal ORDER BY random() LIMIT 1; "
                f"IF c IS NOT NULL THEN EXECUTE format('ALTER TABLE {table} DROP COLUMN %I', c); END IF; END $$"
            )
        if roll < 0.85:
            identity = r.choice(("FULL", "DEFAULT"))
            if table != "p":
                return f"ALTER TABLE {table} REPLICA IDENTITY {identity}"
            # A server that publishes via the root does not notice a change of the root's identity alone.
            return "; ".join(
                f"ALTER TABLE {one} REPLICA IDENTITY {kind}"
                for kind in ("NOTHING", identity)
                for one in ("p", "p1", "p2")
            )
        if roll < 0.87 and not self._replayed:
            return f"ALTER TABLE {table} ALTER a TYPE {r.choice(('int', 'bigint', 'numeric'))}"
        if roll < 0.89:
            return (
                f"COPY {table} (id, a, b) FROM PROGRAM 'seq {number} {number + 20} | sed s/$/,7,copied/' (FORMAT csv)"
            )
        if roll < 0.91:
            return f"CREATE INDEX ON {table} (a); ANALYZE {table}"
        if roll < 0.93:
            return "CREATE TEMP TABLE IF NOT EXISTS tmp (x int); INSERT INTO tmp VALUES (1); DROP TABLE tmp"
        if roll < 0.95:
            return (
                f"CREATE TABLE c{self.name}{self.done} (x int, y text DEFAULT 'q', z e[]); "
                f"INSERT INTO c{self.name}{self.done} VALUES (1); DROP TABLE c{self.name}{self.done}"
            )
        if roll < 0.96:
            return f"SELECT pg_logical_emit_message({r.choice(('true', 'false'))}, 'p', 'message {number}')"
        if roll < 0.97:
            return (
                f"ALTER TABLE {self.name}_a RENAME TO {self.name}_x; ALTER TABLE {self.name}_x RENAME TO {self.name}_a"
            )
        if roll < 0.98:
            return (
                "ALTER TABLE p DETACH PARTITION p2; ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (200) TO (100000)"
            )
        return (
            f"DO $$ BEGIN FOR i IN 1..{r.randint(1, 30)} LOOP BEGIN INSERT INTO {table} (id, a) VALUES ({number} + i, i); "
            "IF i % 3 = 0 THEN RAISE EXCEPTION 'x'; END IF; EXCEPTION WHEN OTHERS THEN NULL; END; END LOOP; END $$"
        )

    def _definition(self) -> str:
        """Return a statement that changes the description of rows, but no row."""
        r = self.random
        table = self._table()
        own = f"{self.name}_{r.choice('ab')}"
        # Not the root: see `_statement` on a change of its identity alone.
        identified = table if table != "p" else "p1"
        statements = [
            f"ALTER TABLE {table} ALTER b SET STORAGE {r.choice(('PLAIN', 'EXTERNAL', 'EXTENDED', 'MAIN'))}",
            (
                f"CREATE UNIQUE INDEX IF NOT EXISTS {identified}_key ON {identified} (id) INCLUDE (a); "
                f"ALTER TABLE {identified} REPLICA IDENTITY USING INDEX {identified}_key"
            ),
            f"DROP INDEX IF EXISTS {identified}_key",
            f"ALTER TABLE {identified} REPLICA IDENTITY NOTHING",
            f"ALTER TABLE {own} SET SCHEMA beside",
            f"ALTER TABLE beside.{own} SET SCHEMA public",
            f"COMMENT ON TABLE {table} IS 'seen'; GRANT SELECT ON {table} TO PUBLIC",
            # A root above the root, in steps between which other statements run.
            "CREATE TABLE top (LIKE p) PARTITION BY RANGE (id)",
            "ALTER TABLE top ATTACH PARTITION p FOR VALUES FROM (0) TO (100000)",
            "CREATE TABLE top (LIKE p) PARTITION BY RANGE (id); ALTER TABLE top ATTACH PARTITION p DEFAULT",
            "ALTER TABLE top DETACH PARTITION p",
            "ALTER TABLE top DETACH PARTITION p; DROP TABLE top",
        ]
        if not self._replayed:
            column = f"c{r.randint(1, 30)}"
            statements += [
                f"ALTER TABLE {own} SET {r.choice(('LOGGED', 'UNLOGGED'))}",
                f"CREATE TABLE {own} (id int PRIMARY KEY, a int, b text, g int GENERATED ALWAYS AS (a + 1) STORED)",
                f"ALTER TABLE {table} RENAME {column} TO {column}x",
                f"ALTER TABLE {table} RENAME {column}x TO {column}",
                f"ALTER TABLE {table} RENAME b TO {column}; ALTER TABLE {table} ADD b text",
            ]
        return r.choice(statements)


SETUP = """
CREATE SCHEMA beside;
CREATE TYPE e AS ENUM ('x', 'y');
CREATE TABLE t1 (id int PRIMARY KEY, a int, b text);
CREATE TABLE t2 (id int PRIMARY KEY, a int, b text);
ALTER TABLE t2 REPLICA IDENTITY FULL;
CREATE TABLE t3 (id int PRIMARY KEY, a int, b text, m e DEFAULT 'x');
ALTER TABLE t3 ALTER b SET STORAGE EXTERNAL;
CREATE TABLE t4 (id int PRIMARY KEY, a int, b text) WITH (fillfactor = 50);
CREATE TABLE p (id int PRIMARY KEY, a int, b text) PARTITION BY RANGE (id);
CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (200);
CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (200) TO (100000);
"""


WORKERS = 4


def set_up(server: EmbeddedPostgres, dbname: str, publications: str) -> None:
    """Create the tables, the publications and an origin for each session."""
    statements = [statement for statement in SETUP.split(";\n") if statement.strip()]
    statements += PUBLICATIONS[publications]
    statements += [f"SELECT pg_replication_origin_create('from w{n}')" for n in range(WORKERS)]
    with server.connect(dbname) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def run(
    server: EmbeddedPostgres,
    dbname: str,
    seed: int,
    seconds: float,
    *,
    replayed: bool,
    publications: str = EVERYTHING,
) -> int:
    """Run the sessions; return the number of statements done.  Raises the error that ended a session."""
    deadline = time.monotonic() + seconds
    threads = [
        Worker(server, dbname, f"{seed}-{n}", deadline, replayed=replayed, publications=publications)
        for n in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        if thread.failure is not None:
            raise thread.failure
    return sum(thread.done for thread in threads)


Row = dict[str, Value]


class Replica:
    """Tables in memory: rows by relation oid and `id`."""

    def __init__(self) -> None:
        self.relations: dict[int, Relation] = {}
        self.rows: dict[int, dict[bytes, Row]] = {}

    def apply(self, messages: Sequence[Message]) -> None:
        """Apply transactions that were not streamed, prepared ones at COMMIT PREPARED."""
        prepared: dict[int, list[Message]] = {}
        inside: list[Message] | None = None
        for message in messages:
            read = read_message(message.data)
            if inside is not None and not isinstance(read, Prepare):
                # A definition applies to other transactions at once, and again to its own rows when they are committed.
                inside.append(message)
                if not isinstance(read, Relation):
                    continue
            match read:
                case BeginPrepare():
                    inside = prepared[read.xid] = []
                case Prepare():
                    inside = None
                case CommitPrepared():
                    self.apply(prepared.pop(read.xid))
                case RollbackPrepared():
                    del prepared[read.xid]
                case Relation():
                    self.relations[read.oid] = read
                case Insert(oid, new) if self._has_key(oid):
                    self._put(oid, self._named(oid, new))
                case Update(oid, _, old, new) if self._has_key(oid):
                    row = self._named(oid, new)
                    before = self._named(oid, old) if old is not None else row
                    key = before["id"]
                    assert isinstance(key, bytes)
                    stored = self.rows.get(oid, {}).pop(key, None)
                    for name, value in row.items():
                        if value is UNCHANGED:
                            assert stored is not None, (self.relations[oid].name, key)
                            row[name] = stored.get(name, _default(name))
                    self._put(oid, row)
                case Delete(oid, _, old) if self._has_key(oid):
                    key = self._named(oid, old)["id"]
                    assert isinstance(key, bytes)
                    self.rows.get(oid, {}).pop(key, None)
                case Truncate(oids):
                    for oid in oids:
                        self.rows.pop(oid, None)
                case _:
                    pass

    def _has_key(self, oid: int) -> bool:
        """Return whether the table has the key `id`; others are ignored."""
        return any(column.name == "id" for column in self.relations[oid].columns)

    def _named(self, oid: int, values: tuple[Value, ...]) -> Row:
        columns = self.relations[oid].columns
        assert len(columns) == len(values)
        return {column.name: value for column, value in zip(columns, values, strict=True)}

    def _put(self, oid: int, row: Row) -> None:
        key = row["id"]
        assert isinstance(key, bytes)
        self.rows.setdefault(oid, {})[key] = row

    def difference(self, server: EmbeddedPostgres, dbname: str) -> str:
        """Return "" if the server's tables have the same rows, otherwise the first difference."""
        tables = server.query(
            "SELECT oid::int8, oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace "
            "AND relname ~ '^(t[0-9]|p[0-9]|w)'",
            dbname,
        )
        for oid, name in tables:
            columns = [
                str(column)
                for (column,) in server.query(
                    f"SELECT attname FROM pg_attribute WHERE attrelid = {oid} AND attnum > 0 AND NOT attisdropped "
                    "ORDER BY attnum",
                    dbname,
                )
            ]
            listed = ", ".join(f'"{column}"::text' for column in columns)
            theirs = {
                str(row[columns.index("id")]).encode(): {
                    column: None if value is None else str(value).encode()
                    for column, value in zip(columns, row, strict=True)
                }
                for row in server.query(f"SELECT {listed} FROM {name}", dbname)
            }
            mine = {
                key: {column: row.get(column, _default(column)) for column in columns}
                for key, row in self.rows.get(oid, {}).items()
            }
            if mine != theirs:
                for key in sorted(mine.keys() | theirs.keys()):
                    if mine.get(key) != theirs.get(key):
                        return f"{name} {key!r}: decoded {str(mine.get(key))[:500]}, the server has {str(theirs.get(key))[:500]}"
        return ""


def _default(name: str) -> bytes | None:
    _, mark, value = name.partition("_d")
    return value.encode() if mark else None
