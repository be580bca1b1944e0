"""pubsub.cli: arguments, exit codes, and output on the right stream."""

from __future__ import annotations

import json
import subprocess
import sys
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


@pytest.mark.parametrize("arguments", [["frobnicate"], ["sql", "--nope"], ["snapshot"], ["sql", "-f", "x", "SHOW ALL"]])
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


def test_settings_that_can_not_be_read(home: str) -> None:
    Path(home).mkdir()
    (Path(home) / "pubsub.toml").write_text("nope = 1\n")
    result = run("--home", home, "status")
    assert result.exit_code == 1
    assert 'unrecognized configuration parameter "nope"' in result.stderr


def test_quick_commands_import_nothing_heavy(home: str) -> None:
    program = (
        "import sys; from pubsub.cli.app import app\n"
        f"for arguments in (['status', '--json'], ['sql', {UNCONNECTED!r}], ['sql', 'ALTER SUBSCRIPTION s ENABLE']):\n"
        f"    app(['--home', {home!r}, *arguments], standalone_mode=False)\n"
        "heavy = {'pyspark', 'pyarrow', 'deltalake', 'sqlglot', 'numpy', 'pandas', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
