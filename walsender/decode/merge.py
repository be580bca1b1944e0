"""The order in which a server sends the changes of a transaction and its subtransactions.

It is the order of the WAL, except for changes of different subtransactions with the same LSN: a logical message has the
LSN of its record's end, which is where the next change begins.  Which of the two comes first depends on their places in
the server's heap; the same heap decides here.  The changes of one subtransaction always stay in order.

Follows reorderbuffer.c (ReorderBufferIterTXNInit, ReorderBufferIterTXNNext), binaryheap.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from walsender.decode.changes import HEAD


def merged(frames: Sequence[bytes], xids: Iterable[int]) -> list[bytes]:
    """Return `frames`, which are in the order of the WAL, in the order in which a server sends them.

    `xids`: the transaction, then its subtransactions in the order in which they became known.
    """
    changes: dict[int, list[tuple[int, bytes]]] = {xid: [] for xid in xids}
    for frame in frames:
        _, xid, _, lsn = HEAD.unpack_from(frame)
        changes[xid].append((lsn, frame))
    queues = [iter(queue) for queue in changes.values() if queue]
    nodes = [(next(queue), queue) for queue in queues]
    lsns = [node[0][0] for node in nodes]
    heap = list(range(len(nodes)))
    for place in range((len(heap) - 2) >> 1, -1, -1):
        _sift_down(heap, lsns, place)
    found: list[bytes] = []
    while heap:
        number = heap[0]
        (_, frame), queue = nodes[number]
        found.append(frame)
        following = next(queue, None)
        if following is not None:
            nodes[number] = (following, queue)
            lsns[number] = following[0]
        else:
            last = heap.pop()
            if not heap:
                break
            heap[0] = last
        _sift_down(heap, lsns, 0)
    return found


def _sift_down(heap: list[int], lsns: Sequence[int], place: int) -> None:
    """Move the node at `place` down to where it belongs; the smallest LSN is at the top (binaryheap.c: sift_down)."""
    number = heap[place]
    while True:
        child = 2 * place + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and lsns[heap[child + 1]] < lsns[heap[child]]:
            child += 1
        if lsns[number] <= lsns[heap[child]]:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = number
