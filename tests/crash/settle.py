"""The end of a round: everything that was broken works again, and the node catches up."""

from __future__ import annotations

import time
from typing import Final

import psutil
import psycopg

from pubsub.errors import PubsubError
from pubsub.node.node import CatchupTimeoutError
from pubsub.sql.identifiers import quote_literal
from tests.crash.load import Load
from tests.crash.plan import SMALL_DISK
from tests.crash.world import World

#: Seconds.
PATIENCE: Final = 150.0


class FailedRound(Exception):
    """What a round has found."""


def settle(world: World, load: Load) -> None:
    """Mend everything, end prepared transactions, refresh, and wait for the catch-up.  Raises FailedRound."""
    _mend(world)
    with world.connect() as connection:
        prepared = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchall()
        for number, (gid,) in enumerate(sorted(prepared)):
            outcome = "ROLLBACK" if number % 3 == 2 else "COMMIT"
            connection.execute(f"{outcome} PREPARED {quote_literal(gid)}".encode())
    _command(world, "ENABLE")
    _command(world, world.plan.refresh)
    # An ALTER is followed at the table's next row.
    with world.connect() as connection:
        for table in load.tables(connection):
            _touch(connection, table)
    try:
        world.node.daemon.client(lambda node: node.wait_for_catchup(world.name, timeout=PATIENCE))
    except CatchupTimeoutError as error:
        raise FailedRound(f"it does not catch up:\n{error.report()}") from error


def _mend(world: World) -> None:
    world.network.restore()
    world.server.start()
    if world.node.catalog is not None:
        world.node.catalog.start()
    for daemon in world.node.daemons:
        daemon.restore()
        for process in daemon.family():
            if process.is_running() and process.status() == psutil.STATUS_STOPPED:
                process.resume()
        if not daemon.running and world.node.kind != SMALL_DISK and not daemon.expelled():
            raise FailedRound(f"the daemon has ended by itself:\n{daemon.tail()}")
        daemon.ensure()


def _command(world: World, action: str) -> None:
    """Run a command that must work now, or as soon as its workers have noticed that everything works again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            world.node.daemon.execute(f"ALTER SUBSCRIPTION {world.name} {action}")
            return
        except PubsubError as error:
            if time.monotonic() > deadline:
                raise FailedRound(f"{action}: {error}") from error
            time.sleep(0.3)


def _touch(connection: psycopg.Connection, table: str) -> None:
    columns = {"pair": ", k", "parted": ", part"}.get(table, "")
    values = {"pair": ", 'end'", "parted": ", 1"}.get(table, "")
    connection.execute(f"INSERT INTO {table} (id{columns}) VALUES (2000000000{values})".encode())
