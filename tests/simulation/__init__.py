"""A subscriber's life under a virtual clock, thousands of times, each from its seed.

    python -m tests.simulation --seeds 1000            # 0 to 999, on all cores
    python -m tests.simulation --seed 4711 --story     # one, as a story

The subscriber is the real one: catalog, launcher, workers, pipeline, staging, Delta's log and our writer, and the commands.  Models
take the place of what lies outside its process:

    publisher.py    servers with WAL, transactions, slots, timelines; walsender.py streams from them, sessions.py answers SQL
    lake.py         the store of the Delta tables, in memory, and Delta's transactions: refused, made, or not known to be made
    engine.py       Spark's JVM, which outlives a killed daemon
    catalog.py      the catalog's SQLite without threads

    life.py         one process: its tasks, and its death between any two rounds or in any durable write; daemon.py: a daemon's
    loop.py         the event loop: virtual time, threads as tasks, the same order in every run

    history.py      what happens from outside: a list of steps, made from a seed; steps.py takes them
    world.py        what it happens to
    oracle.py       what must hold, at each commit and status message, and in the end, to which settle.py brings it
    run.py          one history; many.py several, shrink.py a smaller one that still fails
"""
