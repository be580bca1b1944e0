"""Transactions far larger than logical_decoding_work_mem, and the memory of the daemon's process meanwhile."""

from __future__ import annotations

import pytest

from bench import machine
from pubsub.testing.compare import compare_tables
from tests.fault.daemon import Daemon, Subscribed

LIMIT = 600 << 20


def peak_of(daemon: Daemon, subscribed: Subscribed, statement: str) -> int:
    """Return the daemon's peak resident memory, in bytes, while it follows the statement."""
    machine.forget_peak(daemon.process.pid)
    subscribed.database.execute(statement)
    subscribed.caught_up()
    return machine.peak_memory(daemon.process.pid)


@pytest.mark.soak
@pytest.mark.parametrize("rows", [1_000_000, 10_000_000])
def test_one_transaction_of_many_rows(subscribed: Subscribed, daemon: Daemon, rows: int) -> None:
    subscribed.subscribe()
    subscribed.assert_equal()
    inserts = f"INSERT INTO a SELECT g, g, md5(g::text) FROM generate_series(1000001, 1000000 + {rows}) g"
    peak = peak_of(daemon, subscribed, inserts)
    print(f"{rows} inserts: {peak >> 20} MB")
    assert peak < LIMIT, f"{peak >> 20} MB"
    peak = peak_of(daemon, subscribed, f"UPDATE a SET n = n + 1 WHERE id <= {1_000_000 + min(rows, 3_000_000)}")
    print(f"{min(rows, 3_000_000)} updates: {peak >> 20} MB")
    assert peak < LIMIT, f"{peak >> 20} MB"
    difference = compare_tables(subscribed.database.conninfo, "public.a", subscribed.relations()["a"].path)
    assert difference is None, str(difference)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(20_000, marks=pytest.mark.full),
        *(pytest.param(rows, marks=pytest.mark.soak) for rows in (200_000, 800_000)),
    ],
)
def test_an_update_that_leaves_large_values_unchanged(subscribed: Subscribed, daemon: Daemon, rows: int) -> None:
    """The values, 12.8 kB each, are not in the stream: they are taken from the table, up to 10 GB of them."""
    subscribed.database.execute(
        f"""
        ALTER TABLE a ALTER t SET STORAGE EXTERNAL;
        INSERT INTO a SELECT g, 0, repeat(md5(g::text), 400) FROM generate_series(1000001, 1000000 + {rows}) g
        """
    )
    subscribed.subscribe()
    subscribed.assert_equal(["keyless"])
    peak = peak_of(daemon, subscribed, "UPDATE a SET n = 1")
    print(f"{rows} unchanged values: {peak >> 20} MB")
    assert peak < LIMIT, f"{peak >> 20} MB"
    subscribed.assert_equal()
