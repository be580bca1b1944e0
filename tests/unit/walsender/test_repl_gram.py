"""repl_gram: parses what PostgreSQL's subscribers send; refuses what PostgreSQL refuses, in its words."""

from __future__ import annotations

import pytest

from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.protocol.lsn import Lsn
from walsender import repl_gram as gram

SYNC = "pg_203833_sync_203819_7710407069345080899"
START_PARALLEL = (
    f"START_REPLICATION SLOT \"{SYNC}\" LOGICAL 0/1B1D650 (proto_version '4', streaming 'parallel', "
    "two_phase 'on', origin 'none', publication_names '\"p1\"')"
)

COMMANDS: list[tuple[str, gram.Command]] = [
    ("IDENTIFY_SYSTEM", gram.IdentifySystem()),
    ("  IDENTIFY_SYSTEM ;", gram.IdentifySystem()),
    (
        "CREATE_REPLICATION_SLOT \"sub15\" LOGICAL pgoutput (SNAPSHOT 'nothing')",
        gram.CreateReplicationSlot("sub15", "pgoutput", snapshot="nothing"),
    ),
    (
        f"CREATE_REPLICATION_SLOT \"{SYNC}\" LOGICAL pgoutput (FAILOVER, SNAPSHOT 'use')",
        gram.CreateReplicationSlot(SYNC, "pgoutput", snapshot="use", failover=True),
    ),
    (
        "CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput TWO_PHASE NOEXPORT_SNAPSHOT",
        gram.CreateReplicationSlot("s", "pgoutput", True, "nothing", two_phase=True),
    ),
    ("CREATE_REPLICATION_SLOT s PHYSICAL RESERVE_WAL", gram.CreateReplicationSlot("s", None, reserve_wal=True)),
    ("CREATE_REPLICATION_SLOT s PHYSICAL (reserve_wal false)", gram.CreateReplicationSlot("s", None)),
    (f"DROP_REPLICATION_SLOT {SYNC} WAIT", gram.DropReplicationSlot(SYNC, True)),
    ("DROP_REPLICATION_SLOT Sub", gram.DropReplicationSlot("sub", False)),
    ("ALTER_REPLICATION_SLOT sub18 ( FAILOVER false );", gram.AlterReplicationSlot("sub18", failover=False)),
    ("ALTER_REPLICATION_SLOT sub18 ( TWO_PHASE false );", gram.AlterReplicationSlot("sub18", two_phase=False)),
    (
        START_PARALLEL,
        gram.StartLogicalReplication(
            SYNC,
            Lsn(0x1B1D650),
            (
                ("proto_version", "4"),
                ("streaming", "parallel"),
                ("two_phase", "on"),
                ("origin", "none"),
                ("publication_names", '"p1"'),
            ),
        ),
    ),
    ("START_REPLICATION SLOT s LOGICAL 0/0", gram.StartLogicalReplication("s", Lsn(0), ())),
    ("START_REPLICATION SLOT s PHYSICAL A/B TIMELINE 3", gram.StartPhysicalReplication("s", Lsn(0xA_0000_000B), 3)),
    ("START_REPLICATION 0/0", gram.StartPhysicalReplication(None, Lsn(0), None)),
    ("TIMELINE_HISTORY 2", gram.TimelineHistory(2)),
    # As strtoul reads them into 32 bits.
    ("TIMELINE_HISTORY " + "9" * 5000, gram.TimelineHistory(0xFFFFFFFF)),
    ("START_REPLICATION 0/123456789", gram.StartPhysicalReplication(None, Lsn(0x23456789), None)),
    ("SHOW wal_segment_size", gram.Show("wal_segment_size")),
    ("SHOW ours.Setting", gram.Show("ours.setting")),
    ("READ_REPLICATION_SLOT s", gram.ReadReplicationSlot("s")),
]


@pytest.mark.parametrize(("text", "command"), COMMANDS)
def test_commands(text: str, command: gram.Command) -> None:
    assert gram.parse_command(text) == command


@pytest.mark.parametrize("text", ["SELECT 1", "identify_system", "show server_version", "", "BEGIN", "é", "(", "1"])
def test_anything_else_is_sql(text: str) -> None:
    assert gram.parse_command(text) is None


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("IDENTIFY_SYSTEM 1", 16),
        ("IDENTIFY_SYSTEM;;", 16),
        ("DROP_REPLICATION_SLOT", 21),
        ("DROP_REPLICATION_SLOT SLOT", 22),
        ("DROP_REPLICATION_SLOT 'quoted'", 22),
        ('DROP_REPLICATION_SLOT "unterminated', 22),
        ("START_REPLICATION SLOT s LOGICAL 0/0 ()", 38),
        ("START_REPLICATION SLOT s LOGICAL 0/0 (a 'b',)", 44),
        ("START_REPLICATION SLOT s LOGICAL 0/0 (a E'b')", 40),
        ("START_REPLICATION SLOT s LOGICAL 0/0 (a 1)", 40),
        ("START_REPLICATION LOGICAL 0/0", 18),
        ("START_REPLICATION 0/0 TIMELINE 0", 31),
        ("TIMELINE_HISTORY 4294967296", 17),
    ],
)
def test_syntax_errors_point_at_the_place(text: str, position: int) -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        gram.parse_command(text)
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("text", "sqlstate", "message"),
    [
        ("CREATE_REPLICATION_SLOT s LOGICAL p (reserve_wal)", "42601", "conflicting or redundant options"),
        ("CREATE_REPLICATION_SLOT s PHYSICAL (two_phase)", "42601", "conflicting or redundant options"),
        ("CREATE_REPLICATION_SLOT s LOGICAL p (snapshot)", "42601", "snapshot requires a parameter"),
        ("ALTER_REPLICATION_SLOT s (snapshot 'use')", "XX000", "unrecognized option: snapshot"),
        (
            "CREATE_REPLICATION_SLOT s LOGICAL p (SNAPSHOT 'take')",
            "22023",
            'unrecognized value for CREATE_REPLICATION_SLOT option "snapshot": "take"',
        ),
        (
            "CREATE_REPLICATION_SLOT s LOGICAL p USE_SNAPSHOT EXPORT_SNAPSHOT",
            "42601",
            "conflicting or redundant options",
        ),
        ("CREATE_REPLICATION_SLOT s LOGICAL p (two_phase 2)", "42601", "two_phase requires a Boolean value"),
        ("BASE_BACKUP", "0A000", "BASE_BACKUP is not supported"),
    ],
)
def test_options_are_refused_in_postgresqls_words(text: str, sqlstate: str, message: str) -> None:
    with pytest.raises(PubsubError) as caught:
        gram.parse_command(text)
    assert (caught.value.sqlstate, caught.value.message) == (sqlstate, message)


def test_the_options_of_pgoutput() -> None:
    options: list[gram.Option] = [
        ("proto_version", "4"),
        ("streaming", "Parallel"),
        ("two_phase", "on"),
        ("origin", "NONE"),
        ("publication_names", '"p1", P2 ,"a""b"'),
        ("binary", None),
        ("messages", "0"),
    ]
    assert gram.parse_pgoutput_options(options) == gram.PgoutputParameters(
        4, ("p1", "p2", 'a"b'), binary=True, streaming="parallel", two_phase=True, messages=False, origin="none"
    )


REQUIRED: list[gram.Option] = [("proto_version", "1"), ("publication_names", "p")]


def test_the_defaults_of_pgoutput() -> None:
    assert gram.parse_pgoutput_options(REQUIRED) == gram.PgoutputParameters(1, ("p",))


@pytest.mark.parametrize(
    ("options", "sqlstate", "message"),
    [
        (REQUIRED[1:], "22023", 'option "proto_version" missing'),
        (REQUIRED[:1], "22023", 'option "publication_names" missing'),
        ([*REQUIRED, ("publication_names", "q")], "42601", "conflicting or redundant options"),
        ([*REQUIRED, ("what", "1")], "XX000", "unrecognized pgoutput option: what"),
        ([*REQUIRED, ("origin", "me")], "22023", 'unrecognized origin value: "me"'),
        ([*REQUIRED, ("streaming", "maybe")], "42601", 'streaming requires a Boolean value or "parallel"'),
        ([*REQUIRED, ("binary", "yes")], "42601", "binary requires a Boolean value"),
        ([("proto_version", "x"), REQUIRED[1]], "22023", "invalid proto_version"),
        ([("proto_version", "4294967296"), REQUIRED[1]], "22023", 'proto_version "4294967296" out of range'),
        ([REQUIRED[0], ("publication_names", "a,,b")], "42602", "invalid publication_names syntax"),
        ([REQUIRED[0], ("publication_names", '"a')], "42602", "invalid publication_names syntax"),
        ([REQUIRED[0], ("publication_names", "a b")], "42602", "invalid publication_names syntax"),
    ],
)
def test_pgoutput_options_are_refused(options: list[gram.Option], sqlstate: str, message: str) -> None:
    with pytest.raises(PubsubError) as caught:
        gram.parse_pgoutput_options(options)
    assert (caught.value.sqlstate, caught.value.message) == (sqlstate, message)


@pytest.mark.parametrize(
    ("version", "option", "needed"),
    [
        ("1", ("streaming", "on"), "streaming, need 2"),
        ("3", ("streaming", "parallel"), "parallel streaming, need 4"),
        ("2", ("two_phase", "on"), "two-phase commit, need 3"),
    ],
)
def test_a_feature_needs_its_protocol(version: str, option: gram.Option, needed: str) -> None:
    with pytest.raises(FeatureNotSupported) as caught:
        gram.parse_pgoutput_options([("proto_version", version), REQUIRED[1], option])
    assert caught.value.message == f"requested proto_version={version} does not support {needed} or higher"


@pytest.mark.parametrize("version", ["0", "5"])
def test_other_protocols_are_not_spoken(version: str) -> None:
    with pytest.raises(FeatureNotSupported):
        gram.parse_pgoutput_options([("proto_version", version), REQUIRED[1]])


@pytest.mark.parametrize(("name", "cut"), [("a" * 63, "a" * 63), ("a" * 64, "a" * 63), ("é" * 32, "é" * 31)])
def test_names_are_cut_to_63_bytes(name: str, cut: str) -> None:
    assert gram.parse_command(f'DROP_REPLICATION_SLOT "{name}"') == gram.DropReplicationSlot(cut, wait=False)
