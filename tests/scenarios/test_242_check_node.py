"""`pubsub check` of the node's own side: each thing that the daemon needs, there and missing, by the command itself."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from catalog.store import Catalog
from pubsub.cli.app import app
from pubsub.node import check as node_check
from pubsub.node.check import clocks
from pubsub.testing.fixtures import Database


def check(home: Path, *arguments: str) -> tuple[int, list[str]]:
    ran = CliRunner().invoke(app, ["--home", str(home), "check", *arguments])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.stdout.splitlines()


def fault(home: Path, start: str) -> list[str]:
    """Return the lines of the one finding that is an error; it begins with `start` and has a hint."""
    code, lines = check(home)
    assert code == 1
    errors = [place for place, line in enumerate(lines) if line.startswith("ERROR:")]
    assert len(errors) == 1, lines
    found = [lines[errors[0]], *(line for line in lines[errors[0] + 1 : errors[0] + 3] if line.startswith("    "))]
    assert found[0].startswith(f"ERROR:  {start}"), found
    assert any(line.startswith("    HINT:  ") for line in found), found
    return found


def test_a_machine_that_is_ready(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    home = tmp_path / "node"
    code, lines = check(home, database.conninfo, "p")
    assert code == 0, lines
    assert [line for line in lines if not line.startswith(("ok:", "    DETAIL:", "WARNING:  only"))] == []
    for part in ('table "public.t"', "Java ", "clock", "warehouse", "GB are free", "catalog.db", "files"):
        assert any(part in line for line in lines), part
    assert list(tmp_path.iterdir()) == []  # nothing stays behind

    async def make() -> str:
        async with await Catalog.open(home / "catalog.db") as catalog:
            return (await catalog.node()).node_id

    node_id = asyncio.run(make())
    assert any(f"of node {node_id}" in line for line in check(home)[1])


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("JAVA_HOME", str(tmp_path))
        fault(tmp_path / "node", "could not find Java")
    with monkeypatch.context() as patch:
        patch.setenv("PUBSUB_JARS", str(tmp_path))
        fault(tmp_path / "node", "could not find the jar")


@pytest.mark.parametrize(
    ("call", "number", "step"),
    [
        ("link", errno.EPERM, "making a hard link"),
        ("fsync", errno.EIO, "fsync of a file"),
        ("open", errno.EROFS, "fsync of a directory"),
        ("rename", errno.EXDEV, "renaming a file"),
    ],
)
def test_a_warehouse_that_cannot_do_what_a_commit_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, step: str
) -> None:
    home, warehouse = tmp_path / "node", tmp_path / "lake"
    home.mkdir()
    warehouse.mkdir()
    (home / "pubsub.toml").write_text(f'warehouse = "{warehouse}"\n')
    real: Any = getattr(os, "replace" if call == "rename" else call)

    def failing(*arguments: Any, **more: Any) -> Any:
        here = call == "fsync" or str(arguments[0]).startswith(f"{warehouse}/.pubsub-check-")
        if here and (call != "open" or arguments[1] & os.O_DIRECTORY):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **more)

    if call == "fsync":
        # The catalog's directory is tried in the same way.
        asyncio.run(_make_catalog(home))
    monkeypatch.setattr(os, "replace" if call == "rename" else call, failing)
    found = fault(home, f'warehouse "{warehouse}" cannot be used: {os.strerror(number)}')
    assert found[1] == f"    DETAIL:  It failed at {step}."
    monkeypatch.undo()
    assert list(warehouse.iterdir()) == []


async def _make_catalog(home: Path) -> None:
    async with await Catalog.open(home / "catalog.db"):
        pass


def test_a_store_that_replaces_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers of one version would both succeed."""

    def replacing(source: str, target: str) -> None:
        shutil.copy(source, target)

    asyncio.run(_make_catalog(tmp_path))
    monkeypatch.setattr(os, "link", replacing)
    found = fault(tmp_path, "warehouse")
    assert "refusing to link over a file" in found[1]


def test_a_directory_where_nothing_can_be_made() -> None:
    code, lines = check(Path("/proc/node"))
    assert code == 1
    assert sum(line.startswith("ERROR:") for line in lines) == 2  # warehouse and catalog


def test_space(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    free = 1 << 29
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, free))
    fault(tmp_path, "only 0.5 GB are free for the warehouse")
    free = 5 << 30
    code, lines = check(tmp_path)
    assert code == 0
    assert "WARNING:  only 5.0 GB are free for the warehouse" in lines
    # What the publisher's tables take is asked for.
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 1000)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    assert asyncio.run(node_check.published_bytes(database.conninfo, [])) >= 32768
    monkeypatch.setattr(node_check, "published_bytes", _much)
    lines = check(tmp_path, database.conninfo, "p")[1]
    assert any(line == "    DETAIL:  The published tables take 6.0 GB on the publisher." for line in lines)


async def _much(*_: object) -> int:
    return 6 << 30


def test_the_catalog_is_asked(database: Database, tmp_path: Path) -> None:
    url = f"postgresql://postgres@127.0.0.1:{database.server.port}/{database.name}"
    (tmp_path / "pubsub.toml").write_text(f'[catalog]\nurl = "{url}"\n')
    assert "ok:  catalog at [catalog] url will be made" in check(tmp_path)[1]
    assert database.query("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
    (tmp_path / "pubsub.toml").write_text(f'[catalog]\nurl = "{url}_that_is_not"\n')
    code, lines = check(tmp_path)
    assert code == 1
    assert any(line.startswith("ERROR:") and "catalog" in line for line in lines), lines


def test_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    code, lines = check(tmp_path)
    assert code == 0
    assert "WARNING:  a process may open 256 files only (at most 4096)" in lines


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (100.0, "ok"),
        (99.5, "ok"),
        (100.9, "ok"),  # the answer was long on its way
        (90.0, "10 s ahead of"),
        (111.0, "10 s behind"),
    ],
)
def test_clocks(theirs: float, message: str) -> None:
    """Asked at 100, answered at 101."""
    found = clocks(100.0, 101.0, theirs)
    assert message in (found.message if found.severity == "warning" else found.severity)


def test_a_clock_that_cannot_be_asked_is_no_second_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(node_check, "clocks", never)
    code, lines = check(tmp_path, "host=/nowhere dbname=none")
    assert code == 1
    assert sum(line.startswith("ERROR:") for line in lines) == 1
