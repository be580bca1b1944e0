"""What the commands of the command line import: a package that takes long to import is paid for by every command."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from catalog.records import NewRelation, NewSubscription
from catalog.store import Catalog
from pubsub.sql.options import SubscriptionOptions

ARROW = {"numpy", "pandas", "pyarrow"}
ENGINES = {"deltalake", "duckdb", "pyspark", "py4j", "sqlglot"}
DATABASES = {"aiosqlite", "asyncpg", "psycopg", "sqlalchemy"}
OTHERS = {"rich", "structlog"}
ALL = ARROW | ENGINES | DATABASES | OTHERS
#: Of our own: what works for the daemon, or asks a publisher.
DAEMON = {"apply", "tablesync", "walsender", "launcher.service", "pubsub.publisher", "pubsub.delta"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node with a subscription, and a table that has rows."""
    home = tmp_path_factory.mktemp("node")
    write_deltalake(str(home / "t"), pa.table({"id": pa.array([1, 2], pa.int32())}))

    async def make() -> None:
        async with await Catalog.open(home / "catalog.db") as catalog:
            new = NewSubscription("s", "host=h", ("p",), SubscriptionOptions(), "s", "s", False)
            await catalog.create_subscription(new, [NewRelation(100, "public", "t", str(home / "t"))])

    asyncio.run(make())
    return home


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--version"], ALL | DAEMON | {"pubsub.node"}),
        (["--help"], (ALL - {"rich"}) | DAEMON | {"pubsub.node"}),
        (["publish", "--help"], (ALL - {"rich"}) | DAEMON),
        (["sql", "--help"], (ALL - {"rich"}) | DAEMON),
        (["sql", "SHOW ALL"], ALL | DAEMON),
        (["sql", "SELECT * FROM pg_subscription"], (ALL - {"deltalake", "sqlglot"}) | DAEMON),
        (["sql", "SELECT count(*) FROM pg_stat_subscription WHERE pid > 1"], (ALL - {"deltalake", "sqlglot"}) | DAEMON),
        (["sql", "SELECT sum(id) FROM t"], {"pandas", "pyspark", "duckdb"} | DATABASES),
        (["sql", "DROP SUBSCRIPTION s t"], ALL | DAEMON),
        (["status"], (ALL - {"rich"}) | DAEMON),
        (["status", "--json"], ALL | DAEMON),
        (["snapshot", "--list"], ALL | DAEMON),
        (["sql", "ALTER SUBSCRIPTION s SET (synchronous_commit = off)"], ARROW | ENGINES | OTHERS | {"pubsub.delta"}),
        (
            ["sql", "CREATE SUBSCRIPTION n CONNECTION 'host=h' PUBLICATION p WITH (connect = false)"],
            ARROW | ENGINES | OTHERS | {"pubsub.delta"},
        ),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_a_command_imports_only_what_it_needs(home: Path, arguments: list[str], absent: set[str]) -> None:
    program = (
        "import atexit, sys\n"
        f"absent = {sorted(absent)!r}\n"
        "atexit.register(lambda: print('IMPORTED', [name for name in absent if name in sys.modules], file=sys.stderr))\n"
        "from pubsub.cli import main\n"
        "main()"
    )
    command = [sys.executable, "-c", program, "--home", str(home), *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == (1 if "DROP" in arguments[-1] else 0), ran.stderr
    assert ran.stderr.rstrip().endswith("IMPORTED []"), ran.stderr
