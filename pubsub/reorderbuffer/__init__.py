"""Transactions of any size in bounded memory: assembled, spilled to disk, read back, kept.

    log          FrameLog: frames of transactions that arrive whole
    block        changes in byte buffers
    files        the file layer and its errors
    directories  the directories that changes spill into: locked by one process, removed once its lock is gone
    segments     changes on disk: Arrow streams with a checksum for each batch
    changes      one log: disk, then memory
    transaction  a top-level transaction and its subtransactions; how it is read
    buffer       ReorderBuffer: all transactions, the limit, statistics
    durable      a whole transaction in one durable file (two-phase)

Start reading at `buffer`.
"""
