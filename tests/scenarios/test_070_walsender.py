"""`python -m walsender decode` beside PostgreSQL's own decoding of the same WAL: the same bytes.

The same server has a logical slot for each plugin and set of options.  Repeated Relation and Type messages are left
out of the comparison (tests/support/walsender_compare.py: comparable).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Insert, Relation, read_message
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import (
    walsender_filters,
    walsender_handmade,
    walsender_names,
    walsender_regression,
    walsender_settings,
)
from tests.support import walsender_published as published
from tests.support import walsender_workload as workload
from tests.support.replica import wait_until
from tests.support.walsender_compare import differences, inconsistency
from tests.support.walsender_decodings import Decoding, Message, ServerStream, create_slot, flush_lsn, slot_changes
from walsender.decoding import DecodeRequest, Session
from walsender.plugin_request import PluginRequest

# Autovacuum's own transactions would come between a slot's consistent point and ours.
SETTINGS: dict[str, str | int] = {"max_prepared_transactions": 10, "autovacuum": "off"}
VERSIONS = ("15", "16", "17", "18", "19")
IN_BASE = {"a zone with summer time"}
OLDEST_AND_NEWEST = ("15", "18", "19")
_numbers = itertools.count()


@dataclass
class Case:
    """One decoding: ours in a process, PostgreSQL's from a slot."""

    plugin: str = "pgoutput"
    publications: str = "p"
    options: dict[str, str] = field(default_factory=dict)
    two_phase: bool = False
    work_mem: str = "64MB"
    slot: str = ""
    theirs: list[Message] = field(default_factory=list)
    ours: Decoding | None = None

    def server_options(self) -> dict[str, str]:
        if self.plugin == "test_decoding":
            return self.options
        return {"proto_version": "1", **self.options, "publication_names": self.publications}


class Servers:
    """A server for each version, with room for prepared transactions."""

    def __init__(self) -> None:
        self._running: dict[str, EmbeddedPostgres] = {}

    def __getitem__(self, version: str) -> EmbeddedPostgres:
        if version not in self._running:
            self._running[version] = EmbeddedPostgres(version, settings=SETTINGS).start()
        return self._running[version]

    def close(self) -> None:
        for server in self._running.values():
            server.close()


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


def execute(server: EmbeddedPostgres, dbname: str, statements: Sequence[str]) -> Iterator[None]:
    with server.connect(dbname) as connection:
        for statement in statements:
            connection.execute(statement.encode())
            yield


def changes_of_slot(server: EmbeddedPostgres, dbname: str, case: Case) -> list[Message]:
    return slot_changes(server, dbname, case.slot, case.plugin, case.server_options(), work_mem=case.work_mem)


def compare(
    server: EmbeddedPostgres,
    setup: str,
    statements: Sequence[str],
    cases: Sequence[Case],
    *,
    eager: bool = False,
    interpreted: bool = False,
) -> None:
    """Run the statements and compare our decoding with PostgreSQL's for each case.

    `eager`: PostgreSQL decodes after each statement, so that it still finds what is rolled back later.
    `interpreted`: ours runs without its compiled modules.
    """
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    with server.connect(dbname) as connection:
        for statement in setup.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
    with contextlib.ExitStack() as stack:
        for case in cases:
            case.slot = f"compare_{next(_numbers)}"
            create_slot(server, dbname, case.slot, case.plugin, two_phase=case.two_phase)
            stack.callback(server.drop_slot, case.slot)
        for case in cases:
            options = [f"{name}={value}" for name, value in case.options.items() if name != "proto_version"]
            if case.two_phase and case.plugin == "test_decoding":
                options.append("two-phase=on")
            case.ours = stack.enter_context(
                Decoding(
                    server,
                    dbname,
                    plugin=case.plugin,
                    publications=case.publications,
                    proto_version=int(case.options.get("proto_version", "1")),
                    options=options,
                    more=["--work-mem", case.work_mem],
                    interpreted=interpreted,
                )
            )
        for case in cases:
            assert case.ours is not None
            case.ours.wait_consistent()
        for _ in execute(server, dbname, statements):
            if eager:
                for case in cases:
                    case.theirs += changes_of_slot(server, dbname, case)
        end = flush_lsn(server, dbname)
        for case in cases:
            assert case.ours is not None
            case.theirs += changes_of_slot(server, dbname, case)
            case.ours.wait_for(end)
            ours = case.ours.stop()
            assert len(case.theirs) > 10
            assert differences(ours, case.theirs, pgoutput=case.plugin == "pgoutput") == ""
    server.drop_database(dbname)


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_a_change_can_be(upstreams: Servers, version: str) -> None:
    compare(
        upstreams[version],
        workload.SETUP,
        workload.STATEMENTS + workload.TYPE_ROWS,
        [
            Case(options={"messages": "true"}),
            Case("test_decoding"),
            # On the versions in between these cases behave the same.
            *(
                [
                    Case(options={"binary": "true"}),
                    Case(
                        "test_decoding",
                        options={
                            "skip-empty-xacts": "on",
                            "include-timestamp": "on",
                            "include-xids": "off",
                            "include-rewrites": "on",
                        },
                    ),
                ]
                if version in OLDEST_AND_NEWEST
                else []
            ),
        ],
        interpreted=version in {"15", "17"},
    )


@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_values_that_name_what_the_catalogs_have(upstreams: Servers, version: str) -> None:
    """Values of reg* types and aclitem, which name what the catalogs have; jsonpath; types of extensions."""
    compare(
        upstreams[version],
        walsender_names.SETUP,
        walsender_names.statements(version),
        [Case(), Case("test_decoding"), Case(options={"binary": "true"}, publications="without_acls")],
        interpreted=version == "15",
    )


@pytest.mark.full
@pytest.mark.parametrize("version", ["16", "18", "19"])
def test_the_setup_of_the_regression_tests(upstreams: Servers, version: str) -> None:
    compare(
        upstreams[version],
        walsender_regression.SETUP,
        walsender_regression.STATEMENTS,
        [Case(), Case("test_decoding"), Case("test_decoding", options={"include-rewrites": "on"})],
    )


@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_statements_found_by_hand(upstreams: Servers, version: str) -> None:
    compare(
        upstreams[version],
        walsender_handmade.SETUP,
        walsender_handmade.statements(version),
        [
            Case(options={"messages": "true"}),
            Case("test_decoding"),
            Case(options={"binary": "true"}),
            Case(publications="long"),
        ],
    )


@pytest.mark.parametrize(
    ("version", "name"),
    [
        *(
            pytest.param("18", name, marks=() if name in IN_BASE else pytest.mark.full)
            for name in walsender_settings.SETTINGS
        ),
        ("15", "SQL, day first"),
        ("15", "other names"),
    ],
)
def test_settings_of_the_database_shape_the_output(upstreams: Servers, version: str, name: str) -> None:
    compare(
        upstreams[version],
        walsender_settings.setup(name),
        walsender_settings.STATEMENTS,
        [Case(), Case("test_decoding", options={"include-timestamp": "on"})],
    )


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_publications(upstreams: Servers, version: str) -> None:
    """Row filters, column lists, schemas, partition roots, all of them altered along the way."""
    compare(
        upstreams[version],
        published.FILTER_SETUP,
        published.FILTER_STATEMENTS,
        [Case(publications=names) for names in ("p,q", "u,q,r", "r,s")[: None if version in OLDEST_AND_NEWEST else 1]],
    )


def test_trees_of_partitions(upstreams: Servers) -> None:
    """The tree above a partitioned table changes, and with it the root that its partitions are sent as."""
    compare(
        upstreams["18"],
        published.TREE_SETUP,
        published.TREE_STATEMENTS,
        [Case(publications=names) for names in ("p", "q")],
    )


@pytest.mark.full
@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_row_filters(upstreams: Servers, version: str) -> None:
    """Each filter has a table of its own with the same rows; then the rows are changed."""
    names = [f"t{number}" for number in range(len(walsender_filters.FILTERS))]
    filters = dict(zip(names, walsender_filters.FILTERS, strict=True))
    setup = [
        f"CREATE TABLE t ({walsender_filters.COLUMNS})",
        *(f"CREATE TABLE {name} (LIKE t); ALTER TABLE {name} REPLICA IDENTITY FULL" for name in names),
        "CREATE PUBLICATION p FOR TABLE " + ", ".join(f"{name} WHERE ({text})" for name, text in filters.items()),
    ]
    statements = [
        *(f"INSERT INTO t VALUES {values}" for values in walsender_filters.ROWS),
        "INSERT INTO t (id) VALUES (100)",
        *(f"INSERT INTO {name} SELECT * FROM t ORDER BY id" for name in names),
        *(f"UPDATE {name} SET (i, t, n, d, ts, j) = (SELECT i, t, n, d, ts, j FROM t WHERE id = 1)" for name in names),
    ]
    compare(upstreams[version], ";\n".join(setup), statements, [Case()])


@pytest.mark.parametrize("version", ["15", "18", "19"])
def test_two_phase(upstreams: Servers, version: str) -> None:
    compare(
        upstreams[version],
        workload.SETUP,
        workload.TWO_PHASE,
        [
            Case(options={"proto_version": "3", "two_phase": "on"}, two_phase=True),
            Case("test_decoding", two_phase=True),
            Case("test_decoding", options={"skip-empty-xacts": "on"}, two_phase=True),
        ],
        eager=True,
    )


@pytest.mark.full
@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_origins(upstreams: Servers, version: str) -> None:
    """Transactions that came from another origin: sent, left out, prepared, streamed."""
    streamed = {"proto_version": "3", "two_phase": "on", "streaming": "on"}
    compare(
        upstreams[version],
        workload.SETUP,
        workload.ORIGINS,
        [
            Case(options={"proto_version": "3", "two_phase": "on", "messages": "true"}, two_phase=True),
            Case(options=streamed, two_phase=True, work_mem="64kB"),
            # 15's only option that leaves them out.
            Case("test_decoding", options={"only-local": "on", "include-timestamp": "on"}, two_phase=True)
            if version == "15"
            else Case(
                options={"proto_version": "4", "streaming": "parallel", "two_phase": "on", "origin": "none"},
                two_phase=True,
                work_mem="64kB",
            ),
        ],
        eager=True,
    )


@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_prepared_before_the_consistent_point(upstreams: Servers, version: str) -> None:
    """Such a transaction is sent at COMMIT PREPARED, as it was prepared.

    There are three transactions, so that the slot's snapshot builder gets far enough to see the third whole, but is not
    done.
    """
    server = upstreams[version]
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    server.execute("CREATE TABLE st (a int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES", dbname)
    slot = f"prepared_{next(_numbers)}"
    options = {"proto_version": "3", "two_phase": "on"}
    waits = "SELECT transactionid::text FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
    followed = "SELECT 1 FROM pg_stat_replication WHERE application_name = 'walsender' AND state = 'streaming'"
    with contextlib.ExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(1))  # shut down last, when the slot waits for nothing
        one, two = (stack.enter_context(server.connect(dbname)) for _ in range(2))

        def begin(connection: psycopg.Connection[tuple[object, ...]], number: int) -> str:
            connection.execute(f"BEGIN; INSERT INTO st VALUES ({number})".encode())
            row = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
            assert row is not None
            return str(row[0])

        first = begin(one, 1)
        creating = executor.submit(create_slot, server, dbname, slot, "pgoutput", two_phase=True)
        wait_until(lambda: (first,) in server.query(waits), "the slot waits for the first")
        second = begin(two, 2)
        decoding = stack.enter_context(Decoding(server, dbname, proto_version=3, options=["two_phase=on"]))
        wait_until(lambda: bool(server.query(followed)), "the WAL is followed")
        one.execute("COMMIT")
        wait_until(lambda: (second,) in server.query(waits), "the slot waits for the second")
        begin(one, 3)
        one.execute("PREPARE TRANSACTION 'three'")
        two.execute("COMMIT")
        creating.result(60)
        decoding.wait_consistent()
        server.execute("INSERT INTO st VALUES (4)", dbname)
        one.execute("COMMIT PREPARED 'three'")
        end = flush_lsn(server, dbname)
        decoding.wait_for(end)
        ours = decoding.stop()
        theirs = slot_changes(server, dbname, slot, "pgoutput", {**options, "publication_names": "p"})
    assert [m.data[:1] for m in theirs] == [b"B", b"R", b"I", b"C", b"b", b"I", b"P", b"K"]
    assert differences(ours, theirs) == ""
    server.drop_slot(slot)
    server.drop_database(dbname)


@pytest.mark.parametrize(
    ("version", "streaming", "two_phase"),
    [("15", "on", False), ("16", "parallel", True), ("18", "on", True), ("19", "on", False)],
)
def test_streaming(upstreams: Servers, version: str, streaming: str, two_phase: bool) -> None:
    """Streams begin and end where PostgreSQL's do, with logical_decoding_work_mem at 64kB on both sides."""
    server = upstreams[version]
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    server.execute(f"ALTER DATABASE {dbname} SET logical_decoding_work_mem = '64kB'")
    with server.connect(dbname) as connection:
        for statement in workload.SETUP.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
    proto = "4" if streaming == "parallel" else "3"
    options = {"streaming": streaming, "messages": "true"} | ({"two_phase": "on"} if two_phase else {})
    slot = f"stream_{next(_numbers)}"
    create_slot(server, dbname, slot, "pgoutput", two_phase=two_phase)
    with (
        Decoding(
            server,
            dbname,
            proto_version=int(proto),
            options=[f"{name}={value}" for name, value in options.items()],
            more=["--work-mem", "64kB"],
        ) as decoding,
        ServerStream(server, dbname, slot, {"proto_version": proto, **options, "publication_names": "p"}) as stream,
    ):
        decoding.wait_consistent()
        for statement in workload.STREAMING:
            if statement.endswith("; ROLLBACK"):
                # From 18 on a server that reads late sees that it is rolled back, and sends less of it.
                with server.connect(dbname) as connection:
                    connection.execute(statement.removesuffix("; ROLLBACK").encode())
                    has_read = (
                        "SELECT 1 FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid "
                        f"WHERE s.slot_name = '{slot}' AND r.sent_lsn >= '{Lsn(flush_lsn(server, dbname))}'"
                    )
                    wait_until(lambda has_read=has_read: server.query(has_read), "the server has read it")
                    connection.execute(b"ROLLBACK")
                continue
            prepare = two_phase and "COMMIT" in statement
            for _ in execute(
                server, dbname, [statement.replace("COMMIT", "PREPARE TRANSACTION 'p'") if prepare else statement]
            ):
                pass
            if prepare:
                server.execute("COMMIT PREPARED 'p'", dbname)
        for statement in workload.STREAMING_PREPARED:
            server.execute(statement, dbname)
        end = flush_lsn(server, dbname)
        theirs = stream.wait_for(end)
        decoding.wait_for(end)
        ours = decoding.stop()
        assert differences(ours, theirs) == ""
        assert inconsistency(ours, parallel=streaming == "parallel") == ""
        assert sum(message.data[:1] == b"S" for message in theirs) > 20
    server.drop_database(dbname)


@pytest.mark.full
def test_streaming_as_text(upstreams: Servers) -> None:
    """test_decoding says where a stream begins and ends, and that something is changed.

    Transactions that are rolled back are not compared: a server that reads late sends less of them.
    """
    options = {"stream-changes": "on"}
    compare(
        upstreams["17"],
        workload.SETUP,
        [statement for statement in workload.STREAMING if "ROLLBACK" not in statement],
        [
            Case("test_decoding", options=options, work_mem="64kB"),
            Case("test_decoding", options=options | {"skip-empty-xacts": "on", "include-xids": "off"}, work_mem="64kB"),
        ],
        eager=True,
    )


def test_a_definition_that_is_rolled_back(upstreams: Servers) -> None:
    """A definition that a stream sent within a subtransaction does not hold after the subtransaction's rollback."""
    server = upstreams["18"]
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    server.execute(f"ALTER DATABASE {dbname} SET logical_decoding_work_mem = '64kB'")
    server.execute("CREATE PUBLICATION p FOR ALL TABLES", dbname)
    slot = f"stream_{next(_numbers)}"
    create_slot(server, dbname, slot, "pgoutput")
    more = ["--work-mem", "64kB"]
    options = {"proto_version": "2", "streaming": "on", "publication_names": "p"}
    with (
        Decoding(server, dbname, proto_version=2, options=["streaming=on"], more=more) as decoding,
        ServerStream(server, dbname, slot, options) as stream,
    ):
        decoding.wait_consistent()
        for statement in workload.ROLLED_BACK_DEFINITION:
            server.execute(statement, dbname)
        end = flush_lsn(server, dbname)
        theirs = stream.wait_for(end)
        decoding.wait_for(end)
        assert differences(decoding.stop(), theirs, whole=True) == ""
    server.drop_database(dbname)


@pytest.mark.parametrize(
    "streaming", [pytest.param("off", marks=pytest.mark.full), pytest.param("on", marks=pytest.mark.full), "parallel"]
)
def test_definitions_that_differ_by_transaction(upstreams: Servers, streaming: str) -> None:
    """Rows are sent with the definition that they were decoded with, and streams are applied late, and in part.

    The test publishes columns and withdraws them, which takes no lock that writers would wait for.  PostgreSQL's own
    walsender can get this wrong, so the messages are read as a subscriber reads them.
    """
    server = upstreams["18"]
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    server.execute("CREATE TABLE st (a int PRIMARY KEY, c int); CREATE PUBLICATION p FOR TABLE st", dbname)
    many = "INSERT INTO st SELECT g, g FROM generate_series({0}, {0} + 1500) g"
    with (
        Decoding(
            server, dbname, proto_version=4, options=[f"streaming={streaming}"], more=["--work-mem", "64kB"]
        ) as decoding,
        server.connect(dbname) as one,
        server.connect(dbname) as other,
    ):
        decoding.wait_consistent()
        # The first row is described while another transaction has changed the publication, and is sent after that one.
        one.execute("BEGIN; ALTER PUBLICATION p SET TABLE st (a); INSERT INTO st VALUES (1, 1)")
        other.execute("BEGIN; INSERT INTO st VALUES (2, 2)")
        one.execute("COMMIT")
        other.execute("COMMIT; ALTER PUBLICATION p SET TABLE st; INSERT INTO st VALUES (3, 3)")
        # A stream that described the old definition is applied after the new one was sent.
        one.execute(f"BEGIN; {many.format(10_000)}")
        other.execute("ALTER PUBLICATION p SET TABLE st (a)")
        other.execute("INSERT INTO st VALUES (4, 4)")
        one.execute(f"SAVEPOINT s; {many.format(20_000)}")
        one.execute("ROLLBACK TO s")
        one.execute("COMMIT")
        other.execute("INSERT INTO st VALUES (5, 5)")
        # A stream sends a definition that holds for it alone, while others go on.
        one.execute(f"BEGIN; ALTER PUBLICATION p SET TABLE st (a, c); {many.format(30_000)}")
        other.execute("INSERT INTO st VALUES (6, 6)")
        one.execute("ROLLBACK")
        other.execute("INSERT INTO st VALUES (7, 7)")
        # A streamed transaction that is prepared, without two_phase, and rolled back.
        one.execute(f"BEGIN; {many.format(40_000)}; PREPARE TRANSACTION 'undone'")
        one.execute("ROLLBACK PREPARED 'undone'")
        decoding.wait_for(flush_lsn(server, dbname))
        ours = decoding.stop()
    assert inconsistency(ours, parallel=streaming == "parallel") == ""
    assert any(message.data[:1] == b"S" for message in ours) == (streaming != "off")
    server.drop_database(dbname)


def test_a_definition_from_before_the_start(upstreams: Servers) -> None:
    """A transaction that changed a table before decoding began and is rolled back leaves no trace of its definition."""
    server = upstreams["18"]
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    server.execute("CREATE TABLE st (a int PRIMARY KEY, c int); CREATE PUBLICATION p FOR TABLE st", dbname)
    followed = "SELECT 1 FROM pg_stat_replication WHERE application_name = 'walsender' AND state = 'streaming'"
    with server.connect(dbname) as connection:
        connection.execute("BEGIN; ALTER TABLE st ADD extra int")
        with Decoding(server, dbname) as decoding:
            wait_until(lambda: bool(server.query(followed)), "the WAL is followed")
            connection.execute("INSERT INTO st VALUES (1, 1, 1)")
            connection.execute("ROLLBACK")
            decoding.wait_consistent()
            server.execute("INSERT INTO st VALUES (2, 2)", dbname)
            decoding.wait_for(flush_lsn(server, dbname))
            ours = [read_message(message.data) for message in decoding.stop()]
    assert [[c.name for c in m.columns] for m in ours if isinstance(m, Relation)] == [["a", "c"]]
    assert [m.new for m in ours if isinstance(m, Insert)] == [(b"2", b"2")]
    server.drop_database(dbname)


@pytest.mark.parametrize(("version", "streaming"), [("16", "on"), ("18", "off")])
def test_files_that_move(upstreams: Servers, version: str, streaming: str) -> None:
    """A row's relation is found by its file, even if the catalogs were rewritten in between."""
    server = upstreams[version]
    dbname = f"wal_{next(_numbers)}"
    server.create_database(dbname)
    server.execute(f"ALTER DATABASE {dbname} SET logical_decoding_work_mem = '64kB'")
    server.execute(workload.FILES_SETUP, dbname)
    slot = f"files_{next(_numbers)}"
    create_slot(server, dbname, slot, "pgoutput")
    options = {"proto_version": "2", "publication_names": "p"} | ({"streaming": "on"} if streaming == "on" else {})
    with (
        Decoding(
            server, dbname, proto_version=2, options=[f"streaming={streaming}"], more=["--work-mem", "64kB"]
        ) as decoding,
        ServerStream(server, dbname, slot, options) as stream,
        server.connect(dbname) as one,
        server.connect(dbname) as other,
    ):
        decoding.wait_consistent()
        for client in (one, other):
            # If one of them and the walsender wait for each other, the walsender is the one to fail.
            client.execute(b"SET deadlock_timeout = '10min'")
        for who, statement in workload.FILES:
            (one if who == "one" else other).execute(statement.encode())
        end = flush_lsn(server, dbname)
        decoding.wait_for(end)
        ours = decoding.stop()
        assert differences(ours, stream.wait_for(end), whole=True) == ""
        assert inconsistency(ours) == ""
    server.drop_database(dbname)


def test_a_catalog_is_kept_once(upstreams: Servers, tmp_path: Path) -> None:
    """A rewrite of a catalog that is rolled back leaves none of its rows in memory."""
    server = upstreams["18"]
    dbname = f"wal_{next(_numbers)}"
    server.execute(f"CREATE DATABASE {dbname}")
    server.execute("CREATE PUBLICATION p", dbname)

    class ReachedError(Exception):
        pass

    async def tuples() -> tuple[int, int]:
        options = {"proto_version": "1", "publication_names": "p"}
        request = DecodeRequest(server.conninfo(dbname), PluginRequest("pgoutput", options), tmp_path)
        session = await Session.open(request, lambda *_: None, lambda _: None)
        files = session.decoder.tracker.catalogs.files
        before = sum(len(table.tuples) for table in files.values())
        for _ in range(3):
            server.execute("BEGIN; CLUSTER pg_attribute USING pg_attribute_relid_attnum_index; ROLLBACK", dbname)
        end = flush_lsn(server, dbname)

        def idle() -> None:
            if session.reader.position >= end:
                raise ReachedError

        with contextlib.suppress(ReachedError):
            await session.run(idle)
        await session.close()
        return before, sum(len(table.tuples) for table in files.values())

    before, after = asyncio.run(tuples())
    assert after < before + 500
    server.drop_database(dbname)
