"""Values of every type, with its edge cases, as SQL: a server converts them to its own output.

`columns(version)` returns the columns of one wide table: a name, the type's SQL, and values as SQL constants.  Columns
differ in length; a shorter one is filled up with NULL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Types that the corpus needs beside the built-in ones.
SETUP = """
CREATE EXTENSION IF NOT EXISTS hstore;
CREATE EXTENSION IF NOT EXISTS citext;
CREATE EXTENSION IF NOT EXISTS ltree;
CREATE TYPE mood AS ENUM ('sad', 'o k', 'häppy', 'a,b', '"');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN smaller AS positive CHECK (VALUE < 1000);
CREATE DOMAIN money2 AS numeric(10,2);
CREATE DOMAIN moods AS mood;
CREATE DOMAIN ints AS int[];
CREATE TYPE pair AS (a int, b text);
CREATE TYPE nested AS (p pair, ps pair[], at timestamptz, d smaller, m mood);
CREATE TYPE floatrange AS RANGE (subtype = float8, subtype_diff = float8mi);
CREATE TYPE textrange AS RANGE (subtype = text, collation = "C");
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the corpus; `binary`: whether binary transfer supports its type."""

    name: str
    type: str
    values: tuple[str, ...]
    binary: bool = True


def _column(name: str, type_: str, values: Iterable[object], *, binary: bool = True) -> Column:
    return Column(name, type_, tuple(f"'{str(value).replace(chr(39), chr(39) * 2)}'" for value in values), binary)


_TEXTS = (
    "",
    " ",
    "NULL",
    "null",
    "\\N",
    "a,b",
    'a"b',
    "a'b",
    "a\\b",
    "a\tb\nc\rd",
    "\n",
    "\r\n",
    "{}",
    "()",
    "\x01\x1f\x7f",
    "\u00e4\u0416\u05d0",
    "\u20ac\u4e2d\uffee",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "\U0002070e\U000e0041\U000f0000\U0010fffd",
    "e\u0301 \u00e9 \u202eabc",
    "\ufeffx",
    "x" * 1000,
    "\u4e2d" * 700,
)
_YEARS = (
    "0001-01-01",
    "0999-12-31",
    "1582-10-05",
    "1582-10-14",
    "1969-12-31",
    "1970-01-01",
    "2000-02-29",
    "9999-12-31",
)
_OTHER_YEARS = ("0001-01-01 BC", "4713-01-01 BC", "infinity", "-infinity", "10000-01-01", "5874897-12-31")
_STAMPS = (
    "0001-01-01 00:00:00",
    "1582-10-10 23:59:59.999999",
    "1900-01-01 00:00:00.000001",
    "1969-12-31 23:59:59.999999",
    "1970-01-01 00:00:00",
    "2000-01-01 00:00:00",
    "2024-02-29 12:34:56.7",
    "2024-03-31 02:30:00.123",
    "9999-12-31 23:59:59.999999",
)
_OTHER_STAMPS = (
    "infinity",
    "-infinity",
    "4713-11-24 00:00:00 BC",
    "0001-12-31 23:59:59.5 BC",
    "294276-12-31 23:59:59.999999",
)
_FLOAT8 = (
    "0",
    "-0",
    "1",
    "-1.5",
    "0.1",
    "1e-5",
    "0.0001",
    "1e15",
    "999999999999999",
    "1e23",
    "5e-324",
    "2.2250738585072014e-308",
    "1.7976931348623157e308",
    "9007199254740993",
    "123456.789012345678",
    "NaN",
    "Infinity",
    "-Infinity",
)
_FLOAT4 = (
    "0",
    "-0",
    "1.1",
    "-3.5",
    "16777217",
    "1e6",
    "999999",
    "1e-45",
    "1.17549435e-38",
    "3.4028235e38",
    "NaN",
    "Infinity",
    "-Infinity",
)
_NUMERICS = (
    "0",
    "0.00",
    "-0",
    "1",
    "1.0",
    "1.000000",
    "-1",
    "10",
    "100",
    "9999",
    "10000",
    "10001",
    "99990000",
    "100000000",
    "0.1",
    "0.0001",
    "0.00010",
    "0.00001",
    "-0.000000000000000000012345678901234567890",
    "12345678901234567890123456789012345678901234567890.1234567890",
    "1e-400",
    "1e400",
    "NaN",
    "Infinity",
    "-Infinity",
)
_JSON = (
    "null",
    "true",
    "1",
    "1.0",
    "1.00",
    "-0",
    "1e5",
    "123456789012345678901234567890.12345",
    '""',
    '"a\\"b\\\\\\u20ac\\n"',
    "[]",
    "{}",
    '[1, [2, [3, {"a": null}]]]',
    '{"b": 1, "a": {"c": [true, false]}, "aa": "\U0001f600", "": " "}',
    '{"a": 1, "a": 2}',
)


def _columns(version: int) -> list[Column]:
    infinite_intervals = ("infinity", "-infinity") if version >= 17 else ()
    return [
        _column("c_bool", "boolean", ("t", "f")),
        _column("c_int2", "smallint", (0, -1, 32767, -32768, 12)),
        _column("c_int4", "integer", (0, -1, 2147483647, -2147483648)),
        _column("c_int8", "bigint", (0, -1, 9223372036854775807, -9223372036854775808)),
        _column("c_oid", "oid", (0, 4294967295, 16384)),
        _column("c_float4", "real", _FLOAT4),
        _column("c_float8", "double precision", _FLOAT8),
        _column("c_numeric", "numeric", _NUMERICS),
        _column(
            "c_numeric_12_2",
            "numeric(12,2)",
            ("0", "0.01", "-0.01", "9999999999.99", "-9999999999.99", "1", "100", "0.10"),
        ),
        _column("c_numeric_38_0", "numeric(38,0)", ("0", "9" * 38, "-" + "9" * 38, "10000", "99990000")),
        _column("c_numeric_38_38", "numeric(38,38)", ("0", "0." + "9" * 38, "-0." + "0" * 37 + "1", "0.5")),
        _column("c_numeric_38_10", "numeric(38,10)", ("1" * 28 + "." + "2" * 10, "-0.0000000001", "1e20")),
        _column("c_numeric_39_1", "numeric(39,1)", ("9" * 38 + ".9", "0.1")),
        _column("c_numeric_5_m2", "numeric(5,-2)", ("1234567", "-100")),
        _column("c_numeric_2_5", "numeric(2,5)", ("0.00012", "0")),
        _column("c_date", "date", _YEARS),
        _column("c_date_text", "date", (*_YEARS, *_OTHER_YEARS)),
        _column("c_timestamp", "timestamp", _STAMPS),
        _column("c_timestamp_3", "timestamp(3)", _STAMPS[:-1]),
        _column("c_timestamp_text", "timestamp", (*_STAMPS, *_OTHER_STAMPS)),
        _column("c_timestamptz", "timestamptz", (*(f"{s}+00" for s in _STAMPS), "2024-03-31 02:30:00 Europe/Berlin")),
        _column("c_timestamptz_text", "timestamptz", (*_STAMPS, *_OTHER_STAMPS)),
        _column("c_float8_text", "double precision", _FLOAT8),
        _column("c_float4_text", "real", _FLOAT4),
        _column("c_int8_text", "bigint", (0, -9223372036854775808)),
        _column("c_bool_text", "boolean", ("t", "f")),
        _column("c_oid_text", "oid", (0, 4294967295)),
        _column("c_bytea_text", "bytea", ("", "\\x00ff27225c")),
        _column("c_decimal_text", "numeric(6,2)", ("0.10", "-1000", "NaN")),
        _column("c_bytea", "bytea", ("", "\\x", "\\x00", "\\x" + bytes(range(256)).hex(), "\\x" + "ab" * 3000)),
        _column("c_text", "text", _TEXTS),
        _column("c_varchar", "varchar(2000)", _TEXTS),
        _column("c_bpchar", "char(5)", ("", "a", "abcde", "\u20ac", "  a")),
        _column("c_char", '"char"', ("", "a", " ")),
        _column("c_name", "name", ("", "a", "A b", "\u4e2d" * 21)),
        _column("c_json", "json", (*_JSON, ' { "a" :1 , "a":  2 } ')),
        _column("c_jsonb", "jsonb", _JSON),
        _column("c_jsonpath", "jsonpath", ("$", "$.a[*] ? (@ > 1)", 'strict $."a b"')),
        _column("c_xml", "xml", ("<a/>", "text & more".replace("&", "&amp;"), "<a b='c'>\u20ac</a>")),
        _column(
            "c_uuid", "uuid", ("00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "f" * 32)
        ),
        _column("c_time", "time", ("00:00:00", "24:00:00", "23:59:59.999999", "12:34:56.7", "00:00:00.000001")),
        _column(
            "c_timetz",
            "timetz",
            ("00:00:00+00", "24:00:00-15:59", "12:34:56.7+05:30", "01:02:03+00:19:32", "23:59:59.999999+14"),
        ),
        _column(
            "c_interval",
            "interval",
            (
                "0",
                "1 day",
                "-1 day",
                "1 mon -1 day",
                "-1 year -2 mons +3 days -04:05:06.7",
                "1 microsecond",
                "-1 microsecond",
                "178000000 years",
                "2147483647 days",
                "30 days",
                "1 mon",
                "25:00:00",
                *infinite_intervals,
            ),
        ),
        _column("c_money", "money", ("0", "-1.5", "92233720368547758.07", "1000"), binary=False),
        _column("c_bit", "bit(5)", ("00000", "10101", "11111")),
        _column("c_bit_64", "bit(64)", ("1" * 64, "0" * 63 + "1")),
        _column("c_varbit", "bit varying", ("", "1", "0", "10101010", "101010101", "1" * 100)),
        _column(
            "c_inet",
            "inet",
            (
                "0.0.0.0",
                "192.168.0.1/24",
                "255.255.255.255",
                "::",
                "::1",
                "::ffff:1.2.3.4",
                "::1.2.3.4",
                "fe80::1/64",
                "2001:db8::a:b",
                "1:0:0:2:0:0:0:3",
                "1:2:3:4:5:6:7:8",
            ),
        ),
        _column("c_cidr", "cidr", ("0.0.0.0/0", "10.0.0.0/8", "192.168.0.1/32", "::/0", "2001:db8::/32", "::1/128")),
        _column("c_macaddr", "macaddr", ("00:00:00:00:00:00", "08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff")),
        _column("c_macaddr8", "macaddr8", ("08:00:2b:01:02:03:04:05", "ff:ff:ff:ff:ff:ff:ff:ff")),
        _column("c_point", "point", ("(0,0)", "(-1.5,1e300)", "(NaN,Infinity)", "(0.1,-0)")),
        _column("c_line", "line", ("{1,-1,0}", "{0.1,2,3}")),
        _column("c_lseg", "lseg", ("[(0,0),(1,1)]", "[(0.1,2),(-3,4)]")),
        _column("c_box", "box", ("(1,1),(0,0)", "(0.1,2),(-3,-4)")),
        _column("c_path", "path", ("[(0,0),(1,1)]", "((0,0),(1,1),(2,0))")),
        _column("c_polygon", "polygon", ("((0,0),(1,1),(2,0))", "((0.1,0))")),
        _column("c_circle", "circle", ("<(0,0),1>", "<(0.1,-2),0>")),
        _column(
            "c_tsvector", "tsvector", ("", "a b c", "'a b':1A,2B 'c''d':3C,16383", "x:1 y:2D 'z\\\\'", "'\u20ac':5")
        ),
        _column(
            "c_tsquery",
            "tsquery",
            (
                "",
                "a",
                "!a",
                "a & b | c",
                "a <-> b <3> c",
                "!(a | b) & 'c d':*A",
                "(a | b) <-> (c <-> d)",
                "'q''\\\\':AB",
            ),
        ),
        _column("c_int4range", "int4range", ("empty", "[1,5)", "(,)", "[1,1]", "(,-3]", "[2147483646,2147483647)")),
        _column("c_int8range", "int8range", ("empty", "[1,9223372036854775807)", "(,0]")),
        _column("c_numrange", "numrange", ("empty", "[1.0,2.50)", "(,1.00]", "(1,)", "[-Infinity,NaN]")),
        _column("c_daterange", "daterange", ("empty", "[2024-01-01,2024-02-01)", "[0044-03-15 BC,infinity)", "(,)")),
        _column("c_tsrange", "tsrange", ("empty", '["2024-01-01 00:00:00","2024-01-02 00:00:00.5"]', "(-infinity,)")),
        _column("c_tstzrange", "tstzrange", ("empty", "[2024-01-01 00:00+02,infinity]", "(,)")),
        _column("c_int4multirange", "int4multirange", ("{}", "{[1,3),[5,9)}", "{(,)}", "{(,1),[3,)}")),
        _column("c_int8multirange", "int8multirange", ("{}", "{[1,3),[5,9)}")),
        _column("c_nummultirange", "nummultirange", ("{}", "{[1.0,3.50),(5,)}")),
        _column("c_datemultirange", "datemultirange", ("{}", "{[2024-01-01,2024-01-05),[2024-02-01,)}")),
        _column("c_tsmultirange", "tsmultirange", ("{}", '{["2024-01-01 00:00:00","2024-01-02 00:00:00")}')),
        _column("c_tstzmultirange", "tstzmultirange", ("{}", '{["2024-01-01 00:00:00+01","2024-01-02 00:00:00+00")}')),
        _column("c_pg_lsn", "pg_lsn", ("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF")),
        _column("c_xid", "xid", (0, 3, 4294967295)),
        _column("c_xid8", "xid8", (0, 18446744073709551615)),
        _column("c_cid", "cid", (0, 4294967295)),
        _column("c_tid", "tid", ("(0,0)", "(4294967295,65535)")),
        _column("c_pg_snapshot", "pg_snapshot", ("10:20:10,14,15", "1:1:")),
        _column("c_txid_snapshot", "txid_snapshot", ("10:20:10,14,15",)),
        _column("c_int2vector", "int2vector", ("1 -2 3", "")),
        _column("c_oidvector", "oidvector", ("1 4294967295", "")),
        _column("c_refcursor", "refcursor", ("a", "")),
        _column("c_regclass", "regclass", ("pg_class", "0", "4294967295"), binary=False),
        _column("c_regtype", "regtype", ("int4", "timestamp with time zone"), binary=False),
        _column("c_regproc", "regproc", ("now", "-"), binary=False),
        _column("c_regprocedure", "regprocedure", ("abs(int4)",), binary=False),
        _column("c_regoper", "regoper", ("||/",), binary=False),
        _column("c_regoperator", "regoperator", ("+(int4,int4)",), binary=False),
        _column("c_regrole", "regrole", ("postgres",), binary=False),
        _column("c_regnamespace", "regnamespace", ("pg_catalog",), binary=False),
        _column("c_regconfig", "regconfig", ("simple",), binary=False),
        _column("c_regdictionary", "regdictionary", ("simple",), binary=False),
        _column("c_regcollation", "regcollation", ('"C"',), binary=False),
        _column("c_aclitem", "aclitem", ("postgres=r/postgres", "=X/postgres"), binary=True),
        # Types of users
        _column("c_mood", "mood", ("sad", "o k", "h\u00e4ppy", "a,b", '"')),
        _column("c_smaller", "smaller", (1, 999)),
        _column("c_money2", "money2", ("0.1", "-12345678.90")),
        _column("c_moods", "moods", ("sad",)),
        _column("c_ints", "ints", ("{1,2}", "{}")),
        _column(
            "c_pair",
            "pair",
            ("(1,a)", "(,)", '(2,"a b")', '(3,"")', '(4,"x"" y\\\\)")', '(-1,"(1,2)")'),
        ),
        _column(
            "c_nested",
            "nested",
            (
                '("(1,""a b"")","{""(2,c)"",NULL}","2024-01-01 00:00:00+00",5,"o k")',
                "(,,,,)",
                '("(,)",{},infinity,,"""")',
            ),
        ),
        _column("c_floatrange", "floatrange", ("empty", "[0.1,1e300)", "(,)", "[-Infinity,NaN]")),
        _column("c_floatmultirange", "floatmultirange", ("{}", "{[0.1,1),[2,3]}")),
        _column(
            "c_textrange",
            "textrange",
            ("empty", '["a b","c,d")', '["",z]', '["\\"","\\\\"]'),
        ),
        _column("c_hstore", "hstore", ("", "a=>1, b=>NULL", '"a b"=>"c\\"d\\\\", ""=>""')),
        _column("c_citext", "citext", ("", "Ab", "\u00c4")),
        _column("c_ltree", "ltree", ("", "a.b.c", "Top_1.x")),
        _column("c_lquery", "lquery", ("*.a|b{1,2}.!c@*",)),
        _column("c_ltxtquery", "ltxtquery", ("a & !b*@",)),
        # Arrays
        _column(
            "c_int4_array",
            "int4[]",
            ("{}", "{1,NULL,-3}", "{{1,2},{3,NULL}}", "[0:1]={5,6}", "[-2:-1][3:4]={{1,2},{3,4}}", "{{{1}}}"),
        ),
        _column(
            "c_text_array",
            "text[]",
            (
                "{}",
                '{"",NULL,"NULL","a b","a,b","{","a\\"b\\\\",null}',
                '{"\\"NULL\\"", nUlL, "nUlL"}',
                "{{\u20ac},{\U0001f600}}",
            ),
        ),
        _column("c_bool_array", "bool[]", ("{t,f,NULL}",)),
        _column("c_float8_array", "float8[]", ("{0.1,NaN,-Infinity,-0}",)),
        _column("c_numeric_array", "numeric(6,2)[]", ("{1,2.5,NaN,NULL}",)),
        _column("c_timestamptz_array", "timestamptz[]", ('{"2024-01-01 00:00:00+01",infinity,NULL}',)),
        _column("c_date_array", "date[]", ('{2024-01-01,"0044-03-15 BC"}',)),
        _column("c_bytea_array", "bytea[]", ('{"\\\\x00ff","\\\\x"}',)),
        _column("c_uuid_array", "uuid[]", ("{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11,NULL}",)),
        _column("c_jsonb_array", "jsonb[]", ('{"{\\"a\\": 1}",null,"null"}',)),
        _column("c_interval_array", "interval[]", ('{"1 mon -1 days",00:00:01}',)),
        _column("c_box_array", "box[]", ("{(1,1),(0,0);(2,2),(1,1)}",)),
        _column("c_point_array", "point[]", ('{"(1,2)",NULL}',)),
        _column("c_inet_array", "inet[]", ("{10.0.0.1/8,::1}",)),
        _column("c_mood_array", "mood[]", ('{sad,"o k",NULL,"a,b","\\""}',)),
        _column("c_smaller_array", "smaller[]", ("{1,NULL,999}",)),
        _column("c_pair_array", "pair[]", ('{"(1,a)","(,\\"a b\\")",NULL}',)),
        _column("c_int4range_array", "int4range[]", ('{"[1,3)",empty}',)),
        _column("c_int4multirange_array", "int4multirange[]", ('{"{[1,3),[5,7)}","{}"}',)),
        _column("c_bit_array", "bit(3)[]", ("{101,000}",)),
        _column("c_char_array", '"char"[]', ("{a,b}",)),
        _column("c_name_array", "name[]", ("{a,\u20ac}",)),
        _column("c_time_array", "time[]", ("{24:00:00}",)),
        _column("c_money_array", "money[]", ("{1}",), binary=False),
        _column("c_hstore_array", "hstore[]", ('{"\\"a\\"=>\\"1\\""}',)),
        _column("c_ltree_array", "ltree[]", ("{a.b,NULL}",)),
        _column("c_xml_array", "xml[]", ("{<a/>}",)),
        _column("c_tsvector_array", "tsvector[]", ("{\"'a':1\"}",)),
    ]


#: Columns to replicate as text (subscription option `types`).
TEXT_COLUMNS = (
    "c_date_text",
    "c_timestamp_text",
    "c_timestamptz_text",
    "c_float8_text",
    "c_float4_text",
    "c_int8_text",
    "c_bool_text",
    "c_oid_text",
    "c_bytea_text",
    "c_decimal_text",
)


_FROM_19 = (
    _column("c_oid8", "oid8", (0, 18446744073709551615)),
    _column("c_oid8_array", "oid8[]", ("{0,NULL,18446744073709551615}",)),
    _column("c_regdatabase", "regdatabase", ("postgres", "-"), binary=False),
)


def columns(version: int, *, binary: bool = False) -> list[Column]:
    """Return the corpus of a major version; with `binary`, only what binary transfer supports."""
    found = [*_columns(version), *(_FROM_19 if version >= 19 else ())]
    return [column for column in found if column.binary or not binary]


def create(table: str, wanted: Sequence[Column]) -> str:
    """Return CREATE TABLE with id and the columns."""
    listed = ", ".join(f"{column.name} {column.type}" for column in wanted)
    return f"CREATE TABLE {table} (id int PRIMARY KEY, {listed})"


def insert(table: str, wanted: Sequence[Column], first: int) -> str:
    """Return an INSERT of all values and a row of NULLs, with ids from `first` on."""
    longest = max(len(column.values) for column in wanted)
    rows = [
        f"({first + i}, " + ", ".join(c.values[i] if i < len(c.values) else "NULL" for c in wanted) + ")"
        for i in range(longest + 1)
    ]
    return f"INSERT INTO {table} VALUES {', '.join(rows)}"
