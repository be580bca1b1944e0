"""Everything that outlives a process: the publisher, the lake, the catalog's database, a directory on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from catalog.records import State
from launcher import subscriptioncmds
from launcher.client_session import Session as ClientSession
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.setting_tables import HousekeepingSettings
from pubsub.settings import Settings
from pubsub.sql.parser import parse_one
from tests.simulation import catalog
from tests.simulation.chance import Chance
from tests.simulation.daemon import Supervisor
from tests.simulation.history import History
from tests.simulation.lake import ROOT, Lake
from tests.simulation.life import Life
from tests.simulation.oracle import Oracle
from tests.simulation.publisher import Server, Transaction

SUBSCRIPTION: Final = "s"
PUBLICATION: Final = "p"
#: How long a command may wait for running transactions before they end, in virtual seconds.
_PATIENCE: Final = 120.0
#: Of a log entry, what the story tells.
_TOLD: Final = ("relation", "lsn", "until", "reason", "detail", "columns", "chunks", "statement")
#: What no failure of the world raises.
_DEFECTS: Final = ("AssertionError", "AttributeError", "TypeError", "KeyError", "IndexError", "NameError", "ValueError")


class World:
    """What a history happens to.

    `lineage`: the servers that have been the publisher, the present one last.  `excuses`: what has happened after which
    tables may have to be copied again.  `poisoned`: transactions with a row that no Delta table holds, each by its finish
    LSN, with its tables.  `failed_at`: when a worker failed last.
    """

    supervisor: Supervisor

    def __init__(self, history: History, home: Path) -> None:
        setting = history.setting
        bounds = dict(setting.bounds)
        self.setting = setting
        self.options = dict(setting.options)
        self.chance = Chance(history.noise, calm=history.calm)
        self._home = str(home)
        self.lake = Lake(self.chance)
        self.store = catalog.Store(server=setting.catalog_on_server)
        self.oracle = Oracle(self)
        self.lake.on_commit = self.oracle.committed
        self.server = Server(self.chance)
        self.lineage = [self.server]
        self.settings = Settings(
            home=home,
            warehouse=ROOT,
            housekeeping=HousekeepingSettings(enabled=False),
            **dict(setting.settings),
            **({"logical_decoding_work_mem": bounds["memory"]} if "memory" in bounds else {}),
        )
        self.tables: list[int] = []
        self.excuses: set[str] = set()
        self.poisoned: list[tuple[Lsn, set[int]]] = []
        self.failed_at = 0.0
        self._clients = 0

    def tell(self, what: str) -> None:
        """Write a line of the story."""
        self.chance.tell(what.replace(self._home, "HOME"))

    def another_home(self) -> None:
        """Let the next daemon be another home's, with the same catalog."""
        self.settings = self.settings.model_copy(update={"home": self.settings.home / "another"})
        self.settings.home.mkdir()

    def begin(self) -> None:
        """Make the publisher's tables with their first rows, and start the daemon."""
        for name, kind, large in self.setting.tables:
            self.tables.append(self.server.create_table(name, kind, large=large, dates=self.setting.dates))
        self.server.publications[PUBLICATION] = set(self.tables)
        for oid in self.tables:
            transaction = self.server.begin()
            for pick in range(self.setting.first_rows):
                transaction.insert(oid, pick * 7)
            transaction.commit()
        self.supervisor = Supervisor(self)

    async def create_subscription(self) -> None:
        options = ", ".join(f"{name} = {value}" for name, value in self.setting.options)
        await self.command(
            f"CREATE SUBSCRIPTION {SUBSCRIPTION} CONNECTION 'dbname=d' PUBLICATION {PUBLICATION}"
            + (f" WITH ({options})" if options else "")
        )

    async def command(self, text: str, *, dies_in: int | None = None) -> PubsubError | None:
        """Let a client carry out a command; return its error."""
        self._clients += 1
        client = Life(f"client {self._clients}", self.chance)
        client.dies_in = dies_in
        self.tell(f"{client.name}: {text}")

        async def run() -> None:
            session = ClientSession(self.settings, self.store.opened(client), lambda _: None)
            statement: Any = parse_one(text)
            await subscriptioncmds.execute(session, statement)

        main = client.begin(run())
        while not (await asyncio.wait({main}, timeout=_PATIENCE))[0]:
            # A slot is made when the running transactions have ended, which the history's next steps cannot do meanwhile.
            self.end_transactions()
        dead = not client.alive
        error = None if main.cancelled() else main.exception()
        client.alive = False
        await client.end()
        if dead:
            return None
        if isinstance(error, PubsubError):
            self.tell(f"{client.name}: ERROR: {error.message}")
            return error
        self.oracle.require(error is None, f"a command ends with {error!r}: {text}")
        return None

    async def alter(self, action: str, *, dies_in: int | None = None) -> PubsubError | None:
        """Let a client carry out ALTER SUBSCRIPTION; return its error."""
        return await self.command(f"ALTER SUBSCRIPTION {SUBSCRIPTION} {action}", dies_in=dies_in)

    def finish(self, transaction: Transaction, *, commits: bool) -> None:
        """End a transaction of the publisher."""
        if commits:
            names = ", ".join(self.server.now(oid).shape.name for oid in transaction.drafts)
            end = transaction.commit()
            self.tell(f"the publisher commits transaction {transaction.xid} at {end}: {names or 'nothing'}")
        else:
            transaction.abort()
            self.tell(f"the publisher rolls transaction {transaction.xid} back")

    def end_transactions(self) -> None:
        """End the publisher's running transactions, prepared ones among them, some by rolling them back."""
        for transaction in self.server.running():
            self.finish(transaction, commits=self.chance.random.random() < 0.5)

    async def run_orphans(self) -> None:
        """Let the JVMs of dead daemons make their last commits, some time later, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            if self.lake.pending and self.chance.random.random() < 0.2:
                self.lake.pending.pop(0)()

    def note_log(self, _logger: Any, level: str, entry: Any) -> Any:
        """Put what a process logs into the story; an error that is no failure of the world is a violation."""
        life = Life.current()
        if life is not None and life.alive and level != "debug":
            fields = ", ".join(f"{k} {v}" for k, v in entry.items() if k in _TOLD and v is not None)
            self.tell(f"    {life.name} logs: {entry['event']}" + (f" ({fields})" if fields else ""))
            if entry["event"] == "worker failed":
                self.failed_at = asyncio.get_running_loop().time()
            lines = str(entry.get("exception", "")).splitlines()
            if any(line.partition(":")[0] in _DEFECTS for line in lines):
                self.oracle.require(False, "\n".join(["a worker fails by a defect:", *lines]))
        raise structlog.DropEvent

    # What is in the catalog

    async def state(self) -> State:
        """Return what is in the catalog."""
        return await self.store.opened(None).state()

    def relations(self) -> list[tuple[int, str, str, str, str | None, bool]]:
        """Return each table's oid, quoted name, path, state, slot, and whether it has stopped."""
        rows = self.store.rows(
            "SELECT r.relid, r.schema_name, r.name, r.path, r.state, r.sync_slot, i.stopped FROM pubsub_subscription_rel r "
            "LEFT JOIN pubsub_table_incident i ON i.subid = r.subid AND i.relid = r.relid ORDER BY r.relid"
        )
        return [
            (relid, f'{schema}."{name}"', path, state, slot, bool(stopped))
            for relid, schema, name, path, state, slot, stopped in rows
        ]

    def paths_of(self, oids: set[int]) -> list[str]:
        """Return the paths of those of these tables that are in the subscription."""
        return [path for relid, _, path, *_ in self.relations() if relid in oids]

    def failure(self) -> tuple[str | None, str | None]:
        """Return the subscription's error, with its hint."""
        error, hint = self.store.rows("SELECT error, error_hint FROM pubsub_subscription_stats")[0]
        return error, hint

    def enabled(self) -> bool:
        """Return whether the subscription is enabled."""
        return self.store.rows("SELECT enabled FROM pubsub_subscription") == [(1,)]

    def unrest(self) -> Iterator[str]:
        """Yield what is not at rest yet."""
        if not self.enabled():
            yield "the subscription is not enabled"
        if self.store.rows("SELECT paused FROM pubsub_subscription") != [(None,)]:
            yield "the subscription is paused"
        slot = self.server.slots.get(SUBSCRIPTION)
        if slot is None or slot.user is None:
            # Its origin may be an LSN of a server that is no more.
            yield "the publisher is not followed"
        published = self.server.publications[PUBLICATION]
        relations = self.relations()
        if {relid for relid, *_ in relations} != published:
            yield "other tables are published"
        for _, name, path, state, slot, stopped in relations:
            if stopped:
                yield f"{name} has stopped"
            elif state != "r" or slot is not None or path in self.oracle.differs:
                yield f"{name} is in state {state}, slot {slot}"
        last = max((s[-1].since for oid, s in self.server.states.items() if oid in published), default=Lsn(0))
        origin = self.oracle.stored_origin()
        if origin < last:
            yield f"the origin is {origin}, the last commit {last}"
        if self.lake.pending:
            yield "a JVM is still committing"
