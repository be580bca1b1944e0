"""where: the rows of the publisher's tables that the Delta tables have."""

from __future__ import annotations

from tests.support.matching_rows import Filtered
from tests.support.replica import Replica

SETUP = (
    "CREATE TABLE orders (id int PRIMARY KEY, status text, amount numeric(8, 2), region varchar(8), hidden boolean, at date);"
    "ALTER TABLE orders REPLICA IDENTITY FULL; CREATE TABLE logins (who text, at int); ALTER TABLE logins REPLICA IDENTITY FULL;"
    "CREATE TABLE plain (id int PRIMARY KEY, state text, n int, v text);"
    "INSERT INTO plain SELECT g, CASE WHEN g % 2 = 0 THEN 'on' ELSE 'off' END, g, 'v' || g FROM generate_series(1, 20) g;"
    "CREATE TABLE keyed (region text, id int, v text, PRIMARY KEY (region, id));"
    "INSERT INTO orders SELECT g, CASE g % 3 WHEN 0 THEN 'draft' WHEN 1 THEN 'open' END, g, 'eu', g % 5 = 0, '2026-01-01' "
    "FROM generate_series(1, 20) g; INSERT INTO logins SELECT 'w' || g % 2, g % 4 FROM generate_series(1, 12) g;"
    "INSERT INTO keyed SELECT CASE g % 2 WHEN 0 THEN 'eu' ELSE 'us' END, g, 'v' FROM generate_series(1, 9) g;"
    "CREATE PUBLICATION p FOR TABLE orders, logins, keyed, plain"
)
ORDERS = "status <> 'draft' AND (amount > 10.5 OR region IN ('us', 'asia')) AND NOT hidden AND at >= '2026-01-01'"
LOGINS = "at BETWEEN 1 AND 2"
KEYED = "region = 'eu'"
PLAIN = "state = 'on' OR n > 100"
CONDITIONS = {"orders": ORDERS, "logins": LOGINS, "keyed": KEYED, "plain": PLAIN}
CHANGES = (
    # Rows that come: inserted, or changed so that they do; of a condition that is unknown before, or after.
    (
        "INSERT INTO orders VALUES (30, 'open', 11, 'eu', false, '2026-02-01'), (31, 'open', 10.5, 'eu', false, '2026-02-01'),"
        "(32, NULL, 90, 'us', false, '2026-02-01'), (33, 'open', NULL, 'us', false, '2026-02-01'), (34, 'open', 99, 'eu', NULL, NULL);"
        "UPDATE orders SET status = 'open' WHERE id IN (12, 14, 32); UPDATE orders SET amount = 100 WHERE id < 5"
    ),
    # Rows that go, stay and never were there; keys that move with them.
    (
        "UPDATE orders SET hidden = true WHERE id = 13; UPDATE orders SET region = 'asia' WHERE id IN (7, 16);"
        "UPDATE orders SET id = id + 100 WHERE id IN (4, 5, 16); UPDATE orders SET id = 200, status = 'draft' WHERE id = 19;"
        "UPDATE orders SET id = 201, hidden = false WHERE id = 13; DELETE FROM orders WHERE id IN (1, 2, 30, 104)"
    ),
    (
        "BEGIN; UPDATE orders SET hidden = true WHERE id = 14; UPDATE orders SET hidden = false WHERE id = 14;"
        "DELETE FROM orders WHERE id = 14; INSERT INTO orders VALUES (14, 'new', 50, 'eu', false, '2026-03-01');"
        "UPDATE orders SET at = '2025-12-31' WHERE id = 14; UPDATE orders SET at = '2026-01-01' WHERE id = 14; COMMIT"
    ),
    "UPDATE logins SET at = at + 1 WHERE who = 'w1'; DELETE FROM logins WHERE at = 2 AND who = 'w0'; INSERT INTO logins VALUES ('n', 1)",
    (
        "UPDATE keyed SET v = 'w'; UPDATE keyed SET region = 'eu' WHERE id = 1; UPDATE keyed SET region = 'us', v = 'x' WHERE id = 2;"
        "UPDATE keyed SET id = id + 50 WHERE id IN (3, 4); DELETE FROM keyed WHERE id > 6 AND id < 50"
    ),
    # Of rows that were there, and were not, while the publisher sends no more than the key.
    (
        "UPDATE plain SET state = 'on' WHERE id IN (1, 2); UPDATE plain SET state = 'off' WHERE id IN (3, 4);"
        "UPDATE plain SET v = 'w' WHERE id IN (5, 6); DELETE FROM plain WHERE id IN (7, 8);"
        "UPDATE plain SET id = id + 100 WHERE id IN (9, 10); UPDATE plain SET id = id + 100, n = 500 WHERE id IN (11, 12);"
        "UPDATE plain SET id = id + 100, state = 'off' WHERE id IN (13, 14)"
    ),
    (
        "BEGIN; UPDATE plain SET state = 'off' WHERE id IN (16, 17); UPDATE plain SET state = 'on', v = 'x' WHERE id IN (16, 17);"
        "UPDATE plain SET state = 'off', n = 0 WHERE id > 17; UPDATE plain SET state = 'on' WHERE id = 18;"
        "DELETE FROM plain WHERE id = 18; INSERT INTO plain VALUES (18, 'off', 1, 'n'), (40, 'off', 1, 'n'), (41, 'on', 1, 'n');"
        "UPDATE plain SET state = 'on' WHERE id IN (18, 40); UPDATE plain SET state = 'off' WHERE id = 41;"
        "UPDATE plain SET id = 42 WHERE id = 41; UPDATE plain SET n = 101 WHERE id = 42; UPDATE plain SET id = 43 WHERE id = 40;"
        "UPDATE plain SET id = 40 WHERE id = 42; COMMIT"
    ),
)


def option(conditions: dict[str, str]) -> str:
    elements = ", ".join(f"public.{table} ({condition})" for table, condition in conditions.items())
    return "'" + elements.replace("'", "''") + "'"


def test_rows_that_meet_the_condition(replica: Replica) -> None:
    """Copied, and changed: in, out, under other keys, and not at all."""
    replica.execute(SETUP)
    replica.subscribe(where=option(CONDITIONS))
    filtered = Filtered(replica, CONDITIONS)
    for statements in ((), *CHANGES):
        replica.execute(*([statements] if statements else []))
        filtered.assert_equal()
    rows = replica.node.fetch("SELECT relation, kept_rows FROM pg_subscription_rel ORDER BY 1")
    assert [(row["relation"], row["kept_rows"]) for row in rows] == [
        ("public.keyed", KEYED), ("public.logins", LOGINS), ("public.orders", ORDERS),
        ("public.plain", PLAIN),
    ]  # fmt: skip
    # A batch of which no table has a row is passed over.
    version = replica.version("orders")
    replica.execute("INSERT INTO orders VALUES (300, 'draft', 1, 'eu', true, NULL); DELETE FROM orders WHERE id = 300")
    filtered.assert_equal()
    assert replica.version("orders") == version
    assert replica.node.statistics(replica.name)["confl_delete_missing"] == 0
    filtered.assert_verified()
