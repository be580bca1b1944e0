"""Queries about a publisher's replication slots and the end of its WAL.

Every function takes an open Connection, for replication or not, and raises what `Connection.query` raises;
search_path is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import number_or_none, text, truth


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A row of pg_replication_slots.  An LSN is None until the slot has one, and for a lost slot."""

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    active: bool
    confirmed_flush_lsn: Lsn | None
    wal_status: str | None
    """reserved, extended, unreserved or lost."""
    safe_wal_size: int | None
    """Bytes of WAL that can still be written before the slot may be lost; None: no limit is set."""
    two_phase: bool
    failover: bool
    invalidation_reason: str | None
    """From 17 on; on 16 "conflicting" or None, since that version tells no more."""
    retained_bytes: int | None
    """Bytes of WAL kept for the slot: from restart_lsn to the end of the WAL."""

    @property
    def lost(self) -> bool:
        """Whether the slot was invalidated, for whatever reason: no stream can be had from it any more."""
        return self.wal_status == "lost"


@dataclass(frozen=True, slots=True)
class SlotWait:
    """A slot under creation and the transaction that it waits for; `xid` None: on a standby, it waits for the primary.

    `age` is in seconds.  `pid` is None for a prepared transaction; so are fields of other sessions that the role may not see.
    """

    slot: str
    xid: int | None
    pid: int | None
    user: str | None
    application: str | None
    state: str | None
    age: float | None
    gid: str | None


async def slot_info(connection: Connection, slot: str) -> SlotInfo | None:
    """Return the slot's row, or None if there is no such slot."""
    rows = await connection.query(_SLOT, [slot])
    return _slot(rows[0]) if rows else None


async def slot_infos(connection: Connection, pattern: str) -> list[SlotInfo]:
    """Return the rows of the slots with names LIKE `pattern`, of any database."""
    return [_slot(row) for row in await connection.query(_SLOTS, [pattern])]


def _slot(row: Sequence[str | None]) -> SlotInfo:
    return SlotInfo(
        name=text(row[0]),
        plugin=row[1],
        database=row[2],
        temporary=truth(row[3]),
        active=truth(row[4]),
        confirmed_flush_lsn=None if row[5] is None else Lsn.parse(row[5]),
        wal_status=row[6],
        safe_wal_size=number_or_none(row[7]),
        two_phase=truth(row[8]),
        failover=truth(row[9]),
        invalidation_reason=row[10],
        retained_bytes=number_or_none(row[11]),
    )


async def slots_like(connection: Connection, pattern: str) -> dict[str, int | None]:
    """Return the slots with names LIKE `pattern`, of any database, each with the bytes of WAL that it retains."""
    rows = await connection.query(_SLOTS_LIKE, [pattern])
    return {text(name): number_or_none(retained) for name, retained in rows}


async def advance_slot(connection: Connection, slot: str) -> Lsn:
    """Move a slot that no one reads to the end of the WAL; return its new position.  Raises PublisherError."""
    (row,) = await connection.query(f"SELECT end_lsn FROM pg_replication_slot_advance($1::name, {_END_OF_WAL})", [slot])
    return Lsn.parse(text(row[0]))


async def slot_waits(connection: Connection, pattern: str) -> list[SlotWait]:
    """Return the waits of slots under creation with names LIKE `pattern` (snapbuild.c: SnapBuildWaitSnapshot)."""
    rows = await connection.query(_SLOT_WAITS, [pattern])
    return [
        SlotWait(
            slot=text(slot),
            xid=number_or_none(xid),
            pid=number_or_none(pid),
            user=user,
            application=application,
            state=state,
            age=None if age is None else float(age),
            gid=gid,
        )
        for slot, xid, pid, user, application, state, age, gid in rows
    ]


async def slot_user(connection: Connection, slot: str) -> str | None:
    """Return a sentence that says who reads from the slot; None if no one does."""
    rows = await connection.query(_SLOT_USER, [slot])
    if not rows:
        return None
    pid, application, user, address, since = rows[0]
    where = f"from {address}" if address is not None else "on the publisher's host"
    return f'Process {pid} ("{application}") of role "{user}" {where} reads it, connected since {since}.'


async def prepared_transactions(connection: Connection) -> set[tuple[int, str]]:
    """Return the prepared transactions of the connection's database: xids and gids.  A standby lists none."""
    rows = await connection.query(_PREPARED)
    return {(number_or_none(xid) or 0, text(gid)) for xid, gid in rows}


async def current_wal_lsn(connection: Connection) -> Lsn:
    """Return the end of the WAL written so far, exclusive; on a standby, of the WAL replayed."""
    (row,) = await connection.query(f"SELECT {_END_OF_WAL}")
    return Lsn.parse(text(row[0]))


_END_OF_WAL: Final = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"

# to_jsonb, since some columns came with later versions.
_ANY_SLOT: Final = f"""
SELECT s.slot_name, s.plugin, s.database, s.temporary, s.active, s.confirmed_flush_lsn,
       s.wal_status, s.safe_wal_size, s.two_phase, coalesce((to_jsonb(s) ->> 'failover')::bool, false),
       coalesce(to_jsonb(s) ->> 'invalidation_reason',
                CASE WHEN to_jsonb(s) ->> 'conflicting' = 'true' THEN 'conflicting' END),
       pg_wal_lsn_diff({_END_OF_WAL}, s.restart_lsn)
  FROM pg_replication_slots s
 WHERE s.slot_name"""
_SLOT: Final = f"{_ANY_SLOT} = $1::text"
_SLOTS: Final = f"{_ANY_SLOT} LIKE $1::text"

_PREPARED: Final = "SELECT transaction, gid FROM pg_prepared_xacts WHERE database = current_database()"

_SLOTS_LIKE: Final = f"""
SELECT slot_name, pg_wal_lsn_diff({_END_OF_WAL}, restart_lsn)
  FROM pg_replication_slots
 WHERE slot_name LIKE $1::text AND NOT temporary
 ORDER BY slot_name
"""

# A walsender that creates a slot waits for the lock of each transaction that was running when it began; on a standby
# it first waits for a record from the primary.  Virtual transactions have no such lock, and are not waited for.
_SLOT_WAITS: Final = """
SELECT slot.name, l.transactionid, holder.pid, a.usename, a.application_name, a.state,
       extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start)), p.gid
  FROM pg_stat_activity w
  JOIN LATERAL (SELECT substring(w.query FROM '^CREATE_REPLICATION_SLOT "([^"]+)"') AS name) slot ON slot.name LIKE $1::text
  LEFT JOIN pg_locks l ON l.pid = w.pid AND l.locktype = 'transactionid' AND NOT l.granted
  LEFT JOIN pg_locks holder ON holder.locktype = 'transactionid' AND holder.transactionid = l.transactionid
                           AND holder.granted AND holder.mode = 'ExclusiveLock'
  LEFT JOIN pg_stat_activity a ON a.pid = holder.pid
  LEFT JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
 WHERE w.backend_type = 'walsender' AND w.state = 'active'
   AND (l.pid IS NOT NULL OR pg_is_in_recovery() AND w.query_start < clock_timestamp() - interval '3 s')
"""

_SLOT_USER: Final = """
SELECT s.active_pid, a.application_name, a.usename, host(a.client_addr), date_trunc('second', a.backend_start)
  FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
 WHERE s.slot_name = $1::text AND s.active_pid IS NOT NULL
"""
