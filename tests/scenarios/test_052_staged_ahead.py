"""streaming = parallel: a transaction's changes are staged while it is in progress (t/015 to 018, with parallel).

Parts are as small as blocks, so that every streamed transaction has several.  `taken` says for each transaction that
committed whether its early work was used or was in vain; the rows are right either way.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

import apply.pipeline.dispatch
from apply.batch import Batch
from apply.staging.staged_table import StagedTable
from apply.staging.stream_ahead import Ahead
from pubsub.delta.places import place
from tests.scenarios import test_050_streaming as streaming
from tests.scenarios.test_050_streaming import TABLES, any_replica, on
from tests.support.replica import Replica, Stock

__all__ = ["any_replica"]

INSERTS = "INSERT INTO a SELECT g, 1, repeat('i', 40) FROM generate_series(100000, 110000) g"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []
    finish = Ahead.finish

    async def noted(self: Ahead, batch: Batch) -> list[StagedTable] | None:
        had_parts = len(batch.large) > 1
        staged = await finish(self, batch)
        if had_parts:
            found.append(staged is not None)
        return staged

    monkeypatch.setattr(apply.pipeline.dispatch, "PART_BYTES", 100_000)
    monkeypatch.setattr(Ahead, "finish", noted)
    return found


def data_files(replica: Replica, table: str) -> set[str]:
    return {file.name for file in place(replica.path(table)).glob("*.parquet")}


@on("15", "18")
def test_every_kind_of_transaction_is_staged_ahead(any_replica: Replica, taken: list[bool]) -> None:
    replica = any_replica
    replica.subscribe("p, q", streaming="parallel")
    replica.assert_equal(*TABLES)
    for statements in streaming.ALL:
        replica.database.execute(statements)
        replica.assert_equal(*TABLES)
    assert taken
    assert not list((replica.node.home / "spill").rglob("*.arrows"))


@pytest.mark.full
@on("18")
def test_staged_parts_are_used_at_the_commit(any_replica: Replica, taken: list[bool]) -> None:
    replica = any_replica
    replica.subscribe("p, q", streaming="parallel")
    replica.assert_equal(*TABLES)
    replica.execute(INSERTS)
    replica.assert_equal(*TABLES)
    # Each key once: rows of the table, rows with unchanged TOAST values, and keys that move.
    replica.execute("UPDATE a SET n = n + 1")
    replica.execute("UPDATE big SET n = n + 1; UPDATE a SET id = -id; DELETE FROM a WHERE id % 3 = 0")
    replica.assert_equal(*TABLES)
    replica.database.execute(
        f"BEGIN; {INSERTS}; INSERT INTO keyless SELECT g, 'k' FROM generate_series(1, 3000) g; COMMIT"
    )
    replica.assert_equal(*TABLES)
    assert taken[:2] == [True, True]
    assert taken[-1]


@pytest.mark.full
@on("18")
def test_staged_parts_that_do_not_fit_are_discarded(any_replica: Replica, taken: list[bool]) -> None:
    replica = any_replica
    replica.subscribe("p, q", streaming="parallel")
    replica.assert_equal(*TABLES)
    replica.database.execute(f"BEGIN; {INSERTS}; UPDATE a SET n = 5; DELETE FROM a WHERE id % 7 = 0; COMMIT")
    replica.assert_equal(*TABLES)
    replica.database.execute(
        "BEGIN; INSERT INTO b SELECT g, 'b', 0 FROM generate_series(1, 5000) g;"
        " SAVEPOINT s; INSERT INTO b SELECT g, 'gone', 0 FROM generate_series(1, 5000) g; ROLLBACK TO SAVEPOINT s; COMMIT"
    )
    replica.assert_equal(*TABLES)
    assert taken == [False, False]
    before = data_files(replica, "a")
    replica.database.execute(
        "BEGIN; INSERT INTO a SELECT g, 1, repeat('r', 40) FROM generate_series(1000000, 1010000) g; ROLLBACK"
    )
    replica.execute("INSERT INTO keyless VALUES (1, 'after')")
    replica.assert_equal(*TABLES)
    assert data_files(replica, "a") == before
    # Early work succeeds again after it was in vain.
    replica.database.execute("INSERT INTO b SELECT g, 'again', 0 FROM generate_series(1, 5000) g")
    replica.assert_equal(*TABLES)
    assert taken == [False, False, True]


@pytest.mark.full
@on("18")
def test_other_transactions_commit_while_parts_are_staged(any_replica: Replica, taken: list[bool]) -> None:
    """Others commit in batches of their own, before the streamed one if they committed before it.

    More transactions are streamed at once than there are workers.
    """
    replica = any_replica
    replica.subscribe("p, q", streaming="parallel")
    replica.assert_equal(*TABLES)
    connections = [psycopg.connect(replica.conninfo) for _ in range(4)]
    try:
        for step in range(4):
            for number, connection in enumerate(connections):
                first = 100000 * (number + 1) + 3000 * step
                connection.execute(
                    f"INSERT INTO a SELECT g, {number}, repeat('i', 40) FROM generate_series({first}, {first + 2999}) g"
                )
            replica.execute(f"UPDATE a SET n = n + 1 WHERE id BETWEEN 1 AND {100 + step}")
            replica.execute(f"INSERT INTO keyless VALUES ({step}, 'beside')")
        connections[3].commit()
        connections[1].rollback()
        replica.execute("UPDATE a SET n = -n WHERE id BETWEEN 400000 AND 400500")
        connections[0].commit()
        connections[2].commit()
        replica.execute("DELETE FROM a WHERE id BETWEEN 100000 AND 100500")
    finally:
        for connection in connections:
            connection.close()
    replica.assert_equal(*TABLES)
    assert taken


@pytest.mark.full
def test_beside_a_stock_subscriber(replica: Replica, stock: Callable[[str], Stock], taken: list[bool]) -> None:
    streaming.prepare(replica.database)
    beside = stock(streaming.DDL)
    replica.subscribe("p, q", streaming="parallel")
    beside.subscribe("p, q")
    replica.assert_equal(*TABLES)
    for statements in (INSERTS, *streaming.ALL):
        replica.database.execute(statements)
    beside.assert_equal(*TABLES)
    assert taken
