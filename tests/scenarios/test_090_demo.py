"""make demo as a stranger runs it: a process of its own, judged by its output, exit code, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.testing.fixtures import Database

ROOT = Path(__file__).parents[2]
SMALL = ("--scale", "1", "--tps", "50", "--orders-tps", "20", "--quiet")
SECONDS = 900.0


class Demo:
    """A running demo in a process group of its own; its output is read as it comes."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.lines: list[str] = []
        self._spoken = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pubsub.demo", "--home", str(home), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(home.parent)},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def await_text(self, text: str) -> None:
        """Wait until a line with `text` was printed; fail if the demo ends without it."""
        with self._spoken:
            found = self._spoken.wait_for(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(), SECONDS
            )
        assert found, self.output
        assert text in self.output, self.output

    def wait(self) -> int:
        code = self.process.wait(SECONDS)
        self._reader.join()
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._spoken:
                self.lines.append(line.rstrip("\n"))
                self._spoken.notify_all()
        with self._spoken:
            self._spoken.notify_all()


@pytest.fixture
def home() -> Iterator[Path]:
    """The node's directory, with the demo's temporary files beside it; afterwards no process may run on them."""
    # Directly below /tmp: the servers' account must reach it, and a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as scratch:
        Path(scratch).chmod(0o755)
        yield Path(scratch) / "node"
        assert processes(Path(scratch)) == []
        assert list(Path(scratch).glob("pubsub-*")) == []


def processes(home: Path) -> list[str]:
    """Return the command lines that name the directory: servers, daemon, JVM, Spark's workers, watchers, commands."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(home) in command and state != "Z":
            found.append(command)
    return found


def servers_of(demo: Demo) -> list[str]:
    """Return the ports of the embedded servers that the demo named and that still take connections."""
    ports = set(re.findall(r"port=(\d+)", demo.output))
    listening = Path("/proc/net/tcp").read_text()
    return [port for port in ports if re.search(rf":{int(port):04X} 00000000:0000 0A", listening)]


def run(home: Path, *arguments: str) -> Demo:
    demo = Demo(home, *arguments)
    try:
        demo.wait()
    finally:
        demo.kill()
    return demo


@pytest.mark.full
def test_the_demo_copies_follows_and_compares(home: Path) -> None:
    demo = run(home, *SMALL, "--seconds", "5")
    assert demo.process.returncode == 0, demo.output
    assert "Equal: 11 tables" in demo.output
    assert demo.output.count(": equal") == 11
    for statement in ("CREATE SUBSCRIPTION orders", "CREATE SUBSCRIPTION pgbench"):
        assert f'$ pubsub sql "{statement}' in demo.output
    for figure in (
        r"copied +1\d\d,\d{3} rows of 11 tables in [\d.]+ s: [\d,]+ rows/s",
        r"applied +[\d,]+ row changes in",
        r"p50 [\d.]+ s, p95 [\d.]+ s, max [\d.]+ s",
        r"Python \d+ MB, its JVM [\d,]+ MB",
    ):
        assert re.search(figure, demo.output), figure
    assert servers_of(demo) == []
    # The commands that the demo prints to be pasted work.
    pasted = re.findall(r"^\S+ - <<'END'\n.*?\nEND$", demo.output, re.MULTILINE | re.DOTALL)
    assert len(pasted) == 3
    pasted.append(re.findall(r"^\S+ .*--home \S+ sql .*$", demo.output, re.MULTILINE)[-1])
    for text in pasted:
        ran = subprocess.run(text, shell=True, capture_output=True, text=True, check=False, timeout=SECONDS)
        assert ran.returncode == 0, ran.stderr
        assert all(word in ran.stdout for word in ("new", "paid", "shipped")), ran.stdout


@pytest.mark.full
def test_the_demo_with_our_server_between(home: Path) -> None:
    demo = run(home, *SMALL, "--seconds", "3", "--walsender")
    assert demo.process.returncode == 0, demo.output
    assert "Equal: 11 tables" in demo.output
    assert "PostgreSQL has 0 replication slots" in demo.output
    assert servers_of(demo) == []


@pytest.mark.full
def test_a_falsified_value_is_found(home: Path) -> None:
    demo = run(home, *SMALL, "--seconds", "1", "--falsify")
    assert demo.process.returncode == 1, demo.output
    assert "DIFFERENT: 1 of 11 tables" in demo.output
    assert demo.output.count(": equal") == 10
    key = re.search(r"falsified in Delta: the name of customer (\S+)", demo.output)
    assert key is not None
    difference = demo.output.partition("DIFFERENT: 1 of 11")[2]
    assert "orders: public.customers: 300 rows at the publisher, 300 in Delta; 1 missing" in difference.replace('"', "")
    assert f"id='{key[1]}'" in difference
    assert re.search(r"name='customer \d+ falsified'", difference)


@pytest.fixture
def own(database: Database) -> Database:
    """A database with tables that can be followed, and with some that cannot."""
    database.execute(
        """
        CREATE TABLE accounts (id int PRIMARY KEY, name text, amount numeric(12,2));
        INSERT INTO accounts SELECT n, 'account ' || n, n / 4.0 FROM generate_series(1, 5000) n;
        CREATE SCHEMA "Odd one";
        CREATE TABLE "Odd one"."Täble" ("a b" int PRIMARY KEY, "C" text);
        INSERT INTO "Odd one"."Täble" VALUES (1, 'x'), (2, NULL);
        CREATE TABLE keyless (n int);
        INSERT INTO keyless VALUES (0);
        CREATE UNLOGGED TABLE scratch (n int PRIMARY KEY);
        """
    )
    return database


@pytest.fixture
def writers(own: Database, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A client that goes on writing, also to the table without a key."""
    script = tmp_path / "writers.sql"
    script.write_text(
        "\\set id random(1, 5000)\n"
        "UPDATE accounts SET amount = amount + 0.25 WHERE id = :id;\n"
        "INSERT INTO accounts SELECT max(id) + 1, 'new', 0 FROM accounts ON CONFLICT DO NOTHING;\n"
        "UPDATE keyless SET n = n + 1;\n"
    )
    command = [
        str(own.server.bin("pgbench")),
        "--no-vacuum",
        "--rate=20",
        "--time=3600",
        f"--file={script}",
        own.conninfo,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield process
        still_writing = process.poll() is None
        process.kill()
    assert still_writing


def assert_untouched(own: Database) -> None:
    """Assert that the demo left nothing in the database."""
    assert own.query("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    assert own.query("SELECT pubname FROM pg_publication") == []
    left = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%pubsub%'"
    assert own.query(left) == []


@pytest.mark.full
@pytest.mark.parametrize("between", [[], ["--walsender"]])
def test_a_database_of_ones_own_is_compared_while_it_is_written_to(
    home: Path, own: Database, writers: subprocess.Popen[bytes], between: list[str]
) -> None:
    demo = run(home, "--pg", own.conninfo + " password=hidden1", "--seconds", "5", "--quiet", *between)
    assert demo.process.returncode == 0, demo.output
    assert "left out: public.keyless: it has no primary key" in demo.output
    assert "left out: public.scratch: an unlogged table" in demo.output
    assert "Equal: 2 tables" in demo.output
    assert "p95" in demo.output
    assert "hidden1" not in demo.output
    assert "Nothing is left there." in demo.output
    assert_untouched(own)
    assert own.query("SELECT n > 0 FROM keyless") == [(True,)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("The node's daemon starts", signal.SIGINT),
        ('$ pubsub sql "CREATE SUBSCRIPTION', signal.SIGINT),
        ("Tables are copied", signal.SIGTERM),
        ("All tables are ready", signal.SIGINT),
        ("The node rests", signal.SIGTERM),
    ],
)
def test_ctrl_c_leaves_nothing_in_the_database(home: Path, own: Database, moment: str, number: signal.Signals) -> None:
    demo = Demo(home, "--pg", own.conninfo, "--seconds", "3600" if "ready" in moment else "1", "--quiet")
    try:
        demo.await_text(moment)
        demo.process.send_signal(number)
        assert demo.wait() == 128 + number, demo.output
    finally:
        demo.kill()
    assert f"Interrupted ({number.name})" in demo.output
    assert processes(home) == []
    assert_untouched(own)


@pytest.mark.full
def test_ctrl_c_while_the_snapshot_waits_for_a_writer(home: Path, own: Database) -> None:
    demo = Demo(home, "--pg", own.conninfo, "--seconds", "2", "--quiet")
    try:
        demo.await_text("All tables are ready")
        with own.server.connect(own.name) as connection, connection.transaction():
            connection.execute("INSERT INTO keyless VALUES (1)")
            demo.await_text("ALTER SUBSCRIPTION")
            waiting = "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
            while own.query(waiting) == [(0,)]:
                assert demo.process.poll() is None
            demo.process.send_signal(signal.SIGINT)
            assert demo.wait() == 128 + signal.SIGINT, demo.output
            assert_untouched(own)
    finally:
        demo.kill()


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("PostgreSQL 18 starts", signal.SIGTERM),
        ("Databases are filled", signal.SIGINT),
        ("Tables are copied", signal.SIGINT),
    ],
)
def test_ctrl_c_leaves_no_server(home: Path, moment: str, number: signal.Signals) -> None:
    demo = Demo(home, *SMALL)
    try:
        demo.await_text(moment)
        demo.process.send_signal(number)
        assert demo.wait() == 128 + number, demo.output
    finally:
        demo.kill()
    assert processes(home) == []
    assert servers_of(demo) == []


def test_a_publisher_that_cannot_publish_is_reported(home: Path) -> None:
    demo = run(home, "--pg", "host=127.0.0.1 port=1 dbname=nothing", "--quiet")
    assert demo.process.returncode == 1
    assert "ERROR:" in demo.output
    assert "port 1 failed" in demo.output
    assert "Traceback" not in demo.output


@pytest.mark.soak
def test_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    ran = subprocess.run(
        ["make", "demo", "DEMO=--seconds 3 --scale 1 --tps 50 --orders-tps 20"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Equal: 11 tables" in ran.stdout
    assert (clone / "demo-node" / "warehouse").is_dir()
    shutil.rmtree(clone)
