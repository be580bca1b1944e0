"""ALTER SUBSCRIPTION … SKIP: exactly the transaction that an error named is left out."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.support.replica import Replica, wait_until

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, at timestamptz);
CREATE TABLE b (id int PRIMARY KEY);
INSERT INTO a VALUES (1, '2024-01-01'), (2, '2024-01-02');
CREATE PUBLICATION p FOR TABLE a, b;
"""


def finish_lsn(replica: Replica) -> str:
    """Return the finish LSN that the error's DETAIL names."""
    replica.error()
    detail = replica.node.statistics(replica.name)["error_detail"]
    (found,) = re.findall(r"finished at ([0-9A-F]+/[0-9A-F]+)", detail)
    return str(found)


@pytest.mark.parametrize("disable", ["true", "false"])
def test_the_transaction_that_fails_is_skipped(replica: Replica, disable: str) -> None:
    """A value that Delta cannot hold stops the subscription; the transactions around it are applied."""
    replica.execute(TABLES)
    replica.subscribe(disable_on_error=disable)
    replica.assert_equal("a", "b")
    replica.execute(
        "INSERT INTO b VALUES (1)",
        "BEGIN; INSERT INTO b VALUES (2); INSERT INTO a VALUES (3, 'infinity'); DELETE FROM a WHERE id = 1; COMMIT",
        "INSERT INTO b VALUES (3); UPDATE a SET at = '2025-01-01' WHERE id = 2",
    )
    lsn = finish_lsn(replica)
    if disable == "true":
        wait_until(
            lambda: (
                not replica.node.fetch(f"SELECT subenabled FROM pg_subscription WHERE subname = '{replica.name}'")[0][
                    "subenabled"
                ]
            ),
            "the subscription to be disabled",
        )
    replica.alter(f"SKIP (lsn = '{lsn}')")
    if disable == "true":
        replica.alter("ENABLE")
    replica.caught_up()
    assert sorted(row["id"] for row in replica.rows("b")) == [1, 3]
    assert sorted((row["id"], row["at"].year) for row in replica.rows("a")) == [(1, 2024), (2, 2025)]
    assert skip_lsn(replica) == "0/0"
    # Later transactions are not skipped.
    replica.execute("INSERT INTO b VALUES (4)")
    replica.caught_up()
    assert sorted(row["id"] for row in replica.rows("b")) == [1, 3, 4]


def test_another_transaction_takes_skip_back(replica: Replica) -> None:
    """Clear SKIP as worker.c: clear_subscription_skip_lsn does."""
    replica.execute(TABLES)
    replica.subscribe()
    replica.assert_equal("a", "b")
    replica.alter("SKIP (lsn = 'FFFFFFFF/FFFFFFFF')")
    numbers = itertools.count(1)

    def taken_back() -> bool:
        # The worker from before the ALTER may still have applied the first row.
        replica.execute(f"INSERT INTO b VALUES ({next(numbers)})")
        replica.assert_equal("a", "b")
        return skip_lsn(replica) == "0/0"

    wait_until(taken_back, "SKIP to be taken back")


def skip_lsn(replica: Replica) -> str:
    (row,) = replica.node.fetch(f"SELECT subskiplsn FROM pg_subscription WHERE subname = '{replica.name}'")
    return str(row["subskiplsn"])
