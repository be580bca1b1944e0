"""An older version's catalog is brought to this one by command: what is said, the backup, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from catalog import backup, upgrade
from catalog.database import connect
from catalog.from_rows import SCHEMA_VERSION
from catalog.home_lock import DaemonLock
from catalog.store import Catalog
from pubsub.cli.app import app
from pubsub.errors import DataCorrupted, NoCatalog, ObjectInUse, PubsubError
from tests.support.catalog import with_table

OLD = SCHEMA_VERSION - 1
LACKS = ("table pubsub_pinned_snapshot", "column pubsub_subscription_stats.spill_txns")


@pytest.fixture
def location(tmp_path: Path) -> Path | str:
    """The catalog's location; scenario 065 runs the same tests on a PostgreSQL database."""
    return tmp_path / "catalog.db"


def backups(directory: Path) -> list[Path]:
    return list(directory.glob("**/*.backup"))


async def make_older(location: Path | str) -> None:
    """Make a catalog with a subscription, as a version before this one would have left it."""
    async with await Catalog.open(location) as catalog:
        sub = await with_table(catalog)
        await catalog.add_counters(sub.oid, commits=3)
        async with catalog._write(bump=False) as connection:
            for statement in (
                "DROP TABLE pubsub_pinned_snapshot",
                "ALTER TABLE pubsub_subscription_stats DROP COLUMN spill_txns",
                f"UPDATE pubsub_node SET schema_version = {OLD}",
            ):
                await connection.exec_driver_sql(statement)


async def assert_whole(location: Path | str) -> None:
    async with Catalog(await connect(location, make=False, upgrade=False)) as catalog:
        state = await catalog.state()
        (stats,) = state.statistics
        assert (stats.commits, stats.spill_txns, len(state.relations), state.pinned_snapshots) == (3, 0, 1, ())


async def test_an_older_catalog_is_upgraded_after_a_backup(location: Path | str, tmp_path: Path) -> None:
    await make_older(location)
    for _ in range(2):  # looking changes nothing
        found = await upgrade.look(location, 30)
        assert (found.version, found.is_needed, set(found.lacks)) == (OLD, True, set(LACKS))
    done = await upgrade.upgrade(tmp_path, location, 30, None)
    assert done.backup == tmp_path / f"catalog.v{OLD}.backup"
    await assert_whole(location)
    again = await upgrade.upgrade(tmp_path, location, 30, None)
    assert (again.version, again.lacks, again.backup) == (SCHEMA_VERSION, (), None)
    # The older program finds what it knows, and nothing else.
    first, body = done.backup.read_bytes().split(b"\n", 1)
    assert json.loads(first)["schema_version"] == OLD
    (tmp_path / "body.db").write_bytes(body)
    with closing(sqlite3.connect(tmp_path / "body.db")) as raw:
        assert raw.execute("SELECT schema_version FROM pubsub_node").fetchone() == (OLD,)
        assert raw.execute("SELECT commits FROM pubsub_subscription_stats").fetchone() == (3,)
        columns = {name for (name,) in raw.execute("SELECT name FROM pragma_table_info('pubsub_subscription_stats')")}
        assert "spill_txns" not in columns
        assert raw.execute("SELECT 1 FROM sqlite_master WHERE name = 'pubsub_pinned_snapshot'").fetchone() is None
    # And so does this one.
    other = tmp_path / "other"
    other.mkdir()
    await backup.restore(other, other / "catalog.db", 30, done.backup)
    await assert_whole(other / "catalog.db")


async def test_no_daemon_may_run(location: Path | str, tmp_path: Path) -> None:
    await make_older(location)
    with DaemonLock.acquire(tmp_path), pytest.raises(ObjectInUse, match="a daemon is already running on node"):
        await upgrade.upgrade(tmp_path, location, 30, None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with Catalog(await connect(location, make=False, upgrade=False)) as catalog:
        await catalog.hold(Path("/home"))
        with pytest.raises(ObjectInUse, match="a daemon is running on catalog"):
            await upgrade.upgrade(elsewhere, location, 30, None)
        await catalog.let_go()
    assert (await upgrade.look(location, 30)).is_needed
    assert backups(tmp_path) == []


async def test_without_its_backup_nothing_is_upgraded(location: Path | str, tmp_path: Path) -> None:
    await make_older(location)
    (tmp_path / "there").touch()
    with pytest.raises(PubsubError, match="could not write backup"):
        await upgrade.upgrade(tmp_path, location, 30, tmp_path / "there")
    assert (await upgrade.look(location, 30)).is_needed


async def test_a_newer_catalog_is_refused(location: Path | str, tmp_path: Path) -> None:
    with pytest.raises(NoCatalog):
        await upgrade.look(tmp_path / "none.db", 30)
    async with await Catalog.open(location) as catalog, catalog._write(bump=False) as connection:
        await connection.exec_driver_sql(f"UPDATE pubsub_node SET schema_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(DataCorrupted, match=f"version {SCHEMA_VERSION + 1}, this program reads version") as caught:
        await upgrade.upgrade(tmp_path, location, 30, None)
    assert "a later one" in (caught.value.hint or "")


def test_the_command(tmp_path: Path) -> None:
    asyncio.run(make_older(tmp_path / "catalog.db"))

    def run(*arguments: str) -> str:
        ran = CliRunner().invoke(app, ["--home", str(tmp_path), "catalog", "upgrade", *arguments])
        assert ran.exit_code == 0, ran.output
        return re.sub(r"\s+", " ", ran.output)

    said = run("--dry-run")
    assert f"has version {OLD}, this program's is {SCHEMA_VERSION}" in said
    assert all(f"{one} would be added" in said for one in LACKS)
    assert backups(tmp_path) == []
    said = run("--backup", str(tmp_path / "mine"))
    assert all(f"{one} is added" in said for one in LACKS)
    assert f'backup of version {OLD}: "{tmp_path / "mine"}"' in said
    assert f"has version {SCHEMA_VERSION}, as this program: nothing is to be done" in run()
