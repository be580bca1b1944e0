"""The system catalogs of a node, for psql's \\d, drivers and tools: pg_catalog and information_schema, in SQLite.

    catalog's state ─► tables (SQLite, in memory)
    PostgreSQL's SQL ─► translate ─► SQLite's, with PostgreSQL's functions (functions) ─► rows, with types (result_types)

All of PostgreSQL 18's catalogs are there, with their columns (definitions.json, made by scripts/system_catalogs.py); those
that a node has something to say about have rows.
"""
