"""A slot's snapshot sees transactions whose commit is in the WAL, though PostgreSQL does not count them as ended yet.

A commit that waits for a synchronous standby stays so for as long as a test needs.  For a new slot's snapshot to see one, it must
begin and commit while the slot waits for older transactions (snapbuild.c: SnapBuildFindSnapshot).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg

from catalog.states import RelState
from pubsub.publisher import snapshots
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import create_slot
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, wait_until


def until_a_slot_waits_for(database: Database, session: psycopg.Connection[Any]) -> None:
    pid = session.info.backend_pid
    waits = f"SELECT FROM pg_stat_activity WHERE backend_type = 'walsender' AND {pid} = ANY (pg_blocking_pids(pid))"
    wait_until(lambda: len(database.query(waits)) > 0, "a slot's creation to wait for a transaction")


class Commit:
    """A statement whose commit a slot's snapshot will see, and that does not end before the block does."""

    def __init__(self, database: Database, statement: str) -> None:
        self._database = database
        self._thread = threading.Thread(target=self._run, args=[statement])

    def __enter__(self) -> Commit:
        """`create` must have a slot made by another thread or task."""
        self._older = self._transaction()
        return self

    def between(self) -> None:
        """Commit while a slot is being made; afterwards it has been made, or soon will be."""
        until_a_slot_waits_for(self._database, self._older)
        newer = self._transaction()
        self._older.close()
        until_a_slot_waits_for(self._database, newer)
        self._standbys("nobody")
        wait_until(self._commits_wait, "commits to wait for a standby")
        self._thread.start()
        self._until("SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'", "the commit to wait for a standby")
        newer.close()

    def until_a_slot_waits_for_it(self) -> None:
        """Wait until a slot that is being made waits for the commit to end."""
        committing = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        self._until(
            f"SELECT FROM pg_stat_activity WHERE backend_type = 'walsender' AND ({committing}) = ANY (pg_blocking_pids(pid))",
            "a slot's creation to wait for the commit",
        )

    def __exit__(self, *_: object) -> None:
        self._older.close()
        self._standbys("")
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, statement: str) -> None:
        with psycopg.connect(self._database.conninfo, autocommit=True) as session:
            session.execute(statement.encode())

    def _transaction(self) -> psycopg.Connection[Any]:
        session = psycopg.connect(self._database.conninfo)
        session.execute("SELECT pg_current_xact_id()")
        return session

    def _standbys(self, names: str) -> None:
        self._database.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        self._database.execute("SELECT pg_reload_conf()")

    def _commits_wait(self) -> bool:
        """Whether the checkpointer has read the setting: only then do commits wait (syncrep.c: SyncRepWaitForLSN)."""
        with psycopg.connect(self._database.conninfo, autocommit=True) as session:
            pid = session.info.backend_pid
            waiting = f"SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'SyncRep'"
            thread = threading.Thread(target=session.execute, args=[b"SELECT pg_logical_emit_message(true, '', '')"])
            thread.start()
            wait_until(
                lambda: not thread.is_alive() or len(self._database.query(waiting)) > 0, "a commit to end or wait"
            )
            waits = thread.is_alive()
            if waits:
                self._database.execute(f"SELECT pg_cancel_backend({pid})")
            thread.join()
            return waits

    def _until(self, query: str, what: str) -> None:
        wait_until(lambda: len(self._database.query(query)) > 0, what)


async def test_a_commit_that_waits_for_a_standby_is_not_waited_for(any_database: Database) -> None:
    """It is marked as committed.  To a role that must not see what it waits for, it may be any other.

    19 makes no slot before such a commit has ended, so its snapshots never see one.
    """
    role = f"{any_database.name}_reader"
    any_database.execute(f"CREATE TABLE t (id int); CREATE ROLE {role} LOGIN")
    unprivileged = f"{any_database.conninfo} user={role}"
    try:
        if any_database.server.version >= "19":
            async with await Connection.connect(any_database.conninfo, replication=True) as exporter:
                with Commit(any_database, "INSERT INTO t VALUES (1)") as commit:
                    creating = asyncio.create_task(
                        create_slot(exporter, f"{any_database.name}_s", snapshot="export", temporary=True)
                    )
                    await asyncio.to_thread(commit.between)
                    await asyncio.to_thread(commit.until_a_slot_waits_for_it)
                exported = (await creating).snapshot_name
                assert exported is not None
                async with await Connection.connect(any_database.conninfo) as connection:
                    seen = await snapshots.settle(connection, exported)
                    assert not await snapshots.lacks(connection, seen)
                    assert await connection.query("SELECT id FROM public.t") == [("1",)]
            return
        with Commit(any_database, "INSERT INTO t VALUES (1)") as commit:
            async with await Connection.connect(any_database.conninfo, replication=True) as exporter:
                slot = f"{any_database.name}_s"
                creating = asyncio.create_task(create_slot(exporter, slot, snapshot="export", temporary=True))
                await asyncio.to_thread(commit.between)
                exported = (await creating).snapshot_name
                assert exported is not None
                async with await Connection.connect(any_database.conninfo) as connection:
                    seen = await snapshots.settle(connection, exported)
                    assert await snapshots.lacks(connection, seen)
                    assert not await snapshots._still_committing(connection, seen)
                    await snapshots.begin_under(connection, exported)
                    assert len(await connection.query("SELECT id FROM public.t")) == 1
                    await connection.execute("COMMIT")
                    assert await connection.query("SELECT id FROM public.t") == []
                async with await Connection.connect(unprivileged) as connection:
                    assert await snapshots._still_committing(connection, seen)
        async with await Connection.connect(unprivileged) as connection:
            assert not await snapshots._still_committing(connection, seen)
    finally:
        any_database.execute(f"DROP ROLE {role}")


async def test_a_transaction_is_rolled_back_while_a_slot_is_made(any_database: Database) -> None:
    """A snapshot can end before it begins then, as PostgreSQL writes it, and does not read it."""
    any_database.execute("CREATE TABLE t (id int)")
    first, second, third = (psycopg.connect(any_database.conninfo) for _ in range(3))
    with first, second, third:
        first.execute("INSERT INTO t VALUES (1)")
        async with await Connection.connect(any_database.conninfo, replication=True) as exporter:
            creating = asyncio.create_task(
                create_slot(exporter, f"{any_database.name}_s", snapshot="export", temporary=True)
            )
            await asyncio.to_thread(until_a_slot_waits_for, any_database, first)
            second.execute("INSERT INTO t VALUES (2)")
            first.rollback()
            await asyncio.to_thread(until_a_slot_waits_for, any_database, second)
            third.execute("INSERT INTO t VALUES (3)")
            second.rollback()
            exported = (await creating).snapshot_name
            assert exported is not None
            async with await Connection.connect(any_database.conninfo) as connection:
                seen = await snapshots.settle(connection, exported)
                assert not await snapshots.lacks(connection, seen)
                await snapshots.begin_under(connection, exported)
                assert await connection.query("SELECT FROM public.t") == []
                assert await connection.query(
                    "SELECT pg_visible_in_snapshot($1::text::xid8, $2::text::pg_snapshot)",
                    [xid_of(third), seen],
                ) == [("f",)]


def xid_of(session: psycopg.Connection[Any]) -> str:
    """Return the session's transaction, which it has begun."""
    (row,) = session.execute("SELECT pg_current_xact_id()::text")
    return str(row[0])


def test_rows_of_a_commit_that_waits_are_copied_once(replica: Replica) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY)")
    replica.execute("CREATE PUBLICATION p FOR TABLE other")
    replica.subscribe()
    replica.assert_equal("other")
    replica.execute("ALTER PUBLICATION p ADD TABLE t")
    with Commit(replica.database, "INSERT INTO t VALUES (1)") as commit:
        replica.alter("REFRESH PUBLICATION")
        commit.between()
        if replica.database.server.version >= "19":
            commit.until_a_slot_waits_for_it()
        else:
            wait_until(lambda: replica.relation("t").state is RelState.READY, "the copy")
            assert [row["id"] for row in replica.rows("t")] == [1]
            assert replica.query("SELECT FROM t") == []
    replica.execute("INSERT INTO t VALUES (2)")
    replica.assert_equal("t")
