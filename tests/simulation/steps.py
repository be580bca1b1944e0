"""The steps of a history: each method `do_…` is one kind.  A step for which there is no occasion does nothing."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta import schema_json
from pubsub.delta.files import data_files, file_rows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation, Request
from pubsub.delta.table import TargetTable, read_schema
from pubsub.delta.writers import arrow_writer
from pubsub.protocol.lsn import Lsn
from tests.simulation.history import Step
from tests.simulation.lake import ROOT
from tests.simulation.oracle import FOREIGN_KEY
from tests.simulation.publisher import FIRST_LSN, Slot, Transaction
from tests.simulation.world import PUBLICATION, SUBSCRIPTION, World

Statements = Sequence[tuple[str, int, int]]
"""What is done, to which table, and a number that decides what is left open."""


class Steps:
    """Takes the steps of a history in its world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tell = world.tell
        self._gids = self._foreign_rows = 0

    async def take(self, step: Step) -> None:
        """Take one step."""
        done = getattr(self, f"do_{step.what}")(*step.args)
        if asyncio.iscoroutine(done):
            await done

    # The publisher's load

    def _table(self, which: int) -> int:
        return self._world.tables[which % len(self._world.tables)]

    def _perform(self, transaction: Transaction, statements: Statements) -> None:
        for what, which, pick in statements:
            oid = self._table(which)
            match what:
                case "insert":
                    transaction.insert(oid, pick)
                case "update":
                    transaction.update(oid, pick)
                case "move":
                    transaction.update(oid, pick, move=True)
                case "delete":
                    transaction.delete(oid, pick)
                case "truncate":
                    transaction.truncate([oid] if pick % 2 else self._world.tables)

    def do_write(self, statements: Statements) -> None:
        """Commit a transaction."""
        transaction = self._world.server.begin()
        self._perform(transaction, statements)
        self._world.finish(transaction, commits=True)

    def do_idle(self) -> None:
        """Write WAL that concerns nobody."""
        self._world.server.append("other")

    def do_open(self, statements: Statements) -> None:
        """Begin a transaction that stays open."""
        self._perform(self._world.server.begin(), statements)

    def _opened(self, pick: int, *, prepared: bool = False) -> Transaction | None:
        found = [one for one in self._world.server.running() if (one.gid is not None) == prepared]
        return found[pick % len(found)] if found else None

    def do_more(self, pick: int, statements: Statements, savepoint: str) -> None:
        """Go on with an open transaction, in a subtransaction, or one that is rolled back."""
        transaction = self._opened(pick)
        if transaction is None:
            return
        if savepoint == "savepoint":
            transaction.savepoint()
        self._perform(transaction, statements)
        if savepoint == "rollback":
            transaction.rollback_to_savepoint()

    def do_finish(self, pick: int, commits: bool) -> None:
        """End an open transaction."""
        transaction = self._opened(pick)
        if transaction is not None:
            self._world.finish(transaction, commits=commits)

    def do_prepare(self, pick: int) -> None:
        """PREPARE TRANSACTION, of an open one or a new one."""
        transaction = self._opened(pick)
        if transaction is None:
            transaction = self._world.server.begin()
            self._perform(transaction, [("insert", pick, pick), ("update", pick + 1, pick)])
        if transaction.altered:
            self._world.finish(transaction, commits=True)
            return
        self._gids += 1
        transaction.prepare_as(f"g{self._gids}")
        self._tell(f"the publisher prepares transaction {transaction.xid} as {transaction.gid}")

    def do_outcome(self, pick: int, commits: bool) -> None:
        """COMMIT or ROLLBACK PREPARED."""
        transaction = self._opened(pick, prepared=True)
        if transaction is not None:
            self._world.finish(transaction, commits=commits)

    def do_alter(self, pick: int, what: str) -> None:
        """ALTER TABLE."""
        transaction = self._world.server.begin()
        transaction.alter(self._table(pick), what, pick)
        self._world.finish(transaction, commits=True)

    def do_mixed(self, pick: int, what: str, before: Statements, after: Statements) -> None:
        """Change rows, alter the table, and change rows again, in one transaction."""
        transaction = self._world.server.begin()
        self._perform(transaction, before)
        transaction.alter(self._table(pick), what, pick)
        self._perform(transaction, after)
        self._world.finish(transaction, commits=True)

    def do_forget(self, pick: int) -> None:
        """Make walsenders announce a table again, as VACUUM FULL or a GRANT does."""
        transaction = self._world.server.begin()
        transaction.touch(self._table(pick))
        self._world.finish(transaction, commits=True)

    def do_poison(self, pick: int) -> None:
        """Commit a transaction with a row that no Delta table holds."""
        transaction = self._world.server.begin()
        if not self._world.setting.dates or not transaction.insert(self._table(pick), pick, poison=True):
            transaction.abort()
            return
        self._perform(transaction, [("insert", pick + 1, pick)])
        self._world.excuses.add("poison")
        tables = set(transaction.drafts)
        self._world.finish(transaction, commits=True)
        assert transaction.outcome is not None
        self._world.poisoned.append((transaction.outcome.start, tables))

    # Connections, slots, servers

    def do_cut(self) -> None:
        """Break all connections to the publisher."""
        self._tell("all connections to the publisher are cut")
        self._world.server.cut()

    async def do_down(self, seconds: float) -> None:
        """Let the publisher be away."""
        server = self._world.server
        self._tell(f"the publisher is down for {seconds} s")
        server.down = True
        server.cut()
        await asyncio.sleep(seconds)
        server.down = False
        server.stir()

    async def do_failover(self, lost: int) -> None:
        """Let the standby take over, which may lack some WAL and some of what slots have confirmed."""
        old = self._world.server
        wal = [record.end for record in old.wal if record.end <= old.end - 10 * lost]
        at = max(wal, default=FIRST_LSN)
        self._tell(f"the publisher fails; its standby takes over at {at}, which lacks {(old.end - at) // 10} records")
        self._world.excuses.add("failover")
        old.down = True
        old.cut()
        self._world.server = old.promote(at)
        self._world.lineage.append(self._world.server)
        await asyncio.sleep(self._world.chance.random.choice([0.0, 5.0]))

    def _slot(self, *, sync: bool) -> Slot | None:
        return next((slot for name, slot in self._world.server.slots.items() if (name != SUBSCRIPTION) == sync), None)

    def _invalidate(self, slot: Slot) -> None:
        self._tell(f"slot {slot.name} is invalidated")
        slot.lost = True
        self._break(slot)

    def _break(self, slot: Slot) -> None:
        if slot.user is not None:
            slot.user.cut = True
            slot.user = None
        self._world.server.stir()

    def _drop(self, slot: Slot) -> None:
        self._tell(f"slot {slot.name} is dropped by somebody")
        del self._world.server.slots[slot.name]

    def do_lose_slot(self) -> None:
        """Lose the subscription's slot."""
        slot = self._slot(sync=False)
        if slot is not None:
            self._world.excuses.add("slot")
            if self._world.chance.random.random() < 0.5:
                self._invalidate(slot)
            elif slot.user is None:
                self._drop(slot)

    def do_lose_sync_slot(self, pick: int) -> None:
        """Lose a sync worker's slot."""
        slot = self._slot(sync=True)
        if slot is not None and slot.user is None:
            self._drop(slot)
        elif slot is not None:
            self._invalidate(slot)

    def do_rewind_slot(self, pick: int) -> None:
        """Let a slot be as it was some time ago, as after a restart of its server."""
        slot = self._slot(sync=pick % 3 == 0)
        if slot is not None:
            self._break(slot)
            slot.confirmed = max(Lsn(slot.confirmed - 10 * (pick % 5)), slot.created)
            self._tell(f"slot {slot.name} goes back to {slot.confirmed}")

    def do_advance_slot(self) -> None:
        """Let somebody advance the subscription's slot."""
        slot = self._slot(sync=False)
        if slot is not None and slot.user is None:
            self._world.excuses.add("slot")
            slot.confirmed = self._world.server.end
            self._tell(f"slot {slot.name} is advanced to {slot.confirmed} by somebody")

    async def do_kill(self, rounds: int) -> None:
        """Kill the daemon, some rounds of the loop from now."""
        daemon = self._world.supervisor.living
        if daemon is not None:
            for _ in range(rounds):
                await asyncio.sleep(0)
            await daemon.kill()

    def do_dies(self, writes: int) -> None:
        """Let the daemon die in one of its next durable writes."""
        daemon = self._world.supervisor.living
        if daemon is not None and daemon.dies_in is None:
            daemon.dies_in = writes

    def do_stop(self) -> None:
        """Stop the daemon in order."""
        daemon = self._world.supervisor.living
        if daemon is not None and daemon.launcher is not None:
            self._tell(f"{daemon.name} is stopped")
            daemon.launcher.stop()

    async def do_freeze(self, seconds: float) -> None:
        """Hold the daemon; the catalog's server takes it for dead, and that of another home starts.  Later it wakes up.

        Prepared transactions are in a home's files, so there must be none.
        """
        world, daemon = self._world, self._world.supervisor.living
        if not world.setting.catalog_on_server or daemon is None or "two_phase" in world.options:
            return
        world.another_home()
        self._tell(f"{daemon.name} is held, and another takes its place")
        daemon.frozen = asyncio.Event()
        world.store.holder = None
        world.server.cut()
        world.supervisor.abandon()
        await asyncio.sleep(seconds)
        self._tell(f"{daemon.name} goes on")
        daemon.thaw()
        await asyncio.sleep(20.0)
        for _ in range(50):
            holder = world.store.holder_of()
            if holder in (None, daemon) or not daemon.alive or daemon.main.done():
                break
            # Each of its looks at the catalog, some seconds apart, may have met trouble: it does not know yet.
            await asyncio.sleep(2.0)
        else:
            world.oracle.require(False, f"{daemon.name} does not end, though {holder.name} has its catalog")
        await daemon.kill("it is of no use any more")

    def do_fate(self, fate: str, count: int) -> None:
        """Decide what becomes of the next commits."""
        self._tell(f"the next {count} commits are: {fate}")
        self._world.lake.fates += [fate] * count

    def _ready_path(self, pick: int) -> str | None:
        paths = [path for _, _, path, state, *_ in self._world.relations() if state == "r"]
        return paths[pick % len(paths)] if paths else None

    def _read_log(self, pick: int) -> TableLog | None:
        path = self._ready_path(pick)
        if path is None or self._world.lake.version(path) < 1:
            return None
        log = TableLog(path)
        log.refresh()
        return log

    def do_foreign(self, pick: int) -> None:
        """Let another writer append a row."""
        log = self._read_log(pick)
        if log is not None:
            self._append(log)

    def _append(self, log: TableLog) -> None:
        table = _as_it_is(log)
        if "id" not in table.schema.names:
            return
        self._foreign_rows += 1
        key = FOREIGN_KEY + self._foreign_rows
        row = {field.name: [key if field.name == "id" else None] for field in table.schema}
        self._tell(f"another writer appends a row to {table.path.rpartition('/')[2]}")
        self._commit(log, data_files.write(table, [pa.table(row, table.schema)]), Operation.WRITE)

    def _commit(self, log: TableLog, actions: list[dict[str, Any]], operation: Operation) -> None:
        request = Request(str(log.table), log.version, log.metadata["id"], actions, operation)
        self._world.lake.commit(request, "another engine")

    def do_interloper(self, pick: int) -> None:
        """Let another writer commit just before our next commit."""
        path = self._ready_path(pick)
        if path is None:
            return

        def append() -> None:
            log = TableLog(path)
            log.refresh()
            contextvars.Context().run(self._append, log)

        self._world.lake.interlopers[path] = append

    def do_optimize(self, pick: int) -> None:
        """Let another writer rewrite a file, without a change of rows."""
        log = self._read_log(pick)
        if log is None or not log.files:
            return
        table = _as_it_is(log)
        file = list(log.files.values())[pick % len(log.files)]
        rows = [part for part in file_rows.live_rows(log, [file], table) if part.num_rows]
        added = data_files.write(table, [pa.concat_tables(rows)]) if rows else []
        for action in added:
            action["add"]["dataChange"] = False
        self._tell(f"OPTIMIZE rewrites a file of {table.path.rpartition('/')[2]}")
        removed = arrow_writer.remove_action(file, 0, data_change=False)
        self._commit(log, [*added, removed], Operation.MERGE_FILES)

    def do_foreign_delete(self, pick: int) -> None:
        """Let another writer delete a row that was replicated."""
        log = self._read_log(pick)
        if log is None or not log.files or json.loads(log.properties.get("pubsub.key", "[]")) != ["id"]:
            return
        table = _as_it_is(log)
        file = list(log.files.values())[pick % len(log.files)]
        rows = pa.concat_tables(list(file_rows.live_rows(log, [file], table)))
        if not rows.num_rows:
            return
        gone = rows.column("id")[pick % rows.num_rows]
        left = rows.filter(pc.not_equal(rows.column("id"), gone))
        added = data_files.write(table, [left]) if left.num_rows else []
        self._tell(f"another writer deletes the row {gone} of {table.path.rpartition('/')[2]}")
        self._world.oracle.deletes(table.path, gone.as_py())
        self._commit(log, [*added, arrow_writer.remove_action(file, 0)], Operation.WRITE)

    async def do_disable(self, pick: int) -> None:
        """DISABLE, and some time later ENABLE."""
        await self._world.alter("DISABLE")
        await asyncio.sleep((pick % 3) * 3.0)
        if pick % 4 == 0:
            self.do_write([("insert", pick, pick)])
        await self._world.alter("ENABLE")

    def _resync(self, pick: int) -> str | None:
        names = [name for _, name, *_ in self._world.relations()]
        if not names:
            return None
        return f"RESYNC TABLE {', '.join(names) if pick % 5 == 0 else names[pick % len(names)]}"

    async def do_resync(self, pick: int) -> None:
        """Copy a table again, or all."""
        action = self._resync(pick)
        if action is not None:
            await self._world.alter(action)

    async def do_refresh(self) -> None:
        """REFRESH PUBLICATION."""
        await self._world.alter("REFRESH PUBLICATION")

    async def do_unpublish(self, pick: int) -> None:
        """Take a table out of the publication, and refresh."""
        world, oid = self._world, self._table(pick)
        published = world.server.publications[PUBLICATION]
        if oid in published and len(published) > 1:
            self._tell(f"table {world.server.now(oid).shape.name} leaves the publication")
            published.discard(oid)
            # What is written from now on is not sent; only another copy brings it.
            world.oracle.differs.update(world.paths_of({oid}))
            self.do_idle()
            await self.do_refresh()

    async def do_publish(self, pick: int) -> None:
        """Take a table into the publication again, and refresh."""
        world, oid = self._world, self._table(pick)
        if oid in world.server.publications[PUBLICATION]:
            return
        name = world.server.now(oid).shape.name
        if not world.paths_of({oid}):
            path = f"{ROOT}/d/public/{name}"
            self._tell(f"the Delta table of {name} is moved away")
            world.lake.remove(path)
            world.oracle.forget(path)
        self._tell(f"table {name} joins the publication")
        world.server.publications[PUBLICATION].add(oid)
        self.do_idle()
        await self.do_refresh()

    async def do_skip(self, pick: int) -> None:
        """Skip a transaction that never comes: the first one that comes clears it."""
        await self._world.alter(f"SKIP (lsn = '{Lsn(self._world.server.end + 5)}')")

    async def do_skip_failed(self, pick: int = 0) -> None:
        """Skip the transaction that a table fails at; its tables differ until they are copied again."""
        if self._world.poisoned and self._world.options.get("on_table_error") != "isolate":
            await self.skip(*self._world.poisoned[-1])

    async def skip(self, finish: Lsn, tables: set[int]) -> bool:
        """SKIP a transaction, whose tables are these; return whether that was done."""
        if await self._world.alter(f"SKIP (lsn = '{finish}')") is not None:
            return False
        self._world.oracle.differs.update(self._world.paths_of(tables))
        return True

    async def do_set(self, name: str, value: str) -> None:
        """Set an option."""
        await self._world.alter(f"SET ({name} = {value})")

    async def do_client_dies(self, writes: int, what: str, pick: int) -> None:
        """Let a client be killed in the middle of a command."""
        actions = {"resync": self._resync(pick), "refresh": "REFRESH PUBLICATION", "disable": "DISABLE"}
        action = actions[what]
        if action is not None:
            await self._world.alter(action, dies_in=writes)


def _as_it_is(log: TableLog) -> TargetTable:
    """Return the table as another engine sees it."""
    path = str(log.table)
    return TargetTable(path, read_schema(path), (), "x", schema_json.mapping(schema_json.fields(log.metadata)))
