"""kill -9 while a table stops alone, and around commits by others: what was stored before the kill stays known."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pubsub.delta import table
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import Commit
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.protocol.lsn import Lsn
from tests.fault.daemon import Daemon, Subscribed
from tests.support import stores
from tests.support.json_transactions import JsonTransactions
from tests.support.replica import Faults


def keys(path: str, name: str = "id") -> set[Any]:
    result = QueryBuilder().register("t", DeltaTable(path)).execute(f"SELECT {name} FROM t").read_all()
    return set(pa.table(result).column(0).to_pylist())


@pytest.mark.full
def test_killed_while_a_table_stops_alone(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    subscribed.database.execute(
        "CREATE TABLE c (id int PRIMARY KEY, at timestamptz); INSERT INTO c VALUES (1, now()); ALTER PUBLICATION p ADD TABLE c"
    )
    subscribed.subscribe()
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} SET (on_table_error = isolate)")
    subscribed.assert_equal(("a", "keyless", "c"))
    fault.arm("batch committed", "kill")
    subscribed.database.execute(
        "INSERT INTO c VALUES (2, now()), (3, 'infinity'); UPDATE a SET n = n + 1; INSERT INTO keyless VALUES (77)"
    )
    daemon.killed_by_fault()
    # The other tables hold the transaction.  That c has stopped is not stored, so the failure is met again.
    assert not subscribed.relations()["c"].stopped
    fault.clear()
    fault.arm("tables stopped", "kill")
    daemon.start()
    daemon.killed_by_fault()
    stopped = subscribed.relations()["c"]
    assert stopped.stopped
    assert stopped.error_lsn is not None
    subscribed.database.execute("INSERT INTO c VALUES (4, now())")
    subscribed.write(2)
    fault.clear()
    daemon.start()
    subscribed.assert_equal()
    assert subscribed.relations()["c"] == stopped
    assert keys(stopped.path) == {1}
    subscribed.database.execute("DELETE FROM c WHERE id = 3")
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE c")
    subscribed.assert_equal(("a", "keyless", "c"))


@pytest.mark.full
@stores.local_only
def test_commits_of_other_writers_while_no_daemon_runs(subscribed: Subscribed, daemon: Daemon, fault: Faults) -> None:
    subscribed.subscribe()
    subscribed.assert_equal()
    relation = subscribed.relations()["a"]
    daemon.kill()
    target = table.load(relation.path, "public.a", relation.definition)
    deleted = pa.table({"id": pa.array([10], target.schema.field("id").type)})
    arrow_writer.commit(
        DirectStaged(target, TableLog(target.path, JsonTransactions()), [], deleted, None, False, 1),
        Commit("others", Lsn(1), Lsn(1)),
    )
    subscribed.database.execute("UPDATE a SET n = 5 WHERE id IN (10, 11)")
    # The foreign commit is stored before the batch that met it is in Delta, and stays stored.
    fault.arm("commit public.a", "kill")
    daemon.start()
    daemon.killed_by_fault()
    noticed = subscribed.relations()["a"].foreign
    assert noticed is not None
    fault.clear()
    daemon.start()
    subscribed.caught_up()
    assert keys(relation.path) == set(range(1, 2001)) - {10}, "the update of a row that is missing must not insert it"
    assert subscribed.relations()["a"].foreign == noticed
    fault.arm("batch committed", "kill")
    subscribed.database.execute("DELETE FROM a WHERE id IN (10, 12)")
    daemon.killed_by_fault()
    fault.clear()
    daemon.start()
    subscribed.caught_up()
    assert keys(relation.path) == set(range(1, 2001)) - {10, 12}
    daemon.execute(f"ALTER SUBSCRIPTION {subscribed.name} RESYNC TABLE a")
    subscribed.assert_equal()
    assert subscribed.relations()["a"].foreign is None
