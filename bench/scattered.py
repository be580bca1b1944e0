"""Updates of scattered rows: a load whose cost must not grow with the table."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from bench.workload import Dataset, last_transaction
from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres

#: The scenarios, and each one's key as SQL of a number.
KEYS: Final = {"scattered": "{}::bigint", "scattered-text": "md5({}::text)"}
#: A transaction updates so many rows; there are so many transactions a second.
ROWS: Final = 10
RATE: Final = 200


@dataclass(frozen=True, slots=True)
class Scattered(Dataset):
    """One table of `rows` rows; `key` is SQL that makes a key of a number."""

    rows: int
    key: str

    @property
    def tables(self) -> tuple[str, ...]:
        return ("scattered",)

    def create_tables(self, server: EmbeddedPostgres) -> None:
        kind = "text" if "md5" in self.key else "bigint"
        server.execute(f"CREATE TABLE scattered (id {kind} PRIMARY KEY, count int, note text)", self.database)

    def load(self, publisher: EmbeddedPostgres) -> None:
        publisher.create_database(self.database)
        self.create_tables(publisher)
        key = self.key.format("i")
        publisher.execute(
            f"INSERT INTO scattered SELECT {key}, 0, 'note ' || i FROM generate_series(1, {self.rows}) i;"
            f"CREATE PUBLICATION {self.publication} FOR TABLE scattered",
            self.database,
        )

    @contextmanager
    def running(self, publisher: EmbeddedPostgres, seconds: int) -> Iterator[subprocess.Popen[str]]:
        """Run RATE transactions per second, each of which updates ROWS rows anywhere in the table."""
        lines = ["BEGIN;"]
        for number in range(ROWS):
            key = self.key.format(f":n{number}")
            lines.insert(0, f"\\set n{number} random(1, {self.rows})")
            lines.append(f"UPDATE scattered SET count = count + 1 WHERE id = {key};")
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
            script.write("\n".join([*lines, "COMMIT;", ""]))
            script.flush()
            os.chmod(script.name, 0o644)
            arguments = ["--no-vacuum", f"--rate={RATE}", f"--time={seconds}", f"--file={script.name}"]
            command = [str(binaries.program("pgbench")), *arguments, publisher.conninfo(self.database)]
            yield subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def mark(self, publisher: EmbeddedPostgres) -> Lsn:
        """Run one more transaction; return an LSN as `last_transaction` does."""
        key = self.key.format("1")
        return last_transaction(publisher, self.database, f"UPDATE scattered SET count = count + 1 WHERE id = {key}")
