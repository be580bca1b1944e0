"""Random crashes of the real thing: a server, a daemon and its JVM under load, and faults at them, several at once.

`plan` draws a round from its seed: server, options, schedule of faults.  `load` writes at the publisher.  `faults` carries the
schedule out.  `settle` ends it all and waits for the catch-up; `check` compares, and looks for what was left behind.  `machine`
has what rounds share: servers, nodes, another program's Spark.  `round` runs one.

The same seed gives the same schedule and the same statements, not the same moments: threads and processes are real.
"""
