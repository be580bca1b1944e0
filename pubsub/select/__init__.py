"""SELECT: PostgreSQL's names, types and operators, worked out here; the rows are DataFusion's, without a JVM.

    text ─► sqlglot's tree ─► queries, expressions (names, types, casts, functions as PostgreSQL finds them)
         ─► DataFusion's SQL, every name in it ours ─► Arrow ─► outputs (values as Python has them)

What DataFusion would take otherwise than PostgreSQL is written out (an integer's overflow, rounding, division by zero) or
refused.  docs/select.md says what there is.
"""
