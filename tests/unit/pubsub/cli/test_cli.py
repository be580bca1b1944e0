"""pubsub.cli: arguments, exit codes, and output on the right stream."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from contextlib import closing
from os import open as os_open
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pubsub.cli.app import app

UNCONNECTED = "CREATE SUBSCRIPTION s CONNECTION 'host=h' PUBLICATION p WITH (connect = false)"


@pytest.fixture
def home(tmp_path: Path) -> str:
    return str(tmp_path / "home")


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_ddl_prints_its_tag_and_notices_apart(home: str) -> None:
    result = run("--home", home, "sql", UNCONNECTED)
    assert (result.exit_code, result.stdout) == (0, "CREATE SUBSCRIPTION\n")
    assert result.stderr.startswith("WARNING:  subscription was created, but is not connected\nHINT:  ")


def test_an_error_as_postgresql_prints_it(home: str) -> None:
    result = run("--home", home, "sql", "DROP SUBSCRIPTION nope")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == 'ERROR:  subscription "nope" does not exist\n'
    verbose = run("--home", home, "--verbose", "sql", "DROP SUBSCRIPTION nope")
    assert verbose.stderr == 'ERROR:  42704: subscription "nope" does not exist\n'


def test_a_syntax_error_points_at_its_place(home: str) -> None:
    result = run("--home", home, "sql", "DROP SUBSCRIPTION s t")
    assert result.exit_code == 1
    assert "LINE 1: DROP SUBSCRIPTION s t\n                            ^" in result.stderr


def test_machine_formats_hold_rows_alone(home: str) -> None:
    result = run(
        "--home", home, "sql", "--format", "json", f"{UNCONNECTED}; SELECT subname, subenabled FROM pg_subscription"
    )
    assert json.loads(result.stdout) == [{"subname": "s", "subenabled": False}]
    assert "CREATE SUBSCRIPTION" in result.stderr
    result = run("--home", home, "sql", "--format", "csv", "SELECT subname, subenabled FROM pg_subscription")
    assert result.stdout == "subname,subenabled\ns,f\n"


def test_statements_from_standard_input_and_a_file(home: str, tmp_path: Path) -> None:
    assert run("--home", home, "sql", stdin="SHOW drain_timeout;").stdout.splitlines()[2].strip() == "30s"
    script = tmp_path / "script.sql"
    script.write_text("SHOW drain_timeout; -- last\n")
    assert run("--home", home, "sql", "-f", str(script)).exit_code == 0
    missing = run("--home", home, "sql", "-f", str(tmp_path / "nope"))
    assert (missing.exit_code, missing.stderr.startswith("ERROR:  could not read file")) == (1, True)


SNAPSHOT = [
    ["snapshot", *arguments]
    for arguments in (
        ["s", "--list"],
        ["s", "--drop", "n"],
        ["--list", "--drop", "n"],
        ["--pin", "n"],
        ["--list", "--at", "0/1"],
    )
]


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["sql", "--nope"], ["snapshot"], *SNAPSHOT, ["sql", "-f", "x", "SHOW ALL"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_status_as_json(home: str) -> None:
    run("--home", home, "sql", UNCONNECTED)
    found = json.loads(run("--home", home, "status", "--json").stdout)
    assert [s["name"] for s in found["subscriptions"]] == ["s"]


def test_status_for_people(home: str) -> None:
    run("--home", home, "sql", UNCONNECTED)
    shown = run("--home", home, "status").stdout
    assert "no daemon runs" in shown
    assert "s  disabled" in shown


READING = [
    ["status"],
    ["status", "--json"],
    ["status", "--watch"],
    ["snapshot", "s"],
    ["snapshot", "s", "--pin", "n"],
    ["snapshot", "--list"],
    ["snapshot", "--drop", "n"],
    ["sql", "SELECT * FROM pg_subscription"],
    ["sql", "SELECT * FROM public.orders"],
    ["sql", "SHOW drain_timeout; SELECT 1"],
]


@pytest.mark.parametrize("place", ["nothing", "a directory", "a file"])
@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_reading_creates_no_node(home: str, arguments: list[str], place: str) -> None:
    """`pubsub status` in another directory made a node there, and said that it had no subscriptions."""
    if place == "a directory":
        Path(home).mkdir()
    elif place == "a file":
        Path(home).touch()
    result = run("--home", home, *arguments)
    assert result.exit_code == 1
    error, hint = result.stderr.splitlines()
    assert error == f'ERROR:  no node at "{home}"'
    assert "--home" in hint
    assert "$PUBSUB_HOME" in hint
    assert (
        (list(Path(home).iterdir()) == []) if place == "a directory" else (Path(home).is_file() == (place == "a file"))
    )
    assert not result.stdout or "SHOW drain_timeout" in arguments[1]


def test_reading_creates_no_node_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PUBSUB_HOME", raising=False)
    assert f'no node at "{tmp_path}/pubsub-node"' in run("status").stderr
    monkeypatch.setenv("PUBSUB_HOME", "elsewhere")
    assert f'no node at "{tmp_path}/elsewhere"' in run("status").stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["empty", "another program's"])
def test_a_database_without_a_catalog_is_not_changed(home: str, file: str) -> None:
    Path(home).mkdir()
    path = Path(home) / "catalog.db"
    path.touch()
    if file != "empty":
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE t (a int)")
    before = path.read_bytes()
    assert run("--home", home, "status").stderr.startswith(f'ERROR:  no node at "{home}"\n')
    assert path.read_bytes() == before


def test_ddl_creates_the_node(home: str) -> None:
    result = run("--home", home, "sql", "DROP SUBSCRIPTION IF EXISTS s; SELECT count(*) FROM pg_subscription")
    assert result.exit_code == 0
    assert "DROP SUBSCRIPTION" in result.stdout
    assert run("--home", home, "status").exit_code == 0


def test_ddl_that_does_not_parse_creates_no_node(home: str) -> None:
    assert run("--home", home, "sql", "CREATE SUBSCRIPTION s CONNECTIN 'host=h'").exit_code == 1
    assert not Path(home).exists()


def test_a_prompt_creates_the_node_at_its_first_ddl(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pubsub.cli.app import Common
    from pubsub.cli.output import Format
    from pubsub.cli.sql import run_terminal

    seen: list[bool] = []
    lines = iter(["SELECT * FROM pg_subscription;", "\\d", UNCONNECTED + ";", "SELECT * FROM pg_subscription;"])

    def answer(prompt: str) -> str:
        seen.append(Path(home).exists())
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("pubsub.cli.sql._load_history", lambda: None)
    assert run_terminal(Common(Path(home), False), Format.TABLE) == 0
    assert seen == [False, False, False, True, True]


@pytest.mark.parametrize("command", [["status"], ["sql", "SELECT count(*) FROM pg_subscription"]], ids=" ".join)
def test_a_read_only_node_can_be_read(home: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run("--home", home, "sql", UNCONNECTED)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    monkeypatch.setattr(os, "open", forbid_writing)
    assert run("--home", home, *command).exit_code == 0
    assert [path.name for path in Path(home).iterdir()] == ["catalog.db"]


def forbid_writing(path: object, flags: int, *rest: object, **more: object) -> int:
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise PermissionError(errno.EROFS, "Read-only file system", str(path))
    return os_open(path, flags, *rest, **more)  # type: ignore[arg-type]


def test_invalid_settings_are_reported(home: str) -> None:
    Path(home).mkdir()
    (Path(home) / "pubsub.toml").write_text("nope = 1\n")
    result = run("--home", home, "status")
    assert result.exit_code == 1
    assert 'unrecognized configuration parameter "nope"' in result.stderr
