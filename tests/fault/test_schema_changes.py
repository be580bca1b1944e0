"""kill -9 around the commit that alters a Delta table: it is made once, and the rows before and after it are right."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pubsub.delta.log.transactions import Operation
from tests.fault.daemon import Daemon, Subscribed
from tests.support.replica import Faults

CHANGE = """
BEGIN;
UPDATE a SET n = n + 1 WHERE id % 3 = 0;
INSERT INTO a VALUES (300001, 1, 'before');
ALTER TABLE a ADD COLUMN c int DEFAULT 7;
ALTER TABLE a RENAME t TO u;
ALTER TABLE keyless ADD COLUMN m int;
UPDATE a SET n = n + 1, c = 8 WHERE id % 5 = 0;
INSERT INTO a VALUES (300002, 1, 'after', NULL);
INSERT INTO keyless VALUES (1, 2);
COMMIT
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("alter public.a", marks=pytest.mark.soak),  # nothing is altered
        "altered public.a",  # the Delta table is altered, the catalog is not
        "commit public.a",  # both are altered, the batch is not committed
        # This table holds the batch, but not the origin.
        pytest.param("committed public.a", marks=pytest.mark.soak),
    ],
)
def test_killed_around_an_alter(subscribed: Subscribed, daemon: Daemon, fault: Faults, point: str) -> None:
    subscribed.subscribe()
    subscribed.assert_equal()
    fault.arm(point, "kill")
    subscribed.database.execute(CHANGE)
    daemon.killed_by_fault()
    path = subscribed.relations()["a"].path
    altered = point != "alter public.a"
    assert ([f.name for f in DeltaTable(path).schema().fields] == ["id", "n", "u", "c"]) == altered
    subscribed.database.execute("UPDATE a SET c = c + 1; INSERT INTO keyless VALUES (3, 4)")
    fault.clear()
    daemon.start()
    subscribed.assert_equal()
    metadata = [entry for entry in DeltaTable(path).history() if entry["operation"] == Operation.ALTER.value]
    assert len(metadata) == 1
    assert subscribed.relations()["a"].copy_generation == 1
