"""Connection strings without their secrets."""

from __future__ import annotations

import pytest

from pubsub.sql.conninfo import MASK, mask_conninfo


@pytest.mark.parametrize(
    ("conninfo", "masked"),
    [
        ("", ""),
        ("host=h dbname=d", "host=h dbname=d"),
        ("host=h password=secret dbname=d", f"host=h password={MASK} dbname=d"),
        ("password = 'se cret\\'x' host = h", f"password={MASK} host=h"),
        ("password=se\\ cret host=h", f"password={MASK} host=h"),
        ("sslpassword=secret password=", f"sslpassword={MASK} password={MASK}"),
        ("host=''", "host=''"),
        ("options='-c a=secret' host=h", "options='-c a=secret' host=h"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgres://u@h:1,i:2/d?sslmode=require", "postgres://u@h:1,i:2/d?sslmode=require"),
        ("postgresql://u:secret@h/d", f"postgresql://u:{MASK}@h/d"),
        ("postgresql://u:se@cr:et@h/d", f"postgresql://u:{MASK}@h/d"),
        ("postgresql://h/d?password=secret&user=u", f"postgresql://h/d?password={MASK}&user=u"),
        ("postgresql://h/d?%70assword=secret", f"postgresql://h/d?{MASK}={MASK}"),
        ("postgresql://u:sec/ret@h/d", f"postgresql://{MASK}"),
        ("postgresql://u:sec?ret@h/d", f"postgresql://u:{MASK}@h/d"),
        ("postgresql://u:sec?ret@h?sslmode=require", f"postgresql://u:{MASK}@h?sslmode=require"),
        ("postgresql://u:sec?re/t@h", f"postgresql://{MASK}"),
    ],
)
def test_mask(conninfo: str, masked: str) -> None:
    assert mask_conninfo(conninfo) == masked


@pytest.mark.parametrize(
    "conninfo", ["secret", "password 'secret'", "password='secret", "password='a'secret", "=secret"]
)
def test_a_malformed_string_is_masked_whole(conninfo: str) -> None:
    assert mask_conninfo(conninfo) == MASK
