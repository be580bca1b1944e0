"""A node that a monitor sees, of the wanted size, served by the real endpoint in a thread: for what is shown, no daemon is needed."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from apply.worker_statistics import Changes, Figures
from catalog.figures import (
    CopyProgress,
    PublisherStatus,
    SubscriptionStats,
    TableRows,
    TableStorage,
    Verification,
    Warned,
    WorkerStats,
)
from catalog.records import DaemonRow, NodeRow, OriginStatus, State, Subscription, SubscriptionRel
from catalog.states import RelState
from pubsub.logs import RecentEvents
from pubsub.memory import Memory
from pubsub.monitoring.document import Observed
from pubsub.monitoring.endpoint import Endpoint
from pubsub.monitoring.node import NodeSource
from pubsub.monitoring.page import Page
from pubsub.monitoring.picture import Live, Picture, Served
from pubsub.node.status import from_state
from pubsub.protocol.copyboth import pg_time_from_datetime
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions

#: What a name or an error may hold.
HOSTILE: Final = (
    "<img src=x onerror=\"document.title='taken'\">",
    "</script><script>document.title='taken'</script>",
    '"><svg onload="document.title=\'taken\'">&lt;b&gt;',
    "javascript:document.title='taken'",
    "\u202edesrever\u202c \u0000\u0007 ${7*7} {{7*7}}",
    "w" * 300,
)
#: When the node that is watched began, in seconds: its samples end there.
_began = [int(time.time())]
_THINGS: Final = (
    "orders", "customers", "invoices", "payments", "shipments", "products", "prices", "stock", "events", "sessions", "users",
    "carts",
)  # fmt: skip


def subscription(oid: int, name: str, *, enabled: bool = True) -> Subscription:
    given = (
        "host=h password=hunter2",
        f"{name}",
        ("p",),
        SubscriptionOptions(),
        "t",
        "7",
        1,
        "shop",
        INVALID_LSN,
        "o",
        1,
        False,
    )
    return Subscription(oid, name, enabled, *given)


def table(subid: int, relid: int, name: str, state: RelState = RelState.READY, **more: Any) -> SubscriptionRel:
    given = SubscriptionRel(subid, relid, "public", name, state, Lsn(0x16B3748), 1, None, name, None, None, None, None)
    return replace(given, **more)


def picture(now: datetime, tables: int = 1000, *, hostile: bool = False) -> Picture:
    """Three subscriptions: `shop` with the tables, most of which follow; one that fails; one that is disabled."""
    chosen = random.Random(5)
    passed = int(now.timestamp())
    relations, rows, storage, copies, verified = [], [], [], [], []
    changes: dict[int, Changes] = {}
    for number in range(tables):
        name = f"{_THINGS[number % len(_THINGS)]}_{number:04d}"
        one = table(5, 1000 + number, name)
        if number == 3:
            one = replace(
                one, stopped=True, error_lsn=Lsn(0x16B0000), error='value "1e400" of column "price" does not fit double precision',
                error_hint="Fix the row, then ALTER SUBSCRIPTION shop RESYNC TABLE public.invoices_0003.",
            )  # fmt: skip
        if number in (7, 8):
            one = replace(one, state=RelState.DATASYNC)
            copies.append(
                CopyProgress(5, 1000 + number, (passed % 3600) * 12_000 + 4_000_000, 60_000_000, 1, None, False)
            )
        if number in (9, 10, 11):
            one = replace(one, state=RelState.INIT, lsn=None)
        if number == 5:
            verified.append(Verification(5, 1005, 1, now, now, Lsn(0x16), "different", missing=2, different=1))
        relations.append(one)
        held = int(math.exp(chosen.uniform(3, 18)))
        rows.append(TableRows(5, 1000 + number, 1, held, Lsn(0x16B3748)))
        storage.append(TableStorage(5, 1000 + number, 1, 9, 4, held * 40, held * 10, 20_000, now, None, 3, 10))
        changes[1000 + number] = Changes(held, 4, 1, 9, pg_time_from_datetime(now) - int(chosen.expovariate(1e-8)))
    error = 'could not connect to the publisher: connection to server at "db2.example.org", port 5432 failed: Connection refused'
    names = ["shop", "billing", "archive"]
    if hostile:
        names = list(HOSTILE[:3])
        error = " ".join(HOSTILE)
        relations[:6] = [
            replace(table(5, 1000 + n, name), error=name, error_hint=name, schema=HOSTILE[0])
            for n, name in enumerate(HOSTILE)
        ]
    state = State(
        NodeRow("7438921", now),
        (DaemonRow(1, 4711, "host", "/home", now, Memory(412 << 20, 1 << 30, 300 << 20, 700 << 20, 2 << 30)),),
        (subscription(5, names[0]), subscription(6, names[1]), subscription(7, names[2], enabled=False)),
        (*relations, *(table(6, n, f"bill_{n}") for n in range(1, 4)), table(7, 1, "old")),
        (OriginStatus(5, None, Lsn(0x16B3748), None), OriginStatus(6, None, Lsn(0x9B3748), None)),
        (
            WorkerStats(
                5, None, received_lsn=Lsn(0x16B4000), publisher_lsn=Lsn(0x16B4100), flush_lsn=Lsn(0x16B3748),
                lag_seconds=_lag(passed),
            ),
        ),
        tuple(copies),
        (
            SubscriptionStats(
                5, transactions=passed % 10**7 * 90, rows_inserted=_rows(passed), bytes_received=_rows(passed) * 210
            ),
            SubscriptionStats(6, apply_error_count=41, error=error, error_hint="Is the server running there?", error_time=now),
        ),
        publishers={
            5: PublisherStatus(
                current_lsn=Lsn(0x16B4100), retained_wal_bytes=84 << 20, safe_wal_bytes=9 << 30, wal_status="reserved",
                warnings=(Warned("the slot of another subscriber retains 12 GB", None, "Drop it if nobody needs it."),),
            ),
            6: PublisherStatus(retained_wal_bytes=3 << 30, wal_status="extended", away_since=now - timedelta(minutes=12)),
        },
        rows=tuple(rows),
        storage=tuple(storage),
        verifications=tuple(verified),
    )  # fmt: skip
    figures = Figures(changes=changes)
    slot = {
        "slot_name": HOSTILE[0] if hostile else "follower", "plugin": "pgoutput", "database": "shop", "active": True,
        "restart_lsn": "0/16B0000", "confirmed_flush_lsn": "0/16B3000", "wal_status": "reserved", "safe_wal_size": None,
    }  # fmt: skip
    stream = {
        "pid": 4, "usename": "repl", "application_name": HOSTILE[1] if hostile else "follower", "client_addr": "10.0.0.7",
        "state": "streaming", "sent_lsn": "0/16B3000", "write_lsn": "0/16B3000", "flush_lsn": "0/16B2F00",
        "replay_lsn": "0/16B2F00",
    }  # fmt: skip
    seen = replace(from_state(state, 4711), time=now)
    return Picture(
        state, seen, {5: Live.of(figures)}, Served((("walsender", slot),), (("walsender", stream),), 0x16B4100)
    )


def _lag(second: int) -> float | None:
    """A lag that moves, with a gap and then a peak in each hour before the node began."""
    minute = (second - _began[0]) % 3600 / 60
    if 15 < minute < 18:
        return None
    return 0.5 + 0.2 * math.sin(second / 211) + 0.15 * math.sin(second / 37) + 6 * math.exp(-((minute - 40) ** 2) / 3)


def _rows(second: int) -> int:
    """Rows up to a moment: more in the evening, and never less than before."""
    return int(900 * (second % 10**7) + 400_000 * math.sin(second / 1100) + 9_000 * math.sin(second / 60))


def observed(now: datetime, tables: int = 20, *, hostile: bool = False) -> Observed:
    """A day of samples up to now, and events."""
    events = RecentEvents()
    found = Observed(events)
    for before in [*range(86_400, 3600, -360), *range(3600, 0, -10)]:
        found.history.sample(picture(now - timedelta(seconds=before), 1, hostile=hostile))
    for before in (12, 7, 2):
        found.copies.look(picture(now - timedelta(seconds=before), tables).status)

    def said(level: str, text: str, seconds: float, **fields: Any) -> None:
        at = (now - timedelta(seconds=seconds)).isoformat()
        events(None, level, {"level": level, "event": text, "timestamp": at, **fields})

    said("info", "daemon has started", 86_000)
    said(
        "info",
        "CREATE SUBSCRIPTION",
        7000,
        statement="CREATE SUBSCRIPTION shop CONNECTION 'host=db1.example.org' PUBLICATION p",
    )
    said("info", "table is copied", 3000, subscription="shop", relation="public.orders_0000")
    said(
        "error",
        "table has stopped",
        900,
        subscription="shop",
        relation="public.invoices_0003",
        lsn="0/16B0000",
        reason="it does not fit",
    )
    for number in range(41):
        said(
            "error", "worker failed", 600 - number * 14, subscription="billing",
            reason='connection to server at "db2.example.org", port 5432 failed: Connection refused',
            hint="Is the server running there?",
        )  # fmt: skip
    if hostile:
        for text in HOSTILE:
            said("error", text, 1, reason=text, relation=text, exception="hunter2 in a traceback")
    return found


@contextmanager
def served(tables: int = 1000, *, hostile: bool = False) -> Iterator[str]:
    """Serve such a node; yield the page's URL."""
    _began[0] = int(time.time())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def take() -> Picture:
        return picture(datetime.now(UTC), tables, hostile=hostile)

    async def begin() -> Endpoint:
        page = Page(take, observed(datetime.now(UTC), tables, hostile=hostile), 60)
        return await Endpoint.open(("127.0.0.1", 0), NodeSource(take, 60), page.paths())

    endpoint = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield f"http://{endpoint.place}/"
    finally:
        asyncio.run_coroutine_threadsafe(endpoint.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
