"""The datasets, and the changes written to the publisher.

A backlog is written while no subscriber is enabled, then each applies it in turn: the same WAL for both.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres

TRANSACTIONS: Final = 100
"""The number of transactions in a backlog of rows."""

_CLIENTS: Final = 4
# The writer of a backlog need not wait for the disk: the backlog is flushed before it is measured.
_WRITER: Final = "SET synchronous_commit = off"

_ORDERS: Final = """
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    name text,
    amount numeric(12,2),
    at timestamptz,
    paid bool,
    quantity int
)"""

NEW_ROW: Final = (
    "i, 'customer number ' || i * 7, (i % 1000000) + (i % 100) / 100.0,"
    " timestamptz '2024-05-01 00:00Z' + i * interval '1.000037 s', i % 2 = 0, i % 5000"
)
_CHANGE: Final = (
    "UPDATE orders SET name = 'changed ' || orders.id, amount = amount + 1.25, at = at + interval '1 day',"
    " paid = NOT paid, quantity = quantity + 1"
)


@dataclass(frozen=True, slots=True)
class Dataset(ABC):
    """A database of the publisher, with the published tables `tables`."""

    database: str

    publication: ClassVar[str] = "bench"

    @property
    @abstractmethod
    def tables(self) -> tuple[str, ...]:
        """The names of the published tables."""

    @abstractmethod
    def create_tables(self, server: EmbeddedPostgres) -> None:
        """Create the tables, empty."""

    @abstractmethod
    def load(self, publisher: EmbeddedPostgres) -> None:
        """Make the database, its rows and the publication."""


@dataclass(frozen=True, slots=True)
class Orders(Dataset):
    """One table with a bigint key, text, numeric(12,2), timestamptz, bool and int; its keys are 1 to `rows`.

    The methods that write return an LSN as `last_transaction` does.
    """

    rows: int

    @property
    def tables(self) -> tuple[str, ...]:
        return ("orders",)

    def create_tables(self, server: EmbeddedPostgres) -> None:
        server.execute(_ORDERS, self.database)

    def load(self, publisher: EmbeddedPostgres) -> None:
        publisher.create_database(self.database)
        self.create_tables(publisher)
        with publisher.connect(self.database) as connection:
            connection.execute(_WRITER)
            connection.execute(f"INSERT INTO orders SELECT {NEW_ROW} FROM generate_series(1, {self.rows}) i".encode())
            # Not published: the order of the random updates' keys, the same in each run.
            connection.execute("CREATE TABLE shuffled (place int PRIMARY KEY, id bigint)")
            connection.execute("SELECT setseed(0.5)")
            connection.execute(
                "INSERT INTO shuffled SELECT row_number() OVER (), id"
                f" FROM (SELECT id FROM generate_series(1, {self.rows}) id ORDER BY random()) s".encode()
            )
            connection.execute("ANALYZE")
            connection.execute(f"CREATE PUBLICATION {self.publication} FOR TABLE orders".encode())

    def insert(self, publisher: EmbeddedPostgres, first: int, count: int) -> Lsn:
        """Insert `count` keys from `first` on."""
        return self._write(
            publisher,
            [
                f"INSERT INTO orders SELECT {NEW_ROW} FROM generate_series({first + low}, {first + high - 1}) i"
                for low, high in _parts(count)
            ],
        )

    def update_in_order(self, publisher: EmbeddedPostgres, count: int) -> Lsn:
        """Update the first `count` rows in the order of their keys."""
        return self._write(publisher, [f"{_CHANGE} WHERE id > {low} AND id <= {high}" for low, high in _parts(count)])

    def update_at_random(self, publisher: EmbeddedPostgres, count: int) -> Lsn:
        """Update `count` rows in an order unrelated to their places in the table."""
        return self._write(
            publisher,
            [
                f"{_CHANGE} FROM (SELECT id FROM shuffled WHERE place > {low} AND place <= {high} ORDER BY place"
                " OFFSET 0) s WHERE orders.id = s.id"
                for low, high in _parts(count)
            ],
            # Any other join would put the updates into the table's order.
            "SET enable_hashjoin = off; SET enable_mergejoin = off",
        )

    def delete(self, publisher: EmbeddedPostgres, first: int, count: int) -> Lsn:
        """Delete `count` keys from `first` on."""
        return self._write(
            publisher,
            [f"DELETE FROM orders WHERE id >= {first + low} AND id < {first + high}" for low, high in _parts(count)],
        )

    def _write(self, publisher: EmbeddedPostgres, statements: Sequence[str], settings: str = "") -> Lsn:
        with publisher.connect(self.database) as connection:
            connection.execute(f"{_WRITER}; {settings}".encode())
            for statement in statements[:-1]:
                connection.execute(statement.encode())
        return last_transaction(publisher, self.database, statements[-1], settings)


@dataclass(frozen=True, slots=True)
class Pgbench(Dataset):
    """pgbench's four tables; `scale` times 100,000 accounts."""

    scale: int

    @property
    def tables(self) -> tuple[str, ...]:
        return ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")

    def create_tables(self, server: EmbeddedPostgres) -> None:
        self._run(server, "--initialize", "--init-steps=dtp", f"--scale={self.scale}")

    def load(self, publisher: EmbeddedPostgres) -> None:
        publisher.create_database(self.database)
        self._run(publisher, "--initialize", "--quiet", f"--scale={self.scale}")
        tables = ", ".join(self.tables)
        publisher.execute(f"CREATE PUBLICATION {self.publication} FOR TABLE {tables}", self.database)

    def transactions(self, publisher: EmbeddedPostgres, count: int) -> Lsn:
        """Run `count` of pgbench's TPC-B-like transactions with four clients; return an LSN as `mark` does."""
        each = max(1, count // _CLIENTS)
        self._run(
            publisher,
            "--no-vacuum",
            "--protocol=prepared",
            f"--client={_CLIENTS}",
            "--jobs=2",
            f"--transactions={each}",
            options="-c synchronous_commit=off",
        )
        return self.mark(publisher)

    def start_at_rate(self, publisher: EmbeddedPostgres, rate: int, seconds: int) -> subprocess.Popen[str]:
        """Start to run `rate` transactions per second.

        When the process has ended, call `mark`, and `rate_of` with its output.
        """
        return subprocess.Popen(
            self._command(
                publisher,
                "--no-vacuum",
                "--protocol=prepared",
                f"--client={_CLIENTS}",
                "--jobs=1",
                f"--rate={rate}",
                f"--time={seconds}",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def mark(self, publisher: EmbeddedPostgres) -> Lsn:
        """Run one more transaction; return an LSN as `last_transaction` does."""
        return last_transaction(
            publisher, self.database, "UPDATE pgbench_branches SET bbalance = bbalance + 1 WHERE bid = 1"
        )

    def _command(self, server: EmbeddedPostgres, *arguments: str) -> list[str]:
        return [str(binaries.program("pgbench")), *arguments, server.conninfo(self.database)]

    def _run(self, server: EmbeddedPostgres, *arguments: str, options: str = "") -> None:
        ran = subprocess.run(
            self._command(server, *arguments),
            env={**os.environ, "PGOPTIONS": options},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise RuntimeError(f"pgbench failed: {ran.stderr.strip()[-2000:]}")


def rate_of(output: str) -> float:
    """Return the transactions per second from pgbench's output."""
    found = re.search(r"^tps = ([0-9.]+)", output, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pgbench failed: {output.strip()[-2000:]}")
    return float(found[1])


def last_transaction(publisher: EmbeddedPostgres, database: str, statement: str, settings: str = "") -> Lsn:
    """Run `statement` as a backlog's last transaction; return an LSN before its commit and after all other commits.

    A subscriber has applied the backlog once its origin, which moves from one commit's end to the next, is past that
    LSN.
    """
    with publisher.connect(database) as connection:
        connection.execute(f"{_WRITER}; {settings}".encode())
        with connection.transaction():
            connection.execute(statement.encode())
            row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None
        return Lsn.parse(row[0])


def _parts(count: int) -> list[tuple[int, int]]:
    """Split 0 to `count` into at most TRANSACTIONS ranges of at least one row."""
    parts = min(TRANSACTIONS, count)
    edges = [count * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))
