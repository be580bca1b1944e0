"""Whether a subscription's Delta tables hold the publisher's rows: both sides compared at one LSN, while both move.

    publisher   the exported snapshot of a temporary slot: the rows at the slot's consistent point, an LSN
    Delta       the apply worker ends a batch there (apply.snapshot_point), so that a version shows exactly this LSN;
                it is pinned
    compare     counts and sums of row hashes by range (pubsub.digest), then the rows of the ranges that differ
    repair      the daemon reads the rows that differ anew, at a later LSN, between two batches (launcher.repairs)

docs/verify.md says what a user sees of it.
"""
