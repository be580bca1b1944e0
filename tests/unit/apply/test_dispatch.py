"""Dispatcher: frames become transactions, and transactions batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import apply.pipeline.dispatch
from apply.pipeline.dispatch import Dispatcher
from apply.twophase import Kept, Preparation
from pubsub.errors import ProtocolViolation
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Insert,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
)
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.reorderbuffer.transaction import Transaction
from tests.support.frames import frame, insert, keepalive, relation, transaction, truncate

A = relation(16384, "a")
B = relation(16385, "b")


def rows_of(dispatcher: Dispatcher) -> list[bytes]:
    """Return the messages in the open batch's log."""
    result = []
    for block in (block for _, blocks in dispatcher.batch.chunks() for block in blocks):
        at = 0
        for length in block.lengths.tolist():
            result.append(block.data[at + XLOG_HEADER : at + length])
            at += length
    return result


def test_a_committed_transaction_joins_the_batch() -> None:
    d = Dispatcher(Lsn(10))
    first = transaction(200, A, insert(A.oid, 1, "x"), insert(A.oid, 2, "y"), xid=7, commit_time=5, final=150)
    second = transaction(300, insert(A.oid, 3, "z"), final=200)
    assert d.feed(first + second, 1.5) == len(first) + len(second)
    assert [(t.xid, t.final_lsn, t.end_lsn, t.commit_time, t.first_seq, t.end_seq) for t in d.batch.transactions] == [
        (7, 150, 200, 5, 0, 2),
        (700, 200, 300, 0, 2, 3),
    ]
    assert (d.position, d.decided, d.batch.opened_at, d.batch.rows) == (300, 300, 1.5, 3)
    assert (d.batch.first_lsn, d.batch.last_lsn) == (200, 300)
    assert d.batch.relations == {A.oid: [(0, A)]}
    assert rows_of(d) == [f[XLOG_HEADER:] for f in (first[2], first[3], second[1])]


def test_nothing_of_an_open_transaction_is_in_the_batch() -> None:
    d = Dispatcher(Lsn(10))
    frames = transaction(200, A, insert(A.oid, 1, "x"), truncate(A.oid))
    d.feed(frames[:-1], 0.0)
    assert not d.batch.transactions
    assert not d.batch.truncations
    assert not d.batch.relations
    assert not d.idle
    assert (d.position, d.decided) == (10, 10)
    d.feed(frames[-1:], 0.0)
    assert [t.seq for t in d.batch.truncations] == [1]
    assert not d.idle
    assert d.take().last_lsn == 200
    assert d.idle


def test_an_empty_transaction_moves_the_position_alone() -> None:
    d = Dispatcher(Lsn(10))
    d.feed(transaction(200), 0.0)
    assert d.idle
    assert (d.position, d.decided) == (200, 200)


def test_before_the_first_transaction_what_is_not_sent_counts_as_decided() -> None:
    """A slot that was made late sends nothing of what a copied table got written before."""
    d = Dispatcher(Lsn(10), sent_from=Lsn(70))
    assert (d.position, d.decided) == (10, 70)
    assert Dispatcher(Lsn(80), sent_from=Lsn(70)).decided == 80


def test_a_keepalive_moves_the_position_only_between_transactions() -> None:
    """Inside a transaction the server's end of WAL is past changes whose outcome is not known yet."""
    d = Dispatcher(Lsn(10))
    d.feed([keepalive(50)], 0.0)
    assert (d.position, d.decided) == (50, 10)
    d.feed([*transaction(200, A)[:2], keepalive(180, reply=True)], 0.0)
    assert d.position == 50
    assert d.reply_requested
    d.feed([keepalive(40)], 0.0)
    assert d.position == 50


def test_take_starts_a_batch_with_the_settled_relations_only() -> None:
    """Relations that an open transaction has sent take effect with its commit, neither before nor twice."""
    d = Dispatcher(Lsn(10))
    d.feed(transaction(100, A, insert(A.oid, 1, "x")), 0.0)
    d.feed(transaction(200, B, insert(B.oid, 1, "x"))[:-1], 0.0)
    d.take()
    assert d.batch.relations == {A.oid: [(0, A)]}
    d.feed(transaction(200, B, insert(B.oid, 1, "x"))[-1:], 0.0)
    assert d.batch.relations == {A.oid: [(0, A)], B.oid: [(0, B)]}


def test_another_definition_holds_from_its_place_on() -> None:
    d = Dispatcher(Lsn(10))
    wider = relation(A.oid, "a", (("id", 20), ("v", 25), ("w", 25)))
    d.feed(transaction(100, A, insert(A.oid, 1, "x"), A), 0.0)
    d.feed(transaction(200, insert(A.oid, 2, "x"), wider, insert(A.oid, 3, "x", "y")), 0.0)
    assert d.batch.relations == {A.oid: [(0, A), (2, wider)]}
    d.take()
    assert d.batch.relations == {A.oid: [(0, wider)]}


BY_V = relation(A.oid, "a", key=("v",))
FULL = relation(A.oid, "a", identity="f")


@pytest.mark.parametrize("other", [BY_V, FULL, relation(A.oid, "a", key=())])
def test_a_transaction_from_which_on_rows_go_by_another_key_begins_a_batch(other: Relation) -> None:
    d = Dispatcher(Lsn(10))
    frames = transaction(100, A, insert(A.oid, 1, "x"), B) + transaction(200, other, insert(A.oid, 2, "x"))
    left = frames + transaction(300, insert(A.oid, 3, "x"))
    left = left[d.feed(left, 0.0) :]
    assert d.closing
    assert [t.end_lsn for t in d.take().transactions] == [100]
    assert d.feed(left, 0.0) == len(left)
    assert not d.closing
    assert [t.end_lsn for t in d.batch.transactions] == [200, 300]
    assert d.batch.relations[A.oid] == [(0, A), (0, other)]


def test_a_streamed_or_prepared_transaction_that_moves_a_key_begins_a_batch(tmp_path: Path) -> None:
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    streamed = [
        StreamStart(Xid(7), True),
        replace(A, xid=Xid(7)),
        replace(insert(A.oid, 1, "x"), xid=Xid(7)),
        replace(BY_V, xid=Xid(7)),
        StreamStop(),
        StreamCommit(Xid(7), 0, Lsn(192), Lsn(200), 0),
    ]
    d.feed(transaction(100, A, insert(A.oid, 1, "x")), 0.0)
    assert d.feed([frame(message) for message in streamed], 0.0) == 5
    d.take()
    assert d.feed([frame(streamed[-1])], 0.0) == 1
    prepared = [
        BeginPrepare(Lsn(290), Lsn(300), 5, Xid(9), "g"),
        A,
        insert(A.oid, 2, "y"),
        Prepare(0, Lsn(290), Lsn(300), 5, Xid(9), "g"),
    ]
    d.feed([frame(message) for message in prepared], 0.0)
    assert isinstance(d.waiting, Preparation)
    announced = [*((0, one) for one in d.waiting.relation_cache.values()), *d.waiting.relations]
    cached = len(d.waiting.relation_cache)
    kept = Kept(d.waiting.transaction, 9, "g", Lsn(290), Lsn(300), 5, False, announced, (), (), cached)
    d.kept()
    assert d.closing, "rows of others that follow go by the other key"
    assert set(d.take().unnamed) == {A.oid}
    assert d.batch.relations[A.oid] == [(0, A)]
    d.feed(transaction(350, B, insert(B.oid, 1, "x")), 0.0)
    d.feed([frame(CommitPrepared(0, Lsn(390), Lsn(400), 6, Xid(9), "g"))], 0.0)
    assert d.close_before(kept)
    d.take()
    assert not d.close_before(kept)
    d.committed(kept, 0.0, None)
    taken = d.take()
    assert (taken.relations[A.oid], set(taken.unnamed)) == ([(0, A), (0, BY_V), (0, A), (1, A)], set())


def _prepare(d: Dispatcher, xid: int, *messages: Relation | Insert) -> Kept:
    """Prepare a transaction that ends at 100 times its xid."""
    end = Lsn(100 * xid)
    begin, prepare = (
        BeginPrepare(Lsn(end - 10), end, 5, Xid(xid), "g"),
        Prepare(0, Lsn(end - 10), end, 5, Xid(xid), "g"),
    )
    d.feed([frame(message) for message in (begin, *messages, prepare)], 0.0)
    waiting = d.waiting
    assert isinstance(waiting, Preparation)
    known = [*((0, one) for one in waiting.relation_cache.values()), *waiting.relations]
    d.kept()
    cached = len(waiting.relation_cache)
    return Kept(waiting.transaction, xid, "g", Lsn(end - 10), end, 5, False, known, (), (), cached)


WIDER = relation(A.oid, "a", (("id", 20), ("v", 25), ("w", 25)))
RENAMED = relation(A.oid, "a_new")


def _seqs(d: Dispatcher, message: Relation) -> list[int]:
    """Return from which rows on the message holds in the open batch."""
    return [seq for seq, one in d.batch.relations[message.oid] if one == message]


def test_what_a_prepared_transaction_announces_holds_for_rows_of_others(tmp_path: Path) -> None:
    """It was altered before: the publisher has sent the definition, and does not send it again for the next transaction."""
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    d.feed(transaction(100, A, insert(A.oid, 1, "x")), 0.0)
    kept = _prepare(d, 2, WIDER, insert(A.oid, 2, "x", "y"))
    d.feed(transaction(300, insert(A.oid, 3, "x", "y")), 0.0)
    assert d.batch.relations[A.oid] == [(0, A), (1, WIDER)]
    d.take()
    d.feed([frame(CommitPrepared(0, Lsn(390), Lsn(400), 6, Xid(2), "g"))], 0.0)
    d.committed(kept, 0.0, None)
    d.feed(transaction(500, insert(A.oid, 5, "x", "y")), 0.0)
    assert d.batch.relations[A.oid] == [(0, WIDER), (0, A), (0, WIDER), (1, WIDER)]


@pytest.mark.parametrize("outcome", ["commit", "rollback", "announced by another"])
@pytest.mark.parametrize("first", [(), (A, insert(A.oid, 1, "x"))])
def test_a_name_that_is_prepared_waits_for_the_outcome(
    tmp_path: Path, first: tuple[Relation | Insert, ...], outcome: str
) -> None:
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    d.feed(transaction(100, B, insert(B.oid, 1, "x"), *first), 0.0)
    kept = _prepare(d, 2, RENAMED, insert(A.oid, 2, "x"))
    assert set(d.take().unnamed) == {A.oid}
    d.feed(transaction(300, insert(B.oid, 3, "x")), 0.0)
    assert set(d.take().unnamed) == {A.oid}
    if outcome == "announced by another":
        d.feed(transaction(310, RENAMED, insert(A.oid, 3, "x"), xid=7), 0.0)
        taken = d.take()
        assert (set(taken.unnamed), taken.announced) == (set(), {A.oid})
        return
    if outcome == "commit":
        d.feed([frame(CommitPrepared(0, Lsn(390), Lsn(400), 6, Xid(2), "g"))], 0.0)
        d.committed(kept, 0.0, None)
        assert not d.take().unnamed
        d.feed(transaction(500, insert(B.oid, 3, "x")), 0.0)
        assert not d.take().unnamed
        return
    d.feed([frame(RollbackPrepared(0, Lsn(200), Lsn(400), 5, 6, Xid(2), "g"))], 0.0)
    d.rolled_back()
    d.feed(transaction(450, insert(B.oid, 3, "x")), 0.0)
    assert set(d.take().unnamed) == {A.oid}
    d.feed(transaction(500, A, insert(A.oid, 5, "x")), 0.0)
    assert _seqs(d, A) == [0]
    assert not d.take().unnamed


def test_what_was_announced_since_holds_after_a_streamed_transaction(tmp_path: Path) -> None:
    """ALTER PUBLICATION waits for no transaction, and the publisher announces the columns once."""
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    block = [
        StreamStart(Xid(7), True),
        replace(A, xid=Xid(7)),
        replace(insert(A.oid, 1, "x"), xid=Xid(7)),
        StreamStop(),
    ]
    d.feed([frame(message) for message in block], 0.0)
    d.feed(transaction(100, WIDER, insert(A.oid, 2, "x", "y")), 0.0)
    d.feed([frame(StreamCommit(Xid(7), 0, Lsn(192), Lsn(200), 0))], 0.0)
    d.feed(transaction(300, insert(A.oid, 3, "x", "y")), 0.0)
    d.batch.read_messages()
    assert d.batch.relations[A.oid] == [(0, WIDER), (1, A), (3, WIDER)]
    d.take()
    assert d.batch.relations[A.oid] == [(0, WIDER)]


def test_after_rows_with_an_earlier_key_a_batch_ends(tmp_path: Path) -> None:
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    block = [
        StreamStart(Xid(7), True),
        replace(A, xid=Xid(7)),
        replace(insert(A.oid, 1, "x"), xid=Xid(7)),
        StreamStop(),
    ]
    d.feed([frame(message) for message in block], 0.0)
    d.feed(transaction(100, BY_V, insert(A.oid, 2, "x")), 0.0)
    commit = frame(StreamCommit(Xid(7), 0, Lsn(192), Lsn(200), 0))
    assert (d.feed([commit], 0.0), d.closing) == (0, True)
    d.take()
    assert (d.feed([commit], 0.0), d.closing) == (1, True)


def test_a_message_that_is_resent_unchanged_is_of_its_transaction_s_batch() -> None:
    """What it does not show was done before its rows, which may join a later batch than the one that is open when it comes."""
    d = Dispatcher(Lsn(10))
    d.feed(transaction(100, A, insert(A.oid, 1, "x")), 0.0)
    d.take()
    d.feed(transaction(200, B, insert(B.oid, 1, "x")), 0.0)
    *frames, commit = transaction(300, A, insert(A.oid, 2, "x"))
    d.feed(frames, 0.0)
    assert d.take().announced == {B.oid}
    d.feed([commit], 0.0)
    assert (d.batch.announced, d.batch.relations[A.oid]) == ({A.oid}, [(0, A)])


def test_what_a_skipped_transaction_has_announced_counts_for_the_next_rows() -> None:
    d = Dispatcher(Lsn(10), skip=Lsn(190))
    d.feed(transaction(200, A, insert(A.oid, 1, "x"), final=190), 0.0)
    assert (d.batch.announced, d.batch.relations, d.batch.transactions) == ({A.oid}, {A.oid: [(0, A)]}, [])


@pytest.mark.parametrize("again", ["nothing", "before", "after", "by another prepared one"])
def test_the_names_that_a_prepared_transaction_was_kept_with_are_outdated_in_a_later_stream(
    tmp_path: Path, again: str
) -> None:
    """Other tables may have been renamed since, and the stream has not said so."""
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path / "1", 1 << 20))
    d.feed(transaction(100, A, insert(A.oid, 1, "x"), B, insert(B.oid, 1, "x")), 0.0)
    kept = _prepare(d, 2, B, insert(B.oid, 2, "x"))
    later = Dispatcher(Lsn(200), ReorderBuffer(tmp_path / "2", 1 << 20))
    if again == "before":
        later.feed(transaction(300, RENAMED, insert(A.oid, 3, "x")), 0.0)
    later.feed([frame(CommitPrepared(0, Lsn(390), Lsn(400), 6, Xid(2), "g"))], 0.0)
    later.committed(kept, 0.0, None)
    if again == "after":
        later.feed(transaction(500, RENAMED, insert(A.oid, 3, "x")), 0.0)
    elif again == "by another prepared one":
        later.feed([frame(CommitPrepared(0, Lsn(490), Lsn(500), 6, Xid(3), "g"))], 0.0)
        later.committed(replace(kept, xid=3, relations=[(0, RENAMED)], cached=0), 0.0, None)
    taken = later.take()
    assert set(taken.unnamed) == ({A.oid} if again == "nothing" else set()), "it has announced b itself"
    assert B.oid in taken.announced
    later.feed(transaction(600, B, insert(B.oid, 4, "x")), 0.0)
    assert not later.take().unnamed


@pytest.mark.parametrize("outcome", ["none", "rollback", "skipped"])
def test_what_a_prepared_transaction_announces_unchanged_counts_for_rows_of_others(
    tmp_path: Path, outcome: str
) -> None:
    """Something was altered before that the message does not show, and the publisher does not repeat it after the PREPARE."""
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20), skip=Lsn(190))
    d.feed(transaction(100, A, insert(A.oid, 1, "x")), 0.0)
    d.take()
    kept = _prepare(d, 2, A, insert(A.oid, 2, "x"))
    if outcome == "rollback":
        d.feed([frame(RollbackPrepared(0, Lsn(200), Lsn(400), 5, 6, Xid(2), "g"))], 0.0)
        d.rolled_back()
    elif outcome == "skipped":
        d.feed([frame(CommitPrepared(0, Lsn(390), Lsn(400), 6, Xid(2), "g"))], 0.0)
        assert not d.committed(kept, 0.0, None)
    d.feed(transaction(500, insert(A.oid, 3, "x")), 0.0)
    taken = d.take()
    assert (taken.announced, taken.relations[A.oid]) == ({A.oid}, [(0, A)])


class Noted:
    """The calls of stream_ahead.Ahead that the dispatcher makes; it stages nothing."""

    def __init__(self) -> None:
        self.taken: list[Transaction] = []

    def accepts(self, xid: int) -> bool:
        return True

    def add(self, xid: int, part: Transaction, known: object) -> None:
        self.taken.append(part)

    def parts(self, xid: int) -> list[Transaction]:
        return self.taken if xid == 7 else []


def test_what_a_skipped_transaction_has_announced_is_not_lost_in_one_that_was_staged_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of that one's own tables alone the publisher is looked at."""
    monkeypatch.setattr(apply.pipeline.dispatch, "PART_BYTES", 1)
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20), skip=Lsn(190), ahead=Noted())  # type: ignore[arg-type]
    d.feed(transaction(200, A, insert(A.oid, 1, "x"), final=190), 0.0)
    streamed = [
        StreamStart(Xid(7), True),
        replace(B, xid=Xid(7)),
        replace(insert(B.oid, 1, "x"), xid=Xid(7)),
        StreamStop(),
        StreamCommit(Xid(7), 0, Lsn(292), Lsn(300), 0),
    ]
    d.feed([frame(message) for message in streamed], 0.0)
    assert d.closing
    assert d.take().announced == {A.oid}
    assert d.batch.announced == {A.oid}
    d.feed(transaction(400, insert(A.oid, 2, "x")), 0.0)
    d.take()
    assert not d.batch.announced


def test_stop_at_lets_nothing_in_that_ends_later() -> None:
    d = Dispatcher(Lsn(10))
    frames = [
        *transaction(100, A, insert(A.oid, 1, "x")),
        *transaction(200, insert(A.oid, 2, "x")),
        *transaction(300, insert(A.oid, 3, "x")),
    ]
    assert d.feed(frames, 0.0, stop_at=Lsn(200)) == 7
    assert d.batch.last_lsn == 200
    d = Dispatcher(Lsn(10))
    assert d.feed(frames, 0.0, stop_at=Lsn(250)) == 10
    assert d.batch.last_lsn == 200
    assert d.position >= 250


def test_pause_at_ends_a_batch_there() -> None:
    d = Dispatcher(Lsn(10))
    frames = [*transaction(100, A, insert(A.oid, 1, "x")), *transaction(200, insert(A.oid, 2, "x"))]
    assert d.feed(frames, 0.0, pause_at=Lsn(100)) == 4
    assert d.batch.last_lsn == 100


def test_messages_other_than_changes_are_ignored() -> None:
    d = Dispatcher(Lsn(10))
    message = LogicalMessage(True, Lsn(40), "p", b"x")
    d.feed(
        transaction(200, Origin(Lsn(5), "o"), A, Type(Oid(9), "public", "mood"), message, insert(A.oid, 1, "x")), 0.0
    )
    d.feed([frame(message)], 0.0)
    assert d.batch.rows == 1


def test_bytes_held_are_counted_once() -> None:
    d = Dispatcher(Lsn(10))
    frames = transaction(200, A, *(insert(A.oid, i, "x" * i) for i in range(50)))
    for one in frames[:-1]:
        d.feed([one], 0.0)
    expected = sum(map(len, frames[2:-1]))
    assert d._open is not None
    assert d._open.nbytes == expected
    d.feed(frames[-1:], 0.0)
    assert d.batch.memory == d.batch.nbytes == expected


BEGIN = frame(Begin(Lsn(100), 0, Xid(1)))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([frame(insert(A.oid, 1, "x"))], "row change outside a transaction"),
        ([frame(truncate(A.oid))], "TRUNCATE outside a transaction"),
        ([frame(Commit(0, Lsn(100), Lsn(108), 0))], "COMMIT outside a transaction"),
        ([BEGIN, BEGIN], "BEGIN inside a transaction"),
        ([BEGIN[:-1]], "malformed BEGIN"),
        ([BEGIN + b"x"], "malformed BEGIN"),
        ([BEGIN, frame(Commit(0, Lsn(100), Lsn(108), 0)) + b"x"], "malformed COMMIT"),
        ([BEGIN, frame(Commit(0, Lsn(101), Lsn(108), 0))], "incorrect commit LSN"),
        ([BEGIN, frame(Commit(0, Lsn(100), Lsn(100), 0))], "went back"),
        ([*transaction(300), *transaction(200)], "went back"),
        ([BEGIN[: XLOG_HEADER + 1] + bytes(20)], "final_lsn not set"),
        ([frame(StreamStop())], "STREAM STOP message without STREAM START"),
        ([b""], "no data left"),
        ([b"w"], "insufficient data"),
        ([b"w" + bytes(24)], "no data left"),
        ([b"k" + bytes(3)], "insufficient data"),
        ([b"x" + bytes(40)], "unexpected message type"),
        ([b"w" + bytes(24) + b"?"], "invalid logical replication message type"),
    ],
)
def test_messages_out_of_order_are_a_protocol_violation(frames: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolViolation, match=text):
        Dispatcher(Lsn(10)).feed(frames, 0.0)


def test_the_next_commit_record_may_begin_where_the_last_ended() -> None:
    d = Dispatcher(Lsn(10))
    d.feed([*transaction(100, A, insert(A.oid, 1, "x")), *transaction(108, insert(A.oid, 2, "x"), final=100)], 0.0)
    assert [t.end_lsn for t in d.batch.transactions] == [100, 108]


START = frame(StreamStart(Xid(7), True))
STOP = frame(StreamStop())
PREPARED = (Lsn(92), Lsn(100), 0, Xid(7), "g")


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([frame(StreamStart(Xid(7), False))], "streams from its middle"),
        ([START, STOP, START], "from its start again"),
        ([START, START], "STREAM START message inside"),
        ([BEGIN, START], "STREAM START message inside"),
        ([START, BEGIN], "BEGIN inside a transaction"),
        ([START, frame(StreamCommit(Xid(7), 0, Lsn(92), Lsn(100), 0))], "without STREAM STOP"),
        ([frame(StreamCommit(Xid(7), 0, Lsn(92), Lsn(100), 0))], "which was not streamed"),
        ([START, frame(StreamAbort(Xid(7), Xid(7)))], "without STREAM STOP"),
        ([START, STOP, frame(insert(A.oid, 1, "x"))], "outside a transaction"),
        ([frame(StreamPrepare(0, *PREPARED))], "which was not streamed"),
        ([START, frame(Prepare(0, *PREPARED))], "outside a prepared transaction"),
        ([BEGIN, frame(Prepare(0, *PREPARED))], "outside a prepared transaction"),
        ([frame(Prepare(0, Lsn(100), *PREPARED[1:]))], "went back"),
        ([frame(BeginPrepare(*PREPARED)), frame(Commit(0, Lsn(92), Lsn(100), 0))], "COMMIT outside"),
        ([frame(BeginPrepare(*PREPARED)), frame(Prepare(0, Lsn(91), *PREPARED[1:]))], "incorrect prepare LSN"),
        ([frame(BeginPrepare(*PREPARED)), frame(CommitPrepared(0, *PREPARED))], "inside a transaction"),
    ],
)
def test_stream_messages_out_of_order_are_a_protocol_violation(frames: list[bytes], text: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolViolation, match=text):
        Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20)).feed(frames, 0.0)


def test_of_a_transaction_that_changed_nothing_its_prepare_and_outcome_may_come_alone(tmp_path: Path) -> None:
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    d.feed([frame(Prepare(0, *PREPARED))], 0.0)
    assert (d.waiting, d.position, d.decided) == (None, 100, 100)
    frames = [frame(CommitPrepared(0, Lsn(192), Lsn(200), 0, Xid(7), "g")), *transaction(300, A, insert(A.oid, 1, "x"))]
    assert d.feed(frames, 0.0) == 1
    d.committed_nothing()
    assert (d.position, d.decided, d.idle) == (200, 200, True)
    d.feed(frames[1:], 0.0)
    assert [t.end_lsn for t in d.batch.transactions] == [300]


def test_a_prepare_that_the_stream_has_passed_moves_nothing_back(tmp_path: Path) -> None:
    """A transaction that was prepared before two-phase commit was enabled comes with its outcome."""
    d = Dispatcher(Lsn(10), ReorderBuffer(tmp_path, 1 << 20))
    d.feed(transaction(200, A, insert(A.oid, 1, "x")), 0.0)
    d.take()
    d.feed([frame(m) for m in (BeginPrepare(*PREPARED), insert(A.oid, 2, "x"), Prepare(0, *PREPARED))], 0.0)
    assert isinstance(d.waiting, Preparation)
    kept = Kept(d.waiting.transaction, 7, "g", *PREPARED[:3], False, [(0, A)], (), ())
    d.kept()
    assert (d.position, d.decided) == (200, 200)
    d.feed([frame(CommitPrepared(0, Lsn(292), Lsn(300), 0, Xid(7), "g"))], 0.0)
    assert d.committed(kept, 0.0, None)
    assert [(t.xid, t.end_lsn) for t in d.batch.transactions] == [(7, 300)]
    assert (d.position, d.decided) == (300, 300)


def test_streams_that_were_not_asked_for_are_refused() -> None:
    for one in (START, frame(Prepare(0, *PREPARED)), frame(CommitPrepared(0, *PREPARED))):
        with pytest.raises(ProtocolViolation, match="it was not asked for"):
            Dispatcher(Lsn(10)).feed([one], 0.0)


def test_a_transaction_in_progress_holds_nothing_back(tmp_path: Path) -> None:
    """It ends past the keepalive's LSN, so a restart sends it again as a whole."""
    buffer = ReorderBuffer(tmp_path, 1 << 20)
    d = Dispatcher(Lsn(10), buffer)
    tagged = frame(replace(insert(A.oid, 1, "x"), xid=Xid(8)))
    d.feed([START, tagged, keepalive(40)], 0.0)
    assert d.position == 10, "inside a block the publisher is further than what it has sent"
    d.feed([STOP, keepalive(50)], 0.0)
    assert (d.position, d.idle) == (50, True)
    d.feed([frame(StreamAbort(Xid(7), Xid(8))), frame(StreamCommit(Xid(7), 0, Lsn(92), Lsn(100), 0))], 0.0)
    assert (d.position, d.decided, d.idle, buffer.memory) == (100, 100, True, 0)


def test_a_large_transaction_moves_to_the_buffer(tmp_path: Path) -> None:
    buffer = ReorderBuffer(tmp_path, 1 << 20)
    d = Dispatcher(Lsn(10), buffer)
    frames = transaction(200, A, *(insert(A.oid, i, "x" * 1000) for i in range(600)), truncate(A.oid))
    for first in range(0, len(frames), 100):
        d.feed(frames[first : first + 100], 0.0)
    assert (d.batch.memory, d.batch.rows) == (0, 600)
    assert d.batch.nbytes == sum(map(len, frames[2:-2]))
    assert d.batch.truncations[0].seq == 600
    (large,) = d.batch.large
    assert large.count == 600
