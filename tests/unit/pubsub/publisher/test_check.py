"""The findings of pubsub check, from definitions alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pubsub.protocol.ids import Oid
from pubsub.publisher.check import Finding, check_publications, check_server, check_table, hba_line
from pubsub.publisher.definitions import ColumnDefinition, ServerInfo, TableDefinition
from pubsub.publisher.publication import Publication, PublishedTable

SERVER = ServerInfo(
    version=180004,
    version_text="18.4",
    wal_level="logical",
    max_replication_slots=10,
    free_replication_slots=10,
    max_wal_senders=10,
    free_wal_senders=10,
    system_identifier="1",
    database="d",
    encoding="UTF8",
    in_recovery=False,
    user="u",
)
TABLE = PublishedTable(
    oid=Oid(1),
    schema="public",
    name="t",
    attnames=None,
    row_filter=None,
    relkind="r",
    is_partition=False,
    replica_identity="d",
    publishes_updates=True,
)


def column(name: str, **more: Any) -> ColumnDefinition:
    plain = ColumnDefinition(
        name=name,
        attnum=1,
        type_oid=Oid(23),
        type_modifier=-1,
        type_name="integer",
        type_kind="b",
        base_type_oid=Oid(23),
        base_typmod=-1,
        base_type_kind="b",
        not_null=False,
        generated="",
        collation_deterministic=True,
    )
    return replace(plain, **more)


def definition(*columns: ColumnDefinition, **more: Any) -> TableDefinition:
    plain = TableDefinition(
        oid=Oid(1),
        schema="public",
        name="t",
        kind="r",
        replica_identity="d",
        columns=columns,
        primary_key=("id",),
        identity_key=("id",),
        estimated_rows=5,
        pages=1,
        row_security=False,
    )
    return replace(plain, **more)


def worst(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "ok"]


def test_a_server_that_is_ready() -> None:
    assert worst(check_server(SERVER)) == []


def test_19_needs_no_level_of_its_own_for_logical_decoding() -> None:
    """A logical slot raises effective_wal_level; on a standby the primary's counts."""
    assert worst(check_server(replace(SERVER, version=190000, wal_level="replica"))) == []
    standby = replace(SERVER, version=190000, wal_level="replica", in_recovery=True)
    assert [one.message for one in worst(check_server(standby))] == [
        'logical decoding on standby requires "effective_wal_level" >= "logical" on the primary',
        "the publisher is a standby",
    ]
    assert [one.severity for one in worst(check_server(replace(standby, wal_level="logical")))] == ["warning"]


@pytest.mark.parametrize(
    ("change", "severity", "message"),
    [
        ({"wal_level": "replica"}, "error", 'logical decoding requires "wal_level" >= "logical"'),
        ({"wal_level": "minimal", "version": 190000}, "error", 'logical decoding requires "wal_level" >= "logical"'),
        ({"free_replication_slots": 0}, "error", "all replication slots are in use"),
        ({"free_replication_slots": 2}, "warning", "only 2 of max_replication_slots = 10 are free"),
        ({"free_wal_senders": 0}, "error", "number of requested standby connections exceeds"),
        ({"in_recovery": True}, "warning", "the publisher is a standby"),
        ({"in_recovery": True, "version": 150000}, "error", "logical decoding cannot be used while in recovery"),
        ({"encoding": "SQL_ASCII"}, "warning", "the database's encoding is SQL_ASCII"),
    ],
)
def test_a_server_that_is_not(change: dict[str, Any], severity: str, message: str) -> None:
    (finding,) = worst(check_server(replace(SERVER, **change)))
    assert finding.severity == severity
    assert finding.message.startswith(message)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            'FATAL:  no pg_hba.conf entry for host "192.0.2.7", user "me", database "shop", no encryption',
            "host shop me 192.0.2.7/32",
        ),
        (
            'FATAL:  no pg_hba.conf entry for host "2001:db8::1", user "me", database "shop", SSL encryption',
            "host shop me 2001:db8::1/128",
        ),
        (
            'FATAL:  pg_hba.conf rejects connection for host "[local]", user "me", database "shop", no encryption',
            "local shop me",
        ),
        (
            'FATAL:  no pg_hba.conf entry for host "fe80::1%eth0", user "all", database "My Shop", no encryption',
            'host "My Shop" "all" fe80::1/128',
        ),
    ],
)
def test_the_line_that_pg_hba_lacks(message: str, line: str) -> None:
    assert hba_line(f"could not connect to the publisher: {message}") == (
        "-- in pg_hba.conf, before the lines that reject it:",
        f"--   {line} scram-sha-256",
        "SELECT pg_reload_conf();",
    )


def test_another_refusal_has_no_line() -> None:
    assert hba_line('FATAL:  password authentication failed for user "me"') == ()


def test_publications() -> None:
    whole = Publication("p", True, True, True, True, False)
    inserts = Publication("q", True, False, False, True, False)
    assert worst(check_publications([whole, inserts], ["p"])) == []
    assert [f.message for f in worst(check_publications([whole, inserts], []))] == [
        'publication "q" does not publish UPDATE, DELETE'
    ]
    assert [f.message for f in check_publications([], ["x"])] == ['publication "x" does not exist on the publisher']
    assert [f.message for f in check_publications([], ["x", "y", "x"])] == [
        'publications "x", "y" do not exist on the publisher'
    ]
    assert [f.severity for f in check_publications([], [])] == ["error"]


def test_a_table_that_works() -> None:
    (finding,) = check_table(TABLE, definition(column("id"), column("x")))
    assert finding == Finding("ok", 'table "public.t"', detail="2 columns, key (id), about 5 rows")


@pytest.mark.parametrize(
    ("table", "known", "severity", "message"),
    [
        ({}, definition(column("a"), column("A")), "error", 'columns "a", "A" of table "public.t" differ only in case'),
        ({}, definition(column("i"), column("ı")), "error", 'columns "i", "ı" of table "public.t" differ only in case'),
        ({}, definition(), "warning", 'table "public.t" has no column that is published'),
        (
            {},
            definition(column("p", base_type_kind="p", type_name="anyarray")),
            "error",
            'column "p" of table "public.t": ',
        ),
        (
            {},
            definition(column("id"), identity_key=(), primary_key=()),
            "warning",
            'cannot update table "t" because it does not have a replica identity and publishes updates',
        ),
        (
            {},
            definition(column("id"), identity_key=(), primary_key=(), replica_identity="f"),
            "warning",
            'table "public.t" has REPLICA IDENTITY FULL and no primary key',
        ),
        ({"attnames": ("x",)}, definition(column("id"), column("x")), "warning", 'cannot update table "t"'),
        (
            {},
            definition(column("id"), column("g", generated="s")),
            "warning",
            'generated columns "g" of table "public.t" are not published',
        ),
    ],
)
def test_a_table_that_does_not(table: dict[str, Any], known: TableDefinition, severity: str, message: str) -> None:
    (finding,) = worst(check_table(replace(TABLE, **table), known))
    assert finding.severity == severity
    assert finding.message.startswith(message)


def test_a_key_is_not_needed_where_updates_are_not_published() -> None:
    known = definition(column("id"), identity_key=(), primary_key=())
    assert worst(check_table(replace(TABLE, publishes_updates=False), known)) == []


def test_unpublished_columns_are_not_checked() -> None:
    known = definition(column("id"), column("Id"))
    assert worst(check_table(replace(TABLE, attnames=("id",)), known)) == []


def test_row_counts_of_unanalyzed_tables_are_unknown() -> None:
    (finding,) = check_table(TABLE, definition(column("id"), estimated_rows=None))
    assert (finding.detail or "").endswith("number of rows unknown (never analyzed)")


def test_where_a_table_lies() -> None:
    (odd,) = check_table(replace(TABLE, name="Odd Table"), definition(column("id")))
    assert (odd.detail or "").endswith('; its directory is "public/Odd-20Table"')
    (root,) = check_table(replace(TABLE, relkind="p"), definition(column("id")))
    assert "its partitions are one Delta table (publish_via_partition_root)" in (root.detail or "")
    (leaf,) = check_table(replace(TABLE, is_partition=True), definition(column("id")), "public.m")
    assert 'a partition of "public.m", and a Delta table of its own' in (leaf.detail or "")
