"""An output plugin whose callbacks raise what no plugin should, at a table named `bad`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pubsub.errors import PubsubError
from walsender.historic.relation import RelationInfo, RelationResolver
from walsender.plugins.plugin import Plugin, PluginContext, RowChange, SentTransaction

_RAISED: Final[Mapping[str, type[BaseException]]] = {
    one.__name__: one for one in (KeyError, ValueError, SystemExit, KeyboardInterrupt)
}


class Failing(Plugin[bytes]):
    """Writes the names of tables that have changed.

    The option `where` names the callback that fails, `what` the exception; `size`: bytes of the message for `bad`.
    """

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.where = context.options.get("where", "")
        self.what = _RAISED[context.options.get("what", "KeyError")]
        self.size = int(context.options.get("size", "0"))
        self._is_bad = False
        if self.where == "wrong":
            raise PubsubError('"wrong" is wrong', sqlstate="22023")
        self._fail("made")

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise self.what(where)

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> bytes | None:
        if relation.name == "bad":
            self._fail("describe")
        return relation.name.encode()

    def skips_origin(self, origin_id: int) -> bool:
        self._fail("skips_origin")
        return False

    def begin(self, txn: SentTransaction) -> None:
        self._is_bad = False

    def change(self, txn: SentTransaction, relation: RelationInfo, entry: bytes, change: RowChange) -> None:
        if entry == b"bad":
            self._is_bad = True
            self._fail("change")
            if self.size:
                entry = entry.ljust(self.size)
        self.context.write(change.lsn, txn.xid, entry)

    def commit(self, txn: SentTransaction) -> None:
        if self._is_bad:
            self._fail("commit")
