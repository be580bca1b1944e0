"""pubsub.node.pinned_snapshots, and `pubsub snapshot --list`: what the catalog holds of a pin, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from catalog.store import Catalog
from pubsub.cli.common import Common
from pubsub.cli.snapshot import show_pinned
from pubsub.delta import pins
from pubsub.errors import DuplicateObject, PubsubError, UndefinedFile, UndefinedObject
from pubsub.node import pinned_snapshots
from pubsub.node.snapshot import Snapshot
from pubsub.protocol.lsn import Lsn


class Carried:
    """Carries out the requests with deltalake, and keeps them; `before` is called before each."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, int]] = []
        self.before: Callable[[str], None] = lambda kind: None

    async def __call__(self, kind: str, name: str, paths: Sequence[str]) -> None:
        self.requests.append((kind, name, len(paths)))
        self.before(kind)
        for path in paths:
            table = DeltaTable(path)
            if kind == "pin":
                table.alter.set_table_properties(
                    pins.pinned(table.metadata().configuration, name), raise_if_not_exists=False
                )


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    (tmp_path / "home").mkdir()
    async with await Catalog.open(tmp_path / "home" / "catalog.db") as opened:
        yield opened


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    paths = {f"public.{name}": str(tmp_path / name) for name in "ba"}
    for path in paths.values():
        for number in range(2):
            write_deltalake(path, pa.table({"id": [number]}), mode="overwrite")
    return Snapshot("s", Lsn(0x500), {name: (0, path) for name, path in paths.items()})


async def test_a_pin_is_complete_when_its_versions_have_been_looked_at(catalog: Catalog, snapshot: Snapshot) -> None:
    carried = Carried()
    seen: list[bool] = []
    carried.before = lambda kind: seen.append(True)
    await pinned_snapshots.pin(catalog, carried, snapshot, "a")
    (found,) = (await catalog.state()).pinned_snapshots
    assert (found.name, found.subscription, found.lsn, found.complete) == ("a", "s", 0x500, True)
    assert [(one.relation, one.version) for one in found.tables] == [("public.a", 0), ("public.b", 0)]
    with pytest.raises(DuplicateObject):
        await pinned_snapshots.pin(catalog, carried, snapshot, "a")
    await pinned_snapshots.drop(catalog, carried, "a")
    assert (await catalog.state()).pinned_snapshots == ()
    assert carried.requests == [("pin", "a", 2), ("release", "a", 2)]
    with pytest.raises(UndefinedObject):
        await pinned_snapshots.drop(catalog, carried, "a")


async def test_a_version_that_went_before_the_commits_is_noticed(catalog: Catalog, snapshot: Snapshot) -> None:
    """The commits come first: until then a VACUUM may remove what was there a moment ago."""
    carried = Carried()
    path = snapshot.tables["public.b"][1]

    def vacuum(kind: str) -> None:
        if kind == "pin":
            DeltaTable(path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    carried.before = vacuum
    with pytest.raises(UndefinedFile, match=r'version 0 of table "public\.b"'):
        await pinned_snapshots.pin(catalog, carried, snapshot, "a")
    assert (await catalog.state()).pinned_snapshots == ()
    assert carried.requests == [("pin", "a", 2), ("release", "a", 2)]


async def test_a_pin_whose_command_was_killed_can_be_dropped(catalog: Catalog, snapshot: Snapshot) -> None:
    carried = Carried()

    def killed(kind: str) -> None:
        if kind == "pin":
            raise SystemExit

    carried.before = killed
    with pytest.raises(SystemExit):
        await pinned_snapshots.pin(catalog, carried, snapshot, "a")
    (found,) = (await catalog.state()).pinned_snapshots
    assert not found.complete
    await pinned_snapshots.drop(catalog, carried, "a")
    assert (await catalog.state()).pinned_snapshots == ()


async def test_a_pin_that_is_interrupted_is_taken_back(catalog: Catalog, snapshot: Snapshot) -> None:
    carried = Carried()

    def interrupted(kind: str) -> None:
        if kind == "pin":
            raise asyncio.CancelledError

    carried.before = interrupted
    with pytest.raises(asyncio.CancelledError):
        await pinned_snapshots.pin(catalog, carried, snapshot, "a")
    assert (await catalog.state()).pinned_snapshots == ()
    assert carried.requests[-1] == ("release", "a", 2)


async def test_a_pin_whose_name_is_taken_leaves_the_other(catalog: Catalog, snapshot: Snapshot) -> None:
    await pinned_snapshots.pin(catalog, Carried(), snapshot, "a")
    carried = Carried()
    with pytest.raises(DuplicateObject):
        await pinned_snapshots.pin(catalog, carried, snapshot, "a")
    (found,) = (await catalog.state()).pinned_snapshots
    assert found.complete
    assert carried.requests == []


@pytest.mark.parametrize(("name", "sqlstate"), [("", "42602"), ("é" * 32, "42622")])
async def test_names(catalog: Catalog, snapshot: Snapshot, name: str, sqlstate: str) -> None:
    with pytest.raises(PubsubError) as raised:
        await pinned_snapshots.pin(catalog, Carried(), snapshot, name)
    assert raised.value.sqlstate == sqlstate
    await pinned_snapshots.pin(catalog, Carried(), snapshot, "é" * 31)


async def test_the_list_says_which_versions_are_kept(
    catalog: Catalog, snapshot: Snapshot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def listed(*, as_json: bool) -> str:
        await show_pinned(Common(tmp_path / "home", False), as_json=as_json)
        return capsys.readouterr().out

    assert await listed(as_json=True) == "[]\n"
    assert (await listed(as_json=False)).splitlines()[-1] == "(0 rows)"
    await pinned_snapshots.pin(catalog, Carried(), snapshot, "a")
    other = replace(snapshot, tables={"public.b": snapshot.tables["public.b"]})
    await pinned_snapshots.pin(catalog, Carried(), other, "z")
    path = snapshot.tables["public.a"][1]
    DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 1 days"})
    found = json.loads(await listed(as_json=True))
    assert [(one["name"], one["subscription"], one["lsn"]) for one in found] == [
        ("a", "s", "0/500"),
        ("z", "s", "0/500"),
    ]
    assert found[0]["tables"]["public.a"] == {"version": 0, "path": path, "kept": False}
    assert found[0]["tables"]["public.b"]["kept"]
    lines = (await listed(as_json=False)).splitlines()
    assert lines[0].split("|")[0].strip() == "name"
    assert [line.rpartition("|")[2].strip() for line in lines[2:5]] == ["f", "t", "t"]
