"""masking: what stands for values, and that the key is given and is one."""

from __future__ import annotations

import hashlib
import hmac

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.masking import REDACTED, apply, mask
from pubsub.masks import VARIABLE, Masks, configured_key, fingerprint_of, require_key
from pubsub.protocol.type_contract import VARIANT
from pubsub.sql.mask_rules import MaskRule

KEY = b"sixteen bytes at least"
HASH = MaskRule("hash")

TEXTS = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=80))


@given(TEXTS, st.binary(min_size=16, max_size=200), st.integers(0, 3))
def test_hashes_are_those_of_hmac(texts: list[str | None], key: bytes, skipped: int) -> None:
    """Of equal values they are equal; arrays may be parts of others."""
    values = pa.array([*[None] * skipped, *texts, "another"], pa.string())[skipped:-1]
    found = mask(values, HASH, key)
    assert found.type == pa.string()
    assert found.to_pylist() == [
        None if one is None else hmac.new(key, one.encode(), hashlib.sha256).hexdigest() for one in texts
    ]


@given(TEXTS, st.integers(0, 90))
def test_truncated_and_redacted(texts: list[str | None], length: int) -> None:
    values = pa.array(texts, pa.string())
    assert mask(values, MaskRule("truncate", length), b"").to_pylist() == [
        None if one is None else one[:length] for one in texts
    ]
    assert mask(values, MaskRule("redact"), b"").to_pylist() == [None if one is None else REDACTED for one in texts]
    assert mask(values, MaskRule("redact"), b"").type == pa.string()


@pytest.mark.parametrize("kind", [pa.int32(), pa.string(), pa.timestamp("us", "UTC"), pa.list_(pa.int64()), VARIANT])
def test_nulls_keep_the_type(kind: pa.DataType) -> None:
    found = mask(pa.nulls(2, kind), MaskRule("null"), b"")
    assert found.type == kind
    assert found.null_count == 2


def test_other_columns_stay() -> None:
    masks = Masks({"a": MaskRule("redact"), "b": MaskRule("null"), "not there": HASH})
    columns = {"a": pa.array(["x"]), "c": pa.array([1])}
    assert {name: one.to_pylist() for name, one in apply(masks, columns, b"").items()} == {"a": ["***"], "c": [1]}
    assert masks.absent == {"b"}


def test_there_must_be_a_key_and_it_must_be_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Masks({"a": MaskRule("redact")}).key("s.t") == b""
    hashed = Masks({"a": HASH}, fingerprint_of(KEY))
    with pytest.raises(NotInPrerequisiteState, match=f"{VARIABLE} is not set"):
        hashed.key("s.t")
    assert hashed.key("s.t", KEY) == KEY
    monkeypatch.setenv(VARIABLE, "too short")
    with pytest.raises(PubsubError, match="fewer than 16 bytes") as short:
        configured_key()
    assert "too short" not in f"{short.value} {short.value.detail} {short.value.hint}"
    monkeypatch.setenv(VARIABLE, KEY.decode())
    assert hashed.key("s.t") == require_key("s.t", None) == KEY
    for other in (Masks({"a": HASH}), Masks({"a": HASH}, "0123456789abcdef")):
        with pytest.raises(NotInPrerequisiteState, match="is not the key") as refused:
            other.key("s.t")
        assert KEY.decode() not in f"{refused.value} {refused.value.detail} {refused.value.hint}"
    assert KEY.hex()[:8] not in fingerprint_of(KEY)
