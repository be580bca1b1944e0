"""The reference pages (settings, subscription options, views, errors, types), made from the modules that define these.

`python -m scripts.reference` writes docs/types.md; scripts/site.py takes the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from catalog.system_views import VIEWS
from pubsub.protocol.column_types import spark_ddl
from pubsub.protocol.type_contract import KINDS, NESTED, RULES, TypeRule
from pubsub.settings import Settings
from pubsub.sql.options import CREATE_OPTIONS, SubscriptionOptions
from scripts.errors_page import errors_page
from scripts.reference_texts import OPTIONS as OPTION_TEXTS
from scripts.reference_texts import VIEWS as VIEW_TEXTS

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

A key that is text here is found by its text. Where that changes without a change of the row, changes of older rows find
none, and are counted as missing, until RESYNC TABLE has copied the table anew: a label of an enum that is renamed, a
reg… type's object that is renamed, lc_monetary. PostgreSQL 19 writes pg_lsn with all digits after the slash
(0/016B3748), earlier releases without zeros in front (0/16B3748). pg_upgrade keeps slots, so a subscription goes on
after an upgrade to 19: RESYNC its tables with a column of pg_lsn, or of a domain, an array or a composite of it. Those
without a key under REPLICA IDENTITY FULL need it, too; in other columns older rows only keep the shorter text.

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


def pages() -> dict[str, str]:
    """Return the reference pages by name: settings, options, views and errors."""
    # Of Spark's own settings there are too many, and they are Spark's.
    settings = [
        *Settings(home=Path("pubsub-node")).describe_all(),
        ("spark.conf", "{}", "A table of Spark's own settings, passed on unchanged."),
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(SubscriptionOptions)}
    options = [(name, _default(name, defaults[name]), OPTION_TEXTS[name]) for name in CREATE_OPTIONS]
    return {
        "settings": "# Settings\n\n" + _SETTINGS + table(("setting", "default", "what it is"), sorted(settings)),
        "options": "# Options of a subscription\n\n" + _OPTIONS + table(("option", "default", "what it is"), options),
        "views": "# Views\n\n"
        + _VIEWS
        + "\n".join(
            f"## {name}\n\n{VIEW_TEXTS[name]}\n\n"
            + table(("column", "type"), [(column, kind.value) for column, kind in view.columns])
            for name, view in VIEWS.items()
        ),
        "errors": errors_page(),
    }


_SETTINGS = """\
In `pubsub.toml`, in the node's directory: those with a dot belong to the table of that name. `SHOW name` and `SHOW ALL`
show what holds. A SIGHUP, or `systemctl reload`, makes a daemon read the file again.

"""

_OPTIONS = """\
`CREATE SUBSCRIPTION … WITH (option = value, …)`, most of them also `ALTER SUBSCRIPTION … SET (…)`.
[What differs from PostgreSQL](../differences.md#options) says more.

"""

_VIEWS = """\
For `pubsub sql "SELECT …"`, psql and drivers. PostgreSQL's columns come first, with its meanings; then further ones.

"""


def _default(name: str, value: object) -> str:
    """Return an option's default as a statement has it; "" if there is none."""
    if name == "slot_name":
        return "the subscription's name"
    if name == "wal_receiver_timeout":
        return "-1"
    if name == "batch_bytes" and isinstance(value, int):
        return f"{value >> 20}MB"
    if name == "batch_age" and isinstance(value, float):
        return f"{value:g}s"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def main() -> None:
    """Write docs/types.md, the one page of these that is kept with the code."""
    TYPES_PAGE.write_text(types_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
