"""The options of the source, as `spark.read.format("pubsub").option(…)` gives them: texts, under names in any case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn

Latest = Literal["latest"]

_NAMES: Final = (
    "home",
    "subscription",
    "table",
    "path",
    "startingLSN",
    "endingLSN",
    "maxTransactionsPerTrigger",
    "maxRowsPerTrigger",
)
_KNOWN: Final = {name.lower(): name for name in _NAMES}
#: Spark's longs, in which limits are sent.
_MOST: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Options:
    """Which history is read, and which of its rows.

    `path`: the Delta table's; None: `home` is a node's directory, and `subscription` and `table` (a name as in SQL) say
    which of its tables.  Rows have LSNs greater than `starting` and not greater than `ending`.  `transactions`, `rows`:
    the most of one micro-batch; None: no limit.
    """

    home: str | None
    subscription: str | None
    table: str | None
    path: str | None
    starting: Lsn | Latest
    ending: Lsn | Latest
    transactions: int | None
    rows: int | None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Read the options.  Raises PubsubError: 22023 for a name or value that is wrong, 0A000 for a combination."""
        values = {name.lower(): value for name, value in given.items()}
        unknown = sorted(values.keys() - _KNOWN.keys())
        if unknown:
            raise PubsubError(
                f'unrecognized option "{unknown[0]}" of the source "pubsub"',
                sqlstate="22023",
                hint=f"It has the options {', '.join(_NAMES)}.",
            )
        found = cls(
            home=values.get("home"),
            subscription=values.get("subscription"),
            table=values.get("table"),
            path=_path(values.get("path")),
            starting=_lsn(values, "startingLSN", INVALID_LSN),
            ending=_lsn(values, "endingLSN", "latest"),
            transactions=_count(values, "maxTransactionsPerTrigger"),
            rows=_count(values, "maxRowsPerTrigger"),
        )
        if found.path is None and found.subscription is None and found.table is None:
            raise PubsubError(
                'the source "pubsub" needs the option subscription, table or path',
                sqlstate="22023",
                hint="Name a history of a node's, or give the path of its Delta table.",
            )
        if found.path is not None and not (found.subscription is None and found.table is None):
            raise FeatureNotSupported("the option path names one table: subscription and table cannot be given with it")
        if isinstance(found.starting, Lsn) and isinstance(found.ending, Lsn) and found.starting > found.ending:
            raise PubsubError(f"startingLSN {found.starting} is past endingLSN {found.ending}", sqlstate="22023")
        return found

    def of_batch(self) -> Options:
        """Return the options, which are a batch query's.  Raises FeatureNotSupported for those of a stream."""
        if not (self.transactions is None and self.rows is None):
            raise FeatureNotSupported("maxTransactionsPerTrigger and maxRowsPerTrigger are options of streams")
        return self

    def of_stream(self) -> Options:
        """Return the options, which are a stream's.  Raises FeatureNotSupported for those of a batch query."""
        if self.ending != "latest":
            raise FeatureNotSupported(
                "a stream has no endingLSN", hint="Use spark.read, or the trigger availableNow, which ends by itself."
            )
        return self


def _path(text: str | None) -> str | None:
    """Return the path under which Hadoop and this program know the table."""
    return f"s3a://{text.removeprefix('s3://')}" if text is not None and text.startswith("s3://") else text


def _lsn(values: Mapping[str, str], name: str, default: Lsn | Latest) -> Lsn | Latest:
    text = values.get(name.lower())
    match text.strip().lower() if text is not None else None:
        case None:
            return default
        case "latest":
            return "latest"
        case "earliest" if name == "startingLSN":
            return INVALID_LSN
        case other:
            return Lsn.parse(other)


def _count(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name.lower())
    if text is None:
        return None
    if not (text.strip().isdecimal() and 0 < int(text) <= _MOST):
        raise PubsubError(
            f'invalid value for option "{name}": "{text}"', sqlstate="22023", hint="It is a number from 1 on."
        )
    return int(text)
