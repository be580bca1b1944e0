"""Commands against real publishers: what is refused, in which words; a refused command leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from typer.testing import CliRunner, Result

from launcher.slot_creation import make_slot
from pubsub.cli.app import app
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import PATIENCE, wait_until

PASSWORD = "pw-of-the-superuser"


@dataclass(frozen=True, slots=True)
class Cli:
    """The command line on one node."""

    home: Path

    def arguments(self, *arguments: str) -> list[str]:
        return ["--home", str(self.home), "--verbose", *arguments]

    def start(self, *arguments: str, ignored: bool = False) -> subprocess.Popen[str]:
        """Start a command in a process of its own, so that a test can send it signals.

        `ignored`: with SIGINT ignored, as a shell starts its background jobs.
        """
        command = [sys.executable, "-X", "faulthandler", "-m", "pubsub.cli", *self.arguments(*arguments)]
        if ignored:
            command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str) -> Result:
        """Run a command in this process: starting a process costs more than most commands do."""
        ran = CliRunner().invoke(app, self.arguments(*arguments))
        if ran.exception is not None and not isinstance(ran.exception, SystemExit):
            raise ran.exception
        return ran

    def sql(self, statement: str) -> Result:
        return self.run("sql", statement)

    def done(self, statement: str) -> str:
        """Run a statement that succeeds with only command tags on standard output; return its standard error."""
        ran = self.sql(statement)
        assert ran.exit_code == 0, ran.stderr
        assert all(line.endswith(" SUBSCRIPTION") for line in ran.stdout.splitlines()), ran.stdout
        return ran.stderr

    def refused(self, statement: str) -> list[str]:
        """Run a statement that fails with exit code 1 and an empty standard output; return the lines of its error."""
        ran = self.sql(statement)
        assert (ran.exit_code, ran.stdout) == (1, ""), ran
        return ran.stderr.splitlines()

    def rows(self, query: str) -> list[dict[str, Any]]:
        ran = self.run("sql", "--format", "json", query)
        assert ran.exit_code == 0, ran.stderr
        found: list[dict[str, Any]] = json.loads(ran.stdout)
        return found

    def is_empty(self) -> bool:
        return (
            self.rows("SELECT oid FROM pg_subscription") == [] == self.rows("SELECT srrelid FROM pg_subscription_rel")
        )


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "node")


@pytest.fixture(scope="module")
def strict() -> Iterator[EmbeddedPostgres]:
    """A server that asks for passwords, and whose only slot is taken."""
    with EmbeddedPostgres(
        "18", auth="scram-sha-256", password=PASSWORD, settings={"max_replication_slots": 1}
    ) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY)")
        server.execute("CREATE PUBLICATION p FOR TABLE t")
        server.query("SELECT pg_create_physical_replication_slot('taken')")
        yield server


@pytest.fixture(scope="module")
def physical() -> Iterator[EmbeddedPostgres]:
    """A server without logical decoding."""
    with EmbeddedPostgres("18", settings={"wal_level": "replica"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY)")
        server.execute("SET client_min_messages = error; CREATE PUBLICATION p FOR TABLE t")
        yield server


def create(conninfo: str, options: str = "", publication: str = "p", name: str = "s") -> str:
    quoted = conninfo.replace("'", "''")
    return f"CREATE SUBSCRIPTION {name} CONNECTION '{quoted}' PUBLICATION {publication}{options}"


def slots(database: Database) -> list[str]:
    return [
        name
        for (name,) in database.query(
            "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
        )
    ]


def nothing_left(cli: Cli, database: Database) -> bool:
    origins = database.query("SELECT roname FROM pg_replication_origin")
    return cli.is_empty() and slots(database) == [] and origins == []


# Refusals of CREATE


def test_an_unknown_publication(cli: Cli, database: Database) -> None:
    database.execute("CREATE PUBLICATION p")
    assert cli.refused(create(database.conninfo, publication="p, nope")) == [
        'ERROR:  42704: publication "nope" does not exist on the publisher',
        f'HINT:  Create it in database "{database.name}" with CREATE PUBLICATION, or correct the name.',
    ]
    assert nothing_left(cli, database)


def test_wal_level_replica(cli: Cli, physical: EmbeddedPostgres) -> None:
    error = cli.refused(create(physical.conninfo()))
    assert error[0].startswith(
        'ERROR:  55000: could not create replication slot "s": ERROR:  logical decoding requires'
    )
    assert error[-1] == "HINT:  Set wal_level = logical in the publisher's postgresql.conf, and restart it."
    assert nothing_left(cli, Database(physical, "postgres"))


def test_no_free_slot(cli: Cli, strict: EmbeddedPostgres) -> None:
    assert cli.refused(create(strict.conninfo())) == [
        'ERROR:  53400: could not create replication slot "s": ERROR:  all replication slots are in use',
        'HINT:  Free one or increase "max_replication_slots".',
    ]
    assert nothing_left(cli, Database(strict, "postgres"))


def test_a_wrong_password(cli: Cli, strict: EmbeddedPostgres) -> None:
    error = cli.refused(create(strict.conninfo(password="pw-that-is-wrong")))
    assert error[0].startswith('ERROR:  08006: subscription "s" could not connect to the publisher: ')
    assert error[0].endswith('FATAL:  password authentication failed for user "postgres"')
    assert "pw-that-is-wrong" not in "".join(error)
    assert cli.is_empty()


def test_an_unreachable_host(cli: Cli, strict: EmbeddedPostgres) -> None:
    error = cli.refused(create("host=127.0.0.1 port=1 user=u dbname=d"))
    assert error[0].startswith('ERROR:  08006: subscription "s" could not connect to the publisher: ')
    assert error[0].endswith("Connection refused")
    assert error[1].startswith("HINT:  Is the server running on that host")
    assert cli.is_empty()


def test_a_host_that_has_no_address(cli: Cli) -> None:
    error = cli.refused(create("host=no-such-host.invalid user=u dbname=d"))
    assert error[0].startswith(
        'ERROR:  08006: subscription "s" could not connect to the publisher: could not translate host name'
    )
    assert cli.is_empty()


def test_a_database_that_is_not_there(cli: Cli, publisher: EmbeddedPostgres) -> None:
    error = cli.refused(create(publisher.conninfo("nope")))
    assert error[0].startswith('ERROR:  08006: subscription "s" could not connect to the publisher: ')
    assert error[0].endswith('FATAL:  database "nope" does not exist')
    assert cli.is_empty()


def test_a_role_that_may_not_replicate(cli: Cli, database: Database) -> None:
    database.execute("CREATE PUBLICATION p; DROP ROLE IF EXISTS plain; CREATE ROLE plain LOGIN")
    error = cli.refused(create(database.server.conninfo(database.name, user="plain")))
    assert error[0].startswith('ERROR:  08006: subscription "s" could not connect to the publisher: ')
    assert error[0].endswith("FATAL:  permission denied to start WAL sender")
    assert error[1] == "DETAIL:  Only roles with the REPLICATION attribute may start a WAL sender process."
    assert nothing_left(cli, database)


def test_a_role_that_may_not_read_a_table(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    database.execute("DROP ROLE IF EXISTS replicator; CREATE ROLE replicator LOGIN REPLICATION")
    conninfo = database.server.conninfo(database.name, user="replicator")
    assert cli.refused(create(conninfo)) == [
        "ERROR:  42501: permission denied for table t",
        'DETAIL:  Role replicator may not read table "public.t" on the publisher, and its rows are to be copied.',
        "HINT:  GRANT SELECT ON public.t TO replicator; or use WITH (copy_data = false).",
    ]
    assert nothing_left(cli, database)
    cli.done(create(conninfo, " WITH (copy_data = false)"))
    cli.done("DROP SUBSCRIPTION s")
    assert nothing_left(cli, database)


def test_a_slot_that_is_there_already(cli: Cli, database: Database) -> None:
    database.execute("CREATE PUBLICATION p")
    database.query("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    error = cli.refused(create(database.conninfo))
    assert error == [
        'ERROR:  42710: could not create replication slot "s": ERROR:  replication slot "s" already exists'
    ]
    assert cli.is_empty()
    assert slots(database) == ["s"]  # the slot is another's


def test_a_warehouse_that_cannot_be_written(cli: Cli, database: Database) -> None:
    """No slot is made that would keep WAL for tables that cannot be."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    cli.home.mkdir()
    (cli.home / "lake").touch()
    (cli.home / "pubsub.toml").write_text('warehouse = "lake"')
    assert cli.refused(create(database.conninfo)) == [
        f'ERROR:  58030: warehouse "{cli.home}/lake" cannot be used: Not a directory',
        "DETAIL:  It failed at making a directory.",
        'HINT:  Name a directory in the setting "warehouse" that this user may write, on a disk with hard links.',
    ]
    assert nothing_left(cli, database)


def test_columns_that_differ_only_in_case(cli: Cli, database: Database) -> None:
    database.execute('CREATE TABLE t (id int PRIMARY KEY, "ID" int); CREATE PUBLICATION p FOR TABLE t')
    error = cli.refused(create(database.conninfo))
    assert error[0] == 'ERROR:  0A000: columns "id" and "ID" of table "public.t" differ only in case'
    assert error[-1].startswith("HINT:  ")
    assert nothing_left(cli, database)


def test_tables_that_differ_only_in_case(cli: Cli, database: Database) -> None:
    database.execute('CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE "T" (id int PRIMARY KEY)')
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    error = cli.refused(create(database.conninfo))
    assert error[0] == 'ERROR:  0A000: tables "public.T" and "public.t" differ only in case'
    assert error[-1].startswith("HINT:  ")
    assert nothing_left(cli, database)


def test_a_delta_table_that_holds_rows(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    path = cli.home / "warehouse" / database.name / "public" / "t"
    path.mkdir(parents=True)
    write_deltalake(path, pa.table({"id": pa.array([1], pa.int32())}))
    assert cli.refused(create(database.conninfo)) == [
        'ERROR:  55000: the Delta table for "public.t" holds rows already',
        f'DETAIL:  It lies at "{path}".',
        "HINT:  Move it away, use WITH (copy_data = false), or choose another target.",
    ]
    assert nothing_left(cli, database)
    assert "created replication slot" in cli.done(create(database.conninfo, " WITH (copy_data = false)"))
    cli.done("DROP SUBSCRIPTION s")


def test_a_delta_table_that_does_not_fit_the_rows(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, more text); CREATE PUBLICATION p FOR TABLE t")
    path = cli.home / "warehouse" / database.name / "public" / "t"
    path.mkdir(parents=True)
    write_deltalake(path, pa.table({"id": pa.array([], pa.int32())}))
    error = cli.refused(create(database.conninfo))
    assert error[0].endswith('relation "public.t" is missing replicated columns: "more"')
    assert nothing_left(cli, database)


def test_a_table_without_a_delta_table_and_none_to_be_made(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    error = cli.refused(create(database.conninfo, " WITH (create_tables = false)"))
    assert error[0] == 'ERROR:  42P01: Delta table for "public.t" does not exist'
    assert nothing_left(cli, database)


def test_a_table_that_another_subscription_owns(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    cli.done(create(database.conninfo))
    error = cli.refused(create(database.conninfo, name="other"))
    assert error[0] == 'ERROR:  42710: the Delta table for relation "public.t" belongs to subscription "s"'
    assert error[-1] == "HINT:  Give the subscription a folder of its own: WITH (target = '…')."
    assert slots(database) == ["s"]
    cli.done(create(database.conninfo, " WITH (target = 'elsewhere')", name="other"))
    cli.done("DROP SUBSCRIPTION other; DROP SUBSCRIPTION s")
    assert nothing_left(cli, database)


def test_a_table_without_replica_identity(cli: Cli, database: Database) -> None:
    """It can be subscribed to if rows are only inserted: the publisher refuses updates itself.  `check` warns of it."""
    database.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="does not have a replica identity"):
        database.execute("UPDATE t SET a = 2")
    ran = cli.run("check", database.conninfo, "p")
    assert ran.exit_code == 0
    found = ran.stdout.splitlines()
    at = found.index(
        'WARNING:  cannot update table "t" because it does not have a replica identity and publishes updates'
    )
    assert [line.split(":")[0].strip() for line in found[at + 1 : at + 3]] == ["DETAIL", "HINT"]


def test_check_names_every_obstacle(cli: Cli, physical: EmbeddedPostgres) -> None:
    ran = cli.run("check", physical.conninfo(), "p", "nope")
    assert ran.exit_code == 1
    assert ran.stdout.count("ERROR:") >= 2  # one for wal_level, one for the publication


def test_interrupted_while_the_slot_is_made(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    with database.server.connect(database.name) as other:
        other.execute("BEGIN; INSERT INTO t VALUES (1)")  # creating the slot waits for this transaction
        process = cli.start("sql", create(database.conninfo), ignored=True)
        with process:
            try:
                wait_until(lambda: slots(database) == ["s"], "the slot is being made")
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
        assert process.returncode == 130
        assert err == "ERROR:  canceling statement due to user request\n"
        other.execute("ROLLBACK")
    assert nothing_left(cli, database)


def ignores_sigint(pid: int) -> bool:
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> signal.SIGINT - 1 & 1)


def interrupted(process: subprocess.Popen[str], seconds: float) -> int:
    """Send SIGINT after so many seconds, if the command has not ended; return its exit code, and check what it says."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        raise AssertionError(f"it goes on: {process.communicate()[1]}") from None
    if process.returncode == 130:
        assert err.endswith("ERROR:  canceling statement due to user request\n"), err
        assert "Traceback" not in err, err
    return process.returncode


@pytest.mark.full
@pytest.mark.parametrize("ignored", [False, True])
def test_interrupted_at_any_moment(cli: Cli, database: Database, ignored: bool) -> None:
    """From the start of the program on: it ends, and leaves nothing behind."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    r = random.Random(60 + ignored)
    created = ("sql", create(database.conninfo))
    commands = (created, ("check", database.conninfo, "p"), ("sql", "SELECT oid FROM pg_subscription"))
    ended: Counter[int] = Counter()
    with database.server.connect(database.name) as other:
        other.execute("BEGIN; INSERT INTO t VALUES (1)")  # creating the slot waits for this transaction
        begun = time.monotonic()
        with cli.start(*created) as process:
            wait_until(lambda: slots(database) == ["s"], "the slot is being made")
            takes = time.monotonic() - begun
            process.send_signal(signal.SIGINT)
        for _ in range(50):
            with cli.start(*r.choices(commands, (8, 1, 1))[0], ignored=ignored) as process:
                # Before its first step the program cannot know of a signal that is ignored.
                wait_until(lambda process=process: not ignores_sigint(process.pid), "the program has begun")
                ended[interrupted(process, r.uniform(0, 2 * takes))] += 1
            assert slots(database) == []
    assert ended[130] > 10, ended
    assert set(ended) <= {0, 1, 130, -signal.SIGINT}, ended
    assert nothing_left(cli, database)


def waits_for_the_slot(database: Database) -> bool:
    return bool(
        database.query("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'DROP_REPLICATION_SLOT%' AND state = 'active'")
    )


@pytest.mark.full
@pytest.mark.parametrize("action", ["RESYNC TABLE t", "REFRESH PUBLICATION", "DROP"])
def test_commands_on_a_subscription_are_interrupted_at_any_moment(cli: Cli, database: Database, action: str) -> None:
    """Each ends, the subscription is there as before, and nothing stays paused."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    cli.done(create(database.conninfo))
    statement = "DROP SUBSCRIPTION s" if action == "DROP" else f"ALTER SUBSCRIPTION s {action}"
    r = random.Random(len(action))
    ended: Counter[int] = Counter()
    # The reader never answers keepalives.
    patient = database.server.conninfo(database.name, replication="database", options="-c wal_sender_timeout=0")
    reader = psycopg.connect(patient, autocommit=True)
    with contextlib.closing(reader), database.server.connect(database.name) as other:
        if action == "RESYNC TABLE t":
            database.query("SELECT pg_drop_replication_slot('s')")
            other.execute("BEGIN; INSERT INTO t VALUES (1)")  # creating the slot waits for this transaction
        else:
            # Dropping the slot waits for whom reads it.
            options = "(proto_version '1', publication_names 'p')"
            reader.pgconn.send_query(f"START_REPLICATION SLOT s LOGICAL 0/0 {options}".encode())
            active = "SELECT active FROM pg_replication_slots WHERE slot_name = 's'"
            wait_until(lambda: database.query(active) == [(True,)], "the slot to be read")
        kept = slots(database)
        begun = time.monotonic()
        with cli.start("sql", statement) as process:
            if action == "REFRESH PUBLICATION":
                process.communicate(timeout=PATIENCE)
            elif action == "DROP":
                wait_until(lambda: waits_for_the_slot(database), "the command to wait for the slot")
            else:
                wait_until(lambda: slots(database) == ["s"], "the slot is being made")
            takes = time.monotonic() - begun
            process.send_signal(signal.SIGINT)
        for _ in range(35):
            with cli.start("sql", statement) as process:
                ended[interrupted(process, r.uniform(0, 1.5 * takes))] += 1
            assert slots(database) == kept
            (one,) = json.loads(cli.run("status", "--json").stdout)["subscriptions"]
            assert one["waiting"] is None
    assert ended[130] > 5, ended
    assert set(ended) <= {0, 130, -signal.SIGINT}, ended
    if action == "RESYNC TABLE t":
        cli.done(f"ALTER SUBSCRIPTION s {action}")
    cli.done("DROP SUBSCRIPTION s")
    assert nothing_left(cli, database)


async def test_a_lost_request_to_cancel_holds_nothing_up(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walsender went on waiting, and the interrupted command waited for it, to drop the slot."""

    async def lost(_: object) -> None:
        return

    async def connect(_: str, conninfo: str) -> Connection:
        return await Connection.connect(conninfo, replication=True)

    monkeypatch.setattr("pubsub.publisher.connection._send_cancel", lost)
    session: Any = SimpleNamespace(connect=connect, notice=lambda *_, **__: None)
    with database.server.connect(database.name) as other:
        other.execute("BEGIN; CREATE TABLE t (id int)")  # creating the slot waits for this transaction
        connection = await connect("s", database.conninfo)
        making = asyncio.create_task(
            make_slot(session, connection, "s", database.conninfo, "s", two_phase=False, failover=False)
        )
        await asyncio.to_thread(wait_until, lambda: slots(database) == ["s"], "the slot is being made")
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(60):
                await making
        assert slots(database) == []


@pytest.mark.full
async def test_cancelled_before_the_walsender_has_read_the_command(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it begins to make the slot after it was to stop, for a client that is gone."""
    sent = asyncio.Event()

    async def connect(_: str, conninfo: str) -> Connection:
        return await Connection.connect(conninfo, replication=True)

    async def create_slot(connection: Connection, *arguments: Any, tell: object, **more: Any) -> object:
        os.kill(connection.backend_pid, signal.SIGSTOP)
        sent.set()
        return await replication.create_slot(connection, *arguments, **more)

    monkeypatch.setattr("launcher.slot_creation.create_slot", create_slot)
    session: Any = SimpleNamespace(connect=connect, notice=lambda *_, **__: None)
    with database.server.connect(database.name) as other:
        other.execute("BEGIN; CREATE TABLE t (id int)")
        connection = await connect("s", database.conninfo)
        making = asyncio.create_task(
            make_slot(session, connection, "s", database.conninfo, "s", two_phase=False, failover=False)
        )
        try:
            await sent.wait()
            making.cancel()
            await asyncio.wait({making}, timeout=1)
            assert not making.done(), "it waits for the walsender's end"
        finally:
            os.kill(connection.backend_pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(PATIENCE):
                await making
        there = f"SELECT 1 FROM pg_stat_activity WHERE pid = {connection.backend_pid}"
        await asyncio.to_thread(wait_until, lambda: not database.query(there), "the walsender's end")
        assert slots(database) == []


# Successes


def test_life_of_a_subscription(cli: Cli, any_database: Database) -> None:
    database = any_database
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE a; CREATE PUBLICATION q FOR TABLE b")
    assert cli.done(create(database.conninfo)) == 'NOTICE:  created replication slot "s" on publisher\n'
    identity = database.query("SELECT system_identifier::text FROM pg_control_system()")[0][0]
    assert cli.rows(
        "SELECT publisher_system_identifier, publisher_database, target, subenabled FROM pg_subscription"
    ) == [
        {
            "publisher_system_identifier": identity,
            "publisher_database": database.name,
            "target": database.name,
            "subenabled": True,
        }
    ]
    tables = "SELECT relation, srsubstate FROM pg_subscription_rel ORDER BY relation"
    assert cli.rows(tables) == [{"relation": "public.a", "srsubstate": "i"}]

    said = cli.done("ALTER SUBSCRIPTION s ADD PUBLICATION q")
    assert 'DEBUG1:  table "public.b" added to subscription "s"' in said
    assert [row["relation"] for row in cli.rows(tables)] == ["public.a", "public.b"]

    error = cli.refused("ALTER SUBSCRIPTION s ADD PUBLICATION nope")
    assert error[0] == 'ERROR:  42704: publication "nope" does not exist on the publisher'
    assert cli.rows("SELECT subpublications FROM pg_subscription") == [{"subpublications": ["p", "q"]}]

    assert 'table "public.a" removed' in cli.done("ALTER SUBSCRIPTION s DROP PUBLICATION p")
    database.execute("CREATE TABLE c (id int PRIMARY KEY); ALTER PUBLICATION q ADD TABLE c")
    cli.done("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = false)")
    assert cli.rows(tables) == [
        {"relation": "public.b", "srsubstate": "i"},
        {"relation": "public.c", "srsubstate": "r"},
    ]
    assert cli.done("DROP SUBSCRIPTION s").endswith('NOTICE:  dropped replication slot "s" on publisher\n')
    assert nothing_left(cli, database)


def test_without_a_copy_a_table_is_ready_at_the_consistent_point(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    cli.done(create(database.conninfo, " WITH (copy_data = false)"))
    ((point,),) = database.query("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'")
    stored = [{"srsubstate": "r", "srsublsn": str(Lsn.parse(point))}]  # PostgreSQL 19 pads it with zeros
    assert cli.rows("SELECT srsubstate, srsublsn FROM pg_subscription_rel") == stored


def test_connected_later(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    cli.done(create(database.conninfo, " WITH (connect = false)"))
    assert slots(database) == []
    database.query("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    cli.done("ALTER SUBSCRIPTION s ENABLE; ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    (stored,) = cli.rows("SELECT target, publisher_database FROM pg_subscription")
    assert stored == {"target": database.name, "publisher_database": database.name}
    (table,) = cli.rows("SELECT path FROM pg_subscription_rel")
    assert table["path"] == str(cli.home / "warehouse" / database.name / "public" / "t")


def test_drop_takes_the_slots_of_sync_workers(cli: Cli, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    cli.done(create(database.conninfo))
    (row,) = cli.rows("SELECT srsubid, srrelid FROM pg_subscription_rel")
    node = json.loads(cli.run("status", "--json").stdout)["node"]
    left = f"pg_{row['srsubid']}_sync_{row['srrelid']}_{node}"
    database.query(f"SELECT pg_create_logical_replication_slot('{left}', 'pgoutput')")
    assert f'NOTICE:  dropped replication slot "{left}" on publisher' in cli.done("DROP SUBSCRIPTION s")
    assert nothing_left(cli, database)


def test_drop_while_the_publisher_is_away(cli: Cli) -> None:
    with EmbeddedPostgres("18") as server:
        database = Database(server, "postgres")
        database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        cli.done(create(database.conninfo))
        before = cli.rows("SELECT * FROM pg_subscription")
        server.stop("immediate")
        error = cli.refused("DROP SUBSCRIPTION s")
        assert error[0].startswith("WARNING:  could not drop tablesync replication slot")
        assert error[1].startswith(
            "ERROR:  08006: could not connect to publisher when attempting to drop replication slot"
        )
        assert error[-1].endswith(
            "then use ALTER SUBSCRIPTION ... SET (slot_name = NONE) to disassociate it from the slot."
        )
        assert cli.rows("SELECT * FROM pg_subscription") == before
        cli.done("ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s")
        assert cli.is_empty()
        server.start()
        assert slots(database) == ["s"]  # left for the user to drop, as PostgreSQL does
