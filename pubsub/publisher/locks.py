"""Which of a subscriber's sessions wait for a lock on the publisher, and whose.

Every function takes an open Connection and raises what `Connection.query` raises; search_path is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pubsub.publisher.connection import Connection
from pubsub.publisher.fields import number, number_or_none, text


@dataclass(frozen=True, slots=True)
class LockWait:
    """A session that waits for a lock, and one that it waits for.

    `relation` is as SQL names it; None: the lock is on no table.  `seconds`: how long it waits.  `holder` None: a prepared
    transaction, or a session that ended a moment ago.  `age` of the holder's transaction, in seconds; fields of
    other sessions that the role may not see are None.  `modes` that the holder has or wants.
    """

    application: str
    pid: int
    relation: str | None
    seconds: float
    holder: int | None
    user: str | None
    holder_application: str | None
    state: str | None
    age: float | None
    modes: str | None
    gid: str | None


async def lock_waits(connection: Connection, pattern: str) -> list[LockWait]:
    """Of sessions with application names LIKE `pattern`, those that have waited for more than a second, the longest first."""
    rows = await connection.query(_LOCK_WAITS, [pattern])
    return [
        LockWait(
            application=text(application),
            pid=number(pid),
            relation=relation,
            seconds=float(text(seconds)),
            holder=number_or_none(holder),
            user=user,
            holder_application=holder_application,
            state=state,
            age=None if age is None else float(age),
            modes=modes,
            gid=gid,
        )
        for application, pid, relation, seconds, holder, user, holder_application, state, age, modes, gid in rows
    ]


# A walsender waits for transactions while it makes a slot: that is slots.slot_waits.  pg_blocking_pids() has those who hold the
# lock and those who came before; 0 is a prepared transaction.  Who holds it goes first.
_LOCK_WAITS: Final = """
SELECT w.application_name, w.pid, l.relation::regclass,
       extract(epoch FROM clock_timestamp() - l.waitstart),
       nullif(blocker.pid, 0), a.usename, a.application_name, a.state,
       extract(epoch FROM clock_timestamp() - coalesce(blocker.prepared, a.xact_start)), blocker.modes, blocker.gid
  FROM pg_stat_activity w
  JOIN pg_locks l ON l.pid = w.pid AND NOT l.granted
  LEFT JOIN LATERAL (
       SELECT b.pid, string_agg(DISTINCT held.mode, ', ') AS modes, bool_or(held.granted) AS granted,
              min(p.gid) AS gid, min(p.prepared) AS prepared
         FROM unnest(pg_blocking_pids(w.pid)) b(pid)
         LEFT JOIN pg_locks held
                ON held.pid IS NOT DISTINCT FROM nullif(b.pid, 0) AND held.locktype = l.locktype
               AND held.database IS NOT DISTINCT FROM l.database AND held.relation IS NOT DISTINCT FROM l.relation
               AND held.transactionid IS NOT DISTINCT FROM l.transactionid
         LEFT JOIN pg_locks own ON b.pid = 0 AND own.virtualtransaction = held.virtualtransaction
                               AND own.locktype = 'transactionid'
         LEFT JOIN pg_prepared_xacts p ON p.transaction = own.transactionid
        GROUP BY b.pid
        ORDER BY bool_or(held.granted) DESC NULLS LAST, b.pid
        LIMIT 1) blocker ON true
  LEFT JOIN pg_stat_activity a ON a.pid = blocker.pid
 WHERE w.application_name LIKE $1::text AND w.backend_type = 'client backend'
   AND l.waitstart < clock_timestamp() - interval '1 s'
 ORDER BY l.waitstart
"""
