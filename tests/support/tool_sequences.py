"""What change data capture tools send to PostgreSQL, in their order, taken from their sources.

A sequence names connections: `r` is one with replication=database, as `r2`; `q` and others are plain ones.  Only the first
connection's transaction, or none, is open where a slot is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple query, or a replication command; `shape`: compare names, types and the number of rows only."""

    connection: str
    sql: str
    shape: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A query of the extended protocol, with parameters in text."""

    connection: str
    sql: str
    parameters: tuple[str, ...] = ()
    shape: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Let a plain connection take up the snapshot that the last answer of `source` names."""

    connection: str
    source: str


@dataclass(frozen=True, slots=True)
class Stream:
    """START_REPLICATION on a connection of its own, until so many commits have come and were confirmed."""

    command: str
    commits: int


@dataclass(frozen=True, slots=True)
class Write:
    """What other clients do meanwhile, beside the tool."""

    sql: str


Step = Simple | Prepared | Snapshot | Stream | Write

_WRITES: Final = Write("INSERT INTO t VALUES (100, 'x'); UPDATE t SET b = 'y' WHERE a = 1")

_PEERDB_SLOTS: Final = """
WITH current_wal AS (
  SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END AS current_lsn
)
SELECT prs.slot_name, pcc.redo_lsn::text, prs.restart_lsn::text, cw.current_lsn::text, prs.wal_status, prs.safe_wal_size,
       prs.confirmed_flush_lsn::text, psr.sent_lsn::text, prs.active,
       round((cw.current_lsn - prs.restart_lsn) / 1024 / 1024),
       round((cw.current_lsn - prs.confirmed_flush_lsn) / 1024 / 1024),
       psa.wait_event_type, psa.wait_event, psa.state,
       (SELECT (pg_size_bytes(setting || COALESCE(unit, '')) / 1024 / 1024)::bigint
        FROM pg_settings WHERE name = 'logical_decoding_work_mem'), -- megabytes
       EXTRACT(EPOCH FROM psrs.stats_reset)::bigint, psrs.spill_txns, psrs.spill_count, psrs.spill_bytes
FROM current_wal cw, pg_control_checkpoint() AS pcc,
     (pg_replication_slots AS prs
      LEFT JOIN pg_stat_activity AS psa ON psa.pid = prs.active_pid
      LEFT JOIN pg_stat_replication AS psr ON psr.pid = prs.active_pid
      LEFT JOIN pg_stat_replication_slots AS psrs ON psrs.slot_name = prs.slot_name)
WHERE prs.slot_name = 'peerflow_slot_job'
"""

PEERDB: Final[tuple[Step, ...]] = (
    Prepared("q", "SELECT current_setting('server_version_num')::INTEGER"),
    Prepared("q", "SHOW wal_level"),
    Prepared("q", "SELECT rolreplication FROM pg_roles WHERE rolname = $1", ("postgres",)),
    Prepared("q", "SELECT setting FROM pg_settings WHERE name = 'rds.logical_replication'"),
    Prepared("q", "SELECT setting::int<2 FROM pg_settings WHERE name='max_wal_senders'"),
    Prepared("q", "SELECT pg_is_in_recovery()"),
    Prepared("q", "SELECT puballtables FROM pg_publication WHERE pubname=$1", ("p",)),
    Prepared(
        "q",
        "select schemaname,tablename from (values ('public'::text,'t'::text)) as input(schemaname,tablename) where not exists"
        " (select * from pg_publication_tables pub where pubname=$1 and pub.schemaname=input.schemaname"
        " and pub.tablename=input.tablename)",
        ("p",),
    ),
    Simple("q", "SELECT slot_name FROM pg_replication_slots WHERE slot_name = 'peerflow_slot_job'"),
    Simple("r", "SET idle_in_transaction_session_timeout=0"),
    Simple("r", "SET lock_timeout=0"),
    Simple("r", 'CREATE_REPLICATION_SLOT "peerflow_slot_job" LOGICAL pgoutput'),
    _WRITES,
    Snapshot("s", "r"),
    Prepared("s", "SELECT count(*), max(a) FROM t"),
    Simple(
        "s",
        "COPY (SELECT a, b FROM t WHERE ctid BETWEEN '(0,0)'::tid AND '(5,0)'::tid) TO STDOUT (FORMAT binary)",
        True,
    ),
    Simple("s", "COMMIT"),
    Simple("q", "SELECT slot_name FROM pg_replication_slots WHERE slot_name = 'peerflow_slot_job'"),
    Prepared("q", _PEERDB_SLOTS, shape=True),
    Stream(
        "START_REPLICATION SLOT peerflow_slot_job LOGICAL 0/0 (proto_version '1', publication_names 'p', messages 'true')",
        1,
    ),
    Prepared("q", _PEERDB_SLOTS, shape=True),
    Prepared(
        "q", "SELECT COUNT(*) FROM pg_stat_activity WHERE usename=$1 AND application_name LIKE 'peerdb%'", ("postgres",)
    ),
    Prepared(
        "q",
        "select COUNT(*) from pg_stat_replication WHERE usename = $1 AND application_name LIKE 'peerdb%'",
        ("postgres",),
    ),
    Prepared(
        "q",
        "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END",
        shape=True,
    ),
    Prepared(
        "q",
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name=$1",
        ("peerflow_slot_job",),
    ),
    Prepared("q", "SELECT EXISTS(SELECT 1 FROM pg_publication WHERE pubname=$1)", ("p",)),
)

SUPABASE_ETL: Final[tuple[Step, ...]] = (
    Simple("r", "select setting, unit from pg_settings where name = 'wal_sender_timeout';"),
    Simple("r", "select 1 as exists from pg_publication where pubname = 'p';"),
    Simple("r", "select schemaname, tablename from pg_publication_tables where pubname = 'p';"),
    Simple("r", "select distinct gpt.relid::oid as oid from pg_get_publication_tables('p') gpt order by oid;", True),
    Simple("r", "select confirmed_flush_lsn from pg_replication_slots where slot_name = 'supabase_etl_apply_1';"),
    Simple("r", "CREATE_REPLICATION_SLOT supabase_etl_apply_1 LOGICAL pgoutput NOEXPORT_SNAPSHOT"),
    Simple("r", "select wal_status from pg_replication_slots where slot_name = 'supabase_etl_apply_1';"),
    Simple("r", "CREATE_REPLICATION_SLOT supabase_etl_apply_1 LOGICAL pgoutput NOEXPORT_SNAPSHOT"),
    Simple("r2", "START TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"),
    Simple("r2", "CREATE_REPLICATION_SLOT supabase_etl_table_sync_1_16384 LOGICAL pgoutput USE_SNAPSHOT"),
    _WRITES,
    Simple("r2", "select pg_export_snapshot();"),
    Snapshot("s", "r2"),
    Simple("s", "select count(*) from t;"),
    Simple("s", "copy (select a, b from public.t where ctid >= '(0,1)'::tid) to stdout with (format text);"),
    Simple("r2", "copy (select a, b from public.t) to stdout with (format text);"),
    Simple("r2", "COMMIT"),
    Simple("s", "COMMIT"),
    Write("SELECT pg_logical_emit_message(true, 'supabase_etl_ddl', '{}'); INSERT INTO t VALUES (101, 'z')"),
    Stream(
        "START_REPLICATION SLOT supabase_etl_table_sync_1_16384 LOGICAL 0/0 (\"proto_version\" '1', "
        "\"publication_names\" 'p', \"messages\" 'true')",
        2,
    ),
    Prepared(
        "q",
        "with current_wal as (select pg_current_wal_lsn() as lsn) select s.slot_name, s.active, s.wal_status,"
        " coalesce(pg_wal_lsn_diff(current_wal.lsn, s.restart_lsn), 0)::bigint as restart_lsn_bytes,"
        " s.safe_wal_size as safe_wal_size_bytes, round(extract(epoch from r.write_lag) * 1000)::bigint as write_lag_ms,"
        " round(extract(epoch from clock_timestamp() - r.reply_time) * 1000)::bigint as reply_time_lag_ms"
        " from pg_replication_slots as s cross join current_wal left outer join pg_stat_replication as r on s.active_pid = r.pid"
        " where s.slot_type = 'logical' and s.database = current_database() and (s.slot_name = $1 or s.slot_name like $2 escape '\\')",
        ("supabase_etl_apply_1", "supabase\\_etl\\_table\\_sync\\_1\\_%"),
        shape=True,
    ),
    Simple("r", "DROP_REPLICATION_SLOT supabase_etl_table_sync_1_16384 WAIT;"),
    Simple("r", "DROP_REPLICATION_SLOT supabase_etl_table_sync_1_16384 WAIT;"),
    Prepared(
        "q",
        "select pg_terminate_backend(r.active_pid) from pg_replication_slots r where (r.slot_name = $1 or"
        " r.slot_name like $2 escape '\\') and r.active = true;",
        ("supabase_etl_apply_1", "supabase\\_etl\\_table\\_sync\\_1\\_%"),
    ),
    Prepared(
        "q",
        "select pg_drop_replication_slot(r.slot_name) from pg_replication_slots r where r.slot_name = $1 or"
        " r.slot_name like $2 escape '\\';",
        ("supabase_etl_apply_1", "supabase\\_etl\\_table\\_sync\\_1\\_%"),
    ),
)

MATERIALIZE: Final[tuple[Step, ...]] = (
    Simple("q", "SHOW wal_level"),
    Simple("q", "SHOW max_wal_senders"),
    Simple("r", "IDENTIFY_SYSTEM"),
    Simple("r", 'CREATE_REPLICATION_SLOT "materialize_1" LOGICAL "pgoutput" NOEXPORT_SNAPSHOT'),
    Simple("r2", "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ;"),
    Simple("r2", 'CREATE_REPLICATION_SLOT "materialize_tmp" TEMPORARY LOGICAL "pgoutput" USE_SNAPSHOT'),
    Simple("r2", "SELECT pg_export_snapshot();"),
    Snapshot("s", "r2"),
    Simple("s", "COPY public.t (a, b) TO STDOUT (FORMAT TEXT, DELIMITER '\t');"),
    Simple("r2", "COMMIT"),
    Simple("s", "COMMIT"),
    _WRITES,
    Simple("q", "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'materialize_1'"),
    Stream(
        'START_REPLICATION SLOT "materialize_1" LOGICAL 0/0 ("proto_version" \'1\', "publication_names" \'"p"\')', 1
    ),
    Simple("q", "SELECT confirmed_flush_lsn IS NOT NULL FROM pg_replication_slots WHERE slot_name = 'materialize_1'"),
    Simple("q", "SELECT timeline_id FROM pg_control_checkpoint()"),
    Simple("r", 'DROP_REPLICATION_SLOT "materialize_1" WAIT'),
)

AIRBYTE: Final[tuple[Step, ...]] = (
    Prepared("q", "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", ("airbyte_slot",), shape=True),
    Prepared(
        "q",
        "SELECT * FROM pg_replication_slots WHERE slot_name = $1 AND plugin = $2 AND database = current_database()",
        ("airbyte_slot", "pgoutput"),
        shape=True,
    ),
    Prepared("q", "SELECT * FROM pg_publication WHERE pubname = $1", ("p",), shape=True),
    Prepared("q", "SELECT pg_current_wal_lsn()", shape=True),
    _WRITES,
    Stream(
        "START_REPLICATION SLOT airbyte_slot LOGICAL 0/0 (proto_version '1', publication_names 'p', messages 'true')", 1
    ),
    Prepared(
        "q", "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1", ("airbyte_slot",), shape=True
    ),
    Prepared("q", "SELECT pg_drop_replication_slot($1)", ("airbyte_slot",)),
)

# A poller without a walsender: it peeks, then confirms what it has stored.
POLLER: Final[tuple[Step, ...]] = (
    Simple("q", "SELECT pg_create_logical_replication_slot('poller', 'pgoutput')", True),
    Simple(
        "q",
        "SELECT slot_name, plugin, slot_type, temporary, active FROM pg_replication_slots WHERE slot_name = 'poller'",
    ),
    _WRITES,
    Simple(
        "q",
        "SELECT get_byte(data, 0) FROM pg_logical_slot_peek_binary_changes('poller', NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'p')",
    ),
    Simple(
        "q",
        "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('poller', pg_current_wal_lsn(), 1, 'proto_version', '1',"
        " 'publication_names', 'p')",
    ),
    Simple("q", "SELECT pg_replication_slot_advance('poller', pg_current_wal_lsn())", True),
    Simple(
        "q",
        "SELECT count(*) FROM pg_logical_slot_get_binary_changes('poller', NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'p')",
    ),
    Simple("q", "SELECT pg_drop_replication_slot('poller')"),
    Simple("q", "SELECT pg_create_logical_replication_slot('poller', 'test_decoding')", True),
    Write("DELETE FROM t WHERE a = 2"),
    Simple(
        "q",
        "SELECT data FROM pg_logical_slot_get_changes('poller', NULL, NULL, 'include-xids', '0', 'skip-empty-xacts', '1')",
    ),
    Simple("q", "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE 'poll%'"),
)

SEQUENCES: Final[Mapping[str, tuple[Step, ...]]] = {
    "PeerDB": PEERDB,
    "Supabase etl": SUPABASE_ETL,
    "Materialize": MATERIALIZE,
    "Airbyte": AIRBYTE,
    "a poller": POLLER,
}
