"""Let the daemon copy rows anew that differ (launcher.repairs), some at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from catalog.records import Subscription
from pubsub.concurrency import in_thread
from pubsub.digest.forms import RowForm
from pubsub.errors import NotInPrerequisiteState
from pubsub.node.verify.report import TableReport

#: How long the daemon may take to find a point, in seconds: it waits for transactions on the publisher.
POINT_SECONDS: Final = 3600.0
#: How many keys the daemon gets at a time; the apply worker waits while it reads and writes their rows.
_KEYS: Final = 100_000


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
        """Yield the distinct keys, some at a time."""
        names = self.keys[0].schema.names
        distinct = pa.Table.from_batches(self.keys).group_by(names).aggregate([]).select(names)
        for first in range(0, distinct.num_rows, _KEYS):
            yield distinct.slice(first, _KEYS)


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

    def __init__(self, subscription: Subscription, home: Path, ask: Ask, tell: Callable[[str], None]) -> None:
        self._subscription = subscription
        self._home = home
        self._ask = ask
        self._tell = tell

    async def run(self, tables: Sequence[Broken]) -> Repaired:
        """Copy the rows anew.  Raises what the daemon answers, and NotInPrerequisiteState if it does not run."""
        copied, refused = dict[str, int](), dict[str, str]()
        with tempfile.TemporaryDirectory(prefix="verify-", dir=self._home) as directory:
            file = Path(directory) / "keys.arrow"
            for table in tables:
                for keys in table.parts():
                    self._tell(table.relation)
                    await in_thread(partial(_write, file, keys))
                    done = await self._repair(table, file)
                    if done["reason"] is not None:
                        refused[table.relation] = str(done["reason"])
                        break
                    rows = max(int(done["inserted"]), int(done["removed"]))
                    copied[table.relation] = copied.get(table.relation, 0) + rows
        return Repaired(copied, refused)

    async def _repair(self, table: Broken, file: Path) -> dict[str, Any]:
        wanted = {"relid": table.relid, "file": str(file), "seed": str(table.form.seed), "null": table.form.null}
        found = await self._ask("repair", self._subscription.oid, {"tables": [wanted]}, timeout=POINT_SECONDS)
        if found is None:
            raise NotInPrerequisiteState("no daemon runs on the node any more", hint="Start one: pubsub daemon.")
        done: dict[str, Any] = found["tables"].get(str(table.relid), {"reason": "the table has left the subscription"})
        return done


def _write(path: Path, keys: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, keys.schema) as writer:
        writer.write_table(keys)
