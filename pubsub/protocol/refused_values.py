"""Refuse a value that its column's type cannot hold exactly: the error, and the search for the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from pubsub.errors import InvalidValue
from pubsub.protocol.column_types import spark_ddl

_SHOWN_CHARACTERS: Final = 100
# Makes values of the type from their bytes, all rows at once.
Convert = Callable[[pa.BinaryArray, pa.DataType], pa.Array]


def printable(text: bytes) -> str:
    """Return a value's beginning on one line, for a message."""
    shown = text[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    return shown.replace("\n", "\\n").replace("\r", "\\r")


class InvalidText(InvalidValue):
    """A text that the target type cannot hold exactly: `text`, at `index` in the array, from 0."""

    def __init__(self, index: int, text: bytes, target: str, sqlstate: str) -> None:
        shown = printable(text)
        if sqlstate == "22021":
            message = f'invalid byte sequence for encoding "UTF8" in value "{shown}"'
        else:
            message = f'value "{shown}" cannot be held exactly by Delta type {target}'
        super().__init__(message, sqlstate=sqlstate)
        self.index = index
        self.text = text
        self.target = target

    def without_value(self) -> InvalidText:
        """Return an error that does not show the value, which is masked."""
        found = InvalidText(self.index, b"", self.target, str(self.sqlstate))
        found.message = found.message.replace('value ""', "a masked value")
        return found


class BadValue(Exception):
    """Some value of the array does not fit; `first_refused` finds which."""


class OtherShape(Exception):
    """A value of a shape that the target cannot hold; `index` is its row."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def first_refused(values: pa.BinaryArray, target: pa.DataType, convert: Convert) -> int:
    """Return the index of the first value that does not convert, by bisection; there must be at least one."""
    good, bad = 0, len(values)  # values[:good] converts, values[:bad] does not
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            convert(values[good:middle], target)
        except (pa.ArrowInvalid, BadValue):
            bad = middle
        else:
            good = middle
    return good


def nested_values(
    values: pa.BinaryArray, target: pa.DataType, convert: Callable[[], pa.Array], out: Callable[[bytes], bytes]
) -> pa.Array:
    """Return what `convert` returns; turn its OtherShape or InvalidText into InvalidText with the whole value's text.

    `out` writes that text.  The `index` of both errors must be the row's.
    """
    try:
        return convert()
    except OtherShape as error:
        raise InvalidText(error.index, out(values[error.index].as_py()), spark_ddl(target), "22P02") from error
    except InvalidText as error:
        text = out(values[error.index].as_py())
        raise InvalidText(error.index, text, spark_ddl(target), str(error.sqlstate)) from error
