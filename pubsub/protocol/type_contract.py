"""The type contract as data: each PostgreSQL type's type in Delta, the reason, and the values it refuses.

`column_types` chooses a column's type by this contract; `make docs` writes docs/types.md from it.  A type's natural
type is a Delta type that holds all its values, or all but a few that are listed.  If there is none, or PostgreSQL's
text says more (a scale, a lower bound, the order of keys), the column is a string with PostgreSQL's own text, which
reads back to exactly the same value.

Arrays, composites, domains, enums, user-defined ranges and extension types have no fixed oids: KINDS covers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

Binary = Literal["columns", "values", "text", "refused"]
"""How binary transfer is read.

columns: a column at a time; values: value by value, in Python; text: the server has no binary form and sends text;
refused: not at all.
"""


@dataclass(frozen=True, slots=True)
class TypeRule:
    """A built-in type: its name and oid in pg_type, the name that SQL prints, and its conversion.

    `natural` is the Arrow type of the natural choice; None if the type is kept as text.  `refused` names the values
    that stop the table if the type is natural, as prose without `{}`.  `since` is the server version that introduced
    the type, 0 for all.
    """

    name: str
    oid: int
    sql_name: str
    natural: pa.DataType | None
    why: str
    binary: Binary
    refused: str = ""
    since: int = 0

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices that the subscription option `types` offers."""
        if self.oid == JSONB:
            return ("text", "variant")
        return ("natural", "text") if self.natural is not None else ("text",)


@dataclass(frozen=True, slots=True)
class KindRule:
    """A family of types without fixed oids."""

    name: str
    delta: str
    why: str
    binary: str


ARRAYS: Final = "arrays"
COMPOSITES: Final = "composites"
"""The option `types` uses this name for all composites, and `arrays` for all arrays."""

JSONB: Final = 3802

VARIANT: Final = pa.struct(
    [pa.field("metadata", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
)
"""A VARIANT's type in Arrow and in data files."""


@dataclass(frozen=True, slots=True)
class NestedRule:
    """A conversion that the option `types` selects, with the word `choice`, for types that are text by default."""

    name: str
    choice: str
    delta: str
    how: str
    refused: str
    binary: str


NESTED: Final = (
    NestedRule(
        ARRAYS,
        "natural",
        "ARRAY",
        "of the type that the elements become: integer[] is ARRAY<INT>, numeric(8,2)[] ARRAY<DECIMAL(8,2)>, an enum's or uuid[] "
        "ARRAY<STRING>; NULL elements stay NULL",
        "more than one dimension, a lower bound other than 1, values that the elements' type refuses; box[], whose elements are "
        "not separated by commas",
        "by columns, text too",
    ),
    NestedRule(
        COMPOSITES,
        "natural",
        "STRUCT",
        "a field for each attribute, with its name and the type that it becomes; arrays and composites inside become ARRAY and "
        "STRUCT, jsonb becomes text",
        "values that the attributes' types refuse; types without attributes, or with attribute names that differ only in case or "
        "that Delta does not allow for fields (blanks and any of ,;{}()=)",
        "by columns, text too",
    ),
    NestedRule(
        "jsonb",
        "variant",
        "VARIANT",
        "numbers as integers or decimals with their scale; the order of keys, which means nothing in jsonb, is lost",
        "numbers of more than 38 digits, arrays and objects nested more than 400 deep, values of more than 16 MB",
        "value by value, text too",
    ),
)

_OUT_OF_YEARS: Final = "infinity, -infinity, BC, years past 9999"
_SAME: Final = "its text is its value"

_NUMERIC: Final = pa.decimal128(38, 0)
"""Stands for numeric(p,s); the column's own precision and scale replace these."""

RULES: Final = (
    # Natural
    TypeRule("bool", 16, "boolean", pa.bool_(), "the same two values", "columns"),
    TypeRule("int2", 21, "smallint", pa.int16(), "the same range", "columns"),
    TypeRule("int4", 23, "integer", pa.int32(), "the same range", "columns"),
    TypeRule("int8", 20, "bigint", pa.int64(), "the same range", "columns"),
    TypeRule("oid", 26, "oid", pa.int64(), "unsigned, 32 bits: the next wider integer holds it", "columns"),
    TypeRule("float4", 700, "real", pa.float32(), "IEEE 754 on both sides; NaN, infinities and -0 are kept", "columns"),
    TypeRule(
        "float8", 701, "double precision", pa.float64(), "IEEE 754 on both sides; NaN, infinities, -0 kept", "columns"
    ),
    TypeRule(
        "numeric",
        1700,
        "numeric",
        _NUMERIC,
        "numeric(p,s) with 0 <= s <= p <= 38 is the same decimal(p,s); numeric without precision, or outside of that, is text: "
        "its scale is each value's own",
        "columns",
        "NaN; Infinity needs a numeric without precision, which is text",
    ),
    TypeRule(
        "date", 1082, "date", pa.date32(), "the proleptic Gregorian calendar on both sides", "columns", _OUT_OF_YEARS
    ),
    TypeRule(
        "timestamp",
        1114,
        "timestamp without time zone",
        pa.timestamp("us"),
        "microseconds on both sides, no zone",
        "columns",
        _OUT_OF_YEARS,
    ),
    TypeRule(
        "timestamptz",
        1184,
        "timestamp with time zone",
        pa.timestamp("us", "UTC"),
        "microseconds on both sides: an instant, read in UTC",
        "columns",
        _OUT_OF_YEARS,
    ),
    TypeRule("bytea", 17, "bytea", pa.binary(), "the same bytes", "columns"),
    # Text
    TypeRule("text", 25, "text", None, _SAME, "columns"),
    TypeRule("varchar", 1043, "character varying", None, _SAME, "columns"),
    TypeRule("bpchar", 1042, "character", None, "its text with its blanks, as long as it was declared", "columns"),
    TypeRule("char", 18, '"char"', None, "one byte; from 16 on those that are not ASCII as an octal escape", "values"),
    TypeRule("name", 19, "name", None, _SAME, "columns"),
    TypeRule("json", 114, "json", None, "its text, with its blanks, order and repeated keys", "columns"),
    TypeRule("jsonb", 3802, "jsonb", None, "its text: every number keeps its digits; VARIANT as a choice", "columns"),
    TypeRule("jsonpath", 4072, "jsonpath", None, _SAME, "columns"),
    TypeRule("xml", 142, "xml", None, _SAME, "columns"),
    TypeRule("uuid", 2950, "uuid", None, "Delta has no such type", "columns"),
    TypeRule("time", 1083, "time without time zone", None, "Delta has no time of day; 24:00:00 is one", "values"),
    TypeRule("timetz", 1266, "time with time zone", None, "Delta has none; the zone is a part of the value", "values"),
    TypeRule(
        "interval",
        1186,
        "interval",
        None,
        "months, days and microseconds apart, which no interval of Delta has",
        "values",
    ),
    TypeRule("money", 790, "money", None, "its text, as the publisher's lc_monetary writes it", "refused"),
    TypeRule("bit", 1560, "bit", None, "a string of bits whose length is a part of it", "values"),
    TypeRule("varbit", 1562, "bit varying", None, "a string of bits whose length is a part of it", "values"),
    TypeRule("inet", 869, "inet", None, "Delta has no such type", "values"),
    TypeRule("cidr", 650, "cidr", None, "Delta has no such type", "values"),
    TypeRule("macaddr", 829, "macaddr", None, "Delta has no such type", "values"),
    TypeRule("macaddr8", 774, "macaddr8", None, "Delta has no such type", "values"),
    TypeRule("point", 600, "point", None, "Delta has no such type", "values"),
    TypeRule("line", 628, "line", None, "Delta has no such type", "values"),
    TypeRule("lseg", 601, "lseg", None, "Delta has no such type", "values"),
    TypeRule("box", 603, "box", None, "Delta has no such type", "values"),
    TypeRule("path", 602, "path", None, "Delta has no such type", "values"),
    TypeRule("polygon", 604, "polygon", None, "Delta has no such type", "values"),
    TypeRule("circle", 718, "circle", None, "Delta has no such type", "values"),
    TypeRule("tsvector", 3614, "tsvector", None, "Delta has no such type", "values"),
    TypeRule("tsquery", 3615, "tsquery", None, "Delta has no such type", "values"),
    TypeRule("int4range", 3904, "int4range", None, "bounds, each in or out or none, and empty", "values"),
    TypeRule("int8range", 3926, "int8range", None, "bounds, each in or out or none, and empty", "values"),
    TypeRule("numrange", 3906, "numrange", None, "bounds, each in or out or none, and empty", "values"),
    TypeRule("daterange", 3912, "daterange", None, "bounds, each in or out or none, and empty", "values"),
    TypeRule("tsrange", 3908, "tsrange", None, "bounds, each in or out or none, and empty", "values"),
    TypeRule("tstzrange", 3910, "tstzrange", None, "bounds, each in or out or none, and empty", "values"),
    TypeRule("int4multirange", 4451, "int4multirange", None, "its ranges in order", "values"),
    TypeRule("int8multirange", 4536, "int8multirange", None, "its ranges in order", "values"),
    TypeRule("nummultirange", 4532, "nummultirange", None, "its ranges in order", "values"),
    TypeRule("datemultirange", 4535, "datemultirange", None, "its ranges in order", "values"),
    TypeRule("tsmultirange", 4533, "tsmultirange", None, "its ranges in order", "values"),
    TypeRule("tstzmultirange", 4534, "tstzmultirange", None, "its ranges in order", "values"),
    TypeRule("pg_lsn", 3220, "pg_lsn", None, "unsigned, 64 bits", "values"),
    TypeRule("xid", 28, "xid", None, "unsigned, without an order", "values"),
    TypeRule("xid8", 5069, "xid8", None, "unsigned, 64 bits", "values"),
    TypeRule("oid8", 6437, "oid8", None, "unsigned, 64 bits", "values"),
    TypeRule("cid", 29, "cid", None, "unsigned, without an order", "values"),
    TypeRule("tid", 27, "tid", None, "a page and a line", "values"),
    TypeRule("pg_snapshot", 5038, "pg_snapshot", None, _SAME, "values"),
    TypeRule("txid_snapshot", 2970, "txid_snapshot", None, _SAME, "values"),
    TypeRule("int2vector", 22, "int2vector", None, "its text, with blanks between", "values"),
    TypeRule("oidvector", 30, "oidvector", None, "its text, with blanks between", "values"),
    TypeRule("refcursor", 1790, "refcursor", None, _SAME, "columns"),
    *(
        TypeRule(name, oid, name, None, "the name, as the publisher's catalog has it when it is sent", "refused")
        for name, oid in (
            ("regproc", 24),
            ("regprocedure", 2202),
            ("regoper", 2203),
            ("regoperator", 2204),
            ("regclass", 2205),
            ("regcollation", 4191),
            ("regtype", 2206),
            ("regrole", 4096),
            ("regnamespace", 4089),
            ("regconfig", 3734),
            ("regdictionary", 3769),
            ("regdatabase", 6490),
        )
    ),
    TypeRule("aclitem", 1033, "aclitem", None, "roles by name", "text"),
    TypeRule("gtsvector", 3642, "gtsvector", None, "no value can be stored by a user", "text"),
    *(
        TypeRule(name, oid, name, None, "of the catalogs: no value can be stored by a user", "refused", since=since)
        for name, oid, since in (
            ("pg_node_tree", 194, 0),
            ("pg_ndistinct", 3361, 0),
            ("pg_dependencies", 3402, 0),
            ("pg_mcv_list", 5017, 0),
            ("pg_brin_bloom_summary", 4600, 0),
            ("pg_brin_minmax_multi_summary", 4601, 0),
        )
    ),
)
"""Every type in pg_catalog that a column can have, in versions 15 to 19."""

KINDS: Final = (
    KindRule(
        "arrays of any of these",
        "STRING",
        "PostgreSQL's text: a column of arrays says nothing of their dimensions and lower bounds, and each value has its own; "
        "read back with ::type[]; ARRAY as a choice",
        "by columns where they have one dimension from 1 on (the elements as their own type is); other shapes value by value",
    ),
    KindRule("enums", "STRING", "the label; rows keep a label that was renamed later", "by columns"),
    KindRule("domains", "as the type below", "a constraint is the publisher's to keep", "as the type below"),
    KindRule(
        "composites, nested ones too", "STRING", 'PostgreSQL\'s text: (1,"a b",); STRUCT as a choice', "value by value"
    ),
    KindRule("ranges of users, their multiranges", "STRING", "PostgreSQL's text", "value by value"),
    KindRule("citext", "STRING", "its text", "by columns"),
    KindRule("ltree, lquery, ltxtquery", "STRING", "its text", "value by value"),
    KindRule("hstore", "STRING", "its text", "value by value"),
    KindRule("pgvector's vector, halfvec and sparsevec", "STRING", "their text", "value by value"),
    KindRule(
        "PostGIS's geometry and geography", "STRING", "PostGIS's text: EWKB in hexadecimal digits", "value by value"
    ),
    KindRule("PostGIS's box2d and box3d", "STRING", "their text", "text"),
    KindRule("all other types of extensions", "STRING", "their text", "refused"),
    KindRule("pseudo-types", "refused", "no column of a table has one", "refused"),
)

BY_OID: Final = {rule.oid: rule for rule in RULES}
BY_NAME: Final = {name: rule for rule in RULES for name in (rule.name, rule.sql_name)}
