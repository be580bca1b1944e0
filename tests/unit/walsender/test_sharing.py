"""What a pass takes over of another's transactions in progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from walsender.decode.sharing import Sharing
from walsender.decode.transactions import Transactions

HERE = 900


def sharing() -> tuple[Sharing, Transactions]:
    registry: Any = SimpleNamespace(take_over=lambda *_: None, retire=lambda *_: None)
    transactions = Transactions(lambda _: [], lambda *_: None)
    nothing: Any = None
    return Sharing(registry, transactions, nothing, lambda _: None, lambda: HERE), transactions


def test_what_is_known_of_a_transaction_comes_with_it() -> None:
    """The pass that was here did not look at what was done with the catalogs, since none of its streams needed that."""
    (here, own), (other, others) = sharing(), sharing()
    own.begin(5, 100)
    for xid in (5, 7):
        txn = others.begin(xid, 100)
        others.assign(xid, xid + 1, 200)
        txn.catalog_xids, txn.invalidations, txn.has_base = {xid + 1}, 3, True
    own.by_xid[5].invalidations = 4
    here.absorb(other)
    found = {txn.xid: (txn.xids, txn.catalog_xids, txn.invalidations, txn.has_base) for txn in own.all()}
    assert found == {5: ({5, 6}, {6}, 4, True), 7: ({7, 8}, {8}, 3, True)}
