"""Failover slots never overtake the standbys that would be promoted: synchronized_standby_slots of the upstream server."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until

pytestmark = pytest.mark.full


@contextmanager
def _standby(server: EmbeddedPostgres, directory: Path) -> Iterator[None]:
    """Have the slot's owner receive the WAL, as a standby does."""
    command = [str(server.bin("pg_receivewal")), "--dbname", server.conninfo("postgres"), "--slot", "standby"]
    command += ["--synchronous", "--no-loop", "--directory", str(directory)]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.terminate()


def _insert(server: EmbeddedPostgres, number: int) -> None:
    server.execute(f"INSERT INTO t VALUES ({number})")


def _set(server: EmbeddedPostgres, value: str) -> None:
    server.execute(f"ALTER SYSTEM SET synchronized_standby_slots = '{value}'")
    server.query("SELECT pg_reload_conf()")


def _cancelled(publish: Publish, call: str) -> str | None:
    """Call a function of the slot `asked`, cancel it while it works, and return the error's SQLSTATE."""
    states: list[str | None] = []
    with publish.connect() as connection:

        def ask() -> None:
            try:
                connection.execute(call.encode())
            except psycopg.Error as error:
                states.append(error.sqlstate)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        active = "SELECT active FROM pg_replication_slots WHERE slot_name = 'asked'"
        wait_until(lambda: publish.query(active) == [(True,)], "the function works")
        connection.cancel()
        thread.join()
    (state,) = states
    return state


@pytest.mark.parametrize("version", ["17", "18", "19"])
def test_failover_slots_wait_for_the_standbys(version: str, tmp_path: Path) -> None:
    received = tmp_path / "received"
    received.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres(version))
        server.execute("CREATE TABLE t (id int)")
        publish = Publish(tmp_path / "node", server.conninfo("postgres"))
        stack.callback(publish.kill)
        server.query("SELECT pg_create_physical_replication_slot('standby', true)")
        create = "SELECT pg_create_logical_replication_slot('{}', 'test_decoding', false, false, {})"
        for name, failover in (("held", True), ("asked", True), ("free", False)):
            publish.execute(create.format(name, failover))
        server.query(create.format("theirs", True))
        _set(server, "standby")
        held = stack.enter_context(Follower(publish.conninfo, "held"))
        free = stack.enter_context(Follower(publish.conninfo, "free"))
        theirs = stack.enter_context(Follower(lambda: server.conninfo("postgres"), "theirs"))

        def stand(expected: list[int]) -> bool:
            """Whether ours and the server's own have these rows."""
            return held.ids == expected and theirs.ids == expected

        _insert(server, 1)
        wait_until(lambda: free.ids == [1], "others do not wait")
        assert stand([])
        assert "does not have active_pid" in publish.read_log()
        with _standby(server, received):
            wait_until(lambda: stand([1]), "the standby has it")
        wait_until(
            lambda: server.query("SELECT active FROM pg_replication_slots WHERE slot_name = 'standby'") == [(False,)],
            "the standby is away",
        )
        _insert(server, 2)
        wait_until(lambda: free.ids == [1, 2], "others do not wait")
        assert stand([1])
        # A confirmed position would be that of the WAL, too.
        ((restart,),) = server.query("SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = 'standby'")
        behind = f"SELECT confirmed_flush_lsn <= '{restart}' FROM pg_replication_slots WHERE slot_name = 'held'"
        assert publish.query(behind) == [(True,)]

        # Functions wait, and can be cancelled.
        for call in (
            "SELECT count(*) FROM pg_logical_slot_get_changes('asked', NULL, NULL)",
            "SELECT pg_replication_slot_advance('asked', pg_current_wal_lsn())",
        ):
            assert _cancelled(publish, call) == "57014"

        # Without the setting all go on, and with it wait again, in the same streams.
        _set(server, "")
        wait_until(lambda: stand([1, 2]), "nobody is waited for")
        assert publish.query("SELECT count(*) FROM pg_logical_slot_get_changes('asked', NULL, NULL)") == [(6,)]
        _set(server, "Standby, nowhere")
        wait_until(lambda: '"nowhere" specified in parameter' in publish.read_log().replace("\\", ""), "it is noticed")
        _insert(server, 3)
        wait_until(lambda: free.ids == [1, 2, 3], "others do not wait")
        assert stand([1, 2])
        _set(server, "standby")
        with _standby(server, received):
            wait_until(lambda: stand([1, 2, 3]), "the standby has it")
        assert held.again == []
