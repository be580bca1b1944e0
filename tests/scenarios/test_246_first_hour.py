"""docs/first-hour.md and docs/start.md, block by block, on a server that asks for passwords; only machines' names are replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pubsub.testing.ports import Port
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.full


def blocks(page: str) -> list[tuple[str, str]]:
    """Return kind and text of a page's blocks, in order."""
    return re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", (ROOT / "docs" / page).read_text())


class FirstHour:
    """The publisher, and the machine of the node."""

    def __init__(self, server: EmbeddedPostgres, home: Path) -> None:
        self.server = server
        self.home = home
        self.daemon: subprocess.Popen[bytes] | None = None
        tools = home / "bin"
        tools.mkdir()
        command = tools / "pubsub"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pubsub.cli "$@"\n')
        command.chmod(0o755)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PG", "PUBSUB_HOME"))},
            "HOME": str(home),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def here(self, text: str) -> str:
        """Replace the example's machines by those of the test."""
        return (
            text.replace("db.example.org:5432", f"127.0.0.1:{self.server.port}")
            .replace("host=db.example.org", f"host=127.0.0.1 port={self.server.port}")
            .replace("10.1.2.3/32", "127.0.0.1/32")
        )

    def sql(self, text: str) -> None:
        for statement in text.split(";\n"):
            if statement.strip():
                self.server.execute(statement, "shop")
        if "wal_level" in text:
            del self.server._settings["wal_level"]  # the command line's would go before it
            self.server.restart()

    def hba(self, text: str) -> None:
        file = self.server.data_dir / "pg_hba.conf"
        file.write_text(f"{self.here(text)}{file.read_text()}")

    def sh(self, text: str) -> str | None:
        """Run the commands; return what they print, or None if one fails.  The daemon goes on."""
        if text.startswith("pubsub daemon"):
            self.daemon = subprocess.Popen(["sh", "-c", f"exec {text}"], cwd=self.home, env=self.environment)
            return ""
        ran = subprocess.run(
            ["sh", "-euc", self.here(text)],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.last = f"{text}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout if ran.returncode == 0 else None


def test_every_block(tmp_path: Path) -> None:
    kinds = [kind for kind, _ in blocks("first-hour.md")]
    assert set(kinds) == {"sql", "sh", "hba", "console"}
    # test_244_wheel.py and test_245_service.py have what the first does, test_200_pg_upgrade.py what the second does.
    assert kinds.count("console") == 2
    with EmbeddedPostgres("18", auth="scram-sha-256", password="superuser's") as server:
        server.create_database("shop")
        server.execute(
            """
            CREATE TABLE customers (id int PRIMARY KEY);
            CREATE TABLE orders (id int PRIMARY KEY, customer int);
            CREATE TABLE visits (id int PRIMARY KEY) PARTITION BY RANGE (id);
            CREATE TABLE visits_1 PARTITION OF visits FOR VALUES FROM (0) TO (100);
            INSERT INTO customers SELECT generate_series(1, 10);
            INSERT INTO orders SELECT g, 1 FROM generate_series(1, 123) g;
            INSERT INTO visits SELECT generate_series(1, 7)
            """,
            "shop",
        )
        file = server.data_dir / "pg_hba.conf"
        file.write_text("local all postgres scram-sha-256\nhost all postgres 127.0.0.1/32 scram-sha-256\n")
        server.execute("SELECT pg_reload_conf()")
        hour = FirstHour(server, tmp_path)
        try:
            for kind, text in blocks("first-hour.md"):
                if kind == "sql":
                    hour.sql(text)
                elif kind == "hba":
                    hour.hba(text)
                elif kind == "sh" and hour.daemon is not None:
                    # The tables are being copied: what asks for rows is refused until then.
                    wait_until(lambda text=text: hour.sh(text) is not None or _ended(hour), text)
                elif kind == "sh":
                    assert hour.sh(text) is not None, hour.last
            printed = hour.sh('pubsub sql --format csv "SELECT count(*) FROM orders"')
            assert printed == "count\n123\n", hour.last
            tables = hour.sh('pubsub sql --format csv "SELECT relation FROM pg_subscription_rel ORDER BY 1"')
            assert tables == "relation\npublic.customers\npublic.orders\npublic.visits\n", hour.last
            assert (tmp_path / "pubsub-node" / "warehouse" / "shop" / "public" / "orders" / "_delta_log").is_dir()
            assert hour.sh("pubsub sql 'DROP SUBSCRIPTION shop'") is not None, hour.last
        finally:
            if hour.daemon is not None:
                hour.daemon.terminate()
                assert hour.daemon.wait(PATIENCE) == 0


def test_five_minutes(tmp_path: Path) -> None:
    """From nothing to a subscription that is watched and verified, with the page alone: its commands, in their order."""
    steps = blocks("start.md")
    assert [kind for kind, _ in steps] == ["console", *["sh"] * 8]
    held = Port.reserve()
    port = str(held.number)
    with EmbeddedPostgres("18", auth="scram-sha-256", password="superuser's") as server:
        server.create_database("shop")
        server.execute(
            """
            CREATE TABLE customers (id int PRIMARY KEY, name text);
            CREATE TABLE orders (id int PRIMARY KEY, customer int, total numeric(10,2));
            CREATE TABLE notes (content text);
            INSERT INTO customers SELECT g, 'c' || g FROM generate_series(1, 100) g;
            INSERT INTO orders SELECT g, g % 100, g / 3.0 FROM generate_series(1, 1234) g;
            CREATE ROLE me SUPERUSER LOGIN PASSWORD 'a secret'
            """,
            "shop",
        )
        file = server.data_dir / "pg_hba.conf"
        file.write_text("local all postgres scram-sha-256\nhost all all 127.0.0.1/32 scram-sha-256\n")
        server.execute("SELECT pg_reload_conf()")
        hour = FirstHour(server, tmp_path)
        try:
            for kind, text in steps:
                text = text.replace("9187", port)
                if kind == "console":
                    continue  # test_244_wheel.py installs the wheel as it is done here
                if text.startswith("sed "):
                    text += f"sed -i s/9187/{port}/ pubsub-node/pubsub.toml\n"
                if hour.daemon is not None and "DROP" not in text:
                    wait_until(lambda text=text: hour.sh(text) is not None or _ended(hour), text)
                else:
                    assert hour.sh(text) is not None, hour.last
                if "SELECT count" in text:
                    assert "1234" in hour.last
                    server.execute("DELETE FROM orders WHERE id > 1000", "shop")
                    wait_until(lambda text=text: " 1000\n" in (hour.sh(text) or ""), "the change")
                if "verify" in text:
                    assert hour.last.count("equal") >= 2, hour.last
            assert server.query("SELECT count(*) FROM pg_replication_slots") == [(0,)]
            assert (tmp_path / "pubsub-node" / "warehouse" / "shop" / "public" / "orders" / "_delta_log").is_dir()
        finally:
            if hour.daemon is not None:
                hour.daemon.terminate()
                assert hour.daemon.wait(PATIENCE) == 0


def _ended(hour: FirstHour) -> bool:
    assert hour.daemon is not None
    assert hour.daemon.poll() is None, (hour.home / "pubsub.log").read_text()
    return False
