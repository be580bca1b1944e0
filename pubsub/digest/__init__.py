"""Rows as 64-bit hashes, computed by PostgreSQL in SQL and here on Arrow columns, with the same result.

    forms     each column's canonical text: an SQL expression for the publisher, a function on Arrow arrays
    hashing   PostgreSQL's hashtextextended, for all rows of a column at once
    sums      counts and sums of hashes by range of the key's hash, which any two sides can compare in any order
    source    the publisher's side: statements, and sessions under one snapshot
    target    the Delta side: one version of a table, read in pieces

`pubsub.node.verify` compares tables by them; `launcher.repairs` finds rows by them.
"""
