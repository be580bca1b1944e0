"""Convert Arrow's results to Python values, and DataFusion's errors to PostgreSQL's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.translated import Output, Translated
from pubsub.node.select.values import UNFINISHED
from pubsub.protocol.lsn import Lsn
from pubsub.texts import Single

if TYPE_CHECKING:
    import pyarrow as pa

#: DataFusion's errors at run time, with PostgreSQL's messages and SQLSTATEs.
_COMPLAINTS: Final = (
    (re.compile(r"[Dd]ivide by zero"), "division by zero", "22012"),
    (re.compile(r"Can't cast value \S+ to type Int16"), "smallint out of range", "22003"),
    (re.compile(r"Can't cast value \S+ to type Int32"), "integer out of range", "22003"),
    (re.compile(r"is out of range Int16"), "smallint out of range", "22003"),
    (re.compile(r"is out of range Int32"), "integer out of range", "22003"),
    (re.compile(r"is out of range Int64|Can't cast value \S+ to type Int64"), "bigint out of range", "22003"),
    (re.compile(r"(?<!capacity )[Oo]verflow"), "value out of range", "22003"),
    (re.compile(r"too (?:large|small) to store"), "numeric field overflow", "22003"),
    (
        re.compile(r"more than one row|returned more than one"),
        "more than one row returned by a subquery used as an expression",
        "21000",
    ),
    (re.compile(r"field position must not be zero", re.IGNORECASE), "field position must not be zero", "22023"),
    (
        re.compile(r"negative (?:substring length|count)", re.IGNORECASE),
        "negative substring length not allowed",
        "22011",
    ),
)
_UNREADABLE: Final = re.compile(
    r"Cannot cast string '(.*?)' to value of (\w+)|Cannot cast value '(.*?)' to value of (\w+)|parsing '(.*?)'",
    re.DOTALL,
)
_NAMES: Final = (
    ("Int16", "smallint", "22P02"),
    ("Int32", "integer", "22P02"),
    ("Int64", "bigint", "22P02"),
    ("Float32", "real", "22P02"),
    ("Float64", "double precision", "22P02"),
    ("Decimal", "numeric", "22P02"),
    ("Boolean", "boolean", "22P02"),
    ("Date", "date", "22007"),
    ("Timestamp", "timestamp", "22007"),
)


def rows(table: pa.Table, translated: Translated) -> list[tuple[Any, ...]]:
    """Return the rows of a table, as Python values."""
    held = dict(zip(table.column_names, table.columns, strict=True))
    columns = [_column(held, column) for column in translated.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


def _column(held: dict[str, pa.ChunkedArray], column: Output) -> Sequence[Any]:
    if column.exact is not None:
        leaves = [held[leaf].to_pylist() for leaf in column.leaves]
        return [column.exact.apply(row) for row in zip(*leaves, strict=True)]
    values: list[Any] = held[column.engine].to_pylist()
    convert = _CONVERTED.get(column.type.name) if not column.type.kept else None
    return values if convert is None else [None if value is None else convert(value) for value in values]


def single(value: float) -> Single:
    """Return the double with the shortest decimal text that denotes the same real."""
    import numpy as np

    return Single(str(np.float32(value)))


def _moment(value: Any) -> Any:
    return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value


_CONVERTED: Final[dict[str, Callable[[Any], Any]]] = {
    "real": single,
    "pg_lsn": lambda value: str(Lsn(int(value))),
    "timestamp without time zone": _moment,
    "timestamp with time zone": _moment,
}


def of_engine(error: BaseException) -> bool:
    """Return whether an error may be DataFusion's, whose panics are no Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def complaint(error: BaseException) -> PubsubError:
    """Return DataFusion's error in PostgreSQL's words; FeatureNotSupported for an unknown one."""
    text = str(error)
    if UNFINISHED in text:
        return FeatureNotSupported(UNFINISHED)
    if match := _UNREADABLE.search(text):
        value = next(one for one in (match[1], match[3], match[5]) if one is not None)
        kind = match[2] or match[4] or "Timestamp"
        for beginning, shown, sqlstate in _NAMES:
            if kind.startswith(beginning):
                return PubsubError(f'invalid input syntax for type {shown}: "{value}"', sqlstate=sqlstate)
    for pattern, message, sqlstate in _COMPLAINTS:
        if pattern.search(text):
            return PubsubError(message, sqlstate=sqlstate)
    return FeatureNotSupported("this query is not supported", hint="docs/select.md says what a SELECT can be.")
