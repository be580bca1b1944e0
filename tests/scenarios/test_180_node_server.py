"""A node's own server, dbname=pubsub: psql with its backslash commands, drivers, tools, roles; on real Delta tables."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa

from pubsub.backend import users
from pubsub.backend.scram import Verifier
from pubsub.server.backend import NodeBackend
from pubsub.server.doors import Doors
from pubsub.settings import Settings
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, RunningNode, wait_until

TABLES = """
CREATE SCHEMA shop;
CREATE TABLE orders (
    id int PRIMARY KEY, name varchar(40), price numeric(12, 2), at timestamptz, ok bool, u uuid, j jsonb, tags text[]
);
INSERT INTO orders SELECT n, 'name ' || n, n * 1.5, '2026-01-02 03:04:05.678+00', n % 2 = 0, gen_random_uuid(), '{"a": 1}', '{a,"b c"}'
    FROM generate_series(1, 5000) n;
CREATE TABLE shop."Odd Name" (a bigint, "B" text, PRIMARY KEY (a, "B"));
INSERT INTO shop."Odd Name" VALUES (1, 'x');
CREATE PUBLICATION p FOR TABLE orders, shop."Odd Name"
"""


class Served:
    """A node with two tables, and its socket and port."""

    def __init__(self, node: RunningNode, doors: Doors) -> None:
        self.node = node
        self.doors = doors

    @property
    def conninfo(self) -> str:
        return f"host={self.node.home} dbname=pubsub user=me"

    @property
    def by_tcp(self) -> str:
        assert self.doors.place is not None
        host, _, port = self.doors.place.rpartition(":")
        return f"host={host} port={port} dbname=pubsub"

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.conninfo, autocommit=True)


@pytest.fixture
def served(replica: Replica) -> Iterator[Served]:
    replica.execute(*TABLES.strip().split(";\n"))
    replica.subscribe()
    replica.caught_up()
    home = replica.node.home
    lines = [
        users.line(name, Verifier.of_password("secret", iterations=1), kind)
        for name, kind in (("admin", "superuser"), ("guest", ""))
    ]
    (home / "users").write_text("\n".join(lines))
    (home / "users").chmod(0o600)
    values = {"walsender": {"listen": "127.0.0.1:0", "auth_file": "users"}}
    settings = Settings.read(values, home)
    node = replica.node
    doors = node.run(Doors.open(settings, NodeBackend(settings, node._node)))
    yield Served(node, doors)
    node.run(doors.close())
    assert not (home / ".s.PGSQL.5432").exists()


def psql(served: Served, *commands: str, program: Path | None = None) -> str:
    """Run psql, the wheel's 18; return what it prints, standard error included."""
    found = program or EmbeddedPostgres("18", wheel=True).psql_path
    arguments = [part for command in commands for part in ("-c", command)]
    environment = {**os.environ, "PGCONNECT_TIMEOUT": "20"}
    ran = subprocess.run(
        [str(found), "-X", "-h", str(served.node.home), "-d", "pubsub", "-U", "me", *arguments],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    return ran.stdout + ran.stderr


COMMANDS = (
    *(
        "\\d",
        "\\d orders",
        "\\d+ shop.*",
        "\\dt *.*",
        "\\dt+",
        "\\dn",
        "\\dn+",
        "\\dRs",
        "\\dRs+",
        "\\dRp",
        "\\du",
        "\\du+",
        "\\l",
    ),
    *(
        "\\l+",
        "\\dv",
        "\\di+",
        "\\df",
        "\\dT+",
        "\\dx",
        "\\dp",
        "\\db+",
        "\\dconfig",
        "\\dO",
        "\\d pg_subscription",
        "\\dD",
        "\\dg",
    ),
    *(
        "\\dc",
        "\\dC",
        "\\dd",
        "\\ddp",
        "\\dE",
        "\\des",
        "\\deu",
        "\\dew",
        "\\dF",
        "\\dFd",
        "\\dFp",
        "\\dFt",
        "\\dL",
        "\\dm",
        "\\do",
    ),
    *(
        "\\dP",
        "\\drds",
        "\\ds",
        "\\dy",
        "\\da",
        "\\dA",
        "\\dAc",
        "\\dAf",
        "\\dAo",
        "\\dX",
        "\\drg",
        "\\dl",
        "\\conninfo",
        "\\encoding",
    ),
)


def test_psql_and_its_backslash_commands(served: Served) -> None:
    for command in COMMANDS:
        shown = psql(served, command)
        assert "ERROR" not in shown, f"{command}\n{shown}"
    described = psql(served, "\\d orders")
    for line in (
        'Table "public.orders"', "id     | integer                  |           | not null", "price  | numeric(12,2)",
        '"orders_pkey" PRIMARY KEY, btree (id)',
    ):  # fmt: skip
        assert line in described
    assert '"Odd Name_pkey" PRIMARY KEY, btree (a, "B")' in psql(served, "\\d+ shop.*")
    assert 'Did not find any relation named "nope"' in psql(served, "\\d nope")
    assert psql(served, "\\dRs").split("\n")[3].split("|")[1:3] == [" pubsub ", " t       "]
    shown = psql(
        served,
        "SELECT id, ok, at, tags FROM orders WHERE id < 3 ORDER BY 1",
        "SHOW wal_receiver_timeout",
        "TABLE pg_subscription_rel",
    )
    assert ' 2 | t  | 2026-01-02 03:04:05.678+00 | {a,"b c"}' in shown
    assert "(2 rows)" in shown
    assert "1min" in shown
    wrong = psql(served, "SELECT 1;\n  SELEC 2")
    assert 'ERROR:  syntax error at or near "SELEC"\nLINE 2:   SELEC 2\n          ^' in wrong
    assert 'ERROR:  column "nope" does not exist' in psql(served, "SELECT nope FROM orders")
    assert "2026-01-02 04:04:05.678+01" in psql(
        served, "SET TIME ZONE 'Europe/Berlin'", "SELECT at FROM orders WHERE id = 1"
    )


def test_statements_take_effect(served: Served) -> None:
    with served.connect() as connection:
        (name,) = connection.execute("SELECT subname FROM pg_subscription").fetchone() or ()
        notices: list[str] = []
        connection.add_notice_handler(lambda one: notices.append(one.message_primary or ""))
        assert (
            connection.execute(f"ALTER SUBSCRIPTION {name} SET (disable_on_error = true)").statusmessage
            == "ALTER SUBSCRIPTION"
        )
        assert connection.execute("SELECT subdisableonerr FROM pg_subscription").fetchone() == (True,)
        connection.execute("DROP SUBSCRIPTION IF EXISTS nope")
        assert notices == ['subscription "nope" does not exist, skipping']
        with pytest.raises(psycopg.errors.UndefinedObject) as caught:
            connection.execute("DROP SUBSCRIPTION nope")
        assert caught.value.diag.message_primary == 'subscription "nope" does not exist'
        with pytest.raises(psycopg.errors.ActiveSqlTransaction), connection.transaction():
            connection.execute(f"ALTER SUBSCRIPTION {name} DISABLE")
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            connection.execute("INSERT INTO orders VALUES (1)")
        with connection.transaction():
            with pytest.raises(psycopg.errors.SyntaxError):
                connection.execute("SELEC")
            with pytest.raises(psycopg.errors.InFailedSqlTransaction):
                connection.execute("SELECT 1")
            raise psycopg.Rollback
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_parameters_cursors_and_copy(served: Served) -> None:
    with psycopg.connect(served.conninfo) as connection:
        run = connection.execute
        for number in range(7):  # psycopg prepares what it has sent five times
            assert run("SELECT name, price FROM orders WHERE id = %s AND ok = %s", [number * 2 + 2, True]).fetchone() == (
                f"name {number * 2 + 2}", (number * 2 + 2) * 3 / 2,
            )  # fmt: skip
        assert run("SELECT relname FROM pg_class WHERE oid = %s::regclass", ["orders"]).fetchone() == ("orders",)
        with connection.cursor(binary=True) as cursor:
            text = run("SELECT * FROM orders WHERE id = 77").fetchone()
            assert cursor.execute("SELECT * FROM orders WHERE id = %s", [77]).fetchone() == text
        with connection.cursor(name="c") as named:
            named.itersize = 700
            assert sorted(row[0] for row in named.execute("SELECT id FROM orders")) == list(range(1, 5001))
        with connection.cursor().copy("COPY (SELECT id, name FROM orders ORDER BY id) TO STDOUT") as copy:
            assert list(copy.rows())[:2] == [("1", "name 1"), ("2", "name 2")]
        with connection.cursor().copy('COPY shop."Odd Name" TO STDOUT WITH (FORMAT csv, HEADER)') as copy:
            assert b"".join(bytes(one) for one in copy) == b"a,B\n1,x\n"
        with connection.cursor().copy("COPY orders (id) TO STDOUT (FORMAT binary)") as copy:
            copy.set_types(["int4"])
            assert sum(row[0] for row in copy.rows()) == 5000 * 5001 // 2
        connection.rollback()
        with connection.pipeline():
            found = [run("SELECT count(*) FROM orders WHERE id <= %s", [number]) for number in range(20)]
            assert [one.fetchone() for one in found] == [(number,) for number in range(20)]


@pytest.mark.full
async def test_asyncpg(served: Served) -> None:
    connection = await asyncpg.connect(host=str(served.node.home), database="pubsub", user="me")
    try:
        row = await connection.fetchrow("SELECT id, name, price, at, ok, u, j FROM orders WHERE id = $1", 7)
        assert (row["id"], row["name"], str(row["price"]), row["ok"]) == (7, "name 7", "10.50", False)
        async with connection.transaction():
            seen = [one["id"] async for one in connection.cursor("SELECT id FROM orders WHERE id <= 100", prefetch=30)]
        assert sorted(seen) == list(range(1, 101))
        assert await connection.fetchval("SELECT subpublications FROM pg_subscription") == ["p"]
        assert (await connection.fetchval("SHOW server_version")).startswith("18")
    finally:
        await connection.close()


def test_a_tool_that_reads_the_catalogs(served: Served) -> None:
    """SQLAlchemy's reflection, as BI tools use it."""
    engine = sa.create_engine(f"postgresql+psycopg://me@/pubsub?host={served.node.home}")
    inspector = sa.inspect(engine)
    assert set(inspector.get_schema_names()) >= {"public", "shop"}
    assert inspector.get_table_names() == ["orders"]
    assert [str(one["type"]) for one in inspector.get_columns("orders")] == [
        "INTEGER", "VARCHAR(40)", "NUMERIC(12, 2)", "TIMESTAMP", "BOOLEAN", "UUID", "JSONB", "ARRAY",
    ]  # fmt: skip
    assert inspector.get_pk_constraint("Odd Name", "shop")["constrained_columns"] == ["a", "B"]
    metadata = sa.MetaData()
    metadata.reflect(engine)
    table = metadata.tables["orders"]
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(table).where(table.c.id < 10)).scalar() == 9
    engine.dispose()


def test_who_may_what_by_tcp(served: Served) -> None:
    def refused(conninfo: str) -> str:
        with pytest.raises(psycopg.OperationalError) as caught:
            psycopg.connect(conninfo)
        return str(caught.value)

    assert "password authentication failed" in refused(f"{served.by_tcp} user=admin password=wrong")
    assert 'database "other" does not exist' in refused(
        served.by_tcp.replace("dbname=pubsub", "dbname=other") + " user=admin password=secret"
    )
    with psycopg.connect(f"{served.by_tcp} user=guest password=secret", autocommit=True) as guest:
        assert guest.execute("SELECT count(*) FROM orders").fetchone() == (5000,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            guest.execute("DROP SUBSCRIPTION nope")
    with psycopg.connect(f"{served.by_tcp} user=admin password=secret", autocommit=True) as admin:
        admin.execute("DROP SUBSCRIPTION IF EXISTS nope")


def test_cancel_and_timeout(served: Served) -> None:
    endless = "SELECT count(*) FROM orders a, orders b, orders c WHERE a.id + b.id + c.id > 1"
    with served.connect() as connection:
        connection.execute("SET statement_timeout = '500ms'")
        with pytest.raises(psycopg.errors.QueryCanceled, match="due to statement timeout"):
            connection.execute(endless)
        connection.execute("RESET statement_timeout")
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(connection.execute, endless)
            wait_until(lambda: (connection.cancel_safe(), wait([running], 0.2).done)[1], "it is cancelled")
            with pytest.raises(psycopg.errors.QueryCanceled, match="due to user request"):
                running.result()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_rows_wait_for_a_client_that_does_not_read(served: Served) -> None:
    """A hundred million rows are not put together anywhere."""
    import psutil

    async def memory() -> int:
        return psutil.Process().memory_info().rss

    connection = served.connect()
    try:
        before = served.node.run(memory())
        connection.pgconn.send_query(b"SELECT a.name, b.name FROM orders a, orders b")
        for _ in range(30):
            served.node.run(asyncio.sleep(0.1))
        assert served.node.run(memory()) - before < 300 << 20
        with served.connect() as other:
            assert other.execute("SELECT count(*) FROM orders").fetchone() == (5000,)
    finally:
        connection.close()


@pytest.mark.full
def test_pubsub_sql_talks_to_the_daemon(served: Served) -> None:
    """Its output and exit codes are those of a client that works on the catalog itself."""

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "pubsub.cli", "--home", str(served.node.home), "sql", *arguments]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        return ran.returncode, ran.stdout, ran.stderr

    assert run("CREATE PUBLICATION q FOR TABLE orders") == (0, "CREATE PUBLICATION\n", ""), "only the daemon can"
    assert (
        run("--format", "csv", "SELECT pubname, puballtables FROM pg_publication")[1] == "pubname,puballtables\nq,f\n"
    )
    query = "SELECT id, price, at, ok, tags FROM orders WHERE id <= 2 ORDER BY id"
    assert run("--format", "json", query)[1] == (
        '[{"id": 1, "price": 1.5, "at": "2026-01-02T03:04:05.678000Z", "ok": false, "tags": "{a,\\"b c\\"}"},\n'
        ' {"id": 2, "price": 3, "at": "2026-01-02T03:04:05.678000Z", "ok": true, "tags": "{a,\\"b c\\"}"}]\n'
    )
    code, out, err = run("DROP PUBLICATION q; DROP SUBSCRIPTION IF EXISTS nope; SELECT 1 AS one; SELEC 2")
    assert (code, out) == (1, "DROP PUBLICATION\nDROP SUBSCRIPTION\n one\n-----\n   1\n(1 row)\n")
    assert err == (
        'NOTICE:  subscription "nope" does not exist, skipping\n'
        'ERROR:  syntax error at or near "SELEC"\nLINE 1: SELEC 2\n        ^\n'
    )
