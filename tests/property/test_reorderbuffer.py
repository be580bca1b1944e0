"""The reorder buffer against a model of plain lists: any interleaving, at any memory limit, on disks that fail.

Reading a transaction gives the model's rows or raises an error; it never gives other rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pubsub.errors import DataCorrupted, DuplicateObject
from pubsub.reorderbuffer import durable
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.files import DiskFull, FileFailure
from pubsub.reorderbuffer.transaction import Transaction
from tests.support.disk import room_for, unreadable

FUZZ = float(os.environ.get("PUBSUB_FUZZ", "1"))

XIDS = st.integers(1, 9)
STREAMED = st.integers(101, 103)
"""Transactions that arrive as a stream; a subtransaction's xid is ten times the transaction's, plus a digit."""
SUBS = st.integers(0, 5)
GIDS = st.sampled_from(["a", "b", "c"])
SIZES = st.lists(st.sampled_from([0, 1, 7, 40, 300]), max_size=8)
ROOM = st.sampled_from([0, 1, 100, 700, 1500, 4000])
CHUNK = st.sampled_from([1, 50, 333, 5000, 1 << 20])

HEADER = b"w" + bytes(24)

Change = tuple[int, bytes]


@dataclass
class Model:
    """A transaction: `changes` are (arrival, xid, message)."""

    xid: int
    changes: list[tuple[int, int, bytes]] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    streamed: bool = False

    def above(self, xid: int) -> list[int]:
        path = [xid]
        while path[-1] in self.parents:
            path.append(self.parents[path[-1]])
        return path

    def kept(self) -> list[Change]:
        return [(xid, what) for _, xid, what in sorted(self.changes) if not self.aborted & set(self.above(xid))]


@dataclass
class Out:
    """A transaction that the buffer gave out, its expected changes, and whether a file under it was damaged."""

    transaction: Transaction
    expected: list[Change]
    header: int
    damaged: bool = False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.spill_directory = Path(self.home.name) / "spill"
        self.prepared_directory = Path(self.home.name) / "prepared"
        self.buffer = ReorderBuffer(self.spill_directory, 3000)
        self.models: dict[int, Model] = {}
        self.of: dict[int, Model] = {}
        self.prepared: dict[str, Out] = {}
        self.kept: dict[str, list[Change]] = {}
        self.out: list[Out] = []
        self.arrival = 0
        self.damaged: set[int] = set()
        self.totals = [0, 0]
        self.streams = [0, 0, 0]

    def teardown(self) -> None:
        for out in [*self.out, *self.prepared.values()]:
            self.check(out, 1000)
        for xid in list(self.models):
            self.finish(xid, 1000)
        self.buffer.close()
        assert self.buffer.memory == 0
        assert not self.spill_directory.exists() or not list(self.spill_directory.iterdir())
        self.home.cleanup()

    # Assembling.

    def model(self, xid: int) -> Model:
        if xid not in self.of:
            self.of[xid] = self.models[xid] = Model(xid)
        return self.of[xid]

    def made(self, model: Model, xid: int, sizes: Iterable[int]) -> list[bytes]:
        messages = []
        for size in sizes:
            self.arrival += 1
            message = f"{self.arrival}:".encode().ljust(size, b"x")[: max(size, 1)] if size else b""
            if xid > 100:
                message = b"I" + message
            model.changes.append((self.arrival, xid, message))
            messages.append(message)
        return messages

    @rule(xid=XIDS, sizes=SIZES)
    def append(self, xid: int, sizes: list[int]) -> None:
        self.buffer.append(xid, self.made(self.model(xid), xid, sizes))
        self.limit()

    @rule(xid=XIDS)
    def begin(self, xid: int) -> None:
        self.buffer.begin(xid)
        self.model(xid)

    @rule(top=STREAMED, changes=st.lists(st.tuples(SUBS, st.sampled_from([0, 1, 40, 300])), max_size=8))
    def stream(self, top: int, changes: list[tuple[int, int]]) -> None:
        frames = []
        for sub, size in changes:
            xid = top * 10 + sub if sub else top
            [message] = self.made(self.model(top), xid, [size])
            frames.append(HEADER + message[:1] + xid.to_bytes(4, "big") + message[1:])
        self.model(top)
        self.buffer.append_tagged(top, frames)
        self.limit()

    def may_assign(self, xid: int, parent: int) -> bool:
        if xid == parent or (parent in self.of and xid in self.of[parent].above(parent)):
            return False
        known = self.of.get(xid)
        if known is None or known is self.of.get(parent):
            return self.of.get(parent) is None or self.of[parent].xid != xid
        return known.xid == xid and not known.streamed

    @rule(xid=XIDS, parent=XIDS, sizes=st.none() | SIZES)
    def assign(self, xid: int, parent: int, sizes: list[int] | None) -> None:
        """Assign a subtransaction, alone or together with its changes."""
        possible = self.may_assign(xid, parent)
        model = self.model(parent)
        if not possible:
            with pytest.raises(ValueError, match="cannot be a subtransaction"):
                self.buffer.assign(xid, parent)
            return
        known = self.of.get(xid)
        if known is not None and known is not model:
            model.changes += known.changes
            model.parents |= known.parents
            model.aborted |= known.aborted
            for sub in known.parents:
                self.of[sub] = model
            del self.models[xid]
            if xid in self.damaged:
                self.damaged.add(model.xid)
        if xid not in model.parents or parent not in model.above(model.parents[xid]):
            model.parents[xid] = parent
        self.of[xid] = model
        if sizes is None:
            self.buffer.assign(xid, parent)
        else:
            self.buffer.append(xid, self.made(model, xid, sizes), top=parent)
            self.limit()

    @rule(top=STREAMED, sub=SUBS.filter(bool), parent=SUBS.filter(bool))
    def assign_in_stream(self, top: int, sub: int, parent: int) -> None:
        """Assign a subtransaction to a nested parent, also after both have made changes."""
        xid, above = top * 10 + sub, top * 10 + parent
        model = self.model(top)
        self.buffer.begin(top)
        for one in (above, xid):
            if one not in self.of:
                self.buffer.assign(one, top)
                model.parents[one] = top
                self.of[one] = model
        if self.may_assign(xid, above):
            self.buffer.assign(xid, above)
            if above not in model.above(model.parents[xid]):
                model.parents[xid] = above
        else:
            with pytest.raises(ValueError, match="cannot be a subtransaction"):
                self.buffer.assign(xid, above)

    @rule(xid=XIDS)
    def abort(self, xid: int) -> None:
        self.buffer.abort(xid)
        model = self.of.get(xid)
        if model is not None and model.xid != xid:
            model.aborted.add(xid)
        elif model is not None:
            self.forget(model)

    @rule(top=STREAMED, sub=SUBS)
    def abort_in_stream(self, top: int, sub: int) -> None:
        xid = top * 10 + sub if sub else top
        self.buffer.abort(xid, top=top)
        if top in self.models:
            if sub:
                self.models[top].aborted.add(xid)
            else:
                self.forget(self.models[top])

    def forget(self, model: Model) -> bool:
        """Forget a transaction; return whether it was damaged."""
        del self.models[model.xid]
        for xid in [xid for xid, of in self.of.items() if of is model]:
            del self.of[xid]
        damaged = model.xid in self.damaged
        self.damaged.discard(model.xid)
        return damaged

    # Giving out.

    def given(self, transaction: Transaction, model: Model, *, damaged: bool, streaming: bool) -> Out:
        expected = model.kept()
        header = 29 if model.xid > 100 else 0
        nbytes = sum(len(message) for _, message in expected)
        if header:
            nbytes += header * len(expected)
        if streaming or model.streamed:
            self.streams[0] += not model.streamed
            self.streams[1] += 1
            self.streams[2] += nbytes
        self.totals[0] += not model.streamed
        self.totals[1] += nbytes
        assert (transaction.count, transaction.nbytes) == (len(expected), nbytes)
        assert transaction.xids == {xid for xid, _ in expected}
        assert transaction.streamed == model.streamed
        return Out(transaction, expected, header, damaged)

    @rule(xid=XIDS | STREAMED, chunk=CHUNK, hold=st.booleans())
    def commit(self, xid: int, chunk: int, hold: bool) -> None:
        model = self.of.get(xid)
        if model is None:
            assert self.buffer.commit(xid) is None
        elif model.xid != xid:
            with pytest.raises(ValueError, match="is a subtransaction of"):
                self.buffer.commit(xid)
        elif hold:
            transaction = self.buffer.commit(xid)
            assert transaction is not None
            self.out.append(self.given(transaction, model, damaged=self.forget(model), streaming=False))
        else:
            self.finish(xid, chunk)

    def finish(self, xid: int, chunk: int) -> None:
        model = self.models[xid]
        with self.buffer.commit(xid) as transaction:  # type: ignore[union-attr]
            self.check(self.given(transaction, model, damaged=self.forget(model), streaming=False), chunk)

    @rule(xid=XIDS | STREAMED, chunk=CHUNK)
    def take(self, xid: int, chunk: int) -> None:
        model = self.models.get(xid)
        if model is None:
            with pytest.raises((KeyError, ValueError)):
                self.buffer.take(xid)
            return
        with self.buffer.take(xid) as part:
            self.check(self.given(part, model, damaged=xid in self.damaged, streaming=True), chunk)
        self.damaged.discard(xid)
        model.streamed = True
        model.changes.clear()

    @precondition(lambda self: self.out)
    @rule(data=st.data(), chunk=CHUNK, release=st.booleans())
    def read(self, data: st.DataObject, chunk: int, release: bool) -> None:
        out = data.draw(st.sampled_from(self.out))
        self.check(out, chunk)
        if release:
            out.transaction.release()
            self.out.remove(out)

    @rule(xid=XIDS | STREAMED, gid=GIDS)
    def prepare(self, xid: int, gid: str) -> None:
        model = self.of.get(xid) or Model(xid)
        if gid in self.prepared:
            with pytest.raises(DuplicateObject):
                self.buffer.prepare(xid, gid)
        elif model.xid != xid:
            with pytest.raises(ValueError, match="is a subtransaction of"):
                self.buffer.prepare(xid, gid)
        else:
            damaged = self.forget(model) if xid in self.models else False
            self.prepared[gid] = self.given(self.buffer.prepare(xid, gid), model, damaged=damaged, streaming=False)

    @rule(gid=GIDS)
    def commit_prepared(self, gid: str) -> None:
        transaction = self.buffer.commit_prepared(gid)
        out = self.prepared.pop(gid, None)
        assert transaction is (out.transaction if out is not None else None)
        if out is not None:
            self.out.append(out)

    @rule(gid=GIDS)
    def rollback_prepared(self, gid: str) -> None:
        assert self.buffer.rollback_prepared(gid) == (self.prepared.pop(gid, None) is not None)

    @rule(gid=GIDS, room=st.none() | ROOM)
    def persist(self, gid: str, room: int | None) -> None:
        out = self.prepared.get(gid)
        if out is None or gid in self.kept:
            return
        path = self.prepared_directory / gid
        try:
            with room_for(1 << 40 if room is None else room):
                durable.persist(out.transaction, path, {"gid": gid})
        except (DiskFull, DataCorrupted, FileFailure) as error:
            if not out.damaged and not (room is not None and isinstance(error, DiskFull)):
                raise
            assert not list(self.prepared_directory.glob(f"{gid}*"))
        else:
            self.kept[gid] = out.expected

    @rule(gid=GIDS, chunk=CHUNK)
    def load(self, gid: str, chunk: int) -> None:
        if gid not in self.kept:
            return
        expected = self.kept[gid]
        stored = durable.load(self.prepared_directory / gid)
        assert stored.metadata == {"gid": gid}
        header = 29 if expected and expected[0][0] > 100 else 0
        assert read(stored.transaction, header, chunk) == expected

    @rule(gid=GIDS)
    def remove_kept(self, gid: str) -> None:
        if self.kept.pop(gid, None) is not None:
            durable.remove(self.prepared_directory / gid)

    # Memory and disks.

    @rule(work_mem=st.sampled_from([0, 500, 3000, 20_000, 1 << 20]))
    def set_work_mem(self, work_mem: int) -> None:
        self.buffer.work_mem = work_mem
        self.limit()

    def limit(self) -> None:
        """Spill when the memory limit is exceeded, as the owner does after each append."""
        if self.buffer.exceeded:
            try:
                self.buffer.spill()
            except FileFailure:
                # A file that `damage` removed cannot be appended to.
                if not self.damaged and not any(out.damaged for out in self.all_out()):
                    raise
            else:
                assert not self.buffer.exceeded or self.buffer.memory == 0

    @rule(room=ROOM)
    def spill_on_a_full_disk(self, room: int) -> None:
        limit, self.buffer.work_mem = self.buffer.work_mem, 0
        try:
            with room_for(room):
                self.buffer.spill()
        except FileFailure as error:
            note(f"{error}")
        else:
            assert self.buffer.memory == 0
        self.buffer.work_mem = limit

    @rule(data=st.data(), how=st.sampled_from(["torn", "altered", "missing", "exchanged"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        """Damage a file under a transaction, but not the schema before its first segment, which holds no rows."""
        files = [file for one in self.buffer._held for file in one.files]
        if not files:
            return
        file = data.draw(st.sampled_from(files))
        if not file.path.exists():
            return
        whole = file.path.read_bytes()
        first = file.segments[0].offset
        place = data.draw(st.integers(first, file.end - 1))
        if place >= len(whole):  # torn already
            return
        match how:
            case "torn":
                os.truncate(file.path, place)
            case "altered":
                file.path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            case "missing":
                file.path.unlink()
            case _:
                other = data.draw(st.sampled_from(files))
                if other is file or not other.path.exists() or whole == other.path.read_bytes():
                    return
                file.path.write_bytes(other.path.read_bytes())
        for out in self.all_out():
            out.damaged |= file in out.transaction.files
        for one in self.buffer.in_progress():
            if file in one.files:
                self.damaged.add(one.xid)

    def all_out(self) -> list[Out]:
        return [*self.out, *self.prepared.values()]

    def check(self, out: Out, chunk: int) -> None:
        if not out.damaged:
            assert read(out.transaction, out.header, chunk) == out.expected
            if out.transaction.files:
                with unreadable(), pytest.raises(FileFailure) as caught:
                    read(out.transaction, out.header, chunk)
                assert caught.value.sqlstate == "58030"
            return
        try:
            found = read(out.transaction, out.header, chunk)
        except (DataCorrupted, FileFailure) as error:
            note(f"{error}")
        else:
            # The damage hit bytes that hold no rows: padding, or zeros at the end that a later write restored.
            assert found == out.expected

    @invariant()
    def memory_and_files_are_accounted(self) -> None:
        held = list(self.buffer._held)
        assert self.buffer.memory == sum(one.memory for one in held)
        assert {one.xid for one in self.buffer.in_progress()} == set(self.models)
        there = set(self.spill_directory.iterdir()) if self.spill_directory.exists() else set()
        known = {path for one in held for path in one.paths}
        assert there <= known
        if not self.damaged and not any(out.damaged for out in self.all_out()):
            assert there == known

    @invariant()
    def statistics_are_the_models(self) -> None:
        found = self.buffer.statistics
        assert [found.total_txns, found.total_bytes] == self.totals
        assert [found.stream_txns, found.stream_count, found.stream_bytes] == self.streams
        assert found.spill_txns <= found.spill_count
        assert (found.spill_count > 0) >= (found.spill_bytes > 0)


def read(transaction: Transaction, header: int, max_bytes: int) -> list[Change]:
    """Return (xid, message) of each change, and check that chunks are bounded and numbered."""
    found: list[Change] = []
    for chunk in transaction.chunks(max_bytes):
        assert chunk.first == len(found)
        assert chunk.nbytes <= max_bytes or chunk.count == 1 or chunk.nbytes == 0
        for block in chunk.blocks:
            assert block.count > 0
            messages = [frame[header:] for frame in block.frames()]
            found += zip(block.xids().tolist(), messages, strict=True)
    return found


def test_reading_agrees_with_the_model() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=round(100 * FUZZ), stateful_step_count=40))
