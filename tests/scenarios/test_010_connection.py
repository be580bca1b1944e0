"""Connections to real publishers: connection strings, sessions, errors, slots, streams, definitions, check."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pubsub.errors import ConnectionFailure, FeatureNotSupported, PublisherError, PubsubError, UndefinedTable
from pubsub.protocol.commands import pgoutput_options
from pubsub.protocol.copyboth import XLOG_HEADER, read_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions, publication, replication, slots, snapshots
from pubsub.publisher.check import check
from pubsub.publisher.connection import Connection, Parameter, Row
from pubsub.publisher.publishable import publishable_tables
from pubsub.publisher.replication import ReplicationStream
from pubsub.publisher.session_settings import session_settings
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres

SECRET = "op3n;sesame' \\"


async def eventually(database: Database, statement: str, expected: object) -> None:
    """Wait until the server gives the expected rows, for 30 seconds at most."""
    async with asyncio.timeout(30):
        while (rows := database.query(statement)) != expected:
            assert rows != expected
            await asyncio.sleep(0.01)


# Sessions


@pytest.mark.parametrize("mode", [False, True], ids=["sql", "replication"])
async def test_settings_win_over_all_others(
    any_database: Database, mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGDATESTYLE", "German")
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    any_database.execute(
        f"ALTER DATABASE {any_database.name} SET search_path = public; "
        f"ALTER DATABASE {any_database.name} SET bytea_output = escape; "
        f"ALTER DATABASE {any_database.name} SET statement_timeout = '1h'"
    )
    conninfo = f"{any_database.conninfo} options='-c intervalstyle=iso_8601 -c work_mem=5MB'"
    async with await Connection.connect(conninfo, replication=mode, application_name="me") as connection:
        for name, value in session_settings(connection.server_version).items():
            shown = (await connection.query("SELECT current_setting($1)", [name]))[0][0]
            assert shown is not None
            assert shown.split(",")[0].strip('"') == value, name
        shown = await connection.query("SELECT current_setting('work_mem'), current_setting('application_name')")
        assert shown == [("5MB", "me")], "the user's own options stay"
        values = "SELECT '2024-02-03 04:05:06+00'::timestamptz, '1 day 2 min'::interval, '\\x00ff'::bytea, 0.1::float8"
        assert await connection.query(values) == [("2024-02-03 04:05:06+00", "1 day 00:02:00", "\\x00ff", "0.1")]


async def test_ways_to_name_a_server(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = database.server
    service = tmp_path / "services"
    service.write_text(
        f"[s]\nhost={server.host}\nport={server.port}\nuser=postgres\ndbname={database.name}\noptions=-c work_mem=6MB\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    for conninfo in (
        f"postgresql://postgres@localhost:{server.port}/{database.name}",
        f"user=postgres dbname={database.name} host={server.socket_dir} port={server.port}",
        f"user=postgres dbname={database.name} host=127.0.0.1,{server.host} port=1,{server.port}",
        "service=s",
    ):
        async with await Connection.connect(conninfo) as connection:
            assert connection.dbname == database.name
            assert connection.server_version // 10000 == int(server.version)
            assert await connection.query("SELECT pg_backend_pid()") == [(str(connection.backend_pid),)]
    async with await Connection.connect("service=s", replication=True) as connection:
        assert await connection.query("SHOW work_mem") == [("6MB",)], "a service's own options stay"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that asks for a password, with a certificate for localhost if it is built with TLS."""
    with EmbeddedPostgres("18", auth="scram-sha-256", password=SECRET) as server:
        openssl = shutil.which("openssl")
        if server.query("SHOW ssl_library") == [("OpenSSL",)] and openssl is not None:
            key, certificate = tmp_path_factory.mktemp("tls") / "server.key", server.data_dir / "server.crt"
            subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
            files = ["-keyout", str(key), "-out", str(certificate)]
            command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
            subprocess.run(command, check=True, capture_output=True)
            owner = (server.data_dir / "PG_VERSION").stat()
            for file in (Path(shutil.copy(key, server.data_dir / "server.key")), certificate):
                file.chmod(0o600)
                shutil.chown(file, owner.st_uid, owner.st_gid)
            for statement in ("ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()"):
                server.execute(statement)
        yield server


@pytest.mark.parametrize("mode", [False, True], ids=["sql", "replication"])
async def test_a_password_is_asked_for_and_never_shown(
    guarded: EmbeddedPostgres, mode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conninfo = guarded.conninfo(password=SECRET)
    async with await Connection.connect(conninfo, replication=mode) as connection:
        assert SECRET not in repr(connection)
    with pytest.raises(ConnectionFailure) as caught:
        await Connection.connect(guarded.conninfo(password="wr0ng"), replication=mode)
    assert caught.value.message == (
        f'could not connect to the publisher: connection to server at "127.0.0.1", port {guarded.port} failed: '
        'FATAL:  password authentication failed for user "postgres"'
    )
    assert "wr0ng" not in caught.value.report(verbose=True)
    passfile = tmp_path / "pgpass"
    escaped = SECRET.replace("\\", "\\\\").replace(":", "\\:")
    passfile.write_text(f"localhost:{guarded.port}:*:postgres:{escaped}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    by_file = f"host=localhost port={guarded.port} user=postgres dbname=postgres"
    async with await Connection.connect(by_file, replication=mode) as connection:
        assert not connection.closed


async def test_tls_is_verified_and_bound(guarded: EmbeddedPostgres) -> None:
    certificate = guarded.data_dir / "server.crt"
    if not certificate.exists():
        pytest.skip("this server is built without TLS")
    secure = f"sslmode=verify-full channel_binding=require sslrootcert={certificate}"
    conninfo = guarded.conninfo(host="localhost", password=SECRET)
    async with await Connection.connect(f"{conninfo} {secure}", replication=True) as connection:
        in_use = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        assert await connection.query(in_use) == [("t",)]
        guarded.execute("CREATE TABLE t (a text); CREATE PUBLICATION p FOR TABLE t")
        await replication.create_slot(connection, "tls", snapshot="nothing", temporary=True)
        guarded.execute("INSERT INTO t SELECT repeat('x', 9000) FROM generate_series(1, 500)")
        options = pgoutput_options(connection.server_version, ["p"])
        stream = await replication.start(connection, "tls", 0, options)
        assert (await until_commit(stream)).count(ord("I")) == 500
    by_address = guarded.conninfo(password=SECRET)
    with pytest.raises(ConnectionFailure, match="does not match host name"):
        await Connection.connect(f"{by_address} {secure}")


# Failures


@pytest.mark.parametrize("mode", [False, True], ids=["sql", "replication"])
async def test_failures_in_postgresqls_words(database: Database, mode: bool) -> None:
    where = f'connection to server at "127.0.0.1", port {database.server.port} failed: FATAL:  '
    for change, message in (
        ({"dbname": "nowhere"}, f'{where}database "nowhere" does not exist'),
        ({"user": "nobody"}, f'{where}role "nobody" does not exist'),
        ({"host": "nowhere.invalid"}, 'could not translate host name "nowhere.invalid" to address: '),
        ({"port": 1}, 'connection to server at "127.0.0.1", port 1 failed: Connection refused'),
        ({"port": "99999"}, 'invalid port number: "99999"'),
    ):
        conninfo = database.server.conninfo(**{"dbname": database.name, **change})  # type: ignore[arg-type]
        with pytest.raises(ConnectionFailure) as caught:
            await Connection.connect(conninfo, replication=mode)
        assert caught.value.message.startswith(f"could not connect to the publisher: {message}")
        assert "\n" not in caught.value.message
        assert caught.value.sqlstate == "08006"
    with pytest.raises(ConnectionFailure) as caught:
        await Connection.connect(database.server.conninfo(port=1), replication=mode)
    assert caught.value.hint == "Is the server running on that host and accepting TCP/IP connections?"
    with pytest.raises(PubsubError, match="invalid connection string syntax"):
        await Connection.connect("host", replication=mode)


async def test_a_silent_host_is_given_up_for_the_next(database: Database) -> None:
    """connect_timeout holds, although libpq ignores it in a nonblocking connection."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionFailure, match=f'"127.0.0.1", port {port} failed: timeout expired'):
            await Connection.connect(f"host=127.0.0.1 port={port} connect_timeout=1")
        both = database.server.conninfo(
            dbname=database.name, host="127.0.0.1,127.0.0.1", port=f"{port},{database.server.port}", connect_timeout=1
        )
        async with await Connection.connect(both) as connection:
            assert connection.port == str(database.server.port)


@pytest.mark.parametrize("mode", [False, True], ids=["sql", "replication"])
async def test_queries(any_database: Database, mode: bool) -> None:
    async with await Connection.connect(any_database.conninfo, replication=mode) as connection:
        values = ['it\'s \\ $2 "ü"', None, 7, True, ['a"b', "\\", "c,d", ""], [1, 2]]
        sql = "SELECT $1::text, $2::text, $3::int, $4::bool, ($5::text[])[1], ($5::text[])[4], ($6::int[])[2]"
        assert await connection.query(sql, values) == [('it\'s \\ $2 "ü"', None, "7", "t", 'a"b', "", "2")]
        assert await connection.query("SELECT 1 WHERE false") == []
        assert await connection.query("SELECT 1; SELECT 2, NULL") == [("2", None)]
        assert await connection.execute("CREATE TABLE public.t (a int)") == "CREATE TABLE"
        with pytest.raises(PublisherError) as caught:
            await connection.execute("DO $$ BEGIN RAISE 'no' USING ERRCODE = '12345', DETAIL = 'd', HINT = 'h'; END $$")
        error = caught.value
        assert (error.sqlstate, error.message, error.detail, error.hint) == ("12345", "no", "d", "h")
        assert await connection.query("SELECT 1") == [("1",)], "the connection goes on"
        first, second = await asyncio.gather(connection.query("SELECT 1"), connection.query("SELECT 2"))
        assert (first, second) == ([("1",)], [("2",)])


async def test_cancelling_stops_the_query_there(database: Database) -> None:
    connection = await Connection.connect(database.conninfo)
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(1000)'"
    query = asyncio.create_task(connection.query("SELECT pg_sleep(1000)"))
    await eventually(database, sleeping, [(1,)])
    query.cancel()
    with pytest.raises(asyncio.CancelledError):
        await query
    assert connection.closed
    await eventually(database, sleeping, [(0,)])
    with pytest.raises(ConnectionFailure, match="closed"):
        await connection.query("SELECT 1")


async def test_a_terminated_session_is_an_error(database: Database) -> None:
    connection = await Connection.connect(database.conninfo)
    with pytest.raises(PublisherError) as caught:
        await connection.query("SELECT pg_terminate_backend(pg_backend_pid())")
    assert caught.value.sqlstate == "57P01"
    assert caught.value.message == "terminating connection due to administrator command"
    assert connection.closed


# Slots and streams


async def test_a_slot_and_its_snapshot(any_database: Database) -> None:
    any_database.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (1)")
    slot = f"slot_{any_database.name}"
    async with await Connection.connect(any_database.conninfo, replication=True) as walsender:
        identity = await replication.identify_system(walsender)
        assert identity.dbname == any_database.name
        assert identity.timeline == 1
        control = any_database.query("SELECT system_identifier::text FROM pg_control_system()")
        assert control == [(identity.system_identifier,)]
        created = await replication.create_slot(walsender, slot, snapshot="export")
        assert created.name == slot
        assert created.snapshot_name is not None
        any_database.execute("INSERT INTO t VALUES (2)")
        async with await Connection.connect(any_database.conninfo) as reader:
            await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await reader.execute(f"SET TRANSACTION SNAPSHOT '{created.snapshot_name}'")
            assert await reader.query("SELECT a FROM public.t") == [("1",)]
            info = await slots.slot_info(reader, slot)
            assert info is not None
            assert (info.plugin, info.database, info.active) == ("pgoutput", any_database.name, False)
            assert info.confirmed_flush_lsn == created.consistent_point
            assert info.retained_bytes is not None
            assert info.retained_bytes >= 0
            assert await slots.slot_info(reader, "nowhere") is None
        with pytest.raises(PublisherError) as caught:
            await replication.create_slot(walsender, slot, snapshot="nothing")
        assert caught.value.sqlstate == "42710"
        assert caught.value.message == (
            f'could not create replication slot "{slot}": ERROR:  replication slot "{slot}" already exists'
        )
        assert await replication.drop_slot(walsender, slot)
        assert not await replication.drop_slot(walsender, slot, missing_ok=True)
        with pytest.raises(PublisherError, match=r"on publisher: ERROR: .*does not exist"):
            await replication.drop_slot(walsender, slot)
        with pytest.raises(PublisherError, match=f'could not start WAL streaming: ERROR: .*"{slot}" does not exist'):
            await replication.start(walsender, slot, 0, pgoutput_options(walsender.server_version, ["p"]))


async def test_a_slot_whose_making_is_cancelled_is_not_left_behind(database: Database) -> None:
    slot = f"slot_{database.name}"
    connection = await Connection.connect(database.conninfo, replication=True)
    with database.server.connect(database.name) as writer:
        writer.execute("BEGIN; SELECT pg_current_xact_id()")  # creating a slot waits for running transactions
        making = asyncio.create_task(replication.create_slot(connection, slot, snapshot="nothing"))
        await eventually(database, f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'", [(True,)])
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert connection.closed
        await eventually(database, f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}'", [])


async def until_commit(stream: ReplicationStream, max_bytes: int = 1 << 20) -> bytes:
    """Return the type bytes of pgoutput's messages up to the first Commit."""
    kinds = bytearray()
    async with asyncio.timeout(30):
        while not kinds.endswith(b"C"):
            frames = await stream.receive(max_bytes)
            assert frames
            kinds += bytes(frame[XLOG_HEADER] for frame in frames if frame[:1] == b"w")
    return bytes(kinds)


async def until_end(stream: ReplicationStream) -> None:
    """Receive and report until one of them raises."""
    async with asyncio.timeout(30):
        while True:
            last = read_server_message((await stream.receive())[-1])
            await stream.send_status(last.wal_end, last.wal_end, last.wal_end)  # a publisher's shutdown waits for this


async def streaming(database: Database, connection: Connection) -> tuple[ReplicationStream, str]:
    database.execute("CREATE TABLE t (a text); CREATE PUBLICATION p FOR TABLE t")
    slot = f"slot_{database.name}"
    await replication.create_slot(connection, slot, snapshot="nothing")
    stream = await replication.start(connection, slot, 0, pgoutput_options(connection.server_version, ["p"]))
    return stream, slot


async def test_a_stream(any_database: Database) -> None:
    async with await Connection.connect(any_database.conninfo, replication=True) as connection:
        stream, slot = await streaming(any_database, connection)
        any_database.execute("INSERT INTO t SELECT repeat('x', i % 100) FROM generate_series(1, 5000) i")
        assert await until_commit(stream) == b"BR" + b"I" * 5000 + b"C"
        any_database.execute("INSERT INTO t SELECT repeat('x', 3000000)")
        assert await until_commit(stream, max_bytes=1000) == b"BIC", "a message larger than the bound comes whole"
        end = any_database.query("SELECT (pg_current_wal_lsn() - '0/0')::int8")[0][0]
        await stream.send_status(end, end, end, reply=True)
        flushed = f"SELECT (confirmed_flush_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = '{slot}'"
        await eventually(any_database, flushed, [(end,)])
        any_database.execute("INSERT INTO t VALUES ('never read')")
        await stream.close()
        assert not connection.closed
        assert (await replication.identify_system(connection)).dbname == any_database.name
        assert await replication.drop_slot(connection, slot)


async def test_a_receiver_that_is_cancelled_again_and_again_loses_nothing(database: Database) -> None:
    async with await Connection.connect(database.conninfo, replication=True) as connection:
        stream, _ = await streaming(database, connection)
        database.execute("INSERT INTO t SELECT 'x' FROM generate_series(1, 3000) i")
        kinds = bytearray()
        turn = 0
        async with asyncio.timeout(30):
            while not kinds.endswith(b"C"):
                receiving = asyncio.ensure_future(stream.receive(2000))
                for _ in range(turn % 4):
                    await asyncio.sleep(0)
                turn += 1
                receiving.cancel()
                (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
                if isinstance(outcome, list):
                    kinds += bytes(frame[XLOG_HEADER] for frame in outcome if frame[:1] == b"w")
                else:
                    assert isinstance(outcome, asyncio.CancelledError)
        assert kinds == b"BR" + b"I" * 3000 + b"C"


async def test_a_terminated_walsender_is_an_error(database: Database) -> None:
    async with await Connection.connect(database.conninfo, replication=True) as connection:
        stream, _ = await streaming(database, connection)
        database.execute("INSERT INTO t VALUES ('x')")
        await until_commit(stream)
        database.execute(f"SELECT pg_terminate_backend({connection.backend_pid})")
        with pytest.raises(PublisherError) as caught:
            await until_end(stream)
        assert caught.value.sqlstate == "57P01"
        assert caught.value.message.startswith("could not receive data from WAL stream: FATAL:  terminating")
        await stream.close()


@pytest.mark.parametrize("crash", [False, True], ids=["shutdown", "kill"])
async def test_a_publisher_that_goes_away_is_an_error(crash: bool) -> None:
    with EmbeddedPostgres("18") as server:
        database = Database(server, "postgres")
        connection = await Connection.connect(database.conninfo, replication=True)
        stream, _ = await streaming(database, connection)
        stopping = asyncio.create_task(asyncio.to_thread(server.kill if crash else server.stop))
        with pytest.raises(ConnectionFailure) as caught:
            await until_end(stream)
        assert isinstance(caught.value, replication.StreamEnded) is not crash
        await stream.close()
        assert connection.closed
        await stopping


async def test_a_publication_that_is_not_there(any_database: Database) -> None:
    if any_database.server.version >= "18":
        pytest.skip("from 18 on the publisher warns and goes on")
    async with await Connection.connect(any_database.conninfo, replication=True) as connection:
        stream, _ = await streaming(any_database, connection)
        any_database.execute("DROP PUBLICATION p; INSERT INTO t VALUES ('x')")
        with pytest.raises(PublisherError, match=r'from WAL stream: ERROR:  publication "p" does not exist') as caught:
            await until_end(stream)
        assert caught.value.sqlstate == "42704"


# Definitions

TABLES = r"""
    CREATE DOMAIN cents AS numeric(12,2);
    CREATE DOMAIN price AS cents NOT NULL;
    CREATE TYPE mood AS ENUM ('glad');
    CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
    CREATE TABLE a (gone int, id int PRIMARY KEY, p price, "W, x""\" text, m mood, ts timestamptz(3),
                    g int GENERATED ALWAYS AS (id * 2) STORED, v varchar(9) COLLATE nocase);
    ALTER TABLE a DROP COLUMN gone;
    CREATE TABLE f (b int PRIMARY KEY, x int, c int NOT NULL);
    CREATE UNIQUE INDEX fi ON f (c, b) INCLUDE (x);
    ALTER TABLE f REPLICA IDENTITY USING INDEX fi;
    CREATE TABLE n (x text);
    ALTER TABLE n REPLICA IDENTITY FULL;
    INSERT INTO n SELECT repeat('x', 100) FROM generate_series(1, 1000);
    CREATE TABLE pt (id int PRIMARY KEY, k int) PARTITION BY RANGE (id);
    CREATE TABLE pt1 PARTITION OF pt FOR VALUES FROM (0) TO (100);
    CREATE TABLE pt2 PARTITION OF pt FOR VALUES FROM (100) TO (200);
    INSERT INTO pt SELECT i, i FROM generate_series(0, 149) i;
    ANALYZE n;
    ANALYZE pt;
    CREATE PUBLICATION whole FOR TABLE a, f (b, c) WHERE (b > 5), n, pt;
    CREATE PUBLICATION root FOR TABLE pt WITH (publish_via_partition_root = true);
    CREATE PUBLICATION part FOR TABLE pt1, f (c, b) WHERE (c = 3);
    CREATE PUBLICATION unfiltered FOR TABLE f (b, c) WITH (publish = 'insert');
    CREATE PUBLICATION other FOR TABLE f;
    CREATE PUBLICATION few FOR TABLE a (id, "W, x""\");
    CREATE PUBLICATION "no ""tables";
"""


@pytest.mark.parametrize("mode", [False, True], ids=["sql", "replication"])
async def test_published_tables(any_database: Database, mode: bool) -> None:
    any_database.execute(TABLES)
    async with await Connection.connect(any_database.conninfo, replication=mode) as connection:

        async def names(*publications: str) -> list[str]:
            tables = await publication.published_tables(connection, publications)
            assert {table.schema for table in tables} <= {"public"}
            return [table.name for table in tables]

        assert await names("whole") == ["a", "f", "n", "pt1", "pt2"]
        assert await names("root") == ["pt"]
        assert await names("whole", "root") == ["a", "f", "n", "pt"]
        assert await names("root", "part") == ["f", "pt"], "a partition whose root is published too"
        assert await names("whole", "part") == ["a", "f", "n", "pt1", "pt2"]
        assert await names('no "tables') == []
        assert await names() == []

        async def f(*publications: str) -> publication.PublishedTable:
            tables = await publication.published_tables(connection, publications)
            return next(table for table in tables if table.name == "f")

        assert (await f("whole")).attnames == ("b", "c")
        assert (await f("whole")).row_filter == "(b > 5)"
        assert (await f("whole")).publishes_updates
        assert (await f("part")).attnames == ("b", "c"), "in the table's order"
        assert (await f("part", "whole")).row_filter == "((c = 3)) OR ((b > 5))"
        assert (await f("part", "unfiltered")).row_filter is None
        assert not (await f("unfiltered")).publishes_updates
        with pytest.raises(FeatureNotSupported) as caught:
            await names("whole", "other")
        assert caught.value.message == (
            'cannot use different column lists for table "public.f" in different publications'
        )
        whole, *_ = await publication.published_tables(connection, ["whole"])
        assert (whole.name, whole.attnames, whole.row_filter) == ("a", None, None)
        (few,) = await publication.published_tables(connection, ["few"])
        assert few.attnames == ("id", 'W, x"\\')
        wanted = ["whole", "x'", 'y"', "root", "x'"]
        assert await publication.missing_publications(connection, wanted) == ["x'", 'y"']


async def test_table_definitions(any_database: Database) -> None:
    any_database.execute(TABLES)
    async with await Connection.connect(any_database.conninfo) as connection:
        published = await publication.published_tables(connection, ["whole", "root"])
        found = await definitions.table_definitions(connection, [table.oid for table in published])
        a, f, n, pt = (found[table.oid] for table in published)
        assert [c.name for c in a.columns] == ["id", "p", 'W, x"\\', "m", "ts", "g", "v"]
        by_name = {c.name: c for c in a.columns}
        assert by_name["id"].attnum == 2
        assert by_name["id"].not_null
        price = by_name["p"]
        assert (price.type_kind, price.type_name) == ("d", "public.price")
        assert (price.base_type_oid, price.base_typmod, price.base_type_kind) == (1700, (12 << 16 | 2) + 4, "b")
        assert (by_name["m"].type_kind, by_name["m"].base_type_oid) == ("e", by_name["m"].type_oid)
        assert by_name["ts"].type_name == "timestamp(3) with time zone"
        assert [c.name for c in a.columns if c.generated] == ["g"]
        assert [c.name for c in a.columns if not c.collation_deterministic] == ["v"]
        assert (a.kind, a.primary_key, a.identity_key, a.pages) == ("r", ("id",), ("id",), 0)
        assert (f.replica_identity, f.primary_key, f.identity_key) == ("i", ("b",), ("c", "b"))
        assert (n.replica_identity, n.primary_key, n.identity_key, n.estimated_rows) == ("f", (), (), 1000)
        size = any_database.query("SELECT pg_relation_size('n') / current_setting('block_size')::int")
        assert [(n.pages,)] == size
        assert n.pages > 1
        assert (pt.kind, pt.estimated_rows, pt.pages, pt.identity_key) == ("p", 150, 0, ("id",))
        any_database.execute(
            "CREATE TABLE never (id int) WITH (autovacuum_enabled = off); INSERT INTO never VALUES (1); "
            "CREATE TABLE empty (id int)"
        )
        oids = [oid for (oid,) in any_database.query("SELECT unnest(ARRAY['never', 'empty', 'pt1']::regclass[])::oid")]
        estimates = await definitions.table_definitions(connection, oids)
        assert [estimates[oid].estimated_rows for oid in oids[:2]] == [None, 0]
        assert await definitions.partition_roots(connection, oids) == {oids[2]: "public.pt"}
        with pytest.raises(UndefinedTable):
            await definitions.table_definition(connection, 1)


async def test_server_info(any_database: Database) -> None:
    async with await Connection.connect(any_database.conninfo) as connection:
        info = await definitions.server_info(connection)
        assert info.version // 10000 == int(any_database.server.version)
        assert (info.wal_level, info.database, info.encoding) == ("logical", any_database.name, "UTF8")
        slot = f"slot_{any_database.name}"
        any_database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        assert (await definitions.server_info(connection)).free_replication_slots == info.free_replication_slots - 1
        end = await slots.current_wal_lsn(connection)
        any_database.execute("CREATE TABLE t ()")
        assert await slots.current_wal_lsn(connection) > end


async def test_the_end_of_the_wal_behind_a_header(any_database: Database) -> None:
    """After a switch of the WAL the next record's place is never flushed, nor sent, while nobody writes: it was waited for."""
    async with await Connection.connect(any_database.conninfo) as connection:
        for _ in range(20):
            any_database.execute("SELECT pg_switch_wal()")
            rows = await connection.query(
                f"SELECT ({snapshots.END_OF_WAL}), pg_current_wal_flush_lsn(), pg_current_wal_insert_lsn()"
            )
            end, flushed, inserted = (Lsn.parse(value or "") for value in rows[0])
            if inserted == flushed + 40:
                break  # and nothing was written in between
        assert (end, inserted) == (flushed, flushed + 40)
        any_database.execute("CREATE TABLE t ()")
        assert await snapshots.flushed_end_of_wal(connection) > end


async def test_copy_progress(database: Database) -> None:
    async with await Connection.connect(database.conninfo) as connection:
        nothing = await definitions.copy_progress(connection, "copier")
        assert (nothing.tuples, nothing.bytes) == (0, 0)
        with database.server.connect(database.name) as copier:
            copier.execute("SET application_name = copier")
            with copier.cursor().copy(
                "COPY (SELECT repeat('x', 1000) FROM generate_series(1, 100000)) TO STDOUT"
            ) as copy:
                copy.read()
                running = nothing
                async with asyncio.timeout(30):
                    while running.tuples == 0:
                        running = await definitions.copy_progress(connection, "copier")
                assert running.bytes >= running.tuples * 1000
                for _ in copy:
                    pass


# pubsub check


async def test_check(any_database: Database) -> None:
    role = f"limited_{any_database.name}"
    any_database.execute(TABLES)
    any_database.execute(
        f"""
        CREATE ROLE {role} LOGIN;
        GRANT SELECT (id, "W, x""\\") ON a TO {role};
        CREATE TABLE policed (id int PRIMARY KEY);
        ALTER TABLE policed ENABLE ROW LEVEL SECURITY;
        GRANT SELECT ON policed TO {role};
        CREATE PUBLICATION guarded FOR TABLE policed;
        """
    )
    try:
        findings = await check(any_database.conninfo, ["whole"])
        assert {finding.severity for finding in findings if 'table "public.a"' not in finding.message} >= {
            "ok",
            "warning",
        }
        assert [finding for finding in findings if finding.severity == "error"] == []
        limited = any_database.server.conninfo(any_database.name, user=role)
        errors = [f for f in await check(limited, ["few", "whole", "guarded", "nowhere"]) if f.severity == "error"]
        messages = [finding.message for finding in errors]
        assert errors[0].change == (f"ALTER ROLE {role} REPLICATION;",)
        assert "FATAL:  " in messages[0]
        assert messages[1] == 'publication "nowhere" does not exist on the publisher'
        assert messages[2] == 'cannot use different column lists for table "public.a" in different publications'
        errors = [f for f in await check(limited, ["few", "guarded", "part"]) if f.severity == "error"]
        assert [finding.message for finding in errors][1:] == [
            "permission denied for table f",
            'query would be affected by row-level security policy for table "policed"',
            "permission denied for table pt1",
        ]
        assert errors[1].change == (
            f"GRANT USAGE ON SCHEMA public TO {role};",
            f"GRANT SELECT ON TABLE public.f TO {role};",
        )
    finally:
        any_database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_many_tables_are_asked_for_at_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table took questions of its own: a thousand tables at a distance of 50 ms took minutes."""
    tables = "".join(
        f"CREATE TABLE t{n} (id int PRIMARY KEY); CREATE TABLE m{n} (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        f"CREATE TABLE m{n}_1 PARTITION OF m{n} DEFAULT;"
        for n in range(3)
    )
    database.execute(
        f"{tables} CREATE PUBLICATION one FOR TABLE t0, m0 WITH (publish_via_partition_root);"
        "CREATE PUBLICATION every FOR ALL TABLES WITH (publish_via_partition_root)"
    )
    asked: list[str] = []
    query = Connection.query

    async def counted(self: Connection, sql: str, params: Sequence[Parameter] = ()) -> list[Row]:
        asked.append(sql)
        return await query(self, sql, params)

    monkeypatch.setattr(Connection, "query", counted)
    counts = []
    for name in ("one", "every"):
        asked.clear()
        assert {finding.severity for finding in await check(database.conninfo, [name])} == {"ok"}
        counts.append(len(asked))
    assert counts[0] == counts[1]
    async with await Connection.connect(database.conninfo) as connection:
        for names in ([("public", "t0"), ("public", "m0")], None):
            asked.clear()
            assert not any(one.change for one in await publishable_tables(connection, names))
            counts.append(len(asked))
    assert counts[2] == counts[3]


async def test_check_of_a_server_that_is_not_ready() -> None:
    settings = {"wal_level": "replica", "max_replication_slots": 1, "max_wal_senders": 1}
    with EmbeddedPostgres("18", settings=settings) as server:
        server.execute("SELECT pg_create_physical_replication_slot('taken')")
        errors = [finding for finding in await check(server.conninfo()) if finding.severity == "error"]
        assert [finding.message for finding in errors] == [
            'logical decoding requires "wal_level" >= "logical"',
            "all replication slots are in use",
            "the database has no publication",
        ]
        (refused,) = await check(server.conninfo("nowhere"))
        assert refused.severity == "error"
        assert refused.message.startswith("could not connect to the publisher: ")
