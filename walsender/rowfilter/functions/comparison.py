"""Comparisons of values (int.c, float.c, numeric.c: cmp_numerics, varlena.c, timestamp.c, varbit.c)."""

from __future__ import annotations

import operator
import re
from typing import Final

from walsender.rowfilter.functions.values import FixedFunction, Settings

COMPARE: Final[dict[str, FixedFunction]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_BYTEWISE_ALWAYS: Final = frozenset({"eq", "ne"})
_COMPARABLE: Final = re.compile(
    r"(int2|int4|int8|int24|int28|int42|int48|int82|int84|oid|float4|float8|float48|float84|numeric_|text|text_|bpchar|name"
    r"|nametext|textname|date_|time_|timestamp_|timestamptz_|uuid_|bytea|bool|char|pg_lsn_|interval_|macaddr_|macaddr8_|xid8"
    r"|xid|cash_|bit|varbit)(eq|ne|lt|le|gt|ge)"
)
_TEXTUAL: Final = frozenset({"text", "text_", "bpchar", "name", "nametext", "textname"})


def find(name: str, settings: Settings) -> FixedFunction | None:
    found = _COMPARABLE.fullmatch(name)
    if found is None:
        return None
    if found[1] in _TEXTUAL and found[2] not in _BYTEWISE_ALWAYS and not settings.bytewise:
        return None
    return COMPARE[found[2]]
