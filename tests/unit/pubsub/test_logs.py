"""pubsub.logs: what is said on a terminal and as JSON; and that nothing shows what variables hold."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import psycopg
import pyarrow as pa
import pytest
import structlog
from typer.testing import CliRunner

import walsender.cli
from apply.handover import Handover
from launcher.monitor import Monitors
from launcher.runner import NodeServices, Runner
from pubsub import logs
from pubsub.cli.app import Common, app
from pubsub.cli.daemon import serve
from pubsub.errors import ConnectionFailure, PubsubError, SqlSyntaxError
from pubsub.publisher.connection import Connection
from pubsub.publisher.read_table import ReadTable
from pubsub.settings import Settings
from tablesync.chunk_reader import CopySource, read_range

SECRET = "s3cr3t-Wort"
#: The password it's %\ s3cr3t @/? as a URI and as keywords have it.
ENCODED = "it%27s%20%25%5C%20s3cr3t%20%40%2F%3F"
QUOTED = "it\\'s %\\\\ s3cr3t @/?"

#: Connection strings that fail, each in its own way, with a password in each way that libpq reads.
FAILING = {
    "nobody listens": f"host=127.0.0.1 port=1 user=u dbname=d password={SECRET} connect_timeout=5",
    "no such host": f"host=nowhere.invalid user=u dbname=d password={SECRET}",
    "no such socket": f"host=/nonexistent user=u dbname=d password={SECRET}",
    "a port that is none": f"host=127.0.0.1 port=99999 password={SECRET}",
    "a port that is no number": f"host=127.0.0.1 port=five password={SECRET}",
    "an option that is none": f"host=127.0.0.1 pasword={SECRET} password={SECRET}",
    "no equals sign": f"host=127.0.0.1 password {SECRET}",
    "an open quote": f"host=127.0.0.1 password='{SECRET}",
    "a space in the password": f"host=127.0.0.1 password=my {SECRET}",
    "a bad sslmode": f"host=127.0.0.1 port=1 sslmode=perhaps password={SECRET}",
    "no root certificate": f"host=127.0.0.1 port=1 sslmode=verify-full sslrootcert=/nonexistent password={SECRET}",
    "no such service": f"service=nope password={SECRET}",
    "a URI": f"postgresql://u:{SECRET}@127.0.0.1:1/d?connect_timeout=5",
    "a URI with a bad percent sign": f"postgresql://u:{SECRET}%zz@127.0.0.1:1/d",
    "a URI with a bad parameter": f"postgresql://127.0.0.1:1/d?pasword={SECRET}",
    "a URI with a password parameter": f"postgresql://127.0.0.1:1/d?password={SECRET}",
    "a URI without its end": f"postgresql://u:{SECRET}@[::1/d",
    "percent-encoded": f"postgresql://u:{ENCODED}@127.0.0.1:1/d",
    "quoted": f"host=127.0.0.1 port=1 password='{QUOTED}'",
    "a key's password": f"host=127.0.0.1 port=1 sslpassword={SECRET} password={SECRET}",
}
#: None of these may be seen.
HIDDEN = (SECRET, "s3cr3t", ENCODED, "s3cr3t%20")

RENDERERS = ["terminal", "verbose terminal", "JSON"]


class Screen(io.StringIO):
    """Standard error, be it a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    kept = structlog.get_config() if structlog.is_configured() else None
    yield
    if kept is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**kept)


def show(renderer: str, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Standard error from here on, with the logs of a daemon on it."""
    screen = Screen(terminal="terminal" in renderer)
    monkeypatch.setattr(sys, "stderr", screen)
    logs.configure(0, verbose="verbose" in renderer)
    return screen


class Catalog:
    """Takes what a runner and a monitor tell."""

    def __init__(self) -> None:
        self.errors: list[PubsubError] = []

    async def set_subscription_error(self, subid: int, error: PubsubError, *, count: str | None) -> None:
        self.errors.append(error)

    async def set_relation_error(self, *of: object) -> None: ...

    async def add_counters(self, *of: object) -> None: ...


def runner(catalog: Catalog) -> Runner:
    node = NodeServices("1", catalog, None, None, Settings(home=Path("/nonexistent")), asyncio.Semaphore(1), None, None)  # type: ignore[arg-type]
    subscription: Any = SimpleNamespace(oid=1, name="s", options=SimpleNamespace(disable_on_error=False, copy_first=""))
    return Runner(subscription, node, Handover())


def source(conninfo: str) -> CopySource:
    return CopySource(conninfo, "copy", ReadTable("public", "t", ("id",), True), "snapshot", None)


def copy(conninfo: str) -> Exception:
    """What a copy's own connection ends with, in a thread of the daemon or a task of Spark's."""
    with pytest.raises((PubsubError, psycopg.Error)) as caught:
        list(read_range(source(conninfo), None, pa.schema([("id", pa.int64())])))
    return caught.value


async def connect(conninfo: str) -> Exception:
    with pytest.raises(PubsubError) as caught:
        async with asyncio.timeout(30):
            await Connection.connect(conninfo)
    return caught.value


def assert_hidden(*texts: str) -> None:
    for text in texts:
        for secret in HIDDEN:
            assert secret not in text, text


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("how", FAILING)
async def test_a_connection_that_fails_shows_no_password(
    renderer: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small copy's once showed it four times: the traceback came with the variables of each frame."""
    monkeypatch.setenv("PGPASSWORD", SECRET)
    screen = show(renderer, monkeypatch)
    catalog = Catalog()
    one = runner(catalog)
    for error in (await asyncio.to_thread(copy, FAILING[how]), await connect(FAILING[how])):
        await one._report(error, None)
        try:
            raise RuntimeError("nobody foresaw this") from error
        except RuntimeError as unforeseen:
            await one._report(unforeseen, None)
            structlog.get_logger().exception("another module's way")
    assert screen.getvalue().count("worker failed") == 4
    stored = [f"{error} {error.detail} {error.hint} {error.context}" for error in catalog.errors]
    assert_hidden(screen.getvalue(), *stored, repr(source(FAILING[how])))


@pytest.mark.parametrize("how", FAILING)
def test_a_command_whose_connection_fails_shows_no_password(tmp_path: Path, how: str) -> None:
    conninfo = FAILING[how]
    sql = "CREATE SUBSCRIPTION s CONNECTION '{}' PUBLICATION p".format(conninfo.replace("'", "''"))
    home = ["--home", str(tmp_path / "home")]
    for verbose in ([], ["--verbose"]):
        for command in (
            ["check", conninfo],
            ["sql", sql],
            ["sql", sql + " WITH (bogus = 1)"],
            ["sql", sql + " nonsense"],
        ):
            result = CliRunner().invoke(app, [*home, *verbose, *command])
            assert result.exit_code == 1, result.output
            assert "ERROR:" in result.output
            assert_hidden(result.output)


@pytest.mark.parametrize("how", FAILING)
def test_a_walsender_whose_connection_fails_shows_no_password(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--conninfo", FAILING[how], "--publication", "p", "--output", str(tmp_path / "out")]
    assert walsender.cli.main(["decode", *arguments]) == 1
    out, err = capfd.readouterr()
    assert "ERROR:" in err
    assert_hidden(out, err)


@pytest.mark.parametrize("how", ["a space in the password", "a URI without its end", "nobody listens"])
def test_a_demo_whose_connection_fails_shows_no_password(how: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pubsub.demo", "--pg", FAILING[how], "--home", str(tmp_path / "demo"), "--seconds", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1
    assert_hidden(ran.stdout, ran.stderr)


def test_a_syntax_error_shows_no_connection_string() -> None:
    """Of any kind of string, closed or not; and still points at its place."""
    for given in (
        f"'password=it''s {SECRET}'",
        f"E'a\\'{SECRET}'",
        f"$$ {SECRET} $$",
        f"$q$ {SECRET}",
        f"'a\n{SECRET}",
    ):
        statement = f"ALTER SUBSCRIPTION s CONNECTION {given} !"
        report = SqlSyntaxError("m", statement=statement, position=len(statement) - 1).report()
        assert_hidden(report)
        _, line, caret = report.splitlines()
        assert "\n" in statement or len(caret) == len(f"LINE 1: {statement}") == len(line)


@pytest.mark.parametrize("renderer", RENDERERS)
async def test_the_monitor_shows_no_password(renderer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = show(renderer, monkeypatch)
    monitors = Monitors("1", cast(Any, None))
    subscription: Any = SimpleNamespace(
        oid=1,
        name="s",
        conninfo=FAILING["nobody listens"],
        enabled=True,
        slot_name="s",
        publications=(),
    )
    monitors.watch([subscription])
    async with asyncio.timeout(30):
        while "publisher could not be asked" not in screen.getvalue():  # noqa: ASYNC110 - a task's
            await asyncio.sleep(0.01)
    await monitors.close()
    assert_hidden(screen.getvalue())


def unforeseen(depth: int = 30) -> None:
    conninfo = f"password={SECRET}"
    if depth:
        unforeseen(depth - 1)
    raise KeyError(len(conninfo))


async def failure(one: Runner) -> None:
    try:
        unforeseen()
    except KeyError as error:
        await one._report(error, None)


async def test_an_error_on_a_terminal_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 375."""
    screen = show("terminal", monkeypatch)
    await failure(runner(Catalog()))
    hinted = ConnectionFailure("could not connect\nat all", detail="It is away.", hint="Start it.")
    await runner(Catalog())._report(hinted, None)
    first, second = screen.getvalue().splitlines()
    assert "KeyError" in first
    for text in ("worker failed", "could not connect", "It is away.", "Start it."):
        assert text in second
    assert "None" not in first + second


async def test_a_traceback_is_for_the_verbose_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = show("verbose terminal", monkeypatch)
    one = runner(Catalog())
    for _ in range(3):
        await failure(one)
    assert screen.getvalue().count("worker failed") == 3
    assert screen.getvalue().count("Traceback") == 1
    assert_hidden(screen.getvalue())


async def test_json_keeps_the_traceback_in_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = show("JSON", monkeypatch)
    for _ in range(2):
        await failure(runner(Catalog()))
    for line in screen.getvalue().splitlines():
        found = json.loads(line)
        assert found["event"] == "worker failed"
        assert "KeyError" in found["reason"]
        assert found["exception"].startswith("Traceback")
        assert "in unforeseen" in found["exception"]
    assert_hidden(screen.getvalue())


@pytest.mark.parametrize("renderer", RENDERERS)
async def test_a_daemon_that_fails_says_so_in_its_log(
    renderer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = show(renderer, monkeypatch)

    async def broken(*_: object, **__: object) -> None:
        unforeseen()

    monkeypatch.setattr("launcher.service.Service.start", broken)
    assert await serve(Common(tmp_path / "home", "verbose" in renderer)) == 1
    assert "daemon has failed" in screen.getvalue()
    assert ("Traceback" in screen.getvalue()) == (renderer != "terminal")
    assert_hidden(screen.getvalue())


@pytest.mark.parametrize("verbose", [False, True])
def test_an_unexpected_exception_in_a_command(tmp_path: Path, verbose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> None:
        unforeseen()

    monkeypatch.setattr("pubsub.node.node.Node.__aenter__", broken)
    result = CliRunner().invoke(app, [*(["--verbose"] if verbose else []), "status"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1 if verbose else 0].startswith("ERROR:  ")
    assert len(result.stderr.splitlines()) > 30 if verbose else len(result.stderr.splitlines()) == 2
    assert_hidden(result.stderr)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('wal_receiver_timeout = "30s"', [("wal_receiver_timeout", "1min", "30s")]),
        (f'[catalog]\nurl = "postgresql://u:{SECRET}@h/d"', [("catalog.url", None, None)]),
        (f'[spark.conf]\n"fs.s3a.secret.key" = "{SECRET}"', [("spark.conf", None, None)]),
        ('warehouse = "/data/lake"', [("warehouse", "/nonexistent/warehouse", "/data/lake")]),
    ],
)
def test_a_sighup_logs_the_changed_parameters(text: str, said: list[tuple[str, str | None, str | None]]) -> None:
    import tomllib

    from pubsub.cli.daemon import changed

    home = Path("/nonexistent")
    before = Settings(home=home)
    assert changed(before, before) == []
    assert changed(before, Settings.read(tomllib.loads(text), home)) == said


def test_the_prompt_s_history_keeps_no_password(tmp_path: Path) -> None:
    import readline

    from pubsub.cli.sql import _save_history

    readline.clear_history()
    for how in ("nobody listens", "a URI"):
        readline.add_history(f"CREATE SUBSCRIPTION s CONNECTION '{FAILING[how]}' PUBLICATION p;")
    readline.add_history("SELECT 1;")
    _save_history(tmp_path / "history")
    readline.clear_history()
    assert (tmp_path / "history").read_text().split() == ["SELECT", "1;"]


def test_the_text_of_a_client_s_statement_is_not_logged() -> None:
    """sqlglot printed the beginning of each that it cannot read."""
    statement = f"PREPARE q AS SELECT '{SECRET}' FROM pg_replication_slots"
    program = f"from pubsub import logs; logs.configure(); from walsender.server import slot_sql; slot_sql.find({statement!r})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


_LIBRARY: Final = """
import asyncio, gc, logging
from pubsub import logs

async def fail():
    raise ValueError("no such thing")

async def main():
    await asyncio.wait([asyncio.create_task(fail())])
    gc.collect()

logs.configure()
logs.hear_libraries()
logs.hear_libraries()
asyncio.run(main())
logging.getLogger("py4j.java_gateway").warning("%s\\n%s", "gone", "for good")
logging.getLogger("py4j.java_gateway").info("Command to send")
logging.getLogger("broken").warning("%d", "none")
"""


def test_what_libraries_log_is_an_event_of_the_log() -> None:
    """Python's own handler printed it between the JSON lines; a record that cannot be rendered is Python's still."""
    done = subprocess.run([sys.executable, "-c", _LIBRARY], capture_output=True, text=True, check=True)
    first, second, *rest = done.stderr.splitlines()
    failed, warned = json.loads(first), json.loads(second)
    assert (failed["event"], failed["level"], failed["library"]) == ("a library has failed", "error", "asyncio")
    assert failed["reason"] == "Task exception was never retrieved"
    assert failed["exception"].endswith("ValueError: no such thing")
    expected = ("a library warns", "warning", "py4j.java_gateway", "gone", "for good")
    assert tuple(warned[name] for name in ("event", "level", "library", "reason", "detail")) == expected
    assert rest[0] == "--- Logging error ---"
