"""What a publisher answers of sequences is looked at before it is used."""

from __future__ import annotations

from typing import cast

import pytest

from pubsub.errors import PubsubError
from pubsub.publisher.connection import Connection
from pubsub.publisher.sequences import sequence_states

GOOD = ("2", "t", "7", "f", "0/10", "0/20", "bigint", "1", "1", "1", "9", "f")


class _Answering:
    def __init__(self, row: tuple[str | None, ...]) -> None:
        self._row = row

    async def query(self, _sql: str, _parameters: object) -> list[tuple[str | None, ...]]:
        return [self._row]


async def _states(row: tuple[str | None, ...]) -> object:
    return await sequence_states(cast(Connection, _Answering(row)), [("public", "a"), ("public", "b")])


async def test_a_good_answer() -> None:
    assert await _states(GOOD)
    assert await _states((*GOOD[:2], None, None, None, *GOOD[5:]))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, one) for one in (None, "", "0", "3", "-1", "9" * 100)),
        *((2, one) for one in ("x", "9" * 100)),
        *((4, one) for one in ("x", "0/")),
        *((5, one) for one in (None, "x")),
        *((place, one) for place in range(6, 11) for one in (None,)),
        *((place, one) for place in range(7, 11) for one in ("x", "")),
    ],
)
async def test_garbage_is_an_error_that_the_program_knows(place: int, value: str | None) -> None:
    with pytest.raises(PubsubError):
        await _states((*GOOD[:place], value, *GOOD[place + 1 :]))
