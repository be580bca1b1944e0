"""The status of tables that stopped alone, and of tables that others write."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime

from rich.console import Console

from catalog.records import ForeignCommit, NodeRow, State, Subscription, SubscriptionRel, WorkerStats
from catalog.states import RelState
from pubsub.cli.status import picture
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions
from pubsub.status import from_state


def relation(relid: int, name: str) -> SubscriptionRel:
    return SubscriptionRel(5, relid, "public", name, RelState.READY, Lsn(16), 1, None, name, None, None, None, None)


def test_a_table_that_stopped_and_one_that_others_write() -> None:
    options = SubscriptionOptions(on_table_error="isolate")
    given = (5, "s", True, "", "s", ("p",), options, "t", "7", 1, "d", INVALID_LSN, "o", 1, False)
    stopped = replace(
        relation(1, "a"), stopped=True, error="it does not fit", error_hint="RESYNC TABLE a", error_lsn=Lsn(0x500)
    )
    written = replace(relation(2, "b"), foreign=ForeignCommit(7, "UPDATE", "an engine"))
    worker = WorkerStats(5, None, publisher_lsn=Lsn(0x700), flush_lsn=Lsn(0x600), lag_seconds=1.0)
    state = State(
        NodeRow("9", datetime.now(UTC)), None, (Subscription(*given),), (stopped, written), (), (worker,), (), ()
    )
    found = from_state(state, 1)
    (subscription,) = found.as_json()["subscriptions"]
    a, b = subscription["tables"]
    assert (a["stopped"], a["error_lsn"], a["error"], a["hint"]) == (True, "0/500", "it does not fit", "RESYNC TABLE a")
    assert (a["lag_bytes"], b["lag_bytes"]) == (None, 0x100)
    assert (b["stopped"], b["foreign_commit"]) == (False, "version 7, UPDATE by an engine")
    shown = io.StringIO()
    Console(file=shown, width=200).print(picture(found, "home"))
    for line in (
        "public.a    stopped",
        "ERROR:  public.a, at 0/500: it does not fit",
        "HINT:  RESYNC TABLE a",
        "WARNING:  public.b: written by others (version 7, UPDATE by an engine)",
    ):
        assert line in shown.getvalue(), shown.getvalue()
