"""Sessions on the model of a publisher: they answer the project's own SQL and replication commands, by their texts.

`Session` takes the place of pubsub.publisher.connection.Connection, `Stream` of replication.ReplicationStream, and `CopySession` of
the psycopg connection with which a copy reads rows.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import psycopg
import pyarrow as pa

from pubsub.errors import ConnectionFailure, PublisherError
from pubsub.protocol.copyboth import Keepalive, write_server_message
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions, publication, replication, slots, snapshots, sound_slots
from tests.simulation.life import Life
from tests.simulation.publisher import PLACES, TYPE_NAMES, Server, Shape, Slot, Snapshot, State
from tests.simulation.walsender import Decoder
from walsender import repl_gram

if TYPE_CHECKING:
    from tests.simulation.world import World

Answer = list[tuple[str | None, ...]]

WORLD: list[World] = []
"""The world of the history that runs."""


class Session:
    """See pubsub.publisher.connection.Connection.  `cut`: the connection is broken."""

    server_version = 180000
    dbname = "d"
    user = "u"
    host = "publisher"
    port = "5432"
    _pids = itertools.count(1000)

    def __init__(self, world: World, life: Life, replication: bool, name: str) -> None:
        self.world, self.life, self.replication, self.name = world, life, replication, name
        self.server: Server = world.server
        self.backend_pid = next(self._pids)
        self.on_warning: Callable[[PublisherError], None] | None = None
        self.closed = self.cut = False
        self.using: Slot | None = None
        self.command: repl_gram.StartLogicalReplication | None = None
        self._exported: list[str] = []
        self._in_transaction = False
        self._snapshot: Snapshot | None = None
        self.server.connections.append(self)

    @classmethod
    async def connect(cls, conninfo: str, *, replication: bool = False, application_name: str = "pubsub") -> Self:
        life = Life.current()
        assert life is not None
        await life.step(f"a connection to the publisher for {application_name}")
        world = WORLD[0]
        if world.server.down:
            raise ConnectionFailure("could not connect to the publisher: it is down")
        return cls(world, life, replication, application_name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.finish()

    def finish(self) -> None:
        """End the session, as the server does when its client is gone."""
        if self.closed:
            return
        self.closed = True
        if self in self.server.connections:
            self.server.connections.remove(self)
        if self.using is not None and self.using.user is self:
            self.using.user = None
        self._end_snapshots()
        self.server.stir()

    def check_open(self) -> None:
        if self.closed or self.cut:
            raise ConnectionFailure("the connection to the publisher is closed")

    async def execute(self, sql: str) -> str:
        await self.query(sql)
        return ""

    async def start_copy_both(self, command: str) -> None:
        parsed = repl_gram.parse_command(command)
        assert isinstance(parsed, repl_gram.StartLogicalReplication)
        await self._step()
        slot = self.server.slots.get(parsed.slot)
        if slot is None:
            raise PublisherError(f'replication slot "{parsed.slot}" does not exist', sqlstate="42704")
        if slot.user is not None:
            raise PublisherError(f'replication slot "{slot.name}" is active for PID 1', sqlstate="55006")
        if slot.lost:
            raise PublisherError(f'can no longer access replication slot "{slot.name}"', sqlstate="55000")
        slot.user, self.using, self.command = self, slot, parsed

    async def query(self, sql: str, params: Sequence[Any] = ()) -> Answer:
        await self._step()
        self._end_snapshots(unless=self._in_transaction)
        command = repl_gram.parse_command(sql)
        answer = await self._command(command) if command is not None else self._sql(sql, params)
        await self.life.wait()
        self.check_open()
        return answer

    async def _step(self) -> None:
        self.check_open()
        await self.life.step(f"a query of {self.name}")
        self.check_open()

    def _end_snapshots(self, *, unless: bool = False) -> None:
        """An exported snapshot lasts until the session's next command, or to the end of its transaction."""
        if not unless:
            for name in self._exported:
                self.server.snapshots.pop(name, None)
            self._exported.clear()

    # Replication commands

    async def _command(self, command: repl_gram.Command) -> Answer:
        server = self.server
        match command:
            case repl_gram.IdentifySystem():
                return [(server.system, str(server.timeline), str(server.end), self.dbname)]
            case repl_gram.TimelineHistory():
                lines = "".join(f"{timeline}\t{end}\tno reason\n" for timeline, end in server.ends)
                return [(f"{server.timeline:08X}.history", lines)]
            case repl_gram.CreateReplicationSlot():
                return await self._create_slot(command)
            case repl_gram.DropReplicationSlot():
                await self._drop_slot(command)
                return []
            case repl_gram.AlterReplicationSlot():
                slot = self._slot(command.slot)
                if command.failover is not None:
                    slot.failover = command.failover
                if command.two_phase is not None:
                    slot.two_phase = command.two_phase
                return []
        raise AssertionError(f"not modelled: {command}")

    def _slot(self, name: str) -> Slot:
        if name not in self.server.slots:
            raise PublisherError(f'replication slot "{name}" does not exist', sqlstate="42704")
        return self.server.slots[name]

    async def _create_slot(self, command: repl_gram.CreateReplicationSlot) -> Answer:
        server = self.server
        if command.slot in server.slots:
            raise PublisherError(f'replication slot "{command.slot}" already exists', sqlstate="42710")
        slot = server.slots[command.slot] = Slot(command.slot, server.end, failover=command.failover, user=self)
        try:
            await server.until_ended(server.running(), self.check_open)
            await self._step()
        except BaseException:
            server.slots.pop(command.slot, None)
            raise
        slot.user, slot.confirmed, slot.created = None, server.end, server.end
        if command.two_phase:
            slot.two_phase, slot.two_phase_at = True, server.end
        self.world.tell(f"slot {slot.name} is created at {slot.confirmed}")
        name = None
        if command.snapshot == "export":
            name = self._export(server.snapshot())
        return [(slot.name, str(slot.confirmed), name, "pgoutput")]

    async def _drop_slot(self, command: repl_gram.DropReplicationSlot) -> None:
        slot = self._slot(command.slot)
        if slot.user is not None and not command.wait:
            raise PublisherError(f'replication slot "{slot.name}" is active for PID 1', sqlstate="55006")
        while slot.user is not None:
            await self.server.grown.wait()
            await self._step()
        if self.server.slots.pop(slot.name, None) is not None:
            self.world.tell(f"slot {slot.name} is dropped")

    def _export(self, snapshot: Snapshot) -> str:
        name = f"{self.server.count():08X}-1"
        self.server.snapshots[name] = snapshot
        self._exported.append(name)
        return name

    def _sql(self, sql: str, params: Sequence[Any]) -> Answer:
        if sql.startswith("BEGIN"):
            self._in_transaction, self._snapshot = True, None
            return []
        if sql.startswith("SET TRANSACTION SNAPSHOT"):
            self._snapshot = _imported(self.server, sql)
            return []
        if sql == "COMMIT":
            self._in_transaction, self._snapshot = False, None
            self._end_snapshots()
            return []
        if self._in_transaction and self._snapshot is None:
            self._snapshot = self.server.snapshot()
        for text, answer in _ANSWERS:
            if sql == text or (text[0] == "…" and text[1:] in sql):
                return answer(self, *params)
        raise AssertionError(f"not modelled: {sql}")

    @property
    def _seen(self) -> Snapshot:
        return self._snapshot or self.server.snapshot()

    def _nothing(self, *_: Any) -> Answer:
        return []

    def _true(self, *_: Any) -> Answer:
        return [("t",)]

    def _false(self, *_: Any) -> Answer:
        return [("f",)]

    def _end_of_wal(self) -> Answer:
        return [(str(self.server.end),)]

    def _slot_info(self, name: str) -> Answer:
        slot = self.server.slots.get(name)
        if slot is None:
            return []
        confirmed = None if slot.lost else str(slot.confirmed)
        status = "lost" if slot.lost else "reserved"
        reason = "wal_removed" if slot.lost else None
        flags = ["t" if flag else "f" for flag in (slot.user is not None, slot.two_phase, slot.failover)]
        active, two_phase, failover = flags
        return [(name, "pgoutput", "d", "f", active, confirmed, status, None, two_phase, failover, reason, "0")]

    def _advance_slot(self, name: str) -> Answer:
        slot = self._slot(name)
        if slot.user is not None:
            raise PublisherError(f'replication slot "{name}" is active for PID 1', sqlstate="55006")
        slot.confirmed = max(slot.confirmed, self.server.end)
        self.world.tell(f"slot {name} is advanced to {slot.confirmed}")
        return [(str(slot.confirmed),)]

    def _stop_user(self, name: str) -> Answer:
        slot = self.server.slots.get(name)
        if slot is not None and isinstance(slot.user, Session):
            slot.user.cut = True
            slot.user = None
            self.server.stir()
        return []

    def _is_standby(self) -> Answer:
        return [("f",)]

    def _publications(self, names: Sequence[str]) -> Answer:
        return [(name,) for name in names if name in self.server.publications]

    def _published(self, names: Sequence[str], only: int | None) -> Answer:
        found: Answer = []
        for oid in sorted(set().union(*(self.server.publications.get(name, set()) for name in names))):
            shape = self._seen.states[oid].shape
            if only is None or int(only) == oid:
                found += [(str(oid), "public", shape.name, None, None, "r", "f", shape.identity, "t")]
        return sorted(found, key=lambda row: str(row[2]))

    def _publishing(self, names: Sequence[str], oid: int) -> Answer:
        return [(",".join(names), "t")]

    def _shapes(self, oids: Sequence[int]) -> list[Shape]:
        states = self._seen.states
        return [states[oid].shape for oid in map(int, oids) if oid in states]

    def _held_types(self, oids: Sequence[int]) -> Answer:
        types = sorted({column.type for shape in self._shapes(oids) for column in shape.columns})
        return [(str(t), TYPE_NAMES[t], "b", "0", "-1", "0", None, None, None, None) for t in types]

    def _columns(self, oids: Sequence[int]) -> Answer:
        found: Answer = []
        for shape in self._shapes(oids):
            for c in shape.columns:
                kind = str(c.type)
                of_type = (kind, "-1", TYPE_NAMES[c.type], "b", kind, "-1", "b")
                of_column = ("t" if c.number in shape.key else "f", "", "t", c.missing, "f", str(c.xmin))
                found.append((str(shape.oid), c.name, str(c.number), *of_type, *of_column))
        return found

    def _tables(self, oids: Sequence[int], sizes: str) -> Answer:
        found: Answer = []
        for shape in self._shapes(oids):
            key = " ".join(map(str, shape.key)) or None
            identity = key if shape.identity == "d" else None
            pages = str(shape.pages) if sizes == "t" else "0"
            size = str(shape.pages * 8192) if sizes == "t" else "0"
            storage = f"{shape.oid}:{shape.file}"
            named = (str(shape.oid), "public", shape.name, "r", shape.identity, key, identity)
            found.append((*named, "1", pages, "f", str(shape.assigned), storage, size))
        return found

    def _file_seen(self, oid: int) -> Answer:
        return [(str(self._seen.states[int(oid)].shape.file),)]

    def _export_snapshot(self) -> Answer:
        return [(self._export(self._seen),)]

    def _current_snapshot(self) -> Answer:
        return [(self._seen.text,)]

    def _lacks(self, earlier: str) -> Answer:
        """As snapshots.lacks asks."""
        _, xmax, running = earlier.split(":")
        known = {int(xid) for xid in running.split(",") if xid}
        unseen = [xid for xid in self._seen.running if xid < int(xmax) and xid not in known]
        return [("t" if self._seen.xmax < int(xmax) or unseen else "f",)]

    def _prepared(self) -> Answer:
        return [(str(one.xid), one.gid) for one in self.server.running() if one.gid is not None]

    def _readable(self, oids: Sequence[int], *_: Any) -> Answer:
        return [(str(oid),) for oid in oids]

    def _next_xid(self) -> Answer:
        """One more for each question: another database has transactions, too."""
        return [(str(self.server.count()),)]

    def _altered(self, *_: object) -> Answer:
        """Now and then; that a slot made meanwhile decodes wrongly is PostgreSQL's fault, not the model's."""
        return [("public.t" if self.world.chance.random.random() < 0.1 else None,)]

    def _no_progress(self, _: str) -> Answer:
        return [("0", "0")]


_ANSWERS: list[tuple[str, Callable[..., Answer]]] = [
    ("…pg_catalog.repeat(", Session._nothing),
    (sound_slots._NEXT_XID, Session._next_xid),
    (sound_slots._ALTERED, Session._altered),
    (sound_slots._ALTERED_TABLE, Session._altered),
    (slots._SLOT, Session._slot_info),
    (slots._SLOT_WAITS, Session._nothing),
    (slots._PREPARED, Session._prepared),
    (slots._SLOT_USER, Session._nothing),
    (replication._CANCEL_USER, Session._stop_user),
    (replication._CREATOR, Session._nothing),
    ("…pg_replication_slot_advance(", Session._advance_slot),
    (f"SELECT {slots._END_OF_WAL}", Session._end_of_wal),
    (snapshots.END_OF_WAL, Session._end_of_wal),
    (snapshots._ALTERING, Session._nothing),  # a commit is seen as soon as it is in the WAL
    ("…pg_current_wal_flush_lsn() >= ", Session._true),
    (definitions._HELD_TYPES, Session._held_types),
    (definitions._COLUMNS, Session._columns),
    (definitions._TABLES, Session._tables),
    (definitions._READABLE, Session._readable),
    (definitions._COPY_PROGRESS, Session._no_progress),
    (publication._EXISTING_PUBLICATIONS, Session._publications),
    (publication._PUBLISHED_TABLES, Session._published),
    (publication._PUBLISHED_COLUMNS, Session._nothing),
    (publication._FOREIGN_ROWS, Session._nothing),
    (snapshots._PUBLISHING, Session._publishing),
    ("…SELECT relfilenode FROM pg_class", Session._file_seen),
    ("…pg_export_snapshot()", Session._export_snapshot),
    ("SELECT pg_current_snapshot()", Session._current_snapshot),
    ("…pg_visible_in_snapshot(", Session._lacks),
    ("SELECT pg_catalog.pg_is_in_recovery()", Session._is_standby),
    ("…SELECT FROM ONLY", Session._nothing),
]


def _imported(server: Server, sql: str) -> Snapshot:
    name = sql.split("'")[1]
    if name not in server.snapshots:
        raise PublisherError(f'invalid snapshot identifier: "{name}"', sqlstate="22023")
    return server.snapshots[name]


async def is_commit_at(
    conninfo: str, application_name: str, timeline: int, lsn: Lsn, commit_time: int, end: Lsn
) -> bool:
    """commit_record.is_commit_at, of the model's WAL, without a walsender that streams it."""
    async with await Session.connect(conninfo, replication=True, application_name=application_name) as session:
        await session._step()
        return any(
            record.start == lsn and record.kind in ("commit", "commit prepared") and record.time == commit_time
            for record in session.server.wal
        )


class Stream:
    """See replication.ReplicationStream."""

    def __init__(self, session: Session) -> None:
        command = session.command
        assert command is not None
        assert session.using is not None
        self._session, self._slot = session, session.using
        options = repl_gram.parse_pgoutput_options(command.options)
        start = max(command.lsn, self._slot.confirmed)
        if options.two_phase and not self._slot.two_phase:
            self._slot.two_phase, self._slot.two_phase_at = True, start
        self._decoder = Decoder(session.server, self._slot, start, options)
        self._ping = False
        self._silent = False
        self._sent_keepalive = Lsn(0)
        self.last_receive = asyncio.get_running_loop().time()
        session.world.tell(f"{self._slot.name} streams from {start}")

    async def receive(self, max_bytes: int = 0) -> list[bytes]:
        session, chance = self._session, self._session.world.chance
        await session.life.step(f"the stream of {self._slot.name}")
        while True:
            session.check_open()
            if self._slot.lost:
                raise PublisherError(f'can no longer access replication slot "{self._slot.name}"', sqlstate="55000")
            decoder, server = self._decoder, session.server
            for _ in range(chance.random.choice([1, 3, 1000])):
                if not decoder.read():
                    break
            if decoder.place == len(server.wal) and (self._ping or self._sent_keepalive < decoder.read_to):
                self._sent_keepalive = max(decoder.read_to, decoder.start)
                reply = chance.random.random() < 0.3
                decoder.frames.append(write_server_message(Keepalive(self._sent_keepalive, 0, reply)))
                self._ping = False
            if decoder.frames and not server.down:
                break
            if decoder.place == len(server.wal) or server.down:
                await server.grown.wait()
        count = chance.random.choice([1, 2, 5, 100])
        taken, decoder.frames = decoder.frames[:count], decoder.frames[count:]
        self.last_receive = asyncio.get_running_loop().time()
        return taken

    async def send_status(self, written: Lsn, flushed: Lsn, applied: Lsn, *, reply: bool = False) -> None:
        session = self._session
        session.life.check()
        session.check_open()
        session.world.oracle.confirmed(self._slot, flushed)
        self._slot.confirmed = max(self._slot.confirmed, flushed)
        if session.world.chance.random.random() < 0.5:
            self._slot.synced = self._slot.confirmed
        if reply:
            self._ping = True
            session.server.stir()
        await session.life.wait()

    async def close(self, timeout: float = 5.0) -> None:
        await self._session.life.wait()


class CopySession:
    """What chunk_reader.session returns: a session that reads rows, and blocks."""

    def __init__(self, life: Life, world: World) -> None:
        life.check()
        if world.server.down or world.chance.random.random() < world.chance.trouble:
            raise ConnectionFailure("could not connect to the publisher: it is down")
        self.life, self.world, self.server = life, world, world.server
        self.pgconn = self
        self._snapshot: Snapshot | None = None
        self._answer: Answer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute(self, sql: bytes | str) -> CopySession:
        text = sql.decode() if isinstance(sql, bytes) else sql
        self._answer = None
        if text.startswith("SET TRANSACTION SNAPSHOT"):
            name = text.split("'")[1]
            if name not in self.server.snapshots:
                raise psycopg.errors.InvalidParameterValue(f'invalid snapshot identifier: "{name}"')
            self._snapshot = self.server.snapshots[name]
        elif text.endswith(" LIMIT 0"):
            self._describe(text)
        elif "pg_relation_filenode(" in text:
            oid = int(re.findall(r"\d+", text)[0])
            seen = (self._snapshot or self.server.snapshot()).states[oid].shape.file
            self._answer = [] if self.server.now(oid).shape.file == seen else [(str(oid),)]
        elif text == snapshots.END_OF_WAL:
            self._answer = [(str(self.server.end),)]
        elif "pg_current_wal_flush_lsn()" in text:
            self._answer = [(True,)]
        return self

    def fetchall(self) -> Answer:
        assert self._answer is not None, "the model of a publisher does not know the query"
        return self._answer

    def _describe(self, statement: str) -> None:
        """Answer a SELECT of no rows with what its names mean now (read_table.hold_as_described)."""
        if self._snapshot is None:
            self._snapshot = self.server.snapshot()
        listed, _, name = statement.removeprefix("SELECT ").partition(" FROM ")
        table = name.removeprefix("ONLY ").removesuffix(" LIMIT 0").partition(".")[2]
        shape = next(s[-1].shape for s in self.server.states.values() if s[-1].shape.name == table)
        columns = {column.name: column for column in shape.columns}
        try:
            self._found = [(shape.oid, columns[name].number, columns[name].type) for name in listed.split(", ")]
        except KeyError as missing:
            raise psycopg.errors.UndefinedColumn(f"column {missing} does not exist") from None

    @property
    def pgresult(self) -> Self:
        return self

    def ftable(self, place: int) -> int:
        return self._found[place][0]

    def ftablecol(self, place: int) -> int:
        return self._found[place][1]

    def ftype(self, place: int) -> int:
        return self._found[place][2]

    def copy(self, statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a COPY that chunk_reader.statement has made."""
        if self._snapshot is None:
            self._snapshot = self.server.snapshot()
        name = re.search(r'FROM (?:ONLY )?"?public"?\."?(\w+)', statement)
        assert name is not None
        state = next(state for state in self._snapshot.states.values() if state.shape.name == name[1])
        rows = list(_rows_in(state, statement))
        numbers = {column: number for number, column in state.shape.names.items()}
        values = [
            dict(zip((c.number for c in state.shape.columns), state.shape.values(row), strict=True)) for row in rows
        ]
        columns = [pa.array([row[numbers[f.name]] for row in values], pa.string()).cast(f.type) for f in schema]
        self.world.chance.fail("a copy's reading")
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _rows_in(state: State, statement: str) -> Iterator[Any]:
    """Choose rows by the conditions on ctid and key that copyjob and window make."""
    step = max(state.shape.pages // PLACES, 1)
    first = re.search(r"ctid >= '\((\d+),0\)'", statement)
    end = re.search(r"ctid < '\((\d+),0\)'", statement)
    keys = set(re.findall(r"\('(-?\d+)'::\w+\)", statement)) if "IN (VALUES" in statement else None
    for place, row in sorted(state.heap.items()):
        block = place * step
        if first is not None and block < int(first[1]):
            continue
        if end is not None and block >= int(end[1]):
            continue
        if keys is None or row[1] in keys:
            yield row
