"""The order in which a server sends the changes of a transaction and its subtransactions, each with its own changes in order
(reorderbuffer.c: ReorderBufferIterTXNInit, ReorderBufferIterTXNNext; binaryheap.c).

It is that of the WAL but for changes with the same LSN in different subtransactions: a logical message bears the LSN where its
record ends, and so where the next one's change begins.  Which of the two comes first is decided by their places in the server's heap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from walsender.decode.changes import HEAD


def merged(frames: Sequence[bytes], xids: Iterable[int]) -> list[bytes]:
    """`frames`, in the order of the WAL, as a server sends them.  `xids`: the transaction, and its subtransactions in the order in
    which they became known."""
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
    """binaryheap.c: sift_down; the smallest LSN is to come to the top."""
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
