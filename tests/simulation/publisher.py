"""A model of PostgreSQL as a publisher: tables, transactions, WAL, slots, snapshots, timelines.

A transaction changes what it sees under locks: a row that another one has changed is left to it.  Each change is a WAL record, so
transactions interleave.  Every state of a table is kept: the oracle asks for any of them, snapshots and copies for theirs.

A table has rows in places (ctids); an UPDATE may move a row to another one.  A value of the column `big` is kept out of line: an
UPDATE that leaves it as it is does not write it again.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Column, Relation
from tests.simulation.chance import Chance

INT8, TEXT, DATE = 20, 25, 1082
TYPE_NAMES = {INT8: "bigint", TEXT: "text", DATE: "date"}
FIRST_LSN = Lsn(1000)
KEYS = 10
PLACES = 16

Row = Mapping[int, str | None]
"""A row's values as text, by the columns' numbers."""
Heap = Mapping[int, Row]
Kind = Literal["keyed", "full", "keyless"]


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """`missing`: the value of rows that are older than the column."""

    number: int
    name: str
    type: int
    xmin: int = 0
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A table's definition.  `assigned`: how many column numbers it has used; `file`: its relfilenode."""

    oid: int
    name: str
    columns: tuple[ColumnShape, ...]
    key: tuple[int, ...]
    identity: Literal["d", "f"]
    assigned: int
    file: int
    large: bool

    @property
    def names(self) -> dict[int, str]:
        return {column.number: column.name for column in self.columns}

    @property
    def pages(self) -> int:
        """A large table is copied in chunks of some places each."""
        return PLACES * 20 if self.large else 1

    def message(self) -> Relation:
        """Return the Relation message that announces the table."""
        flagged = {*self.key} if self.identity == "d" else {column.number for column in self.columns}
        columns = tuple(Column(int(c.number in flagged), c.name, Oid(c.type), -1) for c in self.columns)
        return Relation(Oid(self.oid), "public", self.name, self.identity, columns)

    def values(self, row: Row) -> tuple[str | None, ...]:
        return tuple(row.get(column.number, column.missing) for column in self.columns)

    def key_of(self, row: Row) -> tuple[str | None, ...]:
        return tuple(row.get(number) for number in self.key)


@dataclass(frozen=True, slots=True)
class Change:
    """I(nsert), U(pdate), D(elete), T(runcate), or A(lter).  `unchanged`: columns that an UPDATE did not write; `emptied`: by oid, as
    the transaction had them.
    """

    kind: Literal["I", "U", "D", "T", "A"]
    oid: int
    shape: Shape | None = None
    old: Row | None = None
    new: Row | None = None
    unchanged: frozenset[int] = frozenset()
    emptied: tuple[tuple[int, Shape], ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A WAL record, from `start` to `end`.  `top`: its top-level transaction."""

    start: Lsn
    end: Lsn
    kind: Literal["change", "abort", "commit", "prepare", "commit prepared", "rollback prepared", "other"]
    xid: int = 0
    top: int = 0
    time: int = 0
    change: Change | None = None
    gid: str = ""
    prepared: Record | None = None
    """The prepare record that this outcome belongs to."""


@dataclass(frozen=True, slots=True)
class State:
    """A table from the commit that ended at `since` on."""

    since: Lsn
    shape: Shape
    heap: Heap


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a transaction sees: the tables, and by its xids which transactions."""

    lsn: Lsn
    states: Mapping[int, State]
    xmax: int
    running: frozenset[int]

    @property
    def text(self) -> str:
        """As pg_current_snapshot()."""
        low = min(self.running, default=self.xmax)
        return f"{low}:{self.xmax}:{','.join(map(str, sorted(self.running)))}"


@dataclass
class Slot:
    """A logical slot.  `synced`: its confirmed position on the standby (None: not there yet)."""

    name: str
    confirmed: Lsn
    two_phase: bool = False
    two_phase_at: Lsn = INVALID_LSN
    failover: bool = False
    lost: bool = False
    user: Any = None
    synced: Lsn | None = None
    created: Lsn = INVALID_LSN


@dataclass
class _Draft:
    """What a transaction has made of a table: rows by place (None: gone), over its committed rows, unless `emptied`."""

    shape: Shape | None = None
    rows: dict[int, Row | None] = field(default_factory=dict)
    emptied: bool = False

    def on(self, state: State) -> State:
        heap = {} if self.emptied else dict(state.heap)
        for place, row in self.rows.items():
            if row is None:
                heap.pop(place, None)
            else:
                heap[place] = row
        return replace(state, shape=self.shape or state.shape, heap=heap)


class Transaction:
    """A transaction of one session.  Its statements return whether they have changed anything: others' locks may forbid it."""

    def __init__(self, server: Server, xid: int) -> None:
        self.server = server
        self.xid = xid
        self.sub = xid
        self.drafts: dict[int, _Draft] = {}
        self.locked_keys: set[tuple[int, tuple[str | None, ...]]] = set()
        self.locked_places: set[tuple[int, int]] = set()
        self.locked_tables: set[int] = set()
        self.altered = False
        self.gid: str | None = None
        self.prepare: Record | None = None
        self.outcome: Record | None = None
        self._savepoint: dict[int, _Draft] = {}

    # What it sees and locks

    def _state(self, oid: int) -> State:
        committed = self.server.states[oid][-1]
        return self.drafts[oid].on(committed) if oid in self.drafts else committed

    def _others(self) -> list[Transaction]:
        return [one for one in self.server.running() if one is not self]

    def _may_write(self, oid: int) -> bool:
        return not any(oid in one.locked_tables for one in self._others())

    def _may_lock(self, oid: int) -> bool:
        return not any(
            oid in one.locked_tables or any(table == oid for table, _ in one.locked_places) for one in self._others()
        )

    def _key_is_free(self, oid: int, key: tuple[str | None, ...]) -> bool:
        return not any((oid, key) in one.locked_keys for one in self._others())

    def _place_is_free(self, oid: int, place: int) -> bool:
        return not any((oid, place) in one.locked_places for one in self._others())

    def _free_keys(self, oid: int, state: State) -> list[str]:
        taken = {row[1] for row in state.heap.values()}
        return [str(key) for key in range(KEYS) if str(key) not in taken and self._key_is_free(oid, (str(key),))]

    def _free_places(self, oid: int, state: State) -> list[int]:
        return [place for place in range(PLACES) if place not in state.heap and self._place_is_free(oid, place)]

    def _change(self, change: Change, places: Mapping[int, Row | None]) -> bool:
        draft = self.drafts.setdefault(change.oid, _Draft())
        for place, row in places.items():
            draft.rows[place] = row
            self.locked_places.add((change.oid, place))
        shape = change.shape
        assert shape is not None
        for row in (change.old, change.new):
            if row is not None and shape.key:
                self.locked_keys.add((change.oid, shape.key_of(row)))
        self._log(change)
        return True

    def _log(self, change: Change) -> None:
        self.server.append("change", xid=self.sub, top=self.xid, change=change)

    def insert(self, oid: int, pick: int, *, poison: bool = False) -> bool:
        """Insert a row; with `poison` one with a date that no Delta table can hold."""
        state = self._state(oid)
        shape, places = state.shape, self._free_places(oid, state)
        keys = self._free_keys(oid, state) if shape.key else [str(key) for key in range(4)]
        if not self._may_write(oid) or not places or not keys:
            return False
        row = {c.number: self.server.value(c) for c in shape.columns if c.number != 1}
        row[1] = keys[pick % len(keys)]
        if poison:
            row |= {c.number: "infinity" for c in shape.columns if c.type == DATE}
        return self._change(Change("I", oid, shape, None, row), {places[pick % len(places)]: row})

    def update(self, oid: int, pick: int, *, move: bool = False) -> bool:
        """Change a row, and with `move` its key."""
        state = self._state(oid)
        shape, found = state.shape, self._row(oid, state, pick)
        if found is None:
            return False
        place, old = found
        new = {column.number: old.get(column.number, column.missing) for column in shape.columns}
        stays = {c.number for c in shape.columns if c.name == "big" and new[c.number] is not None and pick % 3}
        for column in shape.columns:
            if column.number != 1 and column.number not in stays:
                new[column.number] = self.server.value(column)
        keys = self._free_keys(oid, state)
        if move and keys:
            new[1] = keys[pick % len(keys)]
        room = [place, *self._free_places(oid, state)]
        to = room[pick % len(room)]
        places: dict[int, Row | None] = {place: None}
        places[to] = new
        return self._change(Change("U", oid, shape, old, new, frozenset(stays)), places)

    def purge(self, oid: int) -> bool:
        """Delete the poisonous rows."""
        state = self._state(oid)
        found = [(place, row) for place, row in sorted(state.heap.items()) if "infinity" in row.values()]
        for place, row in found:
            self._change(Change("D", oid, state.shape, row), {place: None})
        return bool(found)

    def delete(self, oid: int, pick: int) -> bool:
        state = self._state(oid)
        found = self._row(oid, state, pick)
        return found is not None and self._change(Change("D", oid, state.shape, found[1]), {found[0]: None})

    def _row(self, oid: int, state: State, pick: int) -> tuple[int, Row] | None:
        if not self._may_write(oid):
            return None
        rows = [
            (place, row)
            for place, row in sorted(state.heap.items())
            if self._place_is_free(oid, place)
            and (not state.shape.key or self._key_is_free(oid, state.shape.key_of(row)))
        ]
        return rows[pick % len(rows)] if rows else None

    def truncate(self, oids: Iterable[int]) -> bool:
        emptied = {oid: replace(self._state(oid).shape, file=self.server.file()) for oid in oids if self._may_lock(oid)}
        for oid, shape in emptied.items():
            self.drafts[oid] = _Draft(shape, {}, True)
            self.locked_tables.add(oid)
        if emptied:
            self._log(Change("T", next(iter(emptied)), emptied=tuple(emptied.items())))
        return bool(emptied)

    def alter(self, oid: int, what: str, pick: int) -> bool:
        """ALTER TABLE: add, drop or rename a column, rename the table, or change its replica identity."""
        if not self._may_lock(oid):
            return False
        shape = self._state(oid).shape
        others = [column for column in shape.columns if column.number != 1]
        after = None
        if what == "add" and len(shape.columns) < 6:
            number = shape.assigned + 1
            column = ColumnShape(number, f"c{number}", TEXT, self.xid, None if pick % 2 else f"m{number}")
            after = replace(shape, columns=(*shape.columns, column), assigned=number)
        elif what == "drop" and len(others) > 1:
            gone = others[pick % len(others)]
            after = replace(shape, columns=tuple(c for c in shape.columns if c is not gone))
        elif what == "column" and others:
            renamed = others[pick % len(others)]
            new = replace(renamed, name=f"r{self.server.count()}", xmin=self.xid)
            after = replace(shape, columns=tuple(new if c is renamed else c for c in shape.columns))
        elif what == "table":
            after = replace(shape, name=f"{shape.name[0]}{self.server.count()}")
        elif what == "identity" and shape.key:
            after = replace(shape, identity="d" if shape.identity == "f" else "f")
        if after is None:
            return False
        self.drafts.setdefault(oid, _Draft()).shape = after
        self.locked_tables.add(oid)
        self.altered = True
        self._log(Change("A", oid, after))
        return True

    def touch(self, oid: int) -> None:
        """Do something to the table that changes nothing of it, but makes walsenders announce it again."""
        if self._may_lock(oid):
            self.altered = True
            self.locked_tables.add(oid)
            self._log(Change("A", oid, self._state(oid).shape))

    def savepoint(self) -> None:
        """Begin a subtransaction; an earlier one is released."""
        self._savepoint = copy.deepcopy(self.drafts)
        self.sub = self.server.next_xid()

    def rollback_to_savepoint(self) -> None:
        """Roll the subtransaction back; its locks stay, which harms nobody here."""
        if self.sub != self.xid:
            self.drafts = self._savepoint
            self.server.append("abort", xid=self.sub, top=self.xid)
            self.sub = self.xid

    def commit(self) -> Lsn:
        kind = "commit" if self.gid is None else "commit prepared"
        self.outcome = self._end(kind)
        self.server.ended(self, self.outcome.end)
        return self.outcome.end

    def abort(self) -> None:
        self.outcome = self._end("abort" if self.gid is None else "rollback prepared")
        self.server.ended(self, None)

    def prepare_as(self, gid: str) -> None:
        self.gid = gid
        self.prepare = self.server.append("prepare", xid=self.xid, top=self.xid, gid=gid)
        self.server.prepared.append(self)

    def _end(self, kind: str) -> Record:
        return self.server.append(kind, xid=self.xid, top=self.xid, gid=self.gid or "", prepared=self.prepare)


@dataclass
class Server:
    """One server, or one that has taken over from another.  LSNs and xids go on over a failover."""

    chance: Chance
    system: str = "7"
    timeline: int = 1
    ends: tuple[tuple[int, Lsn], ...] = ()
    """Earlier timelines, each with its end."""
    wal: list[Record] = field(default_factory=list)
    end: Lsn = FIRST_LSN
    states: dict[int, list[State]] = field(default_factory=dict)
    publications: dict[str, set[int]] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    transactions: dict[int, Transaction] = field(default_factory=dict)
    """Those that have not ended."""
    prepared: list[Transaction] = field(default_factory=list)
    """All that were ever prepared."""
    last_xid: int = 700
    numbers: int = 0
    down: bool = False
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    connections: list[object] = field(default_factory=list)

    # What transactions need

    def count(self) -> int:
        self.numbers += 1
        return self.numbers

    def file(self) -> int:
        return 20000 + self.count()

    def value(self, column: ColumnShape) -> str | None:
        number = self.count()
        if column.type == DATE:
            return f"2020-01-{number % 28 + 1:02}"
        return str(number) if column.type == INT8 else f"{column.name[0]}{number}"

    def next_xid(self) -> int:
        self.last_xid += 1
        return self.last_xid

    def running(self) -> list[Transaction]:
        """Return the transactions that have not ended, prepared ones among them."""
        return [*self.transactions.values()]

    def begin(self) -> Transaction:
        transaction = Transaction(self, self.next_xid())
        self.transactions[transaction.xid] = transaction
        return transaction

    def append(self, kind: str, **fields: object) -> Record:
        start = self.end
        now = int(asyncio.get_running_loop().time() * 1_000_000)
        record = Record(start, Lsn(start + 10), kind, time=now, **fields)  # type: ignore[arg-type]
        self.end = record.end
        self.wal.append(record)
        self.stir()
        return record

    def stir(self) -> None:
        """Wake whoever waits for something to happen here."""
        self.grown.set()
        self.grown = asyncio.Event()

    def ended(self, transaction: Transaction, committed: Lsn | None) -> None:
        del self.transactions[transaction.xid]
        if committed is None:
            return
        for oid, draft in transaction.drafts.items():
            self.states[oid].append(replace(draft.on(self.states[oid][-1]), since=committed))

    # What is asked of it

    def create_table(self, name: str, kind: Kind, *, large: bool, dates: bool) -> int:
        oid = 16384 + len(self.states)
        columns = [ColumnShape(1, "id", INT8), ColumnShape(2, "n", TEXT), ColumnShape(3, "big", TEXT)]
        if dates:
            columns.append(ColumnShape(4, "d", DATE))
        key = () if kind == "keyless" else (1,)
        identity: Literal["d", "f"] = "d" if kind == "keyed" else "f"
        shape = Shape(oid, name, tuple(columns), key, identity, len(columns), self.file(), large)
        self.states[oid] = [State(INVALID_LSN, shape, {})]
        return oid

    def now(self, oid: int) -> State:
        return self.states[oid][-1]

    def at(self, oid: int, lsn: Lsn) -> State:
        """Return the table after the last commit that ends at or before `lsn`."""
        return next(state for state in reversed(self.states[oid]) if state.since <= lsn)

    def snapshot(self) -> Snapshot:
        """Return what a transaction that begins now sees."""
        return Snapshot(
            self.end,
            {oid: states[-1] for oid, states in self.states.items()},
            self.last_xid + 1,
            frozenset(self.transactions),
        )

    async def until_ended(self, transactions: Iterable[Transaction], check: Callable[[], None]) -> None:
        """Wait until these have ended, or `check` fails: the connection may break."""
        waiting = {one.xid for one in transactions}
        while waiting & self.transactions.keys():
            await self.grown.wait()
            check()

    def cut(self) -> None:
        """Break every connection."""
        for connection in self.connections:
            connection.cut = True  # type: ignore[attr-defined]
        for slot in self.slots.values():
            slot.user = None
        self.connections.clear()
        self.snapshots.clear()
        self.stir()

    def promote(self, at: Lsn) -> Server:
        """Return the standby that has taken over: it has the WAL up to `at`."""
        wal = [record for record in self.wal if record.end <= at]
        new = Server(
            self.chance,
            self.system,
            self.timeline + 1,
            (*self.ends, (self.timeline, at)),
            wal,
            at,
            {oid: [state for state in states if state.since <= at] for oid, states in self.states.items()},
            {name: set(oids) for name, oids in self.publications.items()},
            last_xid=self.last_xid,
            numbers=self.numbers,
        )
        for slot in self.slots.values():
            if slot.failover and not slot.lost and slot.synced is not None:
                confirmed = min(slot.synced, at)
                new.slots[slot.name] = replace(slot, confirmed=confirmed, user=None, synced=None)
        for transaction in self.prepared:
            assert transaction.prepare is not None
            if transaction.prepare.end <= at:
                transaction.server = new
                new.prepared.append(transaction)
                if transaction.outcome is None or transaction.outcome.end > at:
                    transaction.outcome = None
                    new.transactions[transaction.xid] = transaction
        new.append("other")
        return new
