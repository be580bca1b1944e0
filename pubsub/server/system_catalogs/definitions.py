"""PostgreSQL 18's system catalogs as definitions.json has them, with the node's own columns and types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from catalog.system_views import VIEWS

PUBLISHED: Final = "pubsub_publication_tables"
"""A relation of our own: what pg_get_publication_tables returns, for every publication."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Definitions:
    """PostgreSQL's catalogs: for each schema and relation oid, kind and columns with their types; and its types."""

    relations: Mapping[str, Mapping[str, tuple[int, str, tuple[tuple[str, str], ...]]]]
    types: tuple[Row, ...]

    @property
    def type_oids(self) -> dict[str, int]:
        return {row["typname"]: row["oid"] for row in self.types}


@cache
def definitions() -> Definitions:
    """Return what definitions.json says, with the node's own columns after PostgreSQL's."""
    read = json.loads(Path(__file__).with_name("definitions.json").read_text("utf-8"))
    relations: dict[str, dict[str, tuple[int, str, tuple[tuple[str, str], ...]]]] = {}
    for schema in ("pg_catalog", "information_schema"):
        relations[schema] = {}
        for name, (oid, kind, shown) in read[schema].items():
            columns = [tuple(one.rsplit(":", 1)) for one in shown.split(" ")]
            view = VIEWS.get(name) if schema == "pg_catalog" else None
            if view is not None:
                known = {column for column, _ in columns}
                columns += [(column, _NODE_TYPES[kind_.value]) for column, kind_ in view.columns if column not in known]
            relations[schema][name] = (oid, kind, tuple((column, type_) for column, type_ in columns))
    for number, (name, view) in enumerate(sorted(VIEWS.items())):
        # Views that PostgreSQL does not have.
        own = tuple((column, _NODE_TYPES[kind_.value]) for column, kind_ in view.columns)
        relations["pg_catalog"].setdefault(name, (16200 + number, "v", own))
    ours = (("pubname", "name"), ("pubid", "oid"), ("relid", "oid"), ("attrs", "int2vector"), ("qual", "text"))
    relations["pg_catalog"][PUBLISHED] = (16382, "v", ours)
    names = read["type_columns"].split()
    return Definitions(relations, tuple(dict(zip(names, row, strict=True)) for row in read["types"]))


_NODE_TYPES: Final = {
    "oid": "oid", "text": "text", "bigint": "int8", "double precision": "float8", "boolean": "bool", "pg_lsn": "pg_lsn",
    "timestamp with time zone": "timestamptz", "text[]": "_text",
}  # fmt: skip
