"""The options of the source."""

from __future__ import annotations

import pytest

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.spark_source.options import Options


def test_names_in_any_case_and_defaults() -> None:
    found = Options.parse({"Subscription": "s", "STARTINGlsn": "0/16b3748", "maxrowspertrigger": "5"})
    assert found == Options(None, "s", None, None, Lsn.parse("0/16B3748"), "latest", None, 5)
    assert Options.parse({"path": "s3://lake/t", "startingLSN": "Latest"}).path == "s3a://lake/t"
    assert Options.parse({"path": "t", "startingLSN": "earliest"}).starting == INVALID_LSN


@pytest.mark.parametrize(
    ("given", "sqlstate", "words"),
    [
        ({"subscription": "s", "starting": "0/1"}, "22023", 'unrecognized option "starting"'),
        ({}, "22023", "needs the option subscription, table or path"),
        ({"home": "h"}, "22023", "needs the option"),
        ({"path": "p", "table": "t"}, "0A000", "path names one table"),
        ({"table": "t", "startingLSN": "5"}, "22P02", 'invalid input syntax for type pg_lsn: "5"'),
        ({"table": "t", "endingLSN": "earliest"}, "22P02", "pg_lsn"),
        ({"table": "t", "startingLSN": "0/2", "endingLSN": "0/1"}, "22023", "startingLSN 0/2 is past endingLSN 0/1"),
        ({"table": "t", "maxRowsPerTrigger": "0"}, "22023", 'option "maxRowsPerTrigger": "0"'),
        ({"table": "t", "maxTransactionsPerTrigger": "many"}, "22023", "maxTransactionsPerTrigger"),
    ],
)
def test_what_is_refused(given: dict[str, str], sqlstate: str, words: str) -> None:
    with pytest.raises(PubsubError) as refused:
        Options.parse(given)
    assert refused.value.sqlstate == sqlstate
    assert words in refused.value.message


def test_what_only_one_kind_of_query_takes() -> None:
    with pytest.raises(FeatureNotSupported):
        Options.parse({"table": "t", "maxRowsPerTrigger": "1"}).of_batch()
    with pytest.raises(FeatureNotSupported):
        Options.parse({"table": "t", "endingLSN": "0/1"}).of_stream()
