"""Power loss: what is reported as flushed survives it.

    record     strace records what a real run writes, names, fsyncs, and sends to the publisher (trace.py; run.py: a daemon with its
               JVM; publish.py: the publisher's server)
    cut        at a moment of the run the power fails: of what was not fsynced some is lost, torn or reordered (disk.py)
    start      what is left is opened as a daemon opens it, and compared with what had been reported by then (check.py)

Each state is made from a seed, which a failure prints.
"""
