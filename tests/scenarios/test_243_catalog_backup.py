"""The catalog in a file and back, beside a real daemon; a node that goes on in another place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pubsub.cli.app import app
from pubsub.testing.fixtures import Database
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults, wait_until


def run(home: Path, *arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["--home", str(home), *arguments])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def backup(home: Path, file: Path) -> dict[str, object]:
    code, output = run(home, "catalog", "backup", str(file))
    assert code == 0, output
    header: dict[str, object] = json.loads(file.read_bytes().split(b"\n", 1)[0])
    return header


@pytest.fixture
def subscribed(tmp_path: Path, database: Database) -> Iterator[Subscribed]:
    home = tmp_path / "node"
    home.mkdir()
    one = Subscribed(Daemon(home), database)
    one.daemon.start()
    one.subscribe()
    try:
        yield one
        one.daemon.ensure()
        one.drop()
    finally:
        one.daemon.kill()


def remove_catalog(home: Path) -> None:
    for file in home.glob("catalog.db*"):
        file.unlink()


def lose_and_restore(home: Path, file: Path) -> None:
    remove_catalog(home)
    code, output = run(home, "catalog", "restore", str(file))
    assert code == 0, output


@pytest.mark.full
def test_backup_and_restore(subscribed: Subscribed, tmp_path: Path) -> None:
    daemon, home = subscribed.daemon, subscribed.daemon.home
    subscribed.write(3)
    subscribed.caught_up()
    early, late, other = tmp_path / "early", tmp_path / "late", tmp_path / "other"
    # While the daemon runs, and writes to the catalog.
    header = backup(home, early)
    assert (header["subscriptions"], early.stat().st_mode & 0o777) == (1, 0o600)
    code, output = run(home, "catalog", "backup", str(early))
    assert (code, "File exists" in output) == (1, True), output

    # Refused: a daemon runs; the catalog is newer; it is another node's; the file is damaged.
    code, output = run(home, "catalog", "restore", str(early))
    assert (code, "a daemon is already running on" in output) == (1, True), output
    subscribed.write(3)
    subscribed.caught_up()
    assert daemon.terminate() == 0
    before = (home / "catalog.db").read_bytes()
    code, output = run(home, "catalog", "restore", str(early))
    assert (code, "is newer than the backup" in output) == (1, True), output
    assert (home / "catalog.db").read_bytes() == before
    run(tmp_path / "stranger", "sql", "CREATE SUBSCRIPTION x CONNECTION 'host=h' PUBLICATION p WITH (connect = false)")
    code, output = run(tmp_path / "stranger", "catalog", "restore", str(early))
    assert (code, "belongs to another node" in output) == (1, True), output
    for damaged in (early.read_bytes()[:-1], early.read_bytes().replace(subscribed.name.encode(), b"xx"), b"{}\n"):
        assert damaged != early.read_bytes()
        (tmp_path / "damaged").write_bytes(damaged)
        code, output = run(home, "catalog", "restore", str(tmp_path / "damaged"))
        assert (code, "backup" in output) == (1, True), output

    # Lost after the daemon had ended, and restored: it goes on, with nothing copied again.
    backup(home, late)
    lose_and_restore(home, late)
    backup(home, other)
    rest = [file.read_bytes().split(b"\n", 1)[1] for file in (late, other)]
    assert len(rest[0]) == len(rest[1])
    daemon.start()
    subscribed.write(2)
    subscribed.assert_equal()
    assert not daemon.said("table synchronization")


@pytest.mark.full
def test_an_older_backup_is_refused_by_the_slot(subscribed: Subscribed, tmp_path: Path) -> None:
    """It is not followed with a gap, and RESYNC TABLE brings the tables back."""
    daemon, home = subscribed.daemon, subscribed.daemon.home
    subscribed.write(1)
    subscribed.caught_up()
    backup(home, tmp_path / "early")
    subscribed.write(3)
    subscribed.caught_up()
    assert daemon.terminate() == 0
    lose_and_restore(home, tmp_path / "early")
    daemon.start()
    wait_until(lambda: daemon.said("where the subscription stands"), "the slot to be refused")
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE a, keyless")
    subscribed.write(1)
    subscribed.assert_equal()


@pytest.mark.full
def test_tables_that_were_copied_since_the_backup(subscribed: Subscribed, tmp_path: Path) -> None:
    """The restored catalog counts their copies from the backup's on, and their logs know better."""
    daemon, home = subscribed.daemon, subscribed.daemon.home
    subscribed.write(1)
    subscribed.caught_up()
    backup(home, tmp_path / "early")
    resync = f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE a, keyless"
    for _ in range(2):
        daemon.execute(resync)
        subscribed.caught_up()
    assert daemon.terminate() == 0
    lose_and_restore(home, tmp_path / "early")
    daemon.start()
    wait_until(lambda: daemon.said("where the subscription stands"), "the slot to be refused")
    daemon.execute(resync)
    subscribed.write(1)
    subscribed.assert_equal()


@pytest.mark.full
def test_a_node_moves_with_its_directory(subscribed: Subscribed, tmp_path: Path) -> None:
    """As to another machine: copied, file by file, and the old one removed."""
    daemon = subscribed.daemon
    subscribed.write(2)
    subscribed.assert_equal()
    assert daemon.terminate() == 0
    moved = tmp_path / "elsewhere" / "node"
    shutil.copytree(daemon.home, moved)

    # While the old one is there, both would follow one slot.
    old, daemon.home, daemon.log = daemon.home, moved, moved / "daemon.log"
    daemon.faults = Faults(moved / "faults")
    daemon.start()
    wait_until(lambda: not daemon.running, "the daemon to give up")
    assert daemon.said("which is still there")
    shutil.rmtree(old)
    daemon.start()
    subscribed.write(2)
    subscribed.assert_equal()
    assert {Path(one.path).is_relative_to(moved) for one in subscribed.relations().values()} == {True}


@pytest.mark.full
def test_a_catalog_goes_from_a_file_to_a_server(subscribed: Subscribed, tmp_path: Path) -> None:
    daemon, database = subscribed.daemon, subscribed.database
    subscribed.write(2)
    subscribed.caught_up()
    assert daemon.terminate() == 0
    backup(daemon.home, tmp_path / "backup")
    name = f"{database.name}_catalog"
    database.server.create_database(name)
    try:
        url = f"postgresql://postgres@127.0.0.1:{database.server.port}/{name}"
        settings = daemon.home / "pubsub.toml"
        settings.write_text(settings.read_text() + f'\n[catalog]\nurl = "{url}"\n')
        code, output = run(daemon.home, "catalog", "restore", str(tmp_path / "backup"))
        assert code == 0, output
        daemon.start()
        subscribed.write(2)
        subscribed.assert_equal()
        code, output = run(daemon.home, "catalog", "restore", str(tmp_path / "backup"))
        assert (code, "already running" in output) == (1, True), output
        subscribed.drop()
        assert daemon.terminate() == 0
        settings.write_text(settings.read_text().split("[catalog]")[0])
        remove_catalog(daemon.home)
    finally:
        daemon.kill()
        database.server.drop_database(name)
