"""kill -9 of a real daemon while it merges files, after a checkpoint, before VACUUM, and after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pubsub.delta.housekeeping.inventory import list_files, needed, newest_version
from pubsub.delta.housekeeping.upkeep import CHECKPOINT
from pubsub.delta.log import checkpoints
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import place
from tests.fault.daemon import Daemon, Subscribed
from tests.support import stores
from tests.support.replica import Faults, wait_until


def write_until_killed(subscribed: Subscribed, daemon: Daemon, path: Path) -> None:
    """Make small files until some are merged, which kills the daemon."""
    for number in range(100):
        before = newest_version(path)
        subscribed.database.execute(f"INSERT INTO a VALUES ({10_000 + number}, 0, 'x')")
        wait_until(lambda before=before: not daemon.running or newest_version(path) > before, "a commit")  # type: ignore[misc]
        if not daemon.running:
            return


def retention(path: Path, daemon: Daemon) -> None:
    """Set the table's retention to a second, as ALTER TABLE would."""
    from pubsub.delta.log.transactions import Operation
    from tests.support.json_transactions import JsonTransactions

    log = TableLog(str(path), JsonTransactions())
    log.refresh()
    asked = dict.fromkeys(("delta.deletedFileRetentionDuration", "delta.logRetentionDuration"), "interval 1 seconds")
    log.commit([{"metaData": {**log.metadata, "configuration": {**log.properties, **asked}}}], Operation.ALTER)


@pytest.mark.full
@stores.local_only
def test_killed_while_files_are_merged_and_around_vacuum(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    subscribed.subscribe()
    subscribed.assert_equal()
    path = place(subscribed.relations()["a"].path)
    fault.arm("files rewritten", "kill")
    write_until_killed(subscribed, daemon, path)
    daemon.killed_by_fault()
    retention(path, daemon)
    fault.clear()
    fault.arm("before vacuum", "kill")
    daemon.start()
    daemon.killed_by_fault()
    fault.clear()
    fault.arm("vacuumed", "kill")
    daemon.start()
    daemon.killed_by_fault()
    fault.clear()
    daemon.start()
    subscribed.assert_equal()
    log = TableLog(str(path))
    log.refresh()
    held = needed(log.files.values())
    assert held <= {one.path for one in list_files(path)}
    wait_until(lambda: {one.path for one in list_files(path)} <= needed(_now(path).files.values()), "no stray file")
    subscribed.database.execute("UPDATE a SET n = n + 1")
    subscribed.assert_equal()


@pytest.mark.full
@stores.local_only
def test_killed_between_a_checkpoint_and_the_clean_up(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    subscribed.subscribe()
    subscribed.assert_equal()
    path = place(subscribed.relations()["a"].path)
    first = newest_version(path)
    for number in range(CHECKPOINT):
        subscribed.database.execute(f"UPDATE a SET n = {number} WHERE id <= 5")
        wait_until(lambda number=number: newest_version(path) > first + number, "a commit")  # type: ignore[misc]
    subscribed.assert_equal()
    daemon.kill()
    retention(path, daemon)
    fault.arm("checkpoint written", "kill")
    daemon.start()
    daemon.killed_by_fault()
    fault.clear()
    (checkpoint,) = checkpoints.complete(path / "_delta_log")
    assert checkpoint.version > first + CHECKPOINT
    # The earlier commits are no longer needed; where they are gone, the checkpoint is all that says what was before.
    for commit in sorted((path / "_delta_log").glob("*.json"))[: checkpoint.version]:
        commit.unlink()
    daemon.start()
    subscribed.database.execute("UPDATE a SET n = -n")
    subscribed.assert_equal()
    wait_until(lambda: {one.path for one in list_files(path)} <= needed(_now(path).files.values()), "no old file")
    subscribed.assert_equal()


def _now(path: Path) -> TableLog:
    log = TableLog(str(path))
    log.refresh()
    return log
