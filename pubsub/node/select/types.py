"""The types that a SELECT knows, by PostgreSQL's names, and how DataFusion holds their values.

A type that Delta lacks is kept as PostgreSQL's text (docs/types.md): such a `Type` has `kept` set, and allows only
operations that give the same result on the text.  A `numeric` has a scale, which all values of the expression show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

DIGITS: Final = 38
"""The precision of DataFusion's widest decimal with arithmetic."""


@dataclass(frozen=True, slots=True)
class Type:
    """A type.  `name` is format_type's, `element` an array's element type; `kept`: values are PostgreSQL's text."""

    name: str
    kept: bool = False
    scale: int = 0
    element: Type | None = None

    @property
    def is_integer(self) -> bool:
        return self.name in _INTEGERS and not self.kept

    @property
    def is_exact(self) -> bool:
        """Whether it is an integer type or numeric, and not kept as text."""
        return (self.name in _INTEGERS or self.name == "numeric") and not self.kept

    @property
    def is_number(self) -> bool:
        return self.name in _NUMBERS and not self.kept

    @property
    def is_text(self) -> bool:
        """Whether functions that take text accept its values."""
        return self.name in _TEXTS

    @property
    def is_time(self) -> bool:
        """Whether it is a date or a timestamp."""
        return self.name in _TIMES and not self.kept

    @property
    def engine(self) -> str:
        """DataFusion's type."""
        if self.kept or self.is_text:
            return "VARCHAR"
        if self.element is not None:
            raise AssertionError("arrays are not cast")
        if self.name == "numeric":
            return f"DECIMAL({DIGITS}, {self.scale})"
        return _ENGINE[self.name]

    @property
    def has_equality(self) -> bool:
        """Whether values can be compared for equality: a type kept as text must have one text for equal values."""
        return not self.kept or self.name in _SAME_TEXT or self.name == OTHER

    @property
    def has_order(self) -> bool:
        """Whether values can be sorted: for a type kept as text, its texts must sort as the values (C collation)."""
        return not self.kept or self.name in _SORTED_TEXT


OTHER: Final = "user-defined"
"""The name for types without fixed oids, which are kept as text: enums, composites, domains and extensions' types."""

BOOL: Final = Type("boolean")
INT2: Final = Type("smallint")
INT4: Final = Type("integer")
INT8: Final = Type("bigint")
OID: Final = Type("oid")
FLOAT4: Final = Type("real")
FLOAT8: Final = Type("double precision")
TEXT: Final = Type("text")
VARCHAR: Final = Type("character varying")
BPCHAR: Final = Type("character")
DATE: Final = Type("date")
TIMESTAMP: Final = Type("timestamp without time zone")
TIMESTAMPTZ: Final = Type("timestamp with time zone")
BYTEA: Final = Type("bytea")
INTERVAL: Final = Type("interval")
"""Held as microseconds, with a month as 30 days, as PostgreSQL compares intervals."""
LSN: Final = Type("pg_lsn")
"""For the views' columns, held as a number.  In replicated tables, pg_lsn is kept as text."""
UNKNOWN: Final = Type("unknown")
"""The type of untyped literals and NULL."""
VOID: Final = Type("void")

_INTEGERS: Final = {"smallint": 15, "integer": 31, "bigint": 63, "oid": 63}
_NUMBERS: Final = (*_INTEGERS, "numeric", "real", "double precision")
_TEXTS: Final = ("text", "character varying", "character", "name", '"char"')
_TIMES: Final = ("date", "timestamp without time zone", "timestamp with time zone")
_SAME_TEXT: Final = frozenset(
    [
        "uuid",
        "inet",
        "cidr",
        "macaddr",
        "macaddr8",
        "bit",
        "money",
        "xid",
        "xid8",
        "cid",
        "tid",
        "pg_lsn",
        "int4range",
        "int8range",
        "daterange",
    ]
) | {"bit varying", "time without time zone"}
_SORTED_TEXT: Final = frozenset({"uuid", "macaddr", "time without time zone"})
_ENGINE: Final = {
    "boolean": "BOOLEAN",
    "smallint": "SMALLINT",
    "integer": "INT",
    "bigint": "BIGINT",
    "oid": "BIGINT",
    "real": "REAL",
    "double precision": "DOUBLE",
    "date": "DATE",
    "bytea": "BYTEA",
    "interval": "BIGINT",
    "pg_lsn": "DECIMAL(20, 0)",
    "unknown": "VARCHAR",
    "void": "VARCHAR",
}
#: Widening goes from left to right (pg_cast.dat's implicit casts between numbers).
_WIDENING: Final = ("smallint", "integer", "oid", "bigint", "numeric", "real", "double precision")
_PG_NAMES: Final = {
    "boolean": "bool",
    "smallint": "int2",
    "integer": "int4",
    "bigint": "int8",
    "real": "float4",
    "double precision": "float8",
    "character varying": "varchar",
    "character": "bpchar",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
    "time with time zone": "timetz",
    "bit varying": "varbit",
}


NUMERIC: Final = Type("numeric", scale=-1)
"""What a cast to numeric without a scale names: each value keeps its own."""


def numeric(scale: int) -> Type:
    """Return numeric whose values show `scale` digits after the point."""
    return Type("numeric", scale=scale)


def array_of(element: Type) -> Type:
    return Type(f"{element.name}[]", element=element)


def internal_name(type_: Type) -> str:
    """Return pg_type.typname, after which a cast's column is named."""
    return f"_{internal_name(type_.element)}" if type_.element else _PG_NAMES.get(type_.name, type_.name)


def bits_of(type_: Type) -> int:
    """Return how many bits an integer type has besides its sign; 63 for oid, which is held as bigint."""
    return _INTEGERS[type_.name]


def of_column(arrow: pa.DataType, oid: int | None) -> Type:
    """Return the type of a Delta table's column, from its Arrow type and the publisher's oid (None: not known)."""
    import pyarrow.types as kinds

    from pubsub.protocol.type_contract import BY_OID

    rule = BY_OID.get(oid or 0)
    if kinds.is_list(arrow) or kinds.is_large_list(arrow):
        return array_of(of_column(arrow.value_type, None))
    if kinds.is_string(arrow) or kinds.is_large_string(arrow) or kinds.is_string_view(arrow):
        if oid is None:
            return TEXT
        name = rule.sql_name if rule is not None else _ARRAYS.get(oid, OTHER)
        return Type(name, kept=name not in _TEXTS)
    if kinds.is_decimal(arrow):
        return numeric(arrow.scale)
    for test, found in (
        (kinds.is_boolean, BOOL), (kinds.is_int8, INT2), (kinds.is_int16, INT2), (kinds.is_int32, INT4),
        (kinds.is_int64, OID if rule is not None and rule.name == "oid" else INT8), (kinds.is_float32, FLOAT4),
        (kinds.is_float64, FLOAT8), (kinds.is_date, DATE), (kinds.is_binary, BYTEA),
        (kinds.is_large_binary, BYTEA),
    ):  # fmt: skip
        if test(arrow):
            return found
    if kinds.is_timestamp(arrow):
        return TIMESTAMPTZ if arrow.tz else TIMESTAMP
    # The scale of 1 marks a VARIANT or a struct, since a jsonb kept as text has none.
    return Type(rule.sql_name, kept=True, scale=1) if rule is not None else Type("record", kept=True, scale=1)


def typed_name(oid: int, modifier: int) -> str:
    """Return a type's name and modifier as format_type does; OTHER for a type without a known oid."""
    from pubsub.protocol.type_contract import BY_OID  # imports pyarrow, which a query on views does without

    rule = BY_OID.get(oid)
    if rule is None:
        return _ARRAYS.get(oid, OTHER)
    if modifier < 0:
        return rule.sql_name
    match rule.name:
        case "numeric":
            packed = modifier - 4
            return f"numeric({packed >> 16 & 0xFFFF},{(packed & 0x7FF ^ 1024) - 1024})"
        case "varchar" | "bpchar":
            return f"{rule.sql_name}({modifier - 4})"
        case "bit" | "varbit":
            return f"{rule.sql_name}({modifier})"
        case "timestamp" | "timestamptz" | "time" | "timetz":
            kind, _, rest = rule.sql_name.partition(" ")
            return f"{kind}({modifier}) {rest}"
        case _:
            return rule.sql_name


#: Array types of pg_type.dat, for the most frequent element types; other arrays get the name OTHER.
_ARRAYS: Final = {
    1000: "boolean[]", 1005: "smallint[]", 1007: "integer[]", 1016: "bigint[]", 1021: "real[]",
    1022: "double precision[]", 1231: "numeric[]", 1009: "text[]", 1015: "character varying[]",
    1014: "character[]", 1182: "date[]", 1115: "timestamp without time zone[]",
    1185: "timestamp with time zone[]", 2951: "uuid[]", 3807: "jsonb[]", 199: "json[]", 1001: "bytea[]",
}  # fmt: skip


def common(types: list[Type]) -> Type | None:
    """Return the common type of several types (parse_coerce.c: select_common_type); None if there is none."""
    known = [one for one in types if one != UNKNOWN]
    if not known:
        return TEXT
    first = known[0]
    if all(one == first for one in known):
        return first
    if all(one.is_number for one in known):
        widest = max(known, key=lambda one: _WIDENING.index(one.name))
        return numeric(max(one.scale for one in known)) if widest.name == "numeric" else widest
    if all(one.is_text for one in known):
        return TEXT
    if all(one.is_time for one in known):
        return max(known, key=lambda one: _TIMES.index(one.name))
    return first if all(one.name == first.name and one.kept == first.kept for one in known) else None


def implicit(given: Type, wanted: Type) -> bool:
    """Return whether PostgreSQL casts implicitly from `given` to `wanted`."""
    if given == UNKNOWN or (given.name, given.kept) == (wanted.name, wanted.kept):
        return True
    if given.is_number and wanted.is_number:
        return _WIDENING.index(given.name) <= _WIDENING.index(wanted.name)
    if given.is_time and wanted.is_time:
        return _TIMES.index(given.name) <= _TIMES.index(wanted.name)
    return given.is_text and wanted.is_text


def ordering(type_: Type, sql: str) -> str:
    """Return by what a value of a type is ordered, and told from others: -0 is 0, and blanks at the end of a character are none."""
    if type_ in (FLOAT4, FLOAT8):
        return f"({sql} + 0.0)"
    return f"rtrim({sql}, ' ')" if type_ == BPCHAR else sql
