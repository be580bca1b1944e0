"""Writes the reference pages from the modules that are their source: settings, subscription options, views, types.

python scripts/reference.py DIRECTORY
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from catalog.system_views import VIEWS
from pubsub.protocol import types
from pubsub.settings import Settings
from pubsub.sql.options import CREATE_OPTIONS, SubscriptionOptions

# format_type's name, oid and type modifier; types that are not listed are kept as PostgreSQL's text.
_TYPES = (
    ("boolean", types.BOOLOID, -1),
    ("smallint", types.INT2OID, -1),
    ("integer", types.INT4OID, -1),
    ("bigint", types.INT8OID, -1),
    ("oid", types.OIDOID, -1),
    ("real", types.FLOAT4OID, -1),
    ("double precision", types.FLOAT8OID, -1),
    ("numeric(12,2)", types.NUMERICOID, (12 << 16 | 2) + 4),
    ("numeric", types.NUMERICOID, -1),
    ("date", types.DATEOID, -1),
    ("timestamp", types.TIMESTAMPOID, -1),
    ("timestamp with time zone", types.TIMESTAMPTZOID, -1),
    ("bytea", types.BYTEAOID, -1),
    ("every other type", 25, -1),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main(directory: Path) -> None:
    """Write one page for each of the four."""
    directory.mkdir(parents=True, exist_ok=True)
    defaults = {field.name: field.default for field in dataclasses.fields(SubscriptionOptions)}
    pages = {
        "settings": table(("setting", "default"), Settings(home=directory).show_all()),
        "options": table(("option", "default"), [(name, str(defaults[name])) for name in CREATE_OPTIONS]),
        "views": "\n".join(
            f"## {name}\n\n" + table(("column", "type"), [(column, kind.name.lower()) for column, kind in view.columns])
            for name, view in VIEWS.items()
        ),
        "types": table(
            ("PostgreSQL", "Delta"),
            [(name, types.spark_ddl(types.delta_type(oid, modifier))) for name, oid, modifier in _TYPES],
        ),
    }
    for name, text in pages.items():
        (directory / f"{name}.md").write_text(f"# {name.capitalize()}\n\n{text}", encoding="utf-8")
        print(directory / f"{name}.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
