"""The options source and source_column: several subscriptions write one Delta table, each of them the rows of its own source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pubsub.errors import PubsubError

DEFAULT_COLUMN: Final = "_pubsub_source"
# What Spark reads as NULL where it is a partition's value.
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
# More does not fit beside others in a table's properties, which each commit that alters it repeats.
_LONGEST: Final = 200


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of a Delta table that one subscription writes: those that have `value` in `column`, by which it is partitioned."""

    column: str
    value: str


def checked_source(text: str) -> str:
    """Return the text if it can name a source.  Raises PubsubError (22023)."""
    if not text or text == _NULL or not text.isprintable() or len(text.encode()) > _LONGEST:
        raise PubsubError(
            f'invalid value for parameter "source": "{text}"',
            sqlstate="22023",
            hint=f"It is a text of at most {_LONGEST} bytes, all of them printable, and not what Spark reads as NULL.",
        )
    return text


def checked_column(text: str) -> str:
    """Return the text if it can name the column of sources.  Raises PubsubError (22023)."""
    if not text.isidentifier() or not text.isascii() or len(text) > 63:
        raise PubsubError(
            f'invalid value for parameter "source_column": "{text}"',
            sqlstate="22023",
            hint="It consists of letters, digits and underscores, as _pubsub_source does.",
        )
    return text
