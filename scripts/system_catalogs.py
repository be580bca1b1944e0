"""Writes the columns of PostgreSQL 18's system catalogs, and its built-in types, for a node's own (pubsub/server/system_catalogs).

    .venv/bin/python scripts/system_catalogs.py

They are read from a PostgreSQL 18 of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pubsub.testing.servers import EmbeddedPostgres

_TARGET = Path(__file__).parents[1] / "pubsub" / "server" / "system_catalogs" / "definitions.json"
_COLUMNS = """
    SELECT n.nspname, c.relname, c.oid::int, c.relkind, json_agg(json_build_array(a.attname, t.typname) ORDER BY a.attnum)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
    JOIN pg_type t ON t.oid = a.atttypid
    WHERE n.nspname IN ('pg_catalog', 'information_schema') AND c.relkind IN ('r', 'v') AND a.attnum > 0
    GROUP BY 1, 2, 3, 4 ORDER BY 1, 2
"""
_TYPES = """
    SELECT oid::int, typname, typlen, typbyval, typtype, typcategory, typispreferred, typdelim, typelem::int, typarray::int,
        typbasetype::int, typtypmod, typcollation::int, typalign, typstorage, typnotnull, typndims
    FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typrelid = 0 AND oid < 10000
        AND (typelem = 0 OR typelem < 10000) ORDER BY oid
"""
_TYPE_COLUMNS = (
    "oid typname typlen typbyval typtype typcategory typispreferred typdelim typelem typarray typbasetype typtypmod "
    "typcollation typalign typstorage typnotnull typndims"
)


def main() -> None:
    with EmbeddedPostgres("18") as server:
        if not server.running:
            server.start()
        relations: dict[str, dict[str, Any]] = {}
        for schema, name, oid, kind, columns in server.query(_COLUMNS):
            shown = " ".join(f"{column}:{type_}" for column, type_ in columns)
            relations.setdefault(schema, {})[name] = [oid, kind, shown]
        types = [list(row) for row in server.query(_TYPES)]
    lines = ["{"]
    for schema, found in relations.items():
        lines.append(f'"{schema}": {{')
        lines += [f"{json.dumps(name)}: {json.dumps(found[name])}," for name in found]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("},")
    lines.append(f'"type_columns": {json.dumps(_TYPE_COLUMNS)},')
    lines.append('"types": [')
    lines += [json.dumps(row, separators=(",", ":")) + "," for row in types]
    lines[-1] = lines[-1].removesuffix(",")
    lines += ["]", "}"]
    _TARGET.parent.mkdir(parents=True, exist_ok=True)
    _TARGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
