"""Writers on the demo's server: pgbench with its own TPC-B-like script, and with a shop's transactions on `orders`.

The shop inserts, updates, deletes, and truncates two tables at once.  Its updates change keys, texts stored out of
line, and other columns of the same rows, for which those texts are unchanged and not sent.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub.demo.databases import Sizes
from pubsub.demo.interruption import Interruption
from pubsub.errors import PubsubError
from pubsub.testing.servers import EmbeddedPostgres

# Name, share in percent, and script of each transaction.  :orders, :customers and :documents are the initial row
# counts.
_SHOP: Final[tuple[tuple[str, int, str], ...]] = (
    (
        "place an order",
        30,
        r"""
\set customer random(1, :customers)
\set n random(1, 1000000)
BEGIN;
INSERT INTO orders (customer, status, placed, total, weight, express, products, address, attachment)
    SELECT id, 'new', now(), :n / 100.0, :n / 7.0, false, ARRAY[:n, NULL], jsonb_build_object('n', :n),
           CASE WHEN :n % 5 = 0 THEN noise(3000) END
    FROM customers OFFSET :customer - 1 LIMIT 1 RETURNING id \gset
INSERT INTO order_lines SELECT :id, l, 'product ' || l, l, l / 4.0 FROM generate_series(1, 3) l;
INSERT INTO audit VALUES (now(), 'shop', 'order', jsonb_build_object('id', :id));
COMMIT;
""",
    ),
    (
        "pay: the attachment stays unsent",
        20,
        r"""
\set id random(1, :orders)
UPDATE orders SET status = 'paid', total = total + 0.0001, express = NOT express WHERE id = :id;
""",
    ),
    (
        "another attachment",
        6,
        r"""
\set id random(1, :orders)
UPDATE orders SET attachment = noise(4000), checksum = decode(md5(random()::text), 'hex') WHERE id = :id;
""",
    ),
    (
        "renumber: the key changes, the attachment stays unsent",
        5,
        r"""
\set id random(1, :orders)
UPDATE orders SET id = nextval(pg_get_serial_sequence('orders', 'id')) WHERE id = :id;
""",
    ),
    (
        "edit a document",
        5,
        r"""
\set n random(1, :documents)
UPDATE documents SET body = noise(5000), revision = revision + 1, edited = now() WHERE slug = 'document-' || :n;
""",
    ),
    (
        "move a document: a text as key, two texts unsent",
        4,
        r"""
\set n random(1, :documents)
UPDATE documents SET slug = 'document-' || :n || '-' || clock_timestamp() WHERE slug = 'document-' || :n;
""",
    ),
    (
        "cancel an order",
        6,
        r"""
\set id random(1, :orders)
BEGIN;
DELETE FROM orders WHERE id = :id;
DELETE FROM order_lines WHERE order_id = :id;
COMMIT;
""",
    ),
    (
        "a customer's profile",
        6,
        r"""
\set customer random(1, :customers)
UPDATE customers SET profile = profile || '{"seen": true}', tags = tags || 'seen'::text, vip = NOT vip
    WHERE id = (SELECT id FROM customers OFFSET :customer - 1 LIMIT 1);
""",
    ),
    (
        "fill a basket",
        13,
        r"""
BEGIN;
LOCK TABLE baskets, basket_lines IN ROW EXCLUSIVE MODE;
INSERT INTO baskets (session, opened) VALUES (gen_random_uuid(), now()) RETURNING id \gset
INSERT INTO basket_lines (basket, product, quantity) SELECT :id, 'product ' || n, n FROM generate_series(1, 4) n;
COMMIT;
""",
    ),
    (
        "a table without a key",
        4,
        r"""
BEGIN;
UPDATE audit SET what = 'seen' WHERE ctid IN (SELECT ctid FROM audit ORDER BY at LIMIT 3);
DELETE FROM audit WHERE ctid IN (SELECT ctid FROM audit ORDER BY at DESC LIMIT 2);
COMMIT;
""",
    ),
    (
        "empty the baskets",
        1,
        r"""
BEGIN;
TRUNCATE baskets RESTART IDENTITY CASCADE;
INSERT INTO baskets (session, opened) VALUES (gen_random_uuid(), now());
COMMIT;
""",
    ),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Transactions per second offered to each database; 0: as many as possible."""

    pgbench: int
    orders: int

    @property
    def shown(self) -> str:
        """The rates in words."""
        return ", ".join(
            f"{rate or 'as many as possible'} transactions/s on {name}"
            for name, rate in (("pgbench", self.pgbench), ("orders", self.orders))
        )

    def gentle(self) -> Rates:
        """Return a fifth of these rates, for the time while tables are copied."""
        return Rates(max(1, self.pgbench // 5), max(1, self.orders // 5))


class Load:
    """The writers.  Call `start`, then `stop`; `directory` is for their scripts.

    `transactions` counts the committed transactions by database; `stop` adds to it.
    """

    def __init__(self, server: EmbeddedPostgres, sizes: Sizes, directory: Path, interruption: Interruption) -> None:
        self._server = server
        self._sizes = sizes
        self._directory = directory
        self._interruption = interruption
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.transactions: dict[str, int] = {}

    def start(self, rates: Rates, seconds: int) -> None:
        """Start the writers, which run for `seconds`."""
        for name, rate in (("pgbench", rates.pgbench), ("orders", rates.orders)):
            scripts = [] if name == "pgbench" else self._shop()
            command = [
                str(self._server.bin("pgbench")),
                "--no-vacuum",
                "--client=2",
                "--jobs=1",
                "--max-tries=100",
                f"--time={seconds}",
                *([f"--rate={rate}"] if rate else []),
                *scripts,
                self._server.conninfo(name),
            ]
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether any writer is still running."""
        return any(process.poll() is None for process in self._running.values())

    def stop(self) -> None:
        """Wait for the writers to end and count their transactions.  Raises PubsubError if one failed."""
        running, self._running = self._running, {}
        for name, process in running.items():
            output, _ = process.communicate()
            if process.returncode:
                raise PubsubError(f'the load on "{name}" failed', sqlstate="58000", detail=output.strip()[-1500:])
            if found := re.search(r"number of transactions actually processed: (\d+)", output):
                self.transactions[name] = self.transactions.get(name, 0) + int(found[1])

    def kill(self) -> None:
        """Kill the writers at once; never fails."""
        running, self._running = self._running, {}
        for process in running.values():
            process.kill()
            process.communicate()

    def _shop(self) -> Sequence[str]:
        self._directory.mkdir(parents=True, exist_ok=True)
        sizes = self._sizes
        arguments = [
            f"--define=orders={sizes.orders}",
            f"--define=customers={sizes.customers}",
            f"--define=documents={sizes.documents}",
        ]
        for number, (name, weight, script) in enumerate(_SHOP):
            path = self._directory / f"{number:02d}.sql"
            path.write_text(f"-- {name}\n{script}")
            arguments.append(f"--file={path}@{weight}")
        return arguments
