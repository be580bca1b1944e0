"""The same statements on a node and on a stock PostgreSQL: the same outcome, SQLSTATE, words and notices, as 18 has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psycopg

from pubsub.errors import PubsubError
from pubsub.node.node import Node
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres

#: Option lists of CREATE SUBSCRIPTION; the subscription is dropped after each.
CREATED_WITH = """
connect = false, enabled = true
connect = false, create_slot = true
connect = false, copy_data = true
connect = false, slot_name = NONE
connect = false, failover = true, slot_name = NONE
connect = false, streaming = PARALLEL, origin = NONE, slot_name = aa, binary = on
slot_name = NONE, enabled = true
slot_name = none
slot_name = NONE, enabled = false
slot_name = NONE, create_slot = true, enabled = false
slot_name = NONE, create_slot = false
slot_name = NONE, create_slot = false, enabled = false
slot_name = ''
slot_name = 'A b'
slot_name = 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'
slot_name
create_slot = false, slot_name = nothere, enabled = false
enabled = 3
enabled = maybe
streaming = maybe
streaming = 2
origin = foo
origin = ''
origin
nothing_like_it = 1
copy_data, enabled = false
copy_data = true, copy_data = true
binary = foo
two_phase = foo
two_phase = 1.5
synchronous_commit = bar
synchronous_commit = 'remote'
disable_on_error = 2
password_required = x
run_as_owner = x
failover = x
refresh = true
lsn = '0/1'
"""

#: Statements in order; @ stands for the publisher.
STATEMENTS = """
DROP SUBSCRIPTION IF EXISTS x
CREATE SUBSCRIPTION x CONNECTION 'foo' PUBLICATION p
CREATE SUBSCRIPTION x CONNECTION 'host=h bogus=1' PUBLICATION p
CREATE SUBSCRIPTION x CONNECTION '' PUBLICATION p, p WITH (connect = false)
CREATE SUBSCRIPTION x CONNECTION '' PUBLICATION p, q WITH (connect = false, slot_name = NONE)
CREATE SUBSCRIPTION x CONNECTION '' PUBLICATION p WITH (connect = false)
CREATE SUBSCRIPTION x PUBLICATION p
CREATE SUBSCRIPTION x CONNECTION 'a=b'
CREATE SUBSCRIPTION x CONNECTION '' PUBLICATION p WITH ()
ALTER SUBSCRIPTION nope ENABLE
DROP SUBSCRIPTION nope
ALTER SUBSCRIPTION x ENABLE
ALTER SUBSCRIPTION x REFRESH PUBLICATION
ALTER SUBSCRIPTION x SET PUBLICATION p
ALTER SUBSCRIPTION x ADD PUBLICATION z
ALTER SUBSCRIPTION x ADD PUBLICATION p WITH (refresh = false)
ALTER SUBSCRIPTION x ADD PUBLICATION zz WITH (nope = true)
ALTER SUBSCRIPTION x DROP PUBLICATION zz WITH (refresh = false)
ALTER SUBSCRIPTION x DROP PUBLICATION p
ALTER SUBSCRIPTION x DROP PUBLICATION p, q WITH (refresh = false)
ALTER SUBSCRIPTION x SET PUBLICATION a, a WITH (refresh = false)
ALTER SUBSCRIPTION x DROP PUBLICATION q WITH (copy_data = true, refresh = false)
ALTER SUBSCRIPTION x SET PUBLICATION p, q WITH (refresh = false, copy_data = true)
ALTER SUBSCRIPTION x SET (connect = true)
ALTER SUBSCRIPTION x SET (enabled = true)
ALTER SUBSCRIPTION x SET (create_slot = false)
ALTER SUBSCRIPTION x SET (copy_data = false)
ALTER SUBSCRIPTION x SET (two_phase = false)
ALTER SUBSCRIPTION x SET (two_phase = true)
ALTER SUBSCRIPTION x SET (failover = true)
ALTER SUBSCRIPTION x SET (slot_name = 'bad name')
ALTER SUBSCRIPTION x SET (origin = bar)
ALTER SUBSCRIPTION x SET ()
ALTER SUBSCRIPTION x SET (streaming = off, streaming = on)
ALTER SUBSCRIPTION x SKIP (lsn = NONE)
ALTER SUBSCRIPTION x SKIP (lsn = '0/0')
ALTER SUBSCRIPTION x SKIP (lsn = 'zz')
ALTER SUBSCRIPTION x SKIP (xid = 5)
ALTER SUBSCRIPTION x SKIP (lsn = '0/12345')
ALTER SUBSCRIPTION x SKIP ()
ALTER SUBSCRIPTION x CONNECTION 'bogus'
ALTER SUBSCRIPTION x REFRESH
ALTER SUBSCRIPTION x RENAME TO x
ALTER SUBSCRIPTION x RENAME TO y
ALTER SUBSCRIPTION y SET (slot_name = xx)
ALTER SUBSCRIPTION y SET (slot_name = xx, two_phase = false)
ALTER SUBSCRIPTION y ENABLE
ALTER SUBSCRIPTION y SET (slot_name = NONE)
ALTER SUBSCRIPTION y SET (two_phase = true)
ALTER SUBSCRIPTION y SET (failover = true)
ALTER SUBSCRIPTION y DISABLE
ALTER SUBSCRIPTION y SET (slot_name = NONE)
ALTER SUBSCRIPTION y SET (failover = true)
ALTER SUBSCRIPTION y SET (two_phase = false)
ALTER SUBSCRIPTION y SET (synchronous_commit = local, binary = false, streaming = on, run_as_owner = true, disable_on_error = true)
ALTER SUBSCRIPTION y OWNER TO CURRENT_USER
DROP SUBSCRIPTION y CASCADE
DROP SUBSCRIPTION IF EXISTS y RESTRICT
CREATE SUBSCRIPTION z CONNECTION 'host=127.0.0.1 port=1 dbname=d user=u' PUBLICATION p
CREATE SUBSCRIPTION z CONNECTION 'host=127.0.0.1 port=1 dbname=d user=u' PUBLICATION p WITH (connect = false, slot_name = zzz)
DROP SUBSCRIPTION z
ALTER SUBSCRIPTION z DISABLE
ALTER SUBSCRIPTION z SET (slot_name = NONE)
DROP SUBSCRIPTION z
"""

AWAY = "ALTER SUBSCRIPTION x DISABLE; ALTER SUBSCRIPTION x SET (slot_name = NONE); DROP SUBSCRIPTION x"


def first_line(text: str | None) -> str:
    """Return the first line: libpq's advice comes after it, and is a hint here."""
    return (text or "").split("\n")[0].strip()


def as_of_18(message: str) -> str:
    """Return a message of PostgreSQL 19, which can refresh sequences, too, as 18 has it."""
    return message.replace("REFRESH PUBLICATION is not allowed", "REFRESH is not allowed")


def test_messages_are_those_of_a_postgresql_subscriber(
    database: Database, stock_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q")
    stock_server.create_database(database.name)
    stock_server.execute("CREATE TABLE t (id int PRIMARY KEY)", database.name)
    differences: list[str] = []
    said: list[str] = []
    connection = stock_server.connect(database.name)
    connection.add_notice_handler(lambda notice: said.append(f"{notice.severity}: {notice.message_primary}"))

    def theirs(statement: str) -> tuple[str, ...]:
        said.clear()
        try:
            connection.execute(statement.encode())
        except psycopg.Error as error:
            return (
                error.sqlstate or "",
                as_of_18(first_line(error.diag.message_primary)),
                first_line(error.diag.message_hint),
            )
        return ("done", *said)

    async def ours(node: Node, statement: str) -> tuple[str, ...]:
        told: list[str] = []
        try:
            async for result in node.results(statement):
                told += [
                    f"{notice.severity}: {notice.message}"
                    for notice in result.notices
                    if notice.severity in ("NOTICE", "WARNING") and "has no effect" not in notice.message
                ]
        except PubsubError as error:
            return (error.sqlstate, first_line(error.message), first_line(error.hint))
        return ("done", *told)

    async def compare(node: Node, statement: str) -> None:
        one, other = theirs(statement), await ours(node, statement)
        # libpq's advice is part of its message there, and a hint here.
        if one != other and not (one[:2] == other[:2] and one[0] == "08006" and not one[2]):
            differences.append(f"{statement}\n  PostgreSQL: {one}\n  here:       {other}")

    def drop_slots() -> None:
        for (slot,) in database.query("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"):
            database.server.drop_slot(slot)

    async def run() -> None:
        async with Node(tmp_path / "node", workers=False) as node:
            for options in CREATED_WITH.strip().splitlines():
                created = f"CREATE SUBSCRIPTION x CONNECTION {quote_literal(database.conninfo)} PUBLICATION p WITH ({options})"
                one = theirs(created)
                drop(theirs)
                drop_slots()
                other = await ours(node, created)
                for statement in AWAY.split("; "):
                    await ours(node, statement)
                drop_slots()
                if one != other:
                    differences.append(f"WITH ({options})\n  PostgreSQL: {one}\n  here:       {other}")
            for statement in STATEMENTS.strip().splitlines():
                await compare(node, statement)

    def drop(execute: Callable[[str], object]) -> None:
        for statement in AWAY.split("; "):
            execute(statement)

    try:
        asyncio.run(run())
    finally:
        connection.close()
        stock_server.drop_database(database.name)
        drop_slots()
    assert not differences, "\n".join(differences)
