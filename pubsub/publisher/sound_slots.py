"""Logical slots from whose beginning on a publisher decodes with the right catalogs.

PostgreSQL builds a new slot's first picture of the catalogs in two steps, and each waits for the transactions that run at its
beginning (snapbuild.c: SNAPBUILD_BUILDING_SNAPSHOT, SNAPBUILD_FULL_SNAPSHOT).  What commits during the first step is not noted.  If a
transaction older than that one is still open at the step's end, the picture takes it for not committed, and changes of transactions
that begin during the second step are decoded as if it had not happened: without a column that it added, silently, and with an error
for ever after a TRUNCATE ("could not map filenumber").  PostgreSQL 15 to 18 do so.

Nothing tells which transaction was where in time.  So a slot is made again if a table or publication was altered meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from pubsub.errors import PubsubError
from pubsub.protocol import commands
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import CreatedSlot

_ATTEMPTS: Final = 3
"""Each waits for the transactions that run then; where tables are altered all the time, more would not help."""

Tell = Callable[[str, bool], None]
"""Takes the names of what was altered while a slot was made, and whether the slot is made again."""

_NEXT_XID: Final = "SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text"
# Of a row that was frozen long ago, xmin is of an earlier round of transaction ids, and its age may be negative.
_QUERY: Final = """
WITH since (age) AS (SELECT pg_catalog.age($1::pg_catalog.xid8::pg_catalog.xid))
SELECT pg_catalog.string_agg(name, ', ' ORDER BY name) FROM (
    SELECT pg_catalog.format('%I.%I', n.nspname, c.relname) AS name
    FROM since, pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE {tables} AND (
        pg_catalog.age(c.xmin) BETWEEN 0 AND since.age
        OR EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND pg_catalog.age(a.xmin) BETWEEN 0 AND since.age)
        OR EXISTS (SELECT 1 FROM pg_catalog.pg_index i
            WHERE i.indrelid = c.oid AND pg_catalog.age(i.xmin) BETWEEN 0 AND since.age))
    UNION SELECT pg_catalog.format('publication %I', p.pubname)
    FROM since, pg_catalog.pg_publication p
    WHERE pg_catalog.age(p.xmin) BETWEEN 0 AND since.age
        OR EXISTS (SELECT 1 FROM pg_catalog.pg_publication_rel r
            WHERE r.prpubid = p.oid AND pg_catalog.age(r.xmin) BETWEEN 0 AND since.age)
        OR EXISTS (SELECT 1 FROM pg_catalog.pg_publication_namespace s
            WHERE s.pnpubid = p.oid AND pg_catalog.age(s.xmin) BETWEEN 0 AND since.age)
    LIMIT 10
) altered
"""
_ALTERED: Final = _QUERY.format(tables="c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384")
# A database with many tables has each of them copied.
_ALTERED_TABLE: Final = _QUERY.format(
    tables="c.oid IN (SELECT $2::oid UNION SELECT relid FROM pg_catalog.pg_partition_tree($2::oid::regclass))"
)


async def create_slot(
    connection: Connection,
    name: str,
    *,
    snapshot: commands.Snapshot,
    tell: Tell | None = None,
    watch: Connection | None = None,
    table: int | None = None,
    two_phase: bool = False,
    failover: bool = False,
) -> CreatedSlot:
    """Create a slot as `replication.create_slot` does, again if need be; an earlier one's snapshot is gone then.

    `watch`: another connection, which looks at the catalogs; an exported snapshot does not survive that on its own.  `tell` is called
    for each slot that may be wrong; without it the log says so.  The last one stays, even so.  `table`: the oid of the only one whose
    changes are wanted of the slot, with its partitions.
    """
    looking = watch or connection
    attempt = 0
    while True:
        attempt += 1
        (began,) = await looking.query(_NEXT_XID)
        made = await replication.create_slot(
            connection, name, snapshot=snapshot, two_phase=two_phase, failover=failover
        )
        try:
            altered = await _altered_since(looking, str(began[0]), table)
        except PubsubError:
            # The caller does not learn that it is there.
            with suppress(PubsubError):
                await replication.drop_slot(connection, name, missing_ok=True)
            raise
        if altered is None:
            return made
        again = attempt < _ATTEMPTS
        (tell or partial(_log, name))(altered, again)
        if not again:
            return made
        await replication.drop_slot(connection, name)


async def _altered_since(connection: Connection, xid: str, table: int | None) -> str | None:
    """Return the names of what transactions from `xid` on have altered; None: nothing."""
    ((ended,),) = await connection.query(_NEXT_XID)
    if ended == xid:
        return None
    asked = (_ALTERED, [xid]) if table is None else (_ALTERED_TABLE, [xid, table])
    ((altered,),) = await connection.query(*asked)
    return altered


def _log(slot: str, altered: str, again: bool) -> None:
    from structlog import get_logger  # most commands make no slot

    logger = get_logger()
    if again:
        logger.info("replication slot is made again", slot=slot, altered=altered)
    else:
        logger.warning("replication slot may decode its first changes wrongly", slot=slot, altered=altered)
