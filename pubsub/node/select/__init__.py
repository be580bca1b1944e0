"""SELECT: resolves names, types and operators as PostgreSQL does; DataFusion finds the rows, without a JVM.

    text ─► sqlglot's tree ─► queries, expressions (names, types, casts, functions as PostgreSQL finds them)
         ─► DataFusion's SQL, with generated names ─► Arrow ─► outputs (Python values)

Where DataFusion differs from PostgreSQL (integer overflow, rounding, division by zero), the SQL spells out PostgreSQL's
semantics, or the query is refused.  docs/select.md lists what is supported.
"""
