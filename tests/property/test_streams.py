"""Streamed transactions make the same tables as whole ones, however they are cut, interleaved, spilled and aborted."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import apply.pipeline.dispatch
from apply.batch import Batch
from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destinations
from apply.staging.stream_ahead import Ahead
from apply.twophase import Preparation, PreparedStore
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.protocol.ids import Xid
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import (
    BeginPrepare,
    Commit,
    CommitPrepared,
    Message,
    Origin,
    Prepare,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    read_message,
)
from pubsub.reorderbuffer.buffer import ReorderBuffer
from tests.property.test_batches import (
    RELATIONS,
    TARGETS,
    Publisher,
    Wish,
    commit,
    commit_staged,
    destinations,
    histories,
    wholes,
    wishes,
)
from tests.support.frames import frame, insert, keepalive, relation, truncate
from tests.support.memory import MemoryDelta


@dataclass
class Sender:
    """A transaction that the publisher streams: the messages not sent yet, with their subtransactions."""

    xid: int
    commit: Commit
    left: list[tuple[int, Message]]
    begun: bool = False
    prepared: bool = False
    aborting: set[int] = field(default_factory=set)


def sender(frames: Sequence[bytes], xid: int, data: st.DataObject, *, aborts: bool = True) -> Sender:
    """Return the transaction split into subtransactions, with changes of rolled back ones in between."""
    end = read_message(frames[-1], start=XLOG_HEADER)
    assert isinstance(end, Commit)
    left: list[tuple[int, Message]] = []
    aborting: set[int] = set()
    for one in frames[1:-1]:
        if aborts and data.draw(st.integers(0, 3)) == 0:
            lost = xid + 10 + data.draw(st.integers(0, 2))
            aborting.add(lost)
            left += [(lost, message) for message in nonsense(data)]
        left.append((xid + data.draw(st.integers(0, 2)), read_message(one, start=XLOG_HEADER)))
    return Sender(xid, end, left, aborting=aborting)


def nonsense(data: st.DataObject) -> list[Message]:
    """Draw messages that would do harm if they were not rolled back: rows, a TRUNCATE, another definition."""
    oid = data.draw(st.sampled_from([r.oid for r in RELATIONS.values()]))
    kind = data.draw(st.sampled_from(["row", "truncate", "relation"]))
    if kind == "row":
        return [insert(oid, 77, "rolled back")]
    if kind == "truncate":
        return [truncate(oid)]
    return [relation(oid, "elsewhere", (("x", 25),), key=())]


def block(one: Sender, count: int) -> list[bytes]:
    """Return Stream Start, the next `count` messages, and Stream Stop."""
    sent = [frame(StreamStart(Xid(one.xid), not one.begun)), frame(Origin(Lsn(1), "o"))]
    one.begun = True
    for xid, message in one.left[:count]:
        sent.append(frame(replace(message, xid=Xid(xid))))  # type: ignore[arg-type]
    del one.left[:count]
    return [*sent, frame(StreamStop())]


def preparing(one: Sender, data: st.DataObject, parallel: bool, at: Lsn) -> list[bytes]:
    """Return everything left of the transaction and its PREPARE TRANSACTION, which ends at `at`."""
    one.prepared = True
    announced = [(one.xid, relation) for relation in RELATIONS.values()]
    fields = (Lsn(at - 8), at, 0, Xid(one.xid), f"gid {one.xid}")
    if one.begun or data.draw(st.booleans()):
        one.left[:0] = announced
        sent = block(one, len(one.left))
        for xid in sorted(one.aborting):
            sent.append(frame(abort(one.xid, xid, parallel)))
        return [*sent, frame(StreamPrepare(0, *fields))]
    kept = [message for xid, message in [*announced, *one.left] if xid not in one.aborting]
    return [frame(BeginPrepare(*fields)), *(frame(message) for message in kept), frame(Prepare(0, *fields))]


def outcome(one: Sender) -> list[bytes]:
    """Return COMMIT PREPARED and every Relation message: those in a streamed transaction count only for itself."""
    end = one.commit
    committed = CommitPrepared(0, end.commit_lsn, end.end_lsn, end.commit_time, Xid(one.xid), f"gid {one.xid}")
    return [frame(committed), *(frame(relation) for relation in RELATIONS.values())]


def ending(one: Sender, data: st.DataObject, parallel: bool) -> list[bytes]:
    """Return the rest of the transaction, the aborts of its subtransactions, and the commit."""
    if one.prepared:
        return outcome(one)
    sent = block(one, len(one.left)) if one.left or not one.begun else []
    for xid in data.draw(st.permutations(sorted(one.aborting))):
        sent.append(frame(abort(one.xid, xid, parallel)))
    end = one.commit
    return [*sent, frame(StreamCommit(Xid(one.xid), 0, end.commit_lsn, end.end_lsn, end.commit_time))]


def abort(xid: int, subxid: int, parallel: bool) -> StreamAbort:
    extra = (Lsn(5), 0) if parallel else (None, None)
    return StreamAbort(Xid(xid), Xid(subxid), *extra)


@settings(max_examples=150, deadline=None)
@given(histories, wholes, st.booleans(), st.data())
def test_a_streamed_transaction_gives_the_rows_of_a_whole_one(
    history: list[list[Wish]], whole: int, parallel: bool, data: st.DataObject
) -> None:
    asyncio.run(streamed_is_as_whole(history, whole, parallel, data, ahead=False))


#: Few of these changes put early staging in vain.
plain = st.tuples(
    st.sampled_from("ab"), st.sampled_from("iiiiuukd"), st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)
)
mostly_plain = st.lists(st.lists(plain, max_size=6) | st.lists(wishes, max_size=6), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(mostly_plain, wholes, st.data())
def test_a_transaction_staged_ahead_gives_the_rows_of_a_whole_one(
    history: list[list[Wish]], whole: int, data: st.DataObject
) -> None:
    """Every block is a part that is staged at once, later, or when the transaction has committed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply.pipeline.dispatch, "PART_BYTES", 1)
        asyncio.run(streamed_is_as_whole(history, whole, True, data, ahead=True))


class Node:
    """Commit each batch, or use what was staged ahead of it."""

    def __init__(self, delta: MemoryDelta, whole: int, most: int) -> None:
        self.versions: dict[str, Lsn] = {}
        self.outcomes: list[tuple[int, Lsn]] = []
        self._delta = delta
        self._whole = whole
        self.ahead = Ahead(self, delta, "pg_1", most, asyncio.Lock()) if most else None  # type: ignore[arg-type]

    async def adapt_tables(self, batch: Batch, until_committed: object) -> Destinations:
        return [destinations(self.versions)]

    async def unchanged(self, batch: object, announced: object) -> bool:
        return True

    async def done(self, dispatcher: Dispatcher) -> None:
        batch = dispatcher.take()
        early = await self.ahead.finish(batch) if self.ahead is not None else None
        if early is not None:
            commit_staged(self._delta, early, self.versions)
        else:
            commit(self._delta, batch, self.versions, whole=self._whole)
        batch.clear_logs()
        for part in batch.large:
            part.release()
        self.outcomes += batch.outcomes

    async def work_ahead(self, parts: int) -> None:
        if self.ahead is not None:
            while await self.ahead.step() and parts:
                parts -= 1


async def streamed_is_as_whole(
    history: list[list[Wish]], whole: int, parallel: bool, data: st.DataObject, *, ahead: bool
) -> None:
    publisher = Publisher(history)
    delta = MemoryDelta(*TARGETS)
    xids = [1000 + 100 * number for number in range(len(publisher.sent))]
    streamed = {
        number: sender(frames, xids[number], data, aborts=not ahead or data.draw(st.integers(0, 3)) == 0)
        for number, frames in enumerate(publisher.sent)
        if data.draw(st.booleans())
    }
    # This one begins and never commits.
    doomed = Sender(5000, Commit(0, Lsn(1), Lsn(2), 0), [(5000, m) for m in nonsense(data)])
    with tempfile.TemporaryDirectory() as home, delta.installed():
        buffer = ReorderBuffer(Path(home) / "spill", data.draw(st.sampled_from([1, 2000, 1 << 20])))
        node = Node(delta, whole, data.draw(st.integers(1, 3)) if ahead else 0)
        dispatcher = Dispatcher(INVALID_LSN, buffer, parallel=parallel, ahead=node.ahead)

        store = PreparedStore(Path(home) / "prepared")

        async def feed(frames: list[bytes]) -> None:
            while frames:
                frames = frames[dispatcher.feed(frames, 0.0) :]
                if buffer.exceeded:
                    buffer.spill()
                if dispatcher.closing:
                    await node.done(dispatcher)
                match dispatcher.waiting:
                    case Preparation() as preparation:
                        store.keep(preparation)
                        dispatcher.kept()
                    case CommitPrepared() as message:
                        kept = store.load(message.xid, message.gid)
                        assert kept is not None
                        assert dispatcher.committed(kept, 0.0, None)
            if ahead:
                await node.work_ahead(data.draw(st.integers(0, 2)))

        for number, frames in enumerate(publisher.sent):
            early = list(streamed.values())
            for one in data.draw(st.lists(st.sampled_from(early), max_size=8 if ahead else 3)) if early else ():
                if one.prepared:
                    continue
                if not ahead and data.draw(st.integers(0, 2)) == 0:
                    await feed(preparing(one, data, parallel, Lsn(max(dispatcher.decided, 100))))
                    continue
                cut = block(one, data.draw(st.integers(1, 2) if ahead else st.integers(0, 3)))
                middle = data.draw(st.integers(0, len(cut)))
                await feed(cut[:middle])
                await feed([keepalive(1), *cut[middle:]])
            if number == len(publisher.sent) // 2:
                await feed(block(doomed, 10))
            await feed(ending(streamed.pop(number), data, parallel) if number in streamed else frames)
            assert dispatcher.decided == publisher.ends[number]
            if dispatcher.batch.transactions and data.draw(st.booleans()):
                await node.done(dispatcher)
        await feed([frame(abort(5000, 5000, parallel))])
        if dispatcher.batch.transactions:
            await node.done(dispatcher)
        if node.ahead is not None:
            await node.work_ahead(100)
            await node.ahead.close()
        assert buffer.memory == 0
        assert not files(home, "spill")
        assert not buffer.in_progress()
        assert not delta.staged
        store.recover(dispatcher.decided)
        for xid, end in node.outcomes:
            store.done(xid, end)
        store.remove_done(dispatcher.decided)
        assert not files(home, "prepared")
    for name in RELATIONS:
        assert delta.tables[name].rows == publisher.rows(name), name


def files(home: str, folder: str) -> list[Path]:
    return list(Path(home).glob(f"{folder}/*"))
