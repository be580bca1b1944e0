"""Which transactions in progress no longer count towards the memory limit when none may be streamed."""

from __future__ import annotations

import random

from walsender.decode.accounting import MemoryAccounting
from walsender.decode.transactions import Part, Txn


def test_the_largest_is_written_to_disk() -> None:
    """Each change once searched all subtransactions, of which there can be many: that took hours."""
    r = random.Random(1)
    limit = 20_000
    memory = MemoryAccounting(
        limit, needs_streamable=True, may_stream=lambda: False, goes_on=lambda _: True, stream=lambda _: None
    )
    transactions = [Part(None, Txn(number * 1000, number)) for number in range(1, 4)]
    sizes: dict[int, int] = {}
    for step in range(3000):
        part = r.choice(transactions)
        xid = part.txn.xid + r.randrange(300)
        if step % 50 == 49:
            memory.abort(part, xid)
            sizes.pop(xid, None)
        size = r.randrange(1, 2000)
        sizes[xid] = sizes.get(xid, 0) + size
        memory.queue(part, xid, step + 1, size)
        while sum(sizes.values()) >= limit:
            sizes[max(sizes, key=lambda one: sizes[one])] = 0
        assert memory._size == sum(sizes.values())
    memory.forget(transactions[0])
    for xid in [xid for xid in sizes if xid // 1000 == 1]:
        del sizes[xid]
    assert memory._size == sum(sizes.values())
    many = MemoryAccounting(
        1000, needs_streamable=True, may_stream=lambda: False, goes_on=lambda _: True, stream=lambda _: None
    )
    looked_at = 0

    class Counted(dict[int, int]):
        def items(self):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += len(self)
            return super().items()

    account = many.account(transactions[1])
    account.sizes = Counted()
    for number in range(20_000):
        many.queue(transactions[1], number, number + 1, 100)
    assert looked_at < 200_000
