"""Let the daemon copy rows anew that differ (launcher.repairs), some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import pyarrow as pa

from catalog.records import Subscription
from pubsub.concurrency import in_thread
from pubsub.digest import sent_keys
from pubsub.digest.forms import RowForm
from pubsub.errors import NotInPrerequisiteState
from pubsub.node.verify.report import TableReport

#: How long the daemon may take to find a point, in seconds: it waits for transactions on the publisher.
POINT_SECONDS: Final = 3600.0


class Ask(Protocol):
    """Asks the daemon (client_session.Session.ask_daemon)."""

    async def __call__(
        self, kind: str, subid: int | None = None, payload: dict[str, Any] | None = None, *, timeout: float
    ) -> dict[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class Broken:
    """A table that differs.  `name`: as in SQL; `keys`: Found.keys, whose hashes are of `form`."""

    relid: int
    relation: str
    name: str
    form: RowForm
    keys: Sequence[pa.RecordBatch]

    def parts(self) -> Iterator[pa.Table]:
        """Yield the distinct keys, some at a time: the apply worker waits while their rows are read and written."""
        names = self.keys[0].schema.names
        return sent_keys.parts(pa.Table.from_batches(self.keys).group_by(names).aggregate([]).select(names))


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was done: rows that were copied anew, or why nothing was, by table."""

    copied: Mapping[str, int]
    refused: Mapping[str, str]

    def noted(self, report: TableReport) -> TableReport:
        """Return a table's report with what was done."""
        reason = self.refused.get(report.relation)
        if reason is not None:
            report = replace(report, reason=f"it was not repaired: {reason}")
        return replace(report, repaired=report.repaired + self.copied.get(report.relation, 0))


class Repair:
    """Repairs tables of a subscription; `tell` is called with the name of each."""

    def __init__(self, subscription: Subscription, ask: Ask, tell: Callable[[str], None]) -> None:
        self._subscription = subscription
        self._ask = ask
        self._tell = tell

    async def run(self, tables: Sequence[Broken]) -> Repaired:
        """Copy the rows anew.  Raises what the daemon answers, and NotInPrerequisiteState if it does not run."""
        copied, refused = dict[str, int](), dict[str, str]()
        for table in tables:
            for keys in table.parts():
                self._tell(table.relation)
                done = await self._repair(table, await in_thread(partial(sent_keys.write, keys)))
                if done["reason"] is not None:
                    refused[table.relation] = str(done["reason"])
                    break
                rows = max(int(done["inserted"]), int(done["removed"]))
                copied[table.relation] = copied.get(table.relation, 0) + rows
        return Repaired(copied, refused)

    async def _repair(self, table: Broken, keys: str) -> dict[str, Any]:
        wanted = {"relid": table.relid, "keys": keys, "seed": str(table.form.seed), "null": table.form.null}
        found = await self._ask("repair", self._subscription.oid, {"tables": [wanted]}, timeout=POINT_SECONDS)
        if found is None:
            raise NotInPrerequisiteState("no daemon runs on the node any more", hint="Start one: pubsub daemon.")
        done: dict[str, Any] = found["tables"].get(str(table.relid), {"reason": "the table has left the subscription"})
        return done
