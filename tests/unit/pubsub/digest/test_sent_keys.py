"""Keys that are sent with a request: all of them, in parts that are not large."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pubsub.digest import sent_keys


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (pa.table({"id": pa.array([], pa.int64())}), 0),
        (pa.table({"id": range(250_000), "t": pa.array(["ä", None] * 125_000)}), 3),
        (pa.table({"t": [str(number) + "x" * 10_000 for number in range(1000)]}), 3),
        (pa.table({"t": ["x" * (8 << 20), "y"]}), 2),
    ],
)
def test_all_are_sent(keys: pa.Table, parts: int) -> None:
    texts = [sent_keys.write(part) for part in sent_keys.parts(keys)]
    assert len(texts) == parts
    assert all(len(text) < 2 * (4 << 20) for text in texts)
    assert pa.concat_tables([*map(sent_keys.read, texts), keys.schema.empty_table()]).equals(keys)
