"""Replace CASTs in the SQL for DataFusion.

DataFusion names an expression after its text without casts, so sum(CAST(a AS BIGINT)) and sum(a) have one name: it
refuses the query or confuses the two.  So each CAST is sent as a call of arrow_cast, whose name contains the type.
"""

from __future__ import annotations

import re
from typing import Final

_ARROW: Final = {
    "BOOLEAN": "Boolean",
    "SMALLINT": "Int16",
    "INT": "Int32",
    "BIGINT": "Int64",
    "REAL": "Float32",
    "DOUBLE": "Float64",
    "VARCHAR": "Utf8",
    "DATE": "Date32",
    "BYTEA": "Binary",
}
_TOKEN: Final = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\bCAST\(|[()]| AS (?=[A-Z]+(?:\(\d+, \d+\))?\))""")


def spelled(sql: str) -> str:
    """Return the query with each CAST(… AS …) written as arrow_cast(…, '…')."""
    parts: list[str] = []
    stack: list[int] = []  # for each open parenthesis, 1 if it belongs to a CAST
    place = 0
    for match in _TOKEN.finditer(sql):
        if match.start() < place:
            continue
        parts.append(sql[place : match.start()])
        place, token = match.end(), match[0]
        if token == "CAST(":
            stack.append(1)
            parts.append("arrow_cast(")
        elif token == "(":
            stack.append(0)
            parts.append(token)
        elif token == ")":
            stack.pop()
            parts.append(token)
        elif token == " AS " and stack and stack[-1]:
            found = re.compile(r"(\w+)(\(\d+, \d+\))?").match(sql, place)
            assert found is not None
            arrow = f"Decimal128{found[2]}" if found[1] == "DECIMAL" else _ARROW[found[1]]
            parts.append(f", '{arrow}'")
            place = found.end()
        else:
            parts.append(token)
    return "".join(parts) + sql[place:]
