"""Open what a power loss has left, as a daemon does when it starts, and compare it with what had been reported by then."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from apply import twophase
from apply.schema_changes.follow import load
from apply.twophase import PreparedStore
from apply.worker import prepared_directory
from catalog.records import State, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.delta import table as delta
from pubsub.delta.files import file_rows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import application_id
from pubsub.errors import NoCatalog
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.reorderbuffer.directories import SpillDirectory
from tests.power import disk
from tests.power.run import settings


class Lost(Exception):
    """Something that was reported has not survived."""


@dataclass(frozen=True)
class Prepared:
    """A prepared transaction.  The LSNs are at or past the ends of its PREPARE and of its outcome (None: it waits)."""

    gid: str
    prepared: Lsn
    ended: Lsn | None


@dataclass(frozen=True, slots=True)
class _Moment:
    """What the tables hold after a transaction that ends past `before`, by `lsn`; rows that stay are the same object."""

    before: Lsn
    lsn: Lsn
    rows: dict[str, list[dict[str, Any]]]


class Publisher:
    """What the publisher held at each LSN."""

    def __init__(self, path: Path) -> None:
        written = json.loads(path.read_text())
        self.moments: list[_Moment] = []
        for before, lsn, rows in written["moments"]:
            last = self.moments[-1].rows if self.moments else {}
            held = {name: last[name] if last.get(name) == now else now for name, now in rows.items()}
            self.moments.append(_Moment(Lsn.parse(before), Lsn.parse(lsn), held))
        self.prepared = [
            Prepared(one["gid"], Lsn.parse(one["prepared"]), None if one["ended"] is None else Lsn.parse(one["ended"]))
            for one in written["prepared"]
        ]

    def rows(self, table: str, end: Lsn) -> list[dict[str, Any]]:
        """Return a table's rows after the transaction that ends at `end`, or the last one before."""
        return next((one.rows for one in reversed(self.moments) if one.before < end), self.moments[0].rows)[table]

    def changed_between(self, table: str, held: Lsn, origin: Lsn) -> bool:
        """Return whether a transaction that ended after `held`, by `origin`, has changed the table."""
        then = self.rows(table, held)
        return any(one.rows[table] is not then for one in self.moments if held <= one.before and one.lsn <= origin)


@dataclass(frozen=True)
class Reported:
    """What had been reported when the power failed: the greatest flushed LSN, and marks."""

    flushed: Lsn = INVALID_LSN
    marks: frozenset[str] = frozenset()

    def with_mark(self, name: str) -> Self:
        return type(self)(self.flushed, self.marks | {name})

    def with_flushed(self, lsn: Lsn) -> Self:
        return type(self)(max(self.flushed, lsn), self.marks)


def rebuild(state: disk.State, source: Path, target: Path) -> None:
    """Make the files of a state, which were below `source`, below `target`."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for path, content in state.items():
        if path == str(source) or not path.startswith(f"{source}/"):
            continue
        here = target / path[len(str(source)) + 1 :]
        if content is None:
            here.mkdir(parents=True, exist_ok=True)
        else:
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(content)
    # As the run's umask and modes had them: SQLite and the locks open files for writing.
    os.chmod(target, 0o700)


def check(home: Path, original: Path, publisher: Publisher, reported: Reported, *, thorough: bool) -> str:
    """Open the home, whose tables lay below `original`; return how far it had come.  Raises Lost, and what opening raises.

    `thorough`: other readers read the tables, too.
    """
    state = asyncio.run(_opened(home))
    if state is None or not state.subscriptions:
        if "created" in reported.marks:
            raise Lost("the subscription was created, and is gone")
        return "nothing"
    (subscription,) = state.subscriptions
    origin = next(o.remote_lsn for o in state.origins if o.relid is None)
    if origin < reported.flushed:
        raise Lost(f"{reported.flushed} was reported as flushed, and the origin is {origin}")
    SpillDirectory.at(home / "spill").release()
    states = []
    for relation in state.relations:
        states.append(relation.state.value)
        path = str(home / Path(relation.path).relative_to(original))
        asyncio.run(_check_table(state, relation, path, origin, publisher, thorough=thorough))
    _check_prepared(PreparedStore(prepared_directory(settings(home), subscription.oid)), origin, publisher)
    if "copied" in reported.marks and not set(states) <= {"s", "r", "i", "d", "f"}:
        raise Lost(f"the tables were copied, and are in states {states}")
    return "".join(sorted(states))


async def _opened(home: Path) -> State | None:
    try:
        async with await Catalog.open(home / "catalog.db", make=False) as catalog:
            return await catalog.state()
    except NoCatalog:
        return None


async def _check_table(
    state: State, relation: SubscriptionRel, path: str, origin: Lsn, publisher: Publisher, *, thorough: bool
) -> None:
    app_id = application_id(state.node.node_id, relation.subid, relation.relid, relation.copy_generation)
    if relation.state not in (RelState.FINISHEDCOPY, RelState.SYNCDONE, RelState.READY):
        return
    name = relation.name
    held = delta.committed_lsn(path, app_id)
    if held is None:
        raise Lost(f"{name} is in state {relation.state.value}, and its copy is gone")
    if relation.lsn is not None and held < relation.lsn and publisher.changed_between(name, held, relation.lsn):
        raise Lost(f"{name} is in state {relation.state.value} at {relation.lsn}, and holds what is up to {held}")
    if relation.state is not RelState.FINISHEDCOPY and publisher.changed_between(name, held, origin):
        raise Lost(f"the origin is {origin}, and {name} holds what is up to {held}")
    columns = await load(relation.relid, app_id, path, relation.qualified_name, relation.definition)
    log = TableLog(path)
    log.refresh()
    have = Counter[str]()
    for part in file_rows.live_rows(log, list(log.files.values()), file_rows.laid_out(log, columns.target)):
        have += _counted(part.to_pylist())
    expected = publisher.rows(name, held)
    added = {one.name: one.missing for one in columns.attributes.columns} if columns.attributes is not None else {}
    if have != _counted(_as_in(expected, {name: added.get(name) for name in columns.target.schema.names})):
        raise Lost(f"{name} at {held} has {sum(have.values())} rows, not the publisher's {len(expected)}")
    if thorough:
        table = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT * FROM t").read_all()
        if _counted(pa.table(table).to_pylist()) != have:
            raise Lost(f"deltalake reads other rows of {name}")


def _as_in(rows: list[dict[str, Any]], columns: dict[str, str | None]) -> list[dict[str, Any]]:
    """Return the rows with these columns, and what rows have in those that they lack.

    The table is altered before the first row that needs it.
    """
    return [{name: row.get(name, missing) for name, missing in columns.items()} for row in rows]


def _counted(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(row, sort_keys=True) for row in rows)


def _check_prepared(store: PreparedStore, origin: Lsn, publisher: Publisher) -> None:
    """Require each prepared transaction that the origin has passed, and whose outcome it has not."""
    store.recover(origin)
    waiting = {one.gid: one for one in store.waiting()}
    # Their outcome is in every table; it is found here when it is sent again.
    done = {twophase._read(path).gid for path in store._directory.glob(f"*{twophase._DONE}")}
    for one in publisher.prepared:
        if one.prepared <= origin and (one.ended is None or one.ended > origin):
            continue_at = waiting.get(one.gid)
            if continue_at is None:
                # One that was rolled back is removed before the origin passes that: nothing of it is wanted again.
                if one.gid in {*done, "rolled back"} or _may_have_ended(one, origin, publisher):
                    continue
                raise Lost(f'the origin is {origin}, and prepared transaction "{one.gid}" is gone')
            kept = store.load(continue_at.xid, one.gid)
            assert kept is not None
            sum(block.count for chunk in kept.transaction.chunks(1 << 20) for block in chunk.blocks)
        elif one.ended is not None and one.ended <= origin and one.gid in waiting:
            raise Lost(f'prepared transaction "{one.gid}" has ended before {origin}, and waits for ever')


def _may_have_ended(one: Prepared, origin: Lsn, publisher: Publisher) -> bool:
    """Return whether the outcome may end before the origin: what is known of it is only an LSN at or past its end."""
    before = max(
        (at.lsn for at in publisher.moments if one.ended is not None and at.lsn < one.ended), default=INVALID_LSN
    )
    return one.ended is not None and origin > before
