"""LSNs in the catalog keep value and order over all 64 bits; the origin is the greatest LSN ever stored."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.dialects import sqlite

from catalog.records import NewSubscription
from catalog.schema import LsnType
from catalog.store import Catalog
from pubsub.protocol.lsn import Lsn
from pubsub.sql.options import SubscriptionOptions

lsns = (st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])).map(Lsn)


@given(lsns, lsns)
@settings(max_examples=300)
def test_texts_order_as_positions(one: Lsn, other: Lsn) -> None:
    kind, dialect = LsnType(), sqlite.dialect()
    texts = [kind.process_bind_param(lsn, dialect) for lsn in (one, other)]
    assert texts[0] is not None
    assert texts[1] is not None
    assert (texts[0] < texts[1]) == (one < other)
    assert [kind.process_result_value(text, dialect) for text in texts] == [one, other]


@given(st.lists(lsns, min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_the_origin_is_the_greatest(steps: list[Lsn]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with await Catalog.open(Path(home) / "catalog.db") as catalog:
                new = NewSubscription("s", "", ("p",), SubscriptionOptions(), "t", None)
                sub = await catalog.create_subscription(new)
                for place, lsn in enumerate(steps, start=1):
                    greatest = max(steps[:place])
                    assert await catalog.advance_origin(sub.oid, lsn) == greatest
                    assert await catalog.origin(sub.oid) == greatest

    asyncio.run(run())
