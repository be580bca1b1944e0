"""Frames in blocks."""

from __future__ import annotations

from pubsub.reorderbuffer.log import FrameBlock, FrameLog

HEADER = b"w" + bytes(24)


def test_frames_keep_their_order_and_bytes() -> None:
    log = FrameLog(block_bytes=100)
    frames = [HEADER + b"I" + bytes([number]) * number for number in range(20)]
    for first in range(0, 20, 3):
        log.append(frames[first : first + 3])
    assert log.count == 20
    assert log.nbytes == sum(map(len, frames))
    blocks = log.blocks()
    assert len(blocks) > 2
    assert b"".join(block.data for block in blocks) == b"".join(frames)
    assert [int(length) for block in blocks for length in block.lengths] == list(map(len, frames))
    log.append([HEADER + b"D"])
    assert log.blocks()[-1].data == HEADER + b"D"


def test_extend_keeps_order() -> None:
    log = FrameLog()
    log.append([b"first"])
    log.extend([FrameBlock.pack([b"second", b"third"])])
    log.append([b"fourth"])
    assert b"".join(block.data for block in log.blocks()) == b"firstsecondthirdfourth"
    assert (log.count, log.nbytes) == (4, len("firstsecondthirdfourth"))
    log.clear()
    assert (log.count, log.nbytes, log.blocks()) == (0, 0, [])


def test_message_types() -> None:
    block = FrameBlock.pack([HEADER + b"B", b"k" + bytes(17), HEADER, HEADER + b"I" + bytes(8)])
    assert block.message_types().tolist() == [ord("B"), 0, 0, ord("I")]
    assert FrameBlock.pack([]).message_types().tolist() == []
    assert FrameBlock.pack([b"", HEADER]).message_types().tolist() == [0, 0]
