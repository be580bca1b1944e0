"""The reorder buffer: cases that the property test's model does not cover."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from pubsub.errors import DuplicateObject, ProtocolViolation
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Insert, Truncate, read_message
from pubsub.protocol.rows import decode_changes, split_by_relation
from pubsub.reorderbuffer.buffer import ReorderBuffer, Statistics
from pubsub.reorderbuffer.files import FileFailure
from pubsub.reorderbuffer.log import BLOCK_BYTES
from pubsub.reorderbuffer.transaction import State
from tests.support.frames import frame, relation
from tests.support.reorderbuffer import WORK_MEM, read, rows, spilled


@pytest.fixture
def buffer(tmp_path: Path) -> ReorderBuffer:
    return ReorderBuffer(tmp_path / "spill", WORK_MEM)


def test_a_transaction_in_memory(buffer: ReorderBuffer) -> None:
    assert buffer.memory == 0
    buffer.append(10, rows(10, 3))
    buffer.append(11, rows(11, 2), top=10)
    buffer.append(10, [b""])
    assert buffer.memory > 500
    transaction = buffer.commit(10)
    assert transaction is not None
    assert read(transaction) == [*rows(10, 3), *rows(11, 2), b""]
    assert (transaction.count, transaction.nbytes, transaction.xids) == (6, 500, {10, 11})
    [chunk] = transaction.chunks(1 << 20)
    assert [xid for block in chunk.blocks for xid in block.xids().tolist()] == [10] * 3 + [11] * 2 + [10]
    assert buffer.get(10) is buffer.get(11) is None
    transaction.release()
    transaction.release()
    assert buffer.memory == 0
    assert buffer.statistics == Statistics(total_txns=1, total_bytes=500)
    with pytest.raises(ValueError, match="cannot be read"):
        read(transaction)


def test_memory_is_what_the_buffers_hold(buffer: ReorderBuffer) -> None:
    """Compare with tracemalloc, which sees all allocations."""
    frames = rows(10, 20_000)
    buffer.append(9, [b"x"])
    tracemalloc.start()
    try:
        held, before = buffer.memory, tracemalloc.get_traced_memory()[0]
        for first in range(0, len(frames), 100):
            buffer.append(10, frames[first : first + 100])
        counted, allocated = buffer.memory - held, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert counted >= 2_080_000
    assert counted == pytest.approx(allocated, rel=0.01)


def test_the_largest_moves_to_disk(buffer: ReorderBuffer, tmp_path: Path) -> None:
    buffer.append(10, rows(10, 300))
    buffer.append(20, rows(20, 200))
    assert not buffer.exceeded
    buffer.spill()
    assert spilled(tmp_path / "spill") == []
    buffer.append(10, rows(10, 200))
    assert buffer.exceeded
    buffer.spill()
    assert not buffer.exceeded
    [file] = spilled(tmp_path / "spill")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    small, large = buffer.get(20), buffer.get(10)
    assert small is not None
    assert large is not None
    assert (small.spilled, large.spilled, large.memory) == (False, True, 0)
    assert buffer.memory == small.memory
    buffer.append(10, rows(11, 1))
    with buffer.commit(20) as transaction:  # type: ignore[union-attr]
        assert read(transaction) == rows(20, 200)
    with buffer.commit(10) as transaction:  # type: ignore[union-attr]
        assert read(transaction) == [*rows(10, 300), *rows(10, 200), *rows(11, 1)]
    assert spilled(tmp_path / "spill") == []
    assert buffer.memory == 0
    assert buffer.statistics == Statistics(
        spill_txns=1, spill_count=1, spill_bytes=50_000, total_txns=2, total_bytes=70_100
    )


def test_a_committed_transaction_moves_to_disk_until_it_is_read(buffer: ReorderBuffer) -> None:
    buffer.append(10, rows(10, 1000))
    transaction = buffer.commit(10)
    assert transaction is not None
    reader = transaction.chunks(10_000)
    next(reader)
    buffer.spill()
    transaction.spill(lambda _: pytest.fail("it is being read"))
    assert transaction.memory > 100_000
    with pytest.raises(ValueError, match="being read"):
        transaction.release()
    reader.close()
    buffer.spill()
    assert transaction.memory == buffer.memory == 0
    assert read(transaction) == rows(10, 1000)


def test_what_an_earlier_process_left_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    first = ReorderBuffer(directory, WORK_MEM)
    first.append(10, rows(10, 1000))
    first.spill()
    (directory / "somebody-else").touch()
    directory.chmod(0o755)
    assert len(spilled(directory)) == 2
    ReorderBuffer(directory, WORK_MEM)
    assert spilled(directory) == [directory / "somebody-else"]
    first.append(10, rows(10, 1000))
    with pytest.raises(FileFailure):
        first.spill()  # two buffers must not share a directory: this one's file is gone
    first.append(20, rows(20, 1000))
    first.abort(10)
    first.spill()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_directories_are_made_for_this_user(tmp_path: Path) -> None:
    buffer = ReorderBuffer(tmp_path / "node" / "spill" / "worker", WORK_MEM)
    buffer.append(10, rows(10, 1000))
    buffer.spill()
    made = [tmp_path / "node", tmp_path / "node" / "spill", tmp_path / "node" / "spill" / "worker"]
    assert [stat.S_IMODE(one.stat().st_mode) for one in made] == [0o700] * 3


def test_chunks_are_bounded(buffer: ReorderBuffer) -> None:
    frames = [*rows(10, 500), bytes(5000), *rows(10, 500)]
    for first in range(0, len(frames), 70):
        buffer.append(10, frames[first : first + 70])
        if first % 3 == 0:
            buffer.work_mem = 0
            buffer.spill()
    transaction = buffer.commit(10)
    assert transaction is not None
    chunks = list(transaction.chunks(1000))
    assert all(chunk.nbytes <= 1000 for chunk in chunks if chunk.count > 1)
    assert len(chunks) < 120
    firsts = np.cumsum([0, *(chunk.count for chunk in chunks)])
    assert [chunk.first for chunk in chunks] == firsts[:-1].tolist()
    assert read(transaction, 1000) == frames


def test_a_full_block_is_closed(buffer: ReorderBuffer) -> None:
    """Append more than a block in one call, and a frame longer than a block."""
    buffer.work_mem = 1 << 30
    frames = [*rows(10, 30_000), bytes(BLOCK_BYTES + 1), *rows(10, 3)]
    buffer.append(10, frames)
    transaction = buffer.commit(10)
    assert transaction is not None
    sizes = [block.nbytes for block in transaction.blocks()]
    assert max(sizes) == BLOCK_BYTES + 1
    assert sum(size > BLOCK_BYTES for size in sizes) == 1
    assert read(transaction) == frames


def test_subtransactions(buffer: ReorderBuffer) -> None:
    """10 ( 11 ( 12 ) 13 ( 14 ) ): only after 11 is rolled back is 12 assigned to 11, and 14 to 13."""
    for xid in (11, 12, 13, 14):
        buffer.append(xid, rows(xid, 2), top=10)
    buffer.append(10, rows(10, 2))
    buffer.abort(11)
    buffer.assign(12, 11)
    buffer.assign(14, 13)
    buffer.assign(12, 10)  # a record names the top-level transaction again
    buffer.abort(99)
    transaction = buffer.commit(10)
    assert transaction is not None
    assert transaction.aborted == {11, 12}
    assert read(transaction) == [*rows(13, 2), *rows(14, 2), *rows(10, 2)]
    assert (transaction.count, transaction.nbytes) == (6, 600)
    assert buffer.statistics.total_bytes == 600


def test_changes_that_come_with_the_nearer_parent(buffer: ReorderBuffer) -> None:
    """13 is known to be in 10; later changes say that it is in 11, which is rolled back."""
    buffer.append(11, rows(11, 1), top=10)
    buffer.append(13, rows(13, 1), top=10)
    buffer.append(13, rows(13, 1), top=11)
    buffer.abort(11)
    buffer.append(10, rows(10, 1))
    assert read(buffer.commit(10)) == rows(10, 1)


def test_contradicting_parents_of_a_subtransaction_are_refused(buffer: ReorderBuffer) -> None:
    buffer.append(11, rows(11, 1), top=10)
    buffer.append(21, rows(21, 1), top=20)
    with pytest.raises(ValueError, match="cannot be a subtransaction"):
        buffer.assign(11, 20)
    with pytest.raises(ValueError, match="cannot be a subtransaction"):
        buffer.assign(10, 11)
    with pytest.raises(ValueError, match="11 is a subtransaction"):
        buffer.commit(11)
    buffer.assign(12, 11)
    with pytest.raises(ValueError, match="cannot be a subtransaction"):
        buffer.assign(11, 12)
    buffer.append(30, rows(30, 1))
    buffer.take(30).release()
    with pytest.raises(ValueError, match="cannot be a subtransaction"):
        buffer.assign(30, 10)  # it was returned as a top-level transaction


def test_a_subtransaction_that_is_known_too_late(buffer: ReorderBuffer) -> None:
    buffer.append(11, rows(11, 1), lsn=Lsn(100))
    buffer.append(10, rows(10, 1), lsn=Lsn(200))
    buffer.append(11, rows(12, 1), lsn=Lsn(300))
    buffer.work_mem = 0
    buffer.spill()
    buffer.append(10, rows(13, 1))
    buffer.append(11, rows(14, 1))
    buffer.assign(11, 10)
    buffer.append(11, rows(15, 1))
    assert [one.xid for one in buffer.in_progress()] == [10]
    assert buffer.oldest_lsn() == 100
    transaction = buffer.commit(10)
    assert read(transaction) == [*rows(11, 1), *rows(10, 1), *rows(12, 1), *rows(13, 1), *rows(14, 1), *rows(15, 1)]
    assert buffer.memory > 0
    transaction.release()  # type: ignore[union-attr]
    assert buffer.memory == 0


def test_changes_rolled_back_before_their_subtransaction_is_known(buffer: ReorderBuffer) -> None:
    buffer.append(11, rows(11, 1))
    buffer.append(12, rows(12, 1), top=11)
    buffer.append(13, rows(13, 1), top=12)
    buffer.abort(12)
    buffer.append(10, rows(10, 1))
    buffer.assign(11, 10)
    assert read(buffer.commit(10)) == [*rows(11, 1), *rows(10, 1)]


def test_an_aborted_subtransaction_is_not_written(buffer: ReorderBuffer, tmp_path: Path) -> None:
    buffer.append(11, rows(11, 2000), top=10)
    buffer.abort(11)
    buffer.spill()
    assert buffer.memory == 0
    assert spilled(tmp_path / "spill") == []
    assert buffer.statistics == Statistics()
    assert read(buffer.commit(10)) == []


def test_abort(buffer: ReorderBuffer, tmp_path: Path) -> None:
    buffer.append(11, rows(11, 1000), top=10)
    buffer.spill()
    buffer.append(10, rows(10, 3))
    assert spilled(tmp_path / "spill")
    buffer.abort(10)
    assert spilled(tmp_path / "spill") == []
    assert (buffer.memory, buffer.commit(10), buffer.get(11)) == (0, None, None)
    assert buffer.statistics.total_txns == 0
    buffer.append(11, rows(11, 1))  # the xid may be used again
    assert read(buffer.commit(11)) == rows(11, 1)


def test_what_a_crash_left_is_rolled_back(buffer: ReorderBuffer) -> None:
    """Xids are compared modulo 2^32."""
    for xid in (4_294_967_290, 5, 7, 9):
        buffer.append(xid, rows(xid, 1))
    buffer.abort_older(7)
    assert [one.xid for one in buffer.in_progress()] == [7, 9]


def test_oldest_lsn(buffer: ReorderBuffer) -> None:
    assert buffer.oldest_lsn() == 0
    buffer.begin(10, Lsn(100))
    buffer.append(10, rows(10, 1), lsn=Lsn(150))
    buffer.append(20, rows(20, 1), lsn=Lsn(200))
    assert buffer.oldest_lsn() == 100
    buffer.commit(10)
    assert buffer.oldest_lsn() == 200


def test_changes_can_be_taken_from_a_transaction_in_progress(buffer: ReorderBuffer) -> None:
    buffer.append(10, rows(10, 900))
    buffer.spill()
    buffer.append(11, rows(11, 10), top=10)
    buffer.append(12, rows(12, 10), top=10)
    buffer.abort(12)
    buffer.append(20, rows(20, 9))
    largest = buffer.largest()
    assert largest is not None
    assert largest.xid == 10
    assert buffer.largest(lambda one: one.xid != 10) is buffer.get(20)
    with buffer.take(10) as part:
        assert read(part) == [*rows(10, 900), *rows(11, 10)]
        assert part.xids == {10, 11}
        assert (part.state, part.streamed) == (State.COMMITTED, False)
    buffer.append(11, rows(13, 5))
    buffer.abort(11)
    buffer.append(10, rows(14, 5))
    rest = buffer.commit(10)
    assert rest is not None
    assert rest.streamed
    assert read(rest) == rows(14, 5)
    assert buffer.statistics == Statistics(1, 1, 90_000, 1, 2, 91_500, 1, 91_500)
    with pytest.raises(KeyError):
        buffer.take(10)


def test_prepared(buffer: ReorderBuffer) -> None:
    buffer.append(10, rows(10, 3))
    assert read(buffer.prepare(10, "one")) == rows(10, 3)
    with pytest.raises(DuplicateObject):
        buffer.prepare(20, "one")
    assert buffer.get(10) is None
    empty = buffer.prepare(30, "two")
    assert read(empty) == []
    assert [gid for gid, _ in buffer.prepared()] == ["one", "two"]
    assert buffer.rollback_prepared("two")
    assert not buffer.rollback_prepared("two")
    with buffer.commit_prepared("one") as transaction:  # type: ignore[union-attr]
        assert read(transaction) == rows(10, 3)
    assert buffer.commit_prepared("one") is None
    assert buffer.memory == 0
    assert (buffer.statistics.total_txns, buffer.statistics.total_bytes) == (2, 300)


def test_a_prepared_transaction_can_be_released_before_its_outcome(buffer: ReorderBuffer) -> None:
    buffer.append(10, rows(10, 3))
    buffer.prepare(10, "one").release()
    assert buffer.memory == 0
    transaction = buffer.commit_prepared("one")
    with pytest.raises(ValueError, match="cannot be read"):
        read(transaction)


def test_a_stream(buffer: ReorderBuffer) -> None:
    """Relation messages keep their place and disappear with their subtransaction; rows decode as outside a stream."""
    there, other = relation(50, "t"), relation(51, "u")
    messages = [
        (10, there),
        (10, Insert(Oid(50), (b"1", b"a"))),
        (11, other),
        (11, Insert(Oid(51), (b"2", b"b"))),
        (12, Truncate((Oid(50),), cascade=True, restart_identity=False)),
        (12, Insert(Oid(50), (b"3", None))),
    ]
    frames = []
    for xid, message in messages:
        plain = frame(message)
        frames.append(plain[:26] + xid.to_bytes(4, "big") + plain[26:])
    buffer.append_tagged(10, frames[:4])
    buffer.append_tagged(10, frames[4:])
    buffer.abort(11, top=10)
    transaction = buffer.commit(10)
    assert transaction is not None
    assert transaction.xids == {10, 12}
    [block] = transaction.blocks()
    assert block.xids().tolist() == [10, 10, 12, 12]
    assert bytes(block.message_types()) == b"RITI"
    assert [(number, read_message(one)) for number, one in block.others()] == [(0, messages[0][1]), (2, messages[4][1])]
    found = [read_message(one, start=block.header) for one in block.frames()]
    assert found == [message for xid, message in messages if xid != 11]
    relations = split_by_relation([block])
    schema = [pa.field("id", pa.int64()), pa.field("v", pa.string())]
    changes = decode_changes(relations.pop(50), there, schema)
    assert relations == {}
    assert changes.new["id"].to_pylist() == [1, 3]
    assert changes.seq.tolist() == [1, 3]


@pytest.mark.parametrize("bad", [b"", b"w" + bytes(28), b"k" + bytes(40)])
def test_a_frame_that_does_not_name_its_transaction(buffer: ReorderBuffer, bad: bytes) -> None:
    buffer.append_tagged(10, [bad])
    with pytest.raises(ProtocolViolation):
        buffer.commit(10)


def test_plain_and_tagged_frames_do_not_mix(buffer: ReorderBuffer) -> None:
    buffer.append(10, rows(10, 1))
    with pytest.raises(ValueError, match="tagged"):
        buffer.append_tagged(10, [b"w" + bytes(40)])


def test_arrow_reads_a_spilled_transaction(buffer: ReorderBuffer) -> None:
    for xid in (10, 11, 12):
        buffer.append(xid, rows(xid, 300), top=10)
    buffer.spill()
    buffer.append(10, rows(10, 700))
    buffer.spill()
    transaction = buffer.commit(10)
    assert transaction is not None
    [path] = transaction.paths
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        table = stream.read_all()
    assert stream.schema.metadata == {b"header": b"25"}
    assert table.column("frame").to_pylist() == read(transaction)
    assert table.column("xid").to_pylist() == [10] * 300 + [11] * 300 + [12] * 300 + [10] * 700


def test_close_waits_for_a_move_to_disk(buffer: ReorderBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that awaited the moving thread may have been cancelled."""
    writing, go_on, write = threading.Event(), threading.Event(), os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        writing.set()
        assert go_on.wait(60)
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    buffer.append(10, rows(10, 1000))
    with ThreadPoolExecutor() as threads:
        spill = threads.submit(buffer.spill)
        assert writing.wait(60)
        close = threads.submit(buffer.close)
        with pytest.raises(TimeoutError):
            close.result(0.05)
        go_on.set()
        spill.result(60)
        close.result(60)
    assert buffer.memory == 0
    assert spilled(tmp_path / "spill") == []


LARGE = """
import sys
from pathlib import Path
from pubsub.protocol.rows import split_by_relation
from pubsub.reorderbuffer.buffer import ReorderBuffer
millions = int(sys.argv[2])
buffer = ReorderBuffer(Path(sys.argv[1]), 64 << 20)
head = b"w" + bytes(24) + b"I" + (700).to_bytes(4, "big") + (50).to_bytes(4, "big") + b"N" + bytes(66)
frames = [head + number.to_bytes(4, "big") for number in range(500)]
for _ in range(millions * 2000):
    buffer.append_tagged(700, frames)
    if buffer.exceeded:
        buffer.spill()
with buffer.commit(700) as transaction:
    count = 0
    for chunk in transaction.chunks(32 << 20):
        count += sum(len(some.seq) for some in split_by_relation(chunk.blocks, chunk.first)[50])
assert count == millions * 1_000_000
# Not ru_maxrss: that is the parent's, where the parent was greater before exec.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("millions", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_memory_of_a_large_transaction(tmp_path: Path, millions: int) -> None:
    """Peak RSS of a process that receives and reads it back does not depend on its size (measured: 160 to 250 MB)."""
    arguments = [sys.executable, "-c", LARGE, str(tmp_path / "spill"), str(millions)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 350 << 10


def test_reading_holds_a_chunk(buffer: ReorderBuffer) -> None:
    for _ in range(20):
        buffer.append(10, rows(10, 20_000))
        buffer.spill()
    transaction = buffer.commit(10)
    assert transaction is not None
    tracemalloc.start()
    try:
        for chunk in transaction.chunks(4 << 20):
            assert chunk.nbytes > 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert transaction.nbytes == 40_000_000
    # The current chunk, and the next one being read: frames, and 20 bytes for each.
    assert peak < 14 << 20
