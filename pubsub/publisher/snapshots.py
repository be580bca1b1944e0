"""Queries about the snapshots under which a table is copied, and what must be the same under all of them.

Every function takes a Connection in a REPEATABLE READ transaction, but for `settle` and `begin_…`, which begin one.  Only
END_OF_WAL ignores its snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from pubsub.errors import ProtocolViolation
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import number
from pubsub.sql.identifiers import quote_literal

if TYPE_CHECKING:
    from psycopg import Connection as PsycopgConnection

logger = structlog.get_logger()

# How long a transaction whose commit is in the WAL may take to be marked as committed, and when to look again, in seconds.
_PATIENCE: Final = 30.0
_LOOK_AGAIN: Final = 0.02
# The same where the commit may wait until this subscription has flushed it.
_PATIENCE_IF_WAITED_FOR: Final = 1.0

BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


@dataclass(frozen=True, slots=True)
class Publishing:
    """How publications publish a table.

    `marks` changes whenever the way they publish it does.  `everything`: every publication of the table publishes
    inserts, updates and deletes.
    """

    marks: str
    everything: bool


async def file_seen(connection: Connection, oid: int) -> int:
    """Return the table's relfilenode as the snapshot sees it; 0 if it has none."""
    (row,) = await connection.query("SELECT relfilenode FROM pg_class WHERE oid = $1::oid", [oid])
    return number(row[0] or "0")


async def export(connection: Connection) -> str:
    """Export the snapshot and return its name; others can import it as long as the transaction lasts."""
    (row,) = await connection.query("SELECT pg_export_snapshot()")
    return row[0] or ""


async def visible(connection: Connection) -> str:
    """Return which transactions the snapshot sees, in the text form of pg_current_snapshot().

    A slot's snapshot can have an xmax before its xmin, where the last transaction before it was rolled back (snapbuild.c:
    SnapBuildProcessRunningXacts); it sees all before its xmin then.  The server reads no such text.
    """
    (row,) = await connection.query("SELECT pg_current_snapshot()")
    found = (row[0] or "").split(":")
    if len(found) != 3:
        raise ProtocolViolation("the publisher answered a query with a malformed snapshot")
    xmin, xmax, running = found
    return f"{xmin}:{max(number(xmin), number(xmax))}:{running}"


async def lacks(connection: Connection, earlier: str) -> bool:
    """Return whether the `earlier` snapshot sees a transaction that this one does not.

    A slot's snapshot sees a transaction once its commit is in the WAL.  Other snapshots see it only once it has left
    the list of running transactions; with synchronous replication it waits between the two.
    """
    (row,) = await connection.query(
        """
        SELECT pg_snapshot_xmax(pg_current_snapshot()) < pg_snapshot_xmax($1::text::pg_snapshot)
               OR EXISTS (SELECT FROM pg_snapshot_xip(pg_current_snapshot()) running
                           WHERE pg_visible_in_snapshot(running, $1::text::pg_snapshot))
        """,
        [earlier],
    )
    return row[0] == "t"


async def settle(connection: Connection, exported: str) -> str:
    """Wait until what a slot's exported snapshot sees is marked as committed; return what it sees, as `visible`.

    Nothing may be read under it before (`_still_committing`).  It takes an instant; after half a minute it is given up.
    `connection` must be in no transaction.
    """
    await begin_under(connection, exported)
    seen = await visible(connection)
    await connection.execute("COMMIT")
    until = asyncio.get_running_loop().time() + _PATIENCE
    while await _still_committing(connection, seen):
        if asyncio.get_running_loop().time() > until:
            logger.warning("a snapshot sees transactions that have not ended", snapshot=seen)
            break
        await asyncio.sleep(_LOOK_AGAIN)
    return seen


async def begin_under(connection: Connection, exported: str) -> None:
    """Begin a transaction with the exported snapshot."""
    for statement in _beginning(exported):
        await connection.execute(statement)


def begin_session_under(session: PsycopgConnection, exported: str) -> None:
    """Do the same in a session of psycopg's.  Blocks."""
    for statement in _beginning(exported):
        session.execute(statement.encode())


def _beginning(exported: str) -> tuple[str, str]:
    return BEGIN, f"SET TRANSACTION SNAPSHOT {quote_literal(exported)}"


async def begin_showing(connection: Connection, oids: Sequence[int], xids: Sequence[int]) -> frozenset[int]:
    """Begin a transaction that sees how the committed transactions `xids` left the tables `oids`.

    A walsender sends a transaction once its commit is in the WAL.  Others see it only after that: an instant later, or when a
    synchronous standby has it.  It has its locks until then (xact.c: CommitTransaction), so a table on which it has no ACCESS
    EXCLUSIVE lock is as it left it.  After half a minute it is given up, and sooner if the standby may be this subscription;
    the tables for which it was are returned.  `connection` must be in no transaction.
    """
    began = asyncio.get_running_loop().time()
    while True:
        # Before the snapshot, which sees each transaction that has released its locks by now.
        altering = await connection.query(_ALTERING, [list(oids), list(xids)]) if xids else []
        await connection.execute(BEGIN)
        if not altering:
            return frozenset()
        answer = await connection.query(_NOT_SEEN, [[number(xid) for xid, _ in altering]])
        unseen = {number(xid) for xid, _ in answer}
        hidden = frozenset(number(oid) for xid, oid in altering if number(xid) in unseen)
        if not hidden:
            return hidden
        waited_for = any(whether == "t" for _, whether in answer)
        if asyncio.get_running_loop().time() - began > (_PATIENCE_IF_WAITED_FOR if waited_for else _PATIENCE):
            logger.warning("a snapshot does not see transactions that have been received", xids=sorted(unseen))
            return hidden
        await connection.execute("COMMIT")
        await asyncio.sleep(_LOOK_AGAIN)


# The stream has the lower halves of transaction ids, and pg_locks has them.  A prepared transaction has locks like others.
_ALTERING: Final = """
WITH held AS MATERIALIZED (SELECT * FROM pg_locks WHERE granted)
SELECT DISTINCT own.transactionid::text, held.relation
  FROM held JOIN held own ON own.locktype = 'transactionid' AND own.virtualtransaction = held.virtualtransaction
 WHERE held.locktype = 'relation' AND held.mode = 'AccessExclusiveLock' AND held.relation = ANY ($1::oid[])
   AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND own.transactionid::text::bigint = ANY ($2::bigint[])
"""
_NOT_SEEN: Final = """
SELECT xid, EXISTS (SELECT FROM pg_stat_replication
                     WHERE application_name = current_setting('application_name') AND sync_state = 'sync')
  FROM unnest($1::bigint[]) xid,
       (SELECT pg_current_snapshot() AS seen, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next) now
 WHERE NOT pg_visible_in_snapshot(
           (next + ((xid - next + 2147483648) & 4294967295) - 2147483648)::text::xid8, seen)
"""


async def _still_committing(connection: Connection, earlier: str) -> bool:
    """Return whether a transaction that the `earlier` snapshot sees may not be marked as committed yet.

    A slot's snapshot sees a transaction once its commit is in the WAL, which is before the commit log has it.  Whoever reads
    its rows in between takes them for aborted, and marks them so for everybody (heapam_visibility.c: SetHintBits); PostgreSQL
    up to 18.6 does not wait for that (snapbuild.c: SnapBuildInitialSnapshot).  One that waits for a synchronous standby is
    marked (xact.c: RecordTransactionCommit); whether it waits, only roles with pg_read_all_stats see.
    """
    (row,) = await connection.query(_STILL_COMMITTING, [earlier])
    return row[0] == "t"


# Those that have not left the list of running transactions; past a snapshot's xmax all that began are among them.
_STILL_COMMITTING: Final = """
WITH snapshots AS (SELECT pg_current_snapshot() AS now, CAST($1::text AS pg_snapshot) AS earlier),
     running AS (
    SELECT earlier, pg_snapshot_xip(now) AS xid FROM snapshots
    UNION ALL
    SELECT earlier, n::text::xid8 FROM snapshots,
           generate_series(pg_snapshot_xmax(now)::text::bigint, pg_snapshot_xmax(earlier)::text::bigint - 1) n
)
SELECT EXISTS (
    SELECT FROM running
     WHERE pg_visible_in_snapshot(xid, earlier)
       AND (EXISTS (SELECT FROM pg_stat_activity a
                     WHERE a.backend_xid = xid::xid AND a.wait_event IS DISTINCT FROM 'SyncRep')
            OR EXISTS (SELECT FROM pg_prepared_xacts p WHERE p.transaction = xid::xid)))
"""


async def end_of_wal(connection: Connection) -> Lsn:
    """Return an LSN past the commit of every transaction that the snapshot sees."""
    (row,) = await connection.query(END_OF_WAL)
    return Lsn.parse(row[0] or "")


async def flushed_end_of_wal(connection: Connection) -> Lsn:
    """Return the same once a crash of the server cannot take it back: with synchronous_commit = off, what a snapshot sees could
    be lost, and the WAL up to there be another one later.

    That takes a moment; some 15 seconds where nobody commits while a transaction writes (xlog.c: XLogBackgroundFlush,
    bgwriter.c: LOG_SNAPSHOT_INTERVAL_MS).
    """
    end = await end_of_wal(connection)
    while (await connection.query(f"SELECT {flushed(end)}"))[0][0] != "t":
        await connection.query(WAIT)
    return end


# Where the last record ends.  The next one is inserted behind the header of its page, 24 bytes of each and 40 of a segment's first
# (xlog_internal.h: SizeOfXLogShortPHD, SizeOfXLogLongPHD): while nobody writes, as after a switch of the WAL (archive_timeout)
# of a quiet server, the server neither flushes nor sends anything up to there.
END_OF_WAL: Final = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE (
    SELECT next - CASE WHEN mod(next - '0/0'::pg_lsn, pg_size_bytes(current_setting('wal_segment_size'))) = 40 THEN 40
                       WHEN mod(next - '0/0'::pg_lsn, current_setting('wal_block_size')::int) = 24 THEN 24
                       ELSE 0 END::numeric
      FROM (SELECT pg_current_wal_insert_lsn() AS next) inserted) END
"""
WAIT: Final = "SELECT pg_sleep(0.05)"


def flushed(lsn: Lsn) -> str:
    """Return the SQL condition that the server's WAL up to `lsn` is on its disk; a standby replays no other."""
    return f"CASE WHEN pg_is_in_recovery() THEN true ELSE pg_current_wal_flush_lsn() >= '{lsn}' END"


async def publishing(connection: Connection, publications: Sequence[str], oid: int) -> Publishing:
    """Return how the publications publish the table."""
    (row,) = await connection.query(_PUBLISHING, [list(publications), oid])
    return Publishing(row[0] or "", row[1] == "t")


_PUBLISHING: Final = """
WITH named AS (SELECT xmin, * FROM pg_publication WHERE pubname = ANY ($1::text[])),
     marks AS (
    SELECT format('p%s/%s', oid, xmin) AS mark FROM named
    UNION ALL
    SELECT format('r%s/%s', r.oid, r.xmin) FROM pg_publication_rel r JOIN named ON named.oid = r.prpubid
     WHERE r.prrelid = $2::oid OR r.prrelid IN (SELECT relid FROM pg_partition_ancestors($2::oid))
    UNION ALL
    SELECT format('n%s/%s', n.oid, n.xmin) FROM pg_publication_namespace n JOIN named ON named.oid = n.pnpubid
)
SELECT (SELECT string_agg(mark, ' ' ORDER BY mark) FROM marks),
       (SELECT bool_and(pubinsert AND pubupdate AND pubdelete) FROM named
         WHERE EXISTS (SELECT FROM pg_get_publication_tables(named.pubname) t WHERE t.relid = $2::oid))
"""
