"""Writes the reference pages (settings, subscription options, views, types) from the modules that define these.

python scripts/reference.py DIRECTORY
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from catalog.system_views import VIEWS
from pubsub.protocol.column_types import spark_ddl
from pubsub.protocol.type_contract import KINDS, NESTED, RULES, TypeRule
from pubsub.settings import Settings
from pubsub.sql.options import CREATE_OPTIONS, SubscriptionOptions

TYPES_PAGE = Path(__file__).resolve().parent.parent / "docs" / "types.md"

_TYPES_INTRODUCTION = """\
Made from `pubsub/protocol/type_contract.py` by `make docs`. PostgreSQL 15 to 19.

Each value is exact, or it is refused: nothing is rounded, clipped or made NULL. If Delta has a type with the same
values, the column gets that type, the natural one. For every other type the column is a `STRING` with PostgreSQL's own
text (`datestyle` ISO, `intervalstyle` postgres, `TimeZone` UTC, `bytea_output` hex, `extra_float_digits` 1 or more),
which `text::type` reads back to the same value. The copy and the stream, and text and binary transfer, give the same
rows.
"""

_TYPES_CHOICE = """\
## A choice for a column

Where a natural type does not hold every value, a value outside of it stops the subscription before any change of its
batch is written. The error names table, column, key and LSN. A table that has to hold such values is created with text
instead:

    CREATE SUBSCRIPTION … WITH (types = 'timestamptz text, public.prices.low text')

Commas separate the elements. Each element is a type's name, or `schema.table.column`, followed by `text`, `natural` or,
for jsonb, `variant`. A column's own choice overrides its type's. The choice counts when a Delta table is created. To
change it for an existing table, drop the Delta table, or point the subscription to another `target`, and copy it again.
"""

_TYPES_NESTED = """
    CREATE SUBSCRIPTION … WITH (types = 'integer[] natural, public.address natural, public.orders.document variant')
    CREATE SUBSCRIPTION … WITH (types = 'arrays natural, composites natural, jsonb variant, public.grids.cells text')

A user's type is named `schema.type`, its arrays `schema.type[]`; `arrays` and `composites` stand for all of them. The
types inside an array or a composite follow their own choices, and are natural without one. Domains over them, and
elements and attributes whose types are domains or enums, follow the types below.

Such columns cannot be a key: a type's choice leaves key columns text, and a choice for the key column itself is
refused. Under REPLICA IDENTITY FULL, rows are told apart by these columns as by any others. Spark 4 and DuckDB 1.5 read
all of them. The deltalake package does, too, with VARIANT as its two binary parts. DuckDB shows the JSON null in a
VARIANT as NULL.

The stream says nothing of an ALTER TYPE that changes a composite's attributes. A value with another number of
attributes than the STRUCT has fields is refused; the worker's next start looks at the type, and the table is copied
again (with on_table_error = isolate it stops until RESYNC TABLE). Attributes that were renamed, or dropped and added so
that their number is the same, are seen when the table's definition is next looked at (the worker's next start, or an
ALTER TABLE of it); the table is then copied again. Until then values stand under the old names: alter such a type while
its table is not written, and RESYNC the table.
"""

_TYPES_KEYS = """\
## Keys

A key may have any type. PostgreSQL names the row that an UPDATE or DELETE changes by the very value that is stored,
byte for byte (heapam.c: HeapDetermineColumnsInfo, ExtractReplicaIdentity). Where it takes two texts for equal keys
(numeric 1.0 and 1.00, citext, jsonb, interval), it sends an UPDATE from one to the other as a change of the key, and
Delta's row follows. Floats: 0 and -0 are one key, NaN equals NaN. A key with a nondeterministic collation is refused:
readers of the Delta table would take its equal values for different ones. Keys of several columns,
`REPLICA IDENTITY USING INDEX` and `FULL` (equal rows counted, NULLs equal to NULLs) work as in PostgreSQL. A deferrable
primary key is not used as a key, as in a replica identity: within a transaction two rows may have it.

A partitioned table that is published as its root has one key, its root's, but the publisher sends the old values that
the partition's own replica identity has (pgoutput.c: pgoutput_change). `pubsub check` names each partition whose
identity lacks columns of that key, or, under FULL without a key, is not FULL, with the ALTER TABLE that mends it; so do
the log and the status if such a change arrives. The same goes for a key with a generated column that is not published,
which servers up to 17 accept.
"""

_TYPES_BINARY = """\
## Binary transfer

With `binary = true` the publisher sends every type that has a send function in binary form, and the rows in Delta are
the same. The column "binary" says how that form is read: by columns (numpy and Arrow), or value by value, which is
slower. "text" means that the server has no binary form and sends text. "refused" means that the binary form does not
determine the text (a role's oid, for example): a table with such a column is refused by name at CREATE SUBSCRIPTION,
and `binary = false` takes it. The initial copy is text in either case: the rows are the same.
"""


def types_page() -> str:
    """Return the page of the type contract, from pubsub/protocol/type_contract.py."""

    def delta(rule: TypeRule) -> str:
        if rule.name == "numeric":
            return "DECIMAL(p,s)"
        return "STRING" if rule.natural is None else spark_ddl(rule.natural)

    natural = [rule for rule in RULES if rule.natural is not None]
    text = [rule for rule in RULES if rule.natural is None]
    parts = (
        _TYPES_INTRODUCTION,
        "## Natural types\n\n"
        + table(
            ("PostgreSQL", "Delta", "why", "refused in it", "binary"),
            [
                (rule.sql_name, delta(rule), rule.why, rule.refused or "nothing", _BINARY[rule.binary])
                for rule in natural
            ],
        ),
        "## Kept as text\n\n"
        + table(
            ("PostgreSQL", "Delta", "why", "binary"),
            [(rule.sql_name, delta(rule), rule.why, _BINARY[rule.binary]) for rule in text],
        ),
        "## Types made by users and extensions\n\n"
        + table(
            ("PostgreSQL", "Delta", "why", "binary"),
            [(kind.name, kind.delta, kind.why, kind.binary) for kind in KINDS],
        ),
        _TYPES_CHOICE,
        "## Arrays, composites and jsonb as Delta's own\n\n"
        + table(
            ("PostgreSQL", "choice", "Delta", "how", "refused in it", "binary"),
            [(one.name, one.choice, one.delta, one.how, one.refused, one.binary) for one in NESTED],
        )
        + _TYPES_NESTED,
        _TYPES_KEYS,
        _TYPES_BINARY,
    )
    return "# Types\n\n" + "\n".join(parts)


_BINARY = {"columns": "by columns", "values": "value by value", "text": "text", "refused": "refused"}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main(directory: Path) -> None:
    """Write the four pages into the directory; the page of the types also goes to docs/types.md, kept with the code."""
    directory.mkdir(parents=True, exist_ok=True)
    defaults = {field.name: field.default for field in dataclasses.fields(SubscriptionOptions)}
    # Of Spark's own settings there are too many, and they are Spark's.
    settings = [*Settings(home=Path("pubsub-node")).show_all(), ("spark.conf", "{}, passed on to Spark unchanged")]
    pages = {
        "settings": table(("setting", "default"), sorted(settings)),
        "options": table(("option", "default"), [(name, str(defaults[name])) for name in CREATE_OPTIONS]),
        "views": "\n".join(
            f"## {name}\n\n" + table(("column", "type"), [(column, kind.name.lower()) for column, kind in view.columns])
            for name, view in VIEWS.items()
        ),
    }
    for name, text in pages.items():
        (directory / f"{name}.md").write_text(f"# {name.capitalize()}\n\n{text}", encoding="utf-8")
        print(directory / f"{name}.md")
    for path in (directory / "types.md", TYPES_PAGE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(types_page(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
