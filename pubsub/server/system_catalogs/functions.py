"""PostgreSQL's functions over the system catalogs, for SQLite: each takes and returns SQLite's values, arrays as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from pubsub.server.system_catalogs.definitions import definitions
from pubsub.sql.identifiers import quote_identifier, quote_literal

#: pg_type.typname of types that format_type writes in SQL's words (format_type.c).
_SQL_NAMES: Final = {
    "bit": "bit", "bool": "boolean", "bpchar": "character", "float4": "real", "float8": "double precision", "int4": "integer",
    "int8": "bigint", "int2": "smallint", "numeric": "numeric", "interval": "interval", "time": "time without time zone",
    "timetz": "time with time zone", "timestamp": "timestamp without time zone", "timestamptz": "timestamp with time zone",
    "varbit": "bit varying", "varchar": "character varying",
}  # fmt: skip


@cache
def _types() -> Mapping[int, Mapping[str, Any]]:
    return {row["oid"]: row for row in definitions().types}


def format_type(oid: int | None, modifier: int | None) -> str | None:
    """Return a type's name and modifier in SQL (format_type.c)."""
    if oid is None:
        return None
    row = _types().get(oid)
    if row is None:
        return "-" if oid == 0 else "???"
    if row["typcategory"] == "A" and row["typelem"]:
        return f"{format_type(row['typelem'], modifier)}[]"
    name = _SQL_NAMES.get(row["typname"])
    if name is None:
        return quote_identifier(row["typname"])
    if modifier is None or modifier < 0:
        return name
    match row["typname"]:
        case "bpchar" | "varchar":
            return f"{name}({modifier - 4})"
        case "numeric":
            scale = (modifier - 4 & 0x7FF ^ 1024) - 1024
            return f"numeric({modifier - 4 >> 16 & 0xFFFF},{scale})"
        case "time" | "timetz" | "timestamp" | "timestamptz":
            kind, _, rest = name.partition(" ")
            return f"{kind}({modifier}) {rest}"
        case "bit" | "varbit":
            return f"{name}({modifier})"
    return name


# Arrays, as their text


def array_values(text: str | None) -> list[str | None]:
    """Return the elements of an array without nested ones, or of an int2vector."""
    if text is None:
        return []
    if not text.startswith("{"):
        return list(text.split())
    found: list[str | None] = []
    for quoted, plain in re.findall(r'"((?:[^"\\]|\\.)*)"|([^{},"]+)', text[1:-1]):
        if plain:
            found.append(None if plain.upper() == "NULL" else plain)
        else:
            found.append(re.sub(r"\\(.)", r"\1", quoted))
    return found


def array_text(values: Sequence[object]) -> str:
    """Return an array's text."""
    parts = []
    for value in values:
        if value is None:
            parts.append("NULL")
            continue
        text = str(value)
        plain = text and not re.search(r'[{},"\\\s]', text) and text.upper() != "NULL"
        parts.append(text if plain else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"')
    return "{" + ",".join(parts) + "}"


class ArrayAgg:
    """array_agg, and ARRAY(SELECT …)."""

    def __init__(self) -> None:
        self._values: list[object] = []

    def step(self, value: object) -> None:
        self._values.append(value)

    def finalize(self) -> str:
        return array_text(self._values)


class ArrayAggBy:
    """array_agg(value ORDER BY key)."""

    def __init__(self) -> None:
        self._found: list[tuple[object, object]] = []

    def step(self, value: object, key: object) -> None:
        self._found.append((key, value))

    def finalize(self) -> str:
        return array_text([value for _, value in sorted(self._found, key=_sortable)])


def _sortable(pair: tuple[object, object]) -> tuple[bool, bool, float, str]:
    key = pair[0]
    number = float(key) if isinstance(key, int | float) else 0.0
    return key is None, isinstance(key, str), number, str(key)


class StringAgg:
    """string_agg."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def step(self, value: object, separator: object) -> None:
        if value is not None:
            self._parts += [str(separator or "") if self._parts else "", str(value)]

    def finalize(self) -> str | None:
        return "".join(self._parts) if self._parts else None


class StringAggBy:
    """string_agg(value, separator ORDER BY key)."""

    def __init__(self) -> None:
        self._found: list[tuple[object, object]] = []
        self._separator = ""

    def step(self, value: object, separator: object, key: object) -> None:
        self._separator = str(separator or "")
        if value is not None:
            self._found.append((key, value))

    def finalize(self) -> str | None:
        return (
            self._separator.join(str(value) for _, value in sorted(self._found, key=_sortable)) if self._found else None
        )


def first_subscript(array: str | None) -> int:
    """Return where an array's subscripts begin: those of an int2vector at 0."""
    return 1 if array is None or array.startswith("{") else 0


def element(array: str | None, place: int) -> object:
    """Return an element by its place from 0, a number where it is one."""
    values = array_values(array)
    found = values[place] if 0 <= place < len(values) else None
    return int(found) if found is not None and re.fullmatch(r"-?\d{1,18}", found) else found


def expanded(array: str | None, place: int) -> str:
    """Return what information_schema._pg_expandarray does, as x,n."""
    return f"{element(array, place)},{place + 1}"


def pair_field(pair: str | None, name: str) -> int | None:
    if pair is None or name not in ("x", "n"):
        return None
    return int(pair.split(",")[name == "n"])


def _same(one: object, other: object) -> bool:
    return str(one) == str(other)


def is_any(value: object, array: str | None) -> int | None:
    """value = ANY (array)"""
    if value is None or array is None:
        return None
    return int(any(_same(value, one) for one in array_values(array)))


def subscript(array: str | None, index: int | None) -> str | None:
    values = array_values(array)
    # An int2vector is counted from 0.
    place = index if array is not None and not array.startswith("{") else (index or 0) - 1
    return values[place] if place is not None and 0 <= place < len(values) else None


def array_to_string(array: str | None, separator: str | None, null: str | None = None) -> str | None:
    if array is None or separator is None:
        return None
    shown = [null if one is None else one for one in array_values(array)]
    return separator.join(one for one in shown if one is not None)


def json_elements(array: str | None) -> str:
    """Return an array as JSON, for SQLite's json_each."""
    import json

    def shown(one: str | None) -> object:
        return int(one) if one is not None and re.fullmatch(r"-?\d{1,18}", one) else one

    return json.dumps([shown(one) for one in array_values(array)])


def series(start: int | None, end: int | None, step: int | None = 1) -> str:
    """Return generate_series as JSON."""
    if start is None or end is None or not step:
        return "[]"
    numbers = list(range(start, end + (1 if step > 0 else -1), step))[:100_000]
    return "[" + ",".join(map(str, numbers)) + "]"


def matches(pattern: str | None, text: object) -> int | None:
    """text ~ pattern, as SQLite's REGEXP"""
    return _found(pattern, text, 0)


def matches_any_case(pattern: str | None, text: object) -> int | None:
    return _found(pattern, text, re.IGNORECASE)


def _found(pattern: str | None, text: object, flags: int) -> int | None:
    if pattern is None or text is None:
        return None
    if pattern.startswith("***="):
        pattern = re.escape(pattern[4:])
    try:
        return int(re.search(pattern, str(text), flags) is not None)
    except re.error as error:
        raise ValueError(f"invalid regular expression: {error}") from error


def like(pattern: str | None, text: object, escape: str = "\\") -> int | None:
    """text LIKE pattern"""
    if pattern is None or text is None:
        return None
    return int(re.fullmatch(_like_pattern(pattern, escape), str(text), re.DOTALL) is not None)


def ilike(pattern: str | None, text: object) -> int | None:
    if pattern is None or text is None:
        return None
    return int(re.fullmatch(_like_pattern(pattern, "\\"), str(text), re.DOTALL | re.IGNORECASE) is not None)


@cache
def _like_pattern(pattern: str, escape: str) -> str:
    found, place = "", 0
    while place < len(pattern):
        one = pattern[place]
        if one == escape and place + 1 < len(pattern):
            place += 1
            found += re.escape(pattern[place])
        else:
            found += ".*" if one == "%" else "." if one == "_" else re.escape(one)
        place += 1
    return found


def pretty(size: int | None) -> str | None:
    """pg_size_pretty (dbsize.c)"""
    if size is None:
        return None
    value: float = size
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if abs(value) < 10240 or unit == "TB":
            return f"{round(value)} {unit}"
        value /= 1024
    return None


def quoted(text: str | None) -> str | None:
    return None if text is None else quote_identifier(text)


def quoted_literal(text: object) -> str | None:
    return None if text is None else quote_literal(str(text))


def split_part(text: str | None, separator: str, number: int) -> str | None:
    if text is None:
        return None
    parts = text.split(separator) if separator else [text]
    place = number - 1 if number > 0 else len(parts) + number
    return parts[place] if 0 <= place < len(parts) else ""


def regexp_replace(text: str | None, pattern: str, new: str, flags: str = "") -> str | None:
    if text is None:
        return None
    new = re.sub(r"\\(\d)", r"\\g<\1>", new)
    return re.sub(pattern, new, text, count=0 if "g" in flags else 1, flags=re.IGNORECASE if "i" in flags else 0)


#: Functions of values alone: name, number of arguments (-1: any), function.
PLAIN: Final[tuple[tuple[str, int, Callable[..., Any]], ...]] = (
    ("format_type", 2, format_type),
    ("pg_is_any", 2, is_any),
    ("pg_subscript", 2, subscript),
    ("pg_json_elements", 1, json_elements),
    ("pg_first_subscript", 1, first_subscript),
    ("pg_element", 2, element),
    ("pg_expanded", 2, expanded),
    ("pg_pair_field", 2, pair_field),
    ("pg_series", 2, series),
    ("pg_series", 3, series),
    ("pg_make_array", -1, lambda *values: array_text(values)),
    ("array_to_string", 2, array_to_string),
    ("array_to_string", 3, array_to_string),
    ("array_length", 2, lambda array, _: len(array_values(array)) or None),
    ("array_upper", 2, lambda array, _: len(array_values(array)) or None),
    ("array_lower", 2, lambda array, _: 1 if array_values(array) else None),
    ("cardinality", 1, lambda array: None if array is None else len(array_values(array))),
    (
        "array_position",
        2,
        lambda array, one: next((n for n, x in enumerate(array_values(array), 1) if _same(x, one)), None),
    ),
    ("regexp", 2, matches),
    ("pg_regexp_any_case", 2, matches_any_case),
    ("regexp_replace", 3, regexp_replace),
    ("regexp_replace", 4, regexp_replace),
    ("like", 2, like),
    ("like", 3, like),
    ("pg_ilike", 2, ilike),
    ("pg_size_pretty", 1, pretty),
    ("quote_ident", 1, quoted),
    ("quote_literal", 1, quoted_literal),
    ("quote_nullable", 1, lambda text: "NULL" if text is None else quoted_literal(text)),
    ("split_part", 3, split_part),
    ("concat", -1, lambda *values: "".join(str(one) for one in values if one is not None)),
    ("concat_ws", -1, lambda sep, *values: sep.join(str(one) for one in values if one is not None)),
    ("pg_bool_text", 1, lambda one: None if one is None else "true" if one else "false"),
    ("left", 2, lambda text, n: None if text is None else str(text)[:n]),
    ("right", 2, lambda text, n: None if text is None else str(text)[-n:] if n else ""),
    ("md5", 1, lambda text: None if text is None else __import__("hashlib").md5(str(text).encode()).hexdigest()),
    ("position", 2, lambda part, text: None if text is None or part is None else text.find(part) + 1),
    ("strpos", 2, lambda text, part: None if text is None or part is None else text.find(part) + 1),
    ("pg_encoding_to_char", 1, lambda number: "UTF8" if number == 6 else "SQL_ASCII" if number == 0 else ""),
    ("pg_char_to_encoding", 1, lambda name: 6 if str(name).upper() in {"UTF8", "UNICODE"} else -1),
)

#: Functions whose answer is always the same here; any number of arguments.
CONSTANT: Final[Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "pg_type_is_visible", "pg_function_is_visible", "pg_operator_is_visible",
            "pg_opclass_is_visible", "pg_opfamily_is_visible", "pg_collation_is_visible", "pg_conversion_is_visible",
            "pg_statistics_obj_is_visible", "pg_ts_config_is_visible", "pg_ts_dict_is_visible", "pg_ts_parser_is_visible",
            "pg_ts_template_is_visible", "has_table_privilege", "has_schema_privilege", "has_database_privilege",
            "has_column_privilege", "has_any_column_privilege", "has_function_privilege", "has_type_privilege",
            "has_tablespace_privilege", "has_sequence_privilege", "has_language_privilege", "has_server_privilege",
            "pg_has_role", "pg_relation_is_publishable", "pg_collation_for",
        ),
        1,
    ),
    "getdatabaseencoding": "UTF8",
    "pg_client_encoding": "UTF8",
    **dict.fromkeys(
        (
            "pg_is_in_recovery", "pg_is_other_temp_schema", "pg_is_wal_replay_paused", "row_security_active",
            "pg_relation_is_updatable", "pg_column_is_updatable", "pg_my_temp_schema", "pg_table_size",
            "pg_indexes_size", "pg_tablespace_size", "pg_trigger_depth",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "pg_get_expr", "pg_get_viewdef", "pg_get_ruledef", "pg_get_triggerdef", "pg_get_functiondef", "pg_get_function_result",
            "pg_get_function_arguments", "pg_get_function_identity_arguments", "pg_get_partkeydef", "pg_get_statisticsobjdef",
            "pg_get_statisticsobjdef_columns", "pg_get_partition_constraintdef", "shobj_description", "pg_tablespace_location",
            "pg_partition_root", "pg_partition_ancestors",
            "pg_get_serial_sequence", "pg_get_function_sqlbody", "acldefault", "pg_last_wal_receive_lsn",
            "pg_last_wal_replay_lsn", "pg_last_xact_replay_timestamp", "inet_server_addr", "inet_server_port",
            "inet_client_addr", "inet_client_port", "pg_conf_load_time", "pg_export_snapshot", "pg_filenode_relation",
        ),
        None,
    ),
}  # fmt: skip
