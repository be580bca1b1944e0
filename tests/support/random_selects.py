"""Random expressions and queries for SELECT: templates of what docs/select.md allows, with random values or columns in them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Final

from hypothesis import strategies as st

_TEXTS: Final = st.one_of(
    st.text(st.sampled_from("abAB z'%_\\€0-,"), max_size=6),
    st.sampled_from(["", " ", "abc", "ab  ", "2024-02-29", "12.50", "€", "x,y,z"]),
)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _cast(values: st.SearchStrategy[str], type_: str) -> st.SearchStrategy[str]:
    return st.one_of(values.map(lambda one: f"CAST({_quoted(one)} AS {type_})"), st.just(f"CAST(NULL AS {type_})"))


_CLOCK: Final = st.builds(
    lambda hour, minute, second, micro: f"{hour:02}:{minute:02}:{second:02}" + (f".{micro:06}" if micro else ""),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.sampled_from([0, 1, 500_000, 999_999, 120_000]),
)
_DATES: Final = st.dates(date(1900, 1, 1), date(2200, 1, 1)).map(str)
_MOMENTS: Final = st.builds("{} {}".format, _DATES, _CLOCK)
_FLOATS: Final = ["0", "0.1", "-0.1", "1.5", "2.5", "-2.5", "0.5", "1e10", "-7.25", "3", "NaN", "123456.789"]
_DECIMALS: Final = st.decimals(-999, 999, places=3).map(str)
_INTERVALS: Final = [
    "1 year",
    "-13 months",
    "1 mon -1 day",
    "3 days 04:05:06",
    "-00:00:01.5",
    "2 weeks",
    "90 minutes",
    "1 year 2 months 3 days",
]

#: By the name that a template gives a value's type.
VALUES: Final[dict[str, st.SearchStrategy[str]]] = {
    "small": _cast(st.sampled_from(["0", "1", "-1", "7", "32767", "-32768"]), "smallint"),
    "int": _cast(st.sampled_from(["0", "1", "-1", "7", "255", "2147483647", "-2147483648"]), "integer"),
    "big": _cast(st.sampled_from(["0", "1", "-1", "-77", "9223372036854775807", "4294967296"]), "bigint"),
    "numeric": st.one_of(_cast(_DECIMALS, "numeric(12,3)"), _cast(st.sampled_from(["1.005", "-2.5"]), "numeric(6,2)")),
    "literal": st.sampled_from(["0.1", "1.5", "10.99", "0.005", "3", "-2.50", "100000000000"]),
    "real": _cast(st.sampled_from(_FLOATS), "real"),
    "double": _cast(st.sampled_from(_FLOATS), "double precision"),
    "text": _cast(_TEXTS, "text"),
    "varchar": _cast(_TEXTS, "varchar(5)"),
    "char": _cast(_TEXTS, "char(4)"),
    "string": _TEXTS.map(_quoted),
    "bool": st.sampled_from(["true", "false", "NULL::boolean"]),
    "date": _cast(_DATES, "date"),
    "timestamp": _cast(_MOMENTS, "timestamp"),
    "timestamptz": _cast(
        st.builds("{}{}".format, _MOMENTS, st.sampled_from(["", "+00", "+05:30", "-08"])), "timestamptz"
    ),
    "moment text": st.builds("{}{}".format, _MOMENTS, st.sampled_from(["", "+05", "+05:30", "Z", "-08"])).map(_quoted),
    "interval": st.sampled_from([f"interval '{one}'" for one in _INTERVALS]),
    "time": st.builds("(time '{}')".format, _CLOCK),
    "time literal": st.sampled_from(["'10:00'", "'9:45'", "'09:45:00.5'", "'24:00'", "'25:00'", "'9:5:1'"]),
    "inet": st.sampled_from(
        [f"(inet '{one}')" for one in ("10.0.0.1", "10.0.0.0/8", "::1", "2001:db8::/32", "::ffff:1.2.3.4")]
    ),
    "inet literal": st.sampled_from(
        ["'10.0.0.1/32'", "'010.0.0.1'", "'::0:1'", "'2001:DB8::/32'", "'::FFFF:102:304'", "'x'"]
    ),
    "places": st.sampled_from(["0", "1", "2", "5"]),
    "count": st.sampled_from(["0", "1", "2", "3", "-1", "7"]),
    "compare": st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]),
    "equal": st.sampled_from(["=", "<>", "IS DISTINCT FROM"]),
    "arithmetic": st.sampled_from(["+", "-", "*", "/"]),
    "number type": st.sampled_from(
        ["smallint", "integer", "bigint", "numeric(12,2)", "numeric(4,1)", "real", "double precision"]
    ),
}

_NUMBERS: Final = ("small", "int", "big", "numeric", "literal", "real", "double")
_INTEGERS: Final = ("small", "int", "big")
_STRINGS: Final = ("text", "varchar", "char")
_ANY_STRING: Final = (*_STRINGS, "string")

TEMPLATES: Final = [
    *[f"{{{one}}} {{compare}} {{{other}}}" for one in _NUMBERS for other in _NUMBERS],
    *[f"{{{one}}} {{arithmetic}} {{{other}}}" for one in _NUMBERS for other in _NUMBERS],
    *[f"{{{one}}} % {{{other}}}" for one in _NUMBERS[:4] for other in _NUMBERS[:4]],
    *[f"{{{one}}} {{compare}} {{{other}}}" for one in _STRINGS for other in _ANY_STRING],
    *[
        f"(SELECT count(*) FROM (VALUES (1)) v(x) WHERE {{{one}}} IN (SELECT {{{other}}} UNION ALL SELECT {{{other}}}))"
        for one in _ANY_STRING
        for other in _STRINGS
    ],
    *[
        f"(SELECT count(*) FROM (VALUES (1)) v(x) WHERE {{{one}}} <> ALL (SELECT {{{other}}} UNION ALL SELECT {{{other}}}))"
        for one in _STRINGS
        for other in _STRINGS
    ],
    *[
        f"(SELECT count(*) FROM (VALUES (1)) v(x) WHERE {{{one}}} IN (SELECT {{{other}}} UNION ALL SELECT {{{other}}}))"
        for one in _NUMBERS
        for other in _NUMBERS
    ],
    *[f"{{{one}}} IN ({{literal}}, {{literal}})" for one in _NUMBERS],
    *[f"{{{one}}} IN ({{literal}})" for one in _NUMBERS],
    *[
        f"{{{one}}} IN ({{literal}}, {{{other}}}, {{literal}})"
        for one in _NUMBERS
        for other in ("int", "real", "double")
    ],
    *[f"{{{one}}} = ANY (ARRAY[{{literal}}, {{literal}}])" for one in _NUMBERS],
    *[f"{{{one}}} <> ALL (ARRAY[{{literal}}, {{{one}}}])" for one in _NUMBERS],
    *[f"{{{one}}} BETWEEN {{{other}}} AND {{literal}}" for one in _NUMBERS for other in ("int", "real", "numeric")],
    *[f"CAST({{{one}}} AS {{number type}})" for one in (*_NUMBERS, "string")],
    *[f"({{{one}}})::numeric" for one in _NUMBERS[:5]],
    *[f"{name}({{{one}}})" for one in _NUMBERS for name in ("abs", "ceil", "floor", "sign", "round", "trunc")],
    *[f"{name}({{{one}}}, {{places}})" for one in ("numeric", "literal", "int") for name in ("round", "trunc")],
    *[f"- {{{one}}}" for one in _NUMBERS],
    *[f"to_hex({{{one}}})" for one in ("int", "big")],
    *[
        f"{{{one}}}::text"
        for one in (*_NUMBERS, *_STRINGS, "bool", "date", "timestamp", "timestamptz", "time", "inet", "interval")
    ],
    *[f"nullif({{{one}}}, {{{other}}})" for one in _NUMBERS for other in ("int", "literal", "real")],
    # Numerics of several scales are shown with one (docs/select.md).
    *[
        f"{name}({{{one}}}, {{{other}}})"
        for one in _INTEGERS
        for other in ("int", "real", "double")
        for name in ("coalesce", "greatest", "least")
    ],
    *[
        f"CASE WHEN {{bool}} THEN {{{one}}} ELSE {{{other}}} END"
        for one in _INTEGERS
        for other in ("int", "big", "double")
    ],
    *[f"CASE {{{one}}} WHEN {{{other}}} THEN 1 ELSE 2 END" for one in _NUMBERS for other in ("int", "numeric", "real")],
    *[
        f"{name}({{{one}}})"
        for one in _ANY_STRING
        for name in (
            "lower",
            "upper",
            "length",
            "char_length",
            "octet_length",
            "reverse",
            "md5",
            "ascii",
            "btrim",
            "ltrim",
            "rtrim",
        )
    ],
    *[
        f"{name}({{{one}}}, {{count}})"
        for one in _STRINGS
        for name in ("left", "right", "substr", "lpad", "rpad", "repeat")
    ],
    *[f"substring({{{one}}}, {{count}}, {{count}})" for one in _STRINGS],
    *[
        f"{name}({{{one}}}, {{string}})"
        for one in _STRINGS
        for name in ("strpos", "starts_with", "btrim", "ltrim", "rtrim")
    ],
    *[f"{name}({{{one}}}, {{string}}, {{string}})" for one in _STRINGS for name in ("replace", "translate")],
    *[f"lpad({{{one}}}, {{count}}, {{string}})" for one in _STRINGS],
    *[f"split_part({{{one}}}, {{string}}, {{count}})" for one in _STRINGS],
    *[f"{{{one}}} || {{{other}}}" for one in _STRINGS for other in (*_ANY_STRING, "int", "numeric", "bool")],
    *[
        f"concat({{{one}}}, {{{other}}}, {{bool}})"
        for one in _ANY_STRING
        for other in ("char", "int", "numeric", "date")
    ],
    *[f"concat_ws({{string}}, {{{one}}}, {{{other}}})" for one in _ANY_STRING for other in ("char", "int", "text")],
    *[f"{{{one}}} {word} {{string}}" for one in _STRINGS for word in ("LIKE", "ILIKE", "NOT LIKE")],
    *[
        f"{{{one}}} {{compare}} {{{other}}}"
        for one in ("date", "timestamp", "timestamptz")
        for other in ("date", "timestamp", "timestamptz")
    ],
    *[
        f"{{{one}}} - {{{other}}}"
        for one in ("date", "timestamp", "timestamptz")
        for other in ("date", "timestamp", "timestamptz")
    ],
    *[f"{{{one}}} {sign} {{interval}}" for one in ("date", "timestamp", "timestamptz") for sign in "+-"],
    *[
        f"date_trunc('{unit}', {{{one}}})"
        for one in ("timestamp", "timestamptz", "date")
        for unit in ("second", "minute", "hour", "day", "week", "month", "quarter", "year")
    ],
    *[
        f"extract({field} FROM {{{one}}})"
        for one in ("timestamp", "timestamptz", "date")
        for field in (
            "year",
            "month",
            "day",
            "hour",
            "minute",
            "second",
            "dow",
            "doy",
            "week",
            "quarter",
            "epoch",
            "milliseconds",
        )
    ],
    *[
        f"CAST({{{one}}} AS {other})"
        for one in ("date", "timestamp", "timestamptz")
        for other in ("date", "timestamp", "timestamptz")
    ],
    *[
        f"(SELECT x::{type_} FROM (VALUES ({{moment text}}), ('2024-01-01')) v(x) WHERE x <> '2024-01-01')"
        for type_ in ("date", "timestamp", "timestamptz")
    ],
    *[
        f"(SELECT x::{type_} FROM (VALUES ({{string}}), ('q')) v(x) WHERE x <> 'q')"
        for type_ in ("integer", "numeric(6,2)", "numeric(3,2)", "double precision")
    ],
    "{timestamp} AT TIME ZONE 'UTC'",
    "{timestamptz} AT TIME ZONE 'UTC'",
    "date({timestamp})",
    "extract(epoch FROM {interval})",
    "extract(epoch FROM ({timestamp} - {timestamp}))",
    "date_part('epoch', {timestamptz})",
    "{interval} {compare} {interval}",
    "now() = now()",
    "current_date = now()::date",
    "{time} {compare} {time literal}",
    "{time} {compare} {time}",
    "{time} IN ({time literal}, '10:00')",
    "{inet} {equal} {inet literal}",
    "{inet} IN ({inet literal}, '10.0.0.1/32')",
    "{bool} AND {bool}",
    "{bool} OR NOT {bool}",
    "{bool} IS NOT TRUE",
    "({int} = {int}) IS DISTINCT FROM {bool}",
    "{bool}::integer",
    "{int}::boolean",
]


#: Columns of the table customers (test_059_select.py), by the kinds of their values.
_COLUMNS: Final = {
    "small": "small", "int": "id", "big": "big", "numeric": "balance", "real": "part", "double": "ratio", "text": "full_name",
    "varchar": '"Mixed Case"', "char": "code", "bool": "active", "date": "born", "timestamp": "seen", "timestamptz": "created",
}  # fmt: skip
#: One row has letters that are not ASCII, of which lower and upper make what follows from the server's locale.
_ROWS: Final = "FROM customers WHERE id <> 3"
_EACH_ROW: Final = f"SELECT id, {{}} {_ROWS} ORDER BY id"
_SHAPES: Final = [
    _EACH_ROW,
    f"SELECT active, min({{}}) {_ROWS} GROUP BY active ORDER BY 1",
    f"SELECT active, max({{}}) {_ROWS} GROUP BY active ORDER BY 1",
    f"SELECT count(DISTINCT {{}}) {_ROWS}",
    f"SELECT count(*) {_ROWS} GROUP BY {{}} ORDER BY 1",
    f"SELECT DISTINCT {{}} {_ROWS} ORDER BY 1",
    f"SELECT id {_ROWS} ORDER BY ({{}}) DESC, id",
    f"SELECT id, min({{}}) OVER (ORDER BY id) {_ROWS} ORDER BY id",
]


def _filled(draw: st.DrawFn, columns: Mapping[str, str]) -> str:
    parts = draw(st.sampled_from(TEMPLATES)).split("{")
    found = parts[0]
    for part in parts[1:]:
        kind, _, rest = part.partition("}")
        found += (columns[kind] if kind in columns and draw(st.booleans()) else draw(VALUES[kind])) + rest
    return found


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Draw an expression."""
    return _filled(draw, {})


@st.composite
def queries(draw: st.DrawFn) -> str:
    """Draw a query over the rows of customers."""
    expression = _filled(draw, _COLUMNS)
    # Within a function a quotient has fewer digits than PostgreSQL's (docs/select.md).
    return draw(st.sampled_from(_SHAPES if " / " not in expression else [_EACH_ROW])).format(expression)
