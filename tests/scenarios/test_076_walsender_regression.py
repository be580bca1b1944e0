"""The server's own regression tests, run whole on a server and decoded: `make soak` with PUBSUB_REGRESS.

    PUBSUB_REGRESS=…/src/test/regress make soak      the directory of a PostgreSQL source tree, of any version from 15 on

Statements that a version does not know fail there, and so do those that need the tests' C library.  All the rest is
compared: every catalog, type, and kind of table that PostgreSQL has.

    in turn      each test after the other; test_decoding, which takes every table, and pgoutput
    at once      the tests of a line of parallel_schedule beside each other, autovacuum on
    streams      logical_decoding_work_mem at 64kB on both sides, whole transactions compared
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import Decoding, Message, create_slot, flush_lsn, slot_changes

pytestmark = pytest.mark.soak

REGRESS: Final = os.environ.get("PUBSUB_REGRESS", "")
SESSIONS: Final = 6
LEFT_OUT: Final = frozenset({"infinite_recurse"})
"""This test probes the depth of the stack."""

# Without an identity, pgoutput could not publish changes to tables that have no key.
IDENTITY: Final = """
CREATE FUNCTION public.walsender_identity() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE made record;
BEGIN
    FOR made IN SELECT objid FROM pg_event_trigger_ddl_commands() JOIN pg_class ON oid = objid WHERE relkind IN ('r', 'p') LOOP
        EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', made.objid::regclass);
    END LOOP;
END $$;
CREATE EVENT TRIGGER walsender_identity ON ddl_command_end
    WHEN TAG IN ('CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO') EXECUTE FUNCTION public.walsender_identity();
CREATE PUBLICATION p FOR ALL TABLES;
CREATE PUBLICATION roots FOR ALL TABLES WITH (publish_via_partition_root);
"""
Case = tuple[str, str, dict[str, str]]
"""Plugin, publications, options."""
CASES: Final[dict[str, tuple[Case, ...]]] = {
    "in turn": (
        ("test_decoding", "", {"include-rewrites": "1"}),
        ("pgoutput", "p", {"proto_version": "1"}),
        ("pgoutput", "roots", {"proto_version": "1", "messages": "true"}),
    ),
    "at once": (("test_decoding", "", {}), ("pgoutput", "p", {"proto_version": "1"})),
    "streams": (("pgoutput", "p", {"proto_version": "2", "streaming": "on"}),),
}


def schedule() -> list[list[str]]:
    """Return the tests' names, grouped by line of parallel_schedule."""
    lines = (Path(REGRESS) / "parallel_schedule").read_text().splitlines()
    groups = [line.removeprefix("test:").split() for line in lines if line.startswith("test:")]
    return [[name for name in group if name not in LEFT_OUT] for group in groups]


def run_test(server: EmbeddedPostgres, name: str) -> None:
    """Run a test as pg_regress does; ignore statements that fail."""
    environment = {
        **os.environ,
        "PG_ABS_SRCDIR": REGRESS,
        "PG_ABS_BUILDDIR": REGRESS,
        "PG_LIBDIR": "/nonexistent",
        "PG_DLSUFFIX": ".so",
        "PGTZ": "America/Los_Angeles",
        "PGDATESTYLE": "Postgres, MDY",
        "PGOPTIONS": "-c intervalstyle=postgres_verbose -c statement_timeout=120s",
        "PGCLIENTENCODING": "UTF8",
    }
    variables = ["-v", "HIDE_TABLEAM=on", "-v", "HIDE_TOAST_COMPRESSION=on"]
    script = Path(REGRESS) / "sql" / f"{name}.sql"
    command = [str(server.psql_path), "-X", "-q", *variables, "-d", server.conninfo("regression"), "-f", str(script)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=400, check=False
        )


def run_all(server: EmbeddedPostgres, *, at_once: bool) -> None:
    for group in schedule():
        with ThreadPoolExecutor(SESSIONS if at_once else 1) as sessions:
            list(sessions.map(lambda name: run_test(server, name), group))
    for (gid,) in server.query("SELECT gid FROM pg_prepared_xacts", "regression"):
        server.execute(f"ROLLBACK PREPARED '{gid}'", "regression")


def server_changes(server: EmbeddedPostgres, slot: str, case: Case, end: int) -> list[Message]:
    plugin, publications, options = case
    names = {"publication_names": publications} if plugin == "pgoutput" else {}
    return [m for m in slot_changes(server, "regression", slot, plugin, {**options, **names}) if m.lsn < end]


@pytest.mark.skipif(not REGRESS, reason="PUBSUB_REGRESS names no directory")
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("version", ["15", "16", "17", "18", "19"])
def test_the_regression_tests(version: str, kind: str) -> None:
    settings: dict[str, str | int] = {
        "max_prepared_transactions": 10,
        "autovacuum": "on" if kind == "at once" else "off",
        "wal_keep_size": "4GB",
        "logical_decoding_work_mem": "64kB" if kind == "streams" else "64MB",
    }
    with EmbeddedPostgres(version, settings=settings) as server, contextlib.ExitStack() as stack:
        server.create_database("regression", "TEMPLATE template0 ENCODING UTF8 LC_COLLATE 'C' LC_CTYPE 'C'")
        server.execute(IDENTITY, "regression")
        decodings = []
        for number, (plugin, publications, options) in enumerate(CASES[kind]):
            create_slot(server, "regression", f"compare_{number}", plugin)
            decodings.append(
                stack.enter_context(
                    Decoding(
                        server,
                        "regression",
                        plugin=plugin,
                        publications=publications,
                        proto_version=int(options.get("proto_version", "1")),
                        options=[f"{name}={value}" for name, value in options.items() if name != "proto_version"],
                        more=["--work-mem", "64kB"] if kind == "streams" else [],
                    )
                )
            )
        for decoding in decodings:
            decoding.wait_consistent()
        run_all(server, at_once=kind == "at once")
        end = flush_lsn(server, "regression")
        for number, (decoding, case) in enumerate(zip(decodings, CASES[kind], strict=True)):
            theirs = server_changes(server, f"compare_{number}", case, end)
            decoding.wait_for(end, 600.0)
            ours = [m for m in decoding.stop() if m.lsn < end]
            print(f"version {version}, {kind}, {case}: {len(ours)} messages", flush=True)
            assert len(ours) > 100_000
            found = differences(ours, theirs, pgoutput=case[0] == "pgoutput", whole=kind == "streams")
            if found:
                pytest.fail(found[:10_000])
