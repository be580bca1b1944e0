"""The catalog as SQLite's files: private, of a known version, of one home."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from catalog.database import now
from catalog.records import NewRelation, PinnedSnapshot, PinnedTable
from catalog.store import Catalog
from pubsub.errors import DataCorrupted, FeatureNotSupported, ObjectInUse, PubsubError
from pubsub.protocol.lsn import Lsn
from tests.support.catalog import new


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    async with await Catalog.open(tmp_path / "catalog.db") as opened:
        yield opened


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def test_a_node_keeps_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "home" / "catalog.db"
    async with await Catalog.open(path) as first:
        node = await first.node()
    async with await Catalog.open(path) as second:
        assert await second.node() == node
    assert 2**32 < int(node.node_id) < 2**64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_the_files_beside_the_catalog_are_private_too(catalog: Catalog, tmp_path: Path) -> None:
    await catalog.create_subscription(new())
    assert modes(tmp_path) == {0o600}


async def test_opening_a_catalog_twice_keeps_the_locks_of_the_first(catalog: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    async with await Catalog.open(path):
        await catalog.create_subscription(new())
        # Another process must not take itself for the last one that has the file open: it would remove the -wal file.
        program = (
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM pubsub_node'); c.close()"
        )
        another = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(path))
        assert await another.wait() == 0
        assert path.with_name("catalog.db-wal").exists()
        async with await Catalog.open(path) as third:
            assert (await third.node()) == (await catalog.node())


async def test_a_catalog_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    await (await Catalog.open(path)).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE pubsub_node SET schema_version = 99")
    raw.close()
    with pytest.raises(DataCorrupted, match="version 99"):
        await Catalog.open(path)


async def test_opening_anything_but_a_catalog_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"this is no database, and long enough to be looked at" * 100)
    with pytest.raises(PubsubError, match="could not access the catalog: file is not a database"):
        await Catalog.open(path)
    with pytest.raises(PubsubError, match="could not open the catalog"):
        await Catalog.open(tmp_path)
    with pytest.raises(FeatureNotSupported):
        await Catalog.open("mysql://u:secret@h/d")
    with pytest.raises(PubsubError) as caught:
        await Catalog.open("://u:secret@h/d")
    assert "secret" not in caught.value.report(verbose=True)


async def test_a_failed_statement_does_not_show_its_parameters(catalog: Catalog, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "catalog.db") as raw:
        raw.execute("ALTER TABLE pubsub_subscription RENAME COLUMN target TO other")
    raw.close()
    with pytest.raises(PubsubError) as caught:
        await catalog.create_subscription(new())
    assert "secret" not in repr(caught.value) + repr(caught.value.__cause__) + str(caught.value.__cause__)


async def test_a_copied_home_is_told_from_one_that_was_moved(tmp_path: Path) -> None:
    home = tmp_path / "home"
    tables = [NewRelation(1, "public", "t", f"{home}/warehouse/db/t"), NewRelation(2, "public", "u", "/lake/db/u")]
    async with await Catalog.open(home / "catalog.db") as catalog:
        oid = (await catalog.create_subscription(new(), tables)).oid
        pins = tuple(PinnedTable(f"public.{one.name}", one.path, 7) for one in tables)
        await catalog.add_pinned_snapshot(PinnedSnapshot("pin", "s", Lsn(5), now(), True, pins))
        await catalog.hold(tmp_path)
        await catalog.let_go()

    async def paths(catalog: Catalog) -> list[str]:
        (pin,) = (await catalog.state()).pinned_snapshots
        found = sorted(relation.path for relation in await catalog.relations(oid))
        # Otherwise the pin would hold the tables' files for ever, and could not be released.
        assert sorted(one.path for one in pin.tables) == found
        return found

    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    async with await Catalog.open(copy / "catalog.db") as catalog:
        with pytest.raises(ObjectInUse, match="is a copy of") as caught:
            await catalog.hold(tmp_path)
        assert str(home / "catalog.db") in caught.value.message
        assert await paths(catalog) == ["/lake/db/u", f"{home}/warehouse/db/t"]
    # Renamed, it is itself, though the copy lies in its old place then.
    moved = tmp_path / "moved"
    home.rename(moved)
    copy.rename(home)
    for place in (moved, moved, home):
        async with await Catalog.open(place / "catalog.db") as catalog:
            await catalog.hold(tmp_path)
            assert await paths(catalog) == ["/lake/db/u", f"{place}/warehouse/db/t"]
            await catalog.let_go()
    # Moved to another file system: the old one is gone.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(moved, elsewhere)
    shutil.rmtree(moved)
    async with await Catalog.open(elsewhere / "catalog.db") as catalog:
        await catalog.hold(tmp_path)
        assert f"{elsewhere}/warehouse/db/t" in await paths(catalog)
        await catalog.let_go()
    # Another node lies there since: it is no original.
    again = tmp_path / "again"
    shutil.copytree(elsewhere, again)
    shutil.rmtree(elsewhere)
    await (await Catalog.open(elsewhere / "catalog.db")).close()
    async with await Catalog.open(again / "catalog.db") as catalog:
        await catalog.hold(tmp_path)
        await catalog.let_go()
