"""Settings that a database or a role has for people, and that no connection of ours may inherit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pytest
from psycopg import pq

from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from tests.support.publish import Publish
from tests.support.replica import Faults, Replica, RunningNode, wait_until

SETTINGS: Final = {
    "idle_session_timeout": "'1s'",
    "idle_in_transaction_session_timeout": "'1s'",
    "statement_timeout": "'1s'",
    "lock_timeout": "'10ms'",
    "transaction_timeout": "'1s'",
    "exit_on_error": "'on'",
    "default_transaction_read_only": "'on'",
    "default_transaction_isolation": "'serializable'",
    "default_transaction_deferrable": "'on'",
    "client_min_messages": "'debug1'",
    "row_security": "'on'",
    "array_nulls": "'off'",
    "quote_all_identifiers": "'on'",
    "standard_conforming_strings": "'off'",
    "backslash_quote": "'off'",
    "transform_null_equals": "'on'",
    "xmloption": "'document'",
    "restrict_nonsystem_relation_kind": "'view'",
    "DateStyle": "'German'",
    "IntervalStyle": "'iso_8601'",
    "TimeZone": "'Asia/Tokyo'",
    "bytea_output": "'escape'",
    "extra_float_digits": "'-15'",
    "client_encoding": "'LATIN1'",
    "lc_monetary": "'C'",
    "lc_messages": "'C'",
    "search_path": "shadow, public, pg_catalog",
}

SCHEMA: Final = r"""
CREATE TABLE "Wide" (id int PRIMARY KEY, d date, ts timestamp, tz timestamptz, i interval, f float8, f4 real, b bytea,
    "straße" text, a int[], ta text[], x xml, m money, j jsonb, r tstzrange, c regclass, "select" text);
CREATE TABLE small (id int PRIMARY KEY, note text);
CREATE TABLE rooted (id int, note text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE "Leaf" PARTITION OF rooted DEFAULT;
CREATE PUBLICATION p FOR TABLE "Wide", small WHERE (note <> 'a\b' OR note IS NULL), rooted WITH (publish_via_partition_root);
CREATE SCHEMA shadow;
CREATE VIEW shadow.pg_class AS SELECT oid, relname, relnamespace FROM pg_catalog.pg_class WHERE false;
CREATE VIEW shadow.pg_attribute AS SELECT attrelid, attname FROM pg_catalog.pg_attribute WHERE false;
CREATE VIEW shadow.pg_publication AS SELECT * FROM pg_catalog.pg_publication WHERE false;
CREATE VIEW shadow.pg_replication_slots AS SELECT * FROM pg_catalog.pg_replication_slots WHERE false;
CREATE FUNCTION shadow.pg_current_wal_lsn() RETURNS pg_lsn LANGUAGE sql AS $$SELECT '0/1'::pg_lsn$$;
"""


def rows(first: int) -> str:
    """Return statements that insert rows whose texts depend on many settings; the statements themselves do not."""
    return rf"""
        SET TRANSACTION READ WRITE;
        INSERT INTO "Wide" VALUES ({first}, '2024-02-03', '2024-02-03 04:05:06.7', '2024-02-03 04:05:06+00',
            '1 mon -2 days 03:04:05', 0.1::float8 + 0.2, 1.1, E'\\x005c27ff', E'\u00e4\x27\\\u20ac\u0416', ARRAY[1, NULL],
            ARRAY['NULL', NULL, E'a\\b'], E'<a>\u00e4</a>', 12.34, E'{{"k": "\u00fc"}}', '[2024-01-01,2024-06-01)',
            '"Wide"', 'from');
        INSERT INTO "Wide" VALUES ({first + 1});
        INSERT INTO small VALUES ({first}, E'a\\b'), ({first + 1}, 'kept'), ({first + 2}, NULL);
        INSERT INTO rooted VALUES ({first}, E'\u00df')
    """


class Settled(Replica):
    """A replica whose node logs in as a role for which, or for whose database, the settings are made.

    `publish`: our own server, which stands between.
    """

    publish: Publish | None = None

    @property
    def role(self) -> str:
        return f"settled_{self.database.name}"

    @property
    def conninfo(self) -> str:
        if self.publish is not None:
            return self.publish.conninfo(dbname=self.database.name, user=self.role)
        return self.database.server.conninfo(self.database.name, user=self.role)

    def slots(self) -> list[str]:
        asked = self.database.server if self.publish is None else self.publish
        of = quote_literal(self.database.name)
        return [name for (name,) in asked.query(f"SELECT slot_name FROM pg_replication_slots WHERE database = {of}")]


@pytest.fixture(
    params=["DATABASE", *(pytest.param(each, marks=pytest.mark.full) for each in ("ROLE", "DATABASE, served"))]
)
def settled(request: pytest.FixtureRequest, node: RunningNode, database: Database) -> Iterator[Settled]:
    replica = Settled(node, database)
    if request.param.endswith("served"):
        replica.publish = request.getfixturevalue("served")
    of = database.name if request.param.startswith("DATABASE") else replica.role
    replica.execute(SCHEMA, rows(1), f"CREATE ROLE {replica.role} SUPERUSER LOGIN REPLICATION")
    # From 19 on it cannot be off.
    unknown = {"standard_conforming_strings"} if int(database.server.version) >= 19 else set()
    for name, value in SETTINGS.items():
        if name in unknown:
            continue
        database.server.execute(f"ALTER {request.param.split(',')[0]} {of} SET {name} = {value}")
    yield replica
    if replica.created:
        replica.drop()
    database.server.execute(f"DROP ROLE {replica.role}")


def test_settings_of_the_database_or_the_role_reach_no_connection(settled: Settled, fault: Faults) -> None:
    fault.arm("copy planned public.small")
    settled.subscribe()
    fault.wait("copy planned public.small")
    # The snapshot's exporter is idle in its transaction.
    wait_until(lambda: idle(settled, "_sync_"), "a connection has been idle for longer than people may be")
    fault.release("copy planned public.small")
    equal(settled)
    settled.execute(rows(11), "SET TRANSACTION READ WRITE; UPDATE rooted SET note = 'other' WHERE id = 1")
    equal(settled)
    settled.alter("RESYNC TABLE public.small")
    settled.alter("REFRESH PUBLICATION")
    equal(settled)
    statistics = settled.node.statistics(settled.name)
    assert statistics["apply_error_count"] == statistics["sync_error_count"] == 0, statistics
    settled.drop()
    assert settled.slots() == []


def test_a_stream_of_ours_is_not_idle(served: Publish, database: Database) -> None:
    """The session at the upstream server has nothing to do while a client that sets nothing takes a stream."""
    database.server.execute(f"ALTER DATABASE {database.name} SET idle_session_timeout = '1s'")
    with closing(served.connect(dbname=database.name, replication="database")) as client:
        # The timeout is longer than what a busy machine takes between these, and shorter than between two looks (stream.py).
        client.execute("CREATE_REPLICATION_SLOT idler TEMPORARY LOGICAL test_decoding NOEXPORT_SNAPSHOT")
        started = client.pgconn.exec_(b"START_REPLICATION SLOT idler LOGICAL 0/0")
        assert started.status == pq.ExecStatus.COPY_BOTH
        of = f"pid = {client.info.backend_pid} AND state = 'idle' AND state_change < clock_timestamp() - interval '1.5 s'"
        wait_until(lambda: database.server.query(f"SELECT FROM pg_stat_activity WHERE {of}"), "it has been idle", 60)


def idle(replica: Replica, application: str) -> bool:
    return bool(
        replica.query(
            "SELECT FROM pg_catalog.pg_stat_activity WHERE application_name ~ "
            f"{quote_literal(application)} AND state LIKE 'idle%' AND state_change < clock_timestamp() - interval '1.5 s'"
        )
    )


def equal(replica: Replica) -> None:
    replica.assert_equal('"Wide"', "rooted")
    replica.assert_equal("small", where=r"note <> E'a\\b' OR note IS NULL")
