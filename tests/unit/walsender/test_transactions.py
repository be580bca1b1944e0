"""Transactions in progress are found by each of their ids, and are gone through once each."""

from __future__ import annotations

from walsender.decode.transactions import Transactions


def made() -> Transactions:
    return Transactions(lambda _: [], lambda *_: None)


def test_each_once_however_many_subtransactions() -> None:
    transactions = made()
    large = transactions.begin(10, 200)
    for xid in range(11, 1000):
        transactions.assign(10, xid, 300)
    small = transactions.begin(2000, 100)
    assert transactions.all() == [small, large]
    assert list(transactions._open) == [large, small], "nothing has to be gone through for that"
    assert transactions.oldest_lsn() == 100
    transactions.forget(small)
    assert transactions.all() == [large]
    assert transactions.forget_one(11) is large
    assert transactions.all() == [large]
    transactions.forget(large)
    assert transactions.all() == []
    assert transactions.by_xid == {}
    assert transactions.oldest_lsn() == 0


def test_what_proves_to_be_a_subtransaction_is_no_more_by_itself() -> None:
    transactions = made()
    child = transactions.begin(11, 50)
    parent = transactions.assign(10, 11, 60)
    assert transactions.all() == [parent]
    assert parent.first_lsn == 50
    assert child not in transactions._open
    # Its parent was never heard of, and has rolled it back.
    alone = transactions.begin(20, 70)
    assert transactions.forget_one(20) is alone
    assert transactions.all() == [parent]
    assert transactions.forget_one(21) is None
